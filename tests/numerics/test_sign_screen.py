"""The screen: the same T as the test, whatever the pieces; fair signs are quiet; whom it acquits nothing convicts."""

import math

import pytest
import torch
from glassblock.numerics.gate_or_up import UP_IS_SUSPICIOUS
from glassblock.numerics.sign_bound import log10_tail_bound, row_moments
from glassblock.numerics.sign_screen import (
    PATTERNS,
    ColumnSums,
    RowSums,
    SignScreen,
    SignSums,
    least_log10_p,
    screened,
    screened_together,
    sign_patterns,
)
from glassblock.numerics.sign_symmetry import certified_log10_p, sign_symmetry_test
from glassblock.numerics.unit_rows import centred_unit_rows
from torch import Tensor

CPU = torch.device("cpu")


def by_rows(weight: Tensor, *, step: int = 1000) -> SignSums:
    sums = RowSums(len(weight), weight.shape[1], CPU)
    for start in range(0, len(weight), step):
        sums.add(weight[start : start + step], start)
    return sums.finish()


def by_columns(weight: Tensor, *, step: int = 1000) -> SignSums:
    """The weight `[m, d]`, given as it lies where it is stored `[d, m]`."""
    sums, stored = ColumnSums(len(weight), weight.shape[1], CPU), weight.T.contiguous()
    for start in range(0, len(stored), step):
        sums.add(stored[start : start + step], start)
    return sums.finish()


def noise(m: int, d: int, *, seed: int = 0, common: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(m, d, generator=generator) + common * torch.randn(d, generator=generator)
    return rows * torch.randn(m, 1, generator=generator).exp()


def test_patterns_are_a_group_of_uncorrelated_signs() -> None:
    patterns = sign_patterns(CPU)
    assert bool((patterns[0] == 1).all())
    assert torch.equal(patterns @ patterns.T, PATTERNS * torch.eye(PATTERNS, dtype=torch.float64) - 1)
    rows = {tuple(row) for row in patterns.tolist()}
    assert rows == {tuple((one * other).tolist()) for one in patterns for other in patterns}


@pytest.mark.parametrize("m", [5, 16, 300])
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_it_is_t_beside_t_under_each_pattern(m: int, step: int) -> None:
    weight = noise(m, 40, common=0.3) + 0.2
    signs = sign_patterns(CPU).repeat(1, m)[:, :m]
    statistics = (signs @ centred_unit_rows(weight).rows.double()).square().sum(1) / m
    found = screened(by_rows(weight, step=step))
    others = statistics[1:]
    assert found.statistic == pytest.approx(float(statistics[0]), rel=1e-5)
    assert found.z == pytest.approx(float((statistics[0] - 1) / (others - 1).square().mean().sqrt()), rel=1e-4)
    assert found.above == bool(statistics[0] > others.max())


@pytest.mark.parametrize("turn", [2, 4, 8, 16])
@pytest.mark.parametrize("sums", [by_rows, by_columns])
def test_gates_between_other_rows_stand_out_too(sums: object, turn: int) -> None:
    make, weight = by_rows if sums is by_rows else by_columns, noise(960, 64)
    weight[::turn] += 2 * noise(1, 64, seed=1).exp()
    alone, between = screened(make(weight[::turn])), screened(make(weight))
    assert alone.above
    assert between.above
    assert between.z > alone.z / (2 * turn)


@pytest.mark.parametrize("sums", [by_rows, by_columns])
def test_under_fair_signs_every_rank_is_as_likely(sums: object) -> None:
    """The patterns are a group, so T exceeds all fifteen others once in sixteen times."""
    make, weight = by_rows if sums is by_rows else by_columns, noise(64, 32, common=0.2)
    generator = torch.Generator().manual_seed(5)
    tosses = 2000
    coins = torch.randint(0, 2, (tosses, 64, 1), generator=generator) * 2 - 1
    above = sum(screened(make(weight * signs)).above for signs in coins)
    assert abs(above - tosses / 16) < 4 * math.sqrt(tosses * 15 / 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_by_rows_it_is_the_statistic_of_the_test(dtype: torch.dtype) -> None:
    weight = (noise(300, 40, common=0.3) + 0.2).to(dtype)
    # Unit rows of float32, summed in float32: 300 of them.
    whole = sign_symmetry_test(weight, seed=0, tie=False, certify=False)
    assert screened(by_rows(weight)).statistic == pytest.approx(whole.statistic, rel=1e-5)


@pytest.mark.parametrize("step", [1, 7, 64])
@pytest.mark.parametrize("sums", [by_rows, by_columns])
def test_pieces_do_not_matter(sums: object, step: int) -> None:
    weight = noise(96, 48, common=0.2)
    make = by_rows if sums is by_rows else by_columns
    whole, pieced = screened(make(weight)), screened(make(weight, step=step))
    if make is by_columns and step < 32:
        # The scale is that of the first piece, so another piece is another statistic, of the same law.
        assert pieced.stands_out(5.0) == whole.stands_out(5.0)
    else:
        assert pieced.statistic == pytest.approx(whole.statistic, rel=1e-5)
        assert pieced.z == pytest.approx(whole.z, rel=1e-3)  # a difference of numbers near 1


def test_columns_scaled_by_whole_columns_are_unit_rows() -> None:
    """Where the first piece is the whole weight, both orientations look at nearly the same rows."""
    weight = noise(200, 32, common=0.3)
    rows, columns = screened(by_rows(weight)), screened(by_columns(weight))
    # Rows are scaled after their mean is taken off, columns before: 1/32 of a square on average, once and again.
    assert columns.statistic == pytest.approx(rows.statistic, rel=0.1)
    assert columns.rows == rows.rows == 200


def test_rows_without_a_direction_are_dropped() -> None:
    weight = noise(50, 16)
    weight[:5] = 0.0
    weight[5:8] = 3.0
    for sums in (by_rows(weight), by_columns(weight)):
        found = screened(sums)
        assert (found.rows, found.dropped) == (42, 8)
        assert math.isfinite(found.z)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("sums", [by_rows, by_columns])
def test_what_cannot_be_summed_is_neither_quiet_nor_standing_out(sums: object, value: float) -> None:
    weight = noise(50, 16, common=1.0)
    weight[3, 4] = value
    found = screened((by_rows if sums is by_rows else by_columns)(weight))
    assert not found.quiet(3.0) or value == 1e30
    assert not found.stands_out(12.0) or value == 1e30


def test_nothing_at_all_is_not_quiet() -> None:
    found = screened(by_rows(torch.zeros(8, 4)))
    assert (found.rows, found.dropped) == (0, 8)
    assert not found.quiet(3.0)


@pytest.mark.parametrize("sums", [by_rows, by_columns])
def test_fair_signs_are_rarely_suspicious(sums: object) -> None:
    """z of 16 draws has Student's tails: beyond 3 about 0.4 % on one side, more where few dimensions skew T."""
    make = by_rows if sums is by_rows else by_columns
    zs = torch.tensor([screened(make(noise(96, 64, seed=seed))).z for seed in range(1000)])
    assert float(zs.mean().abs()) < 4 * float(zs.std()) / math.sqrt(len(zs))
    assert int((zs >= UP_IS_SUSPICIOUS).sum()) <= 25  # 0.9 % is expected; 2.5 % has a chance below 1e-5


def test_an_acquitted_sum_of_copies_shares_its_signs() -> None:
    """Copies of one network: sixteen times the rows, and one coin for each neuron."""
    first = noise(96, 64)
    parts = [by_rows(first + 0.1 * noise(96, 64, seed=seed)) for seed in range(1, 17)]
    alone, together = screened(by_rows(first)), screened_together(parts)
    assert together.z == pytest.approx(alone.z, abs=1.0)  # noise of a tenth
    assert together.statistic == pytest.approx(alone.statistic, rel=0.2)


def test_together_faint_gates_stand_out() -> None:
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(64, generator=generator) * 0.08
    parts = [by_rows(torch.randn(96, 64, generator=generator) + direction) for _ in range(32)]
    assert max(screened(part).z for part in parts) < 12
    assert screened_together(parts).stands_out(12.0)


@pytest.mark.parametrize("d", [16, 64, 256])
@pytest.mark.parametrize("m", [64, 256, 1024])
@pytest.mark.parametrize("common", [0.0, 0.05, 0.1, 0.2, 0.4])
def test_no_certificate_goes_below_what_z_allows(m: int, d: int, common: float) -> None:
    """The argument of the module, on weights from noise to gates: the bound is never below `least_log10_p`."""
    rows = centred_unit_rows(noise(m, d, common=common)).rows.double()
    gram = rows @ rows.T
    variance = float((gram - torch.eye(m)).square().sum())
    excess = float(gram.sum()) - m
    least = least_log10_p(excess / math.sqrt(2 * variance), variance)
    assert certified_log10_p(rows.float()) >= least - 1e-6


@pytest.mark.parametrize("variance", [1e3, 1e4, 1e6])
def test_what_is_not_suspicious_is_far_from_a_conviction(variance: float) -> None:
    """z = 3 comes to p = 0.008 at best; a single tensor is convicted at 1e-3 and two of one layer at 5e-4."""
    assert least_log10_p(UP_IS_SUSPICIOUS, variance) > math.log10(5e-3)
    assert least_log10_p(1e-9, variance) == pytest.approx(0.0, abs=1e-6)
    assert least_log10_p(-1.0, variance) == 0.0


def test_the_lower_bound_is_close_where_a_spectrum_is_flat() -> None:
    """Tight enough to mean something: on many dimensions the certificate lies within a third of it."""
    m, d = 2000, 1000
    moments = row_moments([centred_unit_rows(noise(m, d)).rows], at_most=m)
    variance = float((moments.gram - 0).square().sum()) - m
    total = torch.zeros_like(moments.total)
    total[0] = math.sqrt(m + 6 * math.sqrt(2 * variance))
    bound = log10_tail_bound(moments._replace(total=total))
    least = least_log10_p(6.0, variance)
    assert least <= bound <= least / 1.5


def test_few_neurons_in_many_dimensions_have_no_lower_bound() -> None:
    assert least_log10_p(10.0, 20.0) == -math.inf


def test_words() -> None:
    found = SignScreen(2.0, 5.0, above=False, rows=3, dropped=0)
    assert not found.stands_out(4.0)
    assert not found.quiet(4.0)
    assert found.quiet(6.0)


@pytest.mark.parametrize("width", [576, 4096, 14336])
def test_a_constant_row_has_no_direction_however_wide(width: int) -> None:
    weight = noise(8, width)
    weight[2], weight[5] = 0.3, -7.0
    assert by_rows(weight).dropped == 2
    assert by_columns(weight).dropped == 2
