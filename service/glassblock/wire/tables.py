"""`GET /v1`, `/v1/rules`, `/v1/families` and `/health/*`: what the service knows and how it is."""

from typing import Annotated

from pydantic import Field

from glassblock.wire.audits import Certainty, Level
from glassblock.wire.values import Answer


class RuleRow(Answer):
    """One rule, explained."""

    name: str
    level: Level
    certainty: Certainty
    what: Annotated[str, Field(description="the mistake it names")]
    hurts: Annotated[str, Field(description="what goes wrong when nobody notices")]
    detection: Annotated[str, Field(description="how it is found")]
    fooled_by: Annotated[str, Field(description="what would deceive it")]
    report: Annotated[str, Field(description="a public report where it happened")]


class RuleList(Answer):
    """Every rule this service applies."""

    rules: tuple[RuleRow, ...]


class FamilyRow(Answer):
    """One row of the family table, readable."""

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    ffn: Annotated[str, Field(description="glu or plain, where the projections lie, how they are stored")]
    activation: str
    norm: str
    placement: str
    eps: str
    verified: str
    notes: tuple[str, ...]


class FamilyList(Answer):
    """Every family this service reads, and the names it accepts in overrides."""

    families: tuple[FamilyRow, ...]
    norm_kinds: tuple[str, ...]
    activations: tuple[str, ...]
    placements: tuple[str, ...]


class Capabilities(Answer):
    """Versions, and what this service offers."""

    glassblock: str
    schema_version: str
    torch: str
    device: str
    endpoints: tuple[str, ...]


class Health(Answer):
    """Alive, or ready with what was looked at."""

    status: str
    checks: dict[str, str] = Field(default_factory=dict, description="what was looked at, and how it was")
