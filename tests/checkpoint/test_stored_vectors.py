"""Every stored form against the numbers that the library that owns it reads: see vectors/README.md."""

import json
from pathlib import Path

import pytest
import torch
from glassblock.checkpoint.config import ConfigFile
from glassblock.checkpoint.container import read_container
from glassblock.checkpoint.entries import Container, TensorEntry
from glassblock.checkpoint.reading import ReadMeter, read_tensor
from glassblock.checkpoint.stored_weights import STORAGES, StoredWeight, read_stored, stored_weight
from torch import Tensor

VECTORS = sorted((Path(__file__).parent / "vectors").glob("*.safetensors"))
CASES = pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)

# MLX multiplies and adds with one rounding, here there are two: at most one unit in the last place of the product.
FUSED = 2**-23


def vector(path: Path) -> tuple[StoredWeight, Tensor, Container]:
    container = read_container(path)
    assert container.faults == ()
    config = ConfigFile(Path("config.json"), json.loads(container.metadata["config"]))
    stored = stored_weight(container.entries, config, "w.weight")
    assert isinstance(stored, StoredWeight), stored
    return stored, read_tensor(container.entries["expected"], "cpu", ReadMeter()), container


@CASES
def test_the_numbers_are_the_library_s(path: Path) -> None:
    stored, expected, _ = vector(path)
    found = read_stored(stored, "cpu", ReadMeter(), dtype=expected.dtype)
    assert stored.shape == tuple(expected.shape) == tuple(found.shape)
    if stored.storage.name == "MLX":
        assert float((found - expected).abs().max()) <= FUSED * float(expected.abs().max())
    else:
        assert torch.equal(found, expected)


@CASES
def test_every_stored_byte_is_counted(path: Path) -> None:
    stored, _, container = vector(path)
    meter = ReadMeter()
    read_stored(stored, "cpu", meter)
    parts = [entry for name, entry in container.entries.items() if name.startswith("w.")]
    unused = {"w.weight_zero_point"} if stored.storage.name == "packed FP4" else set[str]()
    assert meter.bytes == stored.bytes == sum(entry.bytes for entry in parts if entry.name not in unused)
    assert meter.tensors == len(stored.entries)


@CASES
def test_rows_are_the_rows_of_the_whole(path: Path) -> None:
    stored, _, _ = vector(path)
    whole = read_stored(stored, "cpu", ReadMeter())
    expert = 1 if whole.ndim == 3 else None
    whole = whole if expert is None else whole[expert]
    count = whole.shape[0]
    for first, end in ((0, 1), (count - 1, count), (1, count), (count // 2, count // 2 + 1), (0, count)):
        meter = ReadMeter()
        part = read_stored(stored, "cpu", meter, expert=expert, rows=(first, end))
        assert torch.equal(part, whole[first:end])
        assert meter.bytes <= stored.bytes


@CASES
def test_a_form_is_told_by_its_parts_alone_where_they_tell_enough(path: Path) -> None:
    stored, _, container = vector(path)
    alone = stored_weight(container.entries, None, "w.weight")
    if stored.storage.name == "MLX" or path.stem == "ct-float8-block":
        # How many bits and columns, or rows and columns, share a scale: no shape tells.
        assert not isinstance(alone, StoredWeight)
    else:
        assert isinstance(alone, StoredWeight)
        assert torch.equal(read_stored(alone, "cpu", ReadMeter()), read_stored(stored, "cpu", ReadMeter()))


@CASES
def test_without_a_part_that_it_needs_a_form_names_it(path: Path) -> None:
    stored, _, container = vector(path)
    config = ConfigFile(Path("config.json"), json.loads(container.metadata["config"]))
    for role in stored.storage.needs:
        gone = stored.layout.parts[role].name
        entries: dict[str, TensorEntry] = {name: entry for name, entry in container.entries.items() if name != gone}
        fault = stored_weight(entries, config, "w.weight")
        assert not isinstance(fault, StoredWeight)
        assert fault is not None
        assert fault.kind == "scale-missing"
        assert fault.message.startswith(f"{fault.tensor} is missing")
        # Which of two names it should have had, nothing tells any more.
        assert fault.tensor == gone.replace("bitsandbytes__fp4", "bitsandbytes__nf4")


def test_every_form_has_a_vector_or_a_test_against_transformers() -> None:
    seen = {vector(path)[0].storage.name for path in VECTORS}
    assert {storage.name for storage in STORAGES} - seen == {"block-scaled FP8", "MXFP4"}
