"""Layers: the right tensors, checked against the config, loaded alone and in one orientation."""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.embedding_rows import embedding_rows, sample_embedding_rows
from glassblock.checkpoint.family import FusedProjection, Setting
from glassblock.checkpoint.fitting import LayerFault
from glassblock.checkpoint.layer_map import eps_sources, layer_tensors, resolve_layer, shape_faults
from glassblock.checkpoint.layers import activation_of, load_feed_forward, load_norm, load_wiring
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.outer_tensors import head_entry
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import DamagedCheckpoint, FamilyMismatch, InvalidValue
from glassblock.numerics.fused_layouts import split_rows
from glassblock.numerics.wiring import Placement
from makers import USUAL, Tiny, sizes_for, tiny_checkpoint, tiny_tensors
from safetensors.torch import load_file
from torch import Tensor

FAMILIES = pytest.mark.parametrize("family", USUAL)
TINY = Tiny()
GATE = "model.layers.1.mlp.gate_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def opened(family: str, directory: Path, **changes: Any) -> Checkpoint:
    return open_checkpoint(tiny_checkpoint(family, directory, **changes))


# --- which tensors ----------------------------------------------------------------------------------------------


@FAMILIES
def test_a_healthy_layer_fits(tmp_path: Path, family: str) -> None:
    checkpoint = opened(family, tmp_path, shards=2)
    assert shape_faults(checkpoint) == ()
    for layer in range(2):
        tensors = layer_tensors(checkpoint, layer)
        row = ARCHITECTURES[family]
        parts = (
            {"fused", "down"}
            if row.feed_forward.fused
            else {"up", "down"} | ({"gate"} if row.feed_forward.gate else set())
        )
        assert set(tensors.weights) == parts
        assert set(tensors.biases) == (parts if family == "gpt2" else set())
        assert set(tensors.norms) == set(row.roles) - {"final"}
        assert all(entry.name.startswith(tensors.prefix) for entry in tensors.entries)
        assert f".{layer}." in tensors.prefix
        assert tensors.undeclared == ()


@pytest.mark.parametrize("layer", [-1, 2, 7, 10**30])
def test_a_layer_out_of_range(tmp_path: Path, layer: int) -> None:
    with pytest.raises(
        InvalidValue, match=f"layer {layer} is out of range: the checkpoint has the layers 0 to 1"
    ) as error:
        layer_tensors(opened("llama", tmp_path), layer)
    assert error.value.field == "layer"


def test_a_declared_layer_without_tensors(tmp_path: Path) -> None:
    checkpoint = opened("llama", tmp_path, config={"num_hidden_layers": 4})
    with pytest.raises(FamilyMismatch, match=r"layer 3 has no tensors, though config\.json: num_hidden_layers is 4"):
        layer_tensors(checkpoint, 3)
    (fault,) = shape_faults(checkpoint)
    assert fault.rule == "config/shape"
    assert "is 4, but the tensors show 2 layers: layer 2 is absent" in fault.message


def test_more_layers_than_declared(tmp_path: Path) -> None:
    (fault,) = shape_faults(opened("llama", tmp_path, config={"num_hidden_layers": 1}))
    assert "is 1, but the tensors show 2 layers: layer 1 is there as well" in fault.message


def test_a_huge_layer_count_costs_nothing(tmp_path: Path) -> None:
    (fault,) = shape_faults(opened("llama", tmp_path, config={"num_hidden_layers": 10**15}))
    assert fault.rule == "config/shape"


# --- against the config -----------------------------------------------------------------------------------------


def only(checkpoint: Checkpoint) -> LayerFault:
    (fault,) = shape_faults(checkpoint)
    if fault.layer is not None:
        with pytest.raises(FamilyMismatch) as error:
            layer_tensors(checkpoint, fault.layer)
        assert (error.value.message, error.value.tensor) == (fault.message, fault.tensor)
    return fault


SHAPES: list[tuple[tuple[int, ...], str]] = [
    ((TINY.intermediate, TINY.hidden + 1), "Correct the config"),
    ((TINY.hidden, TINY.intermediate), "It lies there transposed"),
    ((2 * TINY.intermediate, TINY.hidden), "224 is twice what the config says"),
    ((3 * TINY.intermediate, TINY.hidden), "three times what"),
    ((TINY.intermediate // 2, TINY.hidden), "half of what"),
    ((TINY.intermediate + 16, TINY.hidden), "16 more than the config says: if those are zeros, the width was padded"),
    ((TINY.intermediate,), "Correct the config"),
    ((1, TINY.intermediate, TINY.hidden), "Correct the config"),
    ((), "Correct the config"),
]


@pytest.mark.parametrize(("shape", "hint"), SHAPES)
def test_a_shape_that_does_not_fit_names_tensor_shapes_and_keys(
    tmp_path: Path, shape: tuple[int, ...], hint: str
) -> None:
    fault = only(opened("llama", tmp_path, tensors={GATE: torch.randn(shape)}))
    assert (fault.kind, fault.rule, fault.layer, fault.tensor) == ("shape", "config/shape", 1, GATE)
    assert f"{GATE} has the shape {list(shape)} where [112, 48] is expected" in fault.message
    assert "hidden 48 (config.json: hidden_size)" in fault.message
    assert "intermediate 112 (config.json: intermediate_size)" in fault.message
    assert hint in fault.hint


def test_a_config_that_does_not_fit(tmp_path: Path) -> None:
    faults = shape_faults(opened("llama", tmp_path, config={"intermediate_size": 56}))
    assert len(faults) == 6
    assert all("is twice what the config says" in fault.hint for fault in faults)


def test_a_size_that_is_the_familys_default_says_so(tmp_path: Path) -> None:
    fault = shape_faults(opened("llama", tmp_path, config={"intermediate_size": ...}))[0]
    assert "intermediate 11008 (default of family llama)" in fault.message


@FAMILIES
def test_the_widths_of_all_norms_are_checked(tmp_path: Path, family: str) -> None:
    row = ARCHITECTURES[family]
    for norm in row.norms:
        prefix = row.trunks[0].prefix + ("" if norm.role == "final" else row.layer.format(i=1))
        name = prefix + norm.gain
        fault = only(opened(family, tmp_path / norm.role, tensors={name: torch.ones(7)}))
        assert (fault.kind, fault.tensor) == ("shape", name)
        missing = only(opened(family, tmp_path / f"{norm.role}-", tensors={name: None}))
        assert missing.kind == ("final-missing" if norm.role == "final" else "missing-norm")
        assert missing.tensor == name


@FAMILIES
def test_every_projection_is_missed(tmp_path: Path, family: str) -> None:
    network, prefix = ARCHITECTURES[family].feed_forward, ARCHITECTURES[family].trunks[0].prefix
    layer = prefix + ARCHITECTURES[family].layer.format(i=0)
    for number, projection in enumerate((network.gate, network.up, network.fused, network.down)):
        if projection is not None:
            fault = only(opened(family, tmp_path / str(number), tensors={layer + projection.weight: None}))
            assert (fault.kind, fault.rule) == ("missing-tensor", "ffn/missing-tensor")
            assert fault.tensor == layer + projection.weight


def test_embedding_and_head_are_checked(tmp_path: Path) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        fault = only(opened("llama", tmp_path / name, tensors={name: torch.zeros(95, 48)}))
        assert "vocab 96 (config.json: vocab_size)" in fault.message
    assert only(opened("llama", tmp_path / "x", tensors={"model.embed_tokens.weight": None})).kind == "missing-tensor"
    # Whether a head must be there is a question of the tie, not of shapes.
    checkpoint = opened("llama", tmp_path / "y", tensors={"lm_head.weight": None})
    assert shape_faults(checkpoint) == ()
    assert head_entry(checkpoint) is None


def test_biases_by_flag(tmp_path: Path) -> None:
    missing = shape_faults(opened("llama", tmp_path / "missing", config={"mlp_bias": True}))
    assert {fault.rule for fault in missing} == {"ffn/missing-bias"}
    assert len(missing) == 6
    bias = GATE.replace("weight", "bias")
    undeclared = opened("llama", tmp_path / "undeclared", tensors={bias: torch.zeros(112)})
    assert shape_faults(undeclared) == ()
    assert [entry.name for entry in layer_tensors(undeclared, 1).undeclared] == [bias]
    norm_bias = "model.layers.1.input_layernorm.bias"
    odd = opened("llama", tmp_path / "norm", tensors={norm_bias: torch.zeros(48)})
    assert [entry.name for entry in layer_tensors(odd, 1).undeclared] == [norm_bias]


def test_a_missing_weight_and_its_bias_are_one_fault(tmp_path: Path) -> None:
    both = {f"transformer.h.1.mlp.c_fc.{kind}": None for kind in ("weight", "bias")}
    assert only(opened("gpt2", tmp_path, tensors=both)).tensor == "transformer.h.1.mlp.c_fc.weight"


def test_tensors_that_were_never_gathered(tmp_path: Path) -> None:
    fault = only(opened("llama", tmp_path, tensors={GATE: torch.zeros(0)}))
    assert fault.rule == "tensor/empty"
    assert "ZeRO-3" in fault.hint


@pytest.mark.parametrize(
    "codes", [torch.zeros(48, 112).to(torch.float8_e4m3fn), torch.zeros(48 * 112 // 2, 1, dtype=torch.uint8)]
)
def test_quantised_weights_without_any_scale_are_said_to_be_so(tmp_path: Path, codes: Tensor) -> None:
    fault = only(opened("llama", tmp_path, tensors={DOWN: codes}))
    assert (fault.kind, fault.rule) == ("quantised", None)
    assert "with no scale beside it that is known" in fault.message


@pytest.mark.parametrize(
    ("codes", "absent", "tensor"),
    [
        ("qweight", "qzeros", torch.zeros(14, 48, dtype=torch.int32)),
        ("weight_packed", "weight_scale", torch.zeros(48, 14, dtype=torch.int32)),
    ],
)
def test_a_form_that_lacks_a_part_names_it(tmp_path: Path, codes: str, absent: str, tensor: Tensor) -> None:
    fault = only(opened("llama", tmp_path, tensors={DOWN: None, DOWN.replace("weight", codes): tensor}))
    assert (fault.kind, fault.rule) == ("scale-missing", "quant/scale-missing")
    assert fault.tensor == DOWN.replace("weight", absent)
    assert "cannot be read without it" in fault.message


def test_a_scale_of_another_grid_is_one_that_is_missing(tmp_path: Path) -> None:
    codes = torch.ones(48, 112).to(torch.float8_e4m3fn)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
    tensors = {DOWN: codes, f"{DOWN}_scale_inv": torch.ones(7, 3)}
    fault = only(opened("llama", tmp_path, tensors=tensors, config=config))
    assert (fault.kind, fault.tensor) == ("scale-missing", f"{DOWN}_scale_inv")
    assert "where [3, 7] is expected" in fault.message


def _mixtral(tmp_path: Path, *absent: int, **config: object) -> tuple[str | None, ...]:
    """The rules of what is wrong with a mixtral of four experts in layer 1 that lacks some."""
    prefix = "model.layers.1.block_sparse_moe.experts."
    gone = {f"{prefix}{expert}.{part}.weight": None for expert in absent for part in ("w1", "w2", "w3")}
    checkpoint = opened("mixtral", tmp_path, tensors=gone, config=config)
    return tuple(fault.rule for fault in shape_faults(checkpoint))


def test_an_expert_without_any_tensor_is_one_fault(tmp_path: Path) -> None:
    assert _mixtral(tmp_path / "one", 2) == ("moe/experts-missing",)
    assert _mixtral(tmp_path / "all", 0, 1, 2, 3) == ("moe/experts-missing",)


def test_a_config_that_counts_more_experts_than_the_router_is_wrong_about_a_shape(tmp_path: Path) -> None:
    assert set(_mixtral(tmp_path, num_local_experts=6)) == {"config/shape"}


def test_an_expert_that_is_there_in_part_lacks_tensors(tmp_path: Path) -> None:
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    fault = only(opened("mixtral", tmp_path, tensors={name: None}))
    assert (fault.rule, fault.tensor) == ("ffn/missing-tensor", name)


def test_what_an_index_fault_explains_is_not_told_twice(tmp_path: Path) -> None:
    directory = tiny_checkpoint("llama", tmp_path, shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    checkpoint = open_checkpoint(directory)
    assert [fault.rule for fault in checkpoint.faults] == ["index/missing-shard"]
    assert shape_faults(checkpoint) == ()


def test_without_a_config_the_tensors_are_held_against_each_other(tmp_path: Path) -> None:
    directory = tiny_checkpoint("llama", tmp_path, tensors={DOWN: torch.zeros(48, 110)})
    (directory / "config.json").unlink()
    (fault,) = shape_faults(open_checkpoint(directory, family="llama"))
    assert fault.tensor == DOWN
    assert "intermediate 112 (tensor model.layers.0.mlp.gate_proj.weight)" in fault.message


def test_shapes_of_a_broken_config_are_not_judged(tmp_path: Path) -> None:
    checkpoint = opened("llama", tmp_path, config={"hidden_size": "48"})
    assert shape_faults(checkpoint) == ()
    assert [fault.kind for fault in checkpoint.faults] == ["value"]
    with pytest.raises(DamagedCheckpoint, match="hidden_size is '48'"):
        layer_tensors(checkpoint, 0)


# --- loading ----------------------------------------------------------------------------------------------------


@FAMILIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_loading_gives_the_files_numbers_out_in(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    checkpoint = opened(family, tmp_path, dtype=dtype, seed=3)
    row = ARCHITECTURES[family]
    expected = {
        name: tensor.to(dtype) for name, tensor in tiny_tensors(family, sizes_for(family, TINY), seed=3).items()
    }
    prefix = row.trunks[0].prefix + row.layer.format(i=1)
    network = load_feed_forward(checkpoint, 1, "cpu", ReadMeter())
    assert (network.width, network.model_width) == (TINY.intermediate, TINY.hidden)
    down = expected[prefix + row.feed_forward.down.weight]
    assert torch.equal(network.down, down.T if family == "gpt2" else down)
    assert network.down.dtype == dtype
    if family == "phi3":
        fused = expected[prefix + "mlp.gate_up_proj.weight"]
        assert network.gate is not None
        assert torch.equal(network.gate, fused[:112])
        assert torch.equal(network.up, fused[112:])
        assert network.gate.untyped_storage().data_ptr() == network.up.untyped_storage().data_ptr()
    if family == "gpt2":
        assert network.gate is None
        assert network.up_bias is not None
        assert torch.equal(network.up_bias, expected[prefix + "mlp.c_fc.bias"])
    for role in row.roles:
        norm = load_norm(checkpoint, None if role == "final" else 1, role, "cpu", ReadMeter())
        found = row.norm(role)
        assert found is not None
        home = row.trunks[0].prefix if role == "final" else prefix
        assert norm.gain is not None
        assert torch.equal(norm.gain, expected[home + found.gain])
        assert (norm.bias is not None) == found.has_bias
        assert (norm.kind.name, norm.eps) == (found.kind, 1e-5)


@FAMILIES
def test_the_wiring_is_the_rows(tmp_path: Path, family: str) -> None:
    wiring = load_wiring(opened(family, tmp_path), 0, "cpu", ReadMeter())
    row = ARCHITECTURES[family]
    assert wiring.placement is row.placement
    assert (wiring.input_norm is not None) == (row.placement is not Placement.BRANCH_OUTPUT)
    assert (wiring.output_norm is not None) == (row.placement in {Placement.SANDWICH, Placement.BRANCH_OUTPUT})
    assert (wiring.residual_scale, wiring.branch_scale) == (1.0, 1.0)


@pytest.mark.parametrize("order", [("gate", "up"), ("up", "gate")])
@pytest.mark.parametrize("arrangement", ["halves", "interleaved"])
@pytest.mark.parametrize("columns", [(), (5,)])
def test_fused_tensors_are_split_as_the_row_says(order: Any, arrangement: Any, columns: tuple[int, ...]) -> None:
    gate, up = torch.randn(6, *columns), torch.randn(6, *columns)
    first, second = (gate, up) if order[0] == "gate" else (up, gate)
    fused = torch.cat([first, second]) if arrangement == "halves" else torch.stack([first, second], 1).flatten(0, 1)
    layout = FusedProjection("", "", order, arrangement).layout(len(fused))
    assert layout is not None
    parts = split_rows(fused, layout)
    assert torch.equal(parts[0], gate)
    assert torch.equal(parts[1], up)
    assert all(part.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr() for part in parts)


def test_a_fused_bias_follows_the_weight(tmp_path: Path) -> None:
    bias = torch.randn(224)
    checkpoint = opened(
        "phi3",
        tmp_path,
        tensors={"model.layers.0.mlp.gate_up_proj.bias": bias, "model.layers.0.mlp.down_proj.bias": torch.zeros(48)},
    )
    phi3 = ARCHITECTURES["phi3"]
    biased = replace(phi3.feed_forward, bias=Setting((), default=True))
    checkpoint = replace(checkpoint, family=replace(phi3, feed_forward=biased), layer_indices=(0,))
    network = load_feed_forward(checkpoint, 0, "cpu", ReadMeter())
    assert network.gate_bias is not None
    assert network.up_bias is not None
    assert torch.equal(torch.cat([network.gate_bias, network.up_bias]), bias)


def test_multipliers_and_gatings_come_from_the_config(tmp_path: Path) -> None:
    checkpoint = opened("llama", tmp_path, config={"residual_multiplier": 0.22, "limit": 7, "alpha": 1.702})
    row = ARCHITECTURES["llama"]
    parameters = {"limit": Setting(("limit",), 1.0), "alpha": Setting(("alpha",), 1.0)}
    network = replace(row.feed_forward, gating="swiglu_oai", gating_parameters=parameters)
    row = replace(row, branch_scale=Setting(("residual_multiplier",), 1.0), feed_forward=network)
    checkpoint = replace(checkpoint, family=row)
    assert load_wiring(checkpoint, 0, "cpu", ReadMeter()).branch_scale == 0.22
    gating = load_feed_forward(checkpoint, 0, "cpu", ReadMeter()).gating
    assert (gating.name, gating.limit, gating.alpha) == ("swiglu_oai", 7.0, 1.702)


def test_an_unknown_activation_is_refused_with_the_list(tmp_path: Path) -> None:
    checkpoint = opened("llama", tmp_path, config={"hidden_act": "slu"})
    for ask in (activation_of, lambda c: load_feed_forward(c, 0, "cpu", ReadMeter())):
        with pytest.raises(FamilyMismatch, match="hidden_act is 'slu'") as error:
            ask(checkpoint)
        assert {"silu", "gelu_new"} <= set(error.value.known)


def test_an_unknown_role_is_refused_with_the_list(tmp_path: Path) -> None:
    checkpoint = opened("olmo2", tmp_path)
    with pytest.raises(InvalidValue, match="no norm in the role 'ffn_in'") as error:
        load_norm(checkpoint, 0, "ffn_in", "cpu", ReadMeter())
    assert error.value.known == ("attn_out", "ffn_out", "final", "q", "k")
    with pytest.raises(InvalidValue, match="needs a layer"):
        load_norm(checkpoint, None, "q", "cpu", ReadMeter())


def test_epsilons_say_where_they_come_from(tmp_path: Path) -> None:
    silent = opened("llama", tmp_path, config={"rms_norm_eps": ...})
    for source in eps_sources(silent).values():
        assert (source.value, source.source, source.defaulted) == (1e-6, "default of family llama", True)
    assert load_norm(silent, None, "final", "cpu", ReadMeter()).eps == 1e-6


# --- the bytes that are read ------------------------------------------------------------------------------------


@FAMILIES
def test_only_the_layers_bytes_are_read(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = opened(family, tmp_path, shards=3)
    ranges: list[tuple[int, int]] = []
    preadv: Callable[..., int] = os.preadv

    def watched(descriptor: int, buffers: list[Any], offset: int) -> int:
        done = preadv(descriptor, buffers, offset)
        ranges.append((os.fstat(descriptor).st_ino, offset))
        ranges.append((os.fstat(descriptor).st_ino, offset + done - 1))
        return done

    monkeypatch.setattr(os, "preadv", watched)
    meter = ReadMeter()
    load_feed_forward(checkpoint, 1, "cpu", meter)
    load_wiring(checkpoint, 1, "cpu", meter)
    tensors = layer_tensors(checkpoint, 1)
    norms = [tensors.norms[role] for role in tensors.norms if role in {"ffn_in", "ffn_out"}]
    wanted = [*tensors.weights.values(), *tensors.biases.values()]
    wanted += [entry for norm in norms for entry in (norm.gain, norm.bias) if entry is not None]
    assert meter == ReadMeter(sum(entry.bytes for entry in wanted), len(wanted))
    allowed = {(entry.identity.inode, entry.start, entry.stop) for entry in wanted if entry.identity}
    for inode, byte in ranges:
        assert any(inode == file and start <= byte < stop for file, start, stop in allowed)


def test_a_layer_of_a_file_whose_other_bytes_are_absent(tmp_path: Path) -> None:
    # As a sparse file of 24 GB, of which only layer 1 was ever written.
    whole = tiny_tensors("llama", sizes_for("llama", TINY))
    directory = tiny_checkpoint("llama", tmp_path)
    header: dict[str, Any] = {}
    offset = 0
    filler = 8 << 30
    for name, tensor in whole.items():
        size = tensor.numel() * 4
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
        if name.startswith("model.layers.0") and "mlp" in name:
            header[f"extra.{name}"] = {"dtype": "U8", "shape": [filler], "data_offsets": [offset, offset + filler]}
            offset += filler
    raw = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for name, tensor in whole.items():
            if name.startswith("model.layers.1."):
                file.seek(8 + len(raw) + header[name]["data_offsets"][0])
                file.write(tensor.numpy().tobytes())
        file.truncate(8 + len(raw) + offset)
    checkpoint = open_checkpoint(directory)
    assert checkpoint.faults == ()
    assert checkpoint.bytes > 24 << 30
    network = load_feed_forward(checkpoint, 1, "cpu", ReadMeter())
    assert torch.equal(network.down, whole[DOWN])


# --- embedding rows ---------------------------------------------------------------------------------------------


def test_sampled_rows_are_the_embeddings_and_no_more_is_read(tmp_path: Path) -> None:
    checkpoint, meter = opened("llama", tmp_path, dtype=torch.bfloat16), ReadMeter()
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    sample = sample_embedding_rows(checkpoint, 5, 11, "cpu", meter)
    assert torch.equal(sample.x, table[list(sample.token_ids)])
    assert len(set(sample.token_ids)) == 5
    assert sample.multiplier is None
    assert meter.bytes == 5 * 48 * 2
    assert sample_embedding_rows(checkpoint, 5, 11, "cpu", meter).token_ids == sample.token_ids
    assert sample_embedding_rows(checkpoint, 5, 12, "cpu", meter).token_ids != sample.token_ids
    assert sorted(sample_embedding_rows(checkpoint, 96, 0, "cpu", meter).token_ids) == list(range(96))


def test_gemmas_multiplier_is_rounded_to_the_weights_dtype_and_said(tmp_path: Path) -> None:
    checkpoint = opened("gemma3", tmp_path, dtype=torch.bfloat16)
    rows = embedding_rows(checkpoint, [0, 95], "cpu", ReadMeter())
    rounded = torch.tensor(sqrt(48)).bfloat16()
    assert float(rounded) != sqrt(48)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(rows.x, table[[0, 95]] * rounded)
    assert rows.multiplier is not None
    assert rows.multiplier.value == float(rounded)
    assert rows.multiplier.source == "family gemma3: square root of hidden, rounded to BF16"


def test_a_multiplier_of_the_config_is_not_rounded(tmp_path: Path) -> None:
    checkpoint = opened("llama", tmp_path, config={"embedding_multiplier": 0.1}, dtype=torch.bfloat16)
    row = replace(ARCHITECTURES["llama"], embedding_scale=Setting(("embedding_multiplier",), 1.0))
    rows = embedding_rows(replace(checkpoint, family=row), [1], "cpu", ReadMeter())
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(rows.x, table[[1]] * 0.1)
    assert rows.multiplier is not None
    assert rows.multiplier.source == "config.json: embedding_multiplier"


SAMPLES = [(0, 0, "rows"), (97, 0, "rows"), (-1, 0, "rows"), (1, -1, "seed"), (1, 2**63, "seed")]


@pytest.mark.parametrize(("rows", "seed", "field"), SAMPLES)
def test_samples_out_of_range(tmp_path: Path, rows: int, seed: int, field: str) -> None:
    with pytest.raises(InvalidValue) as error:
        sample_embedding_rows(opened("llama", tmp_path), rows, seed, "cpu", ReadMeter())
    assert error.value.field == f"sample.{field}"


@pytest.mark.parametrize("token", [-1, 96, 10**30])
def test_tokens_outside_the_vocabulary(tmp_path: Path, token: int) -> None:
    with pytest.raises(InvalidValue, match=f"token {token} is outside the vocabulary of 96") as error:
        embedding_rows(opened("llama", tmp_path), [0, token], "cpu", ReadMeter())
    assert error.value.field == "token_ids"


@pytest.mark.parametrize("embedding", [None, torch.zeros(0), torch.zeros(96, 48, dtype=torch.uint8)])
def test_no_usable_embedding(tmp_path: Path, embedding: Tensor | None) -> None:
    checkpoint = opened("llama", tmp_path, tensors={"model.embed_tokens.weight": embedding})
    with pytest.raises(FamilyMismatch, match="the token embedding"):
        sample_embedding_rows(checkpoint, 1, 0, "cpu", ReadMeter())


def test_faults_are_values_for_whoever_only_looks(tmp_path: Path) -> None:
    checkpoint = opened("llama", tmp_path, tensors={GATE: torch.zeros(3, 3), DOWN: None})
    tensors, faults = resolve_layer(checkpoint, 1)
    assert [fault.kind for fault in faults] == ["shape", "missing-tensor"]
    assert set(tensors.weights) == {"gate", "up"}
