"""What happened to a network whose tensors are not the reference's: found from fingerprints of rows and columns.

Rows of gate and up and columns of down are each one number of 64 bits. If the same numbers are there in another order,
the order says which mistake it was: exchanged, cut otherwise, neurons moved together (nothing) or apart (damage).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from glassblock.audit.reference_map import Part
from glassblock.audit.reference_types import FormKind, FunctionKind
from glassblock.checkpoint.reading import ReadMeter
from glassblock.numerics.likeness import Likeness, column_fingerprints, narrower_dtype, row_fingerprints

Role = Literal["gate", "up", "down"]
ELEMENTS = 1 << 20
"""Numbers of a piece of either side."""


class Verdict(NamedTuple):
    """What explains a network.

    Attributes:
        kind: The difference.
        words: The same for people.
        proved: Whether equal rows decide it.
    """

    kind: FormKind | FunctionKind
    words: str
    proved: bool = True


@dataclass(frozen=True)
class NetworkPrints:
    """One network as fingerprints: of gate's and up's rows, and of down's columns. `[neurons]` each."""

    gate: Tensor | None
    up: Tensor
    down: Tensor


def prints_of(parts: Mapping[str, Part], dtypes: Mapping[str, torch.dtype], meter: ReadMeter) -> NetworkPrints | None:
    """The fingerprints of a network, its numbers rounded to `dtypes`; None where up or down is absent or misshapen."""
    if "up" not in parts or "down" not in parts:
        return None
    gate, neurons = parts.get("gate"), parts["up"].shape[0]
    if parts["down"].shape[1] != neurons or (gate is not None and gate.shape[0] != neurons):
        return None
    return NetworkPrints(
        None if gate is None else fingerprints(gate, dtypes["gate"], meter),
        fingerprints(parts["up"], dtypes["up"], meter),
        fingerprints(parts["down"], dtypes["down"], meter, columns=True),
    )


def with_biases(
    prints: NetworkPrints, parts: Mapping[str, Part], dtypes: Mapping[str, torch.dtype], meter: ReadMeter
) -> NetworkPrints:
    """The same, each row of gate and up together with its bias, so that both must have moved alike."""
    added = {
        role: fingerprints(parts[f"{role}-bias"], dtypes["gate"], meter) * 0x27D4EB2F
        for role in ("gate", "up")
        if f"{role}-bias" in parts and parts[f"{role}-bias"].elements == len(prints.up)
    }
    gate = prints.gate if prints.gate is None or "gate" not in added else prints.gate + added["gate"]
    return NetworkPrints(gate, prints.up + added["up"] if "up" in added else prints.up, prints.down)


def shared_dtypes(here: Mapping[str, Part], there: Mapping[str, Part]) -> dict[str, torch.dtype]:
    """In which dtype each part is compared: one for gate and up, so that they can be told when they were exchanged."""
    both = [part.dtype for parts in (here, there) for name, part in parts.items() if name in ("gate", "up")]
    first = both[0] if both else torch.float32
    for dtype in both:
        first = narrower_dtype(first, dtype)
    down = narrower_dtype(here["down"].dtype, there["down"].dtype) if "down" in here and "down" in there else first
    return {"gate": first, "up": first, "down": down}


def fingerprints(part: Part, dtype: torch.dtype, meter: ReadMeter, *, columns: bool = False) -> Tensor:
    """Of a part's rows, or of its columns."""
    count, width = part.shape
    step = max(1, ELEMENTS // max(width, 1))
    taken: list[Tensor] = []
    sums = torch.zeros(width if columns else 0, dtype=torch.int64)
    for start in range(0, count, step):
        rows = part.rows(start, min(start + step, count), meter).to(dtype)
        if columns:
            sums += column_fingerprints(rows, start, count)
        else:
            taken.append(row_fingerprints(rows))
    part.let_go()
    return sums if columns else torch.cat(taken)


def reordered(here: Mapping[str, Part], there: Mapping[str, Part], meter: ReadMeter, *, biases: bool) -> Verdict | None:
    """What order of its rows makes one network of the other.

    Args:
        here: The parts of the network by role.
        there: Its counterpart's.
        meter: Counts what is read.
        biases: Whether the biases of gate and up must have moved with their rows.

    Returns:
        None where up or down is absent, or rows are there that the other does not have.

    Raises:
        GlassblockError: A part cannot be read.
    """
    if not {"up", "down"} <= here.keys() & there.keys():
        return None
    dtypes = shared_dtypes(here, there)
    prints, others = prints_of(here, dtypes, meter), prints_of(there, dtypes, meter)
    if prints is None or others is None:
        return None
    if biases:
        prints, others = (with_biases(*pair, dtypes, meter) for pair in ((prints, here), (others, there)))
    return explained(prints, others, fused="gate" in here and here["gate"].name == here["up"].name)


def explained(here: NetworkPrints, there: NetworkPrints, *, fused: bool) -> Verdict | None:
    """What makes one network of the other; None where rows are there that the other does not have.

    Args:
        here: The network.
        there: Its counterpart.
        fused: Whether gate and up lie in one tensor here.
    """
    padded = _without_idle(here, there)
    trimmed = here if padded is None else padded
    less = _without_idle(there, trimmed)
    other = there if less is None else less
    grown = padded is not None or less is not None
    straight = _order(trimmed, other, exchanged=False)
    if straight is not None:
        return _moved(straight, grown=grown)
    crossed = _order(trimmed, other, exchanged=True)
    if crossed is not None and trimmed.gate is not None:
        kind: FunctionKind = "fused-order" if fused else "swapped"
        where = "the two halves of gate and up are" if fused else "gate and up are"
        return Verdict(kind, f"{where} exchanged relative to the reference")
    if trimmed.gate is not None and other.gate is not None:
        mine, its = torch.cat([trimmed.gate, trimmed.up]), torch.cat([other.gate, other.up])
        if fused and _same_multiset(mine, its) and torch.equal(trimmed.down.sort().values, other.down.sort().values):
            return Verdict("fused-layout", f"the rows of gate and up are cut otherwise: {_cut(mine, its)}")
    if _rows_kept(trimmed, other):
        return Verdict("mispaired", "the neurons of gate, up and down are in different orders")
    return None


def _order(here: NetworkPrints, there: NetworkPrints, *, exchanged: bool) -> Tensor | None:
    """The one order of neurons under which all of gate, up and down are the other's."""
    up, gate = (there.gate, there.up) if exchanged else (there.up, there.gate)
    if up is None or (here.gate is None) != (gate is None) or len(here.up) != len(up):
        return None
    mine, its = _neurons(here.gate, here.up, here.down), _neurons(gate, up, there.down)
    places: dict[int, list[int]] = {}
    for place, neuron in enumerate(its):
        places.setdefault(neuron, []).append(place)
    order: list[int] = []
    for neuron in mine:
        found = places.get(neuron)
        if not found:
            return None
        order.append(found.pop(0))
    return torch.tensor(order)


def _neurons(gate: Tensor | None, up: Tensor, down: Tensor) -> list[int]:
    """One number for each neuron, of all that belongs to it."""
    every = up * 0x9E3779B1 + down * 0x85EBCA6B
    return cast("list[int]", (every if gate is None else every + gate * 0xC2B2AE35).tolist())


def _moved(order: Tensor, *, grown: bool) -> Verdict:
    if grown:
        return Verdict("padded", "neurons of zeros were added, which changes nothing")
    if torch.equal(order, torch.arange(len(order))):
        return Verdict("rounded", "the same numbers, rounded")
    return Verdict("permuted", "the neurons are in another order, the same in gate, up and down")


def _without_idle(one: NetworkPrints, other: NetworkPrints) -> NetworkPrints | None:
    """`one` without the neurons of zeros that it has more than the other; None where that is not its width."""
    extra = len(one.up) - len(other.up)
    idle = (one.up == 0) & (one.down == 0) & (one.gate == 0 if one.gate is not None else True)
    if extra <= 0 or int(idle.sum()) < extra:
        return None
    keep = torch.ones(len(one.up), dtype=torch.bool)
    keep[idle.nonzero().flatten()[-extra:]] = False
    gate = None if one.gate is None else one.gate[keep]
    return NetworkPrints(gate, one.up[keep], one.down[keep])


def _rows_kept(here: NetworkPrints, there: NetworkPrints) -> bool:
    """Whether each of gate, up and down holds what the other's does, in some order."""
    pairs = [(here.up, there.up), (here.down, there.down)]
    if here.gate is not None and there.gate is not None:
        pairs.append((here.gate, there.gate))
    return all(_same_multiset(mine, its) for mine, its in pairs)


def _same_multiset(mine: Tensor, its: Tensor) -> bool:
    return len(mine) == len(its) and torch.equal(mine.sort().values, its.sort().values)


def _cut(mine: Tensor, its: Tensor) -> str:
    """In words, how the rows lie: in turn, or in how many blocks."""
    half = len(its) // 2
    place = {number: index for index, number in enumerate(cast("list[int]", its.tolist()))}
    order = torch.tensor([place[number] for number in cast("list[int]", mine.tolist())])
    is_up = order >= half
    changes = int((is_up[1:] != is_up[:-1]).sum()) + 1
    return "rows of both in turn" if changes >= len(mine) // 2 else f"{changes // 2} blocks of both"


def likeness_of(here: Part, there: Part, meter: ReadMeter, *, tell: Callable[[], object] | None = None) -> Likeness:
    """How like two parts of one shape are, read in pieces."""
    count, width = here.shape
    step = max(1, ELEMENTS // max(width, 1))
    found = Likeness()
    for start in range(0, count, step):
        if tell is not None:
            tell()
        stop = min(start + step, count)
        mine, its = here.rows(start, stop, meter), there.rows(start, stop, meter)
        if here.offset != there.offset:
            # Where gains are used, so that two conventions of storing them meet.
            mine, its = mine.to(torch.float32) + here.offset, its.to(torch.float32) + there.offset
        found = found.and_then(mine, its)
    here.let_go()
    there.let_go()
    return found
