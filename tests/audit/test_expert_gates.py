"""Gates of experts, however a family stores them: the layer and the expert are named, and what is decided together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gates import edit_networks, exchange, gated_networks, train
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.fix import Unrepaired
from glassblock.audit.fixes import repair_of
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.layer_parts import Expert
from glassblock.checkpoint.layers import gating_of
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.patches import patched
from glassblock.wire.audits import Coverage, Finding, Report
from makers import Tiny, asked, tiny_checkpoint

RULES = ("ffn/gate-up-swapped", "ffn/fused-order", "ffn/fused-layout")
WIDE = Tiny(intermediate=128, expert_width=96, shared_width=112)
# One of each storage: separate, concatenated, stacked and fused, the same transposed, with a shared network.
STORAGES = ("mixtral", "dbrx", "granitemoe", "qwen3_vl_moe_text", "deepseek_v2", "llama4")


def mixture(family: str) -> bool:
    row = ARCHITECTURES[family]
    return any(part is not None for part in (row.mixture, *(v.changes.get("mixture") for v in row.layer_variants)))


def trained(family: str, directory: Path, tiny: Tiny = WIDE) -> Path:
    return train(tiny_checkpoint(family, directory, tiny=tiny), family=asked(family))


def audit(directory: Path, family: str, **question: Any) -> Report:
    return audit_checkpoint(directory, AuditQuestion(family=asked(family), **question))


def about_gates(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.rule in RULES]


def coverage(report: Report) -> dict[str, Coverage]:
    return {entry.rule: entry for entry in report.coverage if entry.rule in RULES}


@pytest.mark.parametrize("family", [family for family in ARCHITECTURES if mixture(family)])
def test_every_expert_of_every_family_is_decided(family: str, tmp_path: Path) -> None:
    directory = trained(family, tmp_path)
    checkpoint = open_checkpoint(directory, family=asked(family))
    networks = [network for _, network in gated_networks(checkpoint)]
    odd = [network for network in networks if not gating_of(checkpoint, network.row).up_sign_symmetric]
    report = audit(directory, family)
    assert about_gates(report) == []
    entries = coverage(report)
    checked = entries["ffn/gate-up-swapped"].checked + entries["ffn/fused-order"].checked
    assert checked == len(networks) - len(odd)
    assert odd or not any(entry.undecidable for entry in entries.values())


@pytest.mark.parametrize("family", STORAGES)
def test_one_exchanged_expert_is_named(family: str, tmp_path: Path) -> None:
    directory = trained(family, tmp_path)
    checkpoint = open_checkpoint(directory, family=asked(family))
    layer = max(layer for layer, network in gated_networks(checkpoint) if network.expert == 2)
    exchange(directory, (layer, 2), family=asked(family))
    (finding,) = about_gates(audit(directory, family))
    assert (finding.layer, finding.expert, finding.level, finding.certainty) == (layer, 2, "error", "statistical")
    assert finding.rule == ("ffn/fused-order" if len(finding.tensors) == 1 else "ffn/gate-up-swapped")
    assert f"layer {layer}, expert 2: " in finding.message
    assert finding.evidence["log10_p"] < -5
    assert finding.fix is not None


# Drawn by another seed than elsewhere: with 0 the down columns of one expert of deepseek_v2, which must look like
# noise, have p = 0.01, as one of a hundred controls has, and that expert alone is left open.
@pytest.mark.parametrize("family", STORAGES)
def test_every_expert_exchanged_is_one_finding_that_names_all(family: str, tmp_path: Path) -> None:
    directory = train(tiny_checkpoint(family, tmp_path, tiny=WIDE, seed=1), family=asked(family))
    checkpoint = open_checkpoint(directory, family=asked(family))
    layer = max(layer for layer, network in gated_networks(checkpoint) if network.expert == 2)
    experts = [n for of, network in gated_networks(checkpoint) if of == layer and isinstance(n := network.expert, int)]
    exchange(directory, *((layer, expert) for expert in experts), family=asked(family))
    (finding,) = about_gates(audit(directory, family))
    assert (finding.layer, finding.expert) == (layer, None)
    assert f"layer {layer}, all of experts 0 to {experts[-1]}: " in finding.message
    each = finding.evidence["experts"]
    assert list(each) == [str(expert) for expert in experts]
    assert finding.evidence["log10_p"] == max(one["log10_p"] for one in each.values())
    assert set(finding.tensors) >= {
        entry.name
        for of, network in gated_networks(checkpoint)
        if of == layer and isinstance(network.expert, int)
        for part, entry in network.weights.items()
        if part != "down"
    }
    broken = open_checkpoint(directory, family=asked(family))
    repair = repair_of(broken, finding)
    assert not isinstance(repair, Unrepaired)
    assert about_gates(audit_checkpoint(patched(broken, repair))) == []


def test_all_but_one_expert_exchanged_is_a_finding_for_each(tmp_path: Path) -> None:
    directory = trained("mixtral", tmp_path)
    exchange(directory, *((1, expert) for expert in range(3)))
    found = about_gates(audit(directory, "mixtral"))
    assert [(finding.layer, finding.expert) for finding in found] == [(1, 0), (1, 1), (1, 2)]


def test_the_shared_network_is_tested_by_itself(tmp_path: Path) -> None:
    directory = trained("deepseek_v2", tmp_path)
    layer = max(layer for layer, network in gated_networks(open_checkpoint(directory)) if network.expert == "shared")
    exchange(directory, (layer, "shared"))
    (finding,) = about_gates(audit(directory, "deepseek_v2"))
    assert (finding.layer, finding.expert) == (layer, None)
    assert f"layer {layer}, shared expert: " in finding.message


def faint(directory: Path, *, copied: bool) -> Path:
    """Gates too faint to be told one by one, in experts drawn apart or copied from the first one."""
    tiny_checkpoint("mixtral", directory, tiny=Tiny(expert_width=96, experts=16, intermediate=96))
    generator = torch.Generator().manual_seed(0)
    direction, first = torch.randn(48, generator=generator) * 0.1 * 48**-0.5, dict[str, torch.Tensor]()

    def give(_layer: int, _expert: Expert, weights: dict[str, torch.Tensor]) -> None:
        if copied:
            for part, weight in weights.items():
                first.setdefault(part, weight.clone())
                noise = torch.randn(weight.shape, generator=generator) * first[part].std()
                weight.copy_(first[part] + 2.0 * noise)
        weights["gate"] += direction * weights["gate"].norm(dim=1).mean()

    edit_networks(directory, give)
    return directory


@pytest.mark.parametrize("copied", [False, True])
def test_experts_that_are_open_alone_are_decided_together(copied: bool, tmp_path: Path) -> None:
    report = audit(faint(tmp_path, copied=copied), "mixtral")
    assert about_gates(report) == []
    for layer in report.layers:
        counts = {name: layer.metrics[f"experts_{name}"] for name in ("alone", "together", "undecided")}
        assert counts["undecided"] == 0
        assert isinstance(counts["together"], int)
        assert counts["together"] > 8


@pytest.mark.parametrize("copied", [False, True])
def test_together_they_convict_where_none_can_alone(copied: bool, tmp_path: Path) -> None:
    directory = faint(tmp_path, copied=copied)
    exchange(directory, *((1, expert) for expert in range(16)))
    (finding,) = about_gates(audit(directory, "mixtral"))
    assert (finding.layer, finding.expert) == (1, None)
    assert "layer 1, all its experts: " in finding.message
    assert "the sum of " in finding.message
    assert finding.evidence["experts"]["experts"]["log10_p"] < -4
    assert len(finding.tensors) == 32


@pytest.mark.parametrize("seed", range(5))
def test_upcycled_experts_without_a_gate_convict_nobody(seed: int, tmp_path: Path) -> None:
    """Sixteen near copies of one untrained network: sixteen times the same chance, and not one independent test."""
    tiny_checkpoint("mixtral", tmp_path, tiny=Tiny(expert_width=96, experts=16, intermediate=96), seed=seed)
    first: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(seed)

    def copy(_layer: int, _expert: Expert, weights: dict[str, torch.Tensor]) -> None:
        for part, weight in weights.items():
            first.setdefault(part, weight.clone())
            weight.copy_(first[part] + 0.1 * first[part].std() * torch.randn(weight.shape, generator=generator))

    edit_networks(tmp_path, copy)
    report = audit(tmp_path, "mixtral")
    assert about_gates(report) == []
    assert report.verdict == "inconclusive"
    entry = coverage(report)["ffn/gate-up-swapped"]
    assert [open_.layer for open_ in entry.undecidable] == [0, 1]
    assert "of 16 experts are open" in entry.undecidable[0].reason
