"""The header reader: against the reference implementation, and against files that mean harm."""

import json
import os
import struct
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.checkpoint.container import MAX_FAULTS, MAX_HEADER_BYTES, read_container
from glassblock.checkpoint.entries import DTYPE_BITS, Container
from glassblock.errors import AccessRefused, UnknownCheckpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from makers import write_container
from safetensors import SafetensorError, deserialize
from safetensors.torch import save, save_file

ONE = {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}
DATA = b"abcd"


def described(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


# --- what the format says ---------------------------------------------------------------------------------------


def test_entries_are_those_of_the_file(tmp_path: Path) -> None:
    tensors = {"b": torch.zeros(2, 3), "a": torch.zeros((), dtype=torch.bfloat16), "z": torch.zeros(0, 5)}
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    container = read_container(path)
    assert container.faults == ()
    assert container.metadata == {"format": "pt"}
    assert container.size == path.stat().st_size
    assert {name: entry.shape for name, entry in container.entries.items()} == {"b": (2, 3), "a": (), "z": (0, 5)}
    assert [entry.elements for entry in container.entries.values()] == [6, 0, 1]
    assert [entry.bytes for entry in container.entries.values()] == [24, 0, 2]
    assert min(entry.start for entry in container.entries.values()) == 8 + container.header_bytes
    assert all(entry.file == path for entry in container.entries.values())


@pytest.mark.parametrize("code", sorted(DTYPE_BITS))
def test_every_dtype_has_the_size_that_the_reference_gives_it(tmp_path: Path, code: str) -> None:
    size = DTYPE_BITS[code] // 2  # bytes of four elements, which are whole for every code
    right = write_container(tmp_path / "right", {"a": described(code, [4], [0, size])}, bytes(size))
    wrong = write_container(tmp_path / "wrong", {"a": described(code, [4], [0, size + 1])}, bytes(size + 1))
    assert deserialize(right.read_bytes())
    assert read_container(right).faults == ()
    with pytest.raises(SafetensorError):
        deserialize(wrong.read_bytes())
    assert [fault.kind for fault in read_container(wrong).faults] == ["header"]


def test_every_dtype_of_the_reference_is_known(tmp_path: Path) -> None:
    path = write_container(tmp_path / "x", {"a": described("X")}, DATA)
    with pytest.raises(SafetensorError) as refusal:
        deserialize(path.read_bytes())
    told = str(refusal.value).partition("expected one of ")[2].partition(" at line")[0]
    assert {name.strip("` ") for name in told.split(",")} == set(DTYPE_BITS)


@pytest.mark.parametrize("length", [99_994, 99_999, 100_000, 100_001])
def test_a_long_valid_header_passes(tmp_path: Path, length: int) -> None:
    raw = json.dumps(ONE).encode()
    path = write_container(tmp_path / "x", raw + b" " * (length - len(raw)), DATA)
    assert deserialize(path.read_bytes())
    container = read_container(path)
    assert container.faults == ()
    assert container.header_bytes == length


def test_the_longest_header_passes_and_one_byte_more_does_not(tmp_path: Path) -> None:
    raw = json.dumps(ONE).encode()
    path = tmp_path / "x"
    for length, kinds in ((MAX_HEADER_BYTES, []), (MAX_HEADER_BYTES + 1, ["header"])):
        with path.open("wb") as file:
            file.write(struct.pack("<Q", length) + raw + b" " * (length - len(raw)) + DATA)
        assert [fault.kind for fault in read_container(path).faults] == kinds


# --- the reference decides --------------------------------------------------------------------------------------

DIFFERENCES = {
    "a name twice": (
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    ),
    "an unknown field twice": b'{"a":{"dtype":"U8","x":1,"x":2,"shape":[4],"data_offsets":[0,4]}}',
    "a metadata key twice": b'{"__metadata__":{"k":"1","k":"2"},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    "an array for a description": b'{"a":["U8",[4],[0,4]]}',
    "an object for a dtype": b'{"a":{"dtype":{"U8":null},"shape":[4],"data_offsets":[0,4]}}',
}
"""What the reference reads and this reader refuses: repeated keys hide one of two values, and the other two are
spellings that its JSON library allows and the format does not."""


@pytest.mark.parametrize("case", DIFFERENCES)
def test_reasoned_differences(tmp_path: Path, case: str) -> None:
    path = write_container(tmp_path / "x", DIFFERENCES[case], DATA)
    assert deserialize(path.read_bytes())
    assert [fault.kind for fault in read_container(path).faults] == ["header"]


names = st.text(st.characters(codec="utf-8"), max_size=6)
dtypes = st.sampled_from(sorted(DTYPE_BITS))
small = st.integers(0, 3)


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A valid header, and the number of bytes of data it describes."""
    header: dict[str, Any] = {}
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(names, names, max_size=2) | st.none())
    offset = 0
    for name in draw(st.lists(names.filter("__metadata__".__ne__), unique=True, max_size=4)):
        dtype, shape = draw(dtypes), draw(st.lists(small, max_size=3))
        if DTYPE_BITS[dtype] % 8:
            shape.append(4)
        size = DTYPE_BITS[dtype]
        for axis in shape:
            size *= axis
        header[name] = described(dtype, shape, [offset, offset + size // 8])
        offset += size // 8
    items = draw(st.permutations(list(header.items())))
    return dict(items), offset


odd_values = st.sampled_from(
    [None, True, False, -1, 0, 1, 2, 3, 1.0, -0.0, 0.5, "", "1", [], {}, [1], 2**63, 2**64 - 1, 2**64, 10**30, "F32"]
)


CHANGES = ("replace", "move", "shift", "axis", "drop", "extra", "retype")


@st.composite
def damaged_files(draw: st.DrawFn) -> bytes:
    """A safetensors file with up to three changes to header, offsets, data or bytes, which may be harmless."""
    header, size = draw(headers())
    data = b"x" * size
    for _ in range(draw(st.integers(0, 3))):
        tensors = [name for name, value in header.items() if isinstance(value, dict) and "dtype" in value]
        change = draw(st.sampled_from([*CHANGES, "data", "top"]))
        if change == "top":
            header[draw(names)] = draw(odd_values)
        elif change == "data":
            data = draw(st.sampled_from([data + b"y", data[:-1], data + b"yyyyyyyy", data[:0]]))
        elif tensors:
            name = draw(st.sampled_from(tensors))
            header[name] = draw(changed(header[name], change))
    raw = bytearray(json.dumps(header, ensure_ascii=draw(st.booleans())).encode())
    if draw(st.integers(0, 3)) == 0 and raw:
        position = draw(st.integers(0, len(raw) - 1))
        raw[position] = draw(st.integers(0, 255))
    length = len(raw) + draw(st.sampled_from([0] * 20 + [1, -1, 8, 2**40]))
    return struct.pack("<Q", max(0, length)) + bytes(raw) + data


@st.composite
def changed(draw: st.DrawFn, fields: dict[str, Any], change: str) -> dict[str, Any]:
    fields = dict(fields)
    offsets, shape = fields.get("data_offsets"), fields.get("shape")
    if change == "replace":
        fields[draw(st.sampled_from(["dtype", "shape", "data_offsets"]))] = draw(odd_values)
    elif change == "drop":
        del fields[draw(st.sampled_from(sorted(fields)))]
    elif change == "extra":
        fields[draw(names)] = draw(odd_values)
    elif change == "retype":
        fields["dtype"] = draw(dtypes)
    elif change in {"move", "shift"} and isinstance(offsets, list):
        step = draw(st.sampled_from([1, -1, 2]))
        steps = [step if change == "shift" else draw(st.sampled_from([0, step])) for _ in offsets]
        fields["data_offsets"] = [o + s if type(o) is int else o for o, s in zip(offsets, steps, strict=True)]
    elif change == "axis" and isinstance(shape, list):
        fields["shape"] = [*shape, draw(odd_values)]
    return fields


def accepted_by_reference(content: bytes) -> bool:
    try:
        deserialize(content)
    except SafetensorError:
        return False
    return True


def told(container: Container) -> str:
    return " ".join(fault.message for fault in container.faults)


@settings(max_examples=250, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=damaged_files())
def test_accepts_exactly_what_the_reference_accepts(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    container = read_container(path)
    if accepted_by_reference(content):
        assert container.faults == () or "stands twice" in told(container), told(container)
        if not container.faults:
            reference = dict(deserialize(content))
            assert set(reference) == set(container.entries)
            for name, entry in container.entries.items():
                assert content[entry.start : entry.stop] == bytes(reference[name]["data"])
                assert (entry.dtype, list(entry.shape)) == (reference[name]["dtype"], reference[name]["shape"])
    else:
        assert container.faults != ()


@settings(max_examples=100, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=80) | st.binary(max_size=60).map(lambda tail: struct.pack("<Q", 20) + tail))
def test_any_bytes_give_a_value(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert (read_container(path).faults == ()) == accepted_by_reference(content)


# --- files that mean harm ---------------------------------------------------------------------------------------

LONG = b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}"
HOSTILE: dict[str, tuple[str, bytes, str]] = {
    "empty": ("not-safetensors", b"", "is empty"),
    "five bytes": ("not-safetensors", b"\x01\x02\x03\x04\x05", "too few"),
    "a pickle": ("not-safetensors", b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}\x94.", "a Python pickle"),
    "torch.save": ("not-safetensors", b"PK\x03\x04\x00\x00\x08\x08" + b"\0" * 60, "a zip archive"),
    "git-lfs": ("not-safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer"),
    "a web page": ("not-safetensors", b"\n<!DOCTYPE html><html><body>Sign in</body></html>", "a web page"),
    "an error message": ("not-safetensors", b"Access to this model is restricted.", "plain text"),
    "a JSON error": ("not-safetensors", b'{"error": "Repository not found"}', "plain text"),
    "gguf": ("not-safetensors", b"GGUF\x03\x00\x00\x00" + b"\xff" * 40, "a GGUF file"),
    "zeros": ("not-safetensors", bytes(4096), "nothing but zeros"),
    "noise": ("not-safetensors", b"\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8\xf7\xf6", "does not begin"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_foreign_content_is_named(tmp_path: Path, case: str) -> None:
    kind, content, words = HOSTILE[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    container = read_container(path)
    assert [fault.kind for fault in container.faults] == [kind]
    assert words in container.faults[0].message
    assert container.faults[0].hint
    assert not container.listed


def test_a_header_whose_length_looks_like_a_pickle_passes(tmp_path: Path) -> None:
    # 640 is b"\x80\x02" in little-endian, as a pickle of protocol 2 starts.
    raw = json.dumps(ONE).encode()
    path = write_container(tmp_path / "x", raw + b" " * (640 - len(raw)), DATA)
    assert path.read_bytes().startswith(b"\x80\x02")
    assert read_container(path).faults == ()
    path.write_bytes(path.read_bytes()[:600])
    assert [fault.kind for fault in read_container(path).faults] == ["truncated"]


BROKEN: dict[str, tuple[str, object, str]] = {
    "nested 10,000 deep": ("header", LONG, "nested deeper"),
    "10,000 open brackets": ("header", b'{"a":' + b"[" * 10_000, "nested deeper"),
    "not JSON": ("header", b"{'a': 1}", "not JSON"),
    "not UTF-8": ("header", b'{"\xff": 1}', "not UTF-8"),
    "half a surrogate pair": ("header", b'{"\\ud800": {"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', "surrogate"),
    "a number of a million digits": ("header", b'{"a":' + b"9" * 1_000_000 + b"}", "1000000 characters"),
    "a name twice": ("header", DIFFERENCES["a name twice"], "stands twice"),
    "a list": ("header", [], "no JSON object"),
    "metadata of numbers": ("header", {"__metadata__": {"a": 1}, **ONE}, "__metadata__"),
    "no description": ("header", {"a": None}, "not described by an object"),
    "no shape": ("header", {"a": {"dtype": "U8", "data_offsets": [0, 4]}}, "lacks shape"),
    "unknown dtype": ("header", {"a": described("F31")}, "F31"),
    "a bool for an axis": ("header", {"a": described(shape=[True, 4])}, "no list of numbers"),
    "a text for an axis": ("header", {"a": described(shape=["4"])}, "no list of numbers"),
    "a float for an axis": ("header", {"a": described(shape=[4.0])}, "no list of numbers"),
    "a negative axis": ("header", {"a": described(shape=[-4])}, "no list of numbers"),
    "an axis of 2^64": ("header", {"a": described(shape=[2**64])}, "no list of numbers"),
    "a product beyond 2^64": ("header", {"a": described(shape=[2**40, 2**40])}, "passes 2^64"),
    "a product beyond 2^64 times 0": ("header", {"a": described(shape=[2**40, 2**40, 0], offsets=[0, 0])}, "2^64"),
    "negative offsets": ("header", {"a": described(offsets=[-4, 0])}, "no ascending pair"),
    "falling offsets": ("header", {"a": described(offsets=[4, 0])}, "no ascending pair"),
    "three offsets": ("header", {"a": described(offsets=[0, 2, 4])}, "no ascending pair"),
    "offsets of 10^30": ("header", {"a": described(offsets=[0, 10**30])}, "no ascending pair"),
    "a shape that is not the range": ("header", {"a": described(shape=[3])}, "span 4"),
    "half a byte": ("header", {"a": described("F4", [7])}, "no whole number of bytes"),
    "a hole at the start": ("hole", {"a": described(shape=[2], offsets=[2, 4])}, "belong to no tensor"),
    "a hole of one byte": (
        "hole",
        {"a": described(shape=[1], offsets=[0, 1]), "b": described(shape=[2], offsets=[2, 4])},
        "belong to no tensor",
    ),
    "an overlap": (
        "overlap",
        {"a": described(shape=[3], offsets=[0, 3]), "b": described(shape=[2], offsets=[2, 4])},
        "inside tensor",
    ),
    "an overlap that leaves a hole": (
        "overlap",
        {"a": described(shape=[1], offsets=[0, 1]), "b": described(shape=[1], offsets=[0, 1])},
        "inside tensor",
    ),
    "an empty tensor inside another": (
        "overlap",
        {"a": described(), "b": described(shape=[0], offsets=[2, 2])},
        "inside tensor",
    ),
    "data beyond the end": ("truncated", {"a": described(shape=[5], offsets=[0, 5])}, "1 fewer"),
    "bytes after the end": ("trailing-bytes", {"a": described(shape=[3], offsets=[0, 3])}, "1 bytes after"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_header_is_one_fault_that_names_the_culprit(tmp_path: Path, case: str) -> None:
    kind, header, words = BROKEN[case]
    path = write_container(tmp_path / "model.safetensors", header, DATA)
    container = read_container(path)
    assert [fault.kind for fault in container.faults] == [kind]
    fault = container.faults[0]
    assert words in fault.message
    assert "model.safetensors" in fault.message
    assert fault.hint
    assert fault.rule == f"container/{kind}"
    assert len(fault.message) < 500
    if container.listed and kind != "trailing-bytes" and "__metadata__" not in words:
        assert fault.tensor is not None
        assert fault.tensor in fault.message
    # The reference refuses each of them too, except for the name that stands twice.
    assert accepted_by_reference(path.read_bytes()) == (case == "a name twice")


def test_faults_say_which_byte(tmp_path: Path) -> None:
    header = {"a": described(), "b": described("F31", [4], [4, 8])}
    path = write_container(tmp_path / "x", header, DATA * 2)
    content, (fault,) = path.read_bytes(), read_container(path).faults
    assert fault.byte is not None
    assert content[fault.byte :].startswith(b'"b"')
    path.write_bytes(save({"a": torch.zeros(4), "b": torch.zeros(4)})[:-10])
    (fault,) = read_container(path).faults
    assert (fault.kind, fault.tensor, fault.byte) == ("truncated", "b", path.stat().st_size)
    assert "10 fewer" in fault.message
    path.write_bytes(save({"a": torch.zeros(4)}) + b"12345678")
    (fault,) = read_container(path).faults
    assert (fault.kind, fault.byte) == ("trailing-bytes", path.stat().st_size - 8)


def test_a_header_longer_than_the_file(tmp_path: Path) -> None:
    path = write_container(tmp_path / "x", ONE, DATA, length=5_000)
    (fault,) = read_container(path).faults
    assert fault.kind == "truncated"
    assert "5,000" in fault.message


def test_a_refused_tensor_is_remembered_and_the_others_are_kept(tmp_path: Path) -> None:
    header = {"a": described(), "b": described("F31", [4], [4, 8]), "c": described(offsets=[8, 12])}
    container = read_container(write_container(tmp_path / "x", header, DATA * 3))
    assert set(container.entries) == {"a", "c"}
    assert container.refused == {"b"}
    assert len(container.faults) == 1


@pytest.mark.parametrize("wrong", ["description", "overlap"])
def test_ten_thousand_faults_are_told_in_short(tmp_path: Path, wrong: str) -> None:
    header = {f"t{number}": described("F31" if wrong == "description" else "U8") for number in range(10_000)}
    container = read_container(write_container(tmp_path / "x", header, DATA))
    assert len(container.faults) == MAX_FAULTS + 1
    assert "more" in container.faults[-1].message


def test_memory_is_bounded_by_the_header_not_by_its_claims(tmp_path: Path) -> None:
    # A header's length that is a lie costs nothing, and a long shape costs a small multiple of its text.
    path = write_container(tmp_path / "x", b"{", length=MAX_HEADER_BYTES)
    tracemalloc.start()
    read_container(path)
    lie = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    text = b'{"a":{"dtype":"U8","shape":[' + b"1," * 500_000 + b'1],"data_offsets":[0,1]}}'
    assert read_container(write_container(path, text, b"x")).faults == ()
    long = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lie < 100_000
    assert long < 20 * len(text)


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name, words in (("fifo", "a FIFO"), ("folder", "a directory")):
        (fault,) = read_container(tmp_path / f"{name}.safetensors").faults
        assert fault.kind == "not-safetensors"
        assert words in fault.message
    (fault,) = read_container(tmp_path / "x", real=Path("/dev/null")).faults
    assert "a character device" in fault.message


def test_absent_and_unreadable_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UnknownCheckpoint, match=r"gone\.safetensors is not there"):
        read_container(tmp_path / "gone.safetensors")
    path = write_container(tmp_path / "x.safetensors", ONE, DATA)
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    assert read_container(link).faults == ()
    with pytest.raises(AccessRefused, match="became a symbolic link"):
        read_container(link, real=link)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_file_without_permission_is_an_error() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = write_container(Path(folder) / "x.safetensors", ONE, DATA)
        path.chmod(0)
        os.seteuid(65534)
        try:
            with pytest.raises(AccessRefused, match=r"x\.safetensors may not be read: Permission denied"):
                read_container(path)
        finally:
            os.seteuid(0)
