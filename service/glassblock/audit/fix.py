"""What carries out a finding's fix: a patch, or the reason why the files alone do not decide what is right."""

from collections.abc import Callable
from dataclasses import dataclass

from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.patches import Patch
from glassblock.wire.audits import Finding


@dataclass(frozen=True)
class Unrepaired:
    """Why the files alone do not tell how to repair a finding, and what would be needed."""

    reason: str
    needs: str


Repair = Callable[[Checkpoint, Finding], Patch | Unrepaired]
