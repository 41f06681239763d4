"""Exact norms of block Jacobians, by both ways, against the dense Jacobian that autograd gives in float64."""

import dataclasses

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.activations import activation_named, product, xielu
from glassblock.numerics.block import Placement, residual_output
from glassblock.numerics.block_jacobians import Part, block_jacobian
from glassblock.numerics.block_norms import METHODS, REDO_ABOVE, BlockNorms, block_norms, norm_plan
from glassblock.numerics.condition_numbers import condition_numbers
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.finite_difference_check import check_block
from glassblock.numerics.gram_norms import norms_from_grams
from glassblock.numerics.layer_grams import layer_grams
from glassblock.numerics.residual_jacobians import residual_jacobian
from glassblock.numerics.spectral_bracket import spectral_bracket
from glassblock.numerics.spectral_request import Certificate, SpectralRequest
from glassblock.numerics.watching import ComputationCancelled, Watch
from torch import Tensor

from numerics.makers import central_differences, make_feed_forward, make_norm, make_wiring, random_tensor, unit_norm
from numerics.test_block_jacobians import NETWORKS, oracle

D, M, TOKENS = 12, 37, 3  # M spans two blocks, the second of another size
KINDS = ["rms_plus1", "layernorm"]
# The network alone is the same whatever is around it but for what it reads.
PARTS = [
    *((placement, part) for placement in Placement for part in (Part.BRANCH, Part.BLOCK)),
    *((placement, Part.FEED_FORWARD) for placement in (Placement.PRE, Placement.POST)),
]
# Gated and plain, with biases and without, each kind of gating; products of the others are in test_block_jacobians.
FIVE_NETWORKS = [NETWORKS[number] for number in (0, 1, 3, 5, 7)]
# Relative: what was asked for of float64 and float32.
FLOAT64, FLOAT32 = 1e-12, 1e-5


def rows() -> Tensor:
    x = random_tensor(TOKENS, D, seed=41)
    x[1] += 0.7
    x[2, 3] = 2e3  # a massive activation
    return x


def widened(network, wiring):
    """Network and wiring in float64."""
    tensors = {
        field.name: value.double()
        for field in dataclasses.fields(network)
        if isinstance(value := getattr(network, field.name), Tensor)
    }
    return dataclasses.replace(network, **tensors), wiring.to(torch.float64)


def check(found: BlockNorms, dense: Tensor, point: Tensor, tolerance: float) -> None:
    """The trace against the Frobenius norm, and the gain against it too: both may vanish and the norm does not."""
    frobenius = torch.linalg.matrix_norm(dense)
    torch.testing.assert_close(found.frobenius, frobenius, rtol=tolerance, atol=0.0)
    trace = dense.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert ((found.trace - trace).abs() <= tolerance * frobenius).all(), (found.trace - trace) / frobenius
    direction = point / torch.linalg.vector_norm(point, dim=-1, keepdim=True)
    gain = torch.linalg.vector_norm(torch.einsum("tij,tj->ti", dense, direction), dim=-1)
    assert ((found.radial_gain - gain).abs() <= tolerance * frobenius).all(), (found.radial_gain - gain) / frobenius


@pytest.mark.parametrize(("placement", "part"), PARTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("network", FIVE_NETWORKS, ids=lambda network: "-".join(map(str, network.values())))
def test_both_ways_and_precisions(network: dict, placement: Placement, kind: str, part: Part) -> None:
    narrow = make_feed_forward(D, M, dtype=torch.float32, **network)
    narrow_wiring = make_wiring(placement, D, kind=kind, alpha=1.3, beta=0.6).to(torch.float32)
    wide, wide_wiring = widened(narrow, narrow_wiring)
    x = rows().float()
    dense = oracle(x.double(), wide, wide_wiring, part)
    reads = x.double()
    if part is Part.FEED_FORWARD and wide_wiring.input_norm is not None:
        reads = wide_wiring.input_norm(x.double())
    for method in METHODS:
        found = block_norms(x.double(), wide, wide_wiring, part=part, method=method)
        assert (found.method, found.exactness, found.accumulation) == (method, "exact", torch.float64)
        check(found, dense, reads, FLOAT64)
        found = block_norms(x, narrow, narrow_wiring, part=part, method=method)
        assert found.accumulation == torch.float32
        check(found, dense, reads, FLOAT32)


def make(kind: str = "rms_plus1", placement: Placement = Placement.PRE, **network):
    return make_feed_forward(D, M, **network), make_wiring(placement, D, kind=kind, alpha=1.3, beta=0.6)


def with_eps(wiring, eps: float):
    norms = {
        role: dataclasses.replace(norm, eps=eps)
        for role in ("input_norm", "output_norm", "residual_norm")
        if (norm := getattr(wiring, role)) is not None
    }
    return dataclasses.replace(wiring, **norms)


@pytest.mark.parametrize("alpha", [0.0, -0.8])
@pytest.mark.parametrize("placement", Placement)
def test_scales_of_zero_and_below(placement: Placement, alpha: float) -> None:
    network, x = make_feed_forward(D, M), random_tensor(TOKENS, D, seed=42)
    wiring = make_wiring(placement, D, alpha=alpha, beta=-1.7)
    dense = oracle(x, network, wiring, Part.BLOCK)
    for method in METHODS:
        check(block_norms(x, network, wiring, method=method), dense, x, FLOAT64)


def test_a_learned_activation() -> None:
    """Of the Apertus family; it has a corner at zero, and its slope there is not asked for."""
    numbers = {"alpha_p": 0.8, "alpha_n": 0.3, "beta": 0.5, "eps": -1e-6}
    learned = xielu(**{name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()})
    network = dataclasses.replace(make_feed_forward(D, M, gated=False, bias=True), activation=learned)
    wiring, x = make_wiring(Placement.PRE, D), rows()
    dense = oracle(x, network, wiring, Part.BLOCK)
    for method in METHODS:
        check(block_norms(x, network, wiring, method=method), dense, x, FLOAT64)


@pytest.mark.parametrize("kind", ["rms_noweight", "layernorm_noparam", "rms_t5", "layernorm_1p"])
def test_other_norms(kind: str) -> None:
    network, wiring = make(kind, Placement.SANDWICH)
    x = random_tensor(TOKENS, D, seed=43)
    check(block_norms(x, network, wiring), oracle(x, network, wiring, Part.BLOCK), x, FLOAT64)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("exponent", [-37, -30, 30, 37])
@pytest.mark.parametrize("placement", [Placement.PRE, Placement.SANDWICH, Placement.PARALLEL])
def test_float32_rows_near_zero_and_near_overflow(placement: Placement, exponent: int, method: str) -> None:
    """Squares of these rows are no float32 numbers; nor are, for BRANCH, the squares of the Jacobian's entries."""
    wiring = with_eps(make_wiring(placement, D, kind="rms_plus1"), 0.0 if exponent < 0 else 1e-5)
    narrow, narrow_wiring = make_feed_forward(D, M, dtype=torch.float32), wiring.to(torch.float32)
    x = (random_tensor(TOKENS, D, seed=44) * 10.0**exponent).float()
    wide, wide_wiring = widened(narrow, narrow_wiring)
    for part in (Part.BRANCH, Part.BLOCK):
        dense = oracle(x.double(), wide, wide_wiring, part)
        check(block_norms(x, narrow, narrow_wiring, part=part, method=method), dense, x.double(), FLOAT32)


@pytest.mark.parametrize("kind", ["rms_plus1", "layernorm"])
def test_rows_of_zeros(kind: str) -> None:
    network, wiring = make(kind, bias=True)
    x = torch.zeros(2, D, dtype=torch.float64)
    dense = oracle(x, network, wiring, Part.BLOCK)
    for method in METHODS:
        found = block_norms(x, network, wiring, method=method)
        torch.testing.assert_close(found.frobenius, torch.linalg.matrix_norm(dense), rtol=FLOAT64, atol=0.0)
        assert found.radial_gain.isnan().all()
        assert not found.redone.any()  # no precision gives a zero row a direction


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("exponent", [-20, -23, -30])
def test_the_gain_along_a_row_far_below_epsilon(exponent: int, method: str) -> None:
    """Slopes and the normed row are both as small as the row: their product is no float32 number."""
    narrow, wiring = make_feed_forward(D, M, dtype=torch.float32), make_wiring(Placement.PRE, D).to(torch.float32)
    x = (random_tensor(TOKENS, D, seed=47) * 10.0**exponent).float()
    dense = oracle(x.double(), *widened(narrow, wiring), Part.BRANCH)
    check(block_norms(x, narrow, wiring, part=Part.BRANCH, method=method), dense, x.double(), FLOAT32)


@pytest.mark.parametrize("method", METHODS)
def test_a_sum_that_lost_its_bits_before_a_norm_is_done_again(method: str) -> None:
    """Hidden units below float32's normal numbers, and a norm without an epsilon that brings them back to one."""
    wiring = with_eps(make_wiring(Placement.BRANCH_OUTPUT, D), 0.0).to(torch.float32)
    narrow = make_feed_forward(D, M, dtype=torch.float32)
    narrow = dataclasses.replace(narrow, gate_bias=torch.full((M,), -20.0))
    x = (random_tensor(TOKENS, D, seed=48) * 1e-37).float()
    dense = oracle(x.double(), *widened(narrow, wiring), Part.BLOCK)
    found = block_norms(x, narrow, wiring, method=method)
    assert found.redone.all()
    check(found, dense, x.double(), FLOAT32)


def test_slopes_deep_in_a_tail_are_not_lost() -> None:
    """Every sigmoid is near exp(-60): its square is no float32 number."""
    network, wiring = make(activation="sigmoid", bias=True, gated=False)
    network = dataclasses.replace(network, up_bias=torch.full((M,), -60.0, dtype=torch.float64))
    narrow = dataclasses.replace(
        network, up=network.up.float(), down=network.down.float(), up_bias=network.up_bias.float()
    )
    x = random_tensor(TOKENS, D, seed=45).float()
    dense = oracle(x.double(), *widened(narrow, wiring), Part.BRANCH)
    for method in METHODS:
        found = block_norms(x, narrow, wiring.to(torch.float32), part=Part.BRANCH, method=method)
        # A relative error of 6e-8 of an exponent of 60 is one of 4e-6 of its exponential.
        torch.testing.assert_close(found.frobenius, torch.linalg.matrix_norm(dense), rtol=FLOAT32, atol=0.0)


def along_the_row(x: Tensor, *, eps: float = 1e-5, dtype: torch.dtype = torch.float32):
    """A block whose M is y x^T but for a thousandth: the norm before it removes all but that."""
    network = make_feed_forward(D, M, activation="identity", gated=False, dtype=torch.float64)
    row = x[0].double()
    up = torch.outer(random_tensor(M, seed=46), row) + 1e-4 * network.up
    network = dataclasses.replace(network, up=up.to(dtype), down=network.down.to(dtype))
    wiring = dataclasses.replace(make_wiring(Placement.PRE, D), input_norm=unit_norm(eps=eps))
    return network, wiring


def test_a_row_along_x_is_done_again_in_float64() -> None:
    x = random_tensor(2, D, seed=47).float()
    network, wiring = along_the_row(x)
    dense = oracle(x.double(), *widened(network, wiring), Part.BRANCH)
    found = block_norms(x, network, wiring, part=Part.BRANCH, method="gram")
    check(found, dense, x.double(), FLOAT32)
    assert not (0 <= found.cancellation[0] <= REDO_ABOVE)
    assert 0 <= found.cancellation[1] <= REDO_ABOVE
    assert found.redone.tolist() == [True, False]
    assert found.accumulation == torch.float32
    alone = block_norms(x[1:], network, wiring, part=Part.BRANCH, method="gram")
    assert found.flops > alone.flops + alone.push_flops / 2
    # It was needed: float32 alone is off by far more.
    grams = layer_grams(network, wiring, part=Part.BRANCH)
    spoiled = norms_from_grams(block_jacobian(x, network, wiring, part=Part.BRANCH), grams).frobenius
    assert not torch.isclose(spoiled[0], found.frobenius[0], rtol=1e-3)


def test_neurons_that_cancel_are_done_again_in_float64() -> None:
    """Twins with opposite columns of `down`, but for 1e-4 of them: no norm has a part in it."""
    network, wiring = make(placement=Placement.BRANCH_OUTPUT)
    half = make_feed_forward(D, M, dtype=torch.float32)
    twin = {name: torch.cat([getattr(half, name)] * 2) for name in ("gate", "up")}
    network = dataclasses.replace(half, **twin, down=torch.cat([half.down, -0.9999 * half.down], dim=1))
    x = random_tensor(2, D, seed=48).float()
    found = block_norms(x, network, wiring.to(torch.float32), part=Part.FEED_FORWARD, method="gram")
    dense = oracle(x.double(), *widened(network, wiring.to(torch.float32)), Part.FEED_FORWARD)
    assert found.redone.all()
    check(found, dense, x.double(), FLOAT32)


def test_a_layer_norm_of_an_almost_constant_row_is_done_again_in_float64() -> None:
    network, wiring = make_feed_forward(D, M, dtype=torch.float32), make_wiring(Placement.PRE, D, kind="layernorm")
    wiring = wiring.to(torch.float32)
    x = (1e4 + random_tensor(2, D, seed=49)).float()
    found = block_norms(x, network, wiring, part=Part.BRANCH)
    assert found.redone.all()
    check(found, oracle(x.double(), *widened(network, wiring), Part.BRANCH), x.double(), FLOAT32)


def test_a_stream_that_cancels_before_a_norm_is_done_again_in_float64() -> None:
    """x + F(x) is a hundred-thousandth of x."""
    network = make_feed_forward(D, D, activation="identity", gated=False)
    inverse = torch.linalg.inv(network.up)
    network = dataclasses.replace(network, up=network.up.float(), down=-(inverse * (1 - 1e-5)).float())
    wiring = make_wiring(Placement.POST, D).to(torch.float32)
    x = random_tensor(2, D, seed=50).float()
    found = block_norms(x, network, with_eps(wiring, 1e-12))
    assert found.redone.all()
    wide = widened(network, with_eps(wiring, 1e-12))
    check(found, oracle(x.double(), *wide, Part.BLOCK), x.double(), FLOAT32)


def test_a_radial_gain_that_cancels_is_done_again_in_float64() -> None:
    """A norm after a stream that is almost x: of the direction of x it leaves eps/s^2."""
    network = make_feed_forward(D, M, dtype=torch.float32)
    network = dataclasses.replace(network, down=1e-7 * network.down)
    wiring = with_eps(make_wiring(Placement.POST, D).to(torch.float32), 1e-7)
    x = random_tensor(2, D, seed=56).float()
    found = block_norms(x, network, wiring)
    dense = oracle(x.double(), *widened(network, wiring), Part.BLOCK)
    direction = x.double() / torch.linalg.vector_norm(x.double(), dim=-1, keepdim=True)
    gain = torch.linalg.vector_norm(torch.einsum("tij,tj->ti", dense, direction), dim=-1)
    assert (gain < 1e-6 * found.frobenius).all()
    assert (found.cancellation <= REDO_ABOVE).all()
    assert found.redone.all()
    torch.testing.assert_close(found.radial_gain, gain, rtol=FLOAT32, atol=0.0)


def test_another_branch_goes_by_pushes() -> None:
    network, wiring = make(placement=Placement.PARALLEL)
    x, other = random_tensor(TOKENS, D, seed=51), random_tensor(TOKENS, D, D, seed=52)
    found = block_norms(x, network, wiring, other=other)
    assert found.method == "pushes"
    check(found, oracle(x, network, wiring, Part.BLOCK) + other, x, FLOAT64)
    with pytest.raises(InvalidValue) as caught:
        block_norms(x, network, wiring, other=other, method="gram")
    assert caught.value.field == "method"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("placement", Placement)
def test_pieces_give_what_the_whole_gives(placement: Placement, method: str) -> None:
    network, wiring = make("layernorm", placement, bias=True)
    x = random_tensor(9, D, seed=53)
    whole = block_norms(x, network, wiring, method=method)
    places: list[tuple[int, int, str]] = []
    watch = Watch(progress=lambda *place: places.append(place))
    budget = 40_000
    pieces = block_norms(x, network, wiring, method=method, byte_budget=budget, watch=watch)
    for name in ("frobenius", "trace", "radial_gain", "cancellation"):
        torch.testing.assert_close(getattr(pieces, name), getattr(whole, name), rtol=1e-11, atol=1e-12)
    assert sum(message == "tokens" for *_, message in places) > 1
    if method == "gram":
        assert sum(message == "gram matrices" for *_, message in places) > 2  # formed anew for each batch
        assert pieces.flops > whole.flops
        assert pieces.bytes <= budget


def test_gram_matrices_are_a_value_to_be_used_again() -> None:
    network, wiring = make(placement=Placement.SANDWICH)
    x = random_tensor(9, D, seed=54)
    grams = layer_grams(network, wiring, dtype=torch.float64)
    assert grams.blocks is not None
    fresh, cached = (block_norms(x, network, wiring, method="gram", grams=g) for g in (None, grams))
    assert torch.equal(fresh.frobenius, cached.frobenius)
    assert cached.flops < fresh.flops
    # BLOCK and BRANCH of this wiring have the same.
    branch = block_norms(x, network, wiring, part=Part.BRANCH, method="gram", grams=grams)
    assert torch.equal(branch.frobenius, block_norms(x, network, wiring, part=Part.BRANCH, method="gram").frobenius)


def test_gram_matrices_of_something_else_are_refused() -> None:
    network, wiring = make(placement=Placement.SANDWICH)
    x = random_tensor(2, D, seed=55)
    others = [
        layer_grams(make_feed_forward(D, M + 1), wiring, dtype=torch.float64),
        layer_grams(make_feed_forward(D, M, gated=False), wiring, dtype=torch.float64),
        layer_grams(make_feed_forward(D, M, seed=9), wiring, dtype=torch.float64),
        layer_grams(network, make_wiring(Placement.PRE, D), dtype=torch.float64),
        layer_grams(network, wiring, part=Part.FEED_FORWARD, dtype=torch.float64),
        layer_grams(network, wiring, dtype=torch.float32),
    ]
    for grams in others:
        with pytest.raises(InvalidValue) as caught:
            block_norms(x, network, wiring, grams=grams)
        assert caught.value.field == "grams"


def test_the_cheaper_way_is_taken_and_told() -> None:
    network = make_feed_forward(576, 1536, dtype=torch.float32)
    wiring = make_wiring(Placement.PRE, 576).to(torch.float32)
    chosen = {tokens: norm_plan(tokens, network, wiring) for tokens in (1, 4, 10, 256)}
    assert {tokens: plan.method for tokens, plan in chosen.items()} == {
        1: "pushes",
        4: "pushes",
        10: "gram",
        256: "gram",
    }
    for plan in chosen.values():
        assert plan.flops == min(plan.gram_flops, plan.push_flops)
    assert norm_plan(1, network, wiring, formed=True).method == "gram"
    # 5 m^2 d, and a sixteenth more for the blocks on the diagonal.
    forming = chosen[256].gram_flops - norm_plan(256, network, wiring, formed=True).gram_flops
    assert forming == pytest.approx(5 * 1536**2 * 576 * 17 / 16)


def test_llama_7b_fits_six_gigabytes() -> None:
    gate, up, down = (torch.empty(shape, device="meta") for shape in ((11008, 4096), (11008, 4096), (4096, 11008)))
    network = FeedForward(gate, up, down, None, None, None, activation_named("silu"), product())
    plan = norm_plan(2048, network, make_wiring(Placement.PRE, 4096))
    weights = 3 * 11008 * 4096 * 4
    assert plan.method == "gram"
    assert plan.bytes + weights < 6e9


def test_no_tokens() -> None:
    network, wiring = make()
    for method in METHODS:
        found = block_norms(torch.zeros(0, D, dtype=torch.float64), network, wiring, method=method)
        assert found.frobenius.shape == found.redone.shape == (0,)


@pytest.mark.parametrize("method", METHODS)
def test_it_can_be_stopped(method: str) -> None:
    network, wiring = make()
    with pytest.raises(ComputationCancelled):
        block_norms(random_tensor(2, D), network, wiring, method=method, watch=Watch(cancelled=lambda: True))


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(InvalidValue) as caught:
        block_norms(random_tensor(2, D), *make(), method="magic")
    assert (caught.value.field, caught.value.known) == ("method", METHODS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("placement", [Placement.POST, Placement.SANDWICH])
def test_everything_is_made_where_the_inputs_are(placement: Placement, dtype: torch.dtype) -> None:
    """A tensor made without a word about its device would be on `meta` here, and meet the others in an error."""
    network, wiring = make_feed_forward(D, M, bias=True, dtype=dtype), make_wiring(placement, D, kind="layernorm")
    x = rows().to(dtype)
    with torch.device("meta"):
        for method in METHODS:
            assert block_norms(x, network, wiring.to(dtype), method=method).frobenius.device == x.device
        for certificate in (Certificate.PROBABLE, Certificate.CHOLESKY, Certificate.DENSE):
            request = SpectralRequest(certificate=certificate, tolerance=1e-9, vectors=True)
            assert spectral_bracket(x, network, wiring.to(dtype), request=request).upper.device == x.device
        for method in ("dense", "inverse"):
            found = condition_numbers(x, network, wiring.to(dtype), method=method)
            assert found.smallest_upper.device == x.device


UNLIKE = {
    "a norm of the hidden units": lambda network: {"hidden_norm": make_norm("rms_llama", network.width)},
    "a scale on the gate": lambda _: {"gate_scale": 0.7},
    "a scale on what is returned": lambda _: {"down_scale": 1.6},
}


@pytest.mark.parametrize("case", UNLIKE)
@pytest.mark.parametrize("part", Part)
def test_what_the_closed_form_does_not_hold_is_refused_everywhere(case: str, part: Part) -> None:
    network, wiring = make()
    network = dataclasses.replace(network, **UNLIKE[case](network))
    x = rows()
    asks = (
        lambda: block_jacobian(x, network, wiring, part=part),
        lambda: layer_grams(network, wiring, part=part, dtype=torch.float64),
        lambda: spectral_bracket(x, network, wiring, part=part),
        lambda: spectral_bracket(x, network, wiring, part=part, request=SpectralRequest(certificate=Certificate.DENSE)),
        lambda: condition_numbers(x, network, wiring, part=part),
        lambda: check_block(x, network, wiring, part=part),
        *(lambda method=method: block_norms(x, network, wiring, part=part, method=method) for method in METHODS),
    )
    for ask in asks:
        with pytest.raises(InvalidValue, match="closed form"):
            ask()


@pytest.mark.parametrize("case", UNLIKE)
@pytest.mark.parametrize("placement", Placement)
def test_the_dense_jacobian_of_such_a_block_is_that_of_its_output(case: str, placement: Placement) -> None:
    network, wiring = make(placement=placement)
    network = dataclasses.replace(network, **UNLIKE[case](network))
    wiring = dataclasses.replace(wiring, branch_gain=random_tensor(D, seed=48))
    with torch.inference_mode():
        found = residual_jacobian(rows(), network, wiring)
    for row, jacobian in zip(rows(), found, strict=True):
        differences = central_differences(lambda x: residual_output(x, network, wiring), row)
        size = float(jacobian.abs().max())
        torch.testing.assert_close(jacobian, differences, rtol=0.0, atol=1e-7 * size)
