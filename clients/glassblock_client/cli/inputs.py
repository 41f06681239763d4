"""What a command puts into a checkpoint: a file's x, sampled rows, or a text."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import typer
from glassblock.errors import InvalidValue
from glassblock.wire.framing import read_tensors
from glassblock.wire.printable import printable
from glassblock.wire.values import Sample

from glassblock_client.cli.files import read_x
from glassblock_client.cli.streams import tell
from glassblock_client.exchange import compose
from glassblock_client.tensors import Array, array_from_wire

MAX_FILE_BYTES = 64 * 1024 * 1024
"""Far above the tokens that a service takes at once."""

InputOption = Annotated[
    Path | None,
    typer.Option("--input", metavar="FILE", help="x: in a .safetensors file, or an .npy file.", show_default=False),
]
SampleOption = Annotated[
    int | None,
    typer.Option(
        "--sample", metavar="ROWS", help="So many rows of the checkpoint's embedding as x.", show_default=False
    ),
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="Of the sample's draw; 0 when left out.", show_default=False)
]
TokenIdsOption = Annotated[
    str | None,
    typer.Option(
        "--token-ids", metavar="ID,...", help="A text as token ids; the layers below are run.", show_default=False
    ),
]
TextOption = Annotated[
    str | None,
    typer.Option(
        "--text",
        help="The same in words, or a file of them (no such file: words), by the checkpoint's own tokenizer.json.",
        show_default=False,
    ),
]
TokensOption = Annotated[
    Path | None,
    typer.Option(
        "--tokens", metavar="FILE", help="The same as ids in a .json, .npy or .safetensors file.", show_default=False
    ),
]


def chosen_input(
    file: Path | None,
    rows: int | None,
    seed: int | None,
    *,
    token_ids: str | None = None,
    text: str | None = None,
    tokens: Path | None = None,
) -> dict[str, Any]:
    """What goes in, under the name that the client's methods have for it.

    Raises:
        InvalidValue: nothing, two things, or a seed of no sample.
    """
    given = {
        "--input": file is not None,
        "--sample": rows is not None,
        "--token-ids": token_ids is not None,
        "--text": text is not None,
        "--tokens": tokens is not None,
    }
    if sum(given.values()) != 1:
        raise InvalidValue(
            "give one of --input FILE, --sample ROWS, --token-ids ID,..., --text TEXT and --tokens FILE", field="input"
        )
    if seed is not None and rows is None:
        raise InvalidValue("--seed has no effect without --sample", field="seed")
    if file is not None:
        return {"x": read_x(file)}
    if rows is not None:
        return {"sample": compose(Sample, rows=rows, seed=seed or 0)}
    return chosen_text(token_ids, text, tokens)


def chosen_text(token_ids: str | None, text: str | None, tokens: Path | None) -> dict[str, Any]:
    """A text, under the name that the client's methods have for it.

    Raises:
        InvalidValue: none, two, or ids that are no numbers.
    """
    if sum(one is not None for one in (token_ids, text, tokens)) != 1:
        raise InvalidValue("give one of --token-ids ID,..., --text TEXT and --tokens FILE", field="token_ids")
    if text is not None:
        return {"text": _words(text)}
    if tokens is not None:
        return {"token_ids": read_token_ids(tokens)}
    return {"token_ids": [_number(word) for word in (token_ids or "").split(",") if word.strip()]}


_LIKE_A_FILE = re.compile(r"\S*\w\.\w{1,5}")


def _words(given: str) -> str:
    """What stands in the file of this name; `given` itself where there is none."""
    file = Path(given)
    try:
        if not file.is_file():
            if _LIKE_A_FILE.fullmatch(given):
                tell(printable(f"--text: there is no file {given}; its name is taken as the text"))
            return given
        if file.stat().st_size > MAX_FILE_BYTES:
            raise InvalidValue(f"--text: {file} is larger than {MAX_FILE_BYTES:,} bytes", field="text")
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as fault:
        raise InvalidValue(f"--text: {file} holds no text in UTF-8: {fault}", field="text") from fault
    except (OSError, ValueError):  # no name that a file could have: longer than names are, or with a NUL
        return given


def read_token_ids(file: Path) -> list[Any]:
    """Token ids of one text, or of several of one length, in a file.

    Raises:
        InvalidValue: the file cannot be read, or holds something else.
    """
    if not file.is_file():
        raise InvalidValue(f"--tokens: {file} is no file", field="token_ids", hint="give a .json, .npy or .safetensors")
    if file.stat().st_size > MAX_FILE_BYTES:
        raise InvalidValue(f"--tokens: {file} is larger than {MAX_FILE_BYTES:,} bytes", field="token_ids")
    if not file.stat().st_size:
        raise InvalidValue(f"--tokens: {file} is empty", field="token_ids")
    try:
        if file.suffix == ".json":
            found: object = json.loads(file.read_text(encoding="utf-8"))
        elif file.suffix == ".npy":
            found = whole_numbers(np.load(file, allow_pickle=False), option="--tokens")
        elif file.suffix == ".safetensors":
            _, tensors = read_tensors(np.memmap(file, np.uint8, mode="r").data)
            if "token_ids" not in tensors:
                raise InvalidValue(
                    f"--tokens: {file} holds no token_ids", field="token_ids", known=tuple(sorted(tensors))[:20]
                )
            found = whole_numbers(array_from_wire(tensors["token_ids"]), option="--tokens")
        else:
            raise InvalidValue(
                f"--tokens: {file} is none of .json, .npy and .safetensors",
                field="token_ids",
                hint="give it one of these endings",
            )
    except (ValueError, EOFError, RecursionError) as fault:
        raise InvalidValue(f"--tokens: {file} cannot be read: {fault}", field="token_ids") from fault
    if not isinstance(found, list):
        raise InvalidValue(f"--tokens: {file} holds no list of token ids", field="token_ids")
    return cast("list[Any]", found)


def whole_numbers(array: Array, *, option: str) -> list[Any]:
    """Token ids out of an array.

    Raises:
        InvalidValue: it holds no integers.
    """
    if array.dtype.kind not in "iu":
        raise InvalidValue(f"{option}: the array is {array.dtype}, and token ids are integers", field="token_ids")
    return cast("list[Any]", array.tolist())


def _number(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise InvalidValue(f"--token-ids: {word.strip()!r} is no number", field="token_ids") from None
