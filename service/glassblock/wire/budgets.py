"""`POST /v1/budgets`: parameters, activations and arithmetic of a feed-forward block, counted."""

from typing import Annotated, Literal

from pydantic import Field

from glassblock.wire.values import Answer, FamilyName, FamilyRow, Request, TowerName, Whole

Count = Annotated[Whole, Field(ge=1, le=2**40)]
Counts = Count | Annotated[list[Count], Field(min_length=1, max_length=4096)]


class BudgetRequest(Request):
    """Sizes, or a checkpoint to take them from. A list in one size sweeps it."""

    d_model: Counts | None = None
    d_ff: Counts | None = None
    kind: Literal["plain", "gated"] | None = None
    batch: Counts = 1
    tokens: Counts = 1
    layers: Count = 1
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16", "float16", "float8"] | None,
        Field(description="of parameters and activations; the stored one of a checkpoint, else bfloat16"),
    ] = None
    multiple_of: Annotated[Whole, Field(ge=1, le=2**20, description="round the equal-parameter width up to this")] = 256
    checkpoint: Annotated[str | None, Field(min_length=1, max_length=4096)] = None
    family: FamilyName = None
    family_row: FamilyRow = None
    tower: TowerName = None


class ActivationBudget(Answer):
    """One stage, over the whole batch, in one layer."""

    elements: int
    bytes: int


class EqualParameterWidth(Answer):
    """The gated width that spends the parameters of a plain block of width `d_ff`: 2/3 of it."""

    exact: Annotated[str, Field(description="as a fraction")]
    value: float
    rounded: Annotated[int, Field(description="up to the multiple asked for")]
    multiple_of: int


class Budget(Answer):
    """Counts for one set of sizes. Weights only: norms and biases are not in it."""

    d_model: int
    d_ff: int
    kind: Literal["plain", "gated"]
    batch: int
    tokens: int
    layers: int
    dtype: str
    parameters: Annotated[int, Field(description="of all layers")]
    parameters_per_layer: int
    parameter_bytes: int
    hidden_elements: Annotated[int, Field(description="of one branch, in one layer, over the whole batch")]
    activations: Annotated[dict[str, ActivationBudget], Field(description="per stage, in one layer")]
    macs_per_token: Annotated[int, Field(description="multiply-accumulates, per token and layer")]
    flops_per_token: Annotated[int, Field(description="2 per multiply-accumulate, per token and layer")]
    flops: Annotated[int, Field(description="whole batch, all layers")]
    equal_parameter_width: EqualParameterWidth


class BudgetAnswer(Budget):
    """The budget; when a size was a list, its first point here and every point in `sweep`."""

    swept: str | None = None
    sweep: tuple[Budget, ...] = ()
    note: str = "Element counts are not peak memory: what lives at once depends on the engine."
