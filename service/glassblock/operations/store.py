"""Checkpoints by name, and the blocks of them that are held on the device."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from glassblock.checkpoint.entries import FileIdentity
from glassblock.checkpoint.layers import load_feed_forward, load_wiring
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.roots import Roots
from glassblock.errors import InvalidValue, TooLarge
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.wiring import Wiring


@dataclass(frozen=True)
class LoadedBlock:
    """One layer's feed-forward network and wiring, on the device."""

    feed_forward: FeedForward
    wiring: Wiring
    bytes: int


class Stamp(NamedTuple):
    """What files and config were when blocks were read from them."""

    files: tuple[FileIdentity | None, ...]
    config: Mapping[str, object]


@dataclass(frozen=True)
class Held:
    """Blocks of one checkpoint that stay on the device until they are let go."""

    blocks: dict[int, LoadedBlock]
    stamp: Stamp

    @property
    def bytes(self) -> int:
        """Bytes that the blocks take on the device."""
        return sum(block.bytes for block in self.blocks.values())


class CheckpointStore:
    """Opens checkpoints under the roots, and holds pinned blocks within a byte budget.

    Args:
        roots: folders where checkpoints may lie.
        device: "auto", "cpu" or "cuda:N".
        resident_bytes: most that pinned blocks may take together.
    """

    def __init__(self, roots: Sequence[Path], *, device: str = "auto", resident_bytes: int = 2**32) -> None:
        self.roots = Roots(roots)
        self.device = usable_device(device)
        self._resident_bytes = resident_bytes
        self._held: dict[str, Held] = {}
        self._lock = threading.Lock()  # guards _held
        self._pinning = threading.Lock()  # one pin at a time, so that the budget is spent once

    def open(self, name: str, *, family: str | None = None) -> Checkpoint:
        """Headers and config of a checkpoint; no tensor is read.

        Raises:
            UnknownCheckpoint, AccessRefused, InvalidValue: as `Roots.resolve`.
        """
        return open_checkpoint(self.roots.resolve(name), roots=self.roots, family=family)

    def block(self, name: str, checkpoint: Checkpoint, layer: int, meter: ReadMeter) -> LoadedBlock:
        """One layer's block: the held one, or read now and counted in `meter`."""
        with self._lock:
            held = self._held.get(name)
            if held is not None and held.stamp != _stamp(checkpoint):
                del self._held[name]  # the files changed on disk: what is held is no longer theirs
                held = None
        if held is not None and layer in held.blocks:
            return held.blocks[layer]
        return self._load(checkpoint, layer, meter)

    def pin(self, name: str, layers: Iterable[int] | None) -> Held:
        """Read blocks and hold them; all layers when `layers` is None.

        Raises:
            InvalidValue: a layer is out of range.
            TooLarge: the blocks do not fit the budget.
        """
        checkpoint = self.open(name)
        checkpoint.require_usable()
        wanted = range(checkpoint.layers) if layers is None else sorted(set(layers))
        with self._pinning:
            held = Held(self._fitting(name, checkpoint, wanted), _stamp(checkpoint))
            with self._lock:
                self._held[name] = held
        return held

    def _fitting(self, name: str, checkpoint: Checkpoint, layers: Iterable[int]) -> dict[int, LoadedBlock]:
        with self._lock:
            others = sum(held.bytes for other, held in self._held.items() if other != name)
        blocks: dict[int, LoadedBlock] = {}
        for layer in layers:
            blocks[layer] = self._load(checkpoint, layer, ReadMeter())
            total = others + sum(block.bytes for block in blocks.values())
            if total > self._resident_bytes:
                raise TooLarge(
                    f"holding {len(blocks)} block(s) of {name} would take {total} bytes,"
                    f" over the budget of {self._resident_bytes}",
                    field="layers",
                    hint="pin fewer layers, evict another checkpoint, or raise GLASSBLOCK_RESIDENT_MIB",
                )
        return blocks

    def evict(self, name: str) -> None:
        """Let a checkpoint's blocks go; nothing happens when none is held."""
        with self._lock:
            self._held.pop(name, None)

    def held(self, name: str) -> Held | None:
        """What is held of a checkpoint."""
        with self._lock:
            return self._held.get(name)

    def _load(self, checkpoint: Checkpoint, layer: int, meter: ReadMeter) -> LoadedBlock:
        before = meter.bytes
        feed_forward = load_feed_forward(checkpoint, layer, self.device, meter)
        wiring = load_wiring(checkpoint, layer, self.device, meter)
        return LoadedBlock(feed_forward, wiring, meter.bytes - before)


def _stamp(checkpoint: Checkpoint) -> Stamp:
    identities = tuple(container.identity for container in checkpoint.containers.values())
    return Stamp(identities, {} if checkpoint.config is None else checkpoint.config.values)


def usable_device(name: str) -> torch.device:
    """The device that `name` stands for; "auto" is the first GPU, or the CPU without one.

    Raises:
        InvalidValue: no such device here.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ("auto", "cpu", *(f"cuda:{index}" for index in range(gpus)))
    if name == "auto":
        return torch.device("cuda:0" if gpus else "cpu")
    if name not in known:
        raise InvalidValue(f"no device {name!r} here", field="device", known=known, hint="choose one of them")
    return torch.device(name)
