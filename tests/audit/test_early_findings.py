"""What is told early: what headers, index and config decide first, then what is not finite, by tensor."""

import math
import shutil
from pathlib import Path

import pytest
from glassblock.audit.audit import audit_checkpoint
from glassblock.audit.early_findings import HEADER_RULES, NON_FINITE
from glassblock.audit.question import AuditQuestion
from glassblock.audit.rules import RULES
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.wire.audits import Finding

from tests.plants import PLANTS, Plant, edit_entry, edit_json, healthy_checkpoint

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


DECIDED = HEADER_RULES | {name for name, rule in RULES.items() if rule.tells_before_tensors}
CASES = [pytest.param(plant, id=f"{rule}:{plant.label}") for rule, plants in PLANTS.items() for plant in plants]


def broken(plant: Plant, directory: Path) -> tuple[Path, AuditQuestion]:
    healthy = plant.healthy(directory / "healthy")
    shutil.copytree(healthy, directory / "checkpoint")
    plant.break_(directory / "checkpoint")
    reference = open_checkpoint(healthy) if plant.reference else None
    return directory / "checkpoint", AuditQuestion(against=plant.against, reference=reference)


@pytest.mark.parametrize("plant", CASES)
def test_what_is_told_before_the_first_tensor_stands(plant: Plant, tmp_path: Path) -> None:
    directory, question = broken(plant, tmp_path)
    early, _, findings = told(directory, question)
    before = [finding for finding, read in early if not read and finding.rule != NON_FINITE]
    assert all(finding in findings for finding in before if finding.rule in DECIDED)


@pytest.mark.parametrize("rule", sorted(DECIDED))
def test_what_needs_no_tensor_is_told_before_the_first(rule: str, tmp_path: Path) -> None:
    early: list[str] = []
    for number, plant in enumerate(PLANTS[rule]):
        directory, question = broken(plant, tmp_path / str(number))
        reading: list[bool] = []
        audit_checkpoint(
            directory,
            question,
            progress=lambda _done, _total, _what, reading=reading: reading.append(True),
            found=lambda finding, reading=reading: early.extend([] if reading else [finding.rule]),
        )
    assert rule in early


def test_a_width_that_may_be_padded_is_told_when_all_was_read(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_json("config.json", intermediate_size=100)(tmp_path)
    early, total, findings = told(tmp_path)
    assert {read for finding, read in early if finding.rule == "config/shape"} == {total}
    assert {finding.rule for finding in findings} == {"config/shape"}


def test_findings_of_one_rule_and_file_are_told_each(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_json("config.json", num_attention_heads=-1, num_key_value_heads="two")(tmp_path)
    early, _, findings = told(tmp_path)
    assert len({finding.message for finding in findings}) == len(findings) > 1
    assert sorted(finding.message for finding, _ in early) == sorted(finding.message for finding in findings)
