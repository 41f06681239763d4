"""`blocks/explain`: which mistake explains tensors captured elsewhere."""

from collections.abc import Callable, Iterator, Mapping
from typing import cast

import torch
from torch import Tensor

from glassblock.checkpoint.config import declared_eps
from glassblock.checkpoint.layers import layer_tensors, load_norm
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import CheckpointUnusable, InvalidValue
from glassblock.numerics.deciders import Decider as NumericsDecider
from glassblock.numerics.deciders import deciders
from glassblock.numerics.explanation import Explanation, explain
from glassblock.numerics.hypotheses import Alternatives
from glassblock.numerics.nearness import AT_FLOOR
from glassblock.numerics.norms import Norm
from glassblock.numerics.trial import Fit
from glassblock.numerics.watching import Watch
from glassblock.numerics.wiring import Placement, Wiring
from glassblock.operations.hypothesis_words import Declared, departures_in_words, in_words
from glassblock.operations.overrides import rewired
from glassblock.operations.reply import Reply
from glassblock.operations.store import CheckpointStore, LoadedBlock
from glassblock.operations.tensors import captured_tensor
from glassblock.wire.explain import (
    CAPTURED_STAGES,
    Decider,
    Departure,
    ExplainAnswer,
    ExplainRequest,
    RankedHypothesis,
    StageFit,
    Votes,
    stage_of,
)
from glassblock.wire.framing import WireTensor
from glassblock.wire.values import BytesRead, Stage

OTHER_PLACES = (Placement.PRE, Placement.POST, Placement.SANDWICH, Placement.BRANCH_OUTPUT)


def explain_block(
    store: CheckpointStore, request: ExplainRequest, tensors: Mapping[str, WireTensor], *, watch: Watch
) -> Reply[ExplainAnswer]:
    """Replay a block under every hypothesis, and name the one that made the captured tensors.

    Raises:
        InvalidValue: the layer, or a captured tensor, cannot be used.
        CheckpointUnusable: the checkpoint is damaged, or does not fit its family.
        ComputationCancelled: as the watch says.
    """
    checkpoint = store.open(request.checkpoint)
    family = checkpoint.require_usable()
    captures = captured_stages(tensors, request.layer, device=store.device)
    meter = ReadMeter()
    block = store.block(request.checkpoint, checkpoint, request.layer, meter)
    alternatives = _alternatives(store, checkpoint, request.layer, block, meter)
    explanation = explain(
        captures, block.feed_forward, block.wiring, alternatives=alternatives, pairs=request.pairs, watch=watch
    )
    declared = Declared(block.feed_forward, block.wiring)
    answer = ExplainAnswer(
        checkpoint=request.checkpoint,
        layer=request.layer,
        part=request.part,
        family=family.name,
        verified=family.verified,
        device=str(store.device),
        capture_dtype=str(explanation.captures.dtype).removeprefix("torch."),
        tokens=explanation.captures.given,
        replayed_tokens=len(explanation.captures.tokens),
        captured=cast("tuple[Stage, ...]", tuple(explanation.captures.stages)),
        verdict=explanation.verdict,
        message=_message(explanation, declared),
        ranked=tuple(_ranked(explanation, fit, declared) for fit in explanation.ranked),
        tied=explanation.tied,
        not_excluded=tuple(_ranked(explanation, fit, declared) for fit in explanation.not_excluded),
        would_decide=tuple(_decider(decider, declared) for decider in deciders(explanation)),
        read=BytesRead(bytes=meter.bytes, tensors=meter.tensors),
        notes=explanation.notes,
    )
    return Reply(answer)


def captured_stages(tensors: Mapping[str, WireTensor], layer: int, *, device: torch.device) -> dict[str, Tensor]:
    """The captured tensors by stage, on the device.

    Raises:
        InvalidValue: there is none, a name is no stage, or of another layer, or stands twice, or a tensor is not of
            floating point.
    """
    if not tensors:
        raise InvalidValue(
            "no tensor was captured", field="captures", hint="send stages in a safetensors body", known=CAPTURED_STAGES
        )
    stages: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        of_layer, stage = stage_of(name)
        if stage not in CAPTURED_STAGES:
            raise InvalidValue(f"tensor {name!r} is no stage", field="captures", tensor=name, known=CAPTURED_STAGES)
        if of_layer not in {None, layer}:
            raise InvalidValue(
                f"tensor {name!r} is of layer {of_layer}, and layer {layer} is asked about",
                field="captures",
                tensor=name,
                hint="send one layer at a time",
            )
        if stage in stages:
            raise InvalidValue(f"{stage} is captured twice", field="captures", tensor=name, hint="send one of them")
        stages[stage] = captured_tensor(name, tensor, device=device)
    return stages


def _alternatives(
    store: CheckpointStore, checkpoint: Checkpoint, layer: int, block: LoadedBlock, meter: ReadMeter
) -> Alternatives:
    wiring = block.wiring
    return Alternatives(
        wirings=tuple(_other_places(wiring)),
        epsilons=tuple(_other_epsilons(checkpoint)),
        norms=dict(_other_norms(store, checkpoint, layer, wiring, meter)),
    )


def _other_places(wiring: Wiring) -> Iterator[Wiring]:
    """A parallel block is a pre-norm one beside another, and its stages are the same."""
    beside = {wiring.placement, *([Placement.PRE] if wiring.placement is Placement.PARALLEL else [])}
    for placement in OTHER_PLACES:
        if placement not in beside and any(norm is not None for norm in wiring.norms):
            yield rewired(wiring, placement)[0]


def _other_epsilons(checkpoint: Checkpoint) -> Iterator[float]:
    """Every one that config.json and params.json state, whichever norm it is meant for."""
    row = checkpoint.require_usable()
    for stated in declared_eps(checkpoint.config, row, checkpoint.params):
        yield stated.value


def _other_norms(
    store: CheckpointStore, checkpoint: Checkpoint, layer: int, wiring: Wiring, meter: ReadMeter
) -> Iterator[tuple[str, Norm]]:
    """Norms of the same layer that could have been taken for the one in front of the network."""
    mine = wiring.input_norm
    if mine is None or mine.gain is None:
        return
    for role in layer_tensors(checkpoint, layer).norms:
        if role == "ffn_in":
            continue
        try:
            norm = load_norm(checkpoint, layer, role, store.device, meter)
        except (CheckpointUnusable, InvalidValue):
            continue  # a norm that cannot be read is no candidate; an audit tells what is wrong with it
        if norm.width == mine.width:
            yield role, norm


def _ranked(explanation: Explanation, fit: Fit, declared: Declared) -> RankedHypothesis:
    first = explanation.ranked[0]
    against = explanation.trial.declared
    if fit.hypothesis == against.hypothesis:
        against = next((other for other in explanation.ranked if other is not fit), None)
    votes = None
    if against is not None and fit.at_floor and against.at_floor and (fit is not first or explanation.tied):
        votes = Votes.model_validate(explanation.trial.votes(fit, against)._asdict())
    return RankedHypothesis(
        hypothesis=in_words(fit.hypothesis, declared),
        departures=tuple(
            Departure(factor=factor, declared=was, replayed=now, words=words)
            for factor, was, now, words in departures_in_words(fit.hypothesis, declared)
        ),
        residual=fit.residual,
        floor=fit.floor,
        excess=fit.excess,
        at_floor=fit.at_floor,
        stages=tuple(
            StageFit(
                stage=cast("Stage", stage.stage),
                sources=cast("tuple[Stage, ...]", stage.sources),
                residual=stage.residual,
                floor=stage.floor,
                excess=stage.excess,
                at_floor=stage.excess <= AT_FLOOR,
            )
            for stage in fit.stages
        ),
        votes=votes,
    )


def _message(explanation: Explanation, declared: Declared) -> str:
    first = explanation.ranked[0]
    named = in_words(first.hypothesis, declared)
    match explanation.verdict:
        case "as-declared":
            return "the captured tensors are those of the block as declared, to the last rounding"
        case "explained":
            count = len(first.hypothesis.departures())
            return f"{'one mistake explains' if count == 1 else 'two mistakes explain'} the captured tensors: {named}"
        case "indistinguishable":
            told = "; or ".join(in_words(fit.hypothesis, declared) for fit in explanation.ranked)
            return f"these tensors cannot tell apart: {told}"
        case _:
            worst = max(first.stages, key=lambda stage: stage.excess)
            return (
                f"no hypothesis explains the captured tensors; the closest is '{named}', whose {worst.stage} is"
                f" {worst.residual:.2g} off where rounding does {worst.floor:.2g}"
            )


def _decider(decider: NumericsDecider, declared: Declared) -> Decider:
    one, other = (in_words(hypothesis, declared) for hypothesis in decider.between)
    says: Mapping[str, Callable[[], str]] = {
        "tensor": lambda: f"capture {decider.name} as well: there the two differ",
        "dtype": lambda: f"capture in {decider.name}: there the two differ",
        "token": lambda: (
            f"capture a token whose mean square of x is below {decider.needed:.2g}; the smallest here is"
            f" {decider.mean_square:.2g}, of token {decider.name}, and in the first layers they are smallest"
        ),
    }
    return Decider(
        between=(one, other),
        by=decider.by,
        name=decider.name,
        mean_square=decider.mean_square,
        needed=decider.needed,
        message=says[decider.by](),
    )
