"""What a checkpoint is to a reference, told from all that differs between the two."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from types import MappingProxyType

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
    differences: Sequence[Difference],
    *,
    mapped: int,
    matrices: int,
    misshapen: int,
    layers: int,
    lacking: int,
    unread: int,
    changes: str,
) -> tuple[Relation, str]:
    """The relation, and the same in a sentence.

    Args:
        differences: All of them.
        mapped: Tensors with a counterpart.
        matrices: Those of them with two axes.
        misshapen: Those of these whose counterpart has another shape.
        layers: Layers that have some.
        lacking: Tensors on either side without a counterpart, but for buffers.
        unread: Tensors with a counterpart, of which one of the two could not be read.
        changes: What training changed, in words.
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
    touched = {layer for layer, _ in wide if layer is not None}
    return _of_one_model(
        differences,
        cosines=cosines,
        touched=touched,
        layers=layers,
        uncompared=_uncompared(lacking, unread),
        changes=changes,
        mapped=mapped,
    )


def _of_one_model(
    differences: Sequence[Difference],
    *,
    cosines: Sequence[float],
    touched: Collection[int],
    layers: int,
    uncompared: str,
    changes: str,
    mapped: int,
) -> tuple[Relation, str]:
    function = [found for found in differences if found.kind not in FORM_KINDS]
    form = _form(differences)
    if not function and not uncompared:
        if differences:
            return "form", f"the same model in another form: {form}"
        return "identical", f"all {mapped} tensors are equal"
    beside = f"; in form: {form}" if form else ""
    if cosines and min(cosines) >= CLOSE and len(touched) >= MOST_LAYERS * max(layers, 1):
        told = f"{changes}; cosines from {min(cosines):.6g}"
        return "fine-tune", f"the same model, its numbers changed: {told}{_of_another_kind(function)}{beside}"
    beside = f"; {uncompared}{beside}" if function and uncompared else beside
    if function and all(found.kind == "differs" and (found.cosine or 0.0) >= CLOSE for found in function):
        return "function", f"the same model, its numbers changed in places: {changes}{beside}"
    what = f"{_named(function)}{_where(function, layers)}" if function else uncompared
    return "function", f"the same model, but for {what}{beside}"


_FORM_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "dtype": "dtype",
        "rounded": "rounding",
        "permuted": "order of neurons",
        "experts-reordered": "order of experts",
        "padded": "neurons of zeros",
        "offset-folded": "the 1 of the norms",
        "layout": "layout",
        "tied": "the head's own copy of the embedding",
    }
)
_FUNCTION_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "swapped": "gate and up exchanged",
        "fused-order": "gate and up exchanged",
        "fused-layout": "fused rows in another layout",
        "mispaired": "neurons in different orders",
        "transposed": "axes exchanged",
        "offset": "gains that are off by 1",
        "role": "norms in other roles",
        "unrelated": "unrelated numbers",
        "differs": "other numbers",
        "shape": "other shapes",
        "experts-exchanged": "experts exchanged without their router",
        "rotary-order": "queries or keys in another rotary order",
    }
)


def _form(differences: Sequence[Difference]) -> str:
    """What is otherwise of the form alone: `names, dtype, order of neurons`."""
    kinds = {found.kind for found in differences}
    named = ["names"] if any(set(found.here) - set(found.there) for found in differences) else []
    return ", ".join(named + [words for kind, words in _FORM_WORDS.items() if kind in kinds])


def _named(function: Sequence[Difference]) -> str:
    """The kinds of differences and how many there are of each."""
    counts = Counter(_FUNCTION_WORDS[found.kind] for found in function)
    return ", ".join(f"{words} ({count})" for words, count in counts.items())


def _of_another_kind(function: Sequence[Difference]) -> str:
    named = _named([found for found in function if found.kind not in _OTHER_NUMBERS])
    return f"; beside that {named}" if named else ""


def _where(function: Sequence[Difference], layers: int) -> str:
    places = {found.layer for found in function if found.layer is not None}
    return f" in {len(places)} of {_counted(layers, 'layer')}" if places else ""


def _uncompared(lacking: int, unread: int) -> str:
    """What could not be held against a counterpart; empty where all could."""
    told = [f"{_counted(lacking, 'tensor')} without a counterpart"] if lacking else []
    told += [f"{_counted(unread, 'tensor')} that could not be read on both sides"] if unread else []
    return " and ".join(told)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
