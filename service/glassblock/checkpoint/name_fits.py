"""The names of families held against those of a checkpoint: behind which prefix they stand, and which of them fit.

Only names are looked at, neither the config nor a shape.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.attention_row import AttentionRow, LatentAttentionRow
from glassblock.checkpoint.family import Architecture, FeedForwardRow, Projection, Setting, Trunk
from glassblock.checkpoint.variants import row_in

_NUMBER = re.compile(r"\.(?:0|[1-9][0-9]{0,8})(?=\.)")
_SHOWN = 8
"""Families named in a sentence."""


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


def known_names(row: Architecture, names: Collection[str]) -> int:
    """How many of the names are those of a layer of the family, or of what lies outside its layers."""
    trunk, _ = find_trunk(row, names)
    if trunk is None:
        return 0
    own = [name for name, _ in _templates(row, first_expert="{j}")]
    own += [name for part, _ in _attention_projections(row) for name in (part.weight, part.bias)]
    inner = "|".join(map(_pattern, {*own, *row.layer_names()}))
    before, after = (re.escape(part) for part in f"{trunk.prefix}{row.layer}".split("{i}"))
    known = re.compile(f"{before}(?:0|[1-9][0-9]{{0,8}}){after}(?:{inner})")
    outer = {trunk.head, trunk.embedding, trunk.prefix + (row.embedding or "")}
    outer |= {trunk.prefix + name for norm in row.norms if norm.role == "final" for name in (norm.gain, norm.bias)}
    return sum(name in outer or known.fullmatch(name) is not None for name in names)


def _pattern(template: str) -> str:
    """A template's regular expression: any expert is like the first, and any head."""
    return re.sub(r"\\\{[jh]\\\}", "(?:0|[1-9][0-9]{0,8})", re.escape(template))


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
    """How each family fits that has any name in common with a layer there, the best first."""
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


def families_in_words(rows: Sequence[Architecture]) -> str:
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
        if not network.bias_in_files
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
    for network in _networks_of_layer(row):
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
