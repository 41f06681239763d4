"""Norms of Jacobians as a picture: over layers, how they are spread over the tokens, and which tokens stand out.

matplotlib is loaded when a picture is asked for, and not before.
"""

import html
import importlib
import importlib.util
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from glassblock.errors import InvalidValue, ServiceUnavailable
from glassblock.reports.page import page
from glassblock.wire.jacobians import Depth, JacobianNorm, JacobianPart, JacobiansAnswer, LayerJacobians
from numpy.typing import NDArray

from glassblock_client.cli.connection import with_extra
from glassblock_client.cli.jacobian_tables import COLUMNS, Read, layer_table, proof

SUFFIXES = (".png", ".svg", ".html")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
"""Okabe and Ito's, which the colour-blind tell apart."""
COUPLED_PARTS = ("attention", "mixture", "layer")
"""Their norms are of all tokens together."""
MARKERS = ("^", "s", "D", "v")
INK = "#333333"
ROOM = 0.8
"""Of a layer on the axis, for all placements."""
FEWEST = 8
"""Tokens that tell what is usual."""
OUTSIDE = 3.0
"""A token stands out where it lies so many interquartile ranges beyond a quartile, in logarithms."""


class Panel(NamedTuple):
    """One norm over the layers; `identity` is what the identity has."""

    title: str
    read: Read
    identity: Callable[[int], float]


def _one(_width: int) -> float:
    return 1.0


PANELS = (
    Panel("Frobenius norm  $\\|J\\|_F$", COLUMNS["frobenius"].read, math.sqrt),
    Panel("spectral norm  $\\|J\\|_2$", COLUMNS["spectral"].read, _one),
)


def require_matplotlib(path: Path) -> None:
    """Refuse before the work a picture that could not be drawn after it.

    Raises:
        InvalidValue: the file's name ends with no kind of picture.
        ServiceUnavailable: matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise InvalidValue(f"--plot: {path} is none of these kinds of picture", field="--plot", known=SUFFIXES)
    if importlib.util.find_spec("matplotlib") is None:
        raise ServiceUnavailable("no picture can be drawn: matplotlib is not installed", hint=with_extra("plot"))


def require_drawable(part: JacobianPart, norms: Sequence[JacobianNorm], *, depth: bool) -> None:
    """Refuse before the work what has no norms of single tokens to draw.

    Raises:
        InvalidValue: the part couples tokens, or neither norm that is drawn is wanted.
    """
    if not depth and (part in COUPLED_PARTS or not {"frobenius", "spectral"} & {*norms}):
        raise _nothing_to_draw()


def _nothing_to_draw() -> InvalidValue:
    return InvalidValue(
        "nothing can be drawn: neither a Frobenius nor a spectral norm of single tokens was asked for",
        field="--plot",
        hint="ask for one of them, of a part that does not couple tokens",
    )


def picture(answer: JacobiansAnswer, suffix: str) -> bytes:
    """The picture of an answer, as `.png`, `.svg`, or an `.html` page with the table below it.

    Raises:
        InvalidValue: no layer has what is drawn.
    """
    figure = figure_of(answer)
    if suffix == ".png":
        return _saved(figure, "png")
    drawn = _saved(figure, "svg")
    return drawn if suffix == ".svg" else _html_page(answer, drawn.decode())


def figure_of(answer: JacobiansAnswer) -> Any:
    """The matplotlib figure.

    Raises:
        InvalidValue: no layer has what is drawn.
    """
    answer = _pooled(answer)
    panels = [panel for panel in PANELS if any(_values(layer, panel.read) is not None for layer in answer.layers)]
    if not panels and answer.depth is None:
        raise _nothing_to_draw()
    rows = len(panels) + (answer.depth is not None)
    layers = sorted({layer.layer for layer in answer.layers})
    width = min(12.0, max(5.0, 2.2 + 0.26 * len(layers)))
    figure = _matplotlib("matplotlib.figure").Figure(figsize=(width, 0.9 + 2.6 * rows), layout="constrained")
    axes: list[Any] = list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])
    outliers = [_outliers(answer, panel.read) for panel in panels]
    named = _furthest(outliers)
    for axis, panel, found in zip(axes, panels, outliers, strict=False):
        _draw_panel(axis, answer, panel)
        _mark(axis, answer, found, named)
    if answer.depth is not None:
        _draw_depth(axes[-1], answer.depth)
    handles: dict[str, Any] = {}
    for axis in axes[: len(panels)]:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", fontsize=7.5, frameon=False, ncols=4)
    step = 1 if len(layers) <= 40 else -(-len(layers) // 40)
    axes[-1].set_xticks(layers[::step], [str(layer) for layer in layers[::step]])
    axes[-1].set_xlabel("layer")
    axes[-1].set_xlim(min(layers) - 0.7, max(layers) + 0.7)
    tokens = max(len(layer.tokens) if layer.rows is None else len(set(layer.rows)) for layer in answer.layers)
    if answer.depth is not None and not panels:
        tokens = len(np.asarray(answer.depth.residual_rms)[0])
    figure.suptitle(
        f"Jacobian of the {_PART_NAMES[answer.part]}, {_speakable(answer.checkpoint)}, {tokens} tokens",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    return figure


_PART_NAMES = {
    "norm": "norm",
    "ffn": "feed-forward network",
    "branch": "feed-forward branch",
    "block": "feed-forward residual block",
    "attention": "attention",
    "mixture": "mixture of experts",
    "layer": "layer",
}


def _pooled(answer: JacobiansAnswer) -> JacobiansAnswer:
    """Of a mixture, all experts of a layer together: one spread over every token and the networks it goes to."""
    if not any(layer.expert is not None for layer in answer.layers):
        return answer
    pooled: dict[tuple[int, str], LayerJacobians] = {}
    for layer in answer.layers:
        key = layer.layer, layer.placement
        rows = tuple(range(len(layer.tokens))) if layer.rows is None else layer.rows
        before = pooled.get(key)
        tokens = layer.tokens if before is None else (*before.tokens, *layer.tokens)
        rows = rows if before is None or before.rows is None else (*before.rows, *rows)
        pooled[key] = layer.model_copy(update={"tokens": tokens, "rows": rows})
    return answer.model_copy(update={"layers": tuple(pooled.values())})


def _draw_panel(axis: Any, answer: JacobiansAnswer, panel: Panel) -> None:
    """Quartiles as a bar, the range of 5 to 95 % as a line, the median as a dash, the rest as points."""
    placements = _placements(answer)
    room = ROOM / len(placements)
    for colour, placement in zip(COLOURS, placements, strict=False):
        places: list[float] = []
        medians: list[float] = []
        for layer in answer.layers:
            values = _values(layer, panel.read)
            if layer.placement != placement or values is None:
                continue
            shown = values[np.isfinite(values) & (values > 0)]
            if not shown.size:
                continue
            places.append(_place(answer, layer))
            medians.append(float(np.median(shown)))
            _draw_spread(axis, places[-1], shown, colour, width=min(0.42, room * 0.7))
        axis.plot(places, medians, color=colour, linewidth=0.8, alpha=0.5, zorder=1, label=f"{placement}-norm")
    if answer.part == "block":
        identity = panel.identity(answer.width)
        axis.axhline(identity, color=INK, linewidth=0.8, linestyle=(0, (1, 2)), zorder=0, label="the identity")
    axis.set_yscale("log")
    axis.set_ylabel(panel.title, fontsize=9)
    axis.margins(y=0.08)
    _settle(axis)


def _draw_spread(axis: Any, place: float, values: NDArray[np.float64], colour: str, *, width: float) -> None:
    low, first, middle, third, high = np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95])
    axis.vlines(place, low, high, color=colour, linewidth=0.9, zorder=2)
    axis.vlines(place, first, third, color=colour, linewidth=4.5, alpha=0.45, zorder=2)
    axis.hlines(middle, place - width / 2, place + width / 2, color=colour, linewidth=1.4, zorder=3)
    rest = values[(values < low) | (values > high)]
    axis.scatter(np.full(rest.shape, place), rest, s=3, color=colour, alpha=0.55, linewidths=0, zorder=2)


Outliers = dict[int, list[tuple[LayerJacobians, float, float]]]
"""By token: the layers where it stands out, how far, and its value."""


def _outliers(answer: JacobiansAnswer, read: Read) -> Outliers:
    found: Outliers = {}
    for layer in answer.layers:
        values = _values(layer, read)
        if values is None:
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(values)
        finite = logs[np.isfinite(logs)]
        if finite.size < FEWEST:
            continue
        first, third = np.quantile(finite, [0.25, 0.75])
        # Where nearly all tokens agree, a thousandth of their value is no distance to speak of.
        beyond = np.maximum(first - logs, logs - third) / max(float(third - first), 0.01)
        for token in np.flatnonzero(np.isfinite(logs) & (beyond > OUTSIDE)):
            position = int(token) if layer.rows is None else layer.rows[int(token)]
            found.setdefault(position, []).append((layer, float(beyond[token]), float(values[token])))
    return found


def _furthest(panels: Sequence[Outliers]) -> dict[int, str]:
    """Markers of the few tokens that stand out most, the same ones in every panel."""
    reach: dict[int, float] = {}
    for found in panels:
        for token, points in found.items():
            # One freak layer does not outweigh many.
            reach[token] = reach.get(token, 0.0) + sum(min(beyond, 20.0) for _, beyond, _ in points)
    ranked = sorted(reach, key=lambda token: -reach[token])
    return dict(zip(ranked, MARKERS, strict=False))


def _mark(axis: Any, answer: JacobiansAnswer, found: Outliers, named: dict[int, str]) -> None:
    for token, marker in named.items():
        points = found.get(token, [])
        axis.plot(
            [_place(answer, layer) for layer, _, _ in points],
            [value for _, _, value in points],
            marker,
            markersize=4,
            markerfacecolor="none",
            markeredgecolor=INK,
            markeredgewidth=0.8,
            zorder=4,
            label=_token_name(answer, token),
        )


def _draw_depth(axis: Any, depth: Depth) -> None:
    """How much the end of the chain moves with the state before each layer; medians over the tokens."""
    layers = list(depth.layers)
    curve = depth.to_end
    lines = (
        ("$\\|J_{L\\leftarrow l}\\|_F$, estimated", curve.frobenius, COLOURS[0], "-"),
        ("$\\|J_{L\\leftarrow l}\\|_2$, at least", curve.spectral_lower, COLOURS[1], "-"),
        ("product of the layers' norms", curve.product_upper, INK, (0, (4, 2))),
    )
    for label, values, colour, style in lines:
        array = np.asarray(values, np.float64)
        middle = np.median(array, axis=1)
        axis.plot(layers, middle, color=colour, linestyle=style, linewidth=1.2, label=label, zorder=3)
        if array.shape[1] > 1:
            low, high = np.quantile(array, [0.05, 0.95], axis=1)
            axis.fill_between(layers, low, high, color=colour, alpha=0.13, linewidth=0, zorder=1)
    axis.set_yscale("log")
    axis.set_ylabel("from layer $l$ to the end", fontsize=9)
    axis.legend(fontsize=7, frameon=False, loc="upper right")
    _settle(axis)


def _settle(axis: Any) -> None:
    axis.grid(axis="y", which="major", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=7.5)


def _placements(answer: JacobiansAnswer) -> list[str]:
    return list(dict.fromkeys(layer.placement for layer in answer.layers))


def _place(answer: JacobiansAnswer, layer: LayerJacobians) -> float:
    """Where a layer stands on the axis; placements side by side."""
    placements = _placements(answer)
    return layer.layer + (placements.index(layer.placement) - (len(placements) - 1) / 2) * ROOM / len(placements)


def _values(layer: LayerJacobians, read: Read) -> NDArray[np.float64] | None:
    values = [read(token) for token in layer.tokens]
    return np.array(values, np.float64) if values and None not in values else None


def _token_name(answer: JacobiansAnswer, token: int) -> str:
    if answer.token_ids is None:
        return f"position {token}"
    return f"token {answer.token_ids[token]} (position {token})"


def _speakable(name: str) -> str:
    """Without what matplotlib would take for mathematics."""
    return name.replace("$", "\\$")


def _matplotlib(module: str) -> Any:
    """Of an extra that need not be there, also for whoever checks types."""
    return importlib.import_module(module)


def _saved(figure: Any, kind: str) -> bytes:
    buffer = io.BytesIO()
    # The same bytes for the same answer: no date, no random names.
    with _matplotlib("matplotlib").rc_context({"svg.hashsalt": "glassblock", "svg.fonttype": "path"}):
        figure.savefig(buffer, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return buffer.getvalue()


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
svg {{ width: 100%; height: auto; }}
pre {{ font-size: 12px; line-height: 1.35; overflow-x: auto; }}
</style></head><body>
<h1>{title}</h1>
{figure}
<pre>{table}</pre>
</body></html>
"""


def _html_page(answer: JacobiansAnswer, svg: str) -> bytes:
    title = html.escape(f"Jacobian norms of {answer.checkpoint}")
    table = html.escape(page([proof(answer), layer_table(answer)], width=140, colour=False))
    return _PAGE.format(title=title, figure=svg[svg.index("<svg") :], table=table).encode()
