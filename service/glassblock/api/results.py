"""Answers that were computed before, by what they were computed from, on disk within a budget of bytes.

The key of an answer is what it follows from (`operations.content`). An entry is one file under the key's name, written
aside and renamed. It begins with a digest of the rest, and the rest with the proof of its key: one that does not hold
what its digest says is removed and taken for absent; one of another key is left alone, and is no answer to this one.
The least recently used leave first.
"""

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from glassblock.operations.content import Content

log = logging.getLogger(__name__)

SUFFIX = ".answer"
LARGEST_SHARE = 8
"""No entry takes more than this part of the budget."""


class Rendered(NamedTuple):
    """An answer as it is sent, to any number of callers.

    Attributes:
        chunks: the body, in pieces.
    """

    status: int
    headers: Mapping[str, str]
    media_type: str
    chunks: Sequence[bytes | memoryview]

    @property
    def bytes(self) -> int:
        """Length of the body."""
        return sum(memoryview(chunk).nbytes for chunk in self.chunks)


class Counted(NamedTuple):
    """What lies in the folder, and how often it was of use."""

    bytes: int
    hits: int
    misses: int


class StoredAnswers:
    """A folder of answers. Safe to call from any thread; the folder belongs to one process.

    Args:
        folder: it is made where it is not there.
        budget: bytes that all entries may take.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self._folder = folder
        self._budget = budget
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        self._hits = self._misses = 0
        folder.mkdir(parents=True, exist_ok=True)
        found: list[tuple[float, str, int]] = []
        for item in os.scandir(folder):
            status = item.stat(follow_symlinks=False)
            if item.name.endswith(SUFFIX):
                found.append((status.st_mtime, item.name.removesuffix(SUFFIX), status.st_size))
            else:
                _remove(Path(item.path))  # left behind by a process that was killed while writing
        self._sizes.update((key, size) for _, key, size in sorted(found))
        self._shrink()

    def get(self, key: Content) -> Rendered | None:
        """The answer of this key; None where there is none that can be believed."""
        path = self._path(key.name)
        try:
            content = path.read_bytes() if key.name in self._sizes else None
        except OSError:
            content = None
        entry = None if content is None else _read(content)
        rendered = entry.rendered if entry is not None and entry.proof == key.proof() else None
        with self._lock:
            if rendered is None:
                self._misses += 1
                if entry is None and self._sizes.pop(key.name, None) is not None:
                    log.warning("a stored answer cannot be read any more and is removed: %s", path.name)
                    _remove(path)
                return None
            self._hits += 1
            if key.name in self._sizes:
                self._sizes.move_to_end(key.name)
        with contextlib.suppress(OSError):
            os.utime(path)  # who comes after a restart sees in which order they were used
        return rendered

    def put(self, key: Content, rendered: Rendered) -> None:
        """Keep an answer; where the disk does not take it, nothing is kept."""
        if rendered.bytes > self._budget // LARGEST_SHARE or key.name in self._sizes:
            return
        head = json.dumps(
            {"status": rendered.status, "headers": dict(rendered.headers), "media_type": rendered.media_type}
        ).encode()
        pieces = (key.proof(), len(head).to_bytes(4, "little"), head, *rendered.chunks)
        digest = hashlib.sha256()
        for piece in pieces:
            digest.update(piece)
        aside: str | None = None
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                aside = file.name
                file.write(digest.digest())
                for piece in pieces:
                    file.write(piece)
            os.replace(aside, self._path(key.name))  # noqa: PTH105
        except OSError as fault:
            log.warning("an answer cannot be stored: %s", fault.strerror)
            if aside is not None:
                _remove(Path(aside))
            return
        with self._lock:
            self._sizes[key.name] = len(digest.digest()) + sum(memoryview(piece).nbytes for piece in pieces)
            self._shrink()

    def counted(self) -> Counted:
        """What lies in the folder now."""
        with self._lock:
            return Counted(sum(self._sizes.values()), self._hits, self._misses)

    def _shrink(self) -> None:
        total = sum(self._sizes.values())
        while total > self._budget:
            key, size = self._sizes.popitem(last=False)
            total -= size
            _remove(self._path(key))

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"


class _Entry(NamedTuple):
    proof: bytes
    rendered: Rendered


def _remove(path: Path) -> None:
    """What the disk does not let go stays, and stops nobody who asks."""
    with contextlib.suppress(OSError):
        path.unlink()


def _read(content: bytes) -> _Entry | None:
    digest, rest = content[:32], memoryview(content)[32:]
    if len(digest) < 32 or hashlib.sha256(rest).digest() != digest:
        return None
    proof, length, body = bytes(rest[:32]), int.from_bytes(rest[32:36], "little"), rest[36:]
    head = cast("dict[str, object]", json.loads(bytes(body[:length])))
    headers = cast("dict[str, str]", head["headers"])
    rendered = Rendered(cast("int", head["status"]), headers, cast("str", head["media_type"]), (body[length:],))
    return _Entry(proof, rendered)
