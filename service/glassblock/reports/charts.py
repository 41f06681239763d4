"""Line charts as SVG text: no script, no style of their own, nothing loaded. Colours come from the page's classes.

A chart is drawn once, in its own units, and scaled by the page. Numbers that are none leave a gap in their line.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 312
LEFT, RIGHT, TOP, BOTTOM = 66, 24, 32, 50
"""Margins in which the axes are written; wide enough for the larger letters of a small screen."""
X_TICKS = 8
MARKED_UP_TO = 48
"""Points of a line that still get a dot each."""

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: What the legend calls it.
        points: x and y; None or no finite number leaves a gap.
        band: Lower and upper end beside each point, drawn as an area; empty where there is none.
    """

    name: str
    points: Sequence[Point]
    band: Sequence[tuple[float | None, float | None]] = ()


@dataclass(frozen=True)
class Scale:
    """From a value to a share of the axis.

    Attributes:
        low, high: Ends of the axis.
        forward: The value's place on an even axis, such as its logarithm.
        ticks: Where the axis is labelled.
        label: A tick in words.
    """

    low: float
    high: float
    forward: Callable[[float], float]
    ticks: Sequence[float]
    label: Callable[[float], str]

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one; beyond them for what lies beyond."""
        low, high = self.forward(self.low), self.forward(self.high)
        return (self.forward(value) - low) / (high - low)


@dataclass(frozen=True)
class Marks:
    """What stands behind the lines.

    Attributes:
        columns: x values to point out as wrong, with what to say of each.
        reference: One x value to read the others against, with its name.
        rows: From and to in y: a band that means nothing is to be seen there.
    """

    columns: Sequence[tuple[float, str]] = ()
    reference: tuple[float, str] | None = None
    rows: tuple[float, float] | None = None


def line_chart(
    lines: Sequence[Line], *, x: Scale, y: Scale, x_title: str, y_title: str, summary: str, marks: Marks | None = None
) -> str:
    """An `svg` element.

    Args:
        lines: At most six, in the order of the page's colours.
        x, y: The axes.
        x_title, y_title: Their names.
        summary: What the chart shows, for those who do not see it.
        marks: What stands behind the lines.
    """
    marks = marks or Marks()
    width_of_column = (WIDTH - LEFT - RIGHT) / max(1.0, x.high - x.low)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(summary)}">',
        *_row_band(marks, y),
        *_y_axis(y),
        *_x_axis(x),
        *_column_marks(marks, x, min(width_of_column, 18.0)),
        *_reference(marks, x),
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(x_title)}</text>",
        f'<text class="axis" x="4" y="16">{escape(y_title)}</text>',
        *(part for number, line in enumerate(lines, 1) for part in _band(line, number, x, y)),
        *(part for number, line in enumerate(lines, 1) for part in _line(line, number, x, y)),
        "</svg>",
    ]
    return "".join(parts)


def legend(names: Iterable[str]) -> str:
    """The lines' names with their colours, in their order."""
    keys = "".join(
        f'<li><svg class="key" viewBox="0 0 22 8" aria-hidden="true"><path class="line s{number}" d="M1 4H21"/>'
        f'<circle class="dot s{number}" cx="11" cy="4" r="3"/></svg>{escape(name)}</li>'
        for number, name in enumerate(names, 1)
    )
    return f'<ul class="legend">{keys}</ul>'


def linear(values: Iterable[float | None], *, whole: bool = False) -> Scale:
    """An even axis around the values, from zero where they come near to it."""
    low, high = _ends(values)
    if low > 0 and low < 0.4 * high:
        low = 0.0
    size, spread = max(abs(low), abs(high)), high - low
    room = (spread if spread > 1e-9 * size else size) * 0.05 or 1.0  # closer ones are one line to the eye
    low, high = (low, high) if whole else (low if low == 0 else low - room, high + room)
    if low == high:
        high = low + 1
    ticks = _steps(low, high, X_TICKS if whole else 5, whole=whole)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else high - low
    digits = max(4, math.ceil(math.log10(max(abs(low), abs(high)) / step)) + 1)
    return Scale(low, high, lambda value: value, ticks, lambda value: f"{value:.{digits}g}")


def logarithmic(values: Iterable[float | None]) -> Scale:
    """An axis of powers of ten around the values, all of which are above zero."""
    low, high = _ends(value for value in values if value is not None and value > 0)
    low, high = (low / 1.1, high * 1.1) if 0 < low < high else (max(low, 1e-300) / 2, max(high, 1e-300) * 2)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 6))
    ticks = [10.0**power for power in range(first, last + 1, every) if low <= 10.0**power <= high]
    if len(ticks) < 3:
        ticks = [step * 10.0**power for power in range(first, last + 1) for step in (1, 2, 5)]
        ticks = [tick for tick in ticks if low <= tick <= high]
    if len(ticks) < 2:
        ticks = _steps(low, high, 4)
    return Scale(low, high, lambda value: math.log10(max(value, 1e-300)), ticks, _power)


def signed_logarithmic(values: Iterable[float | None]) -> Scale:
    """An axis that is even near zero and logarithmic far from it, on both sides: asinh."""
    low, high = _ends(values)
    low, high = min(low * 1.6, -8.0), max(high * 1.6, 12.0)
    powers = [10.0**power for power in range(1, 12)]
    every = max(1, math.ceil(math.log10(max(high, -low)) / 4))
    ticks = [-power for power in reversed(powers[::every]) if -power >= low]
    ticks += [0.0, *(power for power in powers[::every] if power <= high)]
    return Scale(low, high, lambda value: math.asinh(value / 3), ticks, lambda value: f"{value:,.0f}")


def _ends(values: Iterable[float | None]) -> tuple[float, float]:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (0.0, 1.0)


def _steps(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """Round numbers between the ends, about so many."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= raw * 0.999)
    step = max(1.0, step) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _power(value: float) -> str:
    """0.01, 0.1, 1, 10, 100; beyond these as a power of ten."""
    if 0.01 <= value < 10_000:
        return f"{value:.3g}"
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    return f"{'' if mantissa == '1' else mantissa + '·'}10{superscript(int(exponent))}"


def superscript(number: int) -> str:
    """A whole number as an exponent is written."""
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _across(x: Scale, value: float) -> float:
    return LEFT + x.share(value) * (WIDTH - LEFT - RIGHT)


def _down(y: Scale, value: float) -> float:
    """Within the frame: what lies beyond an end is drawn at it."""
    return TOP + (1 - min(1.0, max(0.0, y.share(value)))) * (HEIGHT - TOP - BOTTOM)


def _y_axis(y: Scale) -> Iterator[str]:
    for tick in y.ticks:
        at = _down(y, tick)
        yield f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text class="tick" x="{LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{escape(y.label(tick))}</text>'


def _x_axis(x: Scale) -> Iterator[str]:
    floor = HEIGHT - BOTTOM
    yield f'<path class="floor" d="M{LEFT} {floor}H{WIDTH - RIGHT}"/>'
    for tick in x.ticks:
        at = _across(x, tick)
        yield f'<path class="floor" d="M{at:.1f} {floor}v4"/>'
        yield f'<text class="tick" x="{at:.1f}" y="{floor + 18}" text-anchor="middle">{escape(x.label(tick))}</text>'


def _row_band(marks: Marks, y: Scale) -> Iterator[str]:
    if marks.rows is not None:
        top, bottom = _down(y, marks.rows[1]), _down(y, marks.rows[0])
        yield (
            f'<rect class="noise" x="{LEFT}" y="{top:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{bottom - top:.1f}"/>'
        )


def _column_marks(marks: Marks, x: Scale, width: float) -> Iterator[str]:
    for value, what in marks.columns:
        at = _across(x, value)
        yield (
            f'<rect class="marked" x="{at - width / 2:.1f}" y="{TOP}" width="{width:.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"><title>{escape(what)}</title></rect>'
        )


def _reference(marks: Marks, x: Scale) -> Iterator[str]:
    if marks.reference is not None:
        value, what = marks.reference
        at = _across(x, value)
        # The name stands on the side that has more room.
        side, anchor = (-6, "end") if x.share(value) > 0.5 else (6, "start")
        yield f'<path class="reference" d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
        yield f'<text class="tick" x="{at + side:.1f}" y="{TOP + 13}" text-anchor="{anchor}">{escape(what)}</text>'


def _runs(points: Sequence[Point]) -> Iterator[list[tuple[int, float, float]]]:
    """The stretches of a line without a gap: number, x, y."""
    run: list[tuple[int, float, float]] = []
    for number, (across, value) in enumerate(points):
        if value is None or not math.isfinite(value):
            if run:
                yield run
            run = []
        else:
            run.append((number, across, value))
    if run:
        yield run


def _line(line: Line, number: int, x: Scale, y: Scale) -> Iterator[str]:
    for run in _runs(line.points):
        path = " ".join(f"{_across(x, across):.1f},{_down(y, value):.1f}" for _, across, value in run)
        yield f'<polyline class="line s{number}" points="{path}"/>'
        if len(line.points) <= MARKED_UP_TO:
            for _, across, value in run:
                yield (
                    f'<circle class="dot s{number}" cx="{_across(x, across):.1f}" cy="{_down(y, value):.1f}" r="2.6">'
                    f"<title>{escape(f'{line.name}, {x.label(across)}: {value:.4g}')}</title></circle>"
                )


def _band(line: Line, number: int, x: Scale, y: Scale) -> Iterator[str]:
    if not line.band:
        return
    for run in _runs(line.points):
        ends = [(across, *line.band[at]) for at, across, _ in run]
        whole = [(across, low, high) for across, low, high in ends if low is not None and high is not None]
        whole = [(across, low, high) for across, low, high in whole if math.isfinite(low) and math.isfinite(high)]
        if len(whole) > 1:
            upper = [f"{_across(x, across):.1f},{_down(y, high):.1f}" for across, _, high in whole]
            lower = [f"{_across(x, across):.1f},{_down(y, low):.1f}" for across, low, _ in reversed(whole)]
            yield f'<polygon class="band s{number}" points="{" ".join((*upper, *lower))}"/>'
