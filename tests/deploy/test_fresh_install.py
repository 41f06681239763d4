"""The client alone, installed into a fresh environment: no torch there, and it talks to a running service."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from makers import tiny_checkpoint
from served import free_port

from deploy.dockerfile import ROOT

pytestmark = pytest.mark.real

# What pip writes when no package index answers; any other failure to install is a defect.
UNREACHED = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "ProxyError")
# Of the service and of the tests: nothing of it may come with the client.
NOT_THE_CLIENTS = {"torch", "safetensors", "fastapi", "starlette", "uvicorn", "jaxtyping", "transformers", "pytest"}
START_S = 60.0  # importing torch on two busy cores; a healthy start takes a tenth of it


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of an environment into which the project was installed as a pipeline would: without extras."""
    folder = tmp_path_factory.mktemp("fresh")
    copy = folder / "glassblock"  # setuptools writes beside what it builds
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, copy)
    for name in ("service", "clients"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    programs = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    install = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--retries",
        "2",
        "--constraint",
        "constraints.txt",
        ".",
    ]
    installed = ran(programs, "python", *install, cwd=copy)
    if installed.returncode and any(sign in installed.stderr for sign in UNREACHED):
        pytest.skip("no package index is reached from here")
    assert installed.returncode == 0, installed.stderr
    return programs


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service that the tests' own interpreter runs, over one tiny checkpoint."""
    root = tmp_path_factory.mktemp("served")
    tiny_checkpoint("llama", root / "llama")
    port = free_port()
    serve = ["serve", "--checkpoints", str(root), "--port", str(port), "--device", "cpu"]
    service = subprocess.Popen(
        [sys.executable, "-c", "from glassblock_client.cli import main; main()", *serve],
        env={name: value for name, value in os.environ.items() if not name.startswith("GLASSBLOCK_")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until_ready(service, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        service.terminate()
        service.wait(30)


def until_ready(service: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert service.poll() is None, f"the service ended with {service.returncode}"
        try:
            with urllib.request.urlopen(f"{url}/health/ready", timeout=5):
                return
        except urllib.error.URLError:
            time.sleep(0.1)
    raise TimeoutError(f"not ready within {START_S} s")


def ran(programs: Path, program: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """One program of the fresh environment, told nothing of the tests' own."""
    told = {
        name: value for name, value in os.environ.items() if not name.startswith(("GLASSBLOCK_", "PYTHON", "COLUMNS"))
    }
    return subprocess.run(
        [programs / program, *arguments],
        cwd=cwd or programs,
        env=told,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


LOOK_AROUND = """
import importlib.metadata, json, sys
import glassblock_client
modules = sorted(name for name in sys.modules if "." not in name)
found = [(one.metadata["Name"].lower().replace("_", "-"), one.version) for one in importlib.metadata.distributions()]
json.dump({"modules": modules, "packages": dict(found), "file": glassblock_client.__file__}, sys.stdout)
"""


def test_the_client_comes_without_torch_and_in_the_pinned_versions(fresh: Path) -> None:
    look = ran(fresh, "python", "-c", LOOK_AROUND)
    assert look.returncode == 0, look.stderr
    found = json.loads(look.stdout)
    assert Path(found["file"]).is_relative_to(fresh.parent)
    assert not NOT_THE_CLIENTS & set(found["packages"])
    assert not NOT_THE_CLIENTS & set(found["modules"])
    assert {"httpx", "numpy", "pydantic", "rich", "typer"} <= set(found["packages"])
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    of_the_environment = {"pip", "setuptools", "wheel", "glassblock"}
    assert {name: pins[name] for name in found["packages"].keys() - of_the_environment} == {
        name: version for name, version in found["packages"].items() if name not in of_the_environment
    }
    torch = ran(fresh, "python", "-c", "import torch")
    assert torch.returncode == 1
    assert "ModuleNotFoundError" in torch.stderr


def test_types_travel_with_it(fresh: Path) -> None:
    packages = [path.parent.name for path in fresh.parent.rglob("site-packages/glassblock*/py.typed")]
    assert sorted(packages) == ["glassblock", "glassblock_client"]


def test_help_and_version(fresh: Path) -> None:
    told = ran(fresh, "glassblock", "--help")
    assert told.returncode == 0, told.stderr
    for command in ("audit", "run", "norms", "budget", "rules", "families", "serve", "demo", "doctor"):
        assert command in told.stdout
    version = ran(fresh, "glassblock", "--version")
    assert re.fullmatch(r"glassblock \d+\.\d+\.\d+\S*\n", version.stdout)


def test_rules_of_a_running_service(fresh: Path, url: str) -> None:
    every = ran(fresh, "glassblock", "rules", "--url", url)
    assert every.returncode == 0, every.stderr
    assert "ffn/gate-up-swapped" in every.stdout
    one = ran(fresh, "glassblock", "rules", "ffn/gate-up-swapped", "--url", url)
    assert one.returncode == 0, one.stderr
    assert "ffn/gate-up-swapped" in one.stdout


def test_a_block_is_run_there(fresh: Path, url: str, tmp_path: Path) -> None:
    stages = tmp_path / "stages.safetensors"
    run = ran(
        fresh, "glassblock", "run", "llama", "--layer", "0", "--sample", "2", "--output", str(stages), "--url", url
    )
    assert run.returncode == 0, run.stderr
    for stage in ("normed", "gate", "hidden", "output"):
        assert stage in run.stdout
    body = stages.read_bytes()
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    assert header["hidden"]["shape"] == [2, 112]


USE_THE_CLIENT = """
import sys
import numpy as np
from glassblock_client import Client, Overrides

x = np.random.default_rng(0).standard_normal((3, 48), dtype=np.float32)
with Client(sys.argv[1]) as client:
    run = client.run_block("llama", 1, x=x, return_tensors=True)
    half = client.run_block(
        "llama", 1, x=x, return_tensors=True, dtype="native", overrides=Overrides(dtype="bfloat16")
    )
assert np.array_equal(run.tensors["x"], x)
apart = np.abs(half.tensors["output"] - run.tensors["output"]).max()
assert 0 < apart < 0.1, apart
assert not half.tensors["output"].view(np.uint32)[0, 0] & 0xFFFF, "bfloat16, held in float32"
"""


def test_the_python_client_reads_tensors_and_bfloat16_without_torch(fresh: Path, url: str) -> None:
    used = ran(fresh, "python", "-c", USE_THE_CLIENT, url)
    assert used.returncode == 0, used.stderr


def test_a_checkpoint_is_audited_there(fresh: Path, url: str, tmp_path: Path) -> None:
    """Random weights: nothing is wrong, and which tensor is the gate cannot be told."""
    audit = ran(fresh, "glassblock", "audit", "llama", "--url", url, "--format", "json")
    assert audit.returncode == 3, audit.stderr
    report = json.loads(audit.stdout)
    assert report["verdict"] == "inconclusive"
    assert report["checkpoint"]["family"] == "llama"
    written = tmp_path / "report.json"
    options = ["--allow-inconclusive", "--format", "json", "--output", str(written)]
    allowed = ran(fresh, "glassblock", "audit", "llama", "--url", url, *options)
    assert allowed.returncode == 0, allowed.stderr
    assert json.loads(written.read_text())["verdict"] == "inconclusive"
    table = ran(fresh, "glassblock", "audit", "llama", "--url", url)
    assert table.returncode == 3, table.stderr
    assert "inconclusive" in table.stdout.lower()


def test_without_a_url_it_says_what_is_missing(fresh: Path, tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path / "llama")
    refused = ran(fresh, "glassblock", "audit", str(tmp_path / "llama"))
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert "is not installed" in refused.stderr
    assert "pip install 'glassblock[service]'" in refused.stderr
    assert "--url" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_service_that_is_not_there_is_named(fresh: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody can answer there
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        refused = ran(fresh, "glassblock", "rules", "--url", address)
    assert refused.returncode == 2
    assert address in refused.stderr
    assert "Traceback" not in refused.stderr
