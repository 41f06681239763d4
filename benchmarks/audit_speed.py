"""The whole audit of SmolLM2 in process, against reading every tensor and summing it in float32 with torch.

The sum is the least that anything can do that looks at every number. Where weightwatcher is installed, its analysis of
the same file is timed too.
"""

import importlib
import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

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
    names = ("glassblock", "read and sum in float32")
    for title, question in (
        ("Audit of SmolLM2-135M, every rule", AuditQuestion()),
        ("The same with every bound certified", AuditQuestion(certify=True)),
        (
            "The same without the gate rules",
            AuditQuestion(rules=tuple(name for name in RULES if name not in GATE_RULE_NAMES)),
        ),
    ):
        runs, warm_up = (1, 0) if question.certify else (9, 1)
        paired = in_pairs(partial(audited, checkpoint, question), partial(summed, weights), runs=runs, warm_up=warm_up)
        print(table(title, names, paired))
    if importlib.util.find_spec("weightwatcher") is not None:
        paired = in_pairs(partial(audited, checkpoint, AuditQuestion()), partial(watched, checkpoint), runs=1)
        print(table("Audit of SmolLM2-135M, every rule", ("glassblock", "weightwatcher"), paired))
    return 0


def audited(checkpoint: Path, question: AuditQuestion) -> None:
    report = audit_checkpoint(checkpoint, question)
    assert report.verdict == "pass", report.findings


def watched(checkpoint: Path) -> None:
    """weightwatcher's analysis of the same file, loaded by transformers."""
    watcher: Any = importlib.import_module("weightwatcher")
    transformers: Any = importlib.import_module("transformers")
    watcher.WeightWatcher(model=transformers.AutoModelForCausalLM.from_pretrained(str(checkpoint))).analyze()


def summed(weights: Path) -> float:
    with safe_open(weights, "pt") as file:
        return sum(float(file.get_tensor(name).sum(dtype=torch.float32)) for name in file.keys())  # noqa: SIM118


if __name__ == "__main__":
    sys.exit(main())
