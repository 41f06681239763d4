"""The numbers of gates, layer by layer: for tables and pictures, not for verdicts."""

from glassblock.audit.evidence import GateLayer, LayerGates
from glassblock.numerics.gate_or_up import Verdict
from glassblock.numerics.gate_up_evidence import GateUpEvidence
from glassblock.numerics.neuron_lengths import Spread


def layer_metrics(gates: LayerGates) -> dict[str, float | int | str | None]:
    """The numbers of one layer, for tables and pictures: of its dense network, or of its experts.

    Of a network that its screen acquits there are T and z of gate and up, lengths and balances; what the certified test
    adds is there where it was made.
    """
    spoken = [one for one in gates.networks if one.network is None] or [
        one for one in gates.networks if one.network == "experts"
    ]
    metrics: dict[str, float | int | str | None] = {}
    if spoken:
        metrics = _network_metrics(spoken[0])
    if gates.experts is not None:
        metrics |= {f"experts_{name}": count for name, count in gates.experts._asdict().items()}
        if not spoken:
            exchanged = any(one.judgement.verdict is Verdict.SWAPPED for one in gates.networks)
            metrics["verdict"] = (Verdict.SWAPPED if exchanged else Verdict.AS_NAMED).value
    return metrics


def _network_metrics(tested: GateLayer) -> dict[str, float | int | str | None]:
    screen, statistics = tested.screen, tested.statistics
    metrics: dict[str, float | int | str | None] = {
        "verdict": tested.judgement.verdict.value,
        "screened": int(tested.judgement.screened),
    }
    numbers = statistics if statistics is not None else screen
    if numbers is None:
        return metrics
    for name, test in (("gate", numbers.gate), ("up", numbers.up)):
        metrics |= {f"{name}_statistic": test.statistic, f"{name}_z": test.z}
    if statistics is not None:
        metrics |= _certified_metrics(statistics)
    return metrics | {
        "balance_gate": numbers.balance_gate,
        "balance_up": numbers.balance_up,
        **_spread("gate_row_norm", numbers.gate_lengths),
        **_spread("up_row_norm", numbers.up_lengths),
        **_spread("down_column_norm", numbers.down_lengths),
    }


def _certified_metrics(statistics: GateUpEvidence) -> dict[str, float | int | str | None]:
    return {
        "gate_draws_p": statistics.gate.draws_p,
        "gate_log10_p": statistics.gate.log10_p,
        "up_draws_p": statistics.up.draws_p,
        "up_log10_p": statistics.up.log10_p,
        "paired_gate_draws_p": statistics.paired_gate.draws_p,
        "paired_gate_log10_p": statistics.paired_gate.log10_p,
        "paired_up_draws_p": statistics.paired_up.draws_p,
        "paired_up_log10_p": statistics.paired_up.log10_p,
        "down_columns_draws_p": statistics.down_columns.draws_p,
        "product_draws_p": statistics.product.draws_p,
    }


def _spread(what: str, lengths: Spread | None) -> dict[str, float]:
    return {} if lengths is None else {f"{what}_{name}": value for name, value in lengths._asdict().items()}
