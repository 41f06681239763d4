"""What the screen acquits is read once; what it does not is read again, whole or some channels of it, and certified."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gates import edit_networks, exchange, lay_fused, train
from glassblock.audit import gate_loading, gather
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.evidence import Evidence
from glassblock.audit.gate_plans import gate_plans
from glassblock.audit.gate_screens import GateScreens
from glassblock.audit.network_sketch import SAMPLED
from glassblock.audit.question import Hash
from glassblock.audit.read_ahead import ReadAhead
from glassblock.checkpoint import reading
from glassblock.checkpoint.layer_map import resolve_layer, resolve_layers
from glassblock.checkpoint.layer_parts import Expert, LayerTensors
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.wire.audits import Report
from makers import Tiny, tiny_checkpoint
from safetensors.torch import load_file
from torch import Tensor

TINY = Tiny(hidden=96, intermediate=128, expert_width=104)
GATES = ("ffn/gate-up-swapped", "ffn/fused-order", "ffn/fused-layout")


def checkpoint(family: str, directory: Path, *, layers: int = 3) -> Path:
    return train(tiny_checkpoint(family, directory, tiny=Tiny(**{**vars(TINY), "layers": layers})))


def evidence_of(directory: Path, **question: Any) -> Evidence:
    return gather.gather(
        open_checkpoint(directory),
        AuditQuestion(**question),
        device=torch.device("cpu"),
        progress=lambda _done, _total, _what: None,
        cancelled=lambda: False,
    )


def told(report: Report) -> list[tuple[str, int | None, int | None]]:
    return [(f.rule, f.layer, f.expert) for f in report.findings if f.rule in GATES]


def covered(report: Report) -> dict[str, int]:
    return {entry.rule: entry.checked for entry in report.coverage if entry.rule in GATES}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes read of each tensor."""
    read: dict[str, int] = {}
    alone: Callable[..., None] = reading._fill_from
    in_runs: Callable[..., Any] = ReadAhead._seen

    def counted(descriptor: int, entry: Any, offset: int, flat: Tensor) -> None:
        read[entry.name] = read.get(entry.name, 0) + flat.numel()
        alone(descriptor, entry, offset, flat)

    def seen(ahead: ReadAhead, span: Any, flat: Tensor) -> Any:
        read[span.entry.name] = read.get(span.entry.name, 0) + flat.numel()
        return in_runs(ahead, span, flat)

    monkeypatch.setattr(reading, "_fill_from", counted)
    monkeypatch.setattr(ReadAhead, "_seen", seen)
    return read


def test_only_the_suspicious_layer_is_read_again(tmp_path: Path, read: dict[str, int]) -> None:
    directory = checkpoint("llama", tmp_path)
    exchange(directory, (1, None))
    report = audit_checkpoint(directory)
    assert told(report) == [(GATES[0], 1, None)]
    entries = open_checkpoint(directory).entries
    assert {name for name, count in read.items() if count > entries[name].bytes} == {
        f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")
    }
    assert [layer.metrics["screened"] for layer in report.layers] == [1, 0, 1]


def test_a_screened_layer_carries_no_certificate_and_its_gate_its_z(tmp_path: Path) -> None:
    study = evidence_of(checkpoint("llama", tmp_path)).gates
    assert study is not None
    for gates in study.layers.values():
        (tested,) = gates.networks
        assert tested.judgement.screened
        assert tested.statistics is None
        assert tested.judgement.log10_p is None
        assert tested.screen is not None
        assert tested.screen.gate.z > 12
        assert tested.screen.up.z < 3


@pytest.mark.parametrize("piece", [192, 1000, 4096])
@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral", "granitemoe", "qwen3_vl_moe_text", "dbrx"])
def test_pieces_of_any_length_give_the_same_verdicts(
    family: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 192 bytes no row fits into a piece: nothing can be screened, and everything is read again."""
    directory = checkpoint(family, tmp_path)
    expert: Expert = None if family in {"llama", "phi3"} else 1
    exchange(directory, (1, expert))
    whole = audit_checkpoint(directory)
    monkeypatch.setattr(gather, "CPU_CHUNK_BYTES", piece)
    pieced = audit_checkpoint(directory)
    assert told(whole) == told(pieced) != []
    assert covered(whole) == covered(pieced)


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3_vl_moe_text", "dbrx"])
def test_of_a_large_network_some_channels_are_enough(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_loading, "FEWEST_CHANNELS", 40)
    directory = checkpoint(family, tmp_path)
    exchange(directory, (1, None if family in {"llama", "phi3"} else 1))
    assert all("channels" not in finding.evidence for finding in audit_checkpoint(directory).findings)
    monkeypatch.setattr(gate_loading.load_network, "__kwdefaults__", {"most_entries": 1})
    (finding,) = (finding for finding in audit_checkpoint(directory).findings if finding.rule in GATES)
    assert finding.evidence["channels"] == 40
    assert finding.layer == 1
    assert finding.evidence["log10_p"] < -4


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("groups", [2, 4, 8, 16, 128])
def test_a_layout_is_recovered_where_gate_or_up_comes_first(groups: int, gate_first: bool, tmp_path: Path) -> None:
    directory = checkpoint("phi3", tmp_path)
    lay_fused(directory, 0, 2, groups=groups, gate_first=gate_first)
    report = audit_checkpoint(directory)
    assert told(report) == [("ffn/fused-layout", 0, None), ("ffn/fused-layout", 2, None)]
    for finding in report.findings:
        assert (finding.evidence["groups"], finding.evidence["gate_first"]) == (groups, gate_first)
        assert finding.evidence["declared"] == "[gate | up]"
        assert 10 ** finding.evidence["declared_up_log10_p"] <= finding.evidence["family_wise"]["level"]
        assert finding.fix is not None
        assert finding.fix.action == "reorder-rows"


def test_the_layout_of_one_expert(tmp_path: Path) -> None:
    directory = checkpoint("granitemoe", tmp_path)

    def lay(layer: int, expert: Expert, weights: dict[str, Tensor]) -> None:
        if (layer, expert) == (1, 2):
            both = [weights[name].clone().unflatten(0, (4, -1)) for name in ("gate", "up")]
            weights["fused"].copy_(torch.stack(both, 1).flatten(0, 2))

    edit_networks(directory, lay)
    assert told(audit_checkpoint(directory)) == [("ffn/fused-layout", 1, 2)]


def test_a_layout_that_is_not_tried_is_undecidable(tmp_path: Path) -> None:
    directory = checkpoint("phi3", tmp_path)

    def shuffle(layer: int, _expert: Expert, weights: dict[str, Tensor]) -> None:
        if layer == 1:
            order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
            weights["fused"].copy_(weights["fused"].clone()[order])

    edit_networks(directory, shuffle)
    report = audit_checkpoint(directory)
    assert told(report) == []
    for entry in report.coverage:
        if entry.rule in {"ffn/fused-order", "ffn/fused-layout"}:
            assert [open_.layer for open_ in entry.undecidable] == [1]


@pytest.mark.parametrize("kind", ["fast", "sha256", "none"])
def test_equal_tensors_have_equal_digests_and_experts_their_own(kind: Hash, tmp_path: Path) -> None:
    directory = checkpoint("granitemoe", tmp_path)

    def copy(layer: int, expert: Expert, weights: dict[str, Tensor]) -> None:
        if layer == 1 and expert in {0, 3}:
            first = kept.setdefault("fused", weights["fused"].clone())
            weights["fused"].copy_(first)

    kept: dict[str, Tensor] = {}
    edit_networks(directory, copy)
    evidence = evidence_of(directory, hash=kind)
    tensors: LayerTensors = resolve_layer(evidence.checkpoint, 1)[0]
    digests = [evidence.digest_of(tensors.network(expert).weights["fused"]) for expert in range(4)]
    if kind == "none":
        assert digests == [None] * 4
        assert not evidence.digests
        return
    assert digests[0] == digests[3] is not None
    assert len(set(digests)) == 3
    assert evidence.digests.keys() == evidence.checkpoint.entries.keys()


@pytest.mark.parametrize("kind", ["fast", "sha256", "none"])
@pytest.mark.parametrize("equal", [True, False])
def test_a_head_is_held_against_the_embedding(equal: bool, kind: Hash, tmp_path: Path) -> None:
    embedding = torch.randn(96, 96, generator=torch.Generator().manual_seed(0))
    head = embedding.clone()
    head[95, 95] += 0 if equal else 1
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    tiny_checkpoint("llama", tmp_path, tiny=TINY, tensors=tensors)
    assert evidence_of(tmp_path, hash=kind).head_is_embedding is equal


def test_a_head_of_another_dtype_is_compared_by_its_numbers(tmp_path: Path) -> None:
    embedding = torch.randn(96, 96, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.float()}
    tiny_checkpoint("llama", tmp_path, tiny=TINY, tensors=tensors)
    assert evidence_of(tmp_path).head_is_embedding is True


def test_torch_has_its_threads_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        audit_checkpoint(checkpoint("llama", tmp_path))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 7, 20, 1000])
@pytest.mark.parametrize(("family", "neurons"), [("llama", 40), ("llama", 112), ("llama", 191), ("phi3", 112)])
def test_the_neurons_that_are_kept_whole_are_the_same_in_pieces_of_any_length(
    family: str, neurons: int, rows: int, tmp_path: Path
) -> None:
    directory = tiny_checkpoint(family, tmp_path, tiny=Tiny(intermediate=neurons, layers=1))
    opened, stored = open_checkpoint(directory), load_file(directory / "model.safetensors")
    plans, _ = gate_plans(opened, resolve_layers(opened)[0], {})
    ((_, sketch),) = GateScreens(plans, device=torch.device("cpu")).sketches()
    sketch.give(lambda entry: iter(stored[entry.name].split(rows)))
    mlp = "model.layers.0.mlp."
    if family == "phi3":
        gate, up = stored[f"{mlp}gate_up_proj.weight"].chunk(2)
    else:
        gate, up = (stored[f"{mlp}{part}_proj.weight"] for part in ("gate", "up"))
    step = max(1, neurons // SAMPLED)
    assert sketch.sampled["gate"].equal(gate[::step][:SAMPLED])
    assert sketch.sampled["up"].equal(up[::step][:SAMPLED])
