"""What tensors captured in an engine say of a checkpoint: each recorded layer is replayed under every hypothesis."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from glassblock.audit.alternatives import alternatives_of
from glassblock.audit.hypothesis_words import (
    Declared,
    decider_in_words,
    departures_in_words,
    explanation_in_words,
    in_words,
)
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.layers import load_feed_forward, load_wiring
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter, read_tensor
from glassblock.checkpoint.recordings import Recording
from glassblock.errors import CheckpointUnusable, InvalidValue
from glassblock.numerics.deciders import deciders
from glassblock.numerics.dtypes import name_of_dtype
from glassblock.numerics.explanation import Explanation, Verdict, explain
from glassblock.numerics.hypotheses import Alternatives, Hypothesis, single_mistakes
from glassblock.numerics.watching import UNWATCHED, Watch
from glassblock.wire.explain import CAPTURED_STAGES, layer_of_file, stage_of

_MORE = "captures of more tokens, in a wider dtype or of quieter layers"
MOST_BYTES = 2**33
"""Of the captures of one layer."""

Entries = Mapping[str, TensorEntry]


@dataclass(frozen=True)
class JudgedLayer:
    """One recorded layer.

    Attributes:
        layer: Its number.
        verdict: Of `explain`, or `unanswered` where the captures could not be compared.
        message: The verdict in a sentence, or why there is none.
        factors: Where explained: each factor that departs, with its value and the words for it.
        open: Factors that stay open, with what would decide: of hypotheses that tie, and of those not excluded.
        seen: Factors that the captures would have shown.
        evidence: Numbers of the best hypothesis.
    """

    layer: int
    verdict: Verdict | Literal["unanswered"]
    message: str
    factors: tuple["Departed", ...] = ()
    open: Mapping[str, str] = field(default_factory=dict[str, str])
    seen: frozenset[str] = frozenset()
    evidence: Mapping[str, float | int | str] = field(default_factory=dict[str, "float | int | str"])

    @property
    def answered(self) -> bool:
        """Whether the captures decide the layer."""
        return self.verdict in {"as-declared", "explained"}


class Departed(NamedTuple):
    """A factor that is not as declared."""

    factor: str
    value: str
    words: str


@dataclass(frozen=True)
class CaptureStudy:
    """Every recorded layer, in order."""

    name: str
    layers: tuple[JudgedLayer, ...]

    @property
    def first_departure(self) -> int | None:
        """The first layer that is not as declared."""
        return next((judged.layer for judged in self.layers if judged.verdict not in {"as-declared"}), None)


def recorded_stages(recording: Recording) -> dict[int, dict[str, TensorEntry]]:
    """The stages of each layer, in the order of the layers.

    A tensor is of the layer that its name says (`layers.7.gate`), else its file (`layer_7.safetensors`).

    Raises:
        InvalidValue: A name is no stage, a stage stands twice, or nothing says of which layer a tensor is.
    """
    found: dict[int, dict[str, TensorEntry]] = {}
    for stem, entries in recording.files.items():
        for name, entry in entries.items():
            of_layer, stage = stage_of(name)
            layer = layer_of_file(stem) if of_layer is None else of_layer
            if stage not in CAPTURED_STAGES:
                raise _refused(entry, f"tensor {name!r} is no stage", known=CAPTURED_STAGES)
            if layer is None:
                raise _refused(entry, f"nothing says of which layer {name!r} is", hint="Name it layers.{i}.{stage}.")
            if stage in found.setdefault(layer, {}):
                raise _refused(entry, f"{stage} of layer {layer} was there already")
            found[layer][stage] = entry
    return dict(sorted(found.items()))


def capture_study(
    checkpoint: Checkpoint,
    recording: Recording,
    *,
    device: torch.device,
    tell: Callable[[str], None] = lambda _: None,
    watch: Watch = UNWATCHED,
) -> CaptureStudy:
    """Judge every recorded layer.

    Args:
        checkpoint: The checkpoint.
        recording: What was captured.
        device: Where blocks are replayed.
        tell: Told what comes next.
        watch: Asked within a layer whether to stop.

    Raises:
        InvalidValue: As `recorded_stages`.
        ComputationCancelled: `watch` asked for it.
    """
    layers: list[JudgedLayer] = []
    for layer, entries in recorded_stages(recording).items():
        tell(f"captures of layer {layer}")
        layers.append(_judged(checkpoint, layer, entries, device=device, watch=watch))
    return CaptureStudy(recording.name, tuple(layers))


def _judged(checkpoint: Checkpoint, layer: int, entries: Entries, *, device: torch.device, watch: Watch) -> JudgedLayer:
    meter = ReadMeter()
    try:
        network = load_feed_forward(checkpoint, layer, device, meter)
        wiring = load_wiring(checkpoint, layer, device, meter)
        alternatives = alternatives_of(checkpoint, layer, wiring, device, meter)
        found = explain(_read(entries, device), network, wiring, alternatives=alternatives, watch=watch)
    except (InvalidValue, CheckpointUnusable) as error:
        return JudgedLayer(layer, "unanswered", error.message)
    declared = Declared(network, wiring)
    seen = _seen(found, declared, alternatives)
    first = found.ranked[0]
    return JudgedLayer(
        layer,
        found.verdict,
        explanation_in_words(found, declared),
        factors=_departed(first.hypothesis, declared) if found.verdict == "explained" else (),
        open=_open(found, declared, seen),
        seen=seen,
        evidence={
            "residual": first.residual,
            "floor": first.floor,
            "declared_residual": found.trial.declared.residual,
            "tokens": found.captures.given,
            "dtype": name_of_dtype(found.captures.dtype),
            "captured": ", ".join(found.captures.stages),
        },
    )


def _read(entries: Entries, device: torch.device) -> dict[str, Tensor]:
    size = sum(entry.bytes for entry in entries.values())
    if size > MOST_BYTES:
        raise InvalidValue(
            f"the captures of this layer have {size:,} bytes; at most {MOST_BYTES:,} are read",
            hint="Capture fewer tokens: 256 are replayed.",
            field="captures",
        )
    stages: dict[str, Tensor] = {}
    for stage, entry in entries.items():
        tensor = read_tensor(entry, device, ReadMeter())
        stages[stage] = tensor.to(torch.float32) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
    return stages


def _seen(found: Explanation, declared: Declared, alternatives: Alternatives) -> frozenset[str]:
    singles = single_mistakes(*declared, alternatives, swaps=("exchanged",))
    return frozenset(factor for single in singles if found.trial.sees(single) for factor in single.departures())


def _departed(hypothesis: Hypothesis, declared: Declared) -> tuple[Departed, ...]:
    return tuple(Departed(factor, now, words) for factor, _, now, words in departures_in_words(hypothesis, declared))


def _open(found: Explanation, declared: Declared, seen: frozenset[str]) -> dict[str, str]:
    """Of each factor that the captures leave open, what would decide it."""
    if found.verdict == "unexplained":
        return dict.fromkeys(seen, "captures of more stages of the layer, from x on, of one forward pass")
    tied = found.ranked[: found.tied] if found.verdict == "indistinguishable" else ()
    told = {frozenset(decider.between): decider_in_words(decider) for decider in deciders(found)}
    settled = found.ranked[0].hypothesis.departures() if found.verdict == "explained" else {}
    open_: dict[str, str] = {}
    for fit in (*tied, *found.not_excluded):
        # In their order: that of a set of pairs is another one in every process.
        words = next((words for pair, words in told.items() if fit.hypothesis in pair), _MORE)
        for factor, value in fit.hypothesis.departures().items():
            if factor not in settled or settled[factor] != value:
                named = in_words(fit.hypothesis, declared)
                open_.setdefault(factor, f"{words} (open: {named})")
    return open_


def _refused(entry: TensorEntry, problem: str, *, hint: str | None = None, known: tuple[str, ...] = ()) -> InvalidValue:
    return InvalidValue(f"{entry.file.name}: {problem}", field="captures", tensor=entry.name, hint=hint, known=known)
