"""Long JSON texts are read as Python reads them, and in steps."""

import json
import random
from typing import Any

import pytest
from glassblock.api import long_json
from glassblock.api.long_json import LONG, STEP, read_json

WORDS = ["", "a", "]", "[", '"', "\\", "{}", "\ud800", "\u00e9", "\x00"]
BROKEN = [
    "[", "[1", "[1,", "[1,]", "[1 2]", "[,]", "]", "{", '{"a"', '{"a":', '{"a":1', '{"a":1,', '{"a":1,}', "{1:2}",
    "[[1,2],", "[[1,2]", "[[1,]]", '["a', "[1]]", "[1] 2", '{"a":[1,}', "[tru]", "[01]", "[\x00]", '["\n"]', "", " ",
    "[[[]", '[{"a":[1}]', "[-]", "[1e]",
]  # fmt: skip


@pytest.fixture
def always_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_json, "LONG", -1)


def value(drawn: random.Random, depth: int) -> Any:
    kind = drawn.randrange(8 if depth else 6)
    if kind == 6:
        return [value(drawn, depth - 1) for _ in range(drawn.randrange(5))]
    if kind == 7:
        return {drawn.choice(WORDS): value(drawn, depth - 1) for _ in range(drawn.randrange(4))}
    leaves: list[Any] = [None, True, drawn.randrange(-(10**20), 10**20), drawn.gauss(0, 1e3), drawn.choice(WORDS), []]
    return leaves[kind]


@pytest.mark.usefixtures("always_in_steps")
@pytest.mark.parametrize("indent", [None, 1])
def test_it_reads_what_python_reads(indent: int | None) -> None:
    drawn = random.Random(0)
    for _ in range(500):
        text = json.dumps(value(drawn, 6), indent=indent, ensure_ascii=drawn.random() < 0.5)
        assert repr(read_json(text, object_of=list)) == repr(json.loads(text, object_pairs_hook=list)), text


@pytest.mark.usefixtures("always_in_steps")
@pytest.mark.parametrize("text", BROKEN)
def test_it_refuses_what_python_refuses_in_the_same_words(text: str) -> None:
    with pytest.raises(ValueError) as theirs:
        json.loads(text)
    with pytest.raises(ValueError) as ours:
        read_json(text, object_of=dict)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("text", ["[" * (LONG + 1), '{"a":' * LONG, "[" * LONG + "]" * LONG])
def test_endless_depth_is_an_ordinary_refusal(text: str) -> None:
    with pytest.raises(RecursionError):
        read_json(text, object_of=dict)


@pytest.mark.parametrize(
    "text",
    [
        '{"x": [' + ",".join(["[" + ",".join(["0.25"] * 64) + "]"] * 10_000) + "]}",
        '{"x": ["]", ' + "1," * STEP * 12 + "1]}",
        '{"x": [[' + "1," * STEP * 12 + "1]]}",
        '{"x": [[' + "[]," * STEP * 12 + "[]]]}",
    ],
    ids=["rows", "a bracket in a string", "one row", "empty lists"],
)
def test_no_step_is_long(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps Python looks whether another thread waits; within one it does not."""
    assert len(text) > LONG
    read_next, longest, inner = long_json._InSteps._next, 0, False

    def watched(reader: Any, text: str, start: int) -> tuple[Any, int]:
        nonlocal longest, inner
        inner = False
        made, end = read_next(reader, text, start)
        longest = longest if inner else max(longest, end - start)
        inner = True
        return made, end

    monkeypatch.setattr(long_json._InSteps, "_next", watched)
    assert read_json(text, object_of=dict) == json.loads(text)
    assert 0 < longest <= STEP + 2
