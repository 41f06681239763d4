"""Opening: what is there, of which family, and everything wrong with it as values."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.checkpoint import reading
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.layer_map import shape_faults
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.roots import Roots
from glassblock.errors import AccessRefused, DamagedCheckpoint, FamilyMismatch, UnknownCheckpoint, UnknownFamily
from makers import asked, tiny_checkpoint, write_container
from safetensors.torch import load_file, save_file


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny_checkpoint("llama", tmp_path / "llama")


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_healthy_checkpoint_of_every_family(tmp_path: Path, family: str, shards: int) -> None:
    directory = tiny_checkpoint(family, tmp_path, shards=shards, dtype=torch.bfloat16)
    checkpoint = open_checkpoint(directory, family=asked(family))
    assert checkpoint.require_usable().name == family
    assert (checkpoint.faults, checkpoint.family_fault) == ((), None)
    assert checkpoint.notes == () or asked(family) is not None
    assert checkpoint.layers == 2
    tensors = [tensor for file in checkpoint.files for tensor in load_file(file).values()]
    assert checkpoint.bytes == sum(tensor.numel() * 2 for tensor in tensors)
    assert len(checkpoint.entries) == len(tensors)


def test_opening_reads_no_tensor_data(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    preadv = os.preadv

    def counting(descriptor: int, buffers: list[Any], offset: int) -> int:
        done = preadv(descriptor, buffers, offset)
        read.append(offset + done)
        return done

    monkeypatch.setattr(os, "preadv", counting)
    checkpoint = open_checkpoint(llama)
    container = checkpoint.containers["model.safetensors"]
    assert max(read) <= 8 + container.header_bytes
    assert not hasattr(checkpoint, "tensors")
    assert reading.ReadMeter() == reading.ReadMeter(0, 0)


# --- the family -------------------------------------------------------------------------------------------------


def config_of(directory: Path, values: Any) -> Path:
    (directory / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return directory


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "mamba"}, 'model_type is "mamba", which is no known family'),
        ({"model_type": "Llama"}, 'model_type is "Llama"'),
        ({"model_type": 7}, "model_type is 7"),
        ({"model_type": ["llama"]}, "no known family"),
        ({}, "has no model_type"),
        ({"architectures": ["MambaForCausalLM"]}, "has no model_type"),
        ({"architectures": "LlamaForCausalLM"}, "has no model_type"),
        ({"model_type": "llama", "architectures": ["Qwen2ForCausalLM"]}, "contradicts itself"),
        ({"model_type": "llava", "text_config": {"model_type": "mamba"}}, "no known family"),
    ],
)
def test_an_unknown_family_is_refused_with_the_list(llama: Path, values: Any, words: str) -> None:
    checkpoint = open_checkpoint(config_of(llama, values))
    assert checkpoint.family is None
    fault = checkpoint.family_fault
    assert fault is not None
    assert (fault.kind, fault.rule) == ("unknown-family", "config/unknown-family")
    assert words in fault.message
    assert "--family" in fault.hint
    with pytest.raises(UnknownFamily) as error:
        checkpoint.require_usable()
    assert {"llama", "gemma3_text", "olmo3"} <= set(error.value.known)
    assert error.value.file == "config.json"


def test_no_config(llama: Path) -> None:
    (llama / "config.json").unlink()
    checkpoint = open_checkpoint(llama)
    assert checkpoint.family_fault is not None
    assert "there is no config.json" in checkpoint.family_fault.message
    asked = open_checkpoint(llama, family="llama")
    assert asked.require_usable().name == "llama"
    assert len(asked.notes) == 2


def test_architectures_name_the_family_where_model_type_is_absent(llama: Path) -> None:
    checkpoint = open_checkpoint(config_of(llama, {"architectures": [None, "LlamaForCausalLM"]}))
    assert checkpoint.require_usable().name == "llama"


def test_a_class_that_no_row_knows_does_not_matter(llama: Path) -> None:
    values = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}
    assert open_checkpoint(config_of(llama, values)).family is ARCHITECTURES["llama"]


def test_a_family_asked_for_is_taken(llama: Path) -> None:
    checkpoint = open_checkpoint(config_of(llama, {"model_type": "mamba"}), family="mistral")
    assert checkpoint.family is ARCHITECTURES["mistral"]
    assert "asked for" in checkpoint.notes[0]
    with pytest.raises(UnknownFamily) as error:
        open_checkpoint(llama, family="lama")
    assert "llama" in error.value.known


def test_tensors_of_another_family(llama: Path) -> None:
    checkpoint = open_checkpoint(llama, family="gpt2")
    assert checkpoint.family_fault is not None
    assert "such as transformer.h.0.mlp.c_proj.weight" in checkpoint.family_fault.message
    with pytest.raises(FamilyMismatch):
        checkpoint.require_usable()


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model.", ""])
def test_every_prefix_is_found(llama: Path, prefix: str) -> None:
    path = llama / "model.safetensors"
    save_file({name.replace("model.", prefix): tensor for name, tensor in load_file(path).items()}, path)
    checkpoint = open_checkpoint(llama)
    assert checkpoint.trunk is not None
    assert checkpoint.trunk.prefix == prefix
    assert checkpoint.layer_indices == (0, 1)


# --- what was opened --------------------------------------------------------------------------------------------


def test_a_bare_file_with_a_family(llama: Path, tmp_path: Path) -> None:
    bare = tmp_path / "alone" / "weights.safetensors"
    bare.parent.mkdir()
    shutil.copy(llama / "model.safetensors", bare)
    assert open_checkpoint(bare).family is None
    checkpoint = open_checkpoint(bare, family="llama")
    assert checkpoint.require_usable().name == "llama"
    assert checkpoint.config is None
    assert checkpoint.declared_layers is None
    assert checkpoint.path == bare


def test_a_bare_file_beside_a_config_uses_it_and_says_so(tmp_path: Path) -> None:
    directory = tiny_checkpoint("llama", tmp_path, shards=2)
    checkpoint = open_checkpoint(directory / "model-00002-of-00002.safetensors")
    assert checkpoint.family is ARCHITECTURES["llama"]
    assert checkpoint.notes == (
        "model-00002-of-00002.safetensors was opened alone, with the config.json beside it.",
        "model-00002-of-00002.safetensors is one of several shards; tensors that it does not hold are not looked for.",
    )
    assert [fault.rule for fault in checkpoint.faults] == ["index/missing-shard"]
    checkpoint.require_usable()
    assert checkpoint.layer_indices == (1,)
    assert shape_faults(checkpoint) == ()


def test_nothing_to_open(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(UnknownCheckpoint, match="holds no safetensors file"):
        open_checkpoint(tmp_path)
    with pytest.raises(UnknownCheckpoint, match="there is nothing at gone"):
        open_checkpoint(tmp_path / "gone")
    with pytest.raises(UnknownCheckpoint, match="xxx is not there") as error:
        open_checkpoint(tmp_path / ("x" * 300))
    assert error.value.field == "checkpoint"
    named = open_checkpoint(tmp_path / "pytorch_model.bin")
    assert "pickle" in named.faults[0].message


def test_params_are_reported(llama: Path) -> None:
    (llama / "params.json").write_text('{"norm_eps": 1e-4}')
    checkpoint = open_checkpoint(llama)
    assert checkpoint.params is not None
    assert checkpoint.params.values == {"norm_eps": 1e-4}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "folder", "dangling", "circle"])
def test_what_is_no_file_but_has_the_name_of_one(llama: Path, kind: str) -> None:
    path = llama / "model.safetensors"
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(llama / ("nowhere" if kind == "dangling" else path.name))
    checkpoint = open_checkpoint(llama)
    assert [fault.rule for fault in checkpoint.faults] == ["container/not-safetensors"]
    assert checkpoint.family_fault is None
    words = "not a regular file" if kind in {"fifo", "folder"} else "is a link that leads nowhere"
    with pytest.raises(DamagedCheckpoint, match=words):
        checkpoint.require_usable()
    if kind == "folder":
        with pytest.raises(UnknownCheckpoint, match="holds no safetensors file"):
            open_checkpoint(path)
        return
    bare = open_checkpoint(path)
    assert [fault.rule for fault in bare.faults] == ["container/not-safetensors"]
    assert (bare.family, bare.family_fault) == (ARCHITECTURES["llama"], None)


SHARDS = tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


def broken_links(directory: Path, *names: str) -> Path:
    """Put links in place of files, as an interrupted download into a cache leaves them."""
    for name in names:
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(directory / "blobs" / name)
    return directory


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("absent", [(1,), (0, 2), (0, 1, 2)])
def test_shards_that_are_links_to_nowhere_are_absent(tmp_path: Path, absent: tuple[int, ...], index: bool) -> None:
    directory = tiny_checkpoint("llama", tmp_path, shards=3)
    broken_links(directory, *(SHARDS[number] for number in absent))
    if not index:
        (directory / "model.safetensors.index.json").unlink()
    checkpoint = open_checkpoint(directory)
    (fault,) = checkpoint.faults
    assert fault.rule == "index/missing-shard"
    assert fault.file.name == SHARDS[absent[0]]
    assert "nowhere" in fault.message
    assert len(fault.message) < 600
    assert set(checkpoint.containers) == {SHARDS[number] for number in range(3) if number not in absent}
    with pytest.raises(DamagedCheckpoint, match="nowhere"):
        checkpoint.require_usable()


def test_links_of_shards_in_a_circle_are_absent(tmp_path: Path) -> None:
    directory = tiny_checkpoint("llama", tmp_path, shards=3)
    for one, other in (SHARDS[:2], SHARDS[1::-1]):
        (directory / one).unlink()
        (directory / one).symlink_to(other)
    (fault,) = open_checkpoint(directory).faults
    assert (fault.rule, "2 of them are links" in fault.message) == ("index/missing-shard", True)


def test_a_shard_opened_alone_that_is_a_link_to_nowhere(tmp_path: Path) -> None:
    directory = broken_links(tiny_checkpoint("llama", tmp_path, shards=3), SHARDS[1])
    (fault,) = open_checkpoint(directory / SHARDS[1]).faults
    assert fault.rule == "container/not-safetensors"


def test_a_link_to_nowhere_hides_no_shards(tmp_path: Path) -> None:
    directory = broken_links(tiny_checkpoint("llama", tmp_path, shards=3), "model.safetensors")
    checkpoint = open_checkpoint(directory)
    assert [fault.rule for fault in checkpoint.faults] == ["container/not-safetensors"]
    assert (set(checkpoint.containers), checkpoint.layers) == (set(SHARDS), 2)
    checkpoint.require_usable()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_json_file_that_is_a_link_to_nowhere_is_one_fault(tmp_path: Path, name: str) -> None:
    directory = broken_links(tiny_checkpoint("llama", tmp_path, shards=3), name)
    (fault,) = open_checkpoint(directory).faults
    assert (fault.rule, fault.file.name) == ("container/header", name)
    assert "is a link that leads nowhere" in fault.message


def test_a_link_to_nowhere_outside_is_refused(llama: Path, tmp_path: Path) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(AccessRefused):
        open_checkpoint(llama)


# --- damage -----------------------------------------------------------------------------------------------------

PICKLE = b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}\x94."


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda content: content[:-10], "container/truncated"),
        (lambda content: content[:100], "container/truncated"),
        (lambda content: content + b"12345678", "container/trailing-bytes"),
        (lambda content: PICKLE, "container/not-safetensors"),
        (lambda content: b"", "container/not-safetensors"),
        (lambda content: content[:8] + b"x" + content[9:], "container/header"),
    ],
)
def test_a_damaged_file_is_one_fault_and_no_run(llama: Path, damage: Any, rule: str) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    checkpoint = open_checkpoint(llama)
    assert [fault.rule for fault in checkpoint.faults] == [rule]
    # What cannot be read convicts no family.
    assert checkpoint.family_fault is None
    with pytest.raises(DamagedCheckpoint) as error:
        checkpoint.require_usable()
    assert error.value.file == "model.safetensors"
    assert error.value.hint


@pytest.mark.parametrize("content", ["", "{", '{"a":' + "[" * 10_000 + "]" * 10_000 + "}", "[]"])
def test_an_unreadable_config_is_one_fault_and_no_run(llama: Path, content: str) -> None:
    checkpoint = open_checkpoint(config_of(llama, content))
    assert [fault.rule for fault in checkpoint.faults] == ["container/header"]
    assert (checkpoint.config, checkpoint.family, checkpoint.family_fault) == (None, None, None)
    with pytest.raises(DamagedCheckpoint, match=r"^config\.json "):
        checkpoint.require_usable()


def test_a_value_of_the_wrong_kind_is_a_fault_and_no_run(llama: Path) -> None:
    values = json.loads((llama / "config.json").read_text())
    checkpoint = open_checkpoint(config_of(llama, values | {"rms_norm_eps": "1e-5"}))
    assert [fault.kind for fault in checkpoint.faults] == ["value"]
    with pytest.raises(DamagedCheckpoint, match="rms_norm_eps is '1e-5'"):
        checkpoint.require_usable()


def test_an_empty_file_of_no_tensors_fits_no_family(llama: Path) -> None:
    write_container(llama / "model.safetensors", {})
    checkpoint = open_checkpoint(llama)
    assert checkpoint.faults == ()
    assert checkpoint.family_fault is not None
    assert "it has no tensors" in checkpoint.family_fault.message


def test_a_layer_number_without_end_costs_nothing(llama: Path) -> None:
    path = llama / "model.safetensors"
    save_file(load_file(path) | {"model.layers.999999999.mlp.down_proj.weight": torch.zeros(1)}, path)
    assert open_checkpoint(llama).layer_indices == (0, 1, 999999999)


def test_file_names_that_no_message_could_show_are_passed_over(llama: Path) -> None:
    for name in (b"\xff.safetensors", b"\x1b[2J.safetensors"):
        (Path(os.fsdecode(os.fsencode(llama) + b"/" + name))).write_bytes(b"")
    assert open_checkpoint(llama).faults == ()
    assert Roots([llama.parent]).list().names == ("llama",)


def test_a_folder_of_checkpoints_names_them(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path / "first")
    tiny_checkpoint("gpt2", tmp_path / "second")
    with pytest.raises(UnknownCheckpoint, match="holds no safetensors file") as refused:
        open_checkpoint(tmp_path)
    assert "first, second" in (refused.value.hint or "")
