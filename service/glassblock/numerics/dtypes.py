"""Dtypes: by name, and which one a set of tensors is computed in."""

from collections.abc import Iterable

import torch
from torch import Tensor


def widest_dtype(tensors: Iterable[Tensor | None]) -> torch.dtype:
    """The widest of float32 and of the dtypes of the tensors."""
    widest = torch.float32
    for tensor in tensors:
        if tensor is not None:
            widest = torch.promote_types(widest, tensor.dtype)
    return widest


def name_of_dtype(dtype: torch.dtype) -> str:
    """As torch calls it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")
