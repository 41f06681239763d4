"""Numbers for tables and pictures, and the places of tensors, against the files themselves."""

from pathlib import Path

import pytest
import torch
from glassblock.audit.audit import audit_checkpoint
from glassblock.audit.evidence import GainMoments
from glassblock.audit.layer_numbers import gain_moments
from glassblock.wire.audits import Finding, Report
from makers import tiny_checkpoint, write_weights
from safetensors.torch import load_file
from torch import Tensor

LAYER = "model.layers.1."


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {
        name: tensor.double() for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()
    }


def finding_of(report: Report, rule: str) -> Finding:
    (finding,) = (finding for finding in report.findings if finding.rule == rule)
    return finding


@pytest.mark.parametrize(("family", "offset"), [("llama", 0.0), ("gemma3", 1.0)])
def test_gains_are_told_as_they_multiply(tmp_path: Path, family: str, offset: float):
    directory = tiny_checkpoint(family, tmp_path / "tiny")
    gain = tensors_of(directory)[f"{LAYER}input_layernorm.weight"] + offset
    metrics = audit_checkpoint(directory).layers[1].metrics
    # The moments are summed in float64, as here; the order of the sum may differ.
    assert metrics["norm_attn_in_gain_rms"] == pytest.approx(float(gain.square().mean().sqrt()), rel=1e-12)
    assert metrics["norm_attn_in_gain_least"] == float(gain.min())
    assert metrics["norm_attn_in_gain_most"] == float(gain.max())


def test_epsilons_stand_beside_their_norms_and_the_first_norm_has_its_rows(tmp_path: Path):
    directory = tiny_checkpoint("llama", tmp_path / "tiny", config={"rms_norm_eps": 3e-6})
    first, *others = (layer.metrics for layer in audit_checkpoint(directory).layers)
    assert {metrics["norm_ffn_in_eps"] for metrics in (first, *others)} == {3e-6}
    rows = tensors_of(directory)["model.embed_tokens.weight"].square().mean(-1)
    # The audit takes the mean square in float32.
    assert first["norm_attn_in_input_mean_square_least"] == pytest.approx(float(rows.min()), rel=1e-5)
    assert first["norm_attn_in_input_mean_square_most"] == pytest.approx(float(rows.max()), rel=1e-5)
    assert not [key for metrics in others for key in metrics if "input_mean_square" in key]


def test_lengths_are_those_of_rows_and_of_columns_of_down(tmp_path: Path):
    directory = tiny_checkpoint("llama", tmp_path / "tiny")
    tensors = tensors_of(directory)
    metrics = audit_checkpoint(directory).layers[1].metrics
    for what, lengths in (
        ("gate_row_norm", tensors[f"{LAYER}mlp.gate_proj.weight"].norm(dim=1)),
        ("up_row_norm", tensors[f"{LAYER}mlp.up_proj.weight"].norm(dim=1)),
        ("down_column_norm", tensors[f"{LAYER}mlp.down_proj.weight"].norm(dim=0)),
    ):
        told = [metrics[f"{what}_{end}"] for end in ("least", "median", "most")]
        expected = [float(lengths.min()), float(lengths.median()), float(lengths.max())]
        assert told == pytest.approx(expected, rel=1e-12)  # both in float64


def test_a_family_without_a_gate_has_the_numbers_of_its_norms(tmp_path: Path):
    layers = audit_checkpoint(tiny_checkpoint("gpt2", tmp_path / "tiny")).layers
    assert len(layers) > 1
    assert all("norm_attn_in_gain_rms" in layer.metrics and "gate_z" not in layer.metrics for layer in layers)


def test_moments_of_pieces_are_those_of_the_whole():
    whole = torch.linspace(-1, 3, 11, dtype=torch.float64)
    pieces = [gain_moments(piece, piece, offset=1.0) for piece in whole.split([4, 7])]
    joined = gain_moments(whole, whole, offset=1.0)
    first, second = pieces
    assert first.joined(second) == GainMoments(11, pytest.approx(joined.square_sum), 0.0, 4.0)  # a sum in another order


@pytest.mark.parametrize("shards", [1, 3])
def test_a_finding_says_where_the_bytes_of_its_tensors_lie(tmp_path: Path, shards: int):
    name = f"{LAYER}mlp.up_proj.weight"
    directory = tiny_checkpoint("llama", tmp_path / "tiny", shards=shards)
    broken = tensors_of(directory)[name].float()
    broken[0, 0] = torch.nan
    tiny_checkpoint("llama", directory, shards=shards, tensors={name: broken})
    (place,) = finding_of(audit_checkpoint(directory), "tensor/non-finite").locations
    assert place.tensor == name
    data = (directory / place.file).read_bytes()[place.byte_offset : place.byte_offset + place.byte_length]
    assert data == broken.numpy().tobytes()


def test_a_tensor_in_two_files_lies_in_two_places(tmp_path: Path):
    directory = tiny_checkpoint("llama", tmp_path / "tiny", shards=2)
    first, second = sorted(directory.glob("*.safetensors"))
    name = "model.norm.weight"
    holder, other = (first, second) if name in load_file(first) else (second, first)
    copied = load_file(other) | {name: load_file(holder)[name] + 1}
    (tmp_path / "one").mkdir()
    write_weights(tmp_path / "one", copied)
    (tmp_path / "one" / "model.safetensors").replace(other)
    report = audit_checkpoint(directory)
    places = [place.file for finding in report.findings for place in finding.locations if place.tensor == name]
    assert set(places) == {first.name, second.name}


def test_a_finding_about_what_is_in_no_file_has_no_place(tmp_path: Path):
    directory = tiny_checkpoint("llama", tmp_path / "tiny", tensors={f"{LAYER}mlp.up_proj.weight": None})
    finding = finding_of(audit_checkpoint(directory), "ffn/missing-tensor")
    assert finding.tensors == (f"{LAYER}mlp.up_proj.weight",)
    assert finding.locations == ()
