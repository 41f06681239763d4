"""Inputs bent with their structure kept: a JSON document is changed as a tree, and whatever frames it is written anew.

Bytes that were changed without regard to their structure are refused at the first bracket; a tree whose numbers, keys
and branches were changed is refused, or believed, by what reads it.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

BYTES_SHARE = 0.2
"""Of the mutations, those that see bytes alone."""

_LENGTH_BYTES = 8
_RAW = "\x00raw"
_TEXTS = ("", " ", "/", "..", "../x", "\x00", "é", "x" * 300, "{i}", "{", "-1", "NaN", "model", "0", "true", "a.b.c")
_NUMBERS = (0, 1, -1, 2, 3, 7, 255, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64, 10**300, -(2**63))
_FLOATS = (0.0, -0.0, 0.5, 1e-5, 1e-45, 5e-324, 1e38, 1e308, float("nan"), float("inf"), float("-inf"))
_EMPTY: tuple[Callable[[], Any], ...] = (dict, list, lambda: [[]], lambda: {"": {}}, lambda: [1] * 40, lambda: [{}] * 3)
_WRITTEN = (
    "1e999", "-0", "-1e-999", "1" * 401, "1" * 5000, "0." + "1" * 380, '"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"',
    "[" * 120 + "]" * 120, "[" * 200 + "]" * 200, '{"a":' * 100 + "0" + "}" * 100, '{"a":1,"a":2}', "Infinity", "1.0",
    "[" + "0," * 2000 + "0]", '{"' + "k" * 3000 + '":0}',
)  # fmt: skip


class Framed(NamedTuple):
    """An input in three parts: what stands before the JSON text, the text, and what follows."""

    head: bytes
    text: bytes
    tail: bytes


Frame = Callable[[bytes], Framed]
Join = Callable[[Framed, random.Random], bytes]


def plain(data: bytes) -> Framed:
    """JSON alone."""
    return Framed(b"", data, b"")


def chosen(data: bytes) -> Framed:
    """JSON after one byte, which says what it is given to."""
    return Framed(data[:1], data[1:], b"")


def container(data: bytes) -> Framed:
    """The header of a safetensors file, after its length and before its tensors."""
    stop = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    return Framed(data[:_LENGTH_BYTES], data[_LENGTH_BYTES:stop], data[stop:])


def joined(framed: Framed, rng: random.Random) -> bytes:
    """The three parts as they are; now and then with another first byte."""
    head = bytes([rng.randrange(256)]) if framed.head and rng.random() < 0.05 else framed.head
    return head + framed.text + framed.tail


def container_joined(framed: Framed, rng: random.Random) -> bytes:
    """With the header's own length, rarely one that lies; the tensors cut or lengthened now and then."""
    length, tail = len(framed.text), framed.tail
    if rng.random() < 0.05:
        length = rng.choice([0, 1, length - 1, length + 1, length * 2, 2**31, 2**63, 2**64 - 1]) % 2**64
    if rng.random() < 0.1:
        tail = rng.choice([b"", tail[: rng.randrange(len(tail) + 1)], tail + bytes(rng.randrange(64))])
    return length.to_bytes(_LENGTH_BYTES, "little") + framed.text + tail


class Mutator:
    """Changes an input for the fuzzer.

    Args:
        seeds: The inputs begun with; their keys, values and branches are put into others.
        frame: Takes an input apart.
        join: Puts it together.
        of_bytes: The fuzzer's own mutation.
    """

    def __init__(
        self, seeds: Iterable[bytes], frame: Frame, join: Join, of_bytes: Callable[[bytes, int], bytes]
    ) -> None:
        self._frame, self._join, self._of_bytes = frame, join, of_bytes
        trees = [json.loads(frame(seed).text) for seed in seeds]
        self._branches = [value for tree in trees for _, _, value in _places(tree)]
        self._keys = sorted({key for tree in trees for _, key, _ in _places(tree) if isinstance(key, str)})

    def __call__(self, data: bytes, longest: int, seed: int) -> bytes:
        """Another input, at most `longest` bytes long; the same for the same seed."""
        rng = random.Random(seed)
        if rng.random() < BYTES_SHARE:
            return self._of_bytes(data, longest)
        framed = self._frame(data)
        try:
            tree: Any = json.loads(framed.text)
        except (ValueError, RecursionError):
            return self._of_bytes(data, longest)
        written: list[str] = []
        for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
            tree = self._changed(tree, rng, written)
        try:
            text = json.dumps(tree, ensure_ascii=rng.random() < 0.5, separators=(",", ":"))
            for number, raw in enumerate(written):
                text = text.replace(json.dumps(f"{_RAW}{number}"), raw)
            changed = self._join(framed._replace(text=text.encode()), rng)
        except (RecursionError, UnicodeEncodeError):
            return self._of_bytes(data, longest)
        return changed if len(changed) <= longest else self._of_bytes(data, longest)

    def _changed(self, tree: Any, rng: random.Random, written: list[str]) -> Any:
        places = list(_places(tree))
        if not places or rng.random() < 0.01:
            return self._value(rng, written)
        inside, key, value = rng.choice(places)
        match rng.randrange(9):
            case 0 | 1:
                inside[key] = self._value(rng, written)
            case 2:
                inside[key] = _near(value, rng)
            case 3:
                del inside[key]
            case 4 if isinstance(inside, dict):
                inside[rng.choice(self._keys)] = inside.pop(key)
            case 5 if isinstance(inside, dict):
                inside[rng.choice((*self._keys, *_TEXTS))] = self._value(rng, written)
            case 6:
                other, place, branch = rng.choice(places)
                if not (_holds(branch, inside) or _holds(value, other)):
                    inside[key], other[place] = branch, value
            case 7:
                inside[key] = json.loads(json.dumps(rng.choice(places)[2]))
            case _:
                inside[key] = rng.choice([[value], {"value": value}, [value, value], str(value)])
        return tree

    def _value(self, rng: random.Random, written: list[str]) -> Any:
        match rng.randrange(8):
            case 0:
                return rng.choice((None, True, False))
            case 1:
                return rng.choice(_NUMBERS)
            case 2:
                return rng.choice(_FLOATS)
            case 3:
                return rng.choice(_TEXTS)
            case 4:
                return rng.choice(_EMPTY)()
            case 5:
                written.append(rng.choice(_WRITTEN))
                return f"{_RAW}{len(written) - 1}"
            case _:
                return json.loads(json.dumps(rng.choice(self._branches)))


def _places(tree: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Every place in a tree: what holds it, its key or number there, and what is there."""
    waiting = [tree]
    while waiting:
        inside = waiting.pop()
        if isinstance(inside, dict | list):
            items = inside.items() if isinstance(inside, dict) else enumerate(inside)
            for key, value in list(items):
                yield inside, key, value
                waiting.append(value)


def _holds(tree: Any, wanted: Any) -> bool:
    return tree is wanted or any(value is wanted for _, _, value in _places(tree))


def _near(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool) or value is None:
        return rng.choice((0, 1, "true", not value))
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, value * 2, value // 2, float(value % 2**60), value + 2**32))
    if isinstance(value, float):
        return rng.choice((-value, value * 10, value / 10, 1 / value if value else 1e300, str(value)))
    if isinstance(value, str):
        cut = rng.randrange(len(value) + 1)
        return rng.choice((value[:cut], value.upper(), value + value[:20], value[:cut] + rng.choice(_TEXTS), [value]))
    if isinstance(value, list):
        return rng.choice((value[:-1], value * 2, value[::-1], rng.sample(value, len(value))))
    return dict(rng.sample(sorted(value.items()), len(value) // 2))
