"""`/v1/audits`: the job, and the versioned report it ends with."""

from typing import Annotated, Any, Literal

from pydantic import Field

from glassblock.wire.values import SCHEMA_VERSION, Answer, Flag, Request

Level = Literal["error", "warning", "note"]
Certainty = Literal["proved", "statistical", "conflict", "risk"]
Verdict = Literal["pass", "fail", "inconclusive"]
JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]

ENDED: frozenset[JobState] = frozenset({"succeeded", "failed", "cancelled"})


class AuditRequest(Request):
    """Audit a checkpoint, with every rule or with those named."""

    checkpoint: Annotated[str, Field(min_length=1, max_length=4096, description="path under a root")]
    family: Annotated[str | None, Field(description="row of the family table, when no config names one")] = None
    against: Annotated[dict[str, Any] | None, Field(description="another engine's config, as an object")] = None
    against_name: Annotated[str, Field(max_length=8192, description="what to call that config")] = "against"
    rules: Annotated[tuple[str, ...] | None, Field(min_length=1, description="all rules when left out")] = None
    certify: Annotated[Flag, Field(description="compute the certified bound of every tensor, not of suspects")] = False


class Progress(Answer):
    """How far a job has come."""

    done: int
    total: int
    message: str = ""


class Fix(Answer):
    """How to repair what a finding names."""

    action: str
    description: str
    tensors: tuple[str, ...] = ()


class Finding(Answer):
    """One mistake, where it is, how sure that is, and the repair."""

    rule: str
    level: Level
    certainty: Certainty
    layer: int | None = None
    expert: int | None = None
    tensors: tuple[str, ...] = ()
    file: str | None = None
    byte: int | None = None
    message: str
    evidence: dict[str, Any] = Field(default_factory=dict)
    fix: Fix | None = None


class Undecidable(Answer):
    """A question the evidence does not settle, and what would."""

    layer: int | None = None
    reason: str
    would_decide: str


class Skipped(Answer):
    """A question not asked, and why."""

    layer: int | None = None
    reason: str


class Coverage(Answer):
    """What one rule looked at. Silence means checked."""

    rule: str
    checked: Annotated[int, Field(description="how many layers, tensors or files were decided")]
    undecidable: tuple[Undecidable, ...] = ()
    skipped: tuple[Skipped, ...] = ()


class LayerMetrics(Answer):
    """Numbers of one layer, for tables and pictures."""

    layer: int
    metrics: dict[str, float | int | str | None]


class AuditedCheckpoint(Answer):
    """What was audited."""

    path: str
    family: str | None
    verified: str | None = None
    layers: int | None
    tensors: int
    bytes: int


class Report(Answer):
    """The audit's result. `schema_version` changes when a reader would have to."""

    schema_version: str = SCHEMA_VERSION
    glassblock: Annotated[str, Field(description="version of the tool that wrote it")]
    checkpoint: AuditedCheckpoint
    verdict: Verdict
    findings: tuple[Finding, ...]
    coverage: tuple[Coverage, ...]
    layers: tuple[LayerMetrics, ...]


class Audit(Answer):
    """An audit as a job."""

    id: str
    state: JobState
    checkpoint: str
    progress: Progress
    report: Report | None = None
    problem: Annotated[dict[str, Any] | None, Field(description="problem document, when it failed")] = None


class AuditList(Answer):
    """Jobs of this service, the newest first, without their reports."""

    audits: tuple[Audit, ...]
