"""What `glassblock fix` tells: equal steps of many tensors and layers once, and no line from the edge but headings."""

from glassblock.reports.page import page
from glassblock.wire.repairs import RefusedRepair, RepairAnswer, RepairEdit, RepairStep
from glassblock_client.cli.repair_lines import LISTED, edit_lines, repair_lines

WORDS = "of every 64 rows the first 64 brought from pairs into halves"


def altered(name: str, words: str = WORDS) -> RepairEdit:
    return RepairEdit(kind="alter", description=f"{name}: {words}", tensors=(name,))


def heads(layers: range, base: str = "model") -> list[RepairEdit]:
    parts = ("q_proj", "k_proj")
    return [altered(f"{base}.layers.{layer}.self_attn.{part}.weight") for layer in layers for part in parts]


def test_equal_steps_of_all_layers_are_one_line() -> None:
    told = f"self_attn.q_proj.weight and self_attn.k_proj.weight of layers 0-29: {WORDS}"
    assert edit_lines(heads(range(30))) == [told]


def test_what_is_done_otherwise_stays_apart() -> None:
    odd = altered("model.layers.2.self_attn.q_proj.weight", "transposed")
    outside = altered("lm_head.weight", "transposed")
    assert edit_lines([*heads(range(2)), odd, outside]) == [
        f"self_attn.q_proj.weight and self_attn.k_proj.weight of layers 0-1: {WORDS}",
        "model.layers.2.self_attn.q_proj.weight: transposed",
        "lm_head.weight: transposed",
    ]


def test_towers_are_told_apart() -> None:
    one, other = edit_lines([*heads(range(2)), *heads(range(2), "vision_model.encoder")])
    assert "of layers 0-1 of model: " in one
    assert "of layers 0-1 of vision_model.encoder: " in other


def test_exchanged_names_of_many_layers_are_one_line() -> None:
    pairs = [tuple(f"model.layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up")) for layer in (0, 1, 5)]
    edits = [
        RepairEdit(kind="rename", description=f"exchanged in the header: {gate} and {up}", tensors=(gate, up))
        for gate, up in pairs
    ]
    told = "layers 0-1, 5: exchanged in the header: mlp.gate_proj.weight and mlp.up_proj.weight"
    assert edit_lines(edits) == [told]
    assert edit_lines(edits[:1]) == [edits[0].description]


def test_many_findings_are_cut_and_wrapped_lines_indented() -> None:
    steps = tuple(
        RepairStep(rule="ffn/x", level="error", layer=layer, message=f"layer {layer}: {'long ' * 20}", edits=(edit,))
        for layer, edit in enumerate(heads(range(30))[::2])
    )
    refused = tuple(
        RefusedRepair(rule="a/b", level="error", message=f"tensor {number}", reason="lost " * 30, needs="the file")
        for number in range(LISTED + 2)
    )
    answer = RepairAnswer.model_construct(steps=steps, refused=refused)
    lines = page(repair_lines(answer), width=60, colour=False).splitlines()
    assert [line for line in lines if line and not line.startswith("  ")] == ["ffn/x:", "a/b:"]
    assert f"  and {30 - LISTED} more; --format json lists all" in lines
    assert "  and 2 more; --format json lists all" in lines
    assert sum("->" in line for line in lines) == 1
    assert sum("not repaired" in line for line in lines) == 1
