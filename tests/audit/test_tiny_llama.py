"""The gate rules on the trained tiny Llama that ships as an example: as it is, exchanged, fused, and in shards."""

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from glassblock.audit.audit import audit_checkpoint
from glassblock.wire.audits import Report
from makers import write_weights
from safetensors.torch import load_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TRAINED = EXAMPLES / "tiny-llama"
LAYERS = range(4)
SWAPPED, FUSED = "ffn/gate-up-swapped", "ffn/fused-order"


def _plant_swap() -> Callable[[Path, Path, Iterable[int]], object]:
    """The example's own command, which is no package."""
    spec = importlib.util.spec_from_file_location("plant_swap", EXAMPLES / "plant_swap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.plant_swap


plant_swap = _plant_swap()


def findings(report: Report) -> list[tuple[str, int | None]]:
    return [(finding.rule, finding.layer) for finding in report.findings]


def fused(directory: Path, exchanged: Iterable[int] = ()) -> Path:
    """The same model as a phi3: gate and up in one tensor, up first in the layers named."""
    directory.mkdir()
    tensors = load_file(TRAINED / "model.safetensors")
    for layer in LAYERS:
        prefix = f"model.layers.{layer}."
        gate, up = (tensors.pop(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up"))
        tensors[f"{prefix}mlp.gate_up_proj.weight"] = torch.cat([up, gate] if layer in exchanged else [gate, up])
        parts = [tensors.pop(f"{prefix}self_attn.{name}_proj.weight") for name in ("q", "k", "v")]
        tensors[f"{prefix}self_attn.qkv_proj.weight"] = torch.cat(parts)
    write_weights(directory, tensors)
    config = json.loads((TRAINED / "config.json").read_text())
    config |= {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_as_trained_it_is_silent_and_every_gate_is_known() -> None:
    report = audit_checkpoint(TRAINED)
    assert (findings(report), report.verdict) == ([], "pass")
    assert [layer.metrics["verdict"] for layer in report.layers] == ["as-named"] * len(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_one_exchanged_layer_is_the_only_finding(layer: int, tmp_path: Path) -> None:
    plant_swap(TRAINED, tmp_path / "swapped", [layer])
    report = audit_checkpoint(tmp_path / "swapped")
    assert (findings(report), report.verdict) == ([(SWAPPED, layer)], "fail")
    evidence = report.findings[0].evidence
    assert 10 ** evidence["log10_p"] <= evidence["family_wise"]["level"]


def test_every_exchanged_layer_is_a_finding(tmp_path: Path) -> None:
    plant_swap(TRAINED, tmp_path / "swapped", LAYERS)
    assert findings(audit_checkpoint(tmp_path / "swapped")) == [(SWAPPED, layer) for layer in LAYERS]


def test_gate_and_up_in_different_shards(tmp_path: Path) -> None:
    tensors = load_file(TRAINED / "model.safetensors")
    (tmp_path / "sharded").mkdir()
    write_weights(tmp_path / "sharded", tensors, shards=7)
    shutil.copyfile(TRAINED / "config.json", tmp_path / "sharded" / "config.json")
    plant_swap(tmp_path / "sharded", tmp_path / "swapped", [2])
    assert findings(audit_checkpoint(tmp_path / "sharded")) == []
    assert findings(audit_checkpoint(tmp_path / "swapped")) == [(SWAPPED, 2)]


def test_fused_as_the_family_says_it_is_silent(tmp_path: Path) -> None:
    report = audit_checkpoint(fused(tmp_path / "phi3"))
    assert (findings(report), report.verdict) == ([], "pass")


@pytest.mark.parametrize("layer", LAYERS)
def test_fused_with_up_first_in_one_layer(layer: int, tmp_path: Path) -> None:
    report = audit_checkpoint(fused(tmp_path / "phi3", [layer]))
    (finding,) = report.findings
    assert (finding.rule, finding.layer, finding.certainty) == (FUSED, layer, "statistical")
    assert finding.fix is not None
    assert (finding.fix.action, finding.fix.tensors) == ("swap-halves", finding.tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_changes_nothing(dtype: torch.dtype, tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    tensors = load_file(TRAINED / "model.safetensors")
    write_weights(tmp_path / "half", {name: tensor.to(dtype) for name, tensor in tensors.items()})
    shutil.copyfile(TRAINED / "config.json", tmp_path / "half" / "config.json")
    plant_swap(tmp_path / "half", tmp_path / "swapped", [1])
    assert findings(audit_checkpoint(tmp_path / "half")) == []
    assert findings(audit_checkpoint(tmp_path / "swapped")) == [(SWAPPED, 1)]
