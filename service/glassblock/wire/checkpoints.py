"""`/v1/checkpoints`: what lies under the roots, and what is resident on the device."""

from typing import Annotated

from pydantic import Field

from glassblock.wire.values import Answer, Request, Whole


class DeclaredEps(Answer):
    """One place that states an epsilon, or the default that stands in for it."""

    norms: Annotated[tuple[str, ...], Field(description="roles of the norms that take it; none: nobody reads it")]
    value: float
    source: str


class Residency(Answer):
    """What of a checkpoint is held on the device."""

    device: str
    layers: tuple[int, ...]
    bytes: int


class Fault(Answer):
    """A fault of the container, the index or the config, as the audit names it."""

    rule: str
    message: str
    file: str | None = None
    tensor: str | None = None
    byte: int | None = None


class CheckpointSummary(Answer):
    """One line of the list."""

    name: str
    family: str | None
    layers: int | None
    tensors: int
    bytes: int
    faults: int
    dtypes: Annotated[dict[str, int], Field(default_factory=dict, description="tensors per stored type")]


class CheckpointList(Answer):
    """Everything under the configured roots."""

    checkpoints: tuple[CheckpointSummary, ...]
    notes: Annotated[tuple[str, ...], Field(description="what the list leaves out, where it does")] = ()


class FamilyFit(Answer):
    """How a family fits the tensors, by the names and shapes of the first and last layer."""

    family: str
    fits: bool
    missing: Annotated[tuple[str, ...], Field(description="names that the family has and the files have not")]
    unexpected: Annotated[tuple[str, ...], Field(description="networks and norms that the family has not")]
    why: str


class CheckpointDetail(Answer):
    """Told from headers and configs alone: no tensor is read."""

    name: str
    family: str | None
    verified: str | None
    layers: int | None
    d_model: int | None
    d_ff: int | None
    vocabulary: int | None
    tensors: int
    bytes: int
    dtypes: Annotated[dict[str, int], Field(description="tensors per stored type")]
    files: tuple[str, ...]
    shapes: Annotated[dict[str, tuple[int, ...]], Field(description="of every tensor")]
    eps: tuple[DeclaredEps, ...]
    residency: Residency | None
    faults: tuple[Fault, ...]
    fits: Annotated[
        tuple[FamilyFit, ...], Field(description="where the family is unknown, or not that of the tensors")
    ] = ()
    notes: tuple[str, ...] = ()


class ResidencyRequest(Request):
    """Which layers to hold; all of them when left out."""

    layers: tuple[Whole, ...] | None = None
