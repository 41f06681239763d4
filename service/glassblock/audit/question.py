"""What is asked of an audit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AuditQuestion:
    """Which rules to apply, and what to compare the checkpoint with.

    Attributes:
        rules: Names of rules; None applies all of them.
        against: Another engine's config, as an object; None compares with none.
        against_name: What messages call that config.
        certify: Bound the p-value of every tensor; otherwise only of those that seeded draws do not rule out.
        family: Row of the family table, where no config names one.
    """

    rules: tuple[str, ...] | None = None
    against: Mapping[str, Any] | None = None
    against_name: str = "against"
    certify: bool = False
    family: str | None = None


class AuditCancelled(Exception):
    """The caller asked the audit to stop. No answer for a client: whoever cancelled knows."""
