"""Mixtures whose attention compresses queries, keys and values: the DeepSeek families and LongCat."""

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType

from glassblock.checkpoint.attention_row import INTERLEAVED, PAIRS_BY_FLAG
from glassblock.checkpoint.conditions import Every, FromLayer, Holds, LayerKind, Whole, unless
from glassblock.checkpoint.families.attention_makers import latent_heads, rotary
from glassblock.checkpoint.families.makers import (
    EPS_5,
    EPS_6,
    MLP_BIAS,
    PRE_NORMS,
    TRUNKS,
    UNTIED,
    like,
    norms,
    sizes,
    source,
)
from glassblock.checkpoint.families.mixture_makers import (
    DEEPSEEK_ROUTING,
    META,
    dense_unless,
    experts_of,
    network,
    with_experts,
)
from glassblock.checkpoint.family import Architecture, NormRow, Ratio, RoutingRow, Setting, SizeSetting, Trunk, Variant
from glassblock.numerics.rotary import RotaryPrecision
from glassblock.numerics.wiring import Placement

_OWN_EPS = Setting((), 1e-6)
_KV_LATENT = NormRow("kv_latent", "self_attn.kv_a_layernorm", "rms_llama", _OWN_EPS, width=("kv_rank",))
_Q_LATENT = NormRow("q_latent", "self_attn.q_a_layernorm", "rms_llama", _OWN_EPS, width=("q_rank",))
_BLOCK_NORMS = norms("rms_llama", EPS_6, *PRE_NORMS)
_NOTES = (
    "The norms of the compressed queries and keys have an epsilon of 1e-6, whatever rms_norm_eps says.",
    "A layer after the last predicts a further token: its network is built as the others'.",
)

# q_lora_rank null means uncompressed queries, and is not told from an absent key: the tensors say which it is.
_UNCOMPRESSED = Variant(
    Every((Holds("self_attn.q_proj.weight"), unless(Holds("self_attn.q_a_layernorm.weight")))),
    MappingProxyType({"norms": (*_BLOCK_NORMS, _KV_LATENT)}),
)


def _latent(q_rank: int, kv_rank: int, nope: int, rope: int, v: int) -> dict[str, tuple[tuple[str, ...], int]]:
    """Sizes of compressed attention."""
    return {
        "q_rank": (("q_lora_rank",), q_rank),
        "kv_rank": (("kv_lora_rank",), kv_rank),
        "nope_head_dim": (("qk_nope_head_dim",), nope),
        "rope_head_dim": (("qk_rope_head_dim",), rope),
        "v_head_dim": (("v_head_dim",), v),
    }


_EXPERTS = network("mlp.experts.{j}.", width=("expert_width",))
_SHARED = network("mlp.shared_experts.", width=("expert_width", "shared_experts"))

_POSITIONS = Setting(("max_position_embeddings",), 4096.0)

DEEPSEEK_V3 = Architecture(
    name="deepseek_v3",
    model_types=("deepseek_v3", "kimi_k2"),
    architectures=("DeepseekV3ForCausalLM", "DeepseekV3Model"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=with_experts(
        sizes(7168, 18432, 61, 128, 129280, kv_heads=128, head_dim=Ratio("rope_head_dim")),
        (("n_routed_experts",), 256),
        (("num_experts_per_tok",), 8),
        expert_width=(("moe_intermediate_size",), 2048),
        shared_experts=(("n_shared_experts",), 1),
        **_latent(1536, 512, 128, 64, 128),
    ),
    feed_forward=None,
    mixture=experts_of(
        "mlp.gate",
        _EXPERTS,
        shared=_SHARED,
        correction="mlp.gate.e_score_correction_bias",
        routing=replace(
            DEEPSEEK_ROUTING,
            groups=Setting(("n_group",), 8.0),
            kept_groups=Setting(("topk_group",), 4.0),
            scaling=Setting(("routed_scaling_factor",), 2.5),
        ),
    ),
    norms=(*_BLOCK_NORMS, _Q_LATENT, _KV_LATENT),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=UNTIED,
    verified="executed",
    sources=(*source("deepseek_v3"), "deepseek-ai/DeepSeek-V3: README_WEIGHTS.md"),
    layer_variants=(dense_unless(FromLayer(Whole(("first_k_dense_replace",), 3)), network("mlp.")), _UNCOMPRESSED),
    extra_layers=Setting(("num_nextn_predict_layers",), 1.0),
    attention=latent_heads(
        rotary(of="rope_head_dim", arrangement=PAIRS_BY_FLAG, max_positions=_POSITIONS),
    ),
    notes=_NOTES,
)

_DEEPSEEK_V2_BIASED = network("mlp.shared_experts.", bias=MLP_BIAS, width=("expert_width", "shared_experts"))

DEEPSEEK_V2 = like(
    DEEPSEEK_V3,
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    "DeepseekV2Model",
    sizes=with_experts(
        sizes(4096, 11008, 32, 32, 102400, kv_heads=32, head_dim=Ratio("rope_head_dim")),
        (("n_routed_experts",), 64),
        (("num_experts_per_tok",), 6),
        expert_width=(("moe_intermediate_size",), 1407),
        shared_experts=(("n_shared_experts",), 2),
        **_latent(1536, 512, 128, 64, 128),
    ),
    mixture=experts_of(
        "mlp.gate",
        _EXPERTS,
        shared=_DEEPSEEK_V2_BIASED,
        routing=RoutingRow(
            grouped=Setting(
                ("topk_method",),
                default=False,
                meanings=MappingProxyType({"greedy": False, "group_limited_greedy": True}),
            ),
            groups=Setting(("n_group",), 1.0),
            kept_groups=Setting(("topk_group",), 1.0),
            scaling=Setting(("routed_scaling_factor",), 1.0),
            wide_logits=True,
        ),
    ),
    layer_variants=(
        dense_unless(FromLayer(Whole(("first_k_dense_replace",), 0)), network("mlp.", bias=MLP_BIAS)),
        _UNCOMPRESSED,
    ),
    extra_layers=Setting((), 0.0),
    attention=latent_heads(
        rotary(of="rope_head_dim", arrangement=INTERLEAVED, precision=RotaryPrecision.COMPLEX),
    ),
    notes=_NOTES[:1],
)

_CLAMP = MappingProxyType({"limit": Setting(("swiglu_limit",), 10.0)})
_V4_EXPERTS = network(
    "ffn.experts.{j}.", META, width=("expert_width",), gating="clamped_before", gating_parameters=_CLAMP
)
_V4_SHARED = network(
    "ffn.shared_experts.",
    META,
    width=("expert_width", "shared_experts"),
    gating="clamped_before",
    gating_parameters=_CLAMP,
)

_V4_BLOCK_NORMS = norms("rms_f32mul", EPS_6, ("attn_in", "attn_norm"), ("ffn_in", "ffn_norm"), ("final", "norm"))
_V4_Q_LATENT = NormRow("q_latent", "attn.q_norm", "rms_f32mul", EPS_6, width=("q_rank",))
_V4_COMPRESSED = NormRow("kv_compressed", "attn.compressor.norm", "rms_f32mul", EPS_6, width=("head_dim",))
_V4_INDEXED = NormRow("index_compressed", "attn.indexer.compressor.norm", "rms_f32mul", EPS_6, width=None)


def _v4_norms(latent: str, *more: NormRow) -> tuple[NormRow, ...]:
    """Norms of a layer, with the name of that of keys and values, and those of what is compressed once more."""
    kv_latent = NormRow("kv_latent", latent, "rms_f32mul", EPS_6, width=("head_dim",))
    return (*_V4_BLOCK_NORMS, _V4_Q_LATENT, kv_latent, *more)


def _v4_variants() -> Iterator[Variant]:
    """Layers with other norms of attention than its own: as the file holds them, whatever kind of layer it is."""
    for latent in ("attn.norm", "attn.kv_norm"):
        for more in ((), (_V4_COMPRESSED,), (_V4_COMPRESSED, _V4_INDEXED)):
            held = (Holds(f"{latent}.weight"), *(Holds(norm.gain) for norm in more))
            yield Variant(Every(held), MappingProxyType({"norms": _v4_norms(latent, *more)}))


DEEPSEEK_V4 = Architecture(
    name="deepseek_v4",
    model_types=("deepseek_v4",),
    architectures=("DeepseekV4ForCausalLM", "DeepseekV4Model"),
    trunks=(Trunk("model.", "head.weight"), Trunk("", "head.weight", "embed.weight")),
    layer="layers.{i}.",
    sizes=with_experts(
        sizes(4096, 2048, 43, 64, 129280, kv_heads=1, head_dim=512),
        (("n_routed_experts",), 256),
        (("num_experts_per_tok",), 6),
        expert_width=(("moe_intermediate_size", "intermediate_size"), 2048),
        shared_experts=(("n_shared_experts",), 1),
        q_rank=(("q_lora_rank",), 1024),
    ),
    feed_forward=None,
    mixture=experts_of("ffn.gate", _V4_EXPERTS, shared=_V4_SHARED, correction="ffn.gate.bias"),
    layer_variants=(
        Variant(
            LayerKind(("mlp_layer_types",), ("hash_moe",), unless(FromLayer(Whole(("num_hash_layers",), 3)))),
            MappingProxyType({"mixture": experts_of("ffn.gate", _V4_EXPERTS, shared=_V4_SHARED)}),
        ),
        *_v4_variants(),
    ),
    norms=_v4_norms("attn.kv_norm"),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=UNTIED,
    verified="executed",
    sources=source("deepseek_v4"),
    not_run="its branches join several residual streams (hyper-connections), which no wiring here does",
    notes=(
        "Gate and up are clamped before the activation.",
        "transformers 5.24 writes the norm of keys and values as attn.norm.",
        "The first layers choose experts by a table of tokens (ffn.gate.tid2eid), not by scores.",
    ),
)

LONGCAT_FLASH = Architecture(
    name="longcat_flash",
    model_types=("longcat_flash",),
    architectures=("LongcatFlashForCausalLM", "LongcatFlashModel"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=MappingProxyType(
        {
            **with_experts(
                sizes(6144, 12288, 28, 64, 131072, kv_heads=64, head_dim=Ratio("rope_head_dim")),
                (("n_routed_experts",), 512),
                (("moe_topk",), 12),
                expert_width=(("expert_ffn_hidden_size",), 2048),
                **_latent(1536, 512, 128, 64, 128),
            ),
            "intermediate": SizeSetting(("ffn_hidden_size", "intermediate_size"), 12288),
            "layers": SizeSetting(("num_layers",), 28),
        }
    ),
    feed_forward=network("mlps.0."),
    # The second dense network is the mixture's shared one: every token passes it, and the two join the stream together.
    mixture=experts_of(
        "mlp.router.classifier",
        _EXPERTS,
        shared=network("mlps.1."),
        correction="mlp.router.e_score_correction_bias",
        idle=True,
    ),
    norms=(
        *norms(
            "rms_llama",
            EPS_5,
            ("attn_in", "input_layernorm.0"),
            ("ffn_in", "post_attention_layernorm.0"),
            ("shared_attn_in", "input_layernorm.1"),
            ("shared_in", "post_attention_layernorm.1"),
            ("final", "norm"),
        ),
        replace(_Q_LATENT, template="self_attn.0.q_a_layernorm"),
        replace(_KV_LATENT, template="self_attn.0.kv_a_layernorm"),
        replace(_Q_LATENT, role="shared_q_latent", template="self_attn.1.q_a_layernorm"),
        replace(_KV_LATENT, role="shared_kv_latent", template="self_attn.1.kv_a_layernorm"),
    ),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=UNTIED,
    verified="executed",
    sources=source("longcat_flash"),
    not_run="a layer has two attentions and two dense networks, and its mixture joins the stream only at the end",
    notes=(
        "The networks are mlps.0, the mixture mlp and mlps.1, which is told as the mixture's shared network: it "
        "follows a second attention, behind norms of its own, and joins the stream where the mixture does.",
        "The router also chooses experts that return their input: they have no tensors, and it is wider than the rest.",
    ),
)

_ARCTIC_DENSE = network("block_sparse_moe.mlp.", META)

ARCTIC = Architecture(
    name="arctic",
    model_types=("arctic",),
    architectures=("ArcticForCausalLM", "ArcticModel"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=with_experts(
        sizes(4096, 14336, 32, 32, 32000, kv_heads=8), (("num_local_experts",), 8), (("num_experts_per_tok",), 1)
    ),
    feed_forward=network("residual_mlp.", META, width=("hidden",)),
    mixture=experts_of("block_sparse_moe.gate", network("block_sparse_moe.experts.{j}.", META)),
    norms=norms(
        "rms_llama",
        EPS_5,
        ("attn_in", "input_layernorm"),
        ("ffn_in", "residual_layernorm"),
        ("experts_in", "post_attention_layernorm"),
        ("final", "norm"),
    ),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=UNTIED,
    verified="source only",
    sources=("vllm-project/vllm: vllm/model_executor/models/arctic.py",),
    layer_variants=(
        Variant(
            unless(Holds("block_sparse_moe.gate.weight")),
            MappingProxyType(
                {
                    "feed_forward": _ARCTIC_DENSE,
                    "mixture": None,
                    "norms": norms("rms_llama", EPS_5, *PRE_NORMS),
                }
            ),
        ),
    ),
    not_run="its mixture reads the layer's input, beside the attention, and joins the stream after a dense network",
    notes=("post_attention_layernorm norms the layer's input for the mixture, in layers that have one.",),
)

ROWS = (DEEPSEEK_V3, DEEPSEEK_V2, DEEPSEEK_V4, LONGCAT_FLASH, ARCTIC)
"""The rows of this module."""
