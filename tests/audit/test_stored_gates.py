"""The gate test on weights that are stored quantised: a trained model in every form, healthy and exchanged."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gates import edit_config, train
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.fix import Unrepaired
from glassblock.audit.fixes import repair_of
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.patches import patched
from glassblock.numerics.dequantise_codebook import E2M1, NF4
from glassblock.wire.audits import Coverage, Finding, Report
from makers import Tiny, tiny_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-llama"
RULES = ("ffn/gate-up-swapped", "ffn/fused-order", "ffn/fused-layout", "ffn/mispaired-neurons")
GROUP = 32

Parts = dict[str, Tensor]
"""What a weight is stored as, by the names after its module's."""


def fp8_blocks(weight: Tensor) -> Parts:
    rows, columns = weight.shape
    blocks = weight.unflatten(0, (rows // GROUP, GROUP)).unflatten(2, (columns // GROUP, GROUP))
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}


def int8_channels(weight: Tensor) -> Parts:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def in_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 0 to 15 around 8, and scales `[rows, groups]`: symmetric rounding to four bits."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / 7).half().float()
    codes = (groups / scale.unsqueeze(-1)).round().clamp(-8, 7) + 8
    return codes.flatten(1).to(torch.int64), scale


def gptq(weight: Tensor) -> Parts:
    codes, scale = in_groups(weight)
    zeros = torch.full((scale.shape[1], len(weight) // 8), 0x77777777, dtype=torch.int32)  # stored less one
    return {"qweight": words(codes).T, "qzeros": zeros, "scales": scale.T.half()}


def awq(weight: Tensor) -> Parts:
    codes, scale = in_groups(weight)
    shuffled = codes.T.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)
    zeros = words(torch.full((scale.shape[1], len(weight)), 8))
    return {"qweight": words(shuffled), "qzeros": zeros, "scales": scale.T.half()}


def compressed(weight: Tensor) -> Parts:
    codes, scale = in_groups(weight)
    return {"weight_packed": words(codes), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def nf4(weight: Tensor) -> Parts:
    blocks = weight.reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    codes = nearest(blocks / absmax[:, None], torch.tensor(NF4)).flatten()
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    return {
        "weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1),
        "weight.absmax": absmax,
        "weight.quant_map": torch.tensor(NF4),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def mxfp4(weight: Tensor) -> Parts:
    groups = weight.unflatten(1, (-1, 32))
    exponent = groups.abs().amax(-1).log2().floor() - 2
    codes = nearest(groups / torch.exp2(exponent).unsqueeze(-1), torch.tensor(E2M1)).flatten(1)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {"weight_packed": packed.to(torch.uint8), "weight_scale": (exponent + 127).to(torch.uint8)}


def nvfp4(weight: Tensor) -> Parts:
    """As NVIDIA's Model Optimizer writes it: the scale over all multiplies."""
    groups = weight.unflatten(1, (-1, 16))
    over_all = weight.abs().max() / (6 * 448)
    scale = (groups.abs().amax(-1) / (6 * over_all)).to(torch.float8_e4m3fn)
    codes = nearest(groups / (scale.float() * over_all).unsqueeze(-1), torch.tensor(E2M1)).flatten(1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": over_all}


def fp8_modelopt(weight: Tensor) -> Parts:
    scale = weight.abs().max() / 448
    return {
        "weight": (weight / scale).to(torch.float8_e4m3fn),
        "weight_scale": scale,
        "input_scale": torch.tensor(0.02),
    }


def nearest(numbers: Tensor, table: Tensor) -> Tensor:
    return (numbers.unsqueeze(-1) - table).abs().argmin(-1)


def words(codes: Tensor) -> Tensor:
    """Codes of 4 bits of each row in 32-bit words, the first lowest."""
    return (codes.unflatten(-1, (-1, 8)) << (4 * torch.arange(8))).sum(-1).to(torch.int32)


Form = tuple[Callable[[Tensor], Parts], dict[str, Any]]
_MX = {"weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}}
FORMS: Mapping[str, Form] = {
    "FP8 in blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}),
    "int8": (int8_channels, {"quant_method": "compressed-tensors"}),
    "FP8 of ModelOpt": (fp8_modelopt, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "NVFP4 of ModelOpt": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}),
    "GPTQ": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "AWQ": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "compressed-tensors": (compressed, {"quant_method": "compressed-tensors"}),
    "NF4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "MXFP4": (
        mxfp4,
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": _MX},
        },
    ),
}
EVERY_FORM = pytest.mark.parametrize("form", FORMS)


def quantised(source: Path, directory: Path, form: str, *, exchanged: tuple[int, ...] = ()) -> Path:
    """A copy whose feed-forward weights are stored in a form, gate and up exchanged in some layers."""
    shutil.copytree(source, directory)
    write, declared = FORMS[form]
    tensors: Parts = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        stored = name
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
        if layer in exchanged:
            other = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}
            stored = ".".join(other.get(part, part) for part in name.split("."))
        if (".mlp." in name or ".experts." in name) and tensor.dim() == 2:
            parts = write(tensor.float())
            tensors |= {stored.removesuffix("weight") + part: told.contiguous() for part, told in parts.items()}
        else:
            tensors[stored] = tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    edit_config(directory, quantization_config=declared)
    return directory


def about_gates(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.rule in RULES]


def gate_coverage(report: Report) -> Coverage:
    return next(entry for entry in report.coverage if entry.rule == RULES[0])


@EVERY_FORM
def test_a_healthy_model_is_silent_in_every_form(form: str, tmp_path: Path) -> None:
    report = audit_checkpoint(quantised(EXAMPLE, tmp_path / "model", form))
    assert about_gates(report) == []
    assert [finding.rule for finding in report.findings if finding.level == "error"] == []
    covered = gate_coverage(report)
    assert (covered.checked, covered.undecidable, covered.skipped) == (4, (), ())
    assert [layer.metrics["screened"] for layer in report.layers] == [1] * 4
    assert report.verdict == "pass"


DAMAGE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "a row less": lambda part: part[:-1],
    "a column less": lambda part: part[:, :-1],
    "whole numbers": lambda part: part.to(torch.int32),
}
ONE_SCALE = ("FP8 of ModelOpt",)  # for all of a weight
DAMAGED = [
    *((form, "codes", "a row less") for form in FORMS),
    *((form, "codes", "a column less") for form in FORMS if form != "NF4"),
    *((form, "scales", "a row less") for form in FORMS if form not in ONE_SCALE),
    *((form, "scales", "a column less") for form in ("FP8 in blocks", "GPTQ", "AWQ", "MXFP4")),
    *((form, "scales", "whole numbers") for form in FORMS),
    *((form, "zeros", kind) for form in ("GPTQ", "AWQ") for kind in ("a row less", "a column less")),
]
PLACES = {"codes": ("qweight", "weight_packed", "weight"), "zeros": ("qzeros",)}
PLACES["scales"] = ("scales", "weight_scale", "weight_scale_inv", "weight.absmax")


@pytest.mark.parametrize(("form", "part", "kind"), DAMAGED)
def test_parts_that_do_not_belong_together_are_an_error(form: str, part: str, kind: str, tmp_path: Path) -> None:
    directory = quantised(EXAMPLE, tmp_path / "model", form)
    tensors = load_file(directory / "model.safetensors")
    network = "model.layers.1.mlp.gate_proj."
    name = next(network + place for place in PLACES[part] if network + place in tensors)
    tensors[name] = DAMAGE[kind](tensors[name]).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    report = audit_checkpoint(directory)
    (finding,) = report.findings
    assert (finding.level, finding.certainty, finding.layer) == ("error", "proved", 1)
    assert finding.rule in {"config/shape", "quant/scale-missing"}
    assert all(told.startswith(network) for told in finding.tensors)
    assert report.verdict == "fail"
    if kind == "whole numbers":
        assert f"{name} is stored as I32, where " in finding.message
        assert finding.evidence["dtype"] == "I32"
        assert "missing" not in finding.evidence


@EVERY_FORM
def test_a_swap_is_found_in_every_form_and_repaired_by_its_names(form: str, tmp_path: Path) -> None:
    directory = quantised(EXAMPLE, tmp_path / "model", form, exchanged=(1, 2))
    report = audit_checkpoint(directory)
    found = about_gates(report)
    assert [(finding.rule, finding.layer) for finding in found] == [(RULES[0], 1), (RULES[0], 2)]
    for finding in found:
        assert finding.evidence["log10_p"] < -30
        assert "dequantised to float32" in finding.evidence["stored"]
        broken = open_checkpoint(directory)
        repair = repair_of(broken, finding)
        assert not isinstance(repair, Unrepaired)
        assert [left.layer for left in about_gates(audit_checkpoint(patched(broken, repair)))] == [
            3 - (finding.layer or 0)
        ]


@pytest.mark.parametrize("form", ["int8", "MXFP4", "GPTQ"])
def test_experts_that_are_quantised(form: str, tmp_path: Path) -> None:
    plain = train(tiny_checkpoint("mixtral", tmp_path / "plain", tiny=Tiny(hidden=64, intermediate=128, layers=2)))
    assert about_gates(audit_checkpoint(quantised(plain, tmp_path / "healthy", form))) == []
    (finding,) = about_gates(audit_checkpoint(quantised(plain, tmp_path / "broken", form, exchanged=(1,))))
    assert (finding.layer, finding.expert) == (1, None)
    assert len(finding.evidence["experts"]) == 4


def test_rows_in_pieces_or_whole_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = quantised(EXAMPLE, tmp_path / "model", "FP8 in blocks", exchanged=(1,))
    whole = audit_checkpoint(directory)
    monkeypatch.setattr("glassblock.audit.stored_pieces.PIECE_ENTRIES", 1000)
    pieced = audit_checkpoint(directory)
    assert [finding.message for finding in about_gates(pieced)] == [finding.message for finding in about_gates(whole)]
    for one, other in zip(whole.layers, pieced.layers, strict=True):
        # Sums of 384 rows in float32, in another order.
        assert other.metrics["gate_z"] == pytest.approx(one.metrics["gate_z"], rel=1e-3)


def test_without_the_gate_rules_nothing_is_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = quantised(EXAMPLE, tmp_path / "model", "NF4")

    def refuse(*_args: object) -> None:
        raise AssertionError

    monkeypatch.setattr("glassblock.audit.gather.stored_pieces", refuse)
    assert audit_checkpoint(directory, AuditQuestion(rules=("tensor/non-finite",))).verdict == "pass"
