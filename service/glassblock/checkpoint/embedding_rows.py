"""Rows of the token embedding as the first layer receives them: projected by nothing, multiplied, normed."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from glassblock.checkpoint.entries import FLOAT_CODES, TensorEntry
from glassblock.checkpoint.family import Architecture, SquareRoot
from glassblock.checkpoint.layer_map import mismatch
from glassblock.checkpoint.layers import norm_of
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.outer_tensors import embedding_entry, embedding_norm
from glassblock.checkpoint.reading import ReadMeter, read_rows, torch_dtype
from glassblock.checkpoint.settings import Sourced, scale_of, size_of
from glassblock.errors import FamilyMismatch, InvalidValue
from glassblock.numerics.dtypes import name_of_dtype


class EmbeddingRows(NamedTuple):
    """Rows of the token embedding as the first layer receives them, without positions.

    Attributes:
        x: `[rows, d]`, in the embedding's dtype.
        token_ids: The row each came from.
        multiplier: What they were multiplied by, and who says so; None for nothing.
    """

    x: Tensor
    token_ids: tuple[int, ...]
    multiplier: Sourced[float] | None


def sample_embedding_rows(
    checkpoint: Checkpoint, rows: int, seed: int, device: torch.device | str, meter: ReadMeter
) -> EmbeddingRows:
    """`rows` different rows of the token embedding, drawn by `seed`; only their bytes are read.

    The draw is `torch.randperm` of a CPU generator, so it is the same on every device.

    Raises:
        InvalidValue: There are not that many rows, or the seed is out of range.
        FamilyMismatch, DamagedCheckpoint, UnknownFamily: As `embedding_rows`.
    """
    checkpoint.require_usable()
    vocabulary = _embedding(checkpoint).shape[0]
    if not 1 <= rows <= vocabulary:
        raise InvalidValue(
            f"{rows} embedding rows were asked for; the checkpoint has {vocabulary}",
            field="sample.rows",
            hint=f"Ask for 1 to {vocabulary}.",
        )
    if not 0 <= seed < 2**63:
        raise InvalidValue(f"the seed {seed} is out of range", field="sample.seed", hint="Give 0 to 2^63 - 1.")
    generator = torch.Generator().manual_seed(seed)
    drawn = cast("list[int]", torch.randperm(vocabulary, generator=generator)[:rows].tolist())
    return embedding_rows(checkpoint, drawn, device, meter)


def embedding_rows(
    checkpoint: Checkpoint,
    token_ids: Sequence[int],
    device: torch.device | str,
    meter: ReadMeter,
    *,
    dtype: torch.dtype | None = None,
) -> EmbeddingRows:
    """Embedding rows of tokens, times the family's multiplier and normed where it is; only their rows are read.

    Args:
        checkpoint: The checkpoint.
        token_ids: Rows of the embedding.
        device: Where they go.
        meter: Counts what is read.
        dtype: What the rows are cast to before anything is made of them, as in a model that runs in it; None for the
            file's own.

    Raises:
        InvalidValue: A token is outside the vocabulary.
        FamilyMismatch: There is no embedding, or it is quantised, or of another width than the layers.
        DamagedCheckpoint, UnknownFamily: See `Checkpoint.require_usable`.
    """
    row = checkpoint.require_usable()
    entry = _embedding(checkpoint)
    _check_width(checkpoint, row, entry)
    for token in token_ids:
        if not 0 <= token < entry.shape[0]:
            raise InvalidValue(
                f"token {token} is outside the vocabulary of {entry.shape[0]}",
                field="token_ids",
                hint=f"Token ids run from 0 to {entry.shape[0] - 1}.",
            )
    rows = read_rows(entry, token_ids, device, meter)
    x, multiplier = _scaled(checkpoint, row, entry, rows if dtype is None else rows.to(dtype))
    norm, faults = embedding_norm(checkpoint)
    for fault in faults:
        raise mismatch(fault)
    if norm is not None:
        loaded = norm_of(checkpoint, norm, device, meter)
        x = (loaded if dtype is None else loaded.to(dtype))(x)
    return EmbeddingRows(x, tuple(token_ids), multiplier)


def _check_width(checkpoint: Checkpoint, row: Architecture, entry: TensorEntry) -> None:
    """Refuse rows that the model projects to another width before its first layer."""
    inner = None if checkpoint.config is None else size_of(checkpoint.config, row, "hidden")
    if row.embedding_projections is None or inner is None or inner.value == entry.shape[1]:
        return
    raise FamilyMismatch(
        f"rows of {entry.name} have {entry.shape[1]} entries where the layers take {inner.value} ({inner.source}): the "
        f"model projects them with {row.embedding_projections[0]}, which is not applied here",
        tensor=entry.name,
        hint="Post the block's input instead.",
    )


def _scaled(
    checkpoint: Checkpoint, row: Architecture, entry: TensorEntry, x: Tensor
) -> tuple[Tensor, Sourced[float] | None]:
    """Rows of the embedding times the family's multiplier."""
    if row.embedding_scale is None:
        return x, None
    multiplier = scale_of(checkpoint.config, row, row.embedding_scale, entry.shape[1])
    if isinstance(row.embedding_scale, SquareRoot) and row.embedding_scale.rounded:
        # As the models do: the multiplier is rounded to the weights' dtype before it multiplies.
        rounded = torch.tensor(multiplier.value, dtype=x.dtype, device=x.device)
        to = entry.dtype if x.dtype is torch_dtype(entry) else name_of_dtype(x.dtype)
        return x * rounded, Sourced(float(rounded), f"{multiplier.source}, rounded to {to}")
    return x * multiplier.value, multiplier


def _embedding(checkpoint: Checkpoint) -> TensorEntry:
    entry = embedding_entry(checkpoint)
    if entry is None or len(entry.shape) != 2 or 0 in entry.shape or entry.dtype not in FLOAT_CODES:
        problem = "is not in the files" if entry is None else f"is {entry.dtype} of shape {list(entry.shape)}"
        raise FamilyMismatch(
            f"the token embedding {problem}; rows of it cannot be taken",
            tensor=None if entry is None else entry.name,
            hint="Post the block's input instead.",
        )
    return entry
