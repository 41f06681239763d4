"""The compose file: valid in every profile, a GPU in one, checkpoints read-only, nothing published to others."""

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from glassblock.api.settings import Settings

from deploy.dockerfile import ROOT, image

COMPOSE = ROOT / "docker-compose.yml"
SERVICES = {"gpu": "glassblock", "cpu": "glassblock-cpu"}


def _config(
    profile: str, *arguments: str, file: Path = COMPOSE, **environment: str
) -> subprocess.CompletedProcess[str]:
    compose = Path(sysconfig.get_path("scripts")) / "docker-compose"
    return subprocess.run(
        [compose, "--file", file, "--profile", profile, "config", *arguments],
        env={"PATH": os.defpath, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def _service(profile: str, **environment: str) -> dict[str, Any]:
    answer = _config(profile, "--format", "json", **environment)
    assert answer.returncode == 0, answer.stderr
    services = json.loads(answer.stdout)["services"]
    assert list(services) == [SERVICES[profile]]
    return services[SERVICES[profile]]


@pytest.mark.parametrize("profile", [*SERVICES, "postgres"])
def test_it_is_valid_in_every_profile(profile: str) -> None:
    answer = _config(profile, "--quiet")
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("- driver: nvidia", "- drivers: nvidia"),
        ("reservations:", "reservation:"),
        ("read_only: true", "readonly: true"),
        ("start_period: 60s", "start_period: soon"),
    ],
)
def test_a_planted_wrong_key_is_rejected(tmp_path: Path, right: str, wrong: str) -> None:
    text = COMPOSE.read_text()
    assert right in text
    planted = tmp_path / "docker-compose.yml"
    planted.write_text(text.replace(right, wrong))
    answer = _config("gpu", "--quiet", file=planted)
    assert answer.returncode != 0
    assert wrong.strip("- ").split(":")[0] in answer.stderr or "soon" in answer.stderr


def test_only_the_gpu_profile_asks_for_a_gpu() -> None:
    gpu = _service("gpu")["deploy"]["resources"]["reservations"]["devices"]
    assert gpu == [{"driver": "nvidia", "count": -1, "capabilities": ["gpu"]}]
    assert _service("gpu", GPUS="1")["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 1
    assert "deploy" not in _service("cpu")


def test_with_postgres_the_jobs_lie_there_and_its_port_is_nobody_elses() -> None:
    answer = _config("postgres", "--format", "json", POSTGRES_PASSWORD="hard-to-guess")
    assert answer.returncode == 0, answer.stderr
    services = json.loads(answer.stdout)["services"]
    assert set(services) == {"postgres", "glassblock-postgres"}
    database, service = services["postgres"], services["glassblock-postgres"]
    assert "ports" not in database
    assert service["environment"]["GLASSBLOCK_DATABASE"] == "postgresql://glassblock:hard-to-guess@postgres/glassblock"
    assert service["environment"]["GLASSBLOCK_ALLOW_OPEN"] == _service("cpu")["environment"]["GLASSBLOCK_ALLOW_OPEN"]
    assert service["depends_on"]["postgres"]["condition"] == "service_healthy"
    same = ("ports", "volumes", "read_only", "tmpfs", "cap_drop", "security_opt", "restart", "build", "image")
    assert {key: service[key] for key in same} == {key: _service("cpu")[key] for key in same}


@pytest.mark.parametrize("profile", SERVICES)
def test_checkpoints_are_read_only_and_lie_where_the_image_looks(profile: str, tmp_path: Path) -> None:
    service = _service(profile, CHECKPOINTS=str(tmp_path))
    mounts = {mount["target"]: mount for mount in service["volumes"]}
    checkpoints = mounts[image().environment["GLASSBLOCK_ROOTS"]]
    assert checkpoints["source"] == str(tmp_path)
    assert checkpoints["read_only"] is True
    assert mounts[image().environment["GLASSBLOCK_DATA"]]["type"] == "volume"
    assert service["read_only"] is True
    assert service["tmpfs"] == [image().environment["HOME"]]


@pytest.mark.parametrize("profile", SERVICES)
def test_without_keys_it_is_published_to_this_machine_alone(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = _service(profile, PORT="18080")
    (port,) = service["ports"]
    assert (port["host_ip"], port["published"], str(port["target"])) == ("127.0.0.1", "18080", image().exposed)

    together = image().environment | service["environment"]
    for name in (name for name in os.environ if name.startswith("GLASSBLOCK_")):
        monkeypatch.delenv(name)
    for name, value in together.items():
        if name.startswith("GLASSBLOCK_"):
            monkeypatch.setenv(name, value)
    settings = Settings()
    assert settings.host == "0.0.0.0"
    settings.refuse_open_address()


@pytest.mark.parametrize("profile", SERVICES)
def test_it_outlives_a_crash_and_has_time_to_finish(profile: str) -> None:
    service = _service(profile)
    assert service["restart"] == "unless-stopped"
    assert service["stop_grace_period"] == "40s"  # the service itself waits 30 s for requests under way
    assert "test" not in service["healthcheck"]  # the image's own
    assert service["cap_drop"] == ["ALL"]
