"""`glassblock`: the table of commands, and how errors leave the process.

A command's module is imported when the command runs, so that `glassblock --help` answers
before numpy, HTTP and the messages are loaded.
"""

import contextlib
import importlib
import io
import os
import sys
import traceback
from dataclasses import dataclass
from typing import Annotated, Any

import glassblock
import typer
from glassblock.errors import GlassblockError
from glassblock.wire.printable import printable
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

NO_REPORT = 2
"""Exit status when no answer was possible: usage, an absent path, a refusal, a defect."""
INTERRUPTED = 130


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
        Command("run", "run", "Run one feed-forward block and show its stages."),
        Command("norms", "norms", "Show the statistics of a norm's input and output."),
        Command("budget", "budget", "Count parameters, activations and FLOPs of a feed-forward block."),
        Command("families", "tables", "List the families of models that are read."),
        Command("rules", "tables", "List the rules of the audit, or explain one."),
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

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command to run, loaded."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if command is None else load_command(COMMANDS[str(command.name)]), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what it returns is the exit status."""
        try:
            status: int = super().invoke(ctx) or 0
            sys.stdout.flush()
        except GlassblockError as error:
            complain(error)
            status = NO_REPORT
        except KeyboardInterrupt:
            sys.stderr.write("interrupted\n")
            status = INTERRUPTED
        except BrokenPipeError:
            # Whoever read has gone. Python flushes stdout once more at exit: give it somewhere to go.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = NO_REPORT
        except OSError as error:
            sys.stderr.write(f"error: {printable(str(error.filename or 'file'))}: {error.strerror or error}\n")
            status = NO_REPORT
        raise typer.Exit(status)


def load_command(row: Command) -> TyperCommand:
    """The command of a row, its module imported."""
    function = getattr(importlib.import_module(f"glassblock_client.cli.{row.module}"), row.name)
    alone = typer.Typer(add_completion=False)
    alone.command(row.name)(function)
    command = get_command(alone)
    assert isinstance(command, TyperCommand)  # noqa: S101  an app of one function makes a command, not a group
    return command


def complain(error: GlassblockError) -> None:
    """One line for what is wrong and one for what to do, on stderr."""
    known = f"; known: {', '.join(error.known)}" if error.known else ""
    sys.stderr.write(printable(f"error: {error.message}{known}") + "\n")
    if error.hint:
        sys.stderr.write(printable(f"hint: {error.hint}") + "\n")


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="glassblock")
    except Exception as defect:
        place = traceback.extract_tb(defect.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}, line {place.lineno}"  # noqa: PTH119  a name, not a path
        told = f"error: a defect in glassblock, {where}: {type(defect).__name__}: {defect}"
        sys.stderr.write(printable(told) + "\n")
        sys.exit(NO_REPORT)
