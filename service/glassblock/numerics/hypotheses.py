"""What may have gone wrong between a checkpoint and captured tensors, as data.

A `Hypothesis` holds one value per factor; its defaults are the block as declared. A single mistake changes one factor,
a pair two. The factors are independent, and each touches few stages (`FACTORS_OF`), so that a hypothesis is replayed
only where a captured tensor can see it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from typing import Any, Literal

from glassblock.numerics.activations import ACTIVATIONS
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.norms import GainOrder, Norm
from glassblock.numerics.wiring import Placement, Wiring

Swap = Literal["none", "exchanged", "activation-on-up", "labels"]
NormScope = Literal["every", "input", "output", "residual"]

ALL_SWAPS: tuple[Swap, ...] = ("exchanged", "activation-on-up", "labels")

EPSILONS = (1e-3, 1e-4, 1e-5, 5e-6, 1e-6, 1e-7, 1e-8, 1e-12)
"""Values that engines and families take where nobody tells them; 5e-6 was once llama.cpp's."""

BLOCKS = (2, 4, 8, 16)
"""Tensor-parallel ranks whose blocks of [gate | up] are tried."""

CLIPPED = frozenset({"gelu_10", "relu6"})
"""Activations that equal another one but beyond a bound, where few gates come; no rival of that other one."""


@dataclass(frozen=True)
class Hypothesis:
    """One value per factor; every default means "as declared".

    Attributes:
        swap: `exchanged`: the up projection's weight is used as the gate's and the reverse. `activation-on-up`: the
            projections are right, the activation is put on the up branch. `labels`: what was captured as gate is up
            and the reverse, and the hidden units are right.
        layout: How the fused rows [gate | up] were read: `interleaved`, or as blocks of so many tensor-parallel ranks
            (`blocks-4`). With `-up-first` behind it, the rows lay as [up | gate]; with `-written`, they were written so
            and read as two halves.
        activation: A name of `ACTIVATIONS`, or `declared`.
        combine: How the branches meet: `declared` (mostly their product), or their `sum`.
        both_activated: The activation is on both branches.
        clamp: Whether the gating's clamp is `dropped`.
        eps: Epsilon, or None.
        eps_place: `outside`: x / (sqrt(mean square) + eps).
        offset: Added to the gain beyond what is declared: 1 (once too often) or -1 (not at all, or taken away).
        norm_bias: Whether the norm's bias is `dropped`.
        cast: The gain is multiplied in `before` or `after` the cast back to the input's dtype.
        norm_kind: `layernorm` or `rmsnorm` in place of the other.
        norm_passes: `twice`: what enters the norm has been normalised already, without the gain.
        norms: Which norms of the branch the norm factors are about, where there are several. No factor of its own.
        norm_from: The norm of the layer, by its role, whose tensors stand in for those of the norm in front of the
            network, or `declared`.
        placement: Where the norm stands, or `declared`.
        transposed: Which square weight is used transposed.
        network_bias: Whether the biases of the feed-forward network are `dropped`.
        residual: What the contribution is added to: the `stream`, the `normed` stream, or nothing (`absent`).
        scales: Whether the multipliers of stream, branch and network are `dropped`.
    """

    swap: Swap = "none"
    layout: str = "declared"
    activation: str = "declared"
    combine: Literal["declared", "sum"] = "declared"
    both_activated: bool = False
    clamp: Literal["declared", "dropped"] = "declared"
    eps: float | None = None
    eps_place: Literal["inside", "outside"] = "inside"
    offset: float = 0.0
    norm_bias: Literal["declared", "dropped"] = "declared"
    cast: Literal["declared", "before", "after"] = "declared"
    norm_kind: Literal["declared", "layernorm", "rmsnorm"] = "declared"
    norm_passes: Literal["once", "twice"] = "once"
    norms: NormScope = "every"
    norm_from: str = "declared"
    placement: str = "declared"
    transposed: Literal["none", "gate", "up", "down"] = "none"
    network_bias: Literal["declared", "dropped"] = "declared"
    residual: Literal["stream", "normed", "absent"] = "stream"
    scales: Literal["declared", "dropped"] = "declared"

    def function(self) -> "Hypothesis":
        """The same but for how the activation is spelt: two spellings of one formula differ by rounding alone."""
        row = ACTIVATIONS.get(self.activation)
        return self if row is None else replace(self, activation=row.formula)

    def departures(self) -> dict[str, object]:
        """The factors that are not as declared, with their values."""
        return {name: getattr(self, name) for name, default in DEFAULTS.items() if getattr(self, name) != default}


DECLARED = Hypothesis()
DEFAULTS = {each.name: each.default for each in fields(Hypothesis) if each.name != "norms"}

NORM_FACTORS = ("eps", "eps_place", "offset", "norm_bias", "cast", "norm_kind", "norm_passes")

HARMLESS = frozenset({"norm_passes"})
"""Factors that hardly change what a block computes. They are looked for alone, in no pair: they hide nothing."""

FACTORS_OF: dict[str, tuple[str, ...]] = {
    "x": (),
    "normed": ("placement", "norm_from", *NORM_FACTORS),
    "gate": ("swap", "layout", "transposed", "network_bias"),
    "up": ("swap", "layout", "transposed", "network_bias"),
    "activated": ("swap", "activation", "clamp", "scales"),
    "hidden": ("swap", "activation", "combine", "both_activated", "clamp", "scales"),
    "down": ("transposed", "network_bias", "scales"),
    "contribution": ("placement", "scales", *NORM_FACTORS),
    "output": ("placement", "scales", "residual", "norm_from", *NORM_FACTORS),
}
"""The factors that touch the step which makes a stage from the ones before it."""


@dataclass(frozen=True)
class Alternatives:
    """What a block might have been instead, as far as the block alone does not tell.

    Attributes:
        wirings: The same norms at other places, by placement.
        epsilons: Further epsilons: what other sources declare.
        norms: Other norms of the layer, by role.
    """

    wirings: tuple[Wiring, ...] = ()
    epsilons: tuple[float, ...] = ()
    norms: Mapping[str, Norm] = field(default_factory=dict[str, Norm])


def single_mistakes(
    feed_forward: FeedForward, wiring: Wiring, alternatives: Alternatives, *, swaps: tuple[Swap, ...] = ALL_SWAPS
) -> tuple[Hypothesis, ...]:
    """Every hypothesis that departs in one factor, of those the block can have.

    Args:
        feed_forward: The network as declared.
        wiring: The norms as declared.
        alternatives: What else it might have been.
        swaps: The exchanges that the captures can tell apart.
    """
    changes = (
        *_network_changes(feed_forward, swaps),
        *({"placement": other.placement.value} for other in alternatives.wirings if other is not wiring),
        *({"norm_from": role} for role in alternatives.norms if wiring.input_norm is not None),
        *_stream_changes(feed_forward, wiring),
    )
    singles = [replace(DECLARED, **change) for change in changes]
    roles = {role: norm for role, norm in _roles(wiring).items() if norm is not None}
    norms = tuple(roles.values())
    singles += [replace(DECLARED, **change) for change in _norm_changes(norms, alternatives.epsilons)]
    if len(roles) > 1:
        singles += [
            replace(DECLARED, norms=role, **change)
            for role, norm in roles.items()
            for change in _norm_changes((norm,), alternatives.epsilons)
        ]
    return tuple(singles)


def pairs_of(singles: tuple[Hypothesis, ...]) -> Iterator[Hypothesis]:
    """Every two single mistakes in different factors, none of them harmless, as one hypothesis."""
    harmful = (single for single in singles if HARMLESS.isdisjoint(single.departures()))
    for one, other in combinations(harmful, 2):
        pair = joined(one, other)
        if pair is not None:
            yield pair


def joined(one: Hypothesis, other: Hypothesis) -> Hypothesis | None:
    """Both at once; None where they are about the same factor, or about different norms."""
    mine, theirs = one.departures(), other.departures()
    if mine.keys() & theirs.keys():
        return None
    scopes = {hypothesis.norms for hypothesis in (one, other) if hypothesis.departures().keys() & set(NORM_FACTORS)}
    if len(scopes) > 1:
        return None
    return replace(one, norms=next(iter(scopes), "every"), **theirs)


def _network_changes(network: FeedForward, swaps: tuple[Swap, ...]) -> Iterator[Mapping[str, Any]]:
    if network.gated:
        yield from ({"swap": swap} for swap in swaps)
        yield from ({"layout": layout} for layout in _layouts(network.width))
        yield from ({"combine": "sum"}, {"both_activated": True})
        if network.gating.limit is not None:
            yield {"clamp": "dropped"}
    declared = network.activation.formula if network.gating.alpha is None else None
    for name, row in ACTIVATIONS.items():
        if row.formula != declared and name not in CLIPPED:
            yield {"activation": name}
    weights = {"gate": network.gate, "up": network.up, "down": network.down}
    if network.width == network.model_width:
        yield from ({"transposed": name} for name in ("down", "gate", "up") if weights[name] is not None)
    biases = (network.gate_bias, network.up_bias, network.down_bias)
    if any(bias is not None and bool(bias.any()) for bias in biases):
        yield {"network_bias": "dropped"}


def _layouts(width: int) -> Iterator[str]:
    if width < 2:
        return
    names = ["interleaved", *(f"blocks-{ranks}" for ranks in BLOCKS if width % ranks == 0 and ranks < width)]
    for name in names:
        yield from (name, f"{name}-up-first")
        if name != "blocks-2":  # which undoes itself
            yield f"{name}-written"


def _norm_changes(norms: tuple[Norm, ...], epsilons: tuple[float, ...]) -> Iterator[Mapping[str, Any]]:
    if not norms:
        return
    declared = {norm.eps for norm in norms}
    for eps in sorted({*EPSILONS, *epsilons} - (declared if len(declared) == 1 else set()), reverse=True):
        yield {"eps": eps}
    if any(norm.eps > 0 for norm in norms):
        yield {"eps_place": "outside"}
    if any(norm.gain is not None for norm in norms):
        yield from ({"offset": 1.0}, {"offset": -1.0})
    orders = {norm.kind.gain for norm in norms if not norm.kind.centred}
    if orders & {GainOrder.AFTER_CAST, GainOrder.WEIGHT_DTYPE}:
        yield {"cast": "before"}
    if GainOrder.BEFORE_CAST in orders:
        yield {"cast": "after"}
    if any(norm.bias is not None and bool(norm.bias.any()) for norm in norms):
        yield {"norm_bias": "dropped"}
    if any(not norm.kind.centred for norm in norms):
        yield {"norm_kind": "layernorm"}
    if any(norm.kind.centred for norm in norms):
        yield {"norm_kind": "rmsnorm"}
    yield {"norm_passes": "twice"}


def _stream_changes(network: FeedForward, wiring: Wiring) -> Iterator[Mapping[str, Any]]:
    if {wiring.residual_scale, wiring.branch_scale, network.gate_scale, network.down_scale} != {1.0}:
        yield {"scales": "dropped"}
    if wiring.placement is not Placement.PARALLEL:
        yield {"residual": "absent"}
        if wiring.input_norm is not None:
            yield {"residual": "normed"}


def _roles(wiring: Wiring) -> dict[NormScope, Norm | None]:
    return {"input": wiring.input_norm, "output": wiring.output_norm, "residual": wiring.residual_norm}
