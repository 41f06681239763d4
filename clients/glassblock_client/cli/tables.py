"""`glassblock families` and `glassblock rules`: what is read, and what is looked for."""

import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Annotated, TypeVar

import typer
from glassblock.errors import InvalidValue, ServiceUnavailable
from glassblock.wire.tables import FamilyList, FamilyRow, RuleList, RuleRow
from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from glassblock_client.cli.connection import DeviceOption, TimeoutOption, UrlOption, connected
from glassblock_client.cli.run import FormatOption
from glassblock_client.cli.screen import show

RowT = TypeVar("RowT", FamilyRow, RuleRow)

LEVEL_STYLES = {"error": "red", "warning": "yellow", "note": "cyan"}


def families(
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
    """List the families of models that are read, or explain one.

    verified: executed, against the model's own code at every test run; source only, read from it.
    """
    with (
        _told_where(url, "docs/adding-a-family.md"),
        connected(context, url=url, timeout=timeout, device=device) as client,
    ):
        known = client.families()
    exact = next((row for row in known.families if row.name == name), None)
    if name is not None and exact is None:
        known = known.model_copy(update={"families": _with_in_name(known.families, name, "family", "families")})
    if answer_format == "json":
        sys.stdout.write((exact or known).model_dump_json(indent=2) + "\n")
    else:
        show([_family_table(known), Text(), _override_names(known)] if exact is None else _explained_family(exact))


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
    if name is not None and exact is None:
        known = known.model_copy(update={"rules": _with_in_name(known.rules, name, "rule", "rules")})
    if answer_format == "json":
        sys.stdout.write((exact or known).model_dump_json(indent=2) + "\n")
    else:
        show(_rule_lines(known) if exact is None else _explained_rule(exact))


@contextmanager
def _told_where(url: str | None, page: str) -> Generator[None]:
    """The tables lie with the service; where that is not installed, what to install and where else they stand."""
    try:
        yield
    except ServiceUnavailable as error:
        if not url:
            error.hint = f"{error.hint or 'install the service'}; the same stands in {page} of the source"
        raise


def _family_table(known: FamilyList) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for title in ("family", "network", "norm", "placement", "verified"):
        table.add_column(title, no_wrap=True)
    for row in known.families:
        table.add_row(Text(row.name, "bold"), _network(row), row.norm, row.placement, row.verified)
    return table


def _network(row: FamilyRow) -> str:
    """`gated`, or `gated experts`: what stands before the tensors' names."""
    experts, _, kind = row.ffn.partition(":")[0].rpartition(", ")
    return f"{kind} experts" if experts else kind


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


def _explained_rule(rule: RuleRow) -> list[Text | Padding]:
    heading = Text.assemble((rule.name, "bold"), "  ", (rule.level, LEVEL_STYLES[rule.level]), f" / {rule.certainty}")
    return _explained(
        heading,
        {
            "what it names": rule.what,
            "what it hurts": rule.hurts,
            "how it is found": rule.detection,
            "what would deceive it": rule.fooled_by,
            "where it happened": rule.report,
        },
    )


def _explained_family(family: FamilyRow) -> list[Text | Padding]:
    return _explained(
        Text.assemble((family.name, "bold"), f"  {family.verified}"),
        {
            "what a config calls it": ", ".join((*family.model_types, *family.architectures)),
            "feed-forward network": family.ffn.replace("; ", "\n"),
            "activation": family.activation,
            "norms": f"{family.norm}, {family.placement}, eps {family.eps}",
            "notes": "\n".join(family.notes),
        },
    )


def _explained(heading: Text, parts: Mapping[str, str]) -> list[Text | Padding]:
    told: list[Text | Padding] = [heading]
    for title, text in parts.items():
        told += [Text(f"\n{title}", "dim"), _indented(text)] if text else []
    return told


def _with_in_name(rows: Sequence[RowT], part: str, what: str, command: str) -> tuple[RowT, ...]:
    """The rows with `part` in their name.

    Raises:
        InvalidValue: there is none; it tells those with the nearest names.
    """
    found = tuple(row for row in rows if part.lower() in row.name)
    if found:
        return found
    names = {row.name: row.name for row in rows}
    meant = {name.partition("/")[0]: name.partition("/")[0] for name in names}
    meant |= {name.partition("/")[2]: name for name in names} | names
    near = dict.fromkeys(meant[word] for word in get_close_matches(part.lower(), meant, n=3))
    hint = f"did you mean {' or '.join(near)}?" if near else f"`glassblock {command}` lists them"
    raise InvalidValue(f"no {what} has {part!r} in its name", field="NAME", hint=hint)
