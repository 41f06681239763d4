"""`glassblock checkpoints`, against a service that answers from a table and against the one in this process."""

import json
from pathlib import Path

import httpx
import pytest
from glassblock.errors import UnknownFamily
from glassblock.wire.checkpoints import CheckpointList, CheckpointSummary
from makers import tiny_checkpoint

from client.fake_service import FAMILIES, RULES, FakeService, listening, problem_response
from client.test_command_line import invoke

FOUND = CheckpointList(
    checkpoints=(
        CheckpointSummary(
            name="org/llama", family="llama", layers=30, tensors=272, bytes=269_060_552, faults=0, dtypes={"BF16": 272}
        ),
        CheckpointSummary(
            name="mixed", family=None, layers=None, tensors=9, bytes=5_000, faults=2, dtypes={"F32": 1, "F8_E4M3": 8}
        ),
    )
)


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "KEY", "DEVICE"):
        monkeypatch.delenv(f"GLASSBLOCK_{name}", raising=False)


def test_a_service_lists_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(FakeService({"GET /v1/checkpoints": FOUND})) as url:
        told = invoke(None, "checkpoints", "--url", url)
        monkeypatch.setenv("GLASSBLOCK_URL", url)
        listed = invoke(None, "checkpoints", "--format", "json")
    assert told.exit_code == 0, told.output
    lines = [line.split() for line in told.stdout.splitlines()]
    assert ["org/llama", "llama", "30", "269", "MB", "BF16"] in lines
    assert ["mixed", "unknown", "5", "kB", "F8_E4M3,", "F32", "2"] in lines
    assert CheckpointList.model_validate_json(listed.stdout) == FOUND


def test_a_list_that_is_not_whole_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        tiny_checkpoint("llama", tmp_path / name)
    assert "not whole" not in invoke(None, "checkpoints", tmp_path).stdout
    monkeypatch.setattr("glassblock.checkpoint.roots.MAX_LISTED", 1)
    told = invoke(None, "checkpoints", tmp_path).stdout
    assert "the list is not whole: after 1 checkpoints" in " ".join(told.split())


def test_an_older_service_tells_no_types() -> None:
    old = json.loads(FOUND.model_dump_json())
    del old["notes"]
    for row in old["checkpoints"]:
        del row["dtypes"]
    assert CheckpointList.model_validate(old).checkpoints[0].dtypes == {}


def test_a_folder_is_looked_under(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path / "models" / "one")
    tiny_checkpoint("gpt2", tmp_path / "two")
    told = invoke(None, "checkpoints", tmp_path, "--format", "json")
    assert told.exit_code == 0, told.output
    found = CheckpointList.model_validate_json(told.stdout).checkpoints
    assert {(row.name, row.family) for row in found} == {("models/one", "llama"), ("two", "gpt2")}
    assert all(row.dtypes == {"F32": row.tensors} for row in found)
    (tmp_path / "empty").mkdir()
    assert "no checkpoint" in invoke(None, "checkpoints", tmp_path / "empty").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing says where to look"),
        (("nowhere",), "nowhere is no folder"),
        (("nowhere", "--url", "http://127.0.0.1:1"), "DIR has no effect with --url"),
    ],
)
def test_what_says_nothing_or_two_things_is_usage(arguments: tuple[str, ...], words: str) -> None:
    refused = invoke(None, "checkpoints", *arguments)
    assert refused.exit_code == 2
    assert words in refused.stderr


def test_a_hint_asks_the_service_that_was_asked() -> None:
    def unknown(_: httpx.Request) -> httpx.Response:
        problem = {"code": "unknown-checkpoint", "title": "", "status": 404, "hint": "GET /v1/checkpoints lists them."}
        body = {"type": "about:blank", "detail": "there is no checkpoint 'x'", **problem}
        return httpx.Response(404, json=body, headers={"content-type": "application/problem+json"})

    with listening(FakeService({"POST /v1/audits": unknown})) as url:
        told = " ".join(invoke(FakeService({}), "audit", "x", "--url", url).stderr.split())
    assert f"`glassblock checkpoints --url {url}` lists them" in told


@pytest.mark.parametrize(
    ("arguments", "listed_by"),
    [
        (("audit", "x", "--rules", ","), "rules"),
        (("rules", "qqqq"), "rules"),
        (("families", "qqqq"), "families"),
        (("run", "x", "--layer", "0", "--sample", "1", "--family", "lama"), "families"),
    ],
)
def test_a_hint_lists_what_that_service_has(arguments: tuple[str, ...], listed_by: str) -> None:
    unknown = UnknownFamily("no family 'lama'", field="family", known=tuple(f"family{number}" for number in range(20)))
    answers = {
        "GET /v1/rules": RULES,
        "GET /v1/families": FAMILIES,
        "POST /v1/blocks/run": lambda _: problem_response(unknown, 409),
    }
    with listening(FakeService(answers)) as url:
        told = " ".join(invoke(None, *arguments, "--url", url).stderr.split())
    assert f"`glassblock {listed_by} --url {url}` lists them" in told


def test_a_hint_repeats_no_password() -> None:
    told = invoke(None, "audit", "x", "--rules", ",", "--url", "http://me:secret@127.0.0.1:9").stderr
    assert "`glassblock rules --url URL` lists them" in told
    assert "secret" not in told
