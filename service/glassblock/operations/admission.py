"""Who may begin: work whose estimated peak of memory fits the device beside what runs and what is pinned.

The budget is one number for the device: what runs has reserved its estimate, the rest may hold resident blocks. A
request that needs room pushes out blocks that are not pinned before it is told to come back.
"""

import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from glassblock.errors import NoRoom, TooLarge
from glassblock.operations.residency import Residency

SHARE_OF_CUDA = 0.9
"""Of a GPU's memory; the rest is torch's own and fragments."""

SHARE_OF_MEMORY = 0.6
"""Of the machine's memory, or of the container's, where the device is the CPU: everything else lives there too."""

RETRY_SECONDS = 5.0
WAIT_SECONDS = 0.2

Fits = Literal["now", "later", "never"]


class Memory(NamedTuple):
    """Bytes of the device's budget."""

    budget: int
    reserved: int
    resident: int
    pinned: int


class Admission:
    """Reserves bytes of one device for work. Safe to call from any thread.

    Args:
        budget: bytes of the device that may be used in all.
        residency: the blocks that lie there between requests, which make room.
    """

    def __init__(self, budget: int, residency: Residency) -> None:
        self.budget = budget
        self._residency = residency
        self._reserved = 0
        self._lock = threading.Lock()
        residency.limit(budget)

    @contextmanager
    def reserved(self, estimate: int, *, resident: int = 0, field: str | None = None) -> Generator[None]:
        """Hold `estimate` bytes while the work runs.

        Args:
            estimate: its peak, bytes.
            resident: bytes of it that are pinned there already.
            field: of the request, to name in a refusal.

        Raises:
            TooLarge: the estimate is over the whole budget.
            NoRoom: it does not fit now, beside what runs and what is pinned.
        """
        if estimate > self.budget:
            raise TooLarge(
                f"this is estimated to take {estimate:,} bytes on the device at its peak, and"
                f" {self.budget:,} may be used",
                field=field,
                hint="send fewer rows or tokens, or raise GLASSBLOCK_DEVICE_MIB",
            )
        needed = max(0, estimate - resident)
        with self._lock:
            free = self.budget - self._reserved - needed
            if self._residency.usage().pinned > free:
                raise NoRoom(
                    f"this is estimated to take {estimate:,} bytes on the device at its peak; of {self.budget:,}"
                    f" {self._reserved:,} are in use and {self._residency.usage().pinned:,} are pinned",
                    field=field,
                    hint="send it again, send fewer rows, or let pinned blocks go",
                    retry_after=RETRY_SECONDS,
                )
            self._reserved += needed
            self._residency.limit(free)
        try:
            yield
        finally:
            with self._lock:
                self._reserved -= needed
                self._residency.limit(self.budget - self._reserved)

    def wait(self, estimate: int, *, given_up: Callable[[], bool]) -> None:
        """Return once `estimate` bytes would fit, or nobody waits any more; at once where they never will."""
        while self.fits(estimate) == "later" and not given_up():
            time.sleep(WAIT_SECONDS)

    def fits(self, estimate: int, *, resident: int = 0) -> Fits:
        """Whether work of this peak could begin."""
        if estimate > self.budget:
            return "never"
        with self._lock:
            free = self.budget - self._reserved - max(0, estimate - resident)
        return "now" if self._residency.usage().pinned <= free else "later"

    def memory(self) -> Memory:
        """How the budget is used."""
        usage = self._residency.usage()
        return Memory(self.budget, self._reserved, usage.bytes, usage.pinned)


def device_budget(device: torch.device) -> int:
    """Bytes that may be used of a device nobody has set a budget for."""
    if device.type == "cuda":
        return int(SHARE_OF_CUDA * torch.cuda.mem_get_info(device)[1])
    return int(SHARE_OF_MEMORY * machine_bytes())


def machine_bytes() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's."""
    return int(min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _container_limit()))


def _container_limit() -> float:
    """What the control group of this process allows; infinity where it says nothing."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return float("inf")
    return float(text) if text.isdigit() else float("inf")
