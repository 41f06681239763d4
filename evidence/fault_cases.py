"""Faults that were reported in public, each rebuilt in a checkpoint: what is broken, and what an audit has to say.

A case edits a model in memory: its tensors by name and its config. Then it is written, and may be broken as a file.
"""

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record import ROOT
from safetensors.torch import load_file
from torch import Tensor

sys.path.append(str(ROOT / "tests"))
sys.path.append(str(ROOT / "tools"))
makers: Any = importlib.import_module("makers")
plants: Any = importlib.import_module("plants")
rotary_heads: Any = importlib.import_module("rotary_heads")


@dataclass
class Model:
    """Tensors and config, to be edited in place."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    shards: int = 1
    files: list[Callable[[Path], object]] = field(default_factory=list)

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        kept = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        makers.write_weights(directory, kept, shards=self.shards)
        for edit in self.files:
            edit(directory)

    def layer(self, number: int) -> str:
        return f"model.layers.{number}."

    @property
    def layers(self) -> int:
        return self.config["num_hidden_layers"]


@dataclass(frozen=True)
class Expect:
    """A finding: its rule, level and certainty, and the layers it is told for (None: of no one layer)."""

    rule: str
    level: str
    certainty: str
    layers: tuple[int | None, ...] = (None,)


@dataclass(frozen=True)
class Open:
    """A question that the files alone leave open: an undecidable entry of that rule, with what would decide."""

    rule: str
    would_decide: str


@dataclass(frozen=True)
class Refused:
    """No checkpoint at all, so no verdict: the words of the refusal."""

    words: str


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        report: R1 to R21, or the number of a kind that no report stands for; a plus for what is of no such kind.
        label: What is broken.
        bases: Names of `BASES` it is rebuilt on.
        change: How, in place.
        expect: What an audit must find, leave open or refuse; nothing for a case that must be silent.
        against: Another engine's config, asked about.
        reference: Whether the healthy model is given as the reference.
        whole: Whether the other config is the model's own but for what `against` says.
    """

    report: str
    label: str
    bases: tuple[str, ...]
    change: Callable[[Model], object]
    expect: Expect | Open | Refused | None
    against: Mapping[str, Any] | None = None
    reference: bool = False
    whole: bool = False


BOTH = ("tiny-llama", "SmolLM2")


def tiny_llama() -> Model:
    return _read(ROOT / "examples" / "tiny-llama")


def smollm2() -> Model:
    return _read(importlib.import_module("smollm2").directories().single)


def trained(kind: str) -> Callable[[], Model]:
    return lambda: _read(ROOT / "tests" / "data" / f"trained-{kind}")


def made(family: str, **config: Any) -> Callable[[], Model]:
    """A tiny model with the family's names, of random numbers."""

    def make() -> Model:
        tiny = makers.sizes_for(family, makers.Tiny())
        return Model(makers.tiny_tensors(family, tiny), makers.tiny_config(family, tiny) | config)

    return make


def with_biases() -> Model:
    """tiny-llama with a bias on every projection of its networks."""
    model, draw = tiny_llama(), torch.Generator().manual_seed(0)
    model.config["mlp_bias"] = True
    for layer in range(model.layers):
        for part in ("gate", "up", "down"):
            weight = model.tensors[f"{model.layer(layer)}mlp.{part}_proj.weight"]
            bias = torch.randn(len(weight), generator=draw) / 10
            model.tensors[f"{model.layer(layer)}mlp.{part}_proj.bias"] = bias
    return model


def square() -> Model:
    """tiny-llama with 64 of its neurons, as many as it has channels."""
    model = tiny_llama()
    model.config["intermediate_size"] = 64
    for layer in range(model.layers):
        prefix = f"{model.layer(layer)}mlp."
        for part in ("gate", "up"):
            model.tensors[f"{prefix}{part}_proj.weight"] = model.tensors[f"{prefix}{part}_proj.weight"][:64]
        model.tensors[f"{prefix}down_proj.weight"] = model.tensors[f"{prefix}down_proj.weight"][:, :64]
    return model


def square_smollm2() -> Model:
    """SmolLM2 with 576 of its 1,536 neurons, as many as it has channels."""
    model = smollm2()
    model.config["intermediate_size"] = width = model.config["hidden_size"]
    for layer in range(model.layers):
        prefix, draw = f"{model.layer(layer)}mlp.", torch.Generator().manual_seed(layer)
        kept = torch.randperm(len(model.tensors[f"{prefix}up_proj.weight"]), generator=draw)[:width].sort().values
        for part in ("gate", "up"):
            model.tensors[f"{prefix}{part}_proj.weight"] = model.tensors[f"{prefix}{part}_proj.weight"][kept]
        model.tensors[f"{prefix}down_proj.weight"] = model.tensors[f"{prefix}down_proj.weight"][:, kept]
    return model


def square_fused() -> Model:
    """The trained fused model with 32 of its neurons, so that gate over up is as high as it is wide."""
    model = trained("fused")()
    model.config["intermediate_size"] = 32
    for layer in range(model.layers):
        prefix = f"{model.layer(layer)}mlp."
        halves = [half[:32] for half in model.tensors[f"{prefix}gate_up_proj.weight"].chunk(2)]
        model.tensors[f"{prefix}gate_up_proj.weight"] = torch.cat(halves)
        model.tensors[f"{prefix}down_proj.weight"] = model.tensors[f"{prefix}down_proj.weight"][:, :32]
    return model


def float8(make: Callable[[], Model]) -> Callable[[], Model]:
    """A model whose networks are stored in e4m3 with a scale for each block of 16 by 16."""

    def stored() -> Model:
        model = make()
        for name in [name for name in model.tensors if ".mlp." in name]:
            codes, scales = plants.in_float8(model.tensors[name].float())
            model.tensors |= {name: codes, f"{name}_scale_inv": scales}
        model.config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
        return model

    return stored


def _read(directory: Path) -> Model:
    return Model(load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text()))


BASES: Mapping[str, Callable[[], Model]] = {
    "tiny-llama": tiny_llama,
    "SmolLM2": smollm2,
    "fused": trained("fused"),
    "experts": trained("experts"),
    "gemma3": made("gemma3"),
    "biases": with_biases,
    "square": square,
    "square SmolLM2": square_smollm2,
    "square fused": square_fused,
    "tiny-llama in FP8": float8(tiny_llama),
    "SmolLM2 in FP8": float8(smollm2),
}
FLOAT8 = ("tiny-llama in FP8", "SmolLM2 in FP8")

LAYER = 2
"""The layer that is broken where one is; the trained tiny mixtures and fused models have two, and layer 1 is taken."""


def exchange(model: Model, one: str, other: str) -> None:
    model.tensors[one], model.tensors[other] = model.tensors[other], model.tensors[one]


def _swap(model: Model) -> None:
    prefix = f"{model.layer(LAYER)}mlp."
    exchange(model, f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")


_FUSED = "model.layers.1.mlp.gate_up_proj.weight"
_EXPERTS = "model.layers.1.block_sparse_moe.experts."


def _swap_halves(model: Model) -> None:
    model.tensors[_FUSED] = torch.cat(model.tensors[_FUSED].chunk(2)[::-1])


def _ranks(count: int) -> Callable[[Model], object]:
    def lay(model: Model) -> None:
        halves = [half.unflatten(0, (count, -1)) for half in model.tensors[_FUSED].chunk(2)]
        model.tensors[_FUSED] = torch.stack(halves, 1).flatten(0, 2)

    return lay


FLAT_ORDER = ("up", "gate", "down")
"""In which order a flat file holds the projections of a layer; its manifest says gate, up, down."""


def _read_by_manifest(model: Model) -> None:
    """What a loader makes of a flat file: bytes in the order in which they were written, names in the manifest's."""
    for layer in range(model.layers):
        written = [model.tensors[f"{model.layer(layer)}mlp.{part}_proj.weight"] for part in FLAT_ORDER]
        flat = torch.cat([weight.reshape(-1) for weight in written])
        claimed = [f"{model.layer(layer)}mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        shapes = [model.tensors[name].shape for name in claimed]
        pieces = flat.split([shape.numel() for shape in shapes])
        model.tensors.update({n: piece.view(shape) for n, piece, shape in zip(claimed, pieces, shapes, strict=True)})


def _flat(directory: Path) -> None:
    """The data alone, without a header, and a manifest beside it."""
    path = directory / plants.SINGLE
    raw = path.read_bytes()
    path.unlink()
    (directory / "model.bin").write_bytes(raw[8 + int.from_bytes(raw[:8], "little") :])
    (directory / "manifest.json").write_text(json.dumps({"write_order": ["gate", "up", "down"]}))


def _swap_biases(model: Model) -> None:
    prefix = f"{model.layer(LAYER)}mlp."
    exchange(model, f"{prefix}gate_proj.bias", f"{prefix}up_proj.bias")


def _add_to_gains(model: Model) -> None:
    for name in [name for name in model.tensors if name.endswith("norm.weight")]:
        model.tensors[name] = (model.tensors[name].float() + 1).to(model.tensors[name].dtype)


def _transpose(suffix: str) -> Callable[[Model], object]:
    def turn(model: Model) -> None:
        name = model.layer(LAYER) + suffix
        model.tensors[name] = model.tensors[name].T.contiguous()

    return turn


def _transpose_fused(model: Model) -> None:
    model.tensors[_FUSED] = model.tensors[_FUSED].T.contiguous()


def _noise(*experts: int) -> Callable[[Model], object]:
    def fill(model: Model) -> None:
        draw = torch.Generator().manual_seed(0)
        for expert in experts:
            for part in ("w1", "w2", "w3"):
                old = model.tensors[f"{_EXPERTS}{expert}.{part}.weight"]
                model.tensors[f"{_EXPERTS}{expert}.{part}.weight"] = (torch.randn(old.shape, generator=draw) * 0.02).to(
                    old.dtype
                )

    return fill


def _no_expert(model: Model) -> None:
    for part in ("w1", "w2", "w3"):
        del model.tensors[f"{_EXPERTS}2.{part}.weight"]


def _copied_expert(model: Model) -> None:
    for part in ("w1", "w2", "w3"):
        model.tensors[f"{_EXPERTS}3.{part}.weight"] = model.tensors[f"{_EXPERTS}0.{part}.weight"].clone()


def _permuted_experts(model: Model, *, router: bool = True) -> None:
    old = dict(model.tensors)
    for new, expert in enumerate((2, 0, 3, 1)):
        for part in ("w1", "w2", "w3"):
            model.tensors[f"{_EXPERTS}{new}.{part}.weight"] = old[f"{_EXPERTS}{expert}.{part}.weight"]
    if router:
        rows = "model.layers.1.block_sparse_moe.gate.weight"
        model.tensors[rows] = old[rows][[2, 0, 3, 1]]


def _in_pairs(model: Model, *, kinds: tuple[str, ...] = ("q_proj", "k_proj")) -> None:
    width = model.config["hidden_size"] // model.config["num_attention_heads"]
    for name, tensor in model.tensors.items():
        if name.endswith(tuple(f"{kind}.weight" for kind in kinds)):
            model.tensors[name] = rotary_heads.into("pairs", tensor, width)


def _exchange_down(model: Model) -> None:
    exchange(model, f"{_EXPERTS}0.w2.weight", f"{_EXPERTS}1.w2.weight")


def _expert_swap(model: Model) -> None:
    exchange(model, f"{_EXPERTS}2.w1.weight", f"{_EXPERTS}2.w3.weight")


def _no_scale(model: Model) -> None:
    for name in [name for name in model.tensors if name.endswith("gate_proj.weight_scale_inv")]:
        del model.tensors[name]


def _other_suffix(model: Model) -> None:
    for name in [name for name in model.tensors if name.endswith("gate_proj.weight_scale_inv")]:
        model.tensors[name.replace("_scale_inv", ".scaling")] = model.tensors.pop(name)


def _unscaled(model: Model) -> None:
    del model.config["quantization_config"]
    for name in [name for name in model.tensors if name.endswith("_scale_inv")]:
        del model.tensors[name]
    for name, tensor in model.tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            model.tensors[name] = tensor.to(torch.bfloat16)


def _same_norms(model: Model) -> None:
    for layer in range(model.layers):
        prefix = model.layer(layer)
        model.tensors[f"{prefix}pre_feedforward_layernorm.weight"] = model.tensors[
            f"{prefix}post_attention_layernorm.weight"
        ].clone()


def _zero_norms(model: Model) -> None:
    for layer in range(model.layers):
        model.tensors[f"{model.layer(layer)}pre_feedforward_layernorm.weight"].zero_()


def _swapped_norms(model: Model) -> None:
    prefix = model.layer(1)
    exchange(model, f"{prefix}pre_feedforward_layernorm.weight", f"{prefix}post_attention_layernorm.weight")


def _loud(model: Model) -> None:
    prefix = f"{model.layer(LAYER)}mlp."
    for part in ("gate", "up"):
        model.tensors[f"{prefix}{part}_proj.weight"][17] *= 300
    model.tensors[f"{prefix}down_proj.weight"][:, 17] /= 90_000


def _head(*, tied: bool, present: bool, equal: bool = True) -> Callable[[Model], object]:
    def change(model: Model) -> None:
        embedding = model.tensors["model.embed_tokens.weight"]
        model.config["tie_word_embeddings"] = tied
        if present:
            model.tensors["lm_head.weight"] = embedding.clone() if equal else embedding.flip(0).contiguous()

    return change


def _two_flags(model: Model) -> None:
    model.config["text_config"] = dict(model.config) | {"tie_word_embeddings": False}


def _sharded(edit: Callable[[Path], object]) -> Callable[[Model], object]:
    def change(model: Model) -> None:
        model.shards = 3
        model.files.append(edit)

    return change


def _file(edit: Callable[[Path], object]) -> Callable[[Model], object]:
    return lambda model: model.files.append(edit)


def _stale(index: dict[str, Any]) -> None:
    index["weight_map"] = {name: file.replace("of-00003", "of-00030") for name, file in index["weight_map"].items()}


def _drop(*endings: str) -> Callable[[Model], object]:
    def change(model: Model) -> None:
        for name in [name for name in model.tensors if name.endswith(endings)]:
            del model.tensors[name]

    return change


def _undeclared(value: float) -> Callable[[Model], object]:
    def change(model: Model) -> None:
        weight = model.tensors[f"{model.layer(LAYER)}mlp.up_proj.weight"]
        model.tensors[f"{model.layer(LAYER)}mlp.up_proj.bias"] = torch.full((len(weight),), value, dtype=weight.dtype)

    return change


def _placeholders(model: Model) -> None:
    for name in sorted(model.tensors)[::3]:
        model.tensors[name] = torch.empty(0, dtype=model.tensors[name].dtype)


def _padded(places: Callable[[int, int], Tensor], *, told: bool) -> Callable[[Model], object]:
    def change(model: Model) -> None:
        was = model.config["intermediate_size"]
        width = was + 32
        for layer in range(model.layers):
            for part in ("gate", "up", "down"):
                name = f"{model.layer(layer)}mlp.{part}_proj.weight"
                old = model.tensors[name]
                axis = int(part == "down")
                shape = list(old.shape)
                shape[axis] = width
                new = torch.zeros(shape, dtype=old.dtype)
                model.tensors[name] = new.index_copy(axis, places(was, width), old)
        if told:
            model.config["intermediate_size"] = width

    return change


def _at_the_end(was: int, _: int) -> Tensor:
    return torch.arange(was)


def _interleaved(_: int, width: int) -> Tensor:
    return torch.cat([torch.arange(0, 64, 2), torch.arange(64, width)])


def _set(**entries: Any) -> Callable[[Model], object]:
    return lambda model: model.config.update(entries)


def _nothing(_: Model) -> None:
    pass


def _nan(model: Model) -> None:
    model.tensors[f"{model.layer(LAYER)}mlp.up_proj.weight"][3, 5] = float("nan")


def _dead(model: Model) -> None:
    model.tensors[f"{model.layer(LAYER)}mlp.up_proj.weight"][10:20] = 0


def _zero(model: Model) -> None:
    model.tensors[f"{model.layer(LAYER)}mlp.down_proj.weight"].zero_()


def _in_bfloat16(model: Model) -> None:
    model.tensors = {name: tensor.to(torch.bfloat16) for name, tensor in model.tensors.items()}


def every(rule: str, level: str, certainty: str, layers: int) -> Expect:
    return Expect(rule, level, certainty, tuple(range(layers)))


_SWAPPED = Expect("ffn/gate-up-swapped", "error", "statistical", (LAYER,))
_TURNED = Expect("tensor/transposed", "warning", "statistical", (LAYER,))
_SHOWN = Expect("ffn/gate-up-swapped", "error", "proved", (LAYER,))
_UNTRAINED = Expect("moe/experts-untrained", "warning", "statistical", (1,))
_ROLE = Expect("norm/role", "warning", "statistical", (0, 1))
_SHARD = Expect("index/missing-shard", "error", "proved")


def _cut(directory: Path, count: int) -> None:
    path = directory / plants.SINGLE
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - count)


def _append(directory: Path, data: bytes) -> None:
    with (directory / plants.SINGLE).open("ab") as file:
        file.write(data)


def _overlap(header: dict[str, Any]) -> None:
    key, value = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "kv")
    header[value]["data_offsets"] = header[key]["data_offsets"]


def _pad(directory: Path) -> None:
    path = directory / plants.SINGLE
    raw = path.read_bytes()
    was = int.from_bytes(raw[:8], "little")
    path.write_bytes((100_000).to_bytes(8, "little") + raw[8 : 8 + was].ljust(100_000) + raw[8 + was :])


CASES: tuple[Case, ...] = (
    Case(
        "R1",
        "sound, and the order asked for is [up | gate]",
        ("fused",),
        _nothing,
        Expect("ffn/fused-order", "error", "conflict"),
        against={"fused_order": "up_gate"},
    ),
    Case(
        "R1",
        "halves of one layer exchanged",
        ("fused",),
        _swap_halves,
        Expect("ffn/fused-order", "error", "statistical", (1,)),
    ),
    Case(
        "R1",
        "w1 and w3 of one expert exchanged",
        ("experts",),
        _expert_swap,
        Expect("ffn/gate-up-swapped", "error", "statistical", (1,)),
    ),
    Case("R2", "gate and up exchanged in one layer", BOTH, _swap, _SWAPPED),
    Case("R2", "the same, beside the original", BOTH, _swap, _SHOWN, reference=True),
    Case(
        "R2",
        "a flat file in the order up, gate, down, as it lies",
        BOTH,
        _file(_flat),
        Refused("holds no safetensors file"),
    ),
    Case(
        "R2",
        "the same, read by its manifest: gate, up, down",
        BOTH,
        _read_by_manifest,
        Expect("ffn/gate-up-swapped", "error", "statistical", tuple(range(30))),
    ),
    Case(
        "R2",
        "the same, read by its manifest, beside the original",
        BOTH,
        _read_by_manifest,
        Expect("ffn/gate-up-swapped", "error", "proved", tuple(range(30))),
        reference=True,
    ),
    Case(
        "R3",
        "1 added to gains that have it, beside the original",
        BOTH,
        _add_to_gains,
        Expect("norm/offset", "error", "proved", (None, *range(30))),
        reference=True,
    ),
    Case(
        "R3",
        "1 added to gains that the family adds it to, alone",
        ("gemma3",),
        _add_to_gains,
        Expect("norm/offset", "warning", "statistical"),
    ),
    Case(
        "R4",
        "gains with +1 for an engine that adds it",
        ("gemma3",),
        _add_to_gains,
        Expect("norm/offset", "error", "proved", (None, 0, 1)),
        reference=True,
    ),
    Case(
        "R4",
        "an engine that does not add 1",
        ("gemma3",),
        _nothing,
        Expect("norm/offset", "error", "conflict"),
        against={"normalization": "RMSNorm", "layernorm_zero_centered_gamma": False},
    ),
    Case(
        "R5",
        "1e-6 for 1e-5 in another engine's config",
        BOTH,
        _nothing,
        Expect("config/eps-conflict", "error", "conflict"),
        against={"rms_norm_eps": 1e-6},
    ),
    Case(
        "R7",
        "exact GELU for the tanh form",
        ("gemma3",),
        _nothing,
        Expect("config/activation-conflict", "error", "conflict"),
        against={"hidden_activation": "gelu"},
        whole=True,
    ),
    Case(
        "R7",
        "the legacy key alone",
        ("gemma3",),
        lambda model: (model.config.pop("hidden_activation", None), model.config.update(hidden_act="gelu")),
        Expect("config/activation-conflict", "warning", "conflict"),
    ),
    Case(
        "R8",
        "a square q_proj transposed, beside the original",
        ("tiny-llama", "SmolLM2"),
        _transpose("self_attn.q_proj.weight"),
        Expect("tensor/transposed", "error", "proved", (LAYER,)),
        reference=True,
    ),
    Case(
        "R8",
        "a square down_proj transposed, beside the original",
        ("square",),
        _transpose("mlp.down_proj.weight"),
        Expect("tensor/transposed", "error", "proved", (LAYER,)),
        reference=True,
    ),
    Case(
        "R8",
        "a square down_proj transposed, alone",
        ("square", "square SmolLM2"),
        _transpose("mlp.down_proj.weight"),
        _TURNED,
    ),
    Case(
        "R8",
        "a square up_proj transposed, alone",
        ("square", "square SmolLM2"),
        _transpose("mlp.up_proj.weight"),
        _TURNED,
    ),
    Case(
        "R8",
        "a square gate_up_proj transposed, alone",
        ("square fused",),
        _transpose_fused,
        Expect("tensor/transposed", "warning", "statistical", (1,)),
    ),
    Case("R9", "all experts of a layer random", ("experts",), _noise(0, 1, 2, 3), _UNTRAINED),
    Case("R9", "one expert random", ("experts",), _noise(2), _UNTRAINED),
    Case(
        "R10",
        "scales of gate_proj dropped",
        ("tiny-llama in FP8",),
        _no_scale,
        every("quant/scale-missing", "error", "proved", 4),
    ),
    Case(
        "R10",
        "scales of gate_proj dropped",
        ("SmolLM2 in FP8",),
        _no_scale,
        every("quant/scale-missing", "error", "proved", 30),
    ),
    Case(
        "R10",
        "scales under another suffix",
        ("tiny-llama in FP8",),
        _other_suffix,
        every("quant/scale-missing", "error", "proved", 4),
    ),
    Case(
        "R10",
        "cast to bfloat16 without their scales",
        FLOAT8,
        _unscaled,
        Expect("quant/scale-unapplied", "warning", "statistical"),
    ),
    Case("R11", "post-attention norm copied to the pre-FFN one", ("gemma3",), _same_norms, _ROLE),
    Case(
        "R11",
        "pre-FFN norm zero in all layers",
        ("gemma3",),
        _zero_norms,
        Expect("norm/role", "warning", "statistical"),
    ),
    Case(
        "R11",
        "the two exchanged in one layer, beside the original",
        ("gemma3",),
        _swapped_norms,
        Expect("norm/role", "error", "proved", (1,)),
        reference=True,
    ),
    Case("R12", "one neuron 300 times as loud", BOTH, _loud, Expect("range/fp16-overflow", "note", "risk", (LAYER,))),
    Case(
        "R12",
        "run in float16",
        ("SmolLM2",),
        _nothing,
        Expect("config/dtype-conflict", "error", "conflict"),
        against={"torch_dtype": "float16"},
        whole=True,
    ),
    Case("R13", "tied, no head", BOTH, _head(tied=True, present=False), None),
    Case(
        "R13", "tied, an equal head", BOTH, _head(tied=True, present=True), Expect("config/tied-head", "note", "proved")
    ),
    Case(
        "R13",
        "tied, another head",
        BOTH,
        _head(tied=True, present=True, equal=False),
        Expect("config/tied-head", "warning", "conflict"),
    ),
    Case(
        "R13", "untied, no head", BOTH, _head(tied=False, present=False), Expect("config/tied-head", "error", "proved")
    ),
    Case("R13", "two flags", BOTH, _two_flags, Expect("config/tied-head", "warning", "conflict")),
    Case(
        "R14",
        "a name too many in the index",
        BOTH,
        _sharded(plants.edit_index(lambda index: index["weight_map"].update({"mtp.x": plants.SHARDS[2]}))),
        Expect("index/missing-tensor", "error", "proved"),
    ),
    Case(
        "R14",
        "a name too few",
        BOTH,
        _sharded(plants.edit_index(lambda index: index["weight_map"].pop("model.norm.weight"))),
        Expect("index/unlisted-tensor", "warning", "conflict"),
    ),
    Case(
        "R14",
        "a name in another shard",
        BOTH,
        _sharded(plants.edit_index(lambda index: index["weight_map"].update({"model.norm.weight": plants.SHARDS[0]}))),
        Expect("index/wrong-shard", "error", "proved"),
    ),
    Case("R14", "a shard deleted", BOTH, _sharded(lambda directory: (directory / plants.SHARDS[1]).unlink()), _SHARD),
    Case("R14", "names of 30 shards where 3 are", BOTH, _sharded(plants.edit_index(_stale)), _SHARD),
    Case(
        "R15",
        "the last 10 bytes cut",
        BOTH,
        _file(lambda directory: _cut(directory, 10)),
        Expect("container/truncated", "error", "proved", (None, 0, 1, 2, 3, 29)),
    ),
    Case(
        "R15",
        "8 bytes appended",
        BOTH,
        _file(lambda directory: _append(directory, bytes(8))),
        Expect("container/trailing-bytes", "error", "proved"),
    ),
    Case(
        "R15",
        "two tensors share bytes",
        ("tiny-llama",),
        _file(plants.edit_header(_overlap)),
        Expect("container/overlap", "error", "proved", (None, *range(4))),
    ),
    Case("R15", "a header padded to 100,000 bytes", ("tiny-llama",), _file(_pad), None),
    Case(
        "R15",
        "a pointer in place of the data",
        BOTH,
        _file(plants.replace_file(plants.SINGLE, b"version https://git-lfs.github.com/spec/v1\n")),
        Expect("container/not-safetensors", "error", "proved"),
    ),
    Case(
        "R16", "all biases dropped", ("biases",), _drop("_proj.bias"), every("ffn/missing-bias", "error", "proved", 4)
    ),
    Case(
        "R16",
        "biases of gate and up dropped",
        ("biases",),
        _drop("gate_proj.bias", "up_proj.bias"),
        every("ffn/missing-bias", "error", "proved", 4),
    ),
    Case(
        "R16",
        "biases of gate and up exchanged, alone",
        ("biases",),
        _swap_biases,
        Open("ffn/gate-up-swapped", "a trusted reference, or captured gate and up"),
    ),
    Case("R16", "the same, beside the original", ("biases",), _swap_biases, _SHOWN, reference=True),
    Case(
        "R16", "an undeclared bias", BOTH, _undeclared(0.5), Expect("ffn/undeclared-bias", "error", "proved", (LAYER,))
    ),
    Case(
        "R16",
        "an undeclared bias of zeros",
        BOTH,
        _undeclared(0.0),
        Expect("ffn/undeclared-bias", "note", "proved", (LAYER,)),
    ),
    Case("R17", "a third of the tensors of shape (0,)", BOTH, _placeholders, Expect("tensor/empty", "error", "proved")),
    Case("R18", "blocks of 2 ranks", ("fused",), _ranks(2), Expect("ffn/fused-layout", "error", "statistical", (1,))),
    Case("R18", "blocks of 4 ranks", ("fused",), _ranks(4), Expect("ffn/fused-layout", "error", "statistical", (1,))),
    Case(
        "R19",
        "an engine that clamps where the config does not",
        BOTH,
        _nothing,
        Expect("config/activation-conflict", "error", "conflict"),
        against={"swiglu_limit": 7.0},
        whole=True,
    ),
    Case("R20", "32 neurons of zeros, interleaved", BOTH, _padded(_interleaved, told=True), None),
    Case("R20", "32 neurons of zeros at the end", BOTH, _padded(_at_the_end, told=True), None),
    Case(
        "R20",
        "the config not told",
        BOTH,
        _padded(_at_the_end, told=False),
        Expect("config/shape", "note", "risk", tuple(range(30))),
    ),
    Case(
        "R20",
        "a third of the width in the config",
        ("tiny-llama",),
        _set(intermediate_size=128),
        Expect("config/shape", "error", "proved"),
    ),
    Case(
        "5",
        "an engine that runs LayerNorm",
        BOTH,
        _nothing,
        Expect("norm/kind-conflict", "error", "conflict"),
        against={"normalization": "LayerNorm"},
    ),
    Case(
        "8", "the last norm missing", BOTH, _drop("model.norm.weight"), Expect("norm/final-missing", "error", "proved")
    ),
    Case(
        "8",
        "the last norm all ones",
        BOTH,
        lambda model: model.tensors["model.norm.weight"].fill_(1),
        Expect("norm/final-missing", "warning", "statistical"),
    ),
    Case("9", "gains of 1 + w in bfloat16", ("gemma3",), _in_bfloat16, Expect("norm/precision", "note", "risk")),
    Case("17", "an expert missing", ("experts",), _no_expert, Expect("moe/experts-missing", "error", "proved", (1,))),
    Case(
        "17", "an expert twice", ("experts",), _copied_expert, Expect("moe/experts-duplicated", "error", "proved", (1,))
    ),
    Case("17", "experts permuted with their router", ("experts",), _permuted_experts, None),
    Case("17", "the same, beside the original", ("experts",), _permuted_experts, None, reference=True),
    Case(
        "17",
        "experts permuted and not their router, alone",
        ("experts",),
        partial(_permuted_experts, router=False),
        Open("moe/experts-exchanged", "a reference checkpoint"),
    ),
    Case(
        "17",
        "the same, beside the original",
        ("experts",),
        partial(_permuted_experts, router=False),
        Expect("moe/experts-exchanged", "error", "proved", (1,)),
        reference=True,
    ),
    Case(
        "17",
        "down projections of two experts exchanged, beside the original",
        ("experts",),
        _exchange_down,
        Expect("ffn/mispaired-neurons", "error", "proved", (1,)),
        reference=True,
    ),
    Case(
        "+",
        "rows of queries and keys in the other rotary order",
        ("SmolLM2",),
        _in_pairs,
        Expect("attention/rotary-order", "error", "statistical"),
    ),
    Case(
        "+",
        "the same, beside the original",
        ("tiny-llama",),
        _in_pairs,
        Expect("attention/rotary-order", "error", "proved", tuple(range(4))),
        reference=True,
    ),
    Case(
        "+",
        "the same, beside the original",
        ("SmolLM2",),
        _in_pairs,
        Expect("attention/rotary-order", "error", "proved", tuple(range(30))),
        reference=True,
    ),
    Case(
        "+",
        "rows of keys alone in the other rotary order",
        ("SmolLM2",),
        partial(_in_pairs, kinds=("k_proj",)),
        Open("attention/rotary-order", "a reference checkpoint"),
    ),
    Case("19", "one NaN", BOTH, _nan, Expect("tensor/non-finite", "error", "proved", (LAYER,))),
    Case("20", "ten rows of up zero", BOTH, _dead, Expect("ffn/dead-neurons", "note", "risk", (LAYER,))),
    Case("20", "a down projection of zeros", BOTH, _zero, Expect("tensor/all-zero", "warning", "risk", (LAYER,))),
)
