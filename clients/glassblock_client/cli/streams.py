"""Standard streams that are closed, full or left by their reader: none of that is a verdict, or a trace."""

import contextlib
import io
import os
import sys
from typing import TextIO


def open_streams() -> None:
    """Give every closed standard stream somewhere to go, before another file takes its number.

    Python leaves None where a descriptor was closed (`2>&-`).
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123  until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def tell(line: str) -> None:
    """A line on stderr, where anybody can read it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def settle_streams() -> None:
    """Empty both streams, or let go of them: Python flushes them again at exit, and a failure changes the status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            _let_go(stream)


def _let_go(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
