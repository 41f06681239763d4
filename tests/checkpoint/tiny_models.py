"""Tiny random models of the families with mixtures, encoders and images, as their own code builds them."""

from typing import Any

import torch

BASE = {
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CHOSEN = {"num_experts_per_tok": 2}
_LOCAL = {"num_local_experts": 3, **_CHOSEN}
_EXPERTS = {"num_experts": 3, **_CHOSEN}
_ROUTED = {"n_routed_experts": 4, **_CHOSEN}
_NARROW = {"moe_intermediate_size": 40}
_SHARED = {"shared_expert_intermediate_size": 56}
_GROUPS = {"n_group": 2, "topk_group": 1}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_LINEAR = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": _LOCAL,
    "phimoe": _LOCAL,
    "minimax": _LOCAL,
    "minimax_m2": _LOCAL | {"rotary_dim": 8},
    "qwen2_moe": _EXPERTS | _NARROW | _SHARED | {"mlp_only_layers": [1]},
    "qwen3_moe": _EXPERTS | _NARROW | {"decoder_sparse_step": 2},
    "qwen3_vl_moe_text": _EXPERTS | _NARROW,
    "qwen3_next": _EXPERTS | _NARROW | _SHARED | _LINEAR | {"mlp_only_layers": [2]},
    "qwen3_5_moe_text": _EXPERTS | _NARROW | _SHARED | _LINEAR,
    "qwen3_5_text": _LINEAR,
    "olmoe": _EXPERTS | {"head_dim": 12},
    "flex_olmo": _EXPERTS,
    "glm4_moe": _ROUTED | _NARROW | {"n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True},
    "hunyuan_v1_moe": {"num_experts": 3, "moe_topk": 2},
    "afmoe": _EXPERTS | _NARROW | {"num_dense_layers": 1, "num_shared_experts": 2, "mup_enabled": True},
    "ernie4_5_moe": _NARROW
    | {
        "moe_num_experts": 3,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
        "use_bias": True,
    },
    "deepseek_v3": _ROUTED | _NARROW | _GROUPS | _LATENT | {"n_shared_experts": 2, "first_k_dense_replace": 1},
    "deepseek_v2": _ROUTED
    | _NARROW
    | _GROUPS
    | _LATENT
    | {"n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": None},
    "deepseek_v4": _ROUTED
    | {
        "q_lora_rank": 24,
        "o_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "num_key_value_heads": 1,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 4,
        "swiglu_limit": 0.5,
    },
    "longcat_flash": _LATENT
    | {
        "n_routed_experts": 4,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 40,
        "ffn_hidden_size": 72,
        "num_layers": 2,
    },
    "dbrx": {
        "d_model": 48,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 3, "moe_top_k": 2, "hidden_size": 48},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0},
    },
    "gpt_oss": _LOCAL | {"swiglu_limit": 0.5},
    "llama4_text": _LOCAL
    | {
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 72,
        "num_hidden_layers": 4,
        "interleave_moe_layer_step": 2,
    },
    "granitemoe": _LOCAL | {"residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "granitemoeshared": _LOCAL | {"shared_intermediate_size": 56, "residual_multiplier": 0.5},
    "granitemoehybrid": _LOCAL
    | {
        "shared_intermediate_size": 56,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 4,
        "mamba_d_head": 24,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "jetmoe": _LOCAL | {"kv_channels": 16},
    "aria_text": {"moe_num_experts": 3, "moe_topk": 2, "moe_num_shared_experts": 2},
    "jamba": _EXPERTS
    | {
        "num_hidden_layers": 4,
        "use_mamba_kernels": False,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "nemotron_h": _ROUTED
    | _NARROW
    | {
        "moe_shared_expert_intermediate_size": 56,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "attention", "mlp", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "layer_norm_epsilon": 1e-5,
        "n_group": 1,
        "topk_group": 1,
        "use_mamba_kernels": False,
    },
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 3,
        "top_k_experts": 2,
        "moe_intermediate_size": 40,
        "global_head_dim": 16,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
}
MIXTURES["nemotron_h latent"] = MIXTURES["nemotron_h"] | {"moe_latent_size": 32}
"""What a tiny config of each `model_type` says beside `BASE`; what follows a blank tells two of a type apart."""


def shaken(model: Any) -> Any:
    """The model with gains and biases off their ones and zeros, which would hide one in the wrong place."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if not parameter.is_floating_point() or any(part in name for part in ("rotary", "inv_freq", "embed_scale")):
            continue
        if parameter.ndim <= 1 or "bias" in name:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        elif "embed" not in name and parameter.ndim <= 3:
            parameter.data *= 8
    return model.eval()


_IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
_TEXT = {
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SIDE = _TEXT | {"num_key_value_heads": 2, "head_dim": 16}
_MODERN = _TEXT | {"cls_token_id": 1, "sep_token_id": 2}
_T5 = {
    "d_model": 48,
    "d_ff": 112,
    "d_kv": 16,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "vocab_size": 96,
}
_TOWERS = {"text_config": _TEXT | {"max_position_embeddings": 16}, "vision_config": _IMAGES}

ENCODERS: dict[str, dict[str, Any]] = {
    "t5": _T5 | {"feed_forward_proj": "gated-gelu"},
    "t5 plain": _T5,
    "mt5": _T5,
    "umt5": _T5 | {"feed_forward_proj": "gated-silu"},
    "t5gemma": {
        "encoder": _SIDE,
        "decoder": _SIDE | {"num_hidden_layers": 3, "hidden_size": 40, "intermediate_size": 88},
        "vocab_size": 96,
    },
    "whisper": {
        "d_model": 48,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_ffn_dim": 112,
        "decoder_ffn_dim": 96,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "vocab_size": 96,
        "num_mel_bins": 8,
        "max_source_positions": 16,
        "max_target_positions": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
    "moonshine": {
        "hidden_size": 48,
        "intermediate_size": 112,
        "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 3,
        "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4,
        "vocab_size": 96,
    },
    "bert": _TEXT,
    "roberta": _TEXT,
    "xlm-roberta": _TEXT,
    "modernbert": _MODERN,
    "modernbert biased": _MODERN | {"norm_bias": True, "mlp_bias": True},
    "modernbert-decoder": _MODERN,
    "nomic_bert": _TEXT,
    "esmc": _TEXT,
    "vit": _IMAGES,
    "siglip": _TOWERS,
    "siglip_vision_model": _IMAGES,
    "clip": _TOWERS,
    "clip_vision_model": _IMAGES,
    "dinov2": _IMAGES,
    "dinov2 gated": _IMAGES | {"use_swiglu_ffn": True},
    "dinov2_with_registers": _IMAGES,
    "dinov3_vit": _IMAGES | {"layerscale_value": 0.5},
    "dinov3_vit gated": _IMAGES | {"layerscale_value": 0.5, "use_gated_mlp": True, "hidden_act": "silu"},
    "phi4_multimodal_audio": {
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_blocks": 2,
        "num_attention_heads": 4,
        "input_size": 16,
        "nemo_conv_channels": 32,
        "ext_pw_out_channel": 32,
    },
    "moshi": _SIDE | {"ffn_dim": 112, "num_codebooks": 2, "audio_vocab_size": 16},
    "kyutai_speech_to_text": _SIDE
    | {"ffn_dim": 112, "codebook_vocab_size": 9, "num_codebooks": 2, "audio_pad_token_id": 8},
}
"""Configs of tiny encoders, encoder-decoders and image models; what follows a blank tells two of a type apart."""
