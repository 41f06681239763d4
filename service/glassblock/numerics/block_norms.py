"""Frobenius norm, trace and radial gain of a block's Jacobian, exact for every token.

Two ways lead there. **gram** evaluates closed forms on the layer's Gram matrices (`layer_grams`, `gram_norms`);
**pushes** forms M for each token, in batches, and pushes the identity through what is around it. With k projections,

    gram      (1 + k^2) m^2 d once per layer, then k^2 m^2 and some products with the weights per token
    pushes    2 m d^2 + 2 k m d per token

and the cheaper one by this count runs, among those that fit the bytes; the answer says which, and both counts. For a
gated network of d = 576, m = 1536 they cross at 7 tokens, or at none once the Gram matrices are there.

A token whose sums magnify rounding more than `REDO_ABOVE` times is done again by pushes in float64, weights and all,
whatever the dtype of the others; nothing is clamped, so a value that rounding has made meaningless is never passed on
for a number. What remains NaN or infinite in float64 is returned as it is.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.block import common_dtype
from glassblock.numerics.block_jacobians import BlockJacobian, Part, block_jacobian, network_in, sides
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.gram_norms import norms_from_cores, norms_from_grams
from glassblock.numerics.layer_grams import (
    DEFAULT_BYTE_BUDGET,
    LayerGrams,
    block_rows,
    gram_bytes,
    gram_flops,
    layer_grams,
    quadratic_flops,
    streamed_bytes,
)
from glassblock.numerics.norm_factors import lengths
from glassblock.numerics.norms import Norm
from glassblock.numerics.watching import UNWATCHED, Watch
from glassblock.numerics.wiring import Wiring

REDO_ABOVE = 1e3
METHODS = ("gram", "pushes")
_LARGEST_CHUNK = 1024  # tokens: beyond this a product gains nothing


class BlockNorms(NamedTuple):
    """Norms of a Jacobian at each token, float64 `[tokens]`, and how they were had.

    Attributes:
        frobenius: ||J||_F.
        trace: tr J. Its error is relative to ||J||_F, not to itself: it is a sum of numbers of both signs.
        radial_gain: ||J x|| / ||x||; NaN for a row of zeros. Where the neurons of M cancel along the row, its error is
            relative to their sizes.
        cancellation: By how much the sums behind the Frobenius norm magnify rounding, before anything was done again;
            negative where rounding alone was left, NaN where nothing was.
        redone: bool `[tokens]`: done again in float64, the Frobenius norm and the trace or the radial gain.
        part: What was differentiated.
        method: A name of `METHODS`.
        exactness: "exact": up to rounding.
        accumulation: The dtype of every long sum, but for the tokens redone, which have float64.
        flops: Counted for what ran, redone tokens included: products of matrices alone.
        gram_flops: Counted for the same tokens by `gram`; None where that does not apply.
        push_flops: Counted by `pushes`.
        bytes: Planned working memory beside the weights.
    """

    frobenius: Tensor
    trace: Tensor
    radial_gain: Tensor
    cancellation: Tensor
    redone: Tensor
    part: Part
    method: str
    exactness: str
    accumulation: torch.dtype
    flops: int
    gram_flops: int | None
    push_flops: int
    bytes: int


class NormPlan(NamedTuple):
    """Which way to go, what it and both ways cost, tokens in one batch, planned bytes beside the weights."""

    method: str
    flops: int
    gram_flops: int | None
    push_flops: int
    chunk: int
    bytes: int


def block_norms(
    x: Float[Tensor, "tokens d"],
    feed_forward: FeedForward,
    wiring: Wiring,
    *,
    part: Part = Part.BLOCK,
    other: Float[Tensor, "tokens d d"] | None = None,
    grams: LayerGrams | None = None,
    method: str | None = None,
    byte_budget: int = DEFAULT_BYTE_BUDGET,
    watch: Watch = UNWATCHED,
) -> BlockNorms:
    """The norms of the Jacobian of a part of a block at each token.

    Args:
        x: The residual stream that enters. Rows on which a norm is undefined must be refused beforehand
            (`norms.check_norm_defined`).
        feed_forward: The network.
        wiring: Norms and residual add.
        part: What is differentiated.
        other: The Jacobian of a parallel branch, BLOCK of PARALLEL only; by pushes then.
        grams: The layer's Gram matrices, of the same part and dtype, where they are there already.
        method: A name of `METHODS`, or None for the cheaper one.
        byte_budget: Bytes to work in, beside the weights and one token.
        watch: Told and asked between batches of tokens and between Gram blocks.

    Raises:
        InvalidValue: A width, a dtype or a name does not fit.
        ComputationCancelled: `watch` asked for it.
    """
    dtype = common_dtype(x, feed_forward, wiring)
    _check(feed_forward, wiring, grams, part=part, dtype=dtype, method=method, other=other)
    tokens = x.shape[0]
    plan = norm_plan(
        tokens,
        feed_forward,
        wiring,
        part=part,
        dtype=dtype,
        formed=grams is not None and grams.blocks is not None,
        byte_budget=byte_budget,
        method=method if other is None else "pushes",
    )
    if plan.method == "gram" and grams is None:
        grams = layer_grams(feed_forward, wiring, part=part, dtype=dtype, byte_budget=byte_budget // 2, watch=watch)
    network = network_in(feed_forward, dtype)
    pieces: list[_Piece] = []
    for start in range(0, max(tokens, 1), plan.chunk):
        watch.at(start, tokens, "tokens")
        rows = slice(start, start + plan.chunk)
        jacobian = block_jacobian(
            x[rows], network, wiring, part=part, other=None if other is None else other[rows], dtype=dtype
        )
        pieces.append(_piece(jacobian, grams if plan.method == "gram" else None, watch=watch))
    found = _Piece(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))
    redone, redone_flops = _redo(
        found, x, feed_forward, wiring, part=part, other=other, byte_budget=byte_budget, watch=watch
    )
    return BlockNorms(
        frobenius=found.frobenius,
        trace=found.trace,
        radial_gain=found.radial_gain,
        cancellation=found.cancellation,
        redone=redone,
        part=part,
        method=plan.method,
        exactness="exact",
        accumulation=dtype,
        flops=plan.flops + redone_flops,
        gram_flops=plan.gram_flops,
        push_flops=plan.push_flops,
        bytes=plan.bytes,
    )


def norm_plan(
    tokens: int,
    feed_forward: FeedForward,
    wiring: Wiring,
    *,
    part: Part = Part.BLOCK,
    dtype: torch.dtype = torch.float32,
    formed: bool = False,
    byte_budget: int = DEFAULT_BYTE_BUDGET,
    method: str | None = None,
) -> NormPlan:
    """The way to go, by counted FLOPs among what fits the bytes.

    `formed` says that the Gram matrices are there. Where K does not fit half of the budget it is formed anew for each
    batch of tokens, which is counted. `method` takes the choice away; "pushes" gives no `gram_flops` then.
    """
    m, d, k = feed_forward.width, feed_forward.model_width, 2 if feed_forward.gated else 1
    product = 2 * (k + 1) * m * d
    shared = tokens * 2 * product  # the forward pass and the product along the row

    token_bytes = (2 * m * d + 5 * d * d + (4 * k + 2) * m) * dtype.itemsize
    push_chunk = max(1, min(byte_budget // token_bytes, _LARGEST_CHUNK))
    push_flops = shared + tokens * (2 * m * d * d + 2 * k * m * d)
    pushes = NormPlan("pushes", push_flops, None, push_flops, push_chunk, min(push_chunk, max(tokens, 1)) * token_bytes)
    if method == "pushes":
        return pushes

    half = byte_budget // 2
    rows = block_rows(d, m, k, dtype=dtype, byte_budget=half)
    whole = gram_bytes(d, m, k, rows=rows, dtype=dtype)
    kept = formed or whole <= half
    layer_bytes = whole if kept else streamed_bytes(d, m, k, rows=rows, dtype=dtype)
    token_bytes = ((6 * k + 2) * m + 16 * d) * dtype.itemsize
    gram_chunk = max(1, half // token_bytes)
    if kept:
        gram_chunk = min(gram_chunk, _LARGEST_CHUNK)
    forming = gram_flops(d, m, k, rows=rows)
    passes = 0 if formed else 1 if kept else -(-tokens // gram_chunk)
    left, right = sides(wiring, part)
    low_rank = product * (_directions(right) + 2 * _directions(left))
    total = shared + passes * forming + tokens * (quadratic_flops(m, k, rows=rows) + low_rank)
    if method is None and push_flops < total:
        return pushes._replace(gram_flops=total)
    return NormPlan(
        "gram", total, total, push_flops, gram_chunk, layer_bytes + min(gram_chunk, max(tokens, 1)) * token_bytes
    )


class _Piece(NamedTuple):
    frobenius: Tensor
    trace: Tensor
    cancellation: Tensor
    radial_gain: Tensor
    radial_amplification: Tensor


def _piece(jacobian: BlockJacobian, grams: LayerGrams | None, *, watch: Watch) -> _Piece:
    norms = norms_from_cores(jacobian) if grams is None else norms_from_grams(jacobian, grams, watch=watch)
    # A relative error of J is twice that of its square.
    floor = 2.0 * jacobian.amplification
    cancellation = torch.where(norms.cancellation >= 0.0, norms.cancellation.maximum(floor), norms.cancellation)
    radial = jacobian.along_point(core_along=norms.core_along)
    gain = lengths(radial.product)
    return _Piece(norms.frobenius, norms.trace, cancellation, gain, radial.amplification * jacobian.amplification)


def _redo(
    found: _Piece,
    x: Tensor,
    feed_forward: FeedForward,
    wiring: Wiring,
    *,
    part: Part,
    other: Tensor | None,
    byte_budget: int,
    watch: Watch,
) -> tuple[Tensor, int]:
    """Do what rounding has spoiled again in float64, in place; which tokens, and the FLOPs."""
    # Written so that NaN and negative factors are outside.
    spoiled = ~((found.cancellation >= 0.0) & (found.cancellation <= REDO_ABOVE))
    spoiled |= ~(found.radial_amplification <= REDO_ABOVE)
    chosen = spoiled.nonzero().squeeze(-1)
    if len(chosen) == 0:
        return spoiled, 0
    network = network_in(feed_forward, torch.float64)
    plan = norm_plan(
        len(chosen), network, wiring, part=part, dtype=torch.float64, byte_budget=byte_budget, method="pushes"
    )
    for start in range(0, len(chosen), plan.chunk):
        watch.at(start, len(chosen), "tokens in float64")
        rows = chosen[start : start + plan.chunk]
        jacobian = block_jacobian(
            x[rows], network, wiring, part=part, other=None if other is None else other[rows], dtype=torch.float64
        )
        again = _piece(jacobian, None, watch=watch)
        found.frobenius[rows] = again.frobenius
        found.trace[rows] = again.trace
        found.radial_gain[rows] = again.radial_gain
    return spoiled, plan.push_flops


def _directions(norm: Norm | None) -> int:
    return 0 if norm is None else 2 if norm.kind.centred else 1


def _check(
    feed_forward: FeedForward,
    wiring: Wiring,
    grams: LayerGrams | None,
    *,
    part: Part,
    dtype: torch.dtype,
    method: str | None,
    other: Tensor | None,
) -> None:
    if method is not None and method not in METHODS:
        raise InvalidValue(f"unknown method {method!r}", hint="Use one of the methods.", field="method", known=METHODS)
    if method == "gram" and other is not None:
        raise InvalidValue(
            "Gram matrices do not hold the Jacobian of another branch",
            hint="Leave the method to the service, or `other` out.",
            field="method",
        )
    if grams is None:
        return
    if grams.dtype != dtype or not grams.belong_to(feed_forward, wiring, part):
        raise InvalidValue(
            f"the Gram matrices, in {grams.dtype}, are not those of this network, wiring and part in {dtype}",
            hint="Form them from the same layer and part, for the dtype of the computation.",
            field="grams",
        )
