"""Repairs and self-tests as the service answers them: what it may write, and where."""

from pathlib import Path

import httpx
import pytest
from glassblock.api.app import create_app
from glassblock.api.entry import in_process
from glassblock.api.settings import Settings
from glassblock.audit.mistakes import Mistake
from glassblock.errors import AccessRefused, InvalidValue
from glassblock.operations.selftests import why_unnoticed
from glassblock.wire.audits import Coverage, Skipped
from glassblock_client import Client
from plants import SINGLE, edit_tensors, healthy_checkpoint, rename

GATE, UP = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    healthy_checkpoint("llama", tmp_path / "roots" / "swapped")
    rename(GATE, UP)(tmp_path / "roots" / "swapped")
    (tmp_path / "outputs").mkdir()
    return tmp_path / "roots"


def served(root: Path, output_root: Path | None) -> Settings:
    return Settings(roots=(root,), device="cpu", output_root=output_root)


def test_a_dry_run_writes_nothing_and_tells_the_patch(root: Path) -> None:
    with in_process(create_app(served(root, None))) as transport:
        answer = Client("http://glassblock", transport=transport).repair("swapped", dry_run=True)
    (step,) = answer.steps
    assert (step.rule, step.layer) == ("ffn/gate-up-swapped", 1)
    assert [edit.kind for edit in step.edits] == ["rename"]
    assert {GATE, UP} == set(step.edits[0].tensors)
    assert (answer.before.verdict, answer.after.verdict, answer.header_only) == ("fail", "pass", True)
    assert answer.written is None
    assert sorted(path.name for path in root.parent.rglob("*") if path.is_file()) == ["config.json", SINGLE]


def test_without_an_output_root_nothing_is_written(root: Path) -> None:
    with in_process(create_app(served(root, None))) as transport:
        client = Client("http://glassblock", transport=transport)
        with pytest.raises(AccessRefused, match="writes no checkpoints") as refused:
            client.repair("swapped", output="repaired")
        assert "GLASSBLOCK_OUTPUT_ROOT" in (refused.value.hint or "")
        with pytest.raises(InvalidValue, match="not said where to write: neither `output` nor `dry_run`") as unsaid:
            client.repair("swapped")
        assert unsaid.value.field == "output"


def test_a_repair_is_written_under_the_output_root_alone(root: Path, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    with in_process(create_app(served(root, outputs))) as transport:
        client = Client("http://glassblock", transport=transport)
        answer = client.repair("swapped", output="repaired")
        assert (answer.written, answer.after.verdict, answer.after.findings) == ("repaired", "pass", ())
        assert sorted(path.name for path in (outputs / "repaired").iterdir()) == ["config.json", SINGLE]
        with pytest.raises(InvalidValue, match="is there already"):
            client.repair("swapped", output="repaired")
        for name in ("../elsewhere", "a/b", "..", "/tmp/x"):
            with pytest.raises(InvalidValue, match="no plain name"):
                client.repair("swapped", output=name)
        # A change in place is no field of the message.
        http = httpx.Client(base_url="http://glassblock", transport=transport)
        assert http.post("/v1/repairs", json={"checkpoint": "swapped", "in_place": True}).status_code == 422
    assert sorted(path.name for path in outputs.iterdir()) == ["repaired"]


def test_a_selftest_tells_every_mistake_and_writes_nothing(root: Path) -> None:
    healthy_checkpoint("phi3", root / "fused", shards=3)
    before = sorted(root.rglob("*"))
    with in_process(create_app(served(root, None))) as transport:
        client = Client("http://glassblock", transport=transport)
        answer = client.selftest("fused")
        some = client.selftest("fused", rules=["tensor/non-finite"], layers=[0])
        with pytest.raises(InvalidValue, match="no layer 9"):
            client.selftest("fused", layers=[9])
        with pytest.raises(InvalidValue, match="no rule 'x'"):
            client.selftest("fused", rules=["x"])
    told = {mistake.mistake: mistake for mistake in answer.mistakes}
    assert (answer.healthy, answer.layers) == ((), (0, 1))
    for name in ("swap", "swap-everywhere", "interleaved", "nan", "infinity", "truncated", "no-shard", "no-tensor"):
        assert told[name].outcome == "found", told[name]
    assert told["swap-everywhere"].fired == ("ffn/fused-order",)
    assert told["swap-everywhere"].named == (0, 1)
    assert told["square-transposed"].outcome != "found"  # of one file alone nobody can tell
    assert [mistake.mistake for mistake in some.mistakes] == ["nan", "infinity"]
    assert [mistake.outcome for mistake in some.mistakes] == ["found", "found"]
    assert sorted(root.rglob("*")) == before


def test_what_is_not_found_has_a_reason(root: Path) -> None:
    healthy_checkpoint("llama", root / "plain")
    with in_process(create_app(served(root, None))) as transport:
        answer = Client("http://glassblock", transport=transport).selftest("plain")
    told = {mistake.mistake: mistake for mistake in answer.mistakes}
    silent = {name: one for name, one in told.items() if one.outcome in ("not-found", "undecidable")}
    assert all(one.reason for one in silent.values()), silent
    for name in ("offset-taken", "float16"):
        assert told[name].outcome == "not-found"
        assert "no other engine's config, no reference" in str(told[name].reason)
    assert told["layer-twice"].outcome == "found"  # also where it is then over all others


UNUSED = Mistake("lost", "what nobody looks for", ("no/such-rule",), lambda _checkpoint, _layers: "")
COVERED: dict[str, tuple[tuple[Coverage, ...], str]] = {
    "no rule": ((), "no rule of this version looks for it"),
    "not looked at": ((Coverage(rule="a/b", checked=0, skipped=(Skipped(reason="no index"),)),), "no index"),
    "looked, and another rule not": (
        (Coverage(rule="a/b", checked=0, skipped=(Skipped(reason="not fused"),)), Coverage(rule="c/d", checked=3)),
        "nothing that c/d looks at tells it",
    ),
    "looked, and could with more": (
        (Coverage(rule="a/b", checked=3, skipped=(Skipped(reason="no reference"),)),),
        "no reference",
    ),
}


@pytest.mark.parametrize("case", COVERED)
def test_which_reason_it_has(case: str) -> None:
    meant, reason = COVERED[case]
    assert why_unnoticed(UNUSED, meant, ()) == ("not-found", reason)


def test_a_note_that_was_there_with_other_numbers_is_no_find(root: Path) -> None:
    healthy_checkpoint("gemma3", root / "offset")
    edit_tensors(
        lambda tensors: tensors.update(
            {name: (gain / 10 + 0.3).bfloat16() for name, gain in tensors.items() if "norm" in name}
        )
    )(root / "offset")
    with in_process(create_app(served(root, None))) as transport:
        answer = Client("http://glassblock", transport=transport).selftest("offset")
    assert "norm/precision" in answer.healthy
    told = {mistake.mistake: mistake for mistake in answer.mistakes}
    for name in ("offset-added", "offset-taken"):
        assert told[name].planted
        assert "norm/precision" not in told[name].fired


def test_mistakes_that_were_there_before_are_not_counted_as_found(root: Path) -> None:
    with in_process(create_app(served(root, None))) as transport:
        answer = Client("http://glassblock", transport=transport).selftest("swapped", rules=["ffn/gate-up-swapped"])
    assert answer.healthy == ("ffn/gate-up-swapped",)
    told = {mistake.mistake: mistake for mistake in answer.mistakes}
    # Exchanged once more, layer 1 is as it should be: only layer 0 is named.
    assert (told["swap-everywhere"].outcome, told["swap-everywhere"].named) == ("found-in-part", (0,))
