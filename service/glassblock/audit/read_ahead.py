"""Tensor data one piece ahead of whoever looks at it: a thread reads, hashes and takes a first look meanwhile.

Two buffers, so at most two pieces are in memory. The caller takes the tensors in the order that was announced.
"""

import hashlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
import xxhash
from torch import Tensor

from glassblock.audit.question import Hash
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.reading import ReadMeter, read_chunks, reading_buffer


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


@dataclass(frozen=True, slots=True)
class _End:
    """The end of one tensor: its digest, or why it ends early."""

    digest: str | None
    parts: tuple[str, ...]
    error: BaseException | None


Looked = TypeVar("Looked")
"""What the first look at a piece gives: the piece itself, or more."""


@dataclass(frozen=True, slots=True)
class _Piece(Generic[Looked]):
    looked: Looked


class ReadAhead(Generic[Looked]):
    """Pieces of many tensors, read by one thread.

    The thread starts when the first piece is asked for and ends with `close`.
    """

    def __init__(
        self,
        entries: Sequence[TensorEntry],
        look: Callable[[TensorEntry, Tensor], Looked],
        *,
        chunk_bytes: int,
        device: torch.device,
        meter: ReadMeter,
        kind: Hash = "fast",
        cuts: Callable[[TensorEntry], Sequence[int]] = lambda _entry: (),
    ) -> None:
        """Announce the tensors.

        Args:
            entries: In the order in which they will be taken.
            look: Called in the thread that reads, on each piece in order; what it gives goes to the caller.
            chunk_bytes: Length of a piece.
            device: Where the pieces go.
            meter: Counts what is read.
            kind: Which hash.
            cuts: Where the parts of a tensor end that have digests of their own, in bytes from its start.
        """
        self._entries = entries
        self._look = look
        self._chunk_bytes = chunk_bytes
        self._device = device
        self._meter = meter
        self._kind: Hash = kind
        self._cuts = cuts
        self._free = threading.Semaphore(2)
        self._ready: queue.SimpleQueue[_Piece[Looked] | _End] = queue.SimpleQueue()
        self._stopped = False
        self._taken = iter(entries)
        self._thread: threading.Thread | None = None
        self.digests: dict[str, str] = {}
        self.part_digests: dict[tuple[str, int], str] = {}

    def pieces(self, entry: TensorEntry) -> Iterator[Looked]:
        """The next tensor, in the pieces of `read_chunks`; one is valid until the next one is asked for.

        Raises:
            Whatever reading it, or the look at it, raised. The tensors after it can still be taken.
        """
        if next(self._taken, None) is not entry:
            raise ValueError(f"{entry.name} is not the tensor that comes next")
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="glassblock-read-ahead", daemon=True)
            self._thread.start()
        while not isinstance(item := self._ready.get(), _End):
            try:
                yield item.looked
            finally:
                self._free.release()
        if item.error is not None:
            raise item.error
        if item.digest is not None:
            self.digests[entry.name] = item.digest
            stops = self._cuts(entry)
            self.part_digests.update(((entry.name, stop), part) for stop, part in zip(stops, item.parts, strict=True))

    def close(self) -> None:
        """Stop reading."""
        self._stopped = True
        self._free.release()
        if self._thread is not None:
            self._thread.join()

    def _read(self) -> None:
        longest = max((entry.bytes for entry in self._entries), default=0)
        length = min(self._chunk_bytes, longest)
        buffers = itertools.cycle([reading_buffer(length, self._device) for _ in range(2)])
        for entry in self._entries:
            hashed = _Digest(self._kind, self._cuts(entry))
            error = None
            try:
                pieces = read_chunks(
                    entry,
                    self._chunk_bytes,
                    device=self._device,
                    meter=self._meter,
                    buffers=buffers,
                    seen=hashed.update,
                )
                while True:
                    self._free.acquire()
                    if self._stopped:
                        return
                    piece = next(pieces, None)
                    if piece is None:
                        self._free.release()
                        break
                    self._ready.put(_Piece(self._look(entry, piece)))
            except BaseException as raised:
                self._free.release()
                error = raised
            self._ready.put(_End(hashed.whole(), hashed.parts(), error))


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

    def whole(self) -> str | None:
        return None if self._whole is None else self._whole.hexdigest()

    def parts(self) -> tuple[str, ...]:
        return tuple(self._parts)
