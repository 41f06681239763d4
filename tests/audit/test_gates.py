"""The gate rules: what they convict, what they refuse to judge, and what a verdict on the checkpoint makes of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.gate_rules import power_of_ten
from glassblock.wire.audits import Coverage, Report
from makers import tiny_checkpoint
from plants import edit_json, edit_tensors, healthy_checkpoint, rename
from torch import Tensor

RULE = "ffn/gate-up-swapped"


def coverage(report: Report, rule: str = RULE) -> Coverage:
    (entry,) = (entry for entry in report.coverage if entry.rule == rule)
    return entry


def names(layer: int) -> tuple[str, str]:
    return (f"model.layers.{layer}.mlp.gate_proj.weight", f"model.layers.{layer}.mlp.up_proj.weight")


def exchange(directory: Path, *layers: int) -> None:
    for layer in layers:
        rename(*names(layer))(directory)


def test_one_exchanged_layer_carries_its_proof_and_its_repair(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    exchange(tmp_path, 1)
    report = audit_checkpoint(tmp_path)
    (finding,) = report.findings
    evidence: dict[str, Any] = finding.evidence
    assert evidence["family_wise"] == {"alpha": 1e-3, "tests": 4, "level": 1e-3 / 4}
    assert 10 ** evidence["log10_p"] <= evidence["family_wise"]["level"]
    assert evidence["log10_p"] == evidence["common_direction"]["up"]["log10_p"]
    assert evidence["common_direction"]["gate"]["draws_p"] > 0.01
    assert evidence["balance_with_down"].keys() == {"gate", "up"}
    assert finding.fix is not None
    assert finding.fix.action == "swap-tensors"
    assert finding.fix.tensors == names(1) == finding.tensors
    assert coverage(report).checked == 2
    assert [layer.metrics["verdict"] for layer in report.layers] == ["as-named", "swapped"]


def test_the_repair_names_the_biases_too(tmp_path: Path) -> None:
    widths = {"gate": 112, "up": 112, "down": 48}
    biases = {
        f"model.layers.{layer}.mlp.{name}_proj.bias": torch.ones(width)
        for layer in (0, 1)
        for name, width in widths.items()
    }
    healthy_checkpoint("llama", tmp_path, config={"mlp_bias": True}, tensors=biases)
    exchange(tmp_path, 0)
    (finding,) = audit_checkpoint(tmp_path).findings
    assert finding.fix is not None
    assert finding.fix.tensors == (*names(0), *(name.replace("weight", "bias") for name in names(0)))


def test_every_exchanged_layer_is_a_finding(tmp_path: Path) -> None:
    healthy_checkpoint("qwen2", tmp_path)
    exchange(tmp_path, 0, 1)
    report = audit_checkpoint(tmp_path)
    assert [(finding.rule, finding.layer) for finding in report.findings] == [(RULE, 0), (RULE, 1)]


def test_an_exchanged_layer_is_found_in_a_damaged_file(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    exchange(tmp_path, 0)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    report = audit_checkpoint(tmp_path)
    assert [(finding.rule, finding.layer) for finding in report.findings] == [("container/truncated", None), (RULE, 0)]
    assert coverage(report, "tensor/non-finite").skipped[0].reason.startswith("model.safetensors ends before")


def test_a_damaged_layer_is_skipped_with_the_reason_and_the_others_are_judged(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path, shards=3)
    path = tmp_path / "model-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:2000])
    report = audit_checkpoint(tmp_path)
    assert {finding.rule for finding in report.findings} == {"container/truncated"}
    assert coverage(report).checked == 1
    (skipped,) = coverage(report).skipped
    assert skipped.layer == 1
    assert "model-00003-of-00003.safetensors ends before" in skipped.reason


def test_untrained_everywhere_is_inconclusive_and_no_finding(tmp_path: Path) -> None:
    report = audit_checkpoint(tiny_checkpoint("llama", tmp_path))
    assert report.findings == ()
    assert report.verdict == "inconclusive"
    assert [entry.layer for entry in coverage(report).undecidable] == [0, 1]
    assert all("untrained" in entry.reason and entry.would_decide for entry in coverage(report).undecidable)


def test_untrained_in_one_layer_is_told_and_passes(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    noise = torch.randn(112, 48, generator=torch.Generator().manual_seed(0))
    edit_tensors(lambda tensors: tensors.update({names(1)[0]: noise}))(tmp_path)
    report = audit_checkpoint(tmp_path)
    assert (report.findings, report.verdict) == ((), "pass")
    assert [entry.layer for entry in coverage(report).undecidable] == [1]
    assert coverage(report).checked == 1


@pytest.mark.parametrize(
    ("activation", "reason", "findings", "verdict"),
    [
        ("tanh", "odd activation", [], "inconclusive"),
        ("gelu_typo", "unknown activation", [("config/activation-conflict", "warning")], "inconclusive"),
        (7, "is 7", [("config/shape", "error")], "fail"),
    ],
)
def test_an_arithmetic_without_the_symmetry_is_undecidable(
    activation: object, reason: str, findings: list[tuple[str, str]], verdict: str, tmp_path: Path
) -> None:
    healthy_checkpoint("llama", tmp_path)
    exchange(tmp_path, 1)
    edit_json("config.json", hidden_act=activation)(tmp_path)
    report = audit_checkpoint(tmp_path)
    assert [(finding.rule, finding.level) for finding in report.findings] == findings
    assert [entry.layer for entry in coverage(report).undecidable] == [0, 1]
    assert all(reason in entry.reason and entry.would_decide for entry in coverage(report).undecidable)
    assert report.verdict == verdict


def test_in_a_bilinear_network_there_is_nothing_to_decide(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path, config={"hidden_act": "linear"})
    exchange(tmp_path, 1)
    report = audit_checkpoint(tmp_path)
    assert (report.findings, report.verdict) == ((), "pass")
    assert "exchanging gate and up changes nothing" in coverage(report).skipped[0].reason


def test_a_plain_network_is_skipped_in_words(tmp_path: Path) -> None:
    report = audit_checkpoint(healthy_checkpoint("gpt2", tmp_path))
    for rule in (RULE, "ffn/fused-order"):
        assert [entry.reason for entry in coverage(report, rule).skipped] == [
            "plain feed-forward network: the family gpt2 has no gate"
        ]
    assert report.layers
    assert not [key for layer in report.layers for key in layer.metrics if "gate" in key or key == "verdict"]


def test_quantised_weights_are_not_judged(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)

    def quantise(tensors: dict[str, Tensor]) -> None:
        small = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items() if ".mlp." in name}
        tensors.update(small)

    edit_tensors(quantise)(tmp_path)
    report = audit_checkpoint(tmp_path)
    assert report.findings == ()
    assert report.verdict == "inconclusive"
    assert "F8_E4M3" in coverage(report).undecidable[0].reason
    assert coverage(report, "tensor/non-finite").checked == report.checkpoint.tensors


def test_certify_bounds_every_tensor(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    screened = audit_checkpoint(tmp_path)
    certified = audit_checkpoint(tmp_path, AuditQuestion(certify=True))
    assert all("up_log10_p" not in layer.metrics for layer in screened.layers)
    assert [layer.metrics["screened"] for layer in screened.layers] == [1, 1]
    assert [layer.metrics["screened"] for layer in certified.layers] == [0, 0]
    for layer in certified.layers:
        bounds = {key: value for key, value in layer.metrics.items() if key.endswith("log10_p")}
        assert None not in bounds.values()
        assert isinstance(bounds["up_log10_p"], float)
        assert isinstance(bounds["gate_log10_p"], float)
        assert bounds["gate_log10_p"] < -3.6 < bounds["up_log10_p"]  # 1e-3 shared by four tensors


@pytest.mark.parametrize(
    ("log10_p", "words"), [(None, "1"), (0.0, "1"), (-0.5, "1"), (-1.0, "1e-1"), (-87.3, "1e-87"), (-292.99, "1e-292")]
)
def test_a_bound_is_never_rounded_down(log10_p: float | None, words: str) -> None:
    assert power_of_ten(log10_p) == words
    assert log10_p is None or float(words) >= 10**log10_p
