"""What a text says, in every format for people, and back from JSON."""

import json
from html import unescape

import pytest
from glassblock.reports import REPORTS
from glassblock.reports.behaviour_lines import behaviour_lines, behaviour_title
from glassblock.wire.audits import Report
from glassblock.wire.behaviour import Behaviour, BehaviourHypothesis, NotAsked

from reports.report_makers import report

REASON = "the weights do not suspect it"
TOLD = Behaviour(
    texts=1,
    tokens=122,
    mean=-4.9436,
    hypotheses=(
        BehaviourHypothesis(
            kind="eps",
            words="eps 1e-06 in every norm",
            value="1e-06",
            mean=-4.9429,
            difference=6.6e-4,
            standard_error=3.9e-4,
            reading="undecided",
            rivals=("eps 1e-05 in every norm",),
        ),
        BehaviourHypothesis(
            kind="activation",
            words="the activation is gelu",
            value="gelu",
            mean=-5.7,
            difference=-0.81,
            standard_error=0.14,
            reading="worse",
        ),
        BehaviourHypothesis(
            kind="swap",
            words="layer 7 with gate and up put right",
            layers=(7,),
            weights="exchanged",
            mean=-3.697,
            difference=1.247,
            standard_error=0.261,
            reading="better",
            rivals=("gate and up of layer <b> exchanged",),
        ),
    ),
    not_asked=tuple(
        NotAsked(words=f"gate and up of layer {layer} exchanged", reason=REASON) for layer in (29, 28, 27, 3)
    ),
    forward_passes=9.77,
    bound=32.0,
    standard_errors=3.86,
    notes=("A text convicts nothing by itself.",),
)


def test_what_the_text_prefers_comes_first_and_layers_left_out_in_one_line() -> None:
    assert behaviour_title(TOLD) == (
        "behaviour: mean log-likelihood -4.9436 nats per token over 122 tokens; 9.77 forward passes"
    )
    assert list(behaviour_lines(TOLD)) == [
        "layer 7 with gate and up put right: +1.25 ± 0.26 nats, the text prefers it; the weights: exchanged; "
        "as likely: gate and up of layer <b> exchanged",
        "eps 1e-06 in every norm: +0.00066 ± 0.00039 nats, the text does not tell",
        "the activation is gelu: -0.81 ± 0.14 nats, the text speaks against it",
        f"not asked: gate and up exchanged in one of layers 3, 27-29: {REASON}",
        "A text convicts nothing by itself.",
    ]


def test_a_long_list_is_cut() -> None:
    many = TOLD.model_copy(update={"hypotheses": TOLD.hypotheses * 10, "not_asked": ()})
    lines = list(behaviour_lines(many))
    assert lines[20] == "and 10 more; the JSON report lists all"
    assert len(lines) == 22
    page = REPORTS["html"].render(report(behaviour=many.model_copy(update={"hypotheses": TOLD.hypotheses * 70})))
    assert "and 10 more; the JSON report lists all" in page


@pytest.mark.parametrize("format_", ["text", "markdown", "html"])
def test_every_format_for_people_has_it(format_: str) -> None:
    told = " ".join(REPORTS[format_].render(report(behaviour=TOLD), width=200).split())
    for part in ("ehaviour", "layer 7 with gate and up put right", "0.26", "prefers it", "A text convicts nothing"):
        assert part in told
    assert "<b>" not in told or format_ == "text"
    without = REPORTS[format_].render(report(), width=200)
    assert "ehaviour" not in without


@pytest.mark.parametrize("format_", ["text", "markdown", "html"])
def test_why_it_was_not_judged(format_: str) -> None:
    silent = Behaviour(texts=1, tokens=9, not_judged="layer 0: the attention is not read here")
    told = " ".join(REPORTS[format_].render(report(behaviour=silent), width=200).split())
    assert "not judged" in told
    assert "the attention is not read here" in told


@pytest.mark.parametrize("format_", ["text", "markdown", "html"])
def test_a_short_text_takes_one_line(format_: str) -> None:
    short = Behaviour(texts=1, tokens=14, not_judged="14 tokens: 32 at least are needed")
    told = REPORTS[format_].render(report(behaviour=short), width=200)
    without = REPORTS[format_].render(report(), width=200)
    more = [line for line in told.splitlines() if line.strip() and line not in without.splitlines()]
    (line,) = [line for line in more if "<h2>" not in line]
    assert "behaviour: not judged: 14 tokens: 32 at least are needed" in unescape(line)
    assert "<details>" not in line


def test_the_json_report_has_every_number() -> None:
    written = REPORTS["json"].render(report(behaviour=TOLD))
    assert Report.model_validate_json(written).behaviour == TOLD
    assert json.loads(written)["behaviour"]["hypotheses"][2]["difference"] == 1.247
