"""Quantised weights as the libraries write them, beside the numbers that the libraries read from them.

    python -m venv formats
    formats/bin/pip install torch numpy safetensors transformers compressed-tensors bitsandbytes "mlx[cpu]"
    formats/bin/pip install --no-deps auto-gptq==0.7.1
    formats/bin/pip install nvidia-modelopt
    formats/bin/pip download --no-deps --no-binary :all: autoawq==0.2.9 && tar xzf autoawq-0.2.9.tar.gz
    formats/bin/python tools/quantised_vectors.py tests/checkpoint/vectors --awq autoawq-0.2.9

One file for each case: the parts under the names they have in a checkpoint, for the weight `w.weight`; `expected`,
which the library made of them; in the metadata the `config` that goes with them and who `made` it.
Of AutoGPTQ and AutoAWQ, which no longer import beside current libraries, single source files are loaded.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

BLOCK = 64


def main() -> None:
    """Make all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--awq", type=Path, required=True, help="the unpacked source of AutoAWQ")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    for make in (bitsandbytes_cases, compressed_cases, mlx_cases, gptq_cases):
        make(arguments.directory)
    awq_cases(arguments.directory, arguments.awq)
    modelopt_cases(arguments.directory)


def save(
    directory: Path, case: str, made: str, config: dict[str, Any], parts: dict[str, Tensor], expected: Tensor
) -> None:
    """Write one case."""
    tensors = {f"w.{name}": tensor.detach().contiguous().clone() for name, tensor in parts.items()}
    tensors["expected"] = expected.detach().contiguous().clone()
    save_file(tensors, directory / f"{case}.safetensors", metadata={"config": json.dumps(config), "made": made})
    print(f"{case}: {list(expected.shape)} {expected.dtype}")


def bitsandbytes_cases(directory: Path) -> None:
    """4 bits plain and nested, and 8 bits."""
    import bitsandbytes.functional as bnb  # noqa: PLC0415

    made = f"bitsandbytes {importlib.metadata.version('bitsandbytes')}"
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    for case, quant_type, nested, dtype, storage, shape in (
        ("bnb-nf4", "nf4", False, torch.float32, torch.uint8, (10, 37)),
        ("bnb-nf4-odd", "nf4", False, torch.float16, torch.uint8, (7, 33)),
        ("bnb-nf4-nested", "nf4", True, torch.bfloat16, torch.uint8, (130, 131)),
        ("bnb-fp4", "fp4", False, torch.float32, torch.uint8, (9, 64)),
        ("bnb-fp4-nested-in-bfloat16", "fp4", True, torch.float16, torch.bfloat16, (16, 64)),
    ):
        weight = torch.randn(shape).to(dtype)
        packed, state = bnb.quantize_4bit(
            weight, blocksize=BLOCK, compress_statistics=nested, quant_type=quant_type, quant_storage=storage
        )
        parts = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        expected = bnb.dequantize_4bit(packed, state)
        # Half the widest step of the codes, and what nesting adds. The library's kernel for CPUs (0.50.2) is further
        # off where a row has an even length that no number of blocks fills, so no case has such a length.
        if float((expected.float() - weight.float()).abs().max()) > 0.17 * float(weight.abs().max()) + 0.1:
            sys.exit(f"{case}: the library does not read back what it wrote")
        save(directory, case, made, config, {"weight": packed, **parts}, expected)
    codes, scale, _ = bnb.int8_vectorwise_quant(torch.randn(11, 29).half())
    eight = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    parts = {"weight": codes, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    save(directory, "bnb-int8", made, eight, parts, bnb.int8_vectorwise_dequant(codes, scale))


def compressed_cases(directory: Path) -> None:
    """Packed, naive and FP4 forms."""
    from compressed_tensors.compressors import BaseCompressor  # noqa: PLC0415
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: PLC0415
    from compressed_tensors.quantization.utils import calculate_qparams  # noqa: PLC0415

    made = f"compressed-tensors {importlib.metadata.version('compressed-tensors')}"
    four, eight = {"num_bits": 4, "type": "int"}, {"num_bits": 8, "type": "int"}
    float8, float4 = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "float"}
    for case, kind, shape, dtype, told in (
        ("ct-int4-group", "pack-quantized", (6, 96), torch.float16, {**four, "strategy": "group", "group_size": 32}),
        (
            "ct-int4-group-zero",
            "pack-quantized",
            (13, 96),
            torch.float16,
            {**four, "strategy": "group", "group_size": 32, "symmetric": False},
        ),
        ("ct-int4-channel", "pack-quantized", (5, 37), torch.bfloat16, {**four, "strategy": "channel"}),
        (
            "ct-int8-pack-zero",
            "pack-quantized",
            (7, 33),
            torch.bfloat16,
            {**eight, "strategy": "channel", "symmetric": False},
        ),
        ("ct-int8-channel", "int-quantized", (7, 33), torch.bfloat16, {**eight, "strategy": "channel"}),
        (
            "ct-int8-group-zero",
            "naive-quantized",
            (7, 48),
            torch.float16,
            {**eight, "strategy": "group", "group_size": 16, "symmetric": False},
        ),
        ("ct-float8-tensor", "float-quantized", (7, 33), torch.bfloat16, {**float8, "strategy": "tensor"}),
        ("ct-float8-channel", "float-quantized", (7, 33), torch.float32, {**float8, "strategy": "channel"}),
        (
            "ct-float8-block",
            "float-quantized",
            (32, 48),
            torch.bfloat16,
            {**float8, "strategy": "block", "block_structure": [16, 16]},
        ),
        (
            "ct-nvfp4",
            "nvfp4-pack-quantized",
            (6, 64),
            torch.bfloat16,
            {**float4, "strategy": "tensor_group", "group_size": 16},
        ),
        (
            "ct-mxfp4",
            "mxfp4-pack-quantized",
            (6, 64),
            torch.bfloat16,
            {**float4, "strategy": "group", "group_size": 32},
        ),
    ):
        arguments = QuantizationArgs(**told)
        weight = torch.randn(shape).to(dtype)
        scale, zero, whole = _parameters(weight, arguments, calculate_qparams)
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        compressor = BaseCompressor.get_value_from_registry(kind)
        given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        if whole is not None:
            given["weight_global_scale"] = whole
        parts = dict(compressor.compress(given, scheme))
        read = compressor.decompress({name: tensor.clone() for name, tensor in parts.items()}, scheme)["weight"]
        config = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": {"weights": told}}}
        save(directory, case, made, {"quantization_config": config}, parts, read)


def _parameters(weight: Tensor, arguments: Any, calculate: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scales and zero points over the blocks that the strategy names, by the library's own arithmetic."""
    rows, columns = weight.shape
    strategy = str(arguments.strategy)
    if strategy == "tensor":
        return *calculate(weight.min().reshape(1), weight.max().reshape(1), arguments), None
    if strategy == "block":
        tall, wide = arguments.block_structure
        blocks = weight.reshape(rows // tall, tall, columns // wide, wide).transpose(1, 2).flatten(2)
    else:
        blocks = weight.reshape(rows, -1, columns if strategy == "channel" else arguments.group_size)
    low, high = blocks.amin(-1), blocks.amax(-1)
    if strategy != "tensor_group":
        return *calculate(low, high, arguments), None
    whole = (448.0 * 6.0 / weight.abs().max().float()).reshape(1)
    scale, zero = calculate(low, high, arguments, global_scale=whole)
    return scale, zero, whole


def mlx_cases(directory: Path) -> None:
    """The affine mode, by the CPU backend."""
    import mlx.core as mx  # noqa: PLC0415

    made = f"mlx {importlib.metadata.version('mlx')}"
    for bits, size, shape in (
        (2, 32, (5, 64)),
        (3, 64, (5, 128)),
        (4, 32, (3, 4, 96)),
        (5, 32, (5, 32)),
        (6, 32, (5, 96)),
        (8, 64, (5, 64)),
    ):
        weight = mx.array(torch.randn(shape).numpy())
        names = ("weight", "scales", "biases")
        packed = mx.quantize(weight, group_size=size, bits=bits, stream=mx.cpu)
        expected = mx.dequantize(*packed, group_size=size, bits=bits, stream=mx.cpu)
        parts = {name: torch.from_numpy(_numpy(tensor)) for name, tensor in zip(names, packed, strict=True)}
        config = {"quantization": {"group_size": size, "bits": bits, "mode": "affine"}}
        save(directory, f"mlx-{bits}", made, config, parts, torch.from_numpy(_numpy(expected)))


def _numpy(array: Any) -> Any:
    import numpy as np  # noqa: PLC0415

    return np.array(array)


def gptq_cases(directory: Path) -> None:
    """Random words, read by the layer itself: its answer for the unit matrix is the weight."""
    files = importlib.metadata.files("auto-gptq") or []
    path = next(file for file in files if str(file).endswith("nn_modules/qlinear/qlinear_cuda.py"))
    module = _module("qlinear_cuda", Path(str(path.locate())))
    made = f"AutoGPTQ {importlib.metadata.version('auto-gptq')}, qlinear_cuda.py on the CPU"
    for bits, size, shuffled in ((2, 32, False), (3, 32, True), (4, 64, True), (4, 32, False), (8, -1, False)):
        rows, columns = 64, 96
        layer = module.QuantLinear(bits, size, columns, rows, bias=False, weight_dtype=torch.float32)
        groups = layer.scales.shape[0]
        layer.qweight = torch.randint(-(2**31), 2**31, layer.qweight.shape, dtype=torch.int64).to(torch.int32)
        # Stored zero points of all ones are left out: the libraries read them in different ways.
        zeros = torch.randint(0, 2**bits - 1, (groups, rows))
        layer.qzeros = _packed(zeros, bits)
        layer.scales = torch.rand(groups, rows).to(torch.float16).to(torch.float32)
        if shuffled:
            layer.g_idx = layer.g_idx[torch.randperm(columns)]
        expected = layer.forward(torch.eye(columns)).T
        parts = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales.half()}
        if shuffled or size == 32:
            parts["g_idx"] = layer.g_idx
        config = {"quant_method": "gptq", "bits": bits, "group_size": size, "checkpoint_format": "gptq"}
        case = f"gptq-{bits}{'-shuffled' if shuffled else ''}"
        save(directory, case, made, {"quantization_config": config}, parts, expected)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Codes of each row joined from the lowest bit on, as 32-bit words."""
    words = []
    for row in codes.tolist():
        joined = sum(code << (bits * place) for place, code in enumerate(row))
        raw = joined.to_bytes(len(row) * bits // 8, "little")
        words.append(torch.frombuffer(bytearray(raw), dtype=torch.int32))
    return torch.stack(words)


def modelopt_cases(directory: Path) -> None:
    """FP8 with one scale and with blocks, and NVFP4, under the names that its export gives them."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor  # noqa: PLC0415

    made = f"nvidia-modelopt {importlib.metadata.version('nvidia-modelopt')}"
    for case, algorithm, shape, blocks in (
        ("modelopt-fp8", "FP8", (7, 33), None),
        ("modelopt-fp8-block", "FP8_PB_WO", (130, 140), {-1: 128, -2: 128}),
    ):
        codes, scale = FP8QTensor.quantize(torch.randn(shape).bfloat16(), block_sizes=blocks)
        scale = scale.float()
        expected = codes.dequantize(dtype=torch.float32, scale=scale, block_sizes=blocks)
        parts = {"weight": codes._quantized_data, "weight_scale": scale if blocks is None else scale[:, None, :, None]}
        config = {"quant_method": "modelopt", "quant_algo": algorithm}
        save(directory, case, made, {"quantization_config": config}, parts, expected)
    codes, scale, over_all = NVFP4QTensor.quantize(torch.randn(6, 64).bfloat16(), 16)
    expected = codes.dequantize(dtype=torch.float32, scale=scale, double_scale=over_all, block_sizes={-1: 16})
    parts = {"weight": codes._quantized_data, "weight_scale": scale, "weight_scale_2": over_all}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    save(directory, "modelopt-nvfp4", made, {"quantization_config": config}, parts, expected)


def awq_cases(directory: Path, source: Path) -> None:
    """Random words, read by the layer's own unpacking."""
    module = _module("packing_utils", source / "awq" / "utils" / "packing_utils.py")
    rows, columns, size = 24, 64, 32
    qweight = torch.randint(-(2**31), 2**31, (columns, rows // 8), dtype=torch.int64).to(torch.int32)
    qzeros = torch.randint(-(2**31), 2**31, (columns // size, rows // 8), dtype=torch.int64).to(torch.int32)
    scales = torch.rand(columns // size, rows).half()
    expected = module.dequantize_gemm(qweight, qzeros, scales, 4, size).T
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}
    parts = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    made = f"AutoAWQ {source.name.rpartition('-')[2]}, packing_utils.py"
    save(directory, "awq-4", made, {"quantization_config": config}, parts, expected)


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        sys.exit(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
