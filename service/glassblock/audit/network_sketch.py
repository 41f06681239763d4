"""What one pass keeps of a feed-forward network: signed sums of gate and up, three lengths for each neuron, a few rows.

The rows of its tensors are tapped as they go by. A sketch is closed when the last of its rows has passed; what is left
then is a handful of numbers.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.layer_parts import NetworkTensors
from glassblock.numerics.fused_layouts import split_groups
from glassblock.numerics.sign_screen import ColumnSums, RowSums, SignSums
from glassblock.numerics.squared_lengths import column_squares, row_squares


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows as they lie in the file.

    Attributes:
        numbers: `[r, width]`, in float32 at least.
        squares: `[r]`, their squared lengths.
    """

    numbers: Float[Tensor, "r width"]
    squares: Float[Tensor, " r"]

    @classmethod
    def of(cls, numbers: Float[Tensor, "r width"]) -> "Rows":
        """Of numbers in any dtype."""
        wide = numbers.to(torch.promote_types(numbers.dtype, torch.float32))
        return cls(wide, row_squares(wide))

    def __len__(self) -> int:
        return len(self.squares)

    def __getitem__(self, span: slice) -> "Rows":
        return Rows(self.numbers[span], self.squares[span])


Take = Callable[[Rows, int], None]
"""Rows, and the number of the first of them."""


@dataclass
class Tap:
    """Rows of one tensor that somebody wants to see go by.

    Attributes:
        start, stop: Which rows, of all rows of the tensor along its last axis.
        take: Given them in order, counted from `start`.
        done: Called once all of them have been given.
    """

    start: int
    stop: int
    take: Take
    done: Callable[[], None]


def feed(taps: list[Tap], rows: Rows, start: int) -> None:
    """Give the rows of a tensor from `start` on to its taps, which are sorted; those that are done are taken out."""
    stop = start + len(rows)
    for tap in taps:
        if tap.start >= stop:
            break
        low, high = max(tap.start, start), min(tap.stop, stop)
        if low < high:
            tap.take(rows[low - start : high - start], low - tap.start)
            if high == tap.stop:
                tap.done()
    while taps and taps[0].stop <= stop:
        taps.pop(0)


Role = Literal["gate", "up", "down"]


SAMPLED = 64
"""Neurons of which gate and up are kept whole, evenly spread, to see whether they are paired."""


@dataclass
class NetworkSketch:
    """One network while it goes by.

    Attributes:
        network: Its tensors.
        neurons, width: m and d.
        summed: Whether signed sums are wanted, or lengths alone.
        device: Where the rows are.
        closed: Called with the sketch once all of it has gone by.
        sums: Of gate and up.
        squares: Squared lengths of each neuron's rows, and of its column of down.
        sampled: `[<= SAMPLED, d]`, the same neurons of gate and of up.
    """

    network: NetworkTensors
    neurons: int
    width: int
    summed: bool
    device: torch.device
    closed: Callable[["NetworkSketch"], None]
    sums: dict[Role, SignSums] = field(default_factory=dict[Role, SignSums])
    squares: dict[Role, Tensor] = field(default_factory=dict[Role, Tensor])
    sampled: dict[Role, Tensor] = field(default_factory=dict[Role, Tensor])

    def __post_init__(self) -> None:
        self._working: dict[Role, _Sums | _Lengths] = {}
        self._open: set[Role] = set()

    @property
    def bytes(self) -> int:
        """What it holds once it is closed."""
        sums = (sums.sums for sums in self.sums.values())
        return sum(held.nbytes for held in (*sums, *self.squares.values(), *self.sampled.values()))

    def taps(self, entries: Mapping[str, TensorEntry]) -> Iterator[tuple[str, Tap]]:
        """The taps on its tensors, by the name of the tensor.

        Args:
            entries: The tensors of the checkpoint, of which those of the network may be slices.
        """
        self._open = {role for part in self.network.weights for role in _roles(part)}
        for part, entry in self.network.weights.items():
            whole = entries[entry.name]
            row_bytes = entry.bytes * entry.shape[-1] // entry.elements
            start = (entry.start - whole.start) // row_bytes
            yield from ((entry.name, tap) for tap in self._part_taps(part, entry, start))

    def give(self, rows_of: Callable[[TensorEntry], Iterator[Tensor]]) -> None:
        """Feed it at once, where its numbers do not go by as they lie.

        Args:
            rows_of: The rows of one of its weights, in order, in any number of pieces.
        """
        self._open = {role for part in self.network.weights for role in _roles(part)}
        for part, entry in self.network.weights.items():
            taps, start = sorted(self._part_taps(part, entry, 0), key=lambda tap: tap.start), 0
            for numbers in rows_of(entry):
                feed(taps, Rows.of(numbers), start)
                start += len(numbers)

    def _part_taps(self, part: str, entry: TensorEntry, start: int) -> Iterator[Tap]:
        """The taps on one weight, whose rows begin at `start`."""
        transposed = self.network.row.layouts[part == "down"] == "in_out"
        stop = start + entry.elements // entry.shape[-1]
        if part == "fused":
            yield from self._fused_taps(start, stop, transposed=transposed)
            return
        role: Role = "down" if part == "down" else "gate" if part == "gate" else "up"
        yield self._tap(role, start, stop, transposed=transposed)

    def _fused_taps(self, start: int, stop: int, *, transposed: bool) -> Iterator[Tap]:
        layout = self.network.fused_layout
        if layout is None:
            return
        roles: tuple[Role, Role] = ("gate", "up") if layout.gate_first else ("up", "gate")
        consumers = [self._consumer(role, transposed=transposed) for role in roles]
        if transposed or layout.groups == self.neurons:
            take = partial(_split_columns, consumers, layout.groups) if transposed else partial(_split_rows, consumers)
            yield Tap(start, stop, take, partial(self._done, *roles))
            return
        run = self.neurons // layout.groups
        for number in range(2 * layout.groups):
            group, side = divmod(number, 2)
            last = group == layout.groups - 1
            yield Tap(
                start + number * run,
                start + (number + 1) * run,
                partial(_moved, consumers[side], group * run),
                partial(self._done, *((roles[side],) if last else ())),
            )

    def _tap(self, role: Role, start: int, stop: int, *, transposed: bool) -> Tap:
        return Tap(start, stop, self._consumer(role, transposed=transposed), partial(self._done, role))

    def _consumer(self, role: Role, *, transposed: bool) -> Take:
        """Made when the first rows come, so that nothing is held for a network that is still far."""
        columns = transposed != (role == "down")

        def give(rows: Rows, start: int) -> None:
            if role not in self._working:
                if role == "down" or not self.summed:
                    self._working[role] = _Lengths(self.neurons, columns=columns, device=self.device)
                else:
                    self._working[role] = _Sums(self.neurons, self.width, columns=columns, device=self.device)
            self._working[role].add(rows, start)

        return give

    def _done(self, *roles: Role) -> None:
        for role in roles:
            worked = self._working.pop(role, None)
            if worked is not None:
                self.squares[role] = worked.squares.to("cpu")
                if isinstance(worked, _Sums):
                    self.sums[role], self.sampled[role] = worked.finish(), worked.sampled
            self._open.discard(role)
        if not self._open:
            self.closed(self)


class _Sums:
    """Signed sums over rows or columns, and a few neurons kept."""

    def __init__(self, neurons: int, width: int, *, columns: bool, device: torch.device) -> None:
        self._sums = (ColumnSums if columns else RowSums)(neurons, width, device)
        self._step = max(1, neurons // SAMPLED)
        self.sampled = torch.zeros(len(range(0, neurons, self._step)[:SAMPLED]), width, device=device)

    @property
    def squares(self) -> Tensor:
        return self._sums.squares

    def add(self, rows: Rows, start: int) -> None:
        if isinstance(self._sums, ColumnSums):
            self._sums.add(rows.numbers, start)
            columns = rows.numbers[:, :: self._step][:, : len(self.sampled)]
            self.sampled[:, start : start + len(rows)] = columns.T
            return
        self._sums.add(rows.numbers, start, rows.squares)
        first = -(-start // self._step)  # of those sampled, at or after the first of these rows
        chosen = rows.numbers[first * self._step - start :: self._step][: max(0, len(self.sampled) - first)]
        self.sampled[first : first + len(chosen)] = chosen

    def finish(self) -> SignSums:
        return self._sums.finish()


class _Lengths:
    """Squared lengths of rows or columns."""

    def __init__(self, neurons: int, *, columns: bool, device: torch.device) -> None:
        self.squares = torch.zeros(neurons, device=device)
        self._columns = columns

    def add(self, rows: Rows, start: int) -> None:
        if self._columns:
            self.squares += column_squares(rows.numbers)
        else:
            self.squares[start : start + len(rows)] = rows.squares


def _roles(part: str) -> tuple[Role, ...]:
    if part == "fused":
        return ("gate", "up")
    return ("gate",) if part == "gate" else ("up",) if part == "up" else ("down",)


def _split_columns(targets: list[Take], groups: int, rows: Rows, start: int) -> None:
    """Rows of a fused tensor whose columns are those of gate and up."""
    for give, side in zip(targets, split_groups(rows.numbers.T, groups), strict=True):
        give(Rows(side.T, rows.squares), start)  # the squares are of both halves; of columns nobody asks for them


def _split_rows(targets: list[Take], rows: Rows, start: int) -> None:
    """Rows of a fused tensor of gate and up in turn; a piece may begin with either of the two."""
    for number, give in enumerate(targets):
        offset = (number - start) % 2
        give(rows[offset::2], (start + offset) // 2)


def _moved(give: Take, by: int, rows: Rows, start: int) -> None:
    """Rows of one of several runs, by their numbers in all of them."""
    give(rows, start + by)
