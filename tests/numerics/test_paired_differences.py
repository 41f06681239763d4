"""The mean of paired differences, and its standard error where tokens depend on their neighbours: by simulation."""

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.paired_differences import paired_difference

DRAWS = 400


def autoregressive(correlation: float, tokens: int, seed: int) -> torch.Tensor:
    """`[DRAWS, tokens]` of mean zero and variance one."""
    noise = torch.randn(DRAWS, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = [noise[:, 0]]
    for place in range(1, tokens):
        rows.append(correlation * rows[-1] + (1 - correlation**2) ** 0.5 * noise[:, place])
    return torch.stack(rows, 1)


def test_the_mean_is_that_of_the_differences() -> None:
    first, second = torch.tensor([-1.0, -2.0, -4.5]), torch.tensor([-1.5, -2.0, -4.0])
    found = paired_difference(first, second)
    assert found.mean == pytest.approx(0.0, abs=1e-15)
    assert found.tokens == 3
    # Differences 0.5, 0 and -0.5: variance 0.25 over 3 tokens. Their correlations at places 1 and 2 are negative, so
    # the error of independent tokens, which is larger, stands.
    assert found.standard_error == pytest.approx((0.25 / 3) ** 0.5, rel=1e-12)


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.5])
def test_the_standard_error_is_that_of_many_texts(correlation: float) -> None:
    rows = autoregressive(correlation, 150, seed=0)
    found = [paired_difference(row, torch.zeros_like(row)) for row in rows]
    true = float(torch.tensor([one.mean for one in found], dtype=torch.float64).std())
    told = [one.standard_error for one in found if one.standard_error is not None]
    typical = sum(told) / len(told)
    # 400 draws know their own scatter to 3.5 %, and the lag cuts correlations short: by 12 % of the error at 0.5. The
    # larger of two errors is taken, which at correlation 0 lies up to 10 % above.
    assert 0.80 * true < typical < 1.20 * true
    if correlation:
        independent = 150**-0.5
        assert typical > 1.1 * independent


def test_texts_are_not_one_behind_the_other() -> None:
    """What ends one text and what begins the next are no neighbours."""
    rows = torch.tensor([[0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    together = paired_difference(rows, torch.zeros_like(rows))
    behind = paired_difference(rows.reshape(-1), torch.zeros(8, dtype=torch.float64))
    assert together.mean == behind.mean
    assert together.standard_error is not None
    assert behind.standard_error is not None
    assert together.standard_error < behind.standard_error


def test_equal_likelihoods_differ_by_nothing() -> None:
    same = torch.randn(40)
    assert paired_difference(same, same) == (0.0, 0.0, 40)


def test_one_token_has_no_standard_error() -> None:
    assert paired_difference(torch.tensor([1.0]), torch.tensor([0.5])) == (0.5, None, 1)


@pytest.mark.parametrize("shapes", [((3,), (4,)), ((0,), (0,))])
def test_what_is_not_in_pairs_is_refused(shapes: tuple[tuple[int], tuple[int]]) -> None:
    first, second = shapes
    with pytest.raises(InvalidValue, match="not in pairs"):
        paired_difference(torch.zeros(first), torch.zeros(second))
