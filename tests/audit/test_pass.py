"""The pass over the files: every byte once, bounded, told and stopped between tensors, the same every time."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from glassblock.audit.audit import AuditCancelled, AuditQuestion, audit_checkpoint
from glassblock.audit.rules import RULES
from glassblock.checkpoint import reading
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.errors import InvalidValue, UnknownFamily
from makers import REPRESENTATIVES, Tiny, tiny_checkpoint, write_container
from plants import PLANTS, edit_json, healthy_checkpoint

Spans = list[tuple[str, int, int]]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """(file, start, stop) of every read of tensor data."""
    spans: Spans = []
    real: Callable[..., int] = reading.fill

    def counted(descriptor: int, target: memoryview, offset: int, *, name: str) -> int:
        spans.append((name, offset, offset + len(target)))
        return real(descriptor, target, offset, name=name)

    monkeypatch.setattr(reading, "fill", counted)
    return spans


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_every_byte_of_every_tensor_is_read_once(family: str, shards: int, tmp_path: Path, spans: Spans) -> None:
    audit_checkpoint(healthy_checkpoint(family, tmp_path, shards=shards))
    files = {path.name: path for path in tmp_path.glob("*.safetensors")}
    for name, path in files.items():
        size = path.stat().st_size
        reached = 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
        for start, stop in sorted((start, stop) for file, start, stop in spans if file == name):
            assert start == reached
            reached = stop
        assert reached == size


def test_only_the_projections_of_one_layer_are_held_whole(tmp_path: Path, spans: Spans) -> None:
    """A vocabulary of 20 MiB goes by in buffers of 6 MiB."""
    healthy_checkpoint("llama", tmp_path, tiny=Tiny(vocab=110_000))
    audit_checkpoint(tmp_path)
    assert max(stop - start for _, start, stop in spans) <= 6 << 20


def test_progress_is_told_before_each_step_and_ends_at_the_total(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(healthy_checkpoint("llama", tmp_path))
    told: list[tuple[int, int, str]] = []
    audit_checkpoint(checkpoint, progress=lambda done, total, message: told.append((done, total, message)))
    assert told[0][0] == 0
    assert told[-1][:2] == (checkpoint.bytes, checkpoint.bytes)
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert {"layer 0", "layer 1", "model.embed_tokens.weight"} <= {message for _, _, message in told}


@pytest.mark.parametrize("step", [0, 1, 7])
def test_it_stops_where_it_is_told_to(step: int, tmp_path: Path, spans: Spans) -> None:
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > step

    with pytest.raises(AuditCancelled):
        audit_checkpoint(healthy_checkpoint("llama", tmp_path), cancelled=cancelled)
    assert asked == step + 1
    assert bool(spans) == bool(step)


def test_the_same_files_give_the_same_report_byte_for_byte(tmp_path: Path) -> None:
    directory = healthy_checkpoint("phi3", tmp_path / "model")
    (plant,) = PLANTS["ffn/fused-order"]
    plant.break_(directory)
    question = AuditQuestion(against={"norm_eps": 1e-6}, certify=True)
    first, second = (audit_checkpoint(directory, question).model_dump_json() for _ in range(2))
    assert first == second


def test_the_report_calls_the_checkpoint_as_it_is_told_to(tmp_path: Path) -> None:
    directory = healthy_checkpoint("llama", tmp_path / "model")
    assert audit_checkpoint(directory).checkpoint.path == "model"
    assert audit_checkpoint(directory, name="zoo/model").checkpoint.path == "zoo/model"


def test_a_report_is_plain_json(tmp_path: Path) -> None:
    report = audit_checkpoint(tiny_checkpoint("llama", tmp_path, tiny=Tiny(layers=1)))
    assert json.loads(report.model_dump_json())["schema_version"] == "1"


def test_named_rules_alone_are_applied_in_the_order_of_the_table(tmp_path: Path) -> None:
    question = AuditQuestion(rules=("tensor/non-finite", "container/header"))
    report = audit_checkpoint(healthy_checkpoint("llama", tmp_path), question)
    assert [entry.rule for entry in report.coverage] == ["container/header", "tensor/non-finite"]


def test_rules_left_out_do_not_make_a_verdict_inconclusive(tmp_path: Path) -> None:
    report = audit_checkpoint(tiny_checkpoint("llama", tmp_path), AuditQuestion(rules=("tensor/non-finite",)))
    assert report.verdict == "pass"


def test_an_unknown_rule_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="ffn/nonsense") as caught:
        audit_checkpoint(healthy_checkpoint("llama", tmp_path), AuditQuestion(rules=("ffn/nonsense",)))
    assert caught.value.known == tuple(RULES)


def test_a_family_can_be_named_where_there_is_no_config(tmp_path: Path) -> None:
    directory = healthy_checkpoint("llama", tmp_path)
    (directory / "config.json").unlink()
    report = audit_checkpoint(directory, AuditQuestion(family="llama"))
    assert report.verdict == "pass"
    assert {finding.rule for finding in report.findings} == {"config/eps-defaulted"}
    with pytest.raises(UnknownFamily):
        audit_checkpoint(directory, AuditQuestion(family="llamax"))


def test_without_a_family_the_rest_is_still_audited(tmp_path: Path) -> None:
    directory = healthy_checkpoint("llama", tmp_path)
    edit_json("config.json", model_type="llamax")(directory)
    report = audit_checkpoint(directory)
    coverage = {entry.rule: entry for entry in report.coverage}
    assert report.checkpoint.family is None
    assert coverage["tensor/non-finite"].checked == report.checkpoint.tensors
    assert "llamax" in coverage["ffn/gate-up-swapped"].skipped[0].reason
    assert "llamax" in coverage["config/eps-conflict"].skipped[0].reason
    assert "known" in report.findings[0].evidence
    assert set(ARCHITECTURES) == set(report.findings[0].evidence["known"])


def test_a_claim_of_a_terabyte_costs_nothing(tmp_path: Path) -> None:
    rows = 2**40 // 4
    header = {"model.layers.0.mlp.down_proj.weight": {"dtype": "F32", "shape": [rows], "data_offsets": [0, 4 * rows]}}
    path = write_container(tmp_path / "model.safetensors", header, bytes(64))
    report = audit_checkpoint(path, AuditQuestion(family="llama"))
    assert "container/truncated" in {finding.rule for finding in report.findings}


def test_aliases_do_not_multiply_the_bytes_read(tmp_path: Path, spans: Spans) -> None:
    entry = {"dtype": "F32", "shape": [4096], "data_offsets": [0, 4 * 4096]}
    header = {f"alias.{number}": entry for number in range(500)}
    audit_checkpoint(write_container(tmp_path / "model.safetensors", header, bytes(4 * 4096)))
    assert sum(stop - start for _, start, stop in spans) == 4 * 4096


def test_an_empty_container_is_no_crash(tmp_path: Path) -> None:
    report = audit_checkpoint(write_container(tmp_path / "model.safetensors", {}))
    assert report.checkpoint.tensors == 0
    assert report.verdict == "fail"
