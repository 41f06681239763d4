"""An embedding narrower than the layers, as OPT may have: its files are sound, its rows are not the stream's."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from glassblock.audit.audit import audit_checkpoint
from glassblock.checkpoint.embedding_rows import embedding_rows, sample_embedding_rows
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import FamilyMismatch
from plants import drop, edit_json


def opt(directory: Path, **options: Any) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 48, "ffn_dim": 112, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.OPTConfig(**sizes, **options)
    transformers.OPTForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    "options",
    [
        {"word_embed_proj_dim": 32},
        {"word_embed_proj_dim": 32, "do_layer_norm_before": False},
        {"word_embed_proj_dim": 64, "tie_word_embeddings": False},
        {"_remove_final_layer_norm": True},
    ],
    ids=str,
)
def test_a_healthy_one_is_silent(options: dict[str, Any], tmp_path: Path) -> None:
    assert [finding.message for finding in audit_checkpoint(opt(tmp_path, **options)).findings] == []


def test_its_rows_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(opt(tmp_path, word_embed_proj_dim=32))
    with pytest.raises(FamilyMismatch, match=r"32 entries where the layers take 48 .*project_in\.weight"):
        embedding_rows(checkpoint, [1, 2], "cpu", ReadMeter())
    with pytest.raises(FamilyMismatch, match="project_in"):
        sample_embedding_rows(checkpoint, 2, 0, "cpu", ReadMeter())


def test_rows_of_the_same_width_are_taken(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(opt(tmp_path, word_embed_proj_dim=48))
    assert embedding_rows(checkpoint, [1, 2], "cpu", ReadMeter()).x.shape == (2, 48)


@pytest.mark.parametrize("name", ["project_in", "project_out"])
def test_a_projection_that_is_missing_is_found(name: str, tmp_path: Path) -> None:
    opt(tmp_path, word_embed_proj_dim=32)
    drop(f"model.decoder.{name}.weight")(tmp_path)
    errors = [finding for finding in audit_checkpoint(tmp_path).findings if finding.level == "error"]
    assert [(finding.rule, finding.tensors) for finding in errors] == [
        ("ffn/missing-tensor", (f"model.decoder.{name}.weight",))
    ]


def test_a_width_that_is_wrong_is_told_by_its_key(tmp_path: Path) -> None:
    opt(tmp_path, word_embed_proj_dim=32)
    edit_json("config.json", word_embed_proj_dim=40)(tmp_path)
    findings = audit_checkpoint(tmp_path).findings
    assert {finding.rule for finding in findings} == {"config/shape"}
    wrong = ["embed_tokens", "project_in", "project_out"]
    assert [name for name in wrong if any(name in finding.tensors[0] for finding in findings)] == wrong
    assert all("word_embed_proj_dim" in finding.message for finding in findings)
