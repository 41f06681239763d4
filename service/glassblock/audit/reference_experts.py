"""Experts of a mixture that lie under other numbers than in the reference.

A whole network is found again by the fingerprints of its projections. It changes nothing where the rows of the router
moved with it; a projection that moved without the rest of its network is damage.
"""

from collections.abc import Mapping, Sequence

import torch

from glassblock.audit.reference_map import Key, Part, expert_of_key, is_of_network, network_parts
from glassblock.audit.reference_networks import Verdict, fingerprints, reordered
from glassblock.audit.reference_pairs import Pairs
from glassblock.audit.reference_types import FORM_KINDS, Difference
from glassblock.checkpoint.layer_parts import Expert
from glassblock.checkpoint.reading import ReadMeter
from glassblock.numerics.likeness import narrower_dtype

Parts = Mapping[Key, Part]


def explain_moved_experts(pairs: Pairs, layer: int, mine: Parts, its: Parts, experts: Sequence[Expert]) -> set[Expert]:
    """Tell which experts lie under another number, whole or with one projection.

    Args:
        pairs: What is known of the parts; a difference is added, and what it explains is settled.
        layer: Which.
        mine: The parts of that layer.
        its: The same of the reference.
        experts: The networks that are not equal to their counterparts.

    Returns:
        Those that are explained.

    Raises:
        GlassblockError: A part cannot be read.
    """
    routed = [expert for expert in experts if isinstance(expert, int)]
    if len(routed) < 2:
        return set()
    moved: dict[int, int] = {}
    apart: set[Expert] = set()
    home: Key = ("layer", layer, "network")
    for part in ("down", "up", "gate"):
        wanted = {
            expert: mine[key]
            for expert in routed
            if expert not in moved and expert not in apart and pairs.differs(key := (*home, expert, part))
        }
        theirs: dict[Expert, Part] = {
            expert_of_key(key): other for key, other in its.items() if key[:3] == home and key[4:] == (part,)
        }
        for expert, other in _homes_there(wanted, theirs, pairs.meter).items():
            here, there = network_parts(layer, expert, mine), network_parts(layer, other, its)
            if _is_same_network(here, there, pairs.meter):
                moved[expert] = other
            else:
                words = f"its {part} projection is that of the reference's expert {other}, and not all of it is"
                pairs.tell_network(Verdict("mispaired", words), (*home, expert), here, there, here)
                apart.add(expert)
    along = _router_moved(pairs, layer, mine, its, moved)
    if moved:
        _tell_moved(pairs, layer, mine, its, moved, along=along)
    for key in [key for key in mine if is_of_network(key) and (key[3] in moved or key[3] in apart)]:
        pairs.settle(key, same=along and key[3] in moved)
    return {*moved, *apart}


def _homes_there(wanted: Mapping[int, Part], theirs: Mapping[Expert, Part], meter: ReadMeter) -> dict[int, int]:
    """Under which other number the reference has a projection, by the expert that has it here."""
    if not wanted:
        return {}
    dtype = next(iter(wanted.values())).dtype
    for other in theirs.values():
        dtype = narrower_dtype(dtype, other.dtype)
    places = {_fingerprint(other, dtype, meter): expert for expert, other in theirs.items() if isinstance(expert, int)}
    found: dict[int, int] = {}
    for expert, part in wanted.items():
        value = _fingerprint(part, dtype, meter)
        place = places.get(value)
        if value and place is not None and place != expert:
            found[expert] = place
    return found


def _is_same_network(here: Mapping[str, Part], there: Mapping[str, Part], meter: ReadMeter) -> bool:
    """Whether two networks are one, whatever the order of its neurons."""
    verdict = reordered(here, there, meter, biases=True)
    return verdict is not None and verdict.kind in FORM_KINDS


def _router_moved(pairs: Pairs, layer: int, mine: Parts, its: Parts, moved: Mapping[int, int]) -> bool:
    """Whether the rows of the router, and what else it has for each expert, moved with the experts."""
    keys = [key for key in mine if key[:3] == ("layer", layer, "router")]
    for key in keys:
        here, there = mine[key], its.get(key)
        if there is None or here.shape != there.shape or here.shape[0] <= max([*moved, *moved.values()], default=0):
            return False
        dtype = narrower_dtype(here.dtype, there.dtype)
        rows, others = (fingerprints(part, dtype, pairs.meter) for part in (here, there))
        if not all(rows[expert] == others[other] for expert, other in moved.items()):
            return False
        stay = [row for row in range(len(rows)) if row not in moved]
        if torch.equal(rows[stay], others[stay]):
            pairs.same.add(key)
    return bool(keys)


def _tell_moved(pairs: Pairs, layer: int, mine: Parts, its: Parts, moved: Mapping[int, int], *, along: bool) -> None:
    """Add the difference of whole experts; `along`: whether the router's rows are with them."""
    here, there = (
        tuple(dict.fromkeys(part.name for expert in side for part in network_parts(layer, expert, parts).values()))
        for side, parts in ((moved.keys(), mine), (moved.values(), its))
    )
    which = f"the experts {', '.join(map(str, sorted(moved)))} lie" if len(moved) <= 8 else f"{len(moved)} experts lie"
    router = "the rows of the router with them" if along else "and the rows of the router do not"
    words = f"{which} under other numbers, {router}"
    kind = "experts-reordered" if along else "experts-exchanged"
    pairs.differences.append(Difference(kind, words, here, there, layer, homes=_homes(layer, mine, moved)))


def _homes(layer: int, mine: Parts, moved: Mapping[int, int]) -> Mapping[int, int] | None:
    """`moved`, where exchanging the names of tensors undoes it: none is there twice, and each has its own tensors."""
    named = [{part.name for part in network_parts(layer, expert, mine).values()} for expert in moved]
    apart = len(set[str]().union(*named)) == sum(map(len, named))
    return moved if apart and sorted(moved) == sorted(moved.values()) else None


def _fingerprint(part: Part, dtype: torch.dtype, meter: ReadMeter) -> int:
    """One number for a whole part, whatever the order of its rows."""
    return int(fingerprints(part, dtype, meter).sum())
