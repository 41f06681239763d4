"""Biases that are in the file and that neither config nor family declares, those of attention as well."""

import json
from pathlib import Path

import pytest
import torch
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.fix import Unrepaired
from glassblock.audit.fixes import repair_of
from glassblock.checkpoint.layer_map import layer_tensors
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.patches import patched
from makers import tiny_checkpoint
from safetensors.torch import load_file, save_file

QUERY = "model.layers.1.self_attn.q_proj.bias"
RULES = ("ffn/undeclared-bias", "ffn/missing-bias")


def with_bias(directory: Path, name: str, length: int, *, family: str, **said: object) -> Path:
    tiny_checkpoint(family, directory)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | said))
    tensors = load_file(directory / "model.safetensors")
    tensors[name] = torch.full((length,), 0.5)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("family", "name", "said", "denied_by"),
    [
        ("llama", QUERY, {}, "default of family llama"),
        ("llama", QUERY, {"attention_bias": False}, "config.json: attention_bias"),
        ("qwen2", "model.layers.1.self_attn.o_proj.bias", {}, "default of family qwen2"),
        ("llama", "model.layers.1.mlp.up_proj.bias", {"mlp_bias": False}, "config.json: mlp_bias"),
        ("llama", "model.layers.1.input_layernorm.bias", {}, "family llama"),
    ],
)
def test_it_is_told_with_who_denies_it(
    family: str, name: str, said: dict[str, object], denied_by: str, tmp_path: Path
) -> None:
    length = 112 if "mlp" in name else 48 if "norm" in name or "o_proj" in name else 64
    directory = with_bias(tmp_path, name, length, family=family, **said)
    tensors = layer_tensors(open_checkpoint(directory), 1)
    assert [entry.name for entry in tensors.undeclared] == [name]
    assert tensors.denied_by == {name: denied_by}
    assert layer_tensors(open_checkpoint(directory), 0).undeclared == ()
    (finding,) = audit_checkpoint(directory, AuditQuestion(rules=RULES)).findings
    assert (finding.rule, finding.layer, finding.tensors) == ("ffn/undeclared-bias", 1, (name,))
    assert f"({denied_by})" in finding.message


def test_what_is_declared_is_not_told(tmp_path: Path) -> None:
    tiny_checkpoint("qwen2", tmp_path)
    assert all(layer_tensors(open_checkpoint(tmp_path), layer).undeclared == () for layer in (0, 1))


def test_biases_of_attention_are_declared_by_its_own_flag(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, weight in list(tensors.items()):
        if "self_attn" in name:
            tensors[f"{name.removesuffix('.weight')}.bias"] = torch.full((len(weight),), 0.5)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    finding = audit_checkpoint(checkpoint, AuditQuestion(rules=RULES)).findings[0]
    patch = repair_of(checkpoint, finding)
    assert not isinstance(patch, Unrepaired)
    after = patched(checkpoint, patch)
    assert after.config is not None
    assert after.config.values["attention_bias"] is True
    assert "mlp_bias" not in after.config.values or not after.config.values["mlp_bias"]
    assert audit_checkpoint(after, AuditQuestion(rules=RULES)).findings == ()
