"""What the client loads, and where it reaches outside."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import glassblock_client
import pytest

CLIENT = Path(glassblock_client.__file__).parent
SERVICE_ONLY = ("torch", "fastapi", "starlette", "uvicorn", "safetensors", "jaxtyping", "pydantic_settings")
LOADED = """
import importlib, pkgutil, sys
{imports}
print("\\n".join(sys.modules))
"""
EVERY_MODULE = """
import glassblock_client, glassblock.reports
from glassblock_client import AsyncClient, Client, Overrides, Reply, Sample
for module in pkgutil.walk_packages(glassblock_client.__path__, "glassblock_client."):
    if module.name != "glassblock_client.cli.service":
        importlib.import_module(module.name)
"""


def modules_after(imports: str) -> set[str]:
    result = subprocess.run(
        [sys.executable, "-c", LOADED.format(imports=imports)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "imports",
    ["import glassblock_client; glassblock_client.Client", "import glassblock_client.cli", EVERY_MODULE],
    ids=["client", "command line", "every module"],
)
def test_the_client_loads_nothing_of_the_service(imports: str):
    loaded = modules_after(imports)
    assert "glassblock_client" in loaded
    assert not {name for name in loaded if name.split(".")[0] in SERVICE_ONLY}
    assert not {name for name in loaded if name.startswith(("glassblock.api", "glassblock.operations"))}


def test_help_is_had_without_numpy_http_and_messages():
    loaded = modules_after("import glassblock_client.cli")
    assert not loaded & {"numpy", "httpx", "pydantic", "rich.table", "glassblock.wire.endpoints"}


def importers_of(name: str) -> set[str]:
    found: set[str] = set()
    for file in CLIENT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            if any(name_ == name or name_.startswith(f"{name}.") for name_ in names):
                found.add(file.relative_to(CLIENT).as_posix())
    return found


def test_the_http_library_is_imported_in_one_module():
    assert importers_of("httpx") == {"backend.py"}


def test_the_service_is_reached_through_one_door():
    assert importers_of("glassblock.api") == {"cli/service.py"}


def test_public_names_are_there_and_others_are_not():
    for name in glassblock_client.__all__:
        assert getattr(glassblock_client, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Server'"):
        _ = glassblock_client.Server  # pyright: ignore[reportAttributeAccessIssue]
