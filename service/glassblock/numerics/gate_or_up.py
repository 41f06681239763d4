"""Which of two projections is the gate? Evidence from the weights of one layer, and the verdict it supports.

Beside T of `gate` and `up` (see `sign_symmetry`) there is the mirrored statistic P(W) = T of the rows w_i * d_i, where
d_i is column i of `down`. Given the gate, the sign of d_i is a fair coin, so P(gate) is noise; u_i * d_i keeps its sign
under the flip, so P(up) may be anything. The true gate thus shows in T, the true up in P, and a swap shows in both.

Two controls are noise in every healthy network under either naming, T(columns of down) and P of gate * up, and not
where the symmetry is broken by something else: u + 1 forms, one-sided clamps, activations on both branches. When one
of them rejects there is no verdict.

Before any of that a layer is screened (`sign_screen`). Where T(gate) stands far out and T(up) does not, the layer is as
named; where neither does, no certificate could decide it. Nothing more is computed then. A screen never convicts.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Literal, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.near_duplicates import near_duplicate_groups, near_duplicate_indices, row_sketch
from glassblock.numerics.sign_screen import SignScreen
from glassblock.numerics.sign_symmetry import (
    BLOCK_ENTRIES,
    SignedRows,
    SymmetryTest,
    Ties,
    UnitSource,
    certified,
    fair_signs,
    randomised,
)
from glassblock.numerics.unit_rows import UnitRows, centred_unit_rows, product_rows, rescaled_rows


class Spread(NamedTuple):
    """Lengths of the rows of one weight that are finite and not zero."""

    least: float
    median: float
    most: float


@dataclass(frozen=True)
class GateUpEvidence:
    """What the weights of one layer (or expert) say, under the names they carry.

    Attributes:
        gate, up: T of the two projections.
        paired_gate, paired_up: P of the two, with the columns of down.
        down_columns: Control: T of the columns of down.
        product: Control: T of the elementwise product of gate and up rows.
        balance_gate, balance_up: Correlation over neurons of log row length with log column length of down. Training
            balances the true up with down; a gate may or may not be balanced, so this never convicts. None where
            lengths do not vary.
        gate_lengths, up_lengths, down_lengths: Of the rows of gate and up and of the columns of down. They are for
            pictures: no verdict looks at them. None where no row has a length.
    """

    gate: SymmetryTest
    up: SymmetryTest
    paired_gate: SymmetryTest
    paired_up: SymmetryTest
    down_columns: SymmetryTest
    product: SymmetryTest
    balance_gate: float | None
    balance_up: float | None
    gate_lengths: Spread | None = None
    up_lengths: Spread | None = None
    down_lengths: Spread | None = None


GATE_STANDS_OUT = 12.0
"""z from which the screen takes a gate for one: an order of magnitude below those of trained ones."""

UP_IS_SUSPICIOUS = 3.0
"""z from which up goes to the certified test. From v = m^2 / d = 200 on, none with a smaller one can be convicted by
it (`least_log10_p`); below, none of 880 was."""


SPREAD_ENOUGH = 400.0
"""Variance v, as the screen estimates it, from which a small z rules a conviction out: twice the 200 from which it
would do, since fifteen others tell v within a factor of two."""


@dataclass(frozen=True)
class GateScreen:
    """What one look at the weights of a layer (or expert) shows, under the names they carry.

    Attributes:
        gate, up: T of the two projections, beside its others.
        balance_gate, balance_up, gate_lengths, up_lengths, down_lengths: As those of `GateUpEvidence`.
    """

    gate: SignScreen
    up: SignScreen
    balance_gate: float | None = None
    balance_up: float | None = None
    gate_lengths: Spread | None = None
    up_lengths: Spread | None = None
    down_lengths: Spread | None = None

    @property
    def as_named(self) -> bool:
        """Whether the gate stands out and up does not, so that no certificate is needed."""
        return self.gate.stands_out(GATE_STANDS_OUT) and self.up.quiet(UP_IS_SUSPICIOUS)

    @property
    def suspicious(self) -> bool:
        """Whether up may be the gate: a certified test could reject it."""
        return not self.up.quiet(UP_IS_SUSPICIOUS)

    @property
    def noise(self) -> bool:
        """Whether neither can be rejected, so that no certificate could decide: as in a network nobody trained.

        Only where the argument that a small z rules a certificate out holds with room to spare (`SPREAD_ENOUGH`).
        """
        both = (self.gate, self.up)
        return all(one.quiet(UP_IS_SUSPICIOUS) and one.variance >= SPREAD_ENOUGH for one in both)


@unique
class Verdict(StrEnum):
    """What the evidence supports."""

    AS_NAMED = "as-named"
    SWAPPED = "swapped"
    UNDECIDABLE = "undecidable"


@unique
class Reason(StrEnum):
    """Why there is no verdict; the value is the sentence to print."""

    NOISE = "neither projection differs from noise: untrained, an odd activation, or too small"
    BOTH_REJECT = "both projections have a common direction: something besides gating breaks the sign symmetry"
    DOWN_REJECTS = "the control fails: the columns of down have a common direction"
    PRODUCT_REJECTS = "the control fails: the products of gate and up rows have a common direction"
    MIRROR_CONTRADICTS = "the mirrored statistic contradicts the direct one"
    ONLY_THE_MIRROR = "only the mirrored statistic differs from noise"
    BORDERLINE = "one projection has a common direction, but what must be noise beside it is not clearly noise"


EQUAL_LENGTHS = 1e-6
"""Row lengths that vary by less, relatively, vary by rounding."""

_WOULD_DECIDE = (
    "normed input and hidden activations of this layer captured from the original model, or the same layer of a "
    "trusted reference"
)


@dataclass(frozen=True)
class Judgement:
    """A verdict on one layer.

    Attributes:
        verdict: What the evidence supports.
        reason: Why it is undecidable; None otherwise.
        would_decide: Which further input would decide; None where nothing is open.
        rejections: Certified rejections that speak for the verdict: the direct statistic, and the mirrored one where
            it is certified too (for "as named" only if the evidence certified all). They look at different rows but
            at the same signs: each has its own p-value, and the two are not to be multiplied.
        log10_p: Certified log10 p-value of the direct statistic behind the verdict; None when undecidable.
        screened: Whether the screen was enough, so that nothing was certified: as named, or noise.
    """

    verdict: Verdict
    reason: Reason | None
    would_decide: str | None
    rejections: int
    log10_p: float | None
    screened: bool = False


SCREENED = Judgement(Verdict.AS_NAMED, None, None, 0, None, screened=True)
"""The judgement of a layer that its screen acquits."""

SCREENED_NOISE = Judgement(Verdict.UNDECIDABLE, Reason.NOISE, _WOULD_DECIDE, 0, None, screened=True)
"""The judgement of a layer whose screen shows that no certificate could decide it."""


def family_wise_level(tests: int, *, alpha: float = 1e-3) -> float:
    """The p-value at which one of `tests` tensors (times the partitions searched) is rejected; Bonferroni.

    Raises:
        InvalidValue: No test at all, or an alpha outside (0, 1).
    """
    if tests < 1:
        raise InvalidValue(f"a family of {tests} tests has no level")
    if not 0 < alpha < 1:
        raise InvalidValue(f"a family-wise error rate lies between 0 and 1, not at {alpha}")
    return alpha / tests


def gate_up_evidence(
    gate: Float[Tensor, "m d"],
    up: Float[Tensor, "m_up d_up"],
    down: Float[Tensor, "d_down m_down"],
    *,
    seed: int,
    level: float,
    draws: int = 199,
    certify: Literal["all", "screened"] = "screened",
) -> GateUpEvidence:
    """All statistics of one layer, under the names given.

    Neurons that are copies in any of the three weights share a sign in all statistics.

    Args:
        gate, up: `[m, d]`: the projections as named, one neuron per row.
        down: `[d, m]`: the projection back, one neuron per column.
        seed: Of the sign draws, which are the same for every statistic.
        level: Per-tensor level of a certified rejection (`family_wise_level`).
        draws: Sign draws, at least 99.
        certify: "all" computes every certified p-value. "screened" leaves it out (None) where the draws find noise, at
            p > 0.01, and for P(up) where the gate is rejected already, which decides the layer without it. A tensor
            that would be certified at 5e-6 passes 199 draws as noise less than once in a million times.

    Memory besides the weights: about eight blocks of 16 MiB, the signs (draws * m bytes), and while certifying
    three float64 matrices of min(m, d) squared.

    Raises:
        InvalidValue: The shapes do not belong together, or `draws` or `level` cannot be used.
    """
    _check(gate, up, down, level)
    ties = Ties.of_groups(near_duplicate_groups([gate, up, down.T]))
    gate_units, up_units, down_units = (_unit_rows(weight) for weight in (gate, up, down.T))
    sources = _Sources(
        gate=gate_units,
        up=up_units,
        paired_gate=_products(gate_units, down_units),
        paired_up=_products(up_units, down_units),
        down_columns=down_units,
        product=_products(gate_units, up_units),
    )
    gate_lengths, up_lengths, down_lengths = (_lengths(rows) for rows in (gate, up, down.T))
    tested = _tested(sources, gate, ties, seed=seed, level=level, draws=draws, every_bound=certify == "all")
    return GateUpEvidence(
        *tested,
        balance_gate=log_length_correlation(gate_lengths, down_lengths),
        balance_up=log_length_correlation(up_lengths, down_lengths),
        gate_lengths=spread_of(gate_lengths),
        up_lengths=spread_of(up_lengths),
        down_lengths=spread_of(down_lengths),
    )


def summed_gate_up_evidence(
    experts: Iterable[tuple[Float[Tensor, "m d"], Float[Tensor, "m d"], Float[Tensor, "d m"]]],
    *,
    seed: int,
    level: float,
    draws: int = 199,
    certify: Literal["all", "screened"] = "screened",
) -> GateUpEvidence:
    """All statistics of the experts of one layer together: of the sums over experts of their unit rows.

    One sign for each neuron index, in all experts at once: valid for experts drawn apart and for copies of one network
    that kept the order of its neurons (upcycling), and more powerful than any expert alone. Copies in another order
    are found, across experts too, and their indices share a sign. P-values of single experts are not to be combined:
    upcycled experts share their signs, so these p-values are not independent.

    Args:
        experts: Gate, up and down of each, as `gate_up_evidence` takes them; held one at a time.
        seed, level, draws, certify: As there.

    Raises:
        InvalidValue: No expert, or shapes that do not belong together.
    """
    totals: dict[str, Tensor] = {}
    sketches: dict[str, list[Tensor]] = {name: [] for name in ("gate", "up", "down")}
    some: Tensor | None = None
    for gate, up, down in experts:
        _check(gate, up, down, level)
        some = gate if some is None else some
        if gate.shape != some.shape:
            raise InvalidValue(f"one expert's gate is {list(some.shape)}, another's {list(gate.shape)}")
        units = {
            name: centred_unit_rows(weight) for name, weight in (("gate", gate), ("up", up), ("down_columns", down.T))
        }
        for name, left, right in _PRODUCTS:
            units[name] = product_rows(units[left], units[right])
        for name, found in units.items():
            totals[name] = totals[name].add_(found.rows) if name in totals else found.rows.clone()
        for name, weight in (("gate", gate), ("up", up), ("down", down.T)):
            sketches[name].append(row_sketch(weight))
    if some is None:
        raise InvalidValue("a mixture without experts has no evidence")
    ties = Ties.of_groups(near_duplicate_indices(sketches.values(), width=some.shape[1]))
    sources = _Sources(**{name: _summed(total) for name, total in totals.items()})
    tested = _tested(sources, some, ties, seed=seed, level=level, draws=draws, every_bound=certify == "all")
    return GateUpEvidence(*tested, balance_gate=None, balance_up=None)


class _Sources(NamedTuple):
    """The unit rows behind each statistic."""

    gate: UnitSource
    up: UnitSource
    paired_gate: UnitSource
    paired_up: UnitSource
    down_columns: UnitSource
    product: UnitSource


_PRODUCTS = (("paired_gate", "gate", "down_columns"), ("paired_up", "up", "down_columns"), ("product", "gate", "up"))


def _tested(
    sources: _Sources, like: Float[Tensor, "m d"], ties: Ties, *, seed: int, level: float, draws: int, every_bound: bool
) -> tuple[SymmetryTest, SymmetryTest, SymmetryTest, SymmetryTest, SymmetryTest, SymmetryTest]:
    """The six tests in that order, each certified where that is asked for or the draws do not find noise."""
    found: dict[str, SymmetryTest] = {}
    signs: Tensor | None = None
    for name, source in sources._asdict().items():
        rows = SignedRows(source, *like.shape, device=like.device, ties=ties)
        signs = fair_signs(rows, draws=draws, seed=seed) if signs is None else signs
        result = randomised(rows, signs)
        wanted = name != "paired_up" or not found["gate"].rejected(level)
        if every_bound or (wanted and not result.noise):
            result = dataclasses.replace(result, log10_p=certified(rows))
        found[name] = result
    gate, up, paired_gate, paired_up, down_columns, product = found.values()
    return gate, up, paired_gate, paired_up, down_columns, product


def _summed(total: Float[Tensor, "m d"]) -> UnitSource:
    return lambda span: rescaled_rows(total[span].clone())


def _dwarfed(test: SymmetryTest, *, by: SymmetryTest) -> bool:
    return test.log10_p is not None and by.log10_p is not None and test.log10_p > 0.1 * by.log10_p


def _unit_rows(weight: Float[Tensor, "m d"]) -> UnitSource:
    """The unit rows of spans of neurons; made once where they all fit into one block."""
    if weight.numel() > BLOCK_ENTRIES:
        return lambda span: centred_unit_rows(weight[span])
    rows, kept = centred_unit_rows(weight)
    return lambda span: UnitRows(rows[span], kept[span])


def _products(left: UnitSource, right: UnitSource) -> UnitSource:
    return lambda span: product_rows(left(span), right(span))


def judge(evidence: GateUpEvidence, *, level: float) -> Judgement:
    """The verdict on one layer.

    Where a control rejects there is no verdict. Otherwise:

    - as named: T(gate) is rejected, T(up) and P(gate) are not, and T(up) is noise: its p-value by draws lies above
      0.01, or its certified log10 p-value is less than a tenth of the gate's.
    - swapped: T(up) is rejected, T(gate) and P(up) are not, and T(gate) and both controls are noise by draws. P(gate)
      rejected as well makes it two rejections.
    - undecidable: everything else, with the reason.

    The two sides differ on purpose. In a healthy model one tensor in a hundred lies below p = 0.01 by chance (its
    certified p-value then is about 0.1); beside a gate at 1e-60 that must not cost a layer its acquittal, and beside
    one at 1e-8 it must. A conviction asks for noise proper, and misses three swaps in a hundred for it.

    Raises:
        InvalidValue: `level` does not lie between 0 and 1.
    """
    _check_level(level)
    reason = _open_question(evidence, level)
    if reason is not None:
        return Judgement(Verdict.UNDECIDABLE, reason, _WOULD_DECIDE, 0, None)
    if evidence.gate.rejected(level):
        verdict, direct, mirrored = Verdict.AS_NAMED, evidence.gate, evidence.paired_up
    else:
        verdict, direct, mirrored = Verdict.SWAPPED, evidence.up, evidence.paired_gate
    return Judgement(verdict, None, None, 1 + mirrored.rejected(level), direct.log10_p)


def _open_question(evidence: GateUpEvidence, level: float) -> Reason | None:
    """Why these rejections support no verdict; None where they support one."""
    gate, up = evidence.gate.rejected(level), evidence.up.rejected(level)
    paired_gate, paired_up = evidence.paired_gate.rejected(level), evidence.paired_up.rejected(level)
    noise_if_swapped = all(test.noise for test in (evidence.gate, evidence.down_columns, evidence.product))
    noise_if_named = evidence.up.noise or _dwarfed(evidence.up, by=evidence.gate)
    reasons = (
        (gate and up, Reason.BOTH_REJECT),
        (evidence.down_columns.rejected(level), Reason.DOWN_REJECTS),
        (evidence.product.rejected(level), Reason.PRODUCT_REJECTS),
        ((gate and paired_gate) or (up and paired_up), Reason.MIRROR_CONTRADICTS),
        ((gate and not noise_if_named) or (up and not noise_if_swapped), Reason.BORDERLINE),
        (not (gate or up) and (paired_gate or paired_up), Reason.ONLY_THE_MIRROR),
        (not (gate or up), Reason.NOISE),
    )
    return next((reason for holds, reason in reasons if holds), None)


def _lengths(rows: Float[Tensor, "m d"]) -> Float[Tensor, " m"]:
    """In float64, which squares of float32 cannot overflow; block by block, for torch widens what it is given."""
    step = max(1, BLOCK_ENTRIES // rows.shape[1])
    spans = (slice(start, start + step) for start in range(0, len(rows), step))
    return torch.cat([cast("Tensor", torch.norm(rows[span], dim=1, dtype=torch.float64)) for span in spans])


def spread_of(lengths: Float[Tensor, " m"]) -> Spread | None:
    """The least, the middle and the greatest length; None where no row has one."""
    some = lengths[lengths.isfinite() & (lengths > 0)]
    if not len(some):
        return None
    # The lower median of an even number is a length that some row has.
    return Spread(float(some.min()), float(some.median()), float(some.max()))


def log_length_correlation(left: Float[Tensor, " m"], right: Float[Tensor, " m"]) -> float | None:
    """Correlation over neurons of the logarithms of two lengths, over those that have both."""
    lengths = torch.stack([left, right])
    logs = lengths[:, (lengths.isfinite() & (lengths > 0)).all(0)].log()
    if logs.shape[1] < 2 or float(logs.std(1).min()) < EQUAL_LENGTHS:
        return None
    return float(torch.corrcoef(logs)[0, 1])


def _check(gate: Tensor, up: Tensor, down: Tensor, level: float) -> None:
    _check_level(level)
    if up.shape != gate.shape:
        raise InvalidValue(f"gate is {list(gate.shape)} and up {list(up.shape)}; they must have the same shape")
    if down.shape != gate.T.shape:
        raise InvalidValue(
            f"down is {list(down.shape)}; beside a gate of {list(gate.shape)} it must be {list(gate.T.shape)}",
            hint="weights are stored [out, in]; one that is stored [in, out] has to be transposed first",
        )


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise InvalidValue(f"a level lies between 0 and 1, not at {level}")
