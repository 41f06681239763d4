"""What the audit finds is repaired, and then it is silent; what cannot be repaired says what is needed."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.fix import Unrepaired
from glassblock.audit.fixes import FIXES, joined, repair_of
from glassblock.audit.gate_fixes import swap_of
from glassblock.audit.reference_findings import NAMED
from glassblock.audit.rules import RULES
from glassblock.checkpoint.layer_map import resolve_layer
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.patches import Alter, Patch, Rename, drafted, patched
from glassblock.checkpoint.reading import ReadMeter, read_tensor
from glassblock.checkpoint.writing import write_checkpoint
from glassblock.operations.repair_words import told_edit
from glassblock.reports.repair_command import CARRIED_OUT, repairable
from glassblock.wire.audits import Finding, Fix, Report
from makers import Tiny
from plants import PLANTS, SHARDS, SINGLE, Plant, edit_json, edit_tensors, healthy_checkpoint, put
from safetensors.torch import load_file, save_file
from torch import Tensor

CASES = [pytest.param(rule, plant, id=f"{rule}:{plant.label}") for rule, plants in PLANTS.items() for plant in plants]
REPAIRED = {
    "container/trailing-bytes:appended",
    "container/hole:gap",
    "container/header:index",
    "index/unlisted-tensor:removed",
    "index/unlisted-tensor:no index",
    "index/unlisted-tensor:nothing listed",
    "index/unlisted-tensor:a shard forgotten",
    "index/wrong-shard:moved",
    "index/total-size:off",
    "config/shape:width",
    "config/shape:more layers",
    "config/shape:transposed",
    "config/shape:type",
    "config/unknown-family:wrapped",
    "config/tied-head:two flags",
    "config/tied-head:a copy",
    "tensor/duplicate:copy",
    "ffn/gate-up-swapped:names",
    "ffn/fused-order:halves",
    "attention/rotary-order:pairs for halves, beside the original",
    "attention/rotary-order:pairs for halves",
    "attention/rotary-order:halves for pairs",
    "moe/experts-exchanged:without their rows",
    "norm/offset:reference",
    "tensor/transposed:reference",
}
# Plants that put another tensor in place of one: nothing but the audit can say that they are repaired.
REPLACING = {"config/tied-head:a copy", "container/hole:gap"}


# One addition in float32 rounded each way: half of the last place of a number below 4.
ROUNDED = {"norm/offset:reference": 2.0**-22}


def silent(*_: object) -> None: ...


def repairs(checkpoint: Checkpoint, report: Report) -> tuple[Patch, list[Unrepaired]]:
    found = [repair_of(checkpoint, finding) for finding in report.findings]
    patches = (patch for patch in found if not isinstance(patch, Unrepaired))
    return joined(checkpoint, patches), [one for one in found if isinstance(one, Unrepaired)]


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("rule", "plant"), CASES)
def test_a_plant_is_repaired_or_told_what_it_needs(rule: str, plant: Plant, tmp_path: Path) -> None:
    broken, healthy = tmp_path / "broken", tmp_path / "healthy"
    plant.healthy(healthy)
    shutil.copytree(healthy, broken)
    plant.break_(broken)
    before = {path.name: path.read_bytes() for path in broken.iterdir() if path.is_file()}
    reference = open_checkpoint(healthy) if plant.reference else None
    question = AuditQuestion(against=plant.against, against_name="other.json", reference=reference)
    checkpoint = open_checkpoint(broken)
    found = audit_checkpoint(checkpoint, question)
    patch, refused = repairs(checkpoint, found)
    case = f"{rule}:{plant.label}"
    for finding in found.findings:  # the report names `glassblock fix` for whatever it repairs
        assert repairable(finding) or isinstance(repair_of(checkpoint, finding), Unrepaired), finding
    assert patch or case not in REPAIRED
    assert all(one.reason and one.needs for one in refused)
    if not patch:
        assert refused
        return
    draft = drafted(checkpoint, patch)
    question = AuditQuestion(reference=reference)
    foreseen = audit_checkpoint(draft.checkpoint, question)
    write_checkpoint(draft, tmp_path / "repaired", tick=silent)
    report = audit_checkpoint(tmp_path / "repaired", question, name=broken.name)
    assert (report.findings, report.verdict) == ((), "pass")
    assert report == foreseen
    assert {path.name: path.read_bytes() for path in broken.iterdir() if path.is_file()} == before
    if case in ROUNDED:
        after, ours = tensors_of(tmp_path / "repaired"), tensors_of(healthy)
        assert all((after[name] - ours[name]).abs().max() <= ROUNDED[case] for name in ours)
    elif case not in REPLACING:
        assert same(tensors_of(tmp_path / "repaired"), tensors_of(healthy))


@pytest.mark.parametrize("back", [True, False], ids=["exchanged", "renamed"])
def test_many_pairs_of_names_are_cut(back: bool) -> None:
    pairs = {f"a{number}": f"b{number}" for number in range(20)}
    words = told_edit(Rename(pairs | ({new: old for old, new in pairs.items()} if back else {}))).description
    assert words.startswith("exchanged in the header: a0 and b0, " if back else "renamed in the header: a0 to b0, ")
    assert words.endswith(", and 12 more")


def test_every_expected_repair_is_of_a_plant() -> None:
    assert {f"{rule}:{plant.label}" for rule, plants in PLANTS.items() for plant in plants} >= REPAIRED


def test_every_action_that_a_finding_names_has_its_repair(tmp_path: Path) -> None:
    actions: set[str] = set()
    for number, plant in enumerate(plant for plants in PLANTS.values() for plant in plants):
        directory = tmp_path / str(number)
        plant.healthy(directory)
        plant.break_(directory)
        report = audit_checkpoint(directory, AuditQuestion(against=plant.against))
        actions.update(finding.fix.action for finding in report.findings if finding.fix is not None)
    assert actions
    actions.update(named.action for named in NAMED.values())
    assert actions <= FIXES.keys()


def test_what_the_reports_name_the_command_for_is_what_is_carried_out(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(healthy_checkpoint("llama", tmp_path / "healthy"))
    assert CARRIED_OUT.keys() <= FIXES.keys()
    for action in FIXES.keys() - CARRIED_OUT.keys():
        assert isinstance(FIXES[action](checkpoint, finding(action)), Unrepaired)


def finding(action: str, *tensors: str, layer: int | None = None, level: Any = "error", **evidence: Any) -> Finding:
    return Finding(
        rule=next(iter(RULES)),
        level=level,
        certainty="statistical",
        layer=layer,
        tensors=tensors,
        message="",
        evidence=evidence,
        fix=Fix(action=action, description="", tensors=tensors),
    )


def read(checkpoint: Checkpoint, name: str) -> Tensor:
    return read_tensor(checkpoint.entries[name], "cpu", ReadMeter())


def repaired(checkpoint: Checkpoint, of: Finding) -> Checkpoint:
    patch = repair_of(checkpoint, of)
    assert not isinstance(patch, Unrepaired), patch
    return patched(checkpoint, patch)


FUSED = "model.layers.1.mlp.gate_up_proj.weight"


@pytest.mark.parametrize(
    ("evidence", "stored"),
    [
        (
            {"groups": Tiny().intermediate, "gate_first": True},
            lambda gate, up: torch.stack([gate, up], 1).flatten(0, 1),
        ),
        (
            {"groups": 4, "gate_first": True},
            lambda gate, up: torch.cat(
                [part for pair in zip(gate.chunk(4), up.chunk(4), strict=True) for part in pair]
            ),
        ),
    ],
    ids=["alternating", "blocks of four ranks"],
)
def test_a_recovered_layout_is_brought_into_halves(
    evidence: dict[str, Any], stored: Callable[[Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    healthy_checkpoint("phi3", tmp_path)
    healthy = load_file(tmp_path / SINGLE)[FUSED]
    edit_tensors(lambda tensors: tensors.update({FUSED: stored(*tensors[FUSED].chunk(2)).contiguous()}))(tmp_path)
    after = repaired(open_checkpoint(tmp_path), finding("reorder-rows", FUSED, layer=1, **evidence))
    assert torch.equal(read(after, FUSED), healthy)


def test_halves_of_a_quantised_weight_take_their_scales_with_them(tmp_path: Path) -> None:
    healthy_checkpoint("phi3", tmp_path)
    rows = 2 * Tiny().intermediate
    per_row, per_block = torch.arange(float(rows))[:, None], torch.arange(float(rows // 16))[:, None]
    for suffix, scale in (("_scale", per_row), ("_scale_inv", per_block)):
        put(FUSED + suffix, scale)(tmp_path)
    after = repaired(open_checkpoint(tmp_path), finding("swap-halves", FUSED, layer=1))
    for suffix, scale in (("_scale", per_row), ("_scale_inv", per_block)):
        assert torch.equal(read(after, FUSED + suffix), scale.roll(len(scale) // 2, 0))


@pytest.mark.parametrize("last", ["weight_shape", "g_idx"])
def test_what_holds_nothing_of_the_rows_stays_as_it_is(last: str, tmp_path: Path) -> None:
    healthy_checkpoint("phi3", tmp_path)
    name = FUSED.removesuffix("weight") + last
    put(name, torch.arange(2))(tmp_path)
    after = repaired(open_checkpoint(tmp_path), finding("swap-halves", FUSED, layer=1))
    assert read(after, name).tolist() == [0, 1]


def test_the_gain_of_a_norm_in_the_same_module_stays_as_it_is(tmp_path: Path) -> None:
    """Its length divides the number of rows, as that of a scale for blocks of rows would."""
    healthy_checkpoint("megatron_core", tmp_path, tiny=Tiny(hidden=32, intermediate=64, heads=2, kv_heads=1))
    checkpoint = open_checkpoint(tmp_path, family="megatron_core")
    module = "decoder.layers.1.mlp.linear_fc1."
    patch = repair_of(checkpoint, finding("swap-halves", f"{module}weight", layer=1))
    assert not isinstance(patch, Unrepaired)
    assert [edit.tensor for edit in patch if isinstance(edit, Alter)] == [f"{module}weight"]


def test_scales_of_blocks_that_hold_rows_of_both_are_not_taken_apart(tmp_path: Path) -> None:
    healthy_checkpoint("phi3", tmp_path)
    put(FUSED + "_scale_inv", torch.ones(2 * Tiny().intermediate // 16, 1))(tmp_path)
    in_turn = finding("reorder-rows", FUSED, layer=1, groups=Tiny().intermediate, gate_first=True)
    refused = repair_of(open_checkpoint(tmp_path), in_turn)
    assert isinstance(refused, Unrepaired)
    assert refused.reason == f"a number of {FUSED}_scale_inv stands for rows of gate and of up"


def test_codes_that_are_not_packed_by_rows_are_not_reordered(tmp_path: Path) -> None:
    healthy_checkpoint("phi3", tmp_path)
    rows, width, module = 2 * Tiny().intermediate, Tiny().hidden, FUSED.removesuffix("weight")
    parts = {
        "qweight": torch.zeros(width // 8, rows, dtype=torch.int32),
        "qzeros": torch.zeros(2, rows // 8, dtype=torch.int32),
        "scales": torch.ones(2, rows, dtype=torch.float16),
    }
    edit_tensors(lambda tensors: tensors.pop(FUSED))(tmp_path)
    edit_tensors(lambda tensors: tensors.update({module + part: told for part, told in parts.items()}))(tmp_path)
    declared = {"quant_method": "gptq", "bits": 4, "group_size": width // 2}
    edit_json("config.json", quantization_config=declared)(tmp_path)
    refused = repair_of(open_checkpoint(tmp_path), finding("swap-halves", f"{module}qweight", layer=1))
    assert refused == Unrepaired(
        f"the rows of {module}qweight cannot be told apart", "the weights before they were quantised"
    )


@pytest.mark.parametrize("family", ["granitemoe", "qwen3_vl_moe", "gpt_oss"])
def test_experts_with_a_finding_of_their_own_are_left_out_of_what_is_done_to_the_stack(
    family: str, tmp_path: Path
) -> None:
    healthy_checkpoint(family, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    (network, *_) = (one for one in resolve_layer(checkpoint, 0)[0].networks if one.expert == 0)
    stack = network.weights["fused"].name
    alone = finding("swap-halves", stack, layer=0).model_copy(update={"expert": 1})
    found = [repair_of(checkpoint, one) for one in (alone, finding("swap-halves", stack, layer=0))]
    patch = joined(checkpoint, (one for one in found if not isinstance(one, Unrepaired)))
    raw = load_file(tmp_path / SINGLE)[stack]
    axis = -1 if network.row.layouts[0] == "in_out" else -2
    fused = network.row.fused
    assert fused is not None

    def turned(tensor: Tensor) -> Tensor:
        if fused.arrangement == "interleaved":
            return tensor.unflatten(axis, (-1, 2)).flip(-1).flatten(-2)
        return tensor.roll(tensor.shape[axis] // 2, axis)

    assert torch.equal(read(patched(checkpoint, patch), stack), turned(raw))
    assert torch.equal(read(patched(checkpoint, (*patch, *patch)), stack), raw)
    for name in (edit.tensor for edit in patch if isinstance(edit, Alter)):
        assert not torch.equal(read(patched(checkpoint, patch), name), load_file(tmp_path / SINGLE)[name])
    only = repair_of(checkpoint, alone)
    assert not isinstance(only, Unrepaired)
    after = read(patched(checkpoint, only), stack)
    assert torch.equal(after[[0, 2, 3]], raw[[0, 2, 3]])
    assert torch.equal(after[1], turned(raw[1]))


def test_modules_are_exchanged_with_all_that_belongs_to_them(tmp_path: Path) -> None:
    stem = "model.layers.1.mlp"
    tensors = {
        f"{stem}.{part}_proj.{kind}": torch.full((2,), float(number))
        for number, (part, kind) in enumerate(
            (part, kind) for part in ("gate", "up", "down") for kind in ("qweight", "scales", "bias")
        )
    }
    tensors[f"{stem}.up_proj_extra"] = torch.ones(1)
    save_file(tensors, tmp_path / SINGLE)
    names = swap_of(open_checkpoint(tmp_path), f"{stem}.gate_proj.qweight", f"{stem}.up_proj.qweight").names
    for kind in ("qweight", "scales", "bias"):
        assert names[f"{stem}.gate_proj.{kind}"] == f"{stem}.up_proj.{kind}"
        assert names[f"{stem}.up_proj.{kind}"] == f"{stem}.gate_proj.{kind}"
    assert not any("down" in name for name in names)


def test_a_module_whose_name_begins_another_is_exchanged_alone(tmp_path: Path) -> None:
    healthy_checkpoint("grok1", tmp_path)
    module = "transformer.decoder_layer.0.moe.0.linear"
    gate, up = f"{module}.weight", f"{module}_v.weight"
    assert swap_of(open_checkpoint(tmp_path), gate, up).names == {gate: up, up: gate}


def test_gains_are_brought_back_by_what_the_evidence_says(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    name = "model.norm.weight"
    after = repaired(open_checkpoint(tmp_path), finding("add-to-gains", name, add=-1.0))
    assert torch.equal(read(after, name), load_file(tmp_path / SINGLE)[name] - 1)
    undecided = repair_of(open_checkpoint(tmp_path), finding("add-to-gains", name))
    assert isinstance(undecided, Unrepaired)


def test_an_epsilon_is_set_only_where_evidence_decided(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(repair_of(checkpoint, finding("align-eps")), Unrepaired)
    after = repaired(checkpoint, finding("align-eps", decided=1e-6, decided_key="rms_norm_eps"))
    assert after.config is not None
    assert after.config.values["rms_norm_eps"] == 1e-6


def biases(width: int = Tiny().intermediate) -> Iterator[tuple[str, Tensor]]:
    for layer in (0, 1):
        for part, length in (("gate", width), ("up", width), ("down", Tiny().hidden)):
            yield f"model.layers.{layer}.mlp.{part}_proj.bias", torch.full((length,), 0.5)


@pytest.mark.parametrize(("value", "declared"), [(0.5, True), (0.0, False)], ids=["numbers", "zeros"])
def test_undeclared_biases_are_declared_or_dropped(value: float, declared: bool, tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_tensors(lambda tensors: tensors.update({name: bias * 2 * value for name, bias in biases()}))(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    patch, refused = repairs(checkpoint, audit_checkpoint(checkpoint))
    after = patched(checkpoint, patch)
    assert refused == []
    assert after.config is not None
    assert after.config.values.get("mlp_bias") == (True if declared else None)
    assert ("model.layers.0.mlp.up_proj.bias" in after.entries) == declared
    assert audit_checkpoint(after).findings == ()


def test_several_mistakes_are_repaired_together(tmp_path: Path) -> None:
    directory = tmp_path / "broken"
    healthy_checkpoint("llama", directory, shards=3)
    healthy = tensors_of(directory)
    gate, up = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
    for file in SHARDS:
        tensors = load_file(directory / file)
        renamed = {{gate: up, up: gate}.get(name, name): tensor for name, tensor in tensors.items()}
        save_file(renamed, directory / file)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    places = index["weight_map"]
    places[gate], places[up] = places[up], places[gate]
    places["model.norm.weight"] = SHARDS[0]
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    edit_json("config.json", vocab_size=97)(directory)
    checkpoint = open_checkpoint(directory)
    patch, refused = repairs(checkpoint, audit_checkpoint(checkpoint))
    assert refused == []
    write_checkpoint(drafted(checkpoint, patch), tmp_path / "repaired", tick=silent)
    assert audit_checkpoint(tmp_path / "repaired").findings == ()
    assert same(tensors_of(tmp_path / "repaired"), healthy)


TRANSPOSED = {
    "gate and up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "gate and down": ("mlp.gate_proj", "mlp.down_proj"),
    "the network": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "keys": ("self_attn.k_proj",),
}
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
IN_DOUBT = {"attention": ATTENTION, "all": (*TRANSPOSED["the network"], *ATTENTION)}


def transposed(directory: Path, parts: tuple[str, ...], *, heads: int = 2) -> Path:
    """A checkpoint of which these weights lie transposed in every layer; queries and the output are square."""
    healthy_checkpoint("llama", directory, tiny=Tiny(heads=4, kv_heads=heads, head_dim=12))

    def turn(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.removesuffix(".weight").endswith(parts)]:
            tensors[name] = tensors[name].T.contiguous()

    edit_tensors(turn)(directory)
    return directory


@pytest.mark.parametrize("parts", TRANSPOSED.values(), ids=TRANSPOSED)
def test_what_lies_transposed_in_all_layers_is_brought_back(parts: tuple[str, ...], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(transposed(tmp_path, parts))
    patch, refused = repairs(checkpoint, audit_checkpoint(checkpoint))
    assert (refused, {edit.tensor for edit in patch if isinstance(edit, Alter)}) == (
        [],
        {name for name in checkpoint.entries if name.removesuffix(".weight").endswith(parts)},
    )
    assert audit_checkpoint(drafted(checkpoint, patch).checkpoint).findings == ()


@pytest.mark.parametrize(
    ("parts", "heads"),
    [(IN_DOUBT["attention"], 2), (IN_DOUBT["all"], 2), (TRANSPOSED["the network"], 4)],
    ids=["attention", "all", "the network, beside square attention"],
)
def test_what_square_matrices_leave_open_is_refused_as_a_whole(
    parts: tuple[str, ...], heads: int, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(transposed(tmp_path, parts, heads=heads))
    patch, refused = repairs(checkpoint, audit_checkpoint(checkpoint))
    assert patch == ()
    assert refused
    assert all("no shape tells" in one.reason and "self_attn.q_proj" in one.reason for one in refused)


def test_a_reference_tells_of_the_square_ones_too(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path / "original", tiny=Tiny(heads=4, kv_heads=2, head_dim=12))
    checkpoint = open_checkpoint(transposed(tmp_path / "broken", ATTENTION))
    question = AuditQuestion(reference=open_checkpoint(tmp_path / "original"))
    patch, refused = repairs(checkpoint, audit_checkpoint(checkpoint, question))
    assert refused == []
    assert audit_checkpoint(drafted(checkpoint, patch).checkpoint, question).findings == ()
