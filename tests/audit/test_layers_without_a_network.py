"""A row of somebody's own whose later layers have no feed-forward network: read, audited and refused by name."""

from pathlib import Path
from typing import Any

import pytest
from glassblock_client.cli import app as command_line
from plants import drop, healthy_checkpoint
from typer.testing import CliRunner, Result

ROW = """{"like": "llama",
 "layer_variants": [{"when": {"if": "from-layer", "first": {"keys": ["first_without"], "default": 1}},
                     "changes": {"feed_forward": null}}]}"""


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GLASSBLOCK_DEVICE", "cpu")
    directory = tmp_path / "tiny"
    healthy_checkpoint("llama", directory)
    for part in ("gate", "up", "down"):
        drop(f"model.layers.1.mlp.{part}_proj.weight")(directory)
    (tmp_path / "row.json").write_text(ROW)
    return directory


def invoke(checkpoint: Path, *arguments: Any) -> Result:
    row = checkpoint.parent / "row.json"
    words = [arguments[0], checkpoint, *arguments[1:], "--family-file", row]
    return CliRunner().invoke(command_line, [str(word) for word in words])


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--layer", 1, "--sample", 4),
        ("likelihood", "--token-ids", "1,2,3"),
    ],
    ids=lambda arguments: " ".join(str(word) for word in arguments),
)
def test_what_needs_the_network_says_that_there_is_none(checkpoint: Path, arguments: tuple[Any, ...]) -> None:
    result = invoke(checkpoint, *arguments)
    assert result.exit_code == 2, result.output
    assert "layer 1 has no feed-forward network" in " ".join(result.stderr.split())


def test_the_other_layers_run(checkpoint: Path) -> None:
    assert invoke(checkpoint, "run", "--layer", 0, "--sample", 4).exit_code == 0


def test_an_audit_finds_nothing(checkpoint: Path) -> None:
    result = invoke(checkpoint, "audit", "--format", "json")
    assert '"findings":[]' in result.stdout.replace(" ", ""), result.output
