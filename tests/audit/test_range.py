"""How far a neuron may reach in float16: clamps and activations count, and no input exceeds the bound that is told."""

from collections.abc import Callable
from pathlib import Path

import torch
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.checkpoint.layers import load_feed_forward, load_wiring
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.numerics.block import run_block
from glassblock.wire.audits import Finding, Report
from plants import edit_entry, edit_json, edit_tensors, healthy_checkpoint
from torch import Tensor

RULE = "range/fp16-overflow"
Tensors = dict[str, Tensor]


def audited(family: str, directory: Path, change: Callable[[Tensors], object]) -> Report:
    healthy_checkpoint(family, directory)
    edit_tensors(change)(directory)
    return audit_checkpoint(directory, AuditQuestion(rules=(RULE,)))


def louder(part: str, by: float) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith((f"{part}.weight", part)):
                tensors[name] = tensors[name] * by

    return change


def reaching(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if "reaches" in finding.message]


def test_a_clamp_leaves_nothing_that_could_overflow(tmp_path: Path) -> None:
    report = audited("gpt_oss", tmp_path, louder("gate_up_proj", 3e4))
    assert report.findings == ()
    (coverage,) = report.coverage
    assert (coverage.checked > 0, coverage.skipped) == (True, ())


def test_unless_it_is_that_wide_itself(tmp_path: Path) -> None:
    healthy_checkpoint("gpt_oss", tmp_path, config={"swiglu_limit": 1e4})
    edit_tensors(louder("gate_up_proj", 3e4))(tmp_path)
    (finding,) = reaching(audit_checkpoint(tmp_path, AuditQuestion(rules=(RULE,))))
    assert finding.evidence["bound"] <= 1e4 * (1e4 + 1)


def test_a_square_reaches_as_its_square(tmp_path: Path) -> None:
    (finding,) = reaching(audited("nemotron", tmp_path / "square", louder("up_proj", 100)))
    healthy_checkpoint("nemotron", tmp_path / "plain")
    edit_tensors(louder("up_proj", 100))(tmp_path / "plain")
    edit_json("config.json", hidden_act="relu")(tmp_path / "plain")
    assert reaching(audit_checkpoint(tmp_path / "plain", AuditQuestion(rules=(RULE,)))) == []
    assert finding.evidence["reach"] > 65504


def test_an_activation_that_is_learned_is_not_checked(tmp_path: Path) -> None:
    (coverage,) = audited("apertus", tmp_path, lambda _tensors: None).coverage
    assert coverage.checked == 0
    assert {skip.reason for skip in coverage.skipped} == {"the activation of its network is not known, or is learned"}


def loud(name: str, tensors: Tensors) -> None:
    """A loud neuron, as the family stores its rows."""
    tensors[name][(slice(None), 5) if "c_fc" in name else (5,)] *= 1e6


def test_no_input_exceeds_the_bound(tmp_path: Path) -> None:
    """Not those that lie along its row, nor what a bias of the norm adds, nor the square of both."""
    up = {
        "gpt2": "transformer.h.1.mlp.c_fc",
        "nemotron": "model.layers.1.mlp.up_proj",
        "llama": "model.layers.1.mlp.up_proj",
    }
    for family, name in up.items():
        directory = tmp_path / family

        def change(tensors: Tensors, name: str = name) -> None:
            loud(f"{name}.weight", tensors)
            if "c_fc" in name:
                tensors["transformer.h.1.ln_2.bias"] = 1e3 * tensors[f"{name}.weight"][:, 5] / 1e6
                tensors[f"{name}.bias"][5] = 1e5

        (finding,) = reaching(audited(family, directory, change))
        assert (finding.layer, finding.evidence["neuron"]) == (1, 5)
        checkpoint, meter = open_checkpoint(directory), ReadMeter()
        network = load_feed_forward(checkpoint, 1, "cpu", meter)
        wiring = load_wiring(checkpoint, 1, "cpu", meter)
        assert wiring.input_norm is not None
        assert wiring.input_norm.gain is not None
        row = network.up[5] * wiring.input_norm.gain
        x = torch.stack([row, -row, *torch.randn(64, len(row), generator=torch.Generator().manual_seed(0))])
        hidden = run_block(x, network, wiring).hidden
        assert hidden is not None
        reached = float(hidden[:, 5].abs().max())
        assert 0.01 * finding.evidence["bound"] < reached <= finding.evidence["bound"]


def test_a_bias_that_cannot_be_read_leaves_it_open(tmp_path: Path) -> None:
    healthy_checkpoint("gpt2", tmp_path)
    edit_entry("transformer.h.0.mlp.c_fc.bias", (3,), 1.0)(tmp_path)
    edit_tensors(lambda tensors: tensors.update({"transformer.h.0.mlp.c_fc.bias": torch.zeros(112).to(torch.int8)}))(
        tmp_path
    )
    (coverage,) = audit_checkpoint(tmp_path, AuditQuestion(rules=(RULE,))).coverage
    assert [(skip.layer, skip.reason) for skip in coverage.skipped] == [(0, "a bias of its network could not be read")]
