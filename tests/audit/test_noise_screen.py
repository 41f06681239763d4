"""Layers whose gate and up are both noise are undecidable from their screens alone: as the whole test would say."""

from pathlib import Path

import pytest
from gates import exchange, train
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.numerics.gate_or_up import SPREAD_ENOUGH, GateScreen
from glassblock.numerics.sign_screen import SignScreen
from glassblock.wire.audits import Report
from makers import Tiny, tiny_checkpoint
from safetensors.torch import load_file, save_file

TINY = Tiny(hidden=64, intermediate=256, expert_width=256, layers=4)
SINGLE = "model.safetensors"


def verdicts(report: Report) -> list[object]:
    return [layer.metrics.get("verdict") for layer in report.layers]


def screened_as_noise(report: Report) -> int:
    return sum(layer.metrics == layer.metrics | {"verdict": "undecidable", "screened": 1} for layer in report.layers)


def as_the_whole_test_says(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """The report with the screen, found equal to that without it in everything but what was computed."""
    report = audit_checkpoint(directory)
    with monkeypatch.context() as patch:
        patch.setattr(GateScreen, "noise", property(lambda _self: False))
        whole = audit_checkpoint(directory)
    assert verdicts(report) == verdicts(whole)
    assert report.findings == whole.findings
    assert report.verdict == whole.verdict
    assert report.coverage == whole.coverage
    assert screened_as_noise(whole) == 0
    return report


@pytest.mark.parametrize("family", ["llama", "phi3", "granitemoe"])
def test_random_networks(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = as_the_whole_test_says(tiny_checkpoint(family, tmp_path, tiny=TINY), monkeypatch)
    assert report.verdict == "inconclusive"
    assert screened_as_noise(report) >= 3  # one in fifty is looked at more closely by chance


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("strength", [0.03, 0.06, 0.1, 0.3])
def test_gates_from_faint_to_plain(
    strength: float, exchanged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = train(tiny_checkpoint("llama", tmp_path, tiny=TINY), strength=strength)
    if exchanged:
        exchange(directory, *((layer, None) for layer in range(4)))
    report = as_the_whole_test_says(directory, monkeypatch)
    if strength == 0.3:
        assert verdicts(report) == ["swapped" if exchanged else "as-named"] * 4


def test_untrained_layers_beside_trained_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_checkpoint("llama", tmp_path, tiny=TINY)
    noise = load_file(directory / SINGLE)
    trained = load_file(train(directory) / SINGLE)
    mixed = {name: noise[name] if ".0." in name or ".2." in name else tensor for name, tensor in trained.items()}
    save_file(mixed, directory / SINGLE, metadata={"format": "pt"})
    exchange(directory, (1, None))
    report = as_the_whole_test_says(directory, monkeypatch)
    assert verdicts(report) == ["undecidable", "swapped", "undecidable", "as-named"]


def test_every_bound_is_computed_where_that_is_asked(tmp_path: Path) -> None:
    report = audit_checkpoint(tiny_checkpoint("llama", tmp_path, tiny=TINY), AuditQuestion(certify=True))
    assert screened_as_noise(report) == 0
    assert all("gate_log10_p" in layer.metrics for layer in report.layers)


def test_few_neurons_in_many_dimensions_go_to_the_whole_test() -> None:
    quiet = SignScreen(1.0, 0.5, above=False, rows=64, dropped=0, variance=SPREAD_ENOUGH)
    assert GateScreen(quiet, quiet).noise
    for other in (
        quiet._replace(variance=SPREAD_ENOUGH - 1),
        quiet._replace(variance=float("nan")),
        quiet._replace(z=3.0),
        quiet._replace(z=float("nan")),
    ):
        assert not GateScreen(quiet, other).noise
        assert not GateScreen(other, quiet).noise
