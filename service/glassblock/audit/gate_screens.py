"""The gates of all networks as they go by: when the last row of one has passed, its sums are what is left of it.

Networks are screened some at a time. What is done to one takes a few hundred calls on small tensors, and between two
pieces of weights these would find the processor's caches full of numbers: that doubles their time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from glassblock.audit.gate_plans import GatePlan
from glassblock.audit.network_sketch import NetworkSketch, Role
from glassblock.audit.neuron_numbers import NeuronNumbers, neuron_numbers
from glassblock.checkpoint.layers import Expert
from glassblock.numerics.gate_or_up import GateScreen
from glassblock.numerics.neuron_lengths import length_numbers
from glassblock.numerics.pairing import pairing_z
from glassblock.numerics.sign_screen import SignScreen, SignSums, screen_signs, screened, screened_together

Key = tuple[int, Expert]
"""A network: its layer, and which one of it."""

_WAITING_BYTES = 16 << 20


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
                    partial(_signs, plan.neurons),
                    self._device,
                    self._closing(plan),
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
        for plan, sketch in self._waiting:
            found = _screened(sketch)
            expert = plan.network.expert
            self.networks[plan.layer, expert] = found
            if isinstance(expert, int):
                self._sums[plan.layer][expert] = dict(sketch.sums)
                self._open[plan.layer] -= 1
                if not self._open[plan.layer]:
                    self._layer_closed(plan.layer)
        self._waiting.clear()
        self._waiting_bytes = 0

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


@lru_cache(maxsize=4)
def _signs(neurons: int) -> Tensor:
    """The same for all networks of one size, so that the sums of experts add up to those of the experts together."""
    return screen_signs(neurons, seed=0)


def _together(parts: list[dict[Role, SignSums]]) -> GateScreen | None:
    if not parts:
        return None
    gate, up = (screened_together([part[role] for part in parts]) for role in ("gate", "up"))
    return GateScreen(gate, up)


def _screened(sketch: NetworkSketch) -> Screened:
    gate, up = (screened(sketch.sums[role]) if role in sketch.sums else _NOTHING for role in ("gate", "up"))
    roles: tuple[Role, ...] = ("gate", "up", "down")
    numbers = length_numbers(torch.stack([sketch.squares[role] for role in roles]).double().sqrt_())
    return Screened(
        GateScreen(gate, up, *numbers.balances, *numbers.spreads),
        sketch.neurons,
        numbers.idle,
        pairing_z(sketch.sampled["gate"], sketch.sampled["up"]) if len(sketch.sampled) > 1 else None,
        neuron_numbers(sketch.squares, sketch.width),
    )


_NOTHING = SignScreen(float("nan"), float("nan"), above=False, rows=0, dropped=0)
