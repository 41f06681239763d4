"""`POST /v1/norms/statistics` and `POST /v1/residuals/compare`."""

from typing import Annotated, Literal

from pydantic import Field

from glassblock.wire.values import (
    Answer,
    BytesRead,
    FamilyName,
    FamilyRow,
    Flag,
    Nested,
    Real,
    Request,
    Sample,
    Sourced,
    Tensorial,
    Text,
    TokenIds,
    TowerName,
    Whole,
)

NormRole = Literal["attn_in", "attn_out", "ffn_in", "ffn_out", "final"]


class NormStatisticsRequest(Request):
    """Statistics of `x` and of its norms: with `eps` given, or with a checkpoint's own norm."""

    x: Annotated[Nested | None, Field(description="[..., d]; or the tensor `x`")] = None
    eps: Real | None = None
    gain: Annotated[Nested | None, Field(description="[d]; or the tensor `gain`; ones when absent")] = None
    offset: Annotated[Real, Field(allow_inf_nan=False, description="added to the gain")] = 0.0
    checkpoint: Annotated[str | None, Field(min_length=1, max_length=4096)] = None
    family: FamilyName = None
    family_row: FamilyRow = None
    tower: TowerName = None
    layer: Whole | None = None
    norm: Annotated[NormRole | None, Field(description="which norm of the checkpoint")] = None
    sample: Sample | None = None
    token_ids: TokenIds = None
    text: Text = None
    jacobian: Annotated[Flag, Field(description="also the dense Jacobians, up to a width of 128")] = False


class Differences(Answer):
    """Largest |difference| between two outputs of each norm, per row."""

    rmsnorm: Nested
    layernorm: Nested


class Invariances(Answer):
    """How far each norm's output moves when the row is changed. Zero is an invariance."""

    shift: Annotated[Differences, Field(description="1 added to every channel: LayerNorm does not move")]
    positive_scale: Annotated[Differences, Field(description="twice the row: with eps 0 neither moves")]
    negative_scale: Annotated[Differences, Field(description="-2 times the row: both move, the sign turns")]
    negative_scale_flipped: Annotated[Differences, Field(description="the same, the output with its sign turned")]
    channel_scale: Annotated[Differences, Field(description="factors 1 to 2 over the channels: never an invariance")]


class DtypeFit(Answer):
    """Per row: what a norm that squares and sums in this type would lose."""

    value_overflow: Nested
    square_overflow: Nested
    square_sum_overflow: Nested
    square_underflow: Annotated[Nested, Field(description="every square of a row that is not zero becomes zero")]
    eps_zero: Annotated[bool, Field(description="eps itself becomes zero")]
    eps_subnormal: Annotated[bool, Field(description="eps keeps fewer bits than the type has")]


class NormJacobians(Answer):
    """Closed form, [..., d, d]: row i, column j holds d y_i / d x_j."""

    rmsnorm: Nested
    layernorm: Nested


class NormStatisticsAnswer(Answer):
    """Every value has the shape of `x` without its last axis; outputs and Jacobians keep it."""

    mean: Nested
    square_mean: Nested
    variance: Annotated[Nested, Field(description="biased: divided by d")]
    rms: Nested
    rmsnorm: Tensorial = None
    layernorm: Tensorial = None
    jacobian: NormJacobians | None = None
    jacobian_frobenius: Annotated[dict[str, Nested], Field(description="Frobenius norm of each Jacobian, per row")]
    invariances: Invariances
    dtype_report: Annotated[dict[str, DtypeFit], Field(description="for float16, bfloat16 and float32")]
    eps: Sourced
    norm_kind: str | None = None
    output: Annotated[Tensorial, Field(description="the checkpoint's own norm, in its own arithmetic")] = None
    read: BytesRead | None = None


class ResidualCompareRequest(Request):
    """The same sublayer wired pre-, post- and sandwich-norm: a matrix, or a checkpoint's FFN."""

    x: Annotated[Nested | None, Field(description="[..., d]; or the tensor `x`")] = None
    matrix: Annotated[Nested | None, Field(description="[d, d]: F(x) = matrix @ x; or the tensor `matrix`")] = None
    eps: Real | None = None
    checkpoint: Annotated[str | None, Field(min_length=1, max_length=4096)] = None
    family: FamilyName = None
    family_row: FamilyRow = None
    tower: TowerName = None
    layer: Whole | None = None
    sample: Sample | None = None
    dense_up_to: Annotated[Whole, Field(ge=0, le=512, description="widest d whose Jacobians are written out")] = 128


class JacobianNorms(Answer):
    """What is told of a Jacobian too wide to write out, per token."""

    frobenius: Nested
    trace: Nested


class ResidualCompareAnswer(Answer):
    """Outputs [..., d] and Jacobians [..., d, d] of the three wirings."""

    pre: Tensorial = None
    post: Tensorial = None
    sandwich: Tensorial = None
    pre_jacobian: JacobianNorms | Tensorial = None
    post_jacobian: JacobianNorms | Tensorial = None
    sandwich_jacobian: JacobianNorms | Tensorial = None
    jacobians: Annotated[Literal["dense", "norms"], Field(description="which of the two forms stands above")]
    eps: Sourced
    notes: tuple[str, ...] = ()
    read: BytesRead | None = None
