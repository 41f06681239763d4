"""Long JSON texts, read in steps: between two of them other threads get their turn.

Python's reader is one call that keeps Python's lock to its end: seconds for tens of MiB of lists, in which the event
loop answers nobody, whoever asks after the service's health included.
"""

import json
import re
from collections.abc import Callable
from typing import Any

STEP = 1 << 16
"""Characters of a list that are read at once."""

LONG = 1 << 20
"""Characters from which on a text is read in steps. Shorter ones take milliseconds."""

_FLAT = re.compile(rf'\[[^][{{}}"]{{,{STEP}}}\]')
"""A list of numbers and words, without strings, lists or objects in it."""

Pairs = list[tuple[str, Any]]


def read_json(text: bytes | str, *, object_of: Callable[[Pairs], Any]) -> Any:
    """As `json.loads`, which it calls.

    Args:
        object_of: makes an object of its names and values.

    Raises:
        ValueError: it is not JSON.
        RecursionError: it is nested too deep.
    """
    return json.loads(text, cls=_InSteps if len(text) > LONG else None, object_pairs_hook=object_of)


class _InSteps(json.JSONDecoder):
    """Reads short flat lists and what is no list at once, and goes through all others element by element."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        own: Any = self  # of the attributes that hold its parts typeshed knows none
        self._at_once, self._list_of, self._object_of = own.scan_once, own.parse_array, own.parse_object
        own.scan_once = self._next

    def _next(self, text: str, start: int) -> tuple[Any, int]:
        if text.startswith("{", start):
            return self._object_of((text, start + 1), self.strict, self._next, None, self.object_pairs_hook)
        if text.startswith("[", start) and not _FLAT.match(text, start):
            return self._list_of((text, start + 1), self._next)
        return self._at_once(text, start)
