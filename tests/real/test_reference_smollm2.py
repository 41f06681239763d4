"""SmolLM2 beside itself: saved otherwise, named otherwise, and with gate and up exchanged in three layers."""

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.wire.audits import Report
from meta_names import as_meta
from rotary_heads import into
from safetensors.torch import load_file, save_file
from torch import Tensor

pytestmark = pytest.mark.real

Tensors = dict[str, Tensor]
SWAPPED = (3, 11, 29)


def made(smollm2: Any, directory: Path, change: Callable[[Tensors], Tensors], name: str = "model.safetensors") -> Path:
    directory.mkdir()
    save_file(change(load_file(smollm2.single / "model.safetensors")), directory / name)
    if name == "model.safetensors":
        (directory / "config.json").write_text((smollm2.single / "config.json").read_text())
    return directory


def compared(here: Path, there: Path) -> Report:
    report = audit_checkpoint(here, AuditQuestion(reference=open_checkpoint(there), reference_name="SmolLM2"))
    assert report.reference is not None
    return report


def test_resharded_it_is_identical(smollm2: Any) -> None:
    report = compared(smollm2.sharded, smollm2.single)
    assert report.reference is not None
    assert (report.reference.relation, report.reference.same) == ("identical", report.reference.mapped)
    assert [finding for finding in report.findings if finding.level == "error"] == []


def test_rows_in_pairs_are_proved_layer_by_layer(smollm2: Any, tmp_path: Path) -> None:
    def in_pairs(tensors: Tensors) -> Tensors:
        ends = ("q_proj.weight", "k_proj.weight")
        return {name: into("pairs", tensor, 64) if name.endswith(ends) else tensor for name, tensor in tensors.items()}

    report = compared(made(smollm2, tmp_path / "pairs", in_pairs), smollm2.single)
    assert {(finding.rule, finding.certainty) for finding in report.findings} == {("attention/rotary-order", "proved")}
    assert [finding.layer for finding in report.findings] == list(range(30))


def test_through_float16_and_back_it_is_what_the_numbers_say(smollm2: Any, tmp_path: Path) -> None:
    """Every weight of SmolLM2 is a float16 number too: so stored it is another form, and back it is identical."""

    def narrowed(tensors: Tensors) -> Tensors:
        return {name: tensor.to(torch.float16) for name, tensor in tensors.items()}

    def back(tensors: Tensors) -> Tensors:
        return {name: tensor.to(torch.bfloat16) for name, tensor in narrowed(tensors).items()}

    for change, relation, kinds in ((narrowed, "form", {"dtype"}), (back, "identical", set[str]())):
        report = compared(made(smollm2, tmp_path / relation, change), smollm2.sharded)
        assert report.reference is not None
        assert (report.reference.relation, {form.kind for form in report.reference.form}) == (relation, kinds)
        assert report.reference.same == report.reference.mapped


def test_a_source_of_more_digits_is_rounded(smollm2: Any, tmp_path: Path) -> None:
    """A source with more digits than bfloat16 holds: a third of each number, in float32."""

    def third(tensors: Tensors) -> Tensors:
        return {name: tensor.float() / 3 for name, tensor in tensors.items()}

    def rounded(tensors: Tensors) -> Tensors:
        return {name: tensor.to(torch.float16).to(torch.bfloat16) for name, tensor in third(tensors).items()}

    report = compared(made(smollm2, tmp_path / "here", rounded), made(smollm2, tmp_path / "there", third))
    assert report.reference is not None
    assert (report.reference.relation, report.reference.function) == ("form", ())
    assert "rounded: float16 then bfloat16" in {form.words for form in report.reference.form}


def test_exchanged_in_three_layers(smollm2: Any, tmp_path: Path) -> None:
    def swapped(tensors: Tensors) -> Tensors:
        for layer in SWAPPED:
            gate, up = (f"model.layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up"))
            tensors[gate], tensors[up] = tensors[up], tensors[gate]
        return tensors

    report = compared(made(smollm2, tmp_path / "here", swapped), smollm2.single)
    found = [
        (finding.rule, finding.certainty, finding.layer) for finding in report.findings if finding.level == "error"
    ]
    assert found == [("ffn/gate-up-swapped", "proved", layer) for layer in SWAPPED]
    assert report.reference is not None
    assert report.reference.same == report.reference.mapped - 2 * len(SWAPPED)


def test_under_metas_names_it_is_the_same_model(smollm2: Any, tmp_path: Path) -> None:
    def renamed(tensors: Tensors) -> Tensors:
        meta = as_meta(tensors, {"q_proj": 9, "k_proj": 3})
        meta["output.weight"] = tensors["model.embed_tokens.weight"].clone()
        return meta

    meta = made(smollm2, tmp_path / "meta", renamed, "consolidated.safetensors")
    params = {"dim": 576, "hidden_dim": 1536, "n_layers": 30, "n_heads": 9, "n_kv_heads": 3, "norm_eps": 1e-5}
    (meta / "params.json").write_text(json.dumps(params))
    report = compared(meta, smollm2.single)
    assert report.reference is not None
    reference = report.reference
    assert (reference.relation, reference.function, reference.unmatched, reference.unmatched_there) == (
        "form",
        (),
        (),
        (),
    )
    assert reference.same == reference.mapped


def test_memory_stays_small(smollm2: Any) -> None:
    """The embedding alone is 57 MB: what is held are pieces of either side."""
    compared(smollm2.sharded, smollm2.single)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    compared(smollm2.sharded, smollm2.single)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
