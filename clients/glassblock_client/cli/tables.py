"""`glassblock families` and `glassblock rules`: what is read, and what is looked for."""

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Annotated

import typer
from glassblock.errors import InvalidValue, ServiceUnavailable
from glassblock.wire.tables import FamilyList, RuleList, RuleRow
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from glassblock_client.cli.connection import DeviceOption, TimeoutOption, UrlOption, connected
from glassblock_client.cli.run import FormatOption
from glassblock_client.cli.screen import show

LEVEL_STYLES = {"error": "red", "warning": "yellow", "note": "cyan"}


def families(
    context: typer.Context,
    *,
    answer_format: FormatOption = "text",
    url: UrlOption = None,
    timeout: TimeoutOption = None,
    device: DeviceOption = None,
) -> None:
    """List the families of models that are read."""
    with (
        _told_where(url, "docs/adding-a-family.md"),
        connected(context, url=url, timeout=timeout, device=device) as client,
    ):
        known = client.families()
    if answer_format == "json":
        sys.stdout.write(known.model_dump_json(indent=2) + "\n")
    else:
        show([*_family_lines(known), Text(), _override_names(known)])


def rules(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Explain this one, or list those with this in their name.", show_default=False
        ),
    ] = None,
    *,
    answer_format: FormatOption = "text",
    url: UrlOption = None,
    timeout: TimeoutOption = None,
    device: DeviceOption = None,
) -> None:
    """List the rules of the audit, or explain one."""
    with _told_where(url, "docs/rules.md"), connected(context, url=url, timeout=timeout, device=device) as client:
        known = client.rules()
    exact = next((row for row in known.rules if row.name == name), None)
    listed = known if name is None or exact is not None else _with_in_name(known, name)
    if answer_format == "json":
        sys.stdout.write((exact or listed).model_dump_json(indent=2) + "\n")
    else:
        show(_rule_lines(listed) if exact is None else _explained(exact))


@contextmanager
def _told_where(url: str | None, page: str) -> Generator[None]:
    """The tables lie with the service; where that is not installed, what to install and where else they stand."""
    try:
        yield
    except ServiceUnavailable as error:
        if not url:
            error.hint = f"{error.hint or 'install the service'}; the same stands in {page} of the source"
        raise


def _family_lines(known: FamilyList) -> Iterator[RenderableType]:
    for row in known.families:
        kind, _, layout = row.ffn.partition(": ")
        yield Text.assemble((row.name, "bold"), f"  {kind}, {row.norm}, {row.placement}, {row.verified}")
        yield _indented(f"activation {row.activation}, eps {row.eps}")
        yield _indented(layout, "dim")


def _override_names(known: FamilyList) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("norm kinds", ", ".join(known.norm_kinds))
    grid.add_row("activations", ", ".join(known.activations))
    grid.add_row("placements", ", ".join(known.placements))
    return grid


def _rule_lines(known: RuleList) -> Iterator[RenderableType]:
    for row in known.rules:
        yield Text.assemble((row.name, "bold"), "  ", (row.level, LEVEL_STYLES[row.level]))
        yield _indented(row.what)


def _indented(text: str, style: str = "") -> Padding:
    return Padding(Text(text, style, overflow="fold"), (0, 0, 0, 2))


def _explained(rule: RuleRow) -> list[Text | Padding]:
    parts: list[Text | Padding] = [
        Text.assemble((rule.name, "bold"), "  ", (rule.level, LEVEL_STYLES[rule.level]), f" / {rule.certainty}")
    ]
    for title, text in (
        ("what it names", rule.what),
        ("what it hurts", rule.hurts),
        ("how it is found", rule.detection),
        ("what would deceive it", rule.fooled_by),
        ("where it happened", rule.report),
    ):
        parts += [Text(f"\n{title}", "dim"), _indented(text)]
    return parts


def _with_in_name(known: RuleList, part: str) -> RuleList:
    """The rules with `part` in their name.

    Raises:
        InvalidValue: there is none; it tells those with the nearest names.
    """
    found = tuple(row for row in known.rules if part.lower() in row.name)
    if found:
        return known.model_copy(update={"rules": found})
    names = {row.name: row.name for row in known.rules}
    meant = {name.partition("/")[0]: name.partition("/")[0] for name in names}
    meant |= {name.partition("/")[2]: name for name in names} | names
    near = dict.fromkeys(meant[word] for word in get_close_matches(part.lower(), meant, n=3))
    hint = f"did you mean {' or '.join(near)}?" if near else "`glassblock rules` lists them"
    raise InvalidValue(f"no rule has {part!r} in its name", field="NAME", hint=hint)
