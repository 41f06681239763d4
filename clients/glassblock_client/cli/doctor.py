"""`glassblock doctor`: what is installed, what works, and what to do about the rest."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import glassblock
import typer
from glassblock.errors import GlassblockError
from glassblock.wire.printable import printable
from rich.table import Table
from rich.text import Text

from glassblock_client.cli.connection import TimeoutOption, UrlOption, connected, with_extra
from glassblock_client.cli.screen import show, working
from glassblock_client.client import Client

CLIENT_PACKAGES = ("anyio", "httpx", "numpy", "pydantic", "rich", "typer")
SERVICE_PACKAGES = (
    "torch", "safetensors", "tokenizers", "fastapi", "starlette", "uvicorn", "pydantic-settings", "jaxtyping",
    "sqlalchemy", "alembic", "sse-starlette", "prometheus-client", "structlog", "limits", "xxhash",
)  # fmt: skip
"""What pyproject.toml asks for, the most telling first."""
TORCH_SECONDS = 120
DRIVER_SECONDS = 20
SUFFIX = ".safetensors"
FILES = 1000
READ_BYTES = 256 << 20
"""Enough to tell a disk from a network, and little enough to wait for."""

LOOK_AT_TORCH = """
import torch
print(torch.__version__)
print(torch.version.cuda or "")
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
        here = () if url else (*_service_packages(), *_roots())
        checks = [*_here(), *here, *_service(context, url, timeout)]
    show(_told(checks))
    return 0 if all(check.good for check in checks) else 1


def _here() -> Iterator[Check]:
    yield Check("glassblock", glassblock.__version__)
    yield Check("python", f"{platform.python_version()}, {sys.executable}")
    yield Check("platform", f"{platform.platform()}, {os.cpu_count()} CPUs")
    yield _packages("client packages", CLIENT_PACKAGES, advice="pip install glassblock (in a clone pip install .)")


def _service_packages() -> Iterator[Check]:
    """torch is looked at by another process: the client never loads it, and a broken build may crash."""
    packages = _packages("service packages", SERVICE_PACKAGES, advice=f"{with_extra('service')}, or use --url")
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
    version, cuda, *devices = asked.stdout.splitlines()
    yield Check("torch", f"{version}, {f'for CUDA {cuda}' if cuda else 'for the CPU alone'}")
    yield _driver(for_cuda=bool(cuda), devices=devices)
    yield Check("devices", "; ".join([*devices, "cpu"]))


def _driver(*, for_cuda: bool, devices: Sequence[str]) -> Check:
    """The NVIDIA driver, which torch needs for a GPU and which is installed apart from it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Check("driver", "no NVIDIA driver here (nvidia-smi is not found)")
    query = [program, "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=DRIVER_SECONDS, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return Check("driver", "does not answer", good=False, advice="look at nvidia-smi; a restart may be needed")
    if asked.returncode != 0:
        first = (asked.stdout or asked.stderr).strip().partition("\n")[0]
        return Check("driver", f"fails: {first}", good=False, advice="look at nvidia-smi; a restart may be needed")
    found = "; ".join(asked.stdout.strip().split("\n"))
    if devices:
        return Check("driver", found)
    why = "torch does not see its GPU" if for_cuda else "this torch is for the CPU alone"
    return Check("driver", f"{found}; {why}", good=False, advice="install a CUDA build of torch that fits the driver")


def _roots() -> Iterator[Check]:
    """How fast the disk under the roots is read: an audit takes at least the size of a checkpoint divided by that."""
    for root in filter(None, os.environ.get("GLASSBLOCK_ROOTS", "").split(os.pathsep)):
        try:
            largest = _largest_file(Path(root))
            if largest is None:
                yield Check("root", f"{root}: no .safetensors file", good=False, advice=f"put checkpoints under {root}")
                continue
            size, seconds = _read(largest)
        except (OSError, ValueError) as fault:
            yield Check("root", f"{root}: {fault}", good=False, advice="look at its permissions, or GLASSBLOCK_ROOTS")
            continue
        yield Check("root", f"{root}: {size / 2**20:,.0f} MiB read at {size / 2**20 / seconds:,.0f} MiB/s")


def _largest_file(root: Path) -> Path | None:
    """Among the first FILES weights below `root`: a store of thousands need not be walked to the end."""
    if not root.is_dir():
        raise NotADirectoryError("is no folder" if os.path.lexists(root) else "does not exist")
    files = (Path(folder) / name for folder, _, names in os.walk(root) for name in names if name.endswith(SUFFIX))
    return max(islice(files, FILES), key=lambda file: file.stat().st_size, default=None)


def _read(file: Path) -> tuple[int, float]:
    """Bytes read from the start of a file, and how long that took; what the system holds in memory comes faster."""
    began, size = time.perf_counter(), 0
    with file.open("rb", buffering=0) as stream:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while size < READ_BYTES and (piece := stream.read(1 << 22)):
            size += len(piece)
    return size, max(time.perf_counter() - began, 1e-9)


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
    for name, told in health.checks.items():
        if told.startswith("low"):
            yield Check(name, told, good=False, advice="free space where GLASSBLOCK_DATA lies, or keep fewer audits")


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
