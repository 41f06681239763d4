"""What the metrics of a report's layers look like: which lines, on which axes, with what to read out of them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from glassblock.reports.charts import (
    Line,
    Marks,
    Scale,
    line_chart,
    linear,
    logarithmic,
    signed_logarithmic,
    superscript,
)
from glassblock.wire.audits import LayerMetrics, Report

GAINS_WITH_BANDS = 2
"""Norms whose spread can be drawn beside each other and still be told apart."""
SERIES_UP_TO = 6
NOISE = 3.0
"""Standard deviations within which a tensor looks like noise."""
EPSILONS = (-10.0, -2.0)
"""Powers of ten between which the sensitivity to an epsilon is drawn."""
CURVE_STEPS = 200
LEAST_CHANGE = 1e-3
"""Per cent: below bfloat16's rounding by far, and nobody's concern."""

ROLES = {
    "attn_in": "before attention",
    "attn_out": "after attention",
    "ffn_in": "before feed-forward",
    "ffn_out": "after feed-forward",
    "q_norm": "of queries",
    "k_norm": "of keys",
}


@dataclass(frozen=True)
class Chart:
    """A picture with its words.

    Attributes:
        title: Its heading.
        reading: How to read it, in a sentence or two.
        names: Of its lines, in their order.
        svg: The picture.
    """

    title: str
    reading: str
    names: tuple[str, ...]
    svg: str


def charts_of(report: Report) -> Iterator[Chart]:
    """The charts for which the report has the numbers."""
    layers = report.layers
    if not layers:
        return
    for chart in (_symmetry(layers), _row_lengths(layers), _gains(layers), _epsilon(layers)):
        if chart is not None:
            yield chart


def number_of(metrics: LayerMetrics, key: str) -> float | None:
    """A metric as a number, None where there is none: also "NaN" and "-Infinity", which travel as text."""
    value = metrics.metrics.get(key)
    try:
        number = None if value is None else float(value)
    except ValueError:
        return None
    return number if number is not None and math.isfinite(number) else None


def swapped(layers: Sequence[LayerMetrics]) -> tuple[int, ...]:
    """The layers whose gate and up are judged to be exchanged."""
    return tuple(layer.layer for layer in layers if layer.metrics.get("verdict") == "swapped")


def _line(layers: Sequence[LayerMetrics], name: str, key: str, *, spread: tuple[str, str] | None = None) -> Line:
    points = [(float(layer.layer), number_of(layer, key)) for layer in layers]
    band = [] if spread is None else [(number_of(at, spread[0]), number_of(at, spread[1])) for at in layers]
    return Line(name, points, band)


def _values(lines: Sequence[Line]) -> list[float | None]:
    ends = [end for line in lines for pair in line.band for end in pair]
    return [value for line in lines for _, value in line.points] + ends


def _some(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if any(value is not None for _, value in line.points)][:SERIES_UP_TO]


def _per_layer(layers: Sequence[LayerMetrics]) -> Scale:
    return linear((float(layer.layer) for layer in layers), whole=True)


def _fitting(lines: Sequence[Line]) -> Scale:
    """Even where the values are of one order of magnitude, logarithmic where they are not and are above zero."""
    some = [value for value in _values(lines) if value is not None]
    return logarithmic(some) if min(some) > 0 and max(some) > 8 * min(some) else linear(some)


def _symmetry(layers: Sequence[LayerMetrics]) -> Chart | None:
    lines = _some([_line(layers, "named gate", "gate_z"), _line(layers, "named up", "up_z")])
    if not lines:
        return None
    marked = swapped(layers)
    told = f" The marked column{'s are' if len(marked) > 1 else ' is'} judged to be exchanged." if marked else ""
    svg = line_chart(
        lines,
        x=_per_layer(layers),
        y=signed_logarithmic(_values(lines)),
        x_title="layer",
        y_title="z, standard deviations above noise",
        summary="Common direction of the rows of gate and up in every layer, as a z-score",
        marks=Marks([(layer, f"layer {layer}: gate and up exchanged") for layer in marked], rows=(-NOISE, NOISE)),
    )
    reading = (
        "A gate's rows share a direction: far above the grey band of noise. An up projection's do not: inside it."
        f"{told}"
    )
    return Chart("Which one is the gate", reading, tuple(line.name for line in lines), svg)


def _row_lengths(layers: Sequence[LayerMetrics]) -> Chart | None:
    names = (("gate, rows", "gate_row_norm"), ("up, rows", "up_row_norm"), ("down, columns", "down_column_norm"))
    lines = _some([_line(layers, name, f"{key}_median", spread=(f"{key}_least", f"{key}_most")) for name, key in names])
    if not lines:
        return None
    svg = line_chart(
        lines,
        x=_per_layer(layers),
        y=_fitting(lines),
        x_title="layer",
        y_title="length",
        summary="Median length of the rows of gate and up and of the columns of down, per layer",
        marks=Marks([(layer, f"layer {layer}: gate and up exchanged") for layer in swapped(layers)]),
    )
    reading = "The median neuron; the shades reach from the shortest to the longest. Zeros are left out."
    return Chart("Row norms", reading, tuple(line.name for line in lines), svg)


def _gains(layers: Sequence[LayerMetrics]) -> Chart | None:
    found = dict.fromkeys(
        key.removeprefix("norm_").removesuffix("_gain_rms")
        for layer in layers
        for key in layer.metrics
        if key.startswith("norm_") and key.endswith("_gain_rms")
    )
    keys = [*(role for role in ROLES if role in found), *(role for role in found if role not in ROLES)]
    banded = len(keys) <= GAINS_WITH_BANDS
    lines = _some(
        [
            _line(
                layers,
                ROLES.get(role, role.replace("_", " ")),
                f"norm_{role}_gain_rms",
                spread=(f"norm_{role}_gain_least", f"norm_{role}_gain_most") if banded else None,
            )
            for role in keys
        ]
    )
    if not lines:
        return None
    svg = line_chart(
        lines,
        x=_per_layer(layers),
        y=_fitting(lines),
        x_title="layer",
        y_title="gain",
        summary="Root mean square of every norm's gain, per layer",
    )
    shades = "; the shades reach from the least to the greatest" if banded else ""
    reading = f"Root mean square of the channels{shades}. As it multiplies, with the 1 that some families add."
    return Chart("Norm gains", reading, tuple(line.name for line in lines), svg)


def _epsilon(layers: Sequence[LayerMetrics]) -> Chart | None:
    """How much the first norm's output would change with another epsilon: |sqrt((ms + true)/(ms + used)) - 1|."""
    first = layers[0]
    true = number_of(first, "norm_attn_in_eps")
    least = number_of(first, "norm_attn_in_input_mean_square_least")
    median = number_of(first, "norm_attn_in_input_mean_square_median")
    if true is None or least is None or median is None or true < 0 or least <= 0 or median <= 0:
        return None
    low, high = EPSILONS
    if true > 0:
        low, high = min(low, math.floor(math.log10(true)) - 2), max(high, math.ceil(math.log10(true)) + 2)
    powers = [low + (high - low) * step / CURVE_STEPS for step in range(CURVE_STEPS + 1)]

    def curve(name: str, mean_square: float) -> Line:
        changes = [100 * relative_change(mean_square, true=true, used=10.0**power) for power in powers]
        # At the declared epsilon nothing changes, which has no logarithm: the curve ends at the floor on either side.
        return Line(name, [(power, max(change, LEAST_CHANGE)) for power, change in zip(powers, changes, strict=True)])

    lines = [curve("smallest row", least), curve("median row", median)]
    every = max(1, round((high - low) / 4))
    ticks = [float(power) for power in range(round(low), round(high) + 1, every)]
    svg = line_chart(
        lines,
        x=Scale(low, high, lambda power: power, ticks, lambda power: f"10{superscript(round(power))}"),
        y=logarithmic([LEAST_CHANGE, *(value for _, value in lines[0].points)]),
        x_title="epsilon that an engine uses",
        y_title="change, %",
        summary="Change of the first norm's output with the epsilon used, for the smallest and the median row",
        marks=Marks(reference=(math.log10(true), f"declared {_epsilon_words(true)}") if true > 0 else None),
    )
    reading = (
        "By how much the first norm's output changes for rows of the embedding when an engine takes another epsilon "
        f"than {_epsilon_words(true)}. {_confusions(true, least)}"
    )
    return Chart("Epsilon sensitivity", reading, tuple(line.name for line in lines), svg)


def relative_change(mean_square: float, *, true: float, used: float) -> float:
    """|sqrt((ms + true)/(ms + used)) - 1|: how much a norm's output changes with another epsilon."""
    return abs(math.sqrt((mean_square + true) / (mean_square + used)) - 1)


def _confusions(true: float, mean_square: float) -> str:
    """What the usual confusions would cost the smallest row."""
    others = [other for other in (1e-5, 1e-6) if not math.isclose(other, true, rel_tol=1e-6)]
    told = [
        f"{_epsilon_words(other)} by {100 * relative_change(mean_square, true=true, used=other):.2g} %"
        for other in others
    ]
    return f"The smallest row: with {', with '.join(told)}."


def _epsilon_words(value: float) -> str:
    return f"{value:.3g}".replace("e-0", "e-")
