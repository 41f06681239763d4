"""What a service says of paths and fields, in the words of a command line: commands and options."""

import re
import shlex
from collections.abc import Mapping

from glassblock.errors import HINT_AS_JOB, GlassblockError

COMMANDS_FOR: Mapping[str, str] = {
    "GET /v1/rules": "`glassblock rules`",
    "GET /v1/families": "`glassblock families`",
    "GET /v1/checkpoints": "`glassblock checkpoints`",
    "GET /v1/audits": "`glassblock audits`",
    "GET /openapi.json": "`glassblock COMMAND --help`",
}
"""The command that answers what a path of the service does."""

FIELDS: Mapping[str, str] = {
    "family_row": "family_file",
    "rows": "sample",
    "x": "input_file",
    "format": "report_format",
}
"""Fields of a request whose option is not called as they are."""

_BOTH = "family_row, --family-file"
"""Where a hint names field and option."""

URL_ASKED = "glassblock.url"
"""Of a context's `meta`: the service that a command asks."""

_LISTING = re.compile(r"`glassblock (rules|families|checkpoints|audits)`")
"""Commands whose answer each service has of its own."""

_QUOTED = re.compile(r"`([a-z_]+)`")
_JOINED = re.compile(r"(?<![\w./`-])[a-z]+(?:_[a-z]+)+(?![\w./`-])")


def in_words_of_options(error: GlassblockError, options: Mapping[str, str], command: str) -> None:
    """Put an error's message and hint into the words of a command.

    Args:
        error: is changed.
        options: of the command by parameter, `token_ids`: `--token-ids`.
        command: its name.
    """
    error.message = _translated(_led_by_option(error, options), options, command)
    error.hint = None if error.hint is None else _translated(error.hint, options, command)


def asking_at(url: str | None, text: str) -> str:
    """`text` with its commands asking the service at `url`. A password in there is not repeated."""
    at = "" if not url else " --url URL" if "@" in url else f" --url {shlex.quote(url)}"
    return _LISTING.sub(lambda found: f"`glassblock {found[1]}{at}`", text)


def _led_by_option(error: GlassblockError, options: Mapping[str, str]) -> str:
    """The message, with the option in the place of the field that it begins with: `--capture: 'gat' is none of ...`."""
    field, message = error.field or "", error.message
    after = message[len(field) : len(field) + 1]
    if not field or not message.startswith(field) or after not in {":", " "}:
        return message
    steps = [step for step in field.split(".") if not step.isdecimal()]
    for number, step in enumerate(steps):
        option = _option(step, options)
        if option is not None:
            if after == " " and not re.match(r" (?:is|comes|belongs|has) ", message[len(field) :]):
                return message
            inner = ".".join(rest for rest in steps[number + 1 :] if _option(rest, options) != option)
            return f"{option}{f': {inner}' if inner else ''}{message[len(field) :]}"
    return message


def _translated(text: str, options: Mapping[str, str], command: str) -> str:
    text = text.replace(HINT_AS_JOB, "").replace(_BOTH, "--family-file")
    for path, told in COMMANDS_FOR.items():
        text = text.replace(path, told.replace("COMMAND", command))
    text = _QUOTED.sub(lambda found: f"`{_option(found[1], options) or found[1]}`", text)
    return _JOINED.sub(lambda found: _option(found[0], options) or found[0], text)


def _option(field: str, options: Mapping[str, str]) -> str | None:
    return options.get(field) or options.get(FIELDS.get(field, ""))
