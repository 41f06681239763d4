"""From token ids to the hidden states that enter a layer, and on to logits, with one layer held at a time.

The states pass upwards, layer by layer; each layer is read, run and let go. So a deep checkpoint takes the memory of
one layer, and every byte of the layers below is read once.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from glassblock.checkpoint.embedding_rows import embedding_rows
from glassblock.checkpoint.entries import FLOAT_CODES, TensorEntry
from glassblock.checkpoint.family import Architecture, LogitsRow
from glassblock.checkpoint.layer_loading import load_layer
from glassblock.checkpoint.layer_map import whole_layer_tensors
from glassblock.checkpoint.layers import load_norm
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.outer_tensors import embedding_entry, head_entry, trunk_entry
from glassblock.checkpoint.reading import ReadMeter, read_rows, read_tensor, torch_dtype
from glassblock.checkpoint.settings import (
    Sourced,
    flag_of,
    number_of,
    optional_number_of,
    scale_of,
    size_of,
    tied_of,
)
from glassblock.errors import FamilyMismatch, InvalidValue
from glassblock.numerics.causal_attention import DEFAULT_BYTE_BUDGET
from glassblock.numerics.layer import Layer, layer_output
from glassblock.numerics.likelihood import log_likelihood, logit_chunks
from glassblock.numerics.watching import UNWATCHED, Watch

HEAD_BYTES = 1 << 26
"""Rows of the head are read in parts of about so many bytes."""

LayerLoader = Callable[[int], Layer]
"""Gives the layer of a number; by default one that reads it and keeps nothing."""


def entering_states(
    checkpoint: Checkpoint,
    token_ids: Int[Tensor, "*batch tokens"],
    layer: int,
    device: torch.device | str,
    meter: ReadMeter,
    *,
    dtype: torch.dtype | None = None,
    load: LayerLoader | None = None,
    reached: tuple[int, Tensor] | None = None,
    byte_budget: int = DEFAULT_BYTE_BUDGET,
    watch: Watch = UNWATCHED,
) -> Float[Tensor, "*batch tokens d"]:
    """The residual stream that enters `layer`, of whole sequences from their first token.

    Args:
        checkpoint: The checkpoint.
        token_ids: The sequences.
        layer: The layer entered; the number of layers is what leaves the last one.
        device: Where it is computed.
        meter: Counts what is read.
        dtype: None computes in float32 at least; a given dtype runs every operation in it, as a model does.
        load: Gives the layers below.
        reached: A layer no higher than this one, and what enters it of these sequences: begun there.
        byte_budget: About how many bytes the scores of attention may take.
        watch: Told and asked between layers.

    Raises:
        InvalidValue: A token is outside the vocabulary or the positions, or there is no such layer.
        FamilyMismatch: A layer below cannot be run here; the error names it.
        ComputationCancelled: `watch` asked for it.
        DamagedCheckpoint, UnknownFamily: See `Checkpoint.require_usable`.
    """
    checkpoint.require_usable()
    if not 0 <= layer <= layer_count(checkpoint):
        raise InvalidValue(
            f"layer {layer} is out of range: the model has {layer_count(checkpoint)} layers",
            field="layer",
            hint="Count layers from 0.",
        )
    for below in range(layer):  # told before the first is read
        whole_layer_tensors(checkpoint, below)
    load = load or (lambda number: load_layer(checkpoint, number, device, meter))
    positions = torch.arange(token_ids.shape[-1], device=device)
    start, x = reached or (0, embedded(checkpoint, token_ids, device, meter, dtype=dtype))
    for below in range(start, layer):
        watch.at(below, layer, f"layer {below}")
        x = _through(x, load(below), positions, dtype=dtype, byte_budget=byte_budget)
    return x


def embedded(
    checkpoint: Checkpoint,
    token_ids: Int[Tensor, "*batch tokens"],
    device: torch.device | str,
    meter: ReadMeter,
    *,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "*batch tokens d"]:
    """What enters the first layer: embedding rows with the family's multiplier, norm and learned positions.

    Raises:
        InvalidValue: A token is outside the vocabulary, or there are more tokens than learned positions.
        FamilyMismatch: The embedding or the positions are not there, or not as wide as the model.
        DamagedCheckpoint, UnknownFamily: See `Checkpoint.require_usable`.
    """
    row = checkpoint.require_usable()
    flat = cast("list[int]", token_ids.reshape(-1).tolist())
    entry = embedding_entry(checkpoint)
    wide = None if entry is None else torch.promote_types(torch_dtype(entry), torch.float32)
    rows = embedding_rows(checkpoint, flat, device, meter, dtype=dtype or wide).x
    x = rows.reshape(*token_ids.shape, rows.shape[-1])
    hidden = None if checkpoint.config is None else size_of(checkpoint.config, row, "hidden")
    if hidden is not None and hidden.value != x.shape[-1]:
        raise FamilyMismatch(
            f"the embedding is {x.shape[-1]} wide and {hidden.source} is {hidden.value}: a projection between the two "
            "is not read here",
            hint="Post the hidden states that enter the layer.",
        )
    if row.positions is None:
        return x
    table = trunk_entry(checkpoint, row.positions.name)
    count = token_ids.shape[-1]
    width = x.shape[-1]
    if table is None or len(table.shape) != 2 or table.shape[1] != width or table.dtype not in FLOAT_CODES:
        found = "not in the files" if table is None else f"{table.dtype} of shape {list(table.shape)}"
        raise FamilyMismatch(
            f"the learned positions are {found}, where rows of {width} numbers are expected",
            tensor=None if table is None else table.name,
            hint="Download the checkpoint again.",
        )
    if count + row.positions.offset > table.shape[0]:
        raise InvalidValue(
            f"{count} tokens, and the model has {table.shape[0] - row.positions.offset} positions",
            field="token_ids",
            hint="Give a shorter text.",
        )
    rows = range(row.positions.offset, row.positions.offset + count)
    return x + read_rows(table, rows, device, meter).to(x.dtype)


def token_log_likelihoods(
    checkpoint: Checkpoint,
    token_ids: Int[Tensor, "*batch tokens"],
    device: torch.device | str,
    meter: ReadMeter,
    *,
    dtype: torch.dtype | None = None,
    load: LayerLoader | None = None,
    watch: Watch = UNWATCHED,
) -> Float[Tensor, "*batch next"]:
    """ln p of every token but the first, given those before it.

    Args:
        checkpoint: The checkpoint.
        token_ids: The sequences, two tokens at least.
        device: Where it is computed.
        meter: Counts what is read.
        dtype: As in `entering_states`.
        load: As there.
        watch: Told and asked between layers.

    Raises:
        As `entering_states`; FamilyMismatch also where there is no head.
    """
    count = layer_count(checkpoint)
    require_head(checkpoint)
    states = entering_states(checkpoint, token_ids, count, device, meter, dtype=dtype, load=load, watch=watch)
    watch.at(count, count + 1, "the head")
    return log_likelihood(logit_parts(checkpoint, states, meter, dtype=dtype), token_ids.to(states.device))


def logit_parts(
    checkpoint: Checkpoint, states: Float[Tensor, "*batch tokens d"], meter: ReadMeter, *, dtype: torch.dtype | None
) -> Iterator[Float[Tensor, "*batch tokens part"]]:
    """The logits of what leaves the last layer, in parts along the vocabulary; the head is read part by part.

    Raises:
        FamilyMismatch: There is no head, or it is quantised, or the config scales or caps logits by what nothing can,
            or the family's logits are not read here.
        DamagedCheckpoint, UnknownFamily: See `Checkpoint.require_usable`.
    """
    family, config = checkpoint.require_usable(), checkpoint.config
    head, device = require_head(checkpoint), states.device
    row = _logits_row(family)
    wide = dtype or torch.promote_types(torch.promote_types(states.dtype, torch_dtype(head)), torch.float32)
    norm = None if family.norm("final") is None else load_norm(checkpoint, None, "final", device, meter)
    normed = states.to(wide) if norm is None else norm.to(wide)(states.to(wide))
    scale, softcap = _logit_scale(checkpoint, row, head), optional_number_of(config, family, row.softcap)
    if softcap is not None and softcap.value <= 0:
        raise _unusable(checkpoint, softcap, "caps no logits")
    bias = _head_bias(checkpoint, row, head)
    for start, part in _row_parts(head, HEAD_BYTES):
        rows = read_tensor(part, device, meter)
        if row.unit_rows:  # in the dtype of the computation, as the models do
            rows = functional.normalize(rows.to(wide))
        own = None if bias is None else read_tensor(_rows(bias, start, start + part.shape[0]), device, meter)
        yield from logit_chunks(
            normed,
            None,
            rows,
            bias=own,
            scale=scale,
            softcap=None if softcap is None else softcap.value,
            dtype=wide,
        )


def require_head(checkpoint: Checkpoint) -> TensorEntry:
    """The output head: the one that is stored, or else the embedding where the two are tied.

    A stored head that differs from the embedding counts though the config ties them, as transformers 5 has it; the
    audit tells of it (`config/tied-head`), since other loaders drop it.

    Raises:
        FamilyMismatch: There is none, or it is quantised.
        DamagedCheckpoint, UnknownFamily: See `Checkpoint.require_usable`.
    """
    family = checkpoint.require_usable()
    tied = tied_of(checkpoint.config, family)
    entry = head_entry(checkpoint) or (embedding_entry(checkpoint) if tied.value else None)
    if entry is None or len(entry.shape) != 2 or entry.dtype not in FLOAT_CODES:
        where = None if checkpoint.trunk is None else checkpoint.trunk.head
        absent = "the embedding" if tied.value else (where or "the output head")
        name = absent if entry is None else entry.name
        problem = "is not in the files" if entry is None else f"is {entry.dtype} of shape {list(entry.shape)}"
        raise FamilyMismatch(
            f"{name} {problem}; without it there are no logits ({tied.source}: tied is {tied.value})",
            tensor=None if entry is None else entry.name,
            hint="Download the checkpoint again, or correct tie_word_embeddings.",
        )
    return entry


def layer_count(checkpoint: Checkpoint) -> int:
    """How many layers a text passes: those that the config declares, or else those that the tensors show."""
    declared = checkpoint.declared_layers
    return checkpoint.layers if declared is None else declared.value


def _through(x: Tensor, layer: Layer, positions: Tensor, *, dtype: torch.dtype | None, byte_budget: int) -> Tensor:
    """One layer. In a function of its own, so that its weights are let go before the next are read."""
    return layer_output(x, layer, positions=positions, dtype=dtype, byte_budget=byte_budget)


def _logits_row(family: Architecture) -> LogitsRow:
    if family.logits is None:
        raise FamilyMismatch(
            f"logits of the family {family.name} are not read here: more than a norm lies in front of its head",
            hint="Run its blocks on hidden states of your own.",
        )
    return family.logits


def _logit_scale(checkpoint: Checkpoint, row: LogitsRow, head: TensorEntry) -> float:
    """What the logits are multiplied by."""
    family, config = checkpoint.require_usable(), checkpoint.config
    scale = number_of(config, family, row.scale)
    divisor = scale_of(config, family, row.divisor, head.shape[1])
    if divisor.value == 0:
        raise _unusable(checkpoint, divisor, "divides no logits")
    if row.divided_by_size is None:
        return scale.value / divisor.value
    size = None if config is None else size_of(config, family, row.divided_by_size)
    if size is None:
        raise FamilyMismatch(
            f"nothing says what {row.divided_by_size} is, by which logits are divided",
            hint="Put the model's config beside its weights.",
        )
    return scale.value / (size.value / divisor.value)


def _unusable(checkpoint: Checkpoint, told: Sourced[float], problem: str) -> FamilyMismatch:
    return FamilyMismatch(
        f"{told.source} is {told.value:g}, which {problem}",
        file=None if checkpoint.config is None else checkpoint.config.path.name,
        hint="Correct the config.",
    )


def _head_bias(checkpoint: Checkpoint, row: LogitsRow, head: TensorEntry) -> TensorEntry | None:
    family = checkpoint.require_usable()
    if not flag_of(checkpoint.config, family, row.bias).value:
        return None
    trunk = checkpoint.trunk
    name = head.name if trunk is None or trunk.head is None else trunk.head
    entry = checkpoint.entries.get(f"{name.removesuffix('.weight')}.bias")
    if entry is None or entry.shape != head.shape[:1] or entry.dtype not in FLOAT_CODES:
        found = "missing" if entry is None else f"{entry.dtype} of shape {list(entry.shape)}"
        raise FamilyMismatch(
            f"the bias of the output head is {found}, where {head.shape[0]} numbers are expected",
            tensor=None if entry is None else entry.name,
            hint="Download the checkpoint again.",
        )
    return entry


def _row_parts(entry: TensorEntry, limit: int) -> Iterator[tuple[int, TensorEntry]]:
    rows = max(1, limit * entry.shape[0] // max(1, entry.bytes))
    for start in range(0, entry.shape[0], rows):
        yield start, _rows(entry, start, min(start + rows, entry.shape[0]))


def _rows(entry: TensorEntry, start: int, stop: int) -> TensorEntry:
    """The entry of a run of rows."""
    step = entry.bytes // entry.shape[0]
    shape = (stop - start, *entry.shape[1:])
    return replace(entry, shape=shape, start=entry.start + start * step, stop=entry.start + stop * step)
