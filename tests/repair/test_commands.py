"""`glassblock fix` and `glassblock selftest`, on files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from glassblock.audit.audit import audit_checkpoint
from glassblock.checkpoint.in_place import JOURNAL
from glassblock_client.cli import app as command_line
from plants import SINGLE, drop, edit_entry, edit_json, healthy_checkpoint, rename
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

GATE, UP = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "KEY"):
        monkeypatch.delenv(f"GLASSBLOCK_{name}", raising=False)
    monkeypatch.setenv("GLASSBLOCK_DEVICE", "cpu")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "dumb")


@pytest.fixture
def swapped(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    healthy_checkpoint("llama", directory)
    rename(GATE, UP)(directory)
    (directory / "tokenizer.json").write_text("{}")
    (directory / ".hidden").write_text("")
    return directory


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(command_line, [str(argument) for argument in arguments])


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_dry_run_shows_the_patch_and_writes_nothing(swapped: Path) -> None:
    before = names(swapped)
    result = invoke("fix", swapped, "--dry-run")
    assert result.exit_code == 0
    assert f"exchanged in the header: {GATE} and {UP}" in " ".join(result.stdout.split())
    assert "nothing was written" in result.stdout
    assert (names(swapped), names(swapped.parent)) == (before, ["tiny"])


def test_a_repaired_folder_has_all_files_and_passes(swapped: Path) -> None:
    result = invoke("fix", swapped, "--output", swapped.parent / "repaired", "--format", "json")
    assert result.exit_code == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    assert (answer["before"]["verdict"], answer["after"]["verdict"]) == ("fail", "pass")
    assert names(swapped.parent / "repaired") == ["config.json", SINGLE, "tokenizer.json"]
    assert audit_checkpoint(swapped.parent / "repaired").findings == ()
    assert names(swapped.parent) == ["repaired", "tiny"]


@pytest.mark.parametrize("link", [False, True])
def test_nothing_is_written_into_the_checkpoint_itself(swapped: Path, link: bool) -> None:
    before, inside = names(swapped), swapped
    if link:
        inside = swapped.parent / "link"
        inside.symlink_to(swapped)
    result = invoke("fix", swapped, "--output", inside / "repaired")
    assert result.exit_code == 2
    assert "inside the checkpoint" in " ".join(result.stderr.split())
    assert names(swapped) == before


def test_one_file_is_repaired_with_its_config(swapped: Path) -> None:
    result = invoke("fix", swapped / SINGLE, "--output", swapped.parent / "repaired")
    assert result.exit_code == 0, result.stderr
    assert names(swapped.parent / "repaired") == ["config.json", SINGLE]
    assert audit_checkpoint(swapped.parent / "repaired").findings == ()


def test_in_place_only_headers_and_config_change_and_what_they_were_is_kept(swapped: Path) -> None:
    edit_json("config.json", vocab_size=97)(swapped)
    before = {path.name: path.read_bytes() for path in swapped.iterdir()}
    result = invoke("fix", swapped, "--in-place")
    assert result.exit_code == 0, result.stderr
    assert audit_checkpoint(swapped).findings == ()
    length = 8 + int.from_bytes(before[SINGLE][:8], "little")
    backups = {name: (swapped / f"{name}.glassblock-backup").read_bytes() for name in (SINGLE, "config.json")}
    assert backups == {SINGLE: before[SINGLE][:length], "config.json": before["config.json"]}
    assert (swapped / SINGLE).read_bytes()[length:] == before[SINGLE][length:]
    again = invoke("fix", swapped, "--in-place")
    assert (again.exit_code, "nothing to repair" in again.stdout) == (0, True)


def test_in_place_refuses_to_move_data_and_to_touch_links(swapped: Path) -> None:
    with (swapped / SINGLE).open("ab") as file:
        file.write(bytes(8))
    before = (swapped / SINGLE).read_bytes()
    result = invoke("fix", swapped, "--in-place")
    assert (result.exit_code, "--output" in result.stderr) == (2, True)
    linked = swapped.parent / "linked"
    linked.mkdir()
    shutil.copy(swapped / "config.json", linked)
    (linked / SINGLE).hardlink_to(swapped / SINGLE)
    result = invoke("fix", linked, "--in-place", "--rules", "ffn/gate-up-swapped")
    assert result.exit_code == 2
    assert (swapped / SINGLE).read_bytes() == before
    assert names(linked) == ["config.json", SINGLE]


def test_a_change_in_place_that_was_broken_off_is_told_and_then_undone(swapped: Path) -> None:
    header = (swapped / SINGLE).read_bytes()[: 8 + int.from_bytes((swapped / SINGLE).read_bytes()[:8], "little")]
    (swapped / f"{SINGLE}.glassblock-backup").write_bytes(header)
    with (swapped / SINGLE).open("r+b") as file:
        file.seek(len(header) // 2)
        file.write(b" " * 9)
    (swapped / JOURNAL).write_text(json.dumps({SINGLE: "header"}))
    refused = invoke("fix", swapped, "--dry-run")
    assert (refused.exit_code, "broken off" in refused.stderr) == (2, True)
    result = invoke("fix", swapped, "--in-place")
    assert result.exit_code == 0, result.stderr
    assert "was undone first" in result.stdout
    assert audit_checkpoint(swapped).findings == ()
    assert not (swapped / JOURNAL).exists()


def test_what_cannot_be_repaired_is_told_and_remains(swapped: Path) -> None:
    edit_entry("model.layers.0.mlp.down_proj.weight", (0, 0), float("nan"))(swapped)
    result = invoke("fix", swapped, "--output", swapped.parent / "partly")
    assert result.exit_code == 1
    assert "not repaired:" in result.stdout
    assert [finding.rule for finding in audit_checkpoint(swapped.parent / "partly").findings] == ["tensor/non-finite"]
    only = invoke("fix", swapped, "--output", swapped.parent / "none", "--rules", "tensor/non-finite")
    assert only.exit_code == 2
    assert names(swapped.parent) == ["partly", "tiny"]


def test_a_missing_tensor_is_not_made_up(swapped: Path) -> None:
    rename(GATE, UP)(swapped)
    drop("model.norm.weight")(swapped)
    result = invoke("fix", swapped, "--output", swapped.parent / "out")
    assert result.exit_code == 2
    assert "cannot be made up" in result.stdout
    assert names(swapped.parent) == ["tiny"]


def test_a_reference_decides_what_the_file_alone_does_not(swapped: Path) -> None:
    rename(GATE, UP)(swapped)
    good = shutil.copytree(swapped, swapped.parent / "good")
    edit_entry("model.norm.weight", (slice(None),), 3.0)(good)
    edit_entry("model.norm.weight", (slice(None),), 4.0)(swapped)
    alone = invoke("fix", swapped, "--dry-run")
    assert "nothing to repair" in alone.stdout
    result = invoke("fix", swapped, "--reference", good, "--output", swapped.parent / "repaired")
    assert result.exit_code == 0, result.stdout
    assert load_file(swapped.parent / "repaired" / SINGLE)["model.norm.weight"].tolist() == [3.0] * 48


@pytest.mark.parametrize(
    "options",
    [[], ["--dry-run", "--in-place"], ["--rules", ",", "--dry-run"], ["--dry-run", "--timeout", "3"]],
    ids=["nowhere", "both", "no rule", "timeout"],
)
def test_options_that_say_nothing_or_two_things_are_usage(options: list[str], swapped: Path) -> None:
    result = invoke("fix", swapped, *options)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


def test_a_selftest_is_a_table_and_json(swapped: Path) -> None:
    rename(GATE, UP)(swapped)
    text = invoke("selftest", swapped, "--rules", "ffn/gate-up-swapped,config/eps-conflict", "--layers", "0-1")
    assert text.exit_code == 0, text.stderr
    words = " ".join(text.stdout.split())
    assert "gate and up exchanged in every layer found 2 of 2 ffn/gate-up-swapped" in words
    assert "2 of 3 planted mistakes found" in words
    as_json = invoke("selftest", swapped, "--rules", "tensor/non-finite", "--layers", "1", "--format", "json")
    assert [mistake["outcome"] for mistake in json.loads(as_json.stdout)["mistakes"]] == ["found", "found"]
    assert names(swapped) == [".hidden", "config.json", SINGLE, "tokenizer.json"]


@pytest.mark.parametrize("layers", ["x", "1-", "-1", "", "3-y", "9" * 30])
def test_layers_that_are_none_are_refused(layers: str, swapped: Path) -> None:
    result = invoke("selftest", swapped, "--layers", layers)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
