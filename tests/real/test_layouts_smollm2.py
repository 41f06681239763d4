"""The networks of SmolLM2 stored again in every fused layout, and transposed: each layer's layout is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.gate_plans import GATE_RULE_NAMES
from glassblock.wire.audits import Report
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

pytestmark = pytest.mark.real

LAYERS = range(30)
ROLES = ("gate", "up", "down")


@pytest.fixture(scope="module")
def networks(smollm2: Any) -> list[tuple[Tensor, ...]]:
    opened: Any = safe_open(smollm2.single / "model.safetensors", "pt")
    with opened as file:
        return [tuple(file.get_tensor(f"model.layers.{n}.mlp.{role}_proj.weight") for role in ROLES) for n in LAYERS]


def audited(
    directory: Path,
    networks: list[tuple[Tensor, ...]],
    store: Callable[[int, tuple[Tensor, ...]], dict[str, Tensor]],
    **config: object,
) -> Report:
    """The networks alone: the gate rules look at nothing else."""
    tensors = {name: tensor for n, network in enumerate(networks) for name, tensor in store(n, network).items()}
    tensors["model.embed_tokens.weight"] = torch.zeros(8, 576, dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 8}
    sizes |= {"num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    (directory / "config.json").write_text(json.dumps({**sizes, **config}))
    return audit_checkpoint(directory, AuditQuestion(rules=tuple(sorted(GATE_RULE_NAMES))))


def phi3(directory: Path, networks: list[tuple[Tensor, ...]], *, groups: int, gate_first: bool) -> Report:
    def store(layer: int, network: tuple[Tensor, ...]) -> dict[str, Tensor]:
        gate, up, down = network
        halves = [half.unflatten(0, (groups, -1)) for half in ((gate, up) if gate_first else (up, gate))]
        prefix = f"model.layers.{layer}.mlp."
        fused = torch.stack(halves, 1).flatten(0, 2)
        return {f"{prefix}gate_up_proj.weight": fused, f"{prefix}down_proj.weight": down}

    return audited(directory, networks, store, model_type="phi3", architectures=["Phi3ForCausalLM"])


def checked(report: Report) -> dict[str, int]:
    assert not any(entry.undecidable for entry in report.coverage if entry.rule != "norm/eps-mismatch")
    return {entry.rule: entry.checked for entry in report.coverage if entry.checked}


ALL = {"ffn/fused-order": 30, "ffn/fused-layout": 30, "ffn/mispaired-neurons": 30}


def test_gate_first_is_what_the_family_says(networks: list[tuple[Tensor, ...]], tmp_path: Path) -> None:
    report = phi3(tmp_path, networks, groups=1, gate_first=True)
    assert report.findings == ()
    assert checked(report) == ALL
    assert all(layer.metrics["screened"] for layer in report.layers)


def test_up_first_is_named_in_every_layer(networks: list[tuple[Tensor, ...]], tmp_path: Path) -> None:
    report = phi3(tmp_path, networks, groups=1, gate_first=False)
    assert [(finding.rule, finding.layer) for finding in report.findings] == [("ffn/fused-order", n) for n in LAYERS]
    assert all(finding.evidence["log10_p"] < -50 for finding in report.findings)


@pytest.mark.parametrize(("groups", "gate_first"), [(1536, True), (2, True), (4, True), (4, False)])
def test_every_other_layout_is_named_in_every_layer(
    groups: int, gate_first: bool, networks: list[tuple[Tensor, ...]], tmp_path: Path
) -> None:
    report = phi3(tmp_path, networks, groups=groups, gate_first=gate_first)
    assert [(finding.rule, finding.layer) for finding in report.findings] == [("ffn/fused-layout", n) for n in LAYERS]
    for finding in report.findings:
        assert (finding.evidence["groups"], finding.evidence["gate_first"]) == (groups, gate_first)
        assert finding.evidence["log10_p"] < -50


@pytest.mark.parametrize("exchanged", [None, 0, 17])
def test_transposed_in_a_stack_of_one_expert(
    exchanged: int | None, networks: list[tuple[Tensor, ...]], tmp_path: Path
) -> None:
    def store(layer: int, network: tuple[Tensor, ...]) -> dict[str, Tensor]:
        gate, up, down = network
        rows = torch.cat([up, gate] if layer == exchanged else [gate, up])
        prefix = f"model.layers.{layer}.mlp."
        return {
            f"{prefix}gate.weight": torch.zeros(1, 576, dtype=torch.bfloat16),
            f"{prefix}experts.gate_up_proj": rows.T.contiguous()[None],
            f"{prefix}experts.down_proj": down.T.contiguous()[None],
        }

    report = audited(
        tmp_path,
        networks,
        store,
        model_type="qwen3_vl_moe_text",
        architectures=["Qwen3VLMoeTextModel"],
        num_experts=1,
        num_experts_per_tok=1,
        moe_intermediate_size=1536,
    )
    found = [(finding.rule, finding.layer, finding.expert) for finding in report.findings]
    assert found == ([] if exchanged is None else [("ffn/fused-order", exchanged, 0)])
    assert checked(report)["ffn/fused-order"] == 30
