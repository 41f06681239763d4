"""What a text says of a checkpoint, in the same words in every format for people."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from glassblock.reports.ranges import layer_ranges
from glassblock.wire.behaviour import Behaviour, BehaviourHypothesis
from glassblock.wire.printable import printable

LISTED_UP_TO = 20

HEADS = ("hypothesis", "nats per token", "standard error", "the text", "the weights")
"""Of a table of `behaviour_cells`."""

READINGS = {"better": "prefers it", "worse": "speaks against it", "undecided": "does not tell"}


def behaviour_title(behaviour: Behaviour) -> str:
    """The likelihood as it stands, in a line; or why there is none."""
    if behaviour.not_judged is not None:
        return printable(f"behaviour: not judged: {behaviour.not_judged}")
    texts = "" if behaviour.texts == 1 else f" of {behaviour.texts:,} texts"
    return (
        f"behaviour: mean log-likelihood {behaviour.mean:.4f} nats per token over {behaviour.tokens:,} tokens{texts}; "
        f"{behaviour.forward_passes:.3g} forward passes"
    )


def behaviour_lines(behaviour: Behaviour) -> Iterator[str]:
    """Every hypothesis that is told, what was not asked, and the notes, a line each."""
    shown = told(behaviour)
    for hypothesis in shown:
        words, difference, error, reading, weights = behaviour_cells(hypothesis)
        beside = f"; the weights: {weights}" if weights else ""
        better = hypothesis.reading == "better"
        rivals = f"; as likely: {', '.join(hypothesis.rivals)}" if better and hypothesis.rivals else ""
        yield printable(f"{words}: {difference} ± {error} nats, the text {reading}{beside}{rivals}")
    if len(behaviour.hypotheses) > len(shown):
        yield f"and {len(behaviour.hypotheses) - len(shown):,} more; the JSON report lists all"
    yield from not_asked(behaviour)
    yield from map(printable, behaviour.notes)


def told(behaviour: Behaviour) -> Sequence[BehaviourHypothesis]:
    """The hypotheses that are shown: those that the text prefers, then the others as they were asked."""
    order = sorted(behaviour.hypotheses, key=lambda one: -one.difference if one.reading == "better" else 0.0)
    return order[:LISTED_UP_TO]


def behaviour_cells(hypothesis: BehaviourHypothesis) -> tuple[str, str, str, str, str]:
    """Words, difference, standard error, what the text says and what the weights say."""
    error = "-" if hypothesis.standard_error is None else f"{hypothesis.standard_error:.2g}"
    return (
        printable(hypothesis.words),
        f"{hypothesis.difference:+.3g}",
        error,
        READINGS[hypothesis.reading],
        printable((hypothesis.weights or "").replace("-", " ")),
    )


def not_asked(behaviour: Behaviour) -> Iterator[str]:
    """What the text was not asked, one line for each reason."""
    by_reason = sorted(behaviour.not_asked, key=lambda one: one.reason)
    for reason, group in groupby(by_reason, key=lambda one: one.reason):
        words = [one.words for one in group]
        layers = [int(found) for one in words if (found := one.partition("of layer ")[2].partition(" ")[0]).isdigit()]
        if len(layers) == len(words) > 1:
            words = [f"gate and up exchanged in one of {layer_ranges(layers)}"]
        more = f" and {len(words) - 3:,} more" if len(words) > 3 else ""
        yield printable(f"not asked: {'; '.join(words[:3])}{more}: {reason}")
