"""Every rule with the ways to break a healthy tiny checkpoint that it must find.

A plant edits the files of a directory and says what an audit has to report: one finding of that rule, with that level,
certainty and layer, whose message names the culprits, and no other error or warning.
"""

import json
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.numerics.fused_layouts import split_rows
from makers import Tiny, sizes_for, tiny_checkpoint, tiny_config, tiny_tensors
from rotary_heads import into, trained_heads
from safetensors.torch import load_file, save_file
from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = tuple(f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3))


@dataclass(frozen=True)
class Plant:
    """One mistake in one healthy checkpoint.

    Attributes:
        label: In a word, what is broken.
        break_: Edits the files of the directory.
        culprits: Words that the finding's message holds.
        family: Of the healthy checkpoint.
        shards: Number of its weight files.
        tiny: Its sizes.
        config: Entries of its config that differ from the family's.
        tensors: Tensors it has besides the family's.
        level, certainty: Of the finding.
        layer: Of the finding.
        against: Another engine's config, to ask about.
        reference: Whether to compare with the healthy checkpoint.
    """

    label: str
    break_: Callable[[Path], object]
    culprits: tuple[str, ...]
    family: str = "llama"
    shards: int = 1
    tiny: Tiny = field(default_factory=Tiny)
    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    level: str = "error"
    certainty: str = "proved"
    layer: int | None = None
    against: Mapping[str, Any] | None = None
    reference: bool = False

    def healthy(self, directory: Path) -> Path:
        return healthy_checkpoint(
            self.family,
            directory,
            shards=self.shards,
            tiny=self.tiny,
            config=self.config,
            tensors=self.tensors,
        )


def healthy_checkpoint(
    family: str,
    directory: Path,
    *,
    shards: int = 1,
    tiny: Tiny | None = None,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> Path:
    """A checkpoint whose gates have what training gives them: a direction common to all their rows."""
    row, sizes = ARCHITECTURES[family], sizes_for(family, tiny or Tiny())
    network, trunk = row.feed_forward, row.trunks[0]
    trained = dict(tensors or {})
    gate = None if network is None else network.gate or network.fused
    made = tiny_tensors(family, sizes) if gate is not None else {}
    for layer in range(sizes.layers) if gate is not None and network is not None else ():
        name = trunk.prefix + row.layer.format(i=layer) + gate.weight
        if name not in made:
            continue
        rows = made[name] if network.layout == "out_in" else made[name].T
        layout = None if network.fused is None else network.fused.layout(len(rows))
        rows = rows if layout is None else split_rows(rows, layout)[0]
        rows += torch.randn(sizes.hidden, generator=torch.Generator().manual_seed(layer)) * sizes.hidden**-0.5
        trained.setdefault(name, made[name])
    return tiny_checkpoint(family, directory, tiny=tiny, shards=shards, config=config, tensors=trained)


# How to edit files.


def edit_json(name: str, **changes: Any) -> Callable[[Path], object]:
    """Put entries into a JSON file; `...` takes one out."""

    def edit(directory: Path) -> None:
        path = directory / name
        values = json.loads(path.read_text()) if path.exists() else {}
        values |= changes
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))

    return edit


def edit_tensors(change: Callable[[dict[str, Tensor]], object], file: str = SINGLE) -> Callable[[Path], object]:
    def edit(directory: Path) -> None:
        tensors = load_file(directory / file)
        change(tensors)
        save_file(tensors, directory / file, metadata={"format": "pt"})

    return edit


def copy_layer(tensors: dict[str, Tensor], source: int, onto: int) -> None:
    """Give one layer the numbers of another."""
    prefix = f"model.layers.{source}."
    of_source = [name for name in tensors if name.startswith(prefix)]
    tensors |= {name.replace(prefix, f"model.layers.{onto}."): tensors[name].clone() for name in of_source}


def put(name: str, tensor: Tensor, file: str = SINGLE) -> Callable[[Path], object]:
    return edit_tensors(lambda tensors: tensors.update({name: tensor}), file)


def drop(name: str) -> Callable[[Path], object]:
    return edit_tensors(lambda tensors: tensors.pop(name))


def edit_entry(name: str, at: tuple[int, ...], value: float) -> Callable[[Path], object]:
    return edit_tensors(lambda tensors: tensors[name].__setitem__(at, value))


def edit_header(
    change: Callable[[dict[str, Any]], object], data: Callable[[bytes], bytes] = bytes
) -> Callable[[Path], object]:
    """Rewrite the header of model.safetensors, and its data where asked."""

    def edit(directory: Path) -> None:
        path = directory / SINGLE
        raw = path.read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data(raw[8 + length :]))

    return edit


def edit_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def edit(directory: Path) -> None:
        path = directory / INDEX
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    return edit


def rename(one: str, other: str) -> Callable[[Path], object]:
    """Exchange two names in the header; no data moves."""

    def change(header: dict[str, Any]) -> None:
        header[one], header[other] = header[other], header[one]

    return edit_header(change)


def replace_file(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(content)


def _overlap(header: dict[str, Any]) -> None:
    key, query = (f"model.layers.1.self_attn.{name}_proj.weight" for name in ("k", "v"))
    header[query]["data_offsets"] = header[key]["data_offsets"]


def _hole(header: dict[str, Any]) -> None:
    first = header["model.layers.1.self_attn.v_proj.weight"]["data_offsets"][0]
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][0] >= first:
            entry["data_offsets"] = [offset + 16 for offset in entry["data_offsets"]]


def _hole_data(data: bytes) -> bytes:
    return data + bytes(16)  # where the bytes go in does not matter: they are noise


def _swap_halves(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.gate_up_proj.weight"
    gate, up = tensors[name].chunk(2)
    tensors[name] = torch.cat([up, gate])


def _same_halves(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.gate_up_proj.weight"
    gate, _ = tensors[name].chunk(2)
    tensors[name] = torch.cat([gate, gate])


def _wrapped(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[f"module.{name}"] = tensors.pop(name)


def _empty_third(tensors: dict[str, Tensor]) -> None:
    for name in sorted(tensors):
        if "self_attn" in name:
            tensors[name] = torch.empty(0)


def _both_sets(directory: Path) -> None:
    tensors = {name: tensor for shard in SHARDS for name, tensor in load_file(directory / shard).items()}
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})


def _copied_head(directory: Path) -> None:
    edit_tensors(lambda tensors: tensors.update({"lm_head.weight": tensors[_EMBEDDING].clone()}))(directory)
    edit_json("config.json", tie_word_embeddings=True)(directory)


def _two_flags(directory: Path) -> None:
    inner = tiny_config("llama", Tiny()) | {"tie_word_embeddings": True}
    edit_json("config.json", tie_word_embeddings=False, text_config=inner)(directory)


def _two_epsilons(directory: Path) -> None:
    edit_json("config.json", text_config=tiny_config("llama", Tiny()) | {"rms_norm_eps": 1e-3})(directory)


def link_nowhere(*names: str) -> Callable[[Path], object]:
    """Put links in place of files, as an interrupted download into a cache leaves them."""

    def link(directory: Path) -> None:
        for name in names:
            (directory / name).unlink(missing_ok=True)
            (directory / name).symlink_to(f"blobs/{name}")

    return link


def _cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def _keep(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:count])


_UP = "model.layers.1.mlp.up_proj.weight"
_GATE = "model.layers.1.mlp.gate_proj.weight"
_KEYS = "model.layers.1.self_attn.k_proj.weight"
_BIASES = {
    f"model.layers.{layer}.mlp.{name}_proj.bias": torch.full((width,), 0.25)
    for layer in (0, 1)
    for name, width in (("gate", Tiny().intermediate), ("up", Tiny().intermediate), ("down", Tiny().hidden))
}
_EMBEDDING = "model.embed_tokens.weight"


def _paired_networks(layers: int, width: int, neurons: int) -> dict[str, Tensor]:
    """Networks whose neurons show that they belong together: up and down by their lengths, gate and up by a line."""
    tensors: dict[str, Tensor] = {}
    for layer in range(layers):
        generator = torch.Generator().manual_seed(layer)
        gate, up = (torch.randn(neurons, width, generator=generator) * width**-0.5 for _ in range(2))
        down = torch.randn(width, neurons, generator=generator) * neurons**-0.5
        length = torch.randn(neurons, 1, generator=generator).exp()
        sign = torch.randint(0, 2, (neurons, 1), generator=generator) * 2 - 1
        gate += sign * up + torch.randn(width, generator=generator) * width**-0.5
        prefix = f"model.layers.{layer}.mlp."
        tensors[f"{prefix}gate_proj.weight"] = gate
        tensors[f"{prefix}up_proj.weight"] = up * length
        tensors[f"{prefix}down_proj.weight"] = down * length.T
    return tensors


_PAIRED = Tiny(layers=5, intermediate=192)


def _permuted(*names: str) -> Callable[[Path], object]:
    """The neurons of these projections of layer 1 in another order."""

    def permute(tensors: dict[str, Tensor]) -> None:
        order = torch.randperm(_PAIRED.intermediate, generator=torch.Generator().manual_seed(0))
        for name in names:
            full = f"model.layers.1.mlp.{name}_proj.weight"
            tensors[full] = tensors[full][:, order] if name == "down" else tensors[full][order]

    return edit_tensors(permute)


def _laid(groups: int) -> Callable[[Path], object]:
    """The fused rows of layer 1 in so many blocks of [gate | up]."""

    def lay(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.1.mlp.gate_up_proj.weight"
        halves = [half.unflatten(0, (groups, -1)) for half in tensors[name].chunk(2)]
        tensors[name] = torch.stack(halves, 1).flatten(0, 2)

    return edit_tensors(lay)


_MANY_HEADS = Tiny(layers=8, head_dim=32)
_EXPERT = "model.layers.1.block_sparse_moe.experts."


def trained_mixture() -> dict[str, Tensor]:
    """Experts of a mixtral as training leaves them: gates with a direction in common, neurons of many lengths."""
    tiny = Tiny()
    width, neurons = tiny.hidden, tiny.intermediate
    tensors: dict[str, Tensor] = {}
    for layer in range(tiny.layers):
        for expert in range(tiny.experts):
            generator = torch.Generator().manual_seed(10 * layer + expert)
            gate, up = (torch.randn(neurons, width, generator=generator) * width**-0.5 for _ in range(2))
            down = torch.randn(width, neurons, generator=generator) * neurons**-0.5
            length = (0.5 * torch.randn(neurons, 1, generator=generator)).exp()
            gate += torch.randn(width, generator=generator) * width**-0.5
            prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
            tensors[f"{prefix}w1.weight"] = gate * length
            tensors[f"{prefix}w2.weight"] = down * length.T
            tensors[f"{prefix}w3.weight"] = up * length
    return tensors


def _trained_attention() -> dict[str, Tensor]:
    """Values whose rows are of many lengths, in layer 1 of a mixtral."""
    name = "model.layers.1.self_attn.v_proj.weight"
    rows = tiny_tensors("mixtral", Tiny())[name]
    lengths = torch.linspace(-1.0, 1.0, len(rows))[:, None].exp()
    return {name: rows * lengths}


def _trained_heads(order: str) -> dict[str, Tensor]:
    """Queries and keys of a llama of `_MANY_HEADS` in that order, in all layers."""
    tiny, tensors = _MANY_HEADS, dict[str, Tensor]()
    for layer in range(tiny.layers):
        queries, keys = trained_heads(
            order,
            heads=tiny.heads,
            kv_heads=tiny.kv_heads,
            width=tiny.head_dim,
            channels=tiny.hidden,
            seed=layer,
        )
        prefix = f"model.layers.{layer}.self_attn."
        tensors[f"{prefix}q_proj.weight"] = queries.flatten(0, 1) * tiny.hidden**-0.5
        tensors[f"{prefix}k_proj.weight"] = keys.flatten(0, 1) * tiny.hidden**-0.5
    return tensors


def _reorder_heads(order: str, width: int, layer: int | None = None) -> Callable[[Path], object]:
    """The rows of queries and keys brought into that order, in one layer or in all."""

    def reorder(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            wanted = layer is None or f".{layer}." in name
            if wanted and name.endswith(("q_proj.weight", "k_proj.weight")):
                tensors[name] = into(order, tensor, width)

    return edit_tensors(reorder)


def _without_experts(*numbers: int) -> Callable[[Path], object]:
    def take_out(tensors: dict[str, Tensor]) -> None:
        for number in numbers:
            for part in ("w1", "w2", "w3"):
                del tensors[f"{_EXPERT}{number}.{part}.weight"]

    return edit_tensors(take_out)


def _same_experts(tensors: dict[str, Tensor]) -> None:
    for part in ("w1", "w2", "w3"):
        tensors[f"{_EXPERT}3.{part}.weight"] = tensors[f"{_EXPERT}1.{part}.weight"].clone()


def _exchange_experts(tensors: dict[str, Tensor], *parts: str) -> None:
    """These projections of the experts 0 and 2, each under the other's name."""
    for part in parts:
        one, other = (f"{_EXPERT}{number}.{part}.weight" for number in (0, 2))
        tensors[one], tensors[other] = tensors[other], tensors[one]


def _random_experts(*numbers: int) -> Callable[[Path], object]:
    def fill(tensors: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(5)
        for number in numbers:
            for part in ("w1", "w2", "w3"):
                name = f"{_EXPERT}{number}.{part}.weight"
                tensors[name] = torch.randn(tensors[name].shape, generator=generator) * 0.02

    return edit_tensors(fill)


def in_float8(weight: Tensor, block: int = 16) -> tuple[Tensor, Tensor]:
    """Codes in e4m3 and one scale for each block, which the codes are to be multiplied by."""
    rows, columns = weight.shape
    blocks = weight.unflatten(0, (rows // block, block)).unflatten(2, (columns // block, block))
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(rows, columns), scales


_DOWN = "model.layers.1.mlp.down_proj.weight"
_FLOAT8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}


def _in_float8() -> dict[str, Tensor]:
    """One weight of a llama stored in 8 bits, with its scales."""
    codes, scales = in_float8(tiny_tensors("llama", Tiny())[_DOWN])
    return {_DOWN: codes, f"{_DOWN}_scale_inv": scales}


def _as_codes(tensors: dict[str, Tensor]) -> None:
    """The codes of a weight in a tensor of bfloat16, without the scales."""
    tensors[_DOWN] = in_float8(tensors[_DOWN])[0].to(torch.bfloat16)


def _as_whole_numbers(tensors: dict[str, Tensor]) -> None:
    tensors[_DOWN] = (tensors[_DOWN] / tensors[_DOWN].abs().max() * 127).round()


def _loud_neuron(tensors: dict[str, Tensor]) -> None:
    """One neuron three hundred times as loud in gate and in up, which down takes back."""
    tensors[_GATE][17] *= 300
    tensors[_UP][17] *= 300
    tensors[_DOWN][:, 17] /= 90_000


_NORM = "model.layers.1.input_layernorm.weight"


def _half_gains(tensors: dict[str, Tensor]) -> None:
    tensors.update({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})


PLANTS: Mapping[str, tuple[Plant, ...]] = {
    "container/truncated": (
        Plant("cut", lambda directory: _cut(directory / SINGLE, 10), (SINGLE, "10 fewer", "model.norm.weight")),
        Plant("cut shard", lambda directory: _cut(directory / SHARDS[1], 1), (SHARDS[1], "1 fewer"), shards=3),
        Plant("header cut", lambda directory: _keep(directory / SHARDS[1], 100), (SHARDS[1], "header"), shards=3),
    ),
    "container/trailing-bytes": (
        Plant("appended", edit_header(lambda header: None, lambda data: data + bytes(8)), (SINGLE, "8 bytes")),
    ),
    "container/overlap": (Plant("aliased", edit_header(_overlap), ("k_proj", "v_proj")),),
    "container/hole": (
        Plant("gap", edit_header(_hole, _hole_data), (SINGLE, "model.layers.1.self_attn.v_proj.weight")),
    ),
    "container/header": (
        Plant("shape", edit_header(lambda header: header[_KEYS].update(shape=[7, 7])), (_KEYS, "[7, 7]")),
        Plant("dtype", edit_header(lambda header: header[_KEYS].update(dtype="BF17")), (_KEYS, "BF17")),
        Plant("index", replace_file(INDEX, b"{"), (INDEX,), shards=3),
        Plant("config", replace_file("config.json", b'{"model_type": '), ("config.json",)),
    ),
    "container/not-safetensors": (
        Plant("pickle", replace_file(SHARDS[2], pickle.dumps({"a": 1})), (SHARDS[2], "pickle"), shards=3),
        Plant(
            "pointer",
            replace_file(SHARDS[2], b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
            (SHARDS[2], "git-lfs"),
            shards=3,
        ),
        Plant("nothing", replace_file(SINGLE, b""), (SINGLE, "empty")),
        Plant("link", link_nowhere(SINGLE), (SINGLE, "a link that leads nowhere")),
    ),
    "index/missing-shard": (
        Plant("deleted", lambda directory: (directory / SHARDS[1]).unlink(), (SHARDS[1],), shards=3),
        Plant(
            "stale",
            edit_index(
                lambda index: index["weight_map"].update({"model.layers.9.x": "model-00004-of-00004.safetensors"})
            ),
            ("model-00004-of-00004.safetensors", "model.layers.9.x"),
            shards=3,
        ),
        Plant("link", link_nowhere(SHARDS[1]), (SHARDS[1], "a link that leads nowhere"), shards=3),
        Plant("links", link_nowhere(*SHARDS), ("3 of 3 shards", "links that lead nowhere"), shards=3),
    ),
    "index/missing-tensor": (
        Plant(
            "added",
            edit_index(lambda index: index["weight_map"].update({"mtp.fc.weight": SHARDS[2]})),
            ("mtp.fc.weight", SHARDS[2]),
            shards=3,
        ),
    ),
    "index/unlisted-tensor": (
        Plant(
            "removed",
            edit_index(lambda index: index["weight_map"].pop(_KEYS)),
            (_KEYS,),
            shards=3,
            level="warning",
            certainty="conflict",
        ),
        Plant(
            "no index",
            lambda directory: (directory / INDEX).unlink(),
            ("there is no index", INDEX, SHARDS[0]),
            shards=3,
            level="warning",
            certainty="conflict",
        ),
        Plant(
            "nothing listed",
            edit_index(lambda index: index["weight_map"].clear()),
            (INDEX, "lists no tensor", "21 tensors"),
            shards=3,
            level="warning",
            certainty="conflict",
        ),
        Plant(
            "a shard forgotten",
            edit_index(
                lambda index: index.update(
                    weight_map={name: file for name, file in index["weight_map"].items() if file != SHARDS[1]}
                )
            ),
            (SHARDS[1], "does not list"),
            shards=3,
            level="warning",
            certainty="conflict",
        ),
        Plant(
            "beside",
            lambda directory: save_file({"adapter.a": torch.ones(3)}, directory / "adapter.safetensors"),
            ("adapter.safetensors", "adapter.a"),
            level="note",
            certainty="risk",
        ),
    ),
    "index/wrong-shard": (
        Plant(
            "moved",
            edit_index(lambda index: index["weight_map"].update({_EMBEDDING: SHARDS[2]})),
            (_EMBEDDING, SHARDS[0], SHARDS[2]),
            shards=3,
        ),
    ),
    "index/total-size": (
        Plant(
            "off",
            edit_index(lambda index: index["metadata"].update(total_size=index["metadata"]["total_size"] + 1)),
            (INDEX,),
            shards=3,
            level="note",
            certainty="risk",
        ),
    ),
    "index/two-weight-sets": (
        Plant("both", _both_sets, (SINGLE, SHARDS[0]), shards=3, level="note", certainty="risk"),
    ),
    "config/shape": (
        Plant("width", edit_json("config.json", vocab_size=97), (_EMBEDDING, "96", "97", "vocab_size")),
        Plant("layers", edit_json("config.json", num_hidden_layers=3), ("num_hidden_layers", "layer 2"), layer=2),
        Plant("more layers", edit_json("config.json", num_hidden_layers=1), ("num_hidden_layers", "layer 1"), layer=1),
        Plant(
            "transposed",
            edit_tensors(lambda tensors: tensors.update({_UP: tensors[_UP].T.contiguous()})),
            (_UP, "[48, 112]", "[112, 48]"),
            layer=1,
        ),
        Plant("type", edit_json("config.json", hidden_size="48"), ("hidden_size", "'48'")),
        Plant("heads", edit_json("config.json", num_key_value_heads=4), ("k_proj.weight", "kv_heads 4", "[64, 48]")),
    ),
    "config/unknown-family": (
        Plant("type", edit_json("config.json", model_type="llamax"), ("llamax", "glassblock families")),
        Plant("contradiction", edit_json("config.json", model_type="gpt2"), ("gpt2", "LlamaForCausalLM")),
        Plant("no config", lambda directory: (directory / "config.json").unlink(), ("config.json",)),
        Plant(
            "other names",
            edit_json("config.json", model_type="gpt2", architectures=["GPT2LMHeadModel"]),
            ("gpt2", "c_proj"),
        ),
        Plant(
            "wrapped",
            edit_tensors(_wrapped),
            ("every name begins with `module.`", "without it they are those of llama"),
        ),
    ),
    "config/tied-head": (
        Plant("no head", drop("lm_head.weight"), ("lm_head.weight", "tie_word_embeddings is false")),
        Plant(
            "two heads",
            edit_json("config.json", tie_word_embeddings=True),
            ("lm_head.weight", "differs"),
            level="warning",
            certainty="conflict",
        ),
        Plant(
            "two flags",
            _two_flags,
            ("tie_word_embeddings", "text_config"),
            level="warning",
            certainty="conflict",
        ),
        Plant(
            "a copy",
            _copied_head,
            ("lm_head.weight", "redundant"),
            level="note",
        ),
    ),
    "config/eps-conflict": (
        Plant(
            "against",
            lambda directory: None,
            ("1e-05", "1e-06", "other.json", "attn_in, ffn_in, final"),
            against={"rms_norm_eps": 1e-6},
            certainty="conflict",
        ),
        Plant(
            "params",
            edit_json("params.json", norm_eps=1e-6),
            ("1e-05", "1e-06", "params.json: norm_eps"),
            level="warning",
            certainty="conflict",
        ),
        Plant(
            "levels",
            _two_epsilons,
            ("text_config.rms_norm_eps", "0.001", "1e-05"),
            level="warning",
            certainty="conflict",
        ),
    ),
    "config/activation-conflict": (
        Plant(
            "against",
            lambda directory: None,
            ("the activation is silu", "gelu (other.json: hidden_act)"),
            against={"rms_norm_eps": 1e-5, "hidden_act": "gelu"},
            certainty="conflict",
        ),
        Plant(
            "legacy",
            edit_json("config.json", hidden_act="gelu"),
            ('config.json: hidden_act is "gelu"', "takes for gelu_pytorch_tanh", "differ by 0.00047 at most"),
            family="gemma",
            level="warning",
            certainty="conflict",
        ),
    ),
    "config/dtype-conflict": (
        Plant(
            "against",
            lambda directory: None,
            ("float32", "float16 (other.json: dtype)", "65,504"),
            against={"rms_norm_eps": 1e-5, "dtype": "float16"},
            certainty="conflict",
        ),
        Plant(
            "stored",
            edit_tensors(lambda tensors: tensors.update({name: one.half() for name, one in tensors.items()})),
            ("bfloat16 (config.json: dtype)", "stored as float16", "65,504"),
            config={"dtype": "bfloat16"},
            level="note",
            certainty="conflict",
        ),
    ),
    "norm/kind-conflict": (
        Plant(
            "against",
            lambda directory: None,
            ("attn_in, ffn_in, final", "rms", "layer (other.json: normalization)"),
            against={"layernorm_epsilon": 1e-5, "normalization": "LayerNorm"},
            certainty="conflict",
        ),
    ),
    "norm/offset": (
        Plant(
            "reference",
            edit_tensors(lambda tensors: tensors["model.layers.1.input_layernorm.weight"].add_(1)),
            ("model.layers.1.input_layernorm.weight", "+1 of the reference's"),
            layer=1,
            reference=True,
        ),
        Plant(
            "against",
            lambda directory: None,
            ("attn_in, ffn_in, final", "other.json: layernorm_zero_centered_gamma"),
            against={"layernorm_epsilon": 1e-5, "layernorm_zero_centered_gamma": True},
            certainty="conflict",
        ),
        Plant(
            "folded",
            edit_tensors(lambda tensors: [tensors[name].add_(1) for name in tensors if "norm" in name]),
            ("the family adds 1 to its gains", "the 1 may be in them already"),
            family="gemma3",
            level="warning",
            certainty="statistical",
        ),
    ),
    "tensor/transposed": (
        Plant(
            "reference",
            edit_tensors(
                lambda tensors: tensors.update(
                    {
                        "model.layers.1.mlp.down_proj.weight": tensors[
                            "model.layers.1.mlp.down_proj.weight"
                        ].T.contiguous()
                    }
                )
            ),
            ("model.layers.1.mlp.down_proj.weight", "axes are exchanged"),
            tiny=Tiny(intermediate=48),
            layer=1,
            reference=True,
        ),
    ),
    "tensor/untrained": (
        Plant(
            "reference",
            put(
                "model.layers.1.self_attn.v_proj.weight",
                torch.randn(32, 48, generator=torch.Generator().manual_seed(5)),
            ),
            ("model.layers.1.self_attn.v_proj.weight", "cosine"),
            layer=1,
            reference=True,
        ),
    ),
    "config/eps-defaulted": (
        Plant(
            "silent",
            edit_json("config.json", rms_norm_eps=...),
            ("rms_norm_eps", "1e-06", "family llama"),
            level="note",
            certainty="risk",
        ),
    ),
    "tensor/non-finite": (
        Plant("nan", edit_entry(_KEYS, (3, 5), float("nan")), (_KEYS, "[3, 5]"), layer=1),
        Plant("infinity", edit_entry(_GATE, (111, 47), float("-inf")), (_GATE, "[111, 47]"), layer=1),
        Plant("head", edit_entry("lm_head.weight", (95, 0), float("nan")), ("lm_head.weight", "[95, 0]")),
    ),
    "tensor/empty": (
        Plant("one", put(_KEYS, torch.empty(0)), (_KEYS,), layer=1),
        Plant("a third", edit_tensors(_empty_third), ("8 of 21 tensors",)),
        Plant("a needed one", put(_UP, torch.empty(0, 48)), (_UP,), layer=1),
    ),
    "tensor/all-zero": (
        Plant("matrix", edit_entry(_KEYS, (slice(None),), 0.0), (_KEYS,), layer=1, level="warning", certainty="risk"),
        Plant(
            "gain",
            edit_entry("model.norm.weight", (slice(None),), 0.0),
            ("model.norm.weight",),
            level="warning",
            certainty="risk",
        ),
        Plant(
            "half of a fused one",
            edit_entry("model.layers.1.mlp.gate_up_proj.weight", (slice(112, None),), 0.0),
            ("layer 1: up in model.layers.1.mlp.gate_up_proj.weight is zero throughout",),
            family="phi3",
            layer=1,
            level="warning",
            certainty="risk",
        ),
    ),
    "tensor/duplicate": (
        Plant(
            "other content",
            put(_EMBEDDING, torch.ones(96, 48), SHARDS[2]),
            (_EMBEDDING, SHARDS[0], SHARDS[2]),
            shards=3,
        ),
        Plant(
            "copy",
            lambda directory: put(_EMBEDDING, load_file(directory / SHARDS[0])[_EMBEDDING], SHARDS[2])(directory),
            (_EMBEDDING, "byte for byte"),
            shards=3,
            level="note",
        ),
        Plant(
            "gate as up",
            edit_tensors(lambda tensors: tensors.update({_UP: tensors[_GATE].clone()})),
            ("layer 1", _GATE, _UP, "equal byte for byte", "differ elsewhere"),
            layer=1,
        ),
        Plant(
            "values as keys",
            edit_tensors(lambda tensors: tensors.update({_KEYS: tensors[_KEYS.replace("k_proj", "v_proj")].clone()})),
            ("layer 1", _KEYS, "v_proj", "equal byte for byte"),
            layer=1,
        ),
        Plant(
            "one bias for two",
            edit_tensors(
                lambda tensors: tensors.update(
                    {
                        f"model.layers.1.self_attn.{name}_proj.bias": torch.linspace(
                            -1, 1, len(tensors["model.layers.1.self_attn.k_proj.bias"])
                        )
                        for name in ("k", "v")
                    }
                )
            ),
            ("layer 1", "k_proj.bias", "v_proj.bias"),
            family="qwen2",
            layer=1,
        ),
        Plant(
            "gate as up of an expert",
            edit_tensors(
                lambda tensors: tensors.update({f"{_EXPERT}2.w3.weight": tensors[f"{_EXPERT}2.w1.weight"].clone()})
            ),
            ("layer 1", f"{_EXPERT}2.w1.weight", f"{_EXPERT}2.w3.weight"),
            family="mixtral",
            tensors=trained_mixture(),
            layer=1,
        ),
        Plant(
            "one half twice",
            edit_tensors(_same_halves),
            ("layer 1", "gate and up in model.layers.1.mlp.gate_up_proj.weight are equal number for number"),
            family="phi3",
            layer=1,
        ),
        Plant(
            "layer of another",
            edit_tensors(lambda tensors: copy_layer(tensors, 1, 2)),
            ("layers 1 and 2 are equal byte for byte in every tensor",),
            tiny=Tiny(layers=3),
            level="note",
            certainty="risk",
        ),
    ),
    "ffn/gate-up-swapped": (
        Plant("names", rename(_GATE, _UP), (_GATE, _UP, "p <= 1e-"), layer=1, certainty="statistical"),
    ),
    "ffn/fused-order": (
        Plant(
            "halves",
            edit_tensors(_swap_halves),
            ("model.layers.1.mlp.gate_up_proj.weight", "p <= 1e-"),
            family="phi3",
            layer=1,
            certainty="statistical",
        ),
    ),
    "ffn/fused-layout": tuple(
        Plant(
            words,
            _laid(groups),
            ("model.layers.1.mlp.gate_up_proj.weight", words, "[gate | up]", "p <= 1e-"),
            family="phi3",
            layer=1,
            certainty="statistical",
        )
        for groups, words in (
            (2, "2 blocks of"),
            (4, "4 blocks of"),
            (Tiny().intermediate, "rows of gate and up in turn"),
        )
    ),
    "ffn/mispaired-neurons": tuple(
        Plant(
            f"{'_'.join(names)}_permuted",
            _permuted(*names),
            (f"layer 1: the neurons of {words} do not belong together",),
            tiny=_PAIRED,
            tensors=_paired_networks(_PAIRED.layers, _PAIRED.hidden, _PAIRED.intermediate),
            layer=1,
            level="warning",
            certainty="statistical",
        )
        for names, words in (
            (("down",), "model.layers.1.mlp.up_proj.weight and model.layers.1.mlp.down_proj.weight"),
            (("gate",), "model.layers.1.mlp.gate_proj.weight and model.layers.1.mlp.up_proj.weight"),
            (
                ("up",),
                "model.layers.1.mlp.gate_proj.weight and model.layers.1.mlp.up_proj.weight and "
                "model.layers.1.mlp.down_proj.weight",
            ),
        )
    ),
    "ffn/missing-tensor": (
        Plant("weight", drop(_UP), (_UP,), layer=1),
        Plant("embedding", drop(_EMBEDDING), (_EMBEDDING,)),
    ),
    "ffn/missing-bias": (
        Plant(
            "declared",
            drop("model.layers.1.mlp.up_proj.bias"),
            ("model.layers.1.mlp.up_proj.bias",),
            config={"mlp_bias": True},
            tensors=_BIASES,
            layer=1,
        ),
    ),
    "ffn/undeclared-bias": (
        Plant(
            "bias",
            put("model.layers.1.mlp.up_proj.bias", torch.ones(112)),
            ("up_proj.bias", "no bias is declared"),
            layer=1,
        ),
    ),
    "norm/role": (
        Plant("gain", drop("model.layers.1.post_attention_layernorm.weight"), ("post_attention_layernorm",), layer=1),
        Plant(
            "one of four",
            drop("model.layers.1.pre_feedforward_layernorm.weight"),
            ("pre_feedforward_layernorm", "gemma3"),
            family="gemma3",
            layer=1,
        ),
        Plant(
            "one twice",
            edit_tensors(
                lambda tensors: tensors.update(
                    {
                        "model.layers.1.pre_feedforward_layernorm.weight": tensors[
                            "model.layers.1.post_attention_layernorm.weight"
                        ].clone()
                    }
                )
            ),
            ("layer 1", "pre_feedforward_layernorm", "post_attention_layernorm", "byte for byte"),
            family="gemma3",
            layer=1,
            level="warning",
            certainty="statistical",
        ),
        Plant(
            "zeros in all layers",
            edit_tensors(
                lambda tensors: [tensors[name].zero_() for name in tensors if "pre_feedforward_layernorm" in name]
            ),
            ("pre_feedforward_layernorm", "every gain is 0 in all layers"),
            family="gemma3",
            level="warning",
            certainty="statistical",
        ),
    ),
    "norm/final-missing": (
        Plant("gain", drop("model.norm.weight"), ("model.norm.weight",)),
        Plant(
            "never written",
            put("model.norm.weight", torch.ones(48)),
            ("model.norm.weight: every gain is 1", "4 of 4 norms of the layers"),
            level="warning",
            certainty="statistical",
        ),
        Plant(
            "never written, with 1 added",
            put("model.norm.weight", torch.zeros(48)),
            ("model.norm.weight: every gain is 0", "norms of the layers"),
            family="gemma",
            level="warning",
            certainty="statistical",
        ),
    ),
    "ffn/dead-neurons": tuple(
        Plant(
            place,
            edit_entry(name, at, 0.0),
            ("2 of 112 neurons", f"2 in {place}", "the first is 40"),
            layer=1,
            level="note",
            certainty="risk",
        )
        for place, name, at in (
            ("gate", _GATE, (slice(40, 42),)),
            ("up", _UP, (slice(40, 42),)),
            ("down", _DOWN, (slice(None), slice(40, 42))),
        )
    ),
    "norm/precision": (
        Plant(
            "added in bfloat16",
            edit_tensors(_half_gains),
            ("input_layernorm", "where the 1 is added in bfloat16"),
            family="gemma3",
            level="note",
            certainty="risk",
        ),
        Plant(
            "rounded on the way",
            edit_tensors(lambda tensors: tensors.update({_NORM: tensors[_NORM].to(torch.bfloat16).to(torch.float32)})),
            (_NORM, "no number has a bit that bfloat16 lacks"),
            layer=1,
            level="note",
            certainty="risk",
        ),
    ),
    "moe/experts-missing": (
        Plant(
            "one",
            _without_experts(2),
            ("layer 1: expert 2 has no tensor", "3 others have", "a row for each of 4"),
            family="mixtral",
            tensors=trained_mixture(),
            layer=1,
        ),
        Plant(
            "the last two",
            _without_experts(2, 3),
            ("layer 1: experts 2 to 3 have no tensor", "2 others have"),
            family="mixtral",
            tensors=trained_mixture(),
            layer=1,
        ),
    ),
    "moe/experts-duplicated": (
        Plant(
            "copied",
            edit_tensors(_same_experts),
            ("layer 1: the experts 1, 3 are equal byte for byte in all their weights",),
            family="mixtral",
            tensors=trained_mixture(),
            layer=1,
        ),
        Plant(
            "one projection",
            edit_tensors(
                lambda tensors: tensors.update({f"{_EXPERT}0.w1.weight": tensors[f"{_EXPERT}2.w1.weight"].clone()})
            ),
            ("layer 1: the experts 0, 2 are equal byte for byte in gate",),
            family="mixtral",
            tensors=trained_mixture(),
            layer=1,
        ),
    ),
    "moe/experts-untrained": (
        Plant(
            "one",
            _random_experts(2),
            ("layer 1: expert 2 has neurons", "its other experts"),
            family="mixtral",
            tensors=trained_mixture(),
            layer=1,
            level="warning",
            certainty="statistical",
        ),
        Plant(
            "all",
            _random_experts(0, 1, 2, 3),
            ("layer 1: 4 of 4 experts have neurons", "v_proj"),
            family="mixtral",
            tensors=trained_mixture() | _trained_attention(),
            layer=1,
            level="warning",
            certainty="statistical",
        ),
    ),
    "moe/experts-exchanged": (
        Plant(
            "without their rows",
            edit_tensors(lambda tensors: _exchange_experts(tensors, "w1", "w2", "w3")),
            ("experts.0.w1.weight", "the experts 0, 2 lie under other numbers, and the rows of the router do not"),
            family="mixtral",
            tensors=trained_mixture(),
            layer=1,
            reference=True,
        ),
    ),
    "attention/rotary-order": (
        Plant(
            "pairs for halves, beside the original",
            _reorder_heads("pairs", 16, layer=1),
            ("q_proj.weight and", "the rows of its heads lie in pairs, where halves are turned together"),
            layer=1,
            reference=True,
        ),
        Plant(
            "pairs for halves",
            _reorder_heads("pairs", 32),
            ("trained as pairs of a head, 2i and 2i + 1", "llama turns halves, i and i + 16", "over 8 layers"),
            tiny=_MANY_HEADS,
            tensors=_trained_heads("halves"),
            certainty="statistical",
        ),
        Plant(
            "halves for pairs",
            _reorder_heads("halves", 32),
            ("trained as halves of a head", "cohere turns pairs, 2i and 2i + 1"),
            family="cohere",
            tiny=_MANY_HEADS,
            tensors=_trained_heads("pairs"),
            certainty="statistical",
        ),
    ),
    "quant/scale-missing": (
        Plant(
            "dropped",
            drop(f"{_DOWN}_scale_inv"),
            (f"{_DOWN}_scale_inv is missing",),
            config=_FLOAT8,
            tensors=_in_float8(),
            layer=1,
        ),
        Plant(
            "renamed",
            edit_tensors(lambda tensors: tensors.update({f"{_DOWN}_s": tensors.pop(f"{_DOWN}_scale_inv")})),
            (f"{_DOWN}_scale_inv is missing",),
            config=_FLOAT8,
            tensors=_in_float8(),
            layer=1,
        ),
        Plant(
            "another grid",
            put(f"{_DOWN}_scale_inv", torch.ones(7, 3)),
            (f"{_DOWN}_scale_inv has the shape [7, 3] where [3, 7] is expected",),
            config=_FLOAT8,
            tensors=_in_float8(),
            layer=1,
        ),
        Plant(
            "no config",
            lambda directory: (
                drop(f"{_DOWN}_scale_inv")(directory),
                edit_json("config.json", quantization_config=...)(directory),
            ),
            (_DOWN, "no scale beside it", "448"),
            config=_FLOAT8,
            tensors=_in_float8(),
            layer=1,
            level="warning",
            certainty="statistical",
        ),
        Plant(
            "float8 in one layer",
            edit_tensors(lambda tensors: tensors.update({_DOWN: tensors[_DOWN].to(torch.float8_e4m3fn)})),
            (_DOWN, "no scale beside it", "the same weight is F32 in 2 other layers"),
            tiny=Tiny(layers=3),
            layer=1,
        ),
        Plant(
            "integers in one layer",
            edit_tensors(lambda tensors: tensors.update({_DOWN: (100 * tensors[_DOWN]).to(torch.int8)})),
            (_DOWN, "stored as I8", "no scale beside it", "the same weight is F32 in the other layer"),
            layer=1,
        ),
        Plant(
            "integers of attention",
            edit_tensors(lambda tensors: tensors.update({_KEYS: (100 * tensors[_KEYS]).to(torch.uint8)})),
            (_KEYS, "stored as U8", "declares no quantisation"),
            layer=1,
        ),
        Plant(
            "integers beside an unknown scale",
            edit_tensors(
                lambda tensors: tensors.update(
                    {_DOWN: (100 * tensors[_DOWN]).to(torch.int8), f"{_DOWN}_s": torch.ones(48, 1)}
                )
            ),
            (_DOWN, "stored as I8", f"beside it lies {_DOWN}_s"),
            layer=1,
            level="warning",
            certainty="statistical",
        ),
    ),
    "quant/scale-unapplied": (
        Plant(
            "float8",
            edit_tensors(_as_codes),
            (_DOWN, "numbers of the format e4m3 up to 448"),
            layer=1,
            level="warning",
            certainty="statistical",
        ),
        Plant(
            "int8",
            edit_tensors(_as_whole_numbers),
            (_DOWN, "whole numbers up to 127"),
            layer=1,
            level="warning",
            certainty="statistical",
        ),
    ),
    "range/fp16-overflow": (
        Plant(
            "a loud neuron",
            edit_tensors(_loud_neuron),
            ("layer 1: neuron 17 reaches",),
            layer=1,
            level="note",
            certainty="risk",
        ),
        Plant(
            "a large number",
            edit_entry(_KEYS, (3, 5), 1e5),
            (_KEYS, "become infinite in float16"),
            layer=1,
            level="note",
            certainty="risk",
        ),
    ),
    "range/eps-underflow": (
        Plant(
            "declared",
            edit_json("config.json", dtype="float16", rms_norm_eps=1e-8),
            ("attn_in, ffn_in, final", "1e-08", "0 in float16"),
            level="note",
            certainty="risk",
        ),
        *(
            Plant(
                f"epsilon {value:g}",
                edit_json("config.json", rms_norm_eps=value),
                ("attn_in, ffn_in, final", f"is {value:g} (config.json: rms_norm_eps)"),
                level="note",
                certainty="risk",
            )
            for value in (0.0, 0.1, 100000.0)
        ),
    ),
}
