"""Errors on stderr: names that are known, of a few all, of many those near to what was said."""

import doctest
import importlib
import time
import traceback
from pathlib import Path

import pytest
from glassblock.errors import GlassblockError, InvalidValue, UnknownFamily
from glassblock_client.cli.app import KNOWN_UP_TO, NEAR, known_names
from makers import tiny_checkpoint

from client.test_command_line import invoke

MANY = tuple(f"family{number}" for number in range(100))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (InvalidValue("no part 'x'", known=("ffn", "attention")), "ffn, attention"),
        (
            UnknownFamily('there is no family "lama"', field="family", known=("gemma", "llama", *MANY)),
            "llama and 101 more: `glassblock families` lists them",
        ),
        (
            InvalidValue("unknown activation 'sil'", field="overrides.activation", known=("relu", "silu", *MANY)),
            "silu and 101 more: `glassblock families` lists them",
        ),
        (
            InvalidValue("there is no rule 'norm/ofset'", field="rules", known=("norm/offset", *MANY)),
            "norm/offset and 100 more: `glassblock rules` lists them",
        ),
        (InvalidValue("no tensor 'famly7'", field="tensor", known=MANY), "family7, family97, "),
    ],
)
def test_names_near_to_what_was_said_come_first_and_the_rest_is_counted(error: GlassblockError, told: str) -> None:
    assert known_names(error).startswith(told)


def test_where_none_is_near_some_are_told() -> None:
    told = known_names(InvalidValue("no tensor 'qqq'", known=MANY))
    assert told == f"{', '.join(MANY[:NEAR])} and {100 - NEAR} more"


def test_the_docstring_shows_what_happens() -> None:
    assert doctest.testmod(importlib.import_module("glassblock_client.cli.app")).failed == 0


def test_a_message_that_quotes_a_book_takes_no_time() -> None:
    book = InvalidValue(f"no tensor {'family1 ' * 200_000!r}", known=MANY)
    started = time.monotonic()
    assert known_names(book).endswith("more")
    assert time.monotonic() - started < 2.0  # of milliseconds; without a bound it is minutes


def test_a_few_are_all_told() -> None:
    assert known_names(InvalidValue("'family1'", known=MANY[:KNOWN_UP_TO])) == ", ".join(MANY[:KNOWN_UP_TO])


def test_an_unknown_family_takes_two_lines(tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model", config={"model_type": "lama", "architectures": ["Lama"]})
    for options in ((), ("--family", "lama")):
        result = invoke(None, "run", model, "--layer", 0, "--sample", 3, *options)
        assert result.exit_code == 2
        first, second = result.stderr.splitlines()
        assert "known: llama" in first
        assert "more: `glassblock families` lists them" in first
        assert len(first) < 250
        assert second.startswith("hint: ")


def test_an_error_that_nobody_catches_shows_what_to_do_below_it() -> None:
    error = InvalidValue("capture.0 is unknown", hint="Ask for stages.", known=("gate", "up"))
    shown = "".join(traceback.format_exception(error))
    assert "capture.0 is unknown\nAsk for stages.\nKnown: gate, up" in shown
    assert str(error) == "capture.0 is unknown"
