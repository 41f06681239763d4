"""The test of the rotary order: its symmetry is exact, and what training gives is found in both orders."""

import math

import pytest
import torch
from glassblock.numerics.rotary import Arrangement, Rotary, rotary_table, rotate
from glassblock.numerics.rotary_forms import DefaultForm
from glassblock.numerics.rotary_order import (
    LEVEL,
    FairSigns,
    OrderVerdict,
    fair_signs,
    judged,
    order_terms,
    partner_products,
)
from rotary_heads import planes, trained_heads
from torch import Tensor

HEADS, KV_HEADS, WIDTH, CHANNELS = 4, 2, 16, 48
ORDERS = (Arrangement.HALVES, Arrangement.PAIRS)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trained(order: Arrangement, seed: int) -> tuple[Tensor, Tensor]:
    return trained_heads(order, heads=HEADS, kv_heads=KV_HEADS, width=WIDTH, channels=CHANNELS, seed=seed)


def turned_at(rows: Tensor, plane: Tensor) -> Tensor:
    """A plane of every head turned by 90 degrees."""
    turned = rows.clone()
    turned[:, plane[0]], turned[:, plane[1]] = rows[:, plane[1]], -rows[:, plane[0]]
    return turned


def terms_of(queries: Tensor, keys: Tensor, order: Arrangement, turned: int = WIDTH) -> Tensor:
    """What speaks against that order, four by four."""
    shared = queries.unflatten(0, (KV_HEADS, -1))
    return order_terms(partner_products(shared, keys, turned))[ORDERS.index(order)]


@pytest.mark.parametrize("order", ORDERS)
def test_a_turn_of_a_plane_changes_no_score(order: Arrangement) -> None:
    rotary = Rotary(WIDTH, 10000.0, DefaultForm(), order)
    table = rotary_table(rotary, torch.arange(7), dtype=torch.float64)
    tokens = draw(7, CHANNELS, seed=1).double()

    def scores(queries: Tensor, keys: Tensor) -> Tensor:
        heads = (rotate(tokens @ rows.double().mT, table, rotary) for rows in (queries, keys.repeat_interleave(2, 0)))
        return torch.einsum("hqd,hkd->hqk", *heads)

    queries, keys = draw(HEADS, WIDTH, CHANNELS, seed=2), draw(KV_HEADS, WIDTH, CHANNELS, seed=3)
    before = scores(queries, keys)
    plane = planes(order, WIDTH)[3]
    torch.testing.assert_close(scores(turned_at(queries, plane), turned_at(keys, plane)), before)
    other = planes(ORDERS[1 - ORDERS.index(order)], WIDTH)[3]
    assert not torch.allclose(scores(turned_at(queries, other), turned_at(keys, other)), before)


@pytest.mark.parametrize("order", ORDERS)
def test_a_turn_of_a_plane_flips_the_sign_of_its_four_and_of_no_other(order: Arrangement) -> None:
    queries, keys = draw(HEADS, WIDTH, CHANNELS, seed=4), draw(KV_HEADS, WIDTH, CHANNELS, seed=5)
    before = terms_of(queries, keys, order)
    for plane in planes(order, WIDTH):
        after = terms_of(turned_at(queries, plane), turned_at(keys, plane), order)
        mine = int(plane[0] % (WIDTH // 2)) // 2
        sign = torch.ones(WIDTH // 4)
        sign[mine] = -1
        torch.testing.assert_close(after, before * sign, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_what_training_gives_is_found_in_the_order_in_which_it_lies(order: Arrangement) -> None:
    layers = [trained(order, seed=100 * layer) for layer in range(24)]
    against = {one: fair_signs(torch.stack([terms_of(*layer, one) for layer in layers])) for one in ORDERS}
    other = ORDERS[1 - ORDERS.index(order)]
    assert against[order].noise, against
    assert against[other].rejected(LEVEL), against
    assert judged(against[order], against[other]) is OrderVerdict.AS_DECLARED
    assert judged(against[other], against[order]) is OrderVerdict.OTHER


@pytest.mark.parametrize("order", ORDERS)
def test_whatever_lies_there_random_turns_make_it_noise(order: Arrangement) -> None:
    """The p-value is valid for the most structured weights, once their planes are turned by coins."""
    queries, keys = trained(ORDERS[1 - ORDERS.index(order)], seed=7)
    coins = torch.Generator().manual_seed(8)
    p: list[float] = []
    for _ in range(400):
        one, other = queries, keys
        for plane in planes(order, WIDTH):
            if torch.rand((), generator=coins) < 0.5:
                one, other = turned_at(one, plane), turned_at(other, plane)
        p.append(10 ** fair_signs(terms_of(one, other, order)).log10_p)
    for level in (0.5, 0.2):
        assert sum(value <= level for value in p) / len(p) <= level + 3 * math.sqrt(level * (1 - level) / len(p))


def test_rows_that_positions_do_not_turn_do_not_count() -> None:
    queries, keys = trained(Arrangement.HALVES, seed=9)
    terms = terms_of(queries, keys, Arrangement.PAIRS, turned=8)
    assert terms.shape == (2,)
    queries[:, 8:] = draw(HEADS, WIDTH - 8, CHANNELS, seed=10)
    torch.testing.assert_close(terms_of(queries, keys, Arrangement.PAIRS, turned=8), terms)


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_sizes_do_not_count(scale: float) -> None:
    queries, keys = draw(HEADS, WIDTH, CHANNELS, seed=11), draw(KV_HEADS, WIDTH, CHANNELS, seed=12)
    torch.testing.assert_close(
        terms_of(queries * scale, keys * scale, Arrangement.HALVES), terms_of(queries, keys, Arrangement.HALVES)
    )


@pytest.mark.parametrize("number", [0.0, math.inf, math.nan])
def test_rows_of_zeros_and_of_what_is_not_finite_say_nothing(number: float) -> None:
    queries, keys = draw(HEADS, WIDTH, CHANNELS, seed=13), draw(KV_HEADS, WIDTH, CHANNELS, seed=14)
    whole = terms_of(queries, keys, Arrangement.HALVES)
    queries[:, 0] = number
    queries[:, 1] = number
    queries[:, 8] = number
    queries[:, 9] = number
    found = terms_of(queries, keys, Arrangement.HALVES)
    assert found[0] == 0
    torch.testing.assert_close(found[1:], whole[1:])


def test_equal_terms_of_one_mind_reach_the_least_p() -> None:
    of_one_mind = fair_signs(torch.ones(30))
    assert of_one_mind.z == pytest.approx(math.sqrt(30))
    assert of_one_mind.log10_p == pytest.approx(of_one_mind.least_log10_p)
    assert not of_one_mind.rejected(LEVEL)
    assert fair_signs(torch.ones(48)).rejected(LEVEL)
    assert fair_signs(-torch.ones(48)).log10_p == 0
    assert fair_signs(torch.zeros(48)) == FairSigns(0.0, 0)


@pytest.mark.parametrize(
    ("declared", "other", "verdict"),
    [
        (20.0, 20.0, OrderVerdict.NOT_AS_DECLARED),
        (6.5, 3.1, OrderVerdict.NOT_AS_DECLARED),
        (6.5, 2.9, OrderVerdict.OTHER),
        (6.3, 6.3, OrderVerdict.UNDECIDABLE),
        (3.1, 20.0, OrderVerdict.UNDECIDABLE),
        (0.0, 0.0, OrderVerdict.UNDECIDABLE),
    ],
)
def test_only_what_is_rejected_is_not_as_declared(declared: float, other: float, verdict: OrderVerdict) -> None:
    assert judged(FairSigns(declared, 500), FairSigns(other, 500)) is verdict
