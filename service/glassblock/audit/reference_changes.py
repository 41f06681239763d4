"""How much training changed, in a line: tensors, layers, the size of the change by role, its rank where that is low."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from glassblock.audit.reference_map import Key, Part
from glassblock.audit.reference_types import Difference
from glassblock.checkpoint.entries import FLOAT_CODES
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.stored_entries import StoredEntry
from glassblock.errors import GlassblockError
from glassblock.numerics.low_rank import low_rank

LOOKED_AT = 4
"""Tensors of each role whose change is looked at for its rank, evenly spread over the layers."""

MOST_NUMBERS = 1 << 21
"""Numbers of one of them; of a larger one its first rows, which show the same rank."""

FEWEST_ROWS = 256
"""However wide they are. Ranks up to a quarter of the rows are told."""

Ranks = Mapping[str, tuple[int | None, ...]]
"""Of each role, the ranks of the changes that were looked at, None where one is not low."""


def role_of(key: Key) -> str:
    """What a tensor is in the model: `gate`, `query`, `norm ffn_in`, `embedding`."""
    if key[0] != "layer":
        return str(key[0])
    rest = [str(part) for part in key[2:] if isinstance(part, str)]
    return rest[-1] if rest[0] in ("network", "attention") else " ".join(rest)


def changed_ranks(
    changed: Sequence[Difference], mine: Mapping[Key, Part], its: Mapping[Key, Part], meter: ReadMeter
) -> Ranks:
    """The ranks of some changes of each role, from rows of both sides.

    Args:
        changed: Matrices that hold other numbers.
        mine, its: The parts of both.
        meter: Counts what is read.
    """
    roles: dict[str, list[Key]] = defaultdict(list)
    for found in changed:
        if found.key in mine and found.key in its and min(mine[found.key].shape) > 1:
            roles[role_of(found.key)].append(found.key)
    ranks: dict[str, tuple[int | None, ...]] = {}
    for role, keys in roles.items():
        some = [keys[number * (len(keys) - 1) // max(LOOKED_AT - 1, 1)] for number in range(LOOKED_AT)]
        looked = [_rank(mine[key], its[key], meter) for key in dict.fromkeys(some)]
        ranks[role] = tuple(rank[0] for rank in looked if rank is not None)
    return ranks


def _rank(here: Part, there: Part, meter: ReadMeter) -> tuple[int | None] | None:
    """Its rank; None where it cannot be told: codes are rounded by their own grid."""
    if any(isinstance(part.entry, StoredEntry) or part.entry.dtype not in FLOAT_CODES for part in (here, there)):
        return None
    rows = min(here.shape[0], max(FEWEST_ROWS, MOST_NUMBERS // here.shape[1]))
    try:
        return (low_rank(here.rows(0, rows, meter), there.rows(0, rows, meter), seed=0),)
    except GlassblockError:
        return None  # told by the comparison that read it first
    finally:
        here.let_go()
        there.let_go()


def changes_in_words(changed: Sequence[Difference], ranks: Ranks, *, mapped: int, layers: int) -> str:
    """`90 of 273 tensors, in 30 of 30 layers: query by 2 % (rank 8 in 4 of 4 looked at), down by 1.5 %`."""
    places = {found.layer for found in changed if found.layer is not None}
    sizes: dict[str, list[float]] = defaultdict(list)
    for found in changed:
        if found.relative is not None:
            sizes[role_of(found.key)].append(found.relative)
    told = [
        f"{role} by {_size(values)}{_rank_words(ranks.get(role, ()))}"
        for role, values in sorted(sizes.items(), key=lambda pair: -median(pair[1]))
    ]
    where = f", in {len(places)} of {layers} layers" if places else ""
    return f"{len(changed)} of {mapped} tensors{where}: {', '.join(told)}"


def _size(values: Sequence[float]) -> str:
    least, most = (f"{100 * value:.2g}" for value in (min(values), max(values)))
    return f"{least} %" if least == most else f"{least} to {most} %"


def _rank_words(ranks: Sequence[int | None]) -> str:
    low = sorted({rank for rank in ranks if rank is not None})
    if not low:
        return ""
    named = f"rank {low[0]}" if len(low) == 1 else f"ranks {low[0]} to {low[-1]}"
    count = sum(rank is not None for rank in ranks)
    return f" ({named} in {count} of {len(ranks)} looked at)"
