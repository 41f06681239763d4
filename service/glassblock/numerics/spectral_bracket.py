"""The spectral norm of a block's Jacobian at each token, between a lower and an upper bound.

Below is the largest Ritz value; where the bound above comes from is a `Certificate`:

    PROBABLE     wrong with probability at most p for each token; or the Frobenius bound where that is given and lower
    FROBENIUS    certain and loose (`singular_bracket`)
    CHOLESKY     certain: t^2 I - J^T J has a Cholesky factor, with t just above the Ritz value. J is formed
    DENSE        certain: the singular values of the dense Jacobian. d <= 1024

Steps end when the bracket is as narrow as asked; a token where it is not is told.

**Rounding.** Products are sums of larger terms than they are themselves: the stream, the neurons, and what a norm takes
away. Both bounds are moved apart by `ROUNDING` eps of the sizes of these. The slopes of the hidden units are taken as
they were computed: where all lie deep in a tail, exp(g), they are off by |g| eps. Where rounding, or anything else,
leaves the bracket too wide in float32, the token is done again in float64.
"""

from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.block import common_dtype
from glassblock.numerics.block_jacobians import BlockJacobian, Part, block_jacobian, network_in
from glassblock.numerics.block_norms import BlockNorms
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.formed_jacobians import formed
from glassblock.numerics.golub_kahan import singular_decomposition, singular_values, uniform_starts
from glassblock.numerics.product_noise import ROUNDING, forming_flops, product_noise
from glassblock.numerics.singular_bracket import bracket_largest, decomposition_rounding
from glassblock.numerics.spectral_request import Certificate, SpectralRequest
from glassblock.numerics.watching import UNWATCHED, Watch
from glassblock.numerics.wiring import Wiring


class SpectralBracket(NamedTuple):
    """sigma_1 of the Jacobian at each token; float64 `[tokens]` but where another shape is told.

    Attributes:
        lower: Certain.
        upper: See `certain`. Infinite where nothing is known.
        certain: bool: whether `upper` is certain; else it is wrong with probability at most `failure_probability`.
        converged: bool: upper <= (1 + tolerance) lower.
        rounding: What both bounds were moved by.
        redone: bool: done again in float64.
        steps: int64: steps taken; 0 for a dense decomposition.
        left: `[tokens, d]`: with `right` the top Ritz or singular vectors, J right = sigma_1 left; None unless asked.
        right: `[tokens, d]`.
        method: "golub-kahan" or "dense".
        exactness: "bracketed", or "exact", which is up to rounding.
        failure_probability: Of each bound that is not certain.
        seed: Of the starts.
        accumulation: The dtype of every long sum, but for tokens that were redone or certified, which have float64.
        flops: Counted for what ran: products with the weights, orthogonalisation, forming, factoring, decomposing.
    """

    lower: Tensor
    upper: Tensor
    certain: Tensor
    converged: Tensor
    rounding: Tensor
    redone: Tensor
    steps: Tensor
    left: Tensor | None
    right: Tensor | None
    method: str
    exactness: str
    failure_probability: float
    seed: int
    accumulation: torch.dtype
    flops: int


def spectral_bracket(
    x: Float[Tensor, "tokens d"],
    feed_forward: FeedForward,
    wiring: Wiring,
    *,
    part: Part = Part.BLOCK,
    other: Float[Tensor, "tokens d d"] | None = None,
    request: SpectralRequest = SpectralRequest(),  # noqa: B008  a NamedTuple cannot be changed
    norms: BlockNorms | None = None,
    watch: Watch = UNWATCHED,
) -> SpectralBracket:
    """The spectral norm of the Jacobian of a part of a block at each token, bracketed.

    Args:
        x: The residual stream that enters.
        feed_forward: The network.
        wiring: Norms and residual add.
        part: What is differentiated.
        other: The Jacobian of a parallel branch, BLOCK of PARALLEL only.
        request: How the answer is wanted.
        norms: The exact Frobenius norm of each token, of the same part (`block_norms`). FROBENIUS needs it.
        watch: Told and asked between steps, and between batches of tokens.

    Raises:
        InvalidValue: A width does not fit, or a number is out of its range.
        ComputationCancelled: `watch` asked for it.
    """
    tokens, d = x.shape
    request.check(d)
    frobenius = _frobenius_upper(norms, x, request, part)
    dense = request.certificate is Certificate.DENSE
    dtype = torch.float64 if dense else common_dtype(x, feed_forward, wiring)
    starts = uniform_starts(tokens, d, seed=request.seed).to(x.device)
    call = _Call(x, starts, other, frobenius, feed_forward, wiring, part, request, watch)
    found, flops = _run(call, torch.arange(tokens, device=x.device), dtype)
    redone = ~found.converged if dtype is torch.float32 else torch.zeros_like(found.converged)
    if bool(redone.any()):
        again, more = _run(call, redone.nonzero().squeeze(-1), torch.float64)
        flops += more
        found = _PerToken(*(_replaced(*pair, redone) for pair in zip(found, again, strict=True)))
    return SpectralBracket(
        lower=found.lower,
        upper=found.upper,
        certain=found.certain,
        converged=found.converged,
        rounding=found.rounding,
        redone=redone,
        steps=found.steps,
        left=found.left if request.vectors else None,
        right=found.right if request.vectors else None,
        method="dense" if dense else "golub-kahan",
        exactness="exact" if dense else "bracketed",
        failure_probability=request.failure_probability,
        seed=request.seed,
        accumulation=dtype,
        flops=flops,
    )


def _frobenius_upper(norms: BlockNorms | None, x: Tensor, request: SpectralRequest, part: Part) -> Tensor | None:
    """The Frobenius norms moved up by their rounding; infinite where nothing is known of that."""
    if norms is None:
        if request.certificate is Certificate.FROBENIUS:
            raise InvalidValue(
                "the Frobenius bound needs the exact Frobenius norms",
                hint="Pass what block_norms returns.",
                field="norms",
            )
        return None
    if norms.part is not part or norms.frobenius.shape != x.shape[:1]:
        raise InvalidValue(
            f"the norms given are of {norms.part.value!r} at {len(norms.frobenius)} tokens, and {part.value!r} is asked"
            f" for at {len(x)}",
            hint="Pass the norms of the same part at the same tokens.",
            field="norms",
        )
    # Forming the matrix, as for a token done again, leaves the square root of the magnification.
    fine, eps = torch.finfo(torch.float64).eps, torch.finfo(norms.accumulation).eps
    magnified = torch.where(norms.redone, fine * norms.cancellation.sqrt(), eps * norms.cancellation)
    upper = norms.frobenius * (1.0 + ROUNDING * magnified)
    return torch.where(upper.isnan(), torch.full_like(upper, torch.inf), upper)


class _Call(NamedTuple):
    """The arguments of one call, and the starts of its tokens."""

    x: Tensor
    starts: Tensor
    other: Tensor | None
    frobenius: Tensor | None
    feed_forward: FeedForward
    wiring: Wiring
    part: Part
    request: SpectralRequest
    watch: Watch


def _run(call: _Call, chosen: Tensor, dtype: torch.dtype) -> "tuple[_PerToken, int]":
    """Some of the tokens in one dtype, in batches; and the FLOPs."""
    network = network_in(call.feed_forward, dtype)
    chunk = _chunk(network, call.request, dtype)
    pieces: list[_PerToken] = []
    flops = 0
    for start in range(0, max(len(chosen), 1), chunk):
        call.watch.at(start, len(chosen), f"tokens in {dtype}")
        rows = chosen[start : start + chunk]
        jacobian = block_jacobian(
            call.x[rows],
            network,
            call.wiring,
            part=call.part,
            other=None if call.other is None else call.other[rows],
            dtype=dtype,
        )
        if call.request.certificate is Certificate.DENSE:
            piece, cost = _decomposed(jacobian, call.request)
        else:
            known = None if call.frobenius is None else call.frobenius[rows].double()
            piece, cost = _bracketed(jacobian, call.starts[rows].to(dtype), call.request, known, watch=call.watch)
        if call.request.certificate is Certificate.CHOLESKY:
            piece, more = _certified(call, rows, piece)
            cost += more
        pieces.append(piece)
        flops += cost
    return _PerToken(*(torch.cat(parts) for parts in zip(*pieces, strict=True))), flops


def _replaced(whole: Tensor, part: Tensor, chosen: Tensor) -> Tensor:
    changed = whole.to(torch.promote_types(whole.dtype, part.dtype), copy=True)
    changed[chosen] = part.to(changed.dtype)
    return changed


class _PerToken(NamedTuple):
    """The tensors of a `SpectralBracket`; the vectors are `[tokens, 0]` where they are not wanted."""

    lower: Tensor
    upper: Tensor
    certain: Tensor
    converged: Tensor
    rounding: Tensor
    steps: Tensor
    left: Tensor
    right: Tensor


def _bracketed(
    jacobian: BlockJacobian, starts: Tensor, request: SpectralRequest, frobenius: Tensor | None, *, watch: Watch
) -> tuple[_PerToken, int]:
    probable = request.certificate is not Certificate.FROBENIUS
    found = bracket_largest(
        jacobian,
        starts,
        steps=request.steps,
        # What Cholesky is to certify must leave it room.
        tolerance=request.tolerance / 2 if request.certificate is Certificate.CHOLESKY else request.tolerance,
        failure_probability=request.failure_probability if probable else None,
        frobenius=frobenius,
        noise=product_noise(jacobian),
        eps=ROUNDING * torch.finfo(starts.dtype).eps,
        watch=watch,
    )
    tokens, d = starts.shape
    left, right = found.state.top_vectors() if request.vectors else (starts[:, :0], starts[:, :0])
    steps = found.state.steps
    flops = tokens * (2 * steps * jacobian.product_flops + 8 * steps * steps * d)
    taken = torch.full_like(found.converged, steps, dtype=torch.int64)
    return _PerToken(
        found.lower, found.upper, found.certain, found.converged, found.rounding, taken, left, right
    ), flops


def _certified(call: _Call, rows: Tensor, found: _PerToken) -> tuple[_PerToken, int]:
    """The upper bounds that a Cholesky factor proves, in float64; the Frobenius norm where there is no factor.

    Rump, "Verification of positive definiteness" (2006): a factor found of A - c I in floating point proves A positive
    definite where c is above the rounding of the factorisation, some (d + 1) eps tr(A). That of J^T J is added.
    """
    network = network_in(call.feed_forward, torch.float64)
    request, d, eps = call.request, call.x.shape[-1], torch.finfo(torch.float64).eps
    upper, converged, flops = found.upper.clone(), found.converged.clone(), 0
    for number in range(len(rows)):
        row = rows[number : number + 1]
        call.watch.at(number, len(rows), "certificates")
        other = None if call.other is None else call.other[row]
        jacobian = block_jacobian(call.x[row], network, call.wiring, part=call.part, other=other, dtype=torch.float64)
        dense = formed(jacobian)[0]
        unit = float(dense.abs().max()) or 1.0  # in it squares neither overflow nor vanish
        dense = dense / unit
        square = float(dense.square().sum())
        rounding = float(found.rounding[number])
        # So far below the tolerance that adding the rounding again does not leave it.
        bound = (float(found.lower[number]) * (1.0 + request.tolerance) - rounding) / unit * (1.0 - 4.0 * eps)
        allowance = 2.0 * (d + 2) * eps * (d * bound**2 + square)
        shifted = (bound**2 - allowance) * torch.eye(d, dtype=torch.float64, device=dense.device) - dense.T @ dense
        proved = bound > 0 and _has_cholesky_factor(shifted)
        upper[number] = unit * (bound if proved else square**0.5) + rounding
        converged[number] = upper[number] <= (1.0 + request.tolerance) * found.lower[number]
        flops += forming_flops(jacobian) + 2 * d**3 + d**3 // 3
    return found._replace(upper=upper, certain=torch.ones_like(found.certain), converged=converged), flops


def _decomposed(jacobian: BlockJacobian, request: SpectralRequest) -> tuple[_PerToken, int]:
    dense, d = formed(jacobian), jacobian.width
    left = right = dense[:, 0, :0]
    if request.vectors:
        u, values, vh = singular_decomposition(dense)
        left, right = u[:, :, 0], vh[:, 0]
    else:
        values = singular_values(dense)
    largest = values[:, 0]
    rounding = ROUNDING * torch.finfo(torch.float64).eps * (largest + product_noise(jacobian))
    rounding = rounding + decomposition_rounding(d) * largest
    lower, upper = (largest - rounding).clamp(min=0.0), largest + rounding
    certain = torch.ones_like(lower, dtype=torch.bool)
    converged = upper <= (1.0 + request.tolerance) * lower
    steps = torch.zeros_like(certain, dtype=torch.int64)
    flops = jacobian.tokens * (forming_flops(jacobian) + (21 if request.vectors else 3) * d**3)
    return _PerToken(lower, upper, certain, converged, rounding, steps, left, right), flops


def _has_cholesky_factor(matrix: Tensor) -> bool:
    _, info = cast("tuple[Tensor, Tensor]", torch.linalg.cholesky_ex(matrix))
    return int(info) == 0


def _chunk(network: FeedForward, request: SpectralRequest, dtype: torch.dtype) -> int:
    d, m = network.model_width, network.width
    if request.certificate is Certificate.DENSE:
        token_bytes = (2 * m * d + 6 * d * d) * dtype.itemsize
    else:
        token_bytes = (2 * min(request.steps, d) * d + 12 * m) * dtype.itemsize
    return max(1, request.byte_budget // token_bytes)
