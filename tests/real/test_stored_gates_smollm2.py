"""The gate test on SmolLM2 rounded to four bits, as GPTQ stores it: healthy, and exchanged in three layers."""

from pathlib import Path
from typing import Any

import pytest
from audit.test_stored_gates import RULES, about_gates, gate_coverage, quantised
from glassblock.audit.audit import AuditQuestion, audit_checkpoint

pytestmark = pytest.mark.real


def test_four_bits_leave_every_gate_where_it_is_and_no_swap_hidden(smollm2: Any, tmp_path: Path) -> None:
    healthy = audit_checkpoint(quantised(smollm2.single, tmp_path / "healthy", "GPTQ"), AuditQuestion(rules=RULES))
    assert about_gates(healthy) == []
    assert gate_coverage(healthy).checked == 30
    assert all(layer.metrics["screened"] == 1 for layer in healthy.layers)
    broken = quantised(smollm2.single, tmp_path / "broken", "GPTQ", exchanged=(0, 13, 29))
    found = about_gates(audit_checkpoint(broken, AuditQuestion(rules=RULES)))
    assert [finding.layer for finding in found] == [0, 13, 29]
    assert all(finding.evidence["log10_p"] < -50 for finding in found)
