"""What a pass has shown so far of a part of a checkpoint: of single tensors, or of one layer."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeVar

from torch import Tensor

from glassblock.audit.evidence import Evidence, GainMoments, nothing_read
from glassblock.audit.gate_screens import GateScreens
from glassblock.audit.grain import Grain
from glassblock.audit.neuron_numbers import Key, NeuronNumbers, Weighed
from glassblock.audit.padding import WeighedNetworks
from glassblock.audit.parts_read import Extent
from glassblock.audit.question import AuditQuestion
from glassblock.audit.read_ahead import ReadAhead
from glassblock.audit.values import TensorValues
from glassblock.checkpoint.fitting import LayerFault
from glassblock.checkpoint.layer_parts import LayerTensors, NetworkTensors
from glassblock.checkpoint.opened import Checkpoint

Seen = Callable[[Extent, Callable[[], Evidence]], None]
"""Told how much of a checkpoint was seen, and how to get what that shows."""

Value = TypeVar("Value")


class Noted(Protocol):
    """What a pass has noted so far, by name of the tensor."""

    @property
    def values(self) -> Mapping[str, TensorValues]:
        """See `Evidence`."""
        ...

    @property
    def unread(self) -> Mapping[str, str]:
        """See `Evidence`."""
        ...

    @property
    def gains(self) -> Mapping[str, GainMoments]:
        """See `Evidence`."""
        ...

    @property
    def grains(self) -> Mapping[str, Grain]:
        """See `Evidence`."""
        ...

    @property
    def kept(self) -> Mapping[str, Tensor]:
        """The biases that `WeighedNetworks` asks for."""
        ...


@dataclass(frozen=True)
class PartEvidence:
    """All that was seen so far, of which a part is shown as if there were nothing else.

    Attributes:
        checkpoint, question: Of the audit.
        layers, misfits: What headers and config say.
        noted: What the pass has noted.
        ahead: Has the digests.
        beside, screens, weighed: Have the neurons.
    """

    checkpoint: Checkpoint
    question: AuditQuestion
    layers: Mapping[int, LayerTensors]
    misfits: tuple[LayerFault, ...]
    noted: Noted
    ahead: ReadAhead
    beside: Weighed
    screens: GateScreens
    weighed: WeighedNetworks

    def is_weighed(self, key: Key) -> bool:
        """Whether the neurons of a network are known."""
        return self._numbers_of(key) is not None

    def of(self, names: Iterable[str], layer: int | None) -> Evidence:
        """What tensors show; with a layer, these are all that it has."""
        entries = self.checkpoint.entries
        tensors = () if layer is None else (self.layers[layer],)
        networks: dict[Key, NetworkTensors] = {
            (one.layer, network.expert): network for one in tensors for network in one.networks
        }
        numbers = {key: self._numbers_of(key) for key in networks}
        slices = {
            (entry.name, entry.stop): self.ahead.part_digests.get((entry.name, entry.stop - entries[entry.name].start))
            for network in networks.values()
            for entry in network.weights.values()
        }
        return replace(
            self._nothing,
            checkpoint=replace(self.checkpoint, entries={name: entries[name] for name in names}),
            misfits=tuple(fault for one in tensors for fault in self._misfits.get(one.layer, ())),
            layers={one.layer: one for one in tensors},
            values=_those(self.noted.values, names),
            unread=_those(self.noted.unread, names),
            idle_neurons={one.layer: idle for one in tensors if (idle := self._idle_in(one.layer)) is not None},
            gains=_those(self.noted.gains, names),
            neurons={key: found for key, found in numbers.items() if found is not None},
            rows=_those(self.beside.rows, names),
            grains=_those(self.noted.grains, names),
            digests=_those(self.ahead.digests, names),
            slice_digests={key: digest for key, digest in slices.items() if digest is not None},
        )

    def _numbers_of(self, key: Key) -> NeuronNumbers | None:
        screened = self.screens.networks.get(key)
        return self.beside.networks.get(key) if screened is None else screened.numbers

    def _idle_in(self, layer: int) -> int | None:
        screened = self.screens.networks.get((layer, None))
        return self.weighed.idle_in(layer, self.noted.kept) if screened is None else screened.idle

    @cached_property
    def _nothing(self) -> Evidence:
        return nothing_read(self.checkpoint, replace(self.question, against=None))  # a part is compared with nothing

    @cached_property
    def _misfits(self) -> Mapping[int, list[LayerFault]]:
        found: dict[int, list[LayerFault]] = {}
        for fault in self.misfits:
            if fault.layer is not None:
                found.setdefault(fault.layer, []).append(fault)
        return found


def _those(values: Mapping[str, Value], names: Iterable[str]) -> dict[str, Value]:
    return {name: values[name] for name in names if name in values}
