"""Hypotheses held against the captured stages, each measured where it can be seen and nowhere twice."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from glassblock.numerics.captures import Captures
from glassblock.numerics.hypotheses import DECLARED, Hypothesis
from glassblock.numerics.nearness import AT_FLOOR, Nearness, Votes, element_votes, nearness, sign_test
from glassblock.numerics.replay import Replay, Way
from glassblock.numerics.stage_graph import Key

SCREENED_TOKENS = 8
"""Tokens on which a hypothesis must come near before it is replayed in full."""

SCREEN_MARGIN = 16.0
"""How far above the declared block's floor a hypothesis may stay there, in units of `AT_FLOOR`: floors of two
hypotheses differ, by less than this."""

_ROUNDED = (Way.STEPWISE, Way.BACKWARDS, Way.FUSED)


class StageFit(NamedTuple):
    """How near a hypothesis comes to one captured stage, replayed from `sources`."""

    stage: str
    sources: tuple[str, ...]
    residual: float
    floor: float
    excess: float


class Fit(NamedTuple):
    """How near a hypothesis comes to all captured stages; the numbers are those of its worst stage.

    Attributes:
        hypothesis: What was replayed.
        residual: Relative distance to the float64 replay.
        floor: What rounding may do of it.
        excess: Residual over floor, token by token.
        stages: Every stage that could be replayed.
    """

    hypothesis: Hypothesis
    residual: float
    floor: float
    excess: float
    stages: tuple[StageFit, ...]

    @property
    def at_floor(self) -> bool:
        """Whether rounding explains the residual of every stage."""
        return self.excess <= AT_FLOOR


class _Elements(NamedTuple):
    """Votes of one stage's elements, and whether one of the two replays alone gives all of its bits."""

    differing: int
    won: int
    alone_exact: bool
    other_exact: bool


class Trial:
    """The captured stages that can be replayed, and what hypotheses made of them so far.

    Args:
        replay: Of all tokens.
        captures: What it starts from.
        stages: The captured stages that can be replayed, in their order.
    """

    def __init__(self, replay: Replay, captures: Captures, stages: tuple[str, ...]) -> None:
        self.replay = replay
        self.stages = stages
        self._captured = captures.stages
        count = len(captures.tokens)
        few = min(count, SCREENED_TOKENS)
        self._few = torch.tensor([index * (count - 1) // max(1, few - 1) for index in range(few)])
        self._screen = replay.of_tokens(self._few)
        self._near: dict[tuple[str, Key], Nearness] = {}
        self._screened: dict[tuple[str, Key], float] = {}

    def sees(self, hypothesis: Hypothesis) -> bool:
        """Whether some replayed stage depends on a factor in which the hypothesis departs."""
        touched = {factor for stage in self.stages for factor in self.replay.graph.factors(stage)}
        return bool(hypothesis.departures().keys() & touched)

    @property
    def declared(self) -> Fit:
        """The block as declared."""
        return self.fit(DECLARED)

    def fit(self, hypothesis: Hypothesis) -> Fit:
        """Measure a hypothesis on every stage."""
        stages = tuple(self._stage_fit(stage, hypothesis) for stage in self.stages)
        worst = max(stages, key=lambda stage: stage.excess)
        return Fit(hypothesis, worst.residual, worst.floor, worst.excess, stages)

    def comes_near(self, hypothesis: Hypothesis) -> bool:
        """Whether the hypothesis may be at the floor, by a few tokens. What was measured before is asked first."""
        limit = AT_FLOOR * SCREEN_MARGIN
        keys = [(stage, self.replay.graph.key(stage, hypothesis)) for stage in self.stages]
        if any(self._screened.get(key, 0.0) > limit for key in keys):
            return False
        return all(self._screen_stage(stage, hypothesis) <= limit for stage in self.stages)

    def screened_excess(self, hypothesis: Hypothesis) -> float:
        """How far the hypothesis is above the declared block's floor, on a few tokens."""
        return max(self._screen_stage(stage, hypothesis) for stage in self.stages)

    def votes(self, one: Fit, other: Fit) -> Votes:
        """Where two hypotheses differ by rounding alone: how often the one is nearer, and the chance of that.

        Elements vote where no matrix product was replayed, whose rounding would be shared by a whole token; else
        tokens do. Of the two the more telling.
        """
        told = [stage for stage in self.stages if self._key(stage, one) != self._key(stage, other)]
        plain = [stage for stage in told if not self.replay.graph.has_product(stage)]
        counts = [self._elements(stage, one.hypothesis, other.hypothesis) for stage in plain]
        exact = [count.alone_exact for count in counts]
        by_element = sign_test("elements", sum(count.differing for count in counts), sum(count.won for count in counts))
        by_element = by_element._replace(alone_exact=any(exact) and not any(count.other_exact for count in counts))
        products = [stage for stage in told if self.replay.graph.has_product(stage)]
        if not products:
            return by_element
        by_token = self._tokens(products, one.hypothesis, other.hypothesis)
        return min(by_element, by_token._replace(alone_exact=by_element.alone_exact), key=lambda votes: votes.chance)

    def _elements(self, stage: str, one: Hypothesis, other: Hypothesis) -> _Elements:
        """In the way that comes nearest to the capture for both, so that they differ by the hypothesis alone."""
        both = self._nearness(stage, one).distances.sum(-1) + self._nearness(stage, other).distances.sum(-1)
        way = _ROUNDED[int(both.nan_to_num(nan=torch.inf).argmin())]
        captured = self._captured[stage]
        mine, theirs = (self._rounded(stage, hypothesis, way) for hypothesis in (one, other))
        steady = torch.ones_like(captured, dtype=torch.bool)
        for hypothesis in (one, other):
            forwards, backwards = (self._rounded(stage, hypothesis, each) for each in (Way.STEPWISE, Way.BACKWARDS))
            steady &= forwards == backwards
        differing, won = element_votes(captured, mine, theirs, steady)
        exact = torch.equal(mine, captured), torch.equal(theirs, captured)
        return _Elements(differing, won, exact[0] and not exact[1], exact[1] and not exact[0])

    def _tokens(self, stages: list[str], one: Hypothesis, other: Hypothesis) -> Votes:
        """Each way of rounding by itself, and of the ways the one that tells least: the engine's may be another."""
        sides: list[Tensor] = []
        for hypothesis in (one, other):
            near = [self._nearness(stage, hypothesis) for stage in stages]
            units = [self._nearness(stage, one).floors.square() for stage in stages]
            sides.append(torch.stack([each.distances / unit for each, unit in zip(near, units, strict=True)]).sum(0))
        mine, theirs = sides
        tests = [
            sign_test("tokens", int((near != far).sum()), int((near < far).sum()))
            for near, far in zip(mine, theirs, strict=True)
        ]
        return max(tests, key=lambda votes: votes.chance)

    def _rounded(self, stage: str, hypothesis: Hypothesis, way: Way) -> Tensor:
        return self.replay.replayed(stage, hypothesis, way).to(self._captured[stage].dtype)

    def _key(self, stage: str, fit: Fit) -> Key:
        return self.replay.graph.key(stage, fit.hypothesis)

    def _stage_fit(self, stage: str, hypothesis: Hypothesis) -> StageFit:
        near = self._nearness(stage, hypothesis)
        return StageFit(stage, self.replay.graph.captured_sources(stage), near.residual, near.floor, near.excess)

    def _nearness(self, stage: str, hypothesis: Hypothesis) -> Nearness:
        key = (stage, self.replay.graph.key(stage, hypothesis))
        if key not in self._near:
            exact = self.replay.replayed(stage, hypothesis, Way.EXACT)
            rounded = tuple(self.replay.replayed(stage, hypothesis, way) for way in _ROUNDED)
            self._near[key] = nearness(self._captured[stage], exact, rounded)
        return self._near[key]

    def _screen_stage(self, stage: str, hypothesis: Hypothesis) -> float:
        key = (stage, self.replay.graph.key(stage, hypothesis))
        if key not in self._screened:
            declared = self._nearness(stage, DECLARED)
            floors = (declared.floors / declared.scales)[self._few]
            wide = self._screen.replayed(stage, hypothesis, Way.WIDE).to(torch.float64)
            seen = self._captured[stage][self._few].to(torch.float64)
            scales = wide.square().mean(-1).sqrt().clamp(min=torch.finfo(torch.float64).tiny)
            errors = (seen - wide).square().mean(-1).sqrt() / scales
            excess = float((errors / floors).square().mean().sqrt())
            self._screened[key] = math.inf if math.isnan(excess) else excess
        return self._screened[key]
