"""A checkpoint beside another one: what is planted is named, what only looks different is form, equals are silent."""

import json
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.audit.audit import AuditCancelled, AuditQuestion, audit_checkpoint
from glassblock.audit.fix import Unrepaired
from glassblock.audit.fixes import repair_of
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.patches import drafted
from glassblock.checkpoint.writing import write_checkpoint
from glassblock.errors import InvalidValue
from glassblock.reports import REPORTS
from glassblock.reports.repair_command import repairable
from glassblock.wire.audits import Finding, ReferenceSummary, Report
from makers import Tiny, write_index, write_weights
from meta_names import as_meta
from plants import SINGLE, edit_json, edit_tensors, healthy_checkpoint, put, rename
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Edit = Callable[[Path], object]

GATE, UP, DOWN = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
NORM = "model.layers.1.input_layernorm.weight"
SHUFFLED = torch.randperm(112, generator=torch.Generator().manual_seed(0))
SQUARE = Tiny(intermediate=48)


def compared(directory: Path, reference: Path, **more: Any) -> tuple[Report, ReferenceSummary]:
    question = AuditQuestion(reference=open_checkpoint(reference), reference_name="source", **more)
    report = audit_checkpoint(directory, question)
    assert report.reference is not None
    return report, report.reference


def broken(family: str, directory: Path, *edits: Edit, **more: Any) -> Path:
    healthy_checkpoint(family, directory, **more)
    for edit in edits:
        edit(directory)
    return directory


def changed(**changes: Callable[[Tensor], Tensor]) -> Edit:
    """Edit tensors of layer 1 by the last part of their names."""

    def edit(tensors: Tensors) -> None:
        for short, change in changes.items():
            (name,) = (name for name in tensors if ".1." in name and f".{short}." in name and "weight" in name)
            tensors[name] = change(tensors[name]).contiguous()

    return edit_tensors(edit)


def cast(*dtypes: torch.dtype) -> Edit:
    def edit(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            tensors[name] = reduce(lambda made, dtype: made.to(dtype), dtypes, tensor)

    return edit_tensors(edit)


def noisy(scale: float) -> Edit:
    """Every number moved, as training on further text moves them."""

    def edit(tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(9)
        for tensor in tensors.values():
            tensor.add_(scale * tensor.abs().mean() * torch.randn(tensor.shape, generator=generator))

    return edit_tensors(edit)


# Silent: the same model.


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3", "gpt2", "mixtral", "gpt_oss", "deepseek_v3"])
def test_a_checkpoint_beside_itself_is_identical(family: str, tmp_path: Path) -> None:
    one = healthy_checkpoint(family, tmp_path / "one")
    other = healthy_checkpoint(family, tmp_path / "other", shards=3)
    alone = audit_checkpoint(one)
    report, reference = compared(one, other)
    assert (report.findings, report.verdict) == (alone.findings, alone.verdict)
    assert (reference.relation, reference.form, reference.function) == ("identical", (), ())
    assert reference.mapped == reference.same >= report.checkpoint.tensors
    assert (reference.unmatched, reference.unmatched_there, reference.unread) == ((), (), ())
    coverage = {entry.rule: entry for entry in report.coverage}
    assert coverage["norm/offset"].checked == reference.mapped


def permuted(tensors: Tensors) -> None:
    tensors[GATE], tensors[UP] = tensors[GATE][SHUFFLED], tensors[UP][SHUFFLED]
    tensors[DOWN] = tensors[DOWN][:, SHUFFLED].contiguous()


def padded(tensors: Tensors) -> None:
    for layer in (0, 1):
        names = [f"model.layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        for name in names[:2]:
            tensors[name] = torch.cat([tensors[name], torch.zeros(16, 48)])
        tensors[names[2]] = torch.cat([tensors[names[2]], torch.zeros(48, 16)], 1)


FORMS: dict[str, tuple[tuple[Edit, ...], str]] = {
    "rounded to bfloat16": ((cast(torch.bfloat16),), "rounded"),
    "rounded on the way": ((cast(torch.float16, torch.bfloat16, torch.float32),), "rounded"),
    "a wider dtype": ((cast(torch.float64),), "dtype"),
    "neurons in another order": ((edit_tensors(permuted),), "permuted"),
    "in another order, rounded": ((edit_tensors(permuted), cast(torch.bfloat16)), "permuted"),
    "a padded width": ((edit_tensors(padded), edit_json("config.json", intermediate_size=128)), "padded"),
    "a tied head, stored": (
        (
            edit_tensors(lambda tensors: tensors.pop("lm_head.weight")),
            edit_json("config.json", tie_word_embeddings=True),
        ),
        "tied",
    ),
}


@pytest.mark.parametrize("label", FORMS)
def test_another_form_is_no_finding(label: str, tmp_path: Path) -> None:
    edits, kind = FORMS[label]
    source = healthy_checkpoint("llama", tmp_path / "source")
    if kind == "tied":
        edit_tensors(lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))(
            source
        )
    report, reference = compared(broken("llama", tmp_path / "here", *edits), source)
    assert report.findings == ()
    assert (report.verdict, reference.relation) == ("pass", "form")
    assert kind in {form.kind for form in reference.form}
    assert reference.function == ()


def test_the_reverse_of_padding_is_form_as_well(tmp_path: Path) -> None:
    wide = broken("llama", tmp_path / "wide", *FORMS["a padded width"][0])
    _, reference = compared(healthy_checkpoint("llama", tmp_path / "here"), wide)
    assert (reference.relation, {form.kind for form in reference.form}) == ("form", {"padded"})


# Renamed: other dialects.

META_HEADS = {"q_proj": 4, "k_proj": 2}
META_PARAMS = {
    "dim": 48,
    "hidden_dim": 112,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "norm_eps": 1e-5,
}


def meta_checkpoint(source: Path, directory: Path) -> Path:
    directory.mkdir()
    write_weights(directory, as_meta(load_file(source / SINGLE), META_HEADS))
    (directory / SINGLE).rename(directory / "consolidated.safetensors")
    (directory / "params.json").write_text(json.dumps(META_PARAMS))
    return directory


def test_metas_names_and_rotation_are_form(tmp_path: Path) -> None:
    source = healthy_checkpoint("llama", tmp_path / "source")
    meta = meta_checkpoint(source, tmp_path / "meta")
    for here, there in ((meta, source), (source, meta)):
        report, reference = compared(here, there)
        assert report.findings == ()
        assert (reference.relation, reference.function, reference.unmatched) == ("form", (), ())
        assert reference.same == reference.mapped == 21
        assert {form.kind for form in reference.form} == {"renamed", "layout"}


def test_queries_in_the_wrong_rotation_are_told(tmp_path: Path) -> None:
    """The rows of Meta's order under names whose code turns halves."""
    source = healthy_checkpoint("llama", tmp_path / "source")
    turned = as_meta({"a.q_proj.": load_file(source / SINGLE)["model.layers.1.self_attn.q_proj.weight"]}, {"q_proj": 4})
    edit = put("model.layers.1.self_attn.q_proj.weight", next(iter(turned.values())))
    _, reference = compared(broken("llama", tmp_path / "here", edit), source)
    (found,) = reference.function
    assert (reference.relation, found.layer) == ("function", 1)
    assert found.tensors == ("model.layers.1.self_attn.q_proj.weight",)


def phi3_of(source: Path, directory: Path) -> Path:
    """The same model with fused projections."""
    tensors = load_file(source / SINGLE)
    for layer in (0, 1):
        place = f"model.layers.{layer}."
        qkv = [tensors.pop(f"{place}self_attn.{part}_proj.weight") for part in "qkv"]
        tensors[f"{place}self_attn.qkv_proj.weight"] = torch.cat(qkv)
        pair = [tensors.pop(f"{place}mlp.{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"{place}mlp.gate_up_proj.weight"] = torch.cat(pair)
    healthy_checkpoint("phi3", directory)
    write_weights(directory, tensors)
    return directory


def test_fused_and_separate_projections_meet(tmp_path: Path) -> None:
    source = healthy_checkpoint("llama", tmp_path / "source", config={"head_dim": 16})
    fused = phi3_of(source, tmp_path / "fused")
    edit_json("config.json", head_dim=16)(fused)
    report, reference = compared(fused, source)
    assert report.findings == ()
    assert (reference.relation, reference.function, reference.unmatched_there) == ("form", (), ())
    assert reference.same == reference.mapped == 21
    assert any(form.kind == "layout" and "fused" in form.words for form in reference.form)


def halves(fused: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = fused.chunk(2)
    return gate, up


def in_blocks(ranks: int) -> Callable[[Tensor], Tensor]:
    """[g0 u0 g1 u1 ...], as ranks of tensor parallelism concatenate."""

    def change(fused: Tensor) -> Tensor:
        pairs = zip(*(half.chunk(ranks) for half in halves(fused)), strict=True)
        return torch.cat([torch.cat(pair) for pair in pairs])

    return change


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "exchanged": (lambda fused: torch.cat(halves(fused)[::-1]), "ffn/fused-order", "halves"),
    "blocks of 2": (in_blocks(2), "ffn/fused-layout", "2 blocks"),
    "blocks of 4": (in_blocks(4), "ffn/fused-layout", "4 blocks"),
    "in turn": (lambda fused: torch.stack(halves(fused), 1).flatten(0, 1), "ffn/fused-layout", "in turn"),
}


@pytest.mark.parametrize("label", LAYOUTS)
def test_the_layout_of_a_fused_tensor_is_proved(label: str, tmp_path: Path) -> None:
    change, rule, word = LAYOUTS[label]
    source = healthy_checkpoint("phi3", tmp_path / "source")
    report, reference = compared(broken("phi3", tmp_path / "here", changed(gate_up_proj=change)), source)
    (finding,) = report.findings
    assert (finding.rule, finding.level, finding.certainty, finding.layer) == (rule, "error", "proved", 1)
    assert word in finding.message
    assert reference.relation == "function"


# Not silent: what differs in function.

EXCHANGED_AND_SHUFFLED: Edit = edit_tensors(
    lambda tensors: tensors.update(
        {GATE: tensors[UP][SHUFFLED], UP: tensors[GATE][SHUFFLED], DOWN: tensors[DOWN][:, SHUFFLED].contiguous()}
    )
)

MISTAKES: dict[str, tuple[Edit, str, str]] = {
    "exchanged": (rename(GATE, UP), "ffn/gate-up-swapped", "proved"),
    "exchanged, neurons in another order": (EXCHANGED_AND_SHUFFLED, "ffn/gate-up-swapped", "proved"),
    "down in another order": (changed(down_proj=lambda down: down[:, SHUFFLED]), "ffn/mispaired-neurons", "proved"),
    "gate in another order": (changed(gate_proj=lambda gate: gate[SHUFFLED]), "ffn/mispaired-neurons", "proved"),
    "1 added": (changed(input_layernorm=lambda gain: gain + 1), "norm/offset", "proved"),
    "1 taken": (changed(post_attention_layernorm=lambda gain: gain - 1), "norm/offset", "proved"),
    "noise": (changed(v_proj=torch.randn_like), "tensor/untrained", "proved"),
}


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("label", MISTAKES)
def test_a_mistake_is_the_only_finding(label: str, rounded: bool, tmp_path: Path) -> None:
    edit, rule, certainty = MISTAKES[label]
    torch.manual_seed(3)
    source = healthy_checkpoint("llama", tmp_path / "source")
    edits = (edit, cast(torch.bfloat16)) if rounded else (edit,)
    report, reference = compared(broken("llama", tmp_path / "here", *edits), source)
    (finding,) = report.findings
    assert (finding.rule, finding.level, finding.certainty, finding.layer) == (rule, "error", certainty, 1)
    assert (report.verdict, reference.relation) == ("fail", "function")


def test_the_repair_of_an_offset_is_told(tmp_path: Path) -> None:
    source = healthy_checkpoint("llama", tmp_path / "source")
    report, _ = compared(broken("llama", tmp_path / "here", MISTAKES["1 added"][0]), source)
    (finding,) = report.findings
    assert finding.fix is not None
    assert (finding.fix.action, finding.evidence["add"]) == ("add-to-gains", -1.0)


def test_every_square_weight_may_be_transposed(tmp_path: Path) -> None:
    source = healthy_checkpoint("llama", tmp_path / "source", tiny=SQUARE)
    here = broken("llama", tmp_path / "here", changed(down_proj=lambda down: down.T), tiny=SQUARE)
    (finding,) = compared(here, source)[0].findings
    assert (finding.rule, finding.certainty, finding.layer) == ("tensor/transposed", "proved", 1)


def test_a_norm_in_the_place_of_another(tmp_path: Path) -> None:
    """post_attention copied into pre_feedforward, as converters did for families with four norms."""
    copied = edit_tensors(
        lambda tensors: tensors.update(
            {
                "model.layers.1.pre_feedforward_layernorm.weight": tensors[
                    "model.layers.1.post_attention_layernorm.weight"
                ].clone()
            }
        )
    )
    source = healthy_checkpoint("gemma3", tmp_path / "source")
    report, _ = compared(broken("gemma3", tmp_path / "here", copied), source)
    (finding,) = (finding for finding in report.findings if finding.level == "error")
    assert (finding.rule, finding.layer) == ("norm/role", 1)
    assert "attn_out of the reference, used as ffn_in" in finding.message


def as_gguf(tensors: Mapping[str, Tensor]) -> Tensors:
    """llama.cpp's names; gains hold the 1 that Gemma adds."""
    names = {
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.norm": "output_norm",
        "model.embed_tokens": "token_embd",
        "model.layers": "blk",
    }
    made: Tensors = {}
    for name, tensor in tensors.items():
        new = name
        for old, other in names.items():
            new = new.replace(old, other)
        made[new] = tensor + 1 if "norm" in name else tensor
    return made


def test_gains_that_hold_the_1_are_form_where_that_is_the_convention(tmp_path: Path) -> None:
    source = healthy_checkpoint("gemma", tmp_path / "source")
    here = tmp_path / "here"
    here.mkdir()
    write_weights(here, as_gguf(load_file(source / SINGLE)))
    opened = open_checkpoint(here, family="gguf")
    question = AuditQuestion(reference=open_checkpoint(source), family="gguf")
    reference = audit_checkpoint(opened, question).reference
    assert reference is not None
    assert reference.function == ()
    kinds = {form.kind for form in reference.form}
    assert kinds & {"offset-folded", "rounded"}
    # The same numbers under Gemma's own names are damage.
    twice = broken("gemma", tmp_path / "twice", edit_tensors(_folded))
    report, _ = compared(twice, source)
    assert {finding.rule for finding in report.findings if finding.level == "error"} == {"norm/offset"}


def _folded(tensors: Tensors) -> None:
    for name in tensors:
        if "norm" in name:
            tensors[name] = tensors[name] + 1


# Mixtures.

ORDER = [2, 0, 3, 1]


def reordered(*, router: bool) -> Edit:
    def edit(tensors: Tensors) -> None:
        place = "model.layers.1.block_sparse_moe."
        old = dict(tensors)
        for new, expert in enumerate(ORDER):
            for part in ("w1", "w2", "w3"):
                tensors[f"{place}experts.{new}.{part}.weight"] = old[f"{place}experts.{expert}.{part}.weight"]
        if router:
            tensors[f"{place}gate.weight"] = old[f"{place}gate.weight"][ORDER].contiguous()

    return edit_tensors(edit)


def test_experts_reordered_with_their_router_are_form(tmp_path: Path) -> None:
    source = healthy_checkpoint("mixtral", tmp_path / "source")
    alone = audit_checkpoint(source)
    report, reference = compared(broken("mixtral", tmp_path / "here", reordered(router=True)), source)
    assert report.findings == alone.findings
    assert (reference.relation, {form.kind for form in reference.form}) == ("form", {"experts-reordered"})


def test_experts_reordered_alone_are_a_mistake(tmp_path: Path) -> None:
    source = healthy_checkpoint("mixtral", tmp_path / "source")
    report, reference = compared(broken("mixtral", tmp_path / "here", reordered(router=False)), source)
    (told,) = reference.function
    assert (reference.relation, told.kind, told.layer) == ("function", "experts-exchanged", 1)
    (found,) = (finding for finding in report.findings if finding.certainty == "proved")
    assert (found.rule, found.level, found.layer) == ("moe/experts-exchanged", "error", 1)


def _exchanged(report: Report) -> Finding:
    (found,) = (finding for finding in report.findings if finding.rule == "moe/experts-exchanged")
    return found


def test_experts_are_renamed_back_also_round_a_ring(tmp_path: Path) -> None:
    source = healthy_checkpoint("mixtral", tmp_path / "source")
    here = broken("mixtral", tmp_path / "here", reordered(router=False))
    report, _ = compared(here, source)
    patch = repair_of(open_checkpoint(here), _exchanged(report))
    assert not isinstance(patch, Unrepaired)
    repaired = tmp_path / "repaired"
    write_checkpoint(drafted(open_checkpoint(here), patch), repaired, tick=lambda *_: None)
    _, reference = compared(repaired, source)
    assert reference.relation == "identical"


def _twice(tensors: Tensors) -> None:
    place = "model.layers.1.block_sparse_moe.experts."
    for part in ("w1", "w2", "w3"):
        tensors[f"{place}1.{part}.weight"] = tensors[f"{place}0.{part}.weight"]
        tensors[f"{place}0.{part}.weight"] = tensors[f"{place}3.{part}.weight"].clone()


def _rolled(tensors: Tensors) -> None:
    for name in [name for name in tensors if "layers.1." in name and ".experts." in name]:
        tensors[name] = tensors[name].roll(1, 0).contiguous()


@pytest.mark.parametrize(("family", "edit"), [("mixtral", _twice), ("gpt_oss", _rolled)], ids=["twice", "a stack"])
def test_experts_that_no_names_bring_back_are_told_so(family: str, edit: Any, tmp_path: Path) -> None:
    source = healthy_checkpoint(family, tmp_path / "source")
    here = broken(family, tmp_path / "here", edit_tensors(edit))
    report, _ = compared(here, source)
    found = _exchanged(report)
    told = repair_of(open_checkpoint(here), found)
    assert isinstance(told, Unrepaired)
    assert "are not moved yet" in told.reason
    assert not repairable(found)


def test_without_a_reference_the_order_of_experts_is_undecidable(tmp_path: Path) -> None:
    report = audit_checkpoint(broken("mixtral", tmp_path / "here", reordered(router=False)))
    (coverage,) = (entry for entry in report.coverage if entry.rule == "moe/experts-exchanged")
    (open_,) = coverage.undecidable
    assert "--reference" in open_.would_decide
    assert not [finding for finding in report.findings if finding.rule == coverage.rule]


@pytest.mark.parametrize("parts", [("w2",), ("w1", "w3"), ("w1",), ("w3",)], ids="+".join)
@pytest.mark.parametrize("router", [True, False], ids=["with the router", "alone"])
def test_parts_of_experts_exchanged(parts: tuple[str, ...], router: bool, tmp_path: Path) -> None:
    """The rows of the router moved with them, or not: an expert of which a part stayed is none that was reordered."""
    place = "model.layers.1.block_sparse_moe."

    def edit(tensors: Tensors) -> None:
        for part in parts:
            one, other = (f"{place}experts.{number}.{part}.weight" for number in (0, 3))
            tensors[one], tensors[other] = tensors[other], tensors[one]
        if router:
            tensors[f"{place}gate.weight"] = tensors[f"{place}gate.weight"][[3, 1, 2, 0]].contiguous()

    source = healthy_checkpoint("mixtral", tmp_path / "source")
    report, reference = compared(broken("mixtral", tmp_path / "here", edit_tensors(edit)), source)
    proved = [finding for finding in report.findings if finding.certainty == "proved"]
    told = [(finding.rule, finding.level, finding.layer, finding.expert) for finding in proved]
    assert told == [("ffn/mispaired-neurons", "error", 1, expert) for expert in (0, 3)]
    assert reference.relation == "function"
    assert not reference.form


def test_experts_reordered_with_their_router_and_their_neurons(tmp_path: Path) -> None:
    place = "model.layers.1.block_sparse_moe.experts.2."

    def edit(directory: Path) -> None:
        reordered(router=True)(directory)
        edit_tensors(permute)(directory)

    def permute(tensors: Tensors) -> None:
        order = torch.randperm(112, generator=torch.Generator().manual_seed(1))
        for part in ("w1", "w3"):
            tensors[f"{place}{part}.weight"] = tensors[f"{place}{part}.weight"][order].contiguous()
        tensors[f"{place}w2.weight"] = tensors[f"{place}w2.weight"][:, order].contiguous()

    source = healthy_checkpoint("mixtral", tmp_path / "source")
    alone = audit_checkpoint(source)
    report, reference = compared(broken("mixtral", tmp_path / "here", edit), source)
    assert report.findings == alone.findings
    assert (reference.relation, {form.kind for form in reference.form}) == ("form", {"experts-reordered"})


def test_one_expert_exchanged(tmp_path: Path) -> None:
    place = "model.layers.1.block_sparse_moe.experts.2."
    source = healthy_checkpoint("mixtral", tmp_path / "source")
    here = broken("mixtral", tmp_path / "here", rename(f"{place}w1.weight", f"{place}w3.weight"))
    report, _ = compared(here, source)
    found = [finding for finding in report.findings if finding.certainty == "proved"]
    assert [(finding.rule, finding.layer, finding.expert) for finding in found] == [("ffn/gate-up-swapped", 1, 2)]


def test_metas_experts_meet_mixtrals(tmp_path: Path) -> None:
    source = healthy_checkpoint("mixtral", tmp_path / "source")
    tensors = {
        name.replace("block_sparse_moe.experts", "feed_forward.experts").replace(
            "block_sparse_moe.gate", "feed_forward.gate"
        ): tensor
        for name, tensor in as_meta(load_file(source / SINGLE), META_HEADS).items()
    }
    here = tmp_path / "meta"
    here.mkdir()
    write_weights(here, tensors)
    (here / "params.json").write_text(json.dumps(META_PARAMS | {"moe": {"num_experts": 4, "num_experts_per_tok": 2}}))
    _, reference = compared(here, source)
    assert (reference.relation, reference.function, reference.unmatched) == ("form", (), ())


def test_biases_exchanged_without_their_weights(tmp_path: Path) -> None:
    names = [f"model.layers.1.mlp.{part}_proj.bias" for part in ("gate", "up", "down")]
    biases = {
        name.replace(".1.", f".{layer}."): torch.randn(48 if "down" in name else 112)
        for layer in (0, 1)
        for name in names
    }
    config = {"mlp_bias": True}
    source = healthy_checkpoint("llama", tmp_path / "source", config=config, tensors=biases)
    here = broken("llama", tmp_path / "here", rename(*names[:2]), config=config, tensors=biases)
    (finding,) = compared(here, source)[0].findings
    assert (finding.rule, finding.layer, finding.tensors) == ("ffn/gate-up-swapped", 1, tuple(names[:2]))
    whole = broken("llama", tmp_path / "whole", rename(*names[:2]), rename(GATE, UP), config=config, tensors=biases)
    (finding,) = compared(whole, source)[0].findings
    assert finding.tensors == (GATE, UP)


# Versions, and other models.


def test_a_fine_tune_is_told_with_its_cosines(tmp_path: Path) -> None:
    source = healthy_checkpoint("llama", tmp_path / "source")
    report, reference = compared(broken("llama", tmp_path / "here", noisy(0.05)), source)
    assert (report.findings, report.verdict, reference.relation) == ((), "pass", "fine-tune")
    assert [row.layer for row in reference.profile] == [0, 1]
    assert all(0.99 < row.least < 1 for row in reference.profile)


def test_a_swap_in_a_fine_tune_is_found_by_its_cosines(tmp_path: Path) -> None:
    source = healthy_checkpoint("llama", tmp_path / "source")
    report, reference = compared(broken("llama", tmp_path / "here", noisy(0.05), rename(GATE, UP)), source)
    (finding,) = report.findings
    assert (finding.rule, finding.layer, finding.certainty) == ("ffn/gate-up-swapped", 1, "statistical")
    assert reference.relation == "fine-tune"


def _redrawn(tensors: Tensors) -> None:
    generator = torch.Generator().manual_seed(77)
    for tensor in tensors.values():
        if tensor.ndim == 2:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.std())


def test_another_model_of_the_same_shapes_is_no_damage(tmp_path: Path) -> None:
    source = healthy_checkpoint("llama", tmp_path / "source")
    report, reference = compared(broken("llama", tmp_path / "here", edit_tensors(_redrawn)), source)
    assert [finding for finding in report.findings if finding.rule.startswith(("norm/", "tensor/"))] == []
    assert (report.verdict, reference.relation, reference.function) == ("inconclusive", "other-model", ())


@pytest.mark.parametrize("other", ["llama", "gpt2"])
def test_another_model_of_other_shapes_is_no_damage(other: str, tmp_path: Path) -> None:
    source = healthy_checkpoint(other, tmp_path / "source", tiny=Tiny(hidden=64, heads=4, head_dim=16))
    report, reference = compared(healthy_checkpoint("llama", tmp_path / "here"), source)
    assert report.findings == ()
    assert report.verdict == "inconclusive"
    assert reference.relation in {"other-model", "unanswered"}


# What cannot be read, and what cannot be asked.


def test_a_reference_of_no_family_meets_by_name_and_by_bytes(tmp_path: Path) -> None:
    source = healthy_checkpoint("llama", tmp_path / "source")
    tensors = {f"net.{name}": tensor for name, tensor in load_file(source / SINGLE).items()}
    nameless = tmp_path / "nameless"
    nameless.mkdir()
    write_weights(nameless, tensors)
    for here, there in ((source, nameless), (nameless, source)):
        report, reference = compared(here, there)
        assert (reference.relation, reference.same, reference.unmatched) == ("form", 21, ())
        assert {form.kind for form in reference.form} == {"renamed"}
        assert report.reference == reference


def _cut(directory: Path) -> None:
    path = directory / SINGLE
    path.write_bytes(path.read_bytes()[:-40_000])


def _no_numbers(directory: Path) -> None:
    edit_json("config.json", hidden_size="wide", num_attention_heads=-3)(directory)


HOSTILE: dict[str, Edit] = {
    "cut": _cut,
    "sizes that are none": _no_numbers,
    "no config": lambda directory: (directory / "config.json").unlink(),
    "NaN": changed(down_proj=lambda down: down * float("nan")),
    "zeros": changed(down_proj=lambda down: down * 0),
    "empty": put(DOWN, torch.zeros(0, 112)),
    "integers": put(DOWN, torch.zeros(48, 112, dtype=torch.int32)),
    "three axes": put(DOWN, torch.zeros(2, 24, 112)),
    "a scalar": put(NORM, torch.tensor(1.0)),
    "heads that do not divide": edit_json("config.json", head_dim=7, num_attention_heads=5),
    "a norm too short": put(NORM, torch.ones(7)),
}


@pytest.mark.parametrize("label", HOSTILE)
def test_a_damaged_checkpoint_or_reference_is_no_crash(label: str, tmp_path: Path) -> None:
    whole = healthy_checkpoint("llama", tmp_path / "whole")
    odd = broken("llama", tmp_path / "odd", HOSTILE[label])
    for here, there in ((whole, odd), (odd, whole)):
        report, reference = compared(here, there)
        assert reference.mapped > 0
        for name in REPORTS:
            assert "source" in REPORTS[name].render(report) or name in {"sarif", "junit"}
    # What of the whole one has no readable counterpart is told, and not passed over.
    _, reference = compared(whole, odd)
    if label == "cut":
        assert reference.unread
        assert reference.relation != "identical"


def test_a_question_that_no_rule_reads_is_refused(tmp_path: Path) -> None:
    source = healthy_checkpoint("llama", tmp_path / "source")
    with pytest.raises(InvalidValue, match="reference was given"):
        compared(source, source, rules=("container/header",))


def test_a_comparison_can_be_stopped(tmp_path: Path) -> None:
    source = healthy_checkpoint("llama", tmp_path / "source")
    told: list[str] = []

    def stop() -> bool:
        return any("in the reference" in words for words in told)

    question = AuditQuestion(reference=open_checkpoint(source))
    with pytest.raises(AuditCancelled):
        audit_checkpoint(source, question, progress=lambda _done, _total, words: told.append(words), cancelled=stop)


@pytest.mark.parametrize("name", ["text", "markdown", "html", "json"])
def test_every_report_for_people_tells_the_relation(name: str, tmp_path: Path) -> None:
    source = healthy_checkpoint("llama", tmp_path / "source")
    report, _ = compared(broken("llama", tmp_path / "here", rename(GATE, UP), cast(torch.bfloat16)), source)
    text = REPORTS[name].render(report, width=200)
    assert "source" in text
    assert "rounded" in text
    assert "exchanged" in text


def tuned(
    *, rank: int | None, layers: tuple[int, ...] = (0, 1), roles: tuple[str, ...] = ("q_proj", "down_proj")
) -> Edit:
    """Weights of some roles changed by 5 %, by what an adapter of so many ranks adds or by noise."""

    def edit(tensors: Tensors) -> None:
        for number, (name, tensor) in enumerate(sorted(tensors.items())):
            if not any(f".{layer}." in name for layer in layers) or not any(role in name for role in roles):
                continue
            generator = torch.Generator().manual_seed(number)
            if rank is None:
                delta = torch.randn(tensor.shape, generator=generator)
            else:
                delta = torch.randn(tensor.shape[0], rank, generator=generator)
                delta = delta @ torch.randn(rank, tensor.shape[1], generator=generator)
            tensors[name] = tensor + delta * (0.05 * tensor.norm() / delta.norm())

    return edit_tensors(edit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fine_tune_is_told_in_a_line_with_the_rank_of_a_merged_adapter(dtype: torch.dtype, tmp_path: Path) -> None:
    source = broken("llama", tmp_path / "there", cast(dtype, torch.float32))
    here = broken("llama", tmp_path / "here", cast(dtype, torch.float32), tuned(rank=3), cast(dtype))
    cast(dtype)(source)
    report, reference = compared(here, source)
    assert (reference.relation, report.verdict) == ("fine-tune", "pass")
    assert "its numbers changed: 4 of 21 tensors, in 2 of 2 layers: " in reference.words
    for role in ("query", "down"):
        assert f"{role} by 5 % (rank 3 in 2 of 2 looked at)" in reference.words
    assert "rank" not in "".join(found.words for found in reference.function)


def test_what_is_changed_by_noise_has_no_rank_and_is_told_by_role(tmp_path: Path) -> None:
    source = healthy_checkpoint("llama", tmp_path / "there")
    here = broken("llama", tmp_path / "here", tuned(rank=3, roles=("q_proj",)), tuned(rank=None, roles=("up_proj",)))
    _, reference = compared(here, source)
    assert reference.relation == "fine-tune"
    assert "query by 5 % (rank 3 in 2 of 2 looked at)" in reference.words
    assert reference.words.count("rank") == 1
    assert "up by 5 %" in reference.words


def test_changed_in_places_says_where(tmp_path: Path) -> None:
    source = healthy_checkpoint("llama", tmp_path / "there")
    here = broken("llama", tmp_path / "here", tuned(rank=None, layers=(1,)))
    _, reference = compared(here, source)
    assert reference.relation == "function"
    assert "its numbers changed in places: 2 of 21 tensors, in 1 of 2 layers: " in reference.words
    assert all("changed by 5 % (cosine 0.998" in found.words for found in reference.function)


def test_a_conversion_is_told_in_a_line(tmp_path: Path) -> None:
    source = broken("llama", tmp_path / "there", cast(torch.bfloat16))
    neurons = changed(
        gate_proj=lambda weight: weight[SHUFFLED],
        up_proj=lambda weight: weight[SHUFFLED],
        down_proj=lambda weight: weight[:, SHUFFLED],
    )
    here = broken("llama", tmp_path / "here", cast(torch.bfloat16), neurons, cast(torch.float32))
    _, reference = compared(here, source)
    assert (reference.relation, reference.words) == ("form", "the same model in another form: dtype, order of neurons")
    changed(gate_proj=lambda weight: weight * 0)(here)
    _, reference = compared(here, source)
    assert reference.relation == "function"
    assert reference.words.endswith("; in form: dtype")


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_gains_less_one_are_known_though_two_dtypes_rounded_them(narrow: torch.dtype, tmp_path: Path) -> None:
    """One taken away in the dtype of the source, and then cast to another one."""
    source = broken("llama", tmp_path / "there", cast(torch.bfloat16))

    def less_one(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            tensors[name] = (tensor - 1 if "norm" in name else tensor).to(narrow)

    here = broken("llama", tmp_path / "here", cast(torch.bfloat16), edit_tensors(less_one))
    report, reference = compared(here, source)
    assert {finding.rule for finding in report.findings} == {"norm/offset"}
    assert all(finding.certainty == "proved" for finding in report.findings)
    assert "but for gains that are off by 1 (5) in 2 of 2 layers" in reference.words


# Odd counterparts: nothing that one side holds otherwise ends the comparison.


def with_biases(directory: Path, *edits: Edit) -> Path:
    def add(tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(3)
        for layer in (0, 1):
            for part, width in (("gate", 112), ("up", 112), ("down", 48)):
                name = f"model.layers.{layer}.mlp.{part}_proj.bias"
                tensors[name] = 0.01 * torch.randn(width, generator=generator)

    return broken("llama", directory, edit_json("config.json", mlp_bias=True), edit_tensors(add), *edits)


def test_a_padded_width_with_biases_where_one_ends_the_other_file(tmp_path: Path) -> None:
    """A bias of another length is not held against the wider one, whose numbers it does not have."""
    last = "model.layers.0.mlp.up_proj.bias"

    def pad(tensors: Tensors) -> None:
        padded(tensors)
        for name in [name for name in tensors if name.endswith(("gate_proj.bias", "up_proj.bias"))]:
            tensors[name] = torch.cat([tensors[name], torch.zeros(16)])

    one = with_biases(tmp_path / "one", edit_tensors(pad), edit_json("config.json", intermediate_size=128))
    other = with_biases(tmp_path / "other")
    tensors = load_file(other / SINGLE)
    (other / SINGLE).unlink()
    shard = "model-0000{}-of-00002.safetensors".format
    homes = {name: shard(1 + (name == last)) for name in tensors}
    for file in (shard(1), shard(2)):
        save_file({name: tensor for name, tensor in tensors.items() if homes[name] == file}, other / file)
    write_index(other, homes)
    _, reference = compared(one, other)
    assert (reference.relation, reference.function, reference.unread) == ("form", (), ())


def test_a_counterpart_of_whole_numbers(tmp_path: Path) -> None:
    query = "model.layers.1.self_attn.q_proj.weight"
    integers = edit_tensors(lambda tensors: tensors.update({query: (40 * tensors[query]).round().to(torch.int8)}))
    reference = compared(broken("llama", tmp_path / "one"), broken("llama", tmp_path / "other", integers))[1]
    assert [(found.kind, found.tensors) for found in reference.function] == [("differs", (query,))]
    assert "rank" not in reference.words


def test_a_fused_bias_that_has_no_halves(tmp_path: Path) -> None:
    name = "model.transformer.blocks.1.ff_proj.bias"
    odd = put(name, torch.zeros(1))
    one = broken("olmo_ai2", tmp_path / "one", config={"include_bias": True})
    _, reference = compared(one, broken("olmo_ai2", tmp_path / "other", odd, config={"include_bias": True}))
    assert name in reference.unmatched_there


def test_what_cannot_be_read_has_a_counterpart_all_the_same(tmp_path: Path) -> None:
    one, other = broken("llama", tmp_path / "one"), broken("llama", tmp_path / "other")
    file = other / SINGLE
    file.write_bytes(file.read_bytes()[:-4])
    _, reference = compared(one, other)
    assert reference.relation == "function"
    assert reference.words == "the same model, but for 1 tensor that could not be read on both sides"
    assert (reference.unmatched, reference.unmatched_there, len(reference.unread)) == ((), (), 1)
