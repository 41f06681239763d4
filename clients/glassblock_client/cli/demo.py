"""`glassblock demo`: the story of the silent swap, on the shipped example."""

import importlib.util
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, cast

import typer
from glassblock.errors import ServiceUnavailable
from glassblock.reports import REPORTS
from glassblock.wire.audits import Report

from glassblock_client.cli.connection import DeviceOption, connected
from glassblock_client.cli.screen import coloured, columns
from glassblock_client.progress import progress_bar

EXAMPLE = "tiny-llama"
RULE = "ffn/gate-up-swapped"
KEPT = "swapped"
"""What a copy is called that outlives the demo."""
REPOSITORY_EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

PlantSwap = Callable[[Path, Path, Iterable[int]], Mapping[str, str]]


def demo(
    context: typer.Context,
    *,
    examples: Annotated[
        Path | None,
        typer.Option(help="The repository's examples folder, where it does not lie beside this package."),
    ] = None,
    device: DeviceOption = None,
) -> int:
    """Audit the shipped example, then a copy with a planted mistake.

    In the copy the gate and the up projection of one layer have exchanged their names: every
    shape, type and byte count stays right, and no engine raises an error.
    Exit status: 0 when the first passes and the second names the layer, else 1.
    """
    folder = _examples_folder(examples)
    plant_swap = _planter(folder / "plant_swap.py")
    with tempfile.TemporaryDirectory(prefix="glassblock-demo-") as scratch:
        copy = Path(scratch) / f"{EXAMPLE}-swapped"
        with (
            connected(context, [folder, Path(scratch)], url=None, timeout=None, device=device) as client,
            progress_bar("auditing") as on_progress,
        ):
            healthy = client.audit_checkpoint(EXAMPLE, on_progress=on_progress)
            layer = (healthy.checkpoint.layers or 1) // 2
            renamed = plant_swap(folder / EXAMPLE, copy, [layer])
            swapped = client.audit_checkpoint(copy.name, on_progress=on_progress)
    _tell(f"1. {EXAMPLE}, as it was trained", healthy)
    _tell(f"2. A copy in which {len(renamed)} tensors of layer {layer} exchanged their names", swapped)
    found = healthy.verdict == "pass" and _names_only(swapped, layer)
    sys.stdout.write(
        "The two differ in no shape, type or byte count, and both load everywhere without an error.\n"
        f"The second computes another function, and the audit names the layer: {layer}.\n\n"
        f"That copy is gone. To have one in {KEPT}:\n"
        f"  python {_here(folder / 'plant_swap.py')} {_here(folder / EXAMPLE)} {KEPT} --layers {layer}\n"
        if found
        else "This is not what the demo expects: a pass, then one error that names the layer.\n"
    )
    return 0 if found else 1


def _tell(title: str, report: Report) -> None:
    sys.stdout.write(f"{title}\n\n{REPORTS['text'].render(report, width=columns(), colour=coloured(), asked=KEPT)}\n")


def _here(path: Path) -> str:
    """A path as the shell reads it, from the current folder where it lies below."""
    near = os.path.relpath(path)
    return shlex.quote(str(path) if near.startswith(os.pardir) else near)


def _names_only(report: Report, layer: int) -> bool:
    errors = [(finding.rule, finding.layer) for finding in report.findings if finding.level == "error"]
    return report.verdict == "fail" and errors == [(RULE, layer)]


def _examples_folder(given: Path | None) -> Path:
    folder = REPOSITORY_EXAMPLES if given is None else Path(os.path.realpath(given))
    if not (folder / EXAMPLE).is_dir() or not (folder / "plant_swap.py").is_file():
        where = "beside this package" if given is None else f"in {given}"
        raise ServiceUnavailable(
            f"the demo needs the examples of the repository, and there are none {where}",
            hint="clone the repository and give --examples DIR",
        )
    return folder


def _planter(file: Path) -> PlantSwap:
    """The example's own function: examples are scripts, no package."""
    spec = importlib.util.spec_from_file_location("glassblock_plant_swap", file)
    if spec is None or spec.loader is None:
        raise ServiceUnavailable(f"{file} cannot be loaded as Python", hint="use the repository's examples folder")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast("PlantSwap", module.plant_swap)
