"""Charts: where the points lie, and what happens to numbers that are none."""

import math
import re
from xml.etree import ElementTree as Xml

import pytest
from glassblock.reports.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Line,
    Marks,
    line_chart,
    linear,
    logarithmic,
    signed_logarithmic,
)
from glassblock.reports.layer_charts import charts_of, relative_change
from glassblock.wire.audits import LayerMetrics
from hypothesis import given
from hypothesis import strategies as st

from reports.report_makers import drawn_layer, report

MAKERS = {"linear": linear, "logarithmic": logarithmic, "signed": signed_logarithmic}
NUMBERS = st.none() | st.floats(-1e30, 1e30) | st.sampled_from([math.nan, math.inf, -math.inf])


def chart(*lines: Line, marks: Marks | None = None) -> str:
    values = [value for line in lines for _, value in line.points]
    x = linear([0, 10], whole=True)
    return line_chart(lines, x=x, y=linear(values), x_title="x", y_title="y", summary="s", marks=marks)


def points_of(svg: str) -> list[list[tuple[float, float]]]:
    return [
        [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.split())]
        for line in re.findall(r'<polyline[^>]*points="([^"]+)"', svg)
    ]


def test_ends_of_the_axes_are_corners_of_the_frame():
    scale = linear([0, 10], whole=True)
    svg = line_chart([Line("a", [(0, 0), (10, 10)])], x=scale, y=scale, x_title="", y_title="", summary="")
    assert points_of(svg) == [[(LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, TOP)]]


def test_a_number_that_is_none_leaves_a_gap():
    values = [1.0, 2.0, None, 3.0, math.nan, 4.0, math.inf]
    svg = chart(Line("a", list(enumerate(values))))
    assert [len(run) for run in points_of(svg)] == [2, 1, 1]
    assert "nan" not in svg
    assert "inf" not in svg


@pytest.mark.parametrize("name", MAKERS)
def test_ticks_lie_on_the_axis_and_rise(name: str):
    for values in ([1.0, 2.0], [0.001, 5e4], [7.0], [1e-12, 1e-11], [0.5, 900.0], [3.0, 3.0000001]):
        scale = MAKERS[name](values)
        shares = [scale.share(tick) for tick in scale.ticks]
        assert len(shares) >= 2
        assert shares == sorted(set(shares))
        assert all(-1e-9 <= share <= 1 + 1e-9 for share in shares)
        assert all(0 <= scale.share(value) <= 1 for value in values)
        assert len({scale.label(tick) for tick in scale.ticks}) == len(scale.ticks)


def test_numbers_that_differ_in_their_last_digits_have_an_axis():
    scale = linear([9.999999999999988e29, 9.99999999999999e29])
    assert len(set(scale.ticks)) == len(scale.ticks) >= 2
    assert len({scale.label(tick) for tick in scale.ticks}) == len(scale.ticks)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=8))
def test_any_numbers_give_a_chart_inside_its_frame(given_numbers: list[tuple[float | None, ...]]):
    layers = tuple(
        LayerMetrics(
            layer=n,
            metrics={
                "gate_z": z,
                "gate_row_norm_median": length,
                "gate_row_norm_least": gain,
                "gate_row_norm_most": length,
                "norm_attn_in_gain_rms": gain,
                "norm_attn_in_eps": length,
                "norm_attn_in_input_mean_square_least": gain,
                "norm_attn_in_input_mean_square_median": z,
            },
        )
        for n, (z, length, gain) in enumerate(given_numbers)
    )
    for drawn in charts_of(report(layers=layers)):
        Xml.fromstring(drawn.svg)
        for run in points_of(drawn.svg):
            assert all(LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM for x, y in run)


def test_an_exchanged_layer_is_marked():
    swapped = drawn_layer(2).model_copy(update={"metrics": drawn_layer(2).metrics | {"verdict": "swapped"}})
    layers = (drawn_layer(0), drawn_layer(1), swapped, drawn_layer(3))
    first = next(iter(charts_of(report(layers=layers))))
    assert re.findall(r'class="marked".*?<title>([^<]+)', first.svg) == ["layer 2: gate and up exchanged"]
    assert "judged to be exchanged" in first.reading


def test_the_sensitivity_is_nil_at_the_declared_epsilon_and_told_for_the_usual_other():
    *_, drawn = charts_of(report(layers=(drawn_layer(0),)))
    # |sqrt((0.005 + 1e-5) / (0.005 + 1e-6)) - 1| = 0.0900 %, by hand.
    assert drawn.reading.endswith("The smallest row: with 1e-6 by 0.09 %.")
    assert relative_change(0.005, true=1e-5, used=1e-6) == pytest.approx(8.996e-4, rel=1e-3)  # four digits by hand
    assert relative_change(0.005, true=1e-5, used=1e-5) == 0
    assert "declared 1e-5" in drawn.svg
