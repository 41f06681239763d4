"""How many bytes the bodies of all requests together may hold.

A body is counted by the size it declares, before any of it is read, or as it grows where it declares none; until the
last view of its memory is gone, which may be after its request: an answer that sends a tensor back is sent from there.
Nobody waits: what has no room is refused, so two half-received bodies can never wait for each other.
"""

import weakref
from collections import deque

import numpy as np

from glassblock.errors import NoRoom, TooLarge

SMALL_BODY = 64 * 1024
"""Bytes up to which a body is not counted: questions find a way in while tensors fill the budget."""

RETRY_SECONDS = 2.0


class BodyBudget:
    """Bytes of bodies under way. Taken within one event loop; given back from any thread.

    Args:
        total: bytes that all bodies together may hold; None for any number.
    """

    def __init__(self, total: int | None) -> None:
        self.total = total
        self._held = 0
        # A view may end anywhere, in the middle of `_take` too: only this deque is touched then.
        self._given_back: deque[int] = deque()

    @property
    def held(self) -> int:
        """Bytes of bodies that are counted now."""
        while self._given_back:
            self._held -= self._given_back.popleft()
        return self._held

    def grow(self, size: int, to: int) -> None:
        """Count a body that has held `size` bytes and shall hold `to`.

        Raises:
            TooLarge: it would be larger than all bodies together may be.
            NoRoom: others leave no room for it now.
        """
        more = _counted(to) - _counted(size)
        if self.total is not None and more:
            if to > self.total:
                raise TooLarge(
                    f"the body is larger than {self.total} bytes, which all bodies together may hold",
                    field="body",
                    hint="send less, or raise GLASSBLOCK_BODIES_MIB",
                )
            if self.held + more > self.total:
                raise NoRoom(
                    f"bodies of {self.held:,} bytes are under way, and {self.total:,} may be: {to:,} do not fit now",
                    field="body",
                    hint="send it again later, or raise GLASSBLOCK_BODIES_MIB",
                    retry_after=RETRY_SECONDS,
                )
        self._held += more

    def give_back(self, size: int) -> None:
        """A body of `size` bytes is gone. From any thread, at any moment."""
        self._given_back.append(_counted(size))

    def until_gone(self, body: memoryview) -> None:
        """Give `body`, a view of numpy's memory, back with its last view."""
        array = body.obj
        assert isinstance(array, np.ndarray)  # noqa: S101  else it ends unnoticed
        weakref.finalize(array, self.give_back, body.nbytes).atexit = False


UNCOUNTED = BodyBudget(None)


def _counted(size: int) -> int:
    return size if size > SMALL_BODY else 0
