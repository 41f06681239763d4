from dataclasses import replace

import pytest
import torch
from glassblock.numerics import recombination
from glassblock.numerics.block import STAGES, Placement, Stages, run_block
from glassblock.numerics.norms import NORM_KINDS, Norm
from glassblock.numerics.recombination import recombination_error

from numerics.makers import make_feed_forward, make_wiring, random_tensor

D, M = 24, 40
GATINGS = [
    ("product", {}),
    ("clamped_before", {"limit": 0.5}),
    ("clamped_after", {"limit": 0.5}),
    ("swiglu_oai", {"limit": 0.5, "alpha": 1.702}),
]


@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_float64_run_recombines_to_rounding(placement: Placement, gated: bool, bias: bool) -> None:
    network = make_feed_forward(D, M, gated=gated, bias=bias)
    wiring = make_wiring(placement, D, kind="layernorm", alpha=2.0, beta=0.3)
    errors = recombination_error(run_block(random_tensor(5, D), network, wiring), network, wiring)
    absent = {"x"} | (set() if wiring.input_norm else {"normed"}) | (set() if gated else {"gate"})
    assert list(errors) == [name for name in STAGES if name not in absent]
    for name, error in errors.items():
        # Sums of 40 products in another order, relative to the largest.
        assert error < 2e-14, name


def test_what_stands_inside_a_network_or_behind_it_recombines() -> None:
    """Multipliers, a norm of the hidden units, a gate that is cut, and a gain of the branch."""
    plain, wiring = make_feed_forward(D, M), make_wiring(Placement.PRE, D)
    gain = torch.linspace(0.5, 2.0, M, dtype=torch.float64)
    norm = Norm(NORM_KINDS["rms_llama"], gain, None, 1e-5)
    for network in (
        replace(plain, gate_scale=0.5, down_scale=0.7),
        replace(plain, hidden_norm=norm),
        replace(plain, gate_sparsity=0.9),
    ):
        errors = recombination_error(run_block(random_tensor(5, D), network, wiring), network, wiring)
        assert all(error < 2e-14 for error in errors.values())
    scaled = replace(wiring, branch_gain=torch.linspace(0.1, 1.0, D, dtype=torch.float64))
    errors = recombination_error(run_block(random_tensor(5, D), plain, scaled), plain, scaled)
    assert all(error < 2e-14 for error in errors.values())


@pytest.mark.parametrize(("gating", "numbers"), GATINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_narrow_run_recombines_to_its_precision(gating: str, numbers: dict[str, float], dtype: torch.dtype) -> None:
    network = make_feed_forward(D, M, gating=gating, dtype=torch.float32, **numbers)
    wiring = make_wiring(Placement.SANDWICH, D).to(torch.float32)
    stages = run_block(random_tensor(50, D, dtype=torch.float32), network, wiring, dtype=dtype)
    errors = recombination_error(stages, network, wiring)
    # A stage, and `output` from `hidden`, is four roundings away at most: cast of the weights, product, norm, add.
    assert 0 < max(errors.values()) < 4 * torch.finfo(dtype).eps


def test_a_parallel_branch_is_part_of_the_output() -> None:
    network, wiring = make_feed_forward(D, M), make_wiring(Placement.PARALLEL, D)
    attention = random_tensor(5, D, seed=7)
    stages = run_block(random_tensor(5, D), network, wiring, other=attention)
    assert recombination_error(stages, network, wiring, other=attention)["output"] < 1e-14
    assert recombination_error(stages, network, wiring)["output"] > 0.1


def test_exchanged_weights_do_not_recombine() -> None:
    network, wiring = make_feed_forward(D, M), make_wiring(Placement.PRE, D)
    stages = run_block(random_tensor(5, D), network, wiring)
    errors = recombination_error(stages, network.swapped(), wiring)
    assert errors["gate"] > 0.1
    assert errors["up"] > 0.1
    # The captured gate and up still make the captured hidden, and that the output.
    assert errors["hidden"] == 0
    assert errors["output"] < 1e-14


@pytest.mark.parametrize("name", [name for name in STAGES if name != "x"])
def test_one_foreign_stage_shows_where_it_is_used(name: str) -> None:
    network, wiring = make_feed_forward(D, M), make_wiring(Placement.PRE, D, beta=0.5)
    stages = run_block(random_tensor(5, D), network, wiring)
    errors = recombination_error(stages._replace(**{name: 1.5 * getattr(stages, name)}), network, wiring)
    assert errors[name] > 0.1


def test_stages_that_are_missing_are_left_out() -> None:
    network, wiring = make_feed_forward(D, M), make_wiring(Placement.PRE, D)
    stages = run_block(random_tensor(5, D), network, wiring)
    assert list(recombination_error(run_block(stages.x, network, wiring, until="up"), network, wiring)) == [
        "normed",
        "gate",
        "up",
    ]
    assert list(recombination_error(Stages(hidden=stages.hidden, down=stages.down), network, wiring)) == ["down"]
    assert list(recombination_error(Stages(up=stages.up, hidden=stages.hidden), network, wiring)) == []
    assert recombination_error(Stages(), network, wiring) == {}


def test_no_rows_recombine() -> None:
    network, wiring = make_feed_forward(D, M), make_wiring(Placement.PRE, D)
    errors = recombination_error(run_block(random_tensor(0, D), network, wiring), network, wiring)
    assert [error.item() for error in errors.values()] == [0.0] * 8


def test_weights_held_in_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    network, wiring = make_feed_forward(D, M, bias=True), make_wiring(Placement.PRE, D)
    stages = run_block(random_tensor(5, D), network, wiring)
    whole = recombination_error(stages, network, wiring)
    monkeypatch.setattr(recombination, "_CHUNK", 7 * D)  # 40 rows of up in pieces of 7, 24 of down in pieces of 4
    pieces = recombination_error(stages, network, wiring)
    assert list(pieces) == list(whole)
    for error in pieces.values():
        # A product of fewer rows may sum in another order.
        assert error < 2e-14


def test_zeros_recombine_and_nan_says_so() -> None:
    network, wiring = make_feed_forward(D, M), make_wiring(Placement.PRE, D)
    stages = run_block(torch.zeros(2, D, dtype=torch.float64), network, wiring)
    assert [error.item() for error in recombination_error(stages, network, wiring).values()] == [0.0] * 8
    assert recombination_error(stages._replace(down=torch.ones_like(stages.x)), network, wiring)["down"] == torch.inf
    poisoned = replace(network, down=network.down * torch.nan)
    assert recombination_error(run_block(random_tensor(2, D), poisoned, wiring), poisoned, wiring)["down"].isnan()
