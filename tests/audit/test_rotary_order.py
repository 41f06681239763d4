"""Rows of queries and keys in another rotary order: proved by a reference, told from weights alone, or left open."""

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.fix import Unrepaired
from glassblock.audit.fixes import joined, repair_of
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.patches import patched
from glassblock.reports.repair_command import repairable
from glassblock.reports.wording import evidence_line
from glassblock.wire.audits import Coverage, Finding, Report
from makers import Tiny, asked
from plants import edit_tensors, healthy_checkpoint, in_float8
from rotary_heads import into, trained_heads
from safetensors.torch import load_file
from torch import Tensor

RULE = "attention/rotary-order"
Tensors = dict[str, Tensor]
MANY = Tiny(layers=8, head_dim=32)


def rotary(report: Report) -> tuple[list[Finding], Coverage]:
    (coverage,) = (entry for entry in report.coverage if entry.rule == RULE)
    return [finding for finding in report.findings if finding.rule == RULE], coverage


def moved(directory: Path, changes: Mapping[str, Callable[[Tensor], Tensor]], layer: int = 1) -> None:
    """Change tensors of one layer by the ends of their names."""

    def edit(tensors: Tensors) -> None:
        for name in list(tensors):
            for end, change in changes.items():
                if f".{layer}." in name and name.endswith(end):
                    tensors[name] = change(tensors[name]).contiguous()

    edit_tensors(edit)(directory)


def told(width: int, into_: str, turned: int | None = None) -> dict[str, Any]:
    return {"width": width, "turned": width if turned is None else turned, "into": into_}


def of_fused(change: Callable[[Tensor], Tensor], *spans: slice) -> Callable[[Tensor], Tensor]:
    """The change made to some rows of a fused tensor."""

    def edit(rows: Tensor) -> Tensor:
        rows = rows.clone()
        for span in spans:
            rows[span] = change(rows[span])
        return rows

    return edit


def pairs(rows: Tensor) -> Tensor:
    return into("pairs", rows, 16)


def halves(rows: Tensor) -> Tensor:
    return into("halves", rows, 16)


def four_of_twelve(rows: Tensor) -> Tensor:
    return into("pairs", rows, 12, turned=4)


def half(rows: Tensor) -> Tensor:
    return into("halves", rows, 16, turned=8)


# With a reference. Sixteen rows a head, four heads of queries and two of keys.
BROKEN = {
    "queries alone": ("llama", {"q_proj.weight": pairs}, [told(16, "halves")], "lie in pairs, where halves"),
    "keys alone": ("llama", {"k_proj.weight": pairs}, [told(16, "halves")], "lie in pairs, where halves"),
    "a family of pairs": (
        "cohere",
        {"q_proj.weight": halves, "k_proj.weight": halves},
        [told(16, "pairs")],
        "lie in halves, where pairs",
    ),
    "once too often": (
        "llama",
        {"q_proj.weight": halves, "k_proj.weight": halves},
        [told(16, "pairs")],
        "brought into halves once too often",
    ),
    "with biases": (
        "qwen2",
        {"q_proj.weight": pairs, "k_proj.weight": pairs, "q_proj.bias": pairs, "k_proj.bias": pairs},
        [told(16, "halves")],
        "lie in pairs, where halves",
    ),
    "a bias alone": ("qwen2", {"q_proj.bias": pairs}, [told(16, "halves")], "lie in pairs, where halves"),
    "gains of a head": ("qwen3", {"q_norm.weight": pairs}, [told(16, "halves")], "lie in pairs, where halves"),
    "gains of all heads": ("olmo2", {"k_norm.weight": pairs}, [told(16, "halves")], "lie in pairs, where halves"),
    "as many heads of keys as of queries": (
        "llama",
        {"k_proj.weight": lambda rows: into("halves", into("pairs", rows, 16), 8)},
        [told(8, "pairs"), told(16, "halves")],
        "brought into halves as if it had 4 heads of 8 rows",
    ),
    "part of a head": ("glm", {"q_proj.weight": half}, [told(16, "pairs", 8)], "lie in halves, where pairs"),
    "fused in blocks": (
        "phi3",
        {"qkv_proj.weight": of_fused(pairs, slice(0, 64), slice(64, 96))},
        [told(16, "halves")],
        "lie in pairs, where halves",
    ),
    "fused by heads, in part": (
        "gpt_neox",
        {
            "query_key_value.weight": of_fused(
                four_of_twelve, *(slice(head * 36, head * 36 + 24) for head in range(4))
            )
        },
        [told(12, "halves", 4)],
        "lie in pairs, where halves",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_reference_proves_the_order_and_the_repair_is_exact(case: str, tmp_path: Path) -> None:
    family, changes, steps, words = BROKEN[case]
    source = open_checkpoint(healthy_checkpoint(family, tmp_path / "source"))
    directory = healthy_checkpoint(family, tmp_path / "here")
    moved(directory, changes)
    here = open_checkpoint(directory)
    question = AuditQuestion(reference=source, reference_name="source")
    report = audit_checkpoint(here, question)
    assert report.reference is not None
    assert {difference.kind for difference in report.reference.function} == {"rotary-order"}
    found, _ = rotary(report)
    assert found
    assert all((finding.level, finding.certainty, finding.layer) == ("error", "proved", 1) for finding in found)
    assert all(finding.evidence["steps"] == steps and words in finding.message for finding in found)
    assert {name for finding in found for name in finding.tensors} == {
        name for name in here.entries if ".1." in name and name.endswith(tuple(changes))
    }
    patches = [repair_of(here, finding) for finding in found]
    assert not any(isinstance(patch, Unrepaired) for patch in patches), patches
    repaired = patched(here, joined(here, [patch for patch in patches if not isinstance(patch, Unrepaired)]))
    after = audit_checkpoint(repaired, question)
    assert after.reference is not None
    assert (after.findings, after.reference.relation) == (audit_checkpoint(source).findings, "identical")


def heads_in_another_order(tensors: Tensors) -> None:
    """Heads of keys exchanged, with their queries, values and the columns of what they return."""
    prefix = "model.layers.1.self_attn."
    for name, count, axis in (("q_proj", 2, 0), ("k_proj", 2, 0), ("v_proj", 2, 0), ("o_proj", 2, 1)):
        weight = tensors[f"{prefix}{name}.weight"]
        tensors[f"{prefix}{name}.weight"] = torch.cat(weight.chunk(count, axis)[::-1], axis).contiguous()


def turned_planes(tensors: Tensors) -> None:
    """Rows i and i + 8 of every head of queries and keys turned by 90 degrees: the same scores."""
    for name in tensors:
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            first, second = tensors[name].unflatten(0, (-1, 16)).chunk(2, 1)
            tensors[name] = torch.cat([second, -first], 1).flatten(0, 1).contiguous()


@pytest.mark.parametrize("change", [heads_in_another_order, turned_planes])
def test_what_computes_the_same_is_no_mistake(change: Callable[[Tensors], None], tmp_path: Path) -> None:
    source = open_checkpoint(healthy_checkpoint("llama", tmp_path / "source"))
    directory = healthy_checkpoint("llama", tmp_path / "here")
    edit_tensors(change)(directory)
    found, _ = rotary(audit_checkpoint(directory, AuditQuestion(reference=source)))
    assert found == []


def test_a_fine_tune_is_no_order(tmp_path: Path) -> None:
    source = open_checkpoint(healthy_checkpoint("llama", tmp_path / "source"))
    directory = healthy_checkpoint("llama", tmp_path / "here")
    moved(directory, {"q_proj.weight": lambda rows: rows + 0.01 * rows.abs().mean() * torch.randn_like(rows)})
    report = audit_checkpoint(directory, AuditQuestion(reference=source))
    assert rotary(report)[0] == []
    assert report.reference is not None
    assert {difference.kind for difference in report.reference.function} == {"differs"}


# From the weights alone.


def heads_of(family: str, order: str, tmp_path: Path, tiny: Tiny = MANY, **more: Any) -> Path:
    """A checkpoint of the family whose queries and keys were trained in that order."""
    tensors: Tensors = {}
    for layer in range(tiny.layers):
        queries, keys = trained_heads(
            order, heads=tiny.heads, kv_heads=tiny.kv_heads, width=tiny.head_dim, channels=tiny.hidden, seed=layer
        )
        prefix = f"model.layers.{layer}.self_attn."
        tensors[f"{prefix}q_proj.weight"] = queries.flatten(0, 1) * tiny.hidden**-0.5
        tensors[f"{prefix}k_proj.weight"] = keys.flatten(0, 1) * tiny.hidden**-0.5
    return healthy_checkpoint(family, tmp_path / f"{family}-{order}", tiny=tiny, tensors=tensors, **more)


@pytest.mark.parametrize(("family", "order"), [("llama", "halves"), ("cohere", "pairs"), ("qwen3", "halves")])
def test_the_order_of_the_family_is_seen(family: str, order: str, tmp_path: Path) -> None:
    found, coverage = rotary(audit_checkpoint(heads_of(family, order, tmp_path)))
    assert (found, coverage.checked, coverage.undecidable, coverage.skipped) == ([], 1, (), ())


@pytest.mark.parametrize(("family", "order"), [("llama", "pairs"), ("cohere", "halves")])
def test_the_other_order_is_found_and_repaired(family: str, order: str, tmp_path: Path) -> None:
    here = open_checkpoint(heads_of(family, order, tmp_path))
    (finding,), _ = rotary(audit_checkpoint(here))
    assert (finding.level, finding.certainty, finding.layer) == ("error", "statistical", None)
    assert finding.evidence["log10_p"] < -9
    assert repairable(finding)
    patch = repair_of(here, finding)
    assert not isinstance(patch, Unrepaired)
    found, coverage = rotary(audit_checkpoint(patched(here, patch)))
    assert (found, coverage.checked) == ([], 1)


def test_what_may_have_moved_with_the_rows_is_not_guessed(tmp_path: Path) -> None:
    here = open_checkpoint(heads_of("qwen3", "pairs", tmp_path))
    (finding,), _ = rotary(audit_checkpoint(here))
    repair = repair_of(here, finding)
    assert isinstance(repair, Unrepaired)
    assert "norms of queries and keys" in repair.reason
    assert "reference" in repair.needs
    assert not repairable(finding)


@pytest.mark.parametrize("order", ["halves", "pairs"])
def test_rows_stored_in_eight_bits_are_read_too(order: str, tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
    directory = heads_of("llama", order, tmp_path, config=quantised)

    def store(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight"))]:
            tensors[name], tensors[f"{name}_scale_inv"] = in_float8(tensors[name])

    edit_tensors(store)(directory)
    here = open_checkpoint(directory)
    found, coverage = rotary(audit_checkpoint(here))
    assert (coverage.checked, len(found)) == (1, order == "pairs")
    for finding in found:
        repair = repair_of(here, finding)
        assert isinstance(repair, Unrepaired)
        assert "cannot be moved alone" in repair.reason


def test_a_family_that_nobody_has_run_is_a_warning(tmp_path: Path) -> None:
    (finding,), _ = rotary(audit_checkpoint(heads_of("minicpm", "pairs", tmp_path)))
    assert finding.level == "warning"


def test_both_wrong_alike_are_told_beside_a_reference(tmp_path: Path) -> None:
    here = heads_of("llama", "pairs", tmp_path)
    report = audit_checkpoint(here, AuditQuestion(reference=open_checkpoint(here)))
    found, coverage = rotary(report)
    assert ([finding.certainty for finding in found], coverage.checked) == (["statistical"], 8)
    assert "steps" not in evidence_line(found[0].evidence)
    assert "{" not in evidence_line(found[0].evidence)


def test_one_finding_a_layer_where_the_reference_proves_it(tmp_path: Path) -> None:
    here, source = heads_of("llama", "pairs", tmp_path), heads_of("llama", "halves", tmp_path)
    edit_tensors(lambda tensors: _as_pairs(tensors, source))(here)
    found, _ = rotary(audit_checkpoint(here, AuditQuestion(reference=open_checkpoint(source))))
    assert [(finding.layer, finding.certainty) for finding in found] == [(layer, "proved") for layer in range(8)]


def _as_pairs(tensors: Tensors, source: Path) -> None:
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensors[name] = into("pairs", tensor, 32)


def test_a_layer_that_is_a_copy_of_another_one_counts_once(tmp_path: Path) -> None:
    here = heads_of("llama", "pairs", tmp_path)

    def copy(tensors: Tensors) -> None:
        for name in list(tensors):
            if ".7." in name:
                tensors[name] = tensors[name.replace(".7.", ".3.")].clone()

    before, _ = rotary(audit_checkpoint(here))
    edit_tensors(copy)(here)
    (finding,), coverage = rotary(audit_checkpoint(here))
    assert finding.evidence["comparisons"] == before[0].evidence["comparisons"] - 8
    assert (len(finding.tensors), coverage.checked) == (16, 1)


def test_random_numbers_show_neither_order(tmp_path: Path) -> None:
    report = audit_checkpoint(healthy_checkpoint("llama", tmp_path / "here", tiny=MANY), AuditQuestion(rules=(RULE,)))
    found, coverage = rotary(report)
    (open_,) = coverage.undecidable
    assert (found, coverage.checked, report.verdict) == ([], 0, "pass")
    assert "neither order" in open_.reason
    assert "--reference" in open_.would_decide


ALONE = AuditQuestion(rules=(RULE,))


@pytest.mark.parametrize(("family", "order", "other"), [("llama", "halves", "pairs"), ("cohere", "pairs", "halves")])
def test_a_rejected_order_that_is_not_the_other_one_throughout_is_inconclusive(
    family: str, order: str, other: str, tmp_path: Path
) -> None:
    here = heads_of(family, order, tmp_path, tiny=Tiny(layers=24, head_dim=32))
    assert audit_checkpoint(here, ALONE).verdict == "pass"
    for layer in range(12):
        _reorder(here, other, layer)
    report = audit_checkpoint(here, ALONE)
    found, coverage = rotary(report)
    (open_,) = coverage.undecidable
    assert (found, coverage.checked, report.verdict) == ([], 0, "inconclusive")
    assert "some layers may lie in the other order" in open_.reason
    assert "--reference" in open_.would_decide


def test_a_reference_in_the_same_state_does_not_clear_a_rejected_order(tmp_path: Path) -> None:
    here = heads_of("llama", "halves", tmp_path, tiny=Tiny(layers=24, head_dim=32))
    source = open_checkpoint(shutil.copytree(here, tmp_path / "source"))
    for layer in range(12):
        _reorder(here, "pairs", layer)
    beside_itself = audit_checkpoint(here, AuditQuestion(rules=ALONE.rules, reference=open_checkpoint(here)))
    assert (beside_itself.verdict, beside_itself.findings) == ("inconclusive", ())
    found, coverage = rotary(audit_checkpoint(here, AuditQuestion(rules=ALONE.rules, reference=source)))
    assert {finding.layer for finding in found} == set(range(12))
    assert (coverage.checked, coverage.undecidable) == (24, ())


def test_one_layer_in_the_other_order_is_not_told_of_by_the_model_as_a_whole(tmp_path: Path) -> None:
    here = heads_of("llama", "halves", tmp_path, tiny=Tiny(layers=24, head_dim=32))
    source = open_checkpoint(shutil.copytree(here, tmp_path / "source"))
    _reorder(here, "pairs", 5)
    found, coverage = rotary(audit_checkpoint(here, ALONE))
    assert (found, coverage.checked) == ([], 1)
    found, _ = rotary(audit_checkpoint(here, AuditQuestion(rules=ALONE.rules, reference=source)))
    assert [(finding.layer, finding.certainty) for finding in found] == [(5, "proved")]


def _reorder(directory: Path, order: str, layer: int) -> None:
    change = partial(into, order, width=32)
    moved(directory, {"q_proj.weight": change, "k_proj.weight": change}, layer)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt2", "[in, out]"),
        ("gpt_bigcode", "positions turn no rows"),
        ("deepseek_v3", "made from latents"),
        ("persimmon", "subtract a mean"),
        ("llama", "are too few"),
    ],
)
def test_what_is_not_looked_at_is_told(family: str, reason: str, tmp_path: Path) -> None:
    report = audit_checkpoint(healthy_checkpoint(family, tmp_path / family), AuditQuestion(family=asked(family)))
    found, coverage = rotary(report)
    assert (found, coverage.checked, coverage.undecidable) == ([], 0, ())
    assert len(coverage.skipped) == 1
    assert reason in coverage.skipped[0].reason
    assert coverage.skipped[0].layer is None


def test_a_tensor_that_cannot_be_read_leaves_its_layer_out(tmp_path: Path) -> None:
    here = heads_of("llama", "halves", tmp_path)
    path = here / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 64)
    found, coverage = rotary(audit_checkpoint(here))
    assert found == []
    assert [skipped.layer for skipped in coverage.skipped] in ([], [7])
