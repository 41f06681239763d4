"""Safetensors bodies that lie: each is refused, and names the tensor."""

import contextlib
import json
import struct
import time
from typing import Any

import numpy as np
import pytest
from glassblock.errors import InvalidValue
from glassblock.wire.framing import MAX_AXES, MAX_TENSORS, WireTensor, frame, read_tensors, unframe
from hypothesis import given
from hypothesis import strategies as st


def body_of(header: Any, data: bytes = b"") -> memoryview:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return memoryview(struct.pack("<Q", len(text)) + text + data)


def with_message(**tensors: Any) -> dict[str, Any]:
    return {"__metadata__": {"request": "{}"}, **tensors}


def entry(start: int, stop: int, *shape: int, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


LARGE_AXIS = b'{"__metadata__":{"request":"{}"},"a":{"dtype":"U8","data_offsets":[0,0],"shape":[%s]}}'

HOSTILE = {
    "nothing": (memoryview(b""), None),
    "seven bytes": (memoryview(b"1234567"), None),
    "a length beyond the body": (memoryview(struct.pack("<Q", 2**63) + b"{}"), None),
    "no JSON": (body_of(b"nonsense"), None),
    "a list": (body_of([]), None),
    "ten thousand deep": (body_of(b'{"a":' * 10_000 + b"1" + b"}" * 10_000), None),
    "not UTF-8": (body_of(b'{"\xff": 1}'), None),
    "no metadata": (body_of({}), None),
    "metadata that is text": (body_of({"__metadata__": "request"}), None),
    "a message that is a number": (body_of({"__metadata__": {"request": 1}}), None),
    "half a character in the message": (body_of(b'{"__metadata__": {"request": "\\ud800"}}'), None),
    "half a character in a name": (body_of(with_message(**{"\ud800": entry(0, 0, 0)})), None),
    "an unknown type": (body_of(with_message(a=entry(0, 1, 1, dtype="F4")), b"1"), "a"),
    "a type that is a list": (body_of(with_message(a=entry(0, 1, 1) | {"dtype": ["F32"]}), b"1"), "a"),
    "an entry that is a number": (body_of(with_message(a=1)), "a"),
    "a negative axis": (body_of(with_message(a=entry(0, 1, -1, -1)), b"1"), "a"),
    "a fractional axis": (body_of(with_message(a=entry(0, 1) | {"shape": [1.0]}), b"1"), "a"),
    "a true axis": (body_of(with_message(a=entry(0, 1) | {"shape": [True]}), b"1"), "a"),
    "a shape that is text": (body_of(with_message(a=entry(0, 1) | {"shape": "1"}), b"1"), "a"),
    "three offsets": (body_of(with_message(a=entry(0, 1, 1) | {"data_offsets": [0, 1, 1]}), b"1"), "a"),
    "offsets turned round": (body_of(with_message(a=entry(1, 0, 1)), b"1"), "a"),
    "offsets beyond the body": (body_of(with_message(a=entry(0, 9, 9)), b"12345678"), "a"),
    "offsets of another size": (body_of(with_message(a=entry(0, 1, 2)), b"12"), "a"),
    "an overlap that hides a hole": (body_of(with_message(a=entry(0, 2, 2), b=entry(0, 2, 2)), b"1234"), "b"),
    "a hole": (body_of(with_message(a=entry(0, 1, 1), b=entry(2, 3, 1)), b"123"), "b"),
    "a hole before the first": (body_of(with_message(a=entry(1, 2, 1)), b"12"), "a"),
    "bytes behind the last": (body_of(with_message(a=entry(0, 1, 1)), b"12"), None),
    "too many axes": (body_of(with_message(a=entry(0, 1, *[1] * (MAX_AXES + 1))), b"1"), "a"),
    "an empty tensor no array can have": (body_of(with_message(a=entry(0, 0, 0, 2**47, 2**47))), "a"),
    "an axis of four thousand digits": (body_of(LARGE_AXIS % (b"9" * 4000)), "a"),
    "too many tensors": (body_of(with_message(**{str(n): entry(0, 0, 0) for n in range(MAX_TENSORS + 1)})), None),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_that_lies_is_refused(name: str):
    body, culprit = HOSTILE[name]
    with pytest.raises(InvalidValue) as caught:
        unframe("request", body)
    assert caught.value.tensor == culprit
    caught.value.message.encode()  # can be written into an answer
    assert len(caught.value.message) < 1000


def test_large_numbers_cost_no_time():
    axes = b",".join([b"9" * 4000] * 4000)
    begun = time.process_time()
    with pytest.raises(InvalidValue):
        unframe("request", body_of(LARGE_AXIS % axes))
    # Reading 16 MB of digits takes a second or two; multiplying them out took minutes.
    assert time.process_time() - begun < 20


def test_the_message_of_the_other_direction_is_not_taken():
    body = memoryview(b"".join(frame("response", "{}", {})))
    with pytest.raises(InvalidValue, match=r"__metadata__\.request"):
        unframe("request", body)


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(noise: bytes):
    for body in (memoryview(noise), memoryview(struct.pack("<Q", len(noise)) + noise)):
        with contextlib.suppress(InvalidValue):
            read_tensors(body)


@given(st.data())
def test_a_changed_byte_is_refused_or_read_within_the_body(data: st.DataObject):
    tensors = {name: WireTensor("F32", (2, 3), np.arange(6, dtype="<f4").view(np.uint8).data) for name in "ab"}
    body = bytearray(b"".join(frame("request", "{}", tensors)))
    place = data.draw(st.integers(0, len(body) - 1))
    body[place] = data.draw(st.integers(0, 255))
    try:
        _, read = unframe("request", memoryview(body))
    except InvalidValue:
        return
    assert sum(tensor.data.nbytes for tensor in read.values()) == 48
