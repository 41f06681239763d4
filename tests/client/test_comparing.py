"""`--against` and `--reference` at the command line and over HTTP."""

import json
from pathlib import Path

import pytest
from glassblock.api.entry import connect
from glassblock.errors import InvalidValue, UnknownCheckpoint
from glassblock_client import Client
from glassblock_client.cli.app import app as command_line
from plants import edit_json, healthy_checkpoint, rename
from typer.testing import CliRunner, Result

GATE, UP = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint with gate and up exchanged, and its source under the same name elsewhere."""
    source = healthy_checkpoint("llama", tmp_path / "source" / "model")
    here = healthy_checkpoint("llama", tmp_path / "converted" / "model")
    rename(GATE, UP)(here)
    return here, source


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(command_line, ["audit", *map(str, arguments)])


def test_a_reference_of_the_same_name_elsewhere(pair: tuple[Path, Path]) -> None:
    here, source = pair
    result = invoke(here, "--reference", source, "--format", "json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert [(found["rule"], found["certainty"]) for found in report["findings"]] == [("ffn/gate-up-swapped", "proved")]
    assert report["reference"]["relation"] == "function"
    result = invoke(source, "--reference", source, "--format", "json")
    assert (result.exit_code, json.loads(result.stdout)["reference"]["relation"]) == (0, "identical")


def test_a_folder_stands_for_its_config(pair: tuple[Path, Path], tmp_path: Path) -> None:
    _, source = pair
    assert invoke(source, "--against", source).exit_code == 0
    other = healthy_checkpoint("llama", tmp_path / "other")
    edit_json("config.json", rms_norm_eps=1e-6)(other)
    result = invoke(source, "--against", other, "--format", "json")
    (finding,) = json.loads(result.stdout)["findings"]
    assert (result.exit_code, finding["rule"]) == (1, "config/eps-conflict")
    refused = invoke(source, "--against", tmp_path)
    assert refused.exit_code == 2
    assert "config.json" in refused.stderr


def test_over_http(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with (
        connect(roots=[tmp_path], device="cpu") as transport,
        Client("http://glassblock", transport=transport) as client,
    ):
        report = client.audit_checkpoint("converted/model", reference="source/model")
        assert report.reference is not None
        assert (report.reference.checkpoint, report.reference.relation) == ("source/model", "function")
        with pytest.raises(UnknownCheckpoint) as absent:
            client.audit_checkpoint("converted/model", reference="nowhere")
        assert absent.value.field == "reference"
        with pytest.raises(InvalidValue) as refused:
            client.audit_checkpoint("source/model", against={"colour": "red"})
        assert refused.value.field == "against"
        assert len(refused.value.known) == 6


def test_several_references_tell_what_a_merge_is_made_of(pair: tuple[Path, Path], tmp_path: Path) -> None:
    here, source = pair
    result = invoke(here, "--reference", here, "--reference", source, "--format", "json")
    merge = json.loads(result.stdout)["merge"]
    assert len(merge["references"]) == 2
    (copied,) = [group for group in merge["groups"] if group["kind"] == "copy"]
    assert copied["tensors"] == 2  # gate and up, which the two hold exchanged
    told = invoke(here, "--reference", here, "--reference", source)
    assert "beside" in told.stdout
    with (
        connect(roots=[tmp_path], device="cpu") as transport,
        Client("http://glassblock", transport=transport) as client,
    ):
        report = client.audit_checkpoint("converted/model", reference=["source/model", "converted/model"])
        assert report.reference is None
        assert report.merge is not None
        assert report.merge.references == ("source/model", "converted/model")
        one = client.audit_checkpoint("converted/model", reference=["source/model"])
        assert (one.merge, one.reference is not None) == (None, True)


def test_one_file_is_titled_with_its_folder(pair: tuple[Path, Path]) -> None:
    source, _ = pair
    told = json.loads(invoke(source / "model.safetensors", "--format", "json").stdout)
    assert told["checkpoint"]["path"] == f"{source.name}/model.safetensors"
