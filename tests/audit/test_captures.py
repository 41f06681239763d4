"""Audits with captured tensors: what an engine computed is explained layer by layer, and told under the rule's name."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.capture_findings import CAPTURE_RULES, RULE_OF
from glassblock.audit.fix import Unrepaired
from glassblock.audit.fixes import repair_of
from glassblock.audit.rules import RULES
from glassblock.checkpoint.layers import load_feed_forward, load_wiring
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.patches import patched
from glassblock.checkpoint.reading import ReadMeter, read_tensor
from glassblock.checkpoint.recordings import Recording, open_recording
from glassblock.checkpoint.roots import Roots
from glassblock.errors import InvalidValue, NotFound
from glassblock.numerics.block import run_block
from glassblock.numerics.hypotheses import DEFAULTS
from glassblock.wire.audits import Coverage, Finding, Report
from makers import Tiny, tiny_checkpoint
from plants import edit_tensors, healthy_checkpoint, rename
from safetensors.torch import save_file
from torch import Tensor
from wrong_engine import Engine

TOKENS = 48
SQUARE = Tiny(intermediate=Tiny().hidden)


def rows(seed: int = 0) -> Tensor:
    x = torch.randn(TOKENS, Tiny().hidden, generator=torch.Generator().manual_seed(seed))
    x[: TOKENS // 2] *= 1e-2  # rows of little energy, where an epsilon shows
    return x


def engine_of(directory: Path, layer: int) -> Engine:
    checkpoint, meter = open_checkpoint(directory), ReadMeter()
    network, wiring = load_feed_forward(checkpoint, layer, "cpu", meter), load_wiring(checkpoint, layer, "cpu", meter)
    assert network.gate is not None
    assert wiring.input_norm is not None
    assert wiring.input_norm.gain is not None
    return Engine(network.gate, network.up, network.down, wiring.input_norm.gain, eps=wiring.input_norm.eps)


def save_stages(stages: Mapping[str, Tensor | None], file: Path) -> None:
    save_file({name: tensor.clone() for name, tensor in stages.items() if tensor is not None}, file)


def record(directory: Path, folder: Path, **mistakes: dict[str, Any]) -> Recording:
    """Both layers of a Llama by another engine; `layer_1=...` are its mistakes there."""
    folder.mkdir()
    for layer in (0, 1):
        captured = engine_of(directory, layer).but(**mistakes.get(f"layer_{layer}", {}))(rows(layer))
        save_stages(captured, folder / f"layer_{layer}.safetensors")
    return open_recording(Roots([folder.parent]), folder.name)


def audited(directory: Path, recording: Recording | None, **question: Any) -> Report:
    return audit_checkpoint(directory, AuditQuestion(captures=recording, **question))


def loud(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.level != "note"]


def coverage(report: Report, rule: str) -> Coverage:
    return next(covered for covered in report.coverage if covered.rule == rule)


MISTAKES: dict[str, tuple[dict[str, Any], str, str]] = {
    "swap": ({"swap": True}, "ffn/gate-up-swapped", "gate and up are exchanged"),
    "activation on up": ({"activation_on_up": True}, "ffn/gate-up-swapped", "the activation is on up"),
    "blocks": ({"split_rows": 2}, "ffn/fused-layout", "tensor-parallel"),
    "eps": ({"eps": 1e-3}, "norm/eps-mismatch", "eps is 0.001"),
    "eps outside": ({"eps_outside": True}, "norm/eps-mismatch", "outside the root"),
    "offset": ({"added_to_gain": 1.0}, "norm/offset", "once too often"),
    "LayerNorm": ({"layer_norm": True}, "norm/kind-conflict", "LayerNorm"),
    "placement": ({"placement": "post"}, "norm/role", "post"),
    "relu": ({"activation": torch.relu}, "config/activation-conflict", "relu"),
    "both": ({"both_activated": True}, "config/activation-conflict", "both branches"),
    "transposed": ({"down_transposed": True}, "tensor/transposed", "transposed"),
}


@pytest.mark.parametrize(("wrong", "rule", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_the_only_finding_and_names_its_layer(
    wrong: dict[str, Any], rule: str, words: str, tmp_path: Path
) -> None:
    directory = healthy_checkpoint("llama", tmp_path / "llama", tiny=SQUARE)
    recording = record(directory, tmp_path / "captures", layer_1=wrong)
    report = audited(directory, recording)
    (finding,) = loud(report)
    assert (finding.rule, finding.level, finding.certainty, finding.layer) == (rule, "error", "proved", 1)
    assert words in finding.message
    assert "the first layer that departs" in finding.message
    assert report.verdict == "fail"
    assert report.captures is not None
    assert report.captures.first_departure == 1
    assert [judged.verdict for judged in report.captures.layers] == ["as-declared", "explained"]
    assert str(tmp_path) not in report.model_dump_json()


def test_two_mistakes_in_one_layer_are_two_findings(tmp_path: Path) -> None:
    directory = healthy_checkpoint("llama", tmp_path / "llama")
    wrong = {"swap": True, "eps": 1e-3}
    report = audited(directory, record(directory, tmp_path / "captures", layer_0=wrong))
    assert {(finding.rule, finding.layer) for finding in loud(report)} == {
        ("ffn/gate-up-swapped", 0),
        ("norm/eps-mismatch", 0),
    }
    assert all("one of 2 mistakes" in finding.message for finding in loud(report))


def test_captures_as_declared_acquit_what_the_weights_leave_open(tmp_path: Path) -> None:
    directory = tiny_checkpoint("llama", tmp_path / "llama")  # untrained: its gates are noise
    assert audited(directory, None).verdict == "inconclusive"
    report = audited(directory, record(directory, tmp_path / "captures"))
    assert (loud(report), report.verdict) == ([], "pass")
    swapped = coverage(report, "ffn/gate-up-swapped")
    assert (swapped.checked, swapped.undecidable) == (2, ())
    assert report.captures is not None
    assert report.captures.first_departure is None


def test_an_epsilon_that_does_not_show_stays_open_and_says_what_would_decide(tmp_path: Path) -> None:
    directory = healthy_checkpoint("llama", tmp_path / "llama")
    folder = tmp_path / "captures"
    folder.mkdir()
    captured = engine_of(directory, 0).but(dtype=torch.bfloat16)(100 * rows())
    save_stages(captured, folder / "layer_0.safetensors")
    report = audited(directory, open_recording(Roots([tmp_path]), "captures"))
    (open_,) = coverage(report, "norm/eps-mismatch").undecidable
    assert open_.layer == 0
    assert "capture" in open_.would_decide
    assert (loud(report), report.verdict) == ([], "pass")


def test_a_mistake_that_is_proved_is_not_open_beside_one_that_is(tmp_path: Path) -> None:
    directory = healthy_checkpoint("llama", tmp_path / "llama")
    captured = engine_of(directory, 0).but(dtype=torch.bfloat16, swap=True)(100 * rows())
    save_stages(captured, tmp_path / "layer_0.safetensors")
    report = audited(directory, open_recording(Roots([tmp_path]), "layer_0.safetensors"))
    assert [(finding.rule, finding.layer) for finding in loud(report)] == [("ffn/gate-up-swapped", 0)]
    assert coverage(report, "ffn/gate-up-swapped").undecidable == ()
    (open_,) = coverage(report, "norm/eps-mismatch").undecidable
    assert "gate and up are exchanged" in open_.would_decide


def test_what_cannot_be_answered_is_inconclusive(tmp_path: Path) -> None:
    directory = healthy_checkpoint("llama", tmp_path / "llama")
    x = rows()
    noise = {"x": x, "normed": rows(9), "gate": torch.randn(TOKENS, Tiny().intermediate)}
    for number, stages in enumerate(
        (
            {"layers.0.x": x, "layers.0.down": x.double()[:3]},  # other tokens
            {"layers.7.x": x, "layers.7.normed": x.clone()},  # no such layer
            {f"layers.1.{name}": tensor for name, tensor in noise.items()},  # nothing explains it
            {"layers.1.x": x, "layers.1.normed": x * torch.nan},
        )
    ):
        folder = tmp_path / f"captures-{number}"
        folder.mkdir()
        save_file(stages, folder / "all.safetensors")
        report = audited(directory, open_recording(Roots([tmp_path]), folder.name))
        assert (loud(report), report.verdict) == ([], "inconclusive")
        assert report.captures is not None
        assert report.captures.layers[0].verdict in {"unanswered", "unexplained"}
        assert any(open_.would_decide for open_ in coverage(report, "norm/eps-mismatch").undecidable)


def test_a_fused_tensor_that_is_swapped_is_told_as_its_order(tmp_path: Path) -> None:
    directory = healthy_checkpoint("phi3", tmp_path / "phi3")
    checkpoint, meter = open_checkpoint(directory), ReadMeter()
    network, wiring = load_feed_forward(checkpoint, 0, "cpu", meter), load_wiring(checkpoint, 0, "cpu", meter)
    captured = run_block(rows(), network.swapped(), wiring)
    save_stages(captured._asdict(), tmp_path / "layer_0.safetensors")
    (finding,) = loud(audited(directory, open_recording(Roots([tmp_path]), "layer_0.safetensors")))
    assert (finding.rule, finding.certainty) == ("ffn/fused-order", "proved")
    assert finding.tensors == ("model.layers.0.mlp.gate_up_proj.weight",)


GATE, UP = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"
FUSED = "model.layers.1.mlp.gate_up_proj.weight"


def record_declared(directory: Path, folder: Path) -> Recording:
    """Layer 1 as declared, of any family."""
    folder.mkdir()
    checkpoint, meter = open_checkpoint(directory), ReadMeter()
    network, wiring = load_feed_forward(checkpoint, 1, "cpu", meter), load_wiring(checkpoint, 1, "cpu", meter)
    save_stages(run_block(rows(), network, wiring)._asdict(), folder / "layer_1.safetensors")
    return open_recording(Roots([folder.parent]), folder.name)


def _exchange_halves(tensors: dict[str, Tensor]) -> None:
    tensors[FUSED] = torch.cat(tensors[FUSED].chunk(2)[::-1])


def _interleave(tensors: dict[str, Tensor]) -> None:
    tensors[FUSED] = torch.stack(tensors[FUSED].chunk(2), 1).flatten(0, 1)


def _in_blocks(tensors: dict[str, Tensor]) -> None:
    halves = [half.reshape(4, -1, half.shape[1]) for half in tensors[FUSED].chunk(2)]
    tensors[FUSED] = torch.stack(halves, 1).flatten(0, 2)


EDITS: dict[str, tuple[str, Callable[[Path], object], str, str]] = {
    "names": ("llama", rename(GATE, UP), "ffn/gate-up-swapped", "swap-tensors"),
    "halves": ("phi3", edit_tensors(_exchange_halves), "ffn/fused-order", "swap-halves"),
    "in turn": ("phi3", edit_tensors(_interleave), "ffn/fused-layout", "reorder-rows"),
    "blocks": ("phi3", edit_tensors(_in_blocks), "ffn/fused-layout", "reorder-rows"),
}


@pytest.mark.parametrize(("family", "edit", "rule", "action"), EDITS.values(), ids=EDITS)
def test_what_weights_and_captures_say_alike_is_one_finding_with_both_and_a_repair(
    family: str, edit: Callable[[Path], object], rule: str, action: str, tmp_path: Path
) -> None:
    directory = healthy_checkpoint(family, tmp_path / family)
    recording = record_declared(directory, tmp_path / "captures")
    before = {
        entry.name: read_tensor(entry, "cpu", ReadMeter()) for entry in open_checkpoint(directory).entries.values()
    }
    edit(directory)
    (alone,) = loud(audited(directory, None))
    (finding,) = loud(audited(directory, recording))
    assert (finding.rule, finding.layer, finding.level, finding.certainty) == (rule, 1, "error", "proved")
    assert (alone.rule, alone.certainty) == (rule, "statistical")
    assert finding.message.startswith(f"{alone.message}; and so say captures of layer 1 (captures): ")
    assert finding.evidence.items() >= alone.evidence.items()
    assert finding.evidence["captures"] == "captures"
    assert finding.evidence["residual"] < finding.evidence["declared_residual"]
    assert finding.fix is not None
    assert (finding.fix, finding.fix.action) == (alone.fix, action)
    broken = open_checkpoint(directory)
    patch = repair_of(broken, finding)
    assert not isinstance(patch, Unrepaired)
    mended = patched(broken, patch)
    for name, tensor in before.items():
        assert torch.equal(read_tensor(mended.entries[name], "cpu", ReadMeter()), tensor)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"swap": True}, "has gate and up exchanged"), ({"split_rows": 2}, "has their rows otherwise")],
    ids=["swap", "blocks"],
)
def test_of_weights_that_are_as_named_it_is_told_that_the_engine_is_at_fault(
    wrong: dict[str, Any], words: str, tmp_path: Path
) -> None:
    directory = healthy_checkpoint("llama", tmp_path / "llama")
    (finding,) = loud(audited(directory, record(directory, tmp_path / "captures", layer_1=wrong)))
    assert "the weights of this file are as named" in finding.message
    assert f"or the file that it loaded, {words}, and this file needs no repair" in finding.message
    assert finding.evidence["weights"]["verdict"] == "as-named"
    assert finding.evidence["weights"]["gate_z"] > 10 * abs(finding.evidence["weights"]["up_z"])
    assert (finding.fix, finding.level, finding.certainty) == (None, "error", "proved")


def test_weights_that_leave_it_open_acquit_and_convict_nobody(tmp_path: Path) -> None:
    directory = tiny_checkpoint("llama", tmp_path / "llama")  # untrained: its gates are noise
    report = audited(directory, record(directory, tmp_path / "captures", layer_1={"swap": True}))
    (finding,) = loud(report)
    assert "whether this file or that engine has gate and up exchanged, the weights leave open" in finding.message
    assert (finding.evidence["weights"]["verdict"], finding.fix) == ("undecidable", None)


def test_captures_whose_names_alone_are_exchanged_leave_the_finding_of_the_weights_as_it_is(tmp_path: Path) -> None:
    directory = healthy_checkpoint("llama", tmp_path / "llama")
    rename(GATE, UP)(directory)
    (alone,) = loud(audited(directory, None))
    report = audited(directory, record(directory, tmp_path / "captures", layer_1={"names_exchanged": True}))
    weights, captured = loud(report)
    assert weights == alone
    assert (captured.evidence["replayed"], captured.fix) == ("labels", None)


def test_blocks_with_up_first_are_two_mistakes_to_captures_and_one_repair(tmp_path: Path) -> None:
    directory = healthy_checkpoint("phi3", tmp_path / "phi3")
    recording = record_declared(directory, tmp_path / "captures")
    edit_tensors(_exchange_halves)(directory)
    edit_tensors(_in_blocks)(directory)
    (alone,) = loud(audited(directory, None))
    order, layout = loud(audited(directory, recording))
    assert (layout.rule, layout.fix, layout.certainty) == ("ffn/fused-layout", alone.fix, "proved")
    assert (order.rule, order.fix, order.certainty) == ("ffn/fused-order", None, "proved")
    assert "told as ffn/fused-layout" in order.message


def test_captures_of_another_layout_leave_what_the_weights_show(tmp_path: Path) -> None:
    directory = healthy_checkpoint("phi3", tmp_path / "phi3")
    edit_tensors(_interleave)(directory)  # loaded by an engine that reads two blocks
    checkpoint, meter = open_checkpoint(directory), ReadMeter()
    network, wiring = load_feed_forward(checkpoint, 1, "cpu", meter), load_wiring(checkpoint, 1, "cpu", meter)
    assert network.gate is not None
    parts = torch.cat([network.gate, network.up]).chunk(4)
    read = replace(network, gate=torch.cat(parts[0::2]), up=torch.cat(parts[1::2]))
    save_stages(run_block(rows(), read, wiring)._asdict(), tmp_path / "layer_1.safetensors")
    (alone,) = loud(audited(directory, None))
    weights, captured = loud(audited(directory, open_recording(Roots([tmp_path]), "layer_1.safetensors")))
    assert weights == alone
    assert (captured.rule, captured.evidence["replayed"], captured.fix) == ("ffn/fused-layout", "blocks-2", None)


def test_captures_beside_a_reference_are_one_finding_with_it(tmp_path: Path) -> None:
    directory, right = (healthy_checkpoint("llama", tmp_path / name) for name in ("llama", "right"))
    recording = record_declared(directory, tmp_path / "captures")
    rename(GATE, UP)(directory)
    (finding,) = loud(audited(directory, recording, reference=open_checkpoint(right), reference_name="right"))
    assert (finding.evidence["reference"], finding.evidence["captures"]) == ("right", "captures")
    assert finding.fix is not None
    assert finding.fix.action == "swap-tensors"


BAD: dict[str, tuple[dict[str, Tensor] | None, str, str]] = {
    "no stage": ({"z": torch.ones(1, 48)}, "layer_0", "no stage"),
    "no layer": ({"x": torch.ones(1, 48)}, "all", "of which layer"),
    "twice": ({"x": torch.ones(1, 48), "layers.0.x": torch.ones(1, 48)}, "layer_0", "already"),
    "damaged": (None, "layer_0", "cannot be read"),
}


@pytest.mark.parametrize(("stages", "stem", "words"), BAD.values(), ids=BAD)
def test_captures_that_cannot_be_used_are_refused_before_anything_is_read(
    stages: dict[str, Tensor] | None, stem: str, words: str, tmp_path: Path
) -> None:
    directory = tiny_checkpoint("llama", tmp_path / "llama")
    folder = tmp_path / "captures"
    folder.mkdir()
    if stages is None:
        (folder / f"{stem}.safetensors").write_bytes(b"\x08")
    else:
        save_file(stages, folder / f"{stem}.safetensors")
    with pytest.raises(InvalidValue, match=words) as refused:
        audited(directory, open_recording(Roots([tmp_path]), "captures"))
    assert refused.value.field == "captures"


def test_a_recording_that_is_not_there_or_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidValue, match=r"holds no \.safetensors"):
        open_recording(Roots([tmp_path]), "empty")
    with pytest.raises(NotFound, match="there are no captures") as missing:
        open_recording(Roots([tmp_path]), "nowhere")
    assert missing.value.field == "captures"


def test_rules_that_read_no_captures_are_refused_beside_them(tmp_path: Path) -> None:
    directory = tiny_checkpoint("llama", tmp_path / "llama")
    recording = record(directory, tmp_path / "captures")
    with pytest.raises(InvalidValue, match="captures was given"):
        audited(directory, recording, rules=("tensor/empty",))


def test_every_factor_of_a_hypothesis_has_a_rule() -> None:
    assert RULE_OF.keys() == DEFAULTS.keys()
    assert RULES.keys() >= CAPTURE_RULES


def test_a_layout_that_a_fused_tensor_alone_can_have_is_not_looked_for_in_separate_ones_without_captures(
    tmp_path: Path,
) -> None:
    report = audited(healthy_checkpoint("llama", tmp_path / "llama"), None)
    (skipped,) = coverage(report, "ffn/fused-layout").skipped
    assert "separate tensors" in skipped.reason
