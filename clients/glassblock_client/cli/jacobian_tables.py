"""Norms of Jacobians as tables of a terminal."""

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

from glassblock.wire.jacobians import JacobiansAnswer, LayerJacobians, TokenJacobian
from glassblock.wire.printable import printable
from rich import box
from rich.table import Table
from rich.text import Text

LISTED_TOKENS = 24
WRITTEN_OUT = 1_000_000
"""Below this a number needs no exponent, which would make its column wider."""

Read = Callable[[TokenJacobian], float | None]


class Column(NamedTuple):
    """A norm as it is told of one token; None where it was not asked for."""

    title: str
    read: Read


def _frobenius(token: TokenJacobian) -> float | None:
    return token.frobenius


def _trace(token: TokenJacobian) -> float | None:
    return token.trace


def _radial_gain(token: TokenJacobian) -> float | None:
    return token.radial_gain


def _spectral(token: TokenJacobian) -> float | None:
    return None if token.spectral is None else token.spectral.lower


def _smallest(token: TokenJacobian) -> float | None:
    return None if token.smallest is None else token.smallest.upper


def _condition(token: TokenJacobian) -> float | None:
    return None if token.condition_number is None else token.condition_number.lower


COLUMNS: dict[str, Column] = {
    "frobenius": Column("‖J‖_F", _frobenius),
    "spectral": Column("‖J‖_2", _spectral),
    "trace": Column("tr J", _trace),
    "radial_gain": Column("|Jx|/|x|", _radial_gain),
    "smallest": Column("sigma_d", _smallest),
    "condition_number": Column("condition", _condition),
}
"""By norm: title and number. Of a bracket the bound that is certain to be met."""

WHOLE: dict[str, tuple[str, str]] = {
    COLUMNS["frobenius"].title: ("estimate", "± error"),
    COLUMNS["spectral"].title: ("at least", "at most"),
}
"""By title, what `_whole` tells in its two columns, of a part that couples tokens."""


def proof(answer: JacobiansAnswer) -> Table:
    """How the numbers were had, for all layers together."""
    layers = answer.layers
    rows = [("part", f"{answer.part}, {_size(answer)}")]
    if answer.verified is not None:  # by a service that says it
        rows.append(("family", f"{answer.family} (verified: {answer.verified})"))
    if answer.states == "reached" and answer.token_ids is not None:
        rows.append(("x", f"what a text of {len(answer.token_ids):,} tokens is at each layer"))
    if any(layer.tokens for layer in layers):
        rows += [
            ("exact norms", f"{_told(layer.method for layer in layers)}, summed in {_sums(layers)}"),
            ("FLOPs", f"{sum(layer.flops for layer in layers):.3g}"),
            ("redone in float64", f"{sum(len(layer.redone) for layer in layers):,} tokens"),
        ]
    brackets = [layer.spectral for layer in layers if layer.spectral is not None]
    if brackets:
        wrong = max(bracket.failure_probability for bracket in brackets)
        above = "certain" if wrong == 0 else f"each upper bound wrong with probability at most {wrong:g}"
        wide = sum(bracket.not_converged for bracket in brackets)
        rows.append(("spectral norm", f"within {brackets[0].tolerance:g}, {above}; {wide:,} tokens wider than asked"))
    checks = [layer.self_check.relative_difference for layer in layers if layer.self_check is not None]
    if checks:
        rows.append(("self-check", f"J v against finite differences: {max(checks):.1e} relative at most"))
    if answer.depth is not None:
        rows.append(("depth", "the curves of the chain are in --plot and in --format json"))
    rows += [("note", note) for note in answer.notes]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("jacobian", Text(printable(answer.checkpoint), "bold"))
    for label, value in rows:
        grid.add_row(label, printable(value))
    grid.add_row("", "")
    return grid


def _size(answer: JacobiansAnswer) -> str:
    whole = next((layer.whole for layer in answer.layers if layer.whole is not None), None)
    found = None if whole is None else whole.frobenius or whole.spectral
    if found is None:
        return f"J is {answer.width} x {answer.width} for each token"
    return (
        f"J is {len(found.outputs)} x {len(found.inputs)} blocks of {answer.width} x {answer.width}: the positions"
        f" {_ranges(found.outputs)} by {_ranges(found.inputs)}"
    )


def _ranges(positions: Sequence[int]) -> str:
    if list(positions) == list(range(positions[0], positions[-1] + 1)) and len(positions) > 1:
        return f"{positions[0]} to {positions[-1]}"
    return ", ".join(map(str, positions))


def layer_table(answer: JacobiansAnswer) -> Table:
    """One line for each layer and placement: median over the tokens, and the largest."""
    several = len({layer.placement for layer in answer.layers}) > 1
    mixed = any(layer.expert is not None for layer in answer.layers)
    gap = (0, 0) if several else (0, 1, 0, 0)  # all norms fit a usual screen, no number is cut
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=gap, header_style="dim")
    table.add_column("\nlayer", justify="right", no_wrap=True)
    if several:
        table.add_column("\nplacement", no_wrap=True)
    if mixed:
        table.add_column("\nexpert", justify="right", no_wrap=True)
        table.add_column("\ntokens", justify="right", no_wrap=True)
    coupled = any(layer.whole is not None for layer in answer.layers)
    wanted = [COLUMNS[name] for name in COLUMNS if name in answer.norms]
    wanted = [column for column in wanted if not coupled or column.title in WHOLE]
    for title, _ in wanted:
        first, second = WHOLE[title] if coupled else ("median", "max")
        table.add_column(f"{title}\n{first}", justify="right", no_wrap=True)
        if not mixed:  # else there is no room on a usual screen
            table.add_column(f"\n{second}", justify="right", no_wrap=True)
    for layer in answer.layers:
        cells = [str(layer.layer), *([layer.placement] if several else [])]
        if mixed:
            cells += ["" if layer.expert is None else str(layer.expert), f"{len(layer.tokens):,}"]
        for title, read in wanted:
            values = [value for token in layer.tokens if (value := read(token)) is not None]
            told = [_number(median(values)), _number(max(values))] if values else _whole(layer, title)
            cells += told[:1] if mixed else told
        table.add_row(*cells)
    return table


def _number(value: float) -> str:
    return f"{value:.0f}" if 1000 <= abs(value) < WRITTEN_OUT else f"{value:.4g}"


def token_table(answer: JacobiansAnswer) -> Table:
    """One line for each token of a single layer."""
    layer = answer.layers[0]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    wanted = [COLUMNS[name] for name in COLUMNS if name in answer.norms]
    for title in ("row", *(["token"] if answer.token_ids else []), *(title for title, _ in wanted)):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("")
    rows = range(len(layer.tokens)) if layer.rows is None else layer.rows
    for number, token in zip(rows, layer.tokens[:LISTED_TOKENS], strict=False):
        names = [str(answer.token_ids[number])] if answer.token_ids else []
        values = (read(token) for _, read in wanted)
        cells = ["" if value is None else f"{value:.5g}" for value in values]
        table.add_row(str(number), *names, *cells, Text("float64" if token.redone else "", "dim"))
    if len(layer.tokens) > LISTED_TOKENS:
        table.add_row("...", *[""] * len(table.columns[1:]))
    return table


def _whole(layer: LayerJacobians, title: str) -> list[str]:
    """Of a part that couples tokens: one number for all positions, with its error."""
    whole = layer.whole
    if whole is None:
        return ["", ""]
    if title == COLUMNS["frobenius"][0] and whole.frobenius is not None:
        return [_number(whole.frobenius.frobenius), f"± {whole.frobenius.standard_error:.2g}"]
    if title == COLUMNS["spectral"][0] and whole.spectral is not None:
        return [_number(whole.spectral.lower), _number(whole.spectral.upper)]
    return ["", ""]


def _sums(layers: Sequence[LayerJacobians]) -> str:
    return _told(layer.accumulation for layer in layers)


def _told(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
