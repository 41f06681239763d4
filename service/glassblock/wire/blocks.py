"""`POST /v1/blocks/run`: one block, run with its stages captured."""

from typing import Annotated, Literal

from pydantic import Field

from glassblock.wire.values import (
    Answer,
    BytesRead,
    ComputeDtype,
    Flag,
    Nested,
    PlacementName,
    Real,
    Request,
    Sample,
    Sourced,
    Stage,
    Whole,
)

ALL_STAGES: tuple[Stage, ...] = (
    "x",
    "normed",
    "gate",
    "up",
    "activated",
    "hidden",
    "down",
    "contribution",
    "output",
)


class Overrides(Request):
    """What to change about the block before running it: one request answers one "what if"."""

    eps: Annotated[Real | None, Field(description="epsilon of every norm of the branch")] = None
    activation: Annotated[str | None, Field(description="name of the activation")] = None
    swap: Annotated[Flag, Field(description="exchange gate and up, with their biases")] = False
    norm_offset: Annotated[Real | None, Field(allow_inf_nan=False, description="what is added to the stored gain")] = (
        None
    )
    norm_kind: Annotated[str | None, Field(description="norm arithmetic, by its name in /v1/families")] = None
    placement: Annotated[PlacementName | None, Field(description="where the norm stands")] = None
    width: Annotated[Whole | None, Field(ge=1, description="only the first so many hidden units")] = None
    dtype: Annotated[ComputeDtype | None, Field(description="run every step in this type, as an engine would")] = None


class BlockRunRequest(Request):
    """Run layer `layer`'s feed-forward block on `x`, or on sampled embedding rows."""

    checkpoint: Annotated[str, Field(min_length=1, max_length=4096, description="path under a root")]
    layer: Whole
    part: Literal["ffn"] = "ffn"
    x: Annotated[Nested | None, Field(description="residual stream, [..., d_model]; or the tensor `x`")] = None
    sample: Sample | None = None
    capture: Annotated[tuple[Stage, ...], Field(description="stages to answer for")] = ALL_STAGES
    overrides: Overrides = Overrides()
    return_tensors: Annotated[Flag, Field(description="send the captured tensors themselves")] = False
    dtype: Annotated[
        Literal["float32", "native"], Field(description="of returned tensors: float32, or as computed")
    ] = "float32"


class StageStatistics(Answer):
    """One captured stage in numbers, taken over its finite values."""

    shape: tuple[int, ...]
    dtype: str
    mean: float
    rms: float
    min: float
    max: float
    non_finite: int
    fp16_overflow: Annotated[bool, Field(description="some value lies beyond 65504, the largest float16")]


class BlockRunAnswer(Answer):
    """The stages asked for, and what was done to get them."""

    checkpoint: str
    layer: int
    part: str
    family: str
    verified: Annotated[str, Field(description="how far the family's row was checked against the real model")]
    device: str
    compute_dtype: str
    placement: PlacementName
    activation: Sourced
    eps: Annotated[dict[str, Sourced], Field(description="epsilon per norm of the branch")]
    stages: dict[Stage, StageStatistics]
    recombination_error: Annotated[
        float | None,
        Field(description="output recomputed from x and hidden: max |difference| / max |reference|"),
    ]
    recombination: Annotated[
        dict[Stage, float], Field(description="the same from the activated stage on, each from those before it")
    ]
    parameters: Annotated[int, Field(description="of the feed-forward block as run")]
    hidden_elements: Annotated[int, Field(description="elements of the hidden stage as run")]
    read: BytesRead
    notes: tuple[str, ...] = ()
    tensors: Annotated[
        dict[Stage, Nested] | None, Field(description="when asked for; in a safetensors answer, the body's own")
    ] = None
