"""Which field of a row names a tensor: told where a row of somebody's own asks for one that is not there."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import cast

from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.family import Architecture, NormRow

_NUMBER = "(?:0|[1-9][0-9]{0,8})"


def is_given(row: Architecture | None) -> bool:
    """Whether a row is somebody's own, and not one of the table."""
    return row is not None and ARCHITECTURES.get(row.name) is not row


def field_naming(row: Architecture, name: str) -> str | None:
    """The path of the field that gives a tensor its name, such as `feed_forward.gate.weight`; None where none does.

    Args:
        row: The row as it was given.
        name: The tensor's name as it is in files, with the trunk's prefix and the layer's number.
    """
    global _last  # noqa: PLW0603  one row is asked about at a time, for each of its tensors that is absent
    last = _last  # another thread may ask about another row meanwhile
    if last is None or last[0] is not row:
        last = _last = (row, tuple(_patterns(row)))
    return next((path for path, pattern in last[1] if pattern.fullmatch(name)), None)


_last: tuple[Architecture, tuple[tuple[str, re.Pattern[str]], ...]] | None = None
"""The row that was asked about last, with its names as patterns: a checkpoint may lack tens of thousands of tensors."""


def _patterns(row: Architecture) -> Iterator[tuple[str, re.Pattern[str]]]:
    befores = dict.fromkeys(("", *(f"{trunk.prefix}{layer}" for trunk in row.trunks for layer in (row.layer, ""))))
    for path, template in _names(row, ""):
        if template:
            either = "|".join(re.escape(before + template) for before in befores)
            yield path, re.compile(re.sub(r"\\\{[ijh]\\\}", _NUMBER, either))


def _names(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Every text in a row, with the path of its field."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, NormRow):
        yield f"{path}.template", value.gain
        yield f"{path}.template", value.bias
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from _names(getattr(value, item.name), f"{path}.{item.name}" if path else item.name)
    elif isinstance(value, Mapping):
        for key, part in cast("Mapping[object, object]", value).items():
            yield from _names(part, f"{path}.{key}")
    elif isinstance(value, tuple):
        for place, part in enumerate(cast("tuple[object, ...]", value)):
            yield from _names(part, f"{path}[{place}]")
