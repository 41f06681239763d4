"""Findings told while an audit runs, held against those of its report."""

from collections.abc import Iterable

from glassblock.wire.audits import Finding


def taken_back(told: Iterable[Finding], report: Iterable[Finding]) -> list[Finding]:
    """Those told that are in no finding of the report: by rule, certainty, layer, expert and tensors."""
    findings = tuple(report)
    return [early for early in told if not any(early == found or _covers(found, early) for found in findings)]


def _covers(found: Finding, early: Finding) -> bool:
    same = (found.rule, found.level, found.certainty, found.expert)
    return (
        same == (early.rule, early.level, early.certainty, early.expert)
        and found.layer in {early.layer, None}
        and set() < set(early.tensors) <= set(found.tensors)
    )
