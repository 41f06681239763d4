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

import numpy as np
from engine import attempt, client, debian_base, docker, engine, until
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from jobs.postgres_server import NoServer, fresh_database, postgres_server  # noqa: E402

EXAMPLE = "tiny-llama"
LARGE = "large-llama"
"""The example with wider layers, whose certified audit takes long enough to be interrupted."""
IMAGE = "glassblock-under-test"
DATABASE = f"{IMAGE}-postgres"
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
                _check_gpu_reservation()
                _build(given.base or (debian_base() if own else "python:3.11-slim"), folder)
                _check_image()
                checkpoints = _copied_example(folder)
                _check_container(checkpoints)
                _check_compose(folder, checkpoints, "cpu")
                _check_compose(folder, checkpoints, "postgres", database=_database_image(own=own))
                _check_postgres(checkpoints)
            finally:
                if not given.keep:
                    attempt("image", "rm", "--force", IMAGE, DATABASE)
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
    _start(name, port, checkpoints)
    with _removed(name):
        until("healthy", lambda: _health(name) == "healthy", seconds=90)
        for path, writable in FOLDERS.items():
            status, _ = attempt("exec", name, "touch", f"{path}/probe")
            _check(f"{path} is {'writable' if writable else 'read-only'}", (status == 0) is writable)
        first = _check_audit(port)

        interrupted = _running_audit(port)
        os.kill(_state(name)["Pid"], signal.SIGKILL)
        until("restarted after kill -9", lambda: _inspect(name)["RestartCount"] == 1, seconds=30)
        until("healthy again", lambda: _health(name) == "healthy", seconds=90)
        _check("the history is there, with its report", _audit(port, first)["report"]["verdict"] == "pass")
        until("the audit under way at the kill has its report", lambda: _ended(port, interrupted), seconds=180)
        _check("at its second attempt", _audit(port, interrupted)["attempts"] == 2)

        handed_back = _running_audit(port)
        started = time.monotonic()
        docker("stop", "--time", "40", name)
        took = time.monotonic() - started
        _check(f"it stops gracefully with a job running ({took:.1f} s)", took < 10 and _state(name)["ExitCode"] == 0)
        docker("start", name)
        until("healthy after a new start", lambda: _health(name) == "healthy", seconds=90)
        until("the audit that was handed back has its report", lambda: _ended(port, handed_back), seconds=180)
        _check("the attempt that was stopped is not counted", _audit(port, handed_back)["attempts"] == 1)
        docker("stop", "--time", "40", name)
        _check("no traceback in its log", "Traceback" not in attempt("logs", name)[1])


def _check_postgres(checkpoints: Path) -> None:
    """Two containers of the image share the jobs in a PostgreSQL of this machine, where its programs are here."""
    try:
        with postgres_server() as server:
            url = fresh_database(server)
            sockets = Path(url.partition("host=")[2])
            sockets.chmod(0o711)  # the image's user must come through to the socket
            told = ["--volume", f"{sockets}:{sockets}", "--env", f"GLASSBLOCK_DATABASE={url}"]
            ports = [_free_port() for _ in range(2)]
            with contextlib.ExitStack() as stack:
                for port in ports:
                    name = f"{IMAGE}-{port}"
                    _start(name, port, checkpoints, *told)
                    stack.enter_context(_removed(name))
                for port in ports:
                    until("healthy, on PostgreSQL", lambda: _health(f"{IMAGE}-{port}") == "healthy", seconds=90)  # noqa: B023
                audit = _check_audit(ports[0])
                _check("the other container knows the audit", _audit(ports[1], audit)["state"] == "succeeded")
    except NoServer as why:
        print(f"  not checked: PostgreSQL ({why})", flush=True)


def _start(name: str, port: int, checkpoints: Path, *further: str) -> None:
    docker(
        *f"run --detach --name {name} --network host --restart unless-stopped".split(),
        *["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"],
        *("--volume", f"{checkpoints}:/checkpoints:ro"),
        *("--env", f"GLASSBLOCK_PORT={port}", "--env", "GLASSBLOCK_HOST=127.0.0.1"),
        *further,
        IMAGE,
    )


def _check_gpu_reservation() -> None:
    """Parsed alone: to start it takes a machine with a GPU."""
    told = subprocess.run(
        [*_compose(), "--profile", "gpu", "config", "--format", "json"], capture_output=True, text=True, check=True
    )
    (device,) = json.loads(told.stdout)["services"]["glassblock"]["deploy"]["resources"]["reservations"]["devices"]
    _check("compose: the GPU reservation is read", (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"]))


def _database_image(*, own: bool) -> str:
    """PostgreSQL's own image; where none can be had, Debian's PostgreSQL started as that one is."""
    if not own:
        return "postgres:17"
    steps = f"""FROM {debian_base("postgresql", "postgresql,ca-certificates")}
RUN chmod 1777 /var/run/postgresql && mkdir -p /var/lib/postgresql/data && chown postgres: /var/lib/postgresql/data
ENV PGDATA=/var/lib/postgresql/data
USER postgres
ENTRYPOINT ["bash", "-euc", "PATH=$(echo /usr/lib/postgresql/*/bin):$PATH; \\
  if [ ! -s $PGDATA/PG_VERSION ]; then \\
    initdb --username $POSTGRES_USER --encoding UTF8 --auth scram-sha-256 --pwfile <(echo $POSTGRES_PASSWORD); \\
    echo CREATE DATABASE $POSTGRES_DB | postgres --single -j postgres; \\
  fi; exec postgres -c listen_addresses=127.0.0.1"]
"""
    built = subprocess.run(
        [client(), "build", "--network", "host", "--tag", DATABASE, "-"],
        input=steps, text=True, capture_output=True, check=False, env=os.environ | {"DOCKER_BUILDKIT": "1"},
    )  # fmt: skip
    _check_quietly(f"a PostgreSQL image is built: {built.stderr}", built.returncode == 0)
    return DATABASE


def _compose() -> list[str]:
    return [str(Path(sysconfig.get_path("scripts")) / "docker-compose"), "--file", str(ROOT / "docker-compose.yml")]


def _check_compose(folder: Path, checkpoints: Path, profile: str, *, database: str | None = None) -> None:
    """The compose file's own services, without a GPU; only the network differs, an engine of our own has no bridge."""
    port, database_port = _free_port(), _free_port()
    override = folder / f"{profile}.yml"
    override.write_text(f"""
services:
  glassblock-{profile}:
    image: {IMAGE}
    build: !reset null
    container_name: {IMAGE}-{profile}
    network_mode: host
    ports: !reset []
    environment:
      GLASSBLOCK_HOST: 127.0.0.1
      GLASSBLOCK_PORT: "{port}"
""")
    if database is not None:
        with override.open("a") as file:
            file.write(f"""
      GLASSBLOCK_DATABASE: postgresql://glassblock:glassblock@127.0.0.1:{database_port}/glassblock
  postgres:
    network_mode: host
    environment:
      PGPORT: "{database_port}"
""")
    compose = [*_compose(), "--file", str(override), "--project-name", IMAGE, "--profile", profile]
    told = os.environ | {"CHECKPOINTS": str(checkpoints)} | ({} if database is None else {"POSTGRES_IMAGE": database})
    try:
        subprocess.run([*compose, "up", "--no-build", "--wait", "--wait-timeout", "120"], env=told, check=True)
        _check(f"compose, {profile}: up and healthy", _health(f"{IMAGE}-{profile}") == "healthy")
        audit = _check_audit(port)
        if database is not None:
            _check("its jobs are in PostgreSQL", "postgresql" in _checks(port)["database"])
            subprocess.run([*compose, "restart", "postgres", f"glassblock-{profile}"], env=told, check=True)
            until("healthy after a restart of both", lambda: _health(f"{IMAGE}-{profile}") == "healthy", seconds=90)
            _check("and the history is there", _audit(port, audit)["report"]["verdict"] == "pass")
    except BaseException:
        print(subprocess.run([*compose, "logs"], env=told, capture_output=True, text=True).stdout, file=sys.stderr)  # noqa: PLW1510
        raise
    finally:
        started = time.monotonic()
        subprocess.run([*compose, "down", "--volumes", "--remove-orphans"], env=told, check=True)
    took = time.monotonic() - started
    _check(f"compose, {profile}: down ({took:.1f} s)", took < 20)


def _checks(port: int) -> dict[str, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=30) as answer:
        return json.load(answer)["checks"]


def _check_audit(port: int) -> str:
    """One audit over HTTP: asked for, waited for, passed; and another operation as a job."""
    other = _asked(port, "/v1/jacobians", {"checkpoint": EXAMPLE, "layers": [0], "sample": {"rows": 2}})
    until("the job has its answer", lambda: _ended(port, other), seconds=60)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/audits/{other}/answer", timeout=30) as answer:
        _check("which is served", json.load(answer)["layers"][0]["layer"] == 0)
    audit = _asked_audit(port, {"checkpoint": EXAMPLE})
    until("the audit has its report", lambda: _ended(port, audit), seconds=60)
    _check("the example passes", _audit(port, audit)["report"]["verdict"] == "pass")
    return audit


def _running_audit(port: int) -> str:
    """A long audit that has begun."""
    audit = _asked_audit(port, {"checkpoint": LARGE, "certify": True})
    until("a long audit is under way", lambda: _audit(port, audit)["progress"]["done"] > 0, seconds=60)
    _check("and has not ended", _audit(port, audit)["state"] == "running")
    return audit


def _asked_audit(port: int, message: dict[str, Any]) -> str:
    return _asked(port, "/v1/audits", message)


def _asked(port: int, path: str, message: dict[str, Any]) -> str:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(message).encode(),
        headers={"Content-Type": "application/json", "Prefer": "respond-async"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        _check(f"a job is accepted: {path}", answer.status == 202 and answer.headers["Location"])
        return json.load(answer)["id"]


def _ended(port: int, audit: str) -> bool:
    told = _audit(port, audit)
    _check_quietly(f"audit {audit} is {told['state']}", told["state"] not in {"failed", "cancelled"})
    return told["state"] == "succeeded"


def _audit(port: int, audit: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/audits/{audit}", timeout=30) as answer:
        return json.load(answer)


def _copied_example(folder: Path) -> Path:
    """A folder of checkpoints that the image's user can read, whatever the modes in the working tree are."""
    folder.chmod(0o755)
    copy = folder / "checkpoints" / EXAMPLE
    copy.mkdir(parents=True)
    for file in (ROOT / "examples" / EXAMPLE).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    _write_large(copy, copy.parent / LARGE)
    return copy.parent


def _write_large(example: Path, folder: Path) -> None:
    """The example with every hidden width eight times and every inner width six times what it was."""
    folder.mkdir()
    config = json.loads((example / "config.json").read_text())
    wider = {64: 512, 384: 2304, 32: 256}
    for name in ("hidden_size", "intermediate_size"):
        config[name] = wider[config[name]]
    config["head_dim"] *= 8
    draw = np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    for name, tensor in load_file(example / "model.safetensors").items():
        shape = tuple(axis if axis == config["vocab_size"] else wider[axis] for axis in tensor.shape)
        drawn = 0.02 * draw.standard_normal(shape, dtype=np.float32)
        tensors[name] = drawn if len(shape) > 1 else np.ones(shape, np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the image's user reads it
    (folder / "config.json").write_text(json.dumps(config))


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


def _health(name: str) -> str:
    return _state(name)["Health"]["Status"]


def _inspect(name: str) -> dict[str, Any]:
    return json.loads(docker("inspect", name))[0]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _check(what: str, holds: object) -> None:
    _check_quietly(what, holds)
    print(f"  ok: {what}", flush=True)


def _check_quietly(what: str, holds: object) -> None:
    if not holds:
        sys.exit(f"does not hold: {what}")


if __name__ == "__main__":
    main()
