"""JSON that nobody vouches for: what the standard parser leaves open is closed, and nothing else."""

import json
import math
import time
from typing import Any

import pytest
from glassblock.checkpoint.strict_json import MAX_DEPTH, JsonFault, parse_json, shown
from hypothesis import given, settings
from hypothesis import strategies as st

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None, database=None)
@given(value=values, ascii_only=st.booleans(), indent=st.sampled_from([None, 2]))
def test_whatever_json_writes_is_read(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert parse_json(text.encode("utf-8", "surrogatepass"), constants=False) == value


@pytest.mark.parametrize("depth", [1, MAX_DEPTH, MAX_DEPTH + 1, 10_000, 1_000_000])
@pytest.mark.parametrize("opening", ['{"a":', "[", '[{"[":'])
def test_depth_is_bounded_exactly(depth: int, opening: str) -> None:
    levels = sum(character in "[{" for character in opening.replace('"["', ""))
    closing = "".join({"[": "]", "{": "}"}[c] for c in reversed(opening.replace('"["', "")) if c in "[{")
    text = opening * (depth // levels) + ("[" if depth % levels else "")
    text += "1" + ("]" if depth % levels else "") + closing * (depth // levels)
    if depth <= MAX_DEPTH:
        assert parse_json(text.encode(), constants=False) == json.loads(text)
    else:
        with pytest.raises(JsonFault, match=f"nested deeper than the {MAX_DEPTH} levels"):
            parse_json(text.encode(), constants=False)


@pytest.mark.parametrize(
    "text",
    ['["[[[[", "]]", "\\"[[", "\\\\", "[", "{\\\\\\"{"]', '{"[": "]", "\\\\": ["\\"[\\""]}', '["\\u005b[", "[\\"]"]'],
)
def test_brackets_inside_texts_do_not_count(text: str) -> None:
    padded = text.replace("[[", "[" * 300)
    assert parse_json(padded.encode(), constants=False) == json.loads(padded)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("{'a': 1}", "not JSON"),
        ("[1] x", "not JSON"),
        ("\ufeff{}", "not JSON"),
        ('{"a": 1, "a": 1}', '"a" stands twice'),
        ('[{"b": {"a": 1, "a": 2}}]', '"a" stands twice'),
        ("NaN", "NaN is no JSON number"),
        ("[-Infinity]", "no JSON number"),
        ("1e999", "beyond float64"),
        ("1" * 401, "401 characters"),
        ("0." + "1" * 400, "402 characters"),
        ('"\\ud800"', "surrogate"),
        ('{"\\udc00x": 1}', "surrogate"),
        ('"\x01"', "not JSON"),
        ('"abc', "not JSON"),
        ('"abc\\', "not JSON"),
    ],
)
def test_what_is_not_strict_json_is_refused(text: str, words: str) -> None:
    with pytest.raises(JsonFault, match=words):
        parse_json(text.encode(), constants=False)


def test_faults_say_which_byte() -> None:
    with pytest.raises(JsonFault) as fault:
        parse_json('{"ü": 1,}'.encode(), constants=False)
    assert fault.value.byte == len('{"ü": 1,'.encode())
    with pytest.raises(JsonFault) as fault:
        parse_json(b'{"a": "\xff"}', constants=False)
    assert fault.value.byte == 7


def test_constants_are_read_where_asked_for() -> None:
    read = parse_json(b"[NaN, Infinity, -Infinity, 1e999]", constants=True)
    assert isinstance(read, list)
    assert math.isnan(read[0])
    assert read[1:] == [math.inf, -math.inf, math.inf]


def test_negative_zero_stays_a_float() -> None:
    assert math.copysign(1, parse_json(b"-0", constants=False)) == -1  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 5_000_000,
        b"[" * 5_000_000 + b"]" * 5_000_000,
        b'"' + b'\\"' * 5_000_000,
        b'"' * 5_000_001,
        b'"["{' * 2_000_000,
        b"1" * 5_000_000,
        b"[" + b"1.5," * 500_000,
    ],
)
def test_ten_megabytes_of_malice_take_seconds_at_most(text: bytes) -> None:
    start = time.process_time()
    with pytest.raises(JsonFault):
        parse_json(text, constants=False)
    # Linear work on 10 MB takes about half a second; quadratic work would take hours.
    assert time.process_time() - start < 10


def test_names_are_shown_on_one_line_and_cut() -> None:
    assert shown('a"\n') == '"a\\"\\n"'
    assert len(shown("x" * 1000)) < 100
