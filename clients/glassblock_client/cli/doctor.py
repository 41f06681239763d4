"""`glassblock doctor`: what is installed, what works, and what to do about the rest."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import glassblock
import typer
from glassblock.errors import GlassblockError
from glassblock.wire.printable import printable
from rich.table import Table
from rich.text import Text

from glassblock_client.cli.connection import TimeoutOption, UrlOption, connected
from glassblock_client.cli.screen import show, working
from glassblock_client.client import Client

CLIENT_PACKAGES = ("httpx", "numpy", "pydantic", "rich", "typer")
SERVICE_PACKAGES = ("torch", "safetensors", "fastapi", "uvicorn", "pydantic-settings", "jaxtyping", "anyio")
TORCH_SECONDS = 120
LOOK_AT_TORCH = """
import torch
print(torch.__version__)
for number in range(torch.cuda.device_count()):
    device = torch.cuda.get_device_properties(number)
    print(f"cuda:{number}  {device.name}, {device.total_memory / 2**30:.0f} GiB")
"""


@dataclass(frozen=True)
class Check:
    """One thing looked at. `advice` says what to do where it is not good."""

    subject: str
    found: str
    good: bool = True
    advice: str | None = None


def doctor(context: typer.Context, *, url: UrlOption = None, timeout: TimeoutOption = None) -> int:
    """Look at this installation and say what to do next.

    With --url also at the service there; without, at one in this process.
    Exit status: 0 when everything needed works, else 1.
    """
    with working("looking"):
        checks = [*_here(), *(_service_packages() if not url else ()), *_service(context, url, timeout)]
    show(_told(checks))
    return 0 if all(check.good for check in checks) else 1


def _here() -> Iterator[Check]:
    yield Check("glassblock", glassblock.__version__)
    yield Check("python", f"{platform.python_version()}, {sys.executable}")
    yield Check("platform", f"{platform.platform()}, {os.cpu_count()} CPUs")
    yield _packages("client packages", CLIENT_PACKAGES, advice="pip install glassblock")


def _service_packages() -> Iterator[Check]:
    """torch is looked at by another process: the client never loads it, and a broken build may crash."""
    packages = _packages("service packages", SERVICE_PACKAGES, advice="pip install 'glassblock[service]', or use --url")
    yield packages
    if not packages.good:
        return
    try:
        asked = subprocess.run(  # noqa: S603  this Python, a constant program
            [sys.executable, "-c", LOOK_AT_TORCH], capture_output=True, text=True, timeout=TORCH_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        yield Check("torch", f"did not load in {TORCH_SECONDS} s", good=False, advice="reinstall torch")
        return
    if asked.returncode != 0:
        last = asked.stderr.strip().rpartition("\n")[2]
        yield Check("torch", f"does not load: {last}", good=False, advice="reinstall torch")
        return
    version, *devices = asked.stdout.strip().split("\n")
    yield Check("torch", version)
    yield Check("devices", "; ".join([*devices, "cpu"]))


def _service(context: typer.Context, url: str | None, timeout: float | None) -> Iterator[Check]:
    try:
        with connected(context, url=url, timeout=timeout, device=None) as client:
            yield from _asked(client, url or "in this process")
    except GlassblockError as error:
        yield Check("service", error.message, good=False, advice=error.hint)
    except Exception as defect:  # a doctor looks at what is broken, and must not break on it
        yield Check("service", f"{type(defect).__name__}: {defect}", good=False, advice="reinstall it")


def _asked(client: Client, where: str) -> Iterator[Check]:
    capabilities = client.capabilities()
    yield Check("service", f"{where}, version {capabilities.glassblock}, on {capabilities.device}")
    if capabilities.glassblock != glassblock.__version__:
        yield Check("versions", "client and service differ", advice="install the same on both sides")
    health = client.ready()
    ready = health.status == "ready"
    checks = "; ".join(f"{name}: {told}" for name, told in health.checks.items())
    yield Check("readiness", f"{health.status}{f' ({checks})' if checks else ''}", good=ready, advice="see its log")


def _packages(subject: str, names: Sequence[str], *, advice: str) -> Check:
    versions = {name: _version(name) for name in names}
    missing = [name for name, version in versions.items() if version is None]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    if missing:
        found = f"{found}; missing: {', '.join(missing)}".removeprefix("; ")
    return Check(subject, found, good=not missing, advice=advice)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _told(checks: Sequence[Check]) -> list[Table | Text]:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for check in checks:
        mark = Text("ok", "green") if check.good else Text("!!", "bold red")
        grid.add_row(mark, check.subject, printable(check.found))
    todo = [f"{check.subject}: {check.advice}" for check in checks if not check.good and check.advice]
    closing = "; ".join(todo) or "glassblock demo, or glassblock audit PATH"
    return [grid, Text(), Text(printable(f"Next: {closing}"), "bold")]
