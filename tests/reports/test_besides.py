"""What comparisons showed, captures and several references too, in every format for people."""

import pytest
from glassblock.reports import REPORTS
from glassblock.wire.audits import (
    CapturedLayer,
    CaptureSummary,
    CoefficientRange,
    MergedLayer,
    MergeSource,
    MergeSummary,
    MixGroup,
    Report,
)

from .report_makers import report

PEOPLE = ("text", "markdown", "html")
EVIL = "<script>\x1b[31m|`@x"


def captured(*departed: int, layers: int = 6) -> Report:
    told = [
        CapturedLayer(
            layer=layer,
            verdict="explained" if layer in departed else "as-declared",
            message=f"gate and up are exchanged {EVIL}" if layer in departed else "as declared",
        )
        for layer in range(layers)
    ]
    first = min(departed, default=None)
    summary = CaptureSummary(captures="recording.safetensors", first_departure=first, layers=tuple(told))
    return report().model_copy(update={"captures": summary})


def made_of_two() -> Report:
    coefficients = (
        CoefficientRange(reference="left", least=0.6, most=0.6, largest_error=1e-6),
        CoefficientRange(reference="right", least=0.38, most=0.41, largest_error=1e-6),
    )
    summary = MergeSummary(
        references=("left", "right"),
        words=f"a mix in places {EVIL}",
        mapped=40,
        groups=(
            MixGroup(
                kind="mix",
                words="a linear mix, but for rounding",
                tensors=38,
                coefficients=coefficients,
                largest_residual=0.0021,
                examples=("model.embed_tokens.weight",),
            ),
        ),
        layers=(
            MergedLayer(layer=5, kind="copy", sources=(MergeSource(reference="right", layer=3),), tensors=9),
            MergedLayer(layer=1, kind="mix", sources=(MergeSource(reference="left", layer=1),), tensors=9),
        ),
        unmatched=("extra.weight",),
        unread=("left: x: cut",),
    )
    return report().model_copy(update={"merge": summary})


def flat(told: str) -> str:
    """Without what Markdown writes for signs, and without the line breaks of a narrow page."""
    plain = told.replace("&#8288;", "").replace("&#95;", "_").replace("&#58;", ":").replace("&#x27;", "'")
    return " ".join(plain.split())


@pytest.mark.parametrize("name", PEOPLE)
def test_captures_are_told(name: str) -> None:
    told = flat(REPORTS[name].render(captured(3), width=400))
    assert "the first that is not as declared is layer 3" in told
    assert "as declared: layers 0-2, 4-5" in told
    assert "gate and up are exchanged" in told


@pytest.mark.parametrize("name", PEOPLE)
def test_captures_without_a_departure_say_so(name: str) -> None:
    told = flat(REPORTS[name].render(captured(), width=400))
    assert "6 layers, all as declared" in told


@pytest.mark.parametrize("name", PEOPLE)
def test_many_departures_are_cut_short(name: str) -> None:
    told = flat(REPORTS[name].render(captured(*range(40), layers=40), width=400))
    assert "and 32 more layers" in told


@pytest.mark.parametrize("name", PEOPLE)
def test_several_references_are_told(name: str) -> None:
    told = flat(REPORTS[name].render(made_of_two(), width=400))
    for words in (
        "beside left, right: a mix in places",
        "38 tensors: a linear mix, but for rounding: left 0.600, right 0.380 to 0.410, off by 0.0021",
        "layer 5 is layer 3 of right",
        "in none of them: extra.weight",
        "not read: left: x: cut",
    ):
        assert words in told, words
    assert "layer 1 is" not in told  # it has its own number there


@pytest.mark.parametrize("name", PEOPLE)
@pytest.mark.parametrize("made", [captured(3), made_of_two()], ids=["captures", "merge"])
def test_words_from_outside_stay_words(name: str, made: Report) -> None:
    told = REPORTS[name].render(made, width=400)
    assert "\x1b" not in told
    assert name == "text" or "<script>" not in told
