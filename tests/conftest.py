"""Fixtures shared by all tests."""

import importlib
from pathlib import Path
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("untimed", deadline=None)  # how long one example takes is the machine's
hypothesis.settings.load_profile("untimed")

TESTS = Path(__file__).resolve().parent

LONG = frozenset(
    {
        "audit/test_against.py",
        "audit/test_behaviour.py",
        "audit/test_captures.py",
        "audit/test_early_findings.py",
        "audit/test_expert_gates.py",
        "audit/test_gate_screens.py",
        "audit/test_layers_without_a_network.py",
        "audit/test_merges.py",
        "audit/test_orientation.py",
        "audit/test_reference.py",
        "audit/test_rotary_order.py",
        "audit/test_stored_gates.py",
        "audit/test_trained_kinds.py",
        "audit/test_two_networks_in_a_layer.py",
        "checkpoint/test_biases_and_norms_by_file.py",
        "checkpoint/test_encoders.py",
        "checkpoint/test_healthy_families.py",
        "checkpoint/test_language_model_within.py",
        "checkpoint/test_layer_loading.py",
        "checkpoint/test_mixtures.py",
        "checkpoint/test_oracle.py",
        "checkpoint/test_recognition.py",
        "client/test_audit_captures.py",
        "client/test_explain_command.py",
        "client/test_jacobian_command.py",
        "client/test_pipelines.py",
        "client/test_process.py",
        "compatibility/test_versions.py",
        "deploy/test_entry_point.py",
        "jobs/test_bodies.py",
        "jobs/test_kills.py",
        "jobs/test_worker.py",
        "numerics/test_block_norms.py",
        "numerics/test_depth_curves.py",
        "numerics/test_explanation.py",
        "numerics/test_layer.py",
        "numerics/test_token_coupled_norms.py",
        "repair/test_interruptions.py",
        "repair/test_round_trips.py",
        "service/test_body_budget.py",
        "service/test_connections.py",
        "service/test_doors.py",
        "service/test_every_job.py",
        "service/test_exit_statuses.py",
        "service/test_explanations_over_http.py",
        "service/test_jacobian_parts_over_http.py",
        "service/test_jacobians_over_http.py",
        "service/test_jobs_service.py",
        "service/test_landing.py",
        "service/test_long_json.py",
        "service/test_path_escapes.py",
        "service/test_plans.py",
        "service/test_residuals_over_http.py",
        "service/test_serving.py",
    }
)
"""Modules that take long, measured: they are part of `make ci`, not of `make test`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of long modules."""
    for item in items:
        if item.path.is_relative_to(TESTS) and item.path.relative_to(TESTS).as_posix() in LONG:
            item.add_marker(pytest.mark.long)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Count what the oracle reproduced: model types, and norms by role."""
    found: dict[tuple[str, str], int] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties if report.when == "call" else ():
            if name == "oracle":
                what, model_type, number = value
                found[what, model_type] = max(number, found.get((what, model_type), 0))
    counts: dict[str, int] = {}
    for (what, _), number in found.items():
        counts[what] = counts.get(what, 0) + number
    if counts:
        told = ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))
        terminalreporter.write_line(f"oracle: reproduced {told}")


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """`.single` and `.sharded`: SmolLM2-135M as Hugging Face directories, fetched once into a cache.

    Skips only where no registry is reached and the cache is empty. Workers wait for one another.
    """
    tool = importlib.import_module("smollm2")  # now: other tests need no dequantiser
    try:
        return tool.directories()
    except tool.RegistryUnreached as fault:
        pytest.skip(str(fault))
