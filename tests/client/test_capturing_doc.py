"""docs/capturing.md: its transformers code saves what `glassblock explain` reads."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.api.entry import connect
from glassblock.wire.explain import CAPTURED_STAGES
from glassblock_client import Client
from glassblock_client.cli.captures import read_captures

DOC = Path(__file__).parents[2] / "docs" / "capturing.md"
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_transformers_code_saves_captures_that_are_as_declared(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  seconds, and only here

    section = DOC.read_text(encoding="utf-8").partition("## transformers")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    printed: dict[str, Any] = {}
    exec(code[1], printed)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES)).eval()
    model.save_pretrained(tmp_path / "model")
    printed["save_captures"](model, list(range(40)), tmp_path / "captures")
    layers = read_captures(tmp_path / "captures", None)
    assert list(layers) == [0, 1]
    with connect(roots=[tmp_path], device="cpu") as transport:
        client = Client("http://glassblock", transport=transport)
        for layer, stages in layers.items():
            assert set(stages) == set(CAPTURED_STAGES)
            assert client.explain_block("model", layer, stages).verdict == "as-declared"


def test_every_stage_is_told() -> None:
    text = DOC.read_text(encoding="utf-8")
    assert all(f"`{stage}`" in text for stage in CAPTURED_STAGES)
