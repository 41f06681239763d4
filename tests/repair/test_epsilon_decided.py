"""An epsilon is set where a third source bears one of two out, and nowhere else."""

from pathlib import Path
from typing import Any

import pytest
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.fix import Unrepaired
from glassblock.audit.fixes import repair_of
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.patches import Declare
from glassblock.operations.repairs import Outputs, repair
from glassblock.operations.selftests import selftest
from glassblock.operations.store import CheckpointStore
from glassblock.wire.audits import Finding
from glassblock.wire.repairs import RepairRequest
from glassblock.wire.selftests import SelftestRequest
from makers import tiny_checkpoint
from plants import edit_json, healthy_checkpoint

RULE = "config/eps-conflict"
TRUE, WRONG = 1e-5, 1e-6
NESTED = {"text_config": {"rms_norm_eps": TRUE}}


def said(_done: int, _total: int, _what: str) -> None:
    pass


def found(directory: Path, question: AuditQuestion, rule: str = RULE) -> list[Finding]:
    return [finding for finding in audit_checkpoint(directory, question).findings if finding.rule == rule]


def two_levels(directory: Path, *, outer: float, inner: float) -> Path:
    """The language model's own entry, which the family reads, and another one outside of it."""
    checkpoint = healthy_checkpoint("llama", directory)
    config = {"rms_norm_eps": outer, "text_config": {"model_type": "llama", "rms_norm_eps": inner}}
    edit_json("config.json", **config)(checkpoint)
    return checkpoint


def test_another_engines_config_decides_between_two_of_ones_own(tmp_path: Path) -> None:
    checkpoint = two_levels(tmp_path / "model", outer=TRUE, inner=WRONG)
    undecided = found(checkpoint, AuditQuestion())
    assert all("decided" not in finding.evidence for finding in undecided)
    assert undecided
    asked = AuditQuestion(against={"rms_norm_eps": TRUE}, against_name="training.json")
    (own,) = [finding for finding in found(checkpoint, asked) if finding.level == "warning"]
    assert own.evidence["decided"] == TRUE
    assert own.evidence["decided_key"] == "text_config.rms_norm_eps"
    assert "training.json" in own.evidence["decided_by"]
    assert repair_of(open_checkpoint(checkpoint), own) == (Declare("text_config.rms_norm_eps", TRUE),)


def test_a_witness_for_neither_decides_nothing(tmp_path: Path) -> None:
    checkpoint = two_levels(tmp_path / "model", outer=TRUE, inner=WRONG)
    asked = AuditQuestion(against={"rms_norm_eps": 1e-3}, against_name="training.json")
    assert all("decided" not in finding.evidence for finding in found(checkpoint, asked))


def test_an_engine_does_not_speak_for_itself(tmp_path: Path) -> None:
    checkpoint = healthy_checkpoint("llama", tmp_path / "model")
    (finding,) = found(checkpoint, AuditQuestion(against={"rms_norm_eps": WRONG}))
    assert (finding.level, "decided" in finding.evidence) == ("error", False)
    assert isinstance(repair_of(open_checkpoint(checkpoint), finding), Unrepaired)


def test_a_reference_of_the_same_model_decides_and_is_told(tmp_path: Path) -> None:
    original = healthy_checkpoint("llama", tmp_path / "original")
    converted = healthy_checkpoint("llama", tmp_path / "converted")
    edit_json("config.json", rms_norm_eps=WRONG)(converted)
    reference = open_checkpoint(original)
    (finding,) = found(converted, AuditQuestion(reference=reference, reference_name="original"))
    assert (finding.level, finding.certainty) == ("error", "conflict")
    assert (finding.evidence["decided"], finding.evidence["decided_key"]) == (TRUE, "rms_norm_eps")
    assert found(original, AuditQuestion(reference=reference)) == []


def test_a_reference_that_is_another_model_decides_nothing(tmp_path: Path) -> None:
    other = tiny_checkpoint("llama", tmp_path / "other", config={"rms_norm_eps": WRONG}, seed=5)
    checkpoint = healthy_checkpoint("llama", tmp_path / "model")
    assert found(checkpoint, AuditQuestion(reference=open_checkpoint(other))) == []


@pytest.mark.parametrize(
    "told",
    [
        {"rms_norm_eps": WRONG, "num_hidden_layers": 99},
        {"rms_norm_eps": WRONG, "hidden_size": 4096},
        {"rms_norm_eps": WRONG, "model_type": "gpt2"},
    ],
)
def test_a_config_that_errs_about_the_model_decides_nothing(told: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = two_levels(tmp_path / "model", outer=WRONG, inner=TRUE)
    findings = found(checkpoint, AuditQuestion(against=told))
    assert findings
    assert all("decided" not in finding.evidence for finding in findings)


def test_the_checkpoint_is_no_witness_for_itself(tmp_path: Path) -> None:
    checkpoint = two_levels(tmp_path / "model", outer=WRONG, inner=TRUE)
    config = open_checkpoint(checkpoint).config
    assert config is not None
    for asked in (AuditQuestion(against=dict(config.values)), AuditQuestion(reference=open_checkpoint(checkpoint))):
        findings = found(checkpoint, asked)
        assert findings
        assert all("decided" not in finding.evidence for finding in findings)


def test_a_default_of_another_config_bears_nothing_out(tmp_path: Path) -> None:
    silent = healthy_checkpoint("llama", tmp_path / "silent", config={"rms_norm_eps": ...})
    sizes = {"model_type": "llama", "hidden_size": 48}
    (finding,) = found(silent, AuditQuestion(against=sizes), "config/eps-defaulted")
    assert isinstance(repair_of(open_checkpoint(silent), finding), Unrepaired)


@pytest.mark.parametrize("third", [TRUE, 1e-3])
def test_a_reference_that_another_source_contradicts_decides_nothing(third: float, tmp_path: Path) -> None:
    other = healthy_checkpoint("llama", tmp_path / "other", config={"rms_norm_eps": WRONG})
    checkpoint = healthy_checkpoint("llama", tmp_path / "model")
    asked = AuditQuestion(reference=open_checkpoint(other), against={"rms_norm_eps": third})
    findings = found(checkpoint, asked)
    assert findings
    assert all(isinstance(repair_of(open_checkpoint(checkpoint), finding), Unrepaired) for finding in findings)


@pytest.mark.parametrize("witness", ["against", "reference"])
def test_a_default_that_is_borne_out_is_declared(witness: str, tmp_path: Path) -> None:
    original = healthy_checkpoint("llama", tmp_path / "original", config={"rms_norm_eps": WRONG})
    silent = healthy_checkpoint("llama", tmp_path / "silent", config={"rms_norm_eps": ...})
    questions: dict[str, AuditQuestion] = {
        "against": AuditQuestion(against={"rms_norm_eps": WRONG}),
        "reference": AuditQuestion(reference=open_checkpoint(original), reference_name="original"),
    }
    (alone,) = found(silent, AuditQuestion(), "config/eps-defaulted")
    assert isinstance(repair_of(open_checkpoint(silent), alone), Unrepaired)
    (finding,) = found(silent, questions[witness], "config/eps-defaulted")
    assert repair_of(open_checkpoint(silent), finding) == (Declare("rms_norm_eps", WRONG),)


def test_fix_takes_the_other_engines_config(tmp_path: Path) -> None:
    two_levels(tmp_path / "model", outer=TRUE, inner=WRONG)
    store = CheckpointStore([tmp_path])
    request = RepairRequest(
        checkpoint="model", output="repaired", against={"rms_norm_eps": TRUE}, against_name="training.json"
    )
    outputs = Outputs(tmp_path / "out")
    (tmp_path / "out").mkdir()
    answer = repair(store, request, outputs=outputs, progress=said, cancelled=lambda: False)
    assert [step.rule for step in answer.steps if step.rule == RULE]
    assert [finding for finding in answer.after.findings if finding.rule == RULE] == []
    config: Any = open_checkpoint(tmp_path / "out" / "repaired").config
    assert config.values["text_config"]["rms_norm_eps"] == TRUE


def own_row() -> dict[str, Any]:
    """A family of one's own: llama under another model type."""
    return {"name": "mine", "like": "llama", "model_types": ["mine"]}


def test_fix_and_selftest_take_a_family_of_ones_own(tmp_path: Path) -> None:
    checkpoint = healthy_checkpoint("llama", tmp_path / "model")
    edit_json("config.json", model_type="mine", architectures=["MineForCausalLM"])(checkpoint)
    store = CheckpointStore([tmp_path])
    told = selftest(
        store,
        SelftestRequest(checkpoint="model", family_row=own_row(), rules=("tensor/non-finite",), digest="none"),
        progress=said,
        cancelled=lambda: False,
    )
    assert told.family == "mine"
    answer = repair(
        store,
        RepairRequest(checkpoint="model", family_row=own_row(), dry_run=True, digest="sha256"),
        outputs=Outputs(),
        progress=said,
        cancelled=lambda: False,
    )
    assert answer.before.checkpoint.family == "mine"
