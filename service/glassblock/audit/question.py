"""What is asked of an audit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.recordings import Recording

Hash = Literal["fast", "sha256", "none"]
"""What is computed of a tensor's bytes: xxh3_128, which tells accidental equality; sha256, which cannot be forged."""


@dataclass(frozen=True)
class AuditQuestion:
    """Which rules to apply, and what to compare the checkpoint with.

    Attributes:
        rules: Names of rules; None applies all of them.
        against: Another engine's config, as an object; None compares with none.
        against_name: What messages call that config.
        certify: Bound the p-value of every tensor; otherwise only of those that seeded draws do not rule out.
        family: Row of the family table, where no config names one.
        reference: Another checkpoint to compare every tensor with, as opened; None compares with none.
        reference_name: What the report calls it.
        parents: Several other checkpoints that it may be made of, with their names.
        captures: Tensors captured in an engine, to explain layer by layer; None for none.
        hash: Of each tensor's bytes: fast, or one that cannot be forged, or none.
        token_ids: A text `[tokens]`, or several `[texts, tokens]`, as a witness of behaviour; None for none.
    """

    rules: tuple[str, ...] | None = None
    against: Mapping[str, Any] | None = None
    against_name: str = "against"
    certify: bool = False
    family: str | None = None
    hash: Hash = "fast"
    reference: Checkpoint | None = None
    reference_name: str = "reference"
    parents: tuple[tuple[str, Checkpoint], ...] = ()
    captures: Recording | None = None
    token_ids: Tensor | None = field(default=None, compare=False)


class AuditCancelled(Exception):
    """The caller asked the audit to stop. No answer for a client: whoever cancelled knows."""
