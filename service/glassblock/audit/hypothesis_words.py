"""Hypotheses, and what explains captures, in words."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from glassblock.numerics.deciders import Decider
from glassblock.numerics.explanation import Explanation
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.hypotheses import NORM_FACTORS, Hypothesis
from glassblock.numerics.wiring import Wiring

AS_DECLARED = "as declared"


class Declared(NamedTuple):
    """The block that a hypothesis departs from."""

    feed_forward: FeedForward
    wiring: Wiring


def in_words(hypothesis: Hypothesis, declared: Declared) -> str:
    """All departures in one line."""
    return ", and ".join(words for *_, words in departures_in_words(hypothesis, declared)) or AS_DECLARED


def departures_in_words(hypothesis: Hypothesis, declared: Declared) -> Iterator[tuple[str, str, str, str]]:
    """Factor, declared value, replayed value and a sentence, for each departure."""
    scope = "" if hypothesis.norms == "every" else f" in the {hypothesis.norms} norm"
    for factor, value in hypothesis.departures().items():
        words = _WORDS[factor](value)
        told = f"{value:g}" if isinstance(value, float) else str(value)
        was = _declared(factor, declared)
        yield factor, was, told, words + (scope if factor in NORM_FACTORS else "")


def explanation_in_words(explanation: Explanation, declared: Declared) -> str:
    """The verdict in a sentence."""
    first = explanation.ranked[0]
    named = in_words(first.hypothesis, declared)
    match explanation.verdict:
        case "as-declared":
            return "the captured tensors are those of the block as declared, to the last rounding"
        case "explained":
            count = len(first.hypothesis.departures())
            return f"{'one mistake explains' if count == 1 else 'two mistakes explain'} the captured tensors: {named}"
        case "indistinguishable":
            told = "; or ".join(in_words(fit.hypothesis, declared) for fit in explanation.ranked)
            return f"these tensors cannot tell apart: {told}"
        case _:
            worst = max(first.stages, key=lambda stage: stage.excess)
            return (
                f"no hypothesis explains the captured tensors; the closest is '{named}', whose {worst.stage} is"
                f" {worst.residual:.2g} off where rounding does {worst.floor:.2g}"
            )


def decider_in_words(decider: Decider) -> str:
    """What would tell two hypotheses apart."""
    says: Mapping[str, Callable[[], str]] = {
        "tensor": lambda: f"capture {decider.name} as well: there the two differ",
        "dtype": lambda: f"capture in {decider.name}: there the two differ",
        "token": lambda: (
            f"capture a token whose mean square of x is below {decider.needed:.2g}; the smallest here is"
            f" {decider.mean_square:.2g}, of token {decider.name}, and in the first layers they are smallest"
        ),
    }
    return says[decider.by]()


def _declared(factor: str, declared: Declared) -> str:
    network, wiring = declared
    norms = [norm for norm in wiring.norms if norm is not None]
    kinds = ", ".join(dict.fromkeys(norm.kind.name for norm in norms))
    held = {
        "activation": network.activation.name,
        "combine": network.gating.name,
        "eps": ", ".join(dict.fromkeys(f"{norm.eps:g}" for norm in norms)),
        "offset": ", ".join(dict.fromkeys(f"{norm.kind.offset:g}" for norm in norms)),
        "cast": kinds,
        "norm_kind": kinds,
        "placement": wiring.placement.value,
    }
    return held[factor] if factor in held else _PLAIN[factor]


_PLAIN: Mapping[str, str] = {
    "swap": "none",
    "layout": "gate first, then up",
    "both_activated": "False",
    "clamp": "applied",
    "eps_place": "inside",
    "norm_bias": "applied",
    "norm_passes": "once",
    "norm_from": "ffn_in",
    "transposed": "none",
    "network_bias": "applied",
    "residual": "stream",
    "scales": "applied",
}

_SWAPS = {
    "exchanged": "gate and up are exchanged",
    "activation-on-up": "gate and up are exchanged where they meet: the activation is on up",
    "labels": "gate and up are exchanged by name only: what was captured as the one is the other",
}
_CASTS = {
    "before": "the norm's gain is multiplied before the cast",
    "after": "the norm's gain is multiplied after the cast",
}
_KINDS = {"layernorm": "LayerNorm in place of RMSNorm", "rmsnorm": "RMSNorm in place of LayerNorm"}
_RESIDUALS = {
    "normed": "the contribution is added to the normed stream",
    "absent": "the residual stream is not added",
}


def _layout(value: object) -> str:
    told = str(value)
    name, written = told.removesuffix("-written").removesuffix("-up-first"), told.endswith("-written")
    blocks = name.removeprefix("blocks-")
    halves = "up and gate" if told.endswith("-up-first") else "gate and up"
    layout = "neuron by neuron" if name == "interleaved" else f"in the blocks of {blocks} tensor-parallel ranks"
    return (
        f"gate and up were written {layout}, and read as two halves"
        if written
        else f"the two halves {halves} were read {layout}"
    )


def _offset(value: object) -> str:
    return "1 is added to the norm's gain once too often" if value == 1.0 else "1 is missing from the norm's gain"


_WORDS: Mapping[str, Callable[[object], str]] = {
    "swap": lambda value: _SWAPS[str(value)],
    "layout": _layout,
    "activation": lambda value: f"the activation is {value}",
    "combine": lambda _: "gate and up are added, not multiplied",
    "both_activated": lambda _: "the activation is on both branches",
    "clamp": lambda _: "the gating's clamp is dropped",
    "eps": lambda value: f"eps is {value:g}",
    "eps_place": lambda _: "eps is outside the root",
    "offset": _offset,
    "norm_bias": lambda _: "the norm's bias is dropped",
    "cast": lambda value: _CASTS[str(value)],
    "norm_kind": lambda value: _KINDS[str(value)],
    "norm_passes": lambda _: (
        "rows are normalised twice, the first time without the gain, which changes next to nothing"
    ),
    "norm_from": lambda value: f"the norm {value} is used in place of ffn_in",
    "placement": lambda value: f"the norm is placed as in a {value} block",
    "transposed": lambda value: f"{value} is used transposed",
    "network_bias": lambda _: "the biases of the network are dropped",
    "residual": lambda value: _RESIDUALS[str(value)],
    "scales": lambda _: "the multipliers of stream and branch are dropped",
}
"""One row per factor of `Hypothesis`."""
