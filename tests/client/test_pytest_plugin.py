"""The pytest plugin, in a test run of its own, on the shipped example."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from glassblock.errors import InvalidValue, UnknownCheckpoint
from glassblock.reports import REPORTS
from glassblock_client.pytest_plugin import assert_checkpoint_ok
from reports.report_makers import report, swapped_report, undecided_report

from client.fake_service import listening
from client.test_command_line import audited

pytest_plugins = ["pytester"]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Blocked under the name that an installation gives it, since the same module comes under its own.
PLUGIN = ("-p", "no:glassblock", "-p", "glassblock_client.pytest_plugin", "-p", "no:cacheprovider")


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "KEY"):
        monkeypatch.delenv(f"GLASSBLOCK_{name}", raising=False)
    monkeypatch.setenv("GLASSBLOCK_DEVICE", "cpu")


@pytest.fixture
def swapped(tmp_path: Path) -> Path:
    planter = _example("plant_swap")
    planter.plant_swap(EXAMPLES / "tiny-llama", tmp_path / "swapped", [2])
    return tmp_path / "swapped"


def _example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_healthy_checkpoint_passes_and_a_swapped_one_fails_with_its_report(pytester: pytest.Pytester, swapped: Path):
    pytester.makepyfile(
        f"""
        def test_healthy(assert_checkpoint_ok):
            assert assert_checkpoint_ok({str(EXAMPLES / "tiny-llama")!r}).verdict == "pass"

        def test_swapped(assert_checkpoint_ok):
            assert_checkpoint_ok({str(swapped)!r}, rules=["ffn/gate-up-swapped"])
        """
    )
    # In a process of its own: pytester would forget half of alembic, which later tests of this process need whole.
    result = pytester.runpytest_subprocess(*PLUGIN)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*AssertionError: *swapped", "*ERROR  ffn/gate-up-swapped  layer 2*", "*fix *Exchange*"]
    )
    assert "REPORTS[" not in result.stdout.str()
    told = "".join(line.removeprefix("E").strip() for line in result.stdout.str().splitlines())
    assert f"glassblockfix{swapped}--dry-run" in told.replace(" ", "")


def test_what_a_baseline_knows_passes(swapped: Path, tmp_path: Path):
    with pytest.raises(AssertionError, match="gate-up-swapped"):
        assert_checkpoint_ok(swapped)
    known = {"baseline_version": "1", "checkpoint": "swapped"}
    prefix = "model.layers.2.mlp."
    tensors = [f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"]
    finding = {"rule": "ffn/gate-up-swapped", "level": "error", "layer": 2, "tensors": tensors}
    file = tmp_path / "known.json"
    file.write_text(json.dumps(known | {"findings": [finding]}))
    told = assert_checkpoint_ok(swapped, baseline=file)
    assert [finding.known for finding in told.findings] == [True]


@pytest.mark.parametrize(
    ("finished", "options", "passes"),
    [
        (report(), {}, True),
        (swapped_report(2), {}, False),
        (swapped_report(2), {"fail_on": "never"}, True),
        (undecided_report(), {}, False),
        (undecided_report(), {"allow_inconclusive": True}, True),
    ],
)
def test_it_passes_where_the_command_line_exits_with_0(
    monkeypatch: pytest.MonkeyPatch, finished: object, options: dict[str, object], passes: bool
):
    service = audited(finished)  # pyright: ignore[reportArgumentType]
    with listening(service) as url:
        monkeypatch.setenv("GLASSBLOCK_URL", url)
        monkeypatch.setenv("GLASSBLOCK_KEY", "s3cret")
        if passes:
            assert assert_checkpoint_ok("org/model/", **options) == finished
        else:
            with pytest.raises(AssertionError) as failed:
                assert_checkpoint_ok("org/model", **options)
            told = REPORTS["text"].render(finished, width=100, asked=f"org/model --url {url}")
            assert str(failed.value) == f"org/model\n\n{told}"
    assert service.sent()["checkpoint"] == "org/model"
    assert service.asked[0].headers["authorization"] == "Bearer s3cret"


def test_what_cannot_be_asked_is_an_error_and_no_failure(tmp_path: Path):
    with pytest.raises(UnknownCheckpoint):
        assert_checkpoint_ok(tmp_path / "absent")
    with pytest.raises(InvalidValue, match="fail_on"):
        assert_checkpoint_ok(tmp_path, fail_on="note")  # pyright: ignore[reportArgumentType]


def test_a_family_of_ones_own_goes_to_the_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    row = tmp_path / "mine.toml"
    row.write_text('like = "llama"\nname = "mine"\n')
    service = audited(report())
    with listening(service) as url:
        monkeypatch.setenv("GLASSBLOCK_URL", url)
        assert_checkpoint_ok("org/model", family_file=row)
        with pytest.raises(InvalidValue, match="both given"):
            assert_checkpoint_ok("org/model", family="llama", family_file=row)
    assert service.sent()["family_row"] == {"like": "llama", "name": "mine"}
