"""Neurons that are copies of one another, which share one sign.

Widened and upcycled models copy neurons, and copies keep the sign they were born with: they are one coin, not many.
A test that gave each its own coin would reject falsely. |cosine| does not see signs, so which neurons are tied is
fixed before any coin is tossed, and a test that gives each group one shared sign stays exact.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassblock.numerics.unit_rows import centred_unit_rows

# |cosine| from which two neurons count as copies: relative noise of 20 %, or 4-bit rounding, leaves copies above it.
# In small trained networks distinct neurons reach it too; tying those costs power and no validity.
NEAR_DUPLICATE = 0.95

# The pre-screen compares projections on 64 random directions, whose cosines scatter by 1/sqrt(61) on Fisher's scale
# (atanh). It lets pass what lies within 6.5 standard errors of the threshold, so it misses a copy with probability
# 4e-11; an unrelated pair passes with 6e-15.
_SKETCH_WIDTH = 64
_SCREEN = math.tanh(math.atanh(NEAR_DUPLICATE) - 6.5 / math.sqrt(_SKETCH_WIDTH - 3))
_SKETCH_SEED = 0
_BLOCK_ENTRIES = 2**22
_BLOCK_ROWS = 256  # small beside m, so that little more than half of all pairs is looked at


def near_duplicate_groups(weights: Sequence[Float[Tensor, "m _"]]) -> Int[Tensor, " m"]:
    """Which neurons share a sign: connected components of |cosine| >= 0.95 in any of the weights.

    Args:
        weights: Matrices with one neuron per row (the down projection transposed), all over the same m neurons.

    Returns:
        For each neuron the lowest index in its group; a neuron without copies is its own group.

    Works in blocks of at most 16 MiB, besides the projections (256 bytes per neuron). Only pairs that pass the
    pre-screen have their true cosine taken.
    """
    groups = torch.arange(weights[0].shape[0], device=weights[0].device)
    for weight in weights:
        groups = _tie(weight, groups)
    return groups


def near_duplicate_indices(roles: Iterable[Sequence[Float[Tensor, "m k"]]], *, width: int) -> Int[Tensor, " m"]:
    """Which neuron indices share a sign across the experts of a mixture.

    A neuron may be the copy of one with another index in another expert; then flipping one index alone is no symmetry.
    Sketches are compared and nothing confirms them, so pairs somewhat below the threshold are tied too, which costs
    power and no validity.

    Args:
        roles: For gate, up and down, the sketches (`row_sketch`) of every expert, all over the same m neurons.
        width: d, of the rows that were sketched.

    Returns:
        For each index the lowest one in its group.
    """
    groups = torch.zeros(0, dtype=torch.int64)
    least = NEAR_DUPLICATE if width <= 2 * _SKETCH_WIDTH else _SCREEN
    for sketches in roles:
        every, neurons = torch.cat(list(sketches)), len(sketches[0])
        groups = groups if len(groups) else torch.arange(neurons, device=every.device)
        for start, stop in _spans(len(every), min(_BLOCK_ROWS, max(1, _BLOCK_ENTRIES // len(every)))):
            close = (every[start:stop] @ every[start:].T).abs_() >= least
            row, column = (axis + start for axis in close.nonzero(as_tuple=True))
            row, column = row % neurons, column % neurons
            apart = row != column  # the same index in another expert shares the sign already
            if bool(apart.any()):
                groups = _joined(groups, row[apart], column[apart])
    return groups


def row_sketch(weight: Float[Tensor, "m d"]) -> Float[Tensor, "m k"]:
    """Unit projections of the unit rows on the same random directions for every weight; the rows where d is small."""
    return _sketch(weight)


def _tie(weight: Float[Tensor, "m d"], groups: Int[Tensor, " m"]) -> Int[Tensor, " m"]:
    sketch = _sketch(weight)
    neurons = len(weight)
    for start, stop in _spans(neurons, min(_BLOCK_ROWS, _BLOCK_ENTRIES // neurons)):
        close = (sketch[start:stop] @ sketch[start:].T).abs_() >= _SCREEN
        row, column = close.nonzero(as_tuple=True)
        later = column > row  # each pair once, and no row with itself
        rows, columns = (start + cast("Tensor", torch.unique(axis[later])) for axis in (row, column))
        for first, second in _confirmed(weight, rows, columns):
            groups = _joined(groups, first, second)
    return groups


def _sketch(weight: Float[Tensor, "m d"]) -> Float[Tensor, "m k"]:
    """Unit projections of the unit rows to compare first; the rows themselves where d is small."""
    neurons, width = weight.shape
    if width <= 2 * _SKETCH_WIDTH:
        return centred_unit_rows(weight).rows
    generator = torch.Generator().manual_seed(_SKETCH_SEED)
    directions = torch.randn(width, _SKETCH_WIDTH, generator=generator).to(weight.device)
    spans = _spans(neurons, _BLOCK_ENTRIES // width)
    sketch = torch.cat([centred_unit_rows(weight[start:stop]).rows @ directions for start, stop in spans])
    return torch.nn.functional.normalize(sketch, dim=-1)


def _confirmed(
    weight: Float[Tensor, "m d"], rows: Int[Tensor, " rows"], columns: Int[Tensor, " columns"]
) -> Iterator[tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"]]]:
    """The pairs among these rows and columns whose true |cosine| reaches 0.95."""
    left = centred_unit_rows(weight[rows]).rows
    for low, high in _spans(len(columns), _BLOCK_ENTRIES // weight.shape[1]):
        some = columns[low:high]
        right = centred_unit_rows(weight[some]).rows
        first, second = ((left @ right.T).abs_() >= NEAR_DUPLICATE).nonzero(as_tuple=True)
        yield rows[first], some[second]


def _joined(
    groups: Int[Tensor, " m"], first: Int[Tensor, " pairs"], second: Int[Tensor, " pairs"]
) -> Int[Tensor, " m"]:
    """Merge the groups of each pair, keeping the lowest index as the group's name."""
    while True:
        left, right = groups[first], groups[second]
        if bool((left == right).all()):
            return groups
        parent = torch.arange(len(groups), device=groups.device)
        parent.scatter_reduce_(0, torch.maximum(left, right), torch.minimum(left, right), reduce="amin")
        groups = parent[groups]


def _spans(total: int, step: int) -> list[tuple[int, int]]:
    return list(pairwise([*range(0, total, max(1, step)), total]))
