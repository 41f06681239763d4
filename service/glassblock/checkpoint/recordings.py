"""Recorded tensors in files under the roots: one safetensors file, or a folder of them; their headers alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from glassblock.checkpoint.container import read_container
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.roots import Roots, checked_file
from glassblock.checkpoint.strict_json import shown
from glassblock.checkpoint.weight_sets import WEIGHTS_SUFFIX
from glassblock.errors import (
    AccessRefused,
    GlassblockError,
    InvalidValue,
    NotFound,
    TooLarge,
    UnknownCheckpoint,
)

MAX_FILES = 10_000
"""In one recording."""


@dataclass(frozen=True)
class Recording:
    """What a recording holds.

    Attributes:
        name: What the files are called together.
        files: The tensors of each file by their names, the file by its name without the suffix, in its order.
    """

    name: str
    files: Mapping[str, Mapping[str, TensorEntry]] = field(default_factory=dict[str, Mapping[str, TensorEntry]])


def open_recording(roots: Roots, name: str) -> Recording:
    """The headers of a recording.

    Raises:
        InvalidValue: It holds no safetensors file, or a damaged one, or one without tensors; the field is `captures`.
        NotFound, AccessRefused: Nothing has that name, or it may not be looked at; the field is `captures`.
        TooLarge: It has too many files.
    """
    try:
        path = roots.resolve(name)
        return Recording(name, {file.stem: _entries(file, roots) for file in _files(path, name)})
    except UnknownCheckpoint:
        raise NotFound(
            f"there are no captures {shown(name)}",
            field="captures",
            hint="Name a safetensors file under the roots of the service, or a folder of them.",
        ) from None
    except GlassblockError as error:
        error.field = "captures"
        raise


def _files(path: Path, name: str) -> list[Path]:
    if not path.is_dir():
        if path.suffix != WEIGHTS_SUFFIX:
            raise InvalidValue(f"{name} is no {WEIGHTS_SUFFIX} file", hint="Save captures with safetensors.")
        return [path]
    try:
        files = sorted(each for each in path.iterdir() if each.suffix == WEIGHTS_SUFFIX and each.name[0] != ".")
    except OSError as error:
        raise AccessRefused(f"{name} cannot be looked into: {error.strerror}", hint="Check its permissions.") from error
    if not files:
        raise InvalidValue(f"{name} holds no {WEIGHTS_SUFFIX} file", hint="Name the folder that the captures lie in.")
    if len(files) > MAX_FILES:
        raise TooLarge(f"{name} holds {len(files):,} files; at most {MAX_FILES:,}", hint="Save one for each layer.")
    return files


def _entries(file: Path, roots: Roots) -> Mapping[str, TensorEntry]:
    container = read_container(file, real=checked_file(file.parent, file.name, roots))
    if container.faults:
        fault = container.faults[0]
        raise InvalidValue(f"{file.name} cannot be read: {fault.message}", tensor=fault.tensor, hint="Save it again.")
    if not container.entries:
        raise InvalidValue(f"{file.name} holds no tensor", hint="Save the stages of a layer in it.")
    return container.entries
