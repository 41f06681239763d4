"""Jacobian norms of SmolLM2's blocks at real hidden states against autograd's dense Jacobian in float64."""

from typing import Any, NamedTuple

import pytest
import torch
from glassblock.checkpoint.layers import load_feed_forward, load_wiring
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.numerics.block import run_block
from glassblock.numerics.block_norms import METHODS, block_norms
from glassblock.numerics.condition_numbers import condition_numbers
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.spectral_bracket import spectral_bracket
from glassblock.numerics.spectral_request import Certificate, SpectralRequest
from glassblock.numerics.wiring import Wiring
from tokenizers import Tokenizer
from torch import Tensor

from real.conftest import PARAGRAPH, capturing

pytestmark = pytest.mark.real

EXACT = (0, 11, 12, 29)
# Their second singular value is near the first: 0.9984 and 0.987 of it.
NEAR_DEGENERATE = (26, 28)
# The massive one, and those that follow it.
TOKENS = [0, 1, 2, 3, 40, 41, 80, 122]


class Case(NamedTuple):
    x: Tensor
    network: FeedForward
    wiring: Wiring

    def few(self, tokens: int) -> "Case":
        return self._replace(x=self.x[:tokens])


@pytest.fixture(scope="module")
def cases(smollm2: Any, model: Any) -> dict[int, Case]:
    tokens = Tokenizer.from_file(str(smollm2.single / "tokenizer.json")).encode(PARAGRAPH).ids
    layers = (*EXACT, *NEAR_DEGENERATE)
    with capturing({n: model.model.layers[n] for n in layers}) as captured, torch.inference_mode():
        model(torch.tensor([tokens]))
    checkpoint, meter = open_checkpoint(smollm2.single), ReadMeter()
    return {
        n: Case(
            captured[n]["x"][0, TOKENS].clone(),
            load_feed_forward(checkpoint, n, "cpu", meter),
            load_wiring(checkpoint, n, "cpu", meter),
        )
        for n in layers
    }


def dense(case: Case) -> Tensor:
    def output(row: Tensor) -> Tensor:
        return run_block(row, case.network, case.wiring).output

    return torch.stack([torch.func.jacrev(output)(row) for row in case.x.double()])


@pytest.mark.parametrize("layer", EXACT)
def test_exact_norms(cases: dict[int, Case], layer: int) -> None:
    case = cases[layer]
    expected = dense(case)
    frobenius = torch.linalg.matrix_norm(expected)
    trace = expected.diagonal(dim1=-2, dim2=-1).sum(-1)
    x = case.x.double()
    along = torch.einsum("tij,tj->ti", expected, x / torch.linalg.vector_norm(x, dim=-1, keepdim=True))
    gain = torch.linalg.vector_norm(along, dim=-1)
    if layer >= 12:
        assert case.x[0].square().mean() > 2e5  # the massive token is among them
    for rows, tolerance in ((x, 1e-12), (case.x, 1e-5)):
        for method in METHODS:
            found = block_norms(rows, case.network, case.wiring, method=method)
            assert found.accumulation == rows.dtype
            assert not found.redone.any()
            torch.testing.assert_close(found.frobenius, frobenius, rtol=tolerance, atol=0.0)
            torch.testing.assert_close(found.radial_gain, gain, rtol=tolerance, atol=0.0)
            # Relative to the Frobenius norm: it sums numbers of both signs.
            assert ((found.trace - trace).abs() <= tolerance * frobenius).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layer", NEAR_DEGENERATE)
def test_spectral_norms_where_the_second_singular_value_is_near(
    cases: dict[int, Case], layer: int, dtype: torch.dtype
) -> None:
    case = cases[layer].few(4)
    x = case.x.to(dtype)
    exact = spectral_bracket(
        x, case.network, case.wiring, request=SpectralRequest(tolerance=1e-9, certificate=Certificate.DENSE)
    )
    fine = spectral_bracket(x, case.network, case.wiring, request=SpectralRequest(tolerance=1e-6))
    assert fine.converged.all()
    assert (fine.lower <= exact.upper).all()
    assert (exact.lower <= fine.upper).all()
    torch.testing.assert_close(fine.lower, exact.lower, rtol=1e-6, atol=0.0)
    # float32 cannot hold six digits, and says so by doing them again.
    assert fine.redone.all() == (dtype is torch.float32)
    coarse = spectral_bracket(x, case.network, case.wiring)
    assert coarse.converged.all()
    assert not coarse.redone.any()
    assert (coarse.lower <= exact.upper).all()
    assert (exact.lower <= coarse.upper).all()


def test_the_dense_decomposition_is_that_of_autograds_jacobian(cases: dict[int, Case]) -> None:
    case = cases[28].few(2)
    values = torch.linalg.svdvals(dense(case))
    request = SpectralRequest(tolerance=1e-9, certificate=Certificate.DENSE)
    found = spectral_bracket(case.x, case.network, case.wiring, request=request)
    torch.testing.assert_close(found.upper, values[:, 0], rtol=1e-12, atol=0.0)
    condition = values[:, 0] / values[:, -1]
    both = {m: condition_numbers(case.x, case.network, case.wiring, method=m) for m in ("dense", "inverse")}
    for numbers in both.values():
        assert (numbers.condition_lower <= condition).all()
        assert (condition <= numbers.condition_upper).all()
        assert numbers.converged.all()


def test_a_certificate_of_cholesky(cases: dict[int, Case]) -> None:
    case = cases[26].few(2)
    request = SpectralRequest(tolerance=1e-6, certificate=Certificate.CHOLESKY)
    found = spectral_bracket(case.x, case.network, case.wiring, request=request)
    assert found.converged.all()
    assert found.certain.all()
