"""A checkpoint as opened: every header, the index, the config and the family, and not one byte of tensor data.

What is wrong stays a value, so that an audit can report all of it; `Checkpoint.require_usable` turns the
first fatal fault into an error, for whoever wants to run something.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from glassblock.checkpoint.config import ConfigFault, ConfigFile
from glassblock.checkpoint.contents import Contents, read_contents
from glassblock.checkpoint.entries import Container, ContainerFault, TensorEntry
from glassblock.checkpoint.family import Architecture, Trunk
from glassblock.checkpoint.index import Index, IndexFault
from glassblock.checkpoint.name_fits import find_trunk
from glassblock.checkpoint.recognition import PartWithin, family_named, no_trunk, part_within, recognise, with_fitting
from glassblock.checkpoint.roots import Roots
from glassblock.checkpoint.settings import Sourced, config_faults, size_of
from glassblock.checkpoint.shard_names import is_shard
from glassblock.checkpoint.strict_json import shown
from glassblock.checkpoint.variants import row_for
from glassblock.checkpoint.weight_sets import SINGLE_NAME, in_use, join_entries, weight_set_faults
from glassblock.checkpoint.wrappers import are_wrapped, with_wrappers
from glassblock.errors import (
    DamagedCheckpoint,
    FamilyMismatch,
    InvalidValue,
    UnknownFamily,
)

Fault = ContainerFault | IndexFault | ConfigFault

_HARMLESS = frozenset({"unlisted-tensor", "total-size", "two-weight-sets"})


@dataclass(frozen=True)
class Checkpoint:
    """What lies at a path.

    Attributes:
        path: The directory or file.
        containers: Headers of the weight files in use, by file name.
        index: The index, where there is one.
        config: config.json, where there is a readable one; params.json in the layout of Meta and Mistral.
        params: params.json beside a config.json. It is reported, not used.
        entries: The tensors, each once.
        duplicates: Tensors that lie in more than one file, with all their places.
        faults: Everything wrong with containers, index and config.
        family: The row of the family table that the config names, or that was asked for.
        family_fault: Why there is no family, or why its names fit none of the tensors. None beside `family` None when
            config.json cannot be read, which is one of `faults`.
        trunk: How the file prefixes the family's names.
        layer_indices: The layers of which the tensors show something, in order.
        notes: What was taken for granted while opening, in sentences.
        contents: What all this was told from.
        part: The part of a larger model that `family` describes, where the config names no family for the whole.
    """

    path: Path
    containers: Mapping[str, Container]
    index: Index | None
    config: ConfigFile | None
    params: ConfigFile | None
    entries: Mapping[str, TensorEntry]
    duplicates: Mapping[str, tuple[TensorEntry, ...]]
    faults: tuple[Fault, ...]
    family: Architecture | None
    family_fault: ConfigFault | None
    trunk: Trunk | None
    layer_indices: tuple[int, ...]
    notes: tuple[str, ...]
    contents: Contents
    part: PartWithin | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files in use."""
        return tuple(container.file for container in self.containers.values())

    @property
    def layers(self) -> int:
        """Number of layers that the tensors show."""
        return len(self.layer_indices)

    @property
    def bytes(self) -> int:
        """Bytes of tensor data, each tensor counted once."""
        return sum(entry.bytes for entry in self.entries.values())

    @property
    def declared_layers(self) -> Sourced[int] | None:
        """Number of layers that the config declares; None without a config or a family.

        Raises:
            DamagedCheckpoint: The config holds no positive whole number there.
        """
        if self.config is None or self.family is None:
            return None
        return size_of(self.config, self.family, "layers")

    @property
    def has_unread_files(self) -> bool:
        """Whether tensors may lie where nobody looked: in an absent or unreadable shard, or beside one opened alone."""
        if self.path.name in self.containers and is_shard(self.path.name):
            return True
        absent = any(isinstance(fault, IndexFault) and fault.kind == "missing-shard" for fault in self.faults)
        return absent or not all(container.listed for container in self.containers.values())

    def explains_absence(self, name: str) -> bool:
        """Whether some fault told already accounts for the tensor `name` not being in `entries`."""
        if name in self.entries:
            return False
        listed = self.index is not None and name in self.index.weight_map
        refused = any(name in container.refused for container in self.containers.values())
        return listed or refused or self.has_unread_files

    def tower(self, name: str) -> "Checkpoint":
        """The checkpoint seen as another stack of its layers, such as the encoder of an encoder-decoder.

        Raises:
            InvalidValue: Its family has no tower of that name.
            FamilyMismatch: No tensor has the names of that tower.
            DamagedCheckpoint, UnknownFamily: See `require_usable`.
        """
        family = self.require_usable()
        row = family.towers.get(name)
        if row is None:
            raise InvalidValue(
                f"the family {family.name} has no tower {name!r:.80}",
                field="tower",
                known=tuple(family.towers),
                hint="Leave it out, or use one of its towers." if family.towers else "Leave it out.",
            )
        row = row_for(row, self.config)
        trunk, layers = find_trunk(row, self.entries)
        if trunk is None:
            raise FamilyMismatch(
                f"no tensor has the names of the {name} of the family {family.name}", hint="Look at the names."
            )
        return replace(self, family=row, trunk=trunk, layer_indices=layers)

    def require_usable(self) -> Architecture:
        """The family, once it is sure that a run can stand on the files.

        Raises:
            DamagedCheckpoint: For the first fault of a container, an index or the config that a run cannot live with.
            UnknownFamily: No family is known.
            FamilyMismatch: The family's names fit none of the tensors.
        """
        for fault in self.faults:
            if self._is_fatal(fault):
                raise DamagedCheckpoint(
                    fault.message, hint=fault.hint, file=fault.file.name, tensor=fault.tensor, byte=fault.byte
                )
        if self.family is None or self.trunk is None:
            fault = self.family_fault
            error = UnknownFamily if self.family is None else FamilyMismatch
            raise error(
                "the family is unknown" if fault is None else fault.message,
                hint=None if fault is None else fault.hint,
                file=None if fault is None else fault.file.name,
                known=() if fault is None else fault.known,
            )
        return self.family

    def _is_fatal(self, fault: Fault) -> bool:
        if isinstance(fault, IndexFault) and fault.file.name in self.containers and fault.kind == "missing-shard":
            return False  # one shard, opened alone: what it holds can be run
        if isinstance(fault, IndexFault):
            governs = self.index is not None and any(shard in self.containers for shard in self.index.shards)
            if fault.kind == "duplicate":
                # With an index it is clear which of two copies is meant.
                return not governs
            # A stale index beside a whole model.safetensors is an audit's matter: the weights do not depend on it.
            return fault.kind not in _HARMLESS and (governs or SINGLE_NAME not in self.containers)
        # A damaged file beside the weights in use harms nobody who runs them.
        return not isinstance(fault, ContainerFault) or fault.file.name in self.containers


def open_checkpoint(
    path: Path | str, *, roots: Roots | None = None, family: str | Architecture | None = None
) -> Checkpoint:
    """Open the directory or safetensors file at `path`.

    Args:
        path: A directory with safetensors files, or one such file. A config.json beside the file is used.
        roots: Directories into which links may lead; without them only inside the checkpoint itself and inside the
            Hugging Face cached repository that it lies in.
        family: A name of the family table, or a row of its own, instead of what the config says.

    Raises:
        UnknownCheckpoint: There is nothing at the path, or a directory without safetensors files.
        AccessRefused: A file may not be read, or is a link that leads elsewhere.
        UnknownFamily: `family` is not in the table.
        TooLarge: It lies among more files than are looked at.
        ServiceUnavailable: Too many files are open.
    """
    asked = family_named(family) if isinstance(family, str) else family
    return assemble(read_contents(Path(path), asked, roots))


def assemble(contents: Contents) -> Checkpoint:
    """The checkpoint that these files make up: which are in use, what is wrong between them, and the family."""
    directory, index, config, containers = contents.directory, contents.index, contents.config, contents.containers
    # Nobody loads through a link to nowhere while there is anything else.
    somewhere = {name: container for name, container in containers.items() if name not in contents.nowhere}
    used = in_use(somewhere or containers, index)
    beside = {name: container for name, container in containers.items() if name not in used}
    entries, duplicates = join_entries(used, index)
    row, family_fault, part = contents.asked, None, None
    if row is None and contents.config_fault is None:
        row, family_fault = recognise(config, directory)
        part = None if row is not None else _part_there(config, entries)
        row, family_fault = (row, family_fault) if part is None else (part.row, None)
    all_listed = bool(used) and all(container.listed for container in used.values())
    if family_fault is not None and all_listed:
        fitted = with_fitting(family_fault, entries)
        family_fault = with_wrappers(fitted, entries) if fitted is family_fault else fitted
    if row is not None and all_listed and are_wrapped(entries, row_for(row, config)):
        # Of names that are partly wrapped, what is left would pass for a damaged checkpoint.
        row, trunk, layers, tower = row_for(row, config), None, (), None
    else:
        row, trunk, layers, tower = _placed(row, config, entries)
    if row is not None and trunk is None and all_listed:
        family_fault = no_trunk(row, entries, directory, asked=contents.asked is not None)
        family_fault = with_wrappers(family_fault, entries, row)
    faults: list[Fault] = [fault for container in containers.values() for fault in container.faults]
    absent = contents.nowhere - containers.keys()
    faults.extend(weight_set_faults(directory, used, beside, index, present=contents.present, nowhere=absent))
    faults.extend([] if contents.config_fault is None else [contents.config_fault])
    faults.extend([] if config is None or row is None else config_faults(config, row))
    named = None if contents.asked is None or row is None else row.name
    return Checkpoint(
        path=contents.path,
        containers=MappingProxyType(used),
        index=index,
        config=config,
        params=contents.params,
        entries=MappingProxyType(entries),
        duplicates=MappingProxyType(duplicates),
        faults=tuple(faults),
        family=row,
        family_fault=family_fault,
        trunk=trunk,
        layer_indices=layers,
        notes=(*_notes(contents.path, config, named), *_tower_note(row, tower), *_part_note(part)),
        contents=contents,
        part=part,
    )


def _part_there(config: ConfigFile | None, entries: Mapping[str, TensorEntry]) -> PartWithin | None:
    """The language model that the config declares within, where the tensors have the names of its layers."""
    part = part_within(config)
    if part is None or find_trunk(row_for(part.row, config), entries)[0] is None:
        return None
    return part


def _placed(
    row: Architecture | None, config: ConfigFile | None, entries: Mapping[str, TensorEntry]
) -> tuple[Architecture | None, Trunk | None, tuple[int, ...], str | None]:
    """The row under the config, its trunk and layers; a tower's where the files hold nothing but that."""
    if row is None:
        return None, None, (), None
    row = row_for(row, config)
    trunk, layers = find_trunk(row, entries)
    if trunk is None:
        for name, tower in row.towers.items():
            under = row_for(tower, config)
            trunk, layers = find_trunk(under, entries)
            if trunk is not None:
                return under, trunk, layers, name
    return row, trunk, layers, None


def _tower_note(row: Architecture | None, tower: str | None) -> Iterator[str]:
    if tower is not None and row is not None:
        yield f"The files hold the {tower} alone, and it is what was opened."


def _part_note(part: PartWithin | None) -> Iterator[str]:
    if part is not None:
        yield (
            f"The config names no known family for the whole; its {part.key} says model_type {shown(part.model_type)}, "
            "and that part alone was opened, as it runs by itself."
        )


def _notes(path: Path, config: ConfigFile | None, family: str | None) -> Iterator[str]:
    if path.is_file() and config is not None:
        yield f"{path.name} was opened alone, with the config.json beside it."
    if path.is_file() and is_shard(path.name):
        yield f"{path.name} is one of several shards; tensors that it does not hold are not looked for."
    if family is not None:
        yield f"The family {family} was asked for, not read from a config."
    if family is not None and config is None:
        yield "There is no config.json: epsilons and activations are the family's defaults, sizes are the tensors'."
