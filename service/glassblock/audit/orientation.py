"""Square projections: do they lie as the family stores them? No shape tells, the neurons of the three together do."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassblock.audit.gate_loading import Pieces
from glassblock.audit.gate_plans import GatePlan
from glassblock.audit.orientation_types import OpenOrientation, OrientationStudy, TurnedWeight
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.layer_parts import Expert
from glassblock.errors import CheckpointUnusable, UnknownCheckpoint
from glassblock.numerics.fused_layouts import RowLayout, split_rows
from glassblock.numerics.orientation import Projections, Turned, TurnedTest, turned_test, with_turned

ALPHA = 0.01
"""Family-wise error of the warnings about square weights over one checkpoint."""

_NEURONS = 128  # looked at; on real weights of 128 neurons a turned one stands 8 to 40 deviations out
_EXPERTS = 16  # of one stack, which is turned as a whole
_GROUPS = 256
_SCREEN = 99  # draws that rule out or send on, and never convict
_NOISE = 0.01
_BEYOND_DOUBT = 4.0  # deviations; what lies between is held against all other readings
_MOST_DRAWS = 50_000
_CLEAR = 0.6


@dataclass(frozen=True)
class _Group:
    """One network, or the experts of one stack; and which of their weights are square."""

    plans: tuple[GatePlan, ...]
    roles: tuple[Turned, ...]

    @property
    def hypotheses(self) -> tuple[Turned, ...]:
        return (*self.roles, "both") if "up" in self.roles else self.roles

    @property
    def network(self) -> Expert:
        return self.plans[0].network.expert if len(self.plans) == 1 else None

    def names(self, turned: Turned) -> tuple[str, ...]:
        gate, up, down = self.plans[0].names
        chosen = {"gate": (gate,), "up": (up,), "down": (down,), "both": (gate, up)}[turned]
        return tuple(dict.fromkeys(chosen))


def orientation_study(
    plans: Sequence[GatePlan],
    pieces: Pieces,
    lost: Callable[[CheckpointUnusable | UnknownCheckpoint], str],
    told: Callable[[int], None],
) -> OrientationStudy:
    """Look at every gated network that has a square weight.

    Args:
        plans: The gated networks.
        pieces: Reads a tensor once more.
        lost: Told of a tensor that could not be read; gives the reason in words.
        told: Told before each network.
    """
    groups = list(_groups(plans))
    tests = sum(len(group.hypotheses) for group in groups)
    found = list[TurnedWeight]()
    open_ = list[OpenOrientation]()
    unread = list[tuple[int, str]]()
    upright = 0
    for number, group in enumerate(groups):
        layer = group.plans[0].layer
        if number >= _GROUPS:
            unread.append((layer, f"of {len(groups)} square networks the first {_GROUPS} were looked at"))
            continue
        told(layer)
        try:
            networks = [_without_padding(_loaded(plan, pieces)) for plan in group.plans[:_EXPERTS]]
        except (CheckpointUnusable, UnknownCheckpoint) as error:
            unread.append((layer, lost(error)))
            continue
        outcome = _judged(group, networks, ALPHA / tests)
        if outcome is None:
            upright += 1
        elif isinstance(outcome, TurnedWeight):
            found.append(outcome)
        else:
            open_.append(outcome)
    return OrientationStudy(upright, tuple(found), tuple(open_), tuple(unread))


def _groups(plans: Sequence[GatePlan]) -> Iterator[_Group]:
    for _, of_tensors in groupby(plans, key=lambda plan: (plan.layer, plan.names)):
        same = tuple(of_tensors)
        roles = _square_roles(same[0])
        if roles:
            yield _Group(same, roles)


def _square_roles(plan: GatePlan) -> tuple[Turned, ...]:
    if min(plan.neurons, plan.width) < 2:
        return ()
    if plan.fused is not None and 2 * plan.neurons == plan.width:
        return ("both",)
    if plan.neurons != plan.width:
        return ()
    return ("down",) if plan.fused is not None else ("gate", "up", "down")


def _judged(group: _Group, networks: Sequence[Projections], level: float) -> TurnedWeight | OpenOrientation | None:
    """What lies otherwise; None where each weight shows that it lies as it should."""
    seed, layer = group.plans[0].layer, group.plans[0].layer
    shown = _shown(group, networks, seed)
    upright = all(test.p <= _NOISE for test in shown)
    if upright and all(test.z >= _BEYOND_DOUBT for test in shown):
        return None
    suspects: list[Turned] = [
        turned for turned in group.hypotheses if turned_test(networks, turned, draws=_SCREEN, seed=seed).p <= _NOISE
    ]
    if not suspects and upright:
        return None
    if not suspects:
        reason = "neither as it lies nor with its axes exchanged are its neurons those of the other projections"
        return OpenOrientation(layer, group.names(group.roles[-1]), reason)
    # One weight turned makes others look turned against it: the reading in which most belongs together is told.
    explained = {
        turned: sum(test.z for test in _shown(group, [with_turned(one, turned) for one in networks], seed))
        for turned in group.hypotheses
    }
    best = max(group.hypotheses, key=explained.__getitem__)
    names = group.names(best)
    if sum(test.z for test in shown) >= explained[best]:
        reason = "as it lies more belongs together than with any axes exchanged, though not everything that should"
        return None if upright else OpenOrientation(layer, group.names(group.roles[-1]), reason)
    draws = min(round(1 / level), _MOST_DRAWS)
    test = turned_test(networks, best, draws=draws, seed=seed + 1)
    if test.p > level:
        axes = f"{'its' if len(names) == 1 else 'their'} axes"
        reason = f"{axes} may be exchanged (p = {test.p:.2g} of {draws} permutations, where {level:.2g} is asked)"
        return OpenOrientation(layer, names, reason)
    near: list[Turned] = [
        turned for turned in group.hypotheses if turned != best and explained[turned] > _CLEAR * explained[best]
    ]
    either: dict[str, None] = dict.fromkeys(name for turned in near for name in group.names(turned))
    others = tuple(name for name in dict.fromkeys(group.plans[0].names) if name not in names)
    return TurnedWeight(layer, group.network, names, others, test, level, tuple(either))


def _shown(group: _Group, networks: Sequence[Projections], seed: int) -> list[TurnedTest]:
    """How clearly each square weight lies as it is read: the hypothesis that its axes are exchanged, tested."""
    return [
        turned_test([with_turned(one, role) for one in networks], role, draws=_SCREEN, seed=seed)
        for role in group.roles
    ]


def _loaded(plan: GatePlan, pieces: Pieces) -> Projections:
    """Some neurons and the channels of the same numbers: of a square that is a square, whichever way it lies."""
    generator = torch.Generator().manual_seed(plan.layer)
    neurons = torch.randperm(plan.neurons, generator=generator)[:_NEURONS].sort().values
    rows = split_rows(torch.arange(2 * plan.neurons), plan.fused or RowLayout(1))
    both = torch.cat([part[neurons] for part in rows])
    channels = both if plan.neurons != plan.width else neurons
    inner, outer = plan.network.row.layouts
    weights = plan.network.weights
    down = _part(weights["down"], channels, neurons, pieces, transposed=outer == "in_out")
    if plan.fused is None:
        gate, up = (_part(weights[part], neurons, channels, pieces, transposed=inner == "in_out") for part in _PAIR)
        return Projections(gate, up, down)
    fused = _part(weights["fused"], both, channels, pieces, transposed=inner == "in_out")
    return Projections(fused[: len(neurons)], fused[len(neurons) :], down)


def _without_padding(network: Projections) -> Projections:
    """Leaves out the numbers under which a neuron or a channel is zero: padding of both at the end ties them.

    What is left out does not depend on which weight is turned, nor on the order of the other neurons.
    """
    gate, up, down = network
    neurons = gate.any(1) & up.any(1) & down.any(0)
    channels = gate.any(0) & up.any(0) & down.any(1)
    kept = neurons & channels.view(-1, len(neurons)).all(0)
    if int(kept.sum()) < 2:
        return network
    wide = kept.repeat(len(channels) // len(kept))
    return Projections(gate[kept][:, wide], up[kept][:, wide], down[wide][:, kept])


_PAIR = ("gate", "up")


def _part(
    entry: TensorEntry, rows: Int[Tensor, " r"], columns: Int[Tensor, " c"], pieces: Pieces, *, transposed: bool
) -> Float[Tensor, "r c"]:
    """Some rows and columns of a weight `[out, in]`, whichever way the family stores it."""
    width, start = entry.shape[-1], 0
    stored_rows, stored_columns = (columns, rows) if transposed else (rows, columns)
    order = stored_rows.argsort()
    kept: list[Tensor] = []
    for piece in pieces(entry):
        found = piece.view(-1, width)
        inside = stored_rows[order]
        inside = inside[(inside >= start) & (inside < start + len(found))] - start
        kept.append(found[inside.to(found.device)][:, stored_columns.to(found.device)].to("cpu", torch.float32))
        start += len(found)
    whole = torch.cat(kept)[order.argsort()]
    return whole.T if transposed else whole
