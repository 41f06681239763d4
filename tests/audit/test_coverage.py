"""Silence means checked: whatever a rule did not look at is in its coverage, with the reason."""

from pathlib import Path

import pytest
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.wire.audits import Coverage
from plants import INDEX, PLANTS, SHARDS, SINGLE, drop, edit_index, edit_json, healthy_checkpoint, replace_file
from safetensors.torch import load_file, save_file


def covered(directory: Path) -> dict[str, Coverage]:
    return {entry.rule: entry for entry in audit_checkpoint(directory).coverage}


def reasons(entry: Coverage) -> list[str]:
    return [skipped.reason for skipped in entry.skipped]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return healthy_checkpoint("llama", tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return healthy_checkpoint("llama", tmp_path, shards=3)


def test_a_header_that_cannot_be_read_hides_everything_behind_it(sharded: Path) -> None:
    replace_file(SHARDS[1], b"GGUF" + bytes(100))(sharded)
    coverage = covered(sharded)
    assert coverage["container/not-safetensors"].checked == 3
    for kind in ("truncated", "trailing-bytes", "overlap", "hole", "header"):
        entry = coverage[f"container/{kind}"]
        assert (entry.checked, reasons(entry)) == (2, [f"{SHARDS[1]}: its header could not be read"])


def test_a_misplaced_tensor_hides_holes(llama: Path) -> None:
    (plant,) = PLANTS["container/overlap"]
    plant.break_(llama)
    coverage = covered(llama)
    for kind in ("hole", "trailing-bytes"):
        assert reasons(coverage[f"container/{kind}"]) == [
            f"{SINGLE}: tensors lie where they should not, which leaves gaps elsewhere"
        ]
    assert "begins inside another tensor" in reasons(coverage["tensor/non-finite"])[0]


def test_without_an_index_there_is_nothing_to_join(llama: Path) -> None:
    coverage = covered(llama)
    for rule in ("missing-shard", "missing-tensor", "unlisted-tensor", "wrong-shard", "total-size"):
        entry = coverage[f"index/{rule}"]
        assert (entry.checked, reasons(entry)) == (0, ["the checkpoint has no index"])


def test_a_rule_that_found_something_is_not_told_as_skipped(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    (sharded / SHARDS[1]).unlink()
    report = audit_checkpoint(sharded)
    assert "index/missing-shard" in {finding.rule for finding in report.findings}
    entry = covered(sharded)["index/missing-shard"]
    assert (entry.checked, entry.skipped) == (1, ())


def test_sizes_are_not_summed_up_where_tensors_are_in_question(sharded: Path) -> None:
    edit_index(lambda index: index["weight_map"].popitem())(sharded)
    assert "disagree about tensors" in reasons(covered(sharded)["index/total-size"])[0]


def test_an_index_without_a_total_size(sharded: Path) -> None:
    edit_index(lambda index: index["metadata"].clear())(sharded)
    entry = covered(sharded)["index/total-size"]
    assert (entry.checked, reasons(entry)) == (0, ["the index claims no total_size"])


def test_tensors_that_an_absent_shard_may_hold_are_no_second_finding(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    report = audit_checkpoint(sharded)
    assert [finding.rule for finding in report.findings] == ["index/missing-shard"]
    (tied,) = (entry for entry in report.coverage if entry.rule == "config/tied-head")
    assert tied.checked == 1


def test_an_absent_head_in_an_absent_shard_is_undecidable(sharded: Path) -> None:
    holders = [name for name in SHARDS if "lm_head.weight" in load_file(sharded / name)]
    (sharded / holders[0]).unlink()
    entry = covered(sharded)["config/tied-head"]
    assert entry.checked == 0
    assert "absent or damaged" in entry.undecidable[0].reason


def test_an_absent_head_without_a_config_is_undecidable(llama: Path) -> None:
    drop("lm_head.weight")(llama)
    (llama / "config.json").unlink()
    (tied,) = (
        entry
        for entry in audit_checkpoint(llama, AuditQuestion(family="llama")).coverage
        if entry.rule == "config/tied-head"
    )
    assert (tied.checked, tied.undecidable[0].would_decide) == (0, "config.json")


def test_a_config_whose_sizes_cannot_be_used(llama: Path) -> None:
    edit_json("config.json", hidden_size="48")(llama)
    coverage = covered(llama)
    assert reasons(coverage["ffn/missing-tensor"]) == ["the config does not say which tensors the layers are made of"]
    assert [entry.layer for entry in coverage["ffn/gate-up-swapped"].skipped] == [0, 1]


def test_an_index_that_cannot_be_read_is_told_and_the_files_still_audited(sharded: Path) -> None:
    replace_file(INDEX, b"[]")(sharded)
    coverage = covered(sharded)
    assert coverage["tensor/non-finite"].checked == 21
    assert coverage["ffn/gate-up-swapped"].checked == 2


def test_copies_of_which_one_is_cut_are_undecidable(sharded: Path) -> None:
    name = "model.embed_tokens.weight"
    copy = sharded / "model-00004-of-00004.safetensors"
    save_file({name: load_file(sharded / SHARDS[0])[name]}, copy)
    copy.write_bytes(copy.read_bytes()[:-4])
    edit_index(lambda index: index["weight_map"].update(x=copy.name))(sharded)
    entry = covered(sharded)["tensor/duplicate"]
    assert "not all copies could be read" in entry.undecidable[0].reason
