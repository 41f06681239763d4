"""What every message on the wire has in common.

Strict when writing: a request with a field that nobody reads is a typo, and is refused.
Lenient when reading: an answer may come from a newer service that added a field.
NaN and infinity travel as the strings "NaN", "Infinity" and "-Infinity", never as null.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = "1"
SCHEMA_HEADER = "Glassblock-Schema"
"""Header of every answer: the schema version of the service."""

Stage = Literal["x", "normed", "gate", "up", "activated", "hidden", "down", "contribution", "output"]
RunStage = Literal[
    "x",
    "attention_normed",
    "attention_query",
    "attention_key",
    "attention_value",
    "attention_attended",
    "attention_projected",
    "attention_contribution",
    "middle",
    "normed",
    "gate",
    "up",
    "activated",
    "hidden",
    "router_logits",
    "chosen",
    "weights",
    "routed",
    "shared",
    "down",
    "contribution",
    "output",
]
"""What a run may answer for: the nine of a feed-forward block, what a mixture has beside them, and attention's."""

PlacementName = Literal["pre", "post", "sandwich", "parallel", "branch-output"]
ComputeDtype = Literal["float32", "float64", "bfloat16", "float16"]

Whole = Annotated[int, Field(strict=True)]
"""A whole number; neither a text nor a truth value stands for one."""

Real = Annotated[float, Field(strict=True)]
"""A number; neither a text nor a truth value stands for one."""

Flag = Annotated[bool, Field(strict=True)]
"""true or false, in these words."""

Nested = Annotated[Any, Field(description="numbers nested in lists, the last axis innermost")]
"""A small tensor as JSON: a number, or lists of lists of numbers, rectangular."""

Tensorial = Annotated[Any, Field(description="as `Nested`; in a safetensors answer it is a tensor of this name")]
"""What is large enough to travel as a tensor: null in the message of a safetensors answer."""


class Request(BaseModel):
    """Base of what a caller sends."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings", frozen=True)


class Answer(BaseModel):
    """Base of what a service sends back."""

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="strings", frozen=True)


FamilyName = Annotated[
    str | None, Field(max_length=200, description="row of the family table, instead of what the config says")
]
FamilyRow = Annotated[
    dict[str, Any] | None, Field(description="a row of your own, as docs/adding-a-family.md describes, instead of one")
]
TowerName = Annotated[
    str | None, Field(max_length=200, description="another stack of layers in the files, such as `encoder`")
]


TokenIds = Annotated[
    tuple[Whole, ...] | tuple[tuple[Whole, ...], ...] | None,
    Field(description="a text as token ids from its first token, or several of one length; the layers below are run"),
]
Text = Annotated[
    str | None,
    Field(min_length=1, max_length=1_000_000, description="the same, tokenised with the checkpoint's tokenizer.json"),
]


class Sample(Request):
    """Rows of the checkpoint's own embedding, drawn without replacement, as input."""

    rows: Annotated[Whole, Field(ge=1, le=65_536, description="how many rows")]
    seed: Annotated[Whole, Field(ge=0, le=2**63 - 1, description="seed of the draw")] = 0


class Sourced(Answer):
    """A value with the place it came from."""

    value: float | int | str | bool
    source: Annotated[str, Field(description="file and key, 'override', or 'default of family NAME'")]


class BytesRead(Answer):
    """What was read from disk for this answer."""

    bytes: int
    tensors: int
