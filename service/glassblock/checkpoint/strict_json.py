"""JSON from files that nobody vouches for: bounded in depth, in number length, free of repeated keys.

The standard library's parser does the parsing. What it leaves open is closed around it: it would follow
nesting as deep as the interpreter's stack, take the last of two equal keys without a word, read `NaN`,
let lone surrogates through, and spend quadratic time on a number of a million digits.
"""

import json
import re
from collections.abc import Callable
from typing import NoReturn, cast

import numpy as np

MAX_DEPTH = 127
"""Nested objects and arrays at most, as in the reference implementation of safetensors (serde_json)."""

MAX_NUMBER_CHARACTERS = 400
"""Longest number read. The longest finite float64 written without an exponent has 309 digits."""

_NEITHER_BRACKET_NOR_QUOTE = bytes(set(range(256)) - set(b'[]{}"'))
_STRIDE = 1 << 20
_BRACES_AS_BRACKETS = bytes.maketrans(b"{}", b"[]")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class JsonFault(ValueError):
    """The text is not JSON that is read here. `byte` is where it shows, where that is known."""

    def __init__(self, message: str, byte: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.byte = byte


def parse_json(raw: bytes, *, constants: bool) -> object:
    """The value that `raw` (UTF-8) holds.

    Args:
        raw: The whole document; the caller bounds its length.
        constants: Whether `NaN`, `Infinity` and numbers beyond float64 are read (as floats). Configs in
            the wild hold them; the safetensors format does not allow them.

    Raises:
        JsonFault: On anything else than one strict JSON value.
    """
    text = _decode(raw)
    _check_depth(raw)
    decoder = json.JSONDecoder(
        object_pairs_hook=_object,
        parse_int=_integer,
        parse_float=_float_or_infinity if constants else _finite_float,
        parse_constant=None if constants else _no_constant,
    )
    try:
        value = cast("object", decoder.decode(text))
    except json.JSONDecodeError as error:
        # The parser's own words end in a line and a column; the byte is worth more for one long line.
        raise JsonFault(f"not JSON: {error.msg}", len(text[: error.pos].encode())) from None
    if _SURROGATE_ESCAPE.search(raw):
        _check_surrogates(value)
    return value


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonFault(f"not UTF-8: {error.reason}", error.start) from None


def _check_depth(raw: bytes) -> None:
    """Refuse deep nesting before the parser, which recurses, sees it. Linear in time."""
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw
    marks = unescaped.translate(_BRACES_AS_BRACKETS, _NEITHER_BRACKET_NOR_QUOTE)
    # Taking two neighbouring quotes away leaves every bracket inside, or outside, of strings as it was.
    brackets = b"".join(marks.replace(b'""', b"").split(b'"')[::2])
    depth = 0
    for start in range(0, len(brackets), _STRIDE):
        # "[" is byte 91 and "]" is byte 93: 92 minus the byte is the step in depth.
        steps = 92 - np.frombuffer(brackets[start : start + _STRIDE], np.uint8).astype(np.int64)
        depths = depth + steps.cumsum()
        if int(depths.max()) > MAX_DEPTH:
            raise JsonFault(f"nested deeper than the {MAX_DEPTH} levels that are read")
        depth = int(depths[-1])


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise JsonFault(f"the key {shown(repeated)} stands twice in one object")
    return value


def _integer(text: str) -> int | float:
    _check_length(text)
    # JSON knows a negative zero, integers do not: it is read as the float that it is.
    return -0.0 if text == "-0" else int(text)


def _finite_float(text: str) -> float:
    value = _float_or_infinity(text)
    if value in (float("inf"), float("-inf")):
        raise JsonFault(f"the number {shown(text)} is beyond float64")
    return value


def _float_or_infinity(text: str) -> float:
    _check_length(text)
    return float(text)


def _check_length(text: str) -> None:
    if len(text) > MAX_NUMBER_CHARACTERS:
        raise JsonFault(f"a number of {len(text)} characters; at most {MAX_NUMBER_CHARACTERS} are read")


def _no_constant(text: str) -> NoReturn:
    raise JsonFault(f"{text} is no JSON number")


def _check_surrogates(value: object) -> None:
    write = cast("Callable[..., str]", json.dumps)
    try:
        write(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise JsonFault("a string holds half a surrogate pair, which is no Unicode character") from None


def shown(text: str, limit: int = 80) -> str:
    """`text` quoted for a message, cut when long, with control characters escaped."""
    return json.dumps(text if len(text) <= limit else text[: limit - 3] + "...")
