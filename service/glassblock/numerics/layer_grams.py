"""The Gram matrices of a layer: what the exact Frobenius norm of every token is a quadratic form of.

For neuron i write d_i for column i of W_d after the gain on its left, w_ip for row i of the p-th of the projections
(gate and up, or up alone) with the gain on its right multiplied in, and c_ip for the slopes of this token. Then

    M = sum_ip c_ip d_i w_ip^T        ||M||_F^2 = c^T K c,    K_(ip),(jq) = (d_i . d_j) (w_ip . w_jq)

    tr(Gamma M) = c . t,    t_ip = d_i . w_ip        tr(Gamma^2 M) = c . t',    t'_ip = (gamma d_i) . w_ip

K stacks the matrices K_aa, K_ab and K_bb of both projections. It is symmetric, so only the blocks above its diagonal
are formed, those off the diagonal doubled: (1 + k^2) m^2 d FLOPs for k projections, k^2 m^2 / 2 numbers, and k^2 m^2
FLOPs for each token's quadratic form; k is 2 in a gated network (5 m^2 d, 2 m^2 and 4 m^2).

K depends on weights and gains alone. It is kept whole where it fits the byte budget and formed again block by block
where it does not.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.numerics.block_jacobians import Part, network_in, refuse_unlike, sides
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.norm_factors import lengths
from glassblock.numerics.norms import Norm
from glassblock.numerics.watching import UNWATCHED, Watch
from glassblock.numerics.wiring import Wiring

DEFAULT_BYTE_BUDGET = 2**31
_BLOCKS = 16  # more blocks waste less below the diagonal and make smaller products
_FEWEST_ROWS = 32
_BLOCK_FLOPS = 40_000_000_000  # half a second of one core between two questions to a `Watch`


class GramBlock(NamedTuple):
    """Rows of K: those of neurons `[start, stop)` against neurons from `start` on, doubled beyond `stop`.

    `matrix` is `[(stop - start) k, (m - start) k]`, neuron by neuron.
    """

    start: int
    stop: int
    matrix: Tensor


@dataclass(frozen=True, eq=False)
class LayerGrams:
    """The Gram matrices of one layer and part, for any number of batches of tokens.

    Attributes:
        down: `[d, m]`, the d_i in columns.
        projections: `[m, k, d]`, the w_ip.
        trace: `[m, k]`, t.
        trace_squared: `[m, k]`, t'.
        sizes: `[m, k]`, |d_i| |w_ip|.
        rows: Neurons in a block.
        blocks: All blocks, or None where they are formed anew at every use.
    """

    down: Tensor
    projections: Tensor
    trace: Tensor
    trace_squared: Tensor
    sizes: Tensor
    rows: int
    blocks: tuple[GramBlock, ...] | None

    @property
    def dtype(self) -> torch.dtype:
        """What everything is summed in."""
        return self.down.dtype

    def belong_to(self, feed_forward: FeedForward, wiring: Wiring, part: Part) -> bool:
        """Whether they are of this network, these gains and this part: by the shapes and the first neuron."""
        weights = [feed_forward.up] if feed_forward.gate is None else [feed_forward.gate, feed_forward.up]
        m, k, d = self.projections.shape
        if (feed_forward.width, len(weights), feed_forward.model_width) != (m, k, d):
            return False
        left, right = (gain_of(norm, self.dtype) for norm in sides(wiring, part))
        row = torch.stack([weight[0].detach() for weight in weights]).to(self.dtype)
        column = feed_forward.down[:, 0].detach().to(self.dtype)
        return torch.equal(self.projections[0], row if right is None else row * right) and torch.equal(
            self.down[:, 0], column if left is None else left * column
        )

    def quadratic_form(
        self, slopes: Float[Tensor, "k tokens m"], *, watch: Watch = UNWATCHED
    ) -> Float[Tensor, " tokens"]:
        """||M||_F^2 for each token with the gains multiplied in; float64, summed in the dtype of the matrices.

        Raises:
            ComputationCancelled: Between blocks.
        """
        tokens, k = slopes.shape[1], len(slopes)
        flat = slopes.permute(1, 2, 0).reshape(tokens, slopes.shape[-1] * k)
        total = torch.zeros(tokens, dtype=torch.float64, device=slopes.device)
        for start, stop, matrix in self.blocks or self.form(watch):
            rows = flat[:, start * k : stop * k]
            total += (rows * (flat[:, start * k :] @ matrix.T)).sum(-1, dtype=torch.float64)
        return total

    def neuron_sizes(self, slopes: Float[Tensor, "k tokens m"]) -> Float[Tensor, " tokens"]:
        """sum_i (sum_p |c_ip| |d_i| |w_ip|)^2, float64: ||M||_F^2 were neurons orthogonal and their parts aligned.

        Where it is far above the quadratic form, neurons cancel.
        """
        each = (slopes.abs() * self.sizes.T.unsqueeze(1)).sum(0)
        return each.square().sum(-1, dtype=torch.float64)

    def form(self, watch: Watch = UNWATCHED) -> Iterator[GramBlock]:
        """The blocks of K one after the other, formed now.

        Raises:
            ComputationCancelled: Between blocks.
        """
        m, k, _ = self.projections.shape
        flat = self.projections.reshape(m * k, -1)
        for start in range(0, m, self.rows):
            watch.at(start, m, "gram matrices")
            stop = min(start + self.rows, m)
            below = self.down[:, start:stop].T @ self.down[:, start:]
            below[:, stop - start :] *= 2.0
            matrix = flat[start * k : stop * k] @ flat[start * k :].T
            matrix.view(stop - start, k, m - start, k).mul_(below[:, None, :, None])
            yield GramBlock(start, stop, matrix)


def layer_grams(
    feed_forward: FeedForward,
    wiring: Wiring,
    *,
    part: Part = Part.BLOCK,
    dtype: torch.dtype = torch.float32,
    byte_budget: int = DEFAULT_BYTE_BUDGET,
    watch: Watch = UNWATCHED,
) -> LayerGrams:
    """The Gram matrices of a part of a block. One value serves BLOCK and BRANCH, but in a POST block.

    Args:
        feed_forward: The network.
        wiring: Whose gains are multiplied in.
        part: Of what the norms are wanted.
        dtype: float32 or float64.
        byte_budget: K is kept where it needs no more than this.
        watch: Told and asked between blocks.

    Raises:
        ComputationCancelled: `watch` asked for it.
    """
    refuse_unlike(feed_forward, wiring)
    network = network_in(feed_forward, dtype)
    left, right = sides(wiring, part)
    left_gain, right_gain = gain_of(left, dtype), gain_of(right, dtype)
    weights = [network.up] if network.gate is None else [network.gate, network.up]
    projections = torch.stack(weights, dim=1)
    if right_gain is not None:
        projections *= right_gain
    down = network.down if left_gain is None else left_gain.unsqueeze(-1) * network.down
    trace = _row_products(down, projections)
    sizes = lengths(down, dim=0).unsqueeze(-1) * lengths(projections)
    trace_squared = trace
    if left_gain is not None:
        trace_squared = _row_products(left_gain.unsqueeze(-1) * down, projections)
    m, d = feed_forward.width, feed_forward.model_width
    rows = block_rows(d, m, len(weights), dtype=dtype, byte_budget=byte_budget)
    grams = LayerGrams(down, projections, trace, trace_squared, sizes, rows, None)
    if gram_bytes(d, m, len(weights), rows=rows, dtype=dtype) > byte_budget:
        return grams
    blocks = tuple(grams.form(watch))
    return LayerGrams(down, projections, trace, trace_squared, sizes, rows, blocks)


def _row_products(down: Tensor, projections: Tensor) -> Tensor:
    """d_i . w_ip, `[m, k]`: elementwise, for one small product for each neuron is slower."""
    return torch.stack([(down.T * projections[:, p]).sum(-1) for p in range(projections.shape[1])], dim=1)


def gain_of(norm: Norm | None, dtype: torch.dtype) -> Tensor | None:
    """The gain with its offset; None for no norm and for a norm without a gain."""
    if norm is None or norm.gain is None:
        return None
    return norm.gain.detach().to(dtype) + norm.kind.offset


def block_rows(d: int, m: int, branches: int, *, dtype: torch.dtype, byte_budget: int) -> int:
    """Neurons in one block of K: a sixteenth of them, and no more than memory and patience allow.

    An eighth of the budget holds a block, and it is formed soon enough for a caller who wants to stop.
    """
    fit = byte_budget // 8 // ((branches**2 + 1) * m * dtype.itemsize)
    soon = max(_BLOCK_FLOPS // (2 * (branches**2 + 1) * d * m), _FEWEST_ROWS)
    return max(1, min(max(-(-m // _BLOCKS), _FEWEST_ROWS), fit, soon))


def gram_flops(d: int, m: int, branches: int, *, rows: int) -> int:
    """FLOPs of forming K in blocks."""
    return sum(2 * (1 + branches**2) * d * min(rows, m - start) * (m - start) for start in range(0, m, rows))


def quadratic_flops(m: int, branches: int, *, rows: int) -> int:
    """FLOPs of one token's quadratic form."""
    return sum(2 * branches**2 * min(rows, m - start) * (m - start) for start in range(0, m, rows))


def gram_bytes(d: int, m: int, branches: int, *, rows: int, dtype: torch.dtype) -> int:
    """Bytes of all blocks of K, of the gained weights and of what one block needs while it is formed."""
    kept = branches**2 * sum(min(rows, m - start) * (m - start) for start in range(0, m, rows)) * dtype.itemsize
    return kept + streamed_bytes(d, m, branches, rows=rows, dtype=dtype)


def streamed_bytes(d: int, m: int, branches: int, *, rows: int, dtype: torch.dtype) -> int:
    """The same with one block at a time."""
    return ((branches + 1) * m * d + (branches**2 + 1) * min(rows, m) * m) * dtype.itemsize
