"""Does a weight respect the sign symmetry of its neurons? One statistic, drawn signs, and a certified p-value.

Multiplying row i of `up` and column i of `down` by -1 together leaves a gated network unchanged. Where initialisation
and training respect that flip, each neuron's sign is a fair coin given the gate and everything but the signs. The gate
has no such symmetry unless its activation is odd, and training gives its rows a common direction. With w_i the centred
unit rows of W,

    T(W) = | sum_i w_i |^2 / m        E[T] = 1 under fair signs.

Two p-values go with it and are not interchangeable. `draws_p` comes from seeded sign draws: it is exact, sees small
effects, and cannot fall below 1/(draws + 1), so it may clear a weight and never convicts one. `log10_p` is certified
(`sign_bound`): it reaches 1e-300 and beyond, and only ever rejects.

**Ties.** Copied neurons share a coin (`near_duplicates`). A group of them enters as one row, the unit vector along the
sum of its members, with one sign. Given which neurons are tied, and their signs relative to one another, the group's
own sign is still fair; scaling by a length does not see it. So every row keeps unit length and the bound its diagonal.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.near_duplicates import near_duplicate_groups
from glassblock.numerics.sign_bound import log10_tail_bound, row_moments
from glassblock.numerics.unit_rows import UnitRows, centred_unit_rows

# "Looks like noise" is a statement of its own: the randomisation p-value lies above this.
NOISE = 0.01
FEWEST_DRAWS = 99  # so that draws_p can fall to NOISE at all

BLOCK_ENTRIES = 2**22  # rows are made in blocks of 16 MiB
_CANCELLED = 1e-5  # a group whose unit rows sum to less than this has no direction left
# A draw this near to the observed value counts as reaching it: exact ties exist (all signs flipped), and both are
# sums of up to 1e5 float32 rows, rounded differently.
_TIE = 1e-5

UnitSource = Callable[[slice], UnitRows]  # the unit rows of a span of neurons


@dataclass(frozen=True)
class SymmetryTest:
    """T of one weight, and how unusual it is under fair signs.

    Attributes:
        statistic: T, 1 in expectation under fair signs, at most `rows`.
        rows: Signs: neurons with a direction, each group of tied ones counted once.
        tied: Neurons that share their sign with another.
        dropped: Neurons without a direction: zero, constant or not finite.
        z: T against the draws' mean and standard deviation; NaN where they do not vary. Skewed to the right:
            descriptive, not to be read as a normal score.
        draws_p: (1 + draws that reach T) / (draws + 1).
        log10_p: Certified: log10 of an upper bound on the p-value. None where it was not computed.
    """

    statistic: float
    rows: int
    tied: int
    dropped: int
    z: float
    draws_p: float
    log10_p: float | None = None

    @property
    def noise(self) -> bool:
        """Whether the sign draws find nothing unusual."""
        return self.draws_p > NOISE

    def rejected(self, level: float) -> bool:
        """Whether the certified p-value lies at or below `level`; never on the draws alone."""
        return self.log10_p is not None and self.log10_p <= math.log10(level)


def certified_log10_p(weight: Float[Tensor, "m d"], *, groups: Int[Tensor, " m"] | None = None) -> float:
    """log10 of a certified upper bound on P(T >= T(W)) under fair signs; at most 0, and -293 is representable.

    Args:
        weight: One neuron per row.
        groups: Which neurons share a sign, from `near_duplicate_groups`; None ties none.
    """
    return certified(SignedRows.of_matrix(weight, groups))


def sign_symmetry_test(
    weight: Float[Tensor, "m d"], *, seed: int, draws: int = 199, tie: bool = True, certify: bool = True
) -> SymmetryTest:
    """T of one weight with both p-values, near-duplicate rows tied.

    Raises:
        InvalidValue: Fewer than 99 draws, with which noise could not be told from anything.
    """
    rows = SignedRows.of_matrix(weight, near_duplicate_groups([weight]) if tie else None)
    result = randomised(rows, fair_signs(rows, draws=draws, seed=seed))
    return dataclasses.replace(result, log10_p=certified(rows)) if certify else result


class Ties(NamedTuple):
    """Which neurons share a sign: `member` `[m]` bool, and for the members the number of their group, `slot`."""

    member: Bool[Tensor, " m"]
    slot: Int[Tensor, " members"]
    groups: int

    @classmethod
    def of_groups(cls, groups: Int[Tensor, " m"]) -> "Ties":
        """From the lowest index in each neuron's group."""
        sizes = torch.bincount(groups, minlength=len(groups))
        shared = sizes > 1
        member = shared[groups]
        slot = shared.cumsum(0)[groups[member]] - 1
        return cls(member, slot, int(shared.sum()))


class Block(NamedTuple):
    """Some of the rows of a statistic.

    Attributes:
        rows: `[_, d]`; zero where a row stands for no sign of its own (dropped, or tied and part of a group).
        signs: How many are not zero.
        dropped: How many of the neurons behind them have no direction.
    """

    rows: Float[Tensor, "_ d"]
    signs: int
    dropped: int


@dataclass(frozen=True)
class SignedRows:
    """The unit rows of one statistic, made block by block: neurons that stand alone, then the tied groups.

    Attributes:
        make: Unit rows of a span of neurons.
        neurons: m.
        width: Entries in a row.
        device: Where the rows are.
        ties: Which neurons share a sign.
    """

    make: UnitSource
    neurons: int
    width: int
    device: torch.device
    ties: Ties

    @classmethod
    def of_matrix(cls, weight: Float[Tensor, "m d"], groups: Int[Tensor, " m"] | None = None) -> "SignedRows":
        """The centred unit rows of a weight."""
        neurons, width = weight.shape
        ties = Ties.of_groups(torch.arange(neurons, device=weight.device) if groups is None else groups)
        return cls(lambda span: centred_unit_rows(weight[span]), neurons, width, weight.device, ties)

    @property
    def signs(self) -> int:
        """Columns of signs that `blocks` lines up with: one per neuron (unused where tied), one per group."""
        return self.neurons + self.ties.groups

    def blocks(self) -> Iterator[Block]:
        """Rows in the order of their signs, 16 MiB at a time, then the tied groups."""
        ties = self.ties
        sums = torch.zeros(ties.groups, self.width, device=self.device)
        passed = 0
        for span in self._spans():
            rows, kept = self.make(span)
            dropped = len(kept) - int(kept.sum())
            if ties.groups:
                here = ties.member[span]
                slots = ties.slot[passed : passed + int(here.sum())]
                passed += len(slots)
                sums.index_add_(0, slots, rows[here])
                rows = rows.masked_fill(here.unsqueeze(-1), 0.0)
                kept = kept & ~here
            yield Block(rows, int(kept.sum()), dropped)
        if ties.groups:
            length = sums.square().sum(1, keepdim=True).sqrt()
            alive = length > _CANCELLED
            yield Block((sums / length).masked_fill_(~alive, 0.0), int(alive.sum()), 0)

    def _spans(self) -> Iterator[slice]:
        step = max(1, BLOCK_ENTRIES // self.width)
        return (slice(start, min(start + step, self.neurons)) for start in range(0, self.neurons, step))


def fair_signs(rows: SignedRows, *, draws: int, seed: int) -> Int8[Tensor, "draws signs"]:
    """Seeded fair signs, the same on every device.

    Raises:
        InvalidValue: Fewer than 99 draws.
    """
    if draws < FEWEST_DRAWS:
        raise InvalidValue(f"{draws} sign draws cannot tell noise at p > {NOISE}; at least {FEWEST_DRAWS} are needed")
    generator = torch.Generator().manual_seed(seed)
    coins = torch.randint(0, 2, (draws, rows.signs), generator=generator, dtype=torch.int8)
    return coins.mul_(2).sub_(1).to(rows.device)


def randomised(rows: SignedRows, signs: Int8[Tensor, "draws signs"]) -> SymmetryTest:
    """T and its place among the drawn T; the certified p-value left out.

    One pass over the rows: 2 draws m d operations, and 4 draws d bytes besides a block of rows.
    """
    total = torch.zeros(rows.width, dtype=torch.float64, device=rows.device)
    drawn = torch.zeros(len(signs), rows.width, device=rows.device)
    kept = dropped = column = 0
    for block, present, without in rows.blocks():
        total += block.sum(0, dtype=torch.float64)
        drawn.addmm_(signs[:, column : column + len(block)].to(block.dtype), block)
        kept += present
        dropped += without
        column += len(block)
    statistic = float(total.square().sum()) / max(kept, 1)
    values = drawn.square().sum(1, dtype=torch.float64) / max(kept, 1)
    spread = float(values.std())
    return SymmetryTest(
        statistic=statistic,
        rows=kept,
        tied=int(rows.ties.member.sum()),
        dropped=dropped,
        z=(statistic - float(values.mean())) / spread if spread > _TIE else math.nan,
        draws_p=(1 + int((values >= statistic * (1 - _TIE)).sum())) / (len(signs) + 1),
    )


def certified(rows: SignedRows) -> float:
    """The certified log10 p-value of T; 0 where no row has a direction.

    2 m d^2 operations in float64 and 8 min(m, d)^2 bytes for a Gram matrix, twice more while it is factored.
    """
    return log10_tail_bound(row_moments((block.rows for block in rows.blocks()), at_most=rows.signs))
