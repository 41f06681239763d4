"""One result as a Markdown file: what was promised, what was measured, and the command that made it."""

import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import glassblock
import torch

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "evidence"


class Promise(NamedTuple):
    """A sentence that must hold, the number it stands on, and whether it does."""

    text: str
    measured: str
    held: bool


def publish(title: str, says: str, promises: Sequence[Promise], sections: Iterable[str]) -> int:
    """Write `docs/evidence/<script>.md`, print it, and return the exit status: 1 when a promise does not hold."""
    name = Path(sys.argv[0]).stem
    judged = [(promise.text, promise.measured, "yes" if promise.held else "**no**") for promise in promises]
    head = f"# {title}\n\n{says}\n\nMade by `python evidence/{name}.py` with {versions()}; the seeds are fixed.\n"
    text = "\n".join([head, table(("promised", "measured", "holds"), judged), *sections])
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)
    return 0 if all(promise.held for promise in promises) else 1


def versions() -> str:
    """Of everything that could change a number."""
    plain = torch.__version__.split("+")[0]
    return f"glassblock {glassblock.__version__}, torch {plain}, Python {platform.python_version()}"


def short(number: float) -> str:
    """Two digits: 0.1, 1.7e-5."""
    return f"{number:.2g}".replace("e-0", "e-")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, the others are aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    cells = ([str(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"
