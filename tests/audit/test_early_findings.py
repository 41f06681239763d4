"""What is told early: what headers and index decide first, then numbers that are not finite, with their tensor."""

import math
from pathlib import Path

from glassblock.audit.audit import audit_checkpoint
from glassblock.audit.early_findings import NON_FINITE
from glassblock.audit.question import AuditQuestion
from glassblock.wire.audits import Finding

from tests.plants import edit_entry, healthy_checkpoint

DOWN = "model.layers.{}.mlp.down_proj.weight"


def told(
    directory: Path, question: AuditQuestion | None = None
) -> tuple[list[tuple[Finding, int]], int, tuple[Finding, ...]]:
    """Each finding with the bytes that had been read when it was told, the bytes in all, and those of the report."""
    told: list[tuple[Finding, int]] = []
    read = total = 0

    def progress(done: int, in_all: int, _what: str) -> None:
        nonlocal read, total
        read, total = done, in_all

    report = audit_checkpoint(
        directory, question, progress=progress, found=lambda finding: told.append((finding, read))
    )
    return told, total, report.findings


def test_a_tensor_that_is_not_finite_is_told_when_it_was_read(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    for layer in (0, 1):
        edit_entry(DOWN.format(layer), (0, 0), math.nan)(tmp_path)
    early, total, findings = told(tmp_path)
    assert [(finding.rule, finding.layer) for finding, _ in early[:2]] == [(NON_FINITE, 0), (NON_FINITE, 1)]
    assert early[0][1] < early[1][1] < total
    assert all(finding.locations for finding, _ in early[:2])
    # The report names both in one.
    (both,) = (finding for finding in findings if finding.rule == NON_FINITE)
    assert both.tensors == (DOWN.format(0), DOWN.format(1))


def test_only_where_its_rule_is_asked(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_entry(DOWN.format(0), (0, 0), math.inf)(tmp_path)
    early, _, findings = told(tmp_path, AuditQuestion(rules=("norm/role",)))
    assert early == []
    assert findings == ()


def test_one_tensor_alone_is_told_once(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_entry(DOWN.format(1), (0, 0), math.inf)(tmp_path)
    early, _, findings = told(tmp_path)
    assert [finding for finding, _ in early if finding.rule == NON_FINITE] == list(findings)
