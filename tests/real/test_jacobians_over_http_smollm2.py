"""jacobians over the service's own path, at real hidden states of SmolLM2, against autograd's dense Jacobian."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from glassblock.checkpoint.layers import load_feed_forward, load_wiring
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.numerics.block import residual_output
from glassblock.wire.jacobians import LayerJacobians
from glassblock_client import Client
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from real.conftest import PARAGRAPH, capturing

pytestmark = pytest.mark.real

Array = NDArray[np.float64]

LAYERS = 30
EXACT = (0, 11, 29)
# The massive one, and those that follow it.
TOKENS = [0, 1, 2, 3, 40, 41, 80, 122]


class States(NamedTuple):
    """What enters the feed-forward block of each layer, `[tokens, d]`."""

    x: dict[int, Tensor]
    checkpoint: Checkpoint


@pytest.fixture(scope="module")
def states(smollm2: Any, model: Any) -> States:
    tokens = Tokenizer.from_file(str(smollm2.single / "tokenizer.json")).encode(PARAGRAPH).ids
    with capturing({n: model.model.layers[n] for n in range(LAYERS)}) as captured, torch.inference_mode():
        model(torch.tensor([tokens]))
    return States({n: captured[n]["x"][0, TOKENS].clone() for n in range(LAYERS)}, open_checkpoint(smollm2.single))


def dense(states: States, layer: int) -> Tensor:
    """By autograd, in float64."""
    network = load_feed_forward(states.checkpoint, layer, "cpu", ReadMeter())
    wiring = load_wiring(states.checkpoint, layer, "cpu", ReadMeter())
    jacobian = torch.func.jacrev(lambda row: residual_output(row, network, wiring))
    return torch.stack([jacobian(row) for row in states.x[layer].double()])


def column(layer: LayerJacobians, name: str) -> Array:
    return np.array([getattr(token, name) for token in layer.tokens], np.float64)


@pytest.mark.parametrize("layer", EXACT)
def test_exact_norms(client: Client, smollm2: Any, states: States, layer: int) -> None:
    expected, x = dense(states, layer), states.x[layer].double()
    frobenius = torch.linalg.matrix_norm(expected).numpy()
    trace = expected.diagonal(dim1=-2, dim2=-1).sum(-1).numpy()
    lengths = torch.linalg.vector_norm(x, dim=-1)
    gain = (torch.linalg.vector_norm(torch.einsum("tij,tj->ti", expected, x), dim=-1) / lengths).numpy()
    norms = ("frobenius", "trace", "radial_gain")
    for rows, tolerance in ((x.numpy(), 1e-12), (states.x[layer].numpy(), 1e-5)):
        answer = client.jacobians(smollm2.single.name, [layer], x=rows, norms=norms).answer
        found = answer.layers[0]
        np.testing.assert_allclose(column(found, "frobenius"), frobenius, rtol=tolerance)
        np.testing.assert_allclose(column(found, "radial_gain"), gain, rtol=tolerance)
        # Relative to the Frobenius norm: it sums numbers of both signs.
        assert (np.abs(column(found, "trace") - trace) <= tolerance * frobenius).all()
        assert found.accumulation == str(rows.dtype)
        assert found.redone == ()
        assert found.cancellation is not None
        assert 1.0 <= found.cancellation < 1e3
        assert found.self_check is not None
        assert found.self_check.tokens == len(TOKENS)
        assert found.self_check.relative_difference < 1e-8


@pytest.mark.parametrize("layer", range(LAYERS))
def test_spectral_norms_to_six_digits(client: Client, smollm2: Any, states: States, layer: int) -> None:
    """Layers 26 and 28 hold tokens whose second singular value is within a few thousandths of the first."""
    largest = torch.linalg.svdvals(dense(states, layer))[:, 0].numpy()
    rows = states.x[layer].numpy()
    answer = client.jacobians(smollm2.single.name, [layer], x=rows, norms=["spectral"], tolerance=1e-6).answer
    found = answer.layers[0]
    assert found.spectral is not None
    assert found.spectral.not_converged == 0
    brackets = [token.spectral for token in found.tokens]
    for bracket, truth in zip(brackets, largest, strict=True):
        assert bracket is not None
        # The oracle's own singular values are known to some d eps.
        assert bracket.lower <= truth * (1 + 1e-12)
        assert truth <= bracket.upper * (1 + 1e-12)
        assert bracket.lower == pytest.approx(truth, rel=1e-6)
        assert bracket.upper <= bracket.lower * (1 + 1e-6)


def test_the_massive_token_passes_through_as_if_there_were_no_block(
    client: Client, smollm2: Any, states: States
) -> None:
    """From layer 12 to 25 its branch hardly bends the stream: J is near the identity."""
    answer = client.jacobians(smollm2.single.name, [15], x=states.x[15].numpy()).answer
    spectral = [token.spectral for token in answer.layers[0].tokens]
    assert spectral[0] is not None
    assert spectral[0].lower == pytest.approx(1.0, abs=1e-2)
    assert all(other is not None and other.lower > 1.5 for other in spectral[1:])
