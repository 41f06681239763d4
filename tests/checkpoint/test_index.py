"""Index, shards and directory: every disagreement is told once, with the names; agreement is silent."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.checkpoint import weight_sets
from glassblock.checkpoint.index import MAX_INDEX_BYTES, IndexFault, is_plain_name, read_index
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.shard_names import numbered
from glassblock.errors import DamagedCheckpoint
from makers import tiny_checkpoint, write_index, write_weights
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
FIRST, SECOND, THIRD = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny_checkpoint("llama", tmp_path / "sharded", shards=3)


def edit(directory: Path, **changes: Any) -> dict[str, Any]:
    path = directory / INDEX
    index: dict[str, Any] = json.loads(path.read_text())
    index["weight_map"] |= changes.pop("weight_map", {})
    index["metadata"] |= changes.pop("metadata", {})
    for name in changes.pop("without", []):
        del index["weight_map"][name]
    path.write_text(json.dumps(index))
    return index


def faults(checkpoint: Checkpoint) -> list[IndexFault]:
    assert all(isinstance(fault, IndexFault) for fault in checkpoint.faults), checkpoint.faults
    return [fault for fault in checkpoint.faults if isinstance(fault, IndexFault)]


def only_fault(directory: Path, kind: str, *, fatal: bool) -> IndexFault:
    checkpoint = open_checkpoint(directory)
    (fault,) = faults(checkpoint)
    assert fault.kind == kind
    assert fault.hint
    assert len(fault.message) < 600
    if fatal:
        with pytest.raises(DamagedCheckpoint) as error:
            checkpoint.require_usable()
        assert (error.value.message, error.value.file) == (fault.message, fault.file.name)
    else:
        checkpoint.require_usable()
    return fault


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_a_healthy_checkpoint_is_silent(tmp_path: Path, shards: int) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("qwen3", tmp_path, shards=shards))
    assert checkpoint.faults == ()
    assert len(checkpoint.files) == shards
    assert len(checkpoint.entries) == 3 + 2 * 11


def test_a_name_without_a_tensor(sharded: Path) -> None:
    edit(sharded, weight_map={"model.ghost.weight": SECOND}, metadata={"total_size": 1})
    fault = only_fault(sharded, "missing-tensor", fatal=True)
    assert fault.tensors == ("model.ghost.weight",)
    assert SECOND in fault.message
    assert fault.rule == "index/missing-tensor"


def test_a_tensor_without_a_name(sharded: Path) -> None:
    edit(sharded, without=["model.norm.weight"])
    fault = only_fault(sharded, "unlisted-tensor", fatal=False)
    assert fault.tensors == ("model.norm.weight",)
    assert fault.file.name == THIRD


def test_a_tensor_in_another_shard(sharded: Path) -> None:
    edit(sharded, weight_map={"model.norm.weight": FIRST})
    fault = only_fault(sharded, "wrong-shard", fatal=True)
    assert fault.tensors == ("model.norm.weight",)
    assert f"into {FIRST}, but it lies in {THIRD}" in fault.message


def test_a_shard_that_is_absent(sharded: Path) -> None:
    held = load_file(sharded / SECOND)
    (sharded / SECOND).unlink()
    fault = only_fault(sharded, "missing-shard", fatal=True)
    assert fault.file.name == SECOND
    assert set(fault.tensors) == set(held)
    assert f"{len(held)} tensors" in fault.message


def test_a_stale_index_of_thirty_shards_is_one_fault(sharded: Path) -> None:
    index = edit(sharded)
    stale = {
        name: f"model-{number + 1:05d}-of-00030.safetensors" for number, name in enumerate(sorted(index["weight_map"]))
    }
    write_index(sharded, stale, total_size=1)
    checkpoint = open_checkpoint(sharded)
    kinds = [fault.kind for fault in faults(checkpoint)]
    # The files that are there belong to no loader of that index; their tensors are still read for what they are.
    assert kinds == ["missing-shard"]
    assert "21 of 21 shards are absent" in checkpoint.faults[0].message
    assert checkpoint.layers == 2


def test_total_size(sharded: Path) -> None:
    edit(sharded, metadata={"total_size": 12})
    assert (
        "claims a total_size of 12 bytes; the shards hold 240,576"
        in only_fault(sharded, "total-size", fatal=False).message
    )
    edit(sharded, metadata={"total_size": 240576.0})
    assert open_checkpoint(sharded).faults == ()
    for odd in ("240576", True, -1, 1.5, [1]):
        edit(sharded, metadata={"total_size": odd})
        assert "no whole number of bytes" in only_fault(sharded, "total-size", fatal=False).message


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    # The stray copy lies in a shard that is read before the one that the index names.
    norm, home, other = "model.norm.weight", THIRD, FIRST
    assert edit(sharded)["weight_map"][norm] == home
    copy = torch.zeros_like(load_file(sharded / home)[norm])
    save_file(load_file(sharded / other) | {norm: copy}, sharded / other)
    fault = only_fault(sharded, "duplicate", fatal=False)
    assert fault.tensors == (norm,)
    assert fault.rule == "tensor/duplicate"
    checkpoint = open_checkpoint(sharded)
    assert {entry.file.name for entry in checkpoint.duplicates[norm]} == {home, other}
    assert checkpoint.entries[norm].file.name == home
    # Without an index nothing says which copy counts.
    (sharded / INDEX).unlink()
    without = open_checkpoint(sharded)
    assert [fault.kind for fault in faults(without)] == ["unlisted-tensor", "duplicate"]
    with pytest.raises(DamagedCheckpoint, match=norm):
        without.require_usable()


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    fault = only_fault(sharded, "unlisted-tensor", fatal=False)
    assert fault.message.startswith(f"there is no index {INDEX} for {FIRST}, {SECOND}, {THIRD}")
    assert len(fault.tensors) == 21
    # What looks for the absent shard comes first: its index may come with it.
    (sharded / SECOND).unlink()
    fault = only_fault(sharded, "missing-shard", fatal=True)
    assert fault.message.startswith("1 of 3 shards named model-*-of-00003 are absent")
    assert fault.file.name == SECOND


def test_shards_of_another_name_with_an_index_of_theirs(sharded: Path) -> None:
    (sharded / INDEX).rename(sharded / "consolidated.safetensors.index.json")
    for name in (FIRST, SECOND, THIRD):
        (sharded / name).rename(sharded / name.replace("model", "consolidated"))
    assert open_checkpoint(sharded).faults == ()


@pytest.mark.parametrize("shards", [1, 3])
def test_an_index_that_lists_nothing(tmp_path: Path, shards: int) -> None:
    directory = tiny_checkpoint("llama", tmp_path, shards=shards)
    write_index(directory, {}, total_size=1)
    fault = only_fault(directory, "unlisted-tensor", fatal=False)
    assert len(fault.tensors) == 21
    assert f"{INDEX} lists no tensor" in fault.message
    assert open_checkpoint(directory).layers == 2


def test_an_index_that_forgot_a_whole_shard(sharded: Path) -> None:
    forgotten = load_file(sharded / SECOND)
    edit(sharded, without=list(forgotten))
    fault = only_fault(sharded, "unlisted-tensor", fatal=False)
    assert (fault.file.name, set(fault.tensors)) == (SECOND, set(forgotten))
    assert len(open_checkpoint(sharded).entries) == 21


@pytest.mark.parametrize("where", ["model.safetensors", "consolidated.safetensors"])
def test_two_sets_of_weights(sharded: Path, where: str) -> None:
    tensors = {name: tensor for file in (FIRST, SECOND, THIRD) for name, tensor in load_file(sharded / file).items()}
    if where == "consolidated.safetensors":
        tensors = {name.replace("model.", ""): tensor for name, tensor in tensors.items()}
    save_file(tensors, sharded / where)
    checkpoint = open_checkpoint(sharded)
    only_fault(sharded, "two-weight-sets", fatal=False)
    assert [file.name for file in checkpoint.files] == (
        ["model.safetensors"] if where == "model.safetensors" else [FIRST, SECOND, THIRD]
    )


def test_a_small_file_beside_the_weights(sharded: Path) -> None:
    save_file({"lora.weight": torch.zeros(4)}, sharded / "adapter_model.safetensors")
    fault = only_fault(sharded, "unlisted-tensor", fatal=False)
    assert fault.file.name == "adapter_model.safetensors"
    assert fault.tensors == ("lora.weight",)


def test_a_stale_index_beside_whole_weights_is_told_and_hurts_no_run(tmp_path: Path) -> None:
    directory = tiny_checkpoint("llama", tmp_path)
    write_index(directory, {"model.norm.weight": SECOND})
    fault = only_fault(directory, "missing-shard", fatal=False)
    assert SECOND in fault.message


ODD_NAMES: list[Any] = ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", ".", "pytorch_model.bin"]
ODD_NAMES += [f"a{character}b.safetensors" for character in "\\\0\n\x1b"]
ODD_NAMES += ["x" * 250 + ".safetensors", 7, None, ["a"], {"a": 1}]


@pytest.mark.parametrize("shard", ODD_NAMES)
def test_odd_shard_names_are_refused_and_never_opened(sharded: Path, tmp_path: Path, shard: Any) -> None:
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    edit(sharded, weight_map={"model.norm.weight": shard})
    checkpoint = open_checkpoint(sharded)
    fault = only_fault(sharded, "missing-shard", fatal=True)
    assert "which is no name of a safetensors file beside it; it was not opened" in fault.message
    assert fault.tensors == ("model.norm.weight",)
    assert all(file.parent == sharded for file in checkpoint.files)


@pytest.mark.parametrize(
    ("content", "words", "byte"),
    [
        (b'{"weight_map": {"a": "b",}}', "not JSON", 25),
        (b"", "not JSON", 0),
        (b'{"weight_map": {"a": "\xff"}}', "not UTF-8", 22),
        (b'{"weight_map": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "nested deeper", None),
        (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "stands twice", None),
        (b"[]", "no object weight_map", None),
        (b'{"weight_map": []}', "no object weight_map", None),
    ],
)
def test_an_index_that_cannot_be_read(sharded: Path, content: bytes, words: str, byte: int | None) -> None:
    (sharded / INDEX).write_bytes(content)
    fault = only_fault(sharded, "header", fatal=True)
    assert fault.rule == "container/header"
    assert fault.file.name == INDEX
    assert words in fault.message
    assert fault.byte == byte


def test_an_index_too_long(tmp_path: Path) -> None:
    path = tmp_path / INDEX
    with path.open("wb") as file:
        file.truncate(MAX_INDEX_BYTES + 1)
    (fault,) = read_index(path).faults
    assert "67,108,865 bytes; at most 67,108,864" in fault.message


def test_a_damaged_shard_convicts_no_tensor(sharded: Path) -> None:
    (sharded / SECOND).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    checkpoint = open_checkpoint(sharded)
    assert [fault.rule for fault in checkpoint.faults] == ["container/not-safetensors"]
    with pytest.raises(DamagedCheckpoint) as error:
        checkpoint.require_usable()
    assert error.value.file == SECOND
    assert error.value.hint == "Fetch the data: git lfs pull."


def test_each_name_is_looked_at_as_often_whatever_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    def counting(name: str) -> tuple[str, str] | None:
        nonlocal looked
        looked += 1
        return numbered(name)

    monkeypatch.setattr(weight_sets, "numbered", counting)
    names = [f"model-{number:05d}-of-00060.safetensors" for number in range(1, 61)]
    for number, name in enumerate(names):
        save_file({f"t{number}": torch.zeros(1)}, tmp_path / name)
    write_index(tmp_path, {f"t{number}": name for number, name in enumerate(names[:30])})
    open_checkpoint(tmp_path, family="llama")
    assert looked <= 4 * len(names)


def test_copies_in_many_files_are_told_in_few_words(tmp_path: Path) -> None:
    for number in range(60):
        save_file({"t": torch.zeros(1)}, tmp_path / f"part{number}.safetensors")
    (fault,) = faults(open_checkpoint(tmp_path, family="llama"))
    assert fault.kind == "duplicate"
    assert fault.message.endswith("part12.safetensors and in 55 more")


def test_plain_names() -> None:
    assert is_plain_name("model-00001-of-00002.safetensors")
    assert is_plain_name("ü" * 127)
    assert not is_plain_name("ü" * 128)
    assert not any(is_plain_name(f"a{character}b") for character in "/\\\0\x1b\n\x7f\udcff")


def test_several_files_that_follow_no_numbering_are_one_set(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.zeros(2) for number in range(4)}
    write_weights(tmp_path, tensors)
    (tmp_path / "model.safetensors").rename(tmp_path / "first.safetensors")
    save_file({"u": torch.zeros(1)}, tmp_path / "second.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.faults == ()
    assert set(checkpoint.entries) == {*tensors, "u"}


def test_one_shard_alone_is_no_checkpoint(tmp_path: Path) -> None:
    directory = tiny_checkpoint("llama", tmp_path / "sharded", shards=3)
    for shard in directory.glob("*.safetensors"):
        faults = open_checkpoint(shard).faults
        assert [fault.rule for fault in faults] == ["index/missing-shard"]
        assert "one of several shards" in faults[0].message
    assert open_checkpoint(directory).faults == ()
