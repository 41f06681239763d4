"""Builds the image and runs it on a real engine; `make test-docker` calls it.

    python tests/docker/run.py [--base IMAGE] [--keep]

Where an engine answers (`docker info`), it is used, with python:3.11-slim or `--base`. Where none does
and this is root on Debian with `docker.io` and `debootstrap` installed, an engine of its own is started;
its base image is made by debootstrap, once, into ~/.cache/glassblock/docker (or $GLASSBLOCK_CACHE/docker).
All other state lies in a temporary folder and goes with it.

What pip on this machine is told (index, certificate, folders of wheels) the build is told as secrets;
nothing of it stays in the image. Everything listens on the loopback address of this machine alone.
"""

import argparse
import contextlib
import functools
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine import attempt, client, debian_base, docker, engine, until

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "tiny-llama"
IMAGE = "glassblock-under-test"
FOLDERS = {"/": False, "/checkpoints": False, "/opt/glassblock": False, "/tmp": True, "/data": True}


def main() -> None:
    """Every check in turn; the first that fails ends the run and says what does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="base image; needs python3 with venv and pip")
    parser.add_argument("--keep", action="store_true", help="leave the built image in the engine that was there")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    with tempfile.TemporaryDirectory(prefix="glassblock-docker-") as temporary:
        folder = Path(temporary)
        with engine(folder) as own:
            try:
                _build(given.base or (debian_base() if own else "python:3.11-slim"), folder)
                _check_image()
                checkpoints = _copied_example(folder)
                _check_container(checkpoints)
                _check_compose(folder, checkpoints)
            finally:
                if not given.keep:
                    attempt("image", "rm", "--force", IMAGE)
    print("docker: all checks passed")


def _check_image() -> None:
    about = json.loads(docker("image", "inspect", IMAGE))[0]
    _check("it runs as a number that is not root", about["Config"]["User"] == "10001:10001")
    look = "id -u; find /etc/pip.conf /run/secrets /tmp -type f; python3 -c 'import torch; print(torch.__version__)'"
    user, *left, torch = docker(*["run", "--rm", "--network", "none", "--entrypoint", "sh"], IMAGE, "-c", look).split()
    _check("nothing of pip's configuration or cache is left inside", user == "10001" and not left)
    _check(f"torch is the pinned one ({torch})", torch.split("+")[0] == _pinned_torch())
    print(f"  image: {about['Size'] / 1e6:.0f} MB")

    status, said = attempt(*["run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp"], IMAGE)
    _check(f"without keys and without leave it refuses to listen: {said.strip()}", status == 2)
    _check("and names the way out", "GLASSBLOCK_ALLOW_OPEN=1" in said)


def _check_container(checkpoints: Path) -> None:
    port = _free_port()
    name = f"{IMAGE}-{port}"
    docker(
        *f"run --detach --name {name} --network host --restart unless-stopped".split(),
        *["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"],
        *("--volume", f"{checkpoints}:/checkpoints:ro"),
        *("--env", f"GLASSBLOCK_PORT={port}", "--env", "GLASSBLOCK_HOST=127.0.0.1"),
        IMAGE,
    )
    with _removed(name):
        until("healthy", lambda: _state(name)["Health"]["Status"] == "healthy", seconds=90)
        for path, writable in FOLDERS.items():
            status, _ = attempt("exec", name, "touch", f"{path}/probe")
            _check(f"{path} is {'writable' if writable else 'read-only'}", (status == 0) is writable)
        _check_audit(port)

        os.kill(_state(name)["Pid"], signal.SIGKILL)
        until("restarted after kill -9", lambda: _inspect(name)["RestartCount"] == 1, seconds=30)
        until("healthy again", lambda: _state(name)["Health"]["Status"] == "healthy", seconds=90)
        _check_audit(port)

        started = time.monotonic()
        docker("stop", "--time", "40", name)
        took = time.monotonic() - started
        _check(f"it stops gracefully ({took:.1f} s)", took < 5 and _state(name)["ExitCode"] == 0)
        _check("no traceback in its log", "Traceback" not in attempt("logs", name)[1])


def _check_compose(folder: Path, checkpoints: Path) -> None:
    """The compose file's own service, without a GPU; only the network differs, an engine of our own has no bridge."""
    port = _free_port()
    override = folder / "override.yml"
    override.write_text(f"""
services:
  glassblock-cpu:
    image: {IMAGE}
    build: !reset null
    container_name: {IMAGE}-compose
    network_mode: host
    ports: !reset []
    environment:
      GLASSBLOCK_HOST: 127.0.0.1
      GLASSBLOCK_PORT: "{port}"
""")
    compose = [
        str(Path(sysconfig.get_path("scripts")) / "docker-compose"),
        *("--file", str(ROOT / "docker-compose.yml"), "--file", str(override)),
        *("--project-name", IMAGE, "--profile", "cpu"),
    ]
    told = os.environ | {"CHECKPOINTS": str(checkpoints)}
    try:
        subprocess.run([*compose, "up", "--no-build", "--wait", "--wait-timeout", "90"], env=told, check=True)
        _check("compose: up and healthy", _state(f"{IMAGE}-compose")["Health"]["Status"] == "healthy")
        _check_audit(port)
    except BaseException:
        print(attempt("logs", f"{IMAGE}-compose")[1], file=sys.stderr)
        raise
    finally:
        started = time.monotonic()
        subprocess.run([*compose, "down", "--volumes", "--remove-orphans"], env=told, check=True)
    took = time.monotonic() - started
    _check(f"compose: down ({took:.1f} s)", took < 10)


def _check_audit(port: int) -> None:
    """One audit over HTTP: asked for, waited for, passed."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/audits",
        data=json.dumps({"checkpoint": EXAMPLE}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        location = answer.headers["Location"]
        _check("an audit is accepted", answer.status == 202 and location)

    def report() -> dict[str, Any] | None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{location}", timeout=30) as answer:
            return json.load(answer).get("report")

    until("the audit has its report", lambda: report() is not None, seconds=60)
    _check("the example passes", (report() or {})["verdict"] == "pass")


def _copied_example(folder: Path) -> Path:
    """A folder of checkpoints that the image's user can read, whatever the modes in the working tree are."""
    folder.chmod(0o755)
    copy = folder / "checkpoints" / EXAMPLE
    copy.mkdir(parents=True)
    for file in (ROOT / "examples" / EXAMPLE).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy.parent


def _build(base: str, folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        secrets = [argument for secret in _pip_secrets(folder, stack) for argument in ("--secret", secret)]
        started = time.monotonic()
        subprocess.run(
            [
                *(client(), "build", "--network", "host", "--progress", "plain"),
                *("--build-arg", f"BASE_IMAGE={base}", *secrets, "--tag", IMAGE, str(ROOT)),
            ],
            env=os.environ | {"DOCKER_BUILDKIT": "1"},
            stdin=subprocess.DEVNULL,
            check=True,
        )
        print(f"  built in {time.monotonic() - started:.0f} s")


def _pip_secrets(folder: Path, stack: contextlib.ExitStack) -> list[str]:
    """This machine's pip configuration as build secrets; its folders of wheels over loopback."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    told: dict[str, str] = {}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        told[name.rsplit(".", 1)[-1]] = value.strip("'\"").replace("\\n", " ")
    lines = [f"{name} = {told[name]}" for name in ("index-url", "trusted-host") if name in told]
    beside = [url for url in told.get("extra-index-url", "").split() if url.startswith("http")]
    found = [
        stack.enter_context(_served(path)) for path in map(Path, told.get("find-links", "").split()) if path.is_dir()
    ]
    lines += [
        f"{name} = {' '.join(urls)}" for name, urls in (("extra-index-url", beside), ("find-links", found)) if urls
    ]
    secrets: list[str] = []
    if bundle := told.get("cert") or os.environ.get("SSL_CERT_FILE"):
        lines.append("cert = /run/secrets/ca_bundle")
        secrets.append(f"id=ca_bundle,src={bundle}")
    (folder / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))
    return [*secrets, f"id=pip_conf,src={folder / 'pip.conf'}"]


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """The build's own output says enough."""


@contextlib.contextmanager
def _removed(name: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        print(attempt("logs", name)[1], file=sys.stderr)
        raise
    finally:
        attempt("rm", "--force", "--volumes", name)


def _pinned_torch() -> str:
    (line,) = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    return line.removeprefix("torch==")


def _state(name: str) -> dict[str, Any]:
    return _inspect(name)["State"]


def _inspect(name: str) -> dict[str, Any]:
    return json.loads(docker("inspect", name))[0]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _check(what: str, holds: object) -> None:
    if not holds:
        sys.exit(f"does not hold: {what}")
    print(f"  ok: {what}", flush=True)


if __name__ == "__main__":
    main()
