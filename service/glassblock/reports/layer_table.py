"""One line per layer: the numbers that the verdict stands on, and a picture of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from glassblock.wire.audits import LayerMetrics
from glassblock.wire.printable import printable

Metric = float | int | str | None
Metrics = Mapping[str, Metric]

PICTURE_FROM = 60
"""Columns of text from which the picture has room."""
ARM = 6
"""Cells of the picture on either side."""
NOISE_UP_TO = 2.0
"""-log10 p below which a tensor looks like noise, and has no bar; z where no p-value was asked for."""
UNBOUNDED = 10_000
"""Columns of text, more than any table takes."""
FARTHEST = 300.0
"""-log10 p at which a bar is full: about where a float64 p-value ends; z where no p-value was asked for."""


@dataclass(frozen=True)
class Column:
    """What a layer's metrics tell in one column, None where they do not, and how wide a text must be to show it."""

    title: str
    cell: Callable[[Metrics], str | None]
    from_width: int = 0


def _number(metrics: Metrics, key: str) -> float | None:
    """A metric as a number, also "NaN" and "-Infinity", which travel as text; None where there is none."""
    value = metrics.get(key)
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def _log10_p(metrics: Metrics, name: str) -> tuple[float, bool] | None:
    """The exponent of one p-value, and whether it is certified; that of the seeded draws where none was."""
    certified = _number(metrics, f"{name}_log10_p")
    if certified is not None:
        return certified, True
    draws = _number(metrics, f"{name}_draws_p")
    return None if draws is None or not 0 < draws <= 1 else (math.log10(draws), False)


def _strength(metrics: Metrics, name: str) -> float | None:
    """How strong the evidence against noise is: -log10 p, or z in a layer whose screen asked for no p-value."""
    found = _log10_p(metrics, name)
    return _number(metrics, f"{name}_z") if found is None else -found[0]


def _p_column(name: str) -> Callable[[Metrics], str | None]:
    def cell(metrics: Metrics) -> str | None:
        found = _log10_p(metrics, name)
        # + 0.0: no minus before a zero.
        return None if found is None else f"{'' if found[1] else '~'}{round(found[0], 1) + 0.0:.1f}"

    return cell


def _number_column(key: str, form: str) -> Callable[[Metrics], str | None]:
    def cell(metrics: Metrics) -> str | None:
        number = _number(metrics, key)
        return None if number is None else format(number, form)

    return cell


COLUMNS: tuple[Column, ...] = (
    Column("T\ngate", _number_column("gate_statistic", ".1f"), from_width=100),
    Column("z\ngate", _number_column("gate_z", ".1f")),
    Column("log10 p\ngate", _p_column("gate")),
    Column("T\nup", _number_column("up_statistic", ".1f"), from_width=100),
    Column("z\nup", _number_column("up_z", ".1f")),
    Column("log10 p\nup", _p_column("up")),
    Column("log10 p\npaired up", _p_column("paired_up"), from_width=72),
    Column("up/down\nbalance", _number_column("balance_up", "+.2f"), from_width=80),
)


def layer_table(layers: Sequence[LayerMetrics], *, width: int) -> Group | None:
    """The table, with the columns that some layer fills, and its legend; None where no layer fills any."""
    rows = [layer.metrics for layer in layers]
    columns = [
        column
        for column in COLUMNS
        if width >= column.from_width and any(column.cell(metrics) is not None for metrics in rows)
    ]
    judged = any(metrics.get("verdict") is not None for metrics in rows)
    if not columns and not judged:
        return None
    pictured = width >= PICTURE_FROM and any(_strength(metrics, "gate") is not None for metrics in rows)
    table = _table(layers, columns, pictured=pictured, judged=judged)
    # Before a verdict is cut short, what only stands beside it goes, the dispensable first.
    while _width(table) > width and (widest := max((column.from_width for column in columns), default=0)):
        columns = [column for column in columns if column.from_width < widest]
        table = _table(layers, columns, pictured=pictured, judged=judged)
    while columns and _width(table) > width:  # a narrow text: what is left goes from the right
        columns = columns[:-1]
        table = _table(layers, columns, pictured=pictured, judged=judged)
    return Group(table, Text(_legend(rows, columns), "dim")) if pictured else Group(table)


def _table(layers: Sequence[LayerMetrics], columns: Sequence[Column], *, pictured: bool, judged: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("\nlayer", justify="right", no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    if pictured:
        table.add_column(f"{'evidence':^{2 * ARM + 3}}\n{'up':>{ARM}} │ {'gate':<{ARM}}", no_wrap=True)
    if judged:
        table.add_column("\nverdict")
    for layer in layers:
        cells = [Text(str(layer.layer)), *(Text(column.cell(layer.metrics) or "-") for column in columns)]
        if pictured:
            cells.append(_picture(layer.metrics))
        if judged:
            cells.append(_judged(layer.metrics.get("verdict")))
        table.add_row(*cells)
    return table


def _width(table: Table) -> int:
    """Columns of text that the table takes where nothing in it is wrapped or cut."""
    console = Console(width=UNBOUNDED)
    return Measurement.get(console, console.options, table).maximum


def _legend(rows: Sequence[Metrics], columns: Sequence[Column]) -> str:
    drawn = any((found := _log10_p(metrics, name)) and not found[1] for metrics in rows for name in ("gate", "up"))
    titles = {column.title for column in columns}
    lines: list[str] = []
    if titles & {"T\ngate", "T\nup"}:
        lines.append("T: how much of a common direction the rows have; about 1 in noise")
    if any(_number(metrics, "gate_z") is not None for metrics in rows):
        lines.append("z: how far the common direction stands out of sign draws; a gate has one, an up has none")
    if any(_log10_p(metrics, "gate") for metrics in rows):
        lines.append("p: chance of so much common direction in noise")
    else:
        lines.append("no layer was suspect, so no p-value was certified; --certify does it for all")
    if drawn:
        lines.append("~: from seeded sign draws, which see no p below 0.005 (-2.3); the others are certified bounds")
    if "log10 p\npaired up" in titles:
        lines.append("paired up: the up projection times down, where a true up may show")
    if "up/down\nbalance" in titles:
        lines.append("balance: correlation of the lengths of up rows and down columns; never convicts")
    return "\n".join(lines)


def _judged(value: Metric) -> Text:
    verdict = "-" if value is None else printable(str(value)).replace("-", " ")
    style = "bold red" if "swapped" in verdict else "green" if verdict.startswith("as named") else "yellow"
    return Text(verdict, style)


def _picture(metrics: Metrics) -> Text:
    """Evidence against noise: of the tensor named gate to the right, of the one named up to the left."""
    up, gate = _bar(metrics, "up"), _bar(metrics, "gate")
    return Text.assemble((up.rjust(ARM), "red"), (" │ ", "dim"), (gate, "green"))


def _bar(metrics: Metrics, name: str) -> str:
    """As long as the evidence is strong, on a logarithmic scale."""
    strength = _strength(metrics, name)
    if strength is None or math.isnan(strength):
        return ""
    strength = min(strength, FARTHEST)
    return "" if strength < NOISE_UP_TO else "━" * round(ARM * math.log1p(strength) / math.log1p(FARTHEST))
