"""What there is to say of the gated networks of one kind: of each by itself, or of all experts of a layer at once.

Experts that are convicted of the same are one finding, those that are open one sentence, the others a count.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from glassblock.audit.evidence import Evidence, ExpertCount, GateLayer, GateStudy, LayerGates, Unasked
from glassblock.audit.rule import Checked
from glassblock.numerics.gate_or_up import Verdict
from glassblock.wire.audits import Skipped, Undecidable

Guilty = Callable[[GateLayer], bool]


@dataclass(frozen=True)
class EveryExpert:
    """All routed experts of a layer, convicted of the same: each by itself, those that are open alone by their sum."""

    experts: tuple[GateLayer, ...]

    @property
    def each_alone(self) -> bool:
        """Whether no sum was needed."""
        return all(one.network != "experts" for one in self.experts)

    @property
    def called(self) -> str:
        """In words."""
        numbers = [one.network for one in self.experts if isinstance(one.network, int)]
        return f"all of experts {_ranges(numbers)}" if self.each_alone else "all its experts"

    @property
    def as_one(self) -> GateLayer:
        """The one with the weakest proof, under the names of all."""
        weakest = max(self.experts, key=lambda one: one.judgement.log10_p or 0.0)
        names = tuple(dict.fromkeys(name for one in self.experts for name in (one.gate, one.up, *one.others)))
        first = self.experts[0]
        companions = tuple(dict.fromkeys(name for one in self.experts for name in one.companions))
        return replace(
            weakest,
            network="experts",
            gate=first.gate,
            up=first.up,
            others=names[len({first.gate, first.up}) :],
            companions=companions,
        )


Told = GateLayer | EveryExpert | Undecidable | Skipped | Checked


def gated_networks(evidence: Evidence, *, fused: bool, guilty: Guilty) -> Iterator[tuple[int, Told, GateStudy]]:
    """The networks of one kind, and what is said of those that were not tested or are open."""
    study = evidence.gates
    if study is None:
        return
    for layer in evidence.checkpoint.layer_indices:
        for reason in study.unasked.get(layer, ()):
            if reason.fused is None or reason.fused == fused:
                yield layer, _unasked(layer, reason), study
        gates = study.layers.get(layer)
        if gates is not None:
            yield from ((layer, told, study) for told in _told(layer, gates, fused=fused, guilty=guilty))
        elif layer not in study.unasked:
            yield layer, Skipped(layer=layer, reason="the layer was not read"), study


def _told(layer: int, gates: LayerGates, *, fused: bool, guilty: Guilty) -> Iterator[Told]:
    every = _every_expert(gates, guilty)
    if every is not None and gates.fused == fused:
        yield every
    for one in gates.networks:
        if one.fused == fused and not _of_open_experts(one) and not (every is not None and _routed(one)):
            yield one
    if gates.experts is not None and gates.fused == fused:
        if gates.experts.undecided:
            yield _open_experts(layer, gates)
        yield Checked(gates.experts.alone + gates.experts.together)


def _every_expert(gates: LayerGates, guilty: Guilty) -> EveryExpert | None:
    """All routed experts of a layer, where all are convicted of the same; None where not, or of one alone."""
    count = gates.experts
    if count is None or count.undecided or count.alone + count.together < 2:
        return None
    convicted = [one for one in gates.networks if _routed(one) and guilty(one)]
    alone = sum(one.network != "experts" for one in convicted)
    by_sum = len(convicted) - alone
    if alone < count.alone or by_sum < bool(count.together) or len({one.stored for one in convicted}) > 1:
        return None
    return EveryExpert(tuple(convicted))


def _routed(tested: GateLayer) -> bool:
    return tested.network == "experts" or isinstance(tested.network, int)


def _of_open_experts(tested: GateLayer) -> bool:
    """Whether these are experts that are open; they are told together, once for each layer."""
    return tested.judgement.verdict is Verdict.UNDECIDABLE and _routed(tested)


def _ranges(numbers: list[int]) -> str:
    """0 to 3, 5, 7 and 8: in words, runs together."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _open_experts(layer: int, gates: LayerGates) -> Undecidable:
    count, every = gates.experts or ExpertCount(0, 0, 0), sum(gates.experts or ())
    together = next((one.judgement for one in gates.networks if one.network == "experts"), None)
    why = "" if together is None or together.reason is None else f"; together: {together.reason.value}"
    return Undecidable(
        layer=layer,
        reason=f"{count.undecided} of {every} experts are open, each by itself{why}",
        would_decide="hidden activations of these experts captured from the original model, or a trusted reference",
    )


def _unasked(layer: int, unasked: Unasked) -> Undecidable | Skipped:
    if unasked.would_decide is None:
        return Skipped(layer=layer, reason=unasked.reason)
    return Undecidable(layer=layer, reason=unasked.reason, would_decide=unasked.would_decide)
