"""`glassblock audit --captures` and the request behind it, with the service in the same process."""

import json
from pathlib import Path

import numpy as np
import pytest
from glassblock.api.entry import connect
from glassblock.errors import InvalidValue, NotFound
from glassblock_client import Client, Overrides
from glassblock_client.cli.app import app as command_line
from makers import Tiny, tiny_checkpoint
from plants import healthy_checkpoint, rename
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

D = Tiny().hidden


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "llama")


def capture(model: Path, folder: Path, *, swapped: tuple[int, ...] = ()) -> Path:
    folder.mkdir(parents=True)
    x = np.random.default_rng(1).standard_normal((40, D), dtype=np.float32)
    with connect(roots=[model.parent], device="cpu") as transport:
        client = Client("http://glassblock", transport=transport)
        for layer in (0, 1):
            overrides = Overrides(swap=layer in swapped)
            run = client.run_block(model.name, layer, x=x, overrides=overrides, return_tensors=True)
            save_file(dict(run.tensors), folder / f"layer_{layer}.safetensors")
    return folder


def audit(*arguments: object) -> Result:
    return CliRunner().invoke(command_line, ["audit", *(str(argument) for argument in arguments)])


def test_the_layer_and_the_mistake_are_named(model: Path, tmp_path: Path) -> None:
    folder = capture(model, tmp_path / "recorded", swapped=(1,))
    result = audit(model, "--captures", folder, "--format", "json")
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    (finding,) = (found for found in report["findings"] if found["level"] == "error")
    assert (finding["rule"], finding["layer"], finding["certainty"]) == ("ffn/gate-up-swapped", 1, "proved")
    assert (report["captures"]["first_departure"], report["captures"]["captures"]) == (1, "recorded")
    text = audit(model, "--captures", folder / "layer_1.safetensors")
    assert text.exit_code == 1
    assert "gate and up are exchanged" in " ".join(text.stdout.split())


def test_captures_as_declared_pass_where_the_weights_alone_say_nothing(model: Path, tmp_path: Path) -> None:
    assert audit(model).exit_code == 3
    result = audit(model, "--captures", capture(model, tmp_path / "recorded"))
    assert result.exit_code == 0, result.output


def test_captures_of_the_model_as_it_was_prove_what_its_weights_show_and_keep_the_repair(tmp_path: Path) -> None:
    directory = healthy_checkpoint("llama", tmp_path / "llama")
    folder = capture(directory, tmp_path / "recorded")
    rename(*(f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")))(directory)
    told = audit(directory, "--captures", folder)
    words = " ".join(told.stdout.split())
    assert told.exit_code == 1
    assert "has the common direction of a gate" in words
    assert "and so say captures of layer 1" in words
    assert "to repair the finding" in words
    assert "glassblock fix" in words


def test_captures_that_answer_nothing_are_inconclusive(model: Path, tmp_path: Path) -> None:
    x = np.ones((3, D), np.float32)
    save_file({"x": x, "normed": x + 1}, tmp_path / "layer_0.safetensors")
    assert audit(model, "--captures", tmp_path).exit_code == 3
    assert audit(model, "--captures", tmp_path, "--allow-inconclusive").exit_code == 0


def test_captures_that_are_not_there_or_no_captures_are_usage(model: Path, tmp_path: Path) -> None:
    assert audit(model, "--captures", tmp_path / "nowhere").exit_code == 2
    (tmp_path / "empty").mkdir()
    result = audit(model, "--captures", tmp_path / "empty")
    assert result.exit_code == 2
    assert "holds no .safetensors file" in result.output


def test_the_service_refuses_at_once_what_no_audit_could_answer(model: Path, tmp_path: Path) -> None:
    outside = capture(model, tmp_path / "outside" / "recorded")
    with connect(roots=[model.parent], device="cpu") as transport:
        client = Client("http://glassblock", transport=transport)
        for name, error in (("nowhere", NotFound), (model.name, InvalidValue)):
            with pytest.raises(error) as refused:
                client.start_audit(model.name, captures=name)
            assert refused.value.field == "captures"
        with pytest.raises(Exception, match="roots") as refused_too:
            client.start_audit(model.name, captures=f"../{outside.parent.name}/recorded")
        assert getattr(refused_too.value, "field", None) == "captures"
