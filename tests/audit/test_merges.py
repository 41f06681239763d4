"""A checkpoint beside several: mixes, copies, stacked layers, and what is none of these."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.wire.audits import MergeSummary, Report
from makers import Tiny, tiny_checkpoint, write_weights
from safetensors.torch import load_file
from torch import Tensor

SMALL = Tiny(hidden=32, intermediate=64, layers=4, head_dim=8)
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two versions of one model, and one that is further away."""
    folder = tmp_path_factory.mktemp("parents")
    base = load_file(tiny_checkpoint("llama", folder / "base", tiny=SMALL) / "model.safetensors")
    made = {"base": folder / "base"}
    for seed, (name, moved) in enumerate((("A", 0.1), ("B", 0.1), ("far", 0.8))):
        draw = torch.Generator().manual_seed(seed + 1)
        tuned = {key: weight * (1 + moved * torch.randn(weight.shape, generator=draw)) for key, weight in base.items()}
        made[name] = written(folder / name, made["base"], tuned)
    return made


def written(directory: Path, like: Path, tensors: Weights, **config: int) -> Path:
    directory.mkdir()
    values = json.loads((like / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(values))
    write_weights(directory, tensors)
    return directory


def weights(directory: Path) -> Weights:
    return load_file(directory / "model.safetensors")


def asked(directory: Path, parents: dict[str, Path], *names: str) -> Report:
    given = tuple((name, open_checkpoint(parents[name])) for name in names or ("A", "B"))
    return audit_checkpoint(directory, AuditQuestion(parents=given))


def merged(report: Report) -> MergeSummary:
    assert report.merge is not None
    return report.merge


def mixed(parents: dict[str, Path], how: Callable[[str, Tensor, Tensor], Tensor], directory: Path) -> Report:
    one, other = weights(parents["A"]), weights(parents["B"])
    made = {name: how(name, one[name], other[name]) for name in one}
    return asked(written(directory, parents["A"], made), parents)


def slerp(one: Tensor, other: Tensor, t: float) -> Tensor:
    angle = torch.acos((one * other).sum().double() / (one.double().norm() * other.double().norm()))
    first, second = torch.sin((1 - t) * angle), torch.sin(t * angle)
    return ((first * one.double() + second * other.double()) / torch.sin(angle)).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_mix_and_its_coefficients(dtype: torch.dtype, parents: dict[str, Path], tmp_path: Path) -> None:
    report = mixed(parents, lambda _, one, other: (0.7 * one + 0.3 * other).to(dtype), tmp_path / "model")
    assert merged(report).words == "a linear mix throughout: 0.700 A + 0.300 B"
    (group,) = merged(report).groups
    assert (group.kind, group.tensors) == ("mix", merged(report).mapped)
    assert report.findings == ()


def test_a_spherical_mix(parents: dict[str, Path], tmp_path: Path) -> None:
    one, other = weights(parents["A"]), weights(parents["far"])
    made = {name: slerp(one[name], other[name], 0.3) for name in one}
    report = asked(written(tmp_path / "model", parents["A"], made), parents, "A", "far")
    assert merged(report).words == "a spherical mix (SLERP) of A and far, t = 0.300"


def test_task_arithmetic_over_a_base(parents: dict[str, Path], tmp_path: Path) -> None:
    base, one, other = (weights(parents[name]) for name in ("base", "A", "B"))
    made = {key: base[key] + 0.8 * (one[key] - base[key]) + 0.5 * (other[key] - base[key]) for key in base}
    report = asked(written(tmp_path / "model", parents["base"], made), parents, "base", "A", "B")
    assert merged(report).words == "a linear mix throughout: -0.300 base + 0.800 A + 0.500 B"


def test_parts_that_follow_one_parent_alone(parents: dict[str, Path], tmp_path: Path) -> None:
    def how(name: str, one: Tensor, other: Tensor) -> Tensor:
        return one if "mlp" in name else 0.5 * one + 0.5 * other if "self_attn" in name else other

    report = mixed(parents, how, tmp_path / "model")
    told = {(group.kind, group.words): group.tensors for group in merged(report).groups}
    assert told["copy", "equal to A"] == 3 * SMALL.layers
    assert told["mix", "a linear mix, but for rounding"] == 4 * SMALL.layers
    assert merged(report).words.startswith("a mix of A and B in places, a copy in others")


def test_layers_stacked_from_two_models(parents: dict[str, Path], tmp_path: Path) -> None:
    one, other = weights(parents["A"]), weights(parents["B"])
    made = {name: weight for name, weight in one.items() if ".layers." not in name}
    for layer, (source, number) in enumerate([(one, 0), (one, 1), (one, 2), (other, 1), (other, 2), (other, 3)]):
        prefix = f"model.layers.{number}."
        made |= {
            name.replace(prefix, f"model.layers.{layer}."): weight.clone()
            for name, weight in source.items()
            if name.startswith(prefix)
        }
    report = asked(written(tmp_path / "model", parents["A"], made, num_hidden_layers=6), parents)
    assert merged(report).words == "layers stacked: 0-2 from A; 3-5 from B (1-3 there)"
    sources = {layer.layer: layer.sources for layer in merged(report).layers}
    assert [(source.reference, source.layer) for source in sources[4]] == [("B", 2)]


def test_what_takes_single_numbers_from_either_is_no_linear_mix(parents: dict[str, Path], tmp_path: Path) -> None:
    def how(_: str, one: Tensor, other: Tensor) -> Tensor:
        return torch.where(torch.rand(one.shape, generator=torch.Generator().manual_seed(9)) < 0.5, one, other)

    report = mixed(parents, how, tmp_path / "model")
    assert {group.kind for group in merged(report).groups} == {"near"}
    assert merged(report).words.startswith("not a linear mix throughout")


def test_another_model_is_neither(parents: dict[str, Path], tmp_path: Path) -> None:
    report = asked(tiny_checkpoint("llama", tmp_path / "other", tiny=SMALL, seed=50), parents)
    layers = [layer for layer in merged(report).layers if layer.layer is not None]
    assert layers == []  # no layer is a version of one of theirs
    assert "mix" not in {group.kind for group in merged(report).groups}
    assert merged(report).unmatched


def test_the_same_twice_is_one(parents: dict[str, Path], tmp_path: Path) -> None:
    made = {name: 2 * weight for name, weight in weights(parents["A"]).items()}
    directory = written(tmp_path / "model", parents["A"], made)
    given = tuple((name, open_checkpoint(parents["A"])) for name in ("A", "again"))
    report = audit_checkpoint(directory, AuditQuestion(parents=given))
    assert {group.kind for group in merged(report).groups} == {"mix"}
    assert all(part.reference == "A" for group in merged(report).groups for part in group.coefficients)


def test_a_mix_is_told_whatever_else_is_given(parents: dict[str, Path], tmp_path: Path) -> None:
    """Beside the two of a mix: one of them again, rounded, but for noise, or with a number that is none; zeros."""
    one, other = weights(parents["A"]), weights(parents["B"])
    draw = torch.Generator().manual_seed(7)
    besides: dict[str, Callable[[Tensor], Tensor]] = {
        "again": lambda weight: weight,
        "rounded": lambda weight: weight.bfloat16(),
        "noisy": lambda weight: weight * (1 + 1e-7 * torch.randn(weight.shape, generator=draw)),
        "zero": torch.zeros_like,
        "broken": lambda weight: torch.where(torch.arange(weight.numel()).view(weight.shape) == 0, torch.nan, weight),
    }
    made = {name: 0.5 * one[name] + 0.5 * other[name] for name in one}
    directory = written(tmp_path / "model", parents["A"], made)
    for name, beside in besides.items():
        third = written(tmp_path / name, parents["A"], {key: beside(weight) for key, weight in one.items()})
        given = tuple((path.name, open_checkpoint(path)) for path in (parents["A"], third, parents["B"]))
        summary = merged(audit_checkpoint(directory, AuditQuestion(parents=given)))
        assert {group.kind for group in summary.groups} == {"mix"}, (name, summary.words)
        assert summary.words.startswith("a linear mix throughout: 0.500 A"), (name, summary.words)
        assert summary.words.endswith("0.500 B"), (name, summary.words)


def test_a_rounded_copy_is_no_mix(parents: dict[str, Path], tmp_path: Path) -> None:
    one = weights(parents["A"])
    draw = torch.Generator().manual_seed(8)
    near = {key: weight * (1 + 3e-3 * torch.randn(weight.shape, generator=draw)) for key, weight in one.items()}
    other = written(tmp_path / "other", parents["A"], near)
    for dtype in (torch.bfloat16, torch.float16):
        directory = written(tmp_path / str(dtype), parents["A"], {key: weight.to(dtype) for key, weight in one.items()})
        given = (("A", open_checkpoint(parents["A"])), ("other", open_checkpoint(other)))
        summary = merged(audit_checkpoint(directory, AuditQuestion(parents=given)))
        assert [(group.kind, group.words) for group in summary.groups] == [("copy", "equal to A")]


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_layers_of_any_size_have_their_counterparts(scale: float, parents: dict[str, Path], tmp_path: Path) -> None:
    made = {key: weight * scale for key, weight in weights(parents["A"]).items()}
    summary = merged(asked(written(tmp_path / "model", parents["A"], made), parents))
    assert (summary.mapped, summary.unmatched) == (len(made), ())


def test_zeros_are_a_copy_of_zeros_and_no_mix(parents: dict[str, Path], tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    for dtype, kind in ((torch.float32, "neither"), (torch.bfloat16, "copy")):
        of_zeros = weights(parents["A"])
        of_zeros[name] = torch.zeros_like(of_zeros[name])
        empty = {key: weight.to(dtype) for key, weight in of_zeros.items()}
        directory = written(tmp_path / kind, parents["A"], of_zeros)
        written(tmp_path / f"{kind}-parent", parents["A"], empty)
        first = parents["A"] if kind == "neither" else tmp_path / f"{kind}-parent"
        given = (("first", open_checkpoint(first)), ("B", open_checkpoint(parents["B"])))
        summary = merged(audit_checkpoint(directory, AuditQuestion(parents=given)))
        (group,) = [group for group in summary.groups if name in group.examples]
        assert group.kind == kind


def test_nothing_in_common_is_inconclusive(parents: dict[str, Path], tmp_path: Path) -> None:
    wider = Tiny(hidden=40, intermediate=72, layers=4, head_dim=8, vocab=64)
    report = asked(tiny_checkpoint("llama", tmp_path / "other", tiny=wider), parents)
    assert (merged(report).mapped, report.verdict) == (0, "inconclusive")


def test_the_rules_say_that_several_references_prove_nothing(parents: dict[str, Path]) -> None:
    report = asked(parents["A"], parents)
    (row,) = [row for row in report.coverage if row.rule == "tensor/untrained"]
    assert "several references" in row.skipped[0].reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_all_parents_hold_is_shared_whatever_the_mix_rounds(
    dtype: torch.dtype, parents: dict[str, Path], tmp_path: Path
) -> None:
    one, other = weights(parents["A"]), weights(parents["B"])
    gains = [name for name in one if "norm" in name]
    other |= {name: one[name] for name in gains}
    made = {name: (0.6 * one[name] + 0.4 * other[name]).to(dtype) for name in one}
    assert any(not torch.equal(made[name], one[name]) for name in gains)
    directory = written(tmp_path / "model", parents["A"], made)
    opened = {"A": parents["A"], "B": written(tmp_path / "B", parents["A"], other), "far": parents["far"]}
    for names, kind, words in (
        (("A", "B"), "shared", "equal in all of them"),
        (("A", "B", "far"), "copy", "equal to A and B"),
    ):
        given = tuple((name, open_checkpoint(opened[name])) for name in names)
        summary = merged(audit_checkpoint(directory, AuditQuestion(parents=given)))
        told = {(group.kind, group.words): group.tensors for group in summary.groups}
        assert told[kind, words] == len(gains)
        assert told["mix", "a linear mix, but for rounding"] == len(one) - len(gains)
