"""Which layer a tensor's name speaks of, and tensors that share a name but for it."""

import re
from collections import defaultdict
from collections.abc import Iterable

_LAYER = re.compile(r"(?<![^.])(?:layers|layer|blocks|block|blk|h|decoder_layer|transformer_blocks)\.(\d{1,9})(?=\.)")
_SHOWN = 3
_LONGEST = 300
"""Characters of a name that a message shows."""


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


def cut_names(text: str, names: Iterable[str] = ()) -> str:
    """A message in which no name, nor any other run without a space, is longer than anybody reads.

    Args:
        text: The message.
        names: Tensors that it may name; those with spaces in them are no runs.
    """
    if len(text) <= _LONGEST:
        return text
    for name in names:
        if len(name) > _LONGEST:
            text = text.replace(name, f"{name[: _LONGEST - 3]}...")
    return re.sub(rf"\S{{{_LONGEST + 1},}}", lambda run: f"{run[0][: _LONGEST - 3]}...", text)
