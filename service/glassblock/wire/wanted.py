"""What was wanted of a refused value and what came, in a sentence: pydantic's faults in this project's words."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from pydantic_core import ErrorDetails

LONGEST = 100
"""Characters of a refused text that are told again."""

FEW = 6
"""Values of a closed set that a sentence lists; of more it counts them."""

MANY_BITS = 200
"""Of a whole number that is told by its digits."""

KINDS: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "datetime_type": "a time such as 2026-01-31T12:00:00Z",
    "datetime_parsing": "a time such as 2026-01-31T12:00:00Z",
    "datetime_from_date_parsing": "a time such as 2026-01-31T12:00:00Z",
    "timezone_aware": "a time with its zone, such as 2026-01-31T12:00:00Z",
    "path_type": "a path",
}
"""What a value of the wrong kind should have been."""

NAMES: Sequence[tuple[type, str]] = (
    (int, "a number of very many digits"),
    (Mapping, "an object"),
    (list, "a list"),
    (tuple, "a list"),
)
"""What is not told again, but by its kind."""

Context = Mapping[str, Any]


def _length(context: Context) -> str:
    count = context.get("actual_length")
    return "more entries came" if count is None else f"{count:,} entr{'y' if count == 1 else 'ies'} came"


BOUNDS: Mapping[str, Callable[[object, Context], str]] = {
    "greater_than_equal": lambda given, told: f"{_number(given)} is too small: at least {shown(told['ge'])} is wanted",
    "greater_than": lambda given, told: f"{_number(given)} is too small: more than {shown(told['gt'])} is wanted",
    "less_than_equal": lambda given, told: f"{_number(given)} is too large: at most {shown(told['le'])} is wanted",
    "less_than": lambda given, told: f"{_number(given)} is too large: less than {shown(told['lt'])} is wanted",
    "string_too_short": lambda given, told: (
        f"{shown(given)} is too short: at least {_counted(told['min_length'], 'character')}"
    ),
    "string_too_long": lambda given, told: (
        f"a text of {len(cast('str', given)):,} characters is too long: at most {told['max_length']:,}"
    ),
    "string_pattern_mismatch": lambda given, told: f"{shown(given)} is not of the form {told['pattern']}",
    "too_short": lambda _, told: f"{_length(told)}, and at least {told['min_length']:,} must",
    "too_long": lambda _, told: f"{_length(told)}, and at most {told['max_length']:,} may",
    "literal_error": lambda given, told: none_of(given, cast("str", told["expected"])),
    "enum": lambda given, told: none_of(given, cast("str", told["expected"])),
    "value_error": lambda _, told: str(told["error"]),
    "assertion_error": lambda _, told: str(told["error"]),
    "json_invalid": lambda _, told: f"this is no JSON: {told['error']}",
    "extra_forbidden": lambda _given, _told: "there is no such field",
}
"""What is wrong with a value of the right kind."""


def is_of_wrong_kind(fault: ErrorDetails) -> bool:
    """Whether another kind of value was wanted; where one of several was, whoever has the right kind is told more."""
    return fault["type"] in KINDS or _only_value(fault) is not None


def sentence(faults: Sequence[ErrorDetails]) -> str:
    """What is wrong with one value: of several faults those of the alternatives that it could have been.

    Args:
        faults: of pydantic, about the same value.
    """
    told = next((fault for fault in faults if not is_of_wrong_kind(fault)), None)
    if told is None:
        wanted = dict.fromkeys(KINDS.get(fault["type"]) or _only_value(fault) or "" for fault in faults)
        return f"{' or '.join(wanted)} is wanted, not {shown(faults[0]['input'])}"
    bound = BOUNDS.get(told["type"])
    if bound is None:  # of a newer pydantic, or of a kind that no message of ours has
        return told["msg"][:1].lower() + told["msg"][1:]
    return bound(told["input"], told.get("ctx", {}))


def none_of(given: object, expected: str) -> str:
    """That `given` is none of a closed set, which pydantic writes as `'a', 'b' or 'c'`."""
    count = expected.count("'") // 2
    known = expected.replace(" or ", ", ") if count <= FEW else f"the {count} known values"
    return f"{shown(given)} is none of {known}"


def shown(value: object) -> str:
    """A value as a sentence names it, shortened where it is long.

    >>> shown("x"), shown(65536), shown([1, 2]), shown(None)
    ("'x'", '65,536', 'a list', 'null')
    """
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int) and value.bit_length() <= MANY_BITS:
        return f"{value:,}"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if isinstance(value, str):
        return repr(value) if len(value) <= LONGEST else f"{value[:LONGEST]!r}..."
    return next((name for kind, name in NAMES if isinstance(value, kind)), f"a {type(value).__name__}")


def _number(given: object) -> str:
    """As it came, where a command line or a query has it as text."""
    return given[:LONGEST] if isinstance(given, str) else shown(given)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _only_value(fault: ErrorDetails) -> str | None:
    """The one text that a field takes beside another kind of value: `'shared'`, or a number."""
    expected = fault.get("ctx", {}).get("expected", "") if fault["type"] == "literal_error" else ""
    return expected if expected.count("'") == 2 else None
