"""`blocks/explain`: which mistake explains tensors captured elsewhere."""

from collections.abc import Mapping
from typing import cast

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
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import InvalidValue
from glassblock.numerics.deciders import Decider as NumericsDecider
from glassblock.numerics.deciders import deciders
from glassblock.numerics.dtypes import name_of_dtype
from glassblock.numerics.explanation import Explanation, explain
from glassblock.numerics.nearness import AT_FLOOR
from glassblock.numerics.trial import Fit
from glassblock.numerics.watching import Watch
from glassblock.operations.reply import Reply
from glassblock.operations.store import CheckpointStore
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


def explain_block(
    store: CheckpointStore, request: ExplainRequest, tensors: Mapping[str, WireTensor], *, watch: Watch
) -> Reply[ExplainAnswer]:
    """Replay a block under every hypothesis, and name the one that made the captured tensors.

    Raises:
        InvalidValue: the layer, or a captured tensor, cannot be used.
        CheckpointUnusable: the checkpoint is damaged, or does not fit its family.
        ComputationCancelled: as the watch says.
    """
    checkpoint = store.serving(
        request.checkpoint, family=request.family, family_row=request.family_row, tower=request.tower
    )
    family = checkpoint.require_usable()
    captures = captured_stages(tensors, request.layer, device=store.device)
    meter = ReadMeter()
    block = store.block(request.checkpoint, checkpoint, request.layer, meter)
    alternatives = alternatives_of(checkpoint, request.layer, block.wiring, store.device, meter)
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
        capture_dtype=name_of_dtype(explanation.captures.dtype),
        tokens=explanation.captures.given,
        replayed_tokens=len(explanation.captures.tokens),
        captured=cast("tuple[Stage, ...]", tuple(explanation.captures.stages)),
        verdict=explanation.verdict,
        message=explanation_in_words(explanation, declared),
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


def _decider(decider: NumericsDecider, declared: Declared) -> Decider:
    one, other = (in_words(hypothesis, declared) for hypothesis in decider.between)
    return Decider(
        between=(one, other),
        by=decider.by,
        name=decider.name,
        mean_square=decider.mean_square,
        needed=decider.needed,
        message=decider_in_words(decider),
    )
