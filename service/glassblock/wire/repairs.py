"""`/v1/repairs`: what could be repaired of a checkpoint, what could not, and the audits before and after."""

from typing import Annotated, Any

from pydantic import Field

from glassblock.wire.audits import Digest, Level, Report
from glassblock.wire.values import Answer, FamilyName, FamilyRow, Flag, Request


class RepairRequest(Request):
    """Repair a checkpoint into a new directory, or only say what would be done."""

    checkpoint: Annotated[str, Field(min_length=1, max_length=4096, description="path under a root")]
    output: Annotated[
        str | None,
        Field(min_length=1, max_length=4096, description="name of the new directory, under the service's output root"),
    ] = None
    dry_run: Annotated[Flag, Field(description="write nothing; `after` is the audit of the patched checkpoint")] = False
    rules: Annotated[tuple[str, ...] | None, Field(min_length=1, description="all rules when left out")] = None
    reference: Annotated[
        str | None,
        Field(
            min_length=1, max_length=4096, description="another checkpoint under a root, to compare every tensor with"
        ),
    ] = None
    against: Annotated[dict[str, Any] | None, Field(description="another engine's config, as an object")] = None
    against_name: Annotated[str, Field(max_length=8192, description="what to call that config")] = "against"
    family: FamilyName = None
    family_row: FamilyRow = None
    digest: Digest = "fast"


class RepairEdit(Answer):
    """One change of the checkpoint."""

    kind: Annotated[str, Field(description="rename, alter, drop, declare, relist, compact")]
    description: str
    tensors: tuple[str, ...] = ()
    file: str | None = None
    key: Annotated[str | None, Field(description="dotted key of the config")] = None
    value: Annotated[Any, Field(description="what the key is given; null takes it out")] = None


class RepairStep(Answer):
    """A finding and the changes that repair it."""

    rule: str
    level: Level
    layer: int | None = None
    message: str
    edits: tuple[RepairEdit, ...]


class RefusedRepair(Answer):
    """A finding that the files alone do not tell how to repair."""

    rule: str
    level: Level
    layer: int | None = None
    message: str
    reason: str
    needs: Annotated[str, Field(description="what would make it possible")]


class RepairAnswer(Answer):
    """What was repaired, what was not, and the audits before and after."""

    checkpoint: str
    steps: tuple[RepairStep, ...]
    refused: tuple[RefusedRepair, ...]
    before: Report
    after: Annotated[Report, Field(description="of what was written; in a dry run of the patched checkpoint")]
    header_only: Annotated[bool, Field(description="headers, config and index are all that differs")]
    written: Annotated[str | None, Field(description="the new directory, or the checkpoint changed in place")] = None
    bytes_written: int = 0
    backups: Annotated[tuple[str, ...], Field(description="of a change in place, beside the files")] = ()
    undone: Annotated[tuple[str, ...], Field(description="files brought back first, of a change broken off")] = ()
