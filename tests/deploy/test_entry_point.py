"""The image's command, environment and health check as a plain process: it starts, answers and stops gracefully."""

import http.client
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from served import free_port

from deploy.dockerfile import ROOT, image

EXAMPLES = ROOT / "examples"
START_S = 60.0  # importing torch on two busy cores; a healthy start takes a tenth of it
STOP_S = 10.0  # what `docker stop` grants before it kills


def test_it_answers_and_a_request_under_way_outlives_the_stop(tmp_path: Path) -> None:
    with _service(tmp_path) as (process, port):
        _until(f"http://127.0.0.1:{port}/health/ready", process, tmp_path)
        assert _health_check(port) == 0

        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/checkpoints") as answer:
            names = {entry["name"] for entry in json.load(answer)["checkpoints"]}
        examples = {config.parent.name for config in EXAMPLES.glob("*/config.json")}
        assert names == examples != set()

        body = json.dumps({"d_model": 4096, "d_ff": 11008, "kind": "gated"}).encode()
        under_way = http.client.HTTPConnection("127.0.0.1", port, timeout=STOP_S)
        under_way.putrequest("POST", "/v1/budgets")
        under_way.putheader("Content-Type", "application/json")
        under_way.putheader("Content-Length", str(len(body)))
        under_way.endheaders(body[:10])
        time.sleep(0.5)  # the service has the head and waits for the rest
        process.send_signal(getattr(signal, image().stop_signal))
        time.sleep(0.5)  # it has been told to stop
        assert process.poll() is None
        under_way.send(body[10:])
        assert under_way.getresponse().status == 200
        under_way.close()

        assert process.wait(STOP_S) == 0
        assert _health_check(port) != 0
        assert "Traceback" not in _log(tmp_path)


def test_an_idle_service_stops_within_a_second_or_two(tmp_path: Path) -> None:
    with _service(tmp_path) as (process, port):
        _until(f"http://127.0.0.1:{port}/health/ready", process, tmp_path)
        process.send_signal(signal.SIGTERM)
        assert process.wait(3) == 0


def test_the_images_address_without_leave_is_refused_in_one_line_that_names_the_way_out(tmp_path: Path) -> None:
    with _service(tmp_path, GLASSBLOCK_HOST=image().environment["GLASSBLOCK_HOST"]) as (process, _):
        assert process.wait(START_S) == 2
    assert "GLASSBLOCK_ALLOW_OPEN=1" in _log(tmp_path)
    assert "Traceback" not in _log(tmp_path)


def test_a_setting_that_makes_no_sense_is_named(tmp_path: Path) -> None:
    with _service(tmp_path, GLASSBLOCK_PORT="eighty") as (process, _):
        assert process.wait(START_S) == 2
    assert "port" in _log(tmp_path)
    assert "Traceback" not in _log(tmp_path)


def test_without_its_folder_it_is_alive_but_not_ready_until_the_folder_is_there(tmp_path: Path) -> None:
    mount = tmp_path / "mounted-later"
    with _service(tmp_path, GLASSBLOCK_ROOTS=str(mount)) as (process, port):
        _until(f"http://127.0.0.1:{port}/health/live", process, tmp_path)
        with pytest.raises(urllib.error.HTTPError) as not_ready:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready")
        assert not_ready.value.code == 503
        assert "folder" in not_ready.value.read().decode()
        assert _health_check(port) != 0
        mount.mkdir()
        assert _health_check(port) == 0


@contextmanager
def _service(folder: Path, **changed: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The image's entry point in the image's environment, its two folders and its address moved to this machine's."""
    last = image()
    port = free_port()
    moved = {
        "GLASSBLOCK_ROOTS": str(EXAMPLES),
        "GLASSBLOCK_DATA": str(folder),
        "GLASSBLOCK_HOST": "127.0.0.1",
        "GLASSBLOCK_PORT": str(port),
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PATH": os.environ["PATH"],
    }
    outside = {name: value for name, value in os.environ.items() if not name.startswith("GLASSBLOCK_")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*_program(last.entry_point[0]), *last.entry_point[1:]],
            env=outside | last.environment | moved | changed,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            yield process, port
        finally:
            process.kill()
            process.wait()


def _program(name: str) -> list[str]:
    """The console script; where the project is not installed, what pyproject.toml declares it to be."""
    installed = Path(sysconfig.get_path("scripts")) / name
    if installed.exists():
        return [str(installed)]
    module, function = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"][name].split(":")
    return [sys.executable, "-c", f"from {module} import {function}; {function}()"]


def _until(url: str, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"it ended with {process.returncode}: {_log(folder)}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                assert answer.status == 200
                return
        except urllib.error.URLError:
            time.sleep(0.1)
    raise TimeoutError(f"no answer within {START_S} s from {url}")


def _health_check(port: int) -> int:
    """What the engine runs inside the container."""
    program, *arguments = image().health_check
    assert program == "python3"
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"GLASSBLOCK_PORT": str(port), "http_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        timeout=30,
        check=False,
    ).returncode


def _log(folder: Path) -> str:
    return (folder / "log").read_text()
