"""Which of two projections is the gate? The verdict that the evidence of one layer supports (`gate_up_evidence`).

T and P of either projection must agree, and where a control rejects there is no verdict.

Before any of that a layer is screened (`sign_screen`). Where T(gate) stands far out and T(up) does not, the layer is as
named; where neither does, no certificate could decide it. Nothing more is computed then. A screen never convicts.
"""

from dataclasses import dataclass
from enum import StrEnum, unique

from glassblock.errors import InvalidValue
from glassblock.numerics.gate_up_evidence import GateUpEvidence, check_level
from glassblock.numerics.neuron_lengths import Spread
from glassblock.numerics.sign_screen import SignScreen
from glassblock.numerics.sign_symmetry import SymmetryTest

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
    check_level(level)
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


def _dwarfed(test: SymmetryTest, *, by: SymmetryTest) -> bool:
    return test.log10_p is not None and by.log10_p is not None and test.log10_p > 0.1 * by.log10_p
