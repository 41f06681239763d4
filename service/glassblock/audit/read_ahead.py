"""Tensor data one piece ahead of whoever looks at it: a thread reads and hashes meanwhile.

Two buffers, so at most what fits into them is in memory. The caller takes the tensors in the order that was announced.
"""

import hashlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import xxhash
from torch import Tensor

from glassblock.audit.question import Hash
from glassblock.checkpoint.changes import AlteredEntry, unmoved
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.reading import (
    TORCH_DTYPES,
    ReadMeter,
    piece_bytes,
    read_chunks,
    read_run,
    read_span,
    reading_buffer,
    torch_dtype,
)
from glassblock.errors import GlassblockError


class Hasher(Protocol):
    """What hashlib and xxhash have in common."""

    def update(self, data: memoryview, /) -> object:
        """Take in further bytes."""
        ...

    def hexdigest(self) -> str:
        """Of all bytes so far."""
        ...


def hasher(kind: Hash) -> Hasher | None:
    """A new hash of that kind."""
    if kind == "fast":
        fast: Hasher = xxhash.xxh3_128()
        return fast
    return None if kind == "none" else hashlib.sha256()


class ReadAhead:
    """Pieces of many tensors, read by one thread.

    What lies in a file side by side, and fits into a buffer, is read at once: a model has many small tensors, and each
    would cost a change of threads. The thread starts when the first piece is asked for and ends with `close`.
    """

    def __init__(
        self,
        entries: Sequence[TensorEntry],
        *,
        chunk_bytes: int,
        device: torch.device,
        meter: ReadMeter,
        buffer_bytes: int | None = None,
        kind: Hash = "fast",
        cuts: Callable[[TensorEntry], Sequence[int]] = lambda _entry: (),
    ) -> None:
        """Announce the tensors.

        Args:
            entries: In the order in which they will be taken.
            chunk_bytes: Length of the longest piece.
            device: Where the pieces go.
            meter: Counts what is read.
            buffer_bytes: Length of each of the two buffers, one piece by default.
            kind: Which hash.
            cuts: Where the parts of a tensor end that have digests of their own, in bytes from its start.
        """
        self._entries = entries
        self._chunk_bytes = chunk_bytes
        self._buffer_bytes = max(buffer_bytes or chunk_bytes, chunk_bytes)
        self._device = device
        self._meter = meter
        self._kind: Hash = kind
        self._cuts = cuts
        self._free = threading.Semaphore(2)
        self._ready: queue.SimpleQueue[list[_Read] | BaseException] = queue.SimpleQueue()
        self._stopped = False
        self._taken = iter(entries)
        self._items = self._unpacked()
        self._thread: threading.Thread | None = None
        self.digests: dict[str, str] = {}
        self.part_digests: dict[tuple[str, int], str] = {}

    def pieces(self, entry: TensorEntry) -> Iterator[Tensor]:
        """The next tensor, in the pieces of `read_chunks`; one is valid until the next one is asked for.

        Raises:
            Whatever reading it raised. The tensors after it can still be taken.
        """
        if next(self._taken, None) is not entry:
            raise ValueError(f"{entry.name} is not the tensor that comes next")
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="glassblock-read-ahead", daemon=True)
            self._thread.start()
        for item in self._items:
            if item.entry is not entry:
                continue  # of one before it that was not taken to its end
            if item.piece is not None:
                yield item.piece
            if item.end is not None:
                self._note(entry, item.end)
                return

    def close(self) -> None:
        """Stop reading."""
        self._stopped = True
        self._free.release()
        if self._thread is not None:
            self._thread.join()

    def _unpacked(self) -> "Iterator[_Read]":
        while not isinstance(read := self._ready.get(), BaseException):
            yield from read
            self._free.release()
        raise read

    def _note(self, entry: TensorEntry, end: "_End") -> None:
        if end.error is not None:
            raise end.error
        if end.digest is not None:
            self.digests[entry.name] = end.digest
            stops = self._cuts(entry)
            self.part_digests.update(((entry.name, stop), part) for stop, part in zip(stops, end.parts, strict=True))

    def _read(self) -> None:
        try:
            reads = self._reads()
            while True:
                self._free.acquire()
                read = None if self._stopped else next(reads, None)
                if read is None:
                    return
                self._ready.put(read)
        except BaseException as error:  # the caller waits, and would wait for ever
            self._ready.put(error)

    def _reads(self) -> "Iterator[list[_Read]]":
        """What goes to the caller together. Each fills a buffer, and is made when that is free."""
        length = min(self._buffer_bytes, sum(entry.bytes for entry in self._entries))
        buffers = itertools.cycle([reading_buffer(length, self._device) for _ in range(2)])
        lost: TensorEntry | None = None
        for run in _runs(self._entries, self._chunk_bytes, self._buffer_bytes):
            if isinstance(run, TensorEntry):
                yield from self._alone(run, buffers)
                continue
            spans = [span for span in run if span.entry is not lost]
            if not spans:
                continue
            buffer = next(buffers)
            together = self._together(spans, buffer)
            if together is not None:
                yield together
                continue
            # That buffer first: the caller may still look at what is in the other one.
            rooms = itertools.chain((buffer,), buffers)
            for span in spans:
                if span.entry is lost:
                    continue
                flat = next(rooms)[: span.bytes]
                try:
                    read_span(span.plain, span.start, flat)
                    yield [self._seen(span, flat)]
                except GlassblockError as error:
                    lost = span.entry
                    yield [_Read(span.entry, None, _End(error=error))]

    def _alone(self, entry: TensorEntry, buffers: Iterator[Tensor]) -> "Iterator[list[_Read]]":
        """A tensor that is not in its file as it is to be seen, or that torch cannot hold."""
        digest = _Digest(self._kind, self._cuts(entry))
        try:
            for piece in read_chunks(
                entry,
                self._chunk_bytes,
                device=self._device,
                meter=self._meter,
                buffers=buffers,
                seen=digest.update,
            ):
                yield [_Read(entry, piece, None)]
            yield [_Read(entry, None, digest.end())]
        except GlassblockError as error:
            yield [_Read(entry, None, _End(error=error))]

    def _together(self, spans: "list[_Span]", buffer: Tensor) -> "list[_Read] | None":
        """What lies side by side; None where it cannot be read at once."""
        first, last = spans[0].place, spans[-1].place + spans[-1].bytes
        flat = buffer[: last - first]
        if not read_run([span.plain for span in spans], first, flat):
            return None
        return [self._seen(span, flat[span.place - first :][: span.bytes]) for span in spans]

    def _seen(self, span: "_Span", flat: Tensor) -> "_Read":
        if not span.start:
            self._digest = _Digest(self._kind, self._cuts(span.entry))
        if span.bytes:
            self._digest.update(memoryview(cast("bytearray", flat.numpy())))
        self._meter.bytes += span.bytes
        self._meter.tensors += span.last
        piece = flat.to(self._device).view(torch_dtype(span.plain)) if span.bytes else None
        return _Read(span.entry, piece, self._digest.end() if span.last else None)


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of one tensor, counted from its first one; `plain` is the entry that lies in the file."""

    entry: TensorEntry
    plain: TensorEntry
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start

    @property
    def place(self) -> int:
        """Of its first byte in the file."""
        return self.plain.start + self.start

    @property
    def last(self) -> bool:
        """Whether the tensor ends here."""
        return self.stop == self.plain.bytes


@dataclass(frozen=True, slots=True)
class _End:
    """The end of one tensor: its digest, or why it ends early."""

    digest: str | None = None
    parts: tuple[str, ...] = ()
    error: GlassblockError | None = None


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read of one tensor, and its end where that was reached."""

    entry: TensorEntry
    piece: Tensor | None
    end: _End | None


def _runs(entries: Iterable[TensorEntry], chunk_bytes: int, buffer_bytes: int) -> Iterator[list[_Span] | TensorEntry]:
    """What can be read at once, in the order of the tensors; or a tensor that has to be read alone."""
    run: list[_Span] = []
    for entry in entries:
        plain = unmoved(entry)
        if isinstance(plain, AlteredEntry) or plain.dtype not in TORCH_DTYPES:
            if run:
                yield run
            yield entry
            run = []
            continue
        step = piece_bytes(plain, chunk_bytes)
        for start in range(0, plain.bytes, step) or (0,):
            span = _Span(entry, plain, start, min(start + step, plain.bytes))
            if run and not _fits(run, span, buffer_bytes):
                yield run
                run = []
            run.append(span)
    if run:
        yield run


def _fits(run: list[_Span], span: _Span, buffer_bytes: int) -> bool:
    """Whether a span follows at once, the buffer has room for it, and its numbers would lie where torch takes them."""
    first, last = run[0], run[-1]
    beside = last.place + last.bytes == span.place and last.plain.identity == span.plain.identity
    offset = span.place - first.place
    aligned = offset % torch_dtype(span.plain).itemsize == 0
    return beside and last.plain.file == span.plain.file and aligned and offset + span.bytes <= buffer_bytes


class _Digest:
    """The hash of a tensor and of its parts, from its bytes in order."""

    def __init__(self, kind: Hash, cuts: Sequence[int]) -> None:
        self._kind: Hash = kind
        self._cuts = cuts
        self._whole, self._part = hasher(kind), hasher(kind) if cuts else None
        self._parts: list[str] = []
        self._passed = 0

    def update(self, data: memoryview) -> None:
        if self._whole is None:
            return
        self._whole.update(data)
        while self._part is not None and len(data):
            room = self._cuts[len(self._parts)] - self._passed
            self._part.update(data[:room])
            self._passed += min(room, len(data))
            if len(data) >= room:
                self._parts.append(self._part.hexdigest())
                self._part = hasher(self._kind) if len(self._parts) < len(self._cuts) else None
            data = data[room:]

    def end(self) -> _End:
        return _End(None if self._whole is None else self._whole.hexdigest(), tuple(self._parts))
