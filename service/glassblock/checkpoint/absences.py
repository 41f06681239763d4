"""Layers and experts whose tensors are not there."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.family import MixtureRow
from glassblock.checkpoint.fitting import LayerFault, layer_prefix, row_of, trunk_prefix
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.settings import number_of
from glassblock.checkpoint.shard_names import is_shard
from glassblock.errors import DamagedCheckpoint

_MOST_LAYERS = 10_000
"""A config that declares more layers is no witness of which are absent."""


@dataclass(frozen=True)
class HiddenLayers:
    """Layers with tensors in shards that nobody looked into.

    Attributes:
        whole: The layers all of whose tensors lie there, in order.
        half: Those of which other tensors were read; empty where no index tells.
        reason: Why they were not looked at, for either kind.
    """

    whole: tuple[int, ...] = ()
    half: tuple[int, ...] = ()
    reason: str = ""


def hidden_layers(checkpoint: Checkpoint) -> HiddenLayers:
    """The layers that lie in absent or unreadable shards: as the index says, or else the config's number of layers."""
    if checkpoint.family is None or checkpoint.trunk is None or not checkpoint.has_unread_files:
        return HiddenLayers()
    shown = frozenset(checkpoint.layer_indices)
    index = checkpoint.index
    listed = _undisclosed(checkpoint) if index is None else _hidden_by_index(checkpoint, index.weight_map)
    if checkpoint.path.name in checkpoint.containers and is_shard(checkpoint.path.name):
        what = "was not opened"
    elif all(container.listed for container in checkpoint.containers.values()):
        what = "is not there"
    else:
        what = "is not there or cannot be read"
    return HiddenLayers(
        whole=tuple(sorted(listed - shown)),
        half=tuple(sorted(listed & shown)),
        reason=f"tensors of the layer lie in a shard that {what}",
    )


def _hidden_by_index(checkpoint: Checkpoint, weight_map: Mapping[str, str]) -> frozenset[int]:
    """The layers of which the index puts a tensor into a shard whose header was not read."""
    before, after = (re.escape(part) for part in (trunk_prefix(checkpoint) + row_of(checkpoint).layer).split("{i}"))
    pattern = re.compile(f"{before}(0|[1-9][0-9]{{0,8}}){after}")
    read = {name for name, container in checkpoint.containers.items() if container.listed}
    matches = (
        pattern.match(tensor)
        for tensor, shard in weight_map.items()
        if shard not in read and tensor not in checkpoint.entries
    )
    return frozenset(int(match[1]) for match in matches if match)


def _undisclosed(checkpoint: Checkpoint) -> frozenset[int]:
    """The layers that the config declares and no tensor shows."""
    try:
        declared = checkpoint.declared_layers
    except DamagedCheckpoint:
        return frozenset()
    if declared is None or declared.value > _MOST_LAYERS:
        return frozenset()
    return frozenset(range(declared.value)).difference(checkpoint.layer_indices)


def count_faults(checkpoint: Checkpoint) -> Iterator[LayerFault]:
    """That the tensors show another number of layers than the config declares."""
    declared, shown = checkpoint.declared_layers, checkpoint.layer_indices
    if declared is None:
        return
    extra_layers = int(number_of(checkpoint.config, row_of(checkpoint), row_of(checkpoint).extra_layers).value)
    # Without building the range: a config may declare any number.
    if shown[-1] == len(shown) - 1 and 0 <= len(shown) - declared.value <= max(0, extra_layers):
        return
    present = frozenset(shown)
    absent = next((layer for layer in range(min(declared.value, len(shown) + 1)) if layer not in present), None)
    extra = next((layer for layer in shown if layer >= declared.value), None)
    what = f"layer {absent} is absent" if absent is not None else f"layer {extra} is there as well"
    yield LayerFault(
        "shape",
        absent if absent is not None else extra,
        layer_prefix(checkpoint, absent if absent is not None else shown[-1]) + "*",
        checkpoint.path,
        f"{declared.source} is {declared.value}, but the tensors show {len(shown)} layers: {what}",
        "Correct the config, or download the checkpoint again.",
    )


def experts_missing(
    row: MixtureRow,
    faults: tuple[LayerFault, ...],
    found: Mapping[tuple[str, str], TensorEntry],
    checkpoint: Checkpoint,
    *,
    layer: int,
) -> tuple[LayerFault, ...]:
    """The faults, with those of experts none of whose tensors is there told as one.

    Where the router has a row for each expert that is there, it is the config that counts more, which its shape tells.
    """
    missing = {fault.tensor for fault in faults if fault.kind in {"missing-tensor", "missing-bias"}}
    if row.arrangement != "separate" or not missing:
        return faults
    prefix, experts = layer_prefix(checkpoint, layer), row.experts
    parts = [part for part in (experts.gate, experts.up, experts.fused, experts.down) if part is not None]
    present = {int(place.partition(".")[0]) for place, _ in found if place[:1].isdecimal()}
    owners = {
        full: number
        for number in range(max(present, default=-1) + 1 + len(missing))
        if number not in present
        for part in parts
        for name in (part.weight, part.bias)
        if (full := prefix + name.replace("{j}", str(number))) in missing
    }
    if not owners:
        return faults
    absent = sorted(set(owners.values()))
    kept = tuple(fault for fault in faults if fault.tensor not in owners)
    router = found.get(("router", "weight"))
    rows = None if router is None or len(router.shape) != 2 else router.shape[row.router_layout == "in_out"]
    if rows is not None and not row.idle and present == set(range(rows)):
        return kept
    told = f"expert {absent[0]} has" if len(absent) == 1 else f"experts {_ranges(absent)} have"
    routed = "" if rows is None else f"; the router has a row for each of {rows}"
    first = next(fault for fault in faults if owners.get(fault.tensor) == absent[0])
    message = f"layer {layer}: {told} no tensor in any file, {len(present)} others have{routed}"
    return (*kept, LayerFault("experts-missing", layer, first.tensor, checkpoint.path, message, first.hint))


def _ranges(numbers: list[int]) -> str:
    """`0 to 3, 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
