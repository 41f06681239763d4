"""Loading one layer of a checkpoint: its network, its norms and its wiring, as the family means them.

Weights come out `[out, in]` whatever the file stores: transposing and splitting are views. Only the bytes of
the tensors asked for are read.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.family import Architecture, FusedProjection, SquareRoot
from glassblock.checkpoint.fitting import FLOAT_CODES, LayerFault
from glassblock.checkpoint.layer_map import (
    LayerTensors,
    NormTensors,
    embedding_entry,
    eps_sources,
    final_norm,
    head_entry,
    layer_tensors,
    mismatch,
    resolve_layer,
    shape_faults,
)
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter, read_rows, read_tensor
from glassblock.checkpoint.settings import Sourced, eps_of, number_of, scale_of, text_of
from glassblock.errors import FamilyMismatch, InvalidValue
from glassblock.numerics.activations import ACTIVATION_ALIASES, ACTIVATIONS, activation_named, gating_named
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.norms import Norm, norm_kind_named
from glassblock.numerics.wiring import Wiring

__all__ = [
    "EmbeddingRows",
    "LayerFault",
    "LayerTensors",
    "NormTensors",
    "activation_of",
    "embedding_entry",
    "embedding_rows",
    "eps_sources",
    "head_entry",
    "layer_tensors",
    "load_feed_forward",
    "load_norm",
    "load_wiring",
    "resolve_layer",
    "sample_embedding_rows",
    "shape_faults",
]


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


def load_feed_forward(checkpoint: Checkpoint, layer: int, device: torch.device | str, meter: ReadMeter) -> FeedForward:
    """The feed-forward network of a layer, in the file's dtypes; gate and up of a fused tensor are views of it.

    Raises:
        InvalidValue: There is no such layer.
        FamilyMismatch: Its tensors do not fit, or the config names an unknown activation.
        DamagedCheckpoint, UnknownFamily: See `Checkpoint.require_usable`.
    """
    row, tensors = checkpoint.require_usable(), layer_tensors(checkpoint, layer)
    network = row.feed_forward
    activation = activation_named(activation_of(checkpoint).value)
    numbers = {
        name: number_of(checkpoint.config, row, setting).value for name, setting in network.gating_parameters.items()
    }
    gating = gating_named(network.gating, limit=numbers.get("limit"), alpha=numbers.get("alpha"))
    weights = {
        part: _out_in(read_tensor(entry, device, meter), network.layout) for part, entry in tensors.weights.items()
    }
    biases = {part: read_tensor(entry, device, meter) for part, entry in tensors.biases.items()}
    gate, up = weights.get("gate"), weights.get("up")
    gate_bias, up_bias = biases.get("gate"), biases.get("up")
    if network.fused is not None:
        gate, up = split_fused(weights["fused"], network.fused)
        if "fused" in biases:
            gate_bias, up_bias = split_fused(biases["fused"], network.fused)
    if up is None:
        raise FamilyMismatch(f"the family {row.name} names no up projection")
    return FeedForward(gate, up, weights["down"], gate_bias, up_bias, biases.get("down"), activation, gating)


def load_wiring(checkpoint: Checkpoint, layer: int, device: torch.device | str, meter: ReadMeter) -> Wiring:
    """The norms of a layer's feed-forward block and how it joins the residual stream.

    Raises:
        InvalidValue, FamilyMismatch, DamagedCheckpoint, UnknownFamily: As `load_feed_forward`.
    """
    row, tensors = checkpoint.require_usable(), layer_tensors(checkpoint, layer)

    def norm(role: str) -> Norm | None:
        found = next((tensors.norms[known] for known in tensors.norms if known == role), None)
        return None if found is None else _load(checkpoint, found, device, meter)

    return Wiring(
        row.placement,
        input_norm=norm("ffn_in"),
        output_norm=norm("ffn_out"),
        residual_norm=norm("resid_ffn"),
        residual_scale=number_of(checkpoint.config, row, row.residual_scale).value,
        branch_scale=number_of(checkpoint.config, row, row.branch_scale).value,
    )


def load_norm(
    checkpoint: Checkpoint, layer: int | None, role: str, device: torch.device | str, meter: ReadMeter
) -> Norm:
    """One norm with its tensors and its epsilon.

    Args:
        checkpoint: The checkpoint.
        layer: Its layer; not used for `final`.
        role: A role of the family's norms, such as `ffn_in` or `final`.
        device: Where its tensors go.
        meter: Counts what is read.

    Raises:
        InvalidValue: The family has no norm in that role, or there is no such layer.
        FamilyMismatch, DamagedCheckpoint, UnknownFamily: As `load_feed_forward`.
    """
    row = checkpoint.require_usable()
    if row.norm(role) is None:
        raise InvalidValue(
            f"the family {row.name} has no norm in the role {role!r}",
            field="norm",
            known=row.roles,
            hint="Use one of its roles.",
        )
    if role == "final":
        found, faults = final_norm(checkpoint)
        for fault in faults:
            raise mismatch(fault)
    else:
        if layer is None:
            raise InvalidValue(f"the norm {role!r} needs a layer", field="layer", hint="Say which layer.")
        found = next(norm for norm in layer_tensors(checkpoint, layer).norms.values() if norm.row.role == role)
    if found is None:
        raise FamilyMismatch(f"the family {row.name} has no norm after its last layer")
    return _load(checkpoint, found, device, meter)


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
    checkpoint: Checkpoint, token_ids: Sequence[int], device: torch.device | str, meter: ReadMeter
) -> EmbeddingRows:
    """The embedding of the given tokens, times the family's multiplier; only their rows are read.

    Raises:
        InvalidValue: A token is outside the vocabulary.
        FamilyMismatch: There is no embedding, or it is quantised.
        DamagedCheckpoint, UnknownFamily: See `Checkpoint.require_usable`.
    """
    row = checkpoint.require_usable()
    entry = _embedding(checkpoint)
    for token in token_ids:
        if not 0 <= token < entry.shape[0]:
            raise InvalidValue(
                f"token {token} is outside the vocabulary of {entry.shape[0]}",
                field="token_ids",
                hint=f"Token ids run from 0 to {entry.shape[0] - 1}.",
            )
    x = read_rows(entry, token_ids, device, meter)
    if row.embedding_scale is None:
        return EmbeddingRows(x, tuple(token_ids), None)
    multiplier = scale_of(checkpoint.config, row, row.embedding_scale, entry.shape[1])
    if isinstance(row.embedding_scale, SquareRoot):
        # As the models do: the multiplier is rounded to the weights' dtype before it multiplies.
        rounded = torch.tensor(multiplier.value, dtype=x.dtype, device=x.device)
        source = f"{multiplier.source}, rounded to {entry.dtype}"
        return EmbeddingRows(x * rounded, tuple(token_ids), Sourced(float(rounded), source))
    return EmbeddingRows(x * multiplier.value, tuple(token_ids), multiplier)


def activation_of(checkpoint: Checkpoint) -> Sourced[str]:
    """The name of the activation, as the config spells it, and where it comes from.

    Raises:
        FamilyMismatch: It is unknown; the known names are with the error.
        DamagedCheckpoint, UnknownFamily: See `Checkpoint.require_usable`.
    """
    row = checkpoint.require_usable()
    name = text_of(checkpoint.config, row, row.feed_forward.activation)
    if name.value not in ACTIVATIONS and name.value not in ACTIVATION_ALIASES:
        raise FamilyMismatch(
            f"{name.source} is {name.value!r:.80}, which is no known activation",
            file="config.json",
            known=(*ACTIVATIONS, *ACTIVATION_ALIASES),
            hint="Correct the config.",
        )
    return name


def split_fused(
    fused: Float[Tensor, "two_m *d"], row: FusedProjection
) -> tuple[Float[Tensor, "m *d"], Float[Tensor, "m *d"]]:
    """Gate and up out of a fused weight `[2 m, d]` or bias `[2 m]`, as views."""
    if row.arrangement == "interleaved":
        first, second = fused[0::2], fused[1::2]
    else:
        half = fused.shape[0] // 2
        first, second = fused[:half], fused[half:]
    return (first, second) if row.order[0] == "gate" else (second, first)


def _out_in(weight: Tensor, layout: str) -> Tensor:
    return weight.T if layout == "in_out" else weight


def _load(checkpoint: Checkpoint, norm: NormTensors, device: torch.device | str, meter: ReadMeter) -> Norm:
    row: Architecture = checkpoint.require_usable()
    gain = None if norm.gain is None else read_tensor(norm.gain, device, meter)
    bias = None if norm.bias is None else read_tensor(norm.bias, device, meter)
    eps = eps_of(checkpoint.config, row, norm.row.eps).value
    return Norm(norm_kind_named(norm.row.kind), gain, bias, eps)


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
