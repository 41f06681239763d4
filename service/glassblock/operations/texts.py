"""Texts as token ids: as a request gives them, or tokenised with the checkpoint's own tokenizer.json."""

import hashlib
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from glassblock.checkpoint.files import leads_nowhere, read_whole
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.roots import Roots, checked_file
from glassblock.checkpoint.text_states import entering_states, layer_count
from glassblock.errors import GlassblockError, InvalidValue, TooLarge
from glassblock.numerics.layer import run_layer
from glassblock.numerics.watching import UNWATCHED, Watch
from glassblock.operations.store import CheckpointStore

TOKENIZER = "tokenizer.json"
MAX_TOKENIZER_BYTES = 64 << 20
"""Of one file, and of the files of all tokenizers that are kept; in memory one takes about 2.6 times its file."""

_PANIC = "PanicException"
MAX_TOKENS = 32_768
"""Of all texts of one request."""

Ids = Sequence[int] | Sequence[Sequence[int]]


class _Kept(NamedTuple):
    file_bytes: int
    tokenizer: Any


_kept: OrderedDict[bytes, _Kept] = OrderedDict()
"""Tokenizers by the SHA-256 of their files, the least recently used first."""

_keeping = Lock()


def token_ids_of(
    store: CheckpointStore, checkpoint: Checkpoint, token_ids: Ids | None, text: str | None
) -> Tensor | None:
    """The texts of a request, `[tokens]` or `[texts, tokens]`; None where it gives none.

    Raises:
        InvalidValue: Both are given, a text is empty, several differ in length, or there is no way to tokenise.
        TooLarge: More tokens than one request may have.
    """
    if token_ids is not None and text is not None:
        raise InvalidValue("token_ids and text are both given", field="text", hint="give one of them")
    if text is not None:
        ids: Ids = _tokenised(checkpoint, text, store.roots)
        field = "text"
    elif token_ids is not None:
        ids, field = token_ids, "token_ids"
    else:
        return None
    rows = [cast("Sequence[int]", row) for row in ids] if ids and not isinstance(ids[0], int) else None
    if not ids or (rows is not None and not rows[0]):
        raise InvalidValue(f"{field} holds no token", field=field, hint="give one token at least")
    if rows is not None and len({len(row) for row in rows}) > 1:
        raise InvalidValue(
            f"{field} holds texts of {min(map(len, rows))} to {max(map(len, rows))} tokens",
            field=field,
            hint="give texts of one length, or one after the other",
        )
    count = len(ids) if rows is None else len(rows) * len(rows[0])
    if count > MAX_TOKENS:
        raise TooLarge(f"{count:,} tokens; at most {MAX_TOKENS:,} at once", field=field, hint="give a shorter text")
    if any(abs(one) >= 2**63 for row in (rows or [cast("Sequence[int]", ids)]) for one in row):
        raise InvalidValue(f"{field} holds a number that is no token", field=field, hint="give ids of the vocabulary")
    return torch.tensor(ids, dtype=torch.int64, device=store.device)


def states_of(
    store: CheckpointStore,
    name: str,
    checkpoint: Checkpoint,
    token_ids: Tensor,
    *,
    layer: int,
    meter: ReadMeter,
    dtype: torch.dtype | None = None,
    reached: tuple[int, Tensor] | None = None,
    watch: Watch = UNWATCHED,
) -> Tensor:
    """What enters `layer` of these texts, begun where they were `reached`; layers that are held are not read again.

    Raises:
        As `entering_states`.
    """
    return entering_states(
        checkpoint,
        token_ids,
        layer,
        store.device,
        meter,
        dtype=dtype,
        load=lambda below: store.layer(name, checkpoint, below, meter),
        reached=reached,
        watch=watch,
    )


def norm_reads(
    store: CheckpointStore,
    name: str,
    checkpoint: Checkpoint,
    token_ids: Tensor,
    *,
    layer: int | None,
    role: str,
    meter: ReadMeter,
) -> Tensor:
    """What the norm in `role` of a layer reads of these texts; `final` reads what leaves the last layer.

    Raises:
        InvalidValue: A token is outside the vocabulary, or the norm is one of heads.
        CheckpointUnusable: A layer up to this one is not run here.
    """
    entered = layer_count(checkpoint) if layer is None else layer
    states = states_of(store, name, checkpoint, token_ids, layer=entered, meter=meter)
    if layer is None or role == "attn_in":
        return states
    positions = torch.arange(states.shape[-2], device=states.device)
    stages = run_layer(states, store.layer(name, checkpoint, layer, meter), positions=positions)
    read = {
        "attn_out": stages.attention.projected,
        "ffn_in": stages.feed_forward.x,
        "ffn_out": stages.feed_forward.down,
    }.get(role)
    if read is None:
        raise InvalidValue(f"what the norm {role!r} reads is no state of a token", field="norm", known=_READ_ROLES)
    return read


Pieces = tuple[str, ...] | tuple[tuple[str, ...], ...]


def pieces_of(
    store: CheckpointStore, checkpoint: Checkpoint, token_ids: Tensor
) -> tuple[Pieces | None, tuple[str, ...]]:
    """The piece of text that each token is, as the ids are nested; None where the checkpoint has no tokenizer.

    The second is what must be said: that its tokenizer cannot be read.
    """
    if find_spec("tokenizers") is None:
        return None, ()
    try:
        if not _tokenizer_file(checkpoint, store.roots).is_file():
            return None, ()
        tokenizer = _tokenizer_of(checkpoint, store.roots)
    except GlassblockError as fault:  # the ids are told all the same
        return None, (f"the tokens' text is not told: {fault.message}",)
    rows = cast("list[list[int]]", token_ids.reshape(-1, token_ids.shape[-1]).tolist())
    try:
        with _refused_by_the_library("cannot tell the tokens' text"):
            pieces = tuple(tuple(_pieces(tokenizer, row)) for row in rows)
    except InvalidValue as fault:
        return None, (f"the tokens' text is not told: {fault.message}",)
    return (pieces if token_ids.ndim > 1 else pieces[0]), ()


def _pieces(tokenizer: Any, ids: Sequence[int]) -> Iterator[str]:
    """Each after the one before it, so that its leading space is kept; part of a character as the vocabulary has it."""
    before, start = "", list[int]()
    for one in ids:
        both, alone = _decoded(tokenizer, [*start, one]), _decoded(tokenizer, [one])
        piece = both[len(before) :] if both.startswith(before) else alone
        if not piece or "\N{REPLACEMENT CHARACTER}" in piece:
            piece = cast("str | None", tokenizer.id_to_token(one)) or ""
        yield piece
        before, start = alone, [one]


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return cast("str", tokenizer.decode(ids, skip_special_tokens=False))


_READ_ROLES = ("attn_in", "attn_out", "ffn_in", "ffn_out", "final")


def _tokenised(checkpoint: Checkpoint, text: str, roots: Roots) -> list[int]:
    if find_spec("tokenizers") is None:
        raise InvalidValue(
            "the service cannot tokenise: the library tokenizers is not installed there",
            field="text",
            hint="`pip install tokenizers` where the service runs, or give `token_ids`",
        )
    if not _tokenizer_file(checkpoint, roots).is_file():
        raise InvalidValue(
            f"the checkpoint has no {TOKENIZER}",
            field="text",
            hint=f"put the model's {TOKENIZER} beside its weights, or give `token_ids`",
        )
    tokenizer = _tokenizer_of(checkpoint, roots)
    with _refused_by_the_library("cannot tokenise the text"):
        ids = cast("list[int]", tokenizer.encode(text).ids)
    if not ids:
        raise InvalidValue("the text has no token", field="text", hint="give a longer text")
    return ids


def _tokenizer_file(checkpoint: Checkpoint, roots: Roots) -> Path:
    """Where it lies, or would."""
    directory = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    real = checked_file(directory, TOKENIZER, roots)
    return directory / TOKENIZER if leads_nowhere(directory / TOKENIZER) else real


def _tokenizer_of(checkpoint: Checkpoint, roots: Roots) -> Any:
    real = _tokenizer_file(checkpoint, roots)
    return _tokenizer(read_whole(real, name=TOKENIZER, limit=MAX_TOKENIZER_BYTES))


def _tokenizer(raw: bytes) -> Any:
    from tokenizers import Tokenizer  # noqa: PLC0415

    digest = hashlib.sha256(raw).digest()
    kept = _kept.get(digest)
    if kept is None:
        with _refused_by_the_library("cannot be read"):
            kept = _Kept(len(raw), Tokenizer.from_buffer(raw))
    with _keeping:
        _kept.pop(digest, None)
        _kept[digest] = kept
        while len(_kept) > 1 and sum(one.file_bytes for one in _kept.values()) > MAX_TOKENIZER_BYTES:
            _kept.popitem(last=False)
    return kept.tokenizer


@contextmanager
def _refused_by_the_library(what: str) -> Generator[None]:
    """What the library raises over a file that it does not understand, as an error of ours."""
    try:
        yield
    except BaseException as error:
        # It raises a bare Exception; and where it gives up, a panic, which its binding makes no Exception of.
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise InvalidValue(
            f"{TOKENIZER} {what}: {error}", field="text", file=TOKENIZER, hint="download it again"
        ) from error
