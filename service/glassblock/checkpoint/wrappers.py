"""Names that training wrappers have put parts into: `module.` in front of all, `_orig_mod` in the midst of any."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from glassblock.checkpoint.config import ConfigFault
from glassblock.checkpoint.family import Architecture
from glassblock.checkpoint.name_fits import fitting_by_name, known_names
from glassblock.checkpoint.strict_json import shown

_INSERTED = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_fpw_module"}
)
"""What torch.compile, FSDP, activation checkpointing and Lightning put in wherever they wrap a module."""

_ANYWHERE = frozenset(_INSERTED | {"module"})
"""Those, and what data parallelism and older checkpointing call what they wrap."""

_MARK = re.compile(rf"(?:^|\.)(?:{'|'.join(sorted(_ANYWHERE))})\.")
_DEEPEST = 4


@dataclass(frozen=True)
class Wrapped:
    """What would have to be taken out of the names.

    Attributes:
        prefix: What every name begins with; empty for nothing.
        inserted: The parts that are taken out wherever they are.
        names: Each name that would change, and what it is without both.
        families: The families whose names they are then.
    """

    prefix: str
    inserted: tuple[str, ...]
    names: Mapping[str, str]
    families: tuple[Architecture, ...]

    @property
    def words(self) -> str:
        """What is wrong with the names."""
        told: list[str] = []
        if self.prefix:
            told.append(f"every name begins with `{self.prefix}`")
        if self.inserted:
            told.append(f"{'' if told else 'names '}hold `{'`, `'.join(self.inserted)}`")
        return f"{' and '.join(told)}; without it they are those of {self.of}"

    @property
    def of(self) -> str:
        """The families by name."""
        return " or ".join(row.name for row in self.families[:_DEEPEST])


def wrapped_names(names: Collection[str], row: Architecture | None = None) -> Wrapped | None:
    """What training wrappers have put into the names; None where the rest would be no better known.

    Nothing is taken out where two names would meet. What all names begin with is looked at only where the family
    knows none of them.

    Args:
        names: Every name of the checkpoint.
        row: The family that they should be of; None for any.
    """
    best, most = None, 0 if row is None else _known(row, names)
    placed = most > 0
    for inserted in (frozenset[str](), _INSERTED, _ANYWHERE):
        parts = {name: [part for part in name.split(".") if part not in inserted] for name in names}
        common = [] if placed else _common(list(parts.values()))
        for depth in range(len(common[:_DEEPEST]) + 1):
            rest = {name: ".".join(left[depth:]) for name, left in parts.items()}
            if len(set(rest.values())) < len(rest) or rest.keys() == set(rest.values()):
                continue
            families = fitting_by_name(rest.values()) if row is None else (row,)
            known = len(families) if row is None else _known(row, rest.values())
            if known <= most:
                continue
            out = sorted({part for name in names for part in name.split(".")} & inserted)
            prefix = "".join(f"{part}." for part in common[:depth])
            changed = {old: new for old, new in rest.items() if old != new}
            best, most = Wrapped(prefix, tuple(out), MappingProxyType(changed), families), known
            if row is None:
                return best
    return best


def are_wrapped(names: Collection[str], row: Architecture) -> bool:
    """Whether a training wrapper's part stands in some names, and the family knows more of them without it."""
    marked = any(map(_MARK.search, names))
    return marked and wrapped_names(names, row) is not None


def with_wrappers(fault: ConfigFault, names: Collection[str], row: Architecture | None = None) -> ConfigFault:
    """The fault of names that are not all known, told as what wrappers did to them where it is that."""
    wrapped = wrapped_names(names, row) if names else None
    if wrapped is None:
        return fault
    if row is None:
        return replace(fault, hint=f"{wrapped.words[0].upper()}{wrapped.words[1:]}. {fault.hint}")
    which = "the tensors" if len(wrapped.names) == len(names) else f"{len(wrapped.names)} of {len(names)} tensors"
    first = min(wrapped.names)
    message = f"{which} do not have the names of the family {row.name}: {wrapped.words} (the first is {shown(first)})"
    return replace(fault, message=message, hint="Rename the tensors: `glassblock fix` does it in the header alone.")


def _known(row: Architecture, names: Collection[str]) -> int:
    """How many of the names the family knows, in its layers and in its other stacks of them."""
    return sum(known_names(stack, names) for stack in (row, *row.towers.values()))


def _common(every: list[list[str]]) -> list[str]:
    """The parts that all begin with, the last part of a name not counted."""
    if not every:
        return []
    first, last = min(every), max(every)
    length = next((place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), None)
    shortest = min(len(first), len(last)) if length is None else length
    return first[: min(shortest, *(len(parts) - 1 for parts in every))]
