"""Texts on the command line: `run` and `likelihood` send what they were given, and say what they cannot read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from glassblock.wire.framing import frame
from glassblock_client.tensors import wire_from_array

from client.fake_service import FakeService
from client.test_clients import LIKELIHOOD, block_answer
from client.test_command_line import invoke


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    return folder


def written(path: Path, ids: Any) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(ids))
    elif path.suffix == ".npy":
        np.save(path, np.array(ids))
    else:
        path.write_bytes(b"".join(frame("request", "{}", {"token_ids": wire_from_array(np.array(ids, np.int64))})))
    return path


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        (["--token-ids", "1, 2,3"], {"token_ids": [1, 2, 3]}),
        (["--text", "the cat"], {"text": "the cat"}),
    ],
    ids=["ids", "text"],
)
def test_a_text_is_sent_as_it_was_given(checkpoint: Path, words: list[str], sent: dict[str, Any]) -> None:
    service = FakeService({"POST /v1/likelihoods": LIKELIHOOD})
    result = invoke(service, "likelihood", checkpoint, *words)
    assert result.exit_code == 0, result.output
    assert service.sent() == {"checkpoint": "tiny", **sent}
    assert "mean ln p" in result.stdout
    assert "-0.500000" in result.stdout
    assert "1.64872" in result.stdout  # exp(0.5)


@pytest.mark.parametrize(
    ("given", "told"),
    [("story.txtt", True), ("texts/story.txt", True), ("the cat", False), ("cat", False), ("It ended.", False)],
)
def test_what_looks_like_a_file_that_is_not_there_is_remarked(checkpoint: Path, given: str, told: bool) -> None:
    service = FakeService({"POST /v1/likelihoods": LIKELIHOOD})
    result = invoke(service, "likelihood", checkpoint, "--text", given)
    assert service.sent()["text"] == given
    assert (f"there is no file {given}" in result.stderr) == told
    assert "there is no file" not in result.stdout


def test_each_token_is_shown_with_its_piece_of_text(checkpoint: Path) -> None:
    told = LIKELIHOOD.model_copy(update={"pieces": ("the", " c\x1b\nat")})
    result = invoke(FakeService({"POST /v1/likelihoods": told}), "likelihood", checkpoint, "--token-ids", "1,2")
    assert ["0", "1", "2", "-0.5000", '"', 'c\\u001b\\nat"'] in [line.split() for line in result.stdout.splitlines()]
    two = {"token_ids": [[1, 2], [1, 3]], "log_likelihoods": [[-0.5], [-0.25]], "pieces": (("a", "b"), ("c", "d"))}
    told = LIKELIHOOD.model_copy(update=two)
    result = invoke(FakeService({"POST /v1/likelihoods": told}), "likelihood", checkpoint, "--token-ids", "1,2")
    assert ["1", "1", "3", "-0.2500", '"d"'] in [line.split() for line in result.stdout.splitlines()]
    plain = invoke(FakeService({"POST /v1/likelihoods": LIKELIHOOD}), "likelihood", checkpoint, "--token-ids", "1,2")
    assert "piece" not in plain.stdout


@pytest.mark.parametrize("suffix", [".json", ".npy", ".safetensors"])
@pytest.mark.parametrize("ids", [[1, 2, 3], [[1, 2], [3, 4]]], ids=["one", "two"])
def test_tokens_come_from_files(checkpoint: Path, tmp_path: Path, suffix: str, ids: Any) -> None:
    service = FakeService({"POST /v1/likelihoods": LIKELIHOOD})
    result = invoke(service, "likelihood", checkpoint, "--tokens", written(tmp_path / f"ids{suffix}", ids))
    assert result.exit_code == 0, result.output
    assert service.sent()["token_ids"] == ids


def test_a_text_may_lie_in_a_file(checkpoint: Path, tmp_path: Path) -> None:
    service = FakeService({"POST /v1/likelihoods": LIKELIHOOD})
    (tmp_path / "story.txt").write_text("the cat\nsat, caf\u00e9", encoding="utf-8")
    result = invoke(service, "likelihood", checkpoint, "--text", tmp_path / "story.txt")
    assert result.exit_code == 0, result.output
    assert service.sent()["text"] == "the cat\nsat, caf\u00e9"


@pytest.mark.parametrize("words", ["a\0b", "long " * 2000, "tests"])
def test_words_that_name_no_file_are_the_text(checkpoint: Path, words: str) -> None:
    service = FakeService({"POST /v1/likelihoods": LIKELIHOOD})
    result = invoke(service, "likelihood", checkpoint, "--text", words)
    assert result.exit_code == 0, result.output
    assert service.sent()["text"] == words


def test_a_file_that_holds_no_text_is_one_error_line(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_bytes(b"caf\xe9")
    result = invoke(FakeService({}), "likelihood", checkpoint, "--text", tmp_path / "story.txt")
    assert result.exit_code == 2
    assert "--text" in result.stderr
    assert "UTF-8" in result.stderr
    assert result.stderr.count("\n") <= 2


def test_run_sends_part_expert_and_text(checkpoint: Path) -> None:
    service = FakeService({"POST /v1/blocks/run": block_answer(part="layer", activation=None, token_ids=[1, 2])})
    result = invoke(service, "run", checkpoint, "--layer", 3, "--part", "layer", "--token-ids", "1,2")
    assert result.exit_code == 0, result.output
    assert service.sent() == {"checkpoint": "tiny", "layer": 3, "part": "layer", "token_ids": [1, 2]}
    assert "layer 0, layer" in result.stdout  # of the answer
    for word, number in (("3", 3), ("shared", "shared")):
        result = invoke(service, "run", checkpoint, "--layer", 0, "--expert", word, "--sample", 2)
        assert result.exit_code == 0, result.output
        assert service.sent()["expert"] == number


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give one of --token-ids"),
        (["--text", "a", "--token-ids", "1"], "give one of --token-ids"),
        (["--token-ids", "1,two"], "'two' is no number"),
        (["--tokens", "absent.json"], "is no file"),
        (["--tokens", "{tmp}/ids.txt"], "is none of .json, .npy and .safetensors"),
        (["--tokens", "{tmp}/halves.npy"], "token ids are integers"),
        (["--tokens", "{tmp}/broken.json"], "cannot be read"),
        (["--tokens", "{tmp}/object.json"], "holds no list"),
        (["--tokens", "{tmp}/empty.npy"], "is empty"),
    ],
    ids=["nothing", "two", "a word", "absent", "a suffix", "halves", "broken", "no list", "empty"],
)
def test_what_is_no_text_is_one_error_line(checkpoint: Path, tmp_path: Path, words: list[str], says: str) -> None:
    (tmp_path / "ids.txt").write_text("1 2")
    np.save(tmp_path / "halves.npy", np.array([0.5, 1.0]))
    (tmp_path / "broken.json").write_text("[1,")
    (tmp_path / "object.json").write_text("{}")
    (tmp_path / "empty.npy").touch()
    result = invoke(FakeService({}), "likelihood", checkpoint, *(word.format(tmp=tmp_path) for word in words))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert says in result.stderr.replace("\n", " ")


@pytest.mark.parametrize("word", ["first", "9" * 5000], ids=["a word", "more digits than an integer may be read of"])
def test_an_expert_that_is_no_number_is_told(checkpoint: Path, word: str) -> None:
    result = invoke(FakeService({}), "run", checkpoint, "--layer", 0, "--expert", word, "--sample", 2)
    assert result.exit_code == 2
    assert f"'{word}' is neither a number nor 'shared'" in result.stderr
