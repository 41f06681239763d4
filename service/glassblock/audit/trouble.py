"""What can come over files while they are audited: cut, replaced, removed, or a disk that fails.

A file that is another one than its header was read from answers no question about one checkpoint: that is raised. A
file that was cut, or that the disk does not give back, is a fault, once for each file.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from glassblock.checkpoint.entries import Container, ContainerFault, TensorEntry
from glassblock.checkpoint.files import identity_now
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.strict_json import shown
from glassblock.errors import DamagedCheckpoint, FamilyMismatch, GlassblockError

_OPEN_AGAIN = "Let the files rest, and audit the checkpoint again."


@dataclass(frozen=True)
class ReadTrouble:
    """One tensor that could not be read.

    Attributes:
        entry: The tensor.
        reason: Why not.
        of_disk: Whether the disk is to blame, rather than a cut that its header shows or a dtype that torch lacks.
    """

    entry: TensorEntry
    reason: str
    of_disk: bool


def trouble_of(checkpoint: Checkpoint, entry: TensorEntry, error: GlassblockError) -> ReadTrouble:
    """Why a tensor could not be read.

    Raises:
        DamagedCheckpoint: Its file was replaced, rewritten or removed since its header was read.
    """
    if isinstance(error, FamilyMismatch):
        return ReadTrouble(entry, error.message, of_disk=False)
    container = checkpoint.containers.get(entry.file.name)
    if container is not None and _length_if_cut(container) is not None:
        return ReadTrouble(entry, f"{entry.file.name} was cut while it was audited", of_disk=False)
    cut_before = entry.identity is not None and entry.stop > entry.identity.size
    return ReadTrouble(entry, error.message, of_disk=entry.bytes > 0 and not cut_before)


def read_faults(checkpoint: Checkpoint, troubles: Iterable[ReadTrouble]) -> tuple[ContainerFault, ...]:
    """Files that were cut since their headers were read, and files of which something could not be read.

    Raises:
        DamagedCheckpoint: A file was replaced, rewritten or removed since, even if all of it had been read before.
    """
    failed: dict[Path, dict[str, ReadTrouble]] = defaultdict(dict)
    for trouble in troubles:
        if trouble.of_disk:
            failed[trouble.entry.file].setdefault(trouble.entry.name, trouble)
    faults: list[ContainerFault] = []
    for container in checkpoint.containers.values():
        now = _length_if_cut(container)
        if now is not None:
            if all(fault.kind != "truncated" for fault in container.faults):
                faults.append(_cut(container, now))
        elif container.file in failed:
            faults.append(_unread(container, tuple(failed[container.file].values())))
    return tuple(faults)


def _length_if_cut(container: Container) -> int | None:
    """The length of a file that has lost its end since its header was read; None where it is as it was.

    Raises:
        DamagedCheckpoint: It is there no more, or another file, or holds other bytes.
    """
    before, name = container.identity, container.file.name
    if before is None:
        return None
    now = identity_now(before.real, name=name)
    if now == before:
        return None
    if now is None:
        raise DamagedCheckpoint(f"{name} was removed while it was audited", file=name, hint=_OPEN_AGAIN)
    same_file = (now.device, now.inode) == (before.device, before.inode)
    if same_file and now.size < before.size and any(entry.stop > now.size for entry in container.entries.values()):
        return now.size
    raise DamagedCheckpoint(f"{name} was changed while it was audited", file=name, hint=_OPEN_AGAIN)


def _cut(container: Container, now: int) -> ContainerFault:
    name, lost = container.file.name, [entry for entry in container.entries.values() if entry.stop > now]
    return ContainerFault(
        "truncated",
        container.file,
        lost[0].name,
        now,
        f"{name} was cut while it was audited: it had {container.size:,} bytes when its header was read and has "
        f"{now:,} now; {len(lost)} of {len(container.entries)} tensors are cut or gone, the first is "
        f"{shown(lost[0].name)}",
        "Let the download or copy come to its end, and audit the checkpoint again.",
    )


def _unread(container: Container, troubles: tuple[ReadTrouble, ...]) -> ContainerFault:
    first = troubles[0]
    more = f" and {len(troubles) - 1} more" if len(troubles) > 1 else ""
    return ContainerFault(
        "truncated",
        container.file,
        first.entry.name,
        first.entry.start,
        f"{first.reason}: of {len(container.entries)} tensors {shown(first.entry.name)}{more} could not be read",
        "Check the disk that the file lies on, or copy the file again.",
    )
