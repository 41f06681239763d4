"""What enters, as a request says it: how many rows, how wide, and what is read for them. Nothing is read here."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor

from glassblock.checkpoint.entries import DTYPE_BITS
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.outer_tensors import embedding_entry
from glassblock.errors import InvalidValue
from glassblock.operations.store import CheckpointStore
from glassblock.operations.tensors import COMPUTE_DTYPES
from glassblock.operations.texts import token_ids_of
from glassblock.wire.blocks import BlockRunRequest
from glassblock.wire.likelihoods import LikelihoodRequest
from glassblock.wire.norms import NormStatisticsRequest

_OF_TEXTS = BlockRunRequest | LikelihoodRequest | NormStatisticsRequest
"""Messages whose token ids are texts; those of others are rows of the embedding."""


class Shaped(Protocol):
    """A tensor of which the type code and the shape are known."""

    @property
    def dtype(self) -> str:
        """safetensors' type code."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Axes, outermost first."""
        ...


Shapes = Mapping[str, Shaped]


class PlanInput(NamedTuple):
    """What enters: rows, their width where that is known, bytes of an element, bytes read for it, token counts."""

    rows: int
    width: int
    item: int
    read: int = 0
    texts: tuple[int, int] | None = None


def _shape_of(nested: object) -> tuple[int, ...]:
    shape: list[int] = []
    while isinstance(nested, list) and nested:
        items = cast("list[object]", nested)
        shape.append(len(items))
        nested = items[0]
    return tuple(shape)


def posted_input(nested: object, tensors: Shapes, name: str, nested_item: int) -> PlanInput | None:
    """Rows that were posted, as a tensor or nested in the message; None where there are none."""
    tensor = tensors.get(name)
    if tensor is None and nested is None:
        return None
    shape = _shape_of(nested) if tensor is None else tensor.shape
    item = nested_item if tensor is None else max(1, DTYPE_BITS.get(tensor.dtype, 32) // 8)
    return PlanInput(prod(shape[:-1]), shape[-1] if shape else 1, item)


def sampled_rows(checkpoint: Checkpoint, rows: int) -> PlanInput:
    """Rows of the embedding.

    Raises:
        InvalidValue: the checkpoint has none.
    """
    entry = embedding_entry(checkpoint)
    if entry is None or len(entry.shape) != 2 or not entry.shape[0]:
        raise InvalidValue("there is no embedding to take rows of", field="sample")
    row_bytes = entry.bytes // entry.shape[0]
    return PlanInput(rows, entry.shape[1], max(1, row_bytes // max(1, entry.shape[1])), rows * row_bytes)


def input_of(store: CheckpointStore, checkpoint: Checkpoint, message: Any, tensors: Shapes) -> PlanInput:
    """What a message says that enters: a text, token ids, sampled rows or x.

    Raises:
        InvalidValue: it says nothing, or what it names is not there.
    """
    ids = None
    if getattr(message, "text", None) is not None or isinstance(message, _OF_TEXTS):
        ids = token_ids_of(store, checkpoint, message.token_ids, message.text)
    if ids is not None:
        return text_input(checkpoint, ids)
    tokens = cast("Sequence[int] | None", getattr(message, "token_ids", None))
    if tokens is not None:  # embedding rows
        return sampled_rows(checkpoint, len(tokens))
    sample = getattr(message, "sample", None)
    if sample is not None:
        return sampled_rows(checkpoint, sample.rows)
    found = posted_input(getattr(message, "x", None), tensors, "x", 4)
    if found is None:
        raise InvalidValue("x is missing", field="x")
    return found


def text_input(checkpoint: Checkpoint, ids: Tensor) -> PlanInput:
    """Embedding rows of texts, [tokens] or [texts, tokens]."""
    texts = (1, ids.numel()) if ids.ndim == 1 else (ids.shape[0], ids.shape[1])
    return sampled_rows(checkpoint, ids.numel())._replace(texts=texts)


def compute_item(name: str | None, *items: int) -> int:
    """Bytes of an element in the dtype of the computation: the one named, else that of the widest, float32 at least."""
    return COMPUTE_DTYPES[name].itemsize if name else max(4, *items)
