"""Every rule finds its plants and nothing else; every healthy family is silent."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.rules import RULES
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.wire.audits import Finding, Report
from makers import REPRESENTATIVES, asked
from plants import PLANTS, Plant, healthy_checkpoint

CAPTURES_ONLY = {"norm/eps-mismatch"}
"""Rules that nothing in a checkpoint decides: they say what would."""
BIASES_OPEN = {"olmo_ai2": {"ffn/fused-order"}}
"""Families with biases of gate and up, whose order no weight tells, and the rule that says so."""
CASES = [pytest.param(rule, plant, id=f"{rule}:{plant.label}") for rule, plants in PLANTS.items() for plant in plants]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Plant], Path]:
    """The checkpoint that a plant breaks, made and found healthy once for all plants that share it."""
    made: dict[str, Path] = {}

    def of(plant: Plant) -> Path:
        key = repr((plant.family, plant.shards, plant.config, plant.tiny, sorted(plant.tensors)))
        if key not in made:
            made[key] = plant.healthy(tmp_path_factory.mktemp("healthy"))
            report = audit_checkpoint(made[key])
            assert (loud(report), report.verdict) == ([], "pass")
        return made[key]

    return of


def loud(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.level != "note"]


def test_every_rule_has_its_plants_and_every_plant_its_rule() -> None:
    assert PLANTS.keys() == RULES.keys() - CAPTURES_ONLY
    assert all(PLANTS.values())


@pytest.mark.parametrize(("rule", "plant"), CASES)
def test_a_plant_is_found_and_nothing_else(
    rule: str, plant: Plant, healthy: Callable[[Plant], Path], tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(healthy(plant), directory)
    plant.break_(directory)
    reference = open_checkpoint(healthy(plant)) if plant.reference else None
    question = AuditQuestion(against=plant.against, against_name="other.json", reference=reference)
    report = audit_checkpoint(directory, question)
    found = [finding for finding in report.findings if finding.rule == rule]
    others = [finding for finding in loud(report) if finding.rule != rule]
    assert others == []
    assert len(found) == 1, [finding.message for finding in found]
    (finding,) = found
    assert (finding.level, finding.certainty, finding.layer) == (plant.level, plant.certainty, plant.layer)
    for culprit in plant.culprits:
        assert culprit in finding.message, finding.message
    assert report.verdict == ("fail" if plant.level == "error" else "pass")
    assert str(tmp_path) not in report.model_dump_json()


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_healthy_checkpoint_of_every_family_is_silent(family: str, tmp_path: Path) -> None:
    directory = healthy_checkpoint(family, tmp_path / family)
    told: list[Finding] = []
    report = audit_checkpoint(directory, AuditQuestion(family=asked(family)), found=told.append)
    assert report.findings == ()
    assert told == []
    said = {entry.rule for entry in report.coverage if entry.checked or entry.undecidable or entry.skipped}
    assert said == RULES.keys()
    # Experts of random weights have no direction in common, by which a gate is known: nothing can be said of those.
    assert report.verdict in {"pass", "inconclusive"}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_every_rule_looks_at_a_healthy_checkpoint(family: str, shards: int, tmp_path: Path) -> None:
    report = audit_checkpoint(healthy_checkpoint(family, tmp_path / family, shards=shards))
    assert report.findings == ()
    assert report.verdict == "pass"
    assert [entry.rule for entry in report.coverage] == list(RULES)
    undecidable = {entry.rule: entry.undecidable for entry in report.coverage if entry.undecidable}
    assert undecidable.keys() == CAPTURES_ONLY | BIASES_OPEN.get(family, set())
    assert all("captured" in one.would_decide for entries in undecidable.values() for one in entries)
    checked = {entry.rule: entry.checked for entry in report.coverage}
    assert checked["tensor/non-finite"] == report.checkpoint.tensors
    gated = {"ffn/gate-up-swapped", "ffn/fused-order"} & {rule for rule, count in checked.items() if count}
    network = ARCHITECTURES[family].feed_forward
    assert gated == ({"ffn/fused-order" if network.fused else "ffn/gate-up-swapped"} if network.gated else set())
