"""The row type of the family table: where a family of models keeps its tensors, and what its config means.

A row is data. Names are exact templates, `{i}` the layer, `{j}` the expert; what a config may declare is a `Setting`
with the family's own default, so that a value can always say where it comes from. What is otherwise under a flag of
the config, or in some of the layers, is a `Variant`: a condition and the fields that it replaces. Nothing outside the
table knows a family by name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from glassblock.checkpoint.attention_row import AttentionRow, LatentAttentionRow
from glassblock.checkpoint.conditions import Condition
from glassblock.checkpoint.logits_row import LogitsRow, PositionsRow
from glassblock.checkpoint.routing_row import RoutingRow
from glassblock.checkpoint.row_settings import (
    Layout,
    OverRootDepth,
    Projection,
    Ratio,
    Scale,
    Setting,
    Size,
    SizeSetting,
    SquareRoot,
    TwoThirds,
)
from glassblock.numerics.fused_layouts import RowLayout
from glassblock.numerics.wiring import Placement

__all__ = [
    "ROLES_OF",
    "Architecture",
    "AttentionRow",
    "Branch",
    "FeedForwardRow",
    "FusedProjection",
    "LatentAttentionRow",
    "Layout",
    "LogitsRow",
    "MixtureRow",
    "NormRow",
    "OverRootDepth",
    "PositionsRow",
    "Projection",
    "Ratio",
    "Role",
    "RoutingRow",
    "Scale",
    "Setting",
    "Size",
    "SizeSetting",
    "SquareRoot",
    "Trunk",
    "TwoThirds",
    "Variant",
]

Role = Literal[
    "attn_in",
    "attn_out",
    "ffn_in",
    "ffn_out",
    "resid_attn",
    "resid_ffn",
    "final",
    "q",
    "k",
    "v",
    "q_latent",
    "kv_latent",
    "ffn_hidden",
    "attn_hidden",
    "embedding",
    "experts_in",
    "experts_out",
    "dense_out",
    "shared_attn_in",
    "shared_in",
    "layer_input",
    "cross_in",
    "cross_out",
    "low_rank_out",
    "streams_in",
    "layer_out",
    "shared_q_latent",
    "shared_kv_latent",
    "kv_compressed",
    "index_compressed",
]
"""Which norm: on a branch's input, on its output before the residual add, after that add, after the last layer, on
queries, on keys, on values, on their compressed forms, in front of the projection back to the model's width, on
embedding rows; where a dense network and a mixture run side by side, on what experts read and return, and on what
the network returns; where the shared network reads the stream further on, on what it and the attention in front of
it read, and on the compressed forms there; on what an input of each layer's own adds after both branches; on what
attention to an encoder reads and returns; on what a low-rank branch beside attention adds, and on what a router
among several streams reads; on what leaves a layer of several networks; on keys and values that are compressed once
more, those of an index among them.
"""

Branch = Literal["ffn", "attention"]
ROLES_OF: Mapping[Branch, tuple[Role, Role, Role]] = MappingProxyType(
    {"ffn": ("ffn_in", "ffn_out", "resid_ffn"), "attention": ("attn_in", "attn_out", "resid_attn")}
)
"""The norms in a branch's input, output and residual places, as `Wiring` has them."""


@dataclass(frozen=True)
class FusedProjection:
    """Gate and up projection in one tensor.

    Attributes:
        weight: Its name, relative to the layer.
        bias: Name of its bias, ordered as the weight's rows.
        order: Which of the two comes first.
        arrangement: `halves`, `interleaved` (even and odd rows), or `blocks`: halves in each of several blocks, as
            tensor-parallel ranks write them one after the other.
        blocks: How many those are, such as `tensor_model_parallel_size`; with the arrangement `blocks` alone.
    """

    weight: str
    bias: str
    order: tuple[Literal["gate", "up"], Literal["gate", "up"]] = ("gate", "up")
    arrangement: Literal["halves", "interleaved", "blocks"] = "halves"
    blocks: Setting[float] | None = None

    def layout(self, rows: int, *, blocks: int = 1) -> RowLayout | None:
        """How the rows lie, where there are so many of them, in so many blocks; None where that does not come out."""
        groups = max(rows // 2, 1) if self.arrangement == "interleaved" else blocks
        return None if rows % (2 * groups) else RowLayout(groups, gate_first=self.order[0] == "gate")


@dataclass(frozen=True)
class FeedForwardRow:
    """A feed-forward network, dense or one expert.

    Attributes:
        down: The projection back to the model's width.
        activation: The activation's name, as `numerics.activations` knows it.
        bias: Whether its projections have a bias.
        gate: The gate projection; None in a plain network, or where it is fused.
        up: The up projection; None where it is fused.
        fused: Gate and up in one tensor.
        width: Sizes whose product is the number of its hidden units; None where only a layer's own tensors show it.
        outer: The size of what it reads and returns.
        layout: How its weights are stored.
        down_layout: The same for `down`, where that differs.
        down_bias: Whether `down` has a bias, where that is a question of its own.
        bias_in_files: Whether an argument that no config tells leaves biases out or puts them in, so that `bias` is no
            more than its default: what the files hold in any layer all of them have.
        gating: How gate and up meet, as `numerics.activations.GATINGS` knows it.
        gating_parameters: The numbers that this gating needs.
        activation_tensors: Names of the tensors that a learned activation needs, by parameter, relative to the layer.
        gate_scale: Multiplies what the gate projection returns.
        down_scale: Multiplies what the network returns.
        gate_sparsity: The share of the gate that is cut away, as `numerics.feed_forward.read_of_gate` does it.
    """

    down: Projection
    activation: Setting[str]
    bias: Setting[bool]
    gate: Projection | None = None
    up: Projection | None = None
    fused: FusedProjection | None = None
    width: tuple[Size, ...] | None = ("intermediate",)
    outer: Size = "hidden"
    layout: Layout = "out_in"
    down_layout: Layout | None = None
    down_bias: Setting[bool] | None = None
    bias_in_files: bool = False
    gating: str = "product"
    gating_parameters: Mapping[str, Setting[float]] = field(default_factory=lambda: MappingProxyType({}))
    activation_tensors: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    gate_scale: Setting[float] | None = None
    down_scale: Setting[float] | None = None
    gate_sparsity: float = 0.0

    @property
    def gated(self) -> bool:
        """Whether it has a gate."""
        return self.gate is not None or self.fused is not None

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """How gate and up are stored, and how `down` is."""
        return self.layout, self.down_layout or self.layout


@dataclass(frozen=True)
class MixtureRow:
    """A mixture of experts.

    Attributes:
        router: The projection to one number for each expert.
        experts: One expert's network. Its names have `{j}` where every expert has tensors of its own.
        arrangement: `separate`: tensors of its own for each expert; `stacked`: one tensor with the experts as its first
            axis; `concatenated`: one matrix with the experts' rows one after the other.
        count: The size that counts the experts.
        router_bias: Whether the router has a bias.
        router_layout: How its weight is stored.
        correction: Name of a bias that takes part in choosing the experts, not in weighting them.
        shared: A network that every token passes.
        shared_gate: Name of the weight `[1, d]` whose sigmoid multiplies the shared network's output.
        output_bias: Name of a vector that is added to what the mixture returns.
        idle: Whether the router also chooses experts without tensors, which return their input.
        routing: From the router's logits to the weights of the chosen experts; None where that was not read, so that
            the experts are run one by one and not the whole.
    """

    router: Projection
    experts: FeedForwardRow
    arrangement: Literal["separate", "stacked", "concatenated"] = "separate"
    count: Size = "experts"
    router_bias: Setting[bool] = Setting((), default=False)
    router_layout: Layout = "out_in"
    correction: str | None = None
    shared: FeedForwardRow | None = None
    shared_gate: str | None = None
    output_bias: str | None = None
    idle: bool = False
    routing: RoutingRow | None = None


@dataclass(frozen=True)
class NormRow:
    """One norm of a layer, or the final one.

    Attributes:
        role: Where it stands.
        template: Name of its tensors without `.weight` or `.bias`, relative to the layer (`final`: to the trunk).
            With `{h}` in it every head has tensors of its own.
        kind: Its arithmetic, as `numerics.norms.NORM_KINDS` knows it.
        eps: Its epsilon.
        has_bias: Whether a bias is stored.
        width: Sizes whose product is its number of channels; None where only a layer's own tensors show it.
        has_gain: Whether a gain is stored.
        per_head: Whether there is one norm for each of `width`'s first size: rows of one matrix, or tensors apart.
        gain_suffix: What follows the template in the gain's name.
        bias_suffix: What follows it in the bias's name.
    """

    role: Role
    template: str
    kind: str
    eps: Setting[float]
    has_bias: bool = False
    width: tuple[Size, ...] | None = ("hidden",)
    has_gain: bool = True
    per_head: bool = False
    gain_suffix: str = ".weight"
    bias_suffix: str = ".bias"

    @property
    def apart(self) -> bool:
        """Whether every head has tensors of its own."""
        return "{h}" in self.template

    @property
    def gain(self) -> str:
        """Name that a gain of it has or would have, relative as `template`."""
        return self.template + self.gain_suffix

    @property
    def bias(self) -> str:
        """Name that a bias of it has or would have."""
        return self.template + self.bias_suffix


@dataclass(frozen=True)
class Trunk:
    """One way in which files of a family prefix their names.

    Attributes:
        prefix: Before the names of layers, embedding and final norm.
        head: Full name of the output head; None in models without one.
        embedding: Full name of the token embedding, where it does not lie under the prefix.
    """

    prefix: str
    head: str | None
    embedding: str | None = None


@dataclass(frozen=True)
class Variant:
    """What is otherwise where a condition holds.

    Attributes:
        when: A condition on the config, or on the layer.
        changes: Fields of the `Architecture` and what they are then.
    """

    when: Condition
    changes: Mapping[str, Any]


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
        feed_forward: Its dense feed-forward network; None where a layer has none.
        norms: Its norms; `final` is the one after the last layer.
        placement: Where the norms of the feed-forward block are.
        embedding: Name of the token embedding, relative to the trunk; None in models that read no tokens.
        embedding_projections: Names of the projections from the embedding's width to the layers', and back in front of
            the head, relative to the trunk; they are there where the two widths differ.
        tied: Whether the output head is the embedding.
        verified: `executed` when a test rebuilds it with the models' own code, `source only` otherwise.
        sources: Where its facts were read.
        mixture: Its mixture of experts; None where a layer has none.
        attention_placement: Where the norms of the attention block are; None for as in the feed-forward block.
        embedding_scale: Multiplies embedding rows before the first layer; None for no multiplier.
        embedding_norm: Normalises them after that, named relative to the trunk; None in nearly every family.
        residual_scale: Multiplies the residual stream at the add (`numerics.wiring`'s alpha).
        branch_scale: Multiplies what a branch adds (beta).
        branches_first: Whether two parallel branches are summed before the stream is added, which rounds otherwise.
        branch_gain: Name of a vector that multiplies what the feed-forward branch adds, relative to the layer.
        nested: Keys under which the language model's config may lie inside a larger one.
        config_file: The file that is its config.
        config_variants: What is otherwise in some configs.
        layer_variants: What is otherwise in some layers.
        towers: Other stacks of layers in the same files, by name: the encoder of an encoder-decoder.
        extra_layers: How many layers a file may hold after the declared ones: those that predict further tokens.
        not_run: Why a block of it is not run here; None where it is. Its files are audited all the same.
        attention: Its attention; None where it is not read here, so that a block takes posted states and no text.
        positions: Learned positions that are added to the embedding rows; None for none.
        logits: What is made of the last norm's output times the head; None where more lies between the two, which is
            not read here.
        notes: What surprises.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    trunks: tuple[Trunk, ...]
    layer: str
    sizes: Mapping[Size, SizeSetting]
    feed_forward: FeedForwardRow | None
    norms: tuple[NormRow, ...]
    placement: Placement
    embedding: str | None
    tied: Setting[bool]
    verified: Literal["executed", "source only"]
    sources: tuple[str, ...]
    mixture: MixtureRow | None = None
    attention_placement: Placement | None = None
    embedding_scale: Setting[float] | SquareRoot | None = None
    embedding_norm: NormRow | None = None
    residual_scale: Setting[float] = Setting((), 1.0)
    branch_scale: Scale = Setting((), 1.0)
    branches_first: bool = False
    branch_gain: str | None = None
    nested: tuple[str, ...] = ("text_config", "llm_config", "language_config")
    config_file: Literal["config.json", "params.json"] = "config.json"
    config_variants: tuple[Variant, ...] = ()
    layer_variants: tuple[Variant, ...] = ()
    towers: Mapping[str, "Architecture"] = field(default_factory=lambda: MappingProxyType({}))
    extra_layers: Setting[float] = Setting((), 0.0)
    not_run: str | None = None
    embedding_projections: tuple[str, str] | None = None
    attention: AttentionRow | LatentAttentionRow | None = None
    positions: PositionsRow | None = None
    logits: LogitsRow | None = LogitsRow()
    notes: tuple[str, ...] = ()

    def norm(self, role: str) -> NormRow | None:
        """The norm in that role, or None where the family has none."""
        return next((norm for norm in self.norms if norm.role == role), None)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles in which it has norms."""
        return tuple(norm.role for norm in self.norms)

    @property
    def networks(self) -> tuple[FeedForwardRow, ...]:
        """Every kind of feed-forward network in its layers: dense ones first, then experts and shared ones."""
        dense = [self.feed_forward, *(variant.changes.get("feed_forward") for variant in self.layer_variants)]
        parts = [part for mixture in self.mixtures for part in (mixture.experts, mixture.shared)]
        return tuple(network for network in (*dense, *parts) if network is not None)

    @property
    def mixtures(self) -> tuple[MixtureRow, ...]:
        """Every kind of mixture in its layers."""
        mixtures = [self.mixture, *(variant.changes.get("mixture") for variant in self.layer_variants)]
        return tuple(mixture for mixture in mixtures if mixture is not None)

    @property
    def routings(self) -> tuple[RoutingRow, ...]:
        """The routers of its mixtures."""
        return tuple(mixture.routing for mixture in self.mixtures if mixture.routing is not None)

    @property
    def network(self) -> FeedForwardRow:
        """The network that speaks for the family: the dense one, or else an expert's."""
        return self.networks[0]

    def layer_names(self) -> Iterator[str]:
        """Templates of names relative to a layer by which a layer of this family is recognised."""
        for network in self.networks:
            yield network.down.weight
        norms = [self.norms, *(variant.changes.get("norms", ()) for variant in self.layer_variants)]
        for norm in (norm for group in norms for norm in group):
            if norm.role != "final" and norm.has_gain:
                yield norm.gain
