"""Does the screen let a swap pass that the certified test would convict? Random subsets of real gates.

Every subset is judged with gate and up exchanged, by the certified test and by the screen. A subset that the test would
convict and the screen would acquit is a miss. And under its own names: how many healthy ones the screen is enough for.
"""

import math
import sys
from dataclasses import dataclass, field

import torch
from glassblock.numerics.gate_or_up import GATE_STANDS_OUT, UP_IS_SUSPICIOUS, GateScreen
from glassblock.numerics.sign_screen import RowSums, SignScreen, screened
from glassblock.numerics.sign_symmetry import certified_log10_p
from layers import LAYERS, NEURONS, SOURCE, Weights, smollm2_layers
from record import Promise, publish, table
from torch import Tensor

SUBSETS = {32: 20, 64: 20, 128: 10, 256: 4, NEURONS: 1}  # neurons: random subsets of each layer
TOSSES = 100  # of the signs of up, in each layer
LEVEL = math.log10(1e-3 / 2)  # the laxest there is: one layer


def main() -> int:
    torch.set_num_threads(1)
    counted = {neurons: Counts() for neurons in SUBSETS}
    tossed: list[float] = []
    for number, weights in enumerate(smollm2_layers()):
        generator = torch.Generator().manual_seed(number)
        for neurons, subsets in SUBSETS.items():
            for _ in range(subsets):
                chosen = torch.randperm(NEURONS, generator=generator)[:neurons]
                counted[neurons].add(weights.neurons(chosen))
        for _ in range(TOSSES):
            signs = torch.randint(0, 2, (NEURONS, 1), generator=generator) * 2 - 1
            tossed.append(of(weights.up * signs).z)
        print(f"layer {number} of {LAYERS}", file=sys.stderr, flush=True)
    return report(counted, tossed)


@dataclass
class Counts:
    """Subsets of one size."""

    subsets: int = 0
    convicted: int = 0
    suspicious: int = 0
    missed: int = 0
    acquitted: int = 0
    convicted_z: list[float] = field(default_factory=list)

    def add(self, subset: Weights) -> None:
        gate, up = of(subset.gate), of(subset.up)
        exchanged = GateScreen(gate=up, up=gate)
        convicted = certified_log10_p(subset.gate) <= LEVEL
        self.subsets += 1
        self.convicted += convicted
        self.suspicious += exchanged.suspicious
        self.missed += convicted and not exchanged.suspicious
        self.acquitted += GateScreen(gate=gate, up=up).as_named
        if convicted:
            self.convicted_z.append(gate.z)


def of(weight: Tensor) -> SignScreen:
    sums = RowSums(len(weight), weight.shape[1], weight.device)
    sums.add(weight, 0)
    return screened(sums.finish())


def report(counted: dict[int, Counts], tossed: list[float]) -> int:
    missed = sum(counts.missed for counts in counted.values())
    convicted = sum(counts.convicted for counts in counted.values())
    acquitted = counted[NEURONS].acquitted
    suspicious = sum(z >= UP_IS_SUSPICIOUS for z in tossed)
    promises = [
        Promise("no exchanged subset that would be convicted is acquitted", f"{missed} of {convicted:,}", missed == 0),
        Promise("the screen is enough for every healthy layer", f"{acquitted} of {LAYERS}", acquitted == LAYERS),
        Promise(
            "of layers whose signs are tossed at most one in fifty is looked at more closely",
            f"{suspicious} of {len(tossed):,}",
            suspicious <= len(tossed) / 50,
        ),
    ]
    rows = (
        (
            neurons,
            counts.subsets,
            counts.convicted,
            counts.suspicious,
            counts.missed,
            f"{min(counts.convicted_z):.1f}" if counts.convicted_z else "none",
            counts.acquitted,
        )
        for neurons, counts in counted.items()
    )
    header = (
        "neurons",
        "subsets",
        "exchanged: certified at 5e-4",
        f"z of up >= {UP_IS_SUSPICIOUS:.0f}",
        "certified and not suspicious",
        "lowest z of a certified one",
        f"as named: screened, z of gate > {GATE_STANDS_OUT:.0f}",
    )
    says = (
        f"Random subsets of the neurons of the {LAYERS} layers of {SOURCE}. The level is that of a checkpoint of one "
        "layer, the laxest there is."
    )
    return publish("Screening", says, promises, [table(header, rows)])


if __name__ == "__main__":
    sys.exit(main())
