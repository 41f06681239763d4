"""Which family a checkpoint is of: what its config says, held against the names of its tensors."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import cast

from glassblock.checkpoint.architectures import ARCHITECTURES, BY_ARCHITECTURE, BY_MODEL_TYPE
from glassblock.checkpoint.attention_row import AttentionRow, LatentAttentionRow
from glassblock.checkpoint.config import ConfigFault, ConfigFile, find
from glassblock.checkpoint.family import Architecture, FeedForwardRow, Projection, Setting, Size, Trunk
from glassblock.checkpoint.strict_json import shown
from glassblock.checkpoint.variants import row_in
from glassblock.errors import UnknownFamily

_KNOWN = tuple(sorted(BY_MODEL_TYPE))
_PARTS = ("text_config", "llm_config", "language_config")
_NUMBER = re.compile(r"\.(?:0|[1-9][0-9]{0,8})(?=\.)")
_SHOWN = 8


def family_named(name: str) -> Architecture:
    """The family of that name.

    Raises:
        UnknownFamily: It is not in the table.
    """
    row = ARCHITECTURES.get(name)
    if row is None:
        raise UnknownFamily(
            f"there is no family {shown(name)} in the table",
            field="family",
            known=tuple(ARCHITECTURES),
            hint="Use one of the known names.",
        )
    return row


def by_params(params: ConfigFile | None) -> Architecture | None:
    """The family whose own config a params.json is, by the keys of width and depth that it must have."""
    if params is None:
        return None
    rows = (row for row in ARCHITECTURES.values() if row.config_file == "params.json")
    return next((row for row in rows if all(_declares(params, row, size) for size in ("hidden", "layers"))), None)


def _declares(config: ConfigFile, row: Architecture, size: Size) -> bool:
    return find(config, row, row.sizes[size].keys) is not None


def recognise(config: ConfigFile | None, directory: Path) -> tuple[Architecture | None, ConfigFault | None]:
    """The family that a config names; or why none is known.

    `model_type` decides, `architectures` where it is absent. Where both name a family and not the same one, neither
    is believed. A params.json names none, and is told by its keys.
    """
    if config is not None and config.path.name == "params.json":
        return by_params(config), None
    file = directory / "config.json"

    def unknown(message: str, hint: str) -> tuple[None, ConfigFault]:
        return None, ConfigFault("unknown-family", file, message, hint, known=_KNOWN)

    if config is None:
        hint = "Add the config, or name the family with --family."
        return unknown("the family is unknown: there is no config.json", hint)
    model_type, architecture = config.values.get("model_type"), _first_text(config.values.get("architectures"))
    by_type = BY_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None
    by_architecture = BY_ARCHITECTURE.get(architecture or "")
    if model_type is None and by_architecture is None:
        return unknown(
            "config.json has no model_type, and its architectures name no known family",
            "Add model_type, or name the family with --family.",
        )
    if model_type is not None and by_type is None:
        return unknown(
            f"config.json: model_type is {_quoted(model_type)}, which is no known family",
            f"{_of_the_part_within(config)}If it is built as a known family is, name that with --family; else describe "
            "it with --family-file.",
        )
    if by_type and by_architecture and architecture not in by_type.architectures:
        return unknown(
            f"config.json contradicts itself: model_type {_quoted(model_type)} is the family {by_type.name}, "
            f"architectures {_quoted(architecture)} is the family {by_architecture.name}",
            "Correct the config, or name the family with --family.",
        )
    return by_type or by_architecture, None


@dataclass(frozen=True)
class PartWithin:
    """The language model inside a larger one that no row describes.

    Attributes:
        key: Where the config holds the part's own.
        model_type: What that says.
        row: The family of that name.
    """

    key: str
    model_type: str
    row: Architecture


def part_within(config: ConfigFile | None) -> PartWithin | None:
    """The language model that a config of images and text declares, where its own model_type is no known family."""
    if config is None or _names_a_family(config):
        return None
    for key in _PARTS:
        part = config.values.get(key)
        inner = cast("Mapping[str, object]", part).get("model_type") if isinstance(part, dict) else None
        row = BY_MODEL_TYPE.get(inner) if isinstance(inner, str) else None
        if row is not None and isinstance(inner, str) and _read_under(config, row) == key:
            return PartWithin(key, inner, row)
    return None


def _names_a_family(config: ConfigFile) -> bool:
    """Whether the config itself, and not a part of it, names a known family."""
    model_type, architecture = config.values.get("model_type"), _first_text(config.values.get("architectures"))
    if model_type is None:
        return architecture in BY_ARCHITECTURE
    return isinstance(model_type, str) and model_type in BY_MODEL_TYPE


def _read_under(config: ConfigFile, row: Architecture) -> str | None:
    """The key of the nested config that the family's settings are read in."""
    return next((key for key in row.nested if isinstance(config.values.get(key), dict)), None)


def _of_the_part_within(config: ConfigFile) -> str:
    """What a config of images and text says of its language model, whose names the tensors do not have."""
    part = part_within(config)
    if part is None:
        return ""
    return f"Its {part.key} says model_type {_quoted(part.model_type)}: --family {part.row.name} reads that part. "


def with_fitting(fault: ConfigFault, names: Collection[str]) -> ConfigFault:
    """The fault of an unknown family, with the families whose names fit the tensors."""
    fitting = fitting_by_name(names)
    if not fitting:
        return fault
    return replace(fault, hint=f"The names fit: {in_words(fitting)}. {fault.hint}")


def find_trunk(row: Architecture, names: Iterable[str]) -> tuple[Trunk | None, tuple[int, ...]]:
    """How a file prefixes the family's names, and the layers that its names show, in order.

    The first of the row's trunks under which any layer has a name that the row knows.
    """
    known = re.compile("|".join(_pattern(name) for name in row.layer_names()))
    all_names = tuple(names)
    for trunk in row.trunks:
        before, after = (re.escape(part) for part in f"{trunk.prefix}{row.layer}".split("{i}"))
        pattern = re.compile(f"{before}(0|[1-9][0-9]{{0,8}}){after}(.*)", re.DOTALL)
        matches = (pattern.fullmatch(name) for name in all_names)
        layers = {int(match[1]) for match in matches if match and known.fullmatch(match[2])}
        if layers:
            return trunk, tuple(sorted(layers))
    return None, ()


def _pattern(template: str) -> str:
    """A template's regular expression: any expert is like the first, and any head."""
    return re.sub(r"\\\{[jh]\\\}", "(?:0|[1-9][0-9]{0,8})", re.escape(template))


def no_trunk(row: Architecture, names: Mapping[str, object], directory: Path, *, asked: bool = False) -> ConfigFault:
    """The fault of a checkpoint none of whose names the family knows.

    Args:
        row: The family.
        names: The tensors by name.
        directory: Where the config lies.
        asked: Whether the family was asked for rather than read from the config.
    """
    example = row.trunks[0].prefix + row.layer.format(i=0) + row.network.down.weight.replace("{j}", "0")
    found = next(iter(sorted(names)), None)
    has = "it has no tensors" if found is None else f"its first is {shown(found)}"
    said = f"the family {row.name} was asked for" if asked else f"{row.config_file} says {row.name}"
    fitting = fitting_by_name(names)
    others = f"they are those of {in_words(fitting)}" if fitting else "they are those of no known family"
    hint = "Correct model_type, or name the family with --family."
    if ARCHITECTURES.get(row.name) is None:
        hint = "Look at trunks, layer and the names in the row that was given (family_row, --family-file)."
    return ConfigFault(
        "unknown-family",
        directory / row.config_file,
        f"the tensors do not have the names of the family {row.name}, such as {example}: {has}; {said}, and {others}",
        hint,
        tensor=found,
        known=tuple(ARCHITECTURES),
    )


@dataclass(frozen=True)
class NamesFit:
    """How a family's names fit those of a checkpoint, in its first and last layer.

    Attributes:
        row: The family.
        trunk: How its names would be prefixed.
        layers: The layers that they would show.
        missing: Names that the family has and the checkpoint has not.
        unexpected: Names of networks and norms there that the family has not.
    """

    row: Architecture
    trunk: Trunk
    layers: tuple[int, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether nothing is missing and nothing left over."""
        return not self.missing and not self.unexpected


def name_fits(names: Collection[str]) -> tuple[NamesFit, ...]:
    """How each family fits that has any name in common with a layer there, the best first.

    Only names are looked at: whether shapes agree is another question.
    """
    # Families are tried on the names with every number made 0, which are few; only what passes sees them all.
    patterns = {_NUMBER.sub(".0", f".{name}")[1:] for name in names}
    present = frozenset(names)
    found = [
        _fit_of(row, trunk, layers, present)
        for row in ARCHITECTURES.values()
        if find_trunk(row, patterns)[0] is not None
        for trunk, layers in (find_trunk(row, names),)
        if trunk is not None
    ]
    return tuple(sorted(found, key=lambda fit: (not fit.fits, len(fit.missing) + len(fit.unexpected))))


def fitting_by_name(names: Collection[str]) -> tuple[Architecture, ...]:
    """The families whose names fit a checkpoint's without anything missing or left over."""
    return tuple(fit.row for fit in name_fits(names) if fit.fits)


def in_words(rows: Sequence[Architecture]) -> str:
    """Families by name, and what tells them apart that no name shows."""
    names = ", ".join(row.name for row in rows[:_SHOWN]) + (", and more" if len(rows) > _SHOWN else "")
    facts: dict[str, Callable[[Architecture], object]] = {
        "epsilon": lambda row: {norm.eps for norm in row.norms},
        "activation": lambda row: row.network.activation,
        "norm arithmetic": lambda row: {norm.kind for norm in row.norms},
        "placement of norms": lambda row: row.placement,
        "storage": lambda row: (row.network.layouts, row.network.fused),
        "multipliers": lambda row: (row.embedding_scale, row.residual_scale, row.branch_scale),
    }
    apart = [word for word, fact in facts.items() if any(fact(row) != fact(rows[0]) for row in rows[1:])]
    return f"{names} (they differ in {', '.join(apart)})" if apart else names


def _fit_of(row: Architecture, trunk: Trunk, layers: tuple[int, ...], names: frozenset[str]) -> NamesFit:
    """The fit of a family, with the flags of its config as they fit best: no config is asked."""
    fit = _fit_as(row, trunk, layers, names)
    for variant in () if fit.fits else row.config_variants:
        other = _fit_as(replace(row, **variant.changes), trunk, layers, names)
        fit = min(fit, other, key=lambda one: len(one.missing) + len(one.unexpected))
    return fit


def _fit_as(row: Architecture, trunk: Trunk, layers: tuple[int, ...], names: frozenset[str]) -> NamesFit:
    def shape(name: str) -> tuple[int, ...] | None:
        return () if name in names else None

    missing: list[str] = []
    unexpected: list[str] = []
    for layer in dict.fromkeys((layers[0], layers[-1])):
        prefix = trunk.prefix + row.layer.format(i=layer)
        here = row_in(row, None, layer, prefix=prefix, shape=shape)
        missing.extend(prefix + name for name, needed in _templates(here) if needed and prefix + name not in names)
        own = [name for name, _ in _templates(here, first_expert="{j}")]
        own += [name for part, _ in _attention_projections(here) for name in (part.weight, part.bias)]
        known = re.compile("|".join(map(_pattern, own)))
        for name in names:
            relative = name.removeprefix(prefix)
            if (relative == name and prefix) or known.fullmatch(relative):
                continue
            if _is_norm(relative) or _is_of_network(relative, here):
                unexpected.append(name)
        relative_names = frozenset(name.removeprefix(prefix) for name in names)
        for lacking, barred in (_attention_fit(here, relative_names), _biases_fit(here, relative_names)):
            missing.extend(prefix + name for name in lacking)
            unexpected.extend(prefix + name for name in barred)
    return NamesFit(row, trunk, layers, tuple(missing), tuple(sorted(unexpected)))


def _is_norm(relative: str) -> bool:
    """Whether a name is a norm's gain, and not one within a part that no family describes, such as a state space."""
    home, _, within = relative.partition(".")
    return "norm" in relative.lower() and relative.endswith(".weight") and ("." not in within or home in _homes())


@cache
def _homes() -> frozenset[str]:
    """The modules of layers in which some family has norms or attention."""
    rows = ARCHITECTURES.values()
    norms = {norm.template for row in rows for norm in row.norms if "." in norm.template}
    attention = {part.weight for row in rows for part, _ in _attention_projections(row)}
    return frozenset(name.partition(".")[0] for name in norms | attention)


def _is_of_network(relative: str, row: Architecture) -> bool:
    """Whether a name lies in the module of a network that the layer has, and not in that of attention."""
    names = (network.down.weight for network in _networks_of_layer(row))
    homes = {name.rpartition(".")[0].rpartition(".")[0].partition("{j}")[0] for name in names}
    return any(home and relative.startswith(home) for home in homes)


def _networks_of_layer(row: Architecture) -> Iterator[FeedForwardRow]:
    """The networks that a row has where its variants do not hold; `Architecture.networks` has those of variants too."""
    mixture = row.mixture
    parts = (row.feed_forward, *(() if mixture is None else (mixture.experts, mixture.shared)))
    yield from (network for network in parts if network is not None)


def _attention_fit(row: Architecture, present: frozenset[str]) -> tuple[list[str], list[str]]:
    """Names of attention that the family has and the layer has not, and biases there that the family never has.

    A layer that has none of the weights is not spoken of: in some families only some layers have attention.
    """
    parts = tuple(_attention_projections(row))
    if not any(part.weight in present for part, _ in parts):
        return [], []
    fixed = {part.bias: flag.default for part, flag in parts if not flag.keys}
    lacking = [part.weight for part, _ in parts if part.weight not in present]
    lacking += [name for name, always in fixed.items() if always and name not in present]
    return lacking, [name for name, always in fixed.items() if not always and name in present]


def _biases_fit(row: Architecture, present: frozenset[str]) -> tuple[list[str], list[str]]:
    """Biases of networks that the family always has and the layer has not, and of those and norms that it never has."""
    mixture = row.mixture
    flags = [
        (part.bias.replace("{j}", "0"), flag)
        for network in _networks_of_layer(row)
        for part, flag in (
            *((part, network.bias) for part in (network.gate, network.up, network.fused)),
            (network.down, network.down_bias or network.bias),
        )
        if part is not None
    ]
    flags += [] if mixture is None else [(mixture.router.bias, mixture.router_bias)]
    fixed = {name: flag.default for name, flag in flags if not flag.keys}
    never = [name for name, always in fixed.items() if not always]
    never += [norm.bias.replace("{h}", "0") for norm in row.norms if not norm.has_bias and norm.role != "final"]
    lacking = [name for name, always in fixed.items() if always and name not in present]
    return lacking, [name for name in never if name in present]


def _attention_projections(row: Architecture) -> Iterator[tuple[Projection, Setting[bool]]]:
    """The projections of a family's attention, with what says whether they have a bias."""
    never = Setting[bool]((), default=False)
    match row.attention:
        case AttentionRow() as heads:
            fused = None if heads.fused is None else heads.fused.projection
            bias, key_bias, output_bias = heads.bias, heads.key_bias or heads.bias, heads.output_bias or heads.bias
            parts = ((heads.query, bias), (heads.key, key_bias), (heads.value, bias), (fused, bias))
            yield from ((part, flag) for part, flag in (*parts, (heads.output, output_bias)) if part is not None)
        case LatentAttentionRow() as latent:
            narrow = row.norm("q_latent") is not None
            yield from (
                ((latent.query_down, latent.bias), (latent.query_up, never)) if narrow else ((latent.query, never),)
            )
            yield from (
                (latent.key_value_down, latent.bias),
                (latent.key_value_up, never),
                (latent.output, latent.bias),
            )
        case None:
            pass


def _templates(row: Architecture, *, first_expert: str = "0") -> Iterator[tuple[str, bool]]:
    """Names of a layer relative to it, and whether they must be there."""
    mixture = row.mixture
    networks = [row.feed_forward, *(() if mixture is None else (mixture.experts, mixture.shared))]
    for network in (network for network in networks if network is not None):
        for projection in (network.gate, network.up, network.fused, network.down):
            if projection is not None:
                yield projection.weight.replace("{j}", first_expert), True
                yield projection.bias.replace("{j}", first_expert), False
        yield from ((name.replace("{j}", first_expert), True) for name in network.activation_tensors.values())
    if mixture is not None:
        yield mixture.router.weight, True
        yield mixture.router.bias, False
        yield from (
            (name, False) for name in (mixture.correction, mixture.shared_gate, mixture.output_bias) if name is not None
        )
    for norm in row.norms:
        if norm.role != "final":
            head = "{h}" if first_expert == "{j}" else first_expert
            gain, bias = (name.replace("{h}", head) for name in (norm.gain, norm.bias))
            if norm.has_gain:
                yield gain, True
            if norm.has_bias:
                yield bias, True
    if row.branch_gain is not None:
        yield row.branch_gain, True


def _first_text(value: object) -> str | None:
    texts = cast("list[object]", value) if isinstance(value, list) else []
    return next((text for text in texts if isinstance(text, str)), None)


def _quoted(value: object) -> str:
    return shown(value) if isinstance(value, str) else repr(value)[:80]
