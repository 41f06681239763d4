"""Torch on one thread while pieces go by.

Each operation on a piece takes a tenth of a millisecond. Shared between threads, that time goes into waiting for one
another, the more so beside the thread that reads; measured on two cores, a pass took 0.3 s with one thread and 1 to 3 s
with two.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_within = 0
_before = 0


@contextmanager
def one_thread(device: torch.device) -> Generator[None]:
    """Until the last of those that are within has left, torch computes on one thread; on a GPU nothing changes."""
    if device.type != "cpu":
        yield
        return
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _within, _before  # noqa: PLW0603  the setting is the process's, and so is who asked for it
    with _lock:
        if not _within:
            _before = torch.get_num_threads()
        _within += 1
        torch.set_num_threads(1)


def _leave() -> None:
    global _within  # noqa: PLW0603
    with _lock:
        _within -= 1
        if not _within:
            torch.set_num_threads(_before)
