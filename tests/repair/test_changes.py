"""Tensors read through changes are what the changes make of the whole tensor, in any pieces."""

from pathlib import Path

import pytest
import torch
from glassblock.checkpoint.changes import Add, Cast, Change, InHeads, Put, Reorder, Shuffle, Transpose, Within, altered
from glassblock.checkpoint.container import read_container
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.reading import ReadMeter, read_chunks, read_rows, read_tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

SHAPES = {"vector": (12,), "matrix": (12, 5), "wide": (6, 14), "stack": (3, 8, 5)}


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TensorEntry]:
    path = tmp_path_factory.mktemp("changes") / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    save_file({name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}, path)
    return dict(read_container(path).entries)


def whole(entry: TensorEntry) -> Tensor:
    return read_tensor(entry, "cpu", ReadMeter())


def test_halves_rows_and_blocks_are_put_where_they_belong(entries: dict[str, TensorEntry]) -> None:
    raw = whole(entries["matrix"])
    gate, up = raw[:6], raw[6:]

    def read(*changes: Change) -> Tensor:
        return whole(altered(entries["matrix"], *changes))

    assert torch.equal(read(Reorder(-2, (2, 6), flip=0)), torch.cat([up, gate]))
    alternating = torch.stack([gate, up], 1).reshape(12, 5)
    assert torch.equal(read(Reorder(-2, (2, 6), onto=(1, 0))), alternating)
    assert torch.equal(read(Reorder(-2, (2, 6), onto=(1, 0)), Reorder(-2, (6, 2), onto=(1, 0))), raw)
    assert torch.equal(read(Reorder(-2, (6, 2), flip=1)), raw.view(6, 2, 5).flip(1).reshape(12, 5))
    ranks = torch.cat([gate[:3], up[:3], gate[3:], up[3:]])
    assert torch.equal(read(Reorder(-2, (2, 2, 3), onto=(1, 0, 2))), ranks)
    assert torch.equal(read(Transpose()), raw.T)
    assert torch.equal(read(Add(1.0)), raw + 1)
    assert torch.equal(read(Cast("F16")), raw.half())
    assert read(Put(7, float("nan"))).isnan().nonzero().tolist() == [[1, 2]]
    assert sorted(read(Shuffle(-1, seed=1)).sum(0).tolist()) == pytest.approx(sorted(raw.sum(0).tolist()))


def test_rows_of_heads_are_brought_into_pairs_and_back(entries: dict[str, TensorEntry]) -> None:
    raw = whole(entries["matrix"])  # two heads of six rows

    def read(*changes: Change) -> Tensor:
        return whole(altered(entries["matrix"], *changes))

    assert torch.equal(read(InHeads(-2, 6, (2, 3))), raw[[0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]])
    assert torch.equal(read(InHeads(-2, 6, (2, 3)), InHeads(-2, 6, (3, 2))), raw)
    assert torch.equal(read(InHeads(-2, 6, (2, 2), heads=(1,))), raw[[*range(7), 8, 7, 9, 10, 11]])
    vector = whole(entries["vector"])
    assert torch.equal(whole(altered(entries["vector"], InHeads(-1, 4, (2, 2)))), vector.view(3, 2, 2).mT.flatten())


def test_some_experts_of_a_stack_are_changed_and_the_others_not(entries: dict[str, TensorEntry]) -> None:
    raw = whole(entries["stack"])
    after = whole(altered(entries["stack"], Within((1,), Reorder(-2, (2, 4), flip=0))))
    assert torch.equal(after[1], raw[1].roll(4, 0))
    assert torch.equal(after[[0, 2]], raw[[0, 2]])


def test_what_does_not_fit_the_shape_is_refused(entries: dict[str, TensorEntry]) -> None:
    reorders = Reorder(-2, (2, 5)), Reorder(-3, (2, 6)), Shuffle(-3, 0)
    heads = InHeads(-2, 5, (2, 2)), InHeads(-2, 4, (2, 3)), InHeads(-2, 6, (2, 3), (2,)), InHeads(-3, 1, (1, 1))
    for change in reorders + heads:
        with pytest.raises(ValueError, match="does not fit"):
            altered(entries["matrix"], change)
    with pytest.raises(ValueError, match="cannot be transposed"):
        altered(entries["vector"], Transpose())


@st.composite
def changes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Change, ...]:
    made: list[Change] = []
    for _ in range(draw(st.integers(0, 3))):
        axis = -draw(st.integers(1, len(shape)))
        length = shape[axis]
        kinds = ["add", "cast", "put", "shuffle", *(["halves", "rows", "heads"] if length % 2 == 0 else [])]
        kinds += ["transpose"] if len(shape) > 1 else []
        match draw(st.sampled_from(kinds)):
            case "halves":
                made.append(Reorder(axis, (2, length // 2), flip=0))
            case "rows":
                made.append(Reorder(axis, (length // 2, 2), onto=(1, 0)))
            case "heads":
                made.append(InHeads(axis, length // 2, (1, length // 2), draw(st.sampled_from([None, (1,)]))))
                made.append(InHeads(axis, length, (2, length // 2)))
            case "shuffle":
                made.append(Shuffle(axis, draw(st.integers(0, 5))))
            case "transpose":
                made.append(Transpose())
                shape = (*shape[:-2], shape[-1], shape[-2])
            case "cast":
                made.append(Cast(draw(st.sampled_from(["F16", "BF16"]))))
            case "put":
                made.append(Put(draw(st.integers(0, 11)), 2.0))
            case _:
                made.append(Add(draw(st.sampled_from([1.0, -1.0]))))
    return tuple(made)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(sorted(SHAPES)), chunk=st.integers(8, 200))
def test_pieces_parts_and_rows_are_those_of_the_whole(
    data: st.DataObject, name: str, chunk: int, entries: dict[str, TensorEntry]
) -> None:
    entry = altered(entries[name], *data.draw(changes_of(SHAPES[name])), start=1000, name="patched")
    tensor = whole(entry)
    assert tuple(tensor.shape) == entry.shape
    assert entry.bytes == tensor.numel() * tensor.itemsize
    pieces = [piece.clone() for piece in read_chunks(entry, chunk)]
    assert torch.equal(torch.cat(pieces), tensor.flatten())
    row = entry.shape[-1] * tensor.itemsize
    step = chunk // row * row if row <= chunk else chunk // tensor.itemsize * tensor.itemsize
    assert [piece.numel() * tensor.itemsize for piece in pieces[:-1]] == [step] * (len(pieces) - 1)
    count = data.draw(st.sampled_from([part for part in range(1, 7) if entry.shape[0] % part == 0]))
    index = data.draw(st.integers(0, count - 1))
    part = entry.part(index, count)
    assert torch.equal(whole(part), tensor.chunk(count)[index].reshape(part.shape))
    rows = data.draw(st.lists(st.integers(0, entry.shape[0] - 1), min_size=1, max_size=4))
    assert torch.equal(read_rows(entry, rows, "cpu", ReadMeter()), tensor[rows])


def test_a_change_of_rows_reads_no_more_of_a_stack_than_its_part(tmp_path: Path) -> None:
    save_file({"stack": torch.randn(16, 8, 4)}, tmp_path / "model.safetensors")
    entry = read_container(tmp_path / "model.safetensors").entries["stack"]
    meter = ReadMeter()
    read_tensor(altered(entry, Reorder(-2, (2, 4), flip=0)).part(3, 16), "cpu", meter)
    assert meter.bytes == entry.bytes // 16
