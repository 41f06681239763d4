"""Where checkpoints may lie: names under configured directories, and what their links may point to.

A checkpoint's name is its path under a root. Nothing outside the roots is opened, whatever a name, a link
or an index says; the one exception are the links by which Hugging Face caches store a snapshot's files in
the `blobs` folder of the same repository.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from glassblock.checkpoint.files import leads_nowhere, refusal
from glassblock.checkpoint.index import is_plain_name
from glassblock.checkpoint.strict_json import shown
from glassblock.checkpoint.weight_sets import WEIGHTS_SUFFIX
from glassblock.errors import AccessRefused, GlassblockError, InvalidValue, UnknownCheckpoint

MAX_NAME_BYTES = 1024
MAX_DEPTH = 8
"""Folders below a root that are looked into."""

MAX_FOLDERS = 20_000
"""Folders looked into for one listing; a listing stops there."""

NEAR_FOLDERS = 1_000
"""Folders looked into for names near a wrong one."""

MAX_LISTED = 10_000
"""Checkpoints in one listing."""

CONFIG_NAMES = ("config.json", "params.json")


class Listing(NamedTuple):
    """What lies under the roots.

    Attributes:
        names: Of the checkpoints, sorted.
        stopped: After how many folders or checkpoints nothing more was looked for; None where all was looked at.
    """

    names: tuple[str, ...]
    stopped: str | None


@dataclass(frozen=True)
class Roots:
    """The directories under which checkpoints are looked for.

    Attributes:
        paths: The directories, in the order in which a name is tried.
    """

    paths: tuple[Path, ...]

    def __init__(self, paths: Sequence[Path | str]) -> None:
        object.__setattr__(self, "paths", tuple(Path(os.path.realpath(path)) for path in paths))

    def resolve(self, name: str) -> Path:
        """The directory or file of the checkpoint called `name`.

        Args:
            name: A path under a root, with its URL quoting taken off; `.` for a root that is a checkpoint itself.

        Returns:
            A directory with every link resolved; or a file, its folder resolved and its own name kept: a cache
            stores the file itself under a name that says nothing.

        Raises:
            InvalidValue: It is empty, too long, or no path.
            AccessRefused: It is absolute, climbs with `..`, or leads out of the roots through a link or into a folder
                that is closed, and no other root has it.
            UnknownCheckpoint: Nothing has that name; near names are in the hint.
        """
        parts = _parts(name)
        refused: GlassblockError | None = None  # told in the end: another root may have a checkpoint of this name
        for root in self.paths:
            path = root.joinpath(*parts)
            real = Path(os.path.realpath(path))
            if not self.allows(real):
                refused = AccessRefused(
                    f"{shown(name)} leads out of the configured roots through a link",
                    hint="Links may point inside a root only.",
                )
                continue
            try:
                if real.is_dir():
                    return real
                # A weight file that is a link to nowhere is damage, and not a wrong name.
                if real.is_file() or (path.name.endswith(WEIGHTS_SUFFIX) and leads_nowhere(path)):
                    return Path(os.path.realpath(path.parent)) / path.name
            except OSError as error:
                refused = refusal(error, shown(name))
        if refused is not None:
            refused.field = "checkpoint"
            raise refused
        near = get_close_matches(name, self._listing(NEAR_FOLDERS).names, n=3, cutoff=0.5)
        hint = f"Near: {', '.join(near)}." if near else "GET /v1/checkpoints lists them."
        raise UnknownCheckpoint(f"there is no checkpoint {shown(name)}", field="checkpoint", hint=hint)

    def allows(self, real: Path) -> bool:
        """Whether the path `real`, whose links are resolved, lies inside a root."""
        return any(real.is_relative_to(root) for root in self.paths)

    def list(self) -> "Listing":
        """The checkpoints under the roots.

        A folder that holds safetensors files beside a config is one checkpoint; safetensors files without a config
        are one each. Hidden folders are skipped; depth and counts are bounded by this module's constants.
        """
        return self._listing(MAX_FOLDERS)

    def _listing(self, most_folders: int) -> "Listing":
        names: set[str] = set()
        walked = (found for root in self.paths for found in self._walk(root))
        for folder, weights, config in islice(walked, most_folders):
            if weights and config:
                names.add(folder or ".")
            else:
                names.update(f"{folder}/{name}".lstrip("/") for name in weights)
            if len(names) > MAX_LISTED:
                break
        stopped = None
        if len(names) > MAX_LISTED:
            stopped = f"{MAX_LISTED:,} checkpoints"
        elif next(walked, None) is not None:
            stopped = f"{most_folders:,} folders"
        return Listing(tuple(sorted(names)[:MAX_LISTED]), stopped)

    def _walk(self, root: Path) -> Iterator[tuple[str, tuple[str, ...], bool]]:
        """Each folder below the root, the weight files in it, and whether a config lies beside them."""
        waiting = deque([("", frozenset[str]())])
        while waiting:
            folder, above = waiting.popleft()
            path = os.path.realpath(root / folder)
            # A link to a folder above would be followed for ever.
            if path in above or not self.allows(Path(path)):
                continue
            weights, config, below = _scan(path)
            yield folder, weights, config
            if len(PurePosixPath(folder).parts) < MAX_DEPTH:
                waiting.extend((f"{folder}/{name}".lstrip("/"), above | {path}) for name in below)


def checked_file(directory: Path, filename: str, roots: Roots | None) -> Path:
    """The real path of the file called `filename` in the checkpoint `directory`.

    Links are followed inside the directory itself, into the blobs of the same Hugging Face cached repository,
    and inside a configured root. The file need not exist.

    Raises:
        AccessRefused: The name is no plain file name, or its link leads elsewhere.
    """
    if not is_plain_name(filename):
        raise AccessRefused(
            f"{shown(filename)} is no plain file name", file=filename, hint="Name a file of the checkpoint's directory."
        )
    home = Path(os.path.realpath(directory))
    real = Path(os.path.realpath(home / filename))
    if real.is_relative_to(home) or (roots is not None and roots.allows(real)):
        return real
    blobs = _blobs(home)
    if blobs is not None and real.is_relative_to(blobs):
        return real
    raise AccessRefused(
        f"{filename} is a link that leads out of the checkpoint and of the configured roots",
        file=filename,
        hint="Copy the file into the checkpoint, or configure the directory it lies in as a root.",
    )


def _parts(name: str) -> tuple[str, ...]:
    def unusable(problem: str) -> InvalidValue:
        return InvalidValue(
            f"the checkpoint name {shown(name)} {problem}", field="checkpoint", hint="Give a path under a root."
        )

    if not name:
        raise unusable("is empty")
    try:
        length = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        raise unusable("is no Unicode text") from None
    if length > MAX_NAME_BYTES:
        raise unusable(f"has {length} bytes; at most {MAX_NAME_BYTES} are read")
    if name == ".":
        return ()
    parts = tuple(name.split("/"))
    if name.startswith("/") or ".." in parts:
        raise AccessRefused(
            f"{shown(name)} leads out of the configured roots",
            field="checkpoint",
            hint="A name is a path under a root, without a leading / and without `..`.",
        )
    if not all(is_plain_name(part) for part in parts):
        raise unusable("has a part that is empty, `.`, too long, or holds a backslash or a control character")
    return parts


def _scan(path: str) -> tuple[tuple[str, ...], bool, tuple[str, ...]]:
    """Names of the weight files in a folder, whether a config lies beside them, and the folders in it, sorted."""
    weights: list[str] = []
    folders: list[str] = []
    config = False
    try:
        with os.scandir(path) as found:
            items = [item for item in found if not item.name.startswith(".") and is_plain_name(item.name)]
    except OSError:
        # A folder that vanished or may not be read holds nothing that could be opened.
        return (), False, ()
    for item in items:
        # Not the methods of `item`, which raise for a link that leads to itself.
        if os.path.isdir(item.path):  # noqa: PTH112
            folders.append(item.name)
        elif item.name in CONFIG_NAMES:
            config = True
        elif item.name.endswith(WEIGHTS_SUFFIX) and os.path.isfile(item.path):  # noqa: PTH113
            weights.append(item.name)
    return tuple(sorted(weights)), config, tuple(sorted(folders))


def _blobs(home: Path) -> Path | None:
    """The blobs folder of the Hugging Face cached repository (`models--*/snapshots/*`) that `home` lies in."""
    parts = home.parts
    for position in range(len(parts) - 2, 0, -1):
        if parts[position].startswith("models--") and parts[position + 1] == "snapshots":
            return Path(*parts[: position + 1]) / "blobs"
    return None
