"""The whole audit of SmolLM2 in process, against reading every tensor and summing it in float32 with torch.

The sum is the least that anything can do that looks at every number. Reported, not promised: most of
the audit is the sign-symmetry test, which multiplies matrices.
"""

import sys
from pathlib import Path

import torch
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.gate_plans import GATE_RULE_NAMES
from glassblock.audit.rules import RULES
from pairs import in_pairs, table
from safetensors import safe_open
from smollm2 import directories


def main() -> int:
    checkpoint = directories().single
    weights = checkpoint / "model.safetensors"
    paired = in_pairs(lambda: audited(checkpoint, None), lambda: summed(weights), runs=3)
    print(table("Audit of SmolLM2-135M, every rule", ("glassblock", "read and sum in float32"), paired))
    without_gates = tuple(name for name in RULES if name not in GATE_RULE_NAMES)
    paired = in_pairs(lambda: audited(checkpoint, without_gates), lambda: summed(weights), runs=5)
    print(table("The same without the gate rules", ("glassblock", "read and sum in float32"), paired))
    return 0


def audited(checkpoint: Path, rules: tuple[str, ...] | None) -> None:
    report = audit_checkpoint(checkpoint, AuditQuestion(rules=rules))
    assert report.verdict == "pass", report.findings


def summed(weights: Path) -> float:
    with safe_open(weights, "pt") as file:
        return sum(float(file.get_tensor(name).sum(dtype=torch.float32)) for name in file.keys())  # noqa: SIM118


if __name__ == "__main__":
    sys.exit(main())
