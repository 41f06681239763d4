"""`/v1/audits`: the job, and the versioned report it ends with."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field

from glassblock.wire.behaviour import Behaviour
from glassblock.wire.values import SCHEMA_VERSION, Answer, FamilyName, FamilyRow, Flag, Request, Text, TokenIds

Level = Literal["error", "warning", "note"]
Certainty = Literal["proved", "statistical", "conflict", "risk"]
Verdict = Literal["pass", "fail", "inconclusive"]
Relation = Literal["identical", "form", "function", "fine-tune", "other-model", "unanswered"]
"""What a checkpoint is to a reference: equal; equal but for names, layout and rounding; the same model with other
numbers in places, or in all of them; another model; or it could not be told."""
JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]

ENDED: frozenset[JobState] = frozenset({"succeeded", "failed", "cancelled"})

CheckpointName = Annotated[str, Field(min_length=1, max_length=4096)]
Digest = Annotated[
    Literal["fast", "sha256", "none"],
    Field(description="of each tensor's bytes: fast, or one that cannot be forged"),
]


class AuditRequest(Request):
    """Audit a checkpoint, with every rule or with those named."""

    checkpoint: Annotated[str, Field(min_length=1, max_length=4096, description="path under a root")]
    family: FamilyName = None
    family_row: FamilyRow = None
    against: Annotated[dict[str, Any] | None, Field(description="another engine's config, as an object")] = None
    against_name: Annotated[str, Field(max_length=8192, description="what to call that config")] = "against"
    rules: Annotated[tuple[str, ...] | None, Field(min_length=1, description="all rules when left out")] = None
    certify: Annotated[
        Flag, Field(description="certify every tensor, not suspects alone, and ask a text of every layer")
    ] = False
    digest: Digest = "fast"
    reference: Annotated[
        CheckpointName | Annotated[tuple[CheckpointName, ...], Field(min_length=1, max_length=16)] | None,
        Field(description="another checkpoint to compare with; or several, to tell which tensors are made of which"),
    ] = None
    captures: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=4096,
            description="tensors captured in an engine, to explain layer by layer: a safetensors file or a folder of "
            "them under a root",
        ),
    ] = None
    token_ids: TokenIds = None
    text: Text = None


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


class Location(Answer):
    """Where the bytes of one tensor lie; a tensor that lies in several files has several."""

    tensor: str
    file: str
    byte_offset: Annotated[int, Field(description="first byte, from the start of the file")]
    byte_length: int


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
    locations: Annotated[tuple[Location, ...], Field(description="of its tensors, where they are in a file")] = ()
    known: Annotated[bool, Field(description="accepted by a baseline: it fails no pipeline")] = False


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
    layers: Annotated[int | None, Field(description="how many the tensors show")]
    declared_layers: Annotated[
        int | None, Field(description="how many the config declares, or the family by default")
    ] = None
    tensors: int
    bytes: int


class KnownFinding(Answer):
    """A finding as a baseline remembers it: by what it is, not by the words and numbers that told it."""

    rule: str
    level: Level
    layer: int | None = None
    expert: int | None = None
    tensors: tuple[str, ...] = ()
    file: str | None = None


class Comparison(Answer):
    """What became of a baseline's findings that this report does not have."""

    baseline: Annotated[str, Field(description="what the baseline is called")]
    fixed: Annotated[tuple[KnownFinding, ...], Field(description="looked for again, and gone")] = ()
    unseen: Annotated[tuple[KnownFinding, ...], Field(description="not looked for this time")] = ()


class FormDifference(Answer):
    """Tensors that lie otherwise than in the reference and mean the same."""

    kind: str
    words: str
    tensors: Annotated[int, Field(description="how many tensors, or parts of them")]
    examples: tuple[str, ...] = ()


class FunctionDifference(Answer):
    """Tensors that make the model compute something else than the reference."""

    kind: str
    words: str
    layer: int | None = None
    expert: int | Literal["shared"] | None = None
    tensors: tuple[str, ...] = ()
    counterparts: Annotated[tuple[str, ...], Field(description="their names in the reference")] = ()
    relative_difference: Annotated[float | None, Field(description="|here - there| / |there|")] = None
    cosine: float | None = None


class LayerCosine(Answer):
    """How near a layer is to its counterpart."""

    layer: int
    least: Annotated[float, Field(description="least cosine of its matrices with their counterparts")]


class ReferenceSummary(Answer):
    """What a comparison with another checkpoint showed."""

    checkpoint: Annotated[str, Field(description="what the reference is called")]
    family: str | None = None
    relation: Relation
    words: Annotated[str, Field(description="the relation in a sentence")]
    mapped: Annotated[int, Field(description="tensors, or parts of fused ones, that have a counterpart")]
    same: Annotated[int, Field(description="how many of these are equal, whatever they are called")]
    form: tuple[FormDifference, ...] = ()
    function: tuple[FunctionDifference, ...] = ()
    unmatched: Annotated[tuple[str, ...], Field(description="tensors here without a counterpart")] = ()
    unmatched_there: Annotated[tuple[str, ...], Field(description="tensors there without one")] = ()
    unread: Annotated[tuple[str, ...], Field(description="what could not be read, and why")] = ()
    profile: Annotated[tuple[LayerCosine, ...], Field(description="where numbers differ")] = ()


class CoefficientRange(Answer):
    """What one reference is multiplied by in a mix, over several tensors."""

    reference: str
    least: float
    most: float
    largest_error: Annotated[float, Field(description="standard error, from what the mix leaves over")]


class MixGroup(Answer):
    """Tensors that are made of several references in one way."""

    kind: Annotated[str, Field(description="shared, copy, mix, near or neither")]
    words: str
    tensors: int
    coefficients: tuple[CoefficientRange, ...] = ()
    largest_residual: Annotated[float | None, Field(description="|tensor - mix| / |tensor|")] = None
    examples: tuple[str, ...] = ()


class MergeSource(Answer):
    """A layer of a reference."""

    reference: str
    layer: int


class MergedLayer(Answer):
    """What one layer is made of; null for what lies outside of all layers."""

    layer: int | None
    kind: Annotated[str, Field(description="that of its tensors, or several")]
    sources: tuple[MergeSource, ...] = ()
    tensors: int
    coefficients: tuple[CoefficientRange, ...] = ()
    largest_residual: float | None = None


class MergeSummary(Answer):
    """What a comparison with several checkpoints showed."""

    references: tuple[str, ...]
    words: Annotated[str, Field(description="what the checkpoint is made of, in a sentence")]
    mapped: Annotated[int, Field(description="tensors, or parts of fused ones, that a reference has as well")]
    groups: tuple[MixGroup, ...] = ()
    layers: tuple[MergedLayer, ...] = ()
    unmatched: Annotated[tuple[str, ...], Field(description="tensors that none of them has")] = ()
    unread: Annotated[tuple[str, ...], Field(description="what could not be read, and why")] = ()


class CapturedLayer(Answer):
    """What captured tensors say of one layer."""

    layer: int
    verdict: Annotated[
        str, Field(description="as-declared, explained, indistinguishable, unexplained, or unanswered: not comparable")
    ]
    message: str


class CaptureSummary(Answer):
    """What captured tensors showed, layer by layer."""

    captures: Annotated[str, Field(description="what they are called")]
    first_departure: Annotated[int | None, Field(description="the first layer that is not as declared")] = None
    layers: tuple[CapturedLayer, ...] = ()


class Report(Answer):
    """The audit's result. `schema_version` changes when a reader would have to."""

    schema_version: str = SCHEMA_VERSION
    glassblock: Annotated[str, Field(description="version of the tool that wrote it")]
    checkpoint: AuditedCheckpoint
    verdict: Verdict
    findings: tuple[Finding, ...]
    coverage: tuple[Coverage, ...]
    layers: tuple[LayerMetrics, ...]
    comparison: Annotated[Comparison | None, Field(description="with a baseline, where one was given")] = None
    reference: Annotated[ReferenceSummary | None, Field(description="with another checkpoint, where one was given")] = (
        None
    )
    merge: Annotated[MergeSummary | None, Field(description="with several other checkpoints, where given")] = None
    captures: Annotated[CaptureSummary | None, Field(description="with captured tensors, where some were given")] = None
    behaviour: Annotated[Behaviour | None, Field(description="what a text says, where one was given")] = None


class Audit(Answer):
    """An audit as a job, or another operation that was asked for as one."""

    id: str
    operation: Annotated[str, Field(description="as the client's method is called")] = "start_audit"
    state: JobState
    checkpoint: Annotated[str, Field(description="empty where none was named")]
    progress: Progress
    findings: Annotated[
        tuple[Finding, ...],
        Field(description="of the last attempt, the first thousand; what stands is in the report, once there is one"),
    ] = ()
    report: Report | None = None
    problem: Annotated[dict[str, Any] | None, Field(description="problem document, when it failed")] = None
    created: datetime | None = None
    started: Annotated[datetime | None, Field(description="when the last attempt started")] = None
    ended: datetime | None = None
    attempts: Annotated[int, Field(description="how often it was taken up")] = 0


class AuditQuery(Request):
    """Which audits to list, and how many at once. Travels in the query of the URL."""

    state: JobState | None = None
    operation: Annotated[str | None, Field(max_length=64, description="`start_audit`, `jacobians` and so on")] = None
    checkpoint: Annotated[str | None, Field(min_length=1, max_length=4096, description="of this checkpoint only")] = (
        None
    )
    since: Annotated[AwareDatetime | None, Field(description="created at this time or later, with its zone")] = None
    limit: Annotated[int, Field(ge=1, le=500, description="how many at most")] = 50
    cursor: Annotated[
        str | None, Field(pattern=r"^[0-9]{1,18}$", description="`next` of the page before, to go on from there")
    ] = None


class AuditList(Answer):
    """Jobs of this service, the newest first, without their reports."""

    audits: tuple[Audit, ...]
    next: Annotated[str | None, Field(description="`cursor` of the next page; null on the last")] = None


class AuditEvent(Answer):
    """Something that happened to an audit. Ids of one audit increase."""

    id: int
    kind: Annotated[str, Field(description="state, progress or finding; a newer service may tell more")]
    at: datetime
    state: JobState
    progress: Progress
    finding: Annotated[Finding | None, Field(description="what a rule has just found; the report decides")] = None
    attempts: int = 0


class JobAnswer(Answer):
    """What a job ended with: the answer of its operation, as that endpoint would have sent it."""
