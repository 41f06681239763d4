"""What would tell two hypotheses apart that the captured tensors leave side by side."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from glassblock.numerics.block import STAGES
from glassblock.numerics.captures import Captures
from glassblock.numerics.explanation import Explanation
from glassblock.numerics.hypotheses import Hypothesis
from glassblock.numerics.nearness import AT_FLOOR, nearness
from glassblock.numerics.replay import HALF, Replay, Way
from glassblock.numerics.trial import Fit


class Decider(NamedTuple):
    """Something to capture.

    Attributes:
        between: The two hypotheses.
        by: `tensor`: another stage; `dtype`: the same in float32; `token`: one of smaller mean square.
        name: The stage, the dtype, or the captured token of smallest mean square by its number.
        mean_square: Of that token's row of `x`, else None.
        needed: For a token: the mean square below which one unit in the last place is moved, else None.
    """

    between: tuple[Hypothesis, Hypothesis]
    by: Literal["tensor", "dtype", "token"]
    name: str
    mean_square: float | None = None
    needed: float | None = None


def deciders(explanation: Explanation, *, most: int = 3) -> tuple[Decider, ...]:
    """What would tell what the verdict names from what stands beside it; for at most so many of the latter."""
    first, *others = explanation.ranked[: max(1, explanation.tied)]
    beside = (*others, *explanation.not_excluded)
    if explanation.verdict == "unexplained":
        return ()
    found: list[Decider] = []
    for other in beside[:most]:
        found.extend(_between(explanation, first, other))
    return tuple(found)


def _between(explanation: Explanation, one: Fit, other: Fit) -> Iterator[Decider]:
    captures, replay = explanation.captures, explanation.trial.replay
    between = (one.hypothesis, other.hypothesis)
    telling = next((stage for stage in STAGES if _tells(replay, stage, between)), None)
    if telling is not None:
        yield Decider(between, "tensor", telling)
    elif captures.dtype in HALF and _wider_tells(explanation, between):
        yield Decider(between, "dtype", "float32")
    if "x" in captures.stages and one.hypothesis.eps != other.hypothesis.eps:
        yield _quietest(explanation, between)


def _tells(replay: Replay, stage: str, between: tuple[Hypothesis, Hypothesis]) -> bool:
    """Whether a stage that was not captured would differ by more than rounding."""
    if stage in replay.captures or not replay.graph.follows(stage):
        return False
    return _apart(replay, replay, stage, between)


def _wider_tells(explanation: Explanation, between: tuple[Hypothesis, Hypothesis]) -> bool:
    wide = explanation.trial.replay.in_dtype(torch.float32)
    return any(_apart(wide, wide, stage, between) for stage in explanation.trial.stages)


def _apart(seen: Replay, replay: Replay, stage: str, between: tuple[Hypothesis, Hypothesis]) -> bool:
    one, other = between
    rounded = tuple(replay.replayed(stage, other, way) for way in (Way.STEPWISE, Way.BACKWARDS))
    captured = seen.replayed(stage, one, Way.STEPWISE)
    return nearness(captured, replay.replayed(stage, other, Way.EXACT), rounded).excess > AT_FLOOR


def _quietest(explanation: Explanation, between: tuple[Hypothesis, Hypothesis]) -> Decider:
    captures: Captures = explanation.captures
    squares = captures.stages["x"].to(torch.float64).square().mean(-1)
    least = int(squares.argmin())
    norms = [norm for norm in explanation.trial.replay.norms if norm is not None]
    declared = norms[0].eps if norms else 0.0
    one, other = (declared if each.eps is None else each.eps for each in between)
    unit = torch.finfo(captures.dtype).eps
    # The scale moves by |e1 - e2| / (2 (ms + e)), which one unit in the last place shows.
    needed = abs(one - other) / (2 * unit)
    return Decider(between, "token", str(captures.tokens[least]), float(squares[least]), needed)
