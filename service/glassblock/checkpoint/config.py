"""config.json: what it declares, where, and what a family takes where it is silent.

Every value comes back with its source, so that nothing is defaulted silently. A value that cannot be used
(an epsilon that is a text, a size that is a bool) is refused by key, never converted.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, cast

from glassblock.checkpoint.family import Architecture
from glassblock.checkpoint.files import leads_nowhere, read_whole
from glassblock.checkpoint.strict_json import JsonFault, parse_json
from glassblock.errors import DamagedCheckpoint

MAX_CONFIG_BYTES = 16 << 20
"""Longest config read. Those with a quantisation entry for every module reach a few MB."""

ConfigFaultKind = Literal["header", "value", "shape", "unknown-family"]

_RULES: Mapping[ConfigFaultKind, str] = MappingProxyType({"header": "container/header", "value": "config/shape"})
_EPS_KEY = re.compile(r"(?:\w*norm\w*|ln|rms)_?(?:eps|epsilon)|eps|epsilon", re.ASCII)
_OTHER_SUBJECTS = frozenset({"quantization_config"})


@dataclass(frozen=True)
class ConfigFile:
    """A config as parsed: `values` are plain JSON values, `path` says which file."""

    path: Path
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ConfigFault:
    """One thing wrong with a config, or between it and the tensors.

    Attributes:
        kind: `header` (no readable JSON), `value` (a value of the wrong type), `shape`, `unknown-family`.
        file: The config.
        message: What is wrong.
        hint: What to do.
        key: The dotted key at fault.
        tensor: The tensor at fault.
        byte: Where an unreadable config stops being readable.
        known: The names that would have been accepted.
    """

    kind: ConfigFaultKind
    file: Path
    message: str
    hint: str
    key: str | None = None
    tensor: str | None = None
    byte: int | None = None
    known: tuple[str, ...] = ()

    @property
    def rule(self) -> str:
        """The name of the audit rule it falls under."""
        return _RULES.get(self.kind, f"config/{self.kind}")


@dataclass(frozen=True, slots=True)
class DeclaredEps:
    """An epsilon and one place that states it.

    Attributes:
        value: The number.
        file: Name of the file, or None for a family's default.
        key: Dotted key in it, or None for a family's default.
        roles: Roles of norms that take it from here; none for a declaration that this family does not read.
    """

    value: float
    file: str | None
    key: str | None
    roles: tuple[str, ...]


def read_config(path: Path, *, real: Path | None = None) -> ConfigFile | ConfigFault:
    """The config at `path`, or what is wrong with it.

    Raises:
        UnknownCheckpoint, AccessRefused, ServiceUnavailable: See `files.open_regular`.
    """
    hint = "Restore the file from the model's source."
    if leads_nowhere(path):
        return ConfigFault("header", path, f"{path.name} is a link that leads nowhere", hint)
    try:
        raw = read_whole(path.resolve() if real is None else real, name=path.name, limit=MAX_CONFIG_BYTES)
        value = parse_json(raw, constants=True)
    except DamagedCheckpoint as error:
        return ConfigFault("header", path, error.message, error.hint or hint)
    except JsonFault as error:
        return ConfigFault("header", path, f"{path.name} cannot be read: {error.message}", hint, byte=error.byte)
    if not isinstance(value, dict):
        return ConfigFault("header", path, f"{path.name} is no JSON object", hint, byte=0)
    return ConfigFile(path, MappingProxyType(cast("dict[str, object]", value)))


def declared_eps(config: ConfigFile | None, row: Architecture, params: ConfigFile | None = None) -> list[DeclaredEps]:
    """Every epsilon of a norm that any source states, at every level of nesting.

    Args:
        config: config.json.
        row: The family, whose norms say which declaration they read.
        params: params.json, whose `norm_eps` speaks for all norms.

    Returns:
        One entry for each place; those that some norm reads first. Where a norm's keys are all absent, the family's
        default is an entry of its own, without file and key. Values that are no numbers are left out here and are
        faults in `config_faults`.
    """
    used: dict[tuple[str | None, float], list[str]] = {}
    for norm in row.norms:
        found = None if config is None else find(config, row, norm.eps.keys)
        if found is None:
            used.setdefault((None, norm.eps.default), []).append(norm.role)
        elif (value := as_epsilon(found.value)) is not None:
            used.setdefault((found.key, value), []).append(norm.role)
    name = None if config is None else config.path.name
    entries = [DeclaredEps(value, name if key else None, key, tuple(roles)) for (key, value), roles in used.items()]
    read = {key for key, _ in used}
    for file, roles in ((config, ()), (params, row.roles)):
        if file is not None:
            entries.extend(
                DeclaredEps(value, file.path.name, key, roles)
                for key, value in _eps_keys(file.values)
                if file is params or key not in read
            )
    return entries


def declared_flags(config: ConfigFile, key: str) -> dict[str, object]:
    """Every value that the last part of a dotted key has, at any level: `{"text_config.tie_word_embeddings": ...}`."""
    return {path: value for path, value in _leaves(config.values) if path.rpartition(".")[2] == key}


class Found(NamedTuple):
    """A value in a config, and its dotted key from the top."""

    key: str
    value: object


def find(config: ConfigFile, row: Architecture, keys: tuple[str, ...]) -> Found | None:
    """The first key present, in the nested config of the language model where there is one.

    A null counts as absent, as it does for the models' own configuration classes.
    """
    found = (place for place in _places(config, row, keys) if place.value is not None)
    return next(found, None)


def find_or_null(config: ConfigFile, row: Architecture, keys: tuple[str, ...]) -> Found | None:
    """As `find`, where a null is a value: the first key present, whatever is there."""
    return next(_places(config, row, keys), None)


def _places(config: ConfigFile, row: Architecture, keys: tuple[str, ...]) -> Iterator[Found]:
    """Every key that is there, nulls included."""
    prefix, values = "", config.values
    for name in row.nested:
        inner = values.get(name)
        if isinstance(inner, dict):
            prefix, values = f"{name}.", cast("dict[str, object]", inner)
            break
    for key in keys:
        value: object = values
        for part in key.split("."):
            value = _entry(value, part)
            if value is _ABSENT:
                break
        else:
            yield Found(prefix + key, value)


_ABSENT = object()


def _entry(value: object, part: str) -> object:
    if isinstance(value, Mapping):
        return cast("Mapping[str, object]", value).get(part, _ABSENT)
    if isinstance(value, list) and part.isdecimal() and int(part) < len(cast("list[object]", value)):
        return cast("list[object]", value)[int(part)]
    return _ABSENT


def _leaves(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, dict):
            if key not in _OTHER_SUBJECTS:
                yield from _leaves(cast("dict[str, object]", value), f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _eps_keys(values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for path, value in _leaves(values):
        number = as_epsilon(value)
        if number is not None and _EPS_KEY.fullmatch(path.rpartition(".")[2]):
            yield path, number


def as_number(value: object) -> float | None:
    """The finite number that a JSON value is, or None."""
    # Not a bool, which is an int to isinstance; not a text that looks like a number.
    if type(value) is int and abs(value) < 2**1000:
        return float(value)
    return value if isinstance(value, float) and math.isfinite(value) else None


def as_epsilon(value: object) -> float | None:
    """The finite number, not negative, that a JSON value is, or None."""
    number = as_number(value)
    return number if number is not None and number >= 0 else None
