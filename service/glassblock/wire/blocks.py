"""`POST /v1/blocks/run`: one block, run with its stages captured."""

from typing import Annotated, Literal

from pydantic import Field

from glassblock.wire.values import (
    Answer,
    BytesRead,
    ComputeDtype,
    FamilyName,
    FamilyRow,
    Flag,
    Nested,
    PlacementName,
    Real,
    Request,
    RunStage,
    Sample,
    Sourced,
    Stage,
    Text,
    TokenIds,
    TowerName,
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


BlockPart = Literal["ffn", "attention", "layer"]


class BlockRunRequest(Request):
    """Run a part of layer `layer` on `x`, on sampled embedding rows, or on what a text makes of it."""

    checkpoint: Annotated[str, Field(min_length=1, max_length=4096, description="path under a root")]
    family: FamilyName = None
    family_row: FamilyRow = None
    tower: TowerName = None
    layer: Whole
    part: Annotated[
        BlockPart,
        Field(description="the feed-forward block; attention, of whole sequences; or the layer, attention first"),
    ] = "ffn"
    expert: Annotated[
        Whole | Literal["shared"] | None, Field(description="one network of a mixture alone, for every row of x")
    ] = None
    x: Annotated[
        Nested | None,
        Field(description="what enters the part, [..., d_model], for attention [..., tokens, d_model]; or a tensor"),
    ] = None
    sample: Sample | None = None
    token_ids: TokenIds = None
    text: Text = None
    capture: Annotated[
        tuple[RunStage, ...] | None, Field(description="stages to answer for; all that the part has when left out")
    ] = None
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
    activation: Annotated[Sourced | None, Field(description="null where no network was run")]
    eps: Annotated[dict[str, Sourced], Field(description="epsilon per norm of the branch")]
    overrides: Annotated[
        dict[str, bool | int | float | str],
        Field(default_factory=dict, description="what the request changed, and nothing else"),
    ]
    stages: dict[RunStage, StageStatistics]
    recombination_error: Annotated[
        float | None,
        Field(description="output recomputed from x and hidden: max |difference| / max |reference|"),
    ]
    recombination: Annotated[
        dict[Stage, float], Field(description="the same from the activated stage on, each from those before it")
    ]
    parameters: Annotated[
        int, Field(description="of the part as run; of a mixture those of the experts that any row chose")
    ]
    hidden_elements: Annotated[int, Field(description="elements of the hidden stage as run, over all experts")]
    token_ids: Annotated[Nested | None, Field(description="of the text that was run, where one was")] = None
    read: BytesRead
    notes: tuple[str, ...] = ()
    tensors: Annotated[
        dict[RunStage, Nested] | None, Field(description="when asked for; in a safetensors answer, the body's own")
    ] = None
