"""A linear map in the dtype of what it reads, and the dtype that a set of tensors is computed in."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def apply_linear(
    values: Float[Tensor, "*batch in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "*batch out"]:
    """values @ weight.T + bias, in the dtype of `values`.

    One matrix is cast at a time, so that a wide computation never holds a wide copy of all the weights.
    """
    return functional.linear(values, weight.to(values.dtype), None if bias is None else bias.to(values.dtype))


def widest_dtype(tensors: Iterable[Tensor | None]) -> torch.dtype:
    """The widest of float32 and of the dtypes of the tensors."""
    widest = torch.float32
    for tensor in tensors:
        if tensor is not None:
            widest = torch.promote_types(widest, tensor.dtype)
    return widest
