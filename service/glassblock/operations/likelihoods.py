"""`likelihoods`: ln p of every token of a text, given those before it."""

import torch

from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.text_states import token_log_likelihoods
from glassblock.errors import InvalidValue
from glassblock.numerics.dtypes import name_of_dtype
from glassblock.numerics.watching import UNWATCHED, Watch
from glassblock.operations.reply import Reply, nested_numbers
from glassblock.operations.store import CheckpointStore
from glassblock.operations.tensors import COMPUTE_DTYPES
from glassblock.operations.texts import pieces_of, token_ids_of
from glassblock.wire.likelihoods import LikelihoodAnswer, LikelihoodRequest
from glassblock.wire.values import BytesRead


def likelihoods(
    store: CheckpointStore, request: LikelihoodRequest, *, watch: Watch = UNWATCHED
) -> Reply[LikelihoodAnswer]:
    """Log-likelihoods of the texts of a request.

    Raises:
        InvalidValue: There is no text, or it is one token long, or a token is outside the vocabulary.
        CheckpointUnusable: The checkpoint is damaged, does not fit its family, or a layer of it is not run here.
        ComputationCancelled: `watch` asked for it.
    """
    checkpoint = store.open(request.checkpoint, family=request.family, family_row=request.family_row)
    family = checkpoint.require_usable()
    ids = token_ids_of(store, checkpoint, request.token_ids, request.text)
    if ids is None:
        raise InvalidValue("there is no text", field="token_ids", hint="give `token_ids`, or `text`")
    if ids.shape[-1] < 2:
        raise InvalidValue(
            "the text has one token: nothing stands before it", field="token_ids", hint="give two tokens at least"
        )
    meter = ReadMeter()
    dtype = COMPUTE_DTYPES[request.dtype] if request.dtype else None
    with torch.no_grad():
        found = token_log_likelihoods(
            checkpoint,
            ids,
            store.device,
            meter,
            dtype=dtype,
            load=lambda layer: store.layer(request.checkpoint, checkpoint, layer, meter),
            watch=watch,
        )
    pieces, said = pieces_of(store, checkpoint, ids)
    return Reply(
        LikelihoodAnswer(
            checkpoint=request.checkpoint,
            family=family.name,
            verified=family.verified,
            device=str(store.device),
            compute_dtype=name_of_dtype(dtype or found.dtype),
            token_ids=nested_numbers(ids),
            pieces=pieces,
            log_likelihoods=nested_numbers(found),
            mean=float(found.double().mean()),
            read=BytesRead(bytes=meter.bytes, tensors=meter.tensors),
            notes=(*checkpoint.notes, *said),
        )
    )
