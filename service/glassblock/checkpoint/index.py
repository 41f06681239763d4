"""`model.safetensors.index.json`: which tensor lies in which shard, checked against the shards both ways.

A loader that asks only for what the index names never sees a tensor that it forgot, and one that reads
the shards never sees a name without a tensor. Both directions are joined here, and told as values.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Literal, cast

from glassblock.checkpoint.container import Container
from glassblock.checkpoint.files import leads_nowhere, read_whole
from glassblock.checkpoint.shard_names import nowhere_in_words, number_of, numbered
from glassblock.checkpoint.strict_json import JsonFault, parse_json, shown
from glassblock.errors import DamagedCheckpoint

MAX_INDEX_BYTES = 64 << 20
"""Longest index read. One of a million tensors has about 60 MB."""

IndexFaultKind = Literal[
    "header",
    "missing-shard",
    "missing-tensor",
    "unlisted-tensor",
    "wrong-shard",
    "total-size",
    "two-weight-sets",
    "duplicate",
]

_RULES: Mapping[IndexFaultKind, str] = MappingProxyType({"header": "container/header", "duplicate": "tensor/duplicate"})
_LONGEST_NAME = 255
_NOT_IN_NAMES = re.compile(r"[/\\\x00-\x1f\x7f\ud800-\udfff]")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class IndexFault:
    """One disagreement between index, shards and directory.

    Attributes:
        kind: Which, after the rules `index/*`; `header` when the index itself cannot be read, `duplicate` when one
            tensor lies in two shards.
        file: The index or shard at fault.
        tensors: The names concerned, all of them.
        byte: Where an unreadable index stops being readable.
        message: What is wrong, with numbers and the first few names.
        hint: What to do.
    """

    kind: IndexFaultKind
    file: Path
    message: str
    hint: str
    tensors: tuple[str, ...] = ()
    byte: int | None = None

    @property
    def tensor(self) -> str | None:
        """The first tensor concerned."""
        return self.tensors[0] if self.tensors else None

    @property
    def rule(self) -> str:
        """The name of the audit rule it falls under."""
        return _RULES.get(self.kind, f"index/{self.kind}")


@dataclass(frozen=True)
class Index:
    """What an index says, as far as it can be used.

    Attributes:
        file: The index.
        weight_map: Tensor name to shard name; only names that are plain file names in the same directory.
        total_size: Bytes of tensor data it claims, or None.
        faults: What is wrong with the index by itself.
        refused: Tensors that it puts under a name that is no plain file name; each has its fault.
        metadata: What else it says of itself.
    """

    file: Path
    weight_map: Mapping[str, str]
    total_size: int | None
    faults: tuple[IndexFault, ...]
    refused: frozenset[str] = frozenset()
    metadata: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def lists_nothing(self) -> bool:
        """Whether it can be read, and names not one tensor."""
        return not self.weight_map and not self.refused and all(fault.kind != "header" for fault in self.faults)

    @cached_property
    def shards(self) -> Mapping[str, None]:
        """The shards it names, sorted; a mapping, for they are looked up by name."""
        return dict.fromkeys(sorted(set(self.weight_map.values())))


def read_index(path: Path, *, real: Path | None = None) -> Index:
    """The index at `path`; damage is in its faults.

    Raises:
        UnknownCheckpoint, AccessRefused, ServiceUnavailable: See `files.open_regular`.
    """

    def broken(message: str, byte: int | None = None) -> Index:
        hint = "Write the index again from the shards' headers."
        return Index(path, {}, None, (IndexFault("header", path, f"{path.name} {message}", hint, byte=byte),))

    if leads_nowhere(path):
        return broken("is a link that leads nowhere")
    try:
        raw = read_whole(path.resolve() if real is None else real, name=path.name, limit=MAX_INDEX_BYTES)
        value = parse_json(raw, constants=False)
    except DamagedCheckpoint as error:
        return broken(f"cannot be used: {error.message}")
    except JsonFault as error:
        return broken(f"cannot be read: {error.message}", error.byte)
    fields = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    mapped = fields.get("weight_map")
    if not isinstance(mapped, dict):
        return broken("has no object weight_map")
    weight_map = cast("dict[str, object]", mapped)
    metadata = fields.get("metadata")
    claimed = cast("dict[str, object]", metadata).get("total_size") if isinstance(metadata, dict) else None
    total_size = _size(claimed)
    faults: list[IndexFault] = []
    if claimed is not None and total_size is None:
        message = f"{path.name} claims a total_size of {claimed!r:.80}, which is no whole number of bytes"
        faults.append(IndexFault("total-size", path, message, "Write the sum of the tensors' bytes."))
    usable, refused = _plain_names(weight_map)
    if refused:
        place = shown(str(weight_map[refused[0]]))
        message = (
            f"{path.name} puts {names_in_words(refused)} into {place}, which is no name of a "
            "safetensors file beside it; it was not opened"
        )
        hint = "Name shards of the same directory only."
        faults.append(IndexFault("missing-shard", path, message, hint, tuple(refused)))
    told = MappingProxyType(cast("dict[str, object]", metadata) if isinstance(metadata, dict) else {})
    return Index(path, MappingProxyType(usable), total_size, tuple(faults), frozenset(refused), told)


def compare_index(
    index: Index, containers: Mapping[str, Container], *, nowhere: Collection[str] = ()
) -> tuple[IndexFault, ...]:
    """Join the index with the headers of its shards, both ways.

    Args:
        index: The index.
        containers: Shard name to header, of the shards that are there.
        nowhere: Shards that are links to nowhere, which are not there.

    Returns:
        One fault for each kind and shard, and one for all absent shards together. A shard whose header cannot be
        read has its own container fault and convicts no tensor here.
    """
    claimed: dict[str, list[str]] = defaultdict(list)
    for tensor, shard in index.weight_map.items():
        claimed[shard].append(tensor)
    holders = holders_of(containers.values())
    absent = [shard for shard in index.shards if shard not in containers]
    faults = [_missing_shards(index, absent, claimed, nowhere)] if absent else []
    unsure = not all(container.listed for container in containers.values())
    for shard in index.shards:
        container = containers.get(shard)
        if container is not None and container.listed:
            faults.extend(_claims(index, shard, container, claimed[shard], holders, unsure=unsure))
    for shard, container in sorted(containers.items()):
        unlisted = [name for name in container.entries if name not in index.weight_map and name not in index.refused]
        if unlisted:
            message = (
                f"{shard} holds {names_in_words(unlisted)}, which {index.file.name} does not list: a loader skips them"
            )
            hint = "A loader that follows the index skips them: add them to it, or remove them."
            faults.append(IndexFault("unlisted-tensor", container.file, message, hint, tuple(unlisted)))
    once = len(holders) == sum(len(container.entries) for container in containers.values())
    if not faults and once and not unsure:
        faults.extend(_total_size(index, containers.values()))
    return tuple(faults)


def duplicate_faults(containers: Iterable[Container]) -> tuple[IndexFault, ...]:
    """One fault for each set of files that hold tensors of the same names."""
    together: dict[tuple[Path, ...], list[str]] = defaultdict(list)
    for name, files in _copies(containers).items():
        together[tuple(files)].append(name)
    return tuple(
        IndexFault(
            "duplicate",
            files[-1],
            f"{names_in_words(names)} lies in {_files_in_words(files)}",
            "Keep one copy. Without an index, which of them a loader takes depends on the order it reads in.",
            tuple(names),
        )
        for files, names in together.items()
    )


def holders_of(containers: Iterable[Container]) -> dict[str, Path]:
    """The first file that holds each tensor."""
    holders: dict[str, Path] = {}
    for container in containers:
        for name in container.entries:
            holders.setdefault(name, container.file)
    return holders


def _copies(containers: Iterable[Container]) -> dict[str, list[Path]]:
    """The files that hold a tensor, for tensors in several."""
    first: dict[str, Path] = {}
    copies: dict[str, list[Path]] = {}
    for container in containers:
        for name in container.entries:
            if name in first:
                copies.setdefault(name, [first[name]]).append(container.file)
            else:
                first[name] = container.file
    return copies


def missing_by_number(
    names: Sequence[str], directory: Path, *, nowhere: Collection[str] = ()
) -> tuple[IndexFault, ...]:
    """Shards that the numbers in the names of the others promise (`model-00001-of-00002.safetensors`).

    For directories without an index, where nothing else would tell.

    Args:
        names: The shards that are there.
        directory: Where.
        nowhere: Shards that are links to nowhere, which are not there.
    """
    series: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in (*names, *nowhere):
        if (belongs := numbered(name)) is not None:
            series[belongs].update(() if name in nowhere else (number_of(name),))
    faults: list[IndexFault] = []
    for (stem, count), numbers in sorted(series.items()):
        absent = int(count) - sum(1 <= number <= int(count) for number in numbers)
        if absent <= 0:
            continue
        first = next(number for number in range(1, int(count) + 1) if number not in numbers)
        name = f"{stem}-{first:0{len(count)}d}-of-{count}.safetensors"
        message = (
            f"{absent} of {int(count)} shards named {stem}-*-of-{count} are absent, the first is {name}"
            f"{nowhere_in_words([one for one in nowhere if numbered(one) == (stem, count)])}"
        )
        faults.append(IndexFault("missing-shard", directory / name, message, "Download the missing shards."))
    return tuple(faults)


def _size(value: object) -> int | None:
    # Some writers put a float there.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and value >= 0 else None


def _plain_names(weight_map: dict[str, object]) -> tuple[dict[str, str], list[str]]:
    usable: dict[str, str] = {}
    refused: list[str] = []
    plain: dict[str, bool] = {}
    for tensor, shard in weight_map.items():
        if isinstance(shard, str):
            if shard not in plain:
                plain[shard] = is_plain_name(shard) and shard.endswith(".safetensors")
            if plain[shard]:
                usable[tensor] = shard
                continue
        refused.append(tensor)
    return usable, refused


def is_plain_name(name: str) -> bool:
    """Whether `name` is the name of a file in the same directory, and nothing that leads elsewhere.

    Control characters and bytes that are no UTF-8 are refused too: a message must be able to show the name.
    """
    if name in {"", ".", ".."} or _NOT_IN_NAMES.search(name):
        return False
    return len(name.encode("utf-8")) <= _LONGEST_NAME


def names_in_words(names: Sequence[str]) -> str:
    """`the tensor "a"`, or `12 tensors ("a", "b", "c", "d", "e" and 7 more)`."""
    first = ", ".join(shown(name) for name in names[:_SHOWN])
    if len(names) == 1:
        return f"the tensor {first}"
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"{len(names):,} tensors ({first}{more})"


def _files_in_words(files: Sequence[Path]) -> str:
    more = f" and in {len(files) - _SHOWN:,} more" if len(files) > _SHOWN else ""
    return " and in ".join(file.name for file in files[:_SHOWN]) + more


def _missing_shards(
    index: Index, absent: Sequence[str], claimed: Mapping[str, list[str]], nowhere: Collection[str]
) -> IndexFault:
    tensors = tuple(name for shard in absent for name in claimed[shard])
    many = f"{len(absent)} of {len(index.shards)} shards are"
    which = f"the shard {shown(absent[0])} is" if len(absent) == 1 else many
    first = "" if len(absent) == 1 else f", the first is {shown(absent[0])}"
    links = nowhere_in_words([shard for shard in absent if shard in nowhere])
    message = f"{which} absent{first}{links}; {index.file.name} puts {names_in_words(tensors)} there"
    hint = "Download what is missing. Only where it was left out on purpose, write the index again without it."
    return IndexFault("missing-shard", index.file.with_name(absent[0]), message, hint, tensors)


def _claims(
    index: Index,
    shard: str,
    container: Container,
    claimed: Sequence[str],
    holders: Mapping[str, Path],
    *,
    unsure: bool,
) -> Iterator[IndexFault]:
    absent = [name for name in claimed if name not in container.entries and name not in container.refused]
    elsewhere: dict[Path, list[str]] = defaultdict(list)
    for name in absent:
        if name in holders:
            elsewhere[holders[name]].append(name)
    for file, names in elsewhere.items():
        message = f"{index.file.name} puts {names_in_words(names)} into {shard}, but it lies in {file.name}"
        yield IndexFault("wrong-shard", file, message, "Correct the index.", tuple(names))
    nowhere = [name for name in absent if name not in holders]
    if nowhere:
        doubt = " (one shard could not be read)" if unsure else ""
        message = f"{index.file.name} lists {names_in_words(nowhere)} in {shard}, which no shard holds{doubt}"
        hint = "Convert the checkpoint again, or remove the name if the model does not need it."
        yield IndexFault("missing-tensor", container.file, message, hint, tuple(nowhere))


def _total_size(index: Index, containers: Iterable[Container]) -> Iterator[IndexFault]:
    held = sum(entry.bytes for container in containers for entry in container.entries.values())
    if index.total_size is not None and index.total_size != held:
        message = f"{index.file.name} claims a total_size of {index.total_size:,} bytes; the shards hold {held:,}"
        yield IndexFault("total-size", index.file, message, "Write the sum of the tensors' bytes.")
