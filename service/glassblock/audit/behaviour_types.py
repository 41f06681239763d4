"""What a text may be a witness of: single mistakes as variants of a checkpoint, and what came of asking."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from glassblock.checkpoint.text_variants import Variant
from glassblock.numerics.paired_differences import PairedDifference

Kind = Literal["swap", "eps", "offset", "activation"]
"""Gate and up laid otherwise in some layers, another epsilon, another number added to gains, another activation."""

Weights = Literal["exchanged", "undecidable", "as-named"]
"""What the weights say of the layers that a hypothesis lays otherwise."""

Reading = Literal["better", "worse", "undecided"]


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """One mistake that may have been made, undone.

    Attributes:
        kind: What of.
        words: What is otherwise.
        make: The checkpoint without the mistake; where that cannot be, an error says why.
        layers: The layers laid otherwise; none where it is about all of them alike.
        value: The epsilon, number or name that is taken instead.
        weights: What the weights say of these layers; None where no weight says anything.
        sought: Whether it is asked however long it takes; else only where that is cheap.
    """

    kind: Kind
    words: str
    make: Callable[[], Variant]
    layers: tuple[int, ...] = ()
    value: str | None = None
    weights: Weights | None = None
    sought: bool = True

    @property
    def first(self) -> int:
        """The first layer that is otherwise."""
        return min(self.layers, default=0)


class LeftOut(NamedTuple):
    """What was not asked, and why."""

    words: str
    reason: str


@dataclass(frozen=True)
class Judged:
    """A hypothesis and what the text says of it.

    Attributes:
        hypothesis: What was otherwise.
        mean: Mean log-likelihood of a token, in nats.
        difference: How much higher that is than as it stands, token by token.
        reading: Whether that is beyond the noise.
        rivals: Hypotheses of the same kind that the text does not tell from it.
        by_chance: Whether the text is no witness of it: whichever it prefers, it is no likelier than by chance.
    """

    hypothesis: Hypothesis
    mean: float
    difference: PairedDifference
    reading: Reading
    rivals: tuple[Hypothesis, ...] = ()
    by_chance: bool = False


@dataclass(frozen=True)
class BehaviourStudy:
    """What a text says of a checkpoint.

    Attributes:
        texts: How many sequences.
        tokens: How many tokens were predicted.
        mean: Mean log-likelihood of a token as the checkpoint stands, in nats; None where it was not judged.
        judged: The hypotheses that were asked.
        left_out: Those that were not.
        passes: Forward passes that this took, in whole ones.
        bound: Most that it may take; None for no bound.
        standard_errors: How many of them a difference must have to be told from noise.
        not_judged: Why the text was not asked at all; None where it was.
        chance: Mean log-likelihood of a token where every one is as likely as any other, in nats.
    """

    texts: int
    tokens: int
    mean: float | None = None
    judged: tuple[Judged, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    passes: float = 0.0
    bound: float | None = None
    standard_errors: float = 0.0
    not_judged: str | None = None
    chance: float = 0.0

    @property
    def best(self) -> Judged | None:
        """The one under which the text is likeliest, of those under which it is likelier beyond the noise."""
        better = [judged for judged in self.judged if judged.reading == "better"]
        return max(better, key=lambda judged: judged.difference.mean, default=None)
