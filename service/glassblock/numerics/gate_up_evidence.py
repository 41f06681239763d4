"""What the weights of one gated layer say of which projection is the gate: certified statistics and their controls.

Beside T of `gate` and `up` (see `sign_symmetry`) there is the mirrored statistic P(W) = T of the rows w_i * d_i, where
d_i is column i of `down`. Given the gate, the sign of d_i is a fair coin, so P(gate) is noise; u_i * d_i keeps its sign
under the flip, so P(up) may be anything. The true gate thus shows in T, the true up in P, and a swap shows in both.

Two controls are noise in every healthy network under either naming, T(columns of down) and P of gate * up, and not
where the symmetry is broken by something else: u + 1 forms, one-sided clamps, activations on both branches.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.near_duplicates import near_duplicate_groups, near_duplicate_indices, row_sketch
from glassblock.numerics.neuron_lengths import Spread, log_length_correlation, spread_of
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


def _unit_rows(weight: Float[Tensor, "m d"]) -> UnitSource:
    """The unit rows of spans of neurons; made once where they all fit into one block."""
    if weight.numel() > BLOCK_ENTRIES:
        return lambda span: centred_unit_rows(weight[span])
    rows, kept = centred_unit_rows(weight)
    return lambda span: UnitRows(rows[span], kept[span])


def _products(left: UnitSource, right: UnitSource) -> UnitSource:
    return lambda span: product_rows(left(span), right(span))


def _lengths(rows: Float[Tensor, "m d"]) -> Float[Tensor, " m"]:
    """In float64, which squares of float32 cannot overflow; block by block, for torch widens what it is given."""
    step = max(1, BLOCK_ENTRIES // rows.shape[1])
    spans = (slice(start, start + step) for start in range(0, len(rows), step))
    return torch.cat([cast("Tensor", torch.norm(rows[span], dim=1, dtype=torch.float64)) for span in spans])


def _check(gate: Tensor, up: Tensor, down: Tensor, level: float) -> None:
    check_level(level)
    if up.shape != gate.shape:
        raise InvalidValue(f"gate is {list(gate.shape)} and up {list(up.shape)}; they must have the same shape")
    if down.shape != gate.T.shape:
        raise InvalidValue(
            f"down is {list(down.shape)}; beside a gate of {list(gate.shape)} it must be {list(gate.T.shape)}",
            hint="weights are stored [out, in]; one that is stored [in, out] has to be transposed first",
        )


def check_level(level: float) -> None:
    """Refuse a level at which nothing can be rejected, or all is.

    Raises:
        InvalidValue: It does not lie between 0 and 1.
    """
    if not 0 < level < 1:
        raise InvalidValue(f"a level lies between 0 and 1, not at {level}")
