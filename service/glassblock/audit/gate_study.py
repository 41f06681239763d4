"""From screens to verdicts: what the screen does not acquit is read again and put to the certified test."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median

from torch import Tensor

from glassblock.audit.evidence import (
    ExpertCount,
    GateLayer,
    GateStudy,
    LayerGates,
    Layout,
    Mispaired,
    PairingStudy,
    Tested,
    Unasked,
)
from glassblock.audit.gate_loading import Pieces, load_network
from glassblock.audit.gate_plans import ALPHA, GatePlan
from glassblock.audit.gate_screens import GateScreens, Screened
from glassblock.audit.neuron_numbers import Key
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.stored_entries import storage_notes
from glassblock.errors import CheckpointUnusable, UnknownCheckpoint
from glassblock.numerics.fused_layouts import RowLayout, layout_screens
from glassblock.numerics.gate_or_up import (
    SCREENED,
    SCREENED_NOISE,
    GateScreen,
    Judgement,
    Verdict,
    family_wise_level,
    judge,
)
from glassblock.numerics.gate_up_evidence import GateUpEvidence, gate_up_evidence, summed_gate_up_evidence
from glassblock.numerics.pairing import pairing_z
from glassblock.numerics.sign_symmetry import sign_symmetry_test

DRAWS = 199
"""Sign draws of the certified test; the smallest p-value they can give is 0.005."""

_TOGETHER_ENTRIES = 1 << 22  # of each of the six sums over experts
_FEWEST_PAIRED = 4  # networks, before one can stand apart from the others
_PAIRED = 10.0  # z that the others have
_UNPAIRED = 3.0
_NO_LENGTH = "gate, up or down has no row with a length, as where it is zero throughout, so nothing is paired with it"
_ONE_LENGTH = "the rows of up, or the columns of down, are all of one length, so these lengths cannot go together"
_NO_DIRECTION = "the rows of gate or up do not vary, so they have no direction in which they could be turned"
_NO_BALANCE = (
    "the lengths of up rows and down columns do not go together here, and in too few other layers do they clearly: "
    "columns of down in another order look so, and rotated or otherwise trained ones as well"
)
_NO_COSINES = (
    "rows of gate and up are not turned towards each other here, and in too few other layers are they clearly: rows of "
    "gate in another order look so, and otherwise trained ones as well"
)


@dataclass(frozen=True)
class Again:
    """How suspects are looked at again.

    Attributes:
        screens: What was seen as the networks went by.
        pieces: Reads a tensor once more, in whole rows.
        lost: Told of a tensor that could not be read; the reason it gives is passed on.
        unread: Tensors that could not be read the first time, with the reason; not codes that can be dequantised.
        every_bound: Put every network to the certified test.
        told: Told before each network that is read again.
    """

    screens: GateScreens
    pieces: Pieces
    lost: Callable[[CheckpointUnusable | UnknownCheckpoint], str]
    unread: Mapping[str, str]
    every_bound: bool
    told: Callable[[int], None]


def gate_study(plans: Sequence[GatePlan], unasked: Mapping[int, tuple[Unasked, ...]], again: Again | None) -> GateStudy:
    """The verdict on every network.

    Args:
        plans: The networks that were to be tested, by layer.
        unasked: Why others were not.
        again: How to look at suspects; None judges none.
    """
    tests = sum(plan.tests for plan in plans) + 2 * len(
        {plan.layer for plan in plans if isinstance(plan.network.expert, int)}
    )
    level = family_wise_level(max(tests, 1), alpha=ALPHA)
    layers: dict[int, LayerGates] = {}
    open_questions = {layer: list(reasons) for layer, reasons in unasked.items()}
    for layer, of_layer in groupby(plans if again is not None else (), key=lambda plan: plan.layer):
        if again is None:
            break
        asked: list[GatePlan] = []
        for plan in of_layer:
            lost = next((again.unread[entry.name] for entry in _entries(plan) if entry.name in again.unread), None)
            if lost is None:
                asked.append(plan)
            else:
                open_questions.setdefault(layer, []).append(Unasked(lost, fused=plan.fused is not None))
        try:
            layers[layer] = _layer(asked, again, level)
        except (CheckpointUnusable, UnknownCheckpoint) as error:
            open_questions.setdefault(layer, []).append(Unasked(again.lost(error)))
    pairing = PairingStudy(0, (), "gates were not asked about") if again is None else _pairing(plans, layers, again)
    return GateStudy(
        ALPHA, tests, level, layers, {layer: tuple(reasons) for layer, reasons in open_questions.items()}, pairing
    )


def _layer(plans: Sequence[GatePlan], again: Again, level: float) -> LayerGates:
    experts = [plan for plan in plans if isinstance(plan.network.expert, int)]
    networks = [_network(plan, again, level) for plan in plans if plan not in experts]
    if not experts:
        return LayerGates(tuple(networks))
    closer, count, screened_alone = list[GateLayer](), ExpertCount(0, 0, 0), list[GatePlan]()
    quiet: list[GatePlan] = []
    for plan in experts:
        screen = _screen_of(plan, again)
        if screen is not None and screen.as_named and not again.every_bound:
            screened_alone.append(plan)
        elif screen is not None and not screen.suspicious and not again.every_bound:
            quiet.append(plan)
        else:
            closer.append(_closely(plan, again, level))
    decided = [one for one in closer if one.judgement.verdict is not Verdict.UNDECIDABLE]
    open_ones = [one for one in closer if one.judgement.verdict is Verdict.UNDECIDABLE]
    alone = len(screened_alone) + len(decided)
    if not quiet and not open_ones:
        return LayerGates((*networks, *closer), ExpertCount(alone, 0, 0), fused=experts[0].fused is not None)
    guilty = {one.network for one in decided if one.judgement.verdict is Verdict.SWAPPED or one.relaid}
    together = _together([plan for plan in experts if plan.network.expert not in guilty], again, level)
    networks.extend(closer if together is None else (*closer, together))
    by_sum = together is not None and together.judgement.verdict is not Verdict.UNDECIDABLE
    rest = len(quiet) + len(open_ones)
    count = ExpertCount(alone, rest if by_sum else 0, 0 if by_sum else rest)
    return LayerGates(tuple(networks), count, fused=experts[0].fused is not None)


def _network(plan: GatePlan, again: Again, level: float) -> GateLayer:
    screen = _screen_of(plan, again)
    screened = _screened(screen, again)
    if screened is not None:
        return _gate_layer(plan, plan.network.expert, screen, screened)
    return _closely(plan, again, level)


def _screened(screen: GateScreen | None, again: Again) -> Judgement | None:
    """What the screen is enough for: it acquits, or shows that no certificate could decide."""
    if screen is None or again.every_bound:
        return None
    return SCREENED if screen.as_named else SCREENED_NOISE if screen.noise else None


def _closely(plan: GatePlan, again: Again, level: float) -> GateLayer:
    """The certified test of one network, and of a fused one the layout first."""
    again.told(plan.layer)
    loaded = load_network(plan, again.pieces)
    declared = plan.fused
    stored = None
    if declared is not None:
        screens = layout_screens(loaded.first, declared=declared.groups)
        stored = _only(screen.layout for screen in screens)
    relaid = stored is not None and declared is not None and stored.groups != declared.groups
    statistics = _evidence(loaded.split(stored if relaid else declared), plan, again, level)
    judgement = judge(statistics, level=level)
    found = _gate_layer(plan, plan.network.expert, _screen_of(plan, again), judgement, statistics)
    found = replace(found, channels=loaded.channels if loaded.channels < plan.width else None)
    found = replace(found, stored=None if stored is None else _told(stored, plan))
    if not relaid:
        return found
    if judgement.verdict is Verdict.AS_NAMED:
        named_up = sign_symmetry_test(loaded.split(declared)[1], seed=plan.layer)
        if named_up.rejected(level):
            return replace(found, declared_up_log10_p=named_up.log10_p)
    # Not certified under the layout it seems to have: what is said is said of the declared one.
    statistics = _evidence(loaded.split(declared), plan, again, level)
    return replace(found, stored=None, statistics=statistics, judgement=judge(statistics, level=level))


def _evidence(projections: tuple[Tensor, Tensor, Tensor], plan: GatePlan, again: Again, level: float) -> GateUpEvidence:
    certify = "all" if again.every_bound else "screened"
    return gate_up_evidence(*projections, seed=plan.layer, level=level, draws=DRAWS, certify=certify)


def _only(shown: Iterable[RowLayout | None]) -> RowLayout | None:
    """The layout, where exactly one of all candidates is shown."""
    found = [layout for layout in shown if layout is not None]
    return None if len(found) != 1 else found[0]


def _told(layout: RowLayout, plan: GatePlan) -> Layout:
    return Layout(*layout, interleaved=layout.groups == plan.neurons > 1)


def _together(plans: Sequence[GatePlan], again: Again, level: float) -> GateLayer | None:
    """All routed experts of a layer but those that are exchanged themselves."""
    if not plans:
        return None
    layer, kept = plans[0].layer, {plan.network.expert for plan in plans}
    everyone = [expert for of, expert in again.screens.networks if of == layer and isinstance(expert, int)]
    screen = again.screens.together(layer, [expert for expert in everyone if expert not in kept])
    others = tuple(name for plan in plans[1:] for name in plan.names[:2])
    screened = _screened(screen, again)
    if screened is not None:
        return replace(_gate_layer(plans[0], "experts", screen, screened), others=others)
    again.told(layer)
    entries = max(_TOGETHER_ENTRIES, plans[0].neurons)

    def loaded() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for plan in plans:
            yield load_network(plan, again.pieces, most_entries=entries).split(plan.fused)

    certify = "all" if again.every_bound else "screened"
    statistics = summed_gate_up_evidence(loaded(), seed=layer, level=level, draws=DRAWS, certify=certify)
    found = _gate_layer(plans[0], "experts", screen, judge(statistics, level=level), statistics)
    return replace(found, others=others)


def _stored_as(plan: GatePlan) -> str | None:
    """In words, what the numbers were dequantised from; None of plain weights."""
    return "; ".join(storage_notes(_entries(plan))) or None


def _gate_layer(
    plan: GatePlan,
    tested: Tested,
    screen: GateScreen | None,
    judgement: Judgement,
    statistics: GateUpEvidence | None = None,
) -> GateLayer:
    gate, up, down = plan.names
    declared, stored_as = None if plan.fused is None else _told(plan.fused, plan), _stored_as(plan)
    return GateLayer(
        tested, gate, up, down, plan.companions, screen, judgement, statistics, declared=declared, stored_as=stored_as
    )


def _screen_of(plan: GatePlan, again: Again) -> GateScreen | None:
    found = again.screens.networks.get((plan.layer, plan.network.expert))
    return None if found is None else found.gates


def _entries(plan: GatePlan) -> Iterable[TensorEntry]:
    return plan.network.weights.values()


def _pairing(plans: Sequence[GatePlan], layers: Mapping[int, LayerGates], again: Again) -> PairingStudy:
    """Networks whose neurons are not paired where those of nearly all others are.

    Gate with up by the cosines of a few rows, up with down by the lengths of all; a suspect is read again, and is one
    only if P(up) is noise too where the lengths accuse, or the cosines of all rows where those of a few do. Where most
    networks do not show one of the two ties, those that show nothing of it are open.
    """
    wrong = {
        (layer, one.network)
        for layer, gates in layers.items()
        for one in gates.networks
        if one.relaid or one.judgement.verdict is Verdict.SWAPPED
    }
    seen: dict[Key, tuple[GatePlan, Screened]] = {
        (plan.layer, plan.network.expert): (plan, again.screens.networks[plan.layer, plan.network.expert])
        for plan in plans
        if (plan.layer, plan.network.expert) in again.screens.networks
        and (plan.layer, plan.network.expert) not in wrong
    }
    left_out = {key: _NO_LENGTH for key, (_, found) in seen.items() if _is_void(found)}
    seen = {key: of for key, of in seen.items() if key not in left_out}
    balance_zs = {key: _balance_z(found) for key, (_, found) in seen.items()}
    cosine_zs = {key: found.pairing_z for key, (_, found) in seen.items()}
    lengths, cosines = _telling(balance_zs), _telling(cosine_zs)
    for telling, why in ((lengths, _ONE_LENGTH), (cosines, _NO_DIRECTION)):
        left_out |= dict.fromkeys(seen.keys() - telling.keys() if telling else (), why)
    seen = {key: of for key, of in seen.items() if key not in left_out}
    unpaired = _by_network(left_out)
    if len(seen) < _FEWEST_PAIRED:
        why = f"of {len(seen)} gated networks it cannot be told which one stands apart"
        return PairingStudy(0, (), why, unpaired)
    if not lengths and not cosines:
        why = "in too few layers are the neurons paired clearly enough to miss it in another"
        return PairingStudy(0, (), why, unpaired)
    known_balances = [found.gates.balance_up for _, found in seen.values() if found.gates.balance_up is not None]
    balances = median(known_balances) if known_balances else None
    mispaired: list[Mispaired] = []
    for key, (plan, found) in seen.items():
        by_lengths, by_cosines = (abs(known.get(key, _PAIRED)) < _UNPAIRED for known in (lengths, cosines))
        if by_lengths or by_cosines:
            accused = _mispaired(plan, found, again, balances, by_lengths=by_lengths, by_cosines=by_cosines)
            mispaired.extend(() if accused is None else (accused,))
    shown, reason = (cosine_zs, _NO_COSINES) if lengths else (balance_zs, _NO_BALANCE)
    asked = seen.keys() - {(one.layer, one.network) for one in mispaired} if not (lengths and cosines) else ()
    open_ = {key: reason for key in asked if abs(shown[key] or 0.0) < _UNPAIRED}
    return PairingStudy(len(seen), tuple(mispaired), None, unpaired, _by_network(open_))


def _is_void(found: Screened) -> bool:
    """Whether gate, up or down has no row (of down, column) with a length."""
    return None in (found.gates.gate_lengths, found.gates.up_lengths, found.gates.down_lengths)


def _by_network(reasons: Mapping[Key, str]) -> tuple[tuple[int, str], ...]:
    """The layer of each network and the reason; of an expert, that it holds of some."""
    told = (
        (layer, f"some experts: {why}" if isinstance(expert, int) else why) for (layer, expert), why in reasons.items()
    )
    return tuple(sorted(told))


def _telling(measured: Mapping[Key, float | None]) -> dict[Key, float]:
    """What was measured, where most networks show that they are paired; else nothing."""
    known = {key: z for key, z in measured.items() if z is not None}
    return known if len(known) >= _FEWEST_PAIRED and median(known.values()) >= _PAIRED else {}


def _mispaired(
    plan: GatePlan, found: Screened, again: Again, others: float | None, *, by_lengths: bool, by_cosines: bool
) -> Mispaired | None:
    """What is left of an accusation, by the lengths or by the cosines of a few rows, when all rows are looked at."""
    again.told(plan.layer)
    try:
        loaded = load_network(plan, again.pieces)
    except (CheckpointUnusable, UnknownCheckpoint) as error:
        again.lost(error)
        return None
    gate, up, down = loaded.split(plan.fused)
    statistics = gate_up_evidence(gate, up, down, seed=plan.layer, level=0.5, draws=DRAWS)
    step = max(1, plan.neurons // _COMPARED)
    cosine = pairing_z(gate[::step], up[::step]) or 0.0
    by_lengths, by_cosines = by_lengths and statistics.paired_up.noise, by_cosines and abs(cosine) < _UNPAIRED
    if not by_lengths and not by_cosines:
        return None
    tested, (named_gate, named_up, named_down) = plan.network.expert, plan.names
    names = (named_up, named_down) if by_lengths and not by_cosines else (named_gate, named_up)
    names = names if not (by_lengths and by_cosines) else (named_gate, named_up, named_down)
    return Mispaired(
        plan.layer,
        tested,
        tuple(dict.fromkeys(names)),
        found.gates.balance_up,
        others,
        statistics.paired_up.draws_p,
        cosine,
    )


_COMPARED = 2048  # neurons whose cosines are all taken: a matrix of 32 MiB


def _balance_z(found: Screened) -> float | None:
    """The correlation of lengths in standard deviations of that of noise."""
    balance = found.gates.balance_up
    return None if balance is None else balance * found.neurons**0.5
