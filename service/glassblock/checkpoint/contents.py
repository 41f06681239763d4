"""What lies at a path, read and not yet joined: every header, the index and the config, and no tensor data."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from glassblock.checkpoint.config import ConfigFault, ConfigFile, read_config
from glassblock.checkpoint.container import nowhere_container, read_container
from glassblock.checkpoint.entries import Container
from glassblock.checkpoint.family import Architecture
from glassblock.checkpoint.files import leads_nowhere, refusal
from glassblock.checkpoint.index import Index, is_plain_name, read_index
from glassblock.checkpoint.recognition import by_params
from glassblock.checkpoint.roots import Roots, checked_file
from glassblock.checkpoint.shard_names import is_shard
from glassblock.checkpoint.weight_sets import WEIGHTS_SUFFIX
from glassblock.errors import TooLarge, UnknownCheckpoint

MAX_FILES = 100_000
"""In a directory that is opened, or that a file lies in."""

MAX_HINTS = 5
"""Folders named in a hint."""

INDEX_NAME = "model.safetensors.index.json"
META_STEM = "consolidated"
"""What the names of weight files begin with in the layout of Meta and Mistral."""

META_INDEX_NAME = f"{META_STEM}.safetensors.index.json"


@dataclass(frozen=True)
class Contents:
    """What lies at a path, read and not yet joined.

    Attributes:
        path: The directory or file.
        directory: The directory, or the one that the file lies in.
        asked: The family asked for, instead of what the config says.
        containers: Headers of all weight files, by file name.
        index: The index, where there is one.
        config: config.json, or params.json in its place; None where there is none that can be read.
        config_fault: Why the config cannot be read.
        params: params.json beside a config.json.
        present: Names of everything in the directory; None where one file was opened.
        nowhere: Weight files that are links to nowhere.
    """

    path: Path
    directory: Path
    asked: Architecture | None
    containers: Mapping[str, Container]
    index: Index | None
    config: ConfigFile | None
    config_fault: ConfigFault | None
    params: ConfigFile | None
    present: frozenset[str] | None
    nowhere: frozenset[str]


def read_contents(path: Path, asked: Architecture | None, roots: Roots | None) -> Contents:
    """What lies at `path`: every header, the index and the config, each read once.

    Raises:
        UnknownCheckpoint, AccessRefused, TooLarge, ServiceUnavailable: See `open_checkpoint`.
    """
    present = _present(path)
    directory = path if path.is_dir() else path.parent
    weights = sorted(name for name in present if name.endswith(".safetensors")) if path.is_dir() else [path.name]
    if not weights:
        raise UnknownCheckpoint(
            f"{path.name} holds no safetensors file",
            field="checkpoint",
            hint=_hint_without_weights(path),
        )
    real = {name: checked_file(directory, name, roots) for name in weights}
    config, config_fault = _config(directory, "config.json", present, roots)
    params, params_fault = _config(directory, "params.json", present, roots)
    if _is_metas(asked, params, params_fault, alone=config is None and config_fault is None):
        config, config_fault, params = params, params_fault, None
        weights = [name for name in weights if name.startswith(META_STEM)] or weights
    index_name = META_INDEX_NAME if config is not None and config.path.name == "params.json" else INDEX_NAME
    index = None
    if path.is_dir() and index_name in present:
        index = read_index(directory / index_name, real=checked_file(directory, index_name, roots))
    nowhere = frozenset(name for name in weights if leads_nowhere(directory / name))
    # A shard that is a link to nowhere is an absent shard.
    absent = frozenset(name for name in nowhere if path.is_dir() and _is_shard_of(name, index))
    containers = {
        name: nowhere_container(directory / name)
        if name in nowhere
        else read_container(directory / name, real=real[name])
        for name in weights
        if name not in absent
    }
    return Contents(
        path=path,
        directory=directory,
        asked=asked,
        containers=MappingProxyType(containers),
        index=index,
        config=config,
        config_fault=config_fault,
        params=params,
        present=present if path.is_dir() else None,
        nowhere=nowhere,
    )


def _is_metas(
    row: Architecture | None, params: ConfigFile | None, params_fault: ConfigFault | None, *, alone: bool
) -> bool:
    """Whether params.json is the config: by the family asked for, or, without a config.json, by its keys."""
    if row is not None:
        return row.config_file == "params.json" and (params is not None or params_fault is not None)
    return alone and by_params(params) is not None


def _is_shard_of(name: str, index: Index | None) -> bool:
    """Whether the index, or where it names no shard the number in the name, says that a file belongs to a set."""
    return name in index.shards if index is not None and index.shards else is_shard(name)


def _hint_without_weights(path: Path) -> str:
    """What to do about a directory without weights: often the checkpoints lie one folder below."""
    below = sorted(item.parent.name for item in path.glob(f"*/*{WEIGHTS_SUFFIX}"))
    if below:
        return f"Checkpoints lie in its folders: {', '.join(dict.fromkeys(below[:MAX_HINTS]))}. Name one of them."
    return "Name a directory with safetensors files, or one such file. Pickled weights are never read."


def _present(path: Path) -> frozenset[str]:
    """Names of what lies in the checkpoint's directory."""
    weights = os.path.lexists(path) and path.name.endswith(".safetensors")
    try:
        if path.is_dir() or path.is_file() or weights:
            with os.scandir(path if path.is_dir() else path.parent) as found:
                names = [item.name for item in islice(found, MAX_FILES + 1)]
            if len(names) <= MAX_FILES:
                return frozenset(filter(is_plain_name, names))
            raise TooLarge(
                f"more than {MAX_FILES:,} files lie in the directory of {path.name}",
                field="checkpoint",
                hint="Give the checkpoint a directory of its own.",
            )
    except OSError as error:
        refused = refusal(error, path.name)
        refused.field = "checkpoint"
        raise refused from None
    raise UnknownCheckpoint(f"there is nothing at {path.name}", field="checkpoint", hint="Look at the path.")


def _config(
    directory: Path, name: str, present: frozenset[str], roots: Roots | None
) -> tuple[ConfigFile | None, ConfigFault | None]:
    if name not in present:
        return None, None
    read = read_config(directory / name, real=checked_file(directory, name, roots))
    return (read, None) if isinstance(read, ConfigFile) else (None, read)
