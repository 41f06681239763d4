"""`POST /v1/blocks/explain`: which mistake explains tensors that were captured elsewhere."""

import re
from typing import Annotated, Literal, get_args

from pydantic import Field

from glassblock.wire.values import (
    Answer,
    BytesRead,
    FamilyName,
    FamilyRow,
    Flag,
    Request,
    Stage,
    TowerName,
    Whole,
)

Verdict = Literal["as-declared", "explained", "indistinguishable", "unexplained"]

CAPTURED_STAGES: tuple[Stage, ...] = get_args(Stage)

_LAYER_FILE = re.compile(r"(?:.*[^0-9A-Za-z])?layers?[ ._-]?(\d{1,7})", re.IGNORECASE)
"""`layer_07.safetensors`, `layers.7.safetensors`, `run3-layer7.safetensors`."""

_LAYERED = re.compile(r"layers\.(0|[1-9]\d{0,6})\.(.+)", re.DOTALL)


def stage_of(name: str) -> tuple[int | None, str]:
    """Layer and stage of a captured tensor's name: `layers.7.gate` is (7, "gate"), `gate` is (None, "gate")."""
    layered = _LAYERED.fullmatch(name)
    return (None, name) if layered is None else (int(layered[1]), layered[2])


def layer_of_file(stem: str) -> int | None:
    """The layer that a file of captures is of, by its name without the suffix; None where it does not say."""
    named = _LAYER_FILE.fullmatch(stem)
    return None if named is None else int(named[1])


class ExplainRequest(Request):
    """Explain the captured stages beside this message, each under its name or with `layers.{layer}.` before it."""

    checkpoint: Annotated[str, Field(min_length=1, max_length=4096, description="path under a root")]
    layer: Whole
    family: FamilyName = None
    family_row: FamilyRow = None
    tower: TowerName = None
    part: Literal["ffn"] = "ffn"
    pairs: Annotated[Flag, Field(description="look for two mistakes where one does not explain the captures")] = True


class Departure(Answer):
    """One factor in which a hypothesis is not the checkpoint as declared."""

    factor: str
    declared: str
    replayed: str
    words: str


class StageFit(Answer):
    """How near a hypothesis comes to one captured stage, replayed from the captured stages before it."""

    stage: Stage
    sources: tuple[Stage, ...]
    residual: Annotated[float, Field(description="relative distance to the replay in float64")]
    floor: Annotated[float, Field(description="what rounding and the order of sums may do of it")]
    excess: Annotated[float, Field(description="residual over floor, token by token; about 1 for the same arithmetic")]
    at_floor: bool


class Votes(Answer):
    """Where two replays differ by rounding alone: how many elements or tokens are nearer to the first of the two."""

    unit: Annotated[str, Field(description="elements, or tokens after a matrix product")]
    differing: int
    won: int
    chance: Annotated[float, Field(description="of at least so many, were both as near (sign test)")]


class RankedHypothesis(Answer):
    """A hypothesis and how near it comes. The numbers are those of its worst stage."""

    hypothesis: Annotated[str, Field(description="in words; 'as declared' without a departure")]
    departures: tuple[Departure, ...] = ()
    residual: float
    floor: float
    excess: float
    at_floor: bool
    stages: tuple[StageFit, ...]
    votes: Annotated[
        Votes | None, Field(description="against the block as declared; of that itself, against the second")
    ] = None


class Decider(Answer):
    """What would tell two hypotheses apart."""

    between: tuple[str, str]
    by: Annotated[str, Field(description="tensor, dtype or token")]
    name: Annotated[str, Field(description="the stage, the dtype, or the captured token of smallest mean square")]
    mean_square: float | None = None
    needed: Annotated[float | None, Field(description="a token of a smaller mean square would tell")] = None
    message: str


class ExplainAnswer(Answer):
    """What explains the captured tensors of one layer."""

    checkpoint: str
    layer: int
    part: str
    family: str
    verified: str
    device: str
    capture_dtype: Annotated[str, Field(description="what the captured values are of, and what was replayed in")]
    tokens: int
    replayed_tokens: int
    captured: tuple[Stage, ...]
    verdict: Verdict
    message: str
    ranked: Annotated[tuple[RankedHypothesis, ...], Field(description="the best first; where unexplained, the closest")]
    tied: Annotated[int, Field(description="how many of `ranked` the verdict is about")]
    not_excluded: Annotated[
        tuple[RankedHypothesis, ...],
        Field(description="further mistakes that these tensors would not show"),
    ] = ()
    would_decide: tuple[Decider, ...] = ()
    read: BytesRead
    notes: tuple[str, ...] = ()
