"""Paired rows, permuted ones, and the exact moments over all pairings."""

import itertools
import math

import pytest
import torch
from glassblock.numerics.pairing import pairing_z
from glassblock.numerics.unit_rows import centred_unit_rows
from torch import Tensor


def rows(n: int, d: int = 32, *, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def test_against_every_pairing_of_six() -> None:
    left, right = rows(6), rows(6, seed=1) + 0.5 * rows(6)
    squares = (centred_unit_rows(left).rows @ centred_unit_rows(right).rows.T).square()
    sums = torch.stack([sum(squares[i, j] for i, j in enumerate(order)) for order in itertools.permutations(range(6))])
    expected = float((squares.trace() - sums.mean()) / sums.std(correction=0))
    assert pairing_z(left, right) == pytest.approx(expected, rel=1e-4)  # float32 cosines


def test_paired_rows_show_whatever_their_signs_are() -> None:
    left, signs = rows(64), torch.where(rows(64, 1) > 0, 1.0, -1.0)
    right = signs * (rows(64, seed=1) + 0.7 * left)
    z = pairing_z(left, right)
    assert z is not None
    assert z > 10
    flipped = pairing_z(left, -right)
    assert flipped == pytest.approx(z, rel=1e-5)


def test_permuted_rows_are_noise() -> None:
    left = rows(64)
    right = rows(64, seed=1) + 0.7 * left
    zs = [pairing_z(left, right[torch.randperm(64, generator=torch.Generator().manual_seed(s))]) for s in range(200)]
    known = torch.tensor([z for z in zs if z is not None])
    assert len(known) == 200
    assert float(known.mean().abs()) < 4 / math.sqrt(200)
    assert float(known.std()) == pytest.approx(1.0, abs=4 / math.sqrt(2 * 200))


def test_one_row_or_rows_all_alike_tell_nothing() -> None:
    assert pairing_z(rows(1), rows(1)) is None
    assert pairing_z(rows(1).expand(5, 32), rows(5)) is None or abs(pairing_z(rows(1).expand(5, 32), rows(5)) or 0) < 3


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_no_scale_matters(scale: float) -> None:
    left, right = rows(64), rows(64, seed=1) + 0.7 * rows(64)
    z = pairing_z(left, right)
    assert z is not None
    assert pairing_z(left * scale, right) == pytest.approx(z, rel=1e-4)  # float32 cosines


def test_rows_that_are_constant_or_zero_have_no_cosine() -> None:
    left, right = rows(64), rows(64, seed=1) + 0.7 * rows(64)
    left[3], right[5] = 7.0, 0.0
    units = [centred_unit_rows(side).rows for side in (left, right)]
    squares = (units[0] @ units[1].T).square()
    assert squares[3].abs().max() == squares[:, 5].abs().max() == 0
    centred = squares - squares.mean(0) - squares.mean(1, keepdim=True) + squares.mean()
    expected = float((squares.trace() - squares.sum() / 64) / (centred.square().sum() / 63).sqrt())
    assert pairing_z(left, right) == pytest.approx(expected, rel=1e-4)
