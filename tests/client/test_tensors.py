"""numpy arrays over the wire and back, for every type the wire has."""

import re

import numpy as np
import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.wire.framing import ITEM_BYTES, WireTensor, frame, unframe
from glassblock_client.tensors import DTYPES, FLOAT8_VALUES, array_from_wire, divide, wire_from_array
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from safetensors.numpy import load as safetensors_load

NATIVE = sorted(DTYPES)
ARRAYS = st.sampled_from(NATIVE).flatmap(
    lambda code: npst.arrays(np.dtype(DTYPES[code]), npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)


def sent(tensors: dict[str, WireTensor], message: str = "{}") -> memoryview:
    return memoryview(b"".join(frame("request", message, tensors)))


def test_every_type_of_the_wire_has_a_decoding():
    assert set(DTYPES) | set(FLOAT8_VALUES) | {"BF16"} == set(ITEM_BYTES)


@pytest.mark.parametrize("code", NATIVE)
def test_item_sizes_agree_with_the_wire(code: str):
    assert np.dtype(DTYPES[code]).itemsize == ITEM_BYTES[code]


@given(st.dictionaries(st.text(max_size=8).filter(lambda name: name != "__metadata__"), ARRAYS, max_size=4), st.text())
def test_arrays_survive_a_frame_bit_for_bit(arrays: dict[str, np.ndarray], message: str):
    body = sent({name: wire_from_array(array) for name, array in arrays.items()}, message)
    told, tensors = unframe("request", body)
    assert told == message
    assert list(tensors) == list(arrays)
    for name, array in arrays.items():
        back = array_from_wire(tensors[name])
        assert back.shape == array.shape
        assert back.dtype == array.dtype
        assert back.tobytes() == array.tobytes()


@given(ARRAYS)
def test_a_frame_is_a_safetensors_file(array: np.ndarray):
    loaded = safetensors_load(bytes(sent({"x": wire_from_array(array)})))
    assert loaded["x"].shape == array.shape
    assert loaded["x"].tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "make",
    [
        lambda a: a.T,
        lambda a: a[::-1, ::2],
        lambda a: a.astype(">f4"),
        np.asfortranarray,
        lambda a: np.broadcast_to(a[:1], a.shape),
    ],
)
def test_arrays_in_any_order_of_memory_are_sent_by_value(make):
    array = make(np.arange(24, dtype=np.float32).reshape(4, 6))
    back = array_from_wire(wire_from_array(array))
    np.testing.assert_array_equal(back, array)
    assert back.dtype == np.dtype("<f4")


def test_a_contiguous_array_is_sent_from_its_own_memory():
    array = np.zeros((3, 4), np.float32)
    tensor = wire_from_array(array)
    array[1, 2] = 7
    assert array_from_wire(tensor)[1, 2] == 7


def test_what_arrives_is_a_view_into_the_bytes_received():
    body = sent({"x": wire_from_array(np.arange(6, dtype=np.float32))})
    received = bytearray(body)
    _, tensors = unframe("request", memoryview(received))
    array = array_from_wire(tensors["x"])
    array[0] = 5
    _, again = unframe("request", memoryview(received))
    assert array_from_wire(again["x"])[0] == 5


def test_bfloat16_becomes_the_float32_that_torch_makes_of_it():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    raw = every.view(torch.uint8).numpy()
    array = array_from_wire(WireTensor("BF16", (256, 256), raw.data))
    expected = every.float().numpy().reshape(256, 256)
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(("code", "dtype"), [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)])
def test_float8_becomes_the_float32_that_torch_makes_of_it(code: str, dtype: torch.dtype):
    every = torch.arange(256, dtype=torch.uint8)
    array = array_from_wire(WireTensor(code, (16, 16), every.numpy().data))
    expected = every.view(dtype).float().numpy().reshape(16, 16)
    np.testing.assert_array_equal(array, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(array[numbers]), np.signbit(expected[numbers]))


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2", "F32"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_scalars_and_empty_tensors_keep_their_shape(dtype: str, shape: tuple[int, ...]):
    size = int(np.prod(shape)) * ITEM_BYTES[dtype]
    array = array_from_wire(WireTensor(dtype, shape, memoryview(bytes(size))))
    assert array.shape == shape
    assert array.dtype == np.float32


@pytest.mark.parametrize("array", [np.array([1j]), np.array(["a"]), np.array([object()]), np.array([(1,)], "i4,")])
def test_types_that_do_not_travel_are_refused_by_name(array: np.ndarray):
    with pytest.raises(InvalidValue, match=re.escape(f"gain has the element type {array.dtype}")) as caught:
        wire_from_array(array, field="gain")
    assert caught.value.field == "gain"


def test_lists_go_into_the_message_and_arrays_beside_it():
    raw = WireTensor("BF16", (1,), memoryview(b"\0\0"))
    nested, tensors = divide(x=np.ones(2), matrix=[[1.0, 2]], gain=raw, offset=None)
    assert nested == {"x": None, "matrix": [[1.0, 2]], "gain": None, "offset": None}
    assert tensors["x"].dtype == "F64"
    assert tensors["gain"] is raw
    assert set(tensors) == {"x", "gain"}


def test_a_torch_tensor_is_refused_with_the_way_out():
    with pytest.raises(InvalidValue, match="x is a Tensor") as caught:
        divide(x=torch.ones(2))  # pyright: ignore[reportArgumentType]
    assert "numpy()" in (caught.value.hint or "")
