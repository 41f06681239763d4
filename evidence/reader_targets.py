"""The readers, each as a function of one input that tells whether it was accepted, and the inputs to begin with.

Every input goes through what a user would call: the checkpoint is opened, described and audited, and its first layer
read; a file for the command line is read by it, sent as its client sends it, and answered as the service answers.
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from glassblock.api.bodies import parse_body
from glassblock.audit.rules import RULES
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.layer_loading import load_layer
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import GlassblockError
from glassblock.operations import audits, checkpoints
from glassblock.operations.store import CheckpointStore
from glassblock.operations.texts import pieces_of, token_ids_of
from glassblock.reports.baseline import read_baseline
from glassblock.wire.audits import Report
from glassblock.wire.endpoints import START_AUDIT
from glassblock_client.cli.family import read_family_row
from glassblock_client.cli.files import read_json_object
from glassblock_client.questions import start_audit
from reader_mutations import Frame, Join, chosen, container, container_joined, joined, plain
from record import ROOT
from starlette.datastructures import Headers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

sys.path.append(str(ROOT / "tests"))
makers: Any = importlib.import_module("makers")
stored: Any = importlib.import_module("checkpoint.test_stored_layers")
family_rows: Any = importlib.import_module("checkpoint.test_family_file")

WHOLE = 4
"""One input in so many is described and audited; the others are opened, and a layer of them is read."""

LOOKED_AT = tuple(name for name in RULES if not name.startswith("ffn/"))
"""All rules but those that judge numbers of networks: they read no file of their own and take the longest."""

INDEX = "model.safetensors.index.json"
NARROW: Any = makers.Tiny(hidden=8, intermediate=12, layers=1, heads=2, kv_heads=1, head_dim=4, vocab=8, positions=4)
STATE = "model.layers.0.mlp.gate_proj.weight.quant_state.bitsandbytes__nf4"


class Target(NamedTuple):
    """A reader.

    Attributes:
        read: Gives it one input; whether the input was accepted: it could be read, whatever is wrong in it.
        seeds: Inputs to begin with.
        frame: Where the JSON lies in an input.
        join: How an input is put together again.
    """

    read: Callable[[bytes], bool]
    seeds: list[bytes]
    frame: Frame = plain
    join: Join = joined


def header(folder: Path) -> Target:
    """model.safetensors."""
    seeds = [_narrow(family, folder / family) for family in ("llama", "gpt2", "mixtral", "phi3")]
    store, file = CheckpointStore([folder], device="cpu"), folder / "llama" / "model.safetensors"

    def read(data: bytes) -> bool:
        file.write_bytes(data)
        look(store, "llama", data)
        return store.open("llama").containers[file.name].listed

    return Target(read, [(seed / "model.safetensors").read_bytes() for seed in seeds], container, container_joined)


def index(folder: Path) -> Target:
    """model.safetensors.index.json beside its shards."""
    seeds = [_narrow("llama", folder / f"shards-{shards}", shards=shards) / INDEX for shards in (2, 3, 8)]
    store, file = CheckpointStore([folder], device="cpu"), seeds[1]

    def read(data: bytes) -> bool:
        file.write_bytes(data)
        look(store, "shards-3", data)
        opened = store.open("shards-3").index
        return opened is not None and all(fault.kind != "header" for fault in opened.faults)

    return Target(read, [seed.read_bytes() for seed in seeds])


def config(folder: Path) -> Target:
    """config.json, or params.json, of every family."""
    places = [makers.tiny_checkpoint(family, folder / family) for family in ARCHITECTURES]
    files = [place / ARCHITECTURES[place.name].config_file for place in places]
    return _configs(folder, files)


def quantisation(folder: Path) -> Target:
    """config.json of checkpoints in every stored form."""
    for number, form in enumerate(stored.FORMS):
        stored.quantised_checkpoint("llama", folder / str(number), form)
    return _configs(folder, sorted(folder.glob("*/config.json")))


def quantisation_state(folder: Path) -> Target:
    """The JSON that bitsandbytes keeps in a tensor."""
    stored.quantised_checkpoint("llama", folder / "nf4", "bitsandbytes 4-bit")
    file = folder / "nf4" / "model.safetensors"
    tensors, save = stored.load_file(file), stored.save_file
    store = CheckpointStore([folder], device="cpu")
    seed = bytes(tensors[STATE].tolist())
    nested = json.loads(seed) | {"nested_blocksize": 256, "nested_offset": 0.5, "nested_dtype": "float32"}

    def read(data: bytes) -> bool:
        tensors[STATE] = torch.tensor(list(data), dtype=torch.uint8)
        save(tensors, file)
        look(store, "nf4", data)
        load_layer(store.open("nf4"), 0, "cpu", ReadMeter())  # refused here where it cannot be read
        return True

    return Target(read, [seed, json.dumps(nested).encode()])


def params(folder: Path) -> Target:
    """params.json of Meta and Mistral beside consolidated weights."""
    place = _narrow("llama_meta", folder / "meta")
    (place / "model.safetensors").rename(place / "consolidated.safetensors")
    seed = json.loads((place / "params.json").read_text())
    mistral = seed | {"head_dim": 4, "n_kv_heads": 1, "rope_theta": 1e6, "moe": {"num_experts": 4}, "use_biases": False}
    store, file = CheckpointStore([folder], device="cpu"), place / "params.json"

    def read(data: bytes) -> bool:
        file.write_bytes(data)
        look(store, "meta", data)
        return not store.open("meta").faults

    return Target(read, [json.dumps(each).encode() for each in (seed, mistral)])


def family_file(folder: Path) -> Target:
    """--family-file."""
    _narrow("llama", folder / "llama")
    store, file = CheckpointStore([folder], device="cpu"), folder / "row.json"
    whole = family_rows.WHOLE | {"trunks": [{"prefix": "model.", "head": "lm_head.weight"}], "layer": "layers.{i}."}
    rows = [whole, *({"like": family} for family in ("llama", "mixtral", "gpt2", "deepseek_v3", "gemma4", "t5"))]
    activation = {"keys": ["act"], "default": "gelu", "meanings": {"g": "gelu_tanh"}}
    late = {"if": "every", "of": [{"if": "from-layer", "first": {"keys": ["dense"], "default": 1}}]}
    for family in ("llama", "gemma2"):
        variants = [{"when": late, "changes": {"placement": "post"}}]
        rows.append({"like": family, "feed_forward": {"activation": activation}, "layer_variants": variants})

    def read(data: bytes) -> bool:
        file.write_bytes(data)
        row = read_family_row(None, file)
        audited(store, "llama", family_row=row)
        return True

    return Target(read, [json.dumps(row).encode() for row in rows])


def against(folder: Path) -> Target:
    """--against: configs of every dialect."""
    for family in ("llama", "gemma2", "gpt_oss"):
        _narrow(family, folder / family)
    store, file = CheckpointStore([folder], device="cpu"), folder / "against.json"
    names = ("llama", "gemma2", "gpt_oss")

    def read(data: bytes) -> bool:
        file.write_bytes(data[1:])
        name = names[data[0] % len(names)] if data else names[0]
        audited(store, name, against=read_json_object(file, option="--against"))
        return True

    configs = [json.loads((folder / name / "config.json").read_text()) for name in names]
    engines = [*configs, *_engines(configs[0])]
    return Target(read, [bytes([place]) + json.dumps(each).encode() for place in range(3) for each in engines], chosen)


def baseline(folder: Path) -> Target:
    """--baseline: a report, or what was written of one."""
    place = _narrow("llama", folder / "llama")
    (place / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 9, "rms_norm_eps": 1e-3}))
    store, file = CheckpointStore([folder], device="cpu"), folder / "baseline.json"
    reports: Any = importlib.import_module("glassblock.reports.baseline")
    report = audited(store, "llama")
    whole = report.model_dump(mode="json")
    short = whole | {"coverage": whole["coverage"][:2]}

    def read(data: bytes) -> bool:
        file.write_bytes(data)
        known = read_baseline(read_json_object(file, option="--baseline"), name=file.name)
        reports.compared(report, known, name=file.name).model_dump_json()
        reports.written(known)
        return True

    return Target(read, [json.dumps(short).encode(), reports.written(reports.baseline_of(report)).encode()])


def tokenizer(folder: Path) -> Target:
    """tokenizer.json: a text is tokenised, and its ids told as text."""
    place = _narrow("llama", folder / "llama")
    store, file = CheckpointStore([folder], device="cpu"), place / "tokenizer.json"
    checkpoint = store.open("llama")

    def read(data: bytes) -> bool:
        file.write_bytes(data)
        ids = token_ids_of(store, checkpoint, None, "to be, or\nnot to be: été 12 \U0001f600")
        if ids is None:
            return False
        pieces_of(store, checkpoint, ids)
        return True

    return Target(read, list(_tokenizers()))


TARGETS: Mapping[str, Callable[[Path], Target]] = {
    made.__name__: made
    for made in (
        header, index, config, params, quantisation, quantisation_state, family_file, against, baseline, tokenizer,
    )
}  # fmt: skip


def look(store: CheckpointStore, name: str, data: bytes, *, family: str | None = None) -> None:
    """Read a layer of what is there, which may be refused; of some, describe and audit it."""
    with suppress(GlassblockError):
        load_layer(store.open(name, family=family), 0, "cpu", ReadMeter())
    if crc32(data) % WHOLE == 0:
        checkpoints.detail(store, name).model_dump_json()
        audited(store, name, family=family)


def audited(store: CheckpointStore, name: str, **asked: Any) -> Report:
    """The report, asked for as the client asks and the service reads it."""
    call = start_audit(name, rules=LOOKED_AT, **asked).call
    request, _ = parse_body(START_AUDIT, Headers(dict(call.headers)), memoryview(b"".join(call.body)))
    audits.check(store, request)
    report = audits.audit(store, request, progress=lambda _done, _total, _what: None, cancelled=lambda: False)
    report.model_dump_json()
    return report


def _narrow(family: str, folder: Path, *, shards: int = 1) -> Path:
    return makers.tiny_checkpoint(family, folder, tiny=NARROW, shards=shards)


def _configs(folder: Path, files: list[Path]) -> Target:
    """The first byte of an input says which of these its rest is written to."""
    store = CheckpointStore([folder], device="cpu")
    seeds = [bytes([number]) + file.read_bytes() for number, file in enumerate(files)]

    def read(data: bytes) -> bool:
        file = files[data[0] % len(files)] if data else files[0]
        file.write_bytes(data[1:])
        name = file.parent.name
        asked = makers.asked(name) if name in ARCHITECTURES else None
        look(store, name, data, family=asked)
        opened = store.open(name, family=asked)
        return opened.family is not None and not opened.faults

    return Target(read, seeds, chosen)


def _engines(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One config of every other dialect."""
    yield {"dim": 8, "n_layers": 1, "n_heads": 2, "norm_eps": 1e-6, "rope_theta": 1e4, "vocab_size": 8}
    yield {"hf_config": model, "dtype": "torch.float16", "fused_order": "up_gate", "hf_overrides": '{"hidden_act":"x"}'}
    yield {"model_config": {"hf_text_config": model}, "json_model_override_args": {"rms_norm_eps": 1e-6}}
    yield {
        "general.architecture": "llama",
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.embedding_length": 8,
        "llama.block_count": 1,
        "llama.rope.freq_base": 1e4,
        "tokenizer.ggml.tokens": ["a", "b"],
        "tensors": [{"name": "output.weight"}],
    }
    yield {
        "metadata": {
            "general.architecture": {"value": "gemma2"},
            "gemma2.attention.layer_norm_rms_epsilon": {"value": 1e-6},
            "gemma2.final_logit_softcapping": {"value": 30.0},
        },
        "tensors": {"output.weight": {}},
    }
    megatron = {"layernorm_epsilon": 1e-5, "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False}
    more = {"hidden_size": 8, "num_layers": 1, "num_query_groups": 1, "group_query_attention": True, "bf16": True}
    yield {"args": megatron | more | {"layernorm_zero_centered_gamma": False, "rotary_base": 10000}}
    yield {
        "norms": {"*": {"eps": 1e-5, "kind": "rms", "offset": 0}, "ffn_in": {"eps": 1e-6}},
        "activation": "silu",
        "gating": {"limit": 7.0, "alpha": 1.702},
        "fused_order": ["gate", "up"],
        "fused_arrangement": "blocks-4",
        "placement": "pre",
        "tied": False,
        "bias": {"ffn": False, "attention": True},
        "sizes": {"hidden": 8, "layers": 1},
        "multipliers": {"residual_multiplier": 0.22},
        "dtype": "bfloat16",
    }


def _tokenizers() -> Iterator[bytes]:
    """One of each kind that the library has, with its own vocabulary."""
    words = {word: number for number, word in enumerate(("<unk>", "t", "o", "b", "e", "to", "be", "Ġ", "é", "##e"))}
    for model in (
        models.BPE(words, [("t", "o"), ("b", "e")], unk_token="<unk>", byte_fallback=True),
        models.WordPiece(words, unk_token="<unk>"),
        models.WordLevel(words, unk_token="<unk>"),
        models.Unigram([(word, -float(number)) for word, number in words.items()], 0, byte_fallback=False),
    ):
        made = Tokenizer(model)
        made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("é", "e")])
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])
        made.post_processor = processors.TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 0)])
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(["<s>"])
        yield made.to_str().encode()
