"""The rows of the heads of queries and keys put into the order that the family turns."""

from collections.abc import Mapping
from typing import Any, cast

from glassblock.audit.fix import Unrepaired
from glassblock.checkpoint.changes import InHeads
from glassblock.checkpoint.entries import FLOAT_CODES, TensorEntry
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.patches import Alter, Edit, Patch
from glassblock.wire.audits import Finding


def reorder_heads(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """The rows of every tensor that the finding names, by the steps that it tells."""
    steps = finding.evidence.get("steps")
    if not isinstance(steps, list) or not steps or not finding.tensors:
        return Unrepaired("the finding does not tell how the rows lie", "a reference checkpoint")
    if finding.evidence.get("moved_along") is True:
        reason = "whether biases and norms of queries and keys moved with the rows is not told by the weights"
        return Unrepaired(reason, "a reference checkpoint")
    edits: list[Edit] = []
    for name in finding.tensors:
        entry = checkpoint.entries.get(name)
        if entry is None or entry.dtype not in FLOAT_CODES or _has_companions(checkpoint, name):
            return Unrepaired(f"the rows of {name} cannot be moved alone", "the weights before they were quantised")
        told = cast("list[Mapping[str, Any]]", steps)
        edits.append(Alter(name, tuple(_change(entry, step, finding.evidence.get("heads")) for step in told)))
    return tuple(edits)


def _change(entry: TensorEntry, step: Mapping[str, Any], heads: object) -> InHeads:
    axis, width, half = -min(len(entry.shape), 2), int(step["width"]), int(step["turned"]) // 2
    chosen = tuple(map(int, cast("list[int]", heads))) if isinstance(heads, list) else None
    return InHeads(axis, width, (half, 2) if step["into"] == "halves" else (2, half), chosen)


def _has_companions(checkpoint: Checkpoint, name: str) -> bool:
    """Whether scales or zero points belong to a tensor, which would have to move with its rows."""
    module = name.removesuffix(".weight")
    return any(
        other.startswith((f"{module}.", f"{name}_")) and other not in {name, f"{module}.bias"}
        for other in checkpoint.entries
    )
