"""Files that the command line reads and writes."""

import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
from glassblock.errors import InvalidValue
from glassblock.wire.framing import WireTensor, read_tensors

from glassblock_client.tensors import wire_from_array

JSON_LIMIT_BYTES = 16 * 1024 * 1024
"""Far above any config, far below what would fill memory."""


def read_json_object(path: Path, *, option: str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        InvalidValue: no such file, no JSON, a key that stands twice in one object, no object, or over 16 MiB.
    """
    if not path.exists():
        raise _refused(option, path, "does not exist")
    if path.is_dir():
        raise _refused(option, path, "is a folder")
    with path.open("rb") as file:
        text = file.read(JSON_LIMIT_BYTES + 1)
    if len(text) > JSON_LIMIT_BYTES:
        raise _refused(option, path, f"is larger than {JSON_LIMIT_BYTES:,} bytes, which no config is")
    try:
        value: object = json.loads(text, object_pairs_hook=_each_once)
        if b"\\u" in text:  # half a surrogate pair is read, and could not be written again
            json.dumps(value, ensure_ascii=False).encode()
    except _TwiceError as fault:
        raise _refused(option, path, f"has the key {json.dumps(fault.key[:80])} twice in one object") from None
    except (ValueError, RecursionError) as fault:
        raise _refused(option, path, f"is not JSON: {fault}") from fault
    if not isinstance(value, dict):
        raise _refused(option, path, "is not a JSON object")
    return cast("dict[str, Any]", value)


class _TwiceError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object whose keys are all different: of two alike, the parser alone would take the last without a word."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise _TwiceError(key)
        found[key] = value
    return found


def config_in(path: Path) -> Path:
    """The config itself, or the one in a folder: config.json, else params.json.

    Raises:
        InvalidValue: a folder without either.
    """
    if not path.is_dir():
        return path
    found = next((path / name for name in ("config.json", "params.json") if (path / name).is_file()), None)
    if found is None:
        raise _refused("--against", path, "is a folder without config.json and params.json")
    return found


def read_x(path: Path, *, option: str = "--input") -> WireTensor:
    """The tensor `x` of a .safetensors file, or the array of an .npy file. Never unpickles.

    Raises:
        InvalidValue: another kind of file, damaged, or without `x`.
    """
    if not path.exists():
        raise _refused(option, path, "does not exist")
    if path.is_dir():
        raise _refused(option, path, "is a folder")
    if path.suffix not in {".npy", ".safetensors"}:
        raise _refused(option, path, "is neither .npy nor .safetensors")
    if not path.stat().st_size:
        raise _refused(option, path, "is empty")
    try:
        if path.suffix == ".npy":
            return wire_from_array(np.load(path, mmap_mode="r", allow_pickle=False), field=option)
        _, tensors = read_tensors(np.memmap(path, np.uint8, mode="r").data)
    except (ValueError, EOFError) as fault:  # numpy: an empty file, a pickle, a damaged header
        raise _refused(option, path, f"cannot be read: {fault}") from fault
    except InvalidValue as fault:
        fault.message = f"{option}: {path}: {fault.message}"
        raise
    if "x" not in tensors:
        raise InvalidValue(
            f"{option}: {path} holds no tensor 'x'",
            field=option,
            known=tuple(sorted(tensors))[:20],
            hint="save the residual stream under the name x",
        )
    return tensors["x"]


def require_writable(path: Path, *, option: str = "--output") -> None:
    """Refuse before the work what could not be written after it.

    Raises:
        InvalidValue: no such folder, or no leave to write there.
    """
    if _is_stream(path):
        if not os.access(path, os.W_OK):
            raise _refused(option, path, "may not be written")
        return
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise _refused(option, path, "lies in a folder that is not there")
    if target.is_dir():
        raise _refused(option, path, "is a folder")
    # A file is replaced, which takes leave of its folder too.
    places = [target, target.parent] if target.exists() else [target.parent]
    if not all(os.access(place, os.W_OK) for place in places):
        raise _refused(option, path, "may not be written")


def write_whole(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file so that it is there whole or not at all; what stood there before stays until then.

    Raises:
        OSError: naming `path`, which the draft's own error would not.
    """
    try:
        if _is_stream(path):
            with path.open("wb") as stream:
                stream.writelines(chunks)
        else:
            _replace(Path(os.path.realpath(path)), chunks)
    except OSError as fault:
        fault.filename = str(path)
        raise


def _is_stream(path: Path) -> bool:
    """Whether `path` is written into, not replaced: a pipe, a device. What a link to a pipe names is no path."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _replace(target: Path, chunks: Iterable[bytes | memoryview]) -> None:
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        with draft.open("xb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _refused(option: str, path: Path, what: str) -> InvalidValue:
    return InvalidValue(f"{option}: {path} {what}", field=option)
