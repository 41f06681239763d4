from dataclasses import replace
from typing import Any

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.block import apply_sublayer

from numerics.makers import make_feed_forward, random_tensor


@pytest.mark.parametrize(
    ("gated", "bias", "count"), [(False, False, 48), (False, True, 58), (True, False, 72), (True, True, 88)]
)
def test_widths_and_parameters(gated: bool, bias: bool, count: int) -> None:
    network = make_feed_forward(4, 6, gated=gated, bias=bias)
    assert (network.width, network.model_width, network.gated, network.parameters) == (6, 4, gated, count)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [1, 3, 6])
def test_a_nested_network_is_the_whole_one_with_the_other_neurons_silenced(gated: bool, bias: bool, width: int) -> None:
    network = make_feed_forward(4, 6, gated=gated, bias=bias)
    nested = network.narrowed(width)
    silenced = network.down.clone()
    silenced[:, width:] = 0.0
    n = random_tensor(5, 4, seed=9)
    expected = apply_sublayer(n, replace(network, down=silenced))
    # The same sums of at most 6 products, in another order.
    torch.testing.assert_close(apply_sublayer(n, nested), expected, rtol=0.0, atol=1e-14)
    assert nested.width == width


def test_a_nested_network_holds_views() -> None:
    network = make_feed_forward(4, 6, bias=True)
    nested = network.narrowed(3)
    for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"):
        assert getattr(nested, name).data_ptr() == getattr(network, name).data_ptr(), name


@pytest.mark.parametrize("width", [0, -1, 7])
def test_an_impossible_nested_width_is_refused(width: int) -> None:
    with pytest.raises(InvalidValue, match="between 1 and 6") as caught:
        make_feed_forward(4, 6).narrowed(width, field="overrides.width")
    assert caught.value.field == "overrides.width"


def test_swapping_exchanges_gate_and_up_with_their_biases_and_twice_is_nothing() -> None:
    network = make_feed_forward(4, 6, bias=True)
    swapped = network.swapped()
    assert swapped.gate is network.up
    assert swapped.up is network.gate
    assert swapped.gate_bias is network.up_bias
    assert swapped.up_bias is network.gate_bias
    assert swapped.down is network.down
    assert swapped.swapped().gate is network.gate


def test_swapping_changes_the_output_of_a_gate_and_not_of_a_bilinear_unit() -> None:
    n = random_tensor(3, 4)
    silu, bilinear = make_feed_forward(4, 6), make_feed_forward(4, 6, activation="identity")
    assert (apply_sublayer(n, silu) - apply_sublayer(n, silu.swapped())).abs().max() > 0.01
    assert torch.equal(apply_sublayer(n, bilinear), apply_sublayer(n, bilinear.swapped()))


def test_a_plain_network_has_nothing_to_swap() -> None:
    with pytest.raises(InvalidValue) as caught:
        make_feed_forward(4, 6, gated=False).swapped(field="overrides.swap")
    assert caught.value.field == "overrides.swap"


@pytest.mark.parametrize(
    ("field", "tensor"),
    [
        ("gate", torch.ones(4, 6)),
        ("up", torch.ones(6)),
        ("up", torch.ones(0, 4)),
        ("up", torch.ones(6, 4, dtype=torch.int8)),
        ("down", torch.ones(6, 4)),
        ("down", torch.ones(4, 5)),
        ("gate_bias", torch.ones(4)),
        ("up_bias", torch.ones(6, 1)),
        ("down_bias", torch.ones(6)),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(field: str, tensor: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        replace(make_feed_forward(4, 6, dtype=torch.float32), **{field: tensor})
    assert caught.value.field == field


def test_a_plain_network_has_no_gate_bias() -> None:
    with pytest.raises(InvalidValue) as caught:
        replace(make_feed_forward(4, 6, gated=False), gate_bias=torch.ones(6))
    assert caught.value.field == "gate_bias"
