"""Fuzzing of everything that reads a file nobody vouches for: guided by coverage, with a bound on time and on memory.

`python evidence/readers.py [SECONDS]`, 600 in all by default, split evenly over the readers. Needs atheris, which the
extra `dev` brings on Linux on x86-64, for Python up to 3.13.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from glassblock.checkpoint.config import MAX_CONFIG_BYTES
from glassblock.checkpoint.container import MAX_HEADER_BYTES
from glassblock.checkpoint.index import MAX_INDEX_BYTES
from record import ROOT, Promise, publish, table

SECONDS, SEED, AT_ONCE = 600.0, 20, 2
START_SECONDS = 300.0
LONGEST_SECONDS, MOST_BYTES = 5.0, 16 << 20
LEAST_INPUTS, LEAST_ACCEPTED = 100, 0.01
TIMES_THE_FILE, SECONDS_PER_MB = 40, 1.0
MIB = 1 << 20

READERS: Mapping[str, str] = {
    "header": "header of safetensors",
    "index": "index",
    "config": "config.json of every family",
    "params": "params.json",
    "quantisation": "config.json with stored forms",
    "quantisation_state": "quantisation state",
    "family_file": "family file",
    "against": "other engines' configs",
    "baseline": "baseline",
    "tokenizer": "tokenizer.json",
}

AT_THE_LIMIT = """
import json, sys, time
from pathlib import Path
from glassblock.checkpoint.config import read_config
from glassblock.checkpoint.container import read_container
from glassblock.checkpoint.index import read_index

def status(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))

read = {"config": read_config, "index": read_index, "header": read_container}[sys.argv[1]]
before, began = status("VmRSS"), time.perf_counter()
read(Path(sys.argv[2]))
print(json.dumps({"peak": status("VmHWM") - before, "seconds": time.perf_counter() - began}))
"""


@dataclass(frozen=True)
class Fuzzed:
    """What one reader's fuzzing counted, as `reader_fuzz.Counts` has it, and how it ended."""

    reader: str
    ended: bool
    edges: int
    seeds: int = 0
    inputs: int = 0
    accepted: int = 0
    slowest: float = 0.0
    peak: int = 0
    findings: Mapping[str, str] = field(default_factory=dict[str, str])
    refusals: Mapping[str, int] = field(default_factory=dict[str, int])


def main() -> int:
    if importlib.util.find_spec("atheris") is None:
        print(
            "not run: atheris is not installed here, and is made for Linux on x86-64, Python up to 3.13",
            file=sys.stderr,
        )
        return 0
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    with tempfile.TemporaryDirectory() as scratch:
        limits = at_the_limits(Path(scratch))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            every = list(pool.map(lambda name: fuzzed(name, seconds / len(READERS), Path(scratch) / name), READERS))
    says = (
        f"{seconds:g} seconds of libFuzzer (atheris) in all, seed {SEED}, each reader in a process of its own. Of five"
        " mutations four keep the JSON whole and change it as a tree: values, keys, branches moved, copied, dropped or"
        " taken from another file. Each input, of at most 32 KiB, is written to disk; the checkpoint is opened and a"
        " layer of it read, and one in four is described and audited as a whole, by every rule that judges no network."
        " Accepted is a header or an index that could be read, a config without a fault, any other file that raised"
        " nothing. Files for the command line go through it, the client's message and the service's door. Warnings of"
        " numpy and torch count as failures, and a process may take no more than 1 GiB of addresses above its start."
    )
    return publish("Fuzzing the readers", says, [*promises(every), *limit_promises(limits)], sections(every, limits))


def fuzzed(reader: str, seconds: float, folder: Path) -> Fuzzed:
    """Run one reader's fuzzer, and say how it ended."""
    folder.mkdir()
    command = [sys.executable, str(ROOT / "evidence" / "reader_fuzz.py"), reader, str(seconds), str(SEED), str(folder)]
    quiet = os.environ | {"RUST_BACKTRACE": "0", "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        try:
            code = subprocess.run(
                command, check=False, stdout=log, stderr=log, env=quiet, cwd=folder, timeout=seconds + START_SECONDS
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    said = (folder / "log").read_text(errors="replace")
    edges = re.findall(r"cov: (\d+)", said)
    if code:
        sys.stderr.write(f"{reader} ended with {code}:\n{said[-4000:]}\n")
    counts = folder / "counts.json"
    for note in sorted(folder.glob("finding-*.txt")):
        sys.stderr.write(f"{reader}: {note.with_suffix('').read_bytes()[:2000]!r}\n{note.read_text()}\n")
    told = json.loads(counts.read_text()) if counts.exists() else {}
    return Fuzzed(reader, not code, int(edges[-1]) if edges else 0, **told)


def promises(every: Sequence[Fuzzed]) -> list[Promise]:
    inputs, findings = sum(one.inputs for one in every), [what for one in every for what in one.findings]
    died = [one.reader for one in every if not one.ended]
    slowest, largest = max(every, key=lambda one: one.slowest), max(every, key=lambda one: one.peak)
    least, dullest = min(every, key=lambda one: one.inputs), min(every, key=_share)
    return [
        Promise(
            "whatever a reader is given, it raises an error of Glassblock's or nothing",
            f"{inputs:,} inputs, {', '.join(findings) or 'no other exception'}",
            not findings,
        ),
        Promise("no process dies, hangs or runs out of addresses", ", ".join(died) or "none did", not died),
        Promise(
            f"no input takes longer than {LONGEST_SECONDS:g} s",
            f"{slowest.slowest:.2f} s at most ({slowest.reader})",
            slowest.slowest <= LONGEST_SECONDS,
        ),
        Promise(
            f"memory above the start stays below {MOST_BYTES // MIB} MiB for an input of 32 KiB",
            f"{largest.peak / MIB:.1f} MiB at most ({largest.reader})",
            largest.peak < MOST_BYTES,
        ),
        Promise(
            f"every reader is given at least {LEAST_INPUTS} inputs",
            f"{least.inputs:,} at least ({least.reader})",
            least.inputs >= LEAST_INPUTS,
        ),
        Promise(
            f"of every reader's inputs at least {LEAST_ACCEPTED:.0%} are accepted, and some are not",
            f"{_share(dullest):.1%} at least ({dullest.reader})",
            all(LEAST_ACCEPTED <= _share(one) < 1 for one in every),
        ),
    ]


def at_the_limits(scratch: Path) -> list[tuple[str, int, float, float]]:
    """Files as long as a reader takes them, and one byte longer: length, peak over the file's bytes, seconds."""
    rows: list[tuple[str, int, float, float]] = []
    for name, limit in (("config", MAX_CONFIG_BYTES), ("index", MAX_INDEX_BYTES), ("header", MAX_HEADER_BYTES)):
        for length in (limit, limit + 1):
            file = scratch / f"{name}.safetensors"
            # Nothing in JSON takes more memory for its length than empty lists.
            head, last = b'{"a":[', b"[]]}"
            lists, spaces = divmod(length - len(head) - len(last), len(b"[],"))
            text = head + b"[]," * lists + b" " * spaces + last
            file.write_bytes((length.to_bytes(8, "little") if name == "header" else b"") + text)
            done = subprocess.run(
                [sys.executable, "-c", AT_THE_LIMIT, name, str(file)], check=True, capture_output=True, text=True
            )
            row = json.loads(done.stdout)
            rows.append((name, length, row["peak"] / length, row["seconds"]))
            file.unlink()
    return rows


def limit_promises(limits: Sequence[tuple[str, int, float, float]]) -> list[Promise]:
    taken, refused = limits[::2], limits[1::2]
    most, slowest = max(row[2] for row in taken), max(row[3] / (row[1] / 1e6) for row in taken)
    held = max(row[2] * row[1] for row in refused)
    return [
        Promise(
            f"a file at its reader's limit takes at most {TIMES_THE_FILE} times its bytes",
            f"{most:.0f} times at most",
            most <= TIMES_THE_FILE,
        ),
        Promise(f"and at most {SECONDS_PER_MB:g} s for each MB", f"{slowest:.2f} s at most", slowest <= SECONDS_PER_MB),
        Promise("one byte more is refused unread", f"{held / MIB:.1f} MiB at most", held < MIB),
    ]


def sections(every: Sequence[Fuzzed], limits: Sequence[tuple[str, int, float, float]]) -> list[str]:
    rows = [
        (
            READERS[one.reader],
            one.seeds,
            f"{one.inputs:,}",
            f"{_share(one):.0%}",
            one.edges,
            f"{one.slowest:.2f}",
            f"{one.peak / MIB:.1f}",
            ", ".join(f"{kind} {count:,}" for kind, count in sorted(one.refusals.items())) or "as faults in the answer",
        )
        for one in every
    ]
    header = ("reader", "seeds", "inputs", "accepted", "edges", "slowest, s", "peak, MiB", "refused as")
    found = [f"- {one.reader}: {what}: {said}" for one in every for what, said in one.findings.items()]
    at_limits = [
        (name, f"{length:,}", f"{times * length / MIB:.1f}", f"{seconds:.1f}")
        for name, length, times, seconds in limits
    ]
    return [
        table(header, rows),
        *(["Found:\n\n" + "\n".join(found) + "\n"] if found else []),
        "Files of empty lists, as long as their reader takes them, and one byte longer:\n",
        table(("reader", "bytes", "peak, MiB", "seconds"), at_limits),
    ]


def _share(one: Fuzzed) -> float:
    return one.accepted / max(one.inputs, 1)


if __name__ == "__main__":
    sys.exit(main())
