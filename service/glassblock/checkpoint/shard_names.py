"""What the numbers in the names of shards say: `model-00001-of-00003.safetensors`."""

import re
from collections.abc import Sequence

from glassblock.checkpoint.strict_json import shown

_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d{1,9})-of-(?P<count>\d{1,9})\.safetensors", re.ASCII)


def numbered(name: str) -> tuple[str, str] | None:
    """What a file's name says of the set it is part of: stem and count; None where it has no number."""
    match = _NUMBERED.fullmatch(name)
    return None if match is None else (match["stem"], match["count"])


def number_of(name: str) -> int:
    """The shard's own number; 0 where its name has none."""
    match = _NUMBERED.fullmatch(name)
    return 0 if match is None else int(match["number"])


def series_of(name: str) -> str:
    """The weight set that a file belongs to by its name: `model` for `model-00001-of-00002.safetensors`."""
    match = _NUMBERED.fullmatch(name)
    return match["stem"] if match else name.removesuffix(".safetensors")


def is_shard(name: str) -> bool:
    """Whether a file's name says that it is one of several."""
    match = _NUMBERED.fullmatch(name)
    return match is not None and int(match["count"]) > 1


def nowhere_in_words(links: Sequence[str]) -> str:
    """The half of a sentence that says which absent shards are links to nowhere; empty where none is."""
    if not links:
        return ""
    first = shown(min(links))
    one = f"; {first} is a link that leads nowhere"
    return one if len(links) == 1 else f"; {len(links)} of them are links that lead nowhere, such as {first}"
