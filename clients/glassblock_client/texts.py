"""Texts as token ids, in the form that a message takes them in."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from glassblock_client.given import as_tuple

TokenIds = Sequence[int] | Sequence[Sequence[int]] | NDArray[np.integer[Any]]
"""One text, or several of one length."""


def as_token_ids(ids: TokenIds | None) -> tuple[int, ...] | tuple[tuple[int, ...], ...] | None:
    """The ids as tuples; what is none is refused by the message that they go into."""
    rows: Any = as_tuple(ids)
    return tuple(map(as_tuple, cast("tuple[Any, ...]", rows))) if isinstance(rows, tuple) else rows
