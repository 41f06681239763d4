"""`glassblock keys`: a new key for callers of a service."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from glassblock.errors import InvalidValue
from glassblock.wire.keys import key_line, new_key, read_keys

from glassblock_client.cli.streams import tell


def keys(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Who gets the key; logs and audits say so.")],
    scope: Annotated[
        Literal["read", "run", "admin"],
        typer.Option(help="What it allows: to look; also to compute and audit; also what concerns everybody."),
    ] = "run",
    file: Annotated[
        Path | None,
        typer.Option(help="Add it to this file, GLASSBLOCK_KEYS_FILE of the service.", show_default=False),
    ] = None,
) -> None:
    """Make an API key for callers of a service.

    The key goes to stdout, once. Its line for the service's file goes into --file, else to stderr. The file holds
    no key, only the SHA-256 of one; the service reads it again when it changes.
    """
    key = new_key()
    line = key_line(name, scope, key)
    if file is None:
        tell(line)
    else:
        _add(file, line)
    sys.stdout.write(key + "\n")


def _add(file: Path, line: str) -> None:
    try:
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        after = before + ("\n" if before and not before.endswith("\n") else "") + line + "\n"
        read_keys(after)
    except UnicodeDecodeError as fault:
        raise InvalidValue(
            f"--file: {file} holds no text in UTF-8", field="file", hint="give a file of keys"
        ) from fault
    except InvalidValue as error:
        error.hint = f"take another name, or mend {file}"
        raise
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8") as stream:
        stream.write(after[len(before) :])
