"""Rows that transformers cannot execute, against their own code written again (`tests/original_models.py`)."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import original_models as original
import pytest
import torch
from glassblock.checkpoint.families.renamed import BAICHUAN
from glassblock.checkpoint.layer_map import layer_tensors, shape_faults
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.text_states import entering_states, layer_count, logit_parts
from glassblock.checkpoint.variants import row_for
from glassblock.errors import FamilyMismatch
from safetensors.torch import save_file
from torch import Tensor, nn

# What the project promises of logits in float32, which are near 3 here.
TOLERANCE = 1e-4
IDS = torch.tensor([[5, 17, 3, 42, 90, 0, 61, 8, 33, 71, 12, 54], [7, 7, 80, 2, 2, 19, 44, 95, 1, 63, 28, 30]])
_NANOGPT = {"n_layer": 2, "n_head": 4, "n_embd": 48, "block_size": 24, "vocab_size": 96}
_LLAMA2_C = {"dim": 48, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 96, "max_seq_len": 24}
_OLMO = {
    "model_type": "hf_olmo",
    "d_model": 48,
    "n_heads": 4,
    "n_kv_heads": 2,
    "n_layers": 2,
    "mlp_hidden_size": 112,
    "embedding_size": 96,
    "rope": True,
    "weight_tying": False,
    "clip_qkv": 1.5,
}
_CHATGLM = {
    "model_type": "chatglm",
    "hidden_size": 48,
    "ffn_hidden_size": 112,
    "num_layers": 2,
    "num_attention_heads": 4,
    "kv_channels": 12,
    "padded_vocab_size": 96,
    "add_qkv_bias": True,
    "tie_word_embeddings": False,
}


class Written(NamedTuple):
    """A family, what makes its model, and what its config says."""

    family: str
    model: Callable[[], nn.Module]
    config: Mapping[str, Any]


def bare(width: int) -> nn.Module:
    return nn.LayerNorm(width, eps=1e-5, elementwise_affine=False)


def gained(width: int) -> nn.Module:
    return nn.LayerNorm(width, eps=1e-5, bias=False)


def with_bias(width: int) -> nn.Module:
    return nn.LayerNorm(width, eps=1e-5)


def scaled(width: int) -> nn.Module:
    return original.Scaled(width, 1e-5)


def gain_first(width: int) -> nn.Module:
    return original.Scaled(width, 1e-5, gain_first=True)


def olmo(norm: Callable[[int], nn.Module], **more: Any) -> Callable[[], nn.Module]:
    told: dict[str, Any] = {"activation": "swiglu", "after": False, "bias": False, "clip": 1.5} | more
    return lambda: original.Olmo(norm, **told)


CASES = {
    "nanogpt": Written("nanogpt", lambda: original.NanoGpt(bias=True), _NANOGPT),
    "nanogpt without biases": Written("nanogpt", lambda: original.NanoGpt(bias=False), _NANOGPT | {"bias": False}),
    "llama2.c": Written(
        "llama2_c", lambda: original.Llama2C(hidden=None, multiple_of=32), _LLAMA2_C | {"multiple_of": 32}
    ),
    "llama2.c, its width told": Written(
        "llama2_c", lambda: original.Llama2C(hidden=112, multiple_of=32), _LLAMA2_C | {"hidden_dim": 112}
    ),
    "OLMo 1": Written("olmo_ai2", olmo(bare), _OLMO | {"include_bias": False, "layer_norm_with_affine": False}),
    "OLMo with biases": Written("olmo_ai2", olmo(with_bias, bias=True), _OLMO),
    "OLMo, norms alone without": Written(
        "olmo_ai2", olmo(gained, bias=True), _OLMO | {"include_bias": True, "bias_for_layer_norm": False}
    ),
    "OLMo, norms alone with": Written(
        "olmo_ai2", olmo(with_bias), _OLMO | {"include_bias": False, "bias_for_layer_norm": True}
    ),
    "OLMo without a gate": Written(
        "olmo_ai2", olmo(gained, activation="gelu"), _OLMO | {"include_bias": False, "activation_type": "gelu"}
    ),
    "OLMo 2": Written(
        "olmo_ai2",
        olmo(scaled, after=True),
        _OLMO | {"include_bias": False, "layer_norm_type": "rms", "norm_after": True, "attention_layer_norm": True},
    ),
    "ChatGLM": Written(
        "chatglm",
        lambda: original.ChatGlm(groups=2, norm=gain_first),
        _CHATGLM | {"multi_query_attention": True, "multi_query_group_num": 2},
    ),
    "ChatGLM, a key for every query": Written(
        "chatglm", lambda: original.ChatGlm(groups=None, norm=gain_first), _CHATGLM
    ),
    "ChatGLM with LayerNorms": Written(
        "chatglm",
        lambda: original.ChatGlm(groups=1, norm=with_bias),
        _CHATGLM | {"multi_query_attention": True, "multi_query_group_num": 1, "rmsnorm": False},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_models(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    checkpoint, theirs = written(case, tmp_path)
    assert checkpoint.faults == ()
    assert shape_faults(checkpoint) == ()
    assert unread(checkpoint, case) == set()
    assert float(theirs.abs().max()) > 0.5
    assert float((logits_of(checkpoint) - theirs).abs().max()) <= TOLERANCE


def test_baichuan_turns_heads_in_its_small_models_and_has_a_head_of_unit_rows(tmp_path: Path) -> None:
    config = {
        "model_type": "baichuan",
        "architectures": ["BaichuanForCausalLM"],
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 96,
    }
    checkpoint, theirs = written(Written("baichuan", original.Baichuan, config), tmp_path)
    with pytest.raises(FamilyMismatch, match="attention of the family"):
        logits_of(checkpoint)  # of no width that has rotary positions
    released = row_for(BAICHUAN, None)
    family = replace(checkpoint.require_usable(), attention=released.attention, logits=released.logits)
    assert released.attention is not None
    assert released.logits.unit_rows
    assert float((logits_of(replace(checkpoint, family=family)) - theirs).abs().max()) <= TOLERANCE


@pytest.mark.parametrize(
    "said", [{"rope_ratio": 500}, {"original_rope": False}, {"add_bias_linear": True, "add_qkv_bias": False}]
)
def test_attention_that_was_not_read_is_not_run(said: Mapping[str, Any], tmp_path: Path) -> None:
    case = CASES["ChatGLM"]
    checkpoint, _ = written(case._replace(config=dict(case.config) | said), tmp_path)
    assert checkpoint.require_usable().attention is None


def written(case: Written, directory: Path) -> tuple[Checkpoint, Tensor]:
    torch.manual_seed(0)
    model = original.settled(case.model())
    save_file(dict(original.state_of(model)), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(case.config))
    with torch.no_grad():
        return open_checkpoint(directory, family=case.family), model(IDS)


def logits_of(checkpoint: Checkpoint) -> Tensor:
    meter = ReadMeter()
    states = entering_states(checkpoint, IDS, layer_count(checkpoint), "cpu", meter, dtype=None)
    return torch.cat(list(logit_parts(checkpoint, states, meter, dtype=None)), dim=-1)


def unread(checkpoint: Checkpoint, case: Written) -> set[str]:
    """Tensors of the first layer that the row does not name."""
    tensors = layer_tensors(checkpoint, 0)
    known = {entry.name for entry in (*tensors.entries, *(tensors.attention.entries if tensors.attention else ()))}
    assert case.family == checkpoint.require_usable().name
    return {name for name in checkpoint.entries if name.startswith(tensors.prefix)} - known
