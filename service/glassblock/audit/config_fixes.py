"""A config that says what the tensors show: a bias declared, a tie answered once, a size that fits, an epsilon.

Of several values that would fit none is taken.
"""

from collections.abc import Mapping
from typing import cast

from glassblock.audit.fix import Unrepaired
from glassblock.audit.names import in_words
from glassblock.checkpoint.attention_map import bias_setting
from glassblock.checkpoint.changes import Transpose
from glassblock.checkpoint.config import find
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.fitting import layer_prefix
from glassblock.checkpoint.layer_map import resolve_layer, row_at, shape_faults
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.outer_tensors import head_entry
from glassblock.checkpoint.patches import Alter, Declare, Drop, Patch, patched
from glassblock.errors import CheckpointUnusable
from glassblock.wire.audits import Finding

MOST_TRIALS = 200
"""Sizes tried for a config that does not fit the tensors; each takes a look at the headers."""


def declare_bias(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """Zeros are dropped; a bias with numbers is declared, where the family has a flag and all biases are there."""
    if finding.level == "note":
        return tuple(Drop(name) for name in finding.tensors)
    config, layer = checkpoint.config, finding.layer
    if config is None or layer is None:
        return Unrepaired("there is no config in which it could be declared", "config.json")
    row = row_at(checkpoint, layer)
    name = finding.tensors[0].removeprefix(layer_prefix(checkpoint, layer))
    network = next(iter(row.networks), None)
    setting = bias_setting(row.attention, name) or (None if network is None else network.bias)
    if setting is None or not setting.keys:
        return Unrepaired(f"the family {row.name} has no flag for such a bias", "the code that trained the model")
    stated = find(config, row, setting.keys)
    nested = next((f"{name}." for name in row.nested if isinstance(config.values.get(name), dict)), "")
    edit = Declare(stated.key if stated else nested + setting.keys[0], value=True)
    after = patched(checkpoint, (edit,))
    absent = [fault.tensor for fault in shape_faults(after) if fault.kind == "missing-bias"]
    if absent:
        words = f"{edit.key} would declare biases in all layers, and {len(absent)} of them are absent"
        return Unrepaired(words, "the missing biases, or the reason for this one")
    if any(entry.name in finding.tensors for entry in resolve_layer(after, layer)[0].undeclared):
        return Unrepaired(f"{edit.key} does not declare {finding.tensors[0]}", "the code that trained the model")
    return (edit,)


def correct_config(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """What the config says otherwise than the tensors: a tie, a number's form, a size, or the tensors' axes."""
    if finding.rule == "config/tied-head":
        return _one_tie(checkpoint, finding)
    key = finding.evidence.get("key")
    if isinstance(key, str):
        return _whole_number(checkpoint, key)
    transposed = _transposed(checkpoint, finding)
    return transposed or _fitting_size(checkpoint, finding)


def _one_tie(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """One answer at every level: tied where there is no head of its own or an equal one, untied where they differ."""
    flags = cast("Mapping[str, bool]", finding.evidence.get("flags", {}))
    equal = finding.evidence.get("equal")
    head = head_entry(checkpoint)
    if head is not None and not isinstance(equal, bool):
        return Unrepaired("the head could not be compared with the embedding", "readable tensors")
    tied = head is None or equal is True
    return tuple(Declare(key, value=tied) for key, value in flags.items() if value is not tied)


def _whole_number(checkpoint: Checkpoint, key: str) -> Patch | Unrepaired:
    """A size that is written as a text or a float, where that names a whole number."""
    value = None if checkpoint.config is None else _value_at(checkpoint.config.values, key)
    number = None
    if (isinstance(value, str) and value.strip().isdecimal()) or (isinstance(value, float) and value.is_integer()):
        number = int(value)
    if number is None:
        return Unrepaired(f"{key} names no number", "the config that the model was trained with")
    return (Declare(key, number),)


def _value_at(values: Mapping[str, object], key: str) -> object:
    first, _, rest = key.partition(".")
    value = values.get(first)
    if not rest:
        return value
    return _value_at(cast("dict[str, object]", value), rest) if isinstance(value, dict) else None


def _transposed(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired | None:
    """The tensors of a finding laid the other way round, where they fit then and no square one may lie so as well."""
    entries = [checkpoint.entries[name] for name in finding.tensors if name in checkpoint.entries]
    if not entries or not all(_is_oblong(entry) for entry in entries):
        return None
    edits = tuple(Alter(entry.name, (Transpose(),)) for entry in entries)
    misfits = {fault.tensor for fault in shape_faults(patched(checkpoint, edits))}
    if misfits.intersection(finding.tensors):
        return None
    in_doubt = _squares_in_doubt(checkpoint, finding)
    if not in_doubt:
        return edits
    reason = f"these lie transposed, and no shape tells whether square ones do too: {in_words(in_doubt)}"
    return Unrepaired(reason, "whoever wrote the checkpoint, or a reference checkpoint (--reference)")


def _is_oblong(entry: TensorEntry) -> bool:
    return len(entry.shape) > 1 and entry.shape[-1] != entry.shape[-2]


def _squares_in_doubt(checkpoint: Checkpoint, finding: Finding) -> tuple[str, ...]:
    """Square matrices in the layers of a finding that may lie transposed as well.

    Those of attention, or of a network, that has no other matrix lying right; where all of its matrices are square, the
    whole layer is asked for one. Of a single tensor that lies transposed nothing is concluded, and with a reference the
    rule tensor/transposed tells of square ones.
    """
    if "reference" in finding.evidence:
        return ()
    transposed = {fault.tensor for fault in shape_faults(checkpoint) if fault.kind == "shape"}
    in_doubt = list[str]()
    layers = cast("list[int]", finding.evidence.get("layers", ()))
    for layer in layers if len(transposed) > 1 else ():
        tensors = resolve_layer(checkpoint, layer)[0]
        modules = [list(network.weights.values()) for network in tensors.networks]
        modules += [] if tensors.attention is None else [list(tensors.attention.weights.values())]
        oblong = [[entry for entry in module if _is_oblong(entry)] for module in modules]
        whole = [entry for module in oblong for entry in module]
        for module, telling in zip(modules, oblong, strict=True):
            if all(entry.name in transposed for entry in telling or whole):
                in_doubt.extend(entry.name for entry in module if not _is_oblong(entry))
    return tuple(in_doubt)


def _fitting_size(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """The one size of the config with another value of which all tensors fit, the layers counted too."""
    needs = "the config that the model was trained with, or the tensors that it declares"
    config, family = checkpoint.config, checkpoint.family
    if config is None or family is None:
        return Unrepaired("there is no config that could be corrected", needs)
    declared = checkpoint.declared_layers
    if declared is not None and declared.value > checkpoint.layers:
        reason = f"{declared.source} is {declared.value}, and {checkpoint.layers} layers are there: whether the others "
        return Unrepaired(f"{reason}were lost or never were is not told by the files", "the missing layers")
    lengths = {checkpoint.layers}
    for name in finding.tensors:
        shape = checkpoint.entries[name].shape if name in checkpoint.entries else ()
        lengths.update(length // part for length in shape for part in (1, 2) if length % part == 0)
    keys = {
        stated.key: stated.value for setting in family.sizes.values() if (stated := find(config, family, setting.keys))
    }
    trials = [(key, length) for key in keys for length in sorted(lengths) if length != keys[key]][:MOST_TRIALS]
    fitting = [Declare(key, length) for key, length in trials if _fits(checkpoint, Declare(key, length))]
    if len(fitting) != 1:
        told = ", ".join(f"{edit.key} {edit.value}" for edit in fitting)
        return Unrepaired(f"several changes would fit: {told}" if told else "no one size explains it", needs)
    return (fitting[0],)


def _fits(checkpoint: Checkpoint, edit: Declare) -> bool:
    try:
        after = patched(checkpoint, (edit,))
    except CheckpointUnusable:
        return False
    wrong = [fault for fault in after.faults if fault.rule.startswith("config/")]
    return not wrong and after.trunk is not None and all(fault.kind != "shape" for fault in shape_faults(after))


def align_eps(_: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """The value that evidence decided for, at the place that states the other one; no weight tells it."""
    decided, key = finding.evidence.get("decided"), finding.evidence.get("decided_key")
    if isinstance(decided, float) and isinstance(key, str):
        return (Declare(key, decided),)
    if isinstance(decided, float):
        reason = f"{decided:g} was decided for, and what states the other value is no entry of config.json"
        return Unrepaired(reason, "whoever wrote that file")
    return Unrepaired(
        "no weight carries an epsilon, so the files do not tell which of the two was trained with",
        "captured inputs and outputs of a norm (`glassblock explain`), or the config of the training run",
    )


def declare_eps(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """The family's default stated, where another engine's config or a reference bears it out."""
    if "decided_key" in finding.evidence:
        return align_eps(checkpoint, finding)
    return Unrepaired(
        "that the family's default was trained with is not told by the files", "the config of the training run"
    )
