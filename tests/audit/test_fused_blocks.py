"""A fused tensor in tensor-parallel blocks: declared it is run, audited and repaired as any other, else it is named.

The model is the trained fused one of `tests/data`, its rows written again as so many ranks would have written them.
"""

import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from gates import edit_config, lay_fused
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.fix import Unrepaired
from glassblock.audit.fixes import joined, repair_of
from glassblock.audit.gate_plans import GATE_RULE_NAMES
from glassblock.checkpoint.family import Architecture
from glassblock.checkpoint.family_file import parse_family_row
from glassblock.checkpoint.layers import load_feed_forward, load_wiring
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.patches import patched
from glassblock.checkpoint.reading import ReadMeter, read_tensor
from glassblock.errors import DamagedCheckpoint, FamilyMismatch
from glassblock.numerics.block import run_block
from glassblock.numerics.fused_layouts import candidate_groups
from glassblock.wire.audits import Report
from safetensors.torch import load_file, save_file

DATA = Path(__file__).resolve().parents[1] / "data"
PLAIN, TRANSPOSED = DATA / "trained-fused", DATA / "trained-transposed"
NEURONS = 256
RULES = tuple(sorted(GATE_RULE_NAMES))

BLOCKS_ROW: dict[str, Any] = {
    "like": "phi3",
    "name": "in-blocks",
    "feed_forward": {
        "fused": {
            "arrangement": "blocks",
            "blocks": {"keys": ["tensor_model_parallel_size"], "default": 1},
        }
    },
}


def stored_in_blocks(tmp_path: Path, groups: int, *, gate_first: bool = True) -> tuple[Path, Architecture]:
    """The fused model as so many ranks would have written it, and the row that says so."""
    directory = Path(shutil.copytree(PLAIN, tmp_path / "blocks"))
    lay_fused(directory, 0, 1, groups=groups, gate_first=gate_first)
    edit_config(directory, tensor_model_parallel_size=groups)
    data = deepcopy(BLOCKS_ROW)
    data["feed_forward"]["fused"]["order"] = ["gate", "up"] if gate_first else ["up", "gate"]
    return directory, parse_family_row(data)


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("groups", [2, 4])
def test_declared_blocks_are_run_as_the_plain_layout_and_audited_silently(
    groups: int, gate_first: bool, tmp_path: Path
) -> None:
    directory, row = stored_in_blocks(tmp_path, groups, gate_first=gate_first)
    blocked, plain = open_checkpoint(directory, family=row), open_checkpoint(PLAIN)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for layer in (0, 1):
        meter = ReadMeter()
        stages = [
            run_block(x, load_feed_forward(one, layer, "cpu", meter), load_wiring(one, layer, "cpu", meter))
            for one in (blocked, plain)
        ]
        for name in ("gate", "up", "hidden", "down", "output"):
            assert torch.equal(getattr(stages[0], name), getattr(stages[1], name)), name
    report = audit_checkpoint(blocked, AuditQuestion(rules=RULES))
    assert (report.findings, report.verdict) == ((), "pass")
    assert not any(entry.undecidable for entry in report.coverage)
    whole, healthy = (audit_checkpoint(one) for one in (blocked, plain))
    assert [found.rule for found in whole.findings] == [found.rule for found in healthy.findings]
    for one, other in zip(whole.layers, healthy.layers, strict=True):
        # Runs of rows are summed one by one, in float32, so in another order than halves are.
        assert one.metrics["verdict"] == other.metrics["verdict"] == "as-named"
        numbers, expected = (numbers_of(layer.metrics) for layer in (one, other))
        assert numbers == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("groups", [2, 4])
def test_in_declared_blocks_a_swap_is_found_and_repaired(groups: int, tmp_path: Path) -> None:
    directory, row = stored_in_blocks(tmp_path, groups)
    before = {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}
    lay_fused_again(directory, 1, groups=groups)
    broken = open_checkpoint(directory, family=row)
    (finding,) = audit_checkpoint(broken, AuditQuestion(rules=RULES)).findings
    assert (finding.rule, finding.layer) == ("ffn/fused-order", 1)
    patch = repair_of(broken, finding)
    assert not isinstance(patch, Unrepaired)
    mended = patched(broken, patch)
    assert audit_checkpoint(mended, AuditQuestion(rules=RULES)).findings == ()
    for name, tensor in before.items():
        assert torch.equal(read_tensor(mended.entries[name], "cpu", ReadMeter()), tensor)


@pytest.mark.parametrize("stored", ["plain", "interleaved", "4 blocks"])
def test_what_lies_otherwise_than_the_declared_blocks_is_put_into_them(stored: str, tmp_path: Path) -> None:
    """Recovered from any layout: by the row in two blocks, and the undeclared ones back to the plain layout."""
    directory, row = stored_in_blocks(tmp_path, 2)
    right = {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}
    shutil.copy(PLAIN / "model.safetensors", directory)
    if stored != "plain":
        lay_fused(directory, 0, 1, groups=4 if stored == "4 blocks" else NEURONS)
    broken = open_checkpoint(directory, family=row)
    findings = audit_checkpoint(broken, AuditQuestion(rules=RULES)).findings
    assert [(finding.rule, finding.evidence["declared"]) for finding in findings] == [
        ("ffn/fused-layout", "2 blocks of [gate | up]")
    ] * 2
    patches = [patch for finding in findings if not isinstance(patch := repair_of(broken, finding), Unrepaired)]
    mended = patched(broken, joined(broken, patches))
    for name, tensor in right.items():
        assert torch.equal(read_tensor(mended.entries[name], "cpu", ReadMeter()), tensor)


@pytest.mark.parametrize("groups", [2, 4])
def test_undeclared_blocks_are_named_and_written_as_the_family_has_them(groups: int, tmp_path: Path) -> None:
    directory, _ = stored_in_blocks(tmp_path, groups)
    undeclared = open_checkpoint(directory)
    findings = audit_checkpoint(undeclared, AuditQuestion(rules=RULES)).findings
    assert [(finding.rule, finding.layer, finding.evidence["stored"]) for finding in findings] == [
        ("ffn/fused-layout", layer, f"{groups} blocks of [gate | up]") for layer in (0, 1)
    ]
    patches = [patch for finding in findings if not isinstance(patch := repair_of(undeclared, finding), Unrepaired)]
    mended = patched(undeclared, joined(undeclared, patches))
    for name, tensor in load_file(PLAIN / "model.safetensors").items():
        assert torch.equal(read_tensor(mended.entries[name], "cpu", ReadMeter()), tensor)


def test_a_number_of_blocks_that_is_not_tried_elsewhere_is_read_where_it_is_declared(tmp_path: Path) -> None:
    """Whatever the number: no rank count, no tile, and no candidate of the audit."""
    groups = next(n for n in range(3, NEURONS) if NEURONS % n == 0 and n not in candidate_groups(NEURONS))
    directory, row = stored_in_blocks(tmp_path, groups)
    report = audit_checkpoint(open_checkpoint(directory, family=row), AuditQuestion(rules=RULES))
    assert (report.findings, report.verdict) == ((), "pass")


@pytest.mark.parametrize("groups", [2, 4])
def test_blocks_of_columns_in_a_stack_of_experts_are_read_as_they_are_declared(groups: int, tmp_path: Path) -> None:
    """Stored `[experts, in, out]`, so that the blocks lie side by side."""
    directory = Path(shutil.copytree(TRANSPOSED, tmp_path / "blocks"))
    healthy = numbers_by_layer(audit_checkpoint(directory))
    lay_fused(directory, 0, 1, groups=groups)
    assert {finding.rule for finding in audit_checkpoint(directory, AuditQuestion(rules=RULES)).findings} == {
        "ffn/fused-layout"
    }
    row = parse_family_row(
        {
            "like": "qwen3_vl_moe_text",
            "mixture": {"experts": {"fused": {"arrangement": "blocks", "blocks": groups}}},
        }
    )
    report = audit_checkpoint(open_checkpoint(directory, family=row))
    assert [finding.rule for finding in report.findings if finding.rule in RULES] == []
    for numbers, expected in zip(numbers_by_layer(report), healthy, strict=True):
        # The screens' float32 sums of the same numbers, which lie in other places of a piece here and there.
        assert numbers == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("blocks", "told"), [(7, "cannot be cut into 7 blocks"), (0, "is 0"), ("two", "is 'two'")])
def test_blocks_that_do_not_come_out_are_refused_by_their_key(blocks: object, told: str, tmp_path: Path) -> None:
    directory, row = stored_in_blocks(tmp_path, 2)
    edit_config(directory, tensor_model_parallel_size=blocks)
    checkpoint = open_checkpoint(directory, family=row)
    with pytest.raises((FamilyMismatch, DamagedCheckpoint)) as refused:
        load_feed_forward(checkpoint, 0, "cpu", ReadMeter())
    assert told in refused.value.message
    assert "tensor_model_parallel_size" in refused.value.message
    report = audit_checkpoint(checkpoint)
    assert report.verdict == "fail"
    assert any(told in finding.message for finding in report.findings)
    assert not any(finding.rule in RULES for finding in report.findings)


def lay_fused_again(directory: Path, layer: int, *, groups: int) -> None:
    """Write up where gate lies in every block."""
    tensors = load_file(directory / "model.safetensors")
    name = f"model.layers.{layer}.mlp.gate_up_proj.weight"
    tensors[name] = tensors[name].unflatten(0, (groups, 2, -1)).flip(1).flatten(0, 2).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def numbers_by_layer(report: Report) -> list[dict[str, float]]:
    return [numbers_of(layer.metrics) for layer in report.layers]


def numbers_of(metrics: Mapping[str, object]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}
