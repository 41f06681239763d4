"""What is kept of the lengths of a network's neurons, and of the rows of a few other matrices.

Which neurons are zero where, how much their lengths vary, and which one is the loudest: a handful of numbers for each
network. Networks without a gate are weighed here too, as are the attention and the router of mixtures, beside which an
expert that was never trained shows.
"""

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from glassblock.audit.network_sketch import NetworkSketch, Role, Rows, Tap
from glassblock.checkpoint.entries import FLOAT_CODES, TensorEntry
from glassblock.checkpoint.layer_parts import Expert, LayerTensors, NetworkTensors

Key = tuple[int, Expert]
"""A network: its layer, and which one of it."""


class Loudest(NamedTuple):
    """The neuron whose rows of gate and up have the longest product; in a plain network, the longest row of up."""

    neuron: int
    gate: float | None
    up: float


@dataclass(frozen=True)
class NeuronNumbers:
    """The neurons of one network.

    Attributes:
        neurons, width: m and d.
        zero: For each projection, the neurons whose row (of `down`, column) is zero in it but not in all of them: bit j
            is neuron j. A neuron that is zero throughout is padding.
        spread: For each projection, the standard deviation of the neurons' lengths over their mean; None of zeros.
        loudest: See there; None where nothing has a length.
    """

    neurons: int
    width: int
    zero: Mapping[Role, int]
    spread: Mapping[Role, float | None]
    loudest: Loudest | None


class RowNumbers(NamedTuple):
    """The rows of one matrix: how many, how long each is stored, and how their lengths vary."""

    rows: int
    width: int
    spread: float | None
    zero: int


def neuron_numbers(
    roles: tuple[Role, ...], lengths: Float[Tensor, "networks roles m"], width: int
) -> list[NeuronNumbers]:
    """From the length of each neuron in each projection, network by network; every network has an up projection.

    Where all are finite and none is zero, as nearly always, they are looked at together.
    """
    low, high = (float(extreme) for extreme in torch.aminmax(lengths))
    neurons = lengths.shape[2]
    if not (low > 0 and high < math.inf) or neurons < 2:
        return [_closely(roles, network, width) for network in lengths]
    deviation, mean = torch.std_mean(lengths, 2)
    spreads = cast("list[list[float]]", (deviation / mean).tolist())
    firsts = _loudness(roles, lengths).argmax(1)
    at = cast("list[list[float]]", lengths[torch.arange(len(lengths)), :, firsts].tolist())
    none = dict.fromkeys(roles, 0)
    return [
        NeuronNumbers(neurons, width, none, dict(zip(roles, spread, strict=True)), _loudest(roles, first, there))
        for spread, first, there in zip(spreads, cast("list[int]", firsts.tolist()), at, strict=True)
    ]


def _closely(roles: tuple[Role, ...], lengths: Float[Tensor, "roles m"], width: int) -> NeuronNumbers:
    """Of one network, in which neurons may be zero or infinite."""
    loudness = _loudness(roles, lengths[None])[0]
    loudness = torch.where(loudness.isfinite(), loudness, -1.0)
    first = int(loudness.argmax())
    zeros = lengths == 0
    some = zeros & ~zeros.all(0)
    return NeuronNumbers(
        lengths.shape[1],
        width,
        {role: _bits(none) for role, none in zip(roles, some, strict=True)},
        {role: _spread(length) for role, length in zip(roles, lengths, strict=True)},
        _loudest(roles, first, cast("list[float]", lengths[:, first].tolist())) if float(loudness[first]) > 0 else None,
    )


def _loudness(roles: tuple[Role, ...], lengths: Float[Tensor, "networks roles m"]) -> Float[Tensor, "networks m"]:
    up = lengths[:, roles.index("up")]
    return lengths[:, roles.index("gate")] * up if "gate" in roles else up


def _loudest(roles: tuple[Role, ...], neuron: int, lengths: list[float]) -> Loudest:
    there = dict(zip(roles, lengths, strict=True))
    return Loudest(neuron, there.get("gate"), there["up"])


def noise_spread(width: int, rows: int, *, deviations: float) -> float:
    """How much the lengths of so many rows of independent normal numbers vary, with a margin.

    A row of d such numbers has a length whose standard deviation over its mean is 1 / sqrt(2 d); seen over m rows, that
    is uncertain by a part in sqrt(2 m). Numbers from a uniform or a truncated distribution vary less.
    """
    return (1 + deviations / math.sqrt(2 * rows)) / math.sqrt(2 * width)


NOISE = 5.0
"""Standard deviations of the scatter of noise by which lengths may vary more and are noise still."""


def is_noise(found: NeuronNumbers) -> bool:
    """Whether the neurons' lengths vary in no projection more than those of independent numbers do."""
    most = noise_spread(found.width, found.neurons, deviations=NOISE)
    return all(spread is not None and spread <= most for spread in found.spread.values())


@dataclass
class Weighed:
    """What was weighed beside the gates that are screened."""

    device: torch.device
    networks: dict[Key, NeuronNumbers] = field(default_factory=dict[Key, NeuronNumbers])
    rows: dict[str, RowNumbers] = field(default_factory=dict[str, RowNumbers])

    def plain_networks(
        self, layers: Mapping[int, LayerTensors], *, planned: Container[Key], unread: Container[str]
    ) -> Iterator[tuple[Key, NetworkSketch]]:
        """A sketch for each network that nobody else weighs and whose shapes belong together."""
        for layer, tensors in layers.items():
            for network in tensors.networks:
                key = (layer, network.expert)
                size = None if key in planned else _sizes(network, unread)
                if size is not None:
                    closed = partial(self._closed, key, size[1])
                    yield key, NetworkSketch(network, *size, summed=False, device=self.device, closed=closed)

    def beside_experts(
        self, layers: Mapping[int, LayerTensors], entries: Mapping[str, TensorEntry], unread: Container[str]
    ) -> Iterator[tuple[TensorEntry, Tap]]:
        """A tap for the router and for every matrix of attention in layers with routed experts."""
        for tensors in layers.values():
            if not any(isinstance(network.expert, int) for network in tensors.networks):
                continue
            used = {entry.name for network in tensors.networks for entry in network.weights.values()}
            for name, entry in entries.items():
                wanted = name.startswith(tensors.prefix) and name not in used and name not in unread
                if wanted and len(entry.shape) == 2 and entry.elements and entry.dtype in FLOAT_CODES:
                    yield entry, self._tap(entry)

    def _closed(self, key: Key, width: int, sketch: NetworkSketch) -> None:
        roles, lengths = tuple(sketch.squares), torch.stack(list(sketch.squares.values())).double().sqrt_()
        self.networks[key] = neuron_numbers(roles, lengths[None], width)[0]

    def _tap(self, entry: TensorEntry) -> Tap:
        rows, width = entry.shape
        lengths = torch.zeros(rows, dtype=torch.float64)

        def take(piece: Rows, start: int) -> None:
            lengths[start : start + len(piece)] = piece.squares.cpu().sqrt()

        def done() -> None:
            self.rows[entry.name] = RowNumbers(rows, width, _spread(lengths), _bits(lengths == 0))

        return Tap(0, rows, take, done)


def _sizes(network: NetworkTensors, unread: Container[str]) -> tuple[int, int] | None:
    """m and d of a network whose weights can be weighed; None where they cannot."""
    weights, row = network.weights, network.row
    needed = ("fused", "down") if row.fused is not None else ("gate", "up", "down") if row.gate else ("up", "down")
    if any(part not in weights for part in needed) or (row.fused is not None and network.fused_layout is None):
        return None
    if any(entry.dtype not in FLOAT_CODES or entry.name in unread or not entry.elements for entry in weights.values()):
        return None
    first, last = row.layouts
    shapes = {
        part: entry.shape[::-1] if (last if part == "down" else first) == "in_out" else entry.shape
        for part, entry in weights.items()
    }
    if any(len(shape) != 2 for shape in shapes.values()):
        return None
    width, neurons = shapes["down"]
    rows = {"fused": 2 * neurons, "gate": neurons, "up": neurons}
    fits = all(shapes[part] == (rows[part], width) for part in needed if part != "down")
    return (neurons, width) if fits else None


def _spread(lengths: Float[Tensor, " n"]) -> float | None:
    some = lengths[lengths.isfinite() & (lengths > 0)]
    return float(some.std() / some.mean()) if len(some) > 1 else None


def _bits(mask: Bool[Tensor, " n"]) -> int:
    """Bit j is element j; a number of Python, however many there are."""
    if not bool(mask.any()):
        return 0
    return sum(1 << place for place in cast("list[int]", mask.nonzero().flatten().tolist()))
