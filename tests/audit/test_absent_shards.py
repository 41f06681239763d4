"""Layers in a shard that is not there are told as not checked, for that reason and no other."""

from pathlib import Path

import pytest
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.reports.text import render_text
from glassblock.wire.audits import Report
from makers import Tiny
from plants import INDEX, SHARDS, edit_index, edit_json, healthy_checkpoint
from safetensors.torch import load_file, save_file

DEPTH = 6
REASON = "tensors of the layer lie in a shard that is not there"

OF_ALL_TENSORS = ("config/shape", "ffn/missing-tensor", "ffn/missing-bias", "tensor/non-finite", "tensor/all-zero")
COUNTING_LAYERS = (
    "config/shape",
    "ffn/missing-tensor",
    "ffn/missing-bias",
    "moe/experts-missing",
    "quant/scale-missing",
)
OF_LAYERS = (*OF_ALL_TENSORS, "ffn/gate-up-swapped", "ffn/dead-neurons", "norm/role", "range/fp16-overflow")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return healthy_checkpoint("llama", tmp_path, shards=3, tiny=Tiny(layers=DEPTH))


def layers_in(shard: Path, *, known_by: tuple[str, ...] = ("",)) -> set[int]:
    """The layers of which a tensor lies in a shard; of names that end in one of `known_by`."""
    names = [name for name in load_file(shard) if name.startswith("model.layers.")]
    return {int(name.split(".")[2]) for name in names if name.endswith(known_by)}


def shown_in(*shards: Path) -> set[int]:
    """The layers that shards show: a layer is known by a norm or by its projection back."""
    return {layer for shard in shards for layer in layers_in(shard, known_by=("norm.weight", "down_proj.weight"))}


def without(directory: Path, shard: str) -> tuple[set[int], set[int]]:
    """Takes a shard away, and tells the layers that nothing shows any more and those that are left in part."""
    cut = layers_in(directory / shard)
    (directory / shard).unlink()
    shown = shown_in(*(directory / name for name in SHARDS if name != shard))
    return cut - shown, cut & shown


def left_out(report: Report, rule: str) -> set[int | None]:
    (row,) = (row for row in report.coverage if row.rule == rule)
    return {skip.layer for skip in row.skipped if skip.reason == REASON}


@pytest.mark.parametrize("shard", SHARDS)
def test_every_rule_that_looks_at_layers_tells_those_of_an_absent_shard(sharded: Path, shard: str) -> None:
    gone, half = without(sharded, shard)
    assert gone
    report = audit_checkpoint(sharded)
    assert [finding.rule for finding in report.findings] == ["index/missing-shard"]
    assert (report.checkpoint.layers, report.checkpoint.declared_layers) == (DEPTH - len(gone), DEPTH)
    assert f"{DEPTH - len(gone)} of {DEPTH} layers" in render_text(report)
    for rule in OF_LAYERS:
        assert gone <= left_out(report, rule) <= gone | half, rule
    for rule in OF_ALL_TENSORS:
        assert left_out(report, rule) == gone | half, rule
    checked = {row.rule: row.checked for row in report.coverage}
    for rule in COUNTING_LAYERS:
        assert checked[rule] == DEPTH - len(gone | half), rule
    for row in report.coverage:
        told = [skip.layer for skip in row.skipped if skip.layer is not None]
        assert len(told) == len(set(told)), row.rule


@pytest.mark.parametrize(
    ("part", "rule"),
    [
        ("mlp.gate_proj", "ffn/gate-up-swapped"),
        ("mlp.down_proj", "ffn/dead-neurons"),
        ("self_attn.q_proj", "attention/rotary-order"),
    ],
)
def test_a_layer_of_which_a_part_lies_in_an_absent_shard_does_not_lack_it(tmp_path: Path, part: str, rule: str) -> None:
    name = f"model.layers.3.{part}.weight"
    directory = healthy_checkpoint("llama", tmp_path, shards=3, tiny=Tiny(layers=DEPTH))
    (shard,) = (directory / shard for shard in SHARDS if name in load_file(directory / shard))
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard)
    edit_index(lambda index: index["weight_map"].update({name: "model-00004-of-00004.safetensors"}))(directory)
    report = audit_checkpoint(directory)
    assert "index/missing-shard" in {finding.rule for finding in report.findings}
    (row,) = (row for row in report.coverage if row.rule == rule)
    assert [skip.reason for skip in row.skipped if skip.layer == 3] == [REASON]
    assert left_out(report, "ffn/missing-tensor") == {3}
    assert left_out(report, "norm/role") == set()


def test_the_report_says_it_once(sharded: Path) -> None:
    without(sharded, SHARDS[1])
    assert render_text(audit_checkpoint(sharded)).count(REASON) == 1


def test_rules_that_look_at_no_layer_say_nothing_of_them(sharded: Path) -> None:
    without(sharded, SHARDS[1])
    report = audit_checkpoint(sharded)
    for rule in ("container/hole", "index/missing-shard", "config/unknown-family", "ffn/fused-order"):
        assert left_out(report, rule) == set()


def test_without_an_index_the_config_tells_which_layers_are_absent(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    gone, _ = without(sharded, SHARDS[1])
    assert left_out(audit_checkpoint(sharded), "config/shape") == gone


@pytest.mark.parametrize("count", [10**12, "6"])
def test_a_number_of_layers_that_cannot_be_lists_none(sharded: Path, count: object) -> None:
    (sharded / INDEX).unlink()
    without(sharded, SHARDS[1])
    edit_json("config.json", num_hidden_layers=count)(sharded)
    assert left_out(audit_checkpoint(sharded), "tensor/non-finite") == set()


def test_a_shard_opened_alone_is_told_as_such(sharded: Path) -> None:
    report = audit_checkpoint(sharded / SHARDS[1], AuditQuestion(rules=("config/shape",)))
    ((row,),) = (report.coverage,)
    assert {skip.reason for skip in row.skipped} == {"tensors of the layer lie in a shard that was not opened"}
    assert {skip.layer for skip in row.skipped} == set(range(DEPTH)) - shown_in(sharded / SHARDS[1])


def test_a_layer_that_no_shard_should_hold_is_a_finding(sharded: Path) -> None:
    edit_json("config.json", num_hidden_layers=DEPTH + 2)(sharded)
    report = audit_checkpoint(sharded)
    assert [finding.rule for finding in report.findings] == ["config/shape"]
    assert all(left_out(report, rule) == set() for rule in OF_LAYERS)


def test_a_healthy_checkpoint_leaves_out_no_layer(sharded: Path) -> None:
    report = audit_checkpoint(sharded)
    assert report.findings == ()
    assert not [skip for row in report.coverage for skip in row.skipped if skip.layer is not None]
    assert f" {DEPTH} layers" in render_text(report)
    assert " of 6 layers" not in render_text(report)
