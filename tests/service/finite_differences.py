"""The derivative of what the service itself answers, by central differences: one request for all channels."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# The step's cube against the rounding of float64: near 1e-10 of the derivative for rows of the order of one, which
# the norms of this file's rows bend a few times more sharply.
STEP = 1e-5
TOLERANCE = 1e-8


def derivative(outputs: Callable[[Array], Array], x: Array, *, step: float = STEP) -> Array:
    """`[..., d, d]`, row i column j: d y_i / d x_j at the row `x`.

    Args:
        outputs: `[rows, d]` to `[rows, ..., d]`.
        x: `[d]`.
        step: Of each channel.
    """
    moves = step * np.eye(x.size)
    answered = outputs(np.concatenate([x + moves, x - moves]))
    return np.moveaxis(answered[: x.size] - answered[x.size :], 0, -1) / (2 * step)


def assert_is_derivative(jacobian: object, outputs: Callable[[Array], Array], x: Array, *, step: float = STEP) -> None:
    expected = derivative(outputs, x, step=step)
    found = np.asarray(jacobian, np.float64)
    assert found.shape == expected.shape
    errors = np.abs(found - expected).max((-2, -1)) / np.abs(expected).max((-2, -1))
    assert (errors <= TOLERANCE).all(), errors
