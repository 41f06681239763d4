"""API keys: how one is made, and how the service's file of keys remembers it.

One line per key: `name scope sha256:digest`; `#` begins a comment. The file holds no key, only its SHA-256. A slow hash
would protect nothing more: a key is 256 random bits, which nobody guesses from a digest, and every request is checked.
"""

import hashlib
import re
import secrets
from typing import Literal, NamedTuple, get_args

from glassblock.errors import InvalidValue

Scope = Literal["read", "run", "admin"]
"""What a key allows; each includes the ones before it.

read: lists, tables, jobs and reports, metrics. run: whatever computes; starting audits and cancelling one's own.
admin: what blocks the device holds, and everybody's audits.
"""

SCOPES: tuple[Scope, ...] = get_args(Scope)
PREFIX = "gb_"
"""Begins every key, so that a search for leaked ones finds it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class Key(NamedTuple):
    """A key as it is remembered: who has it, what it allows, and its SHA-256 in hexadecimal digits."""

    name: str
    scope: Scope
    digest: str


def new_key() -> str:
    """A key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """What a file remembers of `key`."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def key_line(name: str, scope: str, key: str) -> str:
    """The line for a file of keys.

    Raises:
        InvalidValue: the name or the scope cannot be used.
    """
    return "{0.name} {0.scope} sha256:{0.digest}".format(_key(name, scope, digest_of(key), where="a key"))


def read_keys(text: str) -> dict[str, Key]:
    """The keys of a file, by their digests.

    Raises:
        InvalidValue: a line is no key, or a name or a key stands twice. The line is named.
    """
    keys: dict[str, Key] = {}
    names: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        digest = _DIGEST.fullmatch(words[2]) if len(words) == 3 else None
        if digest is None:
            raise _refused(f"line {number} is not `name scope sha256:digest`")
        key = _key(words[0], words[1], digest[1], where=f"line {number}")
        if key.digest in keys or key.name in names:
            raise _refused(f"line {number}: {key.name}, or its key, stands twice")
        keys[key.digest] = key
        names.add(key.name)
    if not keys:
        raise _refused("the file holds no key")
    return keys


def allows(scope: Scope, needed: Scope) -> bool:
    """Whether a key of `scope` may do what needs `needed`."""
    return SCOPES.index(scope) >= SCOPES.index(needed)


def _key(name: str, scope: str, digest: str, *, where: str) -> Key:
    if not _NAME.fullmatch(name):
        raise _refused(f"{where}: {name[:80]!r} is no name of 1 to 64 letters, digits, dots, dashes")
    if scope not in SCOPES:
        raise _refused(f"{where}: there is no scope {scope[:80]!r}", known=SCOPES)
    return Key(name, scope, digest)


def _refused(message: str, *, known: tuple[str, ...] = ()) -> InvalidValue:
    return InvalidValue(
        f"keys: {message}", field="keys_file", known=known, hint="`glassblock keys NAME --file FILE` writes one"
    )
