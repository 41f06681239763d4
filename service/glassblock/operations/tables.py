"""The tables, readable: rules with their explanations, families with their layouts."""

from glassblock.audit.rules import RULES
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.family import Architecture, FeedForwardRow, Setting
from glassblock.numerics.activations import ACTIVATION_ALIASES, ACTIVATIONS
from glassblock.numerics.norms import NORM_KINDS
from glassblock.numerics.wiring import Placement
from glassblock.wire.tables import FamilyList, FamilyRow, RuleList, RuleRow


def rules() -> RuleList:
    """Every rule, explained."""
    rows = (
        RuleRow(
            name=rule.name,
            level=rule.level,
            certainty=rule.certainty,
            what=rule.what,
            hurts=rule.hurts,
            detection=rule.detection,
            fooled_by=rule.fooled_by,
            report=rule.report,
        )
        for rule in RULES.values()
    )
    return RuleList(rules=tuple(rows))


def families() -> FamilyList:
    """Every family, and the names that overrides accept."""
    return FamilyList(
        families=tuple(_family(row) for row in ARCHITECTURES.values()),
        norm_kinds=tuple(NORM_KINDS),
        activations=tuple(sorted({*ACTIVATIONS, *ACTIVATION_ALIASES})),
        placements=tuple(placement.value for placement in Placement),
    )


def _family(row: Architecture) -> FamilyRow:
    norm = next((norm for norm in row.norms if norm.role != "final"), row.norms[-1] if row.norms else None)
    return FamilyRow(
        name=row.name,
        model_types=row.model_types,
        architectures=row.architectures,
        ffn=_feed_forward(row),
        activation=_setting(row.network.activation),
        norm="none" if norm is None else norm.kind,
        placement=row.placement.value,
        eps="none" if norm is None else _setting(norm.eps),
        verified=row.verified,
        notes=(
            *([f"Blocks are not run: {row.not_run}."] if row.not_run else []),
            *(["Attention is not read: no texts are run."] if row.attention is None else []),
            *row.notes,
        ),
    )


def _feed_forward(family: Architecture) -> str:
    dense = family.feed_forward
    mixture = family.mixture or next(
        (variant.changes["mixture"] for variant in family.layer_variants if variant.changes.get("mixture")), None
    )
    told = [] if dense is None else [_network(dense)]
    if mixture is not None:
        told.append(f"{mixture.arrangement} experts, {_network(mixture.experts)}; router {mixture.router.weight}")
        told.extend([] if mixture.shared is None else [f"shared, {_network(mixture.shared)}"])
    return "; ".join(told) or "none"


def _network(row: FeedForwardRow) -> str:
    if row.fused is not None:
        blocks = "" if row.fused.blocks is None else f" ({_setting(row.fused.blocks)})"
        where = f"{row.fused.weight} [{' | '.join(row.fused.order)}], {row.fused.arrangement}{blocks}"
    else:
        where = ", ".join(projection.weight for projection in (row.gate, row.up) if projection is not None)
    kind = "gated" if row.gated else "plain"
    return f"{kind}: {where}; {row.down.weight}; stored {row.layout}"


def _setting(setting: Setting[str] | Setting[float]) -> str:
    keys = " or ".join(setting.keys) or "fixed"
    return f"{keys} (default {setting.default})"
