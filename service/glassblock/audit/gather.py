"""One pass over a checkpoint: every byte of tensor data is read once, and leaves numbers behind.

Tensors are streamed in pieces, one read while another one is looked at. What is kept is small: extremes and moments, a
hash, and of every gated network the signed sums that screen it. Only a network that its screen does not acquit is read
again, for the certified test, and of a large one only some channels are held. So memory is bounded by two pieces and
the sketches, whatever the number of layers.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from glassblock.audit.embedding import embedding_plan
from glassblock.audit.equal_projections import equal_halves
from glassblock.audit.evidence import Evidence, GainMoments, nothing_read
from glassblock.audit.gate_plans import GATE_RULE_NAMES, GatePlan, gate_plans
from glassblock.audit.gate_screens import GateScreens
from glassblock.audit.gate_study import Again, gate_study
from glassblock.audit.grain import Grain
from glassblock.audit.layer_numbers import gain_moments, gain_offsets
from glassblock.audit.network_sketch import NetworkSketch, Rows, Tap, feed
from glassblock.audit.neuron_numbers import Key, Weighed
from glassblock.audit.one_thread import one_thread
from glassblock.audit.orientation import orientation_study
from glassblock.audit.orientation_types import OrientationStudy
from glassblock.audit.padding import WeighedNetworks
from glassblock.audit.part_evidence import PartEvidence, Seen
from glassblock.audit.parts_read import PartsRead
from glassblock.audit.question import AuditCancelled, AuditQuestion
from glassblock.audit.read_ahead import ReadAhead
from glassblock.audit.readable import unreadable
from glassblock.audit.rotary_plans import rotary_plans
from glassblock.audit.rotary_study import ROTARY_RULE, RotarySketches, RotaryStudy
from glassblock.audit.stored_pieces import stored_pieces
from glassblock.audit.tensor_sketch import TensorSketch
from glassblock.audit.trouble import ReadTrouble, read_faults, trouble_of
from glassblock.audit.values import TensorValues
from glassblock.checkpoint.entries import FLOAT_CODES, TensorEntry
from glassblock.checkpoint.layer_map import resolve_layers
from glassblock.checkpoint.layer_parts import LayerTensors
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.outer_tensors import embedding_entry, head_entry
from glassblock.checkpoint.reading import ReadMeter, read_chunks
from glassblock.checkpoint.stored_entries import StoredEntry, codes_like_numbers
from glassblock.errors import CheckpointUnusable, UnknownCheckpoint
from glassblock.numerics.squared_lengths import row_squares, sum_of

CPU_CHUNK_BYTES = 2 << 20
"""A piece that stays in a cache while it is looked at several times."""

CPU_BUFFER_BYTES = 6 << 20
"""Read at once: the fewer times two threads wait for each other, the better; it need not stay in a cache."""

GPU_CHUNK_BYTES = 32 << 20

Progress = Callable[[int, int, str], None]


def gather(
    checkpoint: Checkpoint,
    question: AuditQuestion,
    *,
    device: torch.device,
    progress: Progress,
    cancelled: Callable[[], bool],
    seen: Seen = lambda _extent, _show: None,
) -> Evidence:
    """Read the checkpoint once and keep what the rules need.

    Args:
        checkpoint: As opened.
        question: Its rules decide whether gates, the orientation of square weights and the rotary order are judged; it
            also says how many bounds are certified and how bytes are hashed. What to compare with is not read here.
        device: Where the tensors go.
        progress: Told (bytes done, bytes in all, what comes next) before each tensor.
        cancelled: Asked at the same places.
        seen: Told that headers were read, then each part, and how to get the evidence that this is, with nothing else
            in it.

    Raises:
        AuditCancelled: `cancelled` answered true.
        DamagedCheckpoint: A file was replaced, rewritten or removed meanwhile, so that no answer would be about one
            checkpoint. A file that was only cut, and a disk that fails, are evidence.
        AccessRefused, ServiceUnavailable: A file may not be read any more, or too many are open.
    """
    unread = unreadable(checkpoint)
    layers, misfits = resolve_layers(checkpoint)
    seen("headers", lambda: replace(nothing_read(checkpoint, question), layers=layers, misfits=misfits))
    plans, unasked = gate_plans(checkpoint, layers, unread)
    screens = GateScreens(plans, device=device)
    weighed = WeighedNetworks(checkpoint, layers, planned=_dense(plans), unread=unread)
    sweep = _Pass(checkpoint, layers, device=device, unread=unread, keep=weighed.biases)
    beside = Weighed(device)
    stored, awaited = _tapped(sweep, screens, weighed, beside)
    rotary = RotarySketches(*rotary_plans(checkpoint, layers, unread)) if _asked(question, ROTARY_RULE) else None
    for entry, tap in () if rotary is None else rotary.taps():
        sweep.tap_rows(entry, tap)
    steps = [entry for entry in checkpoint.entries.values() if entry.name not in unread]
    steps.sort(key=lambda entry: (entry.file.name, entry.start))
    total, done = sum(entry.bytes for entry in steps), 0

    def tell(what: str) -> None:
        if cancelled():
            raise AuditCancelled
        progress(done, total, what)

    with one_thread(device), closing(sweep.ahead(steps, question, plans)) as ahead:
        part = PartEvidence(checkpoint, question, layers, misfits, sweep, ahead, beside, screens, weighed)
        parts = PartsRead(
            layers,
            steps,
            awaited,
            is_weighed=part.is_weighed,
            read=lambda extent, names, layer: seen(extent, lambda: part.of(names, layer)),
        )
        for entry in steps:
            tell(sweep.labels.get(entry.name, entry.name))
            sweep.take(entry, ahead.pieces(entry))
            done += entry.bytes
            parts.passed(entry)
        screens.settle()
        parts.step()
        # On one thread too: to wake a second one takes longer than to look at some ten thousand numbers.
        embedding = None if sweep.embedding is None else sweep.embedding.energy(sweep.mean_squares)
    judging = question.rules is None or not GATE_RULE_NAMES.isdisjoint(question.rules)
    for plan, sketch in stored if judging else ():
        tell(f"layer {plan.layer} dequantised")
        sweep.dequantise(sketch)
        parts.step()
    screens.settle()
    parts.step()
    copies = _equal_copies(sweep, cancelled)
    head_is_embedding = _head_is_embedding(sweep, ahead)
    codes = codes_like_numbers(checkpoint.entries)
    again = Again(
        screens,
        pieces=sweep.pieces,
        lost=sweep.lost,
        unread={name: reason for name, reason in sweep.unread.items() if reason != codes.get(name)},
        every_bound=question.certify,
        told=lambda layer: tell(f"layer {layer} once more"),
    )
    gates = gate_study(plans, unasked, again if judging else None)
    if rotary is not None:
        rotary.dequantise(sweep.pieces, sweep.lost)
    orientation = _orientation(question, plans, sweep, again)
    neurons = beside.networks | {key: found.numbers for key, found in screens.networks.items()}
    halves = equal_halves(layers, neurons, sweep.pieces, sweep.lost)
    progress(done, total, "judging")
    faults = read_faults(checkpoint, sweep.troubles)
    return Evidence(
        checkpoint=checkpoint,
        question=question,
        misfits=misfits,
        layers=layers,
        values=MappingProxyType(sweep.values),
        unread=MappingProxyType(sweep.unread),
        read_faults=faults,
        gates=gates if _gated(checkpoint) else None,
        embedding=embedding,
        head_is_embedding=head_is_embedding,
        equal_copies=copies,
        idle_neurons=MappingProxyType(_idle(screens, weighed, sweep)),
        gains=MappingProxyType(sweep.gains),
        equal_halves=halves,
        neurons=MappingProxyType(neurons),
        rows=MappingProxyType(beside.rows),
        grains=MappingProxyType(sweep.grains),
        orientation=orientation,
        rotary=RotaryStudy() if rotary is None else rotary.study(),
        digests=MappingProxyType(ahead.digests),
        slice_digests=MappingProxyType(
            {(name, checkpoint.entries[name].start + stop): part for (name, stop), part in ahead.part_digests.items()}
        ),
    )


def _tapped(
    sweep: "_Pass", screens: GateScreens, weighed: WeighedNetworks, beside: Weighed
) -> tuple[list[tuple[GatePlan, NetworkSketch]], set[Key]]:
    """Let each see its tensors; the networks whose numbers do not lie in the file, and all that will be weighed."""
    stored: list[tuple[GatePlan, NetworkSketch]] = []
    awaited: set[Key] = set()
    for plan, sketch in screens.sketches():
        awaited.add((plan.layer, plan.network.expert))
        if plan.stored:
            stored.append((plan, sketch))
        else:
            sweep.tap(sketch)
        sweep.labels.update((entry.name, f"layer {plan.layer}") for entry in plan.network.weights.values())
    for sketch in weighed.sketches(sweep.device):
        sweep.tap(sketch)
    for key, sketch in beside.plain_networks(sweep.layers, planned=frozenset(awaited), unread=sweep.unread):
        awaited.add(key)
        sweep.tap(sketch)
    for entry, tap in beside.beside_experts(sweep.layers, sweep.checkpoint.entries, sweep.unread):
        sweep.tap_rows(entry, tap)
    return stored, awaited


def _asked(question: AuditQuestion, rule: str) -> bool:
    return question.rules is None or rule in question.rules


def _orientation(question: AuditQuestion, plans: Sequence[GatePlan], sweep: "_Pass", again: Again) -> OrientationStudy:
    """Which way square projections lie, where the rule that tells it was asked."""
    if not _asked(question, "tensor/transposed"):
        return OrientationStudy()
    return orientation_study(sweep.readable(plans), sweep.pieces, sweep.lost, again.told)


@dataclass
class _Pass:
    """What the pass was told, and what it has seen so far."""

    checkpoint: Checkpoint
    layers: Mapping[int, LayerTensors]
    device: torch.device
    unread: dict[str, str]
    keep: frozenset[str]
    meter: ReadMeter = field(default_factory=ReadMeter)
    values: dict[str, TensorValues] = field(default_factory=dict[str, TensorValues])
    mean_squares: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    troubles: list[ReadTrouble] = field(default_factory=list[ReadTrouble])
    gains: dict[str, GainMoments] = field(default_factory=dict[str, GainMoments])
    taps: dict[str, list[Tap]] = field(default_factory=dict[str, list[Tap]])
    labels: dict[str, str] = field(default_factory=dict[str, str])
    kept: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    grains: dict[str, Grain] = field(default_factory=dict[str, Grain])

    def __post_init__(self) -> None:
        self.embedding = embedding_plan(self.checkpoint, longest_row=self.chunk_bytes)
        self.gain_offsets = gain_offsets(self.layers)
        self._wide = _Wide(self.device)

    @property
    def chunk_bytes(self) -> int:
        """Length of a piece."""
        return CPU_CHUNK_BYTES if self.device.type == "cpu" else GPU_CHUNK_BYTES

    def tap(self, sketch: NetworkSketch) -> None:
        """Feed a network's sketch, unless a row of one of its tensors is longer than a piece."""
        entries = self.checkpoint.entries
        if any(_row_bytes(entry) > self.chunk_bytes for entry in sketch.network.weights.values()):
            return
        for name, tap in sketch.taps(entries):
            self.taps.setdefault(name, []).append(tap)

    def tap_rows(self, entry: TensorEntry, tap: Tap) -> None:
        """Show the rows of one tensor, unless one is longer than a piece."""
        if _row_bytes(entry) <= self.chunk_bytes:
            self.taps.setdefault(entry.name, []).append(tap)

    def ahead(self, steps: list[TensorEntry], question: AuditQuestion, plans: tuple[GatePlan, ...]) -> ReadAhead:
        """The reading of all tensors, in order. Of experts in stacks each slice has a hash of its own."""
        for taps in self.taps.values():
            taps.sort(key=lambda tap: tap.start)
        cuts: dict[str, list[int]] = {}
        for plan in plans:
            for entry in plan.network.weights.values():
                whole = self.checkpoint.entries[entry.name]
                if entry.stop - entry.start < whole.bytes:
                    cuts.setdefault(entry.name, []).append(entry.stop - whole.start)
        return ReadAhead(
            steps,
            chunk_bytes=self.chunk_bytes,
            device=self.device,
            meter=self.meter,
            buffer_bytes=CPU_BUFFER_BYTES if self.device.type == "cpu" else None,
            kind=question.hash,
            cuts=lambda entry: sorted(cuts.get(entry.name, ())),
        )

    def take(self, entry: TensorEntry, pieces: Iterator[Tensor]) -> None:
        """Look at one tensor."""
        sketch, passed, float_codes = TensorSketch(), 0, entry.dtype in FLOAT_CODES
        taps, width = self.taps.pop(entry.name, None), entry.shape[-1] if entry.shape else 1
        with self.reading(entry):
            for piece in pieces:
                rows = self._wide.rows_of(piece, width) if float_codes else None
                sketch = sketch.and_then(piece, None if rows is None else sum_of(rows.squares))
                if rows is not None:
                    self._measure(entry, piece, rows, passed)
                    if taps:  # of tensors that come in whole rows
                        feed(taps, rows, passed // width)
                passed += piece.numel()
            self.values[entry.name] = sketch.values
            if float_codes:
                self.grains[entry.name] = sketch.grain

    def dequantise(self, sketch: NetworkSketch) -> None:
        """Feed a quantised network's sketch, of which the codes have gone by."""
        entries = sketch.network.weights.values()
        try:
            sketch.give(lambda entry: (piece.view(-1, entry.shape[-1]) for piece in self.pieces(entry)))
        except (CheckpointUnusable, UnknownCheckpoint) as error:
            entry = next((entry for entry in entries if entry.name == error.tensor), None)
            reason = self.lost(error) if entry is None else trouble_of(self.checkpoint, entry, error).reason
            self.unread.update(dict.fromkeys((entry.name for entry in entries), reason))

    def pieces(self, entry: TensorEntry) -> Iterator[Tensor]:
        """A weight, or a slice of one, once more, in whole rows; what is quantised, as the numbers it stands for."""
        if isinstance(entry, StoredEntry):
            return stored_pieces(entry, self.device, self.meter)
        return read_chunks(entry, max(self.chunk_bytes, _row_bytes(entry)), device=self.device, meter=self.meter)

    def readable(self, plans: Sequence[GatePlan]) -> list[GatePlan]:
        """The networks of which all weights could be read."""
        unread = self.unread.keys()
        return [plan for plan in plans if unread.isdisjoint(entry.name for entry in plan.network.weights.values())]

    def lost(self, error: CheckpointUnusable | UnknownCheckpoint) -> str:
        """Note that a tensor could not be read once more; why not."""
        entries = self.checkpoint.entries.values()
        failed = next((entry for entry in entries if entry.file.name == error.file), None)
        if failed is None:
            raise error
        trouble = trouble_of(self.checkpoint, failed, error)
        self.troubles.append(trouble)
        return trouble.reason

    @contextmanager
    def reading(self, entry: TensorEntry) -> Generator[None]:
        """Note why a tensor cannot be read; raise where its file is another one now."""
        try:
            yield
        except (CheckpointUnusable, UnknownCheckpoint) as error:
            if self.embedding is not None and entry.name == self.embedding.tensor:
                self.mean_squares = torch.zeros(0)  # a part of the rows speaks for none of the others
            self.gains.pop(entry.name, None)
            self.kept.pop(entry.name, None)
            trouble = trouble_of(self.checkpoint, entry, error)
            self.unread.setdefault(entry.name, trouble.reason)
            self.troubles.append(trouble)

    def _measure(self, entry: TensorEntry, piece: Tensor, rows: Rows, passed: int) -> None:
        """Mean squares of the embedding's rows, the size of gains, biases that are asked for."""
        if self.embedding is not None and entry.name == self.embedding.tensor:
            start = passed // self.embedding.width
            if not start:
                # At once: what is allocated between two pieces keeps the allocator from using their place again.
                self.mean_squares = torch.zeros(entry.shape[0], dtype=torch.float64)
            self.mean_squares[start : start + len(rows)] = self.embedding.mean_squares(piece, rows.squares)
        if entry.name in self.gain_offsets:
            moments = gain_moments(piece, rows.numbers.view(-1), offset=self.gain_offsets[entry.name])
            before = self.gains.get(entry.name)
            self.gains[entry.name] = moments if before is None else before.joined(moments)
        if entry.name in self.keep:
            before_this = self.kept.get(entry.name)
            self.kept[entry.name] = piece.clone() if before_this is None else torch.cat([before_this, piece])


class _Wide:
    """One buffer for all pieces in float32: what is allocated anew costs more than the conversion."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(0, device=device)

    def rows_of(self, piece: Tensor, width: int) -> Rows:
        """The rows of a piece; where it is a part of a row, that part as one. Valid until it is called again."""
        wide, whole = self._float32(piece), width > 0 and piece.numel() % width == 0
        rows = wide.view(-1, width if whole else piece.numel())
        return Rows(rows, row_squares(rows))

    def _float32(self, piece: Tensor) -> Tensor:
        if piece.dtype.itemsize >= 4:
            return piece
        if self._buffer.numel() < piece.numel():
            self._buffer = torch.empty(piece.numel(), device=piece.device)
        return self._buffer[: piece.numel()].copy_(piece)


def _row_bytes(entry: TensorEntry) -> int:
    return entry.bytes * entry.shape[-1] // entry.elements if entry.shape and entry.elements else 1


def _dense(plans: Sequence[GatePlan]) -> frozenset[int]:
    return frozenset(plan.layer for plan in plans if plan.network.expert is None)


def _gated(checkpoint: Checkpoint) -> bool:
    family = checkpoint.family
    return family is not None and checkpoint.trunk is not None and any(row.gated for row in family.networks)


def _idle(screens: GateScreens, weighed: WeighedNetworks, sweep: _Pass) -> dict[int, int]:
    dense = {layer: found.idle for (layer, expert), found in screens.networks.items() if expert is None}
    return dense | weighed.idle(sweep.kept)


def _head_is_embedding(sweep: _Pass, ahead: ReadAhead) -> bool | None:
    """Whether the output head holds the embedding's numbers; None where one of the two cannot be told."""
    checkpoint = sweep.checkpoint
    if checkpoint.family is None or checkpoint.trunk is None:
        return None
    embedding, head = embedding_entry(checkpoint), head_entry(checkpoint)
    if embedding is None or head is None or {embedding.name, head.name} & sweep.unread.keys():
        return None
    if head.shape != embedding.shape or not _comparable(embedding, head):
        return False if head.shape != embedding.shape else None
    digests = [ahead.digests.get(entry.name) for entry in (embedding, head)]
    if embedding.dtype == head.dtype and None not in digests:
        return digests[0] == digests[1]
    return _equal_numbers(sweep, embedding, head)


def _equal_numbers(sweep: _Pass, one: TensorEntry, other: TensorEntry) -> bool | None:
    """Of two dtypes, or without hashes: a second look at both, side by side."""
    element = max(entry.bytes // entry.elements for entry in (one, other))
    elements = sweep.chunk_bytes // element
    both = (
        read_chunks(entry, elements * entry.bytes // entry.elements, device=sweep.device, meter=sweep.meter)
        for entry in (one, other)
    )
    try:
        return all(bool((piece == other_piece).all()) for piece, other_piece in zip(*both, strict=True))
    except (CheckpointUnusable, UnknownCheckpoint) as error:
        sweep.lost(error)
        return None


def _comparable(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two tensors can be compared number by number."""
    return one.shape == other.shape and one.elements > 0 and {one.dtype, other.dtype} <= FLOAT_CODES


def _equal_copies(sweep: _Pass, cancelled: Callable[[], bool]) -> Mapping[str, bool]:
    """Compare the bytes of tensors that lie in several files. Only these are read again."""
    equal: dict[str, bool] = {}
    for name, copies in sweep.checkpoint.duplicates.items():
        if cancelled():
            raise AuditCancelled
        if len({(copy.dtype, copy.shape) for copy in copies}) > 1:
            equal[name] = False
            continue
        try:
            pieces = (sweep.pieces(copy) for copy in copies)
            equal[name] = all(
                torch.equal(first.view(torch.uint8), other.view(torch.uint8))
                for first, *others in zip(*pieces, strict=True)
                for other in others
            )
        except (CheckpointUnusable, UnknownCheckpoint) as error:
            failed = next((copy for copy in copies if copy.file.name == error.file), copies[0])
            sweep.troubles.append(trouble_of(sweep.checkpoint, failed, error))
    return MappingProxyType(equal)
