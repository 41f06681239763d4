"""Headers, config and index of a checkpoint exchanged in place, with what they were kept beside them.

The order of writes makes every moment recoverable: backups reach the disk, then a journal that names them, then the
changes, then the journal goes. Whoever finds a journal was preceded by an interruption and undoes it first.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast

from glassblock.checkpoint.container import MAX_HEADER_BYTES
from glassblock.checkpoint.files import read_whole
from glassblock.checkpoint.index import is_plain_name
from glassblock.checkpoint.patches import Draft
from glassblock.checkpoint.strict_json import JsonFault, parse_json
from glassblock.checkpoint.writing import BACKUP_MARK, refuse_link, write_all
from glassblock.errors import DamagedCheckpoint, InvalidValue

JOURNAL = ".glassblock-in-place.json"
"""There while a change in place is under way."""

_Kind = Literal["header", "text", "new"]


def write_in_place(draft: Draft, *, wrote: Callable[[str], None] = lambda _name: None) -> tuple[str, ...]:
    """Exchange headers, config and index.

    Args:
        draft: What to write; only headers, config and index may differ.
        wrote: Told each file after it was exchanged.

    Returns:
        Names of the backups: a weight file's holds its header with the length in front, the others the whole text.

    Raises:
        InvalidValue: More than that differs, a backup of an earlier change is there, or the disk refuses.
        AccessRefused: A file is a link, or has several names.
        DamagedCheckpoint: A file was changed meanwhile; or the disk refused midway, and what was changed stands.
    """
    directory = draft.checkpoint.contents.directory
    if not draft.in_place:
        moved = [*(name for name, file in draft.files.items() if not file.header_only), *draft.lost]
        raise InvalidValue(
            f"{moved[0]} would differ in more than its header",
            field="in_place",
            hint="Use --output in place of --in-place.",
        )
    kinds: dict[str, _Kind] = dict.fromkeys(draft.files, "header")
    kinds |= {name: "text" if os.path.lexists(directory / name) else "new" for name in draft.texts}
    _require_writable(directory)
    before = {name: _before(draft, directory, name) for name, kind in kinds.items() if kind != "new"}
    for name, raw in before.items():
        refuse_link(directory / name)
        backup = directory / f"{name}{BACKUP_MARK}"
        if backup.exists() and backup.read_bytes() != raw:
            raise InvalidValue(
                f"{backup.name} is there, of an earlier change", field="in_place", hint="Move it away, or use --output."
            )
    begun = done = False
    try:
        for name, raw in before.items():
            _put(directory / f"{name}{BACKUP_MARK}", raw)
        begun = True
        _put(directory / JOURNAL, json.dumps(kinds).encode())
        for name in kinds:
            if kinds[name] == "header":
                _overwrite(directory / name, draft.files[name].header)
            else:
                _put(directory / name, draft.texts[name])
            wrote(name)
        done = True
        _remove(directory / JOURNAL)
    except BaseException as error:
        _undo_or_tell(directory, kinds, begun=begun, done=done)
        if isinstance(error, OSError):
            words = os.strerror(error.errno) if error.errno else str(error)
            raise InvalidValue(f"it cannot be written in place: {words}", field="in_place") from error
        raise
    return tuple(f"{name}{BACKUP_MARK}" for name in before)


def _require_writable(directory: Path) -> None:
    if not os.access(directory, os.W_OK | os.X_OK):
        raise InvalidValue(
            f"{directory.name} may not be written", field="in_place", hint="Use --output in place of --in-place."
        )


def _undo_or_tell(directory: Path, kinds: dict[str, _Kind], *, begun: bool, done: bool) -> None:
    """Undo what was begun; where the disk refuses that as well, say what stands."""
    try:
        _undo(directory, kinds, begun=begun)
    except OSError as error:
        words = os.strerror(error.errno or 0)
        if begun and interrupted(directory):
            raise DamagedCheckpoint(
                f"a change in place was broken off, and could not be undone: {words}",
                file=JOURNAL,
                hint="`glassblock fix --in-place` brings everything back once the folder can be written.",
            ) from error
        if done:
            raise DamagedCheckpoint(
                f"the change in place stands whole, but the disk refused what follows it: {words}",
                hint="Look at the disk, and audit the checkpoint again.",
            ) from error


def interrupted(directory: Path) -> bool:
    """Whether a change in place was broken off here."""
    return (directory / JOURNAL).exists()


def undo_interrupted(directory: Path) -> tuple[str, ...]:
    """Bring back what a change in place that was broken off had begun to change; the names of those files.

    Raises:
        DamagedCheckpoint: The journal cannot be read.
    """
    if not interrupted(directory):
        return ()
    try:
        raw = read_whole(directory / JOURNAL, name=JOURNAL, limit=MAX_HEADER_BYTES)
        value = parse_json(raw, constants=False)
    except JsonFault:
        value = None
    if not isinstance(value, dict):
        raise DamagedCheckpoint(
            f"{JOURNAL} cannot be read", file=JOURNAL, hint=f"Look at the files named *{BACKUP_MARK}."
        )
    told = cast("dict[str, _Kind]", value)
    kinds: dict[str, _Kind] = {name: kind for name, kind in told.items() if is_plain_name(name)}
    _undo(directory, kinds, begun=True)
    return tuple(kinds)


def _before(draft: Draft, directory: Path, name: str) -> bytes:
    """What is about to be overwritten: the header of a weight file, or the whole text."""
    path = directory / name
    if name not in draft.files:
        return read_whole(path.resolve(), name=name, limit=MAX_HEADER_BYTES)
    was = draft.files[name].was
    with path.open("rb") as file:
        raw = file.read(8 + was.header_bytes)
    if int.from_bytes(raw[:8], "little") != was.header_bytes or len(raw) != len(draft.files[name].header):
        raise DamagedCheckpoint(f"{name} was changed meanwhile", file=name, hint="Start again.")
    return raw


def _undo(directory: Path, kinds: dict[str, _Kind], *, begun: bool) -> None:
    """Every file from its backup, then the backups gone, then the journal. May be done twice."""
    for name, kind in kinds.items() if begun else ():
        backup = directory / f"{name}{BACKUP_MARK}"
        if kind == "new":
            _remove(directory / name)
        elif backup.exists() and kind == "header":
            _overwrite(directory / name, backup.read_bytes())
        elif backup.exists():
            backup.replace(directory / name)  # which takes no room on a full disk
            _sync(directory)
    for name in kinds:
        for path in (directory / name, directory / f"{name}{BACKUP_MARK}"):
            _part_of(path).unlink(missing_ok=True)
        _remove(directory / f"{name}{BACKUP_MARK}")
    _remove(directory / JOURNAL)


def _put(path: Path, raw: bytes) -> None:
    """A small file, whole or as it was, on the disk."""
    draft = _part_of(path)
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_all(descriptor, raw)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _part_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _overwrite(path: Path, header: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        write_all(descriptor, header)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
