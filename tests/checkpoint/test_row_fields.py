"""Which field of a row names a tensor: the right one, and looked up quickly for a checkpoint that lacks thousands."""

import dataclasses
import re

import pytest
from glassblock.checkpoint import row_fields
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.row_fields import field_naming

MIXTURE = dataclasses.replace(ARCHITECTURES["deepseek_v3"], name="mine")


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("model.layers.3.mlp.gate_proj.weight", "feed_forward.gate.weight"),
        ("model.layers.3.input_layernorm.weight", "norms[0].template"),
        ("model.embed_tokens.weight", "embedding"),
        ("model.layers.x.mlp.gate_proj.weight", None),
        ("model.layers.03.mlp.gate_proj.weight", None),
        ("another.weight", None),
    ],
)
def test_the_field_is_named(name: str, field: str | None) -> None:
    assert field_naming(dataclasses.replace(ARCHITECTURES["llama"], name="mine"), name) == field


def test_names_become_patterns_once_for_all_tensors_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def counted(pattern: str) -> re.Pattern[str]:
        compiled.append(pattern)
        return re.compile(pattern)

    row = dataclasses.replace(MIXTURE)
    monkeypatch.setattr(row_fields, "re", type("Counted", (), {"compile": counted, "escape": re.escape, "sub": re.sub}))
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight" for layer in (3, 60) for expert in range(256)]
    assert {field_naming(row, name) for name in names} == {"mixture.experts.up.weight"}
    assert 0 < len(compiled) < 200
