"""The audit of SmolLM2-135M: silent as published, and every exchanged layer named."""

import importlib.util
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.api.entry import repair
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.wire.audits import Coverage, Report
from glassblock.wire.repairs import RepairRequest
from rotary_heads import into
from safetensors.torch import load_file, save_file
from torch import Tensor

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]
RULE = "ffn/gate-up-swapped"
LAYERS = range(30)
PREFIX = "model.layers.{}."


def coverage(report: Report, rule: str = RULE) -> Coverage:
    (entry,) = (entry for entry in report.coverage if entry.rule == rule)
    return entry


@pytest.fixture(scope="module")
def copy(smollm2: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the single file whose header may be edited in place."""
    return shutil.copytree(smollm2.single, tmp_path_factory.mktemp("copy") / "smollm2")


@contextmanager
def exchanged(directory: Path, layer: int) -> Iterator[None]:
    """Gate and up of a layer exchanged in the header; no other byte moves, and it is put back afterwards."""
    path = directory / "model.safetensors"
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length)
        gate, up = (f'"model.layers.{layer}.mlp.{name}_proj.weight"'.encode() for name in ("gate", "up"))
        assert header.count(gate) == header.count(up) == 1
        file.seek(8)
        file.write(header.replace(gate, b"\0").replace(up, gate).replace(b"\0", up))
    try:
        yield
    finally:
        with path.open("r+b") as file:
            file.seek(8)
            file.write(header)


def in_pairs(tensors: dict[str, Tensor], kinds: tuple[str, ...]) -> dict[str, Tensor]:
    """Rows of queries and keys as a conversion leaves them that forgets to reorder them."""
    ends = tuple(f"{kind}.weight" for kind in kinds)
    return {name: into("pairs", tensor, 64) if name.endswith(ends) else tensor for name, tensor in tensors.items()}


def pairs_checkpoint(
    smollm2: Any, directory: Path, kinds: tuple[str, ...] = ("q_proj", "k_proj"), layers: Iterable[int] = LAYERS
) -> Path:
    directory.mkdir()
    tensors = load_file(smollm2.single / "model.safetensors")
    chosen = {name: tensor for name, tensor in tensors.items() if name.startswith(tuple(map(PREFIX.format, layers)))}
    save_file(tensors | in_pairs(chosen, kinds), directory / "model.safetensors")
    shutil.copy(smollm2.single / "config.json", directory)
    return directory


def test_its_rotary_order_is_certified_and_the_other_one_found(smollm2: Any, tmp_path: Path) -> None:
    published = audit_checkpoint(smollm2.single)
    seen = coverage(published, "attention/rotary-order")
    assert (seen.checked, seen.undecidable, seen.skipped) == (1, (), ())
    report = audit_checkpoint(pairs_checkpoint(smollm2, tmp_path / "pairs"))
    (finding,) = report.findings
    assert (finding.rule, finding.level, finding.certainty) == ("attention/rotary-order", "error", "statistical")
    assert finding.evidence["log10_p"] < -50
    assert abs(finding.evidence["z_other"]) < 3
    request = RepairRequest(checkpoint="pairs", output="repaired")
    answer = repair([tmp_path], request, output_root=tmp_path, device="cpu", progress=lambda *_: None)
    assert (answer.after.verdict, answer.after.findings) == ("pass", ())
    assert all("brought from pairs into halves" in edit.description for step in answer.steps for edit in step.edits)
    repaired, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "repaired", smollm2.single))
    assert all(torch.equal(repaired[name], tensor) for name, tensor in original.items())


@pytest.mark.parametrize("kind", ["q_proj", "k_proj"])
def test_queries_or_keys_alone_in_the_other_order_are_left_open(smollm2: Any, tmp_path: Path, kind: str) -> None:
    report = audit_checkpoint(pairs_checkpoint(smollm2, tmp_path / kind, kinds=(kind,)))
    assert (report.findings, report.verdict) == ((), "pass")
    (open_,) = coverage(report, "attention/rotary-order").undecidable
    assert "--reference" in open_.would_decide


@pytest.mark.parametrize("layers", [range(10), range(10, 20), range(15), range(0, 30, 2)])
def test_some_layers_in_the_other_order_are_inconclusive_and_told_beside_a_reference(
    smollm2: Any, tmp_path: Path, layers: range
) -> None:
    path = pairs_checkpoint(smollm2, tmp_path / "some", layers=layers)
    report = audit_checkpoint(path)
    seen = coverage(report, "attention/rotary-order")
    assert (report.findings, report.verdict, seen.checked) == ((), "inconclusive", 0)
    (open_,) = seen.undecidable
    assert "some layers may lie in the other order" in open_.reason
    compared = audit_checkpoint(path, AuditQuestion(reference=open_checkpoint(smollm2.single)))
    assert {finding.layer for finding in compared.findings} == set(layers)
    assert {finding.rule for finding in compared.findings} == {"attention/rotary-order"}


def test_one_layer_in_the_other_order_leaves_the_model_as_a_whole_as_declared(smollm2: Any, tmp_path: Path) -> None:
    report = audit_checkpoint(pairs_checkpoint(smollm2, tmp_path / "one", layers=[7]))
    seen = coverage(report, "attention/rotary-order")
    assert (report.findings, report.verdict, seen.checked) == ((), "pass", 1)


def test_as_published_it_is_silent_and_every_gate_is_certified(smollm2: Any) -> None:
    report = audit_checkpoint(smollm2.single, AuditQuestion(certify=True))
    assert (report.findings, report.verdict) == ((), "pass")
    assert coverage(report).checked == len(report.layers) == len(LAYERS)
    # No tensor carries the epsilon that a norm was run with.
    assert {entry.rule for entry in report.coverage if entry.undecidable} == {"norm/eps-mismatch"}
    metrics = [layer.metrics for layer in report.layers]
    level = math.log10(5e-6)
    for values in metrics:
        assert values["verdict"] == "as-named"
        assert as_number(values["gate_log10_p"]) <= -50
        assert as_number(values["up_draws_p"]) > 0.01
        for noise in ("up_log10_p", "paired_gate_log10_p"):
            assert as_number(values[noise]) > level
    assert sum(as_number(values["paired_up_log10_p"]) <= level for values in metrics) >= 28


def test_in_shards_it_is_the_same(smollm2: Any) -> None:
    single, sharded = (audit_checkpoint(directory) for directory in (smollm2.single, smollm2.sharded))
    assert sharded.findings == ()
    assert sharded.layers == single.layers
    for rule in ("index/missing-shard", "index/missing-tensor", "index/wrong-shard", "index/total-size"):
        assert coverage(sharded, rule).checked > 0


@pytest.mark.parametrize("layer", LAYERS)
def test_one_exchanged_layer_is_the_only_finding(layer: int, copy: Path) -> None:
    with exchanged(copy, layer):
        report = audit_checkpoint(copy)
    (finding,) = report.findings
    assert (finding.rule, finding.level, finding.certainty, finding.layer) == (RULE, "error", "statistical", layer)
    assert finding.evidence["log10_p"] <= -50
    assert finding.tensors == tuple(f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("gate", "up"))
    assert report.verdict == "fail"
    assert coverage(report).checked == len(LAYERS)


def test_exchanged_everywhere_every_layer_is_a_finding(smollm2: Any, tmp_path: Path) -> None:
    plant_swap()(smollm2.sharded, tmp_path / "swapped", LAYERS)
    report = audit_checkpoint(tmp_path / "swapped")
    assert [(finding.rule, finding.layer) for finding in report.findings] == [(RULE, layer) for layer in LAYERS]


def test_random_weights_of_the_same_shapes_are_undecidable(smollm2: Any, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        entry.name: torch.ones(entry.shape, dtype=torch.bfloat16)
        if len(entry.shape) == 1
        else (0.02 * torch.randn(entry.shape, generator=generator)).to(torch.bfloat16)
        for entry in open_checkpoint(smollm2.single).entries.values()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copyfile(smollm2.single / "config.json", tmp_path / "config.json")
    report = audit_checkpoint(tmp_path)
    assert (report.findings, report.verdict) == ((), "inconclusive")
    assert [entry.layer for entry in coverage(report).undecidable] == list(LAYERS)
    assert all("untrained" in entry.reason for entry in coverage(report).undecidable)


def test_an_epsilon_of_another_engine_is_weighed_by_the_embedding(smollm2: Any) -> None:
    """1e-5 against 1e-6 moves the first norm by at most 0.08 %: the rows' mean squares run from 0.0056 to 0.0975."""
    against = {"llama.attention.layer_norm_rms_epsilon": 1e-6}
    report = audit_checkpoint(smollm2.single, AuditQuestion(rules=("config/eps-conflict",), against=against))
    (finding,) = report.findings
    sensitivity = finding.evidence["sensitivity"]
    assert sensitivity["rows"] == 49152
    assert sensitivity["mean_square"]["least"] == pytest.approx(0.0056, abs=5e-5)  # given to two digits
    assert sensitivity["mean_square"]["most"] == pytest.approx(0.0975, abs=5e-5)
    assert sensitivity["relative_change"]["most"] == pytest.approx(8e-4, rel=0.02)


def as_number(value: object) -> float:
    assert isinstance(value, float)
    return value


def plant_swap() -> Callable[..., object]:
    """The example's own command, which is no package."""
    spec = importlib.util.spec_from_file_location("plant_swap", ROOT / "examples" / "plant_swap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.plant_swap
