"""Checkpoints that were opened lately: their headers are read again only when something of them has changed on disk.

A checkpoint of many shards takes a tenth of a second to open, and one request needs it several times.
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import NamedTuple

from glassblock.checkpoint.opened import Checkpoint

KEPT = 16
"""Checkpoints whose headers are kept."""

MOST_FILES = 4096
"""In a directory; one with more is looked through every time."""

SETTLED_SECONDS = 0.1
"""Younger changes are not trusted: file systems tick every few milliseconds, and a second change may look the same."""

LOOKED_AT = (".safetensors", ".json")


class _Signature(NamedTuple):
    files: tuple[tuple[str, int, int, int, int], ...]
    newest: int  # nanoseconds


class OpenedCheckpoints:
    """Remembers opened checkpoints while their files stay as they are. Safe to call from any thread."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, tuple[_Signature, Checkpoint]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path, key: Hashable, open_it: Callable[[], Checkpoint]) -> Checkpoint:
        """The checkpoint at `path`, opened as `key` says; now, unless it was and nothing has changed since.

        Raises:
            Whatever `open_it` raises.
        """
        signature = _signature(path)  # before it is opened: what changes meanwhile shows next time
        with self._lock:
            found = self._kept.get((path, key))
            if found is not None and signature is not None and found[0] == signature:
                self._kept.move_to_end((path, key))
                return found[1]
        opened = open_it()
        settled = signature is not None and time.time_ns() - signature.newest > SETTLED_SECONDS * 1e9
        with self._lock:
            self._kept.pop((path, key), None)
            if settled and signature is not None:
                self._kept[path, key] = signature, opened
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        return opened


def _signature(path: Path) -> _Signature | None:
    """What the files that a checkpoint is told from are now; None where that cannot be said."""
    alone = not path.is_dir()
    files: list[tuple[str, int, int, int, int]] = []
    newest = 0
    try:
        with os.scandir(path.parent if alone else path) as found:
            for number, item in enumerate(found):
                if number >= MOST_FILES:
                    return None
                if alone and item.name != path.name and not item.name.endswith(".json"):
                    continue
                looked_at = item.name.endswith(LOOKED_AT) or (alone and item.name == path.name)
                status = os.stat(item.path) if looked_at else None  # noqa: PTH116  a link's end is meant
                if status is None:
                    files.append((item.name, 0, 0, 0, 0))
                    continue
                newest = max(newest, status.st_mtime_ns, status.st_ctime_ns)
                files.append((item.name, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns))
    except OSError:
        return None
    return _Signature(tuple(sorted(files)), newest)
