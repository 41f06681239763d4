"""The Cohere families."""

from glassblock.checkpoint.attention_row import INTERLEAVED, RotaryRow
from glassblock.checkpoint.conditions import Every, Says
from glassblock.checkpoint.families.attention_makers import (
    ATTENTION_BIAS,
    WINDOW_4096,
    all_but_every,
    heads,
    rotary,
    sliding,
)
from glassblock.checkpoint.families.llama import LLAMA
from glassblock.checkpoint.families.makers import (
    EPS_LAYER_NORM,
    HEAD_OF_A_LARGER_MODEL,
    NEVER,
    SILU,
    TIED,
    Places,
    gated,
    like,
    norms,
    sizes,
    where,
)
from glassblock.checkpoint.family import (
    LogitsRow,
    NormRow,
    Setting,
)
from glassblock.numerics.rotary import RotaryPrecision
from glassblock.numerics.wiring import Placement

_PLACES: Places = (("attn_in", "input_layernorm"), ("ffn_in", "input_layernorm"), ("final", "norm"))
_NORMS = norms("layernorm_cohere", EPS_LAYER_NORM, *_PLACES)

_LOGITS = LogitsRow(scale=Setting(("logit_scale",), 0.0625))
_SLIDING = sliding(all_but_every("sliding_window_pattern", 4))


def _rotary(theta: float) -> RotaryRow:
    return rotary(theta, arrangement=INTERLEAVED, precision=RotaryPrecision.ROUNDED_TABLE)


COHERE = like(
    LLAMA,
    "cohere",
    "CohereForCausalLM",
    "CohereModel",
    sizes=sizes(8192, 22528, 40, 64, 256000, kv_heads=64),
    feed_forward=gated(SILU, NEVER),
    norms=_NORMS,
    placement=Placement.PARALLEL,
    tied=TIED,
    config_variants=(
        HEAD_OF_A_LARGER_MODEL,
        where(
            "use_qk_norm",
            equals=True,
            default=False,
            norms=(
                *_NORMS,
                NormRow(
                    "q",
                    "self_attn.q_norm",
                    "layernorm_cohere",
                    EPS_LAYER_NORM,
                    width=("heads", "head_dim"),
                    per_head=True,
                ),
                NormRow(
                    "k",
                    "self_attn.k_norm",
                    "layernorm_cohere",
                    EPS_LAYER_NORM,
                    width=("kv_heads", "head_dim"),
                    per_head=True,
                ),
            ),
        ),
    ),
    attention=heads(bias=ATTENTION_BIAS, rotary=_rotary(500000.0)),
    logits=_LOGITS,
    notes=("LayerNorm without a bias: its tensors look like those of RMSNorm. One norm feeds both branches.",),
)

COHERE2 = like(
    COHERE,
    "cohere2",
    "Cohere2ForCausalLM",
    "Cohere2Model",
    sizes=sizes(8192, 22528, 40, 64, 256000, kv_heads=64),
    config_variants=(HEAD_OF_A_LARGER_MODEL,),
    attention=heads(
        bias=ATTENTION_BIAS,
        window=WINDOW_4096,
        window_in=_SLIDING,
        rotary=_rotary(10000.0),
        turned_in=Every((_SLIDING, Says(("sliding_window",)))),
    ),
    logits=_LOGITS,
)


ROWS = (
    COHERE,
    COHERE2,
)
"""The rows of this module."""
