"""Estimates and brackets for functions of token states, against the dense Jacobian of autograd."""

import math
from collections.abc import Callable

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.spectral_request import SpectralRequest
from glassblock.numerics.token_coupled_norms import (
    ESTIMATORS,
    PROBES,
    ROWS,
    coupled_frobenius,
    coupled_spectral,
)
from glassblock.numerics.watching import ComputationCancelled, Watch
from torch import Tensor

from numerics.makers import random_tensor

TOKENS, D = 5, 6


def mixing(*, scale: float = 1.0, rank: int | None = None) -> Callable[[Tensor], Tensor]:
    """Causal attention with one head, its scores and values of full or of low rank."""
    query, key, value = (random_tensor(D, D, seed=seed, scale=scale) for seed in (1, 2, 3))
    if rank is not None:
        value = value[:, :rank] @ value[:rank]
    mask = torch.full((TOKENS, TOKENS), -torch.inf, dtype=torch.float64).triu(1)

    def attend(x: Tensor) -> Tensor:
        scores = (x @ query) @ (x @ key).T / D**0.5 + mask
        return scores.softmax(-1) @ (x @ value)

    return attend


def dense(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`[tokens, d, tokens, d]`."""
    return torch.func.jacrev(function)(x)


X = random_tensor(TOKENS, D, seed=9)
# Rank one in each value, so that a few directions hold most of the norm: what hutch++ is for.
CASES = {"full rank": mixing(), "rank one": mixing(rank=1), "residual": lambda x: x + mixing()(x)}


@pytest.mark.parametrize("distribution", PROBES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("case", CASES)
def test_the_error_covers_the_truth_at_its_rate(case: str, estimator: str, distribution: str) -> None:
    """Over 200 seeds the 95 % interval holds the truth 190 times; 180 to 198 is within 3 standard deviations of that.

    Where nothing is left to estimate (rank one under a basis of 16), the interval is a point at the truth.
    """
    matrix = dense(CASES[case], X).reshape(TOKENS * D, TOKENS * D)
    truth = float(torch.linalg.vector_norm(matrix))

    def function(x: Tensor) -> Tensor:  # the same Jacobian, and sooner
        return (matrix @ x.reshape(-1)).view(TOKENS, D)

    found = [
        coupled_frobenius(function, X, probes=32, seed=seed, estimator=estimator, distribution=distribution)
        for seed in range(200)
    ]
    errors = torch.tensor([one.frobenius - truth for one in found])
    stated = torch.tensor([one.standard_error for one in found])
    if float(stated.max()) < 1e-10 * truth:
        assert float(errors.abs().max()) < 1e-10 * truth
        return
    covered = sum(one.lower <= truth <= one.upper for one in found)
    assert 180 <= covered <= 198, covered
    # The stated error is the error that there is: 200 draws of it are known to 5 %, and the estimate of it to more.
    assert float(errors.square().mean().sqrt() / stated.square().mean().sqrt()) == pytest.approx(1.0, abs=0.2)
    # Unbiased in the square; the root is lower by half the relative variance.
    assert abs(float(errors.mean())) < 4 * float(errors.std()) / 200**0.5 + float(errors.var()) / truth


def test_hutchplusplus_runs_where_few_directions_hold_the_norm_and_pays_there() -> None:
    assert coupled_frobenius(CASES["rank one"], X, seed=3).estimator == "hutch++"
    wide = 0.2 * random_tensor(40, D, seed=4)
    assert coupled_frobenius(lambda x: x + 0.1 * x.tanh(), wide, seed=3).estimator == "hutchinson"
    plain, better = (coupled_frobenius(CASES["rank one"], X, seed=3, estimator=name) for name in ESTIMATORS)
    assert better.standard_error < plain.standard_error / 2
    # A basis of 32 has two products each, beside 64 probes and no pilot.
    assert (plain.products, better.products) == (64, 64 + 2 * min(32, TOKENS * D))


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(None, None), ((0,), None), (None, (4,)), ((1, 3), (2, 4)), ((4,), (0, 1))]
)
@pytest.mark.parametrize("case", CASES)
def test_spectral_brackets_hold_the_dense_value_over_the_positions_chosen(
    case: str, inputs: tuple[int, ...] | None, outputs: tuple[int, ...] | None
) -> None:
    function = CASES[case]
    rows, columns = outputs or tuple(range(TOKENS)), inputs or tuple(range(TOKENS))
    chosen = dense(function, X)[list(rows)][:, :, list(columns)]
    matrix = chosen.reshape(len(rows) * D, len(columns) * D)
    truth = float(torch.linalg.matrix_norm(matrix, 2))
    request = SpectralRequest(tolerance=1e-6, vectors=True)
    found = coupled_spectral(function, X, request=request, inputs=inputs, outputs=outputs)
    assert (found.inputs, found.outputs) == (columns, rows)
    assert found.lower <= truth
    estimate = coupled_frobenius(function, X, inputs=inputs, outputs=outputs, probes=200, distribution="gaussian")
    frobenius = float(torch.linalg.vector_norm(matrix))
    if truth == 0.0:  # causal: no early token reads a late one
        assert (found.lower, estimate.frobenius) == (0.0, 0.0)
        return
    assert truth <= found.upper
    # A matrix of low rank leaves nothing to walk through, and the bound that is had by then is what there is.
    assert found.converged or (case == "rank one" and not found.upper > 1.0001 * truth)
    assert found.adjoint_error < 1e-13
    # 200 probes: six standard errors.
    assert abs(estimate.frobenius - frobenius) <= 6 * estimate.standard_error + 1e-12 * frobenius
    assert found.left is not None
    assert found.right is not None
    pushed = torch.einsum("tisj,sj->ti", dense(function, X), found.right)
    kept = torch.zeros_like(pushed)
    kept[list(rows)] = pushed[list(rows)]
    # Ritz vectors are as good as the root of the value they belong to.
    torch.testing.assert_close(kept, truth * found.left, rtol=0.0, atol=1e-3 * truth)


def test_one_seed_gives_one_answer_and_another_another() -> None:
    first, again, other = (coupled_frobenius(CASES["residual"], X, seed=seed).frobenius for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_float32_agrees_with_float64() -> None:
    function = mixing()
    single = coupled_frobenius(lambda x: function(x.double()).float(), X.float(), seed=5, estimator="hutchinson")
    double = coupled_frobenius(function, X, seed=5, estimator="hutchinson")
    # The same probes, so only rounding is between them.
    assert single.frobenius == pytest.approx(double.frobenius, rel=1e-5)


def test_it_stops_when_asked() -> None:
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) > 3

    watch = Watch(cancelled=cancelled)
    for norm in (coupled_frobenius, coupled_spectral):
        asked.clear()
        with pytest.raises(ComputationCancelled):
            norm(CASES["residual"], X, watch=watch)
        assert len(asked) == 4


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"inputs": (7,)}, "inputs"),
        ({"outputs": ()}, "outputs"),
        ({"outputs": (-1,)}, "outputs"),
        ({"probes": 1}, "probes"),
        ({"distribution": "uniform"}, "distribution"),
        ({"estimator": "xtrace"}, "estimator"),
    ],
)
def test_what_cannot_be_used_is_named(given: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        coupled_frobenius(CASES["residual"], X, **given)  # pyright: ignore[reportArgumentType]
    assert caught.value.field == field


def test_a_function_that_changes_the_shape_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"\[5, 3\] of \[5, 6\]"):
        coupled_frobenius(lambda x: x[:, :3], X)


@pytest.mark.parametrize(("inputs", "outputs"), [(None, None), ((0,), (2, 4)), ((4,), (0,))])
@pytest.mark.parametrize("case", CASES)
def test_row_by_row_nothing_is_estimated(
    case: str, inputs: tuple[int, ...] | None, outputs: tuple[int, ...] | None
) -> None:
    rows, columns = outputs or tuple(range(TOKENS)), inputs or tuple(range(TOKENS))
    truth = float(torch.linalg.vector_norm(dense(CASES[case], X)[list(rows)][:, :, list(columns)]))
    found = coupled_frobenius(CASES[case], X, estimator=ROWS, inputs=inputs, outputs=outputs)
    assert found.frobenius == pytest.approx(truth, rel=1e-13)
    assert (found.lower, found.upper, found.standard_error) == (found.frobenius, found.frobenius, 0.0)
    assert found.products == len(rows) * D


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nothing_is_told_of_an_estimate_that_is_not_finite(estimator: str) -> None:
    found = coupled_frobenius(lambda x: x / torch.zeros(()), X, probes=4, estimator=estimator)
    assert all(math.isnan(number) or number == math.inf for number in (found.frobenius, found.upper))
    assert math.isnan(found.standard_error)
    assert math.isnan(found.lower)


def test_progress_does_not_pass_its_end() -> None:
    told: list[tuple[int, int]] = []
    watch = Watch(progress=lambda done, total, _: told.append((done, total)))
    coupled_frobenius(CASES["rank one"], X, probes=4, watch=watch)
    assert all(done < total for done, total in told)


def test_a_function_that_nothing_moves() -> None:
    found = coupled_spectral(lambda states: 0.0 * states, random_tensor(3, 4))
    assert (found.lower, found.upper, found.converged) == (0.0, 0.0, True)
