"""Which single mistake, or which two, explain captured tensors; bug or rounding is decided by replay, by no tolerance.

The order of the search is that of parsimony. The block as declared, every single mistake, every pair: the fewest
departures at the rounding floor explain the captures. Among hypotheses of as many departures at the floor, and before
one more departure is believed, the sign test of `nearness` decides. What it leaves side by side cannot be told apart
with these tensors.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.block import STAGES
from glassblock.numerics.captures import Captures, checked_captures
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.hypotheses import (
    ALL_SWAPS,
    DECLARED,
    Alternatives,
    Hypothesis,
    Swap,
    joined,
    pairs_of,
    single_mistakes,
)
from glassblock.numerics.nearness import CONVICTS, EXCLUDES, SUSPECTS, Votes
from glassblock.numerics.replay import Replay
from glassblock.numerics.trial import Fit, Trial
from glassblock.numerics.watching import UNWATCHED, Watch
from glassblock.numerics.wiring import Placement, Wiring

Verdict = Literal["as-declared", "explained", "indistinguishable", "unexplained"]

CLOSEST = 5
"""Single mistakes that are told where nothing explains the captures."""


class Explanation(NamedTuple):
    """What explains the captures.

    Attributes:
        verdict: `as-declared`, `explained` (the first of `ranked`), `indistinguishable` (the first `tied` of `ranked`)
            or `unexplained` (`ranked` holds the closest).
        ranked: The best first.
        tied: How many of `ranked` the verdict is about.
        not_excluded: Single mistakes that these tensors cannot tell from what the verdict names.
        captures: What was compared.
        trial: To ask further.
        notes: What was captured and could not be compared, and why.
    """

    verdict: Verdict
    ranked: tuple[Fit, ...]
    tied: int
    not_excluded: tuple[Fit, ...]
    captures: Captures
    trial: Trial
    notes: tuple[str, ...]


def explain(
    given: Mapping[str, Tensor],
    feed_forward: FeedForward,
    wiring: Wiring,
    *,
    alternatives: Alternatives | None = None,
    pairs: bool = True,
    watch: Watch = UNWATCHED,
) -> Explanation:
    """Name the mistake, or the two, that made the captured tensors of a block.

    Args:
        given: Captured stages by name, `[*batch, width]`, any of `STAGES`. `normed` is what the feed-forward network
            read.
        feed_forward: The network as declared.
        wiring: The norms as declared.
        alternatives: What else the block might have been.
        pairs: Whether two mistakes are looked for where one does not explain the captures.
        watch: Told the progress over the hypotheses.

    Raises:
        InvalidValue: The captures cannot be compared; see `checked_captures`.
        ComputationCancelled: As the watch says.
    """
    alternatives = alternatives or Alternatives()
    captures = checked_captures(given, feed_forward)
    wirings = {other.placement.value: other for other in alternatives.wirings} | {"declared": wiring}
    replay = Replay(captures.stages, feed_forward, wirings, captures.dtype, norms=alternatives.norms)
    stages = tuple(stage for stage in STAGES if stage in captures.stages and replay.graph.follows(stage))
    if not stages:
        raise InvalidValue(
            f"nothing can be compared: of {', '.join(captures.stages)} none follows from the others",
            field="captures",
            hint="Capture what a stage is made from as well: x for normed, normed for gate, gate and up for hidden.",
        )
    trial = Trial(replay, captures, stages)
    singles = single_mistakes(feed_forward, wiring, alternatives, swaps=_swaps(replay, stages))
    singles = tuple(single for single in singles if trial.sees(single))
    verdict, tied = _decide(trial, singles, pairs=pairs, watch=watch)
    if verdict == "unexplained":
        return Explanation(verdict, tied, 0, (), captures, trial, tuple(_notes(captures, replay, stages, wiring)))
    named = {fit.hypothesis.function() for fit in tied}
    open_ = tuple(
        fit
        for fit in _rivals(trial, tied[0], singles)
        if fit.hypothesis.function() not in named and trial.votes(tied[0], fit).chance > EXCLUDES
    )
    notes = tuple(_notes(captures, replay, stages, wiring))
    return Explanation(verdict, tied, len(tied), open_, captures, trial, notes)


def _swaps(replay: Replay, stages: tuple[str, ...]) -> tuple[Swap, ...]:
    """The exchanges of gate and up that differ on these stages.

    Where no branch is captured, it is one whether the weights are exchanged or the branches that they feed. An
    exchange of names shows where both sides of the branches do: what they come from, and what is made of them.
    """
    branches = {"gate", "up"} & replay.captures.keys()
    after = any(branches & set(replay.graph.captured_sources(stage)) for stage in stages)
    if not (branches and after and replay.graph.known("gate") and replay.graph.known("up")):
        return ("exchanged",)
    return ALL_SWAPS if branches & set(stages) else ("exchanged", "activation-on-up")


def _decide(
    trial: Trial, singles: tuple[Hypothesis, ...], *, pairs: bool, watch: Watch
) -> tuple[Verdict, tuple[Fit, ...]]:
    declared = trial.declared
    if declared.at_floor:
        rivals = _rivals(trial, declared, singles)
        better = [fit for fit in rivals if trial.votes(fit, declared).chance <= CONVICTS]
        if not better:
            suspects = [fit for fit in rivals if _casts_doubt(trial.votes(fit, declared))]
            if not suspects:
                return "as-declared", (declared,)
            return "indistinguishable", (*_standing(trial, suspects), declared)
    else:
        better = list(_near(trial, singles, watch))
    if not better and pairs:
        better = list(_near(trial, tuple(pairs_of(singles)), watch))
        if better:
            return _named(_standing(trial, better))
    if not better:
        closest = sorted((DECLARED, *singles), key=trial.screened_excess)[:CLOSEST]
        return "unexplained", tuple(sorted((trial.fit(each) for each in closest), key=_by_excess))
    standing = _standing(trial, better)
    # A second mistake is believed only where it comes nearer than the first alone by more than chance.
    if pairs:
        extended = [
            fit for fit in _rivals(trial, standing[0], singles) if trial.votes(fit, standing[0]).chance <= CONVICTS
        ]
        standing = _standing(trial, extended) if extended else standing
    return _named(standing)


def _casts_doubt(votes: Votes) -> bool:
    """Where a rival gives every bit and the declared block does not, a few elements are enough for doubt."""
    return votes.chance <= SUSPECTS or votes.alone_exact


def _named(standing: tuple[Fit, ...]) -> tuple[Verdict, tuple[Fit, ...]]:
    return ("explained" if len(standing) == 1 else "indistinguishable"), standing


def _near(trial: Trial, hypotheses: tuple[Hypothesis, ...], watch: Watch) -> Iterator[Fit]:
    """Those at the floor."""
    for done, hypothesis in enumerate(hypotheses):
        if done % 16 == 0:
            watch.at(done, len(hypotheses), "replaying")
        if trial.comes_near(hypothesis):
            fit = trial.fit(hypothesis)
            if fit.at_floor:
                yield fit


def _rivals(trial: Trial, base: Fit, singles: tuple[Hypothesis, ...]) -> list[Fit]:
    """What departs from `base` in one factor more, at the floor."""
    further = (joined(base.hypothesis, single) for single in singles)
    return list(_near(trial, tuple(each for each in further if each is not None), UNWATCHED))


def _standing(trial: Trial, fits: Iterable[Fit]) -> tuple[Fit, ...]:
    """The nearest, and those that the sign test leaves beside it."""
    ordered = sorted(fits, key=_by_excess)
    first = ordered[0]
    for fit in ordered[1:]:
        if trial.votes(fit, first).chance <= EXCLUDES:
            first = fit
    beside = [fit for fit in ordered if fit is not first and trial.votes(first, fit).chance > EXCLUDES]
    # Of several spellings of one function the plain one is told, where the test leaves it beside the nearest.
    told: dict[Hypothesis, Fit] = {}
    for fit in (first, *beside):
        function = fit.hypothesis.function()
        if function not in told or fit.hypothesis == function:
            told[function] = fit
    return tuple(told.values())


def _by_excess(fit: Fit) -> float:
    return fit.excess


def _notes(captures: Captures, replay: Replay, stages: tuple[str, ...], wiring: Wiring) -> Iterator[str]:
    if len(captures.tokens) < captures.given:
        yield f"{len(captures.tokens)} of {captures.given} tokens were replayed, the quietest of them included"
    used = {source for stage in stages for source in replay.graph.captured_sources(stage)}
    for stage in captures.stages:
        if stage == "output" and wiring.placement is Placement.PARALLEL:
            yield "output: a parallel block adds its other branch as well, which is not known here"
        elif stage not in stages and stage not in used:
            yield f"{stage}: not compared, for what it is made from is not captured"
