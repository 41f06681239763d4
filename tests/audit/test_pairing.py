"""Which layers the rule about mispaired neurons accuses, leaves open, and leaves out."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.wire.audits import Coverage, Report
from plants import PLANTS, edit_tensors
from torch import Tensor

RULE = "ffn/mispaired-neurons"
NEW = 4
"""The layer that is put in; the four others are paired."""


def named(layer: int, part: str) -> str:
    return f"model.layers.{layer}.mlp.{part}_proj.weight"


def edited(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    PLANTS[RULE][0].healthy(directory)
    edit_tensors(change)(directory)
    return directory


def of_rule(report: Report) -> Coverage:
    (row,) = (row for row in report.coverage if row.rule == RULE)
    return row


def unpair(part: str, *layers: int) -> Callable[[dict[str, Tensor]], None]:
    """The neurons of one projection in another order."""

    def change(tensors: dict[str, Tensor]) -> None:
        for layer in layers:
            weight = tensors[named(layer, part)]
            order = torch.randperm(192, generator=torch.Generator().manual_seed(layer))
            tensors[named(layer, part)] = (weight[:, order] if part == "down" else weight[order]).contiguous()

    return change


def new_block(last: Callable[[Tensor], Tensor], *layers: int) -> Callable[[dict[str, Tensor]], None]:
    """Random gate and up, and outputs of attention and network that pair with nothing."""

    def change(tensors: dict[str, Tensor]) -> None:
        for layer in layers:
            draw = torch.Generator().manual_seed(100 + layer)
            for part in ("gate", "up"):
                tensors[named(layer, part)] = torch.randn(192, 48, generator=draw) * 0.02
            for name in (named(layer, "down"), f"model.layers.{layer}.self_attn.o_proj.weight"):
                tensors[name] = last(tensors[name])

    return change


@pytest.mark.parametrize(
    ("last", "words"),
    [
        pytest.param(torch.zeros_like, "no row with a length", id="zeros"),
        pytest.param(lambda down: down.sign() * 0.02, "all of one length", id="one-length"),
    ],
)
def test_a_new_block_is_left_out(last: Callable[[Tensor], Tensor], words: str, tmp_path: Path) -> None:
    report = audit_checkpoint(edited(tmp_path, new_block(last, NEW)))
    assert [finding.rule for finding in report.findings if finding.level != "note"] == []
    row = of_rule(report)
    assert (row.checked, row.undecidable, [skipped.layer for skipped in row.skipped]) == (4, (), [NEW])
    assert words in row.skipped[0].reason


def test_too_few_are_left_beside_new_blocks(tmp_path: Path) -> None:
    row = of_rule(audit_checkpoint(edited(tmp_path, new_block(torch.zeros_like, 1, 2, 3))))
    assert (row.checked, [skipped.layer for skipped in row.skipped]) == (0, [1, 2, 3, None])


def test_a_correlation_that_does_not_exist_is_not_told(tmp_path: Path) -> None:
    """Rows of up that are all of one length, in every layer: only the cosines tell."""

    def normalise(tensors: dict[str, Tensor]) -> None:
        for layer in range(5):
            up = tensors[named(layer, "up")]
            tensors[named(layer, "up")] = up / torch.linalg.vector_norm(up, dim=1, keepdim=True)
        unpair("gate", 1)(tensors)

    report = audit_checkpoint(edited(tmp_path, normalise))
    (finding,) = (finding for finding in report.findings if finding.rule == RULE)
    assert (finding.layer, finding.evidence["balance_with_down"]) == (1, None)
    assert "correlate" not in finding.message
    assert "paired at z" in finding.message


@pytest.mark.parametrize("part", ["down", "gate"])
@pytest.mark.parametrize("layers", [(0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4)])
def test_where_most_show_nothing_those_are_undecidable(part: str, layers: tuple[int, ...], tmp_path: Path) -> None:
    report = audit_checkpoint(edited(tmp_path, unpair(part, *layers)))
    assert ([finding for finding in report.findings if finding.rule == RULE], report.verdict) == ([], "pass")
    row = of_rule(report)
    assert (row.checked, [one.layer for one in row.undecidable]) == (5 - len(layers), list(layers))
    assert all("reference" in one.would_decide for one in row.undecidable)


def test_a_reference_decides_what_shows_nothing(tmp_path: Path) -> None:
    broken = edited(tmp_path / "broken", unpair("down", 0, 1, 2))
    PLANTS[RULE][0].healthy(tmp_path / "original")
    report = audit_checkpoint(broken, AuditQuestion(reference=open_checkpoint(tmp_path / "original")))
    told = [(one.layer, one.certainty) for one in report.findings if one.rule == RULE]
    assert told == [(layer, "proved") for layer in (0, 1, 2)]
    assert (of_rule(report).checked, of_rule(report).undecidable) == (5, ())
