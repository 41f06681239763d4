"""A patched checkpoint written as a new directory that is there whole or not at all.

Bytes that stay are copied inside the kernel; of what changes, one tensor at a time is in memory.
"""

import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from glassblock.checkpoint.changes import AlteredEntry, unmoved
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.files import FileIdentity, identity_now, open_regular
from glassblock.checkpoint.patches import Draft
from glassblock.checkpoint.reading import read_chunks
from glassblock.checkpoint.rewriting import Rewritten
from glassblock.checkpoint.roots import Roots, checked_file
from glassblock.errors import AccessRefused, DamagedCheckpoint, InvalidValue

DRAFT_MARK = ".glassblock-draft"
"""What the name of an output ends in while it is written, after a dot in front."""

BACKUP_MARK = ".glassblock-backup"
"""What the name of a kept header, config or index ends in."""

PIECE_BYTES = 16 << 20
"""Bytes moved between two looks at whether to go on."""

SPARE_BYTES = 1 << 20
"""Free space beyond the files' own lengths that is asked for: directories and rounding up to blocks."""

_NO_KERNEL_COPY = frozenset({errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM})

Tick = Callable[[int, int, str], None]
"""Told (bytes done, bytes in all, what comes next); it may raise to stop."""


@dataclass(frozen=True)
class _Output:
    """One file of the output: its name, length, and where it comes from."""

    name: str
    size: int
    source: Path | Rewritten | bytes
    identity: FileIdentity | None = None


def write_checkpoint(draft: Draft, output: Path, *, roots: Roots | None = None, tick: Tick) -> int:
    """Write the patched checkpoint into the new directory `output`, with all other files that lie beside it.

    It is written under another name in the same folder, brought to the disk and renamed, so that whatever happens it
    is there whole or not at all. What an earlier attempt left behind is removed first. Hidden files are left out.

    Args:
        draft: What to write.
        output: Its last part may not be there yet, or be an empty directory.
        roots: Directories into which links of the checkpoint may lead.
        tick: Told how far it is.

    Returns:
        Bytes written.

    Raises:
        InvalidValue: The output is there already, cannot be written, or would not fit on the disk.
        DamagedCheckpoint: A file of the checkpoint was changed meanwhile.
        AccessRefused: A file is a link that leads elsewhere.
    """
    parent = require_place(output)
    remove_abandoned(output)
    outputs = tuple(_outputs(draft, roots))
    total = sum(item.size for item in outputs)
    with _told_of(output):
        free = os.statvfs(parent)
        if total + SPARE_BYTES > free.f_bavail * free.f_frsize:
            raise InvalidValue(
                f"{output.name} needs {total:,} bytes, and {free.f_bavail * free.f_frsize:,} are free in its folder",
                field="output",
                hint="Make room, or choose another folder.",
            )
        with _drafted(parent / f".{output.name}.{secrets.token_hex(4)}{DRAFT_MARK}") as folder:
            done = 0
            for item in outputs:
                tick(done, total, item.name)
                _write(
                    folder / item.name, item, lambda count, start=done, name=item.name: tick(start + count, total, name)
                )
                done += item.size
            for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
                _sync_folder(path)
            os.rename(folder, output)  # noqa: PTH104  not replace: an output that has appeared meanwhile stays
        _sync_folder(parent)
    return total


def require_place(output: Path) -> Path:
    """The folder of an output that can be written there.

    Raises:
        InvalidValue: It is there already, or its folder is not.
    """
    parent = Path(os.path.realpath(output.parent))
    if not output.name or not parent.is_dir():
        raise InvalidValue(f"the folder of {output.name!r} is not there", field="output", hint="Make it first.")
    if os.path.lexists(output) and not (output.is_dir() and not output.is_symlink() and not any(output.iterdir())):
        raise InvalidValue(f"{output.name} is there already", field="output", hint="Choose another name.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InvalidValue(f"the folder of {output.name} may not be written", field="output")
    return parent


def remove_abandoned(output: Path) -> tuple[str, ...]:
    """Remove what interrupted attempts to write `output` left behind; not what another process is writing now."""
    removed: list[str] = []
    for folder in output.parent.glob(f".{glob.escape(output.name)}.*{DRAFT_MARK}"):
        with suppress(OSError), _opened_folder(folder) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
            removed.append(folder.name)
    return tuple(removed)


@contextmanager
def _drafted(folder: Path) -> Generator[Path]:
    """A folder that is locked while it is written, and removed unless it has got another name in the end."""
    folder.mkdir()
    try:
        with _opened_folder(folder) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _opened_folder(folder: Path) -> Generator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _told_of(output: Path) -> Generator[None]:
    """Whatever the disk refuses, told as what is wrong with the output."""
    try:
        yield
    except OSError as error:
        words = os.strerror(error.errno) if error.errno else str(error)
        raise InvalidValue(
            f"{output.name} cannot be written: {words}", field="output", hint="Nothing was left behind."
        ) from error


def _outputs(draft: Draft, roots: Roots | None) -> Iterator[_Output]:
    """Every file of the output: the ones that differ, and the others as they are."""
    contents = draft.checkpoint.contents
    for name, text in draft.texts.items():
        yield _Output(name, len(text), text)
    for name, file in draft.files.items():
        yield _Output(name, file.container.size, file)
    differing = draft.texts.keys() | draft.files.keys() | draft.lost
    if contents.present is None:
        beside = {config.path.name for config in (contents.config, contents.params) if config is not None}
        names = sorted(beside | contents.containers.keys())
    else:
        names = sorted(_beside(contents.directory))
    for name in names:
        if name in differing:
            continue
        path = contents.directory / name
        container = contents.containers.get(name)
        real = checked_file(path.parent, path.name, roots)
        identity = identity_now(real, name=name) if container is None else container.identity
        if identity is not None:
            yield _Output(name, identity.size, real, identity)


def _beside(directory: Path, below: str = "") -> Iterator[str]:
    """Names of the regular files in a directory and its folders; hidden ones and backups are left out."""
    with os.scandir(directory / below) as found:
        items = list(found)
    for item in items:
        if item.name.startswith(".") or item.name.endswith(BACKUP_MARK):
            continue
        name = f"{below}{item.name}"
        if item.is_dir(follow_symlinks=False):
            yield from _beside(directory, f"{name}/")
        elif os.path.isfile(item.path):  # noqa: PTH113  not the method of `item`, which raises for a circle
            yield name


def _write(path: Path, item: _Output, tick: Callable[[int], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        if isinstance(item.source, bytes):
            write_all(descriptor, item.source)
        elif isinstance(item.source, Path):
            with open_regular(item.source, name=item.name) as (source, now):
                _require_same(item.name, item.identity, now)
                _copy(source, 0, item.size, descriptor, tick)
            _require_same(item.name, item.identity, identity_now(item.source, name=item.name))
        else:
            _write_weights(descriptor, item.source, tick)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_same(name: str, before: FileIdentity | None, now: FileIdentity | None) -> None:
    if now != before:
        raise DamagedCheckpoint(f"{name} was changed while it was copied", file=name, hint="Start again.")


def _write_weights(descriptor: int, file: Rewritten, tick: Callable[[int], None]) -> None:
    """Header, then the tensors in order: runs of bytes that stay are copied, the others read through the patch."""
    write_all(descriptor, file.header)
    done = len(file.header)
    for run in _runs(file):
        first, last = run[0], run[-1]
        length = last.stop - first.start
        if isinstance(first, AlteredEntry):
            for piece in read_chunks(first, PIECE_BYTES):
                raw = piece.reshape(-1).view(torch.uint8)
                write_all(descriptor, memoryview(cast("bytearray", raw.numpy())))
                done += raw.numel()
                tick(done)
            continue
        real = first.file.resolve() if first.identity is None else first.identity.real
        with open_regular(real, name=first.file.name) as (source, now):
            _require_same(first.file.name, first.identity, now)
            _copy(source, first.start, length, descriptor, lambda count, start=done: tick(start + count))
            done += length
        _require_same(first.file.name, first.identity, identity_now(real, name=first.file.name))


def _runs(file: Rewritten) -> Iterator[list[TensorEntry]]:
    """Tensors of a file, those together that lie one behind the other where they come from."""
    run: list[TensorEntry] = []
    for entry in map(unmoved, file.container.entries.values()):
        if not entry.bytes:
            continue
        joins = run and not isinstance(entry, AlteredEntry) and not isinstance(run[-1], AlteredEntry)
        if joins and entry.file == run[-1].file and entry.start == run[-1].stop:
            run.append(entry)
            continue
        if run:
            yield run
        run = [entry]
    if run:
        yield run


def _copy(source: int, start: int, count: int, sink: int, tick: Callable[[int], None]) -> None:
    """Append `count` bytes from `start` on; inside the kernel where the file systems allow it."""
    done, in_kernel = 0, True
    while done < count:
        wanted = min(PIECE_BYTES, count - done)
        if in_kernel:
            try:
                step = os.copy_file_range(source, sink, wanted, offset_src=start + done)
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise
                in_kernel = False
                continue
            if step == 0:
                in_kernel = False  # some file systems answer so for files they make up
                continue
        else:
            piece = os.pread(source, wanted, start + done)
            if not piece:
                raise DamagedCheckpoint("a file became shorter while it was copied", hint="Start again.")
            write_all(sink, piece)
            step = len(piece)
        done += step
        tick(done)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of it, in as many calls as that takes."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _sync_folder(folder: Path) -> None:
    with _opened_folder(folder) as descriptor:
        os.fsync(descriptor)


def refuse_link(path: Path) -> None:
    """Refuse to change a file in place that others may see under another name.

    Raises:
        AccessRefused: It is a link, or has several names.
    """
    if path.is_symlink() or path.stat().st_nlink > 1:
        raise AccessRefused(
            f"{path.name} is a link, or has other names: a change in place would reach those too",
            file=path.name,
            hint="Use --output.",
        )
