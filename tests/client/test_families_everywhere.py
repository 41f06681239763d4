"""Whatever opens a checkpoint can be told its family: by name, by a file of one's own, over HTTP as well."""

import importlib
import inspect
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from glassblock.api.entry import connect
from glassblock.errors import InvalidValue, UnknownFamily
from glassblock.wire.endpoints import ENDPOINTS
from glassblock.wire.jacobians import JacobiansRequest
from glassblock_client import Client, Sample
from glassblock_client.cli.app import COMMANDS
from glassblock_client.cli.app import app as command_line
from makers import tiny_checkpoint
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

ROW = {"like": "llama", "name": "mine"}
X = np.random.default_rng(0).standard_normal((6, 48), dtype=np.float32)


@pytest.fixture(scope="module")
def nameless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a config, which no family can be read from."""
    folder = tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny")
    (folder / "config.json").unlink()
    (folder.parent / "row.json").write_text(json.dumps(ROW))
    return folder


@pytest.fixture(scope="module")
def client(nameless: Path) -> Iterator[Client]:
    with connect(roots=[nameless.parent], device="cpu") as transport:
        yield Client("http://glassblock", transport=transport)


def invoke(nameless: Path, *words: object) -> Result:
    def opened(**given: Any) -> AbstractContextManager[httpx.BaseTransport]:
        return connect(roots=list(given["roots"]), device="cpu")

    command, *rest = (str(word) for word in words)
    return CliRunner().invoke(
        command_line,
        [command, str(nameless), *rest],
        obj=opened,
        env={"GLASSBLOCK_URL": None, "GLASSBLOCK_DEVICE": None, "COLUMNS": "100", "TERM": "dumb"},
    )


def test_every_command_that_opens_a_checkpoint_takes_a_family_by_name_and_by_file() -> None:
    opening = 0
    for row in COMMANDS.values():
        function = getattr(importlib.import_module(f"glassblock_client.cli.{row.module}"), row.name)
        parameters = inspect.signature(function).parameters
        if "path" in parameters:
            opening += 1
            assert {"family", "family_file"} <= set(parameters), row.name
    assert opening >= 8


def test_every_request_about_a_checkpoint_takes_a_family_by_name_and_by_row() -> None:
    asking = [row for row in ENDPOINTS if row.method == "POST" and "checkpoint" in row.request.model_fields]
    assert len(asking) >= 9
    for endpoint in asking:
        assert {"family", "family_row"} <= set(endpoint.request.model_fields), endpoint.name


@pytest.mark.parametrize("family", [("--family", "llama"), ("--family-file", "row.json")], ids=["name", "file"])
def test_a_checkpoint_without_a_config_is_looked_at_by_every_command(
    nameless: Path, client: Client, tmp_path: Path, family: tuple[str, str]
) -> None:
    given = (family[0], nameless.parent / family[1]) if family[0] == "--family-file" else family
    run = client.run_block("tiny", 1, x=X, family="llama", return_tensors=True)
    captures = tmp_path / "captures.safetensors"
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in run.tensors.items()}, captures)
    explained = invoke(nameless, "explain", "--captures", captures, "--layer", 1, *given)
    assert explained.exit_code == 0, explained.output
    assert "as-declared" in explained.stdout
    every = invoke(nameless, "jacobian", "--sample", 2, "--format", "json", *given)
    assert every.exit_code == 0, every.output
    assert [layer["layer"] for layer in json.loads(every.stdout)["layers"]] == [0, 1]
    assert len([note for note in json.loads(every.stdout)["notes"] if "rows" in note]) == 1
    one = invoke(nameless, "jacobian", "--sample", 2, "--layers", 1, "--format", "json", *given)
    assert json.loads(one.stdout)["layers"] == json.loads(every.stdout)["layers"][1:]
    counted = invoke(nameless, "budget", "--format", "json", *given)
    assert json.loads(counted.stdout)["d_model"] == 48, counted.output


@pytest.mark.parametrize(
    "words",
    [
        ("jacobian", "--sample", 2),
        ("jacobian", "--sample", 2, "--layers", 0),
        ("budget",),
    ],
)
def test_without_a_family_it_is_refused_with_what_to_do(nameless: Path, words: tuple[object, ...]) -> None:
    refused = invoke(nameless, *words)
    assert refused.exit_code == 2
    assert "--family" in refused.stderr


def test_over_http_the_same_rows_give_the_same_answers(client: Client) -> None:
    sample = Sample(rows=3)
    by_name = client.jacobians("tiny", family="llama", sample=sample).answer
    by_row = client.jacobians("tiny", [0, 1], family_row=ROW, sample=sample).answer
    assert [layer.tokens for layer in by_name.layers] == [layer.tokens for layer in by_row.layers]
    assert by_row.family == "mine"
    assert (
        client.budgets(checkpoint="tiny", family_row=ROW).d_ff == client.budgets(checkpoint="tiny", family="llama").d_ff
    )
    plan = client.plan("jacobians", {"checkpoint": "tiny", "family_row": ROW, "sample": {"rows": 3}})
    whole = client.plan("jacobians", {"checkpoint": "tiny", "layers": [0, 1], "family_row": ROW, "sample": {"rows": 3}})
    assert plan.flops == whole.flops > 0


def test_an_empty_list_of_layers_is_no_list_that_was_left_out(client: Client) -> None:
    with pytest.raises(InvalidValue, match="layers: 0 entries came"):
        client.jacobians("tiny", [], family="llama", sample=Sample(rows=1))
    assert JacobiansRequest(checkpoint="m").layers == ()


def test_a_family_without_a_checkpoint_is_refused(client: Client) -> None:
    with pytest.raises(InvalidValue, match="belongs to a checkpoint"):
        client.budgets(d_model=4, d_ff=8, kind="plain", family="llama")
    with pytest.raises(UnknownFamily):
        client.budgets(checkpoint="tiny", family="lama")
