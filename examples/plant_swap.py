"""Copy a checkpoint and exchange the gate and up tensors of some of its layers.

    python plant_swap.py tiny-llama /tmp/swapped --layers 2

The mistake a converter makes when it pairs the two projections the wrong way round: every shape,
dtype and byte count stays right, the copy loads everywhere, and it computes another function. Only
the names in the safetensors headers (and in the index of a sharded checkpoint) are exchanged; the
bytes of the tensors are copied as they are. Standard library only.
"""

import argparse
import json
import re
import shutil
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast

PROJECTION = re.compile(r"^(?:.*\.)?layers\.(?P<layer>\d+)\.mlp\.(?P<role>gate|up)_proj\.(?P<part>.+)$")
HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
ALIGNMENT = 8  # bytes; where the data of a safetensors file starts


def plant_swap(source: Path, target: Path, layers: Iterable[int]) -> dict[str, str]:
    """Copy the checkpoint directory `source` to `target` with gate and up exchanged in `layers`.

    Everything that belongs to a projection goes with it (weight, bias, quantisation scales), also
    when its gate and its up live in different shards. Nothing is written unless all layers can be swapped.

    Args:
        source: A directory with one or several `.safetensors` files.
        target: A directory that does not exist yet.
        layers: Layer numbers, from 0.

    Returns:
        The exchanged names, old to new.

    Raises:
        FileExistsError: `target` exists already.
        ValueError: A header that cannot be read, or a layer without a gate and an up tensor of one shape and dtype.
    """
    source, target = Path(source).resolve(), Path(target).resolve()
    if target.exists():
        raise FileExistsError(f"{target} exists already: name a new directory")
    if target.is_relative_to(source):
        raise ValueError(f"{target} lies inside {source}: name a directory elsewhere")
    shards = sorted(source.glob("*.safetensors"))
    if not shards:
        raise ValueError(f"{source} holds no .safetensors file")
    entries = {name: entry for shard in shards for name, entry in _header_of(shard).items() if name != "__metadata__"}
    renamed = _exchanged_names(entries, layers)

    def copy_renamed(original: str, copy: str) -> None:
        file = Path(original)
        if file.name.endswith(".safetensors") and file.parent == source:
            _copy_shard(file, Path(copy), renamed)
        elif file.name.endswith(".safetensors.index.json") and file.parent == source:
            _copy_index(file, Path(copy), renamed)
        else:
            shutil.copyfile(original, copy)

    shutil.copytree(source, target, copy_function=copy_renamed)
    return renamed


def _exchanged_names(entries: dict[str, Any], layers: Iterable[int]) -> dict[str, str]:
    """Old name to new name, for every tensor of the gate and up projections of `layers`."""
    found = [(name, match) for name in entries if (match := PROJECTION.match(name))]
    known = sorted({int(match["layer"]) for _, match in found})
    renamed: dict[str, str] = {}
    for layer in sorted(set(layers)):
        of_layer = [(name, match) for name, match in found if int(match["layer"]) == layer]
        if not of_layer:
            has = f"it has layers {', '.join(map(str, known))}" if known else "it has none in any layer"
            raise ValueError(f"layer {layer} has no separate gate_proj and up_proj tensors to exchange; {has}")
        for name, match in of_layer:
            start, end = match.span("role")
            other = name[:start] + ("up" if match["role"] == "gate" else "gate") + name[end:]
            if other not in entries:
                raise ValueError(f"{name} has no counterpart {other}")
            if any(entries[name][key] != entries[other][key] for key in ("dtype", "shape")):
                raise ValueError(f"{name} and {other} differ in shape or dtype")
            renamed[name] = other
    return renamed


def _copy_shard(original: Path, copy: Path, renamed: dict[str, str]) -> None:
    header = _header_of(original)
    with original.open("rb") as reading, copy.open("wb") as writing:
        length = _header_length(reading, original)
        if renamed.keys() & header.keys():
            text = json.dumps({renamed.get(name, name): entry for name, entry in header.items()}, separators=(",", ":"))
            encoded = text.encode()
            encoded += b" " * (-len(encoded) % ALIGNMENT)
            writing.write(struct.pack("<Q", len(encoded)) + encoded)
            reading.seek(8 + length)
        else:
            reading.seek(0)
        shutil.copyfileobj(reading, writing, 1 << 20)


def _copy_index(original: Path, copy: Path, renamed: dict[str, str]) -> None:
    """The index says which shard holds a name, and the bytes stay in their shards: the names move."""
    index = json.loads(original.read_text(encoding="utf-8"))
    index["weight_map"] = {renamed.get(name, name): shard for name, shard in index["weight_map"].items()}
    copy.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _header_of(shard: Path) -> dict[str, Any]:
    with shard.open("rb") as reading:
        text = reading.read(_header_length(reading, shard))
    if not text.startswith(b"{"):
        raise ValueError(f"{shard.name}: not a safetensors file (the header is not a JSON object)")
    try:
        return cast("dict[str, Any]", json.loads(text))
    except ValueError as error:
        raise ValueError(f"{shard.name}: the header is not JSON ({error})") from error


def _header_length(reading: BinaryIO, shard: Path) -> int:
    prefix = reading.read(8)
    length: int = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 0 < length <= min(HEADER_LIMIT, shard.stat().st_size - 8):
        raise ValueError(f"{shard.name}: not a safetensors file (header length {length})")
    return length


def main() -> int:
    """Run from the command line; the exit status is 2 when nothing could be copied."""
    parser = argparse.ArgumentParser(description="Copy a checkpoint and exchange gate and up in some layers.")
    parser.add_argument("source", type=Path, help="checkpoint directory")
    parser.add_argument("target", type=Path, help="new directory")
    parser.add_argument("--layers", type=int, nargs="+", required=True, metavar="N", help="layer numbers, from 0")
    given = parser.parse_args()
    try:
        renamed = plant_swap(given.source, given.target, given.layers)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for old, new in renamed.items():
        print(f"{old} -> {new}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
