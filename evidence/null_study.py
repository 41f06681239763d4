"""False verdicts, on real weights whose signs are tossed.

Two studies. In the first, whole layers are judged. A copy of a layer has every neuron's sign tossed (the row of up and
the column of down together, which changes no output), so that T(up), P(gate) and the controls are noise by construction
and the gate keeps its direction. It is judged under its own names and exchanged. Then the gate's signs are tossed as
well: no projection of such a copy has a direction, and every verdict on it is false.

In the second, only T is taken, of very many more tosses, and each is held against the certified bound: of N tosses no
more than N * p may be certified at p. Tossing does not change W^T W, so one matrix serves all tosses.
"""

import bisect
import dataclasses
import functools
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from glassblock.numerics.gate_or_up import Verdict, family_wise_level, judge
from glassblock.numerics.gate_up_evidence import GateUpEvidence, gate_up_evidence
from glassblock.numerics.near_duplicates import near_duplicate_groups
from glassblock.numerics.sign_bound import log10_tail_bound, row_moments
from glassblock.numerics.sign_symmetry import NOISE, SignedRows, SymmetryTest, Ties, certified, fair_signs, randomised
from glassblock.numerics.unit_rows import UnitRows, centred_unit_rows, product_rows
from layers import LAYERS, NEURONS, SOURCE, Weights, smollm2_layers
from record import Promise, publish, short, table
from torch import Tensor
from uniformity import uniformity_p

LEVEL = family_wise_level(2 * LAYERS)  # gate and up of every layer, as the audit counts them
DRAWS = 199  # as the audit draws
COPIES = 100  # of each layer
TOSSES = 50_000  # of each projection
CHUNK = 10_000
LEVELS = (1e-1, 1e-2, 1e-3, 1e-4, LEVEL)
FLIP_SEED, TOSS_SEED = 1_000_000, 2_000_000  # apart from the seeds of the draws, which count the copies

FRESH = ("up", "paired_gate", "down_columns", "product")
TOLD = {"up": "T(up)", "paired_gate": "P(gate)", "down_columns": "T(columns of down)", "product": "P(gate * up)"}
NAMED, EXCHANGED = "signs of up and down tossed, as named", "signs of up and down tossed, exchanged"
FALSE = {
    NAMED: Verdict.SWAPPED,
    EXCHANGED: Verdict.AS_NAMED,
    "signs of gate tossed too, as named": None,  # every verdict
    "signs of gate tossed too, exchanged": None,
}


def main() -> int:
    torch.set_num_threads(1)
    studied: list[Layer] = []
    tossed = Counter[float]()
    for number, weights in enumerate(smollm2_layers()):
        studied.append(study(weights, number))
        for role, weight in (("gate", weights.gate), ("up", weights.up)):
            tossed.update(dict(certified_at(weight, seed=TOSS_SEED + 2 * number + (role == "up"))))
        print(f"layer {number} of {LAYERS}", file=sys.stderr, flush=True)
    return report(studied, tossed)


@dataclass
class Layer:
    """What the copies of one layer came to."""

    tied: int
    verdicts: dict[str, Counter[Verdict]] = field(default_factory=lambda: {name: Counter() for name in FALSE})
    up: list[SymmetryTest] = field(default_factory=list)
    p_values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in FRESH})


def study(weights: Weights, number: int) -> Layer:
    """Judge the copies of one layer, all four ways."""
    published = gate_up_evidence(*weights, seed=0, level=LEVEL, draws=DRAWS, certify="all")
    # |cosine| is blind to signs: whatever is tossed, the same neurons are tied.
    ties = Ties.of_groups(near_duplicate_groups([weights.gate, weights.up, weights.down.T]))
    gate, up, down = (centred_unit_rows(weight) for weight in (weights.gate, weights.up, weights.down.T))
    paired_gate, product = product_rows(gate, down), product_rows(gate, up)
    generator = torch.Generator().manual_seed(FLIP_SEED + number)
    layer = Layer(tied=published.up.tied)
    for copy in range(COPIES):
        flips, gate_flips = torch.randint(0, 2, (2, len(gate.rows), 1), generator=generator).float() * 2 - 1
        seed = COPIES * number + copy

        def test(units: UnitRows, flips: Tensor, *, seed: int = seed) -> SymmetryTest:
            rows = signed(units, flips, ties)
            result = randomised(rows, fair_signs(rows, draws=DRAWS, seed=seed))
            # Screened as the audit does it: certified where the draws do not find noise.
            return result if result.noise else dataclasses.replace(result, log10_p=certified(rows))

        both = flips * gate_flips
        # Flipping u_i and d_i leaves u_i * d_i as it is, and the gate is not touched: both stay as published.
        healthy = dataclasses.replace(
            published,
            up=test(up, flips),
            paired_gate=test(paired_gate, flips),
            down_columns=test(down, flips),
            product=test(product, flips),
        )
        directionless = dataclasses.replace(
            healthy,
            gate=test(gate, gate_flips),
            paired_gate=test(paired_gate, both),
            product=test(product, both),
        )
        judged = [one for found in (healthy, directionless) for one in (found, exchanged(found))]
        for name, found in zip(FALSE, judged, strict=True):
            layer.verdicts[name][judge(found, level=LEVEL).verdict] += 1
        layer.up.append(healthy.up)
        for name in FRESH:
            layer.p_values[name].append(getattr(healthy, name).draws_p)
        if copy == 0:
            check_against_whole_test(weights, flips.flatten(), judged[:2], seed=seed)
    return layer


def signed(units: UnitRows, flips: Tensor, ties: Ties) -> SignedRows:
    """Unit rows under tossed signs; every step that made them is odd, so this is what the tossed weights would give."""
    rows = units.rows * flips
    neurons, width = rows.shape
    return SignedRows(lambda span: UnitRows(rows[span], units.kept[span]), neurons, width, rows.device, ties)


def exchanged(found: GateUpEvidence) -> GateUpEvidence:
    """The evidence, had gate and up borne each other's names."""
    return dataclasses.replace(
        found,
        gate=found.up,
        up=found.gate,
        paired_gate=found.paired_up,
        paired_up=found.paired_gate,
    )


def check_against_whole_test(weights: Weights, flips: Tensor, judged: Sequence[GateUpEvidence], *, seed: int) -> None:
    """The short cuts of this study against the test as it is shipped, on weights that are really flipped."""
    copy = Weights(weights.gate, weights.up * flips[:, None], weights.down * flips)
    fresh = FRESH, ("gate", "paired_up", "down_columns", "product")
    for found, named, names in zip(judged, (copy, copy.exchanged()), fresh, strict=True):
        whole = gate_up_evidence(*named, seed=seed, level=LEVEL, draws=DRAWS)
        ours, theirs = judge(found, level=LEVEL), judge(whole, level=LEVEL)
        # Not the number of rejections: this study certifies P(up) even where the audit has no need to.
        assert (ours.verdict, ours.reason, ours.log10_p) == (theirs.verdict, theirs.reason, theirs.log10_p)
        assert all(getattr(whole, name) == getattr(found, name) for name in names)


def certified_at(weight: Tensor, *, seed: int) -> Iterator[tuple[float, int]]:
    """For each level, how many tosses of a projection's signs are certified at it."""
    rows = centred_unit_rows(weight).rows
    moments = row_moments([rows], at_most=len(rows))
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.cat([tossed_lengths(rows, generator) for _ in range(TOSSES // CHUNK)])
    longest_first = lengths.sort(descending=True).values
    along = torch.zeros_like(moments.total)

    @functools.cache
    def log10_p(rank: int) -> float:
        along[0] = longest_first[rank]  # the bound looks at the length of the sum alone
        return log10_tail_bound(moments._replace(total=along))

    count = TOSSES
    for level in sorted(LEVELS, reverse=True):
        count = bisect.bisect_right(range(TOSSES), math.log10(level), hi=count, key=log10_p)
        yield level, count


def tossed_lengths(rows: Tensor, generator: torch.Generator) -> Tensor:
    signs = torch.randint(0, 2, (CHUNK, len(rows)), generator=generator, dtype=torch.int8).float() * 2 - 1
    return (signs @ rows).double().square().sum(1).sqrt()


def report(studied: Sequence[Layer], tossed: Counter[float]) -> int:
    verdicts = {name: sum((layer.verdicts[name] for layer in studied), Counter[Verdict]()) for name in FALSE}
    p_values = {name: [p for layer in studied for p in layer.p_values[name]] for name in FRESH}
    copies, tosses = COPIES * LAYERS, 2 * LAYERS * TOSSES
    wrong = {name: false_verdicts(verdicts[name], FALSE[name]) for name in FALSE}
    acquitted, convicted = verdicts[NAMED][Verdict.AS_NAMED], verdicts[EXCHANGED][Verdict.SWAPPED]
    rejected = sum(test.rejected(LEVEL) for layer in studied for test in layer.up)
    uniform = {name: uniformity_p(values, draws=DRAWS) for name, values in p_values.items()}
    by_layer = [uniformity_p(layer.p_values["up"], draws=DRAWS) for layer in studied]
    promises = [
        Promise("no false verdict, under any names", f"{sum(wrong.values())} of {4 * copies}", not any(wrong.values())),
        Promise(f"T(up) never certified at {short(LEVEL)}", f"{rejected} of {copies}", rejected == 0),
        Promise(
            "of N tosses no more than N p are certified at p, for every p below",
            f"{tossed[LEVEL]} of {tosses:,} at {short(LEVEL)}",
            all(tossed[level] <= level * tosses for level in LEVELS),
        ),
        Promise(
            f"p of draws is uniform: Kolmogorov and Smirnov above 0.01/{len(FRESH)} for each statistic",
            f"lowest {min(uniform.values()):.3f}",
            min(uniform.values()) > 0.01 / len(FRESH),
        ),
        Promise(
            f"and above 0.01/{LAYERS} for T(up) in each layer",
            f"lowest {min(by_layer):.3f}",
            min(by_layer) > 0.01 / LAYERS,
        ),
        Promise("every copy is acquitted under its own names", f"{acquitted} of {copies}", acquitted == copies),
        Promise("95 of 100 exchanged copies are convicted", f"{convicted} of {copies}", convicted >= 0.95 * copies),
    ]
    says = (
        f"{copies:,} copies of real layers of {SOURCE}, signs tossed, judged at {short(LEVEL)}: a family-wise error of "
        f"1e-3 over the {2 * LAYERS} projections of a checkpoint, as in the audit; {DRAWS} sign draws. Every "
        f"neuron has a coin of its own; {sum(layer.tied for layer in studied)} of {NEURONS * LAYERS:,} are tied by the "
        f"test, in {sum(layer.tied > 0 for layer in studied)} layers."
    )
    sections = (
        "## Verdicts\n",
        table(
            ("copies", *Verdict, "false"),
            ((name, *(verdicts[name][verdict] for verdict in Verdict), wrong[name]) for name in FALSE),
        ),
        "Exchanged copies that stay undecidable have a chance p-value at or below 0.01 in one of the three statistics "
        "that must be noise: three in a hundred are expected.\n",
        "## The certified bound\n",
        f"{tosses:,} tosses ({TOSSES:,} each of gate and up, {LAYERS} layers), each with its certified p-value.\n",
        table(
            ("certified p at or below", "tosses", "share", "p / share"),
            (
                (
                    short(level),
                    tossed[level],
                    short(tossed[level] / tosses),
                    conservatism(level, tossed[level] / tosses),
                )
                for level in LEVELS
            ),
        ),
        "## The p-value of draws\n",
        table(
            ("statistic", "mean p", f"share at or below {NOISE}", "Kolmogorov and Smirnov p"),
            (
                (TOLD[name], f"{mean(values):.3f}", f"{share_below(values):.4f}", f"{uniform[name]:.3f}")
                for name, values in p_values.items()
            ),
        ),
        "## T(up) by layer\n",
        table(
            (
                "layer",
                "mean T",
                f"p <= {NOISE}",
                "lowest certified log10 p",
                "uniformity p",
                "acquitted",
                "exchanged: found",
            ),
            (
                (
                    number,
                    f"{mean([test.statistic for test in layer.up]):.3f}",
                    sum(not test.noise for test in layer.up),
                    lowest(layer.up),
                    f"{p:.3f}",
                    layer.verdicts[NAMED][Verdict.AS_NAMED],
                    layer.verdicts[EXCHANGED][Verdict.SWAPPED],
                )
                for number, (layer, p) in enumerate(zip(studied, by_layer, strict=True))
            ),
        ),
        f"Each row: {COPIES} copies. Certified only where p of draws is at or below {NOISE}, as in the audit.\n",
    )
    return publish("False verdicts on tossed signs", says, promises, sections)


def false_verdicts(counts: Counter[Verdict], false: Verdict | None) -> int:
    """All but undecidable where every verdict is false."""
    return counts.total() - counts[Verdict.UNDECIDABLE] if false is None else counts[false]


def share_below(values: Sequence[float]) -> float:
    return sum(value <= NOISE for value in values) / len(values)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def lowest(tests: Sequence[SymmetryTest]) -> str:
    looked_at = [test.log10_p for test in tests if test.log10_p is not None]
    return f"{min(looked_at):.2f}" if looked_at else "none looked at"


def conservatism(level: float, share: float) -> str:
    return f"{level / share:.1f}" if share else "none at all"


if __name__ == "__main__":
    sys.exit(main())
