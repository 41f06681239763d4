"""A name in the config that is no activation: told with the nearest one that is known."""

from pathlib import Path
from typing import cast

import pytest
from glassblock.audit.audit import audit_checkpoint
from glassblock.numerics.activations import ACTIVATION_ALIASES, ACTIVATIONS
from plants import edit_json, healthy_checkpoint
from transformers.activations import ACT2FN


@pytest.mark.parametrize(
    ("name", "nearest"), [("SiLU", "silu"), ("swishglu", "swiglu"), ("zzzz", None), ("relu\n:x", "relu")]
)
def test_it_is_a_warning_that_names_the_nearest(name: str, nearest: str | None, tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_json("config.json", hidden_act=name)(tmp_path)
    report = audit_checkpoint(tmp_path)
    (finding,) = report.findings
    assert (finding.rule, finding.level, finding.certainty) == ("config/activation-conflict", "warning", "conflict")
    assert finding.evidence["nearest"] == nearest
    assert "config.json: hidden_act" in finding.message
    assert "\n" not in finding.message
    assert report.verdict == "inconclusive", "no gate can be looked for under it"


@pytest.mark.parametrize(
    "name", sorted({*ACTIVATIONS, *ACTIVATION_ALIASES, *cast("dict[str, object]", ACT2FN)} - {"prelu"})
)
def test_a_name_that_engines_know_is_none(name: str, tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_json("config.json", hidden_act=name)(tmp_path)
    assert [finding for finding in audit_checkpoint(tmp_path).findings if finding.level != "note"] == []
