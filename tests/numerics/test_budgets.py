from fractions import Fraction
from typing import Any

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.block import STAGES, Placement, run_block
from glassblock.numerics.budgets import (
    ELEMENT_COUNTS_ARE_NOT_PEAK_MEMORY,
    equal_parameter_width,
    feed_forward_budget,
    feed_forward_macs,
    feed_forward_parameters,
    round_up_to_multiple,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from numerics.makers import make_feed_forward, make_wiring, random_tensor


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_counts_are_those_of_a_real_network(gated: bool, bias: bool) -> None:
    d, m, batch, tokens = 12, 20, 2, 3
    network = make_feed_forward(d, m, gated=gated, bias=bias, dtype=torch.float32)
    wiring = make_wiring(Placement.PRE, d).to(torch.float32)
    stages = run_block(random_tensor(batch, tokens, d, dtype=torch.float32), network, wiring)
    budget = feed_forward_budget(
        d_model=d, d_ff=m, gated=gated, batch=batch, tokens=tokens, layers=1, element_bytes=4, bias=bias
    )
    assert budget.parameters == network.parameters
    assert budget.hidden_elements == stages.hidden.numel()
    # In a plain network `hidden` is the very tensor of `activated`: no elements of its own.
    expected = [name for name in STAGES if gated or name not in {"gate", "hidden"}]
    assert list(budget.stages) == expected
    for name in expected:
        stage = getattr(stages, name)
        assert (budget.stages[name].elements, budget.stages[name].bytes) == (stage.numel(), stage.nbytes)
    matrices = [tensor for tensor in (network.gate, network.up, network.down) if tensor is not None]
    assert budget.macs_per_token == sum(tensor.numel() for tensor in matrices)


def test_layers_batch_and_tokens_multiply() -> None:
    one: dict[str, Any] = {"d_model": 8, "d_ff": 16, "gated": True, "element_bytes": 2}
    base = feed_forward_budget(**one, batch=1, tokens=1, layers=1)
    found = feed_forward_budget(**one, batch=3, tokens=5, layers=7)
    assert found.parameters == base.parameters == 384
    assert found.macs_per_token == base.macs_per_token == 384
    assert found.flops_per_token == 768
    assert found.total_parameters == 7 * 384
    assert found.total_flops_per_token == 7 * 768
    assert found.total_flops == 7 * 15 * 768
    assert found.hidden_elements == 15 * 16
    assert found.activation_elements == 7 * 15 * base.activation_elements
    assert base.activation_elements == 5 * 8 + 4 * 16
    assert found.activation_bytes == 2 * found.activation_elements


def test_numbers_beyond_64_bits_stay_exact() -> None:
    budget = feed_forward_budget(
        d_model=10**9, d_ff=10**10, gated=True, batch=10**3, tokens=10**6, layers=10**3, element_bytes=8
    )
    assert budget.total_flops == 6 * 10**31


@settings(max_examples=50, deadline=None)
@given(width=st.integers(1, 10**6), d=st.integers(1, 10**4), multiple=st.integers(1, 4096))
def test_the_equal_width_has_equal_parameters_and_rounds_up_to_the_next_multiple(
    width: int, d: int, multiple: int
) -> None:
    equal = equal_parameter_width(width)
    assert 3 * d * equal == feed_forward_parameters(d_model=d, d_ff=width, gated=False)
    rounded = round_up_to_multiple(equal, multiple)
    assert rounded % multiple == 0
    assert equal <= rounded < equal + multiple
    assert isinstance(rounded, int)


@pytest.mark.parametrize(
    ("width", "multiple", "expected"),
    [(Fraction(32768, 3), 1, 10923), (11008, 256, 11008), (11009, 256, 11264), (1, 256, 256), (Fraction(1, 3), 1, 1)],
)
def test_rounding_by_hand(width: Fraction | int, multiple: int, expected: int) -> None:
    assert round_up_to_multiple(width, multiple) == expected


def test_macs_do_not_count_biases() -> None:
    assert feed_forward_macs(d_model=3, d_ff=5, gated=True) == 45
    assert feed_forward_parameters(d_model=3, d_ff=5, gated=True, bias=True) == 45 + 13
    assert feed_forward_parameters(d_model=3, d_ff=5, gated=False, bias=True) == 30 + 8


def test_the_answer_can_say_that_counts_are_no_peak() -> None:
    assert "not peak memory" in ELEMENT_COUNTS_ARE_NOT_PEAK_MEMORY


@pytest.mark.parametrize("field", ["d_model", "d_ff", "batch", "tokens", "layers", "element_bytes"])
@pytest.mark.parametrize("value", [0, -1, True])
def test_what_is_no_count_is_refused_by_name(field: str, value: Any) -> None:
    request: dict[str, Any] = {"d_model": 8, "d_ff": 16, "batch": 1, "tokens": 1, "layers": 1, "element_bytes": 4}
    with pytest.raises(InvalidValue) as caught:
        feed_forward_budget(**(request | {field: value}), gated=True)
    assert caught.value.field == field


@pytest.mark.parametrize(("width", "multiple", "field"), [(0, 256, "width"), (-3, 256, "width"), (5, 0, "multiple_of")])
def test_rounding_what_cannot_be_is_refused(width: int, multiple: int, field: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        round_up_to_multiple(width, multiple)
    assert caught.value.field == field
