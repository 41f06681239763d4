"""Attention against its definition, in bounded memory, and what it refuses. Families: `test_layer`."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.attention import Attention, NormScope, run_attention
from glassblock.numerics.causal_attention import causal_attention
from glassblock.numerics.latent_attention import LatentAttention, latent_score_scale, run_latent_attention
from glassblock.numerics.rotary import Rotary
from glassblock.numerics.rotary_forms import DefaultForm
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from numerics.makers import make_norm, random_tensor

D, HEADS, KV_HEADS, WIDTH = 24, 4, 2, 8
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 3},
    "window of one": {"window": 1},
    "window as long as the sequence": {"window": 9},
    "soft cap": {"softcap": 0.7},
    "sinks": {"sinks": random_tensor(HEADS, seed=9)},
    "all": {"window": 4, "softcap": 0.7, "sinks": random_tensor(HEADS, seed=9)},
}


def states(
    tokens: int = 9, *, kv_heads: int = KV_HEADS, value_width: int = WIDTH, batch: int = 2
) -> tuple[Tensor, ...]:
    return (
        random_tensor(batch, HEADS, tokens, WIDTH, seed=1),
        random_tensor(batch, kv_heads, tokens, WIDTH, seed=2),
        random_tensor(batch, kv_heads, tokens, value_width, seed=3),
    )


def defined(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Token by token and head by head, in plain sums."""
    batch, heads, tokens, _ = query.shape
    out = torch.zeros(batch, heads, tokens, value.shape[-1], dtype=query.dtype)
    for b in range(batch):
        for head in range(heads):
            shared = head // (heads // key.shape[1])
            for at in range(tokens):
                seen = [k for k in range(tokens) if k <= at and (window is None or k > at - window)]
                logits = [scale * float(query[b, head, at] @ key[b, shared, k]) for k in seen]
                if softcap is not None:
                    logits = [softcap * math.tanh(logit / softcap) for logit in logits]
                weights = [math.exp(logit) for logit in logits]
                total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[head])))
                for k, weight in zip(seen, weights, strict=True):
                    out[b, head, at] += weight / total * value[b, shared, k]
    return out


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("value_width", [WIDTH, 5])
@pytest.mark.parametrize("byte_budget", [2**28, 2000, 1])
def test_attention_follows_its_definition(case: str, kv_heads: int, value_width: int, byte_budget: int) -> None:
    given = states(kv_heads=kv_heads, value_width=value_width)
    found = causal_attention(*given, scale=0.3, byte_budget=byte_budget, **CASES[case])
    # float64: sums of nine products of numbers of the order of one.
    torch.testing.assert_close(found, defined(*given, scale=0.3, **CASES[case]), rtol=1e-12, atol=1e-13)


class Largest(TorchDispatchMode):
    """The most bytes that one tensor made under it takes."""

    nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("case", ["plain", "window", "all"])
@pytest.mark.parametrize("value_width", [WIDTH, 5])
def test_long_sequences_keep_to_the_byte_budget(case: str, value_width: int) -> None:
    tokens, budget = 1024, 2**19
    given = states(tokens, value_width=value_width, batch=1)
    with Largest() as largest:
        causal_attention(*given, scale=0.3, byte_budget=budget, **CASES[case])
    scores = HEADS * tokens * tokens * 8
    assert largest.nbytes < budget < scores / 16


@pytest.mark.parametrize("scope", NormScope)
def test_the_scopes_of_query_and_key_norms(scope: NormScope) -> None:
    widths = (WIDTH, WIDTH) if scope is NormScope.HEAD else (HEADS * WIDTH, KV_HEADS * WIDTH)
    norms = [make_norm("layernorm", width, seed=20 * i) for i, width in enumerate(widths)]
    layer = make_attention(query_norm=norms[0], key_norm=norms[1], norm_scope=scope, rotary=None)
    n = random_tensor(5, D, seed=8)
    found = run_attention(n, layer, positions=torch.arange(5))
    for stage, weight, norm, heads in (
        (found.query, layer.query, norms[0], HEADS),
        (found.key, layer.key, norms[1], KV_HEADS),
    ):
        for token in range(5):
            row = weight @ n[token]
            rows = [row] if scope is NormScope.WIDTH else list(row.split(WIDTH))
            for j, part in enumerate(rows):
                own = slice(None) if scope is not NormScope.EACH_HEAD else slice(j * WIDTH, (j + 1) * WIDTH)
                spread = (part - part.mean()).square().mean()
                rows[j] = (part - part.mean()) / (spread + norm.eps).sqrt() * norm.gain[own] + norm.bias[own]
            expected = torch.cat(rows).reshape(heads, WIDTH)
            torch.testing.assert_close(stage[:, token], expected, rtol=1e-12, atol=1e-13)


def test_the_stages_of_attention() -> None:
    layer = make_attention(clip_qkv=0.5, output_bias=random_tensor(D, seed=30), scale=0.4, rotary=None)
    n = random_tensor(2, 7, D, seed=8)
    found = run_attention(n, layer, positions=torch.arange(7))
    assert found.query.shape == (2, HEADS, 7, WIDTH)
    assert found.key.shape == found.value.shape == (2, KV_HEADS, 7, WIDTH)
    expected = (n @ layer.query.T).clamp(-0.5, 0.5).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
    torch.testing.assert_close(found.query, expected, rtol=1e-12, atol=1e-13)
    attended = defined(found.query, found.key, found.value, scale=0.4).transpose(1, 2).flatten(2)
    torch.testing.assert_close(found.attended, attended, rtol=1e-12, atol=1e-13)
    projected = attended @ layer.output.T + layer.output_bias
    torch.testing.assert_close(found.projected, projected, rtol=1e-12, atol=1e-13)


def test_every_sequence_may_have_positions_of_its_own() -> None:
    layer, n = make_attention(), random_tensor(2, 7, D, seed=8)
    positions = torch.stack((torch.arange(7), torch.arange(7) * 3))
    found = run_attention(n, layer, positions=positions).projected
    for row in range(2):
        alone = run_attention(n[row], layer, positions=positions[row]).projected
        torch.testing.assert_close(found[row], alone, rtol=1e-12, atol=1e-13)
    same = run_attention(n[1], layer, positions=torch.arange(7)).projected
    assert not torch.allclose(found[1], same)


def test_no_token_reads_a_later_one() -> None:
    layer, n = make_attention(window=3), random_tensor(7, D, seed=8)
    changed = n.clone()
    changed[4] += 1.0
    before, after = (run_attention(x, layer, positions=torch.arange(7)).projected for x in (n, changed))
    moved = (before != after).any(-1)
    assert moved.tolist() == [False] * 4 + [True] * 3


def test_gradients_flow_through_attention() -> None:
    layer, n = make_attention(), random_tensor(5, D, seed=8).requires_grad_()
    run_attention(n, layer, positions=torch.arange(5)).projected.sum().backward()
    assert n.grad is not None
    assert n.grad.abs().min() > 0


@pytest.mark.parametrize(("factor", "mscale", "expected"), [(40.0, 0.0, 0.25), (40.0, 1.0, 0.25 * 1.3688879454**2)])
def test_the_scale_of_latent_scores(factor: float, mscale: float, expected: float) -> None:
    # m = 0.1 ln 40 + 1 = 1.3688879454
    assert latent_score_scale(16, factor=factor, mscale_all_dim=mscale) == pytest.approx(expected, rel=1e-9)


# What cannot be


def make_attention(**changes: Any) -> Attention:
    given: dict[str, Any] = {
        "query": random_tensor(HEADS * WIDTH, D, seed=1, scale=D**-0.5),
        "key": random_tensor(KV_HEADS * WIDTH, D, seed=2, scale=D**-0.5),
        "value": random_tensor(KV_HEADS * WIDTH, D, seed=3, scale=D**-0.5),
        "output": random_tensor(D, HEADS * WIDTH, seed=4, scale=D**-0.5),
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": WIDTH,
        "scale": WIDTH**-0.5,
        "rotary": Rotary(WIDTH, 10000.0, DefaultForm()),
    }
    return Attention(**(given | changes))


def make_latent(**changes: Any) -> LatentAttention:
    given: dict[str, Any] = {
        "key_value_down": random_tensor(6 + 4, D),
        "key_value_norm": make_norm("rms_llama", 6),
        "key_value_up": random_tensor(HEADS * (8 + 5), 6),
        "output": random_tensor(D, HEADS * 5),
        "heads": HEADS,
        "nope_dim": 8,
        "rope_dim": 4,
        "v_dim": 5,
        "scale": 12**-0.5,
        "rotary": Rotary(4, 10000.0, DefaultForm()),
        "query": random_tensor(HEADS * 12, D),
    }
    return LatentAttention(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"query": torch.ones(HEADS * WIDTH + 1, D)}, "query"),
        ({"key": torch.ones(HEADS * WIDTH, D)}, "key"),
        ({"value": torch.ones(KV_HEADS * WIDTH, D + 1)}, "value"),
        ({"v_head_dim": 5}, "value"),
        ({"output": torch.ones(HEADS * WIDTH, D)}, "output"),
        ({"output": torch.ones(D, HEADS * WIDTH, dtype=torch.int8)}, "output"),
        ({"key_bias": torch.ones(3)}, "key_bias"),
        ({"sinks": torch.ones(HEADS + 1)}, "sinks"),
        ({"heads": 0}, "heads"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"head_dim": -8}, "head_dim"),
        ({"scale": 0.0}, "scale"),
        ({"softcap": float("nan")}, "softcap"),
        ({"window": 0}, "window"),
        ({"clip_qkv": -1.0}, "clip_qkv"),
        ({"rotary": Rotary(WIDTH + 2, 10000.0, DefaultForm())}, "rotary"),
        ({"query_norm": make_norm("rms_llama", WIDTH)}, "query_norm"),
        ({"query_norm": make_norm("rms_llama", 5), "key_norm": make_norm("rms_llama", WIDTH)}, "query_norm"),
        (
            {
                "query_norm": make_norm("rms_llama", WIDTH),
                "key_norm": make_norm("rms_llama", WIDTH),
                "norm_scope": NormScope.WIDTH,
            },
            "query_norm",
        ),
        (
            {
                "query_norm": make_norm("rms_llama", HEADS * WIDTH),
                "key_norm": make_norm("rms_llama", KV_HEADS * WIDTH),
                "norm_scope": NormScope.WIDTH,
                "norms_after_rotary": True,
            },
            "norm_scope",
        ),
    ],
)
def test_attention_that_cannot_be_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        make_attention(**changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"key_value_down": torch.ones(9, D)}, "key_value_down"),
        ({"key_value_up": torch.ones(9, 6)}, "key_value_up"),
        ({"output": torch.ones(D, 7)}, "output"),
        ({"query": torch.ones(HEADS * 8, D)}, "query"),
        ({"query": None}, "query"),
        ({"query_down": torch.ones(3, D)}, "query"),
        ({"query": None, "query_down": torch.ones(3, D), "query_up": torch.ones(HEADS * 12, 3)}, "query"),
        ({"rope_dim": 0}, "rope_dim"),
        ({"scale": float("inf")}, "scale"),
        ({"rotary": Rotary(8, 10000.0, DefaultForm())}, "rotary"),
        ({"key_value_norm": make_norm("rms_llama", 7)}, "key_value_norm"),
    ],
)
def test_latent_attention_that_cannot_be_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        make_latent(**changes)
    assert caught.value.field == field


@pytest.mark.parametrize("make", [make_attention, make_latent])
@pytest.mark.parametrize(
    ("shape", "positions", "dtype", "field"),
    [
        ((5, D + 1), torch.arange(5), None, "x"),
        ((D,), torch.arange(1), None, "x"),
        ((5, D), torch.arange(4), None, "positions"),
        ((2, 5, D), torch.zeros(3, 5, dtype=torch.int64), None, "positions"),
        ((5, D), torch.arange(5), torch.int8, "dtype"),
    ],
)
def test_a_request_that_cannot_be_is_refused_by_name(
    make: Any, shape: tuple[int, ...], positions: Tensor, dtype: torch.dtype | None, field: str
) -> None:
    layer = make()
    run = run_attention if isinstance(layer, Attention) else run_latent_attention
    with pytest.raises(InvalidValue) as caught:
        run(torch.ones(shape, dtype=torch.float64), layer, positions=positions, dtype=dtype)
    assert caught.value.field == field


def test_tensors_are_all_counted() -> None:
    norm = make_norm("layernorm", WIDTH)
    layer = make_attention(
        query_norm=norm, key_norm=norm, sinks=torch.ones(HEADS), query_bias=torch.ones(HEADS * WIDTH)
    )
    assert len(layer.tensors) == 4 + 2 + 4
    assert len(make_latent().tensors) == 5
    assert replace(layer, v_head_dim=WIDTH).value_head_dim == layer.value_head_dim


def test_a_window_beyond_every_whole_number_of_torch_hides_nothing() -> None:
    query, key, value = states()
    sinks = random_tensor(HEADS, seed=9)  # with sinks the mask is written out
    wide = causal_attention(query, key, value, scale=0.3, window=10**30, sinks=sinks)
    assert torch.equal(wide, causal_attention(query, key, value, scale=0.3, sinks=sinks))
