"""`POST /v1/plan`: what a request would read, hold and compute, without doing it."""

from typing import Annotated, Any, Literal

from pydantic import Field

from glassblock.wire.values import Answer, Request, Whole

PlannedOperation = Literal[
    "run_block",
    "explain_block",
    "norm_statistics",
    "compare_residuals",
    "jacobians",
    "likelihoods",
    "start_audit",
    "repair",
    "selftest",
]


class TensorShape(Request):
    """A tensor that would come in the body."""

    dtype: Annotated[
        Literal["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"], Field(description="safetensors' type code")
    ] = "F32"
    shape: Annotated[tuple[Annotated[Whole, Field(ge=0, le=2**48)], ...], Field(max_length=32)]


class PlanRequest(Request):
    """A request that is not made: its operation, its message, and the shapes of its tensors."""

    operation: Annotated[PlannedOperation, Field(description="as the client's method is called")]
    request: Annotated[dict[str, Any], Field(description="the message as it would be sent there")]
    tensors: Annotated[
        dict[Annotated[str, Field(max_length=200)], TensorShape],
        Field(max_length=1024, description="of the body's tensors, by name"),
    ] = Field(default_factory=dict)


class PlanAnswer(Answer):
    """Estimates from headers and shapes alone; no tensor is read."""

    operation: PlannedOperation
    device: str
    bytes_read: Annotated[int, Field(description="of tensor data but for norms, where nothing of it is resident")]
    peak_bytes: Annotated[
        int, Field(description="of the device at the peak, weights included; at most twice what is needed")
    ]
    flops: Annotated[int, Field(description="of the products of matrices; 2 for each multiply-accumulate")]
    budget_bytes: Annotated[int, Field(description="that may be used of the device")]
    in_use_bytes: Annotated[int, Field(description="reserved by what runs now")]
    resident_bytes: Annotated[int, Field(description="of blocks that lie there; those not pinned make room")]
    fits: Annotated[
        Literal["now", "later", "never"],
        Field(description="later: the request would be told to come back (503); never: it is too large (413)"),
    ]
    notes: tuple[str, ...] = ()
