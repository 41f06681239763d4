import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.activations import (
    ACTIVATION_ALIASES,
    ACTIVATIONS,
    GATINGS,
    Activation,
    Gating,
    activation_named,
    gating_named,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.activations import ACT2CLS, ACT2FN
from transformers.models.bloom.modeling_bloom import bloom_gelu_forward
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from numerics.makers import random_tensor

# Their arithmetic depends on tensors of the checkpoint.
LEARNABLE = {"prelu", "xielu"}


def sweep(dtype: torch.dtype) -> Tensor:
    """Every size that matters, both signs, the kinks and the edges where exp and pow saturate."""
    sizes = torch.logspace(-8, 4, 2001, dtype=torch.float64)
    fine = torch.linspace(-12, 12, 24_001, dtype=torch.float64)
    edges = torch.tensor([0.0, -0.0, 3.0, -3.0, 6.0, 10.0, -10.0, torch.inf, -torch.inf], dtype=torch.float64)
    return torch.cat([sizes, -sizes, fine, edges]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", sorted(set(ACT2CLS) - LEARNABLE))
def test_every_activation_of_transformers_is_known_and_gives_its_bits(name: str, dtype: torch.dtype) -> None:
    x = sweep(dtype)
    found, expected = activation_named(name)(x), ACT2FN[name](x)
    assert found.dtype == expected.dtype
    assert torch.equal(found.nan_to_num(nan=12345.0), expected.nan_to_num(nan=12345.0))


def test_bloom_gelu_gives_the_bits_of_bloom() -> None:
    x = sweep(torch.bfloat16)
    assert torch.equal(activation_named("gelu_bloom")(x).nan_to_num(), bloom_gelu_forward(x).nan_to_num())


@pytest.mark.parametrize("name", sorted(LEARNABLE))
def test_learnable_activations_are_refused(name: str) -> None:
    with pytest.raises(InvalidValue):
        activation_named(name)


@pytest.mark.parametrize("row", ACTIVATIONS.values(), ids=lambda row: row.name)
def test_odd_is_what_it_says(row: Activation) -> None:
    x = torch.linspace(-3, 3, 601, dtype=torch.float64)
    assert torch.equal(row(-x), -row(x)) == row.odd


@pytest.mark.parametrize("row", ACTIVATIONS.values(), ids=lambda row: row.name)
def test_rows_of_one_formula_differ_by_rounding_only(row: Activation) -> None:
    x = torch.linspace(-12, 12, 4801, dtype=torch.float64)
    # The constants of the spellings are given to as few as eight digits (0.79788456), inside tanh and times x.
    torch.testing.assert_close(row(x), ACTIVATIONS[row.formula](x), rtol=0.0, atol=1e-7)


def test_different_formulas_differ_by_more_than_rounding() -> None:
    x = torch.linspace(-12, 12, 4801, dtype=torch.float64)
    values = {row.formula: row(x) for row in ACTIVATIONS.values()}
    names = sorted(values)
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            if {first, second} == {"gelu", "gelu_10"}:
                continue  # They part above 10, where both are nearly the identity; the next test sees it.
            assert (values[first] - values[second]).abs().max() > 1e-4, (first, second)
    assert activation_named("gelu_10")(torch.tensor([12.0])).item() == 10.0


def test_aliases_lead_to_rows_and_hide_none() -> None:
    assert set(ACTIVATION_ALIASES.values()) <= set(ACTIVATIONS)
    assert not set(ACTIVATION_ALIASES) & set(ACTIVATIONS)
    for alias, name in ACTIVATION_ALIASES.items():
        assert activation_named(alias) is ACTIVATIONS[name]


def test_an_unknown_activation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidValue, match="siluu") as caught:
        activation_named("siluu", field="overrides.activation")
    assert caught.value.field == "overrides.activation"
    assert set(caught.value.known) == set(ACTIVATIONS) | set(ACTIVATION_ALIASES)


def test_swish_with_beta_one_is_silu_and_with_1_702_quick_gelu() -> None:
    x = sweep(torch.float32)
    assert activation_named("swish", swish_beta=1.0) is ACTIVATIONS["silu"]
    assert torch.equal(
        activation_named("silu", swish_beta=1.702)(x).nan_to_num(), ACTIVATIONS["quick_gelu"](x).nan_to_num()
    )


@settings(max_examples=25, deadline=None)
@given(beta=st.floats(-20, 20))
def test_swish_follows_its_definition(beta: float) -> None:
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    swish = activation_named("silu", swish_beta=beta)
    # exp is good to an ulp and the quotient adds another; |x| <= 5.
    torch.testing.assert_close(swish(x), x / (1 + torch.exp(-beta * x)), rtol=1e-14, atol=1e-15)
    if beta != 0:
        assert not swish.odd


def test_swish_with_beta_zero_is_odd() -> None:
    swish = activation_named("silu", swish_beta=0.0)
    assert swish.odd
    assert torch.equal(swish(torch.tensor([2.0, -2.0])), torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize(("name", "beta"), [("gelu", 1.0), ("silu", torch.nan), ("silu", torch.inf)])
def test_a_beta_without_meaning_is_refused(name: str, beta: float) -> None:
    with pytest.raises(InvalidValue):
        activation_named(name, swish_beta=beta)


def halves(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return random_tensor(64, 96, seed=1, dtype=dtype, scale=6.0), random_tensor(64, 96, seed=2, dtype=dtype, scale=6.0)


class _Limits:
    """What the experts' `_apply_gate` reads of its module."""

    def __init__(self) -> None:
        self.alpha, self.limit, self.act_fn = 1.702, 7.0, ACT2FN["silu"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_swiglu_oai_gives_the_bits_of_gpt_oss(dtype: torch.dtype) -> None:
    gate, up = halves(dtype)
    fused = torch.stack([gate, up], dim=-1).flatten(-2)
    _, hidden = gating_named("swiglu_oai", alpha=1.702, limit=7.0).combine(gate, up, activation_named("silu"))
    assert torch.equal(hidden, GptOssExperts._apply_gate(_Limits(), fused))


@pytest.mark.parametrize("name", ["clamped_before", "clamped_after", "swiglu_oai"])
@pytest.mark.parametrize("limit", [1e5, 1e308])
def test_a_limit_that_the_type_cannot_hold_bounds_nothing(name: str, limit: float) -> None:
    more = {"alpha": 1.702} if name == "swiglu_oai" else {}
    gate, up = (torch.tensor([-torch.inf, -60_000.0, 0.0, 60_000.0, torch.inf], dtype=torch.float16) for _ in range(2))
    silu = activation_named("silu")
    unbounded = gating_named(name, limit=60_000.0, **more).combine(gate[1:4], up[1:4], silu)
    bounded = gating_named(name, limit=limit, **more).combine(gate, up, silu)
    for within, beyond in zip(unbounded, bounded, strict=True):
        assert torch.equal(within, beyond[1:4])
    assert bounded[0][4] == torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_clamped_before_gives_the_bits_of_deepseek_v4(dtype: torch.dtype) -> None:
    gate, up = halves(dtype)
    _, hidden = gating_named("clamped_before", limit=7.0).combine(gate, up, activation_named("silu"))
    assert torch.equal(hidden, DeepseekV4Experts._apply_gate(_Limits(), torch.cat([gate, up], dim=-1)))


def test_clamped_after_clamps_the_activated_gate() -> None:
    # silu(8) = 7.99732 and silu(2) = 1.76159; the limit is 4, and up is clamped both ways.
    gate, up = torch.tensor([8.0, 2.0, -9.0]), torch.tensor([-9.0, 9.0, 1.0])
    activated, hidden = gating_named("clamped_after", limit=4.0).combine(gate, up, activation_named("silu"))
    # Literals to five decimals.
    torch.testing.assert_close(activated, torch.tensor([4.0, 1.76159, -0.00111]), rtol=0.0, atol=6e-6)
    torch.testing.assert_close(hidden, torch.tensor([-16.0, 7.04638, -0.00111]), rtol=0.0, atol=6e-6)


def every_gating() -> list[Gating]:
    numbers = {"alpha": 1.702, "limit": 2.0}
    return [gating_named(name, **{need: numbers[need] for need in row.needs}) for name, row in GATINGS.items()]


@pytest.mark.parametrize("gating", every_gating(), ids=lambda gating: gating.name)
def test_up_sign_symmetric_is_what_it_says(gating: Gating) -> None:
    gate, up = halves(torch.float64)
    silu = activation_named("silu")
    flipped = torch.equal(gating.combine(gate, -up, silu)[1], -gating.combine(gate, up, silu)[1])
    assert flipped == gating.up_sign_symmetric


@pytest.mark.parametrize("gating", every_gating(), ids=lambda gating: gating.name)
def test_a_gating_carries_its_name_and_numbers(gating: Gating) -> None:
    assert gating.name in GATINGS
    assert (gating.limit is not None) == ("limit" in GATINGS[gating.name].needs)
    assert (gating.alpha is not None) == ("alpha" in GATINGS[gating.name].needs)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("products", {}),
        ("product", {"limit": 7.0}),
        ("clamped_before", {}),
        ("clamped_after", {"limit": 7.0, "alpha": 1.702}),
        ("clamped_after", {"limit": 0.0}),
        ("clamped_before", {"limit": -1.0}),
        ("clamped_before", {"limit": torch.inf}),
        ("swiglu_oai", {"limit": 7.0}),
        ("swiglu_oai", {"limit": 7.0, "alpha": torch.nan}),
    ],
)
def test_a_gating_without_its_numbers_is_refused(name: str, numbers: dict[str, float]) -> None:
    with pytest.raises(InvalidValue) as caught:
        gating_named(name, **numbers, field="ffn.gating")
    assert caught.value.field == "ffn.gating"
