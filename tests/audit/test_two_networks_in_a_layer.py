"""A whole audit of LongCat as transformers writes it: two attentions, two dense networks and a mixture in a layer."""

from pathlib import Path

import pytest
from gates import exchange, gated_networks, train
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.checkpoint.architectures import BY_MODEL_TYPE
from glassblock.checkpoint.layer_parts import Expert
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.wire.audits import Finding, Report
from reference_models import Case, build

SIZES = (("intermediate_size", 192), ("moe_intermediate_size", 160))
NETWORKS: tuple[Expert, ...] = (None, 0, 1, 2, 3, "shared")


def longcat(directory: Path) -> Path:
    """A tiny random model, its gates made to look trained."""
    build(Case("longcat_flash", SIZES), BY_MODEL_TYPE["longcat_flash"], directory)
    return train(directory)


def audit(directory: Path) -> Report:
    return audit_checkpoint(directory, AuditQuestion())


def loud(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.level in {"error", "warning"}]


def test_a_healthy_one_is_silent_and_every_network_is_looked_at(tmp_path: Path) -> None:
    report = audit(longcat(tmp_path))
    assert loud(report) == []
    found = [network.expert for _, network in gated_networks(open_checkpoint(tmp_path))]
    assert found == [*NETWORKS, *NETWORKS]
    (entry,) = (entry for entry in report.coverage if entry.rule == "ffn/gate-up-swapped")
    assert (entry.checked, entry.undecidable) == (len(found), ())


@pytest.mark.parametrize(
    ("network", "tensor"),
    [(None, "mlps.0.gate_proj.weight"), ("shared", "mlps.1.gate_proj.weight"), (2, "mlp.experts.2.gate_proj.weight")],
)
def test_exchanged_projections_are_named(network: Expert, tensor: str, tmp_path: Path) -> None:
    exchange(longcat(tmp_path), (1, network))
    (finding,) = loud(audit(tmp_path))
    number = network if isinstance(network, int) else None
    assert (finding.rule, finding.level, finding.layer, finding.expert) == ("ffn/gate-up-swapped", "error", 1, number)
    assert f"model.layers.1.{tensor}" in finding.tensors
    assert finding.evidence["log10_p"] < -5
