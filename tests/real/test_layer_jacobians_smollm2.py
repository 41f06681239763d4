"""Jacobians of SmolLM2's attention and whole layers over 8 tokens, against autograd through transformers' layers."""

from typing import Any

import pytest
import torch
from glassblock_client import Client
from tokenizers import Tokenizer
from torch import Tensor

from real.conftest import PARAGRAPH

pytestmark = pytest.mark.real

TOKENS = 8
# The text's states are computed in float32, here and there.
FLOAT32 = 1e-4


@pytest.fixture(scope="module")
def ids(smollm2: Any) -> list[int]:
    return Tokenizer.from_file(str(smollm2.single / "tokenizer.json")).encode(PARAGRAPH).ids[:TOKENS]


def pulled(model: Any, ids: list[int], number: int, part: str, probes: Tensor) -> Tensor:
    """`J^T z` for each of `[probes, tokens, d]`, through transformers' layer, differentiated by autograd."""
    layer = model.model.layers[number]
    entered: dict[str, Tensor] = {}
    hook = layer.register_forward_pre_hook(
        lambda _m, args, kwargs: entered.update(x=args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    model(torch.tensor([ids]))
    hook.remove()
    x = entered["x"].detach().clone().requires_grad_()
    positions = torch.arange(len(ids))[None]
    rotary = model.model.rotary_emb(x, positions)
    mask = torch.full((1, 1, len(ids), len(ids)), -torch.inf).triu(1)
    if part == "layer":
        made = layer(x, attention_mask=mask, position_embeddings=rotary)
        made = made[0] if isinstance(made, tuple) else made
    else:
        made, _ = layer.self_attn(layer.input_layernorm(x), position_embeddings=rotary, attention_mask=mask)
    grads = [torch.autograd.grad(made, x, probe[None], retain_graph=True)[0][0] for probe in probes]
    return torch.stack(grads)


@pytest.mark.parametrize("part", ["attention", "layer"])
@pytest.mark.parametrize("number", [0, 29])
def test_norms_hold_what_transformers_pulls_back(
    client: Client, smollm2: Any, model: Any, ids: list[int], number: int, part: Any
) -> None:
    answer = client.jacobians(
        smollm2.single.name, [number], part=part, token_ids=ids, tolerance=1e-3, probes=64, vectors=True
    )
    (found,) = answer.answer.layers
    assert found.whole is not None
    frobenius, spectral = found.whole.frobenius, found.whole.spectral
    assert frobenius is not None
    assert spectral is not None
    assert frobenius.inputs == tuple(range(TOKENS))
    width = answer.answer.width
    probes = torch.where(torch.rand(96, TOKENS, width, generator=torch.Generator().manual_seed(1)) < 0.5, -1.0, 1.0)
    squares = pulled(model, ids, number, part, probes).double().square().sum((1, 2))
    # Two estimates of one number, of the square: six of their errors together.
    error = float(squares.std()) / len(squares) ** 0.5 + 2 * frobenius.frobenius * frobenius.standard_error
    assert abs(float(squares.mean()) - frobenius.frobenius**2) <= 6 * error
    left, right = (
        torch.from_numpy(answer.tensors[f"layers.{number}.{found.placement}.{side}"]) for side in ("left", "right")
    )
    # J^T of the left vector has the largest singular value's length, along the right one.
    back = pulled(model, ids, number, part, left[None])[0]
    assert spectral.converged
    assert float(torch.linalg.vector_norm(back)) == pytest.approx(spectral.lower, rel=1e-3)
    assert float((back * right).sum()) == pytest.approx(spectral.lower, rel=FLOAT32)
    assert spectral.upper <= 1.001 * spectral.lower
    assert found.self_check is not None
    assert found.self_check.relative_difference < 1e-6


def test_depth_over_whole_layers_of_a_text(client: Client, smollm2: Any, ids: list[int]) -> None:
    answer = client.jacobians(
        smollm2.single.name, [0, 1, 2], part="layer", token_ids=ids, depth=True, norms=["frobenius"], probes=4
    ).answer
    depth = answer.depth
    assert depth is not None
    assert (depth.coupled, depth.part) == (True, "layer")
    for curve in (depth.to_end, depth.from_start):
        for (frobenius,), (lower,), (product,) in zip(
            curve.frobenius,  # pyright: ignore[reportArgumentType]
            curve.spectral_lower,  # pyright: ignore[reportArgumentType]
            curve.product_upper,  # pyright: ignore[reportArgumentType]
            strict=True,
        ):
            assert 0 < lower <= product  # pyright: ignore[reportOperatorIssue]
            assert frobenius > 0  # pyright: ignore[reportOperatorIssue]
