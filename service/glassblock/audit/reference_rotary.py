"""Queries and keys whose rows are the reference's in another order of each head: pairs for halves, or the reverse.

Every row is one number of 64 bits. If the same numbers are there in another order, the order says which mistake it was.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

import torch

from glassblock.audit.reference_map import HeadRows, Key, Part, layer_of_key, order_of, within_heads
from glassblock.audit.reference_networks import fingerprints
from glassblock.audit.reference_pairs import Pairs
from glassblock.audit.reference_relation import CLOSE
from glassblock.audit.reference_types import Difference, HeadMoves, Into
from glassblock.errors import GlassblockError
from glassblock.numerics.likeness import narrower_dtype

Step = tuple[int, int, Into]
"""See `HeadMoves`."""


class _Guess(NamedTuple):
    """A mistake, and the steps that undo it."""

    words: str
    steps: tuple[Step, ...]


def explain_rotary_order(pairs: Pairs, mine: Mapping[Key, Part], its: Mapping[Key, Part]) -> None:
    """Tell which queries and keys, biases of them and gains of a head's width lie in another order.

    Args:
        pairs: What is known of the parts; a difference is added for what moved alike, and its parts are settled.
        mine: The parts of one layer.
        its: The same of the reference.
    """
    found: dict[tuple[_Guess, tuple[int, ...] | None], list[Key]] = {}
    for key, part in mine.items():
        if part.head is None or part.transposed or not pairs.differs(key):
            continue
        stays = 1 - part.head.turned / part.head.width * (1 - CLOSE)
        if part.shape[1] > 1 and pairs.measured[key].cosine >= stays:
            continue  # its numbers changed, and not their places
        try:
            guess = _explained(pairs, part, its[key], part.head)
        except GlassblockError as error:
            pairs.unread.append(f"{part.name} beside {its[key].name}: {error.message}")
            continue
        if guess is not None:
            found.setdefault((guess, _heads_within(part, part.head)), []).append(key)
    for (guess, heads), keys in found.items():
        here, there = (tuple(dict.fromkeys(parts[key].name for key in keys)) for parts in (mine, its))
        moves = HeadMoves(guess.steps, heads)
        layer = layer_of_key(keys[0])
        pairs.differences.append(Difference("rotary-order", guess.words, here, there, layer, moves=moves))
        for key in keys:
            pairs.settle(key)


def _explained(pairs: Pairs, here: Part, there: Part, head: HeadRows) -> _Guess | None:
    """Which mistake makes one of the other."""
    dtype = narrower_dtype(here.dtype, there.dtype)
    prints, others = (fingerprints(part, dtype, pairs.meter) for part in (here, there))
    if len(prints) % head.width:
        return None
    if head.paired:  # as they lie in the file
        prints = prints[within_heads(order_of(head.width, head.turned, halves=False), len(prints))]
    for guess in _guesses(head, len(prints)):
        undone = prints
        for width, turned, into in guess.steps:
            undone = undone[within_heads(order_of(width, turned, halves=into == "halves"), len(undone))]
        if head.paired:
            undone = undone[within_heads(order_of(head.width, head.turned, halves=True), len(undone))]
        if torch.equal(undone, others):
            return guess
    return None


def _guesses(head: HeadRows, rows: int) -> Iterator[_Guess]:
    """From the plainest mistake on."""
    own, other = _orders(head)
    step: Step = head.width, head.turned, own
    back: Step = head.width, head.turned, other
    yield _Guess(f"the rows of its heads lie in {other}, where {own} are turned together", (step,))
    yield _Guess(f"the rows of its heads were brought into {own} once too often", (back,))
    wrong = rows // head.queries if head.queries and rows % head.queries == 0 else 0
    if wrong in {0, head.width} or wrong % 2 or head.turned < head.width:
        return
    as_many = f"as if it had {head.queries} heads of {wrong} rows"
    yield _Guess(f"its rows were brought into {own} {as_many}", ((wrong, wrong, other), step))
    yield _Guess(f"its rows were brought into {other} {as_many}, and back by its own", ((wrong, wrong, own), back))


def _orders(head: HeadRows) -> tuple[Into, Into]:
    """The family's, and the other one."""
    return ("pairs", "halves") if head.paired else ("halves", "pairs")


def _heads_within(part: Part, head: HeadRows) -> tuple[int, ...] | None:
    """Which heads of a fused tensor a part is."""
    if part.index is None or "fused" not in part.forms:
        return None
    return tuple(cast("list[int]", torch.unique(part.index // head.width).tolist()))
