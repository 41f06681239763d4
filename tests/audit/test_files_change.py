"""Files that change, come short or fail under a running audit: never a pass, and one answer for each cause."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.rules import RULES
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.errors import DamagedCheckpoint
from glassblock.wire.audits import Report
from makers import REPRESENTATIVES, Tiny
from plants import SHARDS, SINGLE, healthy_checkpoint, put
from safetensors.torch import load_file


def opened(directory: Path, family: str = "llama", *, shards: int = 1) -> Checkpoint:
    return open_checkpoint(healthy_checkpoint(family, directory, shards=shards))


def at_last(change: Callable[[], object]) -> Callable[[int, int, str], None]:
    """A progress that changes the files once every tensor has been read."""
    return lambda _done, _total, message: (change() if message == "judging" else None) and None


def told(report: Report) -> list[tuple[str, str, str, str | None]]:
    return [(finding.rule, finding.level, finding.certainty, finding.file) for finding in report.findings]


@pytest.mark.parametrize("family", REPRESENTATIVES)
@pytest.mark.parametrize("kept", [0.0, 1 / 3, 0.9])
def test_a_file_that_is_cut_is_one_error(family: str, kept: float, tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, family)
    path = tmp_path / SINGLE
    left = int(path.stat().st_size * kept)
    os.truncate(path, left)
    report = audit_checkpoint(checkpoint)
    assert report.verdict == "fail"
    assert told(report) == [("container/truncated", "error", "proved", SINGLE)]
    (finding,) = report.findings
    assert finding.byte == left
    lost = [entry for entry in checkpoint.entries.values() if entry.stop > left]
    assert f"{len(lost)} of {len(checkpoint.entries)} tensors" in finding.message
    assert min(lost, key=lambda entry: entry.start).name in finding.message
    (values,) = (entry for entry in report.coverage if entry.rule == "tensor/non-finite")
    assert (values.checked, len(values.skipped)) == (0, len(checkpoint.entries))


def test_one_shard_that_is_cut_leaves_the_others_looked_at(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, shards=3)
    os.truncate(tmp_path / SHARDS[1], 1000)
    report = audit_checkpoint(checkpoint)
    assert told(report) == [("container/truncated", "error", "proved", SHARDS[1])]
    (values,) = (entry for entry in report.coverage if entry.rule == "tensor/non-finite")
    lost = len(checkpoint.containers[SHARDS[1]].entries)
    assert (values.checked, len(values.skipped)) == (len(checkpoint.entries) - lost, lost)


def test_a_cut_after_the_last_byte_was_read_is_told_too(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path)
    report = audit_checkpoint(checkpoint, progress=at_last(lambda: os.truncate(tmp_path / SINGLE, 5000)))
    assert (told(report), report.verdict) == ([("container/truncated", "error", "proved", SINGLE)], "fail")


def test_a_file_that_was_cut_already_is_no_second_finding(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    os.truncate(tmp_path / SINGLE, 200_000)
    checkpoint = open_checkpoint(tmp_path)
    os.truncate(tmp_path / SINGLE, 100_000)
    assert told(audit_checkpoint(checkpoint)) == [("container/truncated", "error", "proved", SINGLE)]


def _replaced(path: Path) -> None:
    other = path.with_name("other")
    shutil.copyfile(path, other)
    other.replace(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "replaced by the same": _replaced,
    "touched": lambda path: os.utime(path, ns=(0, 0)),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "shorter and replaced": lambda path: (os.truncate(path, 5000), _replaced(path)),
    "removed": Path.unlink,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_that_is_another_one_ends_the_audit(change: Callable[[Path], object], when: str, tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, shards=3)
    path = tmp_path / SHARDS[1]
    progress = at_last(lambda: change(path))
    if when == "before":
        change(path)
        progress = at_last(lambda: None)
    with pytest.raises(DamagedCheckpoint, match="while it was audited") as caught:
        audit_checkpoint(checkpoint, progress=progress)
    assert caught.value.file == SHARDS[1]
    assert caught.value.hint


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int, int], None]:
    """Make the disk refuse every read that touches some bytes of a file."""
    real = os.preadv
    bad: list[tuple[int, int, int]] = []

    def preadv(descriptor: int, buffers: list[Any], offset: int) -> int:
        inode = os.fstat(descriptor).st_ino
        for refused, start, stop in bad:
            if inode == refused and offset < stop and start < offset + sum(len(buffer) for buffer in buffers):
                raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return lambda path, start, stop: bad.append((path.stat().st_ino, start, stop))


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.norm.weight",
    ],
)
def test_a_tensor_that_the_disk_refuses_is_one_error(
    name: str, tmp_path: Path, disk: Callable[[Path, int, int], None]
) -> None:
    checkpoint = opened(tmp_path)
    entry = checkpoint.entries[name]
    disk(entry.file, entry.start, entry.stop)
    report = audit_checkpoint(checkpoint)
    assert (told(report), report.verdict) == ([("container/truncated", "error", "proved", SINGLE)], "fail")
    (finding,) = report.findings
    assert name in finding.message
    assert "Input/output error" in finding.message
    (values,) = (entry for entry in report.coverage if entry.rule == "tensor/non-finite")
    assert (values.checked, len(values.skipped)) == (len(checkpoint.entries) - 1, 1)


def test_many_tensors_of_a_failing_file_are_one_error(tmp_path: Path, disk: Callable[[Path, int, int], None]) -> None:
    checkpoint = opened(tmp_path, shards=3)
    disk(tmp_path / SHARDS[0], 0, 1 << 40)
    (finding,) = audit_checkpoint(checkpoint).findings
    lost = len(checkpoint.containers[SHARDS[0]].entries)
    assert f"and {lost - 1} more could not be read" in finding.message


def test_a_copy_that_the_disk_refuses_is_one_error(tmp_path: Path, disk: Callable[[Path, int, int], None]) -> None:
    name = "model.embed_tokens.weight"
    healthy_checkpoint("llama", tmp_path, shards=3)
    put(name, load_file(tmp_path / SHARDS[0])[name], SHARDS[2])(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    _, copy = checkpoint.duplicates[name]
    disk(copy.file, copy.start, copy.stop)
    report = audit_checkpoint(checkpoint)
    assert told(report) == [("container/truncated", "error", "proved", SHARDS[2])]


def test_half_an_embedding_weighs_no_epsilon(tmp_path: Path, disk: Callable[[Path, int, int], None]) -> None:
    healthy_checkpoint("llama", tmp_path, tiny=Tiny(vocab=12_000))  # longer than one piece of 2 MiB
    checkpoint = open_checkpoint(tmp_path)
    entry = checkpoint.entries["model.embed_tokens.weight"]
    disk(entry.file, entry.stop - 4, entry.stop)
    report = audit_checkpoint(checkpoint, AuditQuestion(against={"rms_norm_eps": 1e-6}))
    (conflict,) = (finding for finding in report.findings if finding.rule == "config/eps-conflict")
    assert conflict.evidence["sensitivity"] is None


@pytest.mark.parametrize("rule", sorted(RULES.keys() - {"container/truncated"}))
def test_a_question_without_the_rule_that_tells_it_is_no_pass(rule: str, tmp_path: Path) -> None:
    checkpoint = opened(tmp_path)
    os.truncate(tmp_path / SINGLE, 5000)
    with pytest.raises(DamagedCheckpoint, match="was cut while it was audited"):
        audit_checkpoint(checkpoint, AuditQuestion(rules=(rule,)))
