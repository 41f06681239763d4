"""What an answer follows from, as one digest: version of the service, operation, message, tensors, files.

Two requests of one digest have one answer, up to the order of sums; so it may be shared and kept.
"""

import hashlib
from collections.abc import Mapping

import torch

import glassblock
from glassblock.checkpoint.opened import Checkpoint
from glassblock.operations.store import CheckpointStore
from glassblock.operations.texts import TOKENIZER
from glassblock.wire.framing import WireTensor
from glassblock.wire.values import Request


def content_key(
    store: CheckpointStore, operation: str, message: Request, tensors: Mapping[str, WireTensor], *, form: str
) -> str | None:
    """The digest; None where the answer follows from what no file holds any more.

    Args:
        store: where the checkpoint lies that the message names.
        operation: its name.
        message: what is asked.
        tensors: what was posted beside it.
        form: how the answer is sent.

    Raises:
        GlassblockError: there is no such checkpoint, or it cannot be asked so.
    """
    name = getattr(message, "checkpoint", None)
    stamp = "" if name is None else _stamp(store, name, message)
    if stamp is None:
        return None
    head = (glassblock.__version__, torch.__version__, store.device, operation, form, stamp, message.model_dump_json())
    parts: list[bytes | memoryview] = [str(part).encode() for part in head]
    for tensor_name, tensor in sorted(tensors.items()):
        parts += [f"{tensor_name} {tensor.dtype} {tensor.shape}".encode(), tensor.data]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(memoryview(part).nbytes.to_bytes(8, "little"))  # so that no two lists of parts read alike
        digest.update(part)
    return digest.hexdigest()


def _stamp(store: CheckpointStore, name: str, message: Request) -> str | None:
    if store.remarks(name):
        return None
    how = {field: getattr(message, field, None) for field in ("family", "family_row", "tower")}
    checkpoint = store.open(name, **how)
    files = [repr(container.identity) for container in checkpoint.containers.values()]
    config = None if checkpoint.config is None else dict(checkpoint.config.values)
    texts = [_tokenizer(checkpoint)] if getattr(message, "text", None) is not None else []
    return repr((checkpoint.path, files, config, texts))


def _tokenizer(checkpoint: Checkpoint) -> str:
    directory = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    try:
        status = (directory / TOKENIZER).stat()
    except OSError:
        return "none"
    return repr((status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns))
