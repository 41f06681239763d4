"""`glassblock explain`: files in, a verdict out, and its exit status."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from glassblock.api.entry import connect
from glassblock_client import Client, Overrides
from glassblock_client.cli.app import app as command_line
from makers import tiny_checkpoint
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

X = np.random.default_rng(0).standard_normal((40, 48), dtype=np.float32)


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "KEY", "DEVICE"):
        monkeypatch.delenv(f"GLASSBLOCK_{name}", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "dumb")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def transport(model: Path) -> Iterator[httpx.BaseTransport]:
    with connect(roots=[model.parent], device="cpu") as transport:
        yield transport


@pytest.fixture
def stages(transport: httpx.BaseTransport) -> Any:
    client = Client("http://glassblock", transport=transport)

    def captured(layer: int, *only: str, **overrides: Any) -> dict[str, np.ndarray]:
        run = client.run_block("tiny", layer, x=X, return_tensors=True, overrides=Overrides(**overrides))
        return {name: tensor for name, tensor in run.tensors.items() if not only or name in only}

    return captured


def explain(model: Path, captures: Path, *arguments: object) -> Result:
    def opened(**given: Any) -> AbstractContextManager[httpx.BaseTransport]:
        return connect(roots=list(given["roots"]), device="cpu")

    words = ["explain", str(model), "--captures", str(captures), *(str(argument) for argument in arguments)]
    return CliRunner().invoke(command_line, words, obj=opened)


def saved(folder: Path, name: str, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: np.ascontiguousarray(tensor) for key, tensor in tensors.items()}, folder / name)
    return folder / name


def test_as_declared_is_0(model: Path, stages: Any, tmp_path: Path) -> None:
    result = explain(model, saved(tmp_path, "captures.safetensors", stages(1)), "--layer", 1)
    assert result.exit_code == 0, result.output
    assert "as-declared" in result.stdout
    assert "nearer in" not in result.stdout  # nothing differs, so nothing would stand there
    lines = result.stdout.splitlines()
    (stages_from,) = [number for number, line in enumerate(lines) if "replayed from" in line]
    assert lines[stages_from - 1] == ""


def test_a_layer_that_was_not_recorded_is_told_which_are(model: Path, stages: Any, tmp_path: Path) -> None:
    file = saved(tmp_path, "captures.safetensors", {f"layers.1.{name}": one for name, one in stages(1).items()})
    assert "it holds layer 1\n" in explain(model, file, "--layer", 0).stderr


def test_a_mistake_is_1_and_named(model: Path, stages: Any, tmp_path: Path) -> None:
    result = explain(model, saved(tmp_path, "captures.safetensors", stages(1, swap=True)), "--layer", 1)
    assert result.exit_code == 1, result.output
    assert "gate and up are exchanged" in result.stdout


def test_several_alike_are_3_and_say_what_would_decide(model: Path, stages: Any, tmp_path: Path) -> None:
    file = saved(tmp_path, "captures.safetensors", stages(1, "x", "up", placement="post"))
    result = explain(model, file, "--layer", 1)
    assert result.exit_code == 3, result.output
    assert "would decide" in result.stdout


def test_of_several_tokens_that_would_decide_the_quietest_is_told(model: Path, stages: Any, tmp_path: Path) -> None:
    """Of loud tokens, as of trained models: no epsilon moves a bit of them."""
    loud = {name: (tensor * 1000).astype(np.float32) for name, tensor in stages(1, "x").items()}
    norm = client_normed(model, loud["x"])
    file = saved(tmp_path, "captures.safetensors", loud | {"normed": norm})
    answer = json.loads(explain(model, file, "--layer", 1, "--format", "json").stdout)
    needed = [decider["needed"] for decider in answer["would_decide"] if decider["by"] == "token"]
    assert len(needed) > 1, "nothing to merge"
    told = " ".join(explain(model, file, "--layer", 1).stdout.split())
    assert told.count("capture a token whose mean square of x") == 1
    assert f"mean square of x is below {min(needed):.2g}" in told


def client_normed(model: Path, x: np.ndarray) -> np.ndarray:
    with connect(roots=[model.parent], device="cpu") as transport:
        run = Client("http://glassblock", transport=transport).run_block("tiny", 1, x=x, return_tensors=True)
    return run.tensors["normed"]


def test_nothing_explains_noise_3(model: Path, stages: Any, tmp_path: Path) -> None:
    noise = {name: tensor[::-1] + 1 for name, tensor in stages(1).items()}
    result = explain(model, saved(tmp_path, "captures.safetensors", noise), "--layer", 1)
    assert result.exit_code == 3, result.output
    assert "unexplained" in result.stdout


def test_json_is_the_answer(model: Path, stages: Any, tmp_path: Path) -> None:
    file = saved(tmp_path, "captures.safetensors", stages(1, swap=True))
    result = explain(model, file, "--layer", 1, "--format", "json")
    answer = json.loads(result.stdout)
    assert (answer["verdict"], answer["ranked"][0]["departures"][0]["factor"]) == ("explained", "swap")


RECORDINGS = {
    "a file for each layer": lambda folder, layers: [
        saved(folder, f"layer_{number:02}.safetensors", tensors) for number, tensors in layers.items()
    ],
    "one file with names": lambda folder, layers: saved(
        folder,
        "all.safetensors",
        {f"layers.{number}.{name}": tensor for number, tensors in layers.items() for name, tensor in tensors.items()},
    ),
    "files of stages": lambda folder, layers: [
        saved(folder, f"{name}.safetensors", {f"layers.{number}.{name}": layers[number][name] for number in layers})
        for name in layers[0]
    ],
}


@pytest.mark.parametrize("record", RECORDINGS.values(), ids=RECORDINGS)
def test_the_first_layer_that_departs_is_found(model: Path, stages: Any, tmp_path: Path, record: Any) -> None:
    record(tmp_path / "recorded", {0: stages(0), 1: stages(1, swap=True)})
    result = explain(model, tmp_path / "recorded")
    assert result.exit_code == 1, result.output
    assert "layer 0: as declared; the first that departs is layer 1; " in result.stdout
    told = json.loads(explain(model, tmp_path / "recorded", "--format", "json").stdout)
    assert told["first_departure"] == 1
    assert [layer["verdict"] for layer in told["layers"]] == ["as-declared", "explained"]
    assert explain(model, tmp_path / "recorded", "--layer", 0).exit_code == 0


def test_all_layers_as_declared_is_0(model: Path, stages: Any, tmp_path: Path) -> None:
    for layer in (0, 1):
        saved(tmp_path / "recorded", f"layer-{layer}.safetensors", stages(layer))
    result = explain(model, tmp_path / "recorded")
    assert result.exit_code == 0, result.output
    assert "all 2 recorded layers are as declared" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[:2] for row in rows if row and row[0] in {"0", "1"}] == [["0", "40"], ["1", "40"]]
    assert "would decide" not in result.stdout


def test_files_that_cannot_be_used_are_2_and_named(model: Path, stages: Any, tmp_path: Path) -> None:
    good = stages(1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.safetensors").write_bytes(b"\x00\x01")
    (tmp_path / "nothing.safetensors").write_bytes(b"")
    (tmp_path / "text.txt").write_text("no")
    cases = {
        "does not exist": (tmp_path / "absent.safetensors", ["--layer", 1]),
        "holds no .safetensors file": (tmp_path / "empty", []),
        "too few for a safetensors header": (tmp_path / "torn.safetensors", ["--layer", 1]),
        "is empty": (tmp_path / "nothing.safetensors", ["--layer", 1]),
        "is no .safetensors file": (tmp_path / "text.txt", ["--layer", 1]),
        "is no stage": (saved(tmp_path, "odd.safetensors", {"gates": good["gate"]}), ["--layer", 1]),
        "does not say of which layer": (saved(tmp_path, "plain.safetensors", good), []),
        "holds no stage of layer 0": (saved(tmp_path, "layer_1.safetensors", good), ["--layer", 0]),
        "holds no tensor": (saved(tmp_path, "none.safetensors", {}), ["--layer", 1]),
        "layer 9 is out of range": (saved(tmp_path, "layer_9.safetensors", good), []),
    }
    for message, (captures, arguments) in cases.items():
        result = explain(model, captures, *arguments)
        assert result.exit_code == 2, message
        assert message in result.output
        assert "Traceback" not in result.output
