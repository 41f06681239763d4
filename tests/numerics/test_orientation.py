"""The permutation test of axes: exact on what has no order, and sure of what has."""

import pytest
import torch
from glassblock.numerics.orientation import Projections, Turned, turned_test, with_turned
from torch import Tensor

K = 24


def drawn(seed: int, k: int = K, c: int = K) -> Projections:
    draw = torch.Generator().manual_seed(seed)
    return Projections(*(torch.randn(shape, generator=draw) for shape in ((k, c), (k, c), (c, k))))


def paired(seed: int, c: int = K) -> Projections:
    """Neurons that are loud together and, up to their sign, alike."""
    gate, up, down = drawn(seed, c=c)
    draw = torch.Generator().manual_seed(seed + 1)
    loud = (1 + 4 * torch.rand(K, 1, generator=draw)) * torch.randn(K, 1, generator=draw).sign()
    return Projections(gate * loud, (up + gate) * loud, ((down.T + gate) * loud).T)


@pytest.mark.parametrize("turned", ["gate", "up", "down", "both"])
def test_a_turned_weight_is_rejected_and_an_upright_one_is_not(turned: Turned) -> None:
    upright = paired(3)
    assert turned_test([upright], turned, draws=199, seed=0).p > 0.01
    found = turned_test([with_turned(upright, turned)], turned, draws=199, seed=0)
    assert found.p == pytest.approx(1 / 200)
    assert found.z > 5


def test_gate_over_up_in_one_square_is_turned_as_one() -> None:
    upright = paired(5, c=2 * K)
    turned = with_turned(upright, "both")
    assert torch.equal(torch.cat(turned[:2]), torch.cat(upright[:2]).T)
    assert turned_test([upright], "both", draws=199, seed=0).p > 0.01
    assert turned_test([turned], "both", draws=199, seed=0).p == pytest.approx(1 / 200)


def test_experts_of_one_stack_are_tested_together() -> None:
    """One expert of few neurons shows little; sixteen show it."""

    def weak(seed: int) -> Projections:
        noise = drawn(1000 + seed)
        return Projections(*(one + 2 * other for one, other in zip(paired(seed), noise, strict=True)))

    turned = [with_turned(weak(seed), "down") for seed in range(16)]
    alone = sorted(turned_test([one], "down", draws=199, seed=0).z for one in turned)
    assert turned_test(turned, "down", draws=199, seed=0).z > 2 * alone[8]


def test_the_p_values_of_random_weights_are_uniform() -> None:
    """At 99 draws p takes the values 1/100 to 1: of 400 networks as many fall below each level as it says."""
    values = torch.tensor([turned_test([drawn(seed, 12, 12)], "down", draws=99, seed=seed).p for seed in range(400)])
    for level in (0.05, 0.25, 0.5, 0.75):
        share, spread = float((values <= level).float().mean()), (level * (1 - level) / 400) ** 0.5
        assert abs(share - level) < 4 * spread  # four binomial standard deviations: one run in 4,000 of such tests


def test_a_permutation_of_the_neurons_changes_no_statistic() -> None:
    """The symmetry itself: the statistic under the same draws of one network and of its permuted copy is one set."""
    network, order = paired(7), torch.randperm(K, generator=torch.Generator().manual_seed(2))
    moved = Projections(network.gate[order], network.up[order], network.down[:, order])
    one, other = (turned_test([net], "down", draws=2000, seed=4) for net in (network, moved))
    assert abs(one.p - other.p) < 0.15  # two ranks of different permutations of the same orbit


@pytest.mark.parametrize("zeros", ["gate", "up", "down"])
def test_rows_of_zeros_are_no_evidence_and_no_error(zeros: str) -> None:
    network = drawn(11)
    empty: Tensor = torch.zeros(K, K)
    found = turned_test([network._replace(**{zeros: empty})], "down", draws=99, seed=0)
    assert 0 < found.p <= 1
    nothing = turned_test([Projections(empty, empty, empty)], "down", draws=99, seed=0)
    assert (nothing.p, nothing.z) == (1.0, 0.0)


def test_what_is_not_square_is_refused() -> None:
    with pytest.raises(ValueError, match="down is not square"):
        turned_test([drawn(0, 8, 16)], "down", draws=9, seed=0)
    with pytest.raises(ValueError, match="a draw at least"):
        turned_test([drawn(0)], "down", draws=0, seed=0)
