"""`glassblock serve`: the service, listening."""

import os
import threading
from pathlib import Path
from typing import Annotated

import typer

from glassblock_client.cli.connection import door
from glassblock_client.cli.streams import settle_streams


def serve(
    *,
    checkpoints: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Folder that holds checkpoints; may be repeated. Or GLASSBLOCK_ROOTS."),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on, 127.0.0.1 when left out. Or GLASSBLOCK_HOST.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port, 8080 when left out; 0 takes a free one. Or GLASSBLOCK_PORT.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu or cuda:N; auto when left out. Or GLASSBLOCK_DEVICE.")
    ] = None,
    allow_open: Annotated[
        bool, typer.Option("--allow-open", help="Listen beyond this machine although anyone may then ask anything.")
    ] = False,
) -> None:
    """Serve the checkpoints under some folders over HTTP."""
    given = {
        "roots": tuple(checkpoints) if checkpoints else None,
        "host": host,
        "port": port,
        "device": device,
        "allow_open": allow_open or None,
    }
    before = set(threading.enumerate())
    door().serve(**{name: value for name, value in given.items() if value is not None})
    if any(not thread.daemon for thread in set(threading.enumerate()) - before):
        # Work that outlived its grace has no caller any more, and Python would wait for its thread.
        settle_streams()
        os._exit(0)
