"""Several values in one argument, such as `gate,up` and `0-3,7`, and the network of a mixture that one names."""

from typing import Literal

from glassblock.errors import InvalidValue

MOST_DIGITS = 9
"""Of a layer, a token or an expert."""

LONGEST_RANGE = 100_000


def words_of(text: str, option: str) -> tuple[str, ...]:
    """`a, b` as a and b.

    Raises:
        InvalidValue: nothing is named.
    """
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise InvalidValue(f"{option} names nothing", field=option)
    return words


def rules_of(text: str | None) -> tuple[str, ...] | None:
    """The rules of `--rules`; None where it is left out.

    Raises:
        InvalidValue: it names none.
    """
    try:
        return None if text is None else words_of(text, "--rules")
    except InvalidValue as error:
        error.hint = "`glassblock rules` lists them"
        raise


def numbers_of(text: str, option: str) -> tuple[int, ...]:
    """`0-3,7` as 0, 1, 2, 3, 7.

    Raises:
        InvalidValue: something that is neither a number nor a range, or a range that runs backwards.
    """
    found: list[int] = []
    for word in words_of(text, option):
        first, dash, last = word.partition("-")
        if not _is_number(first) or (dash and not _is_number(last)):
            raise InvalidValue(f"{option}: {word!r} is neither a number nor a range", field=option, hint="0-3,7")
        reach = range(int(first), int(last or first) + 1)
        if not 0 < len(reach) <= LONGEST_RANGE:
            raise InvalidValue(f"{option}: the range {word!r} is empty or too long", field=option, hint="0-3,7")
        found += reach
    return tuple(found)


def expert_of(text: str | None) -> int | Literal["shared"] | None:
    """The network of a mixture that `--expert` names; None where it is left out.

    Raises:
        InvalidValue: it is neither a number nor `shared`.
    """
    if text is None or text == "shared":
        return text
    if not _is_number(text):
        raise InvalidValue(f"--expert: {text!r} is neither a number nor 'shared'", field="expert")
    return int(text)


def _is_number(word: str) -> bool:
    return word.isdecimal() and len(word) <= MOST_DIGITS
