"""What enters each layer, out of one file: the same x for all, or each layer its own."""

import re
from pathlib import Path

import numpy as np
from glassblock.errors import InvalidValue
from glassblock.wire.framing import WireTensor, read_tensors

from glassblock_client.cli.files import read_x
from glassblock_client.cli.inputs import whole_numbers
from glassblock_client.tensors import array_from_wire

PER_LAYER = re.compile(r"layers\.(\d+)\.x")


class LayerInputs:
    """`x`, or `layers.N.x` for some layers; and `token_ids`, where the file names its rows."""

    def __init__(self, tensors: dict[str, WireTensor], *, option: str) -> None:
        self._tensors, self._option = tensors, option

    @property
    def per_layer(self) -> bool:
        """Whether each layer has its own."""
        return "x" not in self._tensors

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """What the rows stand for.

        Raises:
            InvalidValue: they are no integers.
        """
        named = self._tensors.get("token_ids")
        return None if named is None else tuple(whole_numbers(array_from_wire(named).reshape(-1), option=self._option))

    def of(self, layer: int) -> WireTensor:
        """What enters a layer.

        Raises:
            InvalidValue: the file has tensors for layers, and none for this one.
        """
        tensor = self._tensors.get(f"layers.{layer}.x", self._tensors.get("x"))
        if tensor is None:
            raise InvalidValue(
                f"{self._option} holds no layers.{layer}.x",
                field=self._option,
                known=tuple(sorted(self._tensors))[:20],
                hint="choose --layers that it has, or save one x for all",
            )
        return tensor


def read_layer_inputs(path: Path, *, option: str = "--input") -> LayerInputs:
    """The inputs in an .npy or a .safetensors file.

    Raises:
        InvalidValue: another kind of file, damaged, or without any of these tensors.
    """
    found: dict[str, WireTensor] = {}
    if path.suffix == ".safetensors" and path.is_file() and path.stat().st_size:
        try:
            _, tensors = read_tensors(np.memmap(path, np.uint8, mode="r").data)
        except InvalidValue as fault:
            fault.message = f"{option}: {path}: {fault.message}"
            raise
        found = {name: tensor for name, tensor in tensors.items() if PER_LAYER.fullmatch(name) or name == "token_ids"}
        if "x" in tensors or not found.keys() - {"token_ids"}:
            found["x"] = read_x(path, option=option)
    else:
        found["x"] = read_x(path, option=option)
    return LayerInputs(found, option=option)
