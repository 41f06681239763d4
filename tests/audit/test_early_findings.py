"""What is told early: what headers, index and config decide first, then what one tensor or one layer does."""

import math
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from glassblock.audit import early_findings, gate_screens
from glassblock.audit.audit import audit_checkpoint
from glassblock.audit.neuron_numbers import Key
from glassblock.audit.parts_read import STEP_BYTES, PartsRead
from glassblock.audit.question import AuditQuestion
from glassblock.audit.rules import RULES
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.layer_map import resolve_layers
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.wire.audits import Finding
from makers import asked
from plants import PLANTS, Plant, edit_entry, edit_header, edit_json, edit_tensors, healthy_checkpoint, trained_mixture
from told import taken_back
from torch import Tensor

Tensors = dict[str, Tensor]
DOWN = "model.layers.{}.mlp.down_proj.weight"
KEYS = "model.layers.{}.self_attn.k_proj.weight"
OUTPUT = "model.layers.{}.self_attn.o_proj.weight"
NON_FINITE = "tensor/non-finite"


def told(
    directory: Path, question: AuditQuestion | None = None
) -> tuple[list[tuple[Finding, int]], int, tuple[Finding, ...]]:
    """Each finding with the bytes that had been read when it was told, the bytes in all, and those of the report."""
    told: list[tuple[Finding, int]] = []
    read = total = 0

    def progress(done: int, in_all: int, _what: str) -> None:
        nonlocal read, total
        read, total = done, in_all

    report = audit_checkpoint(
        directory, question, progress=progress, found=lambda finding: told.append((finding, read))
    )
    return told, total, report.findings


def test_a_tensor_that_is_not_finite_is_told_when_it_was_read(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    for layer in (0, 1):
        edit_entry(DOWN.format(layer), (0, 0), math.nan)(tmp_path)
    early, total, findings = told(tmp_path)
    assert [(finding.rule, finding.layer) for finding, _ in early[:2]] == [(NON_FINITE, 0), (NON_FINITE, 1)]
    assert early[0][1] < early[1][1] < total
    assert all(finding.locations for finding, _ in early[:2])
    # The report names both in one.
    (both,) = (finding for finding in findings if finding.rule == NON_FINITE)
    assert both.tensors == (DOWN.format(0), DOWN.format(1))


def test_only_where_its_rule_is_asked(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_entry(DOWN.format(0), (0, 0), math.inf)(tmp_path)
    early, _, findings = told(tmp_path, AuditQuestion(rules=("norm/role",)))
    assert early == []
    assert findings == ()


def test_one_tensor_alone_is_told_once(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_entry(DOWN.format(1), (0, 0), math.inf)(tmp_path)
    early, _, findings = told(tmp_path)
    assert [finding for finding, _ in early if finding.rule == NON_FINITE] == list(findings)


CASES = [pytest.param(plant, id=f"{rule}:{plant.label}") for rule, plants in PLANTS.items() for plant in plants]
BY_PART = {name: rule for name, rule in RULES.items() if rule.tells_after != "all"}
BEFORE = {name for name, rule in RULES.items() if rule.tells_before_tensors}


def broken(plant: Plant, directory: Path, *, reference: bool = False) -> tuple[Path, AuditQuestion]:
    healthy = plant.healthy(directory / "healthy")
    shutil.copytree(healthy, directory / "checkpoint")
    plant.break_(directory / "checkpoint")
    compared = open_checkpoint(healthy) if plant.reference or reference else None
    return directory / "checkpoint", AuditQuestion(against=plant.against, reference=compared)


@pytest.mark.parametrize("plant", CASES)
def test_what_is_told_early_is_in_the_report(plant: Plant, tmp_path: Path) -> None:
    directory, question = broken(plant, tmp_path)
    early, _, findings = told(directory, question)
    assert taken_back((finding for finding, _ in early), findings) == []
    assert all(finding in [one for one, _ in early] for finding in findings)
    before = [finding for finding, read in early if not read and finding.rule in BEFORE - BY_PART.keys()]
    assert all(finding in findings for finding in before)


@pytest.mark.parametrize(
    "plant", [pytest.param(plant, id=f"{rule}:{plant.label}") for rule in BY_PART for plant in PLANTS[rule]]
)
def test_and_beside_a_reference(plant: Plant, tmp_path: Path) -> None:
    directory, question = broken(plant, tmp_path, reference=True)
    early, _, findings = told(directory, question)
    assert taken_back((finding for finding, _ in early), findings) == []


@pytest.mark.parametrize("rule", sorted(BEFORE))
def test_what_needs_no_tensor_is_told_before_the_first(rule: str, tmp_path: Path) -> None:
    early: list[str] = []
    for number, plant in enumerate(PLANTS[rule]):
        directory, question = broken(plant, tmp_path / str(number))
        reading: list[bool] = []
        audit_checkpoint(
            directory,
            question,
            progress=lambda _done, _total, _what, reading=reading: reading.append(True),
            found=lambda finding, reading=reading: early.extend([] if reading else [finding.rule]),
        )
    assert rule in early


@pytest.mark.parametrize("rule", sorted(BY_PART.keys() - {"config/shape"}))
def test_what_a_part_decides_is_told_before_all_is_judged(rule: str, tmp_path: Path) -> None:
    early: list[str] = []
    for number, plant in enumerate(PLANTS[rule]):
        directory, question = broken(plant, tmp_path / str(number))
        found, total, _ = told(directory, question)
        early.extend(finding.rule for finding, read in found if 0 < read < total)
    assert rule in early


def test_the_page_says_what_is_told_when() -> None:
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
    for part in ("tensor", "layer"):
        (row,) = re.findall(rf"^\| after each {part} \| (.*) \|$", page, re.MULTILINE)
        assert set(re.findall(r"`([^`]+)`", row)) == {
            name for name, rule in BY_PART.items() if rule.tells_after == part
        }


# Layer by layer. The networks of so small layers would be weighed together at the end.


@pytest.fixture
def weighed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_screens, "_WAITING_BYTES", 0)


def zero(*names: str) -> Callable[[Tensors, int], object]:
    return lambda tensors, layer: [tensors[name.format(layer)].zero_() for name in names]


def dead_neurons(tensors: Tensors, layer: int) -> None:
    tensors[DOWN.format(layer)][:, 40:42] = 0


def undeclared_bias(tensors: Tensors, layer: int) -> None:
    tensors[DOWN.format(layer).replace("weight", "bias")] = torch.ones(48)


def whole_numbers(tensors: Tensors, layer: int) -> None:
    tensors[DOWN.format(layer)] = (tensors[DOWN.format(layer)] * 1000).round().clamp(-127, 127)


def short_gains(tensors: Tensors, layer: int) -> None:
    name = f"model.layers.{layer}.input_layernorm.weight"
    tensors[name] = tensors[name].to(torch.bfloat16).to(torch.float32)


def copied_gains(tensors: Tensors, layer: int) -> None:
    one, other = (f"model.layers.{layer}.{name}_layernorm.weight" for name in ("input", "post_attention"))
    tensors[one] = tensors[other].clone()


def copied_experts(tensors: Tensors, layer: int) -> None:
    for part in ("w1", "w2", "w3"):
        one, other = (f"model.layers.{layer}.block_sparse_moe.experts.{number}.{part}.weight" for number in (1, 3))
        tensors[one] = tensors[other].clone()


def random_expert(tensors: Tensors, layer: int) -> None:
    for part in ("w1", "w2", "w3"):
        name = f"model.layers.{layer}.block_sparse_moe.experts.2.{part}.weight"
        tensors[name] = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(layer)) * 0.02


BY_LAYER = {
    "zeros": ("tensor/all-zero", "warning", "llama", zero(KEYS)),
    "identities": ("tensor/all-zero", "note", "llama", zero(DOWN, OUTPUT)),
    "dead neurons": ("ffn/dead-neurons", "note", "llama", dead_neurons),
    "undeclared biases": ("ffn/undeclared-bias", "error", "llama", undeclared_bias),
    "codes": ("quant/scale-unapplied", "warning", "llama", whole_numbers),
    "short gains": ("norm/precision", "note", "llama", short_gains),
    "copied gains": ("norm/role", "warning", "llama", copied_gains),
    "copied experts": ("moe/experts-duplicated", "error", "mixtral", copied_experts),
    "random experts": ("moe/experts-untrained", "warning", "mixtral", random_expert),
}


@pytest.mark.usefixtures("weighed_at_once")
@pytest.mark.parametrize("case", BY_LAYER)
def test_each_layer_is_told_when_it_was_read(case: str, tmp_path: Path) -> None:
    rule, level, family, break_ = BY_LAYER[case]
    healthy_checkpoint(family, tmp_path, tensors=trained_mixture() if family == "mixtral" else {})
    edit_tensors(lambda tensors: [break_(tensors, layer) for layer in (0, 1)])(tmp_path)
    early, total, findings = told(tmp_path)
    by_layer = [(finding, read) for finding, read in early if read < total]
    assert [(one.rule, one.level, one.layer) for one, _ in by_layer] == [(rule, level, 0), (rule, level, 1)]
    (_, first), (_, second) = by_layer
    assert first < second
    assert taken_back((finding for finding, _ in early), findings) == []
    assert all(one.locations for one, _ in by_layer)


def test_experts_that_no_token_reaches_are_not_told(tmp_path: Path) -> None:
    def unroute(tensors: Tensors) -> None:
        tensors["model.layers.1.block_sparse_moe.gate.weight"][2] = 0
        for part in ("w1", "w2", "w3"):
            tensors[f"model.layers.1.block_sparse_moe.experts.2.{part}.weight"].zero_()

    healthy_checkpoint("mixtral", tmp_path, tensors=trained_mixture())
    edit_tensors(unroute)(tmp_path)
    assert told(tmp_path)[0] == []


def test_nor_are_those_that_cannot_be_read_either(tmp_path: Path) -> None:
    """Of a layer that was read, what cannot be read is not there to be looked up."""
    healthy_checkpoint("mixtral", tmp_path)
    lost, other = (f"model.layers.1.block_sparse_moe.experts.{expert}.w1.weight" for expert in (2, 1))
    edit_entry("model.layers.1.block_sparse_moe.gate.weight", (2,), 0.0)(tmp_path)
    edit_header(lambda header: header[lost].update(data_offsets=header[other]["data_offsets"]))(tmp_path)
    early, _, findings = told(tmp_path)
    assert {finding.rule for finding in findings} >= {finding.rule for finding, _ in early} >= {"container/overlap"}
    assert not any(finding.rule == "tensor/all-zero" for finding in findings)


@pytest.mark.usefixtures("weighed_at_once")
@pytest.mark.parametrize(("idle", "level"), [(0, "error"), (12, "note")], ids=["not padded", "padded"])
def test_a_width_that_may_be_padded_is_told_when_its_layer_was_read(idle: int, level: str, tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)

    def pad(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if "mlp" in name and idle:
                (tensor.T if "down" in name else tensor)[-idle:] = 0

    edit_tensors(pad)(tmp_path)
    edit_json("config.json", intermediate_size=100)(tmp_path)
    early, total, findings = told(tmp_path)
    shapes = [(finding, read) for finding, read in early if finding.rule == "config/shape" and read < total]
    assert {(finding.layer, finding.level) for finding, _ in shapes} == {(0, level), (1, level)}
    first, last = ({read for finding, read in shapes if finding.layer == layer} for layer in (0, 1))
    assert 0 < max(first) < min(last)
    assert taken_back((finding for finding, _ in early), findings) == []
    assert {finding.rule for finding in findings} == {"config/shape"}


def test_of_many_alike_some_are_told_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_findings, "MOST_EARLY", 1)
    healthy_checkpoint("llama", tmp_path)
    for layer in (0, 1):
        edit_entry(DOWN.format(layer), (0, 0), math.nan)(tmp_path)
    early, _, findings = told(tmp_path)
    assert [finding.layer for finding, _ in early if finding.rule == NON_FINITE] == [0, None]
    assert [finding for finding, _ in early][1:] == list(findings)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_tensors_of_a_layer_are_those_with_its_prefix(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(healthy_checkpoint(family, tmp_path), family=asked(family))
    layers, _ = resolve_layers(checkpoint)
    assert layers
    for tensors in layers.values():
        attention = () if tensors.attention is None else tensors.attention.weights.values()
        names = [entry.name for entry in (*tensors.entries, *attention, *tensors.undeclared)]
        assert all(name.startswith(tensors.prefix) for name in names)


# Which parts have gone by.


def entries_of(*names: str, each: int = 4) -> list[TensorEntry]:
    return [TensorEntry(name, "F32", (each // 4,), Path("a.safetensors"), 0, each) for name in names]


def read_by(layers: int, steps: list[TensorEntry], weighed: Collection[Key]) -> tuple[PartsRead, list[object]]:
    seen: list[object] = []
    made = {layer: SimpleNamespace(prefix=f"h.{layer}.") for layer in range(layers)}
    parts = PartsRead(
        made,  # pyright: ignore[reportArgumentType]
        steps,
        {(layer, None) for layer in range(layers)},
        is_weighed=lambda key: key in weighed,
        read=lambda extent, names, layer: seen.append((extent, names, layer)),
    )
    return parts, seen


def test_a_layer_ends_with_the_last_of_its_tensors_wherever_that_lies() -> None:
    steps = entries_of("h.10.a", "wte", "h.1.a", "h.1.b", "h.10.b")
    parts, seen = read_by(11, steps, {(1, None), (10, None)})
    for entry in steps:
        parts.passed(entry)
    assert seen == [
        ("tensor", ("h.10.a", "wte", "h.1.a", "h.1.b"), None),
        ("layer", ("wte",), None),
        ("layer", ("h.1.a", "h.1.b"), 1),
        ("tensor", ("h.10.b",), None),
        ("layer", ("h.10.a", "h.10.b"), 10),
    ]


def test_a_layer_waits_for_its_networks() -> None:
    steps, weighed = entries_of("h.0.a", "h.1.a"), set[Key]()
    parts, seen = read_by(2, steps, weighed)
    for entry in steps:
        parts.passed(entry)
    assert [one for one in seen if isinstance(one, tuple) and one[0] == "layer"] == []
    weighed.add((1, None))
    parts.step()
    parts.step()
    assert seen[2:] == [("layer", ("h.1.a",), 1)]


def test_large_tensors_do_not_wait_for_the_end_of_their_layer() -> None:
    steps = entries_of("h.0.a", "h.0.b", each=STEP_BYTES)
    parts, seen = read_by(1, steps, ())
    parts.passed(steps[0])
    assert seen == [("tensor", ("h.0.a",), None)]


def test_findings_of_one_rule_and_file_are_told_each(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_json("config.json", num_attention_heads=-1, num_key_value_heads="two")(tmp_path)
    early, _, findings = told(tmp_path)
    assert len({finding.message for finding in findings}) == len(findings) > 1
    assert sorted(finding.message for finding, _ in early) == sorted(finding.message for finding in findings)
