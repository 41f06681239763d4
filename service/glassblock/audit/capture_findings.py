"""What captures prove, as findings under the rules that name such mistakes, and what they leave open."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from glassblock.audit.capture_study import CaptureStudy, Departed, JudgedLayer
from glassblock.audit.evidence import Evidence
from glassblock.audit.rule import Checked, Found, Outcome
from glassblock.checkpoint.family import ROLES_OF
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
    return Found(
        f"captures of layer {judged.layer} ({study.name}):{first} {departed.words}{many}; as declared they are off by"
        f" {judged.evidence['declared_residual']:.2g}, with that by {judged.evidence['residual']:.2g}, where rounding"
        f" does {judged.evidence['floor']:.2g}",
        judged.layer,
        _tensors(evidence, judged.layer, departed),
        evidence={"captures": study.name, "factor": departed.factor, "replayed": departed.value, **judged.evidence},
        level="note" if departed.factor in HARMLESS else "error",
        certainty="proved",
    )


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
