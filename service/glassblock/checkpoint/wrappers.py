"""Names that training wrappers have put parts into: `module.` in front of all, `_orig_mod` in the midst of some."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from glassblock.checkpoint.config import ConfigFault
from glassblock.checkpoint.family import Architecture
from glassblock.checkpoint.name_fits import find_trunk, fitting_by_name
from glassblock.checkpoint.strict_json import shown

_INSERTED = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_fpw_module"}
)
"""What torch.compile, FSDP, activation checkpointing and Lightning put in wherever they wrap a module."""

_DEEPEST = 4


@dataclass(frozen=True)
class Wrapped:
    """What would have to be taken out of the names.

    Attributes:
        prefix: What every name begins with; empty for nothing.
        inserted: The parts that are taken out wherever they are.
        names: Each name and what it is without both.
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

    Args:
        names: Every name of the checkpoint, of which the family knows none.
        row: The family that they should be of; None for any.
    """
    for inserted in (frozenset[str](), _INSERTED):
        parts = {name: [part for part in name.split(".") if part not in inserted] for name in names}
        common = _common(list(parts.values()))
        for depth in range(len(common[:_DEEPEST]) + 1):
            rest = {name: ".".join(left[depth:]) for name, left in parts.items()}
            if len(set(rest.values())) < len(rest) or all(old == new for old, new in rest.items()):
                continue
            families = _families(rest.values(), row)
            if families:
                out = sorted({part for name in names for part in name.split(".")} & inserted)
                prefix = "".join(f"{part}." for part in common[:depth])
                return Wrapped(prefix, tuple(out), MappingProxyType(rest), families)
    return None


def with_wrappers(fault: ConfigFault, names: Collection[str], row: Architecture | None = None) -> ConfigFault:
    """The fault of names that no family knows, told as what wrappers did to them where it is that."""
    wrapped = wrapped_names(names, row) if names else None
    if wrapped is None:
        return fault
    first = next(iter(sorted(names)))
    if row is None:
        return replace(fault, hint=f"{wrapped.words[0].upper()}{wrapped.words[1:]}. {fault.hint}")
    message = (
        f"the tensors do not have the names of the family {row.name}: {wrapped.words} (the first is {shown(first)})"
    )
    return replace(fault, message=message, hint="Rename the tensors: `glassblock fix` does it in the header alone.")


def _families(names: Collection[str], row: Architecture | None) -> tuple[Architecture, ...]:
    if row is None:
        return fitting_by_name(names)
    return (row,) if find_trunk(row, names)[0] is not None else ()


def _common(every: list[list[str]]) -> list[str]:
    """The parts that all begin with, the last part of a name not counted."""
    if not every:
        return []
    first, last = min(every), max(every)
    length = next((place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), None)
    shortest = min(len(first), len(last)) if length is None else length
    return first[: min(shortest, *(len(parts) - 1 for parts in every))]
