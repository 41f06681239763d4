"""make: every target that a document names is there, each says what it does, and an old Python is refused plainly."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.dockerfile import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
PHONY = set(re.findall(r"^\.PHONY:(.*)$", MAKEFILE, re.MULTILINE)[0].split())
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / ".ci" / "run", *sorted((ROOT / "docs").rglob("*.md"))]


def _make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def _named_in(text: str) -> set[str]:
    """`make X` in a code span, or a line of a code block that starts with it."""
    return set(re.findall(r"(?:`|^\s*(?:\$ )?)make ((?!-)[a-z0-9-]+)", text, re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_tells_to_make_can_be_made(document: Path) -> None:
    assert _named_in(document.read_text()) <= PHONY


def test_the_readme_names_the_first_two_commands() -> None:
    assert {"demo", "test"} <= _named_in((ROOT / "README.md").read_text())


def test_help_is_the_default_and_lists_every_target() -> None:
    answer = _make()
    assert answer.returncode == 0, answer.stderr
    listed = dict(re.findall(r"^  make (\S+) +(\S.*)$", answer.stdout, re.MULTILINE))
    assert set(listed) == PHONY


@pytest.mark.parametrize("target", sorted(PHONY - {"help", "clean"}))
def test_every_target_fills_its_environment_first(target: str, tmp_path: Path) -> None:
    commands = _make("--dry-run", f"VENV={tmp_path}/.venv", target)
    assert commands.returncode == 0, commands.stderr
    assert commands.stdout.index(f"-m venv {tmp_path}/.venv") < commands.stdout.index("-m pip install")


def test_a_python_that_is_too_old_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\ncase "$1" in -V) echo Python 3.9.19;; *) exit 1;; esac\n')
    old.chmod(0o755)
    answer = _make(f"PYTHON={old}", f"VENV={tmp_path}/.venv", "demo")
    assert answer.returncode != 0
    assert "Python 3.11 or newer is needed" in answer.stdout
    assert "Python 3.9.19" in answer.stdout
    assert not (tmp_path / ".venv").exists()


def test_a_python_that_is_absent_is_named(tmp_path: Path) -> None:
    answer = _make("PYTHON=python-that-is-absent", f"VENV={tmp_path}/.venv", "demo")
    assert answer.returncode != 0
    assert "python-that-is-absent is not here" in answer.stdout


def test_an_environment_of_ones_own_is_used_as_it_is() -> None:
    commands = _make("--dry-run", "PY=python3", "gpu-check")
    assert commands.stdout.split() == ["python3", "-m", "pytest", "-m", "gpu"]


def test_smollm2_installs_what_it_imports_and_no_more(tmp_path: Path) -> None:
    commands = _make("--dry-run", f"VENV={tmp_path}/.venv", "smollm2").stdout
    (install,) = re.findall(r"-m pip install (.*)", commands)
    packages = set(re.findall(r"(?<= )[a-z0-9]+(?= |$)", install.partition("constraints.txt")[2]))
    tool = ast.parse((ROOT / "tools" / "smollm2.py").read_text())
    beside = {file.stem for file in (ROOT / "tools").glob("*.py")}
    imported = {name for node in ast.walk(tool) for name in _modules(node)} - sys.stdlib_module_names - beside
    assert packages == imported
    assert all(f"{package}==" in (ROOT / "constraints.txt").read_text() for package in packages)


def _modules(node: ast.AST) -> list[str]:
    """The packages that a node imports."""
    if isinstance(node, ast.ImportFrom):
        return [(node.module or "").partition(".")[0]]
    return [alias.name.partition(".")[0] for alias in node.names] if isinstance(node, ast.Import) else []
