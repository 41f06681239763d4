"""Conditions under which a row of the family table is otherwise: on the config, and on the layer's number.

They are data, so that a row given as a file can hold them too. `holds` decides one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast


@dataclass(frozen=True)
class Declares:
    """The first of `keys` that the config has, or else `default`, is one of `values`."""

    keys: tuple[str, ...]
    values: tuple[object, ...]
    default: object = None


@dataclass(frozen=True)
class Whole:
    """A whole number that a config may declare."""

    keys: tuple[str, ...]
    default: int


@dataclass(frozen=True)
class FromLayer:
    """The layer's number plus `shift` is at least `first` less `back`, which counts layers from the last."""

    first: Whole
    shift: int = 0
    back: Whole = Whole((), 0)


@dataclass(frozen=True)
class EveryLayer:
    """The layer's number plus `shift`, divided by `step`, leaves `offset`. A step of 0 never does."""

    step: Whole
    offset: Whole = Whole((), 0)
    shift: int = 0


@dataclass(frozen=True)
class LayerListed:
    """The layer's number is in the list at one of `keys`; `default` where there is no such list."""

    keys: tuple[str, ...]
    default: bool = False


@dataclass(frozen=True)
class LayerKind:
    """The entry for this layer in the list or text at one of `keys` is one of `values`; `otherwise` without such."""

    keys: tuple[str, ...]
    values: tuple[object, ...]
    otherwise: "Condition | None" = None


@dataclass(frozen=True)
class Holds:
    """The file has a tensor of that name, relative to the layer; `{j}` is 0. For files whose config does not say."""

    name: str


@dataclass(frozen=True)
class Says:
    """The config has one of `keys`, whatever it says there."""

    keys: tuple[str, ...]


@dataclass(frozen=True)
class AxisIs:
    """The tensor `name` has an axis as long as the axis `at` of the tensor `of`; false without one of them.

    Both names are relative to the layer. For families whose files store one tensor in two ways, of which nothing but
    its shape tells.
    """

    name: str
    axis: int
    of: str
    at: int = 0


@dataclass(frozen=True)
class AtTop:
    """The condition holds at the top of the config, where the family's own lies inside that of a larger model."""

    of: "Condition"


@dataclass(frozen=True)
class Neither:
    """None of the conditions holds."""

    of: tuple["Condition", ...]


@dataclass(frozen=True)
class Every:
    """All of the conditions hold."""

    of: tuple["Condition", ...]


Condition = (
    Declares | FromLayer | EveryLayer | LayerListed | LayerKind | Holds | Says | AxisIs | AtTop | Neither | Every
)


def either(*of: Condition) -> Condition:
    """At least one of the conditions holds."""
    return Neither((Neither(of),))


def unless(condition: Condition) -> Condition:
    """The condition does not hold."""
    return Neither((condition,))


@dataclass(frozen=True)
class Circumstances:
    """What a condition may look at.

    Attributes:
        declared: The value that a config has at the first present of some keys; None where none is.
        layer: The layer's number; 0 for a question about the config alone.
        prefix: What the names of the layer's tensors begin with.
        shape: The shape of the tensor of a name; None where there is none.
        at_top: As `declared`, of the outermost config.
    """

    declared: Callable[[tuple[str, ...]], object]
    layer: int = 0
    prefix: str = ""
    shape: Callable[[str], tuple[int, ...] | None] = lambda _name: None
    at_top: Callable[[tuple[str, ...]], object] = lambda _keys: None


def holds(condition: Condition, at: Circumstances) -> bool:
    """Whether a condition holds. What a config declares in another type than expected counts as not declared."""
    match condition:
        case FromLayer() | EveryLayer() | LayerListed() | LayerKind():
            answer = _holds_of_layer(condition, at)
        case Holds():
            answer = at.shape(at.prefix + condition.name.replace("{j}", "0")) is not None
        case AxisIs():
            length = _axis(condition.name, condition.axis, at)
            answer = length is not None and length == _axis(condition.of, condition.at, at)
        case AtTop():
            answer = holds(condition.of, replace(at, declared=at.at_top))
        case Neither():
            answer = not any(holds(part, at) for part in condition.of)
        case Every():
            answer = all(holds(part, at) for part in condition.of)
        case Says():
            answer = at.declared(condition.keys) is not None
        case Declares():
            declared = at.declared(condition.keys)
            answer = (condition.default if declared is None else declared) in condition.values
    return answer


def _holds_of_layer(condition: FromLayer | EveryLayer | LayerListed | LayerKind, at: Circumstances) -> bool:
    match condition:
        case FromLayer():
            return at.layer + condition.shift >= _whole(condition.first, at) - _whole(condition.back, at)
        case EveryLayer():
            step = _whole(condition.step, at)
            return step > 0 and (at.layer + condition.shift) % step == _whole(condition.offset, at)
        case LayerListed():
            listed = at.declared(condition.keys)
            return at.layer in cast("list[object]", listed) if isinstance(listed, list) else condition.default
        case LayerKind():
            kinds = at.declared(condition.keys)
            if isinstance(kinds, list | str) and at.layer < len(cast("list[object]", kinds)):
                return cast("list[object]", kinds)[at.layer] in condition.values
            return condition.otherwise is not None and holds(condition.otherwise, at)


def _axis(name: str, axis: int, at: Circumstances) -> int | None:
    """The length of an axis of a tensor of the layer."""
    shape = at.shape(at.prefix + name) or ()
    return shape[axis] if -len(shape) <= axis < len(shape) else None


def _whole(number: Whole, at: Circumstances) -> int:
    declared = at.declared(number.keys)
    return declared if type(declared) is int else number.default


def keys_of(condition: Condition) -> Mapping[str, None]:
    """The config keys that a condition reads, in order."""
    match condition:
        case Declares() | LayerListed() | Says():
            found = condition.keys
        case FromLayer():
            found = condition.first.keys + condition.back.keys
        case EveryLayer():
            found = condition.step.keys + condition.offset.keys
        case LayerKind():
            found = condition.keys + (() if condition.otherwise is None else tuple(keys_of(condition.otherwise)))
        case AxisIs() | Holds():
            found = ()
        case AtTop():
            found = tuple(keys_of(condition.of))
        case Neither() | Every():
            found = tuple(key for part in condition.of for key in keys_of(part))
    return dict.fromkeys(found)
