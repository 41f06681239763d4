"""An audit of SmolLM2 with captures of engines: transformers' own, and one that exchanges gate and up in layer 7."""

from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.checkpoint.recordings import open_recording
from glassblock.checkpoint.roots import Roots
from safetensors.torch import save_file
from tokenizers import Tokenizer

from real.conftest import PARAGRAPH, capturing

pytestmark = pytest.mark.real

LAYERS = (0, 6, 7, 8, 29)
SWAPPED = 7


def record(model: Any, tokens: list[int], folder: Path) -> None:
    folder.mkdir()
    with capturing({n: model.model.layers[n] for n in LAYERS}) as captured, torch.inference_mode():
        model(torch.tensor([tokens]))
    for layer, stages in captured.items():
        save_file(
            {name: tensor[0].clone().contiguous() for name, tensor in stages.items()},
            folder / f"layer_{layer}.safetensors",
        )


def test_the_layer_that_an_engine_swapped_is_named_and_no_other(smollm2: Any, model: Any, tmp_path: Path) -> None:
    tokens = Tokenizer.from_file(str(smollm2.single / "tokenizer.json")).encode(PARAGRAPH).ids[:24]
    record(model, tokens, tmp_path / "right")
    mlp = model.model.layers[SWAPPED].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj
    try:
        record(model, tokens, tmp_path / "wrong")
    finally:
        mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj
    roots = Roots([tmp_path])
    healthy = audit_checkpoint(smollm2.single, AuditQuestion(captures=open_recording(roots, "right")))
    assert healthy.verdict == "pass"
    assert healthy.captures is not None
    assert [judged.layer for judged in healthy.captures.layers] == list(LAYERS)
    assert {judged.verdict for judged in healthy.captures.layers} == {"as-declared"}
    report = audit_checkpoint(smollm2.single, AuditQuestion(captures=open_recording(roots, "wrong")))
    (finding,) = (found for found in report.findings if found.level == "error")
    assert (finding.rule, finding.layer, finding.certainty) == ("ffn/gate-up-swapped", SWAPPED, "proved")
    assert "the first layer that departs" in finding.message
    assert finding.tensors == tuple(f"model.layers.{SWAPPED}.mlp.{part}_proj.weight" for part in ("gate", "up"))
    assert report.verdict == "fail"
    assert report.captures is not None
    # Layers after it were fed by the mistake, and are themselves as declared.
    verdicts = {judged.layer: judged.verdict for judged in report.captures.layers}
    assert verdicts == {layer: "explained" if layer == SWAPPED else "as-declared" for layer in LAYERS}
