"""Captured stages in files: one safetensors file, or a folder of them, of one layer or of many."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from glassblock.errors import InvalidValue
from glassblock.reports.ranges import layer_ranges
from glassblock.wire.explain import CAPTURED_STAGES, layer_of_file, stage_of
from glassblock.wire.framing import WireTensor, read_tensors

Stages = Mapping[str, WireTensor]

SUFFIX = ".safetensors"


def read_captures(path: Path, layer: int | None, *, option: str = "--captures") -> dict[int, Stages]:
    """The captured stages of every layer, or of `layer` alone, in the order of the layers.

    A tensor is of the layer that its name says (`layers.7.gate`), else its file (`layer_7.safetensors`), else of the
    `layer` that is asked about.

    Raises:
        InvalidValue: nothing is there, a file is damaged, a name is no stage, a stage stands twice, or nothing says
            of which layer a tensor is.
    """
    if not path.exists():
        raise _refused(option, path, "does not exist")
    files = sorted(file for file in path.iterdir() if file.suffix == SUFFIX) if path.is_dir() else [path]
    if not files:
        raise _refused(option, path, "holds no .safetensors file")
    if path.is_file() and path.suffix != SUFFIX:
        raise _refused(option, path, "is no .safetensors file", hint="docs/capturing.md shows how to save captures")
    found: dict[int, dict[str, WireTensor]] = {}
    for file in files:
        for of_layer, stage, tensor in _tensors(file, layer, option=option):
            stages = found.setdefault(of_layer, {})
            if stage in stages:
                raise _refused(option, file, f"holds {stage} of layer {of_layer}, which was there already", stage)
            stages[stage] = tensor
    if layer is None:
        return dict(sorted(found.items()))
    if layer not in found:
        raise _refused(option, path, f"holds no stage of layer {layer}", hint=f"it holds {layer_ranges(found)}")
    return {layer: found[layer]}


def _tensors(file: Path, asked: int | None, *, option: str) -> Iterator[tuple[int, str, WireTensor]]:
    if not file.stat().st_size:
        raise _refused(option, file, "is empty")
    named = layer_of_file(file.stem)
    of_file = asked if named is None else named
    try:
        _, tensors = read_tensors(np.memmap(file, np.uint8, mode="r").data)
    except (ValueError, EOFError) as fault:
        raise _refused(option, file, f"cannot be read: {fault}") from fault
    except InvalidValue as fault:
        fault.message = f"{option}: {file}: {fault.message}"
        fault.hint = fault.hint or "save one file for each layer, with safetensors"
        raise
    if not tensors:
        raise _refused(option, file, "holds no tensor")
    for name, tensor in tensors.items():
        of_layer, stage = stage_of(name)
        if stage not in CAPTURED_STAGES:
            raise InvalidValue(
                f"{option}: {file}: tensor {name!r} is no stage",
                field=option,
                tensor=name,
                known=CAPTURED_STAGES,
                hint="name it after its stage, or layers.{i}. and its stage",
            )
        layer = of_file if of_layer is None else of_layer
        if layer is None:
            raise _refused(
                option,
                file,
                f"does not say of which layer {name!r} is",
                name,
                hint="give --layer, or name it layers.{i}.",
            )
        yield layer, stage, tensor


def _refused(option: str, path: Path, what: str, tensor: str | None = None, *, hint: str | None = None) -> InvalidValue:
    return InvalidValue(f"{option}: {path} {what}", field=option, tensor=tensor, hint=hint)
