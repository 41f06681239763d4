"""The rule table explains itself, and every fault that opening a checkpoint can tell has a rule to be told under."""

import importlib
import re
import sys
from pathlib import Path
from typing import get_args

import pytest
from glassblock.audit.rule import Rule
from glassblock.audit.rules import RULES
from glassblock.checkpoint.config import ConfigFault, ConfigFaultKind
from glassblock.checkpoint.entries import ContainerFault, ContainerFaultKind
from glassblock.checkpoint.fitting import LayerFault, LayerFaultKind
from glassblock.checkpoint.index import IndexFault, IndexFaultKind

FILE = Path("model.safetensors")


def test_every_fault_has_a_rule() -> None:
    faults = [
        *(ContainerFault(kind, FILE, None, None, "", "") for kind in get_args(ContainerFaultKind)),
        *(IndexFault(kind, FILE, "", "") for kind in get_args(IndexFaultKind)),
        *(ConfigFault(kind, FILE, "", "") for kind in get_args(ConfigFaultKind)),
        *(LayerFault(kind, None, "", FILE, "", "") for kind in get_args(LayerFaultKind)),
    ]
    without = {fault.kind for fault in faults if fault.rule is None}
    assert without == {"quantised"}  # nothing wrong: it is told as a skip
    assert {fault.rule for fault in faults if fault.rule is not None} <= RULES.keys()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_explains_itself(rule: Rule) -> None:
    assert re.fullmatch(r"(container|index|config|tensor|ffn|attention|norm|moe|quant|range)/[a-z0-9-]+", rule.name)
    for text in (rule.what, rule.hurts, rule.detection, rule.fooled_by):
        assert text.endswith(".")
        assert text[0].isupper() or text.startswith("act(")
    assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", rule.report)


def test_the_certainty_fits_the_level() -> None:
    for rule in RULES.values():
        if rule.level == "note":
            assert rule.certainty in {"risk", "proved"}
        if rule.certainty == "risk":
            assert rule.level != "error"


def test_the_page_of_rules_is_that_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.setattr(sys, "path", [*sys.path, str(root / "tools")])
    rules_page = importlib.import_module("rules_page")
    told = (root / "docs" / "rules.md").read_text(encoding="utf-8")
    assert told == rules_page.page().rstrip() + "\n", "run `python tools/rules_page.py`"
