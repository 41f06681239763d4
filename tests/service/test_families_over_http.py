"""A family that is named, given as a row, or left to be found, through the service."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from glassblock.api.entry import connect
from glassblock.errors import FamilyMismatch, InvalidValue, UnknownFamily
from glassblock_client import Client, Sample
from glassblock_client.cli.family import MAX_FILE_BYTES, read_family_row
from makers import tiny_checkpoint
from safetensors.torch import load_file, save_file

ROWS = Sample(rows=4, seed=0)
MINE = {"like": "llama", "name": "mine"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    tiny_checkpoint("llama", folder / "named")
    tiny_checkpoint("llama", folder / "bare")
    (folder / "bare" / "config.json").unlink()
    tiny_checkpoint("llama", folder / "lying")
    (folder / "lying" / "config.json").write_text('{"model_type": "gpt2"}')
    tiny_checkpoint("qwen3", folder / "stripped")
    tensors = load_file(folder / "stripped" / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("_norm.weight")}
    save_file(kept, folder / "stripped" / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Client:
    with connect(roots=[folder], device="cpu") as transport:
        yield Client("http://glassblock", transport=transport)


def test_a_checkpoint_that_is_what_it_says_has_no_fits(service: Client) -> None:
    assert service.checkpoint("named").fits == ()


@pytest.mark.parametrize("name", ["bare", "lying", "stripped"])
def test_an_unknown_or_contradicted_family_is_looked_for(service: Client, name: str) -> None:
    fits = service.checkpoint(name).fits
    llama = next(fit for fit in fits if fit.family == "llama")
    assert llama.fits
    assert llama.missing == llama.unexpected == ()
    assert fits[0].fits
    against = next(fit for fit in fits if fit.family == "qwen3")
    assert not against.fits
    assert "model.layers.0.self_attn.q_norm.weight" in against.missing
    assert against.why.startswith("it has ")


def test_nothing_is_run_before_the_family_is_said(service: Client) -> None:
    with pytest.raises(UnknownFamily) as unknown:
        service.run_block("bare", 0, sample=ROWS)
    assert "The names fit: llama" in unknown.value.hint
    with pytest.raises(FamilyMismatch, match="gpt2"):
        service.run_block("lying", 0, sample=ROWS)


def test_a_named_family_and_a_given_row_run_alike(service: Client) -> None:
    named = service.run_block("bare", 1, sample=ROWS, family="llama", return_tensors=True)
    given = service.run_block("bare", 1, sample=ROWS, family_row=MINE, return_tensors=True)
    assert named.answer.family == "llama"
    assert given.answer.family == "mine"
    assert given.answer.verified == "source only"
    assert np.array_equal(named.tensors["output"], given.tensors["output"])


def test_a_given_row_changes_what_is_computed(service: Client) -> None:
    plain = service.run_block("named", 1, sample=ROWS, return_tensors=True)
    changed = MINE | {"feed_forward": {"activation": "gelu"}}
    given = service.run_block("named", 1, sample=ROWS, family_row=changed, return_tensors=True)
    assert given.answer.activation.value == "gelu"
    gate = torch.from_numpy(plain.tensors["gate"])
    assert np.allclose(given.tensors["activated"], torch.nn.functional.gelu(gate).numpy(), rtol=1e-6, atol=1e-7)


def test_a_pinned_block_is_not_another_familys(service: Client) -> None:
    changed = MINE | {"feed_forward": {"activation": "gelu"}}
    service.pin("named")
    try:
        pinned = service.run_block("named", 1, sample=ROWS, return_tensors=True)
        given = service.run_block("named", 1, sample=ROWS, family_row=changed, return_tensors=True)
        assert not np.array_equal(pinned.tensors["activated"], given.tensors["activated"])
        assert service.checkpoint("named").residency is not None
    finally:
        service.evict("named")


def test_norms_residuals_and_audits_take_them_too(service: Client) -> None:
    for family, row in (("llama", None), (None, MINE)):
        asked = {"family": family, "family_row": row}
        assert service.norm_statistics(checkpoint="bare", layer=0, norm="ffn_in", sample=ROWS, **asked).answer.eps
        assert service.compare_residuals(checkpoint="bare", layer=0, sample=ROWS, **asked).answer
        report = service.audit_checkpoint("bare", rules=["config/unknown-family"], **asked)
        assert report.findings == ()
        assert report.checkpoint.family == (family or "mine")


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"family": "llama", "family_row": MINE}, "family"),
        ({"family_row": {"like": "llama", "layer": "x"}}, "family_row.layer"),
        ({"family_row": {"like": "llama", "norm": []}}, "family_row.norm"),
        ({"tower": "encoder"}, "tower"),
    ],
)
def test_what_cannot_be_used_is_refused_by_field(service: Client, asked: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        service.run_block("named", 0, sample=ROWS, **asked)
    assert refused.value.field == field


def test_a_row_without_a_checkpoint_is_refused(service: Client) -> None:
    with pytest.raises(InvalidValue) as refused:
        service.norm_statistics(x=[[1.0, 2.0]], eps=1e-5, family="llama")
    assert refused.value.field == "family"


def test_a_family_file_is_json_or_toml(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(MINE))
    (tmp_path / "a.toml").write_text('like = "llama"\nname = "mine"\n')
    assert read_family_row(None, tmp_path / "a.json") == read_family_row(None, tmp_path / "a.toml") == MINE
    assert read_family_row("llama", None) is None


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.json", "[]", "is not a JSON object"),
        ("a.json", "[" * 100_000, "is not JSON"),
        ("a.toml", "x = ", "is not TOML"),
        ("a.toml", "x = " + "[" * 100_000, "is not TOML"),
        ("a.toml", "\x00", "is not TOML"),
        ("a.yaml", "", "neither .json nor .toml"),
        ("a.toml", "#" * (MAX_FILE_BYTES + 1), "is larger than"),
    ],
)
def test_a_family_file_that_is_none_is_refused(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidValue, match=words):
        read_family_row(None, tmp_path / name)


def test_a_family_file_that_is_absent_or_beside_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="is no file"):
        read_family_row(None, tmp_path / "absent.json")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(InvalidValue, match="both given"):
        read_family_row("llama", tmp_path / "a.json")
