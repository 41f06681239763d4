"""Options that say which family a checkpoint is of, instead of its config."""

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from glassblock.errors import InvalidValue

from glassblock_client.cli.files import read_json_object

MAX_FILE_BYTES = 1024 * 1024
"""Far above any row."""

FamilyOption = Annotated[
    str | None,
    typer.Option(help="Row of the family table, instead of what the config says.", show_default=False),
]
FamilyFileOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="A family of your own: a row as .json or .toml.", readable=False, show_default=False
    ),
]
TowerOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Another stack of layers in the files: encoder, vision.", show_default=False),
]


def read_family_row(family: str | None, file: Path | None) -> dict[str, Any] | None:
    """The row in `file`, as the plain data it holds; the service says whether it is one.

    Raises:
        InvalidValue: the file cannot be read, or a family is named beside it.
    """
    if file is None:
        return None
    if family is not None:
        raise InvalidValue("--family and --family-file are both given", field="family", hint="give one of them")
    if not file.is_file():
        raise InvalidValue(f"--family-file: {file} is no file", field="family_row", hint="give a .json or .toml file")
    if file.stat().st_size > MAX_FILE_BYTES:
        raise InvalidValue(
            f"--family-file: {file} is larger than {MAX_FILE_BYTES:,} bytes, which no row is",
            field="family_row",
            hint="give a file with one row",
        )
    if file.suffix == ".json":
        return read_json_object(file, option="--family-file")
    if file.suffix != ".toml":
        raise InvalidValue(
            f"--family-file: {file} is neither .json nor .toml", field="family_row", hint="give it one of these endings"
        )
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as fault:
        raise InvalidValue(
            f"--family-file: {file} is not TOML: {fault}", field="family_row", hint="correct the file"
        ) from fault
