"""How few neurons show which projection is the gate, and what rounding and pruning cost.

Random subsets of the neurons of real layers are judged under their own names, where the true gate should be rejected,
and with gate and up exchanged, where the swap should be found. The same subsets are taken of the weights as they are,
rounded to 8 and to 4 bits, about zero and with a zero point, and with the smaller half of every matrix set to zero.

Each subset is screened as well: one whose gate and up are both quiet is not put to the test by an audit, so none may be
quiet that the test decides, under either naming.
"""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from glassblock.numerics.gate_or_up import UP_IS_SUSPICIOUS, GateScreen, Verdict, judge
from glassblock.numerics.gate_up_evidence import GateUpEvidence, gate_up_evidence
from glassblock.numerics.sign_symmetry import NOISE
from layers import LAYERS, NEURONS, SOURCE, Weights, smollm2_layers
from record import Promise, publish, short, table
from screening import of
from torch import Tensor

LEVEL = 5e-6  # 1e-3 over 200 tensors
SUBSETS = {64: 20, 128: 20, 256: 10, 512: 4, NEURONS: 1}  # neurons: random subsets of each layer
ENOUGH = 256  # neurons
GROUP = 32  # entries that share a 4-bit scale
WIDE_GROUP = 64  # that share one with a zero point
AGAIN = "int4, zero point, in the groups of Q4_1"
"""What the weights were made of had 4 bits in groups of 32. Rounded in these groups to another zero point, all numbers
of a group move alike: columns of down have that in common, which its control sees."""


def main() -> int:
    torch.set_num_threads(1)
    counted = {(treatment, neurons): Counts() for treatment in TREATMENTS for neurons in SUBSETS}
    by_layer = [{neurons: Counts() for neurons in SUBSETS} for _ in range(LAYERS)]
    for number, weights in enumerate(smollm2_layers()):
        treated = {name: Weights(*map(treat, weights)) for name, treat in TREATMENTS.items()}
        generator = torch.Generator().manual_seed(number)
        for neurons, subsets in SUBSETS.items():
            for seed in range(subsets):
                chosen = torch.randperm(NEURONS, generator=generator)[:neurons]
                for name, layer in treated.items():
                    found = judged(layer.neurons(chosen), seed=seed)
                    counted[name, neurons].add(found)
                    if TREATMENTS[name] is as_stored:
                        by_layer[number][neurons].add(found)
        print(f"layer {number} of {LAYERS}", file=sys.stderr, flush=True)
    return report(counted, by_layer)


class Judged(NamedTuple):
    """One subset under its own names, exchanged, and screened."""

    evidence: GateUpEvidence
    named: Verdict
    swapped: Verdict
    screen: GateScreen


def judged(subset: Weights, *, seed: int) -> Judged:
    evidence = gate_up_evidence(*subset, seed=seed, level=LEVEL)
    exchanged = gate_up_evidence(*subset.exchanged(), seed=seed, level=LEVEL)
    verdicts = (judge(found, level=LEVEL).verdict for found in (evidence, exchanged))
    return Judged(evidence, *verdicts, GateScreen(of(subset.gate), of(subset.up)))


@dataclass
class Counts:
    """Verdicts on subsets of one size under one treatment."""

    subsets: int = 0
    gate_rejected: int = 0
    acquitted: int = 0
    swap_found: int = 0
    false: int = 0
    up_not_noise: int = 0
    lowest_up: float = 0.0
    quiet: int = 0  # gate and up both below the z from which up is suspicious
    noise: int = 0  # and wide enough to be taken for noise
    decided_and_quiet: int = 0
    decided_and_noise: int = 0
    gate: list[float] = field(default_factory=list)  # certified log10 p

    def add(self, judged: Judged) -> None:
        evidence, named, swapped, screen = judged
        decided = named is not Verdict.UNDECIDABLE or swapped is not Verdict.UNDECIDABLE
        quiet = screen.gate.quiet(UP_IS_SUSPICIOUS) and screen.up.quiet(UP_IS_SUSPICIOUS)
        self.quiet += quiet
        self.noise += screen.noise
        self.decided_and_quiet += decided and quiet
        self.decided_and_noise += decided and screen.noise
        self.subsets += 1
        self.gate_rejected += evidence.gate.rejected(LEVEL)
        self.acquitted += named is Verdict.AS_NAMED
        self.swap_found += swapped is Verdict.SWAPPED
        self.false += (named is Verdict.SWAPPED) + (swapped is Verdict.AS_NAMED)
        self.up_not_noise += not evidence.up.noise
        self.gate.append(evidence.gate.log10_p or 0.0)
        self.lowest_up = min(self.lowest_up, evidence.up.log10_p or 0.0)


def as_stored(weight: Tensor) -> Tensor:
    return weight


def int8_absmax(weight: Tensor) -> Tensor:
    """One scale per output."""
    return rounded(weight.float(), 127)


def int8_zero_point(weight: Tensor) -> Tensor:
    """One scale and one zero point per output."""
    return shifted(weight.float(), 255)


def int4_symmetric(weight: Tensor) -> Tensor:
    """One scale per 32 inputs of an output."""
    return rounded(grouped(weight), 7).flatten(1)


def int4_zero_point(weight: Tensor) -> Tensor:
    """One scale and one zero point per 64 inputs of an output."""
    return shifted(grouped(weight, WIDE_GROUP), 15).flatten(1)


def int4_again(weight: Tensor) -> Tensor:
    """The same per 32 inputs."""
    return shifted(grouped(weight), 15).flatten(1)


def grouped(weight: Tensor, size: int = GROUP) -> Tensor:
    return weight.float().reshape(len(weight), -1, size)


def rounded(groups: Tensor, largest: int) -> Tensor:
    """To the nearest of -largest .. largest, times the scale of the last axis."""
    scale = (groups.abs().amax(-1, keepdim=True) / largest).clamp_min(torch.finfo(groups.dtype).tiny)
    return (groups / scale).round() * scale


def shifted(groups: Tensor, largest: int) -> Tensor:
    """To the nearest of 0 .. largest, less a zero point that is one of them, times the scale of the last axis."""
    least, most = groups.amin(-1, keepdim=True).clamp_max(0), groups.amax(-1, keepdim=True).clamp_min(0)
    scale = ((most - least) / largest).clamp_min(torch.finfo(groups.dtype).tiny)
    zero = (-least / scale).round()
    return ((groups / scale).round() + zero).clamp(0, largest).sub(zero) * scale


def half_pruned(weight: Tensor) -> Tensor:
    """The half of the matrix with the smaller magnitudes set to zero."""
    smaller = weight.abs().flatten().argsort(stable=True)[: weight.numel() // 2]
    return weight.float().flatten().index_fill(0, smaller, 0.0).view_as(weight)


TREATMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16, as it is": as_stored,
    "int8, absmax": int8_absmax,
    "int8, zero point": int8_zero_point,
    "int4, symmetric": int4_symmetric,
    "int4, zero point": int4_zero_point,
    AGAIN: int4_again,
    "50 % pruned": half_pruned,
}


def report(counted: Mapping[tuple[str, int], Counts], by_layer: Sequence[Mapping[int, Counts]]) -> int:
    false = sum(counts.false for counts in counted.values())
    judgements = 2 * sum(counts.subsets for counts in counted.values())
    whole = [counts for (_, neurons), counts in counted.items() if neurons == NEURONS]
    enough = [counts for (_, neurons), counts in counted.items() if neurons >= ENOUGH]
    once = [counts for (name, neurons), counts in counted.items() if neurons >= ENOUGH and name != AGAIN]
    rejected = min(counts.gate_rejected / counts.subsets for counts in enough)
    found = min(counts.swap_found / counts.subsets for counts in once)
    least = min(counts.gate_rejected for counts in whole)
    every = counted.values()
    decided = sum(max(counts.acquitted, counts.swap_found) for counts in every)
    lost, quiet = (
        sum(getattr(counts, name) for counts in every) for name in ("decided_and_noise", "decided_and_quiet")
    )
    promises = [
        Promise("no false verdict", f"{false} of {judgements:,}", false == 0),
        Promise(
            f"all {NEURONS} neurons: the gate is rejected in every layer, however treated",
            f"{least} of {LAYERS}",
            least == LAYERS,
        ),
        Promise(
            f"from {ENOUGH} neurons the gate is rejected in 95 of 100, however treated",
            f"lowest {100 * rejected:.1f} %",
            rejected >= 0.95,
        ),
        Promise(
            "and the swap is found in 90 of 100, but for what is rounded twice",
            f"lowest {100 * found:.1f} %",
            found >= 0.90,
        ),
        Promise("none that the test decides is screened as noise", f"{lost} of {decided:,}", lost == 0),
        Promise(
            f"nor would be if every size could be: z of gate and up below {UP_IS_SUSPICIOUS:.0f}",
            f"{quiet} of {decided:,}",
            quiet == 0,
        ),
    ]
    says = (
        f"Random subsets of the neurons of the {LAYERS} layers of {SOURCE}, certified at {short(LEVEL)} with 199 sign "
        "draws. The whole matrices are treated, then neurons chosen, the same under every treatment. Subsets of a "
        f"layer overlap. {AGAIN[0].upper()}{AGAIN[1:]}: the source had 4 bits in these very groups, so all numbers of "
        "a group move alike, the columns of down have that in common, and its control leaves layers undecidable."
    )
    sections = (
        "## Subsets\n",
        table(
            (
                "weights",
                "neurons",
                "subsets",
                "gate rejected",
                "as named",
                "exchanged: found",
                "false verdicts",
                f"T(up) at p <= {NOISE}",
                "median log10 p, gate",
                "lowest log10 p, up",
                "gate and up quiet",
                "screened as noise",
            ),
            (
                (
                    name,
                    neurons,
                    counts.subsets,
                    *(share(n, counts.subsets) for n in (counts.gate_rejected, counts.acquitted, counts.swap_found)),
                    counts.false,
                    share(counts.up_not_noise, counts.subsets),
                    f"{statistics.median(counts.gate):.1f}",
                    f"{counts.lowest_up:.1f}",
                    counts.quiet,
                    counts.noise,
                )
                for (name, neurons), counts in counted.items()
            ),
        ),
        "A swap is found less often than a gate is rejected: a conviction also asks that three other statistics be "
        f"noise at p > {NOISE}, and chance alone denies it three times in a hundred.\n",
        "## By layer\n",
        "Of the weights as they are: exchanged, found; in brackets the gate rejected under its own name.\n",
        table(
            ("layer", *(f"{neurons} neurons, {subsets} subsets" for neurons, subsets in SUBSETS.items())),
            (
                (number, *(f"{counts.swap_found} ({counts.gate_rejected})" for counts in sizes.values()))
                for number, sizes in enumerate(by_layer)
            ),
        ),
    )
    return publish("How few neurons are enough", says, promises, sections)


def share(count: int, subsets: int) -> str:
    return f"{count / subsets:.3f}"


if __name__ == "__main__":
    sys.exit(main())
