"""One pass over a checkpoint: every byte of tensor data is read once, and leaves numbers behind.

Tensors are streamed in pieces; only the projections of one layer are ever held whole, since telling gate from up, and
counting idle neurons, needs them together. So memory is bounded by one layer's network and one piece, whatever the
number of layers.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from glassblock.audit.embedding import embedding_plan
from glassblock.audit.evidence import Evidence, GateLayer, GateStudy, Unasked
from glassblock.audit.gate_plans import ALPHA, GATE_RULE_NAMES, GatePlan, gate_plans
from glassblock.audit.padding import idle_neurons, network_entries, networks_to_weigh
from glassblock.audit.question import AuditCancelled, AuditQuestion
from glassblock.audit.readable import resolved_layers, unreadable
from glassblock.audit.trouble import ReadTrouble, read_faults, trouble_of
from glassblock.audit.values import TensorValues, values_of
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.fitting import FLOAT_CODES
from glassblock.checkpoint.layers import LayerTensors, embedding_entry, head_entry, shape_faults, split_fused
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter, read_chunks, read_tensor
from glassblock.errors import CheckpointUnusable, UnknownCheckpoint
from glassblock.numerics.gate_or_up import family_wise_level, gate_up_evidence, judge

DRAWS = 199
"""Sign draws per layer; the smallest p-value they can give is 0.005."""

CPU_CHUNK_BYTES = 2 << 20
"""A piece that stays in a core's cache while it is looked at several times."""

GPU_CHUNK_BYTES = 32 << 20

Progress = Callable[[int, int, str], None]


def gather(
    checkpoint: Checkpoint,
    question: AuditQuestion,
    *,
    device: torch.device,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> Evidence:
    """Read the checkpoint once and keep what the rules need.

    Args:
        checkpoint: As opened.
        question: Decides whether gates are judged, and how many bounds are certified; nothing else of it is read here.
        device: Where the tensors go.
        progress: Told (bytes done, bytes in all, what comes next) before each tensor or layer.
        cancelled: Asked at the same places.

    Raises:
        AuditCancelled: `cancelled` answered true.
        DamagedCheckpoint: A file was replaced, rewritten or removed meanwhile, so that no answer would be about one
            checkpoint. A file that was only cut, and a disk that fails, are evidence.
        AccessRefused, ServiceUnavailable: A file may not be read any more, or too many are open.
    """
    unread = unreadable(checkpoint)
    layers = resolved_layers(checkpoint)
    plans, unasked = gate_plans(checkpoint, layers, unread)
    tests = 2 * len(plans)
    sweep = _Pass(
        checkpoint,
        layers,
        device=device,
        level=family_wise_level(max(tests, 1), alpha=ALPHA),
        judging=question.rules is None or not GATE_RULE_NAMES.isdisjoint(question.rules),
        every_bound=question.certify,
        unread=unread,
        unasked=unasked,
    )
    steps = sorted(_steps(sweep, plans), key=lambda step: (step.entries[0].file.name, step.entries[0].start))
    total = sum(entry.bytes for step in steps for entry in step.entries)
    done = 0
    for step in steps:
        if cancelled():
            raise AuditCancelled
        progress(done, total, step.label)
        step.take()
        done += sum(entry.bytes for entry in step.entries)
    copies = _equal_copies(sweep, cancelled)
    progress(done, total, "judging")
    faults = read_faults(checkpoint, sweep.troubles)
    gated = checkpoint.family is not None and checkpoint.trunk is not None and checkpoint.family.feed_forward.gated
    return Evidence(
        checkpoint=checkpoint,
        question=question,
        misfits=shape_faults(checkpoint),
        layers=layers,
        values=MappingProxyType(sweep.values),
        unread=MappingProxyType(sweep.unread),
        read_faults=faults,
        gates=GateStudy(ALPHA, tests, sweep.level, dict(sorted(sweep.gates.items())), sweep.unasked) if gated else None,
        embedding=None if sweep.embedding is None else sweep.embedding.energy(sweep.mean_squares),
        head_is_embedding=sweep.head_is_embedding,
        equal_copies=copies,
        idle_neurons=MappingProxyType(sweep.idle),
    )


@dataclass(frozen=True)
class _Step:
    """One thing to read: what to call it, what it reads, and the doing."""

    label: str
    entries: tuple[TensorEntry, ...]
    take: Callable[[], None]


@dataclass
class _Pass:
    """What the pass was told, and what it has seen so far."""

    checkpoint: Checkpoint
    layers: Mapping[int, LayerTensors]
    device: torch.device
    level: float
    judging: bool
    every_bound: bool
    unread: dict[str, str]
    unasked: dict[int, Unasked]
    meter: ReadMeter = field(default_factory=ReadMeter)
    values: dict[str, TensorValues] = field(default_factory=dict[str, TensorValues])
    gates: dict[int, GateLayer] = field(default_factory=dict[int, GateLayer])
    idle: dict[int, int] = field(default_factory=dict[int, int])
    head_is_embedding: bool | None = None
    mean_squares: list[Tensor] = field(default_factory=list[Tensor])
    troubles: list[ReadTrouble] = field(default_factory=list[ReadTrouble])

    def __post_init__(self) -> None:
        self.embedding = embedding_plan(self.checkpoint, longest_row=self.chunk_bytes)

    @property
    def chunk_bytes(self) -> int:
        """Length of a piece."""
        return CPU_CHUNK_BYTES if self.device.type == "cpu" else GPU_CHUNK_BYTES

    def pieces(self, entry: TensorEntry, elements: int | None = None) -> Iterator[Tensor]:
        """A tensor in flat pieces, of so many elements where that is said."""
        length = self.chunk_bytes if elements is None else elements * entry.bytes // entry.elements
        return read_chunks(entry, length, device=self.device, meter=self.meter)

    def measure(self, entry: TensorEntry, piece: Tensor) -> None:
        """Take the mean squares of the embedding's rows; other tensors are let pass."""
        if self.embedding is not None and entry.name == self.embedding.tensor:
            self.mean_squares.append(self.embedding.mean_squares(piece))

    def whole(self, entry: TensorEntry) -> Tensor | None:
        """A whole tensor, with what it holds noted; None where it cannot be read, which is noted too."""
        with self.reading(entry):
            tensor = read_tensor(entry, self.device, self.meter)
            self.values[entry.name] = values_of(tensor, chunk_elements=self.chunk_bytes // tensor.itemsize)
            return tensor
        return None

    @contextmanager
    def reading(self, entry: TensorEntry) -> Generator[None]:
        """Note why a tensor cannot be read; raise where its file is another one now."""
        try:
            yield
        except (CheckpointUnusable, UnknownCheckpoint) as error:
            if self.embedding is not None and entry.name == self.embedding.tensor:
                self.mean_squares.clear()  # a part of the rows speaks for none of the others
            trouble = trouble_of(self.checkpoint, entry, error)
            self.unread.setdefault(entry.name, trouble.reason)
            self.troubles.append(trouble)


def _steps(sweep: _Pass, plans: Mapping[int, GatePlan]) -> Iterator[_Step]:
    """Every tensor that can be read, in exactly one step."""
    checkpoint = sweep.checkpoint
    taken = set(sweep.unread)
    for layer, plan in plans.items():
        entries = tuple(plan.tensors.weights.values())
        taken.update(entry.name for entry in entries)
        yield _Step(f"layer {layer}", entries, partial(_take_gates, sweep, layer, plan))
    for layer, tensors in networks_to_weigh(checkpoint, sweep.layers, planned=plans, unread=sweep.unread):
        entries = network_entries(tensors)
        taken.update(entry.name for entry in entries)
        yield _Step(f"layer {layer}", entries, partial(_take_network, sweep, layer, tensors))
    if checkpoint.family is not None and checkpoint.trunk is not None:
        embedding, head = embedding_entry(checkpoint), head_entry(checkpoint)
        if embedding is not None and embedding.name not in taken:
            if head is not None and head.name not in taken and _comparable(embedding, head):
                taken.update((embedding.name, head.name))
                yield _Step(embedding.name, (embedding, head), partial(_take_pair, sweep, embedding, head))
            elif head is not None and head.name not in taken and head.shape != embedding.shape:
                sweep.head_is_embedding = False
    for entry in checkpoint.entries.values():
        if entry.name not in taken:
            yield _Step(entry.name, (entry,), partial(_take, sweep, entry))


def _take(sweep: _Pass, entry: TensorEntry) -> None:
    values = TensorValues()
    with sweep.reading(entry):
        for piece in sweep.pieces(entry):
            values = values.and_then(piece)
            sweep.measure(entry, piece)
        sweep.values[entry.name] = values


def _take_pair(sweep: _Pass, embedding: TensorEntry, head: TensorEntry) -> None:
    """Embedding and output head side by side, so that each is read once and they are compared as well."""
    wide = max(entry.bytes // entry.elements for entry in (embedding, head))
    values, head_values, equal = TensorValues(), TensorValues(), True
    try:
        pairs = (sweep.pieces(entry, sweep.chunk_bytes // wide) for entry in (embedding, head))
        for piece, head_piece in zip(*pairs, strict=True):
            values, head_values = values.and_then(piece), head_values.and_then(head_piece)
            sweep.measure(embedding, piece)
            equal = equal and bool((piece == head_piece).all())
    except (CheckpointUnusable, UnknownCheckpoint):
        # One of the two fails: each by itself tells which, and the other one is still looked at.
        sweep.mean_squares.clear()
        _take(sweep, embedding)
        _take(sweep, head)
    else:
        sweep.values[embedding.name], sweep.values[head.name] = values, head_values
        sweep.head_is_embedding = equal


def _comparable(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two tensors can be compared number by number."""
    return one.shape == other.shape and one.elements > 0 and {one.dtype, other.dtype} <= FLOAT_CODES


def _take_gates(sweep: _Pass, layer: int, plan: GatePlan) -> None:
    tensors = plan.tensors
    read = {part: sweep.whole(entry) for part, entry in tensors.weights.items()}
    weights = {part: weight for part, weight in read.items() if weight is not None}
    if len(weights) < len(read):
        lost = next(entry.name for part, entry in tensors.weights.items() if part not in weights)
        sweep.unasked[layer] = Unasked(sweep.unread[lost])
        return
    oriented = {part: weight.T if plan.transposed else weight for part, weight in weights.items()}
    down = oriented["down"]
    gate, up = (oriented["gate"], oriented["up"]) if plan.fused is None else split_fused(oriented["fused"], plan.fused)
    sweep.idle[layer] = idle_neurons(sweep.checkpoint, weights, {})
    if not sweep.judging:
        return
    statistics = gate_up_evidence(
        gate,
        up,
        down,
        seed=layer,
        level=sweep.level,
        draws=DRAWS,
        certify="all" if sweep.every_bound else "screened",
    )
    sweep.gates[layer] = GateLayer(
        gate=tensors.weights["gate" if plan.fused is None else "fused"].name,
        up=tensors.weights["up" if plan.fused is None else "fused"].name,
        down=tensors.weights["down"].name,
        companions=tuple(entry.name for part, entry in tensors.biases.items() if part in {"gate", "up", "fused"}),
        statistics=statistics,
        judgement=judge(statistics, level=sweep.level),
    )


def _take_network(sweep: _Pass, layer: int, tensors: LayerTensors) -> None:
    """Count the idle neurons of a network that is too wide and not tested for its gate."""
    weights = {part: sweep.whole(entry) for part, entry in tensors.weights.items()}
    biases = {part: sweep.whole(entry) for part, entry in tensors.biases.items()}
    found = {part: weight for part, weight in weights.items() if weight is not None}
    found_biases = {part: bias for part, bias in biases.items() if bias is not None}
    if len(found) == len(weights) and len(found_biases) == len(biases):
        sweep.idle[layer] = idle_neurons(sweep.checkpoint, found, found_biases)


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
