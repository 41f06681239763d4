"""What a given row must be beside well-typed: templates, known arithmetic, norms of its placement, sizes."""

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from glassblock.checkpoint.family import (
    ROLES_OF,
    Architecture,
    FeedForwardRow,
    FusedProjection,
    MixtureRow,
    NormRow,
    OverRootDepth,
    Ratio,
    Size,
    SizeSetting,
    Trunk,
    TwoThirds,
)
from glassblock.checkpoint.settings import BEYOND
from glassblock.checkpoint.strict_json import shown
from glassblock.errors import InvalidValue
from glassblock.numerics.activations import ACTIVATION_ALIASES, ACTIVATIONS, GATINGS, LEARNED_ACTIVATIONS
from glassblock.numerics.norms import NORM_KINDS
from glassblock.numerics.wiring import NORM_PLACES, NORMS_OF


def check_row(row: Architecture, *, field: str) -> None:
    """Refuse a row that cannot be used, though every field has its type.

    Raises:
        InvalidValue: A template, name, norm or size in it, named by its field.
    """
    changes = [variant.changes for variant in (*row.config_variants, *row.layer_variants)]
    for layer in (row.layer, *(change["layer"] for change in changes if "layer" in change)):
        _check_template(layer, f"{field}.layer", needs="i")
    for trunks in (row.trunks, *(change["trunks"] for change in changes if "trunks" in change)):
        _check_trunks(trunks, f"{field}.trunks")
    for sizes in (row.sizes, *(change["sizes"] for change in changes if "sizes" in change)):
        _check_size_settings(sizes, f"{field}.sizes")
    for scale in (row.branch_scale, *(change["branch_scale"] for change in changes if "branch_scale" in change)):
        if isinstance(scale, OverRootDepth) and not scale.over > 0:
            refuse(f"{field}.branch_scale.over", f"is {said(scale.over)}", "Give a positive number.")
    networks = _networks(row, changes)
    for network, name, numbered in networks:
        _check_network(row, network, f"{field}.{name}", numbered=numbered)
    if not networks:
        refuse(field, "has no network", "Give feed_forward, or mixture.")
    _check_norms(row, [row.norms, *(change.get("norms", ()) for change in changes)], field)


def _check_trunks(trunks: tuple[Trunk, ...], field: str) -> None:
    if not trunks:
        refuse(field, "is empty", 'Give at least one, such as {"prefix": "model.", "head": null}.')
    for place, trunk in enumerate(trunks):
        _check_template(trunk.prefix, f"{field}[{place}].prefix")


def _check_size_settings(sizes: Mapping[Size, SizeSetting], field: str) -> None:
    """Numbers that can be sizes, and no size that follows from itself."""
    follow: dict[str, tuple[str, ...]] = {}
    for size, setting in sizes.items():
        default, whole = setting.default, [setting.over]
        if isinstance(default, Ratio):
            follow[size] = tuple(part for part in (default.of, default.over) if part is not None)
            whole.append(default.times)
        elif isinstance(default, TwoThirds):
            follow[size] = (default.of,)
            whole.append(default.times)
        elif default is not None:
            whole.append(default)
        for number in whole:
            if not 1 <= number < BEYOND:
                refuse(f"{field}.{size}", f"holds {said(number)}", "Give whole numbers from 1, below 2^63.")
    try:
        TopologicalSorter(follow).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        refuse(
            f"{field}.{circle[0]}", f"follows from itself: {', '.join(circle)}", "Give one of them a number, or null."
        )


def _networks(row: Architecture, changes: list[Mapping[str, Any]]) -> list[tuple[FeedForwardRow, str, bool]]:
    """Every network of a row and its variants, what to call it, and whether its names number the experts."""
    dense: list[FeedForwardRow | None] = [row.feed_forward, *(change.get("feed_forward") for change in changes)]
    found = [(network, "feed_forward", False) for network in dense if network is not None]
    mixtures: list[MixtureRow | None] = [row.mixture, *(change.get("mixture") for change in changes)]
    for mixture in (mixture for mixture in mixtures if mixture is not None):
        found.append((mixture.experts, "mixture.experts", mixture.arrangement == "separate"))
        if mixture.shared is not None:
            found.append((mixture.shared, "mixture.shared", False))
    return found


def _check_norms(row: Architecture, groups: list[tuple[NormRow, ...]], field: str) -> None:
    for place, norm in ((place, norm) for group in groups for place, norm in enumerate(group)):
        where = f"{field}.norms[{place}]"
        if norm.kind not in NORM_KINDS:
            refuse(f"{where}.kind", f"is {said(norm.kind)}", "Use a known arithmetic.", known=tuple(NORM_KINDS))
        if norm.has_bias and not NORM_KINDS[norm.kind].bias:
            refuse(f"{where}.has_bias", f"is true, and {norm.kind} has no bias", "Choose another kind.")
        _check_template(norm.template, f"{where}.template", needs="h" if norm.apart else None)
        if norm.apart and not norm.per_head:
            refuse(f"{where}.per_head", "is false, and the template numbers heads", "Set it to true.")
        if norm.per_head and not norm.width:
            refuse(f"{where}.width", "names no size, and there is a norm for each of the first", "Name that size.")
        _check_sizes(row, norm.width or (), f"{where}.width")
    for role, place in zip(ROLES_OF["ffn"], NORM_PLACES, strict=True):
        if place in NORMS_OF[row.placement] and not any(norm.role == role for group in groups for norm in group):
            refuse(
                f"{field}.norms",
                f"has none in the role {role}, which the placement {row.placement.value} needs",
                "Add it, or choose another placement.",
            )


def _check_network(row: Architecture, network: FeedForwardRow, field: str, *, numbered: bool) -> None:
    known = (*ACTIVATIONS, *ACTIVATION_ALIASES, *LEARNED_ACTIVATIONS)
    if network.activation.default not in known:
        refuse(f"{field}.activation", f"is {said(network.activation.default)}", "Use a known name.", known=known)
    if network.gating not in GATINGS:
        refuse(f"{field}.gating", f"is {said(network.gating)}", "Use a known one.", known=tuple(GATINGS))
    if set(network.gating_parameters) != set(GATINGS[network.gating].needs):
        needs = " and ".join(GATINGS[network.gating].needs) or "nothing"
        refuse(f"{field}.gating_parameters", f"does not give what {network.gating} needs", f"Give {needs}.")
    if (network.up is None) == (network.fused is None) or (network.fused is not None and network.gate is not None):
        refuse(field, "needs either `up`, with or without `gate`, or `fused`", "Give one of the two.")
    if network.fused is not None and sorted(network.fused.order) != ["gate", "up"]:
        refuse(f"{field}.fused.order", "does not name gate and up", 'Give ["gate", "up"] or ["up", "gate"].')
    _check_blocks(network.fused, f"{field}.fused")
    for part in ("gate", "up", "fused", "down"):
        projection = getattr(network, part)
        if projection is not None:
            _check_template(projection.weight, f"{field}.{part}.weight", needs="j" if numbered else None)
    _check_sizes(row, (*(network.width or ()), network.outer), f"{field}.width")
    if not 0.0 <= network.gate_sparsity < 1.0:
        refuse(f"{field}.gate_sparsity", f"is {said(network.gate_sparsity)}", "Give a share from 0 and below 1.")


def _check_blocks(fused: FusedProjection | None, field: str) -> None:
    if fused is None:
        return
    if fused.arrangement != "blocks" and fused.blocks is not None:
        refuse(
            f"{field}.blocks", f"is given, and the arrangement is {fused.arrangement}", 'Set arrangement to "blocks".'
        )
    if fused.arrangement == "blocks" and fused.blocks is None:
        refuse(
            f"{field}.blocks",
            'is missing: the arrangement "blocks" needs it',
            'Give their number, or {"keys": ["tensor_model_parallel_size"], "default": 1}.',
        )
    number = None if fused.blocks is None else fused.blocks.default
    if number is not None and (number < 1 or not float(number).is_integer()):
        refuse(f"{field}.blocks", f"has the default {said(number)}", "Give a whole number from 1.")


def _check_sizes(row: Architecture, sizes: tuple[str, ...], field: str) -> None:
    variants = (*row.config_variants, *row.layer_variants)
    known = {
        size for table in (row.sizes, *(variant.changes.get("sizes", {}) for variant in variants)) for size in table
    }
    for size in sizes:
        if size not in known:
            refuse(field, f"names {size}, which `sizes` does not have", "Add it to `sizes`: its keys and default.")


def _check_template(template: str, field: str, *, needs: Literal["i", "j", "h"] | None = None) -> None:
    """Refuse a name without the number that it needs, and one with other braces."""
    rest = template
    if needs is not None:
        before, number, rest = template.partition(f"{{{needs}}}")
        if not number:
            thing = {"i": "layer", "j": "expert", "h": "head"}[needs]
            refuse(field, f"is {said(template)}, without {{{needs}}}", f"Write it where the {thing}'s number is.")
        rest = before + rest
    if "{" in rest or "}" in rest:
        refuse(field, f"is {said(template)}, with braces that mean nothing here", "Write the name as it is stored.")


NAMES: Mapping[type, str] = MappingProxyType(
    {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
)


def kind_of(data: object) -> str:
    """What a plain value is, in words."""
    if data is None:
        return "empty"
    names = {dict: "an object", list: "a list", **NAMES}
    return names.get(type(data), "no plain value")


def said(data: object) -> str:
    """A plain value as a message shows it: short ones themselves, others by their kind."""
    return shown(data) if isinstance(data, str) else f"{data!r:.80}" if isinstance(data, int | float) else kind_of(data)


def refuse(field: str, problem: str, hint: str, known: tuple[str, ...] = ()) -> NoReturn:
    """Refuse a field of a given row.

    Raises:
        InvalidValue: Always.
    """
    raise InvalidValue(f"{field} {problem}", field=field, hint=hint, known=known)
