"""What `jacobians` is asked: which fields go together, what enters each layer, and in which placements."""

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor

from glassblock.checkpoint.embedding_rows import embedding_rows, sample_embedding_rows
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import InvalidValue
from glassblock.numerics.watching import Watch
from glassblock.numerics.wiring import Placement
from glassblock.operations.coupled_jacobians import COUPLED_PARTS
from glassblock.operations.inputs import refuse_beside_text, required
from glassblock.operations.jacobian_depth import refuse_chain
from glassblock.operations.layer_jacobians import PARTS
from glassblock.operations.store import CheckpointStore
from glassblock.operations.tensors import posted_tensor
from glassblock.operations.text_ascents import TextAscent
from glassblock.operations.texts import token_ids_of
from glassblock.wire.framing import WireTensor
from glassblock.wire.jacobians import JacobiansRequest, TextStates


class EnteringStates(NamedTuple):
    """What enters a layer, and the tokens its rows stand for.

    Attributes:
        x: `[..., d]` in float32 at least: of every layer, but for a text whose own states are taken.
        token_ids: Of the rows.
        ascent: That text.
    """

    x: Tensor
    token_ids: tuple[int, ...] | None
    ascent: TextAscent | None = None

    def layer(self, layer: int, watch: Watch) -> Tensor:
        """`[..., d]`, what enters a layer."""
        return self.x if self.ascent is None else self.ascent.entering(layer, watch=watch)

    def block(self, layer: int, watch: Watch) -> Tensor:
        """`[..., d]`, what enters the feed-forward block of a layer."""
        return self.x if self.ascent is None else self.ascent.entering_block(layer, watch=watch)


def refuse_combinations(request: JacobiansRequest) -> None:
    """Refuse fields that do not go together.

    Raises:
        InvalidValue: Naming one of them.
    """
    if request.part in COUPLED_PARTS:
        if request.placement is not None:
            raise InvalidValue(f"the part {request.part!r} runs as the model wires it", field="placement")
    elif request.input_positions is not None or request.output_positions is not None:
        raise InvalidValue(
            f"in the part {request.part!r} no token reaches another; there are no positions to choose",
            field="input_positions",
            hint="leave the positions out",
        )
    if request.expert is not None and request.part not in PARTS:
        raise InvalidValue(
            f"an expert is a network, and the part is {request.part!r}",
            field="expert",
            known=tuple(PARTS),
            hint="leave it out, or ask for one of these parts",
        )
    if request.vectors and ("spectral" not in request.norms or request.part == "norm"):
        raise InvalidValue(
            "singular vectors come with the spectral norm of a network's part", field="vectors", hint="ask for both"
        )
    if request.states is not None and text_states(request) is None:
        raise InvalidValue(
            "states says what is taken of a text, and none is given",
            field="states",
            hint="give `token_ids` or `text`, or leave it out",
        )
    if request.states == "embedding" and request.part in COUPLED_PARTS:
        raise InvalidValue(
            f"the part {request.part!r} is entered by what a text has become",
            field="states",
            hint="leave it out, or post embedding rows as x",
        )
    if len(set(request.layers)) != len(request.layers):
        raise InvalidValue("a layer is asked for twice", field="layers", hint="name each layer once")
    if request.depth:
        refuse_chain(request)


def what_enters(
    store: CheckpointStore,
    checkpoint: Checkpoint,
    request: JacobiansRequest,
    tensors: Mapping[str, WireTensor],
    meter: ReadMeter,
) -> EnteringStates:
    """Posted or sampled rows, or those of a text.

    Raises:
        InvalidValue: None of them is given, or more than one.
    """
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
        if text_states(request) == "reached":
            ids = token_ids_of(store, checkpoint, request.token_ids, None)
            ascent = None if ids is None else TextAscent(store, request.checkpoint, checkpoint, ids, meter)
            return EnteringStates(rows.x, rows.token_ids, ascent)
    else:
        x = required(posted)
        return EnteringStates(x.to(torch.promote_types(x.dtype, torch.float32)), None)
    return EnteringStates(rows.x.to(torch.promote_types(rows.x.dtype, torch.float32)), rows.token_ids)


def text_states(request: JacobiansRequest) -> TextStates | None:
    """What x is of a text; None where none is given."""
    if request.text is None and request.token_ids is None:
        return None
    reached = request.text is not None or request.part in COUPLED_PARTS
    return request.states or ("reached" if reached else "embedding")


def with_every_layer(checkpoint: Checkpoint, request: JacobiansRequest) -> JacobiansRequest:
    """The request with every layer of the checkpoint, where it names none.

    Raises:
        CheckpointUnusable: Nothing says how many it has.
    """
    if request.layers:
        return request
    checkpoint.require_usable()
    return request.model_copy(update={"layers": checkpoint.layer_indices})


def with_text_as_ids(
    store: CheckpointStore, checkpoint: Checkpoint, request: JacobiansRequest, tensors: Mapping[str, WireTensor]
) -> JacobiansRequest:
    """The request with the text that it may have as token ids, and said what is taken of it.

    Raises:
        InvalidValue: Something else is given beside the text, or the text cannot be tokenised.
    """
    if request.text is None:
        return request
    refuse_beside_text(request, tensors)
    ids = token_ids_of(store, checkpoint, request.token_ids, request.text)
    listed = None if ids is None else tuple(cast("list[int]", ids.tolist()))
    return request.model_copy(update={"token_ids": listed, "text": None, "states": text_states(request)})


def placements_of(request: JacobiansRequest) -> tuple[Placement, ...]:
    """Those asked for; none where each layer stays as it is wired.

    Raises:
        InvalidValue: One is named twice, or none.
    """
    if request.placement is None:
        return ()
    names = (request.placement,) if isinstance(request.placement, str) else request.placement
    if not names or len(set(names)) != len(names):
        raise InvalidValue("placements are missing or named twice", field="placement", hint="name each once")
    return tuple(Placement(name) for name in names)
