"""Rules about gate and up exchanged: the sign-symmetry test of every gated layer, judged at one family-wise level."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from glassblock.audit.evidence import Evidence, GateLayer, GateStudy
from glassblock.audit.gate_verdicts import EveryExpert, Guilty, gated_networks
from glassblock.audit.neuron_numbers import is_noise
from glassblock.audit.rule import Checked, Found, Outcome, Rule
from glassblock.numerics.gate_or_up import Verdict
from glassblock.numerics.sign_symmetry import SymmetryTest
from glassblock.wire.audits import Fix, Skipped, Undecidable

Finding = Callable[[int, GateLayer, GateStudy, "EveryExpert | None"], Found]


def _verdicts(evidence: Evidence, *, fused: bool, guilty: Guilty, finding: Finding) -> Iterator[Outcome]:
    """What is said of the networks of one kind: a finding of each that is guilty, or one of all experts of a layer."""
    networks = tuple(gated_networks(evidence, fused=fused, guilty=guilty))
    if not networks:
        yield Skipped(reason=f"no layer has gate and up in {'one tensor' if fused else 'tensors of their own'}")
    for layer, tested, study in networks:
        if isinstance(tested, Undecidable | Skipped | Checked):
            yield tested
        elif isinstance(tested, EveryExpert):
            yield _of_all(tested, finding(layer, tested.as_one, study, tested), study)
        elif tested.judgement.verdict is Verdict.UNDECIDABLE:
            yield _undecidable(layer, tested)
        else:
            if guilty(tested):
                yield finding(layer, tested, study, None)
            yield from _counted(tested)


def _swapped(fused: bool) -> Callable[[Evidence], Iterator[Outcome]]:  # noqa: FBT001
    def look(evidence: Evidence) -> Iterator[Outcome]:
        yield from _verdicts(evidence, fused=fused, guilty=_is_swapped, finding=_exchanged)
        yield from _order_of_biases(evidence, fused=fused)

    return look


def _relaid(evidence: Evidence) -> Iterator[Outcome]:
    yield from _verdicts(evidence, fused=True, guilty=_is_relaid, finding=_laid_otherwise)


def _order_of_biases(evidence: Evidence, *, fused: bool) -> Iterator[Undecidable]:
    """Biases of gate and up may be exchanged where the weights are not, and have no shape or direction that tells."""
    compared = evidence.reference
    if compared is not None and compared.answers:
        return
    parts = {"fused"} if fused else {"gate", "up"}
    layers = [
        layer
        for layer, tensors in evidence.layers.items()
        if any(network.row.gated and parts <= network.biases.keys() for network in tensors.networks)
    ]
    if layers:
        yield Undecidable(
            layer=layers[0] if len(layers) == 1 else None,
            reason=f"the weights are told apart and not their biases: in {len(layers)} layers those of gate and up may "
            "be exchanged by themselves",
            would_decide="a trusted reference, or captured gate and up of one token with the normed input",
        )


def _is_swapped(tested: GateLayer) -> bool:
    return tested.judgement.verdict is Verdict.SWAPPED


def _is_relaid(tested: GateLayer) -> bool:
    return tested.relaid and tested.judgement.verdict is not Verdict.UNDECIDABLE


def _of_all(every: EveryExpert, found: Found, study: GateStudy) -> Found:
    """The finding of all experts, with what each one says inside."""
    each = {str(one.network): _facts(one, study) for one in every.experts}
    return replace(found, evidence={**found.evidence, "experts": each})


def _counted(tested: GateLayer) -> Iterator[Checked]:
    """Routed experts are counted together."""
    if tested.network is None or tested.network == "shared":
        yield Checked()


def _undecidable(layer: int, tested: GateLayer) -> Undecidable:
    reason = tested.judgement.reason
    return Undecidable(
        layer=layer,
        reason=_said(tested) + str(reason.value if reason else "undecidable"),
        would_decide=tested.judgement.would_decide or "",
    )


def _said(tested: GateLayer) -> str:
    """Which network of the layer, in words that begin a sentence; nothing for the only one."""
    return "" if tested.network is None else f"{_called(tested)}: "


def _called(tested: GateLayer) -> str:
    if tested.network == "experts":
        return "the experts together"
    return "shared expert" if tested.network == "shared" else f"expert {tested.network}"


def _place(layer: int, tested: GateLayer, every: EveryExpert | None = None) -> str:
    if every is not None:
        return f"layer {layer}, {every.called}"
    return f"layer {layer}" if tested.network is None else f"layer {layer}, {_called(tested)}"


def _first(tested: GateLayer, name: str, every: EveryExpert | None = None) -> str:
    """A tensor, or one from each of many experts, or their sum."""
    if every is not None and every.each_alone:
        return name if len(set(tested.names)) <= 2 - tested.fused else f"each of {name} and its like in the others"
    return name if tested.network != "experts" else f"the sum of {name} and those of the other experts"


def _number(tested: GateLayer) -> int | None:
    return tested.network if isinstance(tested.network, int) else None


def _exchanged(layer: int, tested: GateLayer, study: GateStudy, every: EveryExpert | None) -> Found:
    statistics, judgement = tested.statistics, tested.judgement
    names = tested.names
    p = power_of_ten(judgement.log10_p)
    second = ""
    if statistics is not None and judgement.rejections > 1:
        mirrored = power_of_ten(statistics.paired_gate.log10_p)
        second = f"; paired with down the other one shows it a second time (p <= {mirrored})"
    if tested.fused:
        told = (
            f"{_place(layer, tested, every)}: the rows of {_first(tested, tested.gate, every)} that lie where the "
            f"family has up have the common direction of a gate (p <= {p}) and those where it has the gate have "
            f"none{second}: up comes first in this file"
        )
        fix = Fix(
            action="swap-halves",
            description="Exchange the two parts of the fused tensor, and of its bias.",
            tensors=(*names, *tested.companions),
        )
    else:
        told = (
            f"{_place(layer, tested, every)}: {_first(tested, tested.up, every)} has the common direction of a gate "
            f"(p <= {p}) and {_first(tested, tested.gate, every)} has none{second}: the two are exchanged"
        )
        fix = Fix(
            action="swap-tensors",
            description="Exchange the two names (and those of their biases) in the header; no data moves.",
            tensors=(*names, *tested.companions),
        )
    return Found(told, layer, names, expert=_number(tested), evidence=_facts(tested, study), fix=fix)


def _laid_otherwise(layer: int, tested: GateLayer, study: GateStudy, every: EveryExpert | None) -> Found:
    stored, declared = tested.stored, tested.declared
    if stored is None or declared is None:
        raise ValueError("a layout that was not recovered is no finding")
    told = (
        f"{_place(layer, tested, every)}: the rows of {tested.gate} lie as {stored.words}, where the family has "
        f"{declared.words}: what it takes for up has the common direction of a gate "
        f"(p <= {power_of_ten(tested.declared_up_log10_p)}), and of all layouts tried only the other one leaves up none"
    )
    facts = _facts(tested, study) | {
        "stored": stored.words,
        "declared": declared.words,
        "groups": stored.groups,
        "gate_first": stored.gate_first,
        "declared_up_log10_p": tested.declared_up_log10_p,
    }
    fix = Fix(
        action="reorder-rows",
        description=f"Write the rows (and those of the bias) as {declared.words}.",
        tensors=(*tested.names, *tested.companions),
    )
    return Found(told, layer, tested.names, expert=_number(tested), evidence=facts, fix=fix)


def _mispaired(evidence: Evidence) -> Iterator[Outcome]:
    study = evidence.gates
    if study is None:
        return
    yield from (Skipped(layer=layer, reason=reason) for layer, reason in dict.fromkeys(study.pairing.left_out))
    if study.pairing.why_not is not None:
        yield Skipped(reason=study.pairing.why_not)
        return
    turned = {(one.layer, one.network) for one in evidence.orientation.turned}
    for one in study.pairing.mispaired:
        if (one.layer, one.network) in turned or (one.layer, None) in turned:
            continue  # a square weight that is turned: tensor/transposed tells it
        numbers = evidence.neurons.get((one.layer, one.network)) if isinstance(one.network, int) else None
        if numbers is not None and is_noise(numbers):
            continue  # an expert of random numbers: moe/experts-untrained tells it
        where = f"layer {one.layer}" if one.network is None else f"layer {one.layer}, expert {one.network}"
        told = f"{where}: the neurons of {' and '.join(one.tensors)} do not belong together: "
        if one.balance is not None and one.others is not None:
            told += (
                f"the lengths of up rows and down columns correlate by {one.balance:.2f} (median of the others "
                f"{one.others:.2f}), and "
            )
        told += f"gate and up rows are paired at z = {one.cosine_z:.1f}"
        yield Found(
            told,
            one.layer,
            one.tensors,
            expert=one.network if isinstance(one.network, int) else None,
            evidence={
                "balance_with_down": one.balance,
                "balance_of_others": one.others,
                "paired_up_draws_p": one.paired_draws_p,
                "gate_up_cosine_z": one.cosine_z,
            },
            fix=Fix(
                action="convert-again",
                description="Write these tensors again from the source, all rows in one order.",
                tensors=one.tensors,
            ),
        )
    reference = evidence.reference
    if reference is not None and reference.answers:
        yield Checked(study.pairing.compared)  # it decides, whatever the weights show
        return
    for layer, reason in dict.fromkeys(study.pairing.open):
        yield Undecidable(layer=layer, reason=reason, would_decide=_SHOWS_PAIRS)
    yield Checked(study.pairing.compared - len(study.pairing.open))


_SHOWS_PAIRS = "the same layer of a trusted reference"


def power_of_ten(log10_p: float | None) -> str:
    """A bound on a p-value in words, rounded up: `1e-87`."""
    return "1" if log10_p is None or log10_p > -1 else f"1e{math.ceil(log10_p)}"


def _facts(tested: GateLayer, study: GateStudy) -> dict[str, Any]:
    statistics = tested.statistics
    if statistics is None:
        raise ValueError("a conviction carries its certified test")
    return {
        "log10_p": tested.judgement.log10_p,
        "rejections": tested.judgement.rejections,
        "family_wise": {"alpha": study.alpha, "tests": study.tests, "level": study.level},
        "common_direction": {"gate": _test(statistics.gate), "up": _test(statistics.up)},
        "paired_with_down": {"gate": _test(statistics.paired_gate), "up": _test(statistics.paired_up)},
        "controls": {
            "down_columns": _test(statistics.down_columns),
            "gate_times_up": _test(statistics.product),
        },
        "balance_with_down": {"gate": statistics.balance_gate, "up": statistics.balance_up},
        **({} if tested.channels is None else {"channels": tested.channels}),
        **({} if tested.stored_as is None else {"stored": tested.stored_as}),
    }


def _test(test: SymmetryTest) -> dict[str, Any]:
    return {
        "statistic": test.statistic,
        "z": test.z,
        "draws_p": test.draws_p,
        "log10_p": test.log10_p,
        "rows": test.rows,
        "tied": test.tied,
        "dropped": test.dropped,
    }


_DETECTION = (
    "Flipping the signs of a row of up and its column of down changes nothing, so these signs are fair coins; a gate "
    "has no such symmetry and training gives its rows a common direction. The p-value is certified (Chernoff, "
    "Gaussian replacement), corrected for all tensors tested, and four further statistics must agree."
)
_FOOLED_BY = (
    "Arithmetic that breaks the symmetry (u + 1, one-sided clamps): refused by family. Copied neurons: tied. An edit "
    "that moves many rows of up together."
)

GATE_RULES: tuple[Rule, ...] = (
    Rule(
        "ffn/gate-up-swapped",
        "error",
        "statistical",
        what="The tensor named gate_proj was trained as the up projection, and the other way round.",
        hurts="act(up) * gate in place of act(gate) * up: from a loss of 0.04 nats, which nobody sees, to garbage.",
        detection=_DETECTION,
        fooled_by=_FOOLED_BY,
        report="https://github.com/nntrainer/nntrainer/pull/4194",
        needs=("family", "separate-gate"),
        looks_at="layers",
        look=_swapped(fused=False),
    ),
    Rule(
        "ffn/fused-order",
        "error",
        "statistical",
        what="A fused tensor holds up before gate where the family has gate before up, or the other way round.",
        hurts="The activation is applied to the wrong half, in every engine that follows the family.",
        detection=_DETECTION,
        fooled_by=_FOOLED_BY,
        report="https://github.com/sgl-project/sglang/pull/32430",
        needs=("family", "fused-gate"),
        looks_at="layers",
        look=_swapped(fused=True),
    ),
    Rule(
        "ffn/fused-layout",
        "error",
        "statistical",
        what="The rows of a fused tensor are cut otherwise than the family cuts them: interleaved, or in blocks.",
        hurts="Each half holds rows of both projections, and every neuron is multiplied with another one's gate.",
        detection=(
            "All cuts are screened: halves, even and odd rows, blocks of 2, 4, 8 and 16 ranks, tiles of 16 to 128 "
            "rows. Only under the true one is a side noise. A finding needs a certified p-value of what the declared "
            "layout takes for up, the whole test passed under the other layout, and no third layout that fits; the "
            "level is shared by all tensors and all cuts."
        ),
        fooled_by="A layout that is not among those tried: then nothing fits, and the layer is undecidable.",
        report="https://github.com/NVIDIA-NeMo/Automodel/pull/1324",
        needs=("family", "fused-gate"),
        looks_at="layers",
        look=_relaid,
    ),
    Rule(
        "ffn/mispaired-neurons",
        "warning",
        "statistical",
        what="The rows of gate and up and the columns of down are in different orders, or of different networks.",
        hurts="Neurons are multiplied with the gates of others: shapes fit, and nothing that was trained is computed.",
        detection=(
            "Training ties the length of a row of up to that of its column of down, and turns rows of gate and up "
            "towards each other. A network in which either tie is missing, where nearly all others show it, is read "
            "again: P(up), or the cosines of all rows, must be noise as well. Where most do not show a tie, those that "
            "show nothing of it are undecidable; one of whose weights is zero is left out."
        ),
        fooled_by="A layer that was trained otherwise than all the others, or hardly at all: hence a warning.",
        report="https://github.com/nntrainer/nntrainer/pull/4194",
        needs=("family", "gate"),
        looks_at="layers",
        look=_mispaired,
    ),
)
