"""`glassblock`: the table of commands, and how errors leave the process.

A command's module is imported when the command runs, so that `glassblock --help` answers
before numpy, HTTP and the messages are loaded.
"""

import importlib
import inspect
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import Annotated, Any

import glassblock
import typer
from glassblock.errors import GlassblockError, InvalidValue, UnknownFamily
from glassblock.wire.printable import printable
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from glassblock_client.cli.options import URL_ASKED, asking_at, in_words_of_options
from glassblock_client.cli.streams import open_streams, settle_streams, tell

NO_REPORT = 2
"""Exit status when no answer was possible: usage, an absent path, a refusal, a defect."""
KNOWN_UP_TO = 12
"""Names that an error tells all of."""
NEAR = 6
QUOTED, QUOTED_CHARACTERS = 4, 80
"""Of a message, what is held against the names that are known."""
LISTED_BY = {"family": "families", "activation": "families", "norm_kind": "families", "rules": "rules"}
"""The command that lists what a field may hold."""
INTERRUPTED = 130
TERMINATED = 143


class Terminated(KeyboardInterrupt):
    """SIGTERM: it unwinds as Ctrl-C does, so that a cancelled pipeline leaves nothing half written."""


@dataclass(frozen=True)
class Command:
    """A function of this name in `glassblock_client.cli.<module>`, whose docstring starts with `summary`."""

    name: str
    module: str
    summary: str


COMMANDS: dict[str, Command] = {
    row.name: row
    for row in (
        Command("demo", "demo", "Audit the shipped example, then a copy with a planted mistake."),
        Command("audit", "audit", "Name the mistakes in a checkpoint that raise no error."),
        Command("run", "run", "Run a part of one layer and show its stages."),
        Command("likelihood", "likelihood", "Show how likely a checkpoint finds a text, token by token."),
        Command("explain", "explain", "Name the mistake that explains tensors captured elsewhere."),
        Command("norms", "norms", "Show the statistics of a norm's input and output."),
        Command("jacobian", "jacobian", "Show norms of Jacobians per layer and token, each with how it was had."),
        Command("budget", "budget", "Count parameters, activations and FLOPs of a feed-forward block."),
        Command("fix", "fix", "Repair a checkpoint into a new folder, and audit the result."),
        Command("selftest", "selftest", "Plant mistakes in a checkpoint, in memory, and see what is found."),
        Command("checkpoints", "checkpoints", "List the checkpoints of a service, or under a folder."),
        Command("families", "tables", "List the families of models that are read, or explain one."),
        Command("rules", "tables", "List the rules of the audit, or explain one."),
        Command("audits", "audits", "List, follow or cancel the audits of a service."),
        Command("keys", "keys", "Make an API key for callers of a service."),
        Command("serve", "serve", "Serve the checkpoints under some folders over HTTP."),
        Command("doctor", "doctor", "Look at this installation and say what to do next."),
    )
}


class CommandGroup(TyperGroup):
    """Finds commands in the table, and turns every error into one line and an exit status."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # What help, completion and "did you mean" show: name and summary, no module.
        self.commands = {row.name: TyperCommand(row.name, help=row.summary) for row in COMMANDS.values()}
        self.loaded: TyperCommand | None = None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command to run, loaded."""
        name, command, rest = super().resolve_command(ctx, args)
        refuse_empty(args)
        if command is None:
            return name, None, rest
        self.loaded = load_command(COMMANDS[str(command.name)])
        return name, self.loaded, rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what it returns is the exit status."""
        try:
            with terminable():
                status: int = super().invoke(ctx) or 0
                sys.stdout.flush()
        except typer.BadParameter as usage:
            in_our_words(usage)
            raise
        except GlassblockError as error:
            if self.loaded is not None:
                in_words_of_options(error, options_of(self.loaded), str(self.loaded.name))
            complain(error, url=ctx.meta.get(URL_ASKED))
            status = NO_REPORT
        except Terminated:
            tell("terminated")
            status = TERMINATED
        except KeyboardInterrupt:
            tell("interrupted")
            status = INTERRUPTED
        except BrokenPipeError:
            status = NO_REPORT  # whoever read has gone: there is nobody to tell
        except OSError as error:
            complain_of_file(error)
            status = NO_REPORT
        except EOFError as defect:
            complain_of_defect(defect)  # typer would make it status 1
            status = NO_REPORT
        settle_streams()
        raise typer.Exit(status)


@contextmanager
def terminable() -> Generator[None]:
    """SIGTERM raises `Terminated`, in the main thread; no other may say what a signal does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(_number: int, _frame: object) -> None:
    raise Terminated


def load_command(row: Command) -> TyperCommand:
    """The command of a row, its module imported."""
    function = getattr(importlib.import_module(f"glassblock_client.cli.{row.module}"), row.name)
    alone = typer.Typer(add_completion=False)
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    alone.command(row.name, help="\n\n".join(" ".join(lines.split()) for lines in paragraphs))(function)
    command = get_command(alone)
    assert isinstance(command, TyperCommand)  # noqa: S101  an app of one function makes a command, not a group
    return command


def options_of(command: TyperCommand) -> dict[str, str]:
    """The options of a command by their parameter: `token_ids` is `--token-ids`."""
    long = {str(param.name): [name for name in param.opts if name.startswith("--")] for param in command.params}
    return {name: names[0] for name, names in long.items() if names}


def in_our_words(usage: typer.BadParameter) -> None:
    """What is wrong with the value of an option, as the service says it of a field."""
    from glassblock.wire.wanted import sentence  # noqa: PLC0415  loads pydantic, which --help does not need
    from pydantic import ValidationError  # noqa: PLC0415

    if isinstance(usage.__cause__, ValidationError):
        usage.message = f"{sentence(usage.__cause__.errors(include_url=False)[:1]).rstrip('.')}."


def refuse_empty(words: Sequence[str]) -> None:
    """No argument of any command may be empty: it would stand for the current folder, or for nothing said.

    Raises:
        InvalidValue: one is, mostly because a variable was not set: `glassblock audit "$MODEL"`.
    """
    for before, word in pairwise(words):
        if word == "--":
            return
        empty_option = word.startswith("--") and word.partition("=")[1:] == ("=", "")
        if word == "" or empty_option:
            where = word.rstrip("=") if empty_option else before
            raise InvalidValue(
                f"the argument after {where} is empty", hint=f"is a variable not set? `glassblock {words[0]} --help`"
            )


def complain(error: GlassblockError, *, url: str | None = None) -> None:
    """One line for what is wrong and one for what to do, on stderr; its commands ask the service at `url` again."""
    told = all(repr(name) in error.message for name in error.known)
    known = f"; known: {known_names(error)}" if error.known and not told else ""
    tell(printable(f"error: {error.message}{asking_at(url, known)}"))
    if error.hint and error.hint.removeprefix("see ") not in known:
        tell(printable(f"hint: {asking_at(url, error.hint)}"))


def known_names(error: GlassblockError) -> str:
    """The names that are known: all of a few, of many those near to one that the message quotes, and how many more.

    >>> known_names(InvalidValue("no rule 'norm/ofset'", known=("norm/offset", "norm/role")))
    'norm/offset, norm/role'
    >>> known_names(InvalidValue("no rule 'gate'", field="rules", known=("ffn/gate-up", *map(str, range(99)))))
    'ffn/gate-up and 99 more: `glassblock rules` lists them'
    >>> known_names(InvalidValue("no family 'lama'", field="family", known=("gemma", "llama", *map(str, range(99)))))
    'llama and 100 more: `glassblock families` lists them'
    """
    if len(error.known) <= KNOWN_UP_TO:
        return ", ".join(error.known)
    quoted: list[tuple[str, str]] = re.findall(r"'([^']+)'|\"([^\"]+)\"", error.message)
    near = dict.fromkeys(
        name
        for words in quoted[:QUOTED]
        for word in words
        if word
        for name in (
            *get_close_matches(word[:QUOTED_CHARACTERS], error.known, n=NEAR),
            *(known for known in error.known if word in known),
        )
    )
    told = list(near)[:NEAR] or list(error.known[:NEAR])
    listed_by = "families" if isinstance(error, UnknownFamily) else LISTED_BY.get((error.field or "").split(".")[-1])
    where = f": `glassblock {listed_by}` lists them" if listed_by else ""
    return f"{', '.join(told)} and {len(error.known) - len(told):,} more{where}"


def complain_of_file(error: OSError) -> None:
    """One line for a file or stream that could not be read or written."""
    tell(printable(f"error: {error.filename or 'output'}: {error.strerror or error}"))


def complain_of_defect(defect: Exception) -> None:
    """One line for a mistake of ours: its kind and its place."""
    place = traceback.extract_tb(defect.__traceback__)[-1]
    where = f"{os.path.basename(place.filename)}, line {place.lineno}"  # noqa: PTH119  a name, not a path
    tell(printable(f"error: a defect in glassblock, {where}: {type(defect).__name__}: {defect}"))


app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:  # noqa: FBT001  typer calls it so
    if wanted:
        sys.stdout.write(f"glassblock {glassblock.__version__}\n")
        raise typer.Exit


@app.callback()
def glassblock_command(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Look inside the blocks of a transformer checkpoint, and name the mistakes that raise no error."""
    del version


def main() -> None:
    """The entry point `glassblock`."""
    open_streams()
    try:
        app(prog_name="glassblock")
    except OSError as error:  # typer's own help or usage had nowhere to go
        complain_of_file(error)
    except Exception as defect:
        complain_of_defect(defect)
    settle_streams()
    sys.exit(NO_REPORT)
