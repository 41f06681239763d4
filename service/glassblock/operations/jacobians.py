"""`jacobians`: norms of Jacobians per layer and token, each with how it was had."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from glassblock.checkpoint.layer_map import layer_tensors
from glassblock.checkpoint.layer_parts import Expert
from glassblock.checkpoint.layers import load_wiring
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import TooLarge
from glassblock.numerics.block import residual_stream, run_block
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.layer_grams import LayerGrams
from glassblock.numerics.norms import check_norm_defined
from glassblock.numerics.rewiring import rewired
from glassblock.numerics.watching import UNWATCHED, Watch
from glassblock.numerics.wiring import Placement, Wiring
from glassblock.operations.coupled_jacobians import COUPLED_PARTS, LOADERS, coupled_layer, one_sequence
from glassblock.operations.inputs import required, wired_eps
from glassblock.operations.jacobian_depth import depth_of, depth_of_layers
from glassblock.operations.jacobian_inputs import (
    EnteringStates,
    placements_of,
    refuse_combinations,
    text_states,
    what_enters,
    with_every_layer,
    with_text_as_ids,
)
from glassblock.operations.jacobian_networks import NetworkAt, layer_networks, model_width
from glassblock.operations.layer_jacobians import (
    LayerInput,
    LayerOutcome,
    block_layer,
    norm_layer,
    norm_of,
)
from glassblock.operations.reply import Reply
from glassblock.operations.store import CheckpointStore
from glassblock.operations.tensors import require_last_axis
from glassblock.wire.framing import WireTensor
from glassblock.wire.jacobians import Depth, JacobiansAnswer, JacobiansRequest, LayerJacobians
from glassblock.wire.values import BytesRead, Sourced

MAX_TOKENS = 200_000
"""Tokens told in one answer, over all layers and placements: some hundred bytes each."""


def jacobians(
    store: CheckpointStore,
    request: JacobiansRequest,
    tensors: Mapping[str, WireTensor],
    *,
    watch: Watch = UNWATCHED,
) -> Reply[JacobiansAnswer]:
    """The norms of the Jacobian of one part of each layer asked for.

    Args:
        store: Where checkpoints are.
        request: What is asked.
        tensors: `x`, where it was posted as a tensor.
        watch: Told and asked between pieces of the work, many times within a layer.

    Raises:
        InvalidValue: A layer, x, a placement or a combination of fields cannot be used.
        CheckpointUnusable: The checkpoint is damaged, or does not fit its family.
        TooLarge: More tokens, or a larger chain, than one answer holds.
        ComputationCancelled: `watch` asked for it.
    """
    checkpoint = store.serving(
        request.checkpoint, family=request.family, family_row=request.family_row, tower=request.tower
    )
    request = with_every_layer(checkpoint, request)
    refuse_combinations(request)
    request = with_text_as_ids(store, checkpoint, request, tensors)
    family = checkpoint.require_usable()
    layers = request.layers
    for layer in layers:  # a layer that is not there is told before the first is worked on
        layer_tensors(checkpoint, layer)
    meter = ReadMeter()
    entered = what_enters(store, checkpoint, request, tensors, meter)
    placements = placements_of(request)
    _refuse_many(entered.x[..., 0].numel() * len(layers) * max(len(placements), 1))
    steps = _Steps(watch, len(layers) + request.depth)
    asked = _Asked(store, checkpoint, request, entered, placements, meter, steps)
    outcomes: list[LayerJacobians] = []
    vectors: dict[str, Tensor] = {}
    notes: list[str] = []
    for layer in layers:
        for found in _layer(asked, layer):
            outcomes.append(found.told)
            vectors |= {_vector_name(found.told, side): tensor for side, tensor in found.vectors.items()}
            notes += [note for note in found.notes if note not in notes]
        _refuse_many(sum(len(outcome.tokens) for outcome in outcomes))
        steps.next()
    depth = _depth(asked) if request.depth else None
    answer = JacobiansAnswer(
        checkpoint=request.checkpoint,
        part=request.part,
        family=family.name,
        verified=family.verified,
        device=str(store.device),
        width=entered.x.shape[-1],
        norms=request.norms,
        token_ids=entered.token_ids,
        states=None if entered.token_ids is None else text_states(request) or "embedding",
        layers=tuple(outcomes),
        depth=depth,
        read=BytesRead(bytes=meter.bytes, tensors=meter.tensors),
        notes=(*notes, *_notes(request, entered)),
    )
    return Reply(answer, vectors, nest_under="tensors")


def _refuse_many(told: int) -> None:
    if told > MAX_TOKENS:
        raise TooLarge(
            f"{told:,} tokens over all layers, placements and experts; at most {MAX_TOKENS:,} are told at once",
            field="layers",
            hint="ask for fewer tokens, or layer by layer",
        )


def _vector_name(told: LayerJacobians, side: str) -> str:
    expert = "" if told.expert is None else f"expert_{told.expert}."
    return f"layers.{told.layer}.{told.placement}.{expert}{side}"


class _Asked(NamedTuple):
    """What is asked of every layer."""

    store: CheckpointStore
    checkpoint: Checkpoint
    request: JacobiansRequest
    entered: EnteringStates
    placements: Sequence[Placement]
    meter: ReadMeter
    steps: "_Steps"


class _Found(NamedTuple):
    """One layer in one placement, or one network of it; its singular vectors, and what must be said."""

    told: LayerJacobians
    vectors: dict[str, Tensor]
    notes: list[str]


def _layer(asked: _Asked, layer: int) -> list[_Found]:
    """One layer in every placement asked for; how it stands where none is."""
    store, checkpoint, request, entered, placements, meter, steps = asked
    if request.part in COUPLED_PARTS:
        watch = steps.watch(f"layer {layer}")
        x = entered.layer(layer, steps.below(layer))
        told, vectors = coupled_layer(store, checkpoint, request, x, layer=layer, meter=meter, watch=watch)
        return [_Found(told, vectors, [])]
    if request.part == "norm":
        return _norms(asked, layer)
    networks = layer_networks(store, checkpoint, request, layer, meter)
    entering = entered.block(layer, steps.below(layer))
    require_last_axis("x", entering, networks.width, f"d_model of {request.checkpoint}")
    x = entering.reshape(-1, networks.width)
    found: list[_Found] = []
    for number, placement in enumerate(placements or (networks.wiring.placement,)):
        wiring, notes = rewired(networks.wiring, placement)
        notes = notes if networks.note is None else [*notes, networks.note]
        eps = wired_eps(checkpoint, wiring, overridden=False)
        watch = steps.watch(f"layer {layer}", number, max(len(placements), 1))
        for at in networks.at(x, wiring):
            check_defined(at.x, at.feed_forward, wiring, request)
            grams = partial(_kept_grams, asked, layer, at.expert)
            outcome = block_layer(LayerInput(at.x, at.feed_forward, wiring, request, watch, grams))
            found.append(_Found(_told(layer, wiring, outcome, eps, at), outcome.vectors, notes))
    return found


def _norms(asked: _Asked, layer: int) -> list[_Found]:
    """The norm of the branch alone; no network is read."""
    store, checkpoint, request, entered, placements, meter, steps = asked
    width = model_width(checkpoint, layer)
    entering = entered.block(layer, steps.below(layer))
    require_last_axis("x", entering, width, f"d_model of {request.checkpoint}")
    x = entering.reshape(-1, width)
    declared = load_wiring(checkpoint, layer, store.device, meter)
    found: list[_Found] = []
    for placement in placements or (declared.placement,):
        wiring, notes = rewired(declared, placement)
        check_norm_defined(x, norm_of(wiring), field="x")
        outcome = norm_layer(x, wiring, request)
        told = _told(layer, wiring, outcome, wired_eps(checkpoint, wiring, overridden=False))
        found.append(_Found(told, {}, notes))
    return found


def _kept_grams(asked: _Asked, layer: int, expert: Expert, what: str, form: Callable[[], LayerGrams]) -> LayerGrams:
    named = what if expert is None else f"expert {expert} {what}"
    return asked.store.grams(asked.request.checkpoint, asked.checkpoint, layer, named, form)


def check_defined(x: Tensor, feed_forward: FeedForward, wiring: Wiring, request: JacobiansRequest) -> None:
    """Refuse rows on which a norm divides by zero.

    Raises:
        InvalidValue: Naming the row.
    """
    if wiring.input_norm is not None:
        check_norm_defined(x, wiring.input_norm, field="x")
    if request.part == "ffn":
        return
    if wiring.residual_norm is not None and request.part == "block" and wiring.residual_norm.eps == 0:
        check_norm_defined(residual_stream(x, feed_forward, wiring), wiring.residual_norm, field="x")
    if wiring.output_norm is not None and wiring.output_norm.eps == 0:
        down = run_block(x, feed_forward, wiring, until="down").down
        check_norm_defined(required(down), wiring.output_norm, field="x")


def _depth(asked: _Asked) -> Depth:
    """The chain of the layers' blocks, or of the layers themselves."""
    store, checkpoint, request, entered, placements, meter, steps = asked
    watch = steps.watch("depth")
    if request.part == "block":
        blocks = [store.block(request.checkpoint, checkpoint, layer, meter) for layer in request.layers]
        x = entered.block(request.layers[0], Watch(cancelled=watch.cancelled))
        return depth_of(blocks, x, request, placements[0] if placements else None, watch=watch)
    parts = [LOADERS["layer"](store, request.checkpoint, checkpoint, layer, meter) for layer in request.layers]
    last = parts[-1]
    entering = entered.layer(request.layers[0], Watch(cancelled=watch.cancelled))
    x = one_sequence(entering, parts[0], name=request.checkpoint)
    dtype = reduce(torch.promote_types, (part.dtype for part in parts), x.dtype)
    held = sum(part.elements for part in parts) * dtype.itemsize
    functions = [part.run for part in parts]
    return depth_of_layers(functions, x.to(dtype), request, last.wirings[-1].placement, held_bytes=held, watch=watch)


def _told(
    layer: int, wiring: Wiring, outcome: LayerOutcome, eps: Mapping[str, Sourced], at: NetworkAt | None = None
) -> LayerJacobians:
    network = {} if at is None else {"expert": at.expert, "rows": at.rows, "weights": at.weights}
    return LayerJacobians.model_validate(
        {"layer": layer, "placement": wiring.placement.value, "eps": eps, **network, **outcome.fields}
    )


def _notes(request: JacobiansRequest, entered: EnteringStates) -> list[str]:
    sampled = request.part in {"attention", "layer"} and request.sample is not None
    notes = ["x: the sampled rows stand at the positions 0, 1, ... of a sequence, and are no text"] if sampled else []
    if len(request.layers) < 2 or request.part == "norm":
        return notes
    if text_states(request) == "reached":
        return notes
    return [*notes, _same_rows(request, entered)]


def _same_rows(request: JacobiansRequest, entered: EnteringStates) -> str:
    if entered.token_ids is None:
        return "x: every layer was given the same rows"
    told = "x: every layer was given the same embedding rows, which is what enters the first one alone"
    return told if request.token_ids is None else f"{told}; states 'reached' takes what the text is at each layer"


class _Steps:
    """One progress over layers and what is done within each, in thousandths; it never goes back."""

    def __init__(self, watch: Watch, steps: int) -> None:
        self._watch, self._steps, self._done, self._reached = watch, steps, 0, 0

    def next(self) -> None:
        self._done += 1

    def below(self, layer: int) -> Watch:
        """Of the layers that a text passes before this one."""

        def progress(done: int, total: int, message: str) -> None:
            del done, total
            self._watch.progress(self._reached, 1000 * self._steps, f"on the way to layer {layer}: {message}")

        return Watch(progress, self._watch.cancelled)

    def watch(self, what: str, part: int = 0, parts: int = 1) -> Watch:
        def progress(done: int, total: int, message: str) -> None:
            within = (part + done / max(total, 1)) / parts
            self._reached = max(self._reached, int(1000 * (self._done + within)))
            self._watch.progress(self._reached, 1000 * self._steps, f"{what}: {message}")

        return Watch(progress, self._watch.cancelled)
