"""Brackets of the spectral norm of block Jacobians against dense decompositions in float64."""

import dataclasses

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.block import Placement
from glassblock.numerics.block_jacobians import Part
from glassblock.numerics.block_norms import block_norms
from glassblock.numerics.spectral_bracket import SpectralBracket, spectral_bracket
from glassblock.numerics.spectral_request import Certificate, SpectralRequest
from glassblock.numerics.watching import ComputationCancelled, Watch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from numerics.makers import make_feed_forward, make_wiring, random_tensor
from numerics.test_block_jacobians import oracle
from numerics.test_block_norms import widened

D, M, TOKENS = 16, 30, 4


def rows(seed: int = 61) -> Tensor:
    x = random_tensor(TOKENS, D, seed=seed)
    x[1, 2] = 1e3
    return x


def assert_holds(found: SpectralBracket, dense: Tensor, *, relative: float = 0.0) -> None:
    truth = torch.linalg.svdvals(dense)[:, 0]
    # What the decomposition itself may be off by: d eps, which it is where all singular values nearly coincide.
    slack = (dense.shape[-1] * torch.finfo(torch.float64).eps + relative) * truth
    assert (found.lower <= truth + slack).all(), found.lower - truth
    assert (truth <= found.upper + slack).all(), found.upper - truth


@pytest.mark.parametrize("certificate", Certificate)
@pytest.mark.parametrize("kind", ["rms_plus1", "layernorm"])
@pytest.mark.parametrize("placement", Placement)
def test_every_wiring_and_certificate(placement: Placement, kind: str, certificate: Certificate) -> None:
    network = make_feed_forward(D, M, bias=True)
    wiring = make_wiring(placement, D, kind=kind, alpha=1.3, beta=0.6)
    x, part = rows(), Part.BRANCH if kind == "layernorm" else Part.BLOCK
    request = SpectralRequest(tolerance=1e-6, certificate=certificate, vectors=True)
    norms = block_norms(x, network, wiring, part=part) if certificate is Certificate.FROBENIUS else None
    found = spectral_bracket(x, network, wiring, part=part, request=request, norms=norms)
    dense = oracle(x, network, wiring, part)
    assert_holds(found, dense)
    assert found.converged.all()
    assert (found.upper <= found.lower * (1 + 1e-6)).all()
    assert found.certain.all() == (certificate is not Certificate.PROBABLE)
    assert not found.redone.any()
    assert (found.method == "dense") == (found.exactness == "exact") == (certificate is Certificate.DENSE)
    assert found.flops > 0
    # A vector within an angle of the square root of the tolerance gives the value within the tolerance.
    moved = torch.einsum("tij,tj->ti", dense, found.right)
    torch.testing.assert_close(torch.linalg.vector_norm(moved, dim=-1), found.lower, rtol=1e-6, atol=0.0)
    torch.testing.assert_close((moved * found.left).sum(-1), found.lower, rtol=1e-6, atol=0.0)


@settings(max_examples=25, deadline=None)
@given(
    placement=st.sampled_from(list(Placement)),
    kind=st.sampled_from(["rms_llama", "layernorm"]),
    part=st.sampled_from(list(Part)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    certificate=st.sampled_from([Certificate.PROBABLE, Certificate.CHOLESKY, Certificate.FROBENIUS]),
    beta=st.sampled_from([0.0, 1e-12, 1e-3, 1.0, -1.0]),
    tolerance=st.sampled_from([1e-2, 1e-4]),
    steps=st.sampled_from([2, 200]),
    seed=st.integers(0, 1000),
)
def test_the_bracket_holds_the_truth(
    placement: Placement,
    kind: str,
    part: Part,
    dtype: torch.dtype,
    certificate: Certificate,
    beta: float,
    tolerance: float,
    steps: int,
    seed: int,
) -> None:
    """A small beta leaves singular values that all but coincide."""
    narrow = make_feed_forward(D, M, seed=seed, dtype=torch.float32)
    narrow_wiring = make_wiring(placement, D, kind=kind, beta=beta).to(torch.float32)
    network, wiring = widened(narrow, narrow_wiring)
    x = rows(seed).float()
    dense = oracle(x.double(), network, wiring, part)
    request = SpectralRequest(tolerance=tolerance, certificate=certificate, steps=steps, seed=seed)
    norms = block_norms(x, narrow, narrow_wiring, part=part) if certificate is Certificate.FROBENIUS else None
    if dtype is torch.float32:
        found = spectral_bracket(x, narrow, narrow_wiring, part=part, request=request, norms=norms)
    else:
        found = spectral_bracket(x.double(), network, wiring, part=part, request=request, norms=norms)
    assert_holds(found, dense)
    assert (found.converged == (found.upper <= found.lower * (1 + tolerance))).all()
    # Else the Jacobian may be zero, or the Frobenius bound loose, or a norm may have taken away almost everything.
    reachable = certificate is not Certificate.FROBENIUS and placement is not Placement.POST and beta != 0.0
    if steps == 200 and reachable:
        assert found.converged.all()


def test_steps_too_few_are_told() -> None:
    network, wiring = make_feed_forward(64, 100), make_wiring(Placement.PRE, 64)
    x = random_tensor(2, 64, seed=62)
    found = spectral_bracket(x, network, wiring, request=SpectralRequest(tolerance=1e-6, steps=9))
    assert not found.converged.any()
    assert found.steps.tolist() == [9, 9]
    assert (found.upper > found.lower * (1 + 1e-6)).all()
    assert_holds(found, oracle(x, network, wiring, Part.BLOCK))


def test_what_float32_cannot_reach_is_done_again() -> None:
    narrow, narrow_wiring = (
        make_feed_forward(D, M, dtype=torch.float32),
        make_wiring(Placement.PRE, D).to(torch.float32),
    )
    x = rows().float()
    wide = spectral_bracket(x, narrow, narrow_wiring)
    fine = spectral_bracket(x, narrow, narrow_wiring, request=SpectralRequest(tolerance=1e-9, vectors=True))
    assert not wide.redone.any()
    assert fine.redone.all()
    assert fine.converged.all()
    assert fine.accumulation == torch.float32
    assert fine.right.dtype == torch.float64
    assert fine.flops > wide.flops
    dense = oracle(x.double(), *widened(narrow, narrow_wiring), Part.BLOCK)
    assert_holds(wide, dense)
    assert_holds(fine, dense)


@pytest.mark.parametrize("exponent", [-37, 37])
def test_float32_rows_near_zero_and_near_overflow(exponent: int) -> None:
    """The entries of BRANCH's Jacobian have no squares in float32, and those near zero not all bits."""
    network, wiring = make_feed_forward(D, M, dtype=torch.float32), make_wiring(Placement.PRE, D).to(torch.float32)
    norm = dataclasses.replace(wiring.input_norm, eps=0.0)
    wiring = dataclasses.replace(wiring, input_norm=norm)
    x = (random_tensor(TOKENS, D, seed=63) * 10.0**exponent).float()
    found = spectral_bracket(x, network, wiring, part=Part.BRANCH)
    assert found.redone.all() == (exponent > 0)
    assert found.converged.all()
    assert_holds(found, oracle(x.double(), *widened(network, wiring), Part.BRANCH))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gate_bias", [-50.0, -52.0, -53.0, -54.0, -55.0, -70.0, -87.0, -100.0, -400.0])
def test_slopes_deep_in_a_tail(gate_bias: float, dtype: torch.dtype) -> None:
    """The Jacobian is far from one: squares of its entries, then the entries, have few bits in float32, or none."""
    network, wiring = make_feed_forward(24, 64, dtype=dtype), make_wiring(Placement.PRE, 24).to(dtype)
    network = dataclasses.replace(network, gate_bias=torch.full((64,), gate_bias, dtype=dtype))
    x = random_tensor(8, 24, seed=68).to(dtype)
    dense = oracle(x.double(), *widened(network, wiring), Part.FEED_FORWARD)
    unit = dense.abs().amax((-2, -1))  # in it the decomposition is sound
    for certificate in (Certificate.PROBABLE, Certificate.CHOLESKY, Certificate.DENSE):
        request = SpectralRequest(certificate=certificate, tolerance=1e-3)
        found = spectral_bracket(x, network, wiring, part=Part.FEED_FORWARD, request=request)
        assert found.converged.all()
        in_units = found._replace(lower=found.lower / unit, upper=found.upper / unit)
        # exp(g) magnifies the rounding of g |g| times; the slopes are taken as they are.
        relative = 2 * abs(gate_bias) * torch.finfo(found.accumulation).eps
        assert_holds(in_units, dense / unit[:, None, None], relative=relative)


def test_small_entries_by_a_large_row() -> None:
    network, wiring = make_feed_forward(D, M, dtype=torch.float32), make_wiring(Placement.PRE, D).to(torch.float32)
    network = dataclasses.replace(network, gate_bias=torch.full((M,), -20.0))
    x = (random_tensor(TOKENS, D, seed=69) * 1e15).float()
    found = spectral_bracket(x, network, wiring, part=Part.BRANCH)
    assert_holds(found, oracle(x.double(), *widened(network, wiring), Part.BRANCH))


@pytest.mark.parametrize("certificate", [Certificate.PROBABLE, Certificate.CHOLESKY, Certificate.DENSE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_jacobian_of_zeros(dtype: torch.dtype, certificate: Certificate) -> None:
    """A block that was added with a down projection of zeros, and units that are all off."""
    wiring = make_wiring(Placement.PRE, D).to(dtype)
    added = dataclasses.replace(make_feed_forward(D, M, dtype=dtype), down=torch.zeros(D, M, dtype=dtype))
    off = make_feed_forward(D, M, activation="relu", dtype=dtype)
    off = dataclasses.replace(off, gate_bias=torch.full((M,), -1e3, dtype=dtype))
    for network in (added, off):
        request = SpectralRequest(certificate=certificate)
        found = spectral_bracket(rows().to(dtype), network, wiring, part=Part.BRANCH, request=request)
        assert (found.lower == 0).all()
        assert (found.upper == 0).all()
        assert found.converged.all()


def test_what_cancels_to_zero_is_known_to_rounding() -> None:
    """A norm of one channel without an epsilon returns a sign: its derivative is zero, and nobody sees it is."""
    network, wiring = make_feed_forward(1, M), make_wiring(Placement.PRE, 1)
    wiring = dataclasses.replace(wiring, input_norm=dataclasses.replace(wiring.input_norm, eps=0.0))
    found = spectral_bracket(torch.tensor([[2.0]]).double(), network, wiring, part=Part.BRANCH)
    assert found.lower.item() == 0.0
    assert 0.0 < found.upper.item() < 1e-4
    assert not found.certain.any()
    assert not found.converged.any()


def test_batches_give_what_the_whole_gives() -> None:
    network, wiring = make_feed_forward(D, M), make_wiring(Placement.SANDWICH, D)
    x = random_tensor(9, D, seed=64)
    whole = spectral_bracket(x, network, wiring)
    places: list[str] = []
    watch = Watch(progress=lambda _done, _total, message: places.append(message))
    pieces = spectral_bracket(x, network, wiring, request=SpectralRequest(byte_budget=20_000), watch=watch)
    assert places.count("tokens in torch.float64") > 2
    assert "bidiagonalisation" in places
    # Batches stop at steps of their own; each within its bracket.
    torch.testing.assert_close(pieces.lower, whole.lower, rtol=1e-2, atol=0.0)
    assert (pieces.lower <= whole.upper).all()
    assert (whole.lower <= pieces.upper).all()


def test_another_branch() -> None:
    network, wiring = make_feed_forward(D, M), make_wiring(Placement.PARALLEL, D)
    x, other = rows(), random_tensor(TOKENS, D, D, seed=65)
    dense = oracle(x, network, wiring, Part.BLOCK) + other
    for certificate in (Certificate.PROBABLE, Certificate.CHOLESKY, Certificate.DENSE):
        request = SpectralRequest(certificate=certificate)
        found = spectral_bracket(x, network, wiring, other=other, request=request)
        assert_holds(found, dense)
        assert found.converged.all()


def test_no_tokens() -> None:
    network, wiring = make_feed_forward(D, M), make_wiring(Placement.PRE, D)
    for certificate in (Certificate.PROBABLE, Certificate.CHOLESKY, Certificate.DENSE):
        request = SpectralRequest(certificate=certificate)
        found = spectral_bracket(torch.zeros(0, D, dtype=torch.float64), network, wiring, request=request)
        assert found.lower.shape == found.upper.shape == found.redone.shape == (0,)


def test_it_can_be_stopped() -> None:
    network, wiring = make_feed_forward(D, M), make_wiring(Placement.PRE, D)
    asked: list[None] = []

    def cancelled() -> bool:
        asked.append(None)
        return len(asked) > 4

    with pytest.raises(ComputationCancelled):
        spectral_bracket(rows(), network, wiring, watch=Watch(cancelled=cancelled))
    assert len(asked) == 5


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (SpectralRequest(tolerance=0.0), "tolerance"),
        (SpectralRequest(tolerance=float("nan")), "tolerance"),
        (SpectralRequest(failure_probability=1.0), "failure_probability"),
        (SpectralRequest(failure_probability=0.0), "failure_probability"),
        (SpectralRequest(steps=0), "steps"),
        (SpectralRequest(certificate=Certificate.FROBENIUS), "norms"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(request_: SpectralRequest, field: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        spectral_bracket(rows(), make_feed_forward(D, M), make_wiring(Placement.PRE, D), request=request_)
    assert caught.value.field == field


def test_norms_of_something_else_are_refused() -> None:
    network, wiring = make_feed_forward(D, M), make_wiring(Placement.PRE, D)
    for norms in (block_norms(rows(), network, wiring), block_norms(rows()[:1], network, wiring, part=Part.BRANCH)):
        with pytest.raises(InvalidValue) as caught:
            spectral_bracket(rows(), network, wiring, part=Part.BRANCH, norms=norms)
        assert caught.value.field == "norms"


@pytest.mark.parametrize("steps", [3, 9])
def test_with_norms_the_lower_of_both_bounds_counts(steps: int) -> None:
    network, wiring = make_feed_forward(D, M), make_wiring(Placement.PRE, D)
    x = rows()
    norms = block_norms(x, network, wiring)
    probable, both = (
        spectral_bracket(x, network, wiring, request=SpectralRequest(tolerance=1e-15, steps=steps), norms=n)
        for n in (None, norms)
    )
    request = SpectralRequest(tolerance=1e-15, steps=steps, certificate=Certificate.FROBENIUS)
    frobenius = spectral_bracket(x, network, wiring, request=request, norms=norms)
    assert torch.equal(both.upper, torch.minimum(probable.upper, frobenius.upper))
    assert torch.equal(both.certain, frobenius.upper <= probable.upper)
    assert both.certain.any()
    assert not both.certain.all()


def test_a_dense_decomposition_of_a_wide_block_is_refused() -> None:
    x = torch.ones(1, 1025)
    network = make_feed_forward(1025, 2, dtype=torch.float32)
    with pytest.raises(InvalidValue) as caught:
        spectral_bracket(
            x, network, make_wiring(Placement.PRE, 1025), request=SpectralRequest(certificate=Certificate.DENSE)
        )
    assert caught.value.field == "certificate"


@pytest.mark.parametrize("certificate", Certificate)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_leaves_nothing_to_tell(bad: float, certificate: Certificate) -> None:
    network, wiring = make_feed_forward(D, M), make_wiring(Placement.PRE, D)
    network.up[3, 2] = bad
    x = rows()
    found = spectral_bracket(
        x, network, wiring, request=SpectralRequest(certificate=certificate), norms=block_norms(x, network, wiring)
    )
    # Zero is below every norm: that much is always true.
    assert (found.lower.isnan() | (found.lower == 0)).all()
    assert not found.upper.isfinite().any()
    assert not found.converged.any()
