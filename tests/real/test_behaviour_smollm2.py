"""A paragraph of English as a witness on SmolLM2: silent on the healthy model, and exact about each mistake planted."""

from typing import Any

import pytest
import torch
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.gate_fixes import swap_of
from glassblock.checkpoint.changes import Add, Cast
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.patches import Alter, Declare, Edit, patched
from glassblock.wire.audits import Report
from glassblock.wire.behaviour import Behaviour, BehaviourHypothesis
from tokenizers import Tokenizer
from torch import Tensor

from real.conftest import PARAGRAPH

pytestmark = pytest.mark.real

LAYERS = 30
SWAPPED = 7


@pytest.fixture(scope="module")
def token_ids(smollm2: Any) -> Tensor:
    return torch.tensor(Tokenizer.from_file(str(smollm2.single / "tokenizer.json")).encode(PARAGRAPH).ids)


@pytest.fixture(scope="module")
def checkpoint(smollm2: Any) -> Checkpoint:
    return open_checkpoint(smollm2.single)


def audited(checkpoint: Checkpoint, token_ids: Tensor, *edits: Edit, certify: bool = False) -> tuple[Report, Behaviour]:
    question = AuditQuestion(token_ids=token_ids, certify=certify)
    report = audit_checkpoint(patched(checkpoint, edits), question)
    assert report.behaviour is not None
    return report, report.behaviour


@pytest.fixture(scope="module")
def healthy(checkpoint: Checkpoint, token_ids: Tensor) -> tuple[Report, Behaviour]:
    """Asked of every layer."""
    return audited(checkpoint, token_ids, certify=True)


@pytest.fixture(scope="module")
def mean(healthy: tuple[Report, Behaviour]) -> float:
    found = healthy[1].mean
    assert found is not None
    return found


def hypothesis(behaviour: Behaviour, **told: Any) -> BehaviourHypothesis:
    (found,) = [one for one in behaviour.hypotheses if all(getattr(one, key) == value for key, value in told.items())]
    return found


def warnings(report: Report) -> list[tuple[str, str]]:
    return [(finding.rule, finding.certainty) for finding in report.findings if finding.level == "warning"]


def test_the_healthy_model_raises_no_suspicion(healthy: tuple[Report, Behaviour], token_ids: Tensor) -> None:
    report, behaviour = healthy
    assert (report.findings, report.verdict) == ((), "pass")
    assert behaviour.tokens == len(token_ids) - 1
    alone = [one.layers for one in behaviour.hypotheses if len(one.layers) == 1]
    assert sorted(alone) == [(layer,) for layer in range(LAYERS)]
    assert [one.words for one in behaviour.hypotheses if one.reading == "better"] == []
    assert behaviour.not_asked == ()
    assert not any("Contradiction" in note for note in behaviour.notes)


def test_the_mean_is_that_of_transformers(model: Any, mean: float, token_ids: Tensor) -> None:
    with torch.inference_mode():
        logits = model(token_ids[None]).logits[0, :-1].double()
    true = logits.log_softmax(-1).gather(-1, token_ids[1:, None]).mean()
    # Two orders of float32 sums through thirty layers.
    assert mean == pytest.approx(float(true), abs=1e-5)


def test_the_swapped_layer_put_right_is_the_healthy_model_bit_for_bit(
    checkpoint: Checkpoint, token_ids: Tensor, mean: float
) -> None:
    name = f"model.layers.{SWAPPED}.mlp.{{}}_proj.weight"
    report, behaviour = audited(checkpoint, token_ids, swap_of(checkpoint, name.format("gate"), name.format("up")))
    right = hypothesis(behaviour, layers=(SWAPPED,))
    assert (right.mean, right.reading, right.weights) == (mean, "better", "exchanged")
    assert [one for one in behaviour.hypotheses if one.reading == "better"] == [right]
    (finding,) = report.findings
    assert (finding.rule, finding.layer) == ("ffn/gate-up-swapped", SWAPPED)
    assert finding.evidence["behaviour"].startswith(
        f"layer {SWAPPED} with gate and up put right: the mean log-likelihood rises by 1."
    )


def test_another_activation_is_named(checkpoint: Checkpoint, token_ids: Tensor, mean: float) -> None:
    report, behaviour = audited(checkpoint, token_ids, Declare("hidden_act", "gelu"))
    right = hypothesis(behaviour, value="silu")
    assert (right.mean, right.reading, right.rivals) == (mean, "better", ())
    assert warnings(report) == [("config/activation-conflict", "statistical")]
    assert report.verdict == "pass"


def test_a_large_epsilon_is_seen_and_a_usual_one_is_not(checkpoint: Checkpoint, token_ids: Tensor, mean: float) -> None:
    report, behaviour = audited(checkpoint, token_ids, Declare("rms_norm_eps", 0.3))
    right = hypothesis(behaviour, value="1e-05")
    assert (right.mean, right.reading) == (mean, "better")
    assert right.rivals == ("eps 1e-06 in every norm",)
    assert warnings(report) == [("norm/eps-mismatch", "statistical")]
    _, behaviour = audited(checkpoint, token_ids, Declare("rms_norm_eps", 1e-6))
    right = hypothesis(behaviour, value="1e-05")
    assert (right.mean, right.reading) == (mean, "undecided"), "it moves the loss by 5e-5 nats"


def test_an_offset_is_undone(checkpoint: Checkpoint, token_ids: Tensor, mean: float) -> None:
    gains = [name for name in checkpoint.entries if "norm" in name]
    moved = (Alter(name, (Cast("F32"), Add(1.0))) for name in gains)
    report, behaviour = audited(checkpoint, token_ids, *moved)
    right = hypothesis(behaviour, kind="offset", value="-1")
    # Adding 1 in float32 and taking it away rounds each gain twice, by 6e-8 at most, in sixty-one norms.
    assert right.mean == pytest.approx(mean, abs=1e-4)
    assert right.reading == "better"
    assert ("norm/offset", "statistical") in warnings(report)
