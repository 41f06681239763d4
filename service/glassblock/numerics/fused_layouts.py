"""In which order do the rows of a fused gate and up projection lie? Every candidate is screened.

A fused weight `[2 m, d]` is cut into `groups` equal parts, and each of these into a first and a second half: the rows
of one projection and those of the other. One group is [gate | up]; m groups is interleaved; as many groups as there
were tensor-parallel ranks, or tiles of a kernel, is what stands in between. Only under the true cut is one side noise:
under any other both sides hold rows of the gate, and both have its direction.

`split_rows` is what a layout means: whatever reads, tests or repairs a fused tensor takes its rows from there.
"""

from typing import NamedTuple

from jaxtyping import Float, Shaped
from torch import Tensor

from glassblock.numerics.gate_or_up import UP_IS_SUSPICIOUS
from glassblock.numerics.sign_screen import RowSums, SignScreen, screened

RANKS = (2, 4, 8, 16)
TILES = (16, 32, 64, 128)

_GATE_SHOWS = 6.0  # z; what a layout is named by is certified afterwards


class RowLayout(NamedTuple):
    """How often the two sides take turns, and which comes first."""

    groups: int
    gate_first: bool = True


class LayoutScreen(NamedTuple):
    """The two sides of one cut: the first half of every group, and the second."""

    groups: int
    first: SignScreen
    second: SignScreen

    @property
    def layout(self) -> RowLayout | None:
        """The layout that it shows: one side stands out, and the other one is quiet. None where it shows none."""
        for gate, up, gate_first in ((self.first, self.second, True), (self.second, self.first, False)):
            if gate.stands_out(_GATE_SHOWS) and up.quiet(UP_IS_SUSPICIOUS):
                return RowLayout(self.groups, gate_first)
        return None


def candidate_groups(neurons: int, declared: int = 1) -> tuple[int, ...]:
    """The numbers of groups that are tried: halves, ranks, tiles of a kernel, interleaved; each once.

    Args:
        neurons: m, of which every candidate is a divisor.
        declared: The number that is declared, which is tried as well.
    """
    tiles = (neurons // tile for tile in TILES if neurons % tile == 0)
    tried = (1, declared, *(rank for rank in RANKS if neurons % rank == 0), *tiles, neurons)
    return tuple(sorted(set(tried)))


def split_groups(fused: Shaped[Tensor, "two_m *d"], groups: int) -> tuple[Tensor, Tensor]:
    """The first and the second halves of the groups, `[m, d]` each, neurons in order: views of one group or of m."""
    parts = fused.reshape(groups, 2, len(fused) // (2 * groups), *fused.shape[1:])
    return parts[:, 0].flatten(0, 1), parts[:, 1].flatten(0, 1)


def split_rows(
    fused: Shaped[Tensor, "two_m *d"], layout: RowLayout
) -> tuple[Shaped[Tensor, "m *d"], Shaped[Tensor, "m *d"]]:
    """Gate and up out of a fused weight or bias, neurons in order: views of one group or of m, else copies.

    Of the numbers of the rows it gives the order itself.
    """
    first, second = split_groups(fused, layout.groups)
    return (first, second) if layout.gate_first else (second, first)


def layout_screens(fused: Float[Tensor, "two_m d"], *, declared: int = 1) -> tuple[LayoutScreen, ...]:
    """Both sides of every candidate, screened; `declared` is one, whatever its number of groups."""
    neurons, width = len(fused) // 2, fused.shape[1]

    def screen(rows: Tensor) -> SignScreen:
        sums = RowSums(neurons, width, rows.device)
        sums.add(rows, 0)
        return screened(sums.finish())

    return tuple(
        LayoutScreen(groups, *(screen(side) for side in split_groups(fused, groups)))
        for groups in candidate_groups(neurons, declared)
    )
