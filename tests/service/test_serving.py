"""`serve` before it answers: what it refuses to listen with, and what it says once it listens."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from glassblock.api.app import create_app
from glassblock.api.entry import connect, serve
from glassblock.api.listening import listening_sockets, url_of
from glassblock.api.settings import Settings
from glassblock.errors import InvalidValue

MAIN = "from glassblock_client.cli import main; main()"
START_S = 60.0  # importing torch on two busy cores
STOP_S = 15.0  # what a busy machine may need to end a process that is told to


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GLASSBLOCK_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_a_taken_port_is_refused_and_named(taken: int) -> None:
    with pytest.raises(InvalidValue, match=f"port {taken} of 127.0.0.1 is taken") as refused:
        serve(port=taken)
    assert refused.value.field == "port"
    assert "--port" in (refused.value.hint or "")


@pytest.mark.parametrize("host", ["192.0.2.7", "a..b", "", "not an address"])
def test_a_host_that_is_not_here_is_refused(host: str) -> None:
    with pytest.raises(InvalidValue, match="cannot listen on") as refused:
        serve(host=host, allow_open=True)
    assert refused.value.field == "host"


def test_every_address_of_a_name_gets_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    two = [(socket.AF_INET, 1, 6, "", (address, 0)) for address in ("127.0.0.1", "127.0.0.2", "192.0.2.7")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: two)
    sockets = listening_sockets("localhost", 0)
    names = [listener.getsockname() for listener in sockets]
    for listener in sockets:
        listener.close()
    # The third is no address of this machine, as `::1` is none where IPv6 is off.
    assert [name[0] for name in names] == ["127.0.0.1", "127.0.0.2"]
    assert names[0][1] == names[1][1] != 0


def test_a_url_brackets_ipv6(taken: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert port != taken
        assert url_of("::1", listener) == f"http://[::1]:{port}"


def test_a_root_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for root, why in (
        (tmp_path / "nope", "does not exist"),
        (file, "is not a folder"),
        (file / "x", "cannot be looked at"),
        (tmp_path / "circle", "cannot be looked at"),
    ):
        for start in (
            lambda root=root: create_app(Settings(roots=(tmp_path, root))),
            lambda root=root: serve(roots=(tmp_path, root), port=0),
            lambda root=root: connect(roots=[tmp_path, root]).__enter__(),
        ):
            with pytest.raises(InvalidValue, match=why) as refused:
                start()
            assert refused.value.field == "roots"
            assert str(root) in refused.value.message


def test_a_root_of_the_environment_may_come_later_but_not_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    create_app(Settings(roots=(tmp_path / "nope",)), roots_may_come=True)
    with pytest.raises(InvalidValue, match="is not a folder"):
        create_app(Settings(roots=(file,)), roots_may_come=True)


def test_a_refused_setting_says_where_it_was_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="port") as refused:
        serve(port=99999)
    assert refused.value.hint == "`glassblock serve --help` tells what it may be"
    monkeypatch.setenv("GLASSBLOCK_HEAVY", "many")
    for start in (lambda: serve(port=0), lambda: connect(roots=[tmp_path]).__enter__()):
        with pytest.raises(InvalidValue, match="heavy") as refused:
            start()
        assert refused.value.hint == "it is set by GLASSBLOCK_HEAVY in the environment"


def test_it_says_in_one_line_where_it_listens_and_stops_with_status_0(tmp_path: Path) -> None:
    absent = tmp_path / "later"
    with _served(MAIN, GLASSBLOCK_ROOTS=f"{tmp_path}{os.pathsep}{absent}") as (process, line):
        told = re.fullmatch(r"glassblock listens on (http://127\.0\.0\.1:\d+) \(device cpu, roots: (.*)\)\n", line)
        assert told is not None, line
        assert told[2] == f"{tmp_path}, {absent} (does not exist)"
        with urllib.request.urlopen(f"{told[1]}/health/live", timeout=START_S) as answer:
            assert json.load(answer)["status"] == "alive"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=STOP_S) == ("", "")
    assert process.returncode == 0


def test_a_stop_does_not_wait_for_work_beyond_its_grace() -> None:
    stuck = (
        "import threading, time, urllib.request\n"
        "from glassblock.api import entry\n"
        "from glassblock.operations.operations import Operations\n"
        "entry.GRACE_SECONDS = 1\n"
        "def work(*_):\n"
        "    print('working', flush=True)\n"
        "    time.sleep(120)\n"
        "Operations.checkpoints = work\n" + MAIN
    )
    with _served(stuck) as (process, line):
        url = line.split()[3]
        asking = subprocess.Popen(
            [sys.executable, "-c", f"import urllib.request as r; r.urlopen('{url}/v1/checkpoints')"],
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        told = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=STOP_S)
        assert time.monotonic() - told < STOP_S
        asking.kill()
        asking.wait()
    assert process.returncode == 0


@contextmanager
def _served(script: str, **settings: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """`glassblock serve` on a free port, and the first line on its stderr."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, "serve", "--port", "0", "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | settings,
    )
    with process:
        try:
            assert process.stderr is not None
            yield process, process.stderr.readline()
        finally:
            process.kill()
