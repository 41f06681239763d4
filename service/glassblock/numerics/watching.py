"""How a long computation is followed and stopped, between its pieces."""

from collections.abc import Callable
from typing import NamedTuple


class ComputationCancelled(Exception):
    """The caller asked a computation to stop. No answer for a client: whoever cancelled knows."""


class Watch(NamedTuple):
    """Who follows a computation.

    Attributes:
        progress: Told (pieces done, pieces in all, what comes next) between pieces.
        cancelled: Asked at the same places whether to stop.
    """

    progress: Callable[[int, int, str], None] = lambda _done, _total, _message: None
    cancelled: Callable[[], bool] = lambda: False

    def at(self, done: int, total: int, message: str) -> None:
        """One place between pieces.

        Raises:
            ComputationCancelled: `cancelled` answered true.
        """
        if self.cancelled():
            raise ComputationCancelled
        self.progress(done, total, message)


UNWATCHED = Watch()
