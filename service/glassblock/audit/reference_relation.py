"""What a checkpoint is to a reference, told from all that differs between the two."""

from collections.abc import Sequence
from statistics import median

from glassblock.audit.reference_types import FORM_KINDS, Difference
from glassblock.wire.audits import Relation

CLOSE = 0.8
"""Cosine above which two weights are versions of one. Fine-tuned weights lie above 0.95; unrelated ones at 0."""

FAR = 0.2
"""Cosine below which they are not."""

LEAST_ELEMENTS = 256
"""Numbers below which a cosine says nothing."""

MOST_LAYERS = 0.8
"""Share of the layers that training touches, where damage touches a few."""

_OTHER_NUMBERS = frozenset({"differs", "unrelated", "shape"})


def relation_of(
    differences: Sequence[Difference], *, mapped: int, matrices: int, misshapen: int, layers: int, lacking: int
) -> tuple[Relation, str]:
    """The relation, and the same in a sentence.

    Args:
        differences: All of them.
        mapped: Tensors with a counterpart.
        matrices: Those of them with two axes.
        misshapen: Those of these whose counterpart has another shape.
        layers: Layers that have some.
        lacking: Tensors on either side without a counterpart, but for buffers.
    """
    if not mapped or not matrices:
        return "unanswered", "no tensor has a counterpart by name, by its part in the model or by its bytes"
    if misshapen * 2 > matrices:
        return "other-model", "another model: most weights have other shapes than their counterparts"
    wide = [
        (found.layer, found.cosine)
        for found in differences
        if found.kind in _OTHER_NUMBERS and found.elements >= LEAST_ELEMENTS and found.cosine is not None
    ]
    cosines = [cosine for _, cosine in wide]
    if len(wide) * 2 > matrices and median(cosines) < FAR:
        told = f"of {matrices} matrices {len(wide)} differ, with a median cosine of {median(cosines):.2g}"
        return "other-model", f"another model of the same shapes: {told}"
    function = [found for found in differences if found.kind not in FORM_KINDS]
    if not function and not lacking:
        kinds = ", ".join(dict.fromkeys(found.kind for found in differences))
        same = "form" if kinds else "identical"
        return same, f"the same model in another form ({kinds})" if kinds else f"all {mapped} tensors are equal"
    touched = {layer for layer, _ in wide if layer is not None}
    if cosines and min(cosines) >= CLOSE and len(touched) >= MOST_LAYERS * max(layers, 1):
        told = f"{len(wide)} of {matrices} matrices differ, with cosines from {min(cosines):.4f}"
        return "fine-tune", f"a version of the same model: {told}{_of_another_kind(function)}"
    return (
        "function",
        f"the same model, but for {_counted(len(function), 'difference')}{_where(function, layers, lacking)}",
    )


def _of_another_kind(function: Sequence[Difference]) -> str:
    named = sum(found.kind not in _OTHER_NUMBERS for found in function)
    return f", and {_counted(named, 'difference')} of another kind" if named else ""


def _where(function: Sequence[Difference], layers: int, lacking: int) -> str:
    places = {found.layer for found in function if found.layer is not None}
    where = f" in {len(places)} of {_counted(layers, 'layer')}" if places else ""
    return where + (f"; {_counted(lacking, 'tensor')} without a counterpart" if lacking else "")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
