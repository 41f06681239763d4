"""The row type of a family's attention: where its tensors lie and what its config means.

Norms of queries and keys are the row's norms in the roles `q` and `k`; which of the three kinds they are follows from
their widths. What is otherwise in some layers is here as a condition on the layer: a window, positions that do not
turn it.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from glassblock.checkpoint.conditions import Condition
from glassblock.checkpoint.row_settings import Layout, Projection, Setting, Size
from glassblock.numerics.rotary import Arrangement, RotaryPrecision

THETA_KEYS = ("rope_scaling.rope_theta", "rope_parameters.rope_theta", "rope_theta")
SHARE_KEYS = (
    "rope_scaling.partial_rotary_factor",
    "rope_parameters.partial_rotary_factor",
    "partial_rotary_factor",
)


@dataclass(frozen=True)
class RotaryRow:
    """How positions turn queries and keys.

    Attributes:
        theta: The base of the frequencies.
        forms: Keys under which the parameters of the form lie, the first one present; `rope_parameters` in configs of
            transformers 5, `rope_scaling` in older ones. Without any the form is the default one.
        form: The parameters where none is declared, for families whose code has others than the default form's.
        share: Which part of a head is turned. Only where the family's own code reads a share has it keys: others turn
            what they do whatever a config says, and a config that says otherwise is refused.
        dim: How many channels are turned, where the family counts them instead; None where nothing is declared for the
            whole head.
        of: The size that is turned: a head's width, or the part of a head that carries positions.
        arrangement: Which channels make a pair, as `numerics.rotary.Arrangement` names it.
        precision: Where the cast from float32 is.
        max_positions: The longest sequence that the model was made for; null where only the config tells, which a form
            that needs it then must.
        next_even: Whether an odd number of turned channels is one more, at the frequencies of the odd number.
        original_key: A key beside the form that holds the original length and speaks before the form's own (Phi-3).
    """

    theta: Setting[float] = Setting(THETA_KEYS, 10000.0)
    forms: tuple[str, ...] = ("rope_scaling", "rope_parameters")
    form: tuple[tuple[str, object], ...] = ()
    share: Setting[float] = Setting((), 1.0)
    dim: Setting[float | None] | None = None
    of: Size = "head_dim"
    arrangement: Setting[str] = Setting((), Arrangement.HALVES.value)
    precision: RotaryPrecision = RotaryPrecision.ROUNDED
    max_positions: Setting[float | None] = Setting(("max_position_embeddings",), None)
    next_even: bool = False
    original_key: str | None = None


@dataclass(frozen=True)
class ScoreScale:
    """What the scores are multiplied by: `of`, or else the width of a head, ** `power`.

    Where `by_layer` says so it is divided by the layer's number plus one (GPT-2).
    """

    of: Setting[float] | None = None
    power: float = -0.5
    by_layer: Setting[bool] = Setting((), default=False)


@dataclass(frozen=True)
class FusedHeads:
    """Queries, keys and values in one tensor.

    Attributes:
        projection: Its name, and that of its bias.
        arrangement: `blocks`: all queries, all keys, all values; `groups`: for each head of keys its queries, its key,
            its value, one head after the other.
    """

    projection: Projection
    arrangement: Literal["blocks", "groups"] = "blocks"


@dataclass(frozen=True)
class AttentionRow:
    """Attention with heads of queries, keys and values.

    Attributes:
        output: The projection back to the model's width.
        query: The projection to queries; None where it is fused.
        key: That to keys.
        value: That to values.
        fused: All three in one tensor.
        bias: Whether these have a bias.
        output_bias: Whether `output` has one, where that is a question of its own.
        key_bias: Whether `key` has one, where that is a question of its own.
        layout: How the weights are stored.
        scale: What the scores are multiplied by.
        softcap: The soft cap of the scores.
        window: How many tokens a token sees, itself included; null for all before it.
        window_in: The layers in which the window holds.
        sinks: Name of one more logit for each head, relative to the layer.
        clip: Queries, keys and values are clamped to plus and minus this.
        clip_after_norms: Whether the clamp comes after the norms.
        norms_after_rotary: Whether the norms of queries and keys come after the rotation.
        rotary: How positions turn them; None where nothing does.
        turned_in: The layers that positions turn.
        windowed_rotary: In place of `rotary` in the layers in which the window holds.
    """

    output: Projection
    query: Projection | None = None
    key: Projection | None = None
    value: Projection | None = None
    fused: FusedHeads | None = None
    bias: Setting[bool] = Setting((), default=False)
    output_bias: Setting[bool] | None = None
    key_bias: Setting[bool] | None = None
    layout: Layout = "out_in"
    scale: ScoreScale = ScoreScale()
    softcap: Setting[float | None] = Setting((), None)
    window: Setting[float | None] = Setting((), None)
    window_in: Condition | None = None
    sinks: str | None = None
    clip: Setting[float | None] = Setting((), None)
    clip_after_norms: bool = False
    norms_after_rotary: bool = False
    rotary: RotaryRow | None = RotaryRow()
    turned_in: Condition | None = None
    windowed_rotary: RotaryRow | None = None


@dataclass(frozen=True)
class LatentAttentionRow:
    """Attention with keys and values from one narrow latent (DeepSeek-V2, 2024).

    The norms of the latents are the row's, in the roles `q_latent` and `kv_latent`. Queries are read from a latent of
    their own where the file has it.

    Attributes:
        query: The projection to queries, without a latent.
        query_down: That to the latent of queries.
        query_up: That from it to queries.
        key_value_down: That to the latent of keys and values and to the turned part of keys.
        key_value_up: That from the latent to keys and values.
        output: The projection back to the model's width.
        bias: Whether those down and that back have a bias.
        rotary: Turns the part of heads that carries positions.
        scaled: Whether the form's `mscale_all_dim` also scales the scores.
    """

    query: Projection
    query_down: Projection
    query_up: Projection
    key_value_down: Projection
    key_value_up: Projection
    output: Projection
    rotary: RotaryRow
    bias: Setting[bool] = Setting((), default=False)
    scaled: bool = True


INTERLEAVED = Setting((), Arrangement.PAIRS.value)
"""Pairs of neighbouring channels."""

PAIRS_BY_FLAG = Setting(
    ("rope_interleave",),
    Arrangement.PAIRS_TO_HALVES.value,
    meanings=MappingProxyType({True: Arrangement.PAIRS_TO_HALVES.value, False: Arrangement.HALVES.value}),
)
"""DeepSeek-V3's flag."""
