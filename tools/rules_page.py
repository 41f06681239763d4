"""Writes docs/rules.md: every rule of the audit, as `glassblock rules NAME` explains it.

    python tools/rules_page.py

A test holds the page against the table.
"""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from glassblock.audit.rule import Rule
from glassblock.audit.rules import RULES

PAGE = Path(__file__).parent.parent / "docs" / "rules.md"

_HEAD = """# Rules

What the audit looks for, with the highest level of each rule's findings and how sure they are. Made from the rule
table by `python tools/rules_page.py`; `glassblock rules NAME` prints one. How each is measured on planted and reported
faults: [evidence/faults.md](evidence/faults.md).
"""


def page() -> str:
    """The text of docs/rules.md."""
    rules = sorted(RULES.values(), key=_group)
    return "\n".join(
        [_HEAD, *(text for group, members in groupby(rules, key=_group) for text in _section(group, members))]
    )


def _group(rule: Rule) -> str:
    return rule.name.partition("/")[0]


def _section(group: str, rules: Iterable[Rule]) -> Iterable[str]:
    yield f"## {group}\n"
    for rule in rules:
        yield f"### {rule.name}\n"
        yield f"{rule.level}, {rule.certainty}. {rule.what}\n"
        yield f"- It hurts: {rule.hurts}"
        yield f"- It is found: {rule.detection}"
        yield f"- It would be deceived: {rule.fooled_by}"
        yield f"- It happened: <{rule.report}>\n"


if __name__ == "__main__":
    PAGE.write_text(page().rstrip() + "\n", encoding="utf-8")
