"""The mixtures of Granite, whose experts lie in one tensor."""

from types import MappingProxyType

from glassblock.checkpoint.conditions import Declares, unless
from glassblock.checkpoint.families.attention_makers import ATTENTION_BIAS, MULTIPLIER, heads
from glassblock.checkpoint.families.makers import (
    EPS_6,
    HEAD_OF_A_LARGER_MODEL,
    PRE_NORMS,
    TRUNKS,
    UNTIED,
    like,
    norms,
    sizes,
    source,
)
from glassblock.checkpoint.families.mixture_makers import CHOSEN_SOFTMAX, experts_of, fused_network, with_experts
from glassblock.checkpoint.family import Architecture, LogitsRow, MixtureRow, Setting, SizeSetting, Variant
from glassblock.numerics.wiring import Placement

_LOCAL, _CHOSEN = ("num_local_experts",), ("num_experts_per_tok",)
_LINEARS = ("input_linear", "output_linear")
_LOGITS = LogitsRow(divisor=Setting(("logits_scaling",), 1.0))

_GRANITE_EXPERTS = experts_of(
    "block_sparse_moe.router.layer",
    fused_network(*(f"block_sparse_moe.{name}" for name in _LINEARS)),
    arrangement="stacked",
    routing=CHOSEN_SOFTMAX,
)
_GRANITE_SHARED = fused_network(*(f"shared_mlp.{name}" for name in _LINEARS), width=("shared_width",))
_GRANITE_SIZES = with_experts(sizes(4096, 11008, 32, 32, 32000), (_LOCAL, 8), (_CHOSEN, 2))
_GRANITE_SHARED_SIZES = MappingProxyType(
    {**_GRANITE_SIZES, "shared_width": SizeSetting(("shared_intermediate_size",), None)}
)

GRANITEMOE = Architecture(
    name="granitemoe",
    model_types=("granitemoe",),
    architectures=("GraniteMoeForCausalLM", "GraniteMoeModel"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=_GRANITE_SIZES,
    feed_forward=None,
    mixture=_GRANITE_EXPERTS,
    norms=norms("rms_llama", EPS_6, *PRE_NORMS),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=UNTIED,
    verified="executed",
    sources=source("granitemoe"),
    embedding_scale=Setting(("embedding_multiplier",), 1.0),
    branch_scale=Setting(("residual_multiplier",), 1.0),
    attention=heads(bias=ATTENTION_BIAS, scale=MULTIPLIER),
    logits=_LOGITS,
    config_variants=(HEAD_OF_A_LARGER_MODEL,),
    notes=("What every branch adds is multiplied by residual_multiplier.",),
)

GRANITEMOESHARED = like(
    GRANITEMOE,
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    "GraniteMoeSharedModel",
    sizes=_GRANITE_SIZES,
    config_variants=(
        HEAD_OF_A_LARGER_MODEL,
        Variant(
            unless(Declares(("shared_intermediate_size",), (0,), 0)),
            MappingProxyType(
                {
                    "sizes": _GRANITE_SHARED_SIZES,
                    "mixture": MixtureRow(
                        _GRANITE_EXPERTS.router,
                        _GRANITE_EXPERTS.experts,
                        arrangement="stacked",
                        shared=_GRANITE_SHARED,
                        routing=CHOSEN_SOFTMAX,
                    ),
                }
            ),
        ),
    ),
    attention=heads(bias=ATTENTION_BIAS, scale=MULTIPLIER),
    logits=_LOGITS,
)

_HYBRID_SIZES = MappingProxyType({**_GRANITE_SIZES, "shared_width": SizeSetting(("shared_intermediate_size",), 1024)})
_HYBRID_DENSE_SIZES = MappingProxyType(
    {size: setting for size, setting in _HYBRID_SIZES.items() if size not in {"experts", "experts_per_token"}}
)

GRANITEMOEHYBRID = like(
    GRANITEMOE,
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    "GraniteMoeHybridModel",
    sizes=_HYBRID_SIZES,
    mixture=MixtureRow(
        _GRANITE_EXPERTS.router,
        _GRANITE_EXPERTS.experts,
        arrangement="stacked",
        shared=_GRANITE_SHARED,
        routing=CHOSEN_SOFTMAX,
    ),
    logits=_LOGITS,
    config_variants=(
        HEAD_OF_A_LARGER_MODEL,
        Variant(
            Declares(_LOCAL, (0,)),
            MappingProxyType({"sizes": _HYBRID_DENSE_SIZES, "feed_forward": _GRANITE_SHARED, "mixture": None}),
        ),
    ),
    notes=("Without experts the network is the shared one.",),
)

ROWS = (GRANITEMOE, GRANITEMOESHARED, GRANITEMOEHYBRID)
"""The rows of this module."""
