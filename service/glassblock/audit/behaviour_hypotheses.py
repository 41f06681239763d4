"""The mistakes that a text is asked about, each as the checkpoint without it; one at a time, the most suspect first."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, cast

from glassblock.audit.activation_keys import ACTIVATION_KEYS
from glassblock.audit.against import canonical_activation, their_settings
from glassblock.audit.behaviour_types import Hypothesis, LeftOut, Weights
from glassblock.audit.evidence import Evidence
from glassblock.audit.fix import Unrepaired
from glassblock.audit.fixes import FIXES, joined, repair_of
from glassblock.audit.gate_plans import LAYOUT_RULES
from glassblock.checkpoint.changes import Add, Cast
from glassblock.checkpoint.config import as_epsilon, declared_eps, find
from glassblock.checkpoint.entries import FLOAT_CODES
from glassblock.checkpoint.family import Architecture, FeedForwardRow, NormRow, Setting
from glassblock.checkpoint.layer_map import resolve_layer
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.outer_tensors import final_norm
from glassblock.checkpoint.patches import Alter, Patch, patched
from glassblock.checkpoint.settings import eps_of, text_of
from glassblock.checkpoint.text_states import layer_count
from glassblock.checkpoint.text_variants import Variant
from glassblock.numerics.activations import ACTIVATIONS
from glassblock.numerics.norms import norm_kind_named
from glassblock.wire.audits import Coverage, Finding, Fix

EPSILONS = (1e-5, 1e-6)
"""What engines take where nobody tells them, beside what other sources declare."""

RIVALS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu")
"""Activations that are taken for one another, beside what other sources declare."""

Offered = Iterator[Hypothesis | LeftOut]
Change = Callable[[NormRow | FeedForwardRow], NormRow | FeedForwardRow]


def hypotheses_of(
    evidence: Evidence, findings: Sequence[Finding], coverage: Iterable[Coverage]
) -> tuple[Hypothesis | LeftOut, ...]:
    """What a text is asked about a checkpoint that can be run, in this order.

    Layers that the weights convict or leave open, put right or exchanged; all that were convicted; every layer; other
    epsilons, offsets and activations; then the layers that are as named, from the last one down, for these cost least.
    """
    told = findings, tuple(coverage)
    return (
        *_suspects(evidence, *told),
        *_every_layer(evidence.checkpoint, dict(reversed(tuple(_weights_say(*told))))),
        *_epsilons(evidence),
        *_offsets(evidence.checkpoint),
        *_activations(evidence),
        *_others(evidence, *told),
    )


def _weights_say(findings: Iterable[Finding], coverage: Iterable[Coverage]) -> Iterator[tuple[int, Weights]]:
    """The layers that are convicted or open. One that is both is convicted: it is told first."""
    for finding in findings:
        if _convicts(finding) and finding.layer is not None:
            yield finding.layer, "exchanged"
    for rows in coverage:
        for entry in rows.undecidable if rows.rule in LAYOUT_RULES else ():
            if entry.layer is not None:
                yield entry.layer, "undecidable"


def _convicts(finding: Finding) -> bool:
    """Whether it is about the rows as they are stored: captures alone, without a repair, tell of their engine."""
    of_rows = finding.fix is not None or "captures" not in finding.evidence
    return finding.rule in LAYOUT_RULES and finding.level == "error" and of_rows


def _suspects(evidence: Evidence, findings: Sequence[Finding], coverage: Sequence[Coverage]) -> Offered:
    checkpoint, count = evidence.checkpoint, layer_count(evidence.checkpoint)
    convicted: dict[int, Patch] = {}
    seen = set[int]()
    for layer, weights in _weights_say(findings, coverage):
        if layer in seen or layer >= count:
            continue
        seen.add(layer)
        if weights == "undecidable":
            yield _exchanged(checkpoint, layer, weights)
            continue
        patch = _repair(checkpoint, layer, findings)
        words = f"layer {layer} with gate and up put right"
        if isinstance(patch, Unrepaired):
            yield LeftOut(words, patch.reason)
            continue
        convicted[layer] = patch
        yield _laid(checkpoint, words, patch, (layer,), weights)
    if len(convicted) > 1:
        words = f"gate and up put right in all {len(convicted)} layers that the weights convict"
        yield _laid(checkpoint, words, joined(checkpoint, convicted.values()), tuple(convicted), "exchanged")


def _repair(checkpoint: Checkpoint, layer: int, findings: Iterable[Finding]) -> Patch | Unrepaired:
    """What the findings of one layer say is to be done; where they do not, gate and up are exchanged."""
    patches: list[Patch] = []
    for finding in findings:
        if _convicts(finding) and finding.layer == layer:
            patch = exchange(checkpoint, layer) if finding.fix is None else repair_of(checkpoint, finding)
            if isinstance(patch, Unrepaired):
                return patch
            patches.append(patch)
    return joined(checkpoint, patches)


def exchange(checkpoint: Checkpoint, layer: int) -> Patch | Unrepaired:
    """Gate and up of every gated network of a layer exchanged, with what belongs to them."""
    pairs, fused = dict[tuple[str, str], None](), dict[str, None]()
    for network in resolve_layer(checkpoint, layer)[0].networks:
        weights = network.weights
        if "gate" in weights and "up" in weights:
            pairs[weights["gate"].name, weights["up"].name] = None
        elif "fused" in weights:
            fused[weights["fused"].name] = None
    patches: list[Patch] = []
    for action, tensors in (
        ("swap-tensors", tuple(name for pair in pairs for name in pair)),
        ("swap-halves", tuple(fused)),
    ):
        if tensors:
            fix = Fix(action=action, description="", tensors=tensors)
            asked = Finding(
                rule="", level="note", certainty="risk", layer=layer, tensors=tensors, message="", evidence={}, fix=fix
            )
            patch = FIXES[action](checkpoint, asked)
            if isinstance(patch, Unrepaired):
                return patch
            patches.append(patch)
    if not patches:
        return Unrepaired("it has no gate", "a gated layer")
    return joined(checkpoint, patches)


def _exchanged(
    checkpoint: Checkpoint, layer: int, weights: Weights | None, *, sought: bool = True
) -> Hypothesis | LeftOut:
    words = f"gate and up of layer {layer} exchanged"
    patch = exchange(checkpoint, layer)
    if isinstance(patch, Unrepaired):
        return LeftOut(words, patch.reason)
    return _laid(checkpoint, words, patch, (layer,), weights, sought=sought)


def _laid(
    checkpoint: Checkpoint,
    words: str,
    patch: Patch,
    layers: tuple[int, ...],
    weights: Weights | None,
    *,
    sought: bool = True,
) -> Hypothesis:
    return Hypothesis(
        "swap",
        words,
        lambda: Variant(patched(checkpoint, patch), frozenset(layers)),
        layers,
        weights=weights,
        sought=sought,
    )


def _gated(checkpoint: Checkpoint) -> tuple[int, ...]:
    family, count = checkpoint.require_usable(), layer_count(checkpoint)
    if not any(network.gated for network in family.networks):
        return ()
    layers = (layer for layer in checkpoint.layer_indices if layer < count)
    return tuple(
        layer for layer in layers if any(network.row.gated for network in resolve_layer(checkpoint, layer)[0].networks)
    )


def _every_layer(checkpoint: Checkpoint, suspects: Mapping[int, Weights]) -> Offered:
    """One converter or loader makes the same mistake in every layer; that all are convicted is asked otherwise."""
    layers = _gated(checkpoint)
    if len(layers) < 2 or all(suspects.get(layer) == "exchanged" for layer in layers):
        return
    words = "gate and up exchanged in every layer"
    patches: list[Patch] = []
    for layer in layers:
        patch = exchange(checkpoint, layer)
        if isinstance(patch, Unrepaired):
            yield LeftOut(words, f"layer {layer}: {patch.reason}")
            return
        patches.append(patch)
    weights: Weights = "undecidable" if suspects.keys() >= set(layers) else "as-named"
    yield _laid(checkpoint, words, joined(checkpoint, patches), layers, weights)


def _others(evidence: Evidence, findings: Sequence[Finding], coverage: Sequence[Coverage]) -> Offered:
    suspects = {layer for layer, _ in _weights_say(findings, coverage)}
    tested = frozenset[int]() if evidence.gates is None else evidence.gates.layers.keys()
    for layer in reversed(_gated(evidence.checkpoint)):
        if layer not in suspects:
            yield _exchanged(evidence.checkpoint, layer, "as-named" if layer in tested else None, sought=False)


def _epsilons(evidence: Evidence) -> Offered:
    """One epsilon for every norm whose epsilon a config may tell."""
    checkpoint, row = evidence.checkpoint, evidence.family
    ours = {eps_of(checkpoint.config, row, norm.eps).value for norm in row.norms if norm.eps.keys}
    stated = {one.value for one in declared_eps(checkpoint.config, row, checkpoint.params)}
    theirs = their_settings(evidence)
    for name, told in () if theirs is None else theirs.settings.told.items():
        value = as_epsilon(told.value) if name.startswith("eps.") else None
        stated |= set() if value is None else {value}
    for value in sorted({*EPSILONS, *stated}, reverse=True) if ours else ():
        if ours != {value}:

            def change(part: NormRow | FeedForwardRow, value: float = value) -> NormRow | FeedForwardRow:
                known = isinstance(part, NormRow) and part.eps.keys
                return replace(part, eps=Setting[float]((), value)) if known else part

            yield Hypothesis("eps", f"eps {value:g} in every norm", _under(checkpoint, change), value=f"{value:g}")


def _offsets(checkpoint: Checkpoint) -> Offered:
    """1 added to every gain, and 1 taken away; of a family that adds 1 to some of its gains, to and from those."""
    row = checkpoint.require_usable()
    count = layer_count(checkpoint)
    norms = [norm for layer in range(count) for norm in resolve_layer(checkpoint, layer)[0].norms.values()]
    final, _ = final_norm(checkpoint)
    kinds = [
        (norm.gain.name, norm_kind_named(norm.row.kind))
        for norm in (*norms, *(() if final is None else (final,)))
        if norm.gain is not None and norm.gain.dtype in FLOAT_CODES and norm.gain.name in checkpoint.entries
    ]
    moved = {name for name, kind in kinds if kind.offset}
    gains = moved or {name for name, kind in kinds if not kind.centred}
    for value, words in ((1.0, "1 added to every gain"), (-1.0, "1 taken from every gain")) if gains else ():
        told = words if not moved else f"{words} of the norms to which the family {row.name} adds 1"
        # In float32, so that no digit of a gain is lost.
        patch = tuple(Alter(name, (Cast("F32"), Add(value))) for name in sorted(gains))
        yield Hypothesis("offset", told, _patched(checkpoint, patch), value=f"{value:+g}")


def _activations(evidence: Evidence) -> Offered:
    checkpoint, row = evidence.checkpoint, evidence.family
    ours = {
        _formula(text_of(checkpoint.config, row, network.activation).value)
        for network in row.networks
        if _takes(network)
    }
    names = dict.fromkeys((*map(_formula, _stated_activations(evidence)), *RIVALS))
    for name in names if ours else ():
        if name is not None and ours != {name}:

            def change(part: NormRow | FeedForwardRow, name: str = name) -> NormRow | FeedForwardRow:
                known = isinstance(part, FeedForwardRow) and _takes(part)
                return replace(part, activation=Setting[str]((), name)) if known else part

            yield Hypothesis("activation", f"the activation is {name}", _under(checkpoint, change), value=name)


def _takes(network: FeedForwardRow) -> bool:
    """Whether its activation is what it is told: neither learned, nor brought along by its gating."""
    return not network.activation_tensors and "alpha" not in network.gating_parameters


def _stated_activations(evidence: Evidence) -> Iterator[str]:
    config, row, theirs = evidence.checkpoint.config, evidence.family, their_settings(evidence)
    for key in ACTIVATION_KEYS:
        stated = None if config is None else find(config, row, (key,))
        if stated is not None and isinstance(stated.value, str):
            yield stated.value
    told = None if theirs is None else theirs.settings.get("activation")
    if told is not None:
        yield str(told.value)


def _formula(name: str) -> str | None:
    known = ACTIVATIONS.get(canonical_activation(name))
    return None if known is None else known.formula


def _patched(checkpoint: Checkpoint, patch: Patch) -> Callable[[], Variant]:
    return lambda: Variant(patched(checkpoint, patch))


def _under(checkpoint: Checkpoint, change: Change) -> Callable[[], Variant]:
    """The checkpoint under its family's row with every norm and network changed, those of the row's variants too."""
    row = checkpoint.require_usable()
    return lambda: Variant(replace(checkpoint, family=cast("Architecture", _varied(row, change))))


def _varied(part: Any, change: Change) -> Any:
    if isinstance(part, NormRow | FeedForwardRow):
        return change(part)
    if isinstance(part, tuple):
        return tuple(_varied(one, change) for one in cast("tuple[Any, ...]", part))
    if isinstance(part, Mapping):
        named = cast("Mapping[Any, Any]", part)
        return MappingProxyType({key: _varied(value, change) for key, value in named.items()})
    if is_dataclass(part) and not isinstance(part, type):
        changed = {field.name: _varied(getattr(part, field.name), change) for field in fields(part)}
        differing = {name: value for name, value in changed.items() if value != getattr(part, name)}
        return replace(part, **differing) if differing else part
    return part
