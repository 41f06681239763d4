"""`/v1/selftests`: mistakes planted in memory in a checkpoint of one's own, and what the audit says of each."""

from typing import Annotated, Literal

from pydantic import Field

from glassblock.wire.audits import Digest
from glassblock.wire.values import Answer, FamilyName, FamilyRow, Request, Whole

Outcome = Literal["found", "found-in-part", "found-otherwise", "undecidable", "not-found", "not-applicable"]
"""`found`: a rule meant for the mistake fired, in every layer that it was planted in."""


class SelftestRequest(Request):
    """Plant each mistake in a checkpoint, in memory, and audit it."""

    checkpoint: Annotated[str, Field(min_length=1, max_length=4096, description="path under a root")]
    rules: Annotated[
        tuple[str, ...] | None, Field(min_length=1, description="only mistakes that these rules are meant for")
    ] = None
    layers: Annotated[
        tuple[Whole, ...] | None, Field(min_length=1, description="layers to plant in; all when left out")
    ] = None
    family: FamilyName = None
    family_row: FamilyRow = None
    digest: Digest = "fast"


class PlantedMistake(Answer):
    """One mistake and what the audit said of it."""

    mistake: str
    description: str
    rules: Annotated[tuple[str, ...], Field(description="that are meant for it, as far as this version has them")]
    outcome: Outcome
    planted: Annotated[tuple[int, ...], Field(description="layers it was planted in; empty for one of no layer")] = ()
    named: Annotated[tuple[int, ...], Field(description="of these, the layers that findings name")] = ()
    fired: Annotated[tuple[str, ...], Field(description="rules with findings that the checkpoint itself has not")] = ()
    reason: Annotated[str | None, Field(description="why not, where that is known")] = None


class SelftestAnswer(Answer):
    """What an audit would find in this checkpoint: measured, not promised."""

    checkpoint: str
    family: str | None
    layers: Annotated[tuple[int, ...], Field(description="in which mistakes were planted")]
    healthy: Annotated[tuple[str, ...], Field(description="rules with findings before anything was planted")]
    mistakes: tuple[PlantedMistake, ...]
