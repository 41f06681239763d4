"""Numbers of a config, and tensors, that no model can have: each is told by name, and nothing runs away with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.checkpoint.layer_loading import load_layer
from glassblock.checkpoint.layer_map import shape_faults
from glassblock.checkpoint.layers import load_feed_forward
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.text_states import token_log_likelihoods
from glassblock.checkpoint.text_variants import Variant, variant_log_likelihoods
from glassblock.errors import DamagedCheckpoint, FamilyMismatch, GlassblockError
from makers import tiny_checkpoint

TOKENS = torch.tensor([3, 1, 2])
LAYER: list[tuple[str, dict[str, Any], type[GlassblockError], str]] = [
    ("llama", {"partial_rotary_factor": 1e308}, FamilyMismatch, "partial_rotary_factor is 1e"),
    ("llama", {"partial_rotary_factor": -0.5}, FamilyMismatch, "partial_rotary_factor is -0.5"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0}}, FamilyMismatch, "factor of the rotary positions"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 0}, "max_position_embeddings": 64},
        FamilyMismatch,
        "beta_fast of the rotary positions is 0",
    ),
    ("llama", {"max_position_embeddings": 64.5}, DamagedCheckpoint, "max_position_embeddings is 64.5"),
    ("gptj", {"rotary_dim": 6.5}, FamilyMismatch, "rotary_dim is 6.5"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 10**350}}, FamilyMismatch, "factor of the rotary"),
    ("gptj", {"rotary_dim": 10**12}, FamilyMismatch, r"rotary_dim is 1e\+12"),
    ("deepseek_v3", {"rope_interleave": "yes"}, DamagedCheckpoint, "rope_interleave is 'yes'"),
    ("minicpm", {"num_hidden_layers": 10**350}, DamagedCheckpoint, "num_hidden_layers is 1000"),
    ("llama_meta", {"hidden_dim": ..., "ffn_dim_multiplier": 1e307}, DamagedCheckpoint, "ffn_dim_multiplier is 1e"),
    ("llama_meta", {"hidden_dim": ..., "ffn_dim_multiplier": -2.0}, DamagedCheckpoint, "ffn_dim_multiplier is -2"),
    ("llama_meta", {"hidden_dim": ..., "multiple_of": 1e300}, DamagedCheckpoint, r"multiple_of is 1e\+300"),
    ("qwen", {"intermediate_size": 1}, DamagedCheckpoint, "intermediate_size is 1, where .* a whole number from 2"),
]


@pytest.mark.parametrize(("family", "config", "error", "message"), LAYER)
def test_a_layer_is_not_loaded_with_them(
    tmp_path: Path, family: str, config: dict[str, Any], error: type[GlassblockError], message: str
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(family, tmp_path, config=config))
    with pytest.raises(error, match=message):
        load_layer(checkpoint, checkpoint.layer_indices[0], "cpu", ReadMeter())


def test_a_clamp_that_is_none_is_the_checkpoints_fault(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("gpt_oss", tmp_path, config={"swiglu_limit": -1.0}))
    with pytest.raises(FamilyMismatch, match="the limit of the gating 'swiglu_oai' is -1"):
        load_feed_forward(checkpoint, 0, "cpu", ReadMeter(), expert=0)


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0, which divides no logits"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0, which caps no logits"),
    ],
)
def test_logits_are_not_made_with_them(tmp_path: Path, family: str, config: dict[str, Any], message: str) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(family, tmp_path, config=config))
    with pytest.raises(FamilyMismatch, match=message):
        token_log_likelihoods(checkpoint, TOKENS, "cpu", ReadMeter())


def test_heads_that_do_not_share_keys_evenly_are_told_before_a_fused_tensor_is_cut(tmp_path: Path) -> None:
    healthy = open_checkpoint(tiny_checkpoint("internlm2", tmp_path / "healthy"))
    wide, back = (healthy.entries[f"model.layers.0.attention.{name}.weight"].shape for name in ("wqkv", "wo"))
    width = back[1] // 4
    # Two queries and three keys, whose rows are as many as those of a tensor that both have.
    tensors = {
        "model.layers.0.attention.wqkv.weight": torch.randn(8 * width, wide[1]),
        "model.layers.0.attention.wqkv.bias": torch.randn(8 * width),
        "model.layers.0.attention.wo.weight": torch.randn(back[0], 2 * width),
    }
    config = {"num_attention_heads": 2, "num_key_value_heads": 3, "head_dim": width}
    checkpoint = open_checkpoint(tiny_checkpoint("internlm2", tmp_path / "uneven", config=config, tensors=tensors))
    with pytest.raises(FamilyMismatch, match="2 heads cannot share 3 heads of keys evenly"):
        load_layer(checkpoint, 0, "cpu", ReadMeter())


@pytest.mark.parametrize(
    ("family", "name", "shape", "words"),
    [
        ("gpt2", "transformer.wpe.weight", (32, 48), "the learned positions are F8_E4M3"),
        ("phi", "lm_head.bias", (96,), "the bias of the output head is F8_E4M3"),
    ],
)
def test_codes_are_not_taken_for_the_numbers_of_a_text(
    tmp_path: Path, family: str, name: str, shape: tuple[int, ...], words: str
) -> None:
    tensors = {name: torch.randn(shape).to(torch.float8_e4m3fn)}
    checkpoint = open_checkpoint(tiny_checkpoint(family, tmp_path, tensors=tensors))
    with pytest.raises(FamilyMismatch, match=words):
        token_log_likelihoods(checkpoint, TOKENS, "cpu", ReadMeter())


def test_norms_of_a_thousand_million_heads_are_not_looked_for(tmp_path: Path) -> None:
    config = {"qk_layernorm": True, "num_attention_heads": 10**9}
    faults = shape_faults(open_checkpoint(tiny_checkpoint("stablelm", tmp_path, config=config)))
    assert any(fault.tensor.endswith("q_layernorm.norms.4095.weight") for fault in faults)
    assert not any(fault.tensor.endswith("q_layernorm.norms.4096.weight") for fault in faults)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("granitemoe", ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight")),
        ("dbrx", ("ffn.router.layer.weight",)),
    ],
)
def test_scalars_in_the_place_of_stacks_and_routers_are_faults(
    tmp_path: Path, family: str, names: tuple[str, ...]
) -> None:
    healthy = open_checkpoint(tiny_checkpoint(family, tmp_path / "healthy"))
    full = [name for name in healthy.entries if name.endswith(names)]
    tensors = {name: torch.tensor(1.0) for name in full}
    broken = open_checkpoint(tiny_checkpoint(family, tmp_path / "broken", tensors=tensors))
    assert {fault.tensor for fault in shape_faults(broken)} == set(full)


def test_a_variant_that_differs_in_no_layer_of_the_model_has_its_likelihood(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama", tmp_path))
    declared, (same,) = variant_log_likelihoods(
        checkpoint, TOKENS, [Variant(checkpoint, frozenset({99}))], "cpu", ReadMeter()
    )
    assert isinstance(same, torch.Tensor)
    assert torch.equal(same, declared)
