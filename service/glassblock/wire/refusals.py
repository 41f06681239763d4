"""What pydantic refuses, told as the error that the service answers with; client and service tell it alike."""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import cast, get_args

from pydantic import BaseModel, ValidationError

from glassblock.errors import InvalidValue

LONGEST = 100
"""Characters of a refused value that are looked up among the known ones."""

FEW = 6
"""Values of a closed set that a sentence lists; of more it counts them, and `known` holds them all."""


def refusal(fault: ValidationError, model: type[BaseModel] | None = None, *, within: str = "") -> InvalidValue:
    """The error for the first field at fault, with what it takes: the fields of `model`, or a closed set of values."""
    faults = fault.errors(include_url=False)
    first = faults[0]
    # Of the alternatives of one field, the one that got furthest is the one that was meant.
    meant = max(
        (other for other in faults if other["loc"][:1] == first["loc"][:1]), key=lambda other: len(other["loc"])
    )
    # pydantic puts the alternative it tried (`list[int]`) into the path; a caller never wrote that. What came where
    # nothing belongs may be called anything.
    path = [step for step in meant["loc"][:-1] if _was_written(step)]
    path += [step for step in meant["loc"][-1:] if meant["type"] == "extra_forbidden" or _was_written(step)]
    told, given, known = meant["msg"][:1].lower() + meant["msg"][1:], meant["input"], tuple[str, ...]()
    if meant["type"] == "extra_forbidden":
        told, given, known = "there is no such field", path[-1], _fields(model, path[:-1])
    elif meant["type"] == "model_type":
        known = _fields(model, path)
        told = f"an object with the fields {', '.join(known)} is wanted" if known else "an object is wanted"
    elif meant["type"] == "literal_error":
        known = tuple(re.findall(r"'([^']*)'", cast("str", meant.get("ctx", {}).get("expected", ""))))
        if len(known) > FEW and isinstance(given, str):
            told = f"{given[:LONGEST]!r} is none of the {len(known)} known values"
    near = get_close_matches(given[:LONGEST], known) if isinstance(given, str) else []
    hint = f"Near: {', '.join(near)}." if near else None
    if hint is None and meant["type"] == "extra_forbidden" and known:
        hint = f"Known: {', '.join(known)}."
    field = ".".join([*([within] if within else []), *(str(step) for step in path)])
    others = f" (and {len(faults) - 1} more)" if len(faults) > 1 and meant is first else ""
    return InvalidValue(f"{field or 'the message'}: {told}{others}", field=field or "body", hint=hint, known=known)


def _was_written(step: int | str) -> bool:
    return isinstance(step, int) or step.isidentifier()


def _fields(model: type[BaseModel] | None, path: list[int | str]) -> tuple[str, ...]:
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
