"""How many bytes the bodies of all requests together may hold.

A body is counted by the size it declares, before any of it is read, or as it grows where it declares none; until the
last view of its memory is gone, which may be after its request: an answer that sends a tensor back is sent from there.
The numbers of a JSON body are counted once more, as the objects that Python makes of them, while it is answered.
Nobody waits: what has no room is refused, so two half-received bodies can never wait for each other.
"""

import weakref
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager

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

    @contextmanager
    def unfolded(self, size: int) -> Generator[None]:
        """Count `size` bytes of objects that a JSON body becomes, while they are needed.

        Raises:
            TooLarge: they are more than all bodies together may hold.
            NoRoom: others leave no room for them now.
        """
        if self.total is not None and size > self.total:
            raise TooLarge(
                f"read as JSON the body becomes about {size:,} bytes; all bodies together may hold {self.total:,}",
                field="body",
                hint="send tensors as safetensors, or raise GLASSBLOCK_BODIES_MIB",
            )
        self.grow(0, size)
        try:
            yield
        finally:
            self.give_back(size)

    def until_gone(self, body: memoryview) -> None:
        """Give `body`, a view of numpy's memory, back with its last view."""
        array = body.obj
        assert isinstance(array, np.ndarray)  # noqa: S101  else it ends unnoticed
        weakref.finalize(array, self.give_back, body.nbytes).atexit = False


UNCOUNTED = BodyBudget(None)


_OBJECT_BYTES = {",": 40, "[": 88, "{": 88, ":": 140}
"""What Python takes at most for what ends or begins there: a number and its place in a list, an empty list or object,
a name with its place in an object. Measured with the `json` module and pydantic on CPython 3.11."""

_PIECE = 1 << 20


def object_bytes(body: memoryview) -> int:
    """At most how many bytes a JSON text becomes as objects; of small whole numbers it is five times too many."""
    text, found = np.frombuffer(body, dtype=np.uint8), 0
    for start in range(0, len(text), _PIECE):
        piece = text[start : start + _PIECE]
        found += sum(each * int(np.count_nonzero(piece == ord(mark))) for mark, each in _OBJECT_BYTES.items())
    return body.nbytes + found


def _counted(size: int) -> int:
    return size if size > SMALL_BODY else 0
