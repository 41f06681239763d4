"""Stored forms: against transformers' own code, what is refused, and what bad files get for an answer."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.checkpoint.config import ConfigFile
from glassblock.checkpoint.container import read_container
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.quantisation import declared_quantisation
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.storage import StorageFault
from glassblock.checkpoint.stored_weights import KNOWN_METHODS, STORAGES, StoredWeight, read_stored, stored_weight
from glassblock.errors import DamagedCheckpoint, GlassblockError, InvalidValue
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from makers import write_container
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

NAME = "w.weight"
VECTORS = Path(__file__).parent / "vectors"


def config_of(quantisation: Mapping[str, Any] | None) -> ConfigFile | None:
    return None if quantisation is None else ConfigFile(Path("config.json"), {"quantization_config": quantisation})


def entries_of(directory: Path, tensors: Mapping[str, Tensor]) -> Mapping[str, TensorEntry]:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return read_container(directory / "model.safetensors").entries


def found_in(
    directory: Path, tensors: Mapping[str, Tensor], quantisation: Mapping[str, Any] | None = None, name: str = NAME
) -> StoredWeight | StorageFault | None:
    return stored_weight(entries_of(directory, tensors), config_of(quantisation), name)


def read_from(
    directory: Path, tensors: Mapping[str, Tensor], quantisation: Mapping[str, Any] | None = None, name: str = NAME
) -> Tensor:
    stored = found_in(directory, tensors, quantisation, name)
    assert isinstance(stored, StoredWeight), stored
    return read_stored(stored, "cpu", ReadMeter())


def fault_in(
    directory: Path, tensors: Mapping[str, Tensor], quantisation: Mapping[str, Any] | None = None, name: str = NAME
) -> StorageFault:
    fault = found_in(directory, tensors, quantisation, name)
    assert isinstance(fault, StorageFault), fault
    assert fault.message
    assert fault.hint
    return fault


def vector(case: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The parts of a vector, and what its config declares."""
    path = VECTORS / f"{case}.safetensors"
    parts = {name: tensor for name, tensor in load_file(path).items() if name != "expected"}
    (declared,) = json.loads(read_container(path).metadata["config"]).values()
    return parts, declared


# --- against transformers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponents", [False, True])
@pytest.mark.parametrize(("shape", "block"), [((256, 384), (128, 128)), ((12, 20), (4, 5)), ((3, 8, 12), (4, 4))])
def test_block_scaled_fp8_as_transformers_reads_it(
    tmp_path: Path, shape: tuple[int, ...], block: tuple[int, int], exponents: bool
) -> None:
    torch.manual_seed(1)
    name = NAME if len(shape) == 2 else "experts.gate_up_proj"
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    grid = (*shape[:-2], shape[-2] // block[0], shape[-1] // block[1])
    scale = torch.randint(118, 130, grid, dtype=torch.uint8) if exponents else torch.rand(grid)
    stored = scale.view(torch.float8_e8m0fnu) if exponents else scale
    tensors = {name: weight, f"{name}_scale_inv": stored}
    found = read_from(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": list(block)}, name)
    assert torch.equal(found, Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32))


def test_blocks_that_the_edge_cuts_off(tmp_path: Path) -> None:
    torch.manual_seed(1)
    weight, scale = torch.randn(300, 130).to(torch.float8_e4m3fn), torch.rand(3, 2)
    tensors = {NAME: weight, f"{NAME}_scale_inv": scale}
    found = read_from(tmp_path, tensors)
    spread = scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :130]
    assert torch.equal(found, weight.float() * spread)
    stored = found_in(tmp_path, tensors)
    assert isinstance(stored, StoredWeight)
    for rows in ((0, 300), (127, 129), (299, 300), (130, 140)):
        meter = ReadMeter()
        assert torch.equal(read_stored(stored, "cpu", meter, rows=rows), found[slice(*rows)])
        first, end = rows[0] // 128, -(-rows[1] // 128)
        assert meter.bytes == (min(128 * end, 300) - 128 * first) * 130 + (end - first) * 2 * 4


def test_experts_in_mx_blocks_beside_a_declared_grid(tmp_path: Path) -> None:
    weight, scale = torch.randn(3, 64).to(torch.float8_e4m3fn), torch.randint(120, 130, (3, 2), dtype=torch.uint8)
    tensors = {NAME: weight, f"{NAME}_scale_inv": scale}
    found = read_from(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert torch.equal(found, Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32))


def test_one_scale_for_a_weight(tmp_path: Path) -> None:
    weight, scale = torch.randn(5, 7).to(torch.float8_e4m3fn), torch.tensor(0.25, dtype=torch.bfloat16)
    for suffix in ("_scale_inv", "_scale"):
        found = read_from(tmp_path, {NAME: weight, NAME + suffix: scale}, {"quant_method": "fp8"})
        assert torch.equal(found, weight.float() * 0.25)
    stack = {"e.w": torch.ones(2, 3, 4, dtype=torch.float8_e4m3fn), "e.w_scale": torch.tensor([2.0, 3.0])}
    assert read_from(tmp_path, stack, None, "e.w").amax((1, 2)).tolist() == [2.0, 3.0]


# --- NVIDIA's Model Optimizer -----------------------------------------------------------------------------------

MODELOPT_METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8")


@pytest.mark.parametrize("method", [None, *MODELOPT_METHODS])
@pytest.mark.parametrize(
    ("algorithm", "grid", "block"),
    [
        ("FP8", (), (256, 128)),
        ("FP8_PER_CHANNEL_PER_TOKEN", (256,), (1, 128)),
        ("FP8_PB_WO", (2, 1, 1, 1), (128, 128)),
        ("fp8_pb_wo", (2, 1, 1, 1), (128, 128)),
    ],
)
def test_float8_of_the_model_optimizer(
    tmp_path: Path, method: str | None, algorithm: str, grid: tuple[int, ...], block: tuple[int, int]
) -> None:
    weight, scale = torch.randn(256, 128).to(torch.float8_e4m3fn), torch.rand(grid) + 0.1
    tensors = {NAME: weight, f"{NAME}_scale": scale, "w.input_scale": torch.tensor(0.5)}
    found = read_from(tmp_path, tensors, None if method is None else {"quant_method": method, "quant_algo": algorithm})
    spread = scale.reshape(256 // block[0], 1).repeat_interleave(block[0], 0)
    assert torch.equal(found, weight.float() * spread)


@pytest.mark.parametrize("method", [None, *MODELOPT_METHODS, "compressed-tensors"])
def test_float8_in_mx_blocks_under_the_plain_name(tmp_path: Path, method: str | None) -> None:
    weight, scale = torch.randn(3, 64).to(torch.float8_e4m3fn), torch.randint(120, 130, (3, 2), dtype=torch.uint8)
    declared = None if method is None else {"quant_method": method}
    found = read_from(tmp_path, {NAME: weight, f"{NAME}_scale": scale}, declared)
    assert torch.equal(found, weight.float() * torch.exp2(scale.float() - 127).repeat_interleave(32, 1))


@pytest.mark.parametrize("algorithm", [None, "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"])
@pytest.mark.parametrize("method", [None, "modelopt", "modelopt_fp4"])
def test_float4_of_the_model_optimizer_is_that_of_compressed_tensors(
    tmp_path: Path, method: str | None, algorithm: str | None
) -> None:
    """The same codes and scales of blocks; the scale over all multiplies where the other divides."""
    parts, declared = vector("ct-nvfp4")
    expected = read_from(tmp_path, parts, declared)
    renamed = {
        NAME: parts[f"{NAME}_packed"],
        f"{NAME}_scale": parts[f"{NAME}_scale"],
        f"{NAME}_scale_2": 1 / parts[f"{NAME}_global_scale"].reshape(()),
    }
    found = read_from(tmp_path, renamed, None if method is None else {"quant_method": method, "quant_algo": algorithm})
    assert torch.allclose(found, expected, rtol=2**-22, atol=0)
    if method is not None:
        for lost in (f"{NAME}_scale", f"{NAME}_scale_2"):
            left = {name: tensor for name, tensor in renamed.items() if name != lost}
            fault = fault_in(tmp_path, left, {"quant_method": method, "quant_algo": "NVFP4"})
            assert (fault.kind, fault.tensor) == ("scale-missing", lost)


def test_what_the_model_optimizer_writes_and_is_not_read(tmp_path: Path) -> None:
    whole = {NAME: torch.ones(4, 64, dtype=torch.uint8), f"{NAME}_scale": torch.ones(8, 2)}
    for algorithm in ({"quant_algo": "W4A16_AWQ"}, {}):
        fault = fault_in(tmp_path, whole, {"quant_method": "modelopt", **algorithm})
        assert (fault.kind, fault.tensor) == ("unknown-form", NAME)
    scaled = {NAME: torch.ones(4, 64).to(torch.float8_e4m3fn), f"{NAME}_scale": torch.ones(())}
    for method in (None, "modelopt"):
        declared = None if method is None else {"quant_method": method}
        fault = fault_in(tmp_path, {**scaled, "w.pre_quant_scale": torch.ones(64)}, declared)
        assert fault.kind == "unknown-form"
        assert "inputs times w.pre_quant_scale" in fault.message


@pytest.mark.parametrize("method", MODELOPT_METHODS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_a_scale_of_the_model_optimizer_that_is_absent(tmp_path: Path, method: str, dtype: torch.dtype) -> None:
    fault = fault_in(tmp_path, {NAME: torch.ones(4, 32).to(dtype)}, {"quant_method": method})
    assert (fault.kind, fault.tensor) == ("scale-missing", f"{NAME}_scale")


@pytest.mark.parametrize("name", ["experts.gate_up_proj", "mlp.mlp1_weight"])
def test_mxfp4_experts_as_transformers_reads_them(tmp_path: Path, name: str) -> None:
    torch.manual_seed(2)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 2), dtype=torch.uint8)
    suffixes = (".blocks", ".scales") if name.endswith("weight") else ("_blocks", "_scales")
    tensors = {name + suffix: tensor for suffix, tensor in zip(suffixes, (blocks, scales), strict=True)}
    stored = found_in(tmp_path, tensors, {"quant_method": "mxfp4"}, name)
    assert isinstance(stored, StoredWeight)
    assert (stored.shape, stored.storage.axes) == ((3, 10, 64), "out_in")
    meter = ReadMeter()
    found = read_stored(stored, "cpu", meter, dtype=torch.bfloat16)
    # transformers hands it out transposed, as its own layer multiplies.
    assert torch.equal(found.transpose(1, 2), convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16))
    one = ReadMeter()
    assert torch.equal(read_stored(stored, "cpu", one, expert=2, dtype=torch.bfloat16), found[2])
    assert one.bytes * 3 == meter.bytes == stored.bytes == blocks.numel() + scales.numel()
    rows = ReadMeter()
    assert torch.equal(read_stored(stored, "cpu", rows, expert=1, rows=(4, 7), dtype=torch.bfloat16), found[1, 4:7])
    assert rows.bytes == 3 * 2 * 17


# --- told or untold -------------------------------------------------------------------------------------------


def test_plain_weights_are_none_of_the_table_s(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        # A scale beside a plain weight is what calibration leaves behind: the weight is what it is.
        tensors = {NAME: torch.ones(2, 2, dtype=dtype), f"{NAME}_scale": torch.ones(2, 1)}
        for method in (None, *KNOWN_METHODS, "hqq"):
            assert found_in(tmp_path, tensors, method and {"quant_method": method}) is None
    assert found_in(tmp_path, {"other": torch.ones(1)}, {"quant_method": "gptq"}) is None


@pytest.mark.parametrize("case", ["gptq-4", "awq-4", "ct-int4-group", "bnb-nf4", "ct-float8-channel"])
@pytest.mark.parametrize("method", ["hqq", "quark", "GPTQ-v3", ""])
def test_an_unknown_method_is_refused_by_name(tmp_path: Path, case: str, method: str) -> None:
    parts, _ = vector(case)
    fault = fault_in(tmp_path, parts, {"quant_method": method})
    assert fault.kind == "unknown-method"
    assert fault.known == KNOWN_METHODS
    assert f'quantization_config.quant_method is "{method.lower()}"' in fault.message
    assert all(known in fault.message for known in KNOWN_METHODS)


@pytest.mark.parametrize(("case", "method"), [("gptq-4", "fp8"), ("ct-float8-channel", "gptq"), ("bnb-int8", "awq")])
def test_a_method_that_the_tensors_contradict(tmp_path: Path, case: str, method: str) -> None:
    fault = fault_in(tmp_path, vector(case)[0], {"quant_method": method})
    assert fault.kind == "unknown-form"
    assert f"declares the quant_method {method}" in fault.message


@pytest.mark.parametrize(
    ("dtype", "method", "missing"),
    [
        (torch.float8_e4m3fn, "fp8", f"{NAME}_scale_inv"),
        (torch.float8_e4m3fn, "compressed-tensors", f"{NAME}_scale"),
        (torch.int8, "bitsandbytes", "w.SCB"),
        (torch.uint8, "bitsandbytes", f"{NAME}.quant_state.bitsandbytes__nf4"),
    ],
)
def test_codes_without_any_scale(tmp_path: Path, dtype: torch.dtype, method: str, missing: str) -> None:
    tensors = {NAME: torch.ones(4, 4).to(dtype)}
    fault = fault_in(tmp_path, tensors, {"quant_method": method})
    assert (fault.kind, fault.tensor) == ("scale-missing", missing)
    assert NAME in fault.message
    alone = fault_in(tmp_path, tensors)
    assert (alone.kind, alone.tensor) == ("unknown-form", NAME)


def test_codes_of_another_dtype(tmp_path: Path) -> None:
    fault = fault_in(tmp_path, {"w.qweight": torch.ones(2, 2, dtype=torch.int64)}, {"quant_method": "gptq"})
    assert (fault.kind, fault.tensor) == ("unknown-form", "w.qweight")
    assert "I64" in fault.message


def test_where_a_config_declares(tmp_path: Path) -> None:
    def declared(values: dict[str, Any]) -> tuple[str, str | None] | None:
        found = declared_quantisation(ConfigFile(Path("config.json"), values))
        return None if found is None else (found.key, found.method)

    assert declared_quantisation(None) is None
    assert declared({}) is None
    assert declared({"quantization_config": None}) is None
    assert declared({"quantization_config": {"quant_method": "FP8"}}) == ("quantization_config", "fp8")
    nested = {"text_config": {"quantization_config": {"quant_method": "gptq"}}}
    assert declared(nested) == ("text_config.quantization_config", "gptq")
    assert declared({"compression_config": {"quant_method": "compressed-tensors"}}) == (
        "compression_config",
        "compressed-tensors",
    )
    assert declared({"quantization": {"group_size": 64, "bits": 4}}) == ("quantization", "mlx")
    assert declared({"quantization_config": {"load_in_4bit": True}}) == ("quantization_config", "bitsandbytes")
    assert declared({"quantization_config": {"quant_method": 4}}) == ("quantization_config", None)


def test_mlx_settings_of_one_module(tmp_path: Path) -> None:
    parts, declared = VECTORS / "mlx-8.safetensors", {"group_size": 32, "bits": 4}
    tensors = load_file(parts)
    expected = tensors.pop("expected")
    own = {**declared, "w": {"group_size": 64, "bits": 8}}
    found = read_from(tmp_path, tensors, own)
    assert torch.allclose(found, expected, rtol=0, atol=2**-23 * float(expected.abs().max()))
    assert "do not hold 4 bits" in fault_in(tmp_path, tensors, declared).message
    assert fault_in(tmp_path, tensors, {**own, "w": {**own["w"], "mode": "mxfp4"}}).known == ("affine",)


def test_both_versions_of_gptq(tmp_path: Path) -> None:
    parts, declared = vector("gptq-4")
    first = read_from(tmp_path, parts, declared)
    # The second version stores what the first adds one to; none of these zero points is all ones.
    parts["w.qzeros"] = (parts["w.qzeros"].to(torch.int64) + 0x11111111).to(torch.int32)
    assert torch.equal(read_from(tmp_path, parts, {**declared, "checkpoint_format": "gptq_v2"}), first)
    assert not torch.equal(read_from(tmp_path, parts, declared), first)
    fault = fault_in(tmp_path, parts, {**declared, "checkpoint_format": "marlin"})
    assert fault.known == ("gptq", "gptq_v2")
    assert "marlin" in fault.message


def test_bits_of_one_module_of_gptq(tmp_path: Path) -> None:
    parts, declared = vector("gptq-3-shuffled")
    found = read_from(tmp_path, parts, declared)
    other = {**declared, "bits": 4, "group_size": 128}
    assert "does not hold 4 bits" in fault_in(tmp_path, parts, other).message
    assert torch.equal(read_from(tmp_path, parts, {**other, "dynamic": {"w": {"bits": 3}}}), found)


@pytest.mark.parametrize(("key", "value"), [("version", "gemv"), ("version", "gemv_fast"), ("bits", 3)])
def test_other_layouts_of_awq_are_refused(tmp_path: Path, key: str, value: object) -> None:
    parts, declared = vector("awq-4")
    fault = fault_in(tmp_path, parts, {**declared, key: value})
    assert fault.kind == "unknown-form"
    assert str(value) in fault.message
    assert fault.known == (("gemm",) if key == "version" else ("4",))


def test_an_order_of_columns_in_compressed_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts, declared = vector("ct-int4-group-zero")
    plain = read_from(tmp_path, parts, declared)
    columns = plain.shape[1]
    parts[f"{NAME}_g_idx"] = torch.full((columns,), -1, dtype=torch.int32)
    assert torch.equal(read_from(tmp_path, parts, declared), plain)
    order = torch.arange(columns, dtype=torch.int32) // 32
    shuffle = torch.randperm(columns)
    parts[f"{NAME}_g_idx"] = order[shuffle]
    moved = read_from(tmp_path, parts, declared)
    scale = parts[f"{NAME}_scale"].float()
    steps = moved / scale[:, order[shuffle].long()]
    # Codes less zero points of 4 bits: whole numbers of the group that the order names.
    assert torch.allclose(steps, steps.round(), rtol=0, atol=1e-5)
    assert not torch.equal(moved, plain)


def test_declared_zero_points_that_are_absent(tmp_path: Path) -> None:
    for case in ("ct-int4-group-zero", "ct-int8-group-zero"):
        parts, declared = vector(case)
        del parts[f"{NAME}_zero_point"]
        fault = fault_in(tmp_path, parts, declared)
        assert (fault.kind, fault.tensor) == ("scale-missing", f"{NAME}_zero_point")


def test_a_global_scale_that_is_absent(tmp_path: Path) -> None:
    parts, declared = vector("ct-nvfp4")
    del parts[f"{NAME}_global_scale"]
    fault = fault_in(tmp_path, parts, declared)
    assert (fault.kind, fault.tensor) == ("scale-missing", f"{NAME}_global_scale")


# --- files that nobody vouches for ------------------------------------------------------------------------------


def reshaped(tensor: Tensor) -> list[Tensor]:
    """The tensor with an axis more, fewer or longer, flat, scalar and empty."""
    flat = tensor.flatten()
    return [
        flat,
        tensor.unsqueeze(0),
        tensor.unsqueeze(-1),
        torch.cat([flat, flat])[: flat.numel() + 1],
        flat[:0],
        flat[:1].squeeze(0),
        tensor.reshape(-1, 1, 1, 1),
        torch.cat([tensor, tensor]) if tensor.ndim else tensor.repeat(2),
        torch.cat([tensor, tensor], -1) if tensor.ndim else tensor.repeat(3),
        tensor[:-1] if tensor.ndim else tensor.repeat(4),
        tensor[..., :-1] if tensor.ndim else tensor.repeat(5),
    ]


def reads_or_refuses(directory: Path, tensors: Mapping[str, Tensor], declared: Mapping[str, Any] | None) -> bool:
    """Whether the weight was read; a refusal names a tensor of the file or one that is missing."""
    found = found_in(directory, tensors, declared)
    if not isinstance(found, StoredWeight):
        assert found is None or found.tensor.startswith("w.")
        return False
    weight = refusal = None
    try:
        weight = read_stored(found, "cpu", ReadMeter())
    except GlassblockError as error:
        refusal = error
    assert refusal is None or refusal.tensor is not None
    assert weight is None or tuple(weight.shape) == found.shape
    return weight is not None


@pytest.mark.parametrize("path", sorted(VECTORS.glob("*.safetensors")), ids=lambda path: path.stem)
def test_a_part_of_another_shape_or_dtype_is_refused_by_name(tmp_path: Path, path: Path) -> None:
    parts, declared = vector(path.stem)
    taken: set[tuple[str, tuple[int, ...]]] = set()
    for name, tensor in parts.items():
        others = [*reshaped(tensor), tensor.to(torch.int64), tensor.to(torch.bool), tensor.to(torch.float64)]
        others = [other for other in others if (other.shape, other.dtype) != (tensor.shape, tensor.dtype)]
        for other in others:
            if reads_or_refuses(tmp_path, {**parts, name: other}, declared):
                taken.add((name, tuple(other.shape)))
        assert reads_or_refuses(tmp_path, parts, declared)
    codes = {NAME, f"{NAME}_packed", "w.qweight", "w.g_idx"}
    for name, shape in taken:
        # The same numbers under other axes, one scale for all, or codes of another weight that is whole itself.
        same = math.prod(shape) == parts[name].numel()
        assert same or (name == f"{NAME}_scale" and math.prod(shape) == 1) or name in codes, (name, shape)


@pytest.mark.parametrize(("case", "name"), [("gptq-4-shuffled", "w.g_idx"), ("ct-int4-group-zero", f"{NAME}_g_idx")])
@pytest.mark.parametrize("wrong", [-2, -1, 3, 2**31 - 1])
def test_a_group_that_does_not_exist(tmp_path: Path, case: str, name: str, wrong: int) -> None:
    parts, declared = vector(case)
    columns = 96
    order = torch.arange(columns, dtype=torch.int32) % 2
    order[5] = wrong
    stored = found_in(tmp_path, {**parts, name: order}, declared)
    assert isinstance(stored, StoredWeight)
    with pytest.raises(DamagedCheckpoint, match=f"{name} names the groups") as error:
        read_stored(stored, "cpu", ReadMeter())
    assert error.value.tensor == name


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b"\xff\xfe",
        b"[" * 2000,
        b'{"shape": [10, 37], "shape": [1, 1]}',
        b'{"quant_type": "nf4", "blocksize": 64, "shape": [10, -37]}',
        b'{"quant_type": "nf4", "blocksize": 64, "shape": [10]}',
        b'{"quant_type": "nf4", "blocksize": 64, "shape": [4611686018427387904, 4611686018427387904]}',
        b'{"quant_type": "nf4", "blocksize": 64, "shape": [10.0, 37.0]}',
        b'{"quant_type": "nf4", "blocksize": 64, "shape": "10, 37"}',
        b'{"quant_type": "fp4", "blocksize": 64, "shape": [10, 37]}',
        b'{"quant_type": "nf4", "blocksize": 0, "shape": [10, 37]}',
        b'{"quant_type": "nf4", "blocksize": 1e400, "shape": [10, 37]}',
        b'{"quant_type": "nf4", "blocksize": true, "shape": [10, 37]}',
        b'{"quant_type": "nf4", "blocksize": 32, "shape": [10, 37]}',
        b" " * 5000,
        b'{"n": ' + b"9" * 3000 + b"}",
    ],
    ids=range(20),
)
def test_a_state_that_is_no_state(tmp_path: Path, state: bytes) -> None:
    parts, declared = vector("bnb-nf4")
    name = f"{NAME}.quant_state.bitsandbytes__nf4"
    fault = fault_in(tmp_path, {**parts, name: torch.tensor(list(state), dtype=torch.uint8)}, declared)
    assert fault.kind in {"misfit", "empty"}
    assert fault.tensor in {name, NAME, f"{NAME}.absmax"}


@pytest.mark.parametrize("offset", ["NaN", "Infinity", "true", '"1"', "null", "[1]", "1" + "0" * 300])
def test_a_nested_offset_that_is_no_number(tmp_path: Path, offset: str) -> None:
    parts, declared = vector("bnb-nf4-nested")
    name = f"{NAME}.quant_state.bitsandbytes__nf4"
    values = json.loads(bytes(parts[name].tolist()))
    text = json.dumps({**values, "nested_offset": "HERE"}).replace('"HERE"', offset)
    fault = fault_in(tmp_path, {**parts, name: torch.tensor(list(text.encode()), dtype=torch.uint8)}, declared)
    assert "nested_offset" in fault.message
    assert fault.tensor == name


def test_a_table_of_other_values(tmp_path: Path) -> None:
    parts, declared = vector("bnb-nf4")
    parts[f"{NAME}.quant_map"][3] += 0.01
    stored = found_in(tmp_path, parts, declared)
    assert isinstance(stored, StoredWeight)
    with pytest.raises(DamagedCheckpoint, match="does not hold the values of nf4"):
        read_stored(stored, "cpu", ReadMeter())


def test_codes_in_another_order_than_rows(tmp_path: Path) -> None:
    parts, declared = vector("bnb-int8")
    parts["w.weight_format"] = torch.tensor(2, dtype=torch.uint8)
    stored = found_in(tmp_path, parts, declared)
    assert isinstance(stored, StoredWeight)
    with pytest.raises(DamagedCheckpoint, match="weight_format is 2"):
        read_stored(stored, "cpu", ReadMeter())


@pytest.mark.parametrize("shape", [[0, 0], [-6, 96], [2**62, 2**62], [7, 96], [6, 97], [6, 2**40]])
def test_a_told_shape_that_is_none(tmp_path: Path, shape: list[int]) -> None:
    parts, declared = vector("ct-int4-group")
    fault = fault_in(tmp_path, {**parts, f"{NAME}_shape": torch.tensor(shape)}, declared)
    assert fault.kind == "misfit"
    assert fault.tensor in {f"{NAME}_shape", f"{NAME}_packed", f"{NAME}_scale"}


def test_a_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    parts, declared = vector("bnb-nf4")
    entries = entries_of(tmp_path, parts)
    stored = stored_weight(entries, config_of(declared), NAME)
    assert isinstance(stored, StoredWeight)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-300])
    again = stored_weight(entries, config_of(declared), NAME)
    assert isinstance(again, StorageFault)
    assert "model.safetensors" in again.message
    with pytest.raises(DamagedCheckpoint):
        read_stored(stored, "cpu", ReadMeter())


def test_lengths_beyond_any_memory(tmp_path: Path) -> None:
    huge = 2**62
    header = {
        "w.qweight": {"dtype": "I32", "shape": [0, huge], "data_offsets": [0, 0]},
        "w.qzeros": {"dtype": "I32", "shape": [huge, 0], "data_offsets": [0, 0]},
        "w.scales": {"dtype": "F16", "shape": [huge, 0], "data_offsets": [0, 0]},
    }
    entries = read_container(write_container(tmp_path / "model.safetensors", header)).entries
    fault = stored_weight(entries, config_of({"quant_method": "gptq"}), NAME)
    assert isinstance(fault, StorageFault)
    assert fault.kind == "empty"


def test_experts_and_rows_that_do_not_exist(tmp_path: Path) -> None:
    blocks, scales = torch.zeros(2, 3, 1, 16, dtype=torch.uint8), torch.zeros(2, 3, 1, dtype=torch.uint8)
    stack = found_in(tmp_path, {"e_blocks": blocks, "e_scales": scales}, None, "e")
    assert isinstance(stack, StoredWeight)
    for expert in (-1, 2, 10**30):
        with pytest.raises(InvalidValue, match="has no expert"):
            read_stored(stack, "cpu", ReadMeter(), expert=expert)
    with pytest.raises(InvalidValue, match="is a stack"):
        read_stored(stack, "cpu", ReadMeter(), rows=(0, 1))
    for rows in ((0, 0), (-1, 2), (0, 4), (3, 2)):
        with pytest.raises(InvalidValue, match="rows"):
            read_stored(stack, "cpu", ReadMeter(), expert=0, rows=rows)
    parts, declared = vector("gptq-4")
    plain = found_in(tmp_path, parts, declared)
    assert isinstance(plain, StoredWeight)
    with pytest.raises(InvalidValue, match="has no expert 0"):
        read_stored(plain, "cpu", ReadMeter(), expert=0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KEYS = ("quant_method", "bits", "group_size", "checkpoint_format", "version", "weight_block_size", "config_groups")
KEYS = (*KEYS, "dynamic", "mode", "w", "format")


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    declared=st.dictionaries(st.sampled_from(KEYS), JSON | st.sampled_from(KNOWN_METHODS), max_size=5),
    case=st.sampled_from(sorted(path.stem for path in VECTORS.glob("*.safetensors"))),
)
def test_whatever_a_config_declares(declared: dict[str, Any], case: str) -> None:
    container = read_container(VECTORS / f"{case}.safetensors")
    found = stored_weight(container.entries, config_of(declared), NAME)
    if isinstance(found, StoredWeight):
        assert tuple(read_stored(found, "cpu", ReadMeter()).shape) == found.shape
        assert math.prod(found.shape) == container.entries["expected"].elements


def test_the_table_names_every_part_it_reads() -> None:
    assert len({storage.name for storage in STORAGES}) == len(STORAGES)
    for storage in STORAGES:
        roles = {"codes", *storage.needs, *storage.may}
        assert set(storage.tells) <= roles
        assert storage.methods
        assert all("{name}" in one or "{stem}" in one for one in storage.codes)
