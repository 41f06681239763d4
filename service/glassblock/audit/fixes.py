"""From a finding to the patch that repairs it: one table, by the action that the finding's fix names.

A repair never guesses. Where the files alone do not decide what is right, the answer is what would.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from glassblock.audit.config_fixes import align_eps, correct_config, declare_bias, declare_eps
from glassblock.audit.fix import Repair, Unrepaired
from glassblock.audit.gate_fixes import renumber_experts, reorder_rows, swap_halves, swap_tensors
from glassblock.audit.rotary_fixes import reorder_heads
from glassblock.checkpoint.changes import Add, Reorder, Transpose, Within
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.patches import Alter, Compact, Drop, Edit, Patch, Relist, Rename, patched
from glassblock.checkpoint.wrappers import wrapped_names
from glassblock.errors import GlassblockError
from glassblock.wire.audits import Finding


def repair_of(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """The patch that repairs a finding, or what is needed for one."""
    if finding.fix is None:
        return Unrepaired("the finding names no repair", "somebody who looks at it")
    repair = FIXES.get(finding.fix.action)
    if repair is None:
        return Unrepaired(f"nothing here carries out {finding.fix.action}", finding.fix.description)
    try:
        patch = repair(checkpoint, finding)
        if not isinstance(patch, Unrepaired):
            patched(checkpoint, patch)
    except GlassblockError as error:
        return Unrepaired(error.message, error.hint or finding.fix.description)
    return patch


def joined(checkpoint: Checkpoint, patches: Iterable[Patch]) -> Patch:
    """One patch out of several.

    Each edit once; experts that have a finding of their own are left out of what is done to their stack as a whole;
    names are exchanged last, since the other edits go by the old ones.
    """
    edits = list[Edit]()
    for edit in (edit for patch in patches for edit in patch):
        if edit not in edits:
            edits.append(edit)
    alone: dict[str, set[int]] = {}
    for edit in edits:
        for change in edit.changes if isinstance(edit, Alter) else ():
            if isinstance(edit, Alter) and isinstance(change, Within):
                alone.setdefault(edit.tensor, set()).update(change.slices)
    apart = [_for_the_others(checkpoint, edit, alone) for edit in edits]
    return tuple(sorted(apart, key=lambda edit: isinstance(edit, Rename) + 2 * isinstance(edit, Relist)))


def _for_the_others(checkpoint: Checkpoint, edit: Edit, alone: Mapping[str, set[int]]) -> Edit:
    """An edit of a whole stack, as one of the slices that have none of their own."""
    if not isinstance(edit, Alter) or edit.tensor not in alone:
        return edit
    others = tuple(
        index for index in range(checkpoint.entries[edit.tensor].shape[0]) if index not in alone[edit.tensor]
    )
    changes = (Within(others, change) if isinstance(change, Reorder) else change for change in edit.changes)
    return Alter(edit.tensor, tuple(changes))


def _needs(reason: str, needs: str) -> Repair:
    """For what no patch can bring back."""
    return lambda _checkpoint, _finding: Unrepaired(reason, needs)


def _cut(_: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    return (Compact(finding.file),) if finding.file else Unrepaired("no file is named", "the file")


def _write_again(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """A hole is closed and an index written anew; which of two overlapping tensors is right, no header tells."""
    if finding.rule == "container/hole" and finding.file is not None:
        return (Compact(finding.file),)
    index = checkpoint.index
    if finding.rule == "container/header" and index is not None and finding.file == index.file.name:
        return (Relist(),)
    return Unrepaired("what the header contradicts itself about is not told by the data", "the file from its source")


def _relist(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    if finding.file is not None and finding.file not in checkpoint.containers and finding.rule != "index/total-size":
        return Unrepaired(f"no loader of these weights reads {finding.file}", "to know what it is for")
    return (Relist(),)


def _drop_copy(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """Of equal copies the one that the index names stays, else the first."""
    if finding.evidence.get("equal") is not True:
        return Unrepaired("the copies differ, and nothing tells which is right", "the source of the checkpoint")
    return tuple(
        Drop(name, copy.file.name)
        for name in finding.tensors
        for copy in checkpoint.duplicates.get(name, ())
        if copy.file != checkpoint.entries[name].file
    )


def _drop_tensor(_: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    return tuple(Drop(name) for name in finding.tensors)


def _add_to_gains(_: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """Gains as the family stores them; in the file's dtype, so rounded once more."""
    offset = finding.evidence.get("add")
    if not isinstance(offset, int | float):
        return Unrepaired("which of the two conventions is meant was not decided", "a reference checkpoint")
    return tuple(Alter(name, (Add(float(offset)),)) for name in finding.tensors)


def _transpose(_: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    if finding.certainty == "statistical":
        reason = "what the weights show of their axes convicts nothing by itself"
        return Unrepaired(reason, "a reference checkpoint, or captured hidden and down of the layer")
    return tuple(Alter(name, (Transpose(),)) for name in finding.tensors)


def _unwrap_names(checkpoint: Checkpoint, _: Finding) -> Patch | Unrepaired:
    wrapped = wrapped_names(checkpoint.entries, checkpoint.family)
    if wrapped is None:
        return Unrepaired("no part of the names stands between them and the family's", "the script that wrote them")
    return (Rename(wrapped.names),)


_SOURCE = "the file, or the checkpoint, from its source"

FIXES: Mapping[str, Repair] = MappingProxyType(
    {
        "swap-tensors": swap_tensors,
        "swap-halves": swap_halves,
        "reorder-rows": reorder_rows,
        "reorder-heads": reorder_heads,
        "renumber-experts": renumber_experts,
        "add-to-gains": _add_to_gains,
        "transpose": _transpose,
        "cut": _cut,
        "write-again": _write_again,
        "correct-index": _relist,
        "complete-index": _relist,
        "correct-total-size": _relist,
        "drop-copy": _drop_copy,
        "drop-tensor": _drop_tensor,
        "declare-bias": declare_bias,
        "correct-config": correct_config,
        "align-eps": align_eps,
        "align-config": _needs(
            "two sources in the checkpoint differ, and no tensor tells which was trained with",
            "the config of the training run, or captured tensors (--captures)",
        ),
        "correct-engine": _needs(
            "it is the other engine's config that differs, and neither tells which was trained with",
            "the config of the training run",
        ),
        "declare-eps": declare_eps,
        "tie-or-restore": _needs(
            "whether the head was left out by mistake or the flag is wrong is not told by the files",
            "the output head, or the config of the training run",
        ),
        "untie-or-drop": _needs(
            "which of the two heads the model was trained with is not told by the weights",
            "the config of the training run",
        ),
        "name-family": _needs(
            "no row of the family table is named by the config", "--family, or the right config.json"
        ),
        "unwrap-names": _unwrap_names,
        "keep-one-set": _needs("which of the two sets is meant is not told by the files", "somebody who removes one"),
        "fetch": _needs("what is absent cannot be made up", _SOURCE),
        "fetch-again": _needs("what is lost cannot be made up", _SOURCE),
        "convert-again": _needs("the numbers that are wrong or absent cannot be made up", _SOURCE),
        "save-again": _needs("the numbers were never saved", "the run that saved the checkpoint"),
    }
)
"""How each action that a finding's fix may name is carried out."""
