"""Makers of tiny checkpoints and of broken files, for every test that needs some.

`tiny_checkpoint` writes what a model of the family has, as its row says (the oracle test holds networks and norms
against what `save_pretrained` writes), without loading transformers.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import torch
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.config import ConfigFile
from glassblock.checkpoint.families.attention_makers import heads
from glassblock.checkpoint.family import (
    Architecture,
    FeedForwardRow,
    LatentAttentionRow,
    MixtureRow,
    NormRow,
    Ratio,
    Size,
)
from glassblock.checkpoint.settings import flag_of
from glassblock.checkpoint.variants import row_for, row_in
from glassblock.numerics.norms import NORM_KINDS
from safetensors.torch import save_file
from torch import Tensor

# The families that first tests were written for: dense, their norms with gains, their config's keys their own.
USUAL = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "olmo2", "gpt2")
# Families whose files the cheap tests are enough for are left out of the dear ones: these have, between them, every
# storage, placement, norm and multiplier that a dense row can have.
REPRESENTATIVES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3",
    "phi3",
    "olmo2",
    "olmo",
    "gpt2",
    "cohere",
    "falcon",
    "opt",
    "granite",
    "glm4",
    "apertus",
    "bitnet",
    "nanochat",
    "falcon_h1",
    "nemotron",
    "olmo_ai2",
    "qwen",
)


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
    experts: int = 4
    experts_per_token: int = 2
    expert_width: int = 24
    shared_experts: int = 1
    shared_width: int = 40
    q_rank: int = 20
    kv_rank: int = 28
    nope_head_dim: int = 8
    rope_head_dim: int = 8
    v_head_dim: int = 12

    def of(self, size: Size) -> int:
        if size == "embedding_width":
            return self.hidden
        return getattr(self, size, 8)  # a size that no test depends on


def sizes_for(family: str, tiny: Tiny) -> Tiny:
    """The sizes, with the ones that a family derives from others derived."""
    row = row_for(ARCHITECTURES[family], None)
    values = {field.name: getattr(tiny, field.name) for field in fields(Tiny)}
    for size, setting in row.sizes.items():
        if setting.keys or setting.default is None or size not in values:
            continue
        if isinstance(setting.default, Ratio):
            over = 1 if setting.default.over is None else values[setting.default.over]
            values[size] = values[setting.default.of] * setting.default.times // over
        else:
            values[size] = setting.default
    return Tiny(**values)


def asked(family: str) -> str | None:
    """The family's name where no config can say it."""
    row = ARCHITECTURES[family]
    return None if row.model_types or row.architectures else family


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
        config: Entries of the config to put in; a value of `...` takes the entry out.
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
    (directory / ARCHITECTURES[family].config_file).write_text(json.dumps(values, indent=2))
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
    values: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    values |= {"architectures": [row.architectures[0]]} if row.architectures else {}
    values |= {"model_type": row.model_types[0]} if row.model_types else {}
    network = row.network
    settings = {setting.keys[0]: tiny.of(size) * setting.over for size, setting in row.sizes.items() if setting.keys}
    settings |= {key: tiny.eps for norm in row.norms for key in norm.eps.keys[:1]}
    settings |= dict.fromkeys(network.activation.keys[:1], network.activation.default)
    settings |= dict.fromkeys(row.tied.keys[:1], row.tied.default)
    for key, value in settings.items():
        _put(values, key.split("."), value)
    if family == "gpt2":
        values["n_positions"] = tiny.positions
    return values


def _put(values: dict[str, Any], path: list[str], value: object) -> None:
    """An entry under a dotted key; a number stands for an entry of a list, of which there is one for each layer."""
    if len(path) == 1:
        values[path[0]] = value
    elif path[1].isdecimal():
        values[path[0]] = [value] * 2
    else:
        _put(values.setdefault(path[0], {}), path[1:], value)


def tiny_tensors(family: str, tiny: Tiny, *, seed: int = 0) -> dict[str, Tensor]:
    config = ConfigFile(Path("config.json"), tiny_config(family, tiny))
    row = row_for(ARCHITECTURES[family], config)
    generator = torch.Generator().manual_seed(seed)
    trunk = row.trunks[0]
    tensors: dict[str, Tensor] = {}
    outer: list[tuple[str, tuple[int, ...]]] = []
    embedding = trunk.embedding or (None if row.embedding is None else trunk.prefix + row.embedding)
    if embedding is not None:
        outer.append((embedding, (tiny.vocab, tiny.hidden)))
    if row.positions is not None:
        outer.append((trunk.prefix + row.positions.name, (tiny.positions + row.positions.offset, tiny.hidden)))
    if not row.tied.default and trunk.head is not None:
        outer.append((trunk.head, (tiny.vocab, tiny.hidden)))
    for name, shape in outer:
        tensors[name] = _weight(shape, generator)
    for layer in range(tiny.layers):
        prefix = trunk.prefix + row.layer.format(i=layer)
        inner = row_in(row, config, layer, prefix=prefix, shape=lambda name: _shape_of(tensors.get(name)))
        for name, tensor in _layer(inner, config, tiny, generator):
            tensors[prefix + name] = tensor
    for norm in (row.embedding_norm, row.norm("final")):
        for name, tensor in _norm(norm, tiny, generator) if norm is not None else ():
            tensors[trunk.prefix + name] = tensor
    return tensors


def _layer(
    row: Architecture, config: ConfigFile, tiny: Tiny, generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer, by their names relative to it."""
    for name, shape in (
        *_network(row.feed_forward, config, row, tiny),
        *_mixture(row.mixture, config, row, tiny),
        *_attention(row, config, tiny),
    ):
        yield name, _weight(shape, generator)
    for network in row.networks:
        for name in network.activation_tensors.values():
            yield name, 0.5 + 0.1 * torch.rand(1, generator=generator)
    for norm in row.norms:
        if norm.role != "final":
            yield from _norm(norm, tiny, generator)
    if row.branch_gain is not None:
        yield row.branch_gain, 1 + 0.1 * torch.randn(tiny.hidden, generator=generator)


def _weight(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * shape[-1] ** -0.5


def _shape_of(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


def _norm(norm: NormRow, tiny: Tiny, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    sizes = [tiny.of(size) for size in norm.width or ("head_dim",)]
    shape = sizes if norm.per_head else [prod(sizes)]
    if norm.has_gain:
        yield norm.gain, 1 - NORM_KINDS[norm.kind].offset + 0.2 * torch.randn(shape, generator=generator)
    if norm.has_bias:
        yield norm.bias, 0.1 * torch.randn(shape, generator=generator)


def _network(
    network: FeedForwardRow | None, config: ConfigFile, row: Architecture, tiny: Tiny
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the weights and biases of one network; `{j}` is left in them."""
    if network is None:
        return
    inner = tiny.intermediate if network.width is None else prod(tiny.of(size) for size in network.width)
    outer = tiny.of(network.outer)
    first, last = network.layouts
    bias = flag_of(config, row, network.bias).value
    down_bias = bias if network.down_bias is None else flag_of(config, row, network.down_bias).value
    for projection, rows, columns, layout, has_bias in (
        (network.gate, inner, outer, first, bias),
        (network.up, inner, outer, first, bias),
        (network.fused, 2 * inner, outer, first, bias),
        (network.down, outer, inner, last, down_bias),
    ):
        if projection is not None:
            yield projection.weight, (rows, columns) if layout == "out_in" else (columns, rows)
            if has_bias:
                yield projection.bias, (rows,)


def _mixture(
    mixture: MixtureRow | None, config: ConfigFile, row: Architecture, tiny: Tiny
) -> Iterator[tuple[str, tuple[int, ...]]]:
    if mixture is None:
        return
    count = tiny.of(mixture.count)
    router = (count, tiny.hidden) if mixture.router_layout == "out_in" else (tiny.hidden, count)
    yield mixture.router.weight, router
    if flag_of(config, row, mixture.router_bias).value:
        yield mixture.router.bias, (count,)
    for name, shape in _network(mixture.experts, config, row, tiny):
        if mixture.arrangement == "separate":
            yield from ((name.replace("{j}", str(expert)), shape) for expert in range(count))
        elif mixture.arrangement == "stacked":
            yield name, (count, *shape)
        else:
            yield name, (count * shape[0], *shape[1:])
    yield from _network(mixture.shared, config, row, tiny)
    if mixture.correction is not None:
        yield mixture.correction, (count,)
    if mixture.shared_gate is not None:
        yield mixture.shared_gate, (1, tiny.hidden)
    if mixture.output_bias is not None:
        yield mixture.output_bias, (tiny.hidden,)


def _attention(row: Architecture, config: ConfigFile, tiny: Tiny) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a layer's attention; Llama's where the family's is not read."""
    attention = row.attention
    if isinstance(attention, LatentAttentionRow):
        yield from _latent_attention(attention, config, row, tiny)
        return
    attention = attention or heads()
    queries, keys, hidden = tiny.heads * tiny.head_dim, tiny.kv_heads * tiny.head_dim, tiny.hidden
    bias = flag_of(config, row, attention.bias).value
    output_bias = bias if attention.output_bias is None else flag_of(config, row, attention.output_bias).value
    fused = None if attention.fused is None else attention.fused.projection
    for projection, rows, columns, has_bias in (
        (attention.query, queries, hidden, bias),
        (attention.key, keys, hidden, bias),
        (attention.value, keys, hidden, bias),
        (fused, queries + 2 * keys, hidden, bias),
        (attention.output, hidden, queries, output_bias),
    ):
        if projection is not None:
            yield projection.weight, (rows, columns) if attention.layout == "out_in" else (columns, rows)
            if has_bias:
                yield projection.bias, (rows,)
    if attention.sinks is not None:
        yield attention.sinks, (tiny.heads,)


def _latent_attention(
    attention: LatentAttentionRow, config: ConfigFile, row: Architecture, tiny: Tiny
) -> Iterator[tuple[str, tuple[int, ...]]]:
    head_dim, hidden = tiny.nope_head_dim + tiny.rope_head_dim, tiny.hidden
    bias = flag_of(config, row, attention.bias).value
    for projection, rows, columns, has_bias in (
        (attention.query_down, tiny.q_rank, hidden, bias),
        (attention.query_up, tiny.heads * head_dim, tiny.q_rank, False),
        (attention.key_value_down, tiny.kv_rank + tiny.rope_head_dim, hidden, bias),
        (attention.key_value_up, tiny.heads * (tiny.nope_head_dim + tiny.v_head_dim), tiny.kv_rank, False),
        (attention.output, hidden, tiny.heads * tiny.v_head_dim, bias),
    ):
        yield projection.weight, (rows, columns)
        if has_bias:
            yield projection.bias, (rows,)
