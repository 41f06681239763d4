"""Square projections that lie with their axes exchanged, told from their weights alone."""

import json
from pathlib import Path

import pytest
import torch
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.fix import Unrepaired
from glassblock.audit.fixes import repair_of
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.wire.audits import Coverage, Report
from makers import Tiny, tiny_checkpoint, write_weights
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).parent.parent.parent
TINY_LLAMA = ROOT / "examples" / "tiny-llama"
FUSED = ROOT / "tests" / "data" / "trained-fused"
LAYER = 2
RULE = "tensor/transposed"


def written(directory: Path, source: Path, tensors: dict[str, Tensor], neurons: int) -> Path:
    directory.mkdir()
    config = json.loads((source / "config.json").read_text()) | {"intermediate_size": neurons}
    (directory / "config.json").write_text(json.dumps(config))
    write_weights(directory, {name: tensor.contiguous() for name, tensor in tensors.items()})
    return directory


def square() -> dict[str, Tensor]:
    """The trained tiny Llama with as many neurons as channels."""
    tensors = load_file(TINY_LLAMA / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensors[name] = tensor[:64]
        elif name.endswith("down_proj.weight"):
            tensors[name] = tensor[:, :64]
    return tensors


def turned(tensors: dict[str, Tensor], *parts: str, layer: int = LAYER) -> dict[str, Tensor]:
    for part in parts:
        name = f"model.layers.{layer}.mlp.{part}_proj.weight"
        tensors[name] = tensors[name].T
    return tensors


def of_rule(report: Report) -> Coverage:
    (row,) = [row for row in report.coverage if row.rule == RULE]
    return row


def test_a_healthy_square_model_is_checked_and_silent(tmp_path: Path) -> None:
    report = audit_checkpoint(written(tmp_path / "model", TINY_LLAMA, square(), 64))
    assert report.findings == ()
    assert (of_rule(report).checked, of_rule(report).undecidable, of_rule(report).skipped) == (4, (), ())


@pytest.mark.parametrize("parts", [("down",), ("up",), ("gate",), ("gate", "up")])
def test_what_is_turned_is_the_only_finding(parts: tuple[str, ...], tmp_path: Path) -> None:
    directory = written(tmp_path / "model", TINY_LLAMA, turned(square(), *parts), 64)
    report = audit_checkpoint(directory)
    (finding,) = report.findings
    assert (finding.rule, finding.level, finding.certainty) == (RULE, "warning", "statistical")
    assert finding.layer == LAYER
    assert finding.tensors == tuple(f"model.layers.{LAYER}.mlp.{part}_proj.weight" for part in parts)
    assert finding.evidence["p"] <= finding.evidence["level"]
    assert ("their axes" if len(parts) > 1 else "its axes") in finding.message
    assert isinstance(repair_of(open_checkpoint(directory), finding), Unrepaired)


@pytest.mark.parametrize(("channels", "seed"), [(0.3, 0), (0.3, 2), (0.8, 0), (0.8, 2)])
def test_a_weakly_paired_down_is_not_told_as_gate_and_up(channels: float, seed: int, tmp_path: Path) -> None:
    """Channels of their own lengths let gate and up look turned against a down that is: it is always named."""
    draw = torch.Generator().manual_seed(seed)
    tensors, prefix = square(), f"model.layers.{LAYER}.mlp."
    lengths = (torch.randn(64, generator=draw) * channels).exp()
    down = tensors[f"{prefix}down_proj.weight"]
    noise = torch.randn(64, 64, generator=draw) * down.std()
    tensors[f"{prefix}down_proj.weight"] = (0.3 * down + noise) * lengths[:, None]
    for part in ("gate", "up"):
        tensors[f"{prefix}{part}_proj.weight"] = tensors[f"{prefix}{part}_proj.weight"] * lengths
    report = audit_checkpoint(written(tmp_path / "model", TINY_LLAMA, turned(tensors, "down"), 64))
    found = [{*one.tensors, *one.evidence["or_else"]} for one in report.findings if one.rule == RULE]
    open_ = [one.reason for one in of_rule(report).undecidable if one.layer == LAYER]
    assert len(found) + len(open_) == 1
    assert all(f"{prefix}down_proj.weight" in names for names in (*found, *open_))


def test_one_tensor_of_gate_and_up_as_high_as_it_is_wide(tmp_path: Path) -> None:
    tensors = load_file(FUSED / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp."
        halves = [half[:32] for half in tensors[f"{prefix}gate_up_proj.weight"].chunk(2)]
        tensors[f"{prefix}gate_up_proj.weight"] = torch.cat(halves)
        tensors[f"{prefix}down_proj.weight"] = tensors[f"{prefix}down_proj.weight"][:, :32]
    report = audit_checkpoint(written(tmp_path / "model", FUSED, turned(tensors, "gate_up", layer=1), 32))
    assert [(one.rule, one.layer) for one in report.findings if one.level != "note"] == [(RULE, 1)]


def test_a_reference_decides_instead(tmp_path: Path) -> None:
    original = written(tmp_path / "original", TINY_LLAMA, square(), 64)
    broken = written(tmp_path / "broken", TINY_LLAMA, turned(square(), "down"), 64)
    report = audit_checkpoint(broken, AuditQuestion(reference=open_checkpoint(original)))
    (finding,) = [finding for finding in report.findings if finding.rule == RULE]
    assert (finding.level, finding.certainty) == ("error", "proved")


def test_random_numbers_leave_it_undecidable(tmp_path: Path) -> None:
    report = audit_checkpoint(tiny_checkpoint("llama", tmp_path / "model", tiny=Tiny(hidden=48, intermediate=48)))
    assert [finding for finding in report.findings if finding.rule == RULE] == []
    row = of_rule(report)
    assert [one.layer for one in row.undecidable] == [0, 1]
    assert all("square" in one.reason and "captured" in one.would_decide for one in row.undecidable)


def padded(tensors: dict[str, Tensor], kept: int) -> dict[str, Tensor]:
    """Squares whose last neurons and last channels are zero, both."""
    for name, tensor in tensors.items():
        if ".mlp." in name:
            tensors[name] = torch.zeros_like(tensor)
            tensors[name][:kept, :kept] = tensor[:kept, :kept]
    return tensors


@pytest.mark.parametrize("kept", [63, 60, 56, 40])
def test_padding_of_neurons_and_channels_is_no_orientation(kept: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(kept)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) if ".mlp." in name else tensor
        for name, tensor in square().items()
    }
    report = audit_checkpoint(written(tmp_path / "model", TINY_LLAMA, padded(tensors, kept), 64))
    assert [finding for finding in report.findings if finding.rule == RULE] == []


@pytest.mark.parametrize("part", ["down", "up", "gate"])
def test_what_is_turned_is_found_beside_padding(part: str, tmp_path: Path) -> None:
    tensors = turned(padded(square(), 56), part)
    report = audit_checkpoint(written(tmp_path / "model", TINY_LLAMA, tensors, 64))
    (finding,) = [finding for finding in report.findings if finding.rule == RULE]
    assert finding.tensors == (f"model.layers.{LAYER}.mlp.{part}_proj.weight",)


def test_what_is_not_square_is_not_asked() -> None:
    row = of_rule(audit_checkpoint(TINY_LLAMA))
    assert (row.checked, row.undecidable) == (0, ())
    assert row.skipped
