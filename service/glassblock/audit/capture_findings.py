"""What captures prove, as findings under the rules that name such mistakes, and what they leave open."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from glassblock.audit.capture_study import CaptureStudy, Departed, JudgedLayer
from glassblock.audit.evidence import Evidence, GateLayer
from glassblock.audit.rule import Checked, Found, Outcome
from glassblock.checkpoint.family import ROLES_OF
from glassblock.numerics.gate_or_up import Verdict
from glassblock.numerics.hypotheses import HARMLESS
from glassblock.wire.audits import CapturedLayer, CaptureSummary, Undecidable

SWAP_RULE, FUSED_RULE = "ffn/gate-up-swapped", "ffn/fused-order"

RULE_OF: Mapping[str, str] = MappingProxyType(
    {
        "swap": SWAP_RULE,
        "layout": "ffn/fused-layout",
        "activation": "config/activation-conflict",
        "combine": "config/activation-conflict",
        "both_activated": "config/activation-conflict",
        "clamp": "config/activation-conflict",
        "eps": "norm/eps-mismatch",
        "eps_place": "norm/eps-mismatch",
        "offset": "norm/offset",
        "norm_bias": "norm/kind-conflict",
        "cast": "norm/kind-conflict",
        "norm_kind": "norm/kind-conflict",
        "norm_passes": "norm/kind-conflict",
        "norm_from": "norm/role",
        "placement": "norm/role",
        "residual": "norm/role",
        "transposed": "tensor/transposed",
        "network_bias": "ffn/missing-bias",
        "scales": "config/shape",
    }
)
"""The rule of each factor of a hypothesis; of a swap in a fused tensor it is `FUSED_RULE`."""

CAPTURE_RULES: frozenset[str] = frozenset({*RULE_OF.values(), FUSED_RULE})

_EXCHANGED = frozenset({"exchanged", "activation-on-up"})
"""Swaps that change what is computed. One by name only does not: it says nothing of the rows of the file."""


def capture_look(rule: str) -> Callable[[Evidence], Iterator[Outcome]]:
    """What a rule says of captures; nothing where none were given."""

    def look(evidence: Evidence) -> Iterator[Outcome]:
        study = evidence.captures
        if study is None:
            return
        for judged in study.layers:
            mine = {factor for factor in RULE_OF if _rule(evidence, judged.layer, factor) == rule}
            for departed in judged.factors:
                if departed.factor in mine:
                    yield _found(evidence, study, judged, departed)
            if judged.verdict == "unanswered":
                if mine:
                    yield Undecidable(
                        layer=judged.layer,
                        reason=f"{study.name}: the captures of layer {judged.layer} could not be compared:"
                        f" {judged.message}",
                        would_decide="captures of this layer that can be compared (docs/capturing.md)",
                    )
                continue
            left = sorted(mine & judged.open.keys())
            if left:
                yield Undecidable(
                    layer=judged.layer,
                    reason=f"{study.name}, layer {judged.layer}: {judged.message}",
                    would_decide=judged.open[left[0]],
                )
            elif mine & judged.seen:
                yield Checked()

    return look


def decided(evidence: Evidence, rule: str, layer: int | None) -> bool:
    """Whether captures decide a rule in a layer, so that what its weights leave open is open no more."""
    if evidence.captures is None or layer is None:
        return False
    for judged in evidence.captures.layers:
        if judged.layer == layer and judged.answered:
            mine = {factor for factor in judged.seen if _rule(evidence, layer, factor) == rule}
            return bool(mine) and not (mine & judged.open.keys())
    return False


def with_captures(own: Sequence[Outcome], compared: Sequence[Outcome]) -> list[Outcome]:
    """What comparisons say, where captures and the weights (or a reference) say the same of a layer as one finding.

    It is proved and has both in its message and its evidence, and the repair of the weights.

    Args:
        own: What the rule says of the checkpoint alone.
        compared: What reference, captures and another engine's config say under the same rule.
    """
    told: list[Outcome] = []
    met: list[Outcome] = []
    for outcome in compared:
        witness = next((other for other in (*compared, *own) if _say_the_same(outcome, other)), None)
        if isinstance(outcome, Found) and isinstance(witness, Found):
            met.append(witness)
            told.append(
                replace(
                    outcome,
                    message=f"{witness.message}; and so say {outcome.message}",
                    tensors=witness.tensors,
                    evidence={**witness.evidence, **outcome.evidence},
                    fix=witness.fix,
                )
            )
        else:
            told.append(outcome)
    return [outcome for outcome in told if not any(outcome is one for one in met)]


def _say_the_same(captured: Outcome, other: Outcome) -> bool:
    """Whether a finding of captures is that of the rows as they lie: gate and up exchanged, or the same layout."""
    if not (isinstance(captured, Found) and isinstance(other, Found) and other.fix is not None):
        return False
    if (captured.layer, captured.expert, {*captured.tensors}) != (other.layer, other.expert, {*other.tensors}):
        return False
    factor, replayed = captured.evidence.get("factor"), captured.evidence.get("replayed")
    if factor == "swap":
        return replayed in _EXCHANGED and other.fix.action in {"swap-tensors", "swap-halves"}
    if factor != "layout" or other.fix.action != "reorder-rows" or other.evidence.get("declared") != "[gate | up]":
        return False
    # Of blocks with up first the replay makes two mistakes: the blocks, and then gate and up exchanged.
    gate_first = captured.evidence.get("together_with", {}).get("swap") not in _EXCHANGED
    in_turn = str(other.evidence.get("stored")).endswith(" in turn")
    stored = "interleaved" if in_turn else f"blocks-{other.evidence.get('groups')}"
    return (replayed, gate_first) == (stored, other.evidence.get("gate_first"))


def leaves_weights(found: Found) -> bool:
    """Whether what the weights show is told beside it: of rows that captures say something else of."""
    return found.fix is None and found.evidence.get("factor") in {"swap", "layout"}


def unanswered(study: CaptureStudy) -> tuple[int, ...]:
    """The recorded layers that the captures do not decide."""
    return tuple(judged.layer for judged in study.layers if not judged.answered)


def capture_summary(study: CaptureStudy) -> CaptureSummary:
    """The study as the report has it."""
    return CaptureSummary(
        captures=study.name,
        first_departure=study.first_departure,
        layers=tuple(
            CapturedLayer(layer=judged.layer, verdict=judged.verdict, message=judged.message) for judged in study.layers
        ),
    )


def _rule(evidence: Evidence, layer: int, factor: str) -> str:
    rule = RULE_OF[factor]
    tensors = evidence.layers.get(layer)
    if rule == SWAP_RULE and tensors is not None and tensors.dense is not None and tensors.dense.row.fused is not None:
        return FUSED_RULE
    return rule


def _found(evidence: Evidence, study: CaptureStudy, judged: JudgedLayer, departed: Departed) -> Found:
    first = " the first layer that departs:" if judged.layer == study.first_departure and len(study.layers) > 1 else ""
    many = f" (one of {len(judged.factors)} mistakes)" if len(judged.factors) > 1 else ""
    tensors = _tensors(evidence, judged.layer, departed)
    others = {other.factor: other.value for other in judged.factors if other is not departed}
    beside, weights = _beside_weights(_tested(evidence, judged.layer, tensors), departed, others)
    return Found(
        f"captures of layer {judged.layer} ({study.name}):{first} {departed.words}{many}; as declared they are off by"
        f" {judged.evidence['declared_residual']:.2g}, with that by {judged.evidence['residual']:.2g}, where rounding"
        f" does {judged.evidence['floor']:.2g}{beside}",
        judged.layer,
        tensors,
        evidence={
            "captures": study.name,
            "factor": departed.factor,
            "replayed": departed.value,
            **({"together_with": others} if others else {}),
            **judged.evidence,
            **weights,
        },
        level="note" if departed.factor in HARMLESS else "error",
        certainty="proved",
    )


def _tested(evidence: Evidence, layer: int, tensors: tuple[str, ...]) -> GateLayer | None:
    """What the weights say of the network that holds these tensors; None where they were not asked."""
    gates = None if evidence.gates is None else evidence.gates.layers.get(layer)
    networks = () if gates is None else gates.networks
    return next((tested for tested in networks if {*tested.names} == {*tensors}), None)


def _beside_weights(
    tested: GateLayer | None, departed: Departed, others: Mapping[str, str]
) -> tuple[str, dict[str, Any]]:
    """What the weights say of a mistake that they do not tell themselves, in words and as evidence."""
    exchanged = departed.factor == "swap" and departed.value in _EXCHANGED
    if tested is None or not (exchanged or departed.factor == "layout"):
        return "", {}
    if tested.relaid:
        of_layout = exchanged and "layout" in others and tested.stored is not None and not tested.stored.gate_first
        return ("; the weights show it with the layout of the rows, told as ffn/fused-layout" if of_layout else ""), {}
    verdict, numbers = tested.judgement.verdict, tested.statistics or tested.screen
    has = "gate and up exchanged" if exchanged else "their rows otherwise"
    facts: dict[str, Any] = {"verdict": verdict.value}
    if numbers is not None:
        facts |= {"gate_z": numbers.gate.z, "up_z": numbers.up.z}
    if verdict is Verdict.AS_NAMED:
        return (
            "; but the weights of this file are as named (gate has a common direction, up has none): the engine that"
            f" made the captures, or the file that it loaded, has {has}, and this file needs no repair",
            {"weights": facts},
        )
    if verdict is Verdict.UNDECIDABLE:
        return f"; whether this file or that engine has {has}, the weights leave open", {"weights": facts}
    return "", {}


def _tensors(evidence: Evidence, layer: int, departed: Departed) -> tuple[str, ...]:
    """The tensors that the factor is about."""
    tensors = evidence.layers.get(layer)
    if tensors is None:
        return ()
    weights, biases = tensors.weights, tensors.biases
    if departed.factor in {"swap", "layout"}:
        return tuple(weights[part].name for part in ("gate", "up", "fused") if part in weights)
    if departed.factor == "transposed" and departed.value in weights:
        return (weights[departed.value].name,)  # pyright: ignore[reportArgumentType]
    if departed.factor == "network_bias":
        return tuple(entry.name for entry in biases.values())
    if departed.factor in {"offset", "norm_from", "norm_bias"}:
        gains = (norm.gain for role, norm in tensors.norms.items() if role in ROLES_OF["ffn"])
        return tuple(gain.name for gain in gains if gain is not None)
    return ()
