"""What a file that is no safetensors file holds instead, told from its first bytes."""

from typing import NamedTuple


class Foreign(NamedTuple):
    """What was recognised, in words, and what to do about it."""

    words: str
    hint: str


HEAD_BYTES = 512
"""Bytes from a file's start that suffice to recognise it."""

_PICKLE = Foreign(
    "a Python pickle", "It is never unpickled here. Convert it with safetensors in a place where you trust it."
)
_SIGNATURES: tuple[tuple[bytes, Foreign], ...] = (
    (
        b"version https://git-lfs",
        Foreign("a git-lfs pointer instead of the data", "Fetch the data: git lfs pull."),
    ),
    (
        b"PK\x03\x04",
        Foreign(
            "a zip archive, as torch.save writes it around a pickle",
            "It is never unpickled here. Convert it with safetensors in a place where you trust it.",
        ),
    ),
    *((bytes((0x80, protocol)), _PICKLE) for protocol in range(2, 6)),
    (b"GGUF", Foreign("a GGUF file", "Convert it to safetensors, or give it back its name.")),
    (b"\x89HDF\r\n\x1a\n", Foreign("an HDF5 file", "Convert it to safetensors.")),
    (b"\x93NUMPY", Foreign("a NumPy array file", "Convert it to safetensors.")),
    (b"\x1f\x8b", Foreign("gzip-compressed data", "Unpack it.")),
    (b"\x28\xb5\x2f\xfd", Foreign("zstd-compressed data", "Unpack it.")),
    (b"\xfd7zXZ\x00", Foreign("xz-compressed data", "Unpack it.")),
)
_PAGES = (b"<!doctype html", b"<html", b"<?xml", b"<error")


def foreign_content(head: bytes) -> Foreign | None:
    """What a file that begins with `head` is, if it is something known and not safetensors.

    Only for files whose first nine bytes cannot begin a safetensors file: a header of 640 bytes starts like a
    pickle.
    """
    for signature, foreign in _SIGNATURES:
        if head.startswith(signature):
            return foreign
    if head.lstrip().lower().startswith(_PAGES):
        return Foreign("a web page", "The download gave an error or a login page. Download the file again.")
    if head and not head.strip(b"\0"):
        return Foreign(
            "nothing but zeros where the header should be",
            "The file was preallocated and never filled. Download it again.",
        )
    if head and all(byte in b"\t\r\n" or 32 <= byte < 127 for byte in head):
        return Foreign(
            f"plain text that begins {head[:40].decode('ascii')!r}",
            "It may be an error message that was saved under this name. Download the file again.",
        )
    return None
