"""Opening the files of a checkpoint: regular files only, never through a link that appeared meanwhile.

Nothing here waits: a FIFO or a device that carries the name of a weight file is refused, not read.
"""

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from glassblock.errors import AccessRefused, DamagedCheckpoint, GlassblockError, ServiceUnavailable, UnknownCheckpoint

_LARGEST_READ = 1 << 30
"""Bytes asked of one system call; Linux moves at most 2 GiB less a page."""

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What one opened file was, so that a later read can tell that it is still the same.

    Attributes:
        real: The path with every symbolic link resolved; this is what is opened.
        size: Length in bytes.
        device: Number of the device it lies on.
        inode: Its number there.
        modified_ns: When its content last changed, in nanoseconds.
    """

    real: Path
    size: int
    device: int
    inode: int
    modified_ns: int


@contextmanager
def open_regular(path: Path, *, name: str | None = None) -> Generator[tuple[int, FileIdentity]]:
    """A descriptor for reading `path`, and what the file is.

    Args:
        path: A path whose links are resolved already; a link as its last part is refused.
        name: How errors name the file; its last part by default.

    Raises:
        UnknownCheckpoint: There is no such file.
        AccessRefused: It may not be read, or is a symbolic link.
        DamagedCheckpoint: It is no regular file, or the disk fails.
        ServiceUnavailable: Too many files are open.
    """
    name = path.name if name is None else name
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer that may never come.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise refusal(error, name) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = next((words for test, words in _KINDS if test(status.st_mode)), "something else")
            raise DamagedCheckpoint(
                f"{name} is {kind}, not a regular file", file=name, hint="Replace it with the file that belongs there."
            )
        yield descriptor, _identity(path, status)
    finally:
        os.close(descriptor)


def identity_now(path: Path, *, name: str) -> FileIdentity | None:
    """What the file at `path`, whose links are resolved, is at this moment; None where no regular file is there.

    Raises:
        AccessRefused: Its folder may not be looked into any more.
        DamagedCheckpoint: The disk fails.
    """
    try:
        status = os.stat(path, follow_symlinks=False)  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise refusal(error, name) from None
    return _identity(path, status) if stat.S_ISREG(status.st_mode) else None


def identity_of(descriptor: int, path: Path) -> FileIdentity:
    """What the opened file is at this moment; `path` is what was opened."""
    return _identity(path, os.fstat(descriptor))


def _identity(path: Path, status: os.stat_result) -> FileIdentity:
    return FileIdentity(path, status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns)


def read_whole(path: Path, *, name: str, limit: int) -> bytes:
    """The whole content of a small file.

    Raises:
        DamagedCheckpoint: It is longer than `limit` bytes, or no regular file.
        UnknownCheckpoint, AccessRefused, ServiceUnavailable: See `open_regular`.
    """
    with open_regular(path, name=name) as (descriptor, identity):
        if identity.size > limit:
            raise DamagedCheckpoint(
                f"{name} has {identity.size:,} bytes; at most {limit:,} are read of such a file",
                file=name,
                hint="Look whether a weight file was given this name.",
            )
        content = bytearray(identity.size)
        length = fill(descriptor, memoryview(content), 0, name=name)
        return bytes(content[:length])


def leads_nowhere(path: Path) -> bool:
    """Whether `path` is a link at whose end there is nothing, or that leads in a circle."""
    if not os.path.islink(path):  # noqa: PTH114  not the method of `path`, which raises in a folder that is closed
        return False
    try:
        os.path.realpath(path, strict=True)
    except OSError as error:
        return error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
    return False


def fill(descriptor: int, buffer: memoryview, offset: int, *, name: str) -> int:
    """Read `buffer` full from `offset` on; the count of bytes read, less than its length only at the file's end.

    Raises:
        DamagedCheckpoint: The disk fails.
    """
    done = 0
    while done < len(buffer):
        try:
            step = os.preadv(descriptor, [buffer[done : done + _LARGEST_READ]], offset + done)
        except OSError as error:
            raise refusal(error, name) from None
        if step == 0:
            break
        done += step
    return done


def refusal(error: OSError, name: str) -> GlassblockError:
    """What the system refused about the file `name`, as an error to raise."""
    words = os.strerror(error.errno or 0)
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR | errno.ENAMETOOLONG:
            return UnknownCheckpoint(f"{name} is not there", file=name, hint="Look at the path.")
        case errno.EACCES | errno.EPERM:
            return AccessRefused(
                f"{name} may not be read: {words}", file=name, hint="Give the reading user permission."
            )
        case errno.ELOOP:
            return AccessRefused(
                f"{name} became a symbolic link while it was looked at", file=name, hint="Open the checkpoint again."
            )
        case errno.EMFILE | errno.ENFILE:
            return ServiceUnavailable(f"{name} cannot be opened now: {words}", file=name, retry_after=1.0)
        case _:
            return DamagedCheckpoint(f"{name} cannot be read: {words}", file=name, hint="Check the disk it lies on.")
