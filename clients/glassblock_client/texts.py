"""Texts as token ids, in the form that a message takes them in."""

from collections.abc import Sequence
from typing import Any, cast

TokenIds = Sequence[int] | Sequence[Sequence[int]]
"""One text, or several of one length."""


def as_token_ids(ids: TokenIds | None) -> tuple[int, ...] | tuple[tuple[int, ...], ...] | None:
    """The ids as tuples; what is none is refused by the message that they go into."""
    if ids is None:
        return None
    rows = [tuple(row) if isinstance(row, Sequence) else row for row in ids]
    return cast("Any", tuple(rows))
