"""A thread reads ahead: the same pieces, in order; hashes of wholes and parts; errors where the tensor is taken."""

import dataclasses
import hashlib
import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from glassblock.audit.question import Hash
from glassblock.audit.read_ahead import ReadAhead
from glassblock.checkpoint.container import read_container
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.reading import ReadMeter, read_run, read_span
from glassblock.errors import DamagedCheckpoint
from safetensors.torch import save_file
from torch import Tensor

CPU = torch.device("cpu")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (100, 7), "b": (3,), "c": (0, 4), "d": (40, 50), "e": ()}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def entries_of(path: Path) -> list[TensorEntry]:
    return list(read_container(path).entries.values())


def ahead_of(entries: list[TensorEntry], *, kind: Hash = "fast", cuts: list[int] | None = None) -> ReadAhead:
    return ReadAhead(
        entries,
        chunk_bytes=256,
        device=CPU,
        meter=ReadMeter(),
        kind=kind,
        cuts=lambda entry: (cuts or []) if entry.name == "d" else [],
    )


def taken(ahead: ReadAhead, entry: TensorEntry) -> Tensor:
    parts = [piece.clone() for piece in ahead.pieces(entry)]
    return torch.cat(parts) if parts else torch.empty(0)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert "glassblock-read-ahead" not in {thread.name for thread in threading.enumerate()}


def bytes_of(entry: TensorEntry) -> bytes:
    return entry.file.read_bytes()[entry.start : entry.stop]


@pytest.mark.parametrize("kind", ["fast", "sha256", "none"])
def test_every_tensor_comes_whole_with_its_hash(kind: Hash, file: Path) -> None:
    entries = entries_of(file)
    ahead = ahead_of(entries, kind=kind)
    for entry in entries:
        assert taken(ahead, entry).numpy().tobytes() == bytes_of(entry)
    ahead.close()
    make = {"fast": xxhash.xxh3_128, "sha256": hashlib.sha256}.get(kind)
    assert ahead.digests == ({} if make is None else {e.name: make(bytes_of(e)).hexdigest() for e in entries})


@pytest.mark.parametrize("parts", [1, 2, 5, 40])
def test_parts_have_hashes_of_their_own(parts: int, file: Path) -> None:
    entries = entries_of(file)
    stops = [8000 * (number + 1) // parts for number in range(parts)]
    ahead = ahead_of(entries, cuts=stops)
    for entry in entries:
        taken(ahead, entry)
    ahead.close()
    (whole,) = (bytes_of(entry) for entry in entries if entry.name == "d")
    spans = zip([0, *stops], stops, strict=False)
    assert [ahead.part_digests["d", stop] for stop in stops] == [
        xxhash.xxh3_128(whole[a:b]).hexdigest() for a, b in spans
    ]


def test_an_error_comes_where_its_tensor_is_taken_and_the_next_is_read(file: Path) -> None:
    # Without what the file was, so that its end is missed where it is reached, and nowhere before.
    entries = [dataclasses.replace(entry, identity=None) for entry in entries_of(file)]
    entries.sort(key=lambda entry: entry.start)
    with file.open("r+b") as cut:
        cut.truncate(file.stat().st_size - 4)
    last = entries[-1]
    ahead = ahead_of([last, *entries[:-1]])
    with pytest.raises(DamagedCheckpoint):
        taken(ahead, last)
    for entry in entries[:-1]:
        assert taken(ahead, entry).numpy().tobytes() == bytes_of(entry)
    ahead.close()
    assert last.name not in ahead.digests


@pytest.mark.parametrize("after", [0, 1, 3])
def test_it_stops_wherever_it_is(after: int, file: Path) -> None:
    entries = entries_of(file)
    ahead = ahead_of(entries)
    for entry in entries[:after]:
        taken(ahead, entry)
    ahead.close()


def test_it_stops_in_the_middle_of_a_tensor(file: Path) -> None:
    entries = entries_of(file)
    ahead = ahead_of(entries)
    pieces = ahead.pieces(entries[0])
    next(pieces)
    ahead.close()


def test_no_more_than_two_pieces_are_ahead(file: Path) -> None:
    buffers: set[int] = set()
    entries = entries_of(file)
    ahead = ahead_of(entries)
    for entry in entries:
        buffers |= {piece.untyped_storage().data_ptr() for piece in ahead.pieces(entry)}
    ahead.close()
    assert len(buffers) == 2


def test_another_order_is_refused(file: Path) -> None:
    entries = entries_of(file)
    ahead = ahead_of(entries)
    with pytest.raises(ValueError, match="is not the tensor that comes next"):
        taken(ahead, entries[1])
    ahead.close()


def test_what_lies_side_by_side_is_read_at_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = sorted(entries_of(file), key=lambda entry: entry.start)
    reads: list[int] = []

    def counted(spans: list[TensorEntry], start: int, flat: Tensor) -> bool:
        reads.append(flat.numel())
        return read_run(spans, start, flat)

    monkeypatch.setattr("glassblock.audit.read_ahead.read_run", counted)
    ahead = ReadAhead(entries, chunk_bytes=1 << 20, device=CPU, meter=(meter := ReadMeter()))
    for entry in entries:
        assert taken(ahead, entry).numpy().tobytes() == bytes_of(entry)
    ahead.close()
    assert reads == [sum(entry.bytes for entry in entries)]
    assert (meter.bytes, meter.tensors) == (reads[0], len(entries))


def test_bytes_that_torch_could_not_take_from_a_shared_buffer_are_read_apart(tmp_path: Path) -> None:
    # Three bytes, then numbers of four: side by side in the file, and not where a float32 may begin.
    save_file({"numbers": torch.ones(2)}, tmp_path / "plain.safetensors")
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = bytes([1, 2, 3]) + bytes_of(entries_of(tmp_path / "plain.safetensors")[0])
    (tmp_path / "odd.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    entries = entries_of(tmp_path / "odd.safetensors")
    ahead = ahead_of(entries)
    assert taken(ahead, entries[0]).tolist() == [1, 2, 3]
    assert taken(ahead, entries[1]).tolist() == [1.0, 1.0]
    ahead.close()


def test_a_thread_that_fails_does_not_let_its_caller_wait(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bool:
        raise ArithmeticError

    monkeypatch.setattr("glassblock.audit.read_ahead.read_run", broken)
    entries = entries_of(file)
    ahead = ahead_of(entries)
    with pytest.raises(ArithmeticError):
        taken(ahead, entries[0])
    ahead.close()


def test_a_tensor_left_in_the_middle_does_not_disturb_the_next(file: Path) -> None:
    entries = entries_of(file)
    ahead = ahead_of(entries)
    next(ahead.pieces(entries[0]))
    for entry in entries[1:]:
        assert taken(ahead, entry).numpy().tobytes() == bytes_of(entry)
    ahead.close()


def test_a_piece_stands_while_what_follows_cannot_be_read_at_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = sorted(entries_of(file), key=lambda entry: entry.start)
    read_alone = threading.Event()

    def at_first(spans: list[TensorEntry], start: int, flat: Tensor) -> bool:
        return start == entries[0].start and read_run(spans, start, flat)

    def alone(entry: TensorEntry, start: int, flat: Tensor) -> None:
        read_span(entry, start, flat)
        read_alone.set()

    monkeypatch.setattr("glassblock.audit.read_ahead.read_run", at_first)
    monkeypatch.setattr("glassblock.audit.read_ahead.read_span", alone)
    ahead = ahead_of(entries)
    pieces = ahead.pieces(entries[0])
    first = next(pieces)
    assert read_alone.wait(5)
    assert first.numpy().tobytes() == bytes_of(entries[0])[: first.nbytes]
    parts = [first.clone(), *(piece.clone() for piece in pieces)]
    assert torch.cat(parts).numpy().tobytes() == bytes_of(entries[0])
    for entry in entries[1:]:
        assert taken(ahead, entry).numpy().tobytes() == bytes_of(entry)
    ahead.close()
