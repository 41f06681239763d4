"""A Docker engine to test against: the one that answers, or one of our own that leaves nothing behind."""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CACHE = Path(os.environ.get("GLASSBLOCK_CACHE", Path.home() / ".cache" / "glassblock")) / "docker"
SUITE = "bookworm"


@contextlib.contextmanager
def engine(folder: Path) -> Iterator[bool]:
    """An engine that `docker` reaches; whether it is our own, all of whose state lies in `folder`.

    Our own has no bridge and writes no firewall rule, so nothing else on the machine notices it.
    Containers use `--network host`. It ends with the block, whatever happens inside.
    """
    if client() and answers():
        yield False
        return
    missing = [name for name in ("dockerd", "debootstrap") if shutil.which(name) is None]
    missing += ["a docker client with BuildKit"] * (not client()) + ["root"] * (os.geteuid() != 0)
    if missing:
        sys.exit(
            f"no engine answers, and none can be started without {', '.join(missing)} "
            "(as root: apt-get install --no-install-recommends docker.io debootstrap)"
        )
    os.environ["DOCKER_HOST"] = f"unix://{folder}/docker.sock"
    os.environ["DOCKER_CONFIG"] = f"{folder}/config"
    places = [f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/dockerd.pid"]
    apart = ["--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false"]
    with (folder / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(
            ["dockerd", f"--host={os.environ['DOCKER_HOST']}", "--config-file=", *places, *apart],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches this script first, which then ends the engine in order
        )
        try:
            until("an engine of our own is up", lambda: daemon.poll() is not None or answers(), seconds=60)
            if daemon.poll() is not None:
                sys.exit(f"dockerd ended with {daemon.returncode}:\n{(folder / 'dockerd.log').read_text()[-2000:]}")
            yield True
        finally:
            daemon.terminate()
            try:
                daemon.wait(60)
            finally:
                daemon.kill()
                _unmount_below(folder)


def debian_base(name: str = "python3", packages: str = "python3,python3-venv,python3-pip,ca-certificates") -> str:
    """A Debian with `packages` as a local image, out of the cache or by debootstrap (two minutes, once)."""
    archive = CACHE / f"{SUITE}-{name}.tar"
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="debootstrap-", dir=CACHE) as work:
            subprocess.run(
                ["debootstrap", "--variant=minbase", f"--include={packages}", SUITE, f"{work}/system"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                check=True,
            )
            leave = ["./var/cache/apt/archives/*.deb", "./var/lib/apt/lists/*", "./dev/*"]
            exclude = [f"--exclude={pattern}" for pattern in leave]
            packed = f"{work}/packed.tar"
            subprocess.run(
                ["tar", "--create", "--numeric-owner", f"--directory={work}/system", *exclude, f"--file={packed}", "."],
                check=True,
            )
            Path(packed).replace(archive)
    tag = f"glassblock-base:{SUITE}-{name}"
    docker("import", str(archive), tag)
    return tag


@functools.cache
def client() -> str:
    """The first docker client on the PATH that builds with BuildKit; from version 23 on that takes buildx. Or ""."""
    for folder in os.get_exec_path():
        found = shutil.which("docker", path=folder)
        if found is None:
            continue
        version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
        buildx = subprocess.run([found, "buildx", "version"], capture_output=True, check=False)
        if buildx.returncode == 0 or int(version.split("version ")[1].split(".")[0]) < 23:
            return found
    return ""


def docker(*arguments: str) -> str:
    """What a docker command prints; ends the run where it fails."""
    answer = subprocess.run(
        [client(), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if answer.returncode:
        sys.exit(f"docker {' '.join(arguments)}: {answer.stderr.strip()}")
    return answer.stdout


def attempt(*arguments: str) -> tuple[int, str]:
    """Exit status and all output of a docker command that may fail."""
    answer = subprocess.run(
        [client(), *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return answer.returncode, answer.stdout.decode(errors="replace")


def answers() -> bool:
    """Whether an engine is there."""
    return attempt("info")[0] == 0


def until(what: str, is_so: Callable[[], bool], *, seconds: float) -> None:
    """Waits until something holds; ends the run where it does not come."""
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        if is_so():
            print(f"  ok: {what} ({time.monotonic() - started:.1f} s)", flush=True)
            return
        time.sleep(0.2)
    sys.exit(f"not so within {seconds:.0f} s: {what}")


def _unmount_below(folder: Path) -> None:
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((mount for mount in mounts if mount.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=False)
