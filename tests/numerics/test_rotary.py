"""Rotary positions against `modeling_rope_utils` and the rotary functions of transformers' models."""

from typing import Any

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.rotary import (
    Arrangement,
    Rotary,
    RotaryPrecision,
    attention_scaling,
    inverse_frequencies,
    rotary_table,
    rotate,
)
from glassblock.numerics.rotary_forms import (
    ROTARY_FORM_ALIASES,
    ROTARY_FORMS,
    DefaultForm,
    DynamicForm,
    LongRopeForm,
    YarnForm,
    rotary_form_named,
)
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as cohere
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb as deepseek_v2
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave as deepseek_v3
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as glm4
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as olmo2

from numerics.makers import random_tensor

LIMIT, DIM = 256, 32
SHORT = [1.0 + 0.01 * i for i in range(DIM // 2)]
LONG = [1.0 + 0.7 * i for i in range(DIM // 2)]
ORIGINAL = {"original_max_position_embeddings": 64}
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0, **ORIGINAL},
    "yarn ": {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 16.0, "beta_slow": 2.0, **ORIGINAL},
    "yarn  ": {"factor": 32.0, "attention_factor": 1.25, "truncate": False, **ORIGINAL},
    "yarn   ": {"factor": 2.0, "beta_fast": 1.0, "beta_slow": 1.0, **ORIGINAL},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "longrope": {"short_factor": SHORT, "long_factor": LONG, **ORIGINAL},
    "longrope ": {"short_factor": SHORT, "long_factor": LONG, "factor": 8.0, "attention_factor": 1.5, **ORIGINAL},
    "longrope  ": {"short_factor": SHORT, "long_factor": LONG, "factor": 1.0, **ORIGINAL},
    "proportional": {"partial_rotary_factor": 0.3, "factor": 2.0},
    "proportional ": {"partial_rotary_factor": 1.0},
}


def configuration(name: str, theta: float = 10000.0) -> LlamaConfig:
    parameters = {"rope_type": name.strip(), "rope_theta": theta, **FORMS[name]}
    return LlamaConfig(
        hidden_size=4 * DIM, num_attention_heads=4, max_position_embeddings=LIMIT, rope_parameters=parameters
    )


def ours(name: str, theta: float = 10000.0, **options: Any) -> Rotary:
    form = rotary_form_named(name.strip(), configuration(name).rope_parameters, max_positions=LIMIT)
    return Rotary(DIM, theta, form, **options)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1234.5])
@pytest.mark.parametrize("tokens", [None, 60, 64, 65, 256, 257, 1000])
def test_frequencies_bit_for_bit(name: str, theta: float, tokens: int | None) -> None:
    rotary, config = ours(name, theta), configuration(name, theta)
    if name == "default":
        expected, scaling = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        # The dynamic form is recomputed beyond the limit alone, and then from a tensor.
        recomputed = tokens is not None and (name != "dynamic" or tokens > LIMIT)
        length = torch.tensor(tokens) if recomputed else None
        expected, scaling = ROPE_INIT_FUNCTIONS[name.strip()](config, seq_len=length)
    found = inverse_frequencies(rotary, tokens=tokens)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert attention_scaling(rotary) == scaling


def test_every_form_of_transformers_is_tried() -> None:
    assert {name.strip() for name in FORMS} == {*ROPE_INIT_FUNCTIONS, "default"} == set(ROTARY_FORMS)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [30, 300])
def test_the_table_and_the_rotation_of_llama_bit_for_bit(name: str, dtype: torch.dtype, tokens: int) -> None:
    module = LlamaRotaryEmbedding(configuration(name))
    query = random_tensor(2, 4, tokens, DIM, dtype=dtype)
    positions = torch.arange(tokens)[None] + torch.tensor([[0], [5]])
    cosine, sine = module(query, positions)
    rotary = ours(name)
    table = rotary_table(rotary, positions, dtype=dtype)
    assert torch.equal(torch.cat((table.cosine, table.cosine), -1), cosine)
    assert torch.equal(torch.cat((table.sine, table.sine), -1), sine)
    expected, _ = llama(query, query, cosine, sine)
    found = rotate(query, table, rotary)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


POSITIONS = torch.arange(50)[None]


def halves_table(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return LlamaRotaryEmbedding(configuration("default"))(torch.empty(0, dtype=dtype), POSITIONS)


def rotated_by_cohere(x: torch.Tensor) -> torch.Tensor:
    cosine, sine = (half[..., : DIM // 2].repeat_interleave(2, -1) for half in halves_table(x.dtype))
    return cohere(x, x, cosine, sine)[0]


def rotated_by_deepseek_v2(x: torch.Tensor) -> torch.Tensor:
    angles = POSITIONS[..., None].float() * inverse_frequencies(ours("default"))
    return deepseek_v2(x, x, torch.polar(torch.ones_like(angles), angles))[0]


ROTATIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "cohere": (
        rotated_by_cohere,
        {"arrangement": Arrangement.PAIRS, "precision": RotaryPrecision.ROUNDED_TABLE},
    ),
    "glm4": (lambda x: glm4(x, x, *halves_table(x.dtype))[0], {"arrangement": Arrangement.PAIRS}),
    "deepseek_v2": (
        rotated_by_deepseek_v2,
        {"arrangement": Arrangement.PAIRS, "precision": RotaryPrecision.COMPLEX},
    ),
    "deepseek_v3": (
        lambda x: deepseek_v3(x, x, *halves_table(x.dtype))[0],
        {"arrangement": Arrangement.PAIRS_TO_HALVES},
    ),
    "olmo2": (lambda x: olmo2(x, x, *halves_table(torch.float32))[0], {"precision": RotaryPrecision.WIDE}),
}


@pytest.mark.parametrize("family", ROTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_arrangement_and_precision_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    theirs, options = ROTATIONS[family]
    x = random_tensor(1, 3, 50, DIM, dtype=dtype)
    rotary = ours("default", **options)
    found = rotate(x, rotary_table(rotary, POSITIONS, dtype=dtype), rotary)
    assert torch.equal(found, theirs(x))


@pytest.mark.parametrize("arrangement", Arrangement)
def test_channels_beyond_the_turned_ones_pass(arrangement: Arrangement) -> None:
    rotary = Rotary(8, 10000.0, DefaultForm(), arrangement=arrangement)
    x = random_tensor(2, 5, 20, dtype=torch.float32)
    found = rotate(x, rotary_table(rotary, torch.arange(5), dtype=torch.float32), rotary)
    assert torch.equal(found[..., 8:], x[..., 8:])
    assert not torch.equal(found[..., :8], x[..., :8])


@pytest.mark.parametrize("arrangement", Arrangement)
def test_scores_depend_on_distances_alone(arrangement: Arrangement) -> None:
    rotary = Rotary(DIM, 10000.0, DefaultForm(), arrangement=arrangement)
    query, key = random_tensor(1, 1, DIM, seed=1), random_tensor(1, 1, DIM, seed=2)

    def score(at: int, other: int) -> torch.Tensor:
        tables = [rotary_table(rotary, torch.tensor([p]), dtype=torch.float64) for p in (at, other)]
        return (rotate(query, tables[0], rotary) * rotate(key, tables[1], rotary)).sum()

    # Cosines in float32, of sums over 32 channels.
    torch.testing.assert_close(score(3, 1), score(13, 11), rtol=1e-5, atol=1e-5)
    assert (score(3, 1) - score(3, 2)).abs() > 1e-3


# Out of a configuration


def test_what_a_configuration_leaves_out_is_derived_as_transformers_does() -> None:
    longrope = rotary_form_named("su", {"short_factor": SHORT, "long_factor": LONG, **ORIGINAL}, max_positions=256)
    assert longrope == LongRopeForm(tuple(SHORT), tuple(LONG), 64, 4.0)
    assert rotary_form_named("yarn", {"factor": 4.0}, max_positions=256) == YarnForm(4.0, 256)
    assert rotary_form_named("yarn", {"factor": None, "mscale": None, **ORIGINAL}, max_positions=256).factor == 4.0
    assert rotary_form_named("dynamic", {"factor": 2.0}, max_positions=99) == DynamicForm(2.0, 99)
    assert set(ROTARY_FORM_ALIASES.values()) <= set(ROTARY_FORMS)


@pytest.mark.parametrize(
    ("name", "parameters", "field"),
    [
        ("xpos", {}, "rope_parameters"),
        ("linear", {}, "rope_parameters.factor"),
        ("linear", {"factor": "two"}, "rope_parameters.factor"),
        ("linear", {"factor": True}, "rope_parameters.factor"),
        ("linear", {"factor": float("nan")}, "rope_parameters.factor"),
        ("llama3", {"factor": 2.0, "low_freq_factor": 1.0}, "rope_parameters.high_freq_factor"),
        ("longrope", {"short_factor": SHORT, "factor": 2.0}, "rope_parameters.long_factor"),
        ("longrope", {"short_factor": 1.0, "long_factor": LONG}, "rope_parameters.short_factor"),
        ("yarn", {"factor": 2.0, "truncate": 1}, "rope_parameters.truncate"),
        ("linear", {"factor": 0}, "rope_parameters.factor"),
        ("linear", {"factor": 10**400}, "rope_parameters.factor"),
        ("yarn", {"factor": 2.0, "beta_fast": 0}, "rope_parameters.beta_fast"),
        (
            "llama3",
            {"factor": 2.0, "low_freq_factor": 0.0, "high_freq_factor": 4.0},
            "rope_parameters.low_freq_factor",
        ),
        ("longrope", {"short_factor": [0.0], "long_factor": [1.0]}, "rope_parameters.short_factor"),
    ],
)
def test_parameters_that_cannot_be_are_refused_by_name(name: str, parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        rotary_form_named(name, parameters, max_positions=64)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((7, 10000.0, DefaultForm()), "dim"),
        ((0, 10000.0, DefaultForm()), "dim"),
        ((8, 1.0, DefaultForm()), "theta"),
        ((8, float("inf"), DefaultForm()), "theta"),
        ((8, 10000.0, LongRopeForm((1.0,) * 4, (1.0,) * 3, 64, 2.0)), "long_factor"),
        # The logarithm of its context and the exponent of its base are divided by.
        ((8, 10000.0, LongRopeForm((1.0,) * 4, (1.0,) * 4, 1, 2.0)), "original_max_position_embeddings"),
        ((2, 10000.0, DynamicForm(2.0, 64)), "dim"),
        ((8, 10000.0, DefaultForm(), Arrangement.HALVES, RotaryPrecision.ROUNDED, 6), "over"),
        ((8, 10000.0, DefaultForm(), Arrangement.HALVES, RotaryPrecision.ROUNDED, 9), "over"),
        ((8, 10000.0, YarnForm(2.0, 64), Arrangement.HALVES, RotaryPrecision.ROUNDED, 7), "over"),
    ],
)
def test_a_rotation_that_cannot_be_is_refused(arguments: tuple[Any, ...], field: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        Rotary(*arguments)
    assert caught.value.field == field
