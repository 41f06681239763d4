"""Tokenizers that were read lately are kept, within a bound, whatever is asked for."""

import pytest
from glassblock.errors import InvalidValue
from glassblock.operations import texts

tokenizers = pytest.importorskip("tokenizers")


def file_of(words: int) -> bytes:
    """A tokenizer.json that knows so many words."""
    vocabulary = {"<unk>": 0} | {f"word{number}": number for number in range(1, words)}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")).to_str().encode()


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_kept", type(texts._kept)())


def read(raw: bytes) -> object:
    return texts._tokenizer(raw)


def test_the_same_file_is_read_once() -> None:
    assert read(file_of(10)) is read(file_of(10))
    assert read(file_of(10)) is not read(file_of(11))


def test_the_least_recently_used_leave_where_the_files_are_too_large_together(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [file_of(1000 + number) for number in range(4)]
    monkeypatch.setattr(texts, "MAX_TOKENIZER_BYTES", 2 * len(files[-1]))
    first, second = read(files[0]), read(files[1])
    assert read(files[0]) is first
    read(files[2])
    assert sum(kept.file_bytes for kept in texts._kept.values()) <= texts.MAX_TOKENIZER_BYTES
    assert read(files[0]) is first
    assert read(files[1]) is not second
    assert all(len(key) == 32 for key in texts._kept), "the files themselves are not kept"


def test_one_that_is_larger_than_all_may_be_is_kept_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    large = file_of(1000)
    monkeypatch.setattr(texts, "MAX_TOKENIZER_BYTES", len(large) - 1)
    read(file_of(10))
    assert read(large) is read(large)
    assert len(texts._kept) == 1


def test_what_is_no_tokenizer_is_refused_and_not_kept() -> None:
    with pytest.raises(InvalidValue, match=r"tokenizer\.json"):
        read(b"{}")
    assert not texts._kept
