"""Where the answers come from: a service at a URL, or one started in this process."""

import os
import re
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated, TypeVar, cast

import typer
from glassblock.errors import (
    HINT_AS_JOB,
    AccessRefused,
    InvalidValue,
    ServiceUnavailable,
    TooLarge,
    UnknownCheckpoint,
)

from glassblock_client.backend import httpx
from glassblock_client.cli.app import INTERRUPTED, TERMINATED, Terminated
from glassblock_client.cli.options import URL_ASKED
from glassblock_client.cli.screen import working
from glassblock_client.cli.streams import tell
from glassblock_client.client import Client
from glassblock_client.jobs import OnProgress

ResultT = TypeVar("ResultT")

GRACE_SECONDS = 1.0
"""After Ctrl-C, for a service in this process to let go of its work."""

REMOTE_SECONDS = 300.0
"""Longest silence of a remote service, unless --timeout says otherwise: a first look at a large checkpoint is slow."""

UNSPEAKABLE = re.compile(r"[\\\x00-\x1f\x7f\ud800-\udfff]")
"""What no service takes in a checkpoint's name."""

Connect = Callable[..., AbstractContextManager[httpx.BaseTransport]]
"""`connect(*, roots, device)`: a service in this process. Tests hand another to the command line as its `obj`."""

CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="Checkpoint: a folder, or one .safetensors file. With --url its name at the service.",
        show_default=False,
    ),
]


def _remembered(context: typer.Context, url: str | None) -> str | None:
    context.meta[URL_ASKED] = url
    return url


UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        callback=_remembered,
        envvar="GLASSBLOCK_URL",
        metavar="URL",
        help="Ask the service there, with the key in GLASSBLOCK_KEY; without, one starts in this process.",
        rich_help_panel="Service",
        show_default=False,
    ),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        min=0.001,
        help=f"Longest silence of the service at --url, {REMOTE_SECONDS:g} when left out.",
        rich_help_panel="Service",
        show_default=False,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="auto, cpu or cuda:N, for the service in this process; also GLASSBLOCK_DEVICE.",
        rich_help_panel="Service",
        show_default=False,
    ),
]


@contextmanager
def connected(
    context: typer.Context,
    roots: Sequence[Path] = (),
    *,
    url: str | None,
    timeout: float | None,
    device: str | None,
) -> Generator[Client]:
    """A client of the service at `url`, or of one in this process over `roots`.

    Raises:
        InvalidValue: an option was given that has no effect on the service asked.
        ServiceUnavailable: no URL, and the packages of the service are not installed.
    """
    if url:
        if device is not None:
            raise InvalidValue("--device has no effect with --url: that service has its own", field="device")
        key = os.environ.get("GLASSBLOCK_KEY")
        with Client(url, api_key=key, timeout=REMOTE_SECONDS if timeout is None else timeout) as client:
            yield client
        return
    if timeout is not None:
        raise InvalidValue("--timeout has no effect without --url", field="timeout")
    with ExitStack() as stack:
        end = stack.enter_context(_prompt_end())
        with working("starting the service"):
            connect = cast("Connect | None", context.obj) or cast("Connect", door().connect)
            chosen = device or os.environ.get("GLASSBLOCK_DEVICE") or "auto"
            transport = stack.enter_context(connect(roots=tuple(roots), device=chosen))
        client = stack.enter_context(Client("http://in-process", timeout=None, transport=transport))
        try:
            yield client
        except KeyboardInterrupt as stop:
            end(stop)
            raise


def as_job_where_long(
    client: Client, ask: Callable[[Client], ResultT], on_progress: OnProgress | None = None
) -> ResultT:
    """What `ask` asks, at once; as a job where that takes longer than the service lets a caller wait."""
    try:
        return ask(client)
    except TooLarge as refusal:
        if not (refusal.hint or "").startswith(HINT_AS_JOB):
            raise
        return ask(client.as_job(on_progress))


@contextmanager
def _prompt_end() -> Generator[Callable[[KeyboardInterrupt], None]]:
    """Ctrl-C or SIGTERM, and at most GRACE_SECONDS for what then unwinds: a cancelled audit, scratch files.

    A service in this process ends when its work does, and a matrix product in a thread cannot be
    interrupted. So whatever has not ended in time ends with the process, which has no answer to give.
    """
    with ExitStack() as ended:

        def end(stop: KeyboardInterrupt) -> None:
            # Another signal would break off the unwinding, and the process would wait for its threads after all.
            for number in (signal.SIGINT, signal.SIGTERM):
                ended.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))
            watch = threading.Timer(GRACE_SECONDS, _leave, (stop,))
            watch.daemon = True
            watch.start()
            ended.callback(watch.cancel)

        yield end


def _leave(stop: KeyboardInterrupt) -> None:
    terminated = isinstance(stop, Terminated)
    tell("terminated" if terminated else "interrupted")
    # Answers are written after the service has ended: stdout holds nothing yet.
    os._exit(TERMINATED if terminated else INTERRUPTED)


@contextmanager
def connected_to(
    context: typer.Context, path: str, *, url: str | None, timeout: float | None, device: str | None
) -> Generator[tuple[Client, str]]:
    """A client, and the name under which its service knows the checkpoint at `path`.

    Raises:
        UnknownCheckpoint: nothing is there.
        AccessRefused: it may not be looked at.
        InvalidValue: its name cannot be a checkpoint's.
    """
    if url:
        with connected(context, url=url, timeout=timeout, device=device) as client:
            yield client, name_there(path)
        return
    root, name = root_and_name(path)
    with connected(context, [root], url=None, timeout=timeout, device=device) as client:
        yield client, name


@contextmanager
def connected_to_all(
    context: typer.Context,
    path: str,
    others: Sequence[tuple[str, str | None]],
    *,
    url: str | None,
    timeout: float | None,
    device: str | None,
) -> Generator[tuple[Client, str, list[str | None]]]:
    """As `connected_to`, and the names of whatever else is given: another checkpoint, captures, each with its option.

    Raises:
        UnknownCheckpoint, AccessRefused, InvalidValue: as `connected_to`, of any of them.
    """
    if url:
        with connected_to(context, path, url=url, timeout=timeout, device=device) as (client, name):
            yield client, name, [None if other is None else name_there(other) for _, other in others]
        return
    given = [(option, other) for option, other in others if other is not None]
    roots, (name, *names) = roots_of_all(path, given)
    named = iter(names)
    with connected(context, roots, url=None, timeout=timeout, device=device) as client:
        yield client, name, [None if other is None else next(named) for _, other in others]


def name_there(path: str) -> str:
    """The name at a service: a slash at the end is the shell's."""
    return path.rstrip("/") or path


def roots_of_all(path: str, others: Sequence[tuple[str, str]]) -> tuple[list[Path], tuple[str, ...]]:
    """Folders that hold a checkpoint and what is given beside it, each with its option; and their names in there.

    Raises:
        UnknownCheckpoint, AccessRefused, InvalidValue: as `connected_to`, of any of them.
    """
    roots: list[Path] = []
    names: list[str] = []
    for option, given in (("", path), *others):
        root, name = root_and_name(given, option=option)
        if any(other != root and (other / name).exists() for other in roots):
            # A name is looked for under the first root first: this one is named from a folder above all.
            above = Path(os.path.commonpath([root, *roots]))
            root, name = above, str((root / name).relative_to(above))
        roots += [root] if root not in roots else []
        names.append(name)
    return roots, tuple(names)


def root_and_name(path: str, *, option: str = "") -> tuple[Path, str]:
    """The folder that holds the checkpoint, or what `option` gives, and its name in there.

    Links are followed, so that the checkpoint lies under its root: for a file only where the link
    leads to a .safetensors file, because a Hugging Face cache keeps the name on the link alone.
    """
    given, of_option = Path(path), f"{option}: " if option else ""
    try:
        real = given.resolve(strict=True)
    except FileNotFoundError:
        raise UnknownCheckpoint(
            f"{of_option}there is no {path!r}",
            hint="give a folder or a .safetensors file; with --url, a name at the service",
        ) from None
    except (OSError, RuntimeError, ValueError) as fault:  # RuntimeError: links in a circle
        raise AccessRefused(
            f"{of_option}{path!r} cannot be looked at: {fault}", hint="check its permissions"
        ) from fault
    if real.is_file() and real.suffix != ".safetensors":
        real = given.parent.resolve() / given.name
    if not real.name:
        raise InvalidValue(f"{of_option}the root of the file system is no checkpoint", field="PATH")
    if odd := UNSPEAKABLE.search(real.name):
        raise InvalidValue(
            f"{of_option}{real.name!r} has {odd.group()!r} in its name; a checkpoint's name is part of a URL and of"
            " every report, and holds no backslash, no control character and nothing but UTF-8",
            field="PATH",
            hint="rename it",
        )
    return real.parent, real.name


def with_extra(name: str) -> str:
    """The commands that install an extra beside this client, and out of a clone."""
    return f"pip install 'glassblock[{name}]' (in a clone pip install '.[{name}]')"


def door() -> ModuleType:
    """The service's entry points.

    Raises:
        ServiceUnavailable: the packages of the service are not installed.
    """
    # Between its loops OpenMP would spin, and starve every neighbour on a shared machine. Read when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from glassblock_client.cli import service  # noqa: PLC0415  torch loads here, and only for a local service
    except ModuleNotFoundError as fault:
        missing = fault.name or "a package"
        if missing.partition(".")[0].startswith("glassblock"):
            raise
        raise ServiceUnavailable(
            f"no service can start in this process: {missing} is not installed",
            hint=f"{with_extra('service')}, or give --url",
        ) from fault
    return service
