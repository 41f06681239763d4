"""What square projections have shown of the way they lie. Rules read this and nothing else."""

from dataclasses import dataclass
from typing import NamedTuple

from glassblock.checkpoint.layer_parts import Expert
from glassblock.numerics.orientation import TurnedTest


class TurnedWeight(NamedTuple):
    """A weight whose axes are exchanged, by all that its network shows.

    Attributes:
        layer: Of which layer.
        network: Of which network; None for the dense one, and for all experts of a stack.
        tensors: Its name, or the two names of gate and up.
        others: The tensors that it was held against.
        test: Of the hypothesis that it lies as the family stores it.
        level: What its p-value had to fall below.
        either: The tensors that would be turned in a second reading that explains nearly as much.
    """

    layer: int
    network: Expert
    tensors: tuple[str, ...]
    others: tuple[str, ...]
    test: TurnedTest
    level: float
    either: tuple[str, ...]


class OpenOrientation(NamedTuple):
    """A square weight of which nothing is known, and why."""

    layer: int
    tensors: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class OrientationStudy:
    """All square projections.

    Attributes:
        upright: How many networks lie as they should.
        turned: The weights that do not.
        open: Those that cannot be told.
        unread: Layers that were not looked at, with the reason.
    """

    upright: int = 0
    turned: tuple[TurnedWeight, ...] = ()
    open: tuple[OpenOrientation, ...] = ()
    unread: tuple[tuple[int, str], ...] = ()

    @property
    def any(self) -> bool:
        """Whether there is a square projection at all."""
        return bool(self.upright or self.turned or self.open or self.unread)
