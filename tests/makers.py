"""Makers of tiny checkpoints and of broken files, for every test that needs some.

`tiny_checkpoint` writes what `save_pretrained` of the family's own model would write (the oracle test holds the two
against each other), without loading transformers.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.family import Architecture, Size
from glassblock.numerics.norms import NORM_KINDS
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class Tiny:
    """Sizes of a tiny model. Heads times head_dim is not `hidden` on purpose, where a family allows that."""

    hidden: int = 48
    intermediate: int = 112
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 96
    positions: int = 32
    eps: float = 1e-5

    def of(self, size: Size) -> int:
        return getattr(self, size)


def sizes_for(family: str, tiny: Tiny) -> Tiny:
    """The sizes, with the ones that a family derives from others derived."""
    row = ARCHITECTURES[family]
    values = {size: tiny.of(size) for size in row.sizes}
    if not row.sizes["kv_heads"].keys:
        values["kv_heads"] = tiny.heads
    if not row.sizes["head_dim"].keys or family in {"phi3", "olmo2", "qwen2"}:
        values["head_dim"] = tiny.hidden // tiny.heads
    return Tiny(**values, positions=tiny.positions, eps=tiny.eps)


def tiny_checkpoint(
    family: str,
    directory: Path,
    *,
    tiny: Tiny | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor | None] | None = None,
) -> Path:
    """Write a Hugging Face directory of the family with random weights.

    Args:
        family: A name of the family table.
        directory: Where to; made if need be.
        tiny: The sizes.
        seed: For the weights.
        dtype: Of all tensors.
        shards: 1 writes model.safetensors; more write that many shards and an index.
        config: Entries of config.json to put in; a value of `...` takes the entry out.
        tensors: Tensors to put in by full name; None takes one out.
    """
    tiny = sizes_for(family, tiny or Tiny())
    directory.mkdir(parents=True, exist_ok=True)
    all_tensors = {name: tensor.to(dtype) for name, tensor in tiny_tensors(family, tiny, seed=seed).items()}
    for name, tensor in (tensors or {}).items():
        if tensor is None:
            del all_tensors[name]
        else:
            all_tensors[name] = tensor
    values = tiny_config(family, tiny, dtype=dtype)
    for key, value in (config or {}).items():
        if value is ...:
            del values[key]
        else:
            values[key] = value
    (directory / "config.json").write_text(json.dumps(values, indent=2))
    write_weights(directory, all_tensors, shards=shards)
    return directory


def write_weights(directory: Path, tensors: Mapping[str, Tensor], *, shards: int = 1) -> None:
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    write_index(directory, weight_map, total_size=total)


def write_index(directory: Path, weight_map: Mapping[str, Any], **metadata: Any) -> None:
    index = {"metadata": metadata, "weight_map": dict(weight_map)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_container(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """A safetensors file with any header: bytes as they are, anything else as JSON. `length` may lie."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def tiny_config(family: str, tiny: Tiny, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    row = ARCHITECTURES[family]
    values: dict[str, Any] = {
        "architectures": [row.architectures[0]],
        "model_type": row.model_types[0],
        "dtype": str(dtype).removeprefix("torch."),
    }
    values |= {setting.keys[0]: tiny.of(size) for size, setting in row.sizes.items() if setting.keys}
    values |= {key: tiny.eps for norm in row.norms for key in norm.eps.keys[:1]}
    activation = row.feed_forward.activation
    values |= dict.fromkeys(activation.keys[:1], activation.default)
    values |= dict.fromkeys(row.tied.keys[:1], row.tied.default)
    if family == "gpt2":
        values["n_positions"] = tiny.positions
    return values


def tiny_tensors(family: str, tiny: Tiny, *, seed: int = 0) -> dict[str, Tensor]:
    row = ARCHITECTURES[family]
    generator = torch.Generator().manual_seed(seed)
    trunk = row.trunks[0]
    tensors: dict[str, Tensor] = {}

    def weight(name: str, *shape: int) -> None:
        tensors[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    weight(trunk.prefix + row.embedding, tiny.vocab, tiny.hidden)
    if family == "gpt2":
        weight(f"{trunk.prefix}wpe.weight", tiny.positions, tiny.hidden)
    if not row.tied.default:
        weight(trunk.head, tiny.vocab, tiny.hidden)
    for layer in range(tiny.layers):
        prefix = trunk.prefix + row.layer.format(i=layer)
        for name, shape in (*_feed_forward(row, tiny), *_attention(family, tiny)):
            weight(prefix + name, *shape)
        for norm in row.norms:
            if norm.role != "final":
                _norm(row, norm.role, prefix, tiny, tensors, generator)
    _norm(row, "final", trunk.prefix, tiny, tensors, generator)
    return tensors


def _norm(
    row: Architecture, role: str, prefix: str, tiny: Tiny, tensors: dict[str, Tensor], generator: torch.Generator
) -> None:
    norm = row.norm(role)
    assert norm is not None
    width = prod(tiny.of(size) for size in norm.width)
    offset = NORM_KINDS[norm.kind].offset
    tensors[prefix + norm.gain] = 1 - offset + 0.2 * torch.randn(width, generator=generator)
    if norm.has_bias:
        tensors[prefix + norm.bias] = 0.1 * torch.randn(width, generator=generator)


def _feed_forward(row: Architecture, tiny: Tiny) -> list[tuple[str, tuple[int, ...]]]:
    network = row.feed_forward
    inner, outer = tiny.intermediate, tiny.hidden
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for projection, rows, columns in (
        (network.gate, inner, outer),
        (network.up, inner, outer),
        (network.fused, 2 * inner, outer),
        (network.down, outer, inner),
    ):
        if projection is not None:
            shapes.append((projection.weight, (rows, columns) if network.layout == "out_in" else (columns, rows)))
            if network.bias.default:
                shapes.append((projection.bias, (rows,)))
    return shapes


def _attention(family: str, tiny: Tiny) -> list[tuple[str, tuple[int, ...]]]:
    queries, keys, hidden = tiny.heads * tiny.head_dim, tiny.kv_heads * tiny.head_dim, tiny.hidden
    if family == "gpt2":
        return [
            ("attn.c_attn.weight", (hidden, 3 * hidden)),
            ("attn.c_attn.bias", (3 * hidden,)),
            ("attn.c_proj.weight", (hidden, hidden)),
            ("attn.c_proj.bias", (hidden,)),
        ]
    if family == "phi3":
        return [
            ("self_attn.qkv_proj.weight", (queries + 2 * keys, hidden)),
            ("self_attn.o_proj.weight", (hidden, queries)),
        ]
    widths = {"q": queries, "k": keys, "v": keys}
    names = [(f"self_attn.{name}_proj.weight", (width, hidden)) for name, width in widths.items()]
    biases = [(f"self_attn.{name}_proj.bias", (width,)) for name, width in widths.items()] if family == "qwen2" else []
    return [*names, ("self_attn.o_proj.weight", (hidden, queries)), *biases]
