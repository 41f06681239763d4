"""Timing in pairs: A B A B ..., so that a machine whose speed drifts slows both."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Paired:
    """Seconds of each run of two contenders, taken in turn."""

    ours: tuple[float, ...]
    baseline: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median over pairs of baseline / ours: how many times sooner we are."""
        return statistics.median(b / a for a, b in zip(self.ours, self.baseline, strict=True))


def in_pairs(ours: Callable[[], object], baseline: Callable[[], object], *, runs: int, warm_up: int = 1) -> Paired:
    """Time both in turn, `runs` times each, after `warm_up` uncounted rounds."""
    for _ in range(warm_up):
        ours()
        baseline()
    pairs = [(seconds(ours), seconds(baseline)) for _ in range(runs)]
    return Paired(*zip(*pairs, strict=True))


def seconds(work: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def table(title: str, names: tuple[str, str], paired: Paired) -> str:
    """A Markdown table of medians and ranges."""
    lines = [f"### {title}", "", "| | median s | min s | max s |", "|---|---|---|---|"]
    for name, runs in zip(names, (paired.ours, paired.baseline), strict=True):
        lines.append(f"| {name} | {statistics.median(runs):.3f} | {min(runs):.3f} | {max(runs):.3f} |")
    lines += ["", f"Second over first, median of {len(paired.ours)} pairs: **{paired.ratio:.2f}**", ""]
    return "\n".join(lines)
