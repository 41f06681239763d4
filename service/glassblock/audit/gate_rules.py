"""Rules about gate and up exchanged: the sign-symmetry test of every gated layer, judged at one family-wise level."""

import math
from collections.abc import Iterator
from typing import Any

from glassblock.audit.evidence import Evidence, GateLayer, GateStudy, Unasked
from glassblock.audit.rule import Checked, Found, Outcome, Rule
from glassblock.numerics.gate_or_up import GateUpEvidence, Verdict
from glassblock.numerics.sign_symmetry import SymmetryTest
from glassblock.wire.audits import Fix, Skipped, Undecidable


def _look(evidence: Evidence) -> Iterator[Outcome]:
    study = evidence.gates
    if study is None:
        return
    for layer in evidence.checkpoint.layer_indices:
        tested = study.layers.get(layer)
        if tested is None:
            yield _unasked(layer, study.unasked.get(layer, Unasked("the layer was not read")))
            continue
        judgement = tested.judgement
        if judgement.verdict is Verdict.UNDECIDABLE:
            yield Undecidable(
                layer=layer,
                reason=str(judgement.reason.value if judgement.reason else "undecidable"),
                would_decide=judgement.would_decide or "",
            )
            continue
        if judgement.verdict is Verdict.SWAPPED:
            yield _swapped(layer, tested, study)
        yield Checked()


def _unasked(layer: int, unasked: Unasked) -> Undecidable | Skipped:
    if unasked.would_decide is None:
        return Skipped(layer=layer, reason=unasked.reason)
    return Undecidable(layer=layer, reason=unasked.reason, would_decide=unasked.would_decide)


def _swapped(layer: int, tested: GateLayer, study: GateStudy) -> Found:
    statistics, judgement = tested.statistics, tested.judgement
    names = (tested.gate,) if tested.gate == tested.up else (tested.gate, tested.up)
    p = power_of_ten(judgement.log10_p)
    second = ""
    if judgement.rejections > 1:
        mirrored = power_of_ten(statistics.paired_gate.log10_p)
        second = f"; paired with down the other one shows it a second time (p <= {mirrored})"
    if tested.gate == tested.up:
        told = (
            f"layer {layer}: the rows of {tested.gate} that lie where the family has up have the common direction of "
            f"a gate (p <= {p}) and those where it has the gate have none{second}: up comes first in this file"
        )
        fix = Fix(
            action="swap-halves",
            description="Exchange the two parts of the fused tensor, and of its bias.",
            tensors=(*names, *tested.companions),
        )
    else:
        told = (
            f"layer {layer}: {tested.up} has the common direction of a gate (p <= {p}) and {tested.gate} has none"
            f"{second}: the two are exchanged"
        )
        fix = Fix(
            action="swap-tensors",
            description="Exchange the two names (and those of their biases) in the header; no data moves.",
            tensors=(*names, *tested.companions),
        )
    return Found(told, layer, names, evidence=_facts(tested, study), fix=fix)


def power_of_ten(log10_p: float | None) -> str:
    """A bound on a p-value in words, rounded up: `1e-87`."""
    return "1" if log10_p is None or log10_p > -1 else f"1e{math.ceil(log10_p)}"


def _facts(tested: GateLayer, study: GateStudy) -> dict[str, Any]:
    statistics = tested.statistics
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


def layer_metrics(statistics: GateUpEvidence, verdict: Verdict) -> dict[str, float | int | str | None]:
    """The numbers of one layer, for tables and pictures."""
    return {
        "verdict": verdict.value,
        "gate_statistic": statistics.gate.statistic,
        "gate_z": statistics.gate.z,
        "gate_draws_p": statistics.gate.draws_p,
        "gate_log10_p": statistics.gate.log10_p,
        "up_statistic": statistics.up.statistic,
        "up_z": statistics.up.z,
        "up_draws_p": statistics.up.draws_p,
        "up_log10_p": statistics.up.log10_p,
        "paired_gate_draws_p": statistics.paired_gate.draws_p,
        "paired_gate_log10_p": statistics.paired_gate.log10_p,
        "paired_up_draws_p": statistics.paired_up.draws_p,
        "paired_up_log10_p": statistics.paired_up.log10_p,
        "down_columns_draws_p": statistics.down_columns.draws_p,
        "product_draws_p": statistics.product.draws_p,
        "balance_gate": statistics.balance_gate,
        "balance_up": statistics.balance_up,
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
        look=_look,
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
        look=_look,
    ),
)
