"""The row type of the family table: where a family of models keeps its tensors, and what its config means.

A row is data. Names are exact templates, `{i}` the layer; what a config may declare is a `Setting` with the
family's own default, so that a value can always say where it comes from. Nothing outside `architectures`
knows a family by name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, Literal, TypeVar

from glassblock.numerics.wiring import Placement

T = TypeVar("T")

Size = Literal["hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab"]
Role = Literal["attn_in", "attn_out", "ffn_in", "ffn_out", "resid_attn", "resid_ffn", "final", "q", "k"]
"""Which norm: on a branch's input, on its output before the residual add, after that add, after the last layer,
on queries and on keys."""


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A value that a config may declare.

    Attributes:
        keys: Keys that hold it, dotted where nested; the first one present wins. Empty when the family fixes it.
        default: What the family's own code takes where no key is present.
    """

    keys: tuple[str, ...]
    default: T


@dataclass(frozen=True)
class Ratio:
    """A size that follows from others: `of` * `times` // `over`."""

    of: Size
    times: int = 1
    over: Size | None = None


@dataclass(frozen=True)
class SizeSetting:
    """A size that a config may declare; the default is a number or follows from other sizes."""

    keys: tuple[str, ...]
    default: int | Ratio


@dataclass(frozen=True)
class SquareRoot:
    """A multiplier that is the square root of a size, rounded to the dtype of the weights."""

    of: Size


@dataclass(frozen=True)
class Projection:
    """A linear map: names of its weight and bias, relative to the layer."""

    weight: str
    bias: str


@dataclass(frozen=True)
class FusedProjection:
    """Gate and up projection in one tensor.

    Attributes:
        weight: Its name, relative to the layer.
        bias: Name of its bias, ordered as the weight's rows.
        order: Which of the two comes first.
        arrangement: `halves`, or `interleaved` (even and odd neurons).
    """

    weight: str
    bias: str
    order: tuple[Literal["gate", "up"], Literal["gate", "up"]] = ("gate", "up")
    arrangement: Literal["halves", "interleaved"] = "halves"


@dataclass(frozen=True)
class FeedForwardRow:
    """The feed-forward network.

    Attributes:
        down: The projection back to the model's width.
        activation: The activation's name, as `numerics.activations` knows it.
        bias: Whether all its projections have a bias.
        gate: The gate projection; None in a plain network, or where it is fused.
        up: The up projection; None where it is fused.
        fused: Gate and up in one tensor.
        layout: How weights are stored: `out_in` as torch's Linear, `in_out` as Conv1D.
        gating: How gate and up meet, as `numerics.activations.GATINGS` knows it.
        gating_parameters: The numbers that this gating needs.
    """

    down: Projection
    activation: Setting[str]
    bias: Setting[bool]
    gate: Projection | None = None
    up: Projection | None = None
    fused: FusedProjection | None = None
    layout: Literal["out_in", "in_out"] = "out_in"
    gating: str = "product"
    gating_parameters: Mapping[str, Setting[float]] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def gated(self) -> bool:
        """Whether it has a gate."""
        return self.gate is not None or self.fused is not None


@dataclass(frozen=True)
class NormRow:
    """One norm of a layer, or the final one.

    Attributes:
        role: Where it stands.
        template: Name of its tensors without `.weight` or `.bias`, relative to the layer (`final`: to the trunk).
        kind: Its arithmetic, as `numerics.norms.NORM_KINDS` knows it.
        eps: Its epsilon.
        has_bias: Whether a bias is stored.
        width: Sizes whose product is its number of channels.
    """

    role: Role
    template: str
    kind: str
    eps: Setting[float]
    has_bias: bool = False
    width: tuple[Size, ...] = ("hidden",)

    @property
    def gain(self) -> str:
        """Name of its gain, relative as `template`."""
        return f"{self.template}.weight"

    @property
    def bias(self) -> str:
        """Name that a bias of it has or would have."""
        return f"{self.template}.bias"


@dataclass(frozen=True)
class Trunk:
    """One way in which files of a family prefix their names.

    Attributes:
        prefix: Before the names of layers, embedding and final norm.
        head: Full name of the output head.
    """

    prefix: str
    head: str


@dataclass(frozen=True)
class Architecture:
    """One family.

    Attributes:
        name: How it is called here, and by `--family`.
        model_types: Values of the config's `model_type` that mean it.
        architectures: Values in the config's `architectures` that mean it.
        trunks: Prefixes, tried in this order against the names in the file.
        layer: Template of a layer's prefix after the trunk's.
        sizes: The sizes that its config declares.
        feed_forward: Its feed-forward network.
        norms: Its norms; `final` is the one after the last layer.
        placement: Where the norms of the feed-forward block are.
        embedding: Name of the token embedding, relative to the trunk.
        tied: Whether the output head is the embedding.
        embedding_scale: Multiplies embedding rows before the first layer; None for no multiplier.
        residual_scale: Multiplies the residual stream at the add (`numerics.wiring`'s alpha).
        branch_scale: Multiplies what a branch adds (beta).
        nested: Keys under which the language model's config may lie inside a larger one.
        verified: `executed` when a test rebuilds it with the models' own code, `source only` otherwise.
        sources: Where its facts were read.
        notes: What surprises.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    trunks: tuple[Trunk, ...]
    layer: str
    sizes: Mapping[Size, SizeSetting]
    feed_forward: FeedForwardRow
    norms: tuple[NormRow, ...]
    placement: Placement
    embedding: str
    tied: Setting[bool]
    verified: Literal["executed", "source only"]
    sources: tuple[str, ...]
    embedding_scale: Setting[float] | SquareRoot | None = None
    residual_scale: Setting[float] = Setting((), 1.0)
    branch_scale: Setting[float] = Setting((), 1.0)
    nested: tuple[str, ...] = ("text_config",)
    notes: tuple[str, ...] = ()

    def norm(self, role: str) -> NormRow | None:
        """The norm in that role, or None where the family has none."""
        return next((norm for norm in self.norms if norm.role == role), None)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles in which it has norms."""
        return tuple(norm.role for norm in self.norms)

    def layer_names(self) -> Iterable[str]:
        """Names relative to a layer by which a layer of this family is recognised."""
        yield self.feed_forward.down.weight
        for norm in self.norms:
            if norm.role != "final":
                yield norm.gain
