"""Zeros in a part of a tensor that holds several weights: a half of a fused one, an expert's slice of a stack."""

from collections.abc import Callable
from pathlib import Path

import pytest
from glassblock.audit.audit import audit_checkpoint
from glassblock.wire.audits import Finding
from plants import edit_tensors, healthy_checkpoint
from torch import Tensor

EXPERTS = "model.layers.1.feed_forward.experts."
GATE_UP, DOWN, ROUTER = f"{EXPERTS}gate_up_proj", f"{EXPERTS}down_proj", "model.layers.1.feed_forward.router.weight"


def told(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> list[Finding]:
    healthy_checkpoint("llama4", directory)
    edit_tensors(change)(directory)
    return [finding for finding in audit_checkpoint(directory).findings if finding.rule == "tensor/all-zero"]


CASES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str, int | None]] = {
    "gate and up": (lambda tensors: tensors[GATE_UP][2].zero_(), "gate and up of expert 2", 2),
    "gate": (lambda tensors: tensors[GATE_UP][0, :, :24].zero_(), "gate of expert 0", 0),
    "up": (lambda tensors: tensors[GATE_UP][3, :, 24:].zero_(), "up of expert 3", 3),
    "down": (lambda tensors: tensors[DOWN][1].zero_(), "down of expert 1", 1),
    "several": (lambda tensors: tensors[DOWN][:2].zero_(), "down of experts 0, 1", None),
}


@pytest.mark.parametrize(("change", "words", "expert"), CASES.values(), ids=CASES)
def test_an_expert_of_a_stack(
    change: Callable[[dict[str, Tensor]], object], words: str, expert: int | None, tmp_path: Path
) -> None:
    (finding,) = told(tmp_path, change)
    assert (finding.level, finding.layer, finding.expert) == ("warning", 1, expert)
    assert f"layer 1: {words} in {EXPERTS}" in finding.message


def test_an_expert_that_no_token_reaches_may_be_zero(tmp_path: Path) -> None:
    def silence(tensors: dict[str, Tensor]) -> None:
        tensors[GATE_UP][2].zero_()
        tensors[DOWN][2].zero_()
        tensors[ROUTER][2].zero_()

    assert told(tmp_path, silence) == []


def test_all_neurons_but_one_are_no_whole(tmp_path: Path) -> None:
    assert told(tmp_path, lambda tensors: tensors[GATE_UP][2, :, 1:24].zero_()) == []


def test_a_whole_stack_is_told_once(tmp_path: Path) -> None:
    (finding,) = told(tmp_path, lambda tensors: tensors[DOWN].zero_())
    assert finding.tensors == (DOWN,)
    assert "every number is zero" in finding.message
