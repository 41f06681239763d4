"""Values that follow by hand, as literal numbers: one row of the table, one case."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.activations import activation_named, gating_named
from glassblock.numerics.block import Placement, Wiring, residual_output, run_block
from glassblock.numerics.budgets import (
    equal_parameter_width,
    feed_forward_budget,
    feed_forward_macs,
    feed_forward_parameters,
    round_up_to_multiple,
)
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.norm_jacobians import norm_jacobian, norm_jacobian_along_row
from glassblock.numerics.norm_statistics import norm_statistics
from glassblock.numerics.norms import NORM_KINDS, Norm, check_norm_defined
from glassblock.numerics.residual_jacobians import residual_jacobian
from torch import Tensor

from numerics.makers import unit_norm

RMS, LAYER = unit_norm("rms_noweight"), unit_norm("layernorm_noparam")
I2 = torch.eye(2, dtype=torch.float64)
DIAGONAL = torch.tensor([[2.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
SHEAR = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)

# Literals below are given to six decimals or are exact in binary; half a unit of the sixth decimal, and no more.
TO_SIX_DECIMALS = 5e-7


def row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pre() -> Wiring:
    return Wiring(Placement.PRE, input_norm=RMS)


def post() -> Wiring:
    return Wiring(Placement.POST, residual_norm=RMS)


def identities() -> FeedForward:
    nothing = None
    return FeedForward(I2, I2, I2, nothing, nothing, nothing, activation_named("silu"), gating_named("product"))


def stage(name: str) -> Tensor:
    # An eps of 3 and a gain of 2 give a norm that maps [1, -1] to itself exactly: 2 / sqrt(1 + 3).
    norm = Norm(NORM_KINDS["rms_llama"], row(2.0, 2.0), None, 3.0)
    stages = run_block(row(1.0, -1.0), identities(), Wiring(Placement.PRE, input_norm=norm))
    return getattr(stages, name)


def gap(first: str, second: str) -> float:
    x = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    return (activation_named(first)(x) - activation_named(second)(x)).abs().max().item()


@dataclass(frozen=True)
class Case:
    name: str
    compute: Callable[[], Any]
    value: Any


MODEL = {"d_model": 4096, "layers": 32, "batch": 1, "tokens": 1, "element_bytes": 2}
ONE_BRANCH = {"d_model": 512, "d_ff": 2048, "gated": False, "batch": 2, "layers": 1, "element_bytes": 4}

CASES = [
    # SwiGLU, x = [1, -1], three identities of 2 x 2
    Case("swiglu gate", lambda: stage("gate"), [1.0, -1.0]),
    Case("swiglu up", lambda: stage("up"), [1.0, -1.0]),
    Case("swiglu hidden", lambda: stage("hidden"), [0.731059, 0.268941]),
    Case("swiglu down", lambda: stage("down"), [0.731059, 0.268941]),
    Case("swiglu parameters", lambda: identities().parameters, 12),
    Case("swiglu hidden elements", lambda: stage("hidden").numel(), 2),
    # parameters
    Case("plain 512 x 2048", lambda: feed_forward_parameters(d_model=512, d_ff=2048, gated=False), 2_097_152),
    Case("gated 512 x 2048", lambda: feed_forward_parameters(d_model=512, d_ff=2048, gated=True), 3_145_728),
    Case("one branch", lambda: feed_forward_budget(**ONE_BRANCH, tokens=1024).hidden_elements, 4_194_304),
    Case("T = 1024", lambda: feed_forward_budget(**ONE_BRANCH, tokens=1024).parameters, 2_097_152),
    Case("T = 1", lambda: feed_forward_budget(**ONE_BRANCH, tokens=1).parameters, 2_097_152),
    # equal-parameter width
    Case("m0 = 4 d gives 8 d / 3", lambda: equal_parameter_width(4 * 4096), Fraction(8 * 4096, 3)),
    Case("10922.67", lambda: round(float(equal_parameter_width(16384)), 2), 10922.67),
    Case("11008", lambda: round_up_to_multiple(equal_parameter_width(16384), 256), 11_008),
    Case("plain 16384", lambda: feed_forward_parameters(d_model=4096, d_ff=16384, gated=False), 134_217_728),
    Case("gated 16384", lambda: feed_forward_parameters(d_model=4096, d_ff=16384, gated=True), 201_326_592),
    Case("gated 10923", lambda: feed_forward_parameters(d_model=4096, d_ff=10923, gated=True), 134_221_824),
    # operations
    Case("one matrix", lambda: feed_forward_macs(d_model=4096, d_ff=11008, gated=True) // 3, 45_088_768),
    Case("MACs", lambda: feed_forward_macs(d_model=4096, d_ff=11008, gated=True), 135_266_304),
    Case("FLOPs", lambda: feed_forward_budget(**MODEL, d_ff=11008, gated=True).flops_per_token, 270_532_608),
    Case("layers", lambda: feed_forward_budget(**MODEL, d_ff=11008, gated=True).total_flops_per_token, 8_657_043_456),
    # norms of rows
    Case("rmsnorm [1, 3]", lambda: RMS(row(1, 3)), [0.447214, 1.341641]),
    Case("layernorm [1, 3]", lambda: LAYER(row(1, 3)), [-1.0, 1.0]),
    Case("layernorm [3, 5]", lambda: LAYER(row(3, 5)), [-1.0, 1.0]),
    Case("rmsnorm [3, 5]", lambda: RMS(row(3, 5)), [0.727607, 1.212678]),
    Case("mean [2, 4, 6, 8]", lambda: norm_statistics(row(2, 4, 6, 8), 0.0).mean, 5.0),
    Case("variance [2, 4, 6, 8]", lambda: norm_statistics(row(2, 4, 6, 8), 0.0).variance, 5.0),
    Case("mean square [2, 4, 6, 8]", lambda: norm_statistics(row(2, 4, 6, 8), 0.0).square_mean, 30.0),
    Case("mean square [1, 2, 3, 4]", lambda: norm_statistics(row(1, 2, 3, 4), 0.0).square_mean, 7.5),
    Case("rms [1, 2, 3, 4]", lambda: norm_statistics(row(1, 2, 3, 4), 0.0).rms, 2.738613),
    Case(
        "normed [1, 2, 3, 4]",
        lambda: norm_statistics(row(1, 2, 3, 4), 0.0).rmsnorm,
        [0.365148, 0.730297, 1.095445, 1.460593],
    ),
    Case("layernorm [1, 2, 3, 4]", lambda: LAYER(row(1, 2, 3, 4)), [-1.341641, -0.447214, 0.447214, 1.341641]),
    Case("layernorm [101 ..]", lambda: LAYER(row(101, 102, 103, 104)), [-1.341641, -0.447214, 0.447214, 1.341641]),
    Case("rmsnorm [101 ..]", lambda: RMS(row(101, 102, 103, 104)), [0.985307, 0.995063, 1.004818, 1.014574]),
    # the Jacobian of RMSNorm: s = sqrt(12.5) on [3, 4]; d s^3 = 25 s
    Case("J on [3, 4]", lambda: norm_jacobian(row(3, 4), RMS), [[0.181019, -0.135765], [-0.135765, 0.101823]]),
    Case("J x, eps = 0", lambda: norm_jacobian_along_row(row(3, 4), RMS), [0.0, 0.0]),
    Case(
        "J x = eps x / s^3",  # eps = 12.5: s = 5, so 12.5 * [3, 4] / 125
        lambda: norm_jacobian_along_row(row(3, 4), unit_norm(eps=12.5)),
        [0.3, 0.4],
    ),
    # residual blocks at x = [3, 4]
    Case("pre, A = 0", lambda: residual_jacobian(row(3, 4), 0 * I2, pre()), [[1.0, 0.0], [0.0, 1.0]]),
    Case(
        "post, A = 0",
        lambda: residual_jacobian(row(3, 4), 0 * I2, post()),
        [[0.181019, -0.135765], [-0.135765, 0.101823]],
    ),
    Case(
        "pre, diagonal: I + A J",
        lambda: residual_jacobian(row(3, 4), DIAGONAL, pre()),
        [[1.362039, -0.271529], [0.135765, 0.898177]],
    ),
    Case(
        "pre, non-symmetric: I + A J",
        lambda: residual_jacobian(row(3, 4), SHEAR, pre()),
        [[0.864235, 0.101823], [0.0, 1.0]],
    ),
    Case(
        "post, diagonal: J(z) (I + A)",  # z = [9, 0]: J(z) = diag(0, 1/s), and I + A = diag(3, 0)
        lambda: residual_jacobian(row(3, 4), DIAGONAL, post()),
        [[0.0, 0.0], [0.0, 0.0]],
    ),
    Case(
        "post, non-symmetric: J(z) (I + A)",  # z = [7, 4], s^2 = 32.5: J(z) = [[16, -28], [-28, 49]] / (65 s)
        lambda: residual_jacobian(row(3, 4), SHEAR, post()),
        [[0.043178, -0.032384], [-0.075562, 0.056671]],
    ),
    Case("pre output", lambda: residual_output(row(3, 4), SHEAR, pre()), [4.131371, 4.0]),
    Case("post output", lambda: residual_output(row(3, 4), SHEAR, post()), [1.227881, 0.701646]),
    Case("A J", lambda: DIAGONAL @ norm_jacobian(row(3, 4), RMS), [[0.362039, -0.271529], [0.135765, -0.101823]]),
    Case("J A", lambda: norm_jacobian(row(3, 4), RMS) @ DIAGONAL, [[0.362039, 0.135765], [-0.271529, -0.101823]]),
    # zeros and scales
    Case("rmsnorm of zeros", lambda: unit_norm(eps=1e-6)(row(0, 0)), [0.0, 0.0]),
    Case("rmsnorm of 5 x", lambda: RMS(row(5, 15)), [0.447214, 1.341641]),
    Case("rmsnorm of -5 x", lambda: RMS(row(-5, -15)), [-0.447214, -1.341641]),
    Case("rmsnorm of a channel scale", lambda: RMS(row(3, 3)), [1.0, 1.0]),
    # activations
    Case("GELU, erf and tanh", lambda: gap("gelu", "gelu_tanh"), 4.732e-4),
    Case("SiLU and GELU", lambda: round(gap("silu", "gelu"), 2), 0.19),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_value(case: Case) -> None:
    found = case.compute()
    if isinstance(found, Tensor):
        expected = torch.tensor(case.value, dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=0.0, atol=TO_SIX_DECIMALS)
    elif isinstance(found, float):
        assert found == pytest.approx(case.value, abs=TO_SIX_DECIMALS)
    else:
        assert found == case.value


@pytest.mark.parametrize(("norm", "x"), [(RMS, row(0, 0)), (LAYER, row(0.1, 0.1))], ids=["zeros", "constant"])
def test_a_norm_that_would_divide_by_zero_is_refused(norm: Any, x: Tensor) -> None:
    rows = torch.stack([row(1, 2), x])
    with pytest.raises(InvalidValue, match=r"row \[1\]") as caught:
        check_norm_defined(rows, norm, field="x")
    assert caught.value.field == "x"
