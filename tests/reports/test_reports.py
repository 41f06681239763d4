"""Reports as text and JSON."""

import doctest
import inspect
import json
import re

import pytest
from glassblock.reports import REPORTS, ReportFormat, layer_table, page, ranges, text, wording
from glassblock.reports.ranges import layer_ranges
from glassblock.reports.shown import PLAIN, Shown
from glassblock.reports.wording import byte_count
from glassblock.wire import printable as printable_module
from glassblock.wire.audits import Coverage, Finding, Fix, LayerMetrics, Report, Skipped, Undecidable
from glassblock.wire.printable import printable
from hypothesis import given
from hypothesis import strategies as st

from reports.report_makers import (
    RULE,
    full_report,
    healthy_layer,
    report,
    report_with_verdict,
    swap_finding,
    swapped_report,
    undecided_report,
)

MAKERS = {
    "pass": report,
    "fail": lambda: swapped_report(2),
    "everywhere": lambda: swapped_report(*range(30), depth=30),
    "undecided": lambda: undecided_report(30),
    "nothing read": lambda: report(layers=(), coverage=()),
    "everything": full_report,
}
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def test_every_row_is_named_after_its_key_and_keeps_the_signature():
    assert set(REPORTS) == {"text", "json", "sarif", "junit", "markdown", "html"}
    for name, row in REPORTS.items():
        assert row.name == name
        assert "/" in row.media_type
        assert inspect.signature(row.written) == inspect.signature(REPORTS["text"].written)


def test_a_row_is_rendered_as_it_is_to_be_shown():
    said = {
        parameter.name: parameter.default for parameter in inspect.signature(REPORTS["text"].render).parameters.values()
    }
    assert {name: said[name] for name in vars(PLAIN)} == vars(PLAIN)
    row = ReportFormat("seen", "text/plain", lambda _, shown: repr(shown))
    assert row.render(report(), width=9, colour=True, asked="a", rules=None) == repr(Shown(9, True, "a", None))


@pytest.mark.parametrize("module", [ranges, printable_module, text, page, layer_table, wording])
def test_docstrings_show_what_happens(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("row", REPORTS.values(), ids=list(REPORTS))
def test_every_report_can_be_had_in_every_format(row: ReportFormat, name: str):
    told = row.render(MAKERS[name]())
    assert told.endswith("\n")
    assert "\x1b" not in told


@pytest.mark.parametrize("name", MAKERS)
def test_json_is_the_report_again(name: str):
    made = MAKERS[name]()
    assert Report.model_validate_json(REPORTS["json"].render(made)) == made


def test_json_holds_no_bare_nan():
    layer = LayerMetrics(layer=0, metrics={"gate_log10_p": float("-inf"), "up_log10_p": float("nan")})
    told = REPORTS["json"].render(report(layers=(layer,)))
    metrics = json.loads(told, parse_constant=pytest.fail)["layers"][0]["metrics"]
    assert metrics == {"gate_log10_p": "-Infinity", "up_log10_p": "NaN"}


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("name", MAKERS)
def test_no_line_is_longer_than_asked_for_and_none_ends_in_a_space(name: str, width: int):
    for line in REPORTS["text"].render(MAKERS[name](), width=width).splitlines():
        assert len(line) <= width
        assert line == line.rstrip()


@pytest.mark.parametrize("width", [24, 32, 40, 50, 59, 60, 61, 72, 80])
def test_verdicts_of_layers_are_never_cut(width: int):
    verdicts = ("as-named", "swapped", "undecidable")
    more = {"gate_z": 99.0, "up_z": -0.5, "up_log10_p": -1.2}
    made = report(
        layers=tuple(
            LayerMetrics(layer=number, metrics={**healthy_layer(number).metrics, **more, "verdict": verdict})
            for number, verdict in enumerate(verdicts)
        )
    )
    lines = [line.split() for line in REPORTS["text"].render(made, width=width).splitlines()]
    for number, verdict in enumerate(verdicts):
        words = verdict.split("-")
        assert any(line[:1] == [str(number)] and line[-len(words) :] == words for line in lines), verdict


@pytest.mark.parametrize("name", MAKERS)
def test_colour_changes_no_word(name: str):
    plain = REPORTS["text"].render(MAKERS[name]())
    coloured = REPORTS["text"].render(MAKERS[name](), colour=True)
    assert "\x1b[" in coloured
    stripped = ESCAPE.sub("", coloured)
    assert "\x1b" not in stripped
    assert [line.rstrip() for line in stripped.splitlines()] == plain.splitlines()


@pytest.mark.parametrize("variable", ["NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"])
def test_the_environment_has_no_say(monkeypatch: pytest.MonkeyPatch, variable: str):
    expected = [REPORTS["text"].render(report(), colour=colour) for colour in (False, True)]
    monkeypatch.setenv(variable, "1")
    assert [REPORTS["text"].render(report(), colour=colour) for colour in (False, True)] == expected


@pytest.mark.parametrize("verdict", ["pass", "fail", "inconclusive"])
def test_the_verdict_stands_before_everything_but_the_name(verdict):
    lines = REPORTS["text"].render(report_with_verdict(verdict)).splitlines()
    assert lines[0] == "SmolLM2-135M"
    assert lines[1] == "llama (verified: bit for bit) · 4 layers · 272 tensors · 269 MB"
    assert lines[3].split()[0] == verdict.upper()


def test_a_finding_says_what_where_how_sure_and_how_to_repair():
    told = " ".join(REPORTS["text"].render(swapped_report(2)).split())
    for part in (
        "1 error ERROR ffn/gate-up-swapped layer 2 (statistical)",
        "gate_proj and up_proj of layer 2 are exchanged",
        "evidence up log10 p -120.3 · gate draws p 0.42 · rejections 2",
        "tensors model.layers.2.mlp.gate_proj.weight model.layers.2.mlp.up_proj.weight",
        "fix Rename model.layers.2.mlp.gate_proj.weight and .up_proj.weight into each other.",
    ):
        assert part in told


def test_evidence_is_told_in_a_line_and_large_groups_are_left_to_json():
    evidence = {
        "p": 1e-9,
        "nothing": None,
        "family_wise": {"alpha": 0.001, "tests": 60},
        "large": dict.fromkeys("abcd", 1),
        "nested": {"deep": {"er": 1}},
        "names": ["x"],
        "long": "y" * 1000,
    }
    told = " ".join(
        REPORTS["text"].render(report(findings=(swap_finding(0).model_copy(update={"evidence": evidence}),))).split()
    )
    assert "evidence p 1e-09 · family wise: alpha 0.001, tests 60 · names x · long yyy" in told
    assert "y…" in told
    assert "large" not in told
    assert "nested" not in told


@pytest.mark.parametrize(
    ("message", "expert", "told"),
    [
        ("is swapped", None, "layer 4: is swapped"),
        ("layer 4: is swapped", None, "layer 4: is swapped"),
        ("is swapped", 2, "layer 4, expert 2: is swapped"),
    ],
)
def test_a_finding_names_its_layer_once(message: str, expert: int | None, told: str):
    finding = swap_finding(4).model_copy(update={"message": message, "expert": expert})
    assert f"\n  {told}\n" in REPORTS["text"].render(report(findings=(finding,)))


def test_the_worst_level_comes_first():
    findings = tuple(
        Finding(rule=f"a/{level}", level=level, certainty="risk", message=level)
        for level in ("note", "warning", "error")
    )
    told = REPORTS["text"].render(report(verdict="fail", findings=findings))
    assert told.index("ERROR  a/error") < told.index("WARNING  a/warning") < told.index("NOTE  a/note")
    assert "1 error, 1 warning, 1 note" in told


def test_many_findings_of_one_rule_are_counted_and_not_all_told():
    told = REPORTS["text"].render(swapped_report(*range(30), depth=30))
    assert "30 errors" in told
    assert "ERROR  ffn/gate-up-swapped  layers 0-29" in told
    assert "and 22 more; the JSON report lists all" in told
    assert "layer 7 " in told


def test_many_tensors_of_one_finding_are_counted_and_not_all_told():
    finding = swap_finding(4).model_copy(update={"tensors": tuple(f"t.{number}" for number in range(1012))})
    lines = [line.strip() for line in REPORTS["text"].render(report(verdict="fail", findings=(finding,))).splitlines()]
    assert lines[lines.index("t.11") + 1] == "and 1,000 more; the JSON report lists all"


def test_a_shared_repair_of_many_findings_is_told_once():
    fix = Fix(action="rename", description="Exchange every pair.")
    findings = tuple(swap_finding(n).model_copy(update={"fix": fix}) for n in range(5))
    assert REPORTS["text"].render(report(verdict="fail", findings=findings)).count("Exchange every pair.") == 1


def test_a_finding_in_a_file_says_the_byte():
    finding = Finding(
        rule="container/truncated",
        level="error",
        certainty="proved",
        message="Cut.",
        file="m.safetensors",
        byte=1234567,
    )
    assert "file      m.safetensors, byte 1,234,567" in REPORTS["text"].render(report(findings=(finding,)))


def test_the_layer_table_points_the_other_way_where_a_layer_is_swapped():
    told = REPORTS["text"].render(swapped_report(2))
    rows = {int(cells[0]): line for line in told.splitlines() if (cells := line.split()) and cells[0].isdigit()}
    assert set(rows) == {0, 1, 2, 3}
    for layer, line in rows.items():
        left, right = line.split("│")
        swapped = layer == 2
        assert ("━" in left) == swapped
        assert ("━" in right) != swapped
        assert line.endswith("swapped" if swapped else "as named")
    assert rows[0].split()[1:5] == ["-293.1", "~-0.4", "-23.4", "+0.87"]
    assert "~: from seeded sign draws" in told


@pytest.mark.parametrize(("width", "absent"), [(80, "T"), (72, "balance"), (60, "paired")])
def test_columns_without_room_are_left_out(width: int, absent: str):
    heading = REPORTS["text"].render(report(), width=width).partition("───")[0].split()
    assert absent not in heading
    assert "verdict" in heading
    assert absent in REPORTS["text"].render(report(), width=120).partition("───")[0].split()


@pytest.mark.parametrize(("width", "told"), [(80, False), (120, True)])
def test_the_legend_explains_t_where_it_is_shown(width: int, told: bool):
    lines = REPORTS["text"].render(report(), width=width).splitlines()
    assert any(line.startswith("T: ") for line in lines) == told


def test_what_to_do_stands_before_a_long_list():
    told = REPORTS["text"].render(swapped_report(2))
    assert told.index("  fix  ") < told.index("  tensors  ")


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"something_new": 1.0},
        {"gate_log10_p": None, "verdict": None},
        {"gate_log10_p": "NaN", "up_log10_p": "-Infinity", "up_draws_p": 0, "verdict": "undecidable: untrained"},
        {"gate_log10_p": "what", "balance_up": float("inf")},
        {"gate_draws_p": 0.0, "up_draws_p": 2},
    ],
)
def test_metrics_may_be_missing_or_strange(metrics):
    told = REPORTS["text"].render(report(layers=(healthy_layer(0), LayerMetrics(layer=1, metrics=metrics))))
    assert "as named" in told
    REPORTS["text"].render(report(layers=(LayerMetrics(layer=1, metrics=metrics),)))


def test_a_report_without_known_metrics_has_no_table():
    told = REPORTS["text"].render(report(layers=(LayerMetrics(layer=0, metrics={"something_new": 1.0}),)))
    assert "───" not in told
    assert "something_new" not in told


def test_coverage_says_what_was_checked_and_what_was_not_and_why():
    told = REPORTS["text"].render(
        report(
            coverage=(
                Coverage(
                    rule=RULE,
                    checked=27,
                    undecidable=tuple(
                        Undecidable(layer=n, reason="too small", would_decide="captured tensors") for n in (0, 1, 5)
                    ),
                ),
                Coverage(rule="norm/offset", checked=0, skipped=(Skipped(reason="no norm"),)),
                Coverage(rule="moe/experts-missing", checked=0, skipped=(Skipped(reason="no experts"),)),
                Coverage(rule="moe/experts-untrained", checked=0, skipped=(Skipped(reason="no experts"),)),
            )
        )
    )
    lines = [line.strip() for line in told.splitlines()]
    decided = lines.index("not decided")
    assert lines[decided + 1] == "too small; would decide: captured tensors"
    assert lines[decided + 2] == "ffn/gate-up-swapped (layers 0-1, 5)"
    skipped = lines.index("not checked")
    assert lines[skipped + 1 : skipped + 5] == [
        "no norm",
        "norm/offset",
        "no experts",
        "moe/experts-missing, moe/experts-untrained",
    ]
    checked = next(n for n, line in enumerate(lines) if line.startswith("checked ("))
    assert lines[checked + 1] == "ffn/gate-up-swapped\N{NO-BREAK SPACE}27"


def test_names_out_of_a_file_cannot_steer_the_terminal():
    evil = "a\x1b[2J[bold red]\nERROR fake\u202e:smile:"
    finding = swap_finding(0).model_copy(
        update={"tensors": (evil,), "message": evil, "rule": evil, "evidence": {evil: evil}, "file": evil}
    )
    made = report(
        verdict="fail",
        findings=(finding,),
        coverage=(Coverage(rule=evil, checked=1, skipped=(Skipped(reason=evil),)),),
        layers=(LayerMetrics(layer=0, metrics={"gate_log10_p": 1.0, "verdict": evil}),),
    )
    made = made.model_copy(
        update={"checkpoint": made.checkpoint.model_copy(update={"path": evil, "family": evil, "verified": evil})}
    )
    told = REPORTS["text"].render(made, width=200)
    assert "\x1b" not in told
    assert "\u202e" not in told
    assert not [line for line in told.splitlines() if line.startswith("ERROR fake")]
    assert "a\\x1b[2J[bold red]\\nERROR fake\\u202e:smile:" in told


@given(st.text())
def test_what_is_printable_stays_and_what_is_not_is_escaped(given_text: str):
    shown = printable(given_text)
    assert shown.isprintable()
    assert (shown == given_text) == given_text.isprintable()


@given(st.sets(st.integers(0, 200), min_size=1))
def test_layer_ranges_name_every_layer_once(layers: set[int]):
    named: list[int] = []
    for part in layer_ranges(layers).split(" ", 1)[1].split(", "):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(layers)


def test_a_line_break_in_a_name_makes_no_second_name():
    finding = swap_finding(0).model_copy(
        update={"tensors": ("gate\nup",), "file": "a\nb", "evidence": {"key": "one\ntwo"}, "layer": None}
    )
    told = REPORTS["text"].render(report(verdict="fail", findings=(finding,)))
    for written in ("tensor    gate\\nup", "file      a\\nb", "evidence  key one\\ntwo"):
        assert written in told


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (999_999_999, "1 GB"),
        (269_060_552, "269 MB"),
        (1_340_000_000_000, "1.34 TB"),
    ],
)
def test_bytes_are_told_in_a_readable_unit(count: int, told: str):
    assert byte_count(count) == told
