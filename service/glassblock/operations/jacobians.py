"""`jacobians`: norms of Jacobians per layer and token, each with how it was had."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from glassblock.checkpoint.layers import embedding_rows, layer_tensors, sample_embedding_rows
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import InvalidValue, TooLarge
from glassblock.numerics.block import residual_stream, run_block
from glassblock.numerics.norms import check_norm_defined
from glassblock.numerics.watching import UNWATCHED, Watch
from glassblock.numerics.wiring import Placement, Wiring
from glassblock.operations.coupled_jacobians import COUPLED_PARTS, coupled_layer, loader_of
from glassblock.operations.inputs import required, wired_eps
from glassblock.operations.jacobian_depth import depth_of, refuse_chain
from glassblock.operations.layer_jacobians import LayerInput, LayerOutcome, block_layer, norm_layer
from glassblock.operations.overrides import rewired
from glassblock.operations.reply import Reply
from glassblock.operations.store import CheckpointStore, LoadedBlock
from glassblock.operations.tensors import posted_tensor, require_last_axis
from glassblock.wire.framing import WireTensor
from glassblock.wire.jacobians import JacobiansAnswer, JacobiansRequest, LayerJacobians
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
    _refuse_combinations(request)
    checkpoint = store.open(request.checkpoint)
    family = checkpoint.require_usable()
    layers = request.layers
    for layer in layers:  # a layer that is not there is told before the first is worked on
        layer_tensors(checkpoint, layer)
    meter = ReadMeter()
    entered = _input(store, checkpoint, request, tensors, meter)
    placements = _placements(request)
    told = entered.x[..., 0].numel() * len(layers) * max(len(placements), 1)
    if told > MAX_TOKENS:
        raise TooLarge(
            f"{told:,} tokens over all layers and placements; at most {MAX_TOKENS:,} are told at once",
            field="layers",
            hint="ask for fewer tokens, or layer by layer",
        )
    steps = _Steps(watch, len(layers) + request.depth)
    outcomes: list[LayerJacobians] = []
    vectors: dict[str, Tensor] = {}
    notes: list[str] = []
    for layer in layers:
        for found, made, noted in _layer(_Asked(store, checkpoint, request, entered, placements, meter, steps), layer):
            outcomes.append(found)
            vectors |= {f"layers.{layer}.{found.placement}.{name}": tensor for name, tensor in made.items()}
            notes += [note for note in noted if note not in notes]
        steps.next()
    depth = None
    if request.depth:
        chain = [store.block(request.checkpoint, checkpoint, layer, meter) for layer in layers]
        placement = placements[0] if placements else None
        depth = depth_of(chain, layers, entered.x, request, placement, watch=steps.watch("depth"))
    answer = JacobiansAnswer(
        checkpoint=request.checkpoint,
        part=request.part,
        family=family.name,
        device=str(store.device),
        width=entered.x.shape[-1],
        norms=request.norms,
        token_ids=entered.token_ids,
        layers=tuple(outcomes),
        depth=depth,
        read=BytesRead(bytes=meter.bytes, tensors=meter.tensors),
        notes=(*notes, *_notes(request, entered)),
    )
    return Reply(answer, vectors, nest_under="tensors")


class _Entered(NamedTuple):
    """What enters every layer, `[..., d]` in float32 at least, and the tokens its rows stand for."""

    x: Tensor
    token_ids: tuple[int, ...] | None


def _refuse_combinations(request: JacobiansRequest) -> None:
    if request.part in COUPLED_PARTS:
        loader_of(request.part)
        if request.placement is not None:
            raise InvalidValue(f"the part {request.part!r} runs as the model wires it", field="placement")
    elif request.input_positions is not None or request.output_positions is not None:
        raise InvalidValue(
            f"in the part {request.part!r} no token reaches another; there are no positions to choose",
            field="input_positions",
            hint="leave the positions out",
        )
    if request.vectors and ("spectral" not in request.norms or request.part == "norm"):
        raise InvalidValue(
            "singular vectors come with the spectral norm of a network's part", field="vectors", hint="ask for both"
        )
    if len(set(request.layers)) != len(request.layers):
        raise InvalidValue("a layer is asked for twice", field="layers", hint="name each layer once")
    if request.depth:
        refuse_chain(request)


def _input(
    store: CheckpointStore,
    checkpoint: Checkpoint,
    request: JacobiansRequest,
    tensors: Mapping[str, WireTensor],
    meter: ReadMeter,
) -> _Entered:
    posted = posted_tensor("x", request.x, tensors, device=store.device, nested_dtype=torch.float32)
    given = [
        name
        for name, value in (("x", posted), ("token_ids", request.token_ids), ("sample", request.sample))
        if value is not None
    ]
    if len(given) > 1:
        raise InvalidValue(f"{' and '.join(given)} are both given", field=given[-1], hint="give one of them")
    if request.sample is not None:
        rows = sample_embedding_rows(checkpoint, request.sample.rows, request.sample.seed, store.device, meter)
    elif request.token_ids is not None:
        rows = embedding_rows(checkpoint, request.token_ids, store.device, meter)
    else:
        x = required(posted)
        return _Entered(x.to(torch.promote_types(x.dtype, torch.float32)), None)
    return _Entered(rows.x.to(torch.promote_types(rows.x.dtype, torch.float32)), rows.token_ids)


class _Asked(NamedTuple):
    """What is asked of every layer."""

    store: CheckpointStore
    checkpoint: Checkpoint
    request: JacobiansRequest
    entered: _Entered
    placements: Sequence[Placement]
    meter: ReadMeter
    steps: "_Steps"


def _layer(asked: _Asked, layer: int) -> list[tuple[LayerJacobians, dict[str, Tensor], list[str]]]:
    """One layer in every placement asked for; how it stands where none is."""
    store, checkpoint, request, entered, placements, meter, steps = asked
    block = store.block(request.checkpoint, checkpoint, layer, meter)
    width = block.feed_forward.model_width
    require_last_axis("x", entered.x, width, f"d_model of {request.checkpoint}")
    x = entered.x.reshape(-1, width)
    found: list[tuple[LayerJacobians, dict[str, Tensor], list[str]]] = []
    for number, placement in enumerate(placements or (block.wiring.placement,)):
        wiring, assumed = rewired(block.wiring, placement)
        watch = steps.watch(f"layer {layer}", number, max(len(placements), 1))
        if request.part in COUPLED_PARTS:
            outcome = coupled_layer(store, checkpoint, request, x, layer=layer, meter=meter, watch=watch)
        else:
            check_defined(x, block, wiring, request)
            given = LayerInput(x, block.feed_forward, wiring, request, watch)
            outcome = norm_layer(given) if request.part == "norm" else block_layer(given)
        eps = wired_eps(checkpoint, wiring, overridden=False)
        found.append((_told(layer, wiring, outcome, eps), outcome.vectors, assumed))
    return found


def check_defined(x: Tensor, block: LoadedBlock, wiring: Wiring, request: JacobiansRequest) -> None:
    """Refuse rows on which a norm divides by zero.

    Raises:
        InvalidValue: Naming the row.
    """
    if wiring.input_norm is not None:
        check_norm_defined(x, wiring.input_norm, field="x")
    if request.part == "norm":
        for norm in (wiring.residual_norm, wiring.output_norm):
            if norm is not None and wiring.input_norm is None:
                check_norm_defined(x, norm, field="x")
        return
    if request.part == "ffn":
        return
    if wiring.residual_norm is not None and request.part == "block" and wiring.residual_norm.eps == 0:
        check_norm_defined(residual_stream(x, block.feed_forward, wiring), wiring.residual_norm, field="x")
    if wiring.output_norm is not None and wiring.output_norm.eps == 0:
        down = run_block(x, block.feed_forward, wiring, until="down").down
        check_norm_defined(required(down), wiring.output_norm, field="x")


def _told(layer: int, wiring: Wiring, outcome: LayerOutcome, eps: Mapping[str, Sourced]) -> LayerJacobians:
    return LayerJacobians.model_validate(
        {"layer": layer, "placement": wiring.placement.value, "eps": eps, **outcome.fields}
    )


def _placements(request: JacobiansRequest) -> tuple[Placement, ...]:
    if request.placement is None:
        return ()
    names = (request.placement,) if isinstance(request.placement, str) else request.placement
    if not names or len(set(names)) != len(names):
        raise InvalidValue("placements are missing or named twice", field="placement", hint="name each once")
    return tuple(Placement(name) for name in names)


def _notes(request: JacobiansRequest, entered: _Entered) -> list[str]:
    if len(request.layers) < 2 or request.part == "norm":
        return []
    if entered.token_ids is None:
        return ["x: every layer was given the same rows"]
    return ["x: every layer was given the same embedding rows, which is what enters the first one alone"]


class _Steps:
    """One progress over layers and what is done within each, in thousandths; it never goes back."""

    def __init__(self, watch: Watch, steps: int) -> None:
        self._watch, self._steps, self._done, self._reached = watch, steps, 0, 0

    def next(self) -> None:
        self._done += 1

    def watch(self, what: str, part: int = 0, parts: int = 1) -> Watch:
        def progress(done: int, total: int, message: str) -> None:
            within = (part + done / max(total, 1)) / parts
            self._reached = max(self._reached, int(1000 * (self._done + within)))
            self._watch.progress(self._reached, 1000 * self._steps, f"{what}: {message}")

        return Watch(progress, self._watch.cancelled)
