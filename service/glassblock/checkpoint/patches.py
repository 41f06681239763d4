"""Patches of a checkpoint as data, and the checkpoint as it would be opened after one: not a byte is written for it.

A patch is a tuple of edits, applied in order. `drafted` gives the patched checkpoint and the files that would differ;
`writing` and `in_place` write exactly those.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import cast

from glassblock.checkpoint.changes import Change, altered
from glassblock.checkpoint.config import ConfigFile
from glassblock.checkpoint.contents import INDEX_NAME, Contents
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.index import Index
from glassblock.checkpoint.opened import Checkpoint, assemble
from glassblock.checkpoint.rewriting import REWRITABLE, Rewritten, rewritten, shortened
from glassblock.checkpoint.shard_names import series_of
from glassblock.checkpoint.strict_json import shown
from glassblock.errors import DamagedCheckpoint, InvalidValue


@dataclass(frozen=True, slots=True)
class Rename:
    """Tensors under other names, all at once: two that are exchanged are two entries. No data moves."""

    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Alter:
    """The elements of a tensor changed."""

    tensor: str
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """A tensor left out; of several copies the one in `file`."""

    tensor: str
    file: str | None = None


@dataclass(frozen=True, slots=True)
class Stand:
    """The numbers of the tensor `source` in the place of those of `tensor`."""

    tensor: str
    source: str


@dataclass(frozen=True, slots=True)
class Declare:
    """A value at a dotted key of the config; None takes the key out."""

    key: str
    value: int | float | bool | str | None


@dataclass(frozen=True, slots=True)
class Relist:
    """The index written anew from the shards' headers. Names that no shard holds stay, for they are missing."""


@dataclass(frozen=True, slots=True)
class Compact:
    """A weight file written anew, its tensors one behind the other."""

    file: str


@dataclass(frozen=True, slots=True)
class LoseFile:
    """A weight file gone."""

    file: str


@dataclass(frozen=True, slots=True)
class LoseEnd:
    """The last bytes of a weight file gone."""

    file: str
    bytes: int


Edit = Rename | Alter | Drop | Stand | Declare | Relist | Compact | LoseFile | LoseEnd
Patch = tuple[Edit, ...]


@dataclass(frozen=True)
class Draft:
    """A patched checkpoint.

    Attributes:
        checkpoint: As it would be opened.
        files: The weight files that differ, by name.
        texts: Config and index that differ, by name.
        lost: Weight files that are left out.
    """

    checkpoint: Checkpoint
    files: Mapping[str, Rewritten]
    texts: Mapping[str, bytes]
    lost: frozenset[str]

    @property
    def in_place(self) -> bool:
        """Whether headers, config and index are all that differs."""
        return not self.lost and all(file.header_only for file in self.files.values())


def patched(checkpoint: Checkpoint, patch: Iterable[Edit]) -> Checkpoint:
    """The checkpoint as it would be opened after the patch; its tensors are read through it.

    Raises:
        InvalidValue: An edit names a tensor, file or key that is not there, or does not fit it.
        DamagedCheckpoint: A weight file would have to be rewritten whose header cannot be believed.
    """
    return drafted(checkpoint, patch).checkpoint


def drafted(checkpoint: Checkpoint, patch: Iterable[Edit]) -> Draft:
    """As `patched`, with the files that differ.

    Raises:
        InvalidValue, DamagedCheckpoint: See `patched`.
    """
    sketch = _Sketch(checkpoint.contents)
    for edit in patch:
        _EDITS[type(edit)](sketch, edit)
    return sketch.draft()


@dataclass
class _Sketch:
    """Files under edit: each weight file's tensors in the order of their data, with the place each is read from."""

    contents: Contents
    tensors: dict[str, dict[str, TensorEntry]] = field(default_factory=dict[str, dict[str, TensorEntry]])
    touched: set[str] = field(default_factory=set[str])
    cut: dict[str, int] = field(default_factory=dict[str, int])
    lost: set[str] = field(default_factory=set[str])
    config: dict[str, object] | None = None
    index: Index | None = None

    def __post_init__(self) -> None:
        self.tensors = {name: dict(container.entries) for name, container in self.contents.containers.items()}
        self.index = self.contents.index

    def holders(self, tensor: str, file: str | None = None) -> list[str]:
        """The files that hold a tensor, about to be rewritten."""
        files = [name for name, held in self.tensors.items() if tensor in held and file in {None, name}]
        if not files:
            raise InvalidValue(f"no weight file holds the tensor {shown(tensor)}", tensor=tensor, field="patch")
        for name in files:
            self.touch(name)
        return files

    def touch(self, name: str) -> None:
        """Mark a file as rewritten.

        Raises:
            InvalidValue: There is no such file.
            DamagedCheckpoint: Its tensors cannot be told.
        """
        container = self.contents.containers.get(name)
        if container is None:
            raise InvalidValue(f"there is no weight file {name}", file=name, field="patch")
        for fault in container.faults:
            if fault.kind not in REWRITABLE:
                raise DamagedCheckpoint(
                    f"{name} cannot be rewritten: {fault.message}", file=name, byte=fault.byte, hint=fault.hint
                )
        self.touched.add(name)

    def relabel(self, label: Callable[[str], str | None], *, less: int = 0) -> None:
        """Rename the index's tensors (None: not listed any more), `less` bytes in all."""
        if self.index is None:
            return
        listed = {new: shard for name, shard in self.index.weight_map.items() if (new := label(name)) is not None}
        total = None if self.index.total_size is None else self.index.total_size - less
        self.index = replace(self.index, weight_map=MappingProxyType(listed), total_size=total)

    def draft(self) -> Draft:
        """What comes of it."""
        files = {name: rewritten(self.contents.containers[name], self.tensors[name]) for name in self.touched}
        containers = {
            name: files[name].container if name in files else container
            for name, container in self.contents.containers.items()
            if name not in self.lost
        }
        for name, count in self.cut.items():
            containers[name] = shortened(containers[name], count)
        config, texts = self.contents.config, dict[str, bytes]()
        if config is not None and self.config is not None:
            config = ConfigFile(config.path, MappingProxyType(self.config))
            texts[config.path.name] = (json.dumps(self.config, indent=2, ensure_ascii=False) + "\n").encode()
        present = self.contents.present
        if self.index is not None and self.index != self.contents.index:
            texts[self.index.file.name] = _index_text(self.index)
            present = None if present is None else present | {self.index.file.name}
        contents = replace(
            self.contents,
            containers=MappingProxyType(containers),
            config=config,
            index=self.index,
            present=None if present is None else present - self.lost,
        )
        return Draft(assemble(contents), MappingProxyType(files), MappingProxyType(texts), frozenset(self.lost))


def _rename(sketch: _Sketch, edit: Rename) -> None:
    if len(set(edit.names.values())) != len(edit.names):
        raise InvalidValue("two tensors would have one name", field="patch")
    files = {file for name in edit.names for file in sketch.holders(name)}
    for file in files:
        held = sketch.tensors[file]
        renamed = {edit.names.get(name, name): entry for name, entry in held.items()}
        if len(renamed) != len(held):
            raise InvalidValue(f"a name that is given in {file} is another tensor's", file=file, field="patch")
        sketch.tensors[file] = renamed
    sketch.relabel(lambda name: edit.names.get(name, name))


def _alter(sketch: _Sketch, edit: Alter) -> None:
    for file in sketch.holders(edit.tensor):
        entry = sketch.tensors[file][edit.tensor]
        try:
            after = altered(entry, *edit.changes)
        except ValueError as fault:
            raise InvalidValue(f"{edit.tensor}: {fault}", tensor=edit.tensor, field="patch") from None
        sketch.tensors[file][edit.tensor] = after
        sketch.relabel(lambda name: name, less=entry.bytes - after.bytes)


def _drop(sketch: _Sketch, edit: Drop) -> None:
    dropped = [sketch.tensors[file].pop(edit.tensor) for file in sketch.holders(edit.tensor, edit.file)]
    left = next((file for file, held in sketch.tensors.items() if edit.tensor in held), None)
    if left is None:
        lost = sum(entry.bytes for entry in dropped)
        sketch.relabel(lambda name: None if name == edit.tensor else name, less=lost)


def _stand(sketch: _Sketch, edit: Stand) -> None:
    entry = next((held[edit.source] for held in sketch.tensors.values() if edit.source in held), None)
    if entry is None:
        raise InvalidValue(f"no weight file holds the tensor {shown(edit.source)}", tensor=edit.source, field="patch")
    for file in sketch.holders(edit.tensor):
        less = sketch.tensors[file][edit.tensor].bytes - entry.bytes
        sketch.tensors[file][edit.tensor] = entry
        sketch.relabel(lambda name: name, less=less)


def _declare(sketch: _Sketch, edit: Declare) -> None:
    if sketch.contents.config is None:
        raise InvalidValue("there is no config that can be read", field="patch", hint="Restore config.json.")
    if sketch.config is None:
        sketch.config = cast("dict[str, object]", json.loads(json.dumps(dict(sketch.contents.config.values))))
    *outer, last = edit.key.split(".")
    place = sketch.config
    for part in outer:
        inner = place.get(part)
        if not isinstance(inner, dict):
            raise InvalidValue(f"{sketch.contents.config.path.name} has no object {part}", field="patch")
        place = cast("dict[str, object]", inner)
    if edit.value is None:
        place.pop(last, None)
    else:
        place[last] = edit.value


def _relist(sketch: _Sketch, _: Relist) -> None:
    index, containers = sketch.index, sketch.contents.containers
    shards = [name for name in sketch.tensors if index is None or name in index.shards]
    numbering = {series_of(name) for name in shards or sketch.tensors}
    shards = [name for name in sketch.tensors if name in shards or series_of(name) in numbering]
    for name in shards:
        if not containers[name].listed:
            raise DamagedCheckpoint(f"{name} cannot be listed: its header cannot be read", file=name)
    held: dict[str, str] = {}
    for name in shards:
        for tensor in sketch.tensors[name]:
            before = None if index is None else index.weight_map.get(tensor)
            held[tensor] = name if tensor not in held or name == before else held[tensor]
    file = sketch.contents.directory / INDEX_NAME if index is None else index.file
    if index is None and len(numbering) == 1:
        file = sketch.contents.directory / f"{numbering.pop()}.safetensors.index.json"
    missing = (
        {} if index is None else {tensor: shard for tensor, shard in index.weight_map.items() if tensor not in held}
    )
    refused = frozenset[str]() if index is None else index.refused - held.keys()
    sketch.index = Index(
        file,
        MappingProxyType(missing | held),
        sum(sketch.tensors[shard][tensor].bytes for tensor, shard in held.items()),
        () if index is None else tuple(fault for fault in index.faults if refused.intersection(fault.tensors)),
        refused,
        MappingProxyType({} if index is None else dict(index.metadata)),
    )


def _compact(sketch: _Sketch, edit: Compact) -> None:
    sketch.touch(edit.file)


def _lose_file(sketch: _Sketch, edit: LoseFile) -> None:
    if sketch.tensors.pop(edit.file, None) is None:
        raise InvalidValue(f"there is no weight file {edit.file}", file=edit.file, field="patch")
    sketch.lost.add(edit.file)


def _lose_end(sketch: _Sketch, edit: LoseEnd) -> None:
    sketch.touch(edit.file)
    sketch.cut[edit.file] = sketch.cut.get(edit.file, 0) + edit.bytes


_EDITS: Mapping[type[Edit], Callable[[_Sketch, "object"], None]] = cast(
    "Mapping[type[Edit], Callable[[_Sketch, object], None]]",
    MappingProxyType(
        {
            Rename: _rename,
            Alter: _alter,
            Drop: _drop,
            Stand: _stand,
            Declare: _declare,
            Relist: _relist,
            Compact: _compact,
            LoseFile: _lose_file,
            LoseEnd: _lose_end,
        }
    ),
)


def _index_text(index: Index) -> bytes:
    metadata = dict(index.metadata)
    if index.total_size is not None:
        metadata["total_size"] = index.total_size
    value = {"metadata": metadata, "weight_map": dict(sorted(index.weight_map.items()))}
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
