"""Layers of quantised checkpoints: the same network, whatever it is stored in, and its block run."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.audit.audit import audit_checkpoint
from glassblock.checkpoint.layer_map import layer_tensors, resolve_layer, shape_faults
from glassblock.checkpoint.layers import load_feed_forward
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.stored_entries import StoredEntry, read_weight, storage_notes, weight_entry
from glassblock.errors import FamilyMismatch
from glassblock.numerics.dequantise_codebook import E2M1, NF4
from glassblock.operations import block_runs
from glassblock.operations.layer_sizes import block_size
from glassblock.operations.store import CheckpointStore
from glassblock.wire.blocks import BlockRunRequest
from glassblock.wire.values import Sample
from makers import Tiny, tiny_checkpoint, tiny_tensors
from safetensors.torch import load_file, save_file
from torch import Tensor

Quantised = tuple[dict[str, Tensor], Tensor]
"""The parts by their names after the stem, and the weight they stand for."""

HIDDEN, INTERMEDIATE = 64, 128
TINY = Tiny(hidden=HIDDEN, intermediate=INTERMEDIATE)


# --- writers: one for each form, from its description ----------------------------------------------------------


def fp8_blocks(weight: Tensor) -> Quantised:
    scale = torch.rand(-(-weight.shape[0] // 48), -(-weight.shape[1] // 48)) + 0.5
    codes = weight.to(torch.float8_e4m3fn)
    spread = scale.repeat_interleave(48, 0)[: weight.shape[0]].repeat_interleave(48, 1)[:, : weight.shape[1]]
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * spread


def int8_channels(weight: Tensor) -> Quantised:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def gptq(weight: Tensor) -> Quantised:
    rows, columns = weight.shape
    codes = torch.randint(0, 16, (rows, columns))
    scale = (torch.rand(columns // 32, rows) / 8).half()
    zeros = torch.full((columns // 32, rows // 8), 0x77777777, dtype=torch.int32)
    parts = {"qweight": words(codes).T, "qzeros": zeros, "scales": scale}
    return parts, (codes - 8) * scale.float().T.repeat_interleave(32, 1)


def compressed(weight: Tensor) -> Quantised:
    rows, columns = weight.shape
    codes = torch.randint(0, 16, (rows, columns))
    scale = torch.rand(rows, columns // 32) / 8
    parts = {"weight_packed": words(codes), "weight_scale": scale, "weight_shape": torch.tensor([rows, columns])}
    return parts, (codes - 8) * scale.repeat_interleave(32, 1)


def nf4(weight: Tensor) -> Quantised:
    codes = torch.randint(0, 16, (weight.numel(),))
    absmax = torch.rand(weight.numel() // 64)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    parts = {
        "weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1),
        "weight.absmax": absmax,
        "weight.quant_map": torch.tensor(NF4),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return parts, (torch.tensor(NF4)[codes] * absmax.repeat_interleave(64)).reshape(weight.shape)


def nf4_in_bfloat16(weight: Tensor) -> Quantised:
    parts, numbers = nf4(weight)
    parts["weight"] = parts["weight"].flatten().view(torch.bfloat16).unsqueeze(1)
    return parts, numbers


def words(codes: Tensor) -> Tensor:
    """Codes of 4 bits of each row in 32-bit words, the first lowest."""
    spread = codes.unflatten(-1, (-1, 8)).to(torch.int64) << (4 * torch.arange(8))
    return spread.sum(-1).to(torch.int32)


FORMS: Mapping[str, tuple[Callable[[Tensor], Quantised], dict[str, Any]]] = {
    "block-scaled FP8": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [48, 48]}),
    "scaled": (int8_channels, {"quant_method": "compressed-tensors"}),
    "GPTQ": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "compressed-tensors": (compressed, {"quant_method": "compressed-tensors"}),
    "bitsandbytes 4-bit": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "bitsandbytes 4-bit in bfloat16": (nf4_in_bfloat16, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}
EVERY_FORM = pytest.mark.parametrize("form", FORMS)


def quantised_checkpoint(family: str, directory: Path, form: str, *, drop: str | None = None) -> dict[str, Tensor]:
    """Write a checkpoint whose feed-forward weights are stored in a form; what they stand for, by plain name."""
    torch.manual_seed(5)
    write, declared = FORMS[form]
    tensors: dict[str, Tensor | None] = {}
    numbers: dict[str, Tensor] = {}
    for name, weight in tiny_tensors(family, TINY).items():
        if ".mlp." in name and name.endswith(".weight"):
            stem = name.removesuffix("weight")
            in_out = family == "gpt2"
            parts, numbers[name] = write(weight.T if in_out else weight)
            tensors[name] = None
            kept = {stem + part: tensor for part, tensor in parts.items() if part != drop}
            tensors.update({part: tensor.contiguous() for part, tensor in kept.items()})
    tiny_checkpoint(family, directory, tiny=TINY, config={"quantization_config": declared})
    path = directory / "model.safetensors"
    all_tensors: dict[str, Tensor | None] = {**load_file(path), **tensors}
    save_file({name: tensor for name, tensor in all_tensors.items() if tensor is not None}, path)
    return numbers


def opened(directory: Path) -> Checkpoint:
    checkpoint = open_checkpoint(directory)
    assert shape_faults(checkpoint) == ()
    return checkpoint


# --- a layer --------------------------------------------------------------------------------------------------


@EVERY_FORM
def test_a_network_is_read_from_its_stored_form(tmp_path: Path, form: str) -> None:
    numbers = quantised_checkpoint("llama", tmp_path, form)
    checkpoint, meter = opened(tmp_path), ReadMeter()
    network = load_feed_forward(checkpoint, 1, "cpu", meter)
    for part in ("gate", "up", "down"):
        found = getattr(network, part)
        assert found.dtype == torch.float32
        assert torch.equal(found, numbers[f"model.layers.1.mlp.{part}_proj.weight"])
    stored = [entry for name, entry in checkpoint.entries.items() if name.startswith("model.layers.1.mlp.")]
    assert meter.bytes == sum(entry.bytes for entry in stored)
    entries = layer_tensors(checkpoint, 1).weights.values()
    assert all(isinstance(entry, StoredEntry) and entry.dtype not in {"BF16", "F32"} for entry in entries)
    (note,) = storage_notes(entries)
    assert note.endswith("dequantised to float32")


@pytest.mark.parametrize("form", ["GPTQ", "compressed-tensors", "bitsandbytes 4-bit"])
def test_a_family_that_stores_its_plain_weights_transposed(tmp_path: Path, form: str) -> None:
    # Converters turn Conv1D into Linear before they quantise: the codes are [out, in] all the same.
    numbers = quantised_checkpoint("gpt2", tmp_path, form)
    checkpoint = opened(tmp_path)
    network = load_feed_forward(checkpoint, 0, "cpu", ReadMeter())
    assert torch.equal(network.up, numbers["transformer.h.0.mlp.c_fc.weight"])
    assert torch.equal(network.down, numbers["transformer.h.0.mlp.c_proj.weight"])
    assert layer_tensors(checkpoint, 0).weights["up"].shape == (HIDDEN, INTERMEDIATE)


@EVERY_FORM
def test_fused_gate_and_up(tmp_path: Path, form: str) -> None:
    numbers = quantised_checkpoint("phi3", tmp_path, form)["model.layers.0.mlp.gate_up_proj.weight"]
    network = load_feed_forward(opened(tmp_path), 0, "cpu", ReadMeter())
    assert network.gate is not None
    assert torch.equal(torch.cat([network.gate, network.up]), numbers)


@pytest.mark.parametrize(
    ("form", "missing"),
    [
        ("block-scaled FP8", "weight_scale_inv"),
        ("scaled", "weight_scale"),
        ("GPTQ", "qzeros"),
        ("GPTQ", "scales"),
        ("compressed-tensors", "weight_shape"),
        ("bitsandbytes 4-bit", "weight.absmax"),
    ],
)
def test_a_part_that_is_missing_is_told_by_name(tmp_path: Path, form: str, missing: str) -> None:
    quantised_checkpoint("llama", tmp_path, form, drop=missing)
    checkpoint = open_checkpoint(tmp_path)
    _, faults = resolve_layer(checkpoint, 0)
    assert {fault.tensor for fault in faults} == {
        f"model.layers.0.mlp.{part}_proj.{missing}" for part in ("gate", "up", "down")
    }
    assert {fault.kind for fault in faults} == {"scale-missing"}
    with pytest.raises(FamilyMismatch, match=f"{missing} is missing") as error:
        load_feed_forward(checkpoint, 0, "cpu", ReadMeter())
    assert error.value.tensor == faults[0].tensor


def test_a_stored_weight_of_another_shape_than_the_config_says(tmp_path: Path) -> None:
    quantised_checkpoint("llama", tmp_path, "GPTQ")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": INTERMEDIATE // 2}))
    faults = shape_faults(open_checkpoint(tmp_path))
    assert {fault.kind for fault in faults} == {"shape"}
    assert f"has the shape [{INTERMEDIATE}, {HIDDEN}]" in faults[0].message


# --- experts --------------------------------------------------------------------------------------------------


def mxfp4_stack(directory: Path) -> tuple[Checkpoint, Tensor]:
    torch.manual_seed(6)
    codes, scale = torch.randint(0, 16, (4, 6, 64)), torch.randint(120, 130, (4, 6, 2), dtype=torch.uint8)
    packed = (codes[..., 1::2] << 4 | codes[..., ::2]).to(torch.uint8).unflatten(-1, (2, 16))
    tiny_checkpoint("llama", directory, tensors={"e_blocks": packed, "e_scales": scale}, dtype=torch.float32)
    path = directory / "model.safetensors"
    save_file({**load_file(path), "e_blocks": packed, "e_scales": scale}, path)
    numbers = torch.tensor(E2M1)[codes] * torch.exp2(scale.float() - 127).repeat_interleave(32, -1)
    return open_checkpoint(directory), numbers


@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_one_expert_of_a_stack(tmp_path: Path, layout: Any) -> None:
    checkpoint, numbers = mxfp4_stack(tmp_path)
    numbers = numbers if layout == "out_in" else numbers.transpose(1, 2)
    entry = weight_entry(checkpoint.entries, checkpoint.config, "e", layout)
    assert isinstance(entry, StoredEntry)
    assert entry.shape == tuple(numbers.shape)
    assert torch.equal(read_weight(entry, "cpu", ReadMeter()), numbers)
    meter = ReadMeter()
    expert = entry.part(3, 4)
    assert expert.shape == tuple(numbers.shape[1:])
    assert torch.equal(read_weight(expert, "cpu", meter), numbers[3])
    assert meter.bytes == 6 * 2 * 17
    rows = expert.part(1, 2)
    assert torch.equal(read_weight(rows, "cpu", ReadMeter()), numbers[3].chunk(2)[1])
    assert torch.equal(read_weight(entry.part(1, 2), "cpu", ReadMeter()), numbers[2:])


@EVERY_FORM
def test_experts_one_under_the_other(tmp_path: Path, form: str) -> None:
    numbers = quantised_checkpoint("llama", tmp_path, form)["model.layers.0.mlp.up_proj.weight"]
    entry = layer_tensors(opened(tmp_path), 0).weights["up"]
    for index in range(4):
        assert torch.equal(read_weight(entry.part(index, 4), "cpu", ReadMeter()), numbers.chunk(4)[index])


# --- what stands on it ----------------------------------------------------------------------------------------


@EVERY_FORM
def test_a_block_of_a_quantised_checkpoint_is_run(tmp_path: Path, form: str) -> None:
    numbers = quantised_checkpoint("llama", tmp_path / "stored", form)
    plain = tiny_checkpoint("llama", tmp_path / "plain", tiny=TINY)
    save_file({**load_file(plain / "model.safetensors"), **numbers}, plain / "model.safetensors")
    store = CheckpointStore([tmp_path], device="cpu")
    answers, outputs = [], []
    for name in ("stored", "plain"):
        request = BlockRunRequest(checkpoint=name, layer=1, sample=Sample(rows=5), return_tensors=True)
        reply = block_runs.run(store, request, {})
        answers.append(reply.answer)
        outputs.append(reply.tensors["output"])
    assert torch.equal(*outputs)
    stored, told = answers
    assert stored.read.bytes < told.read.bytes
    (note,) = (note for note in stored.notes if note.startswith("weights: stored as"))
    assert note.endswith("dequantised to float32")
    assert not any(note.startswith("weights") for note in told.notes)


@EVERY_FORM
def test_what_a_pinned_block_takes_is_known_before_it_is_read(tmp_path: Path, form: str) -> None:
    quantised_checkpoint("llama", tmp_path / "stored", form)
    store = CheckpointStore([tmp_path], device="cpu")
    tensors = layer_tensors(store.open("stored"), 1)
    size, held = block_size(tensors), store.pin("stored", [1]).bytes
    norms = sum(entry.bytes for norm in tensors.norms.values() for entry in norm.entries)
    assert held <= size.held <= held + norms
    assert size.reading >= max(4 * entry.elements for entry in tensors.weights.values())


@EVERY_FORM
def test_an_audit_reads_them_and_says_that_they_were_never_trained(tmp_path: Path, form: str) -> None:
    quantised_checkpoint("llama", tmp_path, form)
    report = audit_checkpoint(tmp_path)
    assert report.verdict == "inconclusive"
    (told,) = (rule for rule in report.coverage if rule.rule == "ffn/gate-up-swapped")
    assert len(told.undecidable) == 2
    assert all("differs from noise" in entry.reason for entry in told.undecidable)
    assert all(finding.rule.startswith("tensor/") for finding in report.findings)
