"""Layouts whose files alone say which biases and norms a model has: names of timm, xformers, Megatron and llama.cpp."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.fits import fitting_families
from glassblock.checkpoint.layer_map import layer_tensors
from glassblock.checkpoint.layers import load_feed_forward
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from makers import tiny_checkpoint
from reference_models import randomise
from safetensors.torch import load_file, save_file
from torch import Tensor

OPTIONAL = tuple(
    name
    for name, row in ARCHITECTURES.items()
    if row.feed_forward is not None and row.feed_forward.bias_in_files and row.feed_forward.gated
)
"""Families whose library has the biases of networks as an argument."""


def projections(family: str) -> dict[str, str]:
    """Names of a network's biases, relative to the layer, by the part."""
    network = ARCHITECTURES[family].feed_forward
    assert network is not None
    parts = {"gate": network.gate, "up": network.up, "fused": network.fused, "down": network.down}
    return {part: projection.bias for part, projection in parts.items() if projection is not None}


def written(family: str, directory: Path, biased: Callable[[str, int], bool]) -> Path:
    """A tiny file of the family, with the biases of networks for which `biased` is true of part and layer."""
    tiny_checkpoint(family, directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    trunk = open_checkpoint(path, family=family).trunk
    assert trunk is not None
    for layer in (0, 1):
        for part, name in projections(family).items():
            full = trunk.prefix + ARCHITECTURES[family].layer.format(i=layer) + name
            tensors.pop(full, None)
            if biased(part, layer):
                rows = tensors[full.removesuffix("bias") + "weight"].shape[0]
                tensors[full] = 0.1 * torch.randn(rows, generator=torch.Generator().manual_seed(layer))
    save_file(tensors, path)
    return path


def told(path: Path, family: str) -> list[tuple[str, tuple[str, ...]]]:
    findings = audit_checkpoint(path, AuditQuestion(family=family)).findings
    return [(finding.rule, finding.tensors) for finding in findings if finding.level != "note"]


CONSISTENT: Mapping[str, Callable[[str, int], bool]] = {
    "none": lambda _part, _layer: False,
    "all": lambda _part, _layer: True,
    "down alone": lambda part, _layer: part == "down",
    "all but down": lambda part, _layer: part != "down",
}


@pytest.mark.parametrize("biased", CONSISTENT.values(), ids=CONSISTENT)
@pytest.mark.parametrize("family", OPTIONAL)
def test_biases_that_all_layers_have_or_none(family: str, biased: Callable[[str, int], bool], tmp_path: Path) -> None:
    path = written(family, tmp_path, biased)
    assert told(path, family) == []
    checkpoint = open_checkpoint(path, family=family)
    assert {fit.family: fit for fit in fitting_families(checkpoint)}[family].fits
    tensors = layer_tensors(checkpoint, 1)
    assert tensors.undeclared == ()
    if tensors.row.not_run is None:
        network = load_feed_forward(checkpoint, 1, "cpu", ReadMeter())
        assert (network.up_bias is not None) == biased("up", 1)
        assert (network.down_bias is not None) == biased("down", 1)


@pytest.mark.parametrize("family", OPTIONAL)
def test_a_bias_that_one_layer_lacks(family: str, tmp_path: Path) -> None:
    path = written(family, tmp_path, lambda part, layer: part != "down" or layer == 0)
    ((rule, (name,)),) = told(path, family)
    assert rule == "ffn/missing-bias"
    assert name.endswith(projections(family)["down"])


@pytest.mark.parametrize("family", ["timm_swiglu", "xformers", "gguf", "mlx_lm"])
def test_a_gate_without_the_bias_that_up_has(family: str, tmp_path: Path) -> None:
    """One argument gives both."""
    path = written(family, tmp_path, lambda part, _layer: part != "gate")
    assert {rule for rule, _ in told(path, family)} == {"ffn/missing-bias"}


# --- llama.cpp's names of models with LayerNorms ---------------------------------------------------------------------

_BERT = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_GPT2 = {
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_FALCON = {
    "input_layernorm": "attn_norm",
    "ln_attn": "attn_norm_2",
    "ln_mlp": "attn_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
_STARCODER2 = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
_INNER = {"intermediate_size": 112, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYER_NORMED: Mapping[str, tuple[str, dict[str, Any], str, dict[str, str], dict[str, str]]] = {
    "bert": (
        "BertModel",
        _SMALL | _INNER,
        "encoder.layer.",
        _BERT,
        {
            "embeddings.word_embeddings": "token_embd",
            "embeddings.position_embeddings": "position_embd",
            "embeddings.token_type_embeddings": "token_types",
            "embeddings.LayerNorm": "token_embd_norm",
        },
    ),
    "gpt2": (
        "GPT2Model",
        {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 96},
        "h.",
        _GPT2,
        {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"},
    ),
    "falcon": ("FalconModel", _SMALL, "h.", _FALCON, {"word_embeddings": "token_embd", "ln_f": "output_norm"}),
    "falcon of two norms": (
        "FalconModel",
        _SMALL | {"new_decoder_architecture": True},
        "h.",
        _FALCON,
        {"word_embeddings": "token_embd", "ln_f": "output_norm"},
    ),
    "starcoder2": (
        "Starcoder2Model",
        _SMALL | _INNER | {"num_key_value_heads": 2},
        "layers.",
        _STARCODER2,
        {"embed_tokens": "token_embd", "norm": "output_norm"},
    ),
}
"""A class of transformers and its config, the prefix of its layers, and llama.cpp's names in them and around them."""


def under_ggufs_names(name: str, directory: Path) -> Path:
    """A model that transformers built, random in every number, under the names that llama.cpp's converter gives."""
    cls, values, layers, inner, outer = LAYER_NORMED[name]
    torch.manual_seed(0)
    made: Any = getattr(transformers, cls)
    model = made(made.config_class(**values))
    renamed: dict[str, Tensor] = {}
    for full, tensor in model.state_dict().items():
        module, _, kind = full.rpartition(".")
        number, _, relative = module.removeprefix(layers).partition(".")
        within = module.startswith(layers) and relative in inner
        new = f"blk.{number}.{inner[relative]}" if within else outer.get(module)
        if new is not None:
            drawn = tensor.clone()
            randomise(drawn)
            transposed = cls == "GPT2Model" and drawn.ndim == 2 and within
            renamed[f"{new}.{kind}"] = drawn.mT.contiguous() if transposed else drawn
    save_file(renamed, directory / "model.safetensors")
    return directory / "model.safetensors"


@pytest.mark.parametrize("name", LAYER_NORMED)
def test_models_with_layer_norms_are_no_llamas_with_something_missing(name: str, tmp_path: Path) -> None:
    path = under_ggufs_names(name, tmp_path)
    assert told(path, "gguf") == []
    assert layer_tensors(open_checkpoint(path, family="gguf"), 1).row.not_run is not None


@pytest.mark.parametrize(
    ("name", "gone", "rule"),
    [
        ("bert", "blk.1.attn_output_norm.weight", "norm/role"),
        ("bert", "blk.1.layer_output_norm.bias", "norm/role"),
        ("bert", "blk.1.ffn_up.bias", "ffn/missing-bias"),
        ("gpt2", "blk.1.ffn_norm.bias", "norm/role"),
        ("gpt2", "output_norm.weight", "norm/final-missing"),
        ("falcon", "blk.1.ffn_down.weight", "ffn/missing-tensor"),
    ],
)
def test_what_is_missing_in_them_is_told(name: str, gone: str, rule: str, tmp_path: Path) -> None:
    path = under_ggufs_names(name, tmp_path)
    tensors = load_file(path)
    del tensors[gone]
    save_file(tensors, path)
    assert told(path, "gguf") == [(rule, (gone,))]


def test_groks_four_norms_are_none_of_berts(tmp_path: Path) -> None:
    path = tiny_checkpoint("gguf", tmp_path) / "model.safetensors"
    tensors = load_file(path)
    for layer in (0, 1):
        for name in ("attn_output_norm", "layer_output_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = 1 + 0.1 * torch.randn(48)
    save_file(tensors, path)
    assert told(path, "gguf") == []


def test_a_llama_without_its_last_norm_is_still_told(tmp_path: Path) -> None:
    path = tiny_checkpoint("gguf", tmp_path) / "model.safetensors"
    tensors = load_file(path)
    del tensors["output_norm.weight"]
    save_file(tensors, path)
    assert told(path, "gguf") == [("norm/final-missing", ("output_norm.weight",))]
