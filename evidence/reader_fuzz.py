"""One reader under the coverage-guided fuzzer, in a process of its own: `reader_fuzz.py NAME SECONDS SEED FOLDER`.

Writes what it counted to `FOLDER/counts.json` every second and at its end. An exception that is none of ours is
noted, with its input, and the fuzzer goes on: one run finds what there is.
"""

import importlib
import json
import os
import pkgutil
import resource
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import atheris
import glassblock.numerics
from glassblock.errors import GlassblockError, InternalFault
from reader_mutations import Mutator

# Only what reads is traced. The rest is loaded before or after: to trace it too would make every input slower.
for module in pkgutil.iter_modules(glassblock.numerics.__path__):
    importlib.import_module(f"glassblock.numerics.{module.name}")
importlib.import_module("glassblock.wire.audits")
with atheris.instrument_imports(include=["glassblock"]):
    for reads in ("checkpoint.layer_loading", "checkpoint.family_file", "audit.engine_dialects", "reports.baseline"):
        importlib.import_module(f"glassblock.{reads}")
targets: Any = importlib.import_module("reader_targets")

LONGEST = 1 << 15
"""Bytes of an input."""

LONGEST_SECONDS = 5.0
"""For one input; the fuzzer ends the process where it takes longer."""

ROOM = 1 << 30
"""Bytes of address space above the start: whoever believes a length of 2^40 is refused them."""


@dataclass
class Counts:
    """What happened so far.

    Attributes:
        seeds: Inputs begun with, those that are longer than an input may be left out.
        inputs: Given to the reader.
        accepted: Of them, those that it took.
        slowest: Seconds of the slowest.
        peak: Most bytes resident while one was read, above those before it.
        findings: What was raised that should not be, by place.
        refusals: Errors of ours, by class.
    """

    seeds: int
    inputs: int = 0
    accepted: int = 0
    slowest: float = 0.0
    peak: int = 0
    findings: dict[str, str] = field(default_factory=dict[str, str])
    refusals: dict[str, int] = field(default_factory=dict[str, int])


def main() -> None:
    name, seconds, seed, folder = sys.argv[1], float(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    target = targets.TARGETS[name](_made(folder / "files"))
    seeds = [data for data in target.seeds if len(data) <= LONGEST]
    corpus = _made(folder / "corpus")
    for number, data in enumerate(seeds):
        (corpus / f"seed-{number:03d}").write_bytes(data)
    counts = Counts(len(seeds))
    for data in seeds:  # so that nothing of what is loaded once counts as an input's
        _give(target, data, Counts(0), folder)
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + ROOM, resource.RLIM_INFINITY))
    warnings.simplefilter("error", RuntimeWarning)
    deadline, written = time.monotonic() + seconds, time.monotonic()

    def one(data: bytes) -> None:
        nonlocal written
        _give(target, data, counts, folder)
        now = time.monotonic()
        if now > min(written + 1, deadline):
            written = now
            (folder / "counts.json").write_text(json.dumps(asdict(counts)))
        if now > deadline:
            os._exit(0)

    mutator = Mutator(seeds, target.frame, target.join, _of_bytes)
    arguments = [f"-seed={seed}", f"-max_len={LONGEST}", "-len_control=0", f"-timeout={int(LONGEST_SECONDS)}"]
    arguments.append("-mutate_depth=1")  # the mutator changes several places by itself
    atheris.Setup([sys.argv[0], *arguments, "-rss_limit_mb=0", str(corpus)], one, custom_mutator=mutator)
    atheris.Fuzz()


def _of_bytes(data: bytes, longest: int) -> bytes:
    return atheris.Mutate(data, longest)  # looked up late: Fuzz() puts another function there


def _give(target: Any, data: bytes, counts: Counts, folder: Path) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = _status("VmRSS"), time.perf_counter()
    try:
        counts.accepted += target.read(data)
    except InternalFault as error:
        _note(error, data, counts, folder)
    except GlassblockError as error:
        kind = type(error).__name__
        counts.refusals[kind] = counts.refusals.get(kind, 0) + 1
    except BaseException as error:  # a panic in Rust is no Exception
        _note(error, data, counts, folder)
    counts.slowest = max(counts.slowest, time.perf_counter() - began)
    counts.peak = max(counts.peak, _status("VmHWM") - before)
    counts.inputs += 1


def _note(error: BaseException, data: bytes, counts: Counts, folder: Path) -> None:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "glassblock" in frame.filename]
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[:-4:-1])
    key = f"{type(error).__name__} at {where}"
    if key not in counts.findings:
        kept = folder / f"finding-{len(counts.findings)}"
        kept.write_bytes(data)
        kept.with_suffix(".txt").write_text("".join(traceback.format_exception(error)))
        counts.findings[key] = f"{error}"[:200]


def _status(what: str) -> int:
    """A line of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(what)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    main()
