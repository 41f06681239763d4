"""The numbers that docstrings pin."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["norms", "norm_jacobians", "budgets"])
def test_examples_in_docstrings_hold(module: str) -> None:
    results = doctest.testmod(importlib.import_module(f"glassblock.numerics.{module}"))
    assert results.attempted > 0
    assert results.failed == 0
