"""Which layer a tensor's name speaks of, and tensors that share a name but for it."""

import re
from collections import defaultdict
from collections.abc import Iterable

_LAYER = re.compile(r"(?<![^.])(?:layers|h|blocks|layer)\.(\d{1,9})(?=\.)")
_SHOWN = 3


def layer_of(name: str) -> int | None:
    """The layer that a tensor's name tells; None for an embedding, a head or a final norm."""
    match = _LAYER.search(name)
    return None if match is None else int(match[1])


def alike(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Names grouped by what they are but for the layer: `model.layers.{i}.mlp.up_proj.weight` to its tensors."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[_LAYER.sub(lambda match: match[0].replace(match[1], "{i}"), name, count=1)].append(name)
    return {pattern: tuple(members) for pattern, members in groups.items()}


def only_layer(names: Iterable[str]) -> int | None:
    """The layer that all names speak of, if it is one."""
    layers = {layer_of(name) for name in names}
    return layers.pop() if len(layers) == 1 else None


def in_words(names: tuple[str, ...]) -> str:
    """`a`, `a and b`, or `12 tensors (a, b, c and 9 more)`."""
    if len(names) <= _SHOWN:
        return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{len(names)} tensors ({', '.join(names[:_SHOWN])} and {len(names) - _SHOWN} more)"
