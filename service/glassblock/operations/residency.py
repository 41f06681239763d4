"""What lies on the device between requests: blocks, not models. The least recently used leave first.

An entry is one part of one layer (`Key`) with the stamp of the files it was read from; an entry whose stamp is not that
of the files any more is not given out, and the next one under its key takes its place. Pinned entries stay. What is
derived from a block (its Gram matrices) leaves with it.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, cast

from torch import Tensor


class Key(NamedTuple):
    """Where a resident part belongs.

    Attributes:
        checkpoint: its name under the roots.
        layer: its layer.
        part: `ffn`, `attention`, `mixture`, `expert 3`; or `ffn: gram matrices ...`, which is derived from `ffn`.
    """

    checkpoint: str
    layer: int
    part: str

    @property
    def derived_from(self) -> "Key | None":
        """The part that it cannot outlive."""
        source, derived, _ = self.part.partition(": ")
        return self._replace(part=source) if derived else None


@dataclass
class _Resident:
    stamp: object
    value: Any
    bytes: int
    pinned: bool


class Usage(NamedTuple):
    """What lies there, and how often it was of use.

    Attributes:
        bytes: of everything.
        pinned: of what is pinned.
        entries: how many parts.
        hits: how often a part was there.
        misses: how often it was not.
        evictions: how often one had to leave for room.
    """

    bytes: int
    pinned: int
    entries: int
    hits: int
    misses: int
    evictions: int


class Residency:
    """Parts of layers on one device, within a budget of bytes. Safe to call from any thread.

    Args:
        budget: most bytes that may lie there between requests.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._ceiling = budget
        self._entries: OrderedDict[Key, _Resident] = OrderedDict()
        self._lock = threading.Lock()
        self._bytes = self._hits = self._misses = self._evictions = 0

    def get(self, key: Key, stamp: object) -> Any:
        """What lies under `key`, where it was read from these files; else None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.stamp != stamp:
                self._misses += 1
                return None
            self._hits += 1
            self._entries.move_to_end(key)
            return entry.value

    def put(self, key: Key, stamp: object, value: Any, *, pinned: bool = False) -> None:
        """Keep `value`, in place of what lies under `key`, where there is room for it beside what is pinned."""
        size = device_bytes(value)
        with self._lock:
            source = key.derived_from
            if source is not None and source not in self._entries:
                return
            old = self._entries.get(key)
            kept = pinned or (old is not None and old.pinned)
            pinned_bytes = sum(entry.bytes for other, entry in self._entries.items() if entry.pinned and other != key)
            if not kept and pinned_bytes + size > min(self.budget, self._ceiling):
                return
            if old is not None:
                self._drop(key)
            if source is not None and source not in self._entries:
                return
            self._entries[key] = _Resident(stamp, value, size, kept)
            self._bytes += size
            self._shrink(self._ceiling, spared=key)

    def pin(self, keys: Iterable[Key], checkpoint: str) -> None:
        """Let these entries of a checkpoint stay, and no other one of it."""
        wanted = set(keys)
        with self._lock:
            for key, entry in self._entries.items():
                if key.checkpoint == checkpoint:
                    entry.pinned = key in wanted
            self._shrink(self._ceiling)

    def pinned(self, checkpoint: str | None = None) -> dict[Key, tuple[Any, int]]:
        """What is pinned, with its bytes; of one checkpoint or of all."""
        with self._lock:
            return {
                key: (entry.value, entry.bytes)
                for key, entry in self._entries.items()
                if entry.pinned and checkpoint in {None, key.checkpoint}
            }

    def drop(self, checkpoint: str) -> None:
        """Let everything of a checkpoint go, pinned or not."""
        with self._lock:
            for key in [key for key in self._entries if key.checkpoint == checkpoint]:
                self._drop(key)

    def limit(self, ceiling: int) -> int:
        """From now on keep at most `ceiling` bytes, or the budget where that is less; how many lie there then."""
        with self._lock:
            self._ceiling = min(ceiling, self.budget)
            self._shrink(self._ceiling)
            return self._bytes

    def clear(self) -> None:
        """Let go what is not pinned: the device has no memory left."""
        with self._lock:
            self._shrink(0)

    def usage(self) -> Usage:
        """What lies there now."""
        with self._lock:
            pinned = sum(entry.bytes for entry in self._entries.values() if entry.pinned)
            return Usage(self._bytes, pinned, len(self._entries), self._hits, self._misses, self._evictions)

    def _shrink(self, ceiling: int, *, spared: Key | None = None) -> None:
        for key in list(self._entries):
            if self._bytes <= ceiling:
                return
            entry = self._entries.get(key)  # derived parts have left with theirs
            if entry is not None and not entry.pinned and key != spared and key not in _sources(spared):
                self._drop(key)
                self._evictions += 1
        last = None if spared is None else self._entries.get(spared)
        if spared is not None and last is not None and not last.pinned and self._bytes > ceiling:
            self._drop(spared)

    def _drop(self, key: Key) -> None:
        self._bytes -= self._entries.pop(key).bytes
        for other in [other for other in self._entries if other.derived_from == key]:
            self._drop(other)


def _sources(key: Key | None) -> tuple[Key, ...]:
    source = None if key is None else key.derived_from
    return () if source is None else (source,)


def device_bytes(value: object) -> int:
    """Bytes of the memory behind all tensors in a value, views of one memory counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors_in(value)}
    return sum(storages.values())


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in cast("tuple[object, ...]", value):
            yield from _tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name))
