"""Squared lengths of the rows and columns of a matrix, in one look at it.

On a CPU with numpy: its products of a row with itself take half the time of torch's norms, and all lengths of a
checkpoint are taken while it is read.
"""

from typing import cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

_BLOCK_ROWS = 32  # added one after the other; of more rows, and all alike, rounding errors would add up too


def row_squares(matrix: Float[Tensor, "*r d"]) -> Float[Tensor, "*r"]:
    """The squared length of each row of float32 or float64 matrices, in their dtype; infinite where that overflows."""
    if matrix.device.type != "cpu":
        return cast("Tensor", torch.linalg.vecdot(matrix, matrix))
    numbers = matrix.numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.from_numpy(np.vecdot(numbers, numbers))


def sum_of(squares: Float[Tensor, " r"]) -> float:
    """Their sum, in float64."""
    if squares.device.type != "cpu":
        return float(squares.sum(dtype=torch.float64))
    return float(squares.numpy().sum(dtype=np.float64))


def column_squares(matrix: Float[Tensor, "r m"]) -> Float[Tensor, " m"]:
    """The squared length of each column, likewise."""
    if matrix.device.type != "cpu":
        return matrix.square().sum(0)
    numbers = matrix.numpy()
    whole = len(numbers) // _BLOCK_ROWS * _BLOCK_ROWS
    blocks, rest = numbers[:whole].reshape(-1, _BLOCK_ROWS, numbers.shape[1]), numbers[whole:]
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.einsum("brm,brm->bm", blocks, blocks).sum(0, dtype=np.float64) + np.einsum("rm,rm->m", rest, rest)
        return torch.from_numpy(total.astype(numbers.dtype))
