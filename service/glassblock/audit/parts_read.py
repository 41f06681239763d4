"""Which parts of a checkpoint have gone by while it is read: tensors one by one, and layers to their end."""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from glassblock.audit.neuron_numbers import Key
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.layer_parts import LayerTensors

Extent = Literal["headers", "tensor", "layer"]
"""How much of a checkpoint a finding stands on: no tensor, single tensors, or one layer to its end."""

STEP_BYTES = 64 << 20
"""Read at most between two tellings of single tensors. Told one by one, they would cost a hundredth of an audit."""


class PartsRead:
    """Hands on each part once, when all that is going to be known of it is known.

    Single tensors are handed on when a layer ends, or after `STEP_BYTES`. A layer is through once the last of its
    tensors was read and its networks were weighed; one of which a network never is, is not handed on.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerTensors],
        steps: Iterable[TensorEntry],
        awaited: Iterable[Key],
        *,
        is_weighed: Callable[[Key], bool],
        read: Callable[[Extent, tuple[str, ...], int | None], None],
    ) -> None:
        """Announce what will go by.

        Args:
            layers: What they are made of.
            steps: All tensors that will be read.
            awaited: The networks that are to be weighed.
            is_weighed: Whether one was.
            read: Given the names of tensors, and their layer where they are all that it has.
        """
        self._names: dict[int, list[str]] = {layer: [] for layer in layers}
        prefixes = {tensors.prefix: layer for layer, tensors in layers.items()}
        lengths = sorted({len(prefix) for prefix in prefixes}, reverse=True)
        self._homes = {entry.name: _home(entry.name, prefixes, lengths) for entry in steps}
        for name, layer in self._homes.items():
            if layer is not None:
                self._names[layer].append(name)
        self._open = {layer: len(names) for layer, names in self._names.items()}
        self._awaited: dict[int, set[Key]] = {layer: set() for layer in layers}
        for key in awaited:
            self._awaited[key[0]].add(key)
        self._weighed, self._read = is_weighed, read
        self._fresh: list[str] = []
        self._outside: list[str] = []
        self._through: list[int] = []
        self._bytes = 0

    def passed(self, entry: TensorEntry) -> None:
        """A tensor was read, or could not be."""
        layer = self._homes[entry.name]
        self._fresh.append(entry.name)
        self._bytes += entry.bytes
        if layer is None:
            self._outside.append(entry.name)
        else:
            self._open[layer] -= 1
            if not self._open[layer]:
                self._through.append(layer)
        if self._bytes >= STEP_BYTES or (layer is not None and not self._open[layer]):
            self.step()

    def step(self) -> None:
        """Hand on what has come since the last time, and the layers whose networks have been weighed meanwhile."""
        fresh, outside = tuple(self._fresh), tuple(self._outside)
        self._fresh.clear()
        self._outside.clear()
        self._bytes = 0
        if fresh:
            self._read("tensor", fresh, None)
        if outside:
            self._read("layer", outside, None)
        ready = [layer for layer in self._through if self._is_weighed(layer)]
        self._through = [layer for layer in self._through if layer not in ready]
        for layer in ready:
            self._read("layer", tuple(self._names[layer]), layer)

    def _is_weighed(self, layer: int) -> bool:
        awaited = self._awaited[layer]
        while awaited:
            key = next(iter(awaited))
            if not self._weighed(key):
                return False
            awaited.discard(key)
        return True


def _home(name: str, prefixes: Mapping[str, int], lengths: Iterable[int]) -> int | None:
    """The layer whose tensors' names begin as this one does."""
    return next((layer for length in lengths if (layer := prefixes.get(name[:length])) is not None), None)
