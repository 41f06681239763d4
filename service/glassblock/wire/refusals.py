"""What pydantic refuses, told as the error that the service answers with; client and service tell it alike."""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from glassblock.errors import InvalidValue
from glassblock.wire.wanted import LONGEST, sentence

Path = list[int | str]

ALTERNATIVES = {"int", "float", "str", "bool", "datetime"}
"""Steps that pydantic puts into a path for the kind that it tried; no field of a message is called so."""


def refusal(fault: ValidationError, model: type[BaseModel] | None = None, *, within: str = "") -> InvalidValue:
    """The error for the first field at fault, with what it takes: the fields of `model`, or a closed set of values."""
    faults = fault.errors(include_url=False)
    first = faults[0]
    # Of the alternatives of one field, the one that got furthest is the one that was meant.
    meant = max(
        (other for other in faults if other["loc"][:1] == first["loc"][:1]), key=lambda other: len(other["loc"])
    )
    path = _written_path(meant)
    alike = [other for other in faults if _written_path(other) == path]
    told, given, known = sentence(alike), meant["input"], tuple[str, ...]()
    if meant["type"] == "extra_forbidden":
        given, known = path[-1], _fields(model, path[:-1])
    elif meant["type"] == "model_type":
        known = _fields(model, path)
        told = f"{told}; it has the fields {', '.join(known)}" if known else told
    else:
        sets = (cast("str", other.get("ctx", {}).get("expected", "")) for other in alike)
        known = tuple(dict.fromkeys(value for words in sets for value in re.findall(r"'([^']*)'", words)))
    near = get_close_matches(given[:LONGEST], known) if isinstance(given, str) else []
    hint = f"Did you mean {' or '.join(near)}?" if near else None
    if hint is None and meant["type"] == "extra_forbidden" and known:
        hint = f"Known: {', '.join(known)}."
    field = ".".join([*([within] if within else []), *(str(step) for step in path)])
    further = len({other["loc"][:1] for other in faults}) - 1
    others = f" (and {further} more)" if further else ""
    named = f"{field} is missing" if meant["type"] == "missing" else f"{field or 'the message'}: {told}"
    return InvalidValue(f"{named}{others}", field=field or "body", hint=hint, known=known)


def _written_path(fault: ErrorDetails) -> Path:
    """Where a value stands, as its caller wrote it: pydantic adds the alternative that it tried (`list[int]`).

    What came where nothing belongs may be called anything.
    """
    path: Path = [step for step in fault["loc"][:-1] if _was_written(step)]
    return path + [step for step in fault["loc"][-1:] if fault["type"] == "extra_forbidden" or _was_written(step)]


def _was_written(step: int | str) -> bool:
    return isinstance(step, int) or (step.isidentifier() and step not in ALTERNATIVES)


def _fields(model: type[BaseModel] | None, path: Path) -> tuple[str, ...]:
    """The fields of what stands at `path` of a message; none where that is no object of one kind."""
    for step in path:
        field = None if model is None or isinstance(step, int) else model.model_fields.get(step)
        kinds = [] if field is None else [kind for kind in _kinds(field.annotation) if issubclass(kind, BaseModel)]
        model = kinds[0] if len(kinds) == 1 else None
    return () if model is None else tuple(model.model_fields)


def _kinds(annotation: object) -> Iterator[type]:
    arguments = get_args(annotation)
    if isinstance(annotation, type) and not arguments:
        yield annotation
    for argument in arguments:
        yield from _kinds(argument)
