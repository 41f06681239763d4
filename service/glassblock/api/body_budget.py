"""How many bytes the bodies of all requests and answers together may hold, and of them those of one caller.

A body is counted by the size it declares, before any of it is read, or as it grows where it declares none; until the
last view of its memory is gone, which may be after its request: an answer that sends a tensor back is sent from there.
The numbers of a JSON body are counted once more, as the objects that Python makes of them, while it is answered; and
an answer until it is sent, however slowly it is read.
Nobody waits: what has no room is refused, so two half-received bodies can never wait for each other.

A caller is an API key, or an address where there are no keys. One request of each finds whatever room is free. Further
ones of the same caller may together hold `SHARE` times as much as they leave free: one caller alone three quarters of
the budget, two three sevenths each, and there is always room for the next one. (The rule by which switches share their
buffers: Choudhury and Hahne, Dynamic Queue Length Thresholds for Shared-Memory Packet Switches, 1998.)
"""

import weakref
from collections import Counter, deque
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
from starlette.responses import Response

from glassblock.errors import NoRoom, TooLarge

SMALL_BODY = 64 * 1024
"""Bytes up to which a body is not counted: questions find a way in while tensors fill the budget."""

RETRY_SECONDS = 2.0

SHARE = 3
"""How many times what is left free the requests of one caller may hold together."""


class BodyBudget:
    """Bytes of bodies under way. Taken within one event loop; given back from any thread.

    Args:
        total: bytes that all bodies together may hold.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._held: Counter[str] = Counter()  # by caller
        # A view may end anywhere, in the middle of `grow` too: only this deque is touched then.
        self._given_back: deque[tuple[str, int]] = deque()

    @property
    def held(self) -> int:
        """Bytes of bodies that are counted now."""
        return self._settled().total()

    def of(self, caller: str) -> "RequestBudget":
        """What one request of a caller takes of it."""
        return RequestBudget(self, caller)

    def take(self, caller: str, more: int, *, own: int) -> None:
        """Count `more` bytes for a request that holds `own` already.

        Raises:
            NoRoom: others, or the caller's other requests, leave no room for them now.
        """
        held = self._settled()
        free = self.total - held.total() - more
        others = held[caller] - own
        if free < 0:
            raise NoRoom(
                f"bodies of {held.total():,} bytes are under way, and {self.total:,} may be:"
                f" {own + more:,} do not fit now",
                field="body",
                hint="send it again later, or raise GLASSBLOCK_BODIES_MIB",
                retry_after=RETRY_SECONDS,
            )
        if others > 0 and held[caller] + more > SHARE * free:
            raise NoRoom(
                f"your bodies of {held[caller]:,} bytes are under way:"
                f" {own + more:,} beside them would leave others too little",
                field="body",
                hint="send fewer at once, or raise GLASSBLOCK_BODIES_MIB",
                retry_after=RETRY_SECONDS,
            )
        held[caller] += more

    def take_answer(self, caller: str, size: int, *, own: int) -> None:
        """Count an answer, there already, to a request that holds `own`.

        Raises:
            NoRoom: the caller's other requests leave no room for it.
        """
        held = self._settled()
        free = max(0, self.total - held.total() - size)
        if held[caller] > own and held[caller] + size > SHARE * free:
            raise NoRoom(
                f"your bodies and unread answers of {held[caller]:,} bytes are under way:"
                f" an answer of {size:,} beside them would leave others too little",
                hint="read the answers before you ask for more, or raise GLASSBLOCK_BODIES_MIB",
                retry_after=RETRY_SECONDS,
            )
        held[caller] += size

    def give_back(self, caller: str, size: int) -> None:
        """Bytes that were taken are free again. From any thread, at any moment."""
        self._given_back.append((caller, size))

    def _settled(self) -> Counter[str]:
        while self._given_back:
            caller, size = self._given_back.popleft()
            self._held[caller] -= size
            if not self._held[caller]:
                del self._held[caller]
        return self._held


class RequestBudget:
    """What one request takes of the budget: its body, and the objects that the body becomes."""

    def __init__(self, budget: BodyBudget, caller: str) -> None:
        self._budget = budget
        self._caller = caller
        self._own = 0

    def grow(self, size: int, to: int) -> None:
        """Count a body that has held `size` bytes and shall hold `to`.

        Raises:
            TooLarge: it would be larger than all bodies together may be.
            NoRoom: others, or the caller's other requests, leave no room for it now.
        """
        total = self._budget.total
        if _counted(to) > total:
            raise TooLarge(
                f"the body is larger than {total} bytes, which all bodies together may hold",
                field="body",
                hint="send less, or raise GLASSBLOCK_BODIES_MIB",
            )
        self._take(_counted(to) - _counted(size))

    def give_back(self, size: int) -> None:
        """The body, of `size` bytes, is gone. From any thread, at any moment."""
        self._gone(_counted(size))

    @contextmanager
    def unfolded(self, size: int) -> Generator[None]:
        """Count `size` bytes of objects that a JSON body becomes, while they are needed.

        Raises:
            TooLarge: they are more than all bodies together may hold.
            NoRoom: others, or the caller's other requests, leave no room for them now.
        """
        total, size = self._budget.total, _counted(size)
        if self._own + size > total:
            raise TooLarge(
                f"read as JSON the body becomes about {size:,} bytes; all bodies together may hold {total:,}",
                field="body",
                hint="send tensors as safetensors, or raise GLASSBLOCK_BODIES_MIB",
            )
        self._take(size)
        try:
            yield
        finally:
            self._gone(size)

    def until_sent(self, response: Response) -> None:
        """Count an answer while it is there, which is until its last byte has left.

        Raises:
            NoRoom: the caller has others that he has not read yet, and they leave no room for it. One alone always has.
        """
        size = _counted(int(response.headers.get("content-length", "0")))
        if size:
            self._budget.take_answer(self._caller, size, own=self._own)
            weakref.finalize(response, self._budget.give_back, self._caller, size).atexit = False

    def until_gone(self, body: memoryview) -> None:
        """Give `body`, a view of numpy's memory, back with its last view."""
        array = body.obj
        assert isinstance(array, np.ndarray)  # noqa: S101  else it ends unnoticed
        weakref.finalize(array, self.give_back, body.nbytes).atexit = False

    def _take(self, more: int) -> None:
        if more:
            self._budget.take(self._caller, more, own=self._own)
            self._own += more

    def _gone(self, size: int) -> None:
        self._own -= size
        self._budget.give_back(self._caller, size)


_OBJECT_BYTES = {",": 40, "[": 88, "{": 88, ":": 140}
"""What Python takes at most for what ends or begins there: a number and its place in a list, an empty list or object,
a name with its place in an object. Measured with the `json` module and pydantic on CPython 3.11."""

_PIECE = 1 << 20


def object_bytes(body: memoryview) -> int:
    """At most how many bytes a JSON text becomes as objects; of small whole numbers it is five times too many."""
    text, found, widest = np.frombuffer(body, dtype=np.uint8), 0, 0
    for start in range(0, len(text), _PIECE):
        piece = text[start : start + _PIECE]
        found += sum(each * int(np.count_nonzero(piece == ord(mark))) for mark, each in _OBJECT_BYTES.items())
        widest = max(widest, int(piece.max()))
    # Python gives every character what the widest needs; by how it begins in UTF-8, that is 1, 2 or 4 bytes.
    return body.nbytes * (1 if widest < 0xC4 else 2 if widest < 0xF0 else 4) + found


def _counted(size: int) -> int:
    return size if size > SMALL_BODY else 0
