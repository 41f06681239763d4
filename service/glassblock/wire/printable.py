"""Text out of files that nobody vouches for, made safe to show."""


def printable(text: str) -> str:
    r"""`text` with whatever a terminal would obey, and not show, written as an escape.

    >>> printable("gate\x1b[2J")
    'gate\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
