"""The command line against a service that answers from a table, handed over as its `obj`."""

import importlib
import inspect
import io
import json
import os
import subprocess
import sys
import threading
import tomllib
import types
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import glassblock
import glassblock.api
import glassblock_client.cli
import httpx
import numpy as np
import pytest
from glassblock.errors import InvalidValue, UnknownCheckpoint
from glassblock.reports import REPORTS
from glassblock.reports.page import page
from glassblock.wire import framing
from glassblock.wire.audits import Audit, AuditList, Finding, Progress, Report
from glassblock.wire.blocks import StageStatistics
from glassblock.wire.norms import NormStatisticsAnswer
from glassblock.wire.problems import problem_from_error
from glassblock.wire.tables import FamilyRow
from glassblock_client.cli import app as command_line
from glassblock_client.cli import doctor, main, screen
from glassblock_client.cli import serve as serve_command
from glassblock_client.cli.app import COMMANDS
from glassblock_client.cli.audit import exit_status
from glassblock_client.cli.connection import root_and_name
from glassblock_client.progress import progress_bar
from glassblock_client.tensors import array_from_wire, wire_from_array
from reports.report_makers import report, report_with_verdict, swap_finding, swapped_report, undecided_report
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner, Result

from client.fake_service import (
    BUDGET,
    CAPABILITIES,
    FAMILIES,
    HEALTH,
    RULES,
    SWEPT_BUDGET,
    FakeService,
    finished_audit,
    listening,
    problem_response,
)
from client.test_clients import block_answer, tensor_response, waiting

EVERYTHING = {
    "GET /v1/rules": RULES,
    "GET /v1/families": FAMILIES,
    "POST /v1/budgets": BUDGET,
    "GET /v1": CAPABILITIES,
    "GET /health/ready": HEALTH,
}


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "KEY", "DEVICE"):
        monkeypatch.delenv(f"GLASSBLOCK_{name}", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    return folder


def invoke(service: FakeService | None, *arguments: object) -> Result:
    connect = None if service is None else service.connect
    return CliRunner().invoke(command_line, [str(argument) for argument in arguments], obj=connect)


def audited(finished: Report) -> FakeService:
    return FakeService({"POST /v1/audits": finished_audit(finished), "GET /v1/rules": RULES})


def test_every_command_is_a_function_that_says_what_its_row_says():
    for row in COMMANDS.values():
        function = getattr(importlib.import_module(f"glassblock_client.cli.{row.module}"), row.name)
        assert (inspect.getdoc(function) or "").partition("\n")[0] == row.summary


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str):
    result = invoke(None, name, "--help")
    assert result.exit_code == 0
    assert COMMANDS[name].summary.split()[0] in result.stdout
    assert name in invoke(None, "--help").stdout


def test_a_run_says_what_was_changed(checkpoint: Path):
    changed = block_answer(overrides={"swap": True, "eps": 1e-3, "norm_kind": "rms_plus1"})
    told = invoke(FakeService({"POST /v1/blocks/run": changed}), "run", checkpoint, "--layer", 0, "--sample", 1)
    assert "gate and up exchanged, eps 0.001, norm kind rms_plus1" in " ".join(told.stdout.split())
    plain = invoke(FakeService({"POST /v1/blocks/run": block_answer()}), "run", checkpoint, "--layer", 0, "--sample", 1)
    assert "changed" not in plain.stdout


def test_a_mistyped_command_is_usage(checkpoint: Path):
    result = invoke(None, "auditt", checkpoint)
    assert result.exit_code == 2
    assert "'audit'" in result.stderr


@pytest.mark.parametrize(
    ("verdict", "levels", "options", "status"),
    [
        ("pass", [], [], 0),
        ("pass", ["note"], [], 0),
        ("pass", ["warning"], [], 0),
        ("pass", ["warning"], ["--fail-on", "warning"], 1),
        ("pass", ["note"], ["--fail-on", "warning"], 0),
        ("fail", ["error"], [], 1),
        ("fail", ["error"], ["--fail-on", "warning"], 1),
        ("fail", ["error", "warning"], ["--fail-on", "never"], 0),
        ("fail", ["error"], ["--allow-inconclusive"], 1),
        ("inconclusive", [], [], 3),
        ("inconclusive", ["warning"], [], 3),
        ("inconclusive", ["warning"], ["--fail-on", "warning"], 1),
        ("inconclusive", [], ["--fail-on", "never"], 3),
        ("inconclusive", [], ["--allow-inconclusive"], 0),
        ("inconclusive", ["warning"], ["--allow-inconclusive", "--fail-on", "warning"], 1),
    ],
)
def test_exit_statuses_of_an_audit(checkpoint: Path, verdict: Any, levels: list[Any], options: list[str], status: int):
    findings = tuple(swap_finding(2).model_copy(update={"level": level}) for level in levels)
    result = invoke(audited(report(verdict=verdict, findings=findings)), "audit", checkpoint, *options)
    assert result.exit_code == status, result.output


@pytest.mark.parametrize("verdict", ["pass", "fail", "inconclusive"])
def test_json_is_the_report_and_nothing_else(checkpoint: Path, verdict: Any):
    finished = report_with_verdict(verdict)
    result = invoke(audited(finished), "audit", checkpoint, "--format", "json")
    assert Report.model_validate_json(result.stdout) == finished
    assert result.stderr == ""


def test_text_names_the_layer_and_no_escape_reaches_a_pipe(checkpoint: Path):
    result = invoke(audited(swapped_report(2)), "audit", checkpoint)
    assert "ffn/gate-up-swapped" in result.stdout
    assert "layer 2" in result.stdout
    assert "\x1b" not in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


def test_an_output_file_is_written_whole_and_said_on_stderr(checkpoint: Path, tmp_path: Path):
    target = tmp_path / "report.json"
    target.write_text("old")
    result = invoke(audited(report()), "audit", checkpoint, "--format", "json", "--output", target)
    assert Report.model_validate_json(target.read_text()) == report()
    assert result.stdout == ""
    assert result.stderr == f"pass: the report is in {target}\n"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["models", "report.json"]


def test_an_output_that_cannot_be_written_is_said_before_the_audit(checkpoint: Path, tmp_path: Path):
    service = audited(report())
    for target in (tmp_path / "absent" / "report.json", tmp_path):
        result = invoke(service, "audit", checkpoint, "--output", target)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: --output: {target} ")
    assert service.asked == []


def test_leave_to_write_is_asked_where_the_report_is_put(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Replacing a file takes leave of its folder too. Asked through os.access, which the superuser always passes.
    target = tmp_path / "report.json"
    target.write_text("old")
    service = audited(report())
    for locked in (target, tmp_path):
        monkeypatch.setattr(os, "access", lambda place, _mode, locked=locked: Path(place) != locked)
        result = invoke(service, "audit", checkpoint, "--output", target)
        assert (result.exit_code, result.stderr) == (2, f"error: --output: {target} may not be written\n")
    assert service.asked == []


def test_an_output_that_fails_after_all_is_named(checkpoint: Path):
    result = invoke(audited(report()), "audit", checkpoint, "--output", "/dev/full")
    assert (result.exit_code, result.stderr) == (2, "error: /dev/full: No space left on device\n")


def test_an_output_in_a_circle_of_links_is_one_line(checkpoint: Path, tmp_path: Path):
    (tmp_path / "a").symlink_to(tmp_path / "a")
    result = invoke(audited(report()), "audit", checkpoint, "--output", tmp_path / "a" / "report.json")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --output: ")


def test_an_output_may_be_a_stream(checkpoint: Path, tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    result = invoke(audited(report()), "audit", checkpoint, "--format", "json", "--output", pipe)
    reader.join(timeout=10)
    assert result.exit_code == 0, result.output
    assert Report.model_validate_json(read[0]) == report()
    assert pipe.is_fifo()


def test_what_an_audit_is_asked(checkpoint: Path, tmp_path: Path):
    other = tmp_path / "other.json"
    other.write_text('{"rms_norm_eps": 1e-6, "rope_scaling": null}')
    service = audited(report())
    result = invoke(
        service, "audit", checkpoint, "--against", other, "--family", "llama", "--rules", "a/b, c/d", "--certify"
    )
    assert result.exit_code == 0, result.output
    assert service.sent() == {
        "checkpoint": "tiny",
        "family": "llama",
        "against": {"rms_norm_eps": 1e-6, "rope_scaling": None},
        "against_name": f"{other} (--against)",
        "rules": ["a/b", "c/d"],
        "certify": True,
    }
    assert service.connected == {"roots": (checkpoint.parent,), "device": "auto"}


AGAINST = {
    "no JSON": (b"{", "is not JSON"),
    "an array": (b"[]", "is not a JSON object"),
    "binary": (b"\xff\xfe\x00", "is not JSON"),
    "too deep": (b'{"a":' * 100_000, "is not JSON"),
    "a key twice": (b'{"a": {"b": 1, "c": 2, "b": 3}}', 'has the key "b" twice in one object'),
    "half a pair": (b'{"a": "\\ud800"}', "surrogates not allowed"),
    "too large": (b'{"a": "' + b"x" * (16 * 1024 * 1024) + b'"}', "larger than"),
}


@pytest.mark.parametrize("name", AGAINST)
def test_a_config_that_is_none_is_refused(checkpoint: Path, tmp_path: Path, name: str):
    content, told = AGAINST[name]
    other = tmp_path / "other.json"
    other.write_bytes(content)
    result = invoke(FakeService({}), "audit", checkpoint, "--against", other)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: --against: {other} ")
    assert told in result.stderr


def test_a_row_with_a_key_twice_is_refused(checkpoint: Path, tmp_path: Path):
    row = tmp_path / "mine.json"
    row.write_text('{"like": "llama", "norms": [{"role": "ffn_in", "role": "final"}]}')
    result = invoke(FakeService({}), "audit", checkpoint, "--family-file", row)
    assert result.exit_code == 2
    assert result.stderr.startswith(f'error: --family-file: {row} has the key "role" twice in one object')


REFUSED: dict[str, tuple[list[str], str]] = {
    "absent": (["audit", "/no/such/checkpoint"], "there is no '/no/such/checkpoint'"),
    "the root": (["audit", "/"], "the root of the file system"),
    "format": (["audit", "{checkpoint}", "--format", "pdf"], "known: " + ", ".join(REPORTS)),
    "no rule": (["audit", "{checkpoint}", "--rules", " ,"], "--rules names nothing"),
    "absent config": (
        ["audit", "{checkpoint}", "--against", "/no/such.json"],
        "--against: /no/such.json does not exist",
    ),
    "device and url": (["audit", "x", "--url", "http://x.test", "--device", "cpu"], "--device has no effect"),
    "timeout alone": (["audit", "{checkpoint}", "--timeout", "3"], "--timeout has no effect"),
    "bad url": (["audit", "x", "--url", "x.test:80"], "no http:// or https:// URL"),
    "no input": (["run", "{checkpoint}", "--layer", "0"], "one of --input FILE, --sample"),
    "two inputs": (["run", "{checkpoint}", "--layer", "0", "--sample", "1", "--input", "x.npy"], "one of --input"),
    "seed of a file": (["run", "{checkpoint}", "--layer", "0", "--input", "x.npy", "--seed", "1"], "--seed has no"),
    "no rows": (["run", "{checkpoint}", "--layer", "0", "--sample", "0"], "--sample: 0 is too small: at least 1"),
    "a stage": (
        ["run", "{checkpoint}", "--layer", "0", "--sample", "1", "--capture", "gat"],
        "known: gate and 21 more",
    ),
    "no stage": (
        ["run", "{checkpoint}", "--layer", "0", "--sample", "1", "--capture", ","],
        "--capture names no stage",
    ),
    "input of another kind": (["run", "{checkpoint}", "--layer", "0", "--input", __file__], "neither .npy nor"),
    "absent input of no kind": (
        ["run", "{checkpoint}", "--layer", "0", "--input", "/nope"],
        "error: --input: /nope does not exist\n",
    ),
    "a folder as input": (["run", "{checkpoint}", "--layer", "0", "--input", "{checkpoint}"], "is a folder"),
    "absent input": (["run", "{checkpoint}", "--layer", "0", "--input", "/no/x.npy"], "/no/x.npy"),
    "sizes": (["budget", "--d-model", "4,x"], "--d-model: '4,x'"),
    "no PATH": (["audit", ""], "the argument after audit is empty"),
    "no PATH of a run": (["run", "--layer", "0", "--sample", "1", ""], "the argument after 1 is empty"),
    "no PATH of a norm": (["norms", "", "--norm", "final", "--sample", "1"], "the argument after norms is empty"),
    "no PATH of a budget": (["budget", ""], "the argument after budget is empty"),
    "no URL": (["audit", "{checkpoint}", "--url", ""], "the argument after --url is empty"),
    "no URL after =": (["audit", "{checkpoint}", "--url="], "the argument after --url is empty"),
    "no root": (["serve", "--checkpoints", ""], "the argument after --checkpoints is empty"),
    "no examples": (["demo", "--examples", ""], "the argument after --examples is empty"),
    "no name": (["rules", ""], "the argument after rules is empty"),
    "an unknown rule": (["rules", "ffn/gate-up-swaped"], "did you mean ffn/gate-up-swapped?"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_asked_is_one_error_line_and_status_2(checkpoint: Path, name: str):
    arguments, told = REFUSED[name]
    result = invoke(FakeService(EVERYTHING), *(word.format(checkpoint=checkpoint) for word in arguments))
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert told in result.stderr
    assert all(line.startswith("hint: ") for line in lines[1:])
    assert result.stdout == ""


@pytest.mark.parametrize("name", ["two\nlines", "back\\slash", "bell\x07", "not \udcff UTF-8"])
def test_a_name_that_no_service_takes_is_said_to_be_one(tmp_path: Path, name: str):
    folder = tmp_path / name
    folder.mkdir()
    service = FakeService({})
    result = invoke(service, "audit", folder)
    assert result.exit_code == 2
    assert "in its name" in result.stderr
    assert result.stderr.splitlines()[1:] == ["hint: rename it"]
    assert service.asked == []


def test_an_error_of_the_service_is_told_without_what_a_terminal_would_obey(checkpoint: Path):
    error = InvalidValue("tensor 'a\x1b[2J' is odd\nerror: fake", hint="\x07look", known=("x", "y"))
    service = FakeService({"POST /v1/audits": lambda _: problem_response(error, 422)})
    result = invoke(service, "audit", checkpoint)
    assert result.exit_code == 2
    assert result.stderr == ("error: tensor 'a\\x1b[2J' is odd\\nerror: fake; known: x, y\nhint: \\x07look\n")


def test_a_failed_audit_is_an_error_of_status_2(checkpoint: Path):
    problem = problem_from_error(UnknownCheckpoint("it went away"), 404).model_dump(exclude_none=True)
    service = FakeService({"POST /v1/audits": waiting("failed", problem=problem)})
    result = invoke(service, "audit", checkpoint)
    assert (result.exit_code, result.stderr) == (2, "error: it went away\n")


def test_ctrl_c_cancels_the_audit_and_exits_130(checkpoint: Path):
    def interrupt(_: httpx.Request) -> httpx.Response:
        raise KeyboardInterrupt

    service = FakeService(
        {
            "POST /v1/audits": waiting("running"),
            "GET /v1/audits/a1": interrupt,
            "DELETE /v1/audits/a1": waiting("cancelled"),
        }
    )
    result = invoke(service, "audit", checkpoint)
    assert result.exit_code == 130
    assert [request.method for request in service.asked] == ["POST", "GET", "DELETE"]
    assert "Traceback" not in result.output


def test_with_a_url_the_path_is_a_name_and_the_key_is_sent(monkeypatch: pytest.MonkeyPatch):
    service = audited(report())
    monkeypatch.setenv("GLASSBLOCK_KEY", "s3cret")
    with listening(service) as url:
        monkeypatch.setenv("GLASSBLOCK_URL", url)
        result = invoke(None, "audit", "org/model/", "--timeout", 5)
    assert result.exit_code == 0, result.output
    assert service.sent()["checkpoint"] == "org/model"
    assert service.asked[0].headers["Authorization"] == "Bearer s3cret"


def test_a_service_that_is_not_there_is_status_2():
    result = invoke(None, "rules", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: cannot connect to http://127.0.0.1:9")


def test_a_path_is_a_root_and_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    file = folder / "model.safetensors"
    file.write_bytes(b"")
    monkeypatch.chdir(folder)
    for given in (str(folder), f"{folder}/", ".", "../tiny", "./", f"{folder}/../tiny/"):
        assert root_and_name(given) == (folder.parent, "tiny"), given
    for given in (str(file), "model.safetensors", "./model.safetensors"):
        assert root_and_name(given) == (folder, "model.safetensors"), given


def test_links_are_followed_to_where_the_checkpoint_lies(tmp_path: Path):
    real = tmp_path / "store" / "v7"
    real.mkdir(parents=True)
    (real / "model.safetensors").write_bytes(b"")
    (tmp_path / "latest").symlink_to(real)
    assert root_and_name(str(tmp_path / "latest")) == (real.parent, "v7")
    (tmp_path / "one.safetensors").symlink_to(real / "model.safetensors")
    assert root_and_name(str(tmp_path / "one.safetensors")) == (real, "model.safetensors")


def test_a_file_of_a_hugging_face_cache_keeps_the_name_of_its_link(tmp_path: Path):
    blob = tmp_path / "models--o--m" / "blobs" / "8c1f"
    snapshot = tmp_path / "models--o--m" / "snapshots" / "main"
    blob.parent.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    blob.write_bytes(b"")
    (snapshot / "model.safetensors").symlink_to(blob)
    assert root_and_name(str(snapshot / "model.safetensors")) == (snapshot, "model.safetensors")


def test_links_in_a_circle_are_told(tmp_path: Path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    result = invoke(FakeService({}), "audit", tmp_path / "a")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


STAGE = StageStatistics(
    shape=(2, 5), dtype="float32", mean=0.5, rms=1.25, min=-3, max=70000, non_finite=2, fp16_overflow=True
)


def test_run_shows_its_stages(checkpoint: Path):
    service = FakeService({"POST /v1/blocks/run": block_answer(stages={"hidden": STAGE}, notes=("eps by default",))})
    result = invoke(service, "run", checkpoint, "--layer", 7, "--sample", 4, "--seed", 9)
    assert result.exit_code == 0, result.output
    assert service.sent() == {"checkpoint": "tiny", "layer": 7, "sample": {"rows": 4, "seed": 9}}
    for told in ("hidden", "2×5", "7e+04", "2 not finite", "overflows", "silu", "eps by default"):
        assert told in result.stdout
    as_json = invoke(service, "run", checkpoint, "--layer", 7, "--sample", 4, "--format", "json")
    assert json.loads(as_json.stdout)["stages"]["hidden"]["non_finite"] == 2


def test_run_sends_every_override(checkpoint: Path):
    service = FakeService({"POST /v1/blocks/run": block_answer()})
    options = "--eps 1e-6 --activation gelu --swap --norm-offset 1 --norm-kind rms_gemma --placement post --width 8"
    result = invoke(
        service, "run", checkpoint, "--layer", 0, "--sample", 1, *options.split(), "--dtype", "bfloat16",
        "--capture", "gate, hidden",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert service.sent()["capture"] == ["gate", "hidden"]
    assert service.sent()["overrides"] == {
        "eps": 1e-6,
        "activation": "gelu",
        "swap": True,
        "norm_offset": 1,
        "norm_kind": "rms_gemma",
        "placement": "post",
        "width": 8,
        "dtype": "bfloat16",
    }


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_run_reads_x_from_a_file_and_writes_stages_to_one(checkpoint: Path, tmp_path: Path, kind: str):
    x = np.arange(6, dtype=np.float16).reshape(2, 3)
    given = tmp_path / f"x.{kind}"
    if kind == "npy":
        np.save(given, x)
    else:
        given.write_bytes(b"".join(framing.frame("request", "", {"x": wire_from_array(x), "y": wire_from_array(x)})))
    hidden = np.ones((2, 5), np.float32)
    service = FakeService({"POST /v1/blocks/run": lambda _: tensor_response(block_answer(), hidden=hidden)})
    target = tmp_path / "stages.safetensors"
    result = invoke(service, "run", checkpoint, "--layer", 0, "--input", given, "--output", target)
    assert result.exit_code == 0, result.output
    _, sent = framing.unframe("request", memoryview(service.asked[0].content))
    assert list(sent) == ["x"]
    np.testing.assert_array_equal(array_from_wire(sent["x"]), x)
    text, written = framing.unframe("response", memoryview(target.read_bytes()))
    assert json.loads(text)["family"] == "llama"
    np.testing.assert_array_equal(array_from_wire(written["hidden"]), hidden)


BAD_INPUTS = {
    "empty.npy": b"",
    "pickle.npy": b"\x80\x04\x95",
    "cut.npy": b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (1000,), }"
    + b" " * 55
    + b"\n",
    "object.npy": b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }" + b" " * 60 + b"\n",
    "empty.safetensors": b"",
    "pickle.safetensors": b"\x80\x04\x95" * 10,
    "other.safetensors": b"".join(framing.frame("request", "", {"y": wire_from_array(np.ones(1))})),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_an_input_that_holds_no_x_is_refused(checkpoint: Path, tmp_path: Path, name: str):
    given = tmp_path / name
    given.write_bytes(BAD_INPUTS[name])
    result = invoke(FakeService({}), "run", checkpoint, "--layer", 0, "--input", given)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert str(given) in result.stderr


def norm_answer(rows: int) -> NormStatisticsAnswer:
    each = [0.5] * rows
    fit = {
        "value_overflow": [False] * rows,
        "square_overflow": [row == 1 for row in range(rows)],
        "square_sum_overflow": [row == 1 for row in range(rows)],
        "square_underflow": [False] * rows,
        "eps_zero": False,
        "eps_subnormal": True,
    }
    differences = {"rmsnorm": each, "layernorm": each}
    names = ("shift", "positive_scale", "negative_scale", "negative_scale_flipped", "channel_scale")
    return NormStatisticsAnswer.model_validate(
        {
            "mean": each,
            "square_mean": each,
            "variance": each,
            "rms": ["NaN", *each[1:]],
            "jacobian_frobenius": {"rmsnorm": each},
            "invariances": dict.fromkeys(names, differences),
            "dtype_report": {"float16": fit},
            "eps": {"value": 1e-5, "source": "config.json: rms_norm_eps"},
            "norm_kind": "rms_llama",
        }
    )


def test_norms_shows_rows_and_what_float16_would_lose(checkpoint: Path):
    service = FakeService({"POST /v1/norms/statistics": norm_answer(30)})
    # The fake answers JSON whatever is asked for; the client reads either.
    result = invoke(service, "norms", checkpoint, "--layer", 3, "--norm", "ffn_in", "--sample", 30)
    assert result.exit_code == 0, result.output
    assert service.sent() == {"checkpoint": "tiny", "layer": 3, "norm": "ffn_in", "sample": {"rows": 30}}
    for told in ("ffn_in of layer 3", "config.json: rms_norm_eps", "nan", "and 6 more rows", "subnormal in float16"):
        assert told in result.stdout
    assert "squares" in result.stdout
    as_json = invoke(service, "norms", checkpoint, "--norm", "final", "--sample", 30, "--format", "json")
    assert len(json.loads(as_json.stdout)["rms"]) == 30


def test_budget_counts_and_sweeps(checkpoint: Path):
    service = FakeService({"POST /v1/budgets": BUDGET})
    result = invoke(service, "budget", "--d-model", 4, "--d-ff", 8, "--kind", "gated")
    assert result.exit_code == 0, result.output
    assert service.sent() == {"d_model": 4, "d_ff": 8, "kind": "gated"}
    assert "16/3 = 5.33" in result.stdout
    service = FakeService({"POST /v1/budgets": SWEPT_BUDGET})
    swept = invoke(service, "budget", "--d-model", 4, "--d-ff", "8,16", "--kind", "gated", "--tokens", 3)
    assert service.sent() == {"d_model": 4, "d_ff": [8, 16], "kind": "gated", "tokens": 3}
    assert "d_ff" in swept.stdout.splitlines()[1]
    invoke(service, "budget", checkpoint)
    assert service.sent() == {"checkpoint": "tiny"}
    invoke(service, "budget", checkpoint, "--dtype", "bfloat16")
    assert service.sent() == {"checkpoint": "tiny", "dtype": "bfloat16"}
    for size in ("--batch", "--tokens"):
        refused = invoke(FakeService({}), "budget", checkpoint, size, 0)
        assert refused.exit_code == 2
        assert f"{size}: 0 is too small" in refused.stderr


def test_rules_lists_and_explains():
    service = FakeService(EVERYTHING)
    listed = invoke(service, "rules")
    assert "ffn/gate-up-swapped" in listed.stdout
    assert "container/hole" in listed.stdout
    one = invoke(service, "rules", "container/hole")
    assert "Strict readers refuse the file." in one.stdout
    assert json.loads(invoke(service, "rules", "--format", "json").stdout)["rules"][1]["name"] == "container/hole"
    assert "rms_llama" in invoke(service, "families").stdout


FAMILY_ROWS = tuple(
    FamilyRow(
        name=name,
        model_types=(f"{name}_type",),
        architectures=(),
        ffn=ffn,
        activation="hidden_act",
        norm="rms_llama",
        placement="pre",
        eps="rms_norm_eps",
        verified="source only",
        notes=("Attention is not read.",),
    )
    for name, ffn in (
        ("llama", "gated: g, u; d; stored out_in"),
        ("llama4", "stacked experts, gated: g; router r"),
        ("gpt2", "plain: a; b"),
    )
)


def test_families_are_a_line_each_and_explained_by_name():
    service = FakeService({"GET /v1/families": FAMILIES.model_copy(update={"families": FAMILY_ROWS})})
    lines = [line.split() for line in invoke(service, "families").stdout.splitlines()]
    assert lines[0] == ["family", "network", "norm", "placement", "verified"]
    for row in (["llama", "gated"], ["llama4", "gated", "experts"], ["gpt2", "plain"]):
        assert [*row, "rms_llama", "pre", "source", "only"] in lines
    one = invoke(service, "families", "llama").stdout
    assert "llama_type" in one
    assert "Attention is not read." in one
    assert "llama4" not in one
    some = json.loads(invoke(service, "families", "lam", "--format", "json").stdout)
    assert [row["name"] for row in some["families"]] == ["llama", "llama4"]
    refused = invoke(service, "families", "lamma")
    assert refused.exit_code == 2
    assert "did you mean llama or llama4?" in refused.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_spinner_shows_a_name_and_obeys_none_of_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with screen.working("reading m[/x]\x1b[2J[bold]"):
        pass
    assert "reading m[/x]\\x1b[2J[bold]" in terminal.getvalue()


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_bar_on_stderr_takes_nothing_from_a_stdout_that_goes_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], term: str
):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress_bar("auditing") as on_progress:
        on_progress(Progress(done=1, total=2))
        print("the answer of another task")
    assert capsys.readouterr().out == "the answer of another task\n"


def test_the_doctor_looks_at_all_that_is_needed():
    project = tomllib.loads(Path(glassblock.__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    needed = {"client": project["dependencies"], "service": project["optional-dependencies"]["service"]}
    looked_at = {"client": doctor.CLIENT_PACKAGES, "service": doctor.SERVICE_PACKAGES}
    for side, asked_for in needed.items():
        assert sorted(looked_at[side]) == sorted(line.partition(">")[0] for line in asked_for)


def test_a_narrow_page_cuts_no_number():
    table = Table("stage", "mean\nsquare", "shape")
    table.add_row("contribution", Text("0.123456789"), "4×256×1024")
    narrow = page([table], width=26, colour=False)
    assert narrow.split() == ["stage", "contribution", "mean", "square", "0.123456789", "shape", "4×256×1024"]
    assert max(map(len, narrow.splitlines())) <= 26
    assert "┃" in page([table], width=60, colour=False), "where there is room it stays a table"


@pytest.mark.parametrize("columns", [40, 80])
def test_tables_of_rules_and_families_cut_no_word_on_a_narrow_screen(monkeypatch: pytest.MonkeyPatch, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    service = FakeService(EVERYTHING)
    for command in ("rules", "families"):
        shown = invoke(service, command).stdout
        assert max(map(len, shown.splitlines())) <= columns
        assert "…" not in shown
    assert "ffn/gate-up-swapped  error\n  Gate and up are exchanged." in invoke(service, "rules").stdout


def test_doctor_says_what_works():
    result = invoke(FakeService(EVERYTHING), "doctor")
    assert result.exit_code == 0, result.output
    for told in ("python", "torch", "numpy", "in this process, version 0.1.0, on cpu", "Next: glassblock demo"):
        assert told in result.stdout


def test_doctor_says_what_does_not():
    unready = HEALTH.model_copy(update={"status": "not ready", "checks": {"root 0": "failed: not a folder"}})
    newer = CAPABILITIES.model_copy(update={"glassblock": "99.0"})
    with listening(FakeService({"GET /health/ready": unready, "GET /v1": newer})) as url:
        result = invoke(None, "doctor", "--url", url)
    assert result.exit_code == 1
    for told in ("!!", "not ready", "root 0: failed", "version 99.0", "client and service differ"):
        assert told in result.stdout
    gone = invoke(None, "doctor", "--url", "http://127.0.0.1:9")
    assert gone.exit_code == 1
    assert "cannot connect" in gone.stdout


def test_without_the_service_the_way_out_is_told(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    # None in sys.modules makes the import fail, as where the package is not installed.
    for name in [name for name in sys.modules if name.startswith(("glassblock.api", "glassblock_client.cli.service"))]:
        monkeypatch.delitem(sys.modules, name)
    # A package keeps what was once imported from it as an attribute, which `from ... import` takes first.
    monkeypatch.delattr(glassblock_client.cli, "service", raising=False)
    # An import that fails half way leaves another package there: put back the one that was.
    monkeypatch.setattr(glassblock, "api", glassblock.api, raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for arguments in (["audit", checkpoint], ["serve"], ["rules"]):
        result = invoke(None, *arguments)
        assert result.exit_code == 2, result.output
        assert "is not installed" in result.stderr
        assert "glassblock[service]" in result.stderr


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """Stands for the repository's folder: a checkpoint of nothing and a planter that copies it."""
    folder = tmp_path / "examples"
    (folder / "tiny-llama").mkdir(parents=True)
    (folder / "plant_swap.py").write_text(
        "def plant_swap(source, target, layers):\n"
        "    target.mkdir()\n"
        "    return {f'gate.{n}': f'up.{n}' for n in layers}\n"
    )
    return folder


@pytest.mark.parametrize(
    ("second", "status"),
    [(swapped_report(2), 0), (swapped_report(1), 1), (report(), 1), (swapped_report(1, 2), 1), (undecided_report(), 1)],
)
def test_the_demo_tells_its_story(examples: Path, second: Report, status: int):
    answers = [finished_audit(report()), finished_audit(second)]
    service = FakeService({"POST /v1/audits": lambda _: json_answer(answers.pop(0))})
    result = invoke(service, "demo", "--examples", examples)
    assert result.exit_code == status, result.output
    assert "PASS" in result.stdout
    assert [json.loads(request.content)["checkpoint"] for request in service.asked] == [
        "tiny-llama",
        "tiny-llama-swapped",
    ]
    assert not Path(service.connected["roots"][1]).exists()


def json_answer(answer: Audit) -> httpx.Response:
    return httpx.Response(202, content=answer.model_dump_json(), headers={"Content-Type": "application/json"})


def test_the_demo_says_where_its_examples_are(tmp_path: Path):
    result = invoke(FakeService({}), "demo", "--examples", tmp_path)
    assert result.exit_code == 2
    assert "needs the examples of the repository" in result.stderr
    assert "--examples DIR" in result.stderr


def test_the_status_counts_findings_not_verdicts():
    risky = Finding(rule="range/fp16-overflow", level="note", certainty="risk", message="large")
    assert exit_status(report(findings=(risky,)), fail_on="warning", allow_inconclusive=False) == 0
    assert exit_status(report_with_verdict("fail"), fail_on="error", allow_inconclusive=True) == 1


def test_progress_is_silent_where_nobody_looks(checkpoint: Path):
    service = FakeService(
        {
            "POST /v1/audits": waiting("queued"),
            "GET /v1/audits/a1": Audit(
                id="a1", state="succeeded", checkpoint="tiny", progress=Progress(done=1, total=1), report=report()
            ),
        }
    )
    assert invoke(service, "audit", checkpoint).stderr == ""


def test_serve_passes_on_what_was_given_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    served: list[dict[str, Any]] = []
    door = types.SimpleNamespace(serve=lambda **given: served.append(given))
    monkeypatch.setattr(serve_command, "door", lambda: door)
    assert invoke(None, "serve").exit_code == 0
    options = ("--checkpoints", tmp_path, "--checkpoints", "b", "--host", "::1", "--port", 0, "--device", "cpu")
    assert invoke(None, "serve", *options, "--allow-open").exit_code == 0
    assert served == [
        {},
        {"roots": (tmp_path, Path("b")), "host": "::1", "port": 0, "device": "cpu", "allow_open": True},
    ]


def test_a_defect_is_one_line_and_no_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def broken() -> None:
        raise KeyError("a\nb")

    monkeypatch.setattr(serve_command, "door", broken)
    monkeypatch.setattr(sys, "argv", ["glassblock", "serve"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: a defect in glassblock, test_command_line.py, line ")
    assert error.count("\n") == 1


def test_a_reader_that_leaves_is_no_verdict_either():
    script = "from glassblock_client.cli import main; main()"
    with listening(FakeService(EVERYTHING)) as url:
        process = subprocess.Popen(
            [sys.executable, "-c", script, "rules", "--url", url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        error = process.stderr.read()
        process.stderr.close()
        assert process.wait() == 2
    assert error == b""


@pytest.mark.parametrize(
    ("terminal", "settings", "wanted"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "dumb"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": ""}, True),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_colour_is_for_terminals_that_want_it(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, settings: dict[str, str], wanted: bool
):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert screen.coloured() is wanted


def rules_about(*names: str) -> FakeService:
    rows = tuple(RULES.rules[0].model_copy(update={"name": name}) for name in names)
    return FakeService({"GET /v1/rules": RULES.model_copy(update={"rules": rows})})


NAMES = ("ffn/gate-up-swapped", "ffn/fused-order", "norm/offset", "ffn/gate", "norm/role")


@pytest.mark.parametrize(
    ("asked", "listed"),
    [
        ("gate-up", {"ffn/gate-up-swapped"}),
        ("gate", {"ffn/gate-up-swapped", "ffn/gate"}),
        ("Norm", {"norm/offset", "norm/role"}),
        ("norm/", {"norm/offset", "norm/role"}),
    ],
)
def test_a_part_of_a_name_lists_the_rules_that_have_it(asked: str, listed: set[str]):
    told = invoke(rules_about(*NAMES), "rules", asked)
    assert told.exit_code == 0
    assert {name for name in NAMES if f"{name}  " in told.stdout} == listed
    assert "what it hurts" not in told.stdout
    found = json.loads(invoke(rules_about(*NAMES), "rules", asked, "--format", "json").stdout)
    assert {row["name"] for row in found["rules"]} == listed


def test_the_whole_name_explains_the_rule_though_others_have_it_in_theirs():
    told = invoke(rules_about(*NAMES), "rules", "ffn/gate")
    assert "what it hurts" in told.stdout
    assert "gate-up" not in told.stdout
    assert json.loads(invoke(rules_about(*NAMES), "rules", "ffn/gate", "--format", "json").stdout)["name"] == "ffn/gate"


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("ffn/fused-ordr", "did you mean ffn/fused-order?"),
        ("fused-ordr", "did you mean ffn/fused-order?"),
        ("nrom", "did you mean norm?"),
        ("xyzzy", "`glassblock rules` lists them"),
    ],
)
def test_a_name_that_no_rule_has_is_refused_with_the_nearest(asked: str, hint: str):
    refused = invoke(rules_about(*NAMES), "rules", asked)
    assert refused.exit_code == 2
    assert refused.stderr.splitlines() == [f"error: no rule has '{asked}' in its name", f"hint: {hint}"]


JOBS = AuditList(
    audits=tuple(
        Audit(
            id=f"{number:032x}",
            operation=operation,
            state=state,
            checkpoint="organisation/a-model-of-a-long-name-7B",
            progress=Progress(done=45, total=100),
            created=datetime(2026, 11, 30, 9, number, tzinfo=UTC),
        )
        for number, (operation, state) in enumerate(
            [("start_audit", "running"), ("norm_statistics", "succeeded"), ("compare_residuals", "cancelled")]
        )
    )
)


@pytest.mark.parametrize("width", ["80", "120"])
def test_no_column_of_the_jobs_is_cut(width: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", width)
    service = FakeService({"GET /v1/audits?limit=20": JOBS})
    with listening(service) as url:
        told = invoke(None, "audits", "--url", url).stdout
    assert "…" not in told
    assert max(map(len, told.splitlines())) <= int(width)
    for job in JOBS.audits:
        assert f"{job.id}  11-30 09:0" in told
        assert job.state in told
    assert "running 45%" in told
    assert "succeeded 45%" not in told
    words = "".join(told.split())
    assert words.count("organisation/a-model") == 3 if width == "120" else "organisation" in told
    assert "start_" not in told
