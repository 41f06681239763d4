"""A family's row from plain data, as a JSON or TOML file or a request holds it.

The data have the shape of the row's own dataclasses, fields by their names. Three things are shorter or need a name:

- `"like": "llama"` begins with a family of the table, and the data list only the differences. A network, a mixture
  or another part that both have is changed field by field, `sizes` size by size; lists are replaced whole.
- A condition is an object with its kind under `if`: `{"if": "from-layer", "first": {"keys": ["first_k_dense"],
  "default": 1}}`.
- A setting may be its default alone: `"activation": "silu"` says that no config declares it.

Nothing is executed, and nothing is taken that the row type does not have: an unknown field, a wrong type, a template
without its `{i}` and an unknown activation are refused by name.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from glassblock.checkpoint import conditions
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.family import Architecture, Setting, Variant
from glassblock.checkpoint.recognition import family_named
from glassblock.checkpoint.row_checks import NAMES, check_row, kind_of, refuse, said

MAX_ITEMS = 10_000
"""Objects, lists and values in one row."""

MAX_DEPTH = 24
"""Nested objects and lists in one row; a row of the table has about ten."""

MAX_TEXT = 1_000
"""Characters of one text."""

_CONDITIONS: Mapping[str, type] = MappingProxyType(
    {
        "declares": conditions.Declares,
        "from-layer": conditions.FromLayer,
        "every-layer": conditions.EveryLayer,
        "layer-listed": conditions.LayerListed,
        "layer-kind": conditions.LayerKind,
        "holds": conditions.Holds,
        "says": conditions.Says,
        "axis-is": conditions.AxisIs,
        "at-top": conditions.AtTop,
        "neither": conditions.Neither,
        "every": conditions.Every,
    }
)
# Fields that files were once written with.
_OF_AXIS = "Name a tensor with an axis of that length: `of`, and `at` for its axis, 0 if left out."
_FORMER: Mapping[tuple[type, str], str] = MappingProxyType({(conditions.AxisIs, "length"): _OF_AXIS})
# What a row says about itself that a file cannot vouch for.
_NOT_GIVEN = frozenset({"verified", "sources"})
_OPTIONAL_HERE: Mapping[str, object] = MappingProxyType(
    {"model_types": (), "architectures": (), "verified": "source only", "sources": ("a row that was given",)}
)


def parse_family_row(data: object, *, field: str = "family_row") -> Architecture:
    """The row that `data` describe.

    Args:
        data: Plain values, as JSON or TOML parsers return them.
        field: What to call the whole of it in errors.

    Raises:
        InvalidValue: Something in it is no part of a row; the field is named, and what would do.
        UnknownFamily: `like` names no family of the table.
    """
    _check_size(data, field)
    if not isinstance(data, Mapping):
        refuse(field, f"is {kind_of(data)}, and a row is an object", "Give its fields by name.")
    values = dict(cast("Mapping[str, object]", data))
    base = None
    if "like" in values:
        like = values.pop("like")
        if not isinstance(like, str):
            refuse(f"{field}.like", f"is {kind_of(like)}", "Give the name of a family.", known=tuple(ARCHITECTURES))
        base = dataclasses.replace(
            family_named(like), model_types=(), architectures=(), verified="source only", sources=(f"like {like}",)
        )
        values.setdefault("name", f"like {like}")
    for name in _NOT_GIVEN & values.keys():
        refuse(
            f"{field}.{name}", "is no field of a given row", "It says how the table's rows were proved: leave it out."
        )
    row = cast("Architecture", _dataclass(Architecture, values, field, base))
    check_row(row, field=field)
    return row


def _check_size(data: object, field: str) -> None:
    """Bound depth, number and length before anything recurses into it."""
    waiting, seen = [(data, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        seen += 1
        if depth > MAX_DEPTH or seen > MAX_ITEMS:
            what = f"deeper than {MAX_DEPTH} levels" if depth > MAX_DEPTH else f"larger than {MAX_ITEMS} values"
            refuse(field, f"is {what}", "A row of the table is far smaller.")
        if isinstance(value, str) and len(value) > MAX_TEXT:
            refuse(field, f"holds a text of {len(value)} characters", f"At most {MAX_TEXT} are read.")
        if isinstance(value, Mapping):
            inside = cast("Mapping[object, object]", value)
            waiting.extend((part, depth + 1) for part in (*inside.keys(), *inside.values()))
        elif isinstance(value, list | tuple):
            waiting.extend((part, depth + 1) for part in cast("list[object]", value))


def _value(kind: object, data: object, field: str, base: object = None) -> object:
    """`data` as the annotation `kind` has it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _one_of(arguments, data, field, base)
    if dataclasses.is_dataclass(origin or kind):
        bound = dict(zip(_parameters(origin), arguments, strict=False))
        return _dataclass(cast("type", origin or kind), data, field, base, bound)
    if origin is not None:
        return _composed(origin, arguments, data, field, base)
    return data if kind is Any else _scalar(cast("type", kind), data, field)


def _composed(origin: object, arguments: tuple[object, ...], data: object, field: str, base: object) -> object:
    """A word out of several, a list, or an object with free keys."""
    if origin is Literal:
        if data not in arguments or isinstance(data, bool):
            refuse(field, f"is {said(data)}", "Use one of the known words.", known=tuple(map(str, arguments)))
        return data
    return _tuple(arguments, data, field) if origin is tuple else _mapping(arguments, data, field, base)


def _dataclass(
    kind: type, data: object, field: str, base: object = None, parameters: Mapping[object, object] | None = None
) -> object:
    hints = typing.get_type_hints(kind)
    if kind is Setting and not isinstance(data, Mapping):
        data = {"keys": [], "default": data}  # a value that no config declares
    if not isinstance(data, Mapping):
        refuse(field, f"is {said(data)}", f"Give an object with the fields {', '.join(hints)}.")
    values = cast("Mapping[str, object]", data)
    _refuse_others(kind, values, hints, field)
    own = base if isinstance(base, kind) else None
    found: dict[str, object] = {}
    for item in dataclasses.fields(kind):
        if item.name in values and kind is Variant and item.name == "changes":
            found[item.name] = _changes(values[item.name], f"{field}.{item.name}")
        elif item.name in values:
            annotation = _bound(hints[item.name], parameters or {})
            before = None if own is None else getattr(own, item.name)
            found[item.name] = _value(annotation, values[item.name], f"{field}.{item.name}", before)
        elif own is not None:
            found[item.name] = getattr(own, item.name)
        elif kind is Architecture and item.name in _OPTIONAL_HERE:
            found[item.name] = _OPTIONAL_HERE[item.name]
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            refuse(f"{field}.{item.name}", f"is missing: {_words(kind)} needs it", _purpose(kind, item.name))
    return cast("Callable[..., object]", kind)(**found)


def _refuse_others(kind: type, values: Mapping[str, object], hints: Mapping[str, object], field: str) -> None:
    for name in values:
        if name not in hints:
            near = get_close_matches(str(name), hints, n=1)
            hint = f"Did you mean {near[0]}?" if near else _FORMER.get((kind, name), "Leave it out.")
            refuse(f"{field}.{str(name)[:80]}", f"is no field of {_words(kind)}", hint, known=tuple(hints))


def _changes(data: object, field: str) -> Mapping[str, object]:
    """What a variant changes: fields of a row, each read as a row's."""
    if not isinstance(data, Mapping):
        refuse(field, f"is {said(data)}", "Give an object: fields of the row and what they are then.")
    hints = typing.get_type_hints(Architecture)
    changes: dict[str, object] = {}
    for name, value in cast("Mapping[str, object]", data).items():
        if name not in hints or name in _NOT_GIVEN or name in ("name", "config_variants", "towers"):
            near = get_close_matches(str(name), hints, n=1)
            hint = f"Did you mean {near[0]}?" if near else "Leave it out."
            refuse(f"{field}.{str(name)[:80]}", "is nothing that a variant can change", hint)
        changes[name] = _value(hints[name], value, f"{field}.{name}")
    return MappingProxyType(changes)


def _one_of(kinds: tuple[object, ...], data: object, field: str, base: object) -> object:
    """`data` as one of several kinds: none, a condition, one of several objects, or a single value."""
    if data is None:
        if type(None) in kinds:
            return None
        refuse(field, "is empty", "Give a value, or leave the field out.")
    if set(_CONDITIONS.values()) <= set(kinds):
        return _condition(data, field)
    objects = [kind for kind in kinds if dataclasses.is_dataclass(get_origin(kind) or kind)]
    if _is_object(data) and objects:
        given = set(cast("Mapping[str, object]", data))
        fitting = [kind for kind in objects if given <= set(typing.get_type_hints(get_origin(kind) or kind))]
        if len(objects) == 1:
            fitting = objects
        if not fitting:
            words = " or ".join(
                f"{_words(get_origin(kind) or kind)} ({', '.join(typing.get_type_hints(get_origin(kind) or kind))})"
                for kind in objects
            )
            refuse(field, f"has the fields {', '.join(sorted(map(str, given)))[:200]}", f"Give {words}.")
        return _value(fitting[0], data, field, base)
    free = [kind for kind in kinds if get_origin(kind) is Mapping]
    if _is_object(data) and free:
        return _value(free[0], data, field)
    settings = [kind for kind in objects if get_origin(kind) is Setting]
    singles = [kind for kind in kinds if kind not in objects and kind is not type(None)]
    if _is_object(data) or not (singles or settings):
        words = " or ".join(_words(get_origin(kind) or kind) for kind in objects)
        refuse(field, f"is {said(data)}", f"Give an object: {words}." if words else "Give a single value.")
    return _value((singles or settings)[0], data, field, base)


def _is_object(data: object) -> bool:
    return isinstance(data, Mapping)


def _condition(data: object, field: str) -> object:
    known = tuple(_CONDITIONS)
    values = dict(cast("Mapping[str, object]", data)) if _is_object(data) else {}
    kind = values.pop("if", None)
    if not isinstance(kind, str) or kind not in _CONDITIONS:
        problem = f"has {said(kind)} under `if`" if values or kind else f"is {said(data)}"
        refuse(field, problem, "A condition is an object whose kind stands under `if`.", known=known)
    return _dataclass(_CONDITIONS[kind], values, field)


def _tuple(arguments: tuple[object, ...], data: object, field: str) -> tuple[object, ...]:
    if not isinstance(data, list | tuple):
        refuse(field, f"is {said(data)}", "Give a list.")
    items = cast("list[object]", data)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_value(arguments[0], item, f"{field}[{place}]") for place, item in enumerate(items))
    if len(items) != len(arguments):
        refuse(field, f"has {len(items)} entries", f"Give {len(arguments)}.")
    pairs = enumerate(zip(arguments, items, strict=True))
    return tuple(_value(kind, item, f"{field}[{place}]") for place, (kind, item) in pairs)


def _mapping(arguments: tuple[object, ...], data: object, field: str, base: object = None) -> Mapping[object, object]:
    """An object with free keys; one whose keys are a closed set of words, as sizes are, changes those of the base."""
    if not isinstance(data, Mapping):
        refuse(field, f"is {said(data)}", "Give an object.")
    key_kind, value_kind = arguments
    own = cast("Mapping[object, object]", base if isinstance(base, Mapping) else {})
    found: dict[object, object] = dict(own) if get_origin(key_kind) is Literal else {}
    for key, value in cast("Mapping[str, object]", data).items():
        place = f"{field}.{str(key)[:80]}"
        # JSON's keys are texts: a flag's two meanings are written as "true" and "false".
        word = {"true": True, "false": False}.get(key, key) if bool in get_args(key_kind) else key
        known = word if isinstance(word, bool) else _value(key_kind, word, place)
        found[known] = _value(value_kind, value, place, found.get(known))
    return MappingProxyType(found)


def _scalar(kind: type[Any], data: object, field: str) -> object:
    if issubclass(kind, Enum):
        words = tuple(str(member.value) for member in kind)
        if data not in words:
            refuse(field, f"is {said(data)}", "Use one of the known words.", known=words)
        return kind(data)
    if kind is float and type(data) is int and abs(data) < 2**1000:
        return float(data)
    if (kind is object and isinstance(data, str | int | float)) or (kind in NAMES and type(data) is kind):
        return data
    return refuse(field, f"is {said(data)}", f"Give {NAMES.get(kind, 'another value')}.")


def _bound(annotation: object, parameters: Mapping[object, object]) -> object:
    """An annotation with a generic dataclass's parameters put in."""
    if isinstance(annotation, TypeVar):
        return parameters.get(annotation, object)
    arguments = get_args(annotation)
    if not any(isinstance(part, TypeVar) or get_args(part) for part in arguments):
        return annotation
    bound = tuple(_bound(part, parameters) for part in arguments)
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.Union[bound]  # noqa: UP007  built from parts
    return cast("Any", get_origin(annotation))[bound]


def _parameters(kind: object) -> tuple[object, ...]:
    return cast("tuple[object, ...]", getattr(kind, "__parameters__", ()))


def _words(kind: Any) -> str:
    """What a file calls it: a condition has the word under `if`, everything else the name of its class."""
    word = next((word for word, condition in _CONDITIONS.items() if condition is kind), None)
    if word is not None:
        return f"the condition {word}"
    name = getattr(kind, "__name__", str(kind))
    return "a row" if kind is Architecture else f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _purpose(kind: type, name: str) -> str:
    """The field's line of the docstring."""
    lines = (kind.__doc__ or "").splitlines()
    line = next((line.strip() for line in lines if line.strip().startswith(f"{name}:")), "")
    return line.partition(":")[2].strip() or "Give it."
