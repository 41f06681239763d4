"""Golub-Kahan bidiagonalisation and the bounds that stand on it, against dense decompositions in float64."""

from dataclasses import dataclass

import pytest
import torch
from glassblock.numerics.golub_kahan import golub_kahan, largest_singular_value_bound, uniform_starts
from glassblock.numerics.singular_bracket import bracket_largest, frobenius_bound
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from numerics.makers import random_tensor

EPS = torch.finfo(torch.float64).eps
# Orthogonality and decompositions of matrices of size one and of a dozen columns.
ROUNDING = 1e-13


@dataclass(frozen=True)
class Dense:
    matrices: Tensor

    def times(self, v: Tensor) -> Tensor:
        return torch.einsum("tij,tj->ti", self.matrices, v)

    def transposed_times(self, v: Tensor) -> Tensor:
        return torch.einsum("tij,ti->tj", self.matrices, v)


def with_singular_values(*spectra: list[float], seed: int = 0) -> Tensor:
    """Dense matrices of these singular values between random rotations."""
    values = torch.tensor(spectra, dtype=torch.float64)
    left, right = (
        torch.linalg.qr(random_tensor(*values.shape, values.shape[1], seed=seed + number)).Q for number in (1, 2)
    )
    return left @ torch.diag_embed(values) @ right.mT


def last(matrices: Tensor, *, steps: int, seed: int = 0):
    starts = uniform_starts(len(matrices), matrices.shape[-1], seed=seed).to(matrices.dtype)
    *_, state = golub_kahan(Dense(matrices), starts, steps=steps)
    return state


def test_the_recurrence_holds_and_the_vectors_are_orthonormal() -> None:
    matrices = random_tensor(3, 12, 12, seed=1)
    state = last(matrices, steps=7)
    eye = torch.eye(7, dtype=torch.float64).expand(3, 7, 7)
    close = {"rtol": 0.0, "atol": ROUNDING}
    torch.testing.assert_close(state.left @ state.left.mT, eye, **close)
    torch.testing.assert_close(state.right @ state.right.mT, eye, **close)
    # J V = U B, with vectors in rows here.
    torch.testing.assert_close(matrices @ state.right.mT, state.left.mT @ state.matrix(), **close)


def test_all_steps_give_all_singular_values() -> None:
    matrices = random_tensor(3, 12, 12, seed=2)
    state = last(matrices, steps=99)
    assert state.steps == 12
    torch.testing.assert_close(state.ritz_values(), torch.linalg.svdvals(matrices), rtol=0.0, atol=ROUNDING)
    left, right = state.top_vectors()
    torch.testing.assert_close(
        torch.einsum("tij,tj->ti", matrices, right), state.ritz_values()[:, :1] * left, rtol=0.0, atol=ROUNDING
    )


def test_an_early_end() -> None:
    """The identity ends after one step, two different singular values after two, a singular matrix in its rank."""
    spectra = [[2.0] * 6, [3.0] * 3 + [1.0] * 3, [5.0, 4.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 6]
    matrices = with_singular_values(*spectra, seed=3)
    matrices[3] = 0.0
    state = last(matrices, steps=6)
    ritz = state.ritz_values()
    expected = torch.tensor([[2.0, 0.0], [3.0, 1.0], [5.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(ritz[:, :2], expected, rtol=0.0, atol=ROUNDING)
    assert (ritz[:, 3:] == 0).all()
    bound = largest_singular_value_bound(state, ritz, d=6, failure_probability=1e-6)
    assert (bound[:3] >= expected[:3, 0]).all()
    # A floor of 64 eps over a probability of 1e-6 is a relative square of 1e-8.
    assert (bound[:3] <= expected[:3, 0] * (1 + 1e-7)).all()
    assert bound[3].isinf()


def test_starts_are_uniform_and_seeded() -> None:
    starts = uniform_starts(20_000, 3, seed=5)
    torch.testing.assert_close(starts.square().sum(-1), torch.ones(20_000, dtype=torch.float64))
    # On the sphere in three dimensions a coordinate is uniform on [-1, 1]: mean square 1/3, fourth moment 1/5. Five
    # standard errors of 20,000 draws.
    assert abs(float(starts[:, 0].square().mean()) - 1 / 3) < 5 * 0.3 / 20_000**0.5
    assert abs(float(starts[:, 0].pow(4).mean()) - 1 / 5) < 5 * 0.3 / 20_000**0.5
    assert torch.equal(starts, uniform_starts(20_000, 3, seed=5))
    assert not torch.equal(starts, uniform_starts(20_000, 3, seed=6))


def test_the_bound_fails_as_often_as_it_says() -> None:
    """One step on two singular values is the worst case: the bound fails exactly where the start hides the larger.

    In ten dimensions a coordinate below 0.1 / sqrt(20/pi) has a probability of 0.092, for p = 0.1.
    """
    values = [1.05] + [1.0] * 9
    matrices = torch.diag(torch.tensor(values, dtype=torch.float64)).expand(4000, 10, 10)
    state = last(matrices, steps=1, seed=7)
    ritz = state.ritz_values()
    fooled = int((largest_singular_value_bound(state, ritz, d=10, failure_probability=0.1) < 1.05).sum())
    assert abs(fooled - 369) < 4 * 18.3  # four standard deviations
    assert (largest_singular_value_bound(state, ritz, d=10, failure_probability=1e-9) >= 1.05).all()


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_the_frobenius_bound_holds_for_every_start(steps: int) -> None:
    matrices = random_tensor(50, 8, 8, seed=8)
    ritz = last(matrices, steps=steps).ritz_values()
    bound = frobenius_bound(torch.linalg.matrix_norm(matrices), ritz, rounding=EPS * ritz[:, 0])
    largest = torch.linalg.svdvals(matrices)[:, 0]
    assert (bound >= largest * (1 - ROUNDING)).all()
    if steps == 8:
        torch.testing.assert_close(bound, largest, rtol=ROUNDING, atol=0.0)


@settings(max_examples=40, deadline=None)
@given(
    gap=st.sampled_from([0.0, 1e-15, 1e-10, 1e-6, 1e-3, 0.1, 0.9]),
    d=st.integers(1, 16),
    cluster=st.integers(1, 4),
    tail=st.sampled_from([0.0, 1e-8, 0.5, 0.99]),
    size=st.sampled_from([1e-170, 1e-100, 1.0, 1e100, 1e170]),
    steps=st.integers(1, 20),
    seed=st.integers(0, 10_000),
)
def test_the_bracket_holds_the_truth(
    gap: float, d: int, cluster: int, tail: float, size: float, steps: int, seed: int
) -> None:
    """Near-degenerate spectra included. The truth is known by construction, to the rounding of two rotations."""
    spectrum = [size * (1.0 - gap * i / cluster if i < cluster else (1.0 - gap) * tail) for i in range(d)]
    matrices = with_singular_values(spectrum, spectrum, seed=seed)
    known = torch.linalg.svdvals(matrices / size)[:, 0] * size
    frobenius = torch.linalg.matrix_norm(matrices / size) * size * (1 + ROUNDING)
    starts = uniform_starts(2, d, seed=seed)
    for probability, norms in ((1e-9, None), (None, frobenius), (1e-9, frobenius)):
        found = bracket_largest(
            Dense(matrices),
            starts,
            steps=steps,
            tolerance=1e-6,
            failure_probability=probability,
            frobenius=norms,
            eps=16 * EPS,
        )
        assert (found.lower <= known).all(), (found.lower - known) / known
        assert (known <= found.upper).all(), (found.upper - known) / known
        assert (found.converged == (found.upper <= found.lower * (1 + 1e-6))).all()
        if norms is None:
            assert not found.certain.any()
        if probability is None:
            assert found.certain.all()


def test_steps_go_on_until_the_bracket_is_narrow() -> None:
    """Sigma_2 is near enough to hold the Ritz value for many steps."""
    spectrum = [1.0, 1.0 - 1e-4, *torch.linspace(0.9, 0.0, 58).tolist()]
    matrices = with_singular_values(spectrum, seed=9)
    starts = uniform_starts(1, 60, seed=1)
    wide, narrow = (
        bracket_largest(Dense(matrices), starts, steps=60, tolerance=tolerance, failure_probability=1e-9, eps=16 * EPS)
        for tolerance in (1e-2, 1e-8)
    )
    assert wide.converged.all()
    assert narrow.converged.all()
    assert wide.state.steps < narrow.state.steps
    assert abs(float(narrow.lower) - 1.0) < 1e-8
    short = bracket_largest(Dense(matrices), starts, steps=10, tolerance=1e-8, failure_probability=1e-9, eps=16 * EPS)
    assert not short.converged.any()
