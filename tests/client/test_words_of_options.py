"""On the command line an error names options and commands, never the paths and fields of HTTP."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import glassblock
import pytest
from glassblock.errors import HINT_AS_JOB, InvalidValue, TooLarge
from glassblock.wire.endpoints import ENDPOINTS
from glassblock_client.cli.app import COMMANDS, load_command, options_of
from glassblock_client.cli.options import COMMANDS_FOR, FIELDS, in_words_of_options
from makers import tiny_checkpoint

from client.fake_service import FakeService, json_response, problem_response
from client.test_clients import block_answer
from client.test_command_line import invoke

SOURCE = Path(glassblock.__file__).parent
EVERY = {name: option for row in COMMANDS.values() for name, option in options_of(load_command(row)).items()}
BY_HTTP_ALONE = {"abandoned.py"}
"""About headers that no command sends."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny")


def said(message: str, *, field: str | None = None, hint: str | None = None, command: str = "run") -> tuple[str, Any]:
    error = InvalidValue(message, field=field, hint=hint)
    in_words_of_options(error, options_of(load_command(COMMANDS[command])), command)
    return error.message, error.hint


@pytest.mark.parametrize(
    ("command", "field", "message", "told"),
    [
        ("run", "rows", "rows: 0 is too small", "--sample: 0 is too small"),
        ("run", "sample.rows", "sample.rows: 0 is too small", "--sample: 0 is too small"),
        ("run", "capture.0", "capture.0: 'gat' is none", "--capture: 'gat' is none"),
        ("run", "overrides.eps", "overrides.eps: a number is wanted", "--eps: a number is wanted"),
        ("audit", "family_row.name", "family_row.name is missing", "--family-file: name is missing"),
        ("audit", "family_row", "family_row names no family", "--family-file names no family"),
        ("budget", "d_ff", "d_ff comes from the checkpoint", "--d-ff comes from the checkpoint"),
        ("norms", "layer", "layer is missing", "--layer is missing"),
        ("run", "layer", "layer 99 is out of range", "layer 99 is out of range"),
        ("run", "tensor", "tensor: unknown to this command", "tensor: unknown to this command"),
        ("run", None, "token_ids and text are both given", "--token-ids and text are both given"),
    ],
)
def test_a_field_is_told_as_its_option(command: str, field: str | None, message: str, told: str) -> None:
    assert said(message, field=field, command=command)[0] == told


@pytest.mark.parametrize(
    ("hint", "told"),
    [
        ("see GET /v1/rules", "see `glassblock rules`"),
        ("see GET /openapi.json", "see `glassblock run --help`"),
        ("give `token_ids`, `text` or `x`", "give `--token-ids`, `--text` or `--input`"),
        ("Leave it out, or set rms_norm_eps in config.json", "Leave it out, or set rms_norm_eps in config.json"),
        (f"{HINT_AS_JOB}ask for less", "ask for less"),
        ("Look at the row (family_row, --family-file).", "Look at the row (--family-file)."),
        (None, None),
    ],
)
def test_a_hint_names_commands_and_options(hint: str | None, told: str | None) -> None:
    assert said("wrong", hint=hint)[1] == told


def every_hint() -> Iterator[tuple[str, str]]:
    """The file and the text of every hint in the service's source; what is filled in stands as `{}`."""
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                for keyword in node.keywords:
                    if keyword.arg == "hint":
                        yield from ((file.name, text) for text in _texts(keyword.value))


def _texts(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)  # pyright: ignore
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)


def test_no_hint_of_the_service_reaches_the_command_line_with_a_path_or_a_field_in_it() -> None:
    fields = {name for endpoint in ENDPOINTS for name in endpoint.request.model_fields if "_" in name}
    hints = [(file, hint) for file, hint in every_hint() if file not in BY_HTTP_ALONE]
    assert len(hints) > 100  # or the walk finds nothing
    for file, hint in hints:
        error = InvalidValue("wrong", hint=hint)
        in_words_of_options(error, EVERY, "run")
        told = error.hint or ""
        assert not re.search(r"\b(?:GET|POST|PUT|DELETE|PATCH) /|/v1/|Prefer:", told), (file, told)
        assert not fields & set(re.findall(r"[a-z]+(?:_[a-z]+)+", told)), (file, told)


def test_every_path_and_field_of_the_tables_is_one() -> None:
    paths = {f"{endpoint.method} {endpoint.path}" for endpoint in ENDPOINTS} | {"GET /openapi.json"}
    assert set(COMMANDS_FOR) <= paths
    for command in re.findall(r"glassblock ([a-z]+)", " ".join(COMMANDS_FOR.values())):
        assert command in COMMANDS
    assert set(FIELDS.values()) <= set(EVERY)


REFUSED: dict[str, tuple[list[str], str]] = {
    "an unknown rule": (["audit", "{model}", "--rules", "gate"], "known: ffn/gate-up-swapped and"),
    "a stage": (["run", "{model}", "--layer", "0", "--sample", "1", "--capture", "gat"], "error: --capture: 'gat' is"),
    "a norm of Jacobians": (
        ["jacobian", "{model}", "--sample", "1", "--norms", "fro"],
        "error: --norms: 'fro' is none",
    ),
    "a tolerance": (["jacobian", "{model}", "--sample", "1", "--tolerance", "2"], "--tolerance: 2.0 is too large"),
    "no tokenizer": (["run", "{model}", "--layer", "0", "--text", "a b"], "or give `--token-ids`"),
    "no layer": (["norms", "{model}", "--norm", "ffn_in", "--sample", "1"], "error: --layer is missing"),
    "a layer too much": (["norms", "{model}", "--norm", "final", "--layer", "0", "--sample", "1"], "out `--layer`"),
    "no kind": (["budget", "--d-model", "4", "--d-ff", "4"], "error: --kind is missing"),
    "a size too much": (["budget", "{model}", "--d-ff", "4"], "error: --d-ff comes from the checkpoint"),
    "an empty family": (
        ["run", "{model}", "--layer", "0", "--sample", "1", "--family-file", "{empty}"],
        "file: name is",
    ),
    "captures elsewhere": (["audit", "{model}", "--captures", "nowhere"], "error: --captures: there is no 'nowhere'"),
    "another elsewhere": (["audit", "{model}", "--reference", "nowhere"], "error: --reference: there is no 'nowhere'"),
    "no number": (["run", "{model}", "--layer", "x", "--sample", "1"], "a whole number is wanted, not 'x'."),
    "no fraction": (["jacobian", "{model}", "--sample", "1", "--tolerance", "x"], "a number is wanted, not 'x'."),
    "out of range": (["audits", "--limit", "0"], " 0 is too small: at least 1 is wanted."),
    "a choice": (["audit", "{model}", "--fail-on", "warn"], "'warn' is not one of 'error'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_told_by_its_option(name: str, model: Path, tmp_path: Path) -> None:
    words, told = REFUSED[name]
    empty = tmp_path / "e.json"
    empty.write_text("{}")
    result = invoke(None, *(word.format(model=model, empty=empty) for word in words))
    plain = " ".join(result.stderr.replace("│", " ").split())
    assert result.exit_code == 2
    assert told in plain
    assert "Value error" not in plain
    assert "nput should" not in plain


def test_what_takes_longer_than_a_caller_may_wait_is_asked_for_as_a_job(model: Path) -> None:
    asked: list[str] = []

    def answer(request: Any) -> Any:
        asked.append(request.headers.get("Prefer", "now"))
        if len(asked) == 1:
            return problem_response(TooLarge("this is estimated to be 9 TFLOP", hint=f"{HINT_AS_JOB}ask for less"), 413)
        return json_response(block_answer())

    told = invoke(FakeService({"POST /v1/blocks/run": answer}), "run", model, "--layer", 0, "--sample", 1)
    assert told.exit_code == 0, told.output
    assert asked == ["now", "respond-async"]


def test_what_is_over_another_limit_is_not_sent_twice(model: Path) -> None:
    asked: list[str] = []

    def answer(request: Any) -> Any:
        asked.append(request.headers.get("Prefer", "now"))
        return problem_response(TooLarge("the body is larger than 9 bytes", hint="send less"), 413)

    told = invoke(FakeService({"POST /v1/blocks/run": answer}), "run", model, "--layer", 0, "--sample", 1)
    assert told.exit_code == 2
    assert asked == ["now"]
