"""The swap verdict on all 30 layers of SmolLM2-135M: healthy, exchanged, untrained, and with its signs tossed."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.numerics.gate_or_up import Reason, Verdict, family_wise_level, judge
from glassblock.numerics.gate_up_evidence import GateUpEvidence, gate_up_evidence
from glassblock.numerics.sign_bound import log10_tail_bound, row_moments
from glassblock.numerics.unit_rows import centred_unit_rows
from safetensors import safe_open
from torch import Tensor

pytestmark = pytest.mark.real

LAYERS = range(30)
LEVEL = family_wise_level(200)


@cache
def layer(directory: Path, index: int) -> tuple[Tensor, Tensor, Tensor]:
    with safe_open(directory / "model.safetensors", "pt") as file:
        gate, up, down = (
            file.get_tensor(f"model.layers.{index}.mlp.{name}_proj.weight") for name in ("gate", "up", "down")
        )
    return gate, up, down


@pytest.fixture(scope="module")
def evidence(smollm2: Any) -> list[GateUpEvidence]:
    # 4999 draws, so that the smallest of 30 p-values can fall to 0.01/30 and the family-wise statement can fail.
    return [
        gate_up_evidence(*layer(smollm2.single, index), seed=0, level=LEVEL, draws=4999, certify="all")
        for index in LAYERS
    ]


def test_gate_is_certified_and_up_is_noise_in_every_layer(evidence: list[GateUpEvidence]) -> None:
    for found in evidence:
        assert found.gate.log10_p is not None
        assert found.gate.log10_p <= -50
        assert found.up.draws_p > 0.01


def test_mirrored_up_is_certified_in_28_layers(evidence: list[GateUpEvidence]) -> None:
    assert sum(found.paired_up.rejected(5e-6) for found in evidence) >= 28


@pytest.mark.parametrize("name", ["paired_gate", "down_columns", "product"])
def test_mirrored_gate_and_controls_are_noise(evidence: list[GateUpEvidence], name: str) -> None:
    # Over 30 layers one p-value in a hundred lies below 0.01 by chance: noise is what 30 tests together allow.
    tests = [getattr(found, name) for found in evidence]
    assert min(test.draws_p for test in tests) > 0.01 / len(tests)
    assert min(test.log10_p for test in tests) > -1


def test_every_layer_is_as_named(evidence: list[GateUpEvidence]) -> None:
    judgements = [judge(found, level=LEVEL) for found in evidence]
    assert {judgement.verdict for judgement in judgements} == {Verdict.AS_NAMED}
    assert sum(judgement.rejections == 2 for judgement in judgements) >= 28


@pytest.mark.parametrize("index", LAYERS)
def test_screened_verdicts_of_a_layer(smollm2: Any, index: int) -> None:
    gate, up, down = layer(smollm2.single, index)
    healthy = judge(gate_up_evidence(gate, up, down, seed=0, level=LEVEL), level=LEVEL)
    assert healthy.verdict is Verdict.AS_NAMED
    swapped = judge(gate_up_evidence(up, gate, down, seed=0, level=LEVEL), level=LEVEL)
    assert swapped.verdict is Verdict.SWAPPED
    assert swapped.log10_p == healthy.log10_p


def test_random_initialisation_is_undecidable() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in LAYERS:
        gate, up, down = (
            (0.02 * torch.randn(shape, generator=generator)).to(torch.bfloat16)
            for shape in ((1536, 576), (1536, 576), (576, 1536))
        )
        assert judge(gate_up_evidence(gate, up, down, seed=0, level=LEVEL), level=LEVEL).reason is Reason.NOISE


@pytest.mark.parametrize("index", [0, 18, 29])
def test_tossing_the_signs_of_real_rows_convicts_nobody(smollm2: Any, index: int) -> None:
    # W^T W does not see signs, so one matrix serves all 20,000 tosses. The gate of layer 0 is at 1e-293 as it is.
    rows = centred_unit_rows(layer(smollm2.single, index)[0]).rows
    moments = row_moments([rows], at_most=len(rows))
    tosses = torch.randint(0, 2, (20_000, len(rows)), generator=torch.Generator().manual_seed(index)).float() * 2 - 1
    totals = (tosses @ rows).double()
    largest, median = totals[totals.square().sum(1).argsort(descending=True)[[0, 10_000]]]
    assert math.log10(5e-6) < log10_tail_bound(moments._replace(total=largest)) < -1
    assert log10_tail_bound(moments._replace(total=median)) > -0.3
