"""Which of a directory's weight files belong together, and which of them a loader takes."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from glassblock.checkpoint.entries import Container, TensorEntry
from glassblock.checkpoint.index import (
    Index,
    IndexFault,
    compare_index,
    duplicate_faults,
    holders_of,
    missing_by_number,
    names_in_words,
)
from glassblock.checkpoint.shard_names import is_shard, numbered, series_of

WEIGHTS_SUFFIX = ".safetensors"
SINGLE_NAME = f"model{WEIGHTS_SUFFIX}"
"""The name of an unsharded weight file."""


def in_use(containers: Mapping[str, Container], index: Index | None) -> dict[str, Container]:
    """The weight files that a loader takes.

    As transformers does: model.safetensors before an index that does not name it, the index's shards, then
    whatever there is. A shard that the index forgot is taken with those it names, as loaders of whole shards do.
    """
    if SINGLE_NAME in containers and (index is None or SINGLE_NAME not in index.shards):
        return {SINGLE_NAME: containers[SINGLE_NAME]}
    if index is not None and any(name in index.shards for name in containers):
        return _of_index(index, containers)
    return _largest_series(containers)


def _of_index(index: Index, containers: Mapping[str, Container]) -> dict[str, Container]:
    """The shards that an index names, and others of the same numbering."""
    numberings = {numbered(shard) for shard in index.shards} - {None}
    return {
        name: container
        for name, container in containers.items()
        if name in index.shards or numbered(name) in numberings
    }


def _largest_series(containers: Mapping[str, Container]) -> dict[str, Container]:
    series: dict[str, dict[str, Container]] = defaultdict(dict)
    for name, container in containers.items():
        series[series_of(name)][name] = container
    sharded = {stem: members for stem, members in series.items() if len(members) > 1}
    # Files that follow no numbering may be parts of one set: they are taken together.
    return max(sharded.values(), key=_size) if sharded else dict(containers)


def _size(members: Mapping[str, Container]) -> int:
    return sum(container.size for container in members.values())


def join_entries(
    containers: Mapping[str, Container], index: Index | None
) -> tuple[dict[str, TensorEntry], dict[str, tuple[TensorEntry, ...]]]:
    """The tensors of all files, each once; and those that lie in several, with all their places.

    Of several copies the one that the index names counts, else the one in the first file by name.
    """
    entries: dict[str, TensorEntry] = {}
    places: dict[str, list[TensorEntry]] = {}
    for container in containers.values():
        for name, entry in container.entries.items():
            if name in entries:
                places.setdefault(name, [entries[name]]).append(entry)
            else:
                entries[name] = entry
    duplicates = {name: tuple(copies) for name, copies in places.items()}
    if index is not None:
        for name, copies in duplicates.items():
            shard = index.weight_map.get(name)
            entries[name] = next((copy for copy in copies if copy.file.name == shard), copies[0])
    return entries, duplicates


def weight_set_faults(
    directory: Path,
    used: Mapping[str, Container],
    beside: Mapping[str, Container],
    index: Index | None,
    *,
    present: Collection[str] | None,
    nowhere: Collection[str] = (),
) -> Iterator[IndexFault]:
    """What is wrong between the index, the files in use and those beside them.

    Args:
        directory: The checkpoint's directory.
        used: The files in use.
        beside: The other safetensors files there.
        index: The index, where there is one.
        present: Names of everything in the directory; None where one file in it was opened.
        nowhere: Shards that are links to nowhere, and so absent.
    """
    if index is not None:
        yield from index.faults
        if index.lists_nothing and used:
            yield _empty_index(index, used)
        else:
            joined = _of_index(index, used)
            joined |= {name: container for name, container in beside.items() if name in index.shards}
            yield from compare_index(index, joined, nowhere=nowhere)
    if present is not None and (index is None or not index.shards):
        absent = missing_by_number(tuple(used), directory, nowhere=nowhere)
        yield from absent
        if index is None and not absent:
            yield from _without_index(used, present)
    if present is None:
        yield from (
            _one_of_several(container) for name, container in used.items() if is_shard(name) and container.listed
        )
    yield from duplicate_faults(used.values())
    series: dict[str, dict[str, Container]] = defaultdict(dict)
    listed = frozenset[str]() if index is None else frozenset(index.shards)
    taken = holders_of(used.values()) if beside else {}
    for name, container in beside.items():
        if container.entries:
            series[series_of(name)][name] = container
    for members in series.values():
        yield _beside(used, taken, members, listed=listed)


def _one_of_several(container: Container) -> IndexFault:
    """One shard, opened alone: no checkpoint, whatever it holds."""
    message = f"{container.file.name} is one of several shards; the others were not looked at"
    return IndexFault("missing-shard", container.file, message, "Give the directory that holds all of them.")


def _empty_index(index: Index, used: Mapping[str, Container]) -> IndexFault:
    names = tuple(holders_of(used.values()))
    file = next(iter(used.values())).file
    message = f"{index.file.name} lists no tensor; {_files(used)} holds {names_in_words(names)}: a loader skips them"
    return IndexFault("unlisted-tensor", file, message, "Write the index again from the shards' headers.", names)


def _without_index(used: Mapping[str, Container], present: Collection[str]) -> Iterator[IndexFault]:
    """Numbered shards that no index of theirs joins."""
    sets: dict[tuple[str, str], dict[str, Container]] = defaultdict(dict)
    for name, container in used.items():
        if (belongs := numbered(name)) is not None:
            sets[belongs][name] = container
    for (stem, _), members in sets.items():
        index = f"{stem}{WEIGHTS_SUFFIX}.index.json"
        if index in present:
            continue
        names = tuple(holders_of(members.values()))
        first = next(iter(members.values()))
        message = (
            f"there is no index {index} for {_files(members)}, which hold {names_in_words(names)}: loaders that look "
            "for shards by it refuse the directory"
        )
        yield IndexFault("unlisted-tensor", first.file, message, "Write the index from the shards' headers.", names)


def _files(members: Mapping[str, Container]) -> str:
    return ", ".join(sorted(members)[:3]) + (" and more" if len(members) > 3 else "")


def _beside(
    used: Mapping[str, Container], taken: Collection[str], members: Mapping[str, Container], *, listed: frozenset[str]
) -> IndexFault:
    """What to say of files that no loader of the files in use, whose tensors are `taken`, takes."""
    names = tuple(holders_of(members.values()))
    shared = sum(name in taken for name in names)
    files, loaded = _files(members), _files(used)
    first = next(iter(members.values()))
    second_set = 2 * shared >= len(taken) or 2 * _size(members) >= _size(used) or not listed.isdisjoint(members)
    if second_set:
        message = f"two sets of weights lie here: {loaded} is in use, {files} is not; loaders differ in which they take"
        return IndexFault("two-weight-sets", first.file, message, "Keep one set in the directory.", names)
    message = f"{files} holds {names_in_words(names)}, which loaders of {loaded} do not read"
    return IndexFault("unlisted-tensor", first.file, message, "Remove the file, or list it in the index.", names)
