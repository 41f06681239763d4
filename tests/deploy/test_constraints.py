"""One file of pins serves every machine: it is complete, exact, and names no index."""

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from deploy.dockerfile import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
PINS = {canonicalize_name(pin.name): pin for pin in map(Requirement, LINES)}
DIRECT = [
    requirement
    for text in (*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra))
    if (requirement := Requirement(text)).name != PROJECT["name"]
]


def _pinned(pin: Requirement) -> Version:
    (specifier,) = pin.specifier
    assert specifier.operator == "==", f"{pin} is no exact pin"
    return Version(specifier.version)


@pytest.mark.parametrize("requirement", DIRECT, ids=lambda requirement: requirement.name)
def test_every_direct_dependency_is_pinned_within_its_range(requirement: Requirement) -> None:
    pin = PINS[canonicalize_name(requirement.name)]
    assert _pinned(pin) in requirement.specifier
    for python in ("3.11", "3.12", "3.13"):
        for machine in ("x86_64", "aarch64", "arm64"):
            for system in ("linux", "darwin", "win32"):
                there = {"python_version": python, "platform_machine": machine, "sys_platform": system}
                wanted = requirement.marker is None or requirement.marker.evaluate(there)
                assert not wanted or pin.marker is None or pin.marker.evaluate(there), f"{pin} leaves out {there}"


def test_each_name_is_pinned_once_and_exactly() -> None:
    assert len(PINS) == len(LINES)
    for pin in PINS.values():
        assert pin.url is None
        _pinned(pin)


def test_torch_is_pinned_without_a_build_so_that_the_index_decides() -> None:
    assert _pinned(PINS["torch"]) == Version("2.13.0")
    assert _pinned(PINS["torch"]).local is None
