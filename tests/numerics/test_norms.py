"""Norms against the modules they name, bit for bit, and at the edges."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.norms import (
    NORM_KINDS,
    GainOrder,
    Norm,
    NormArithmetic,
    check_eps,
    check_norm_defined,
    layer_norm,
    norm_kind_named,
    rms_norm,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4UnweightedRMSNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.nanochat.modeling_nanochat import NanoChatRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from numerics.makers import make_norm, random_tensor, unit_norm

HALF = (torch.bfloat16, torch.float16)
EVERY_DTYPE = (*HALF, torch.float32)
D = 96

# Two float64 evaluations of a row with mean 100 and deviations of 0.01, which the subtraction costs four digits:
# 1e4 ulps of 2.2e-16, on numbers up to 10. A fall to float32 would miss by 1e-7 and more.
FOUR_DIGITS_LOST = 2.5e-11


class ChatGlmRMSNorm(nn.Module):
    """The forward of ChatGLM's remote code, which transformers does not ship."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        return (self.weight * hidden_states).to(input_dtype)


MODULES: list[tuple[str, Callable[[int, float], nn.Module]]] = [
    ("rms_llama", LlamaRMSNorm),
    ("rms_f32mul", Olmo2RMSNorm),
    ("rms_f32mul", GptOssRMSNorm),
    ("rms_f32mul", HeliumRMSNorm),
    ("rms_f32mul", NemotronHRMSNorm),
    ("rms_plus1", GemmaRMSNorm),
    ("rms_plus1", Gemma3RMSNorm),
    ("rms_plus1", Qwen3NextRMSNorm),
    ("rms_f32mul_pow", Gemma3nRMSNorm),
    ("rms_f32mul_pow", Gemma4RMSNorm),
    ("rms_t5", T5LayerNorm),
    ("rms_chatglm", ChatGlmRMSNorm),
    ("rms_noweight", lambda _, eps: NanoChatRMSNorm(eps)),
    ("rms_noweight", lambda _, eps: Llama4TextL2Norm(eps)),
    ("layernorm", nn.LayerNorm),
    ("layernorm_nobias", lambda d, eps: nn.LayerNorm(d, eps, bias=False)),
    ("layernorm_cohere", CohereLayerNorm),
    ("layernorm_1p", NemotronLayerNorm1P),
    ("layernorm_noparam", lambda d, _: OlmoLayerNorm(d)),
]


def filled(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with gains and biases that are nothing like their initial values, cast as an engine casts them."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(parameter + random_tensor(*parameter.shape, seed=40 + number, dtype=torch.float32))
    return module.to(dtype)


def same_norm(name: str, module: nn.Module, eps: float) -> Norm:
    gain, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    return Norm(NORM_KINDS[name], None if gain is None else gain.detach(), None if bias is None else bias.detach(), eps)


def rows(dtype: torch.dtype, d: int = D) -> Tensor:
    """Rows from tiny to large, one all zero, one with a large entry, one with a large mean."""
    x = random_tensor(7, 5, d, seed=3) * torch.logspace(-4, 2, 7, dtype=torch.float64)[:, None, None]
    x[0, 0] = 0.0
    x[1, 0, 5] = 150.0
    x[2, 0] += 100.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
@pytest.mark.parametrize(
    ("name", "build"), MODULES, ids=[f"{name}-{number}" for number, (name, _) in enumerate(MODULES)]
)
def test_every_kind_gives_the_bits_of_its_modules(
    name: str, build: Callable[[int, float], nn.Module], dtype: torch.dtype
) -> None:
    eps = 1e-5
    module = filled(build(D, eps), dtype)
    x = rows(dtype)
    with torch.no_grad():
        expected = module(x)
    found = same_norm(name, module, eps)(x)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_every_kind_is_held_against_a_module() -> None:
    assert {name for name, _ in MODULES} == set(NORM_KINDS)


@pytest.mark.parametrize("half", HALF, ids=str)
@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("rms_llama", LlamaRMSNorm),
        ("rms_f32mul", Olmo2RMSNorm),
        ("rms_plus1", Gemma3RMSNorm),
        ("rms_f32mul_pow", Gemma4RMSNorm),
        ("rms_t5", T5LayerNorm),
        ("rms_chatglm", ChatGlmRMSNorm),
        ("layernorm_cohere", CohereLayerNorm),
        ("layernorm", nn.LayerNorm),
        ("layernorm_1p", NemotronLayerNorm1P),
    ],
)
def test_a_float32_gain_on_half_rows_gives_their_bits_and_their_dtype(
    name: str, build: Callable[[int, float], nn.Module], half: torch.dtype
) -> None:
    module = filled(build(D, 1e-5), torch.float32)
    x = rows(half)
    with torch.no_grad():
        expected = module(x)
    found = same_norm(name, module, 1e-5)(x)
    assert found.dtype == expected.dtype
    assert (found.dtype == torch.float32) == (name in {"rms_llama", "rms_t5"})
    assert torch.equal(found, expected)


def test_a_half_gain_on_float32_rows_gives_the_bits_and_the_dtype_of_t5() -> None:
    module = filled(T5LayerNorm(D, 1e-5), torch.bfloat16)
    x = rows(torch.float32)
    with torch.no_grad():
        expected = module(x)
    found = same_norm("rms_t5", module, 1e-5)(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_orders_of_gain_and_cast_are_told_apart_by_their_bits(dtype: torch.dtype) -> None:
    x, gain = rows(dtype), random_tensor(D, seed=5, dtype=dtype)
    after = Norm(NORM_KINDS["rms_llama"], gain, None, 1e-5)(x)
    before = Norm(NORM_KINDS["rms_f32mul"], gain, None, 1e-5)(x)
    differing = (after != before).double().mean()
    # Two roundings instead of one move about a quarter of the numbers by one unit in the last place.
    assert 0.1 < differing < 0.4


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_which_kinds_cannot_be_told_apart_by_bits(dtype: torch.dtype) -> None:
    # PyTorch computes the power of -1/2 by rsqrt, and ChatGLM widens by promotion what OLMo-2 widens by a cast.
    x, gain = rows(dtype), random_tensor(D, seed=5, dtype=dtype)
    same = [Norm(NORM_KINDS[name], gain, None, 1e-5)(x) for name in ("rms_f32mul", "rms_f32mul_pow", "rms_chatglm")]
    assert torch.equal(same[0], same[1])
    assert torch.equal(same[0], same[2])


def test_the_unweighted_norm_of_deepseek_v4_is_another_arithmetic_in_half_precision() -> None:
    # It casts the root before it multiplies, so it is no member of `rms_noweight`.
    x = rows(torch.bfloat16)
    assert not torch.equal(unit_norm(eps=1e-6)(x), DeepseekV4UnweightedRMSNorm(1e-6)(x))


@pytest.mark.parametrize("name", sorted(NORM_KINDS))
def test_float64_stays_exact(name: str) -> None:
    x = rows(torch.float64)[1:]
    norm = make_norm(name, D, eps=1e-5)
    kind = norm.kind
    centred = x - x.mean(-1, keepdim=True) if kind.centred else x
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    if norm.gain is not None:
        expected = expected * (norm.gain + kind.offset)
    if norm.bias is not None:
        expected = expected + norm.bias
    found = norm(x)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=0.0, atol=FOUR_DIGITS_LOST)


@pytest.mark.parametrize("name", sorted(name for name, kind in NORM_KINDS.items() if kind.gain is not GainOrder.NONE))
def test_float64_rows_stay_exact_under_a_stored_bfloat16_gain(name: str) -> None:
    x = rows(torch.float64)[1:]
    norm = make_norm(name, D, dtype=torch.bfloat16, eps=1e-5)
    if name == "rms_t5":  # T5 casts to a half gain, on purpose
        norm = norm.to(torch.float32)
    found, expected = norm(x), norm.to(torch.float64)(x)
    assert found.dtype == torch.float64
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [*EVERY_DTYPE, torch.float64], ids=str)
def test_the_plain_functions_are_the_plain_kinds(dtype: torch.dtype) -> None:
    x = rows(dtype)
    gain, bias = random_tensor(D, seed=6, dtype=dtype), random_tensor(D, seed=7, dtype=dtype)
    assert torch.equal(rms_norm(x, gain, 1e-5), Norm(NORM_KINDS["rms_f32mul"], gain, None, 1e-5)(x))
    assert torch.equal(rms_norm(x, gain, 1e-5, offset=1.0), Norm(NORM_KINDS["rms_plus1"], gain, None, 1e-5)(x))
    assert torch.equal(rms_norm(x, None, 1e-5), unit_norm(eps=1e-5)(x))
    assert torch.equal(layer_norm(x, gain, None, 1e-5), Norm(NORM_KINDS["layernorm_cohere"], gain, None, 1e-5)(x))
    with_bias = layer_norm(x.double(), gain.double(), bias.double(), 1e-5, offset=1.0)
    by_kind = Norm(NORM_KINDS["layernorm_1p"], gain, bias, 1e-5).to(torch.float64)(x.double())
    torch.testing.assert_close(with_bias, by_kind, rtol=0.0, atol=FOUR_DIGITS_LOST)


def test_float32_rows_beyond_the_root_of_its_range_come_out_as_zeros_as_in_the_models() -> None:
    x = torch.full((4,), 1e30)
    with torch.no_grad():
        theirs = LlamaRMSNorm(4, 1e-5)(x)
    ours = Norm(NORM_KINDS["rms_llama"], torch.ones(4), None, 1e-5)(x)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, torch.zeros(4))
    assert torch.equal(unit_norm(eps=1e-5)(x.double()), torch.ones(4, dtype=torch.float64))


def test_half_rows_whose_squares_leave_the_half_range_are_normed_all_the_same() -> None:
    x = torch.full((2, 8), 1000.0, dtype=torch.float16)
    x[1] = 60000.0
    assert torch.equal(unit_norm(eps=1e-5)(x), torch.ones(2, 8, dtype=torch.float16))


def test_nan_stays_in_its_row() -> None:
    x = random_tensor(3, D, dtype=torch.float32)
    x[1, 4] = torch.nan
    for name in NORM_KINDS:
        out = make_norm(name, D, dtype=torch.float32)(x)
        assert out.isnan().all(-1).tolist() == [False, True, False], name


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(sorted(NORM_KINDS)),
    power=st.integers(-30, 30),
    d=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_a_power_of_two_moves_no_bit_when_eps_is_zero(name: str, power: int, d: int, seed: int) -> None:
    x = random_tensor(2, d, seed=seed)
    x[..., 0] += 3.0 * torch.arange(1, 3)
    norm = make_norm(name, d, seed=seed, eps=0.0)
    if norm.kind.centred and d == 1:
        with pytest.raises(InvalidValue):
            check_norm_defined(x, norm)
        return
    # 2^k scales every sum by 4^k and the root by 2^k, all exactly.
    assert torch.equal(norm(x * 2.0**power), norm(x))


def test_the_offset_is_added_to_the_stored_gain() -> None:
    x = random_tensor(4, D, seed=8)
    w = random_tensor(D, seed=9)
    raw = Norm(NORM_KINDS["rms_plus1"], w, None, 1e-5)(x)
    folded = Norm(NORM_KINDS["rms_f32mul"], w + 1.0, None, 1e-5)(x)
    assert torch.equal(raw, folded)


# What cannot be


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidValue) as caught:
        norm_kind_named("rmsnorm", field="overrides.norm_kind")
    assert caught.value.field == "overrides.norm_kind"
    assert caught.value.known == tuple(NORM_KINDS)
    assert norm_kind_named("rms_t5") is NORM_KINDS["rms_t5"]


@pytest.mark.parametrize("eps", [-1e-6, torch.nan, torch.inf, -torch.inf])
def test_an_impossible_eps_is_refused(eps: float) -> None:
    with pytest.raises(InvalidValue) as caught:
        check_eps(eps, field="overrides.eps")
    assert caught.value.field == "overrides.eps"
    with pytest.raises(InvalidValue):
        Norm(NORM_KINDS["rms_noweight"], None, None, eps)


@pytest.mark.parametrize(
    ("kind", "gain", "bias", "field"),
    [
        ("rms_llama", None, None, "gain"),
        ("rms_noweight", torch.ones(4), None, "gain"),
        ("rms_llama", torch.ones(4), torch.ones(4), "bias"),
        ("layernorm_nobias", torch.ones(4), torch.ones(4), "bias"),
        ("layernorm_noparam", None, torch.ones(4), "bias"),
        ("layernorm", torch.ones(4), torch.ones(5), "bias"),
        ("rms_llama", torch.ones(2, 2), None, "gain"),
        ("rms_llama", torch.ones(0), None, "gain"),
        ("rms_llama", torch.ones(4, dtype=torch.int32), None, "gain"),
    ],
)
def test_tensors_that_the_kind_does_not_have_are_refused(kind: str, gain: Any, bias: Any, field: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        Norm(NORM_KINDS[kind], gain, bias, 1e-5)
    assert caught.value.field == field


@pytest.mark.parametrize("name", sorted(name for name, kind in NORM_KINDS.items() if kind.gain is not GainOrder.NONE))
def test_rows_of_another_width_are_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match="3 channels"):
        make_norm(name, 3)(torch.ones(2, 1))


# A norm that is not defined on a row


def kinds(*, centred: bool) -> list[NormArithmetic]:
    return [kind for kind in NORM_KINDS.values() if kind.centred == centred]


@pytest.mark.parametrize("kind", NORM_KINDS.values(), ids=lambda kind: kind.name)
def test_ordinary_rows_pass_with_eps_zero_and_zeros_pass_with_an_eps(kind: NormArithmetic) -> None:
    check_norm_defined(rows(torch.float32)[1:], make_norm(kind.name, D, eps=0.0))
    check_norm_defined(torch.zeros(3, D), make_norm(kind.name, D, eps=1e-12))
    check_norm_defined(torch.zeros(0, D), make_norm(kind.name, D, eps=0.0))


@pytest.mark.parametrize("eps", [0.0, 1e-50])
@pytest.mark.parametrize("kind", kinds(centred=False), ids=lambda kind: kind.name)
@pytest.mark.parametrize("value", [0.0, 1e-30])
def test_rows_without_a_square_are_refused_where_eps_vanishes(kind: NormArithmetic, value: float, eps: float) -> None:
    x = torch.ones(2, 3, D)
    x[1, 2] = value
    with pytest.raises(InvalidValue, match=r"\[1, 2\]") as caught:
        check_norm_defined(x, make_norm(kind.name, D, eps=eps), field="body.x")
    assert caught.value.field == "body.x"
    # In float64 the squares of 1e-30 and an eps of 1e-50 are there.
    if value or eps:
        check_norm_defined(x.double(), make_norm(kind.name, D, eps=eps))


@pytest.mark.parametrize("kind", kinds(centred=True), ids=lambda kind: kind.name)
@pytest.mark.parametrize("value", [0.0, 0.1, 7.3, -1e20])
def test_constant_rows_are_refused_by_layer_norm_whatever_the_mean_rounds_to(
    kind: NormArithmetic, value: float
) -> None:
    x = random_tensor(4, D, dtype=torch.float32)
    x[3] = value
    with pytest.raises(InvalidValue, match=r"row \[3\]"):
        check_norm_defined(x, make_norm(kind.name, D, dtype=torch.float32, eps=0.0))


def test_one_row_is_named_by_the_empty_index() -> None:
    with pytest.raises(InvalidValue, match=r"row \[\]"):
        check_norm_defined(torch.zeros(4), unit_norm())
