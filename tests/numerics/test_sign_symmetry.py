"""T under fair signs: values by hand, the certified bound against full enumeration, ties, and what must not matter."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics import near_duplicates, sign_symmetry
from glassblock.numerics.near_duplicates import near_duplicate_groups
from glassblock.numerics.sign_bound import log10_tail_bound, row_moments
from glassblock.numerics.sign_symmetry import certified_log10_p, sign_symmetry_test
from glassblock.numerics.unit_rows import UnitRows, centred_unit_rows, product_rows, rescaled_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from numerics.makers import generator, random_tensor

# Rows are float32 of unit length: sums of some hundred of them agree to about 1e-6 relative in any order.
FLOAT32 = pytest.approx


def signs_of(count: int, *, seed: int) -> Tensor:
    return torch.randint(0, 2, (count,), generator=generator(seed)).double() * 2 - 1


def all_signs(rows: int) -> Tensor:
    """`[2^rows, rows]`: every assignment of signs."""
    numbers = torch.arange(2**rows).unsqueeze(1)
    return ((numbers >> torch.arange(rows)) & 1).double() * 2 - 1


def statistic(weight: Tensor) -> float:
    return sign_symmetry_test(weight, seed=0, tie=False, certify=False).statistic


def with_direction(m: int, d: int, strength: float, *, seed: int) -> Tensor:
    """Gaussian rows that share a direction."""
    return random_tensor(m, d, seed=seed) + strength * random_tensor(1, d, seed=seed + 1)


# --- values by hand -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ([[1.0, -1.0]] * 4, 4.0),  # all alike: |4 v|^2 / 4
        ([[1.0, -1.0], [-1.0, 1.0]], 0.0),
        ([[1.0, -1.0], [3.0, -3.0], [-2.0, 2.0]], 1 / 3),  # lengths do not count: |v + v - v|^2 / 3
        ([[1.0, -1.0, 0.0], [1.0, 1.0, -2.0]], 1.0),  # orthogonal: |v + w|^2 / 2 = 2 / 2
        ([[6.0, 4.0], [8.0, 6.0]], 2.0),  # means 5 and 7 removed, both [1, -1]
        ([[1.0, -1.0], [0.0, 0.0], [5.0, 5.0], [1.0, -1.0]], 2.0),  # zero and constant rows dropped
        ([[0.0, 0.0], [3.0, 3.0]], 0.0),  # nothing left
    ],
)
def test_common_direction_by_hand(weight: list[list[float]], expected: float) -> None:
    assert statistic(torch.tensor(weight)) == FLOAT32(expected, abs=1e-6)


def test_bound_of_two_equal_rows_by_hand() -> None:
    # mu = 1 and -1, excess 2: the minimum of -2t - log(1 - 4t^2)/2 lies where 8t^2 + 4t = 2.
    t = (math.sqrt(80) - 4) / 16
    expected = (-2 * t - 0.5 * math.log(1 - 4 * t * t)) / math.log(10)
    assert expected == FLOAT32(math.log10(0.68562), abs=1e-5)
    # t comes from float32 eigenvalues; at a minimum its error of 1e-7 costs 1e-14, the rows' rounding 1e-7.
    assert certified_log10_p(torch.tensor([[1.0, -1.0], [1.0, -1.0]])) == FLOAT32(expected, abs=1e-6)


@pytest.mark.parametrize(("m", "d"), [(40, 8), (40, 200), (600, 8)])
def test_bound_of_equal_rows_by_hand(m: int, d: int) -> None:
    # One eigenvalue m - 1 and m - 1 times -1; the same number from W^T W (m > d) and from W W^T (m < d).
    t = torch.linspace(0, 0.5 / (m - 1), 2_000_001, dtype=torch.float64)[:-1]
    bound = -t * (m * m - m) - 0.5 * torch.log1p(-2 * t * (m - 1)) - 0.5 * (m - 1) * torch.log1p(2 * t)
    expected = float(bound.min()) / math.log(10)
    weight = random_tensor(1, d, seed=3).expand(m, d)
    # Unit length to 1e-7, times an exponent t m^2 of about m / 2.
    assert certified_log10_p(weight) == FLOAT32(expected, abs=1e-6 * m)


def test_logarithms_do_not_underflow() -> None:
    log10_p = certified_log10_p(random_tensor(1, 8, seed=3).expand(4000, 8))
    assert log10_p < -800  # far below 1e-308, the smallest float64
    assert math.isfinite(log10_p)


def test_draws_of_equal_rows_by_hand() -> None:
    # Without ties: all 6 signs agree in 2 of 64 cases, so p is 1/32; and the mean of T is 1.
    result = sign_symmetry_test(torch.tensor([[1.0, -1.0]] * 6), seed=0, draws=9999, tie=False, certify=False)
    deviation = math.sqrt((1 / 32) * (31 / 32) / 9999)
    assert abs(result.draws_p - 1 / 32) < 5 * deviation
    assert result.z == pytest.approx((6 - 1) / math.sqrt(2 * 5 / 6), rel=0.1)  # Var T = 2 (m - 1)/m; 2 % standard error
    assert result.statistic == FLOAT32(6.0)
    assert (result.rows, result.tied, result.dropped, result.log10_p) == (6, 0, 0, None)


# --- the bound against the truth ------------------------------------------------------------------------------------

ADVERSARIAL: dict[str, Callable[[int, int, int], Tensor]] = {
    "gaussian": lambda m, d, seed: random_tensor(m, d, seed=seed),
    "equal": lambda m, d, seed: random_tensor(1, d, seed=seed).expand(m, d).clone(),
    "two clusters": lambda m, d, seed: random_tensor(2, d, seed=seed)[torch.arange(m) % 2],
    "orthonormal": lambda m, d, seed: torch.eye(max(m, d), dtype=torch.float64)[:m, : max(m, d)],
    "one heavy row": lambda m, d, seed: (
        random_tensor(m, d, seed=seed) * torch.tensor([100.0] + [1.0] * (m - 1))[:, None]
    ),
    "geometric lengths": lambda m, d, seed: random_tensor(m, d, seed=seed) * 2.0 ** torch.arange(m)[:, None],
    "nearly equal": lambda m, d, seed: random_tensor(1, d, seed=seed) + 1e-4 * random_tensor(m, d, seed=seed + 1),
    "with a zero row": lambda m, d, seed: torch.cat([torch.zeros(1, d), random_tensor(m - 1, d, seed=seed)]),
    "sparse": lambda m, d, seed: random_tensor(m, d, seed=seed) * (random_tensor(m, d, seed=seed + 1) > 0.8),
}


@pytest.mark.parametrize("name", ADVERSARIAL)
@settings(max_examples=25, deadline=None)
@given(m=st.integers(2, 12), d=st.integers(1, 16), seed=st.integers(0, 10_000))
def test_certified_bound_lies_above_the_exact_tail(name: str, m: int, d: int, seed: int) -> None:
    rows = ADVERSARIAL[name](m, d, seed).float()
    if not rows.any():
        return
    totals = all_signs(m) @ rows.double()
    energies = totals.square().sum(1)
    moments = row_moments([rows], at_most=m)
    # At every attainable value (a handful of quantiles, the largest among them), not only at an observed one.
    for index in energies.argsort()[torch.linspace(0, len(energies) - 1, 12).long()].tolist():
        energy = float(energies[index])
        # What rounding may have put just below counts as reached: that raises the exact tail.
        exact = float((energies >= energy * (1 - 1e-12)).double().mean())
        bound = log10_tail_bound(moments._replace(total=totals[index]))
        assert bound >= math.log10(exact)
        assert bound <= 0


@settings(max_examples=20, deadline=None)
@given(m=st.integers(2, 12), d=st.integers(1, 16), seed=st.integers(0, 10_000))
def test_both_gram_matrices_give_one_bound(m: int, d: int, seed: int) -> None:
    rows = with_direction(m, d, 1.0, seed=seed).float()
    wide, narrow = row_moments([rows], at_most=10**6), row_moments([rows], at_most=0)
    assert wide.gram.shape == (d, d)
    assert narrow.gram.shape == (m, m)
    # Each has its own slack for rounding, of order 1e-13, and chooses its own t, at a minimum.
    assert log10_tail_bound(wide) == pytest.approx(log10_tail_bound(narrow), abs=1e-4)


def test_bound_falls_as_the_sum_grows() -> None:
    # Flipping rows leaves W^T W as it is, so only the sum differs from one assignment to another.
    rows = with_direction(64, 16, 1.0, seed=1).float()
    totals = [signs_of(64, seed=seed) @ rows.double() for seed in range(40)]
    totals.sort(key=lambda total: float(total.square().sum()))
    bounds = [log10_tail_bound(row_moments([rows], at_most=64)._replace(total=total)) for total in totals]
    assert all(later <= earlier for earlier, later in pairwise(bounds))
    assert bounds[-1] < bounds[0]


def test_bound_is_not_far_above_the_tail() -> None:
    # A bound that never rejects would be useless. At the value that one toss in a thousand reaches (of 20,000),
    # it gives away about a factor of ten.
    rows = centred_unit_rows(random_tensor(1000, 24, seed=0)).rows
    tosses = torch.randint(0, 2, (20_000, 1000), generator=generator(1)).float() * 2 - 1
    totals = tosses @ rows
    reached = totals[totals.square().sum(1).argsort(descending=True)[20]]
    bound = log10_tail_bound(row_moments([rows], at_most=1000)._replace(total=reached.double()))
    assert -3 <= bound < -3 + 1.3


@pytest.mark.parametrize("strength", [0.0, 1.0, 5.0])
def test_flipped_rows_are_not_convicted_more_often_than_stated(strength: float) -> None:
    # With its signs tossed, the most directed weight is noise. 4000 tosses: the share at or below p lies under p,
    # give or take three standard errors.
    rows = centred_unit_rows(with_direction(256, 32, strength, seed=5)).rows
    moments = row_moments([rows], at_most=256)
    tosses = torch.randint(0, 2, (4000, 256), generator=generator(6)).double() * 2 - 1
    bounds = torch.tensor([log10_tail_bound(moments._replace(total=toss @ rows.double())) for toss in tosses[:400]])
    for p in (0.5, 0.1, 0.01):
        assert float((bounds <= math.log10(p)).double().mean()) <= p + 3 * math.sqrt(p / len(bounds))
    # The largest of 4000 tosses stays far from the level of a conviction.
    largest = (tosses @ rows.double()).square().sum(1).argmax()
    assert log10_tail_bound(moments._replace(total=tosses[largest] @ rows.double())) > math.log10(5e-6)


def test_draws_are_exact_under_fair_signs() -> None:
    # p <= 0.1 in a tenth of 300 tosses, give or take four standard errors: neither more nor less.
    weight = with_direction(48, 12, 1.0, seed=9)
    tossed = (weight * signs_of(48, seed=seed)[:, None] for seed in range(1000, 1300))
    small = [
        sign_symmetry_test(toss, seed=seed, draws=99, tie=False, certify=False).draws_p <= 0.1
        for seed, toss in enumerate(tossed)
    ]
    share = sum(small) / len(small)
    assert abs(share - 0.1) < 4 * math.sqrt(0.1 * 0.9 / len(small))


# --- what must not matter -------------------------------------------------------------------------------------------


def padded(weight: Tensor) -> Tensor:
    """Zero rows between and after the others, as an engine pads the FFN width."""
    wide = torch.zeros(2 * len(weight) + 7, weight.shape[1], dtype=weight.dtype)
    wide[: 2 * len(weight) : 2] = weight
    return wide


def with_broken_row(weight: Tensor) -> Tensor:
    broken = torch.full((2, weight.shape[1]), math.nan, dtype=weight.dtype)
    broken[1, :-1], broken[1, -1] = 0.0, math.inf
    return torch.cat([broken, weight])


@pytest.mark.parametrize(
    ("change", "dropped"),
    [
        (padded, 200 + 7),
        (with_broken_row, 2),
        (lambda weight: weight * torch.logspace(-30, 30, 200)[:, None], 0),
        (lambda weight: weight + 3.0, 0),
        (lambda weight: weight.flip(0), 0),
        (lambda weight: -weight, 0),
        (lambda weight: weight.double() * 1e200, 0),
        (lambda weight: weight.double() * 1e-200, 0),
    ],
    ids=["padding", "not finite", "row scales", "offset", "order", "sign", "huge", "minute"],
)
def test_statistic_and_bound_do_not_see(change: Callable[[Tensor], Tensor], dropped: int) -> None:
    weight = with_direction(200, 24, 0.3, seed=11).float()
    before = sign_symmetry_test(weight, seed=0)
    after = sign_symmetry_test(change(weight), seed=0)
    assert before.log10_p is not None
    assert before.log10_p < -5
    # The offset of 3 costs two digits of the float32 that the rows start from; the others cost none.
    assert after.statistic == FLOAT32(before.statistic, rel=1e-4)
    assert after.log10_p == FLOAT32(before.log10_p, rel=1e-4)
    assert (after.rows, after.dropped) == (200, dropped)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    weight = with_direction(200, 24, 0.3, seed=11)
    # Rounding to 8 bits moves entries by 0.4 %, at random, and a sum over 200 rows by less.
    assert statistic(weight.to(dtype)) == pytest.approx(statistic(weight), rel=0.01)


def test_floor_rounding_makes_no_direction() -> None:
    # Floor-like int8: every entry loses half a step on average. Without centring that is a common direction.
    weight = random_tensor(4096, 64, seed=12)
    step = weight.abs().amax(1, keepdim=True) / 8
    floored = (weight / step).floor() * step
    raw = floored / floored.norm(dim=1, keepdim=True)
    assert float(raw.sum(0).square().sum()) / len(raw) > 20
    assert sign_symmetry_test(floored, seed=0, certify=False).noise


def test_block_size_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.cat([with_direction(300, 24, 0.3, seed=13), random_tensor(40, 24, seed=14).repeat(2, 1)])
    whole = sign_symmetry_test(weight, seed=0)
    monkeypatch.setattr(sign_symmetry, "BLOCK_ENTRIES", 24 * 17)
    monkeypatch.setattr(near_duplicates, "_BLOCK_ENTRIES", 24 * 17)
    monkeypatch.setattr(near_duplicates, "_BLOCK_ROWS", 5)
    parts = sign_symmetry_test(weight, seed=0)
    assert (parts.rows, parts.tied, parts.draws_p) == (whole.rows, whole.tied, whole.draws_p)
    assert whole.tied == 80
    assert parts.statistic == FLOAT32(whole.statistic, rel=1e-5)
    assert parts.log10_p == FLOAT32(whole.log10_p, rel=1e-5)


def test_draws_are_seeded() -> None:
    weight = random_tensor(64, 8, seed=15)
    assert sign_symmetry_test(weight, seed=1) == sign_symmetry_test(weight, seed=1)
    assert sign_symmetry_test(weight, seed=1).draws_p != sign_symmetry_test(weight, seed=2).draws_p


def test_too_few_draws_are_refused() -> None:
    with pytest.raises(InvalidValue, match="99"):
        sign_symmetry_test(random_tensor(8, 4), seed=0, draws=98)


def test_a_weight_without_directions_says_nothing() -> None:
    result = sign_symmetry_test(torch.ones(5, 4), seed=0)
    assert (result.rows, result.dropped, result.statistic, result.draws_p, result.log10_p) == (0, 5, 0.0, 1.0, 0.0)
    assert math.isnan(result.z)


# --- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [48, 160])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_copied_neurons_are_not_convicted(d: int, noise: float) -> None:
    base = random_tensor(96, d, seed=20)
    copied = base.repeat(8, 1) + noise * random_tensor(768, d, seed=21)
    loose = sign_symmetry_test(copied, seed=0, tie=False)
    tied = sign_symmetry_test(copied, seed=0)
    assert loose.rejected(5e-6)  # eight coins counted where there is one
    assert (tied.rows, tied.tied) == (96, 768)
    assert tied.noise
    assert not tied.rejected(5e-6)


def test_copies_with_either_sign_are_tied() -> None:
    base = random_tensor(50, 40, seed=22)
    copied = torch.cat([base, base * signs_of(50, seed=23)[:, None], base])
    result = sign_symmetry_test(copied, seed=0)
    assert (result.rows, result.tied) == (50, 150)
    assert result.noise


def test_a_group_that_cancels_is_left_out() -> None:
    weight = torch.cat([random_tensor(20, 40, seed=24), torch.ones(2, 1) * random_tensor(1, 40, seed=25)])
    weight[-1] *= -2
    result = sign_symmetry_test(weight, seed=0)
    assert (result.rows, result.tied, result.dropped) == (20, 2, 0)


@pytest.mark.parametrize("d", [24, 100, 129, 300])
def test_groups_are_the_connected_components(d: int) -> None:
    # A chain a - b - c whose ends are further apart than the threshold, a pair, a flipped pair, and singles.
    a, b = random_tensor(2, d, seed=26)
    a -= a.mean()
    b -= b.mean()
    a, b = a / a.norm(), b / b.norm()
    b = b - (a @ b) * a
    b /= b.norm()
    angle = math.acos(0.96)
    chain = torch.stack([math.cos(k * angle) * a + math.sin(k * angle) * b for k in range(3)])
    assert float(chain[0] @ chain[2]) < near_duplicates.NEAR_DUPLICATE
    weight = random_tensor(200, d, seed=27)
    weight[[150, 3, 77]] = chain
    weight[20] = 5 * weight[190]
    weight[199] = -weight[0]
    weight[60] = weight[61] = 0.0
    expected = torch.arange(200)
    expected[[3, 77, 150]] = 3
    expected[190] = 20
    expected[199] = 0
    assert near_duplicate_groups([weight]).tolist() == expected.tolist()


def test_groups_of_several_weights_are_joined() -> None:
    gate, up = random_tensor(30, 40, seed=28), random_tensor(30, 50, seed=29)
    gate[4] = gate[9]
    up[9] = up[2]
    groups = near_duplicate_groups([gate, up])
    assert groups[[2, 4, 9]].tolist() == [2, 2, 2]
    assert len(groups.unique()) == 28


@pytest.mark.parametrize("rows", [2, 300])
def test_all_alike_is_one_group(rows: int) -> None:
    assert near_duplicate_groups([random_tensor(1, 200, seed=30).expand(rows, 200)]).tolist() == [0] * rows


# --- paired rows and experts ----------------------------------------------------------------------------------------


def paired_rows(weight: Tensor, down: Tensor) -> UnitRows:
    """The rows w_i * d_i of the mirrored statistic."""
    return product_rows(centred_unit_rows(weight), centred_unit_rows(down.T))


def summed_expert_rows(experts: Tensor) -> UnitRows:
    return rescaled_rows(torch.stack([centred_unit_rows(expert).rows for expert in experts]).sum(0))


def test_paired_rows_by_hand() -> None:
    weight = torch.tensor([[1.0, -1.0, 0.0], [1.0, 1.0, 1.0]])
    down = torch.tensor([[2.0, 1.0], [1.0, 0.0], [0.0, -1.0]])  # columns [2, 1, 0] and [1, 0, -1]
    rows, kept = paired_rows(weight, down)
    # Row 0: [1, -1, 0] * [1, 0, -1] (the column less its mean) = [1, 0, 0]. Row 1 is constant.
    torch.testing.assert_close(rows, torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    assert kept.tolist() == [True, False]


def test_paired_rows_keep_their_sign_under_the_flip() -> None:
    up, down = random_tensor(30, 10, seed=31), random_tensor(10, 30, seed=32)
    flip = signs_of(30, seed=33)
    assert torch.equal(paired_rows(up * flip[:, None], down * flip).rows, paired_rows(up, down).rows)
    assert torch.equal(paired_rows(up, down * flip).rows, paired_rows(up, down).rows * flip[:, None].float())


def test_experts_that_share_signs_are_one_coin() -> None:
    # Eight upcycled copies of one noise matrix, one sign per neuron for all: pooling them would see 8 x 128 rows.
    base = random_tensor(128, 32, seed=34)
    experts = torch.stack([base + 0.5 * random_tensor(128, 32, seed=35 + expert) for expert in range(8)])
    pooled = sign_symmetry_test(experts.flatten(0, 1), seed=0, tie=False)
    summed = sign_symmetry_test(summed_expert_rows(experts).rows, seed=0)
    assert pooled.rejected(5e-6)
    assert summed.noise
    assert summed.rows == 128


def test_experts_with_a_direction_are_seen_better_together() -> None:
    direction = random_tensor(1, 32, seed=50)
    experts = torch.stack([random_tensor(128, 32, seed=51 + expert) + 0.25 * direction for expert in range(8)])
    together = certified_log10_p(summed_expert_rows(experts).rows)
    assert together < min(certified_log10_p(expert) for expert in experts)
    assert together < math.log10(5e-6)
