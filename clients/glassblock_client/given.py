"""What callers hand over, in the form that a message takes it in; what cannot be so the message itself refuses."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
from glassblock.errors import InvalidValue


def as_tuple(values: Any) -> Any:
    """Several values as a tuple, an array's as numbers of Python; whatever is not several values as it is."""
    if isinstance(values, np.ndarray):
        return _as_tuples(values.tolist())
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        return cast("Any", values)
    return tuple(_plain(value) for value in cast("Iterable[Any]", values))


def as_object(values: Any) -> Any:
    """A mapping as a dictionary; whatever is none as it is."""
    return dict(cast("Mapping[Any, Any]", values)) if isinstance(values, Mapping) else values


def named(values: Any, field: str) -> dict[str, Any]:
    """A mapping of values by name.

    Raises:
        InvalidValue: it is none.
    """
    found: Any = as_object(values)
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in cast("dict[Any, Any]", found)):
        raise InvalidValue(f"{field} is a {type(values).__name__}, not values by their names", field=field)
    return cast("dict[str, Any]", found)


def _as_tuples(values: Any) -> Any:
    return tuple(_as_tuples(value) for value in cast("list[Any]", values)) if isinstance(values, list) else values


def _plain(value: Any) -> Any:
    return cast("Any", value.item()) if isinstance(value, np.generic) else value
