"""Every planted mistake of the tests, audited: found, by its rule, at its level, and nothing else said.

And the other half: every family's healthy checkpoint, in one file and in three shards, is silent.
"""

import importlib
import sys
import tempfile
from pathlib import Path

from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.checkpoint.architectures import ARCHITECTURES
from record import ROOT, Promise, publish, table

LOUD = {"error", "warning"}


def main() -> int:
    sys.path.append(str(ROOT / "tests"))
    plants = importlib.import_module("plants")
    with tempfile.TemporaryDirectory() as scratch:
        rows = [
            audited(rule, plant, Path(scratch) / f"{rule.replace('/', '-')}-{number}")
            for rule, cases in plants.PLANTS.items()
            for number, plant in enumerate(cases)
        ]
        alarms = sum(
            len(audit_checkpoint(plants.healthy_checkpoint(family, Path(scratch) / f"{family}-{n}", shards=n)).findings)
            for family in ARCHITECTURES
            for n in (1, 3)
        )
    missed = [row for row in rows if row[-2:] != ("yes", "no")]
    promises = [
        Promise(
            "every plant is found by its rule at its level, and nothing else is", f"{len(missed)} misses", not missed
        ),
        Promise("healthy checkpoints of every family are silent", f"{alarms} findings", alarms == 0),
    ]
    says = f"{len(rows)} planted mistakes, one or more for each rule, each in a healthy tiny checkpoint."
    found = table(("rule", "planted", "level", "found", "anything else"), rows)
    return publish("Planted mistakes", says, promises, [found])


def audited(rule: str, plant, directory: Path) -> tuple[str, ...]:
    plant.break_(plant.healthy(directory))
    report = audit_checkpoint(directory, AuditQuestion(against=plant.against, against_name="other.json"))
    named = [finding for finding in report.findings if finding.rule == rule]
    right = [finding for finding in named if (finding.level, finding.layer) == (plant.level, plant.layer)]
    others = [finding for finding in report.findings if finding.rule != rule and finding.level in LOUD]
    found = "yes" if len(named) == len(right) == 1 else "**no**"
    return rule, plant.label, plant.level, found, "**yes**" if others else "no"


if __name__ == "__main__":
    sys.exit(main())
