"""Projections of one module that hold the same numbers, however they are stored; in all layers, or in some."""

from pathlib import Path

import pytest
import torch
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.wire.audits import Finding
from makers import Tiny
from plants import edit_tensors, healthy_checkpoint
from torch import Tensor

LAYERS = (0, 1, 2)


def told(directory: Path, question: AuditQuestion | None = None) -> list[Finding]:
    return [finding for finding in audit_checkpoint(directory, question).findings if finding.rule == "tensor/duplicate"]


def trained(tensors: dict[str, Tensor]) -> None:
    """Neurons of many lengths, as training leaves them."""
    lengths = torch.linspace(0.2, 3, 112)[:, None]
    for name in tensors:
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensors[name] *= lengths


def same(tensors: dict[str, Tensor], layers: tuple[int, ...]) -> None:
    for layer in layers:
        prefix = f"model.layers.{layer}.mlp."
        tensors[f"{prefix}up_proj.weight"] = tensors[f"{prefix}gate_proj.weight"].clone()


def test_of_trained_gates_in_every_layer_it_is_a_warning(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path, tiny=Tiny(layers=3))
    edit_tensors(trained)(tmp_path)
    assert told(tmp_path) == []
    edit_tensors(lambda tensors: same(tensors, LAYERS))(tmp_path)
    (finding,) = told(tmp_path)
    assert (finding.level, finding.certainty, finding.layer) == ("warning", "statistical", None)
    assert "in all 3 layers" in finding.message
    assert len(finding.tensors) == 6


def test_each_layer_is_named_where_others_differ(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path, tiny=Tiny(layers=3))
    edit_tensors(lambda tensors: same(tensors, (0, 2)))(tmp_path)
    assert [(finding.level, finding.layer) for finding in told(tmp_path)] == [("error", 0), ("error", 2)]


def test_without_hashes_it_says_that_it_did_not_look(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path, tiny=Tiny(layers=3))
    edit_tensors(lambda tensors: same(tensors, (1,)))(tmp_path)
    report = audit_checkpoint(tmp_path, AuditQuestion(hash="none"))
    (coverage,) = (entry for entry in report.coverage if entry.rule == "tensor/duplicate")
    assert [entry.reason for entry in coverage.skipped] == [
        "no tensor was hashed: projections of one module, and layers, were not compared"
    ]


def _halves(weight: Tensor) -> None:
    weight[..., weight.shape[-2] // 2 :, :] = weight[..., : weight.shape[-2] // 2, :].clone()


def _columns(weight: Tensor) -> None:
    weight[..., weight.shape[-1] // 2 :] = weight[..., : weight.shape[-1] // 2].clone()


def _rows_in_turn(weight: Tensor) -> None:
    weight[1::2] = weight[0::2].clone()


def _columns_in_turn(weight: Tensor) -> None:
    weight[..., 1::2] = weight[..., 0::2].clone()


FUSED = {
    "phi3": ("model.layers.1.mlp.gate_up_proj.weight", _halves),
    "phi3small": ("model.layers.1.mlp.up_proj.weight", _rows_in_turn),
    "llama4": ("model.layers.1.feed_forward.experts.gate_up_proj", _columns),
    "gpt_oss": ("model.layers.1.mlp.experts.gate_up_proj", _columns_in_turn),
}


@pytest.mark.parametrize("family", FUSED)
def test_the_halves_of_a_fused_tensor_in_every_arrangement(family: str, tmp_path: Path) -> None:
    directory = healthy_checkpoint(family, tmp_path, tiny=Tiny(layers=3))
    assert told(directory) == []
    name, fill = FUSED[family]
    edit_tensors(lambda tensors: fill(tensors[name]))(directory)
    (finding,) = told(directory)
    assert (finding.level, finding.layer, finding.tensors) == ("error", 1, (name,))


def test_one_expert_of_a_stack(tmp_path: Path) -> None:
    directory = healthy_checkpoint("gpt_oss", tmp_path, tiny=Tiny(layers=3))
    edit_tensors(lambda tensors: _columns_in_turn(tensors["model.layers.1.mlp.experts.gate_up_proj"][1:2]))(directory)
    (finding,) = told(directory)
    assert (finding.level, finding.layer, finding.expert) == ("error", 1, 1)
    assert "of expert 1 are equal" in finding.message


def test_two_pairs_of_one_layer_are_not_taken_for_one_pair_of_every_layer(tmp_path: Path) -> None:
    def copied(tensors: dict[str, Tensor]) -> None:
        prefix = "model.layers.1.self_attn."
        for one, other in (("q", "k"), ("v", "o")):
            tensors[f"{prefix}{other}_proj.weight"] = tensors[f"{prefix}{one}_proj.weight"].clone()

    healthy_checkpoint("llama", tmp_path, tiny=Tiny(kv_heads=4, head_dim=12))
    edit_tensors(copied)(tmp_path)
    assert [(finding.level, finding.layer, len(finding.tensors)) for finding in told(tmp_path)] == [("error", 1, 2)] * 2
