"""What a text says of an audited checkpoint: how likely it is as that stands, and without each possible mistake."""

from typing import Annotated, Literal

from pydantic import Field

from glassblock.wire.values import Answer


class BehaviourHypothesis(Answer):
    """One mistake undone, and how much likelier the text is then."""

    kind: Annotated[
        str, Field(description="swap, eps, offset or activation: of what the mistake is; a newer service may tell more")
    ]
    words: Annotated[str, Field(description="what is otherwise than as it stands")]
    layers: Annotated[tuple[int, ...], Field(description="the layers that are; none where it is about all alike")] = ()
    value: Annotated[str | None, Field(description="epsilon, number or activation that is taken instead")] = None
    weights: Annotated[
        str | None,
        Field(description="what the weights say of these layers: exchanged, undecidable or as-named"),
    ] = None
    mean: Annotated[float, Field(description="log-likelihood of a token, in nats")]
    difference: Annotated[float, Field(description="how much higher that is than as it stands")]
    standard_error: Annotated[
        float | None, Field(description="of the difference, paired token by token, with neighbours correlated")
    ] = None
    reading: Annotated[
        Literal["better", "worse", "undecided"], Field(description="whether the difference is beyond the noise")
    ]
    rivals: Annotated[tuple[str, ...], Field(description="of the same kind, which the text does not tell from it")] = ()


class NotAsked(Answer):
    """A hypothesis that the text was not asked about, and why."""

    words: str
    reason: str


class Behaviour(Answer):
    """A text as a witness beside the weights. It convicts nothing by itself."""

    texts: int
    tokens: Annotated[int, Field(description="predicted: one fewer than a text has")]
    mean: Annotated[float | None, Field(description="log-likelihood of a token as it stands, in nats")] = None
    hypotheses: tuple[BehaviourHypothesis, ...] = ()
    not_asked: tuple[NotAsked, ...] = ()
    forward_passes: Annotated[float, Field(description="through all layers, that the question took")] = 0.0
    bound: Annotated[float | None, Field(description="most that it may take; null for no bound")] = None
    standard_errors: Annotated[
        float,
        Field(description="how many of them tell a difference from noise, for so many hypotheses"),
    ] = 0.0
    not_judged: Annotated[str | None, Field(description="why the text was not asked at all; null where it was")] = None
    notes: Annotated[tuple[str, ...], Field(description="where it agrees with the weights, and where not")] = ()
