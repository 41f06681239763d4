"""Which command repairs what a report names: said once, at the report's end, where a command can."""

import shlex
from collections.abc import Callable, Mapping
from types import MappingProxyType

from glassblock.wire.audits import Finding, Report
from glassblock.wire.printable import printable

Decided = Callable[[Finding], bool]


def repair_sentence(report: Report, asked: str | None) -> tuple[str, str, str] | None:
    """What stands before, in and after the command; None where no finding has a repair that `fix` carries out.

    Args:
        report: of an audit that ended.
        asked: the arguments of the audit that `glassblock fix` needs as well, quoted; None stands for the checkpoint.
    """
    count = sum(map(repairable, report.findings))
    if not count:
        return None
    path = shlex.quote(report.checkpoint.path) if asked is None else asked
    told = "the finding" if len(report.findings) == 1 else f"{count:,} of the findings"
    return (
        f"to repair {told}:",
        printable(f"glassblock fix {path} --dry-run"),
        "shows the repair; --output DIR, in its place, writes it",
    )


def repairable(finding: Finding) -> bool:
    """Whether `glassblock fix` carries the finding's fix out, as far as the finding itself tells."""
    decided = None if finding.fix is None else CARRIED_OUT.get(finding.fix.action)
    return decided is not None and decided(finding)


def _always(_: Finding) -> bool:
    return True


def _with(*keys: str) -> Decided:
    return lambda finding: all(finding.evidence.get(key) is not None for key in keys)


def _in_order(finding: Finding) -> bool:
    return finding.rule == "container/hole" or (finding.rule == "container/header" and finding.file is not None)


CARRIED_OUT: Mapping[str, Decided] = MappingProxyType(
    {
        "swap-tensors": _always,
        "swap-halves": _always,
        "reorder-rows": _with("groups", "gate_first"),
        "reorder-heads": lambda finding: (
            "steps" in finding.evidence and finding.evidence.get("moved_along") is not True
        ),
        "renumber-experts": _with("homes"),
        "add-to-gains": _with("add"),
        "transpose": lambda finding: finding.certainty != "statistical",
        "cut": _always,
        "write-again": _in_order,
        "correct-index": _always,
        "complete-index": _always,
        "correct-total-size": _always,
        "drop-copy": lambda finding: finding.evidence.get("equal") is True,
        "drop-tensor": _always,
        "declare-bias": _always,
        "correct-config": _always,
        "unwrap-names": _always,
        "align-eps": _with("decided", "decided_key"),
        "declare-eps": _with("decided", "decided_key"),
    }
)
"""The actions of fixes that are carried out, each with what the finding must tell for it."""
