"""What an answer follows from: version of the service, operation, message, tensors, files.

Two requests of one content have one answer, up to the order of sums; so it may be shared and kept. A fast digest of the
posted tensors, or of the body that they came in, finds who asks the same; that it is the same is decided by the bytes
themselves, or by a SHA-256 of them where they have gone. So nobody is handed the answer of tensors that were made to
have the digest of his own.
"""

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
import torch
import xxhash

import glassblock
from glassblock.checkpoint.opened import Checkpoint
from glassblock.operations.store import CheckpointStore
from glassblock.operations.texts import TOKENIZER
from glassblock.wire.framing import WireTensor
from glassblock.wire.likelihoods import LikelihoodRequest
from glassblock.wire.values import Request


class Content:
    """A key for answers: equal to another whose every byte is equal.

    Args:
        asked: everything but the tensors, as text.
        tensors: what was posted beside it.
        posted: a fast digest of the body that holds the tensors, where one is there already.

    Attributes:
        form: SHA-256 of everything but the tensors' bytes: of two that share it, one costs what the other does.
        name: 64 hexadecimal digits by which it is found. That of another content only by accident or by intent.
    """

    def __init__(self, asked: str, tensors: Mapping[str, WireTensor], *, posted: bytes = b"") -> None:
        self._head = "\n".join([asked, *(f"{name} {t.dtype} {t.shape}" for name, t in sorted(tensors.items()))])
        self._data = tuple(tensor.data.cast("B") for _, tensor in sorted(tensors.items()))
        self.form = _sha256([self._head.encode()])
        digests = [posted] if posted else [xxhash.xxh3_128(data).digest() for data in self._data]
        self.name = _sha256([self.form, *digests]).hex()

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Content) or (self.name, self._head) != (other.name, other._head):
            return False
        return all(mine is its or _equal(mine, its) for mine, its in zip(self._data, other._data, strict=True))

    def proof(self) -> bytes:
        """The SHA-256 of every byte: what is compared where the bytes of the other have gone."""
        return _sha256([self._head.encode(), *self._data])


def content_of(
    store: CheckpointStore,
    operation: str,
    message: Request,
    tensors: Mapping[str, WireTensor],
    *,
    form: str,
    posted: bytes = b"",
) -> Content | None:
    """The content; None where the answer follows from what no file holds any more.

    Args:
        store: where the checkpoint lies that the message names.
        operation: its name.
        message: what is asked.
        tensors: what was posted beside it.
        form: how the answer is sent.
        posted: see `Content`.

    Raises:
        GlassblockError: there is no such checkpoint, or it cannot be asked so.
    """
    name = getattr(message, "checkpoint", None)
    stamp = "" if name is None else _stamp(store, name, message)
    if stamp is None:
        return None
    asked = (glassblock.__version__, torch.__version__, store.device, operation, form, stamp, message.model_dump_json())
    return Content(repr([str(part) for part in asked]), tensors, posted=posted)


def _sha256(parts: Iterable[bytes | memoryview]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(memoryview(part).nbytes.to_bytes(8, "little"))  # so that no two lists of parts read alike
        digest.update(part)
    return digest.digest()


def _equal(one: memoryview, other: memoryview) -> bool:
    """As `==` of the two, which takes thirty times as long."""
    return np.array_equal(np.asarray(one), np.asarray(other))


def _stamp(store: CheckpointStore, name: str, message: Request) -> str | None:
    if store.remarks(name):
        return None
    how = {field: getattr(message, field, None) for field in ("family", "family_row", "tower")}
    checkpoint = store.open(name, **how)
    files = [repr(container.identity) for container in checkpoint.containers.values()]
    config = None if checkpoint.config is None else dict(checkpoint.config.values)
    worded = getattr(message, "text", None) is not None or isinstance(message, LikelihoodRequest)
    texts = [_tokenizer(checkpoint)] if worded else []  # of likelihoods the pieces of text, whatever is asked in
    return repr((checkpoint.path, files, config, texts))


def _tokenizer(checkpoint: Checkpoint) -> str:
    directory = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    try:
        status = (directory / TOKENIZER).stat()
    except OSError:
        return "none"
    return repr((status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns))
