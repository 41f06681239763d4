"""The gates of all networks as they go by: when the last row of one has passed, its sums are what is left of it.

Networks are screened some at a time. What is done to one takes a few hundred calls on small tensors, and between two
pieces of weights these would find the processor's caches full of numbers: that doubles their time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from glassblock.audit.gate_plans import GatePlan
from glassblock.audit.network_sketch import NetworkSketch, Role
from glassblock.audit.neuron_numbers import Key, NeuronNumbers, neuron_numbers
from glassblock.checkpoint.layer_parts import Expert
from glassblock.numerics.gate_or_up import GateScreen
from glassblock.numerics.neuron_lengths import length_numbers
from glassblock.numerics.pairing import pairing_zs
from glassblock.numerics.sign_screen import SignSums, screened_together, screens

_WAITING_BYTES = 16 << 20
_AT_ONCE = 8  # networks


@dataclass(frozen=True)
class Screened:
    """One network that has gone by.

    Attributes:
        gates: Its screen.
        neurons: m.
        idle: Neurons that are zero in all projections.
        pairing_z: Of gate and up (`numerics.pairing`), over some of its neurons.
        numbers: The neurons.
    """

    gates: GateScreen
    neurons: int
    idle: int
    pairing_z: float | None
    numbers: NeuronNumbers


class GateScreens:
    """What has been seen of all networks.

    Of the routed experts of a layer the sums are kept until the layer is through, and longer only where they may be
    asked for again: where an expert is suspicious, or the experts together are not as named.
    """

    def __init__(self, plans: Iterable[GatePlan], *, device: torch.device) -> None:
        """The networks that will go by."""
        self.networks: dict[Key, Screened] = {}
        self._together: dict[int, GateScreen] = {}
        self._sums: dict[int, dict[Expert, dict[Role, SignSums]]] = defaultdict(dict)
        self._open: dict[int, int] = defaultdict(int)
        self._device = device
        self._plans = tuple(plans)
        self._waiting: list[tuple[GatePlan, NetworkSketch]] = []
        self._waiting_bytes = 0
        for plan in self._plans:
            self._open[plan.layer] += isinstance(plan.network.expert, int)

    def sketches(self) -> Iterator[tuple[GatePlan, NetworkSketch]]:
        """One for each network, to be fed."""
        for plan in self._plans:
            yield (
                plan,
                NetworkSketch(
                    plan.network,
                    plan.neurons,
                    plan.width,
                    summed=True,
                    device=self._device,
                    closed=self._closing(plan),
                ),
            )

    def together(self, layer: int, without: Iterable[Expert]) -> GateScreen | None:
        """The screen of all routed experts of a layer but some; None where it cannot be told from what was kept."""
        left_out = frozenset(without)
        kept = self._sums.get(layer)
        if kept is None:
            return None if left_out else self._together.get(layer)
        return _together([sums for expert, sums in kept.items() if expert not in left_out])

    def settle(self) -> None:
        """Screen the networks that wait; to be called once all have gone by."""
        for _, group in groupby(self._waiting, key=lambda waiting: (waiting[0].neurons, waiting[0].width)):
            some = list(group)
            for first in range(0, len(some), _AT_ONCE):
                plans, sketches = zip(*some[first : first + _AT_ONCE], strict=True)
                for plan, sketch, found in zip(plans, sketches, _screened(sketches), strict=True):
                    self._settled(plan, sketch, found)
        self._waiting.clear()
        self._waiting_bytes = 0

    def _settled(self, plan: GatePlan, sketch: NetworkSketch, found: Screened) -> None:
        expert = plan.network.expert
        self.networks[plan.layer, expert] = found
        if isinstance(expert, int):
            self._sums[plan.layer][expert] = dict(sketch.sums)
            self._open[plan.layer] -= 1
            if not self._open[plan.layer]:
                self._layer_closed(plan.layer)

    def _closing(self, plan: GatePlan) -> Callable[[NetworkSketch], None]:
        def closed(sketch: NetworkSketch) -> None:
            self._waiting.append((plan, sketch))
            self._waiting_bytes += sketch.bytes
            if self._waiting_bytes > _WAITING_BYTES:
                self.settle()

        return closed

    def _layer_closed(self, layer: int) -> None:
        experts = [found.gates for (of, expert), found in self.networks.items() if of == layer and expert != "shared"]
        screen = _together(list(self._sums[layer].values()))
        quiet = screen is not None and screen.as_named and not any(expert.suspicious for expert in experts)
        if screen is not None:
            self._together[layer] = screen
        if quiet or all(expert.as_named for expert in experts):
            del self._sums[layer]


def _together(parts: list[dict[Role, SignSums]]) -> GateScreen | None:
    if not parts:
        return None
    gate, up = (screened_together([part[role] for part in parts]) for role in ("gate", "up"))
    return GateScreen(gate, up)


_ROLES: tuple[Role, ...] = ("gate", "up", "down")


def _screened(sketches: Sequence[NetworkSketch]) -> list[Screened]:
    """Networks of one size, looked at together: each takes some hundred calls on small tensors otherwise."""
    gates, ups = (screens([sketch.sums[role] for sketch in sketches]) for role in _ROLES[:2])
    lengths = torch.stack([sketch.squares[role] for sketch in sketches for role in _ROLES]).double().sqrt_()
    lengths = lengths.view(len(sketches), len(_ROLES), -1)
    gate_rows, up_rows = (torch.stack([sketch.sampled[role] for sketch in sketches]) for role in _ROLES[:2])
    return [
        Screened(GateScreen(gate, up, *of.balances, *of.spreads), sketch.neurons, of.idle, z, numbers)
        for sketch, gate, up, of, z, numbers in zip(
            sketches,
            gates,
            ups,
            length_numbers(lengths),
            pairing_zs(gate_rows, up_rows),
            neuron_numbers(_ROLES, lengths, sketches[0].width),
            strict=True,
        )
    ]
