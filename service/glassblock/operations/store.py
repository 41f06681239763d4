"""Checkpoints by name, and the blocks of them that lie on the device.

Every part that is read stays (`residency`) until others need its room; pinned blocks stay until they are let go. Files
that changed on disk are read again. Where they cannot be used any more, what is pinned serves on as it was read, and
the answer says so; what is not pinned is refused with what is wrong.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import torch

from glassblock.checkpoint.attention_loading import attention_of
from glassblock.checkpoint.entries import FileIdentity
from glassblock.checkpoint.family import Architecture
from glassblock.checkpoint.family_file import parse_family_row
from glassblock.checkpoint.layer_loading import load_layer
from glassblock.checkpoint.layer_map import layer_tensors, whole_layer_tensors
from glassblock.checkpoint.layer_parts import Expert
from glassblock.checkpoint.layers import load_feed_forward, load_wiring, runnable, wiring_of
from glassblock.checkpoint.mixture_loading import load_mixture
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.roots import Roots
from glassblock.errors import CheckpointUnusable, InvalidValue, TooLarge, UnknownCheckpoint
from glassblock.numerics.attention import Attention
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.latent_attention import LatentAttention
from glassblock.numerics.layer import Layer
from glassblock.numerics.layer_grams import LayerGrams
from glassblock.numerics.mixture import Mixture
from glassblock.numerics.wiring import Wiring
from glassblock.operations.admission import Admission, device_budget
from glassblock.operations.layer_sizes import block_size
from glassblock.operations.opened import OpenedCheckpoints
from glassblock.operations.residency import Key, Residency, device_bytes

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class LoadedBlock:
    """One layer's feed-forward network and wiring, on the device."""

    feed_forward: FeedForward
    wiring: Wiring

    @property
    def bytes(self) -> int:
        """Bytes that it takes on the device."""
        return device_bytes((self.feed_forward, self.wiring))


class Stamp(NamedTuple):
    """What files and config were when blocks were read from them."""

    files: tuple[FileIdentity | None, ...]
    config: Mapping[str, object]
    family: Architecture | None


@dataclass(frozen=True)
class Held:
    """Blocks of one checkpoint that stay on the device until they are let go."""

    blocks: dict[int, LoadedBlock]

    @property
    def bytes(self) -> int:
        """Bytes that the blocks take on the device."""
        return sum(block.bytes for block in self.blocks.values())


class AttentionBlock(NamedTuple):
    """One layer's attention and wiring, on the device."""

    attention: Attention | LatentAttention
    wiring: Wiring


class CheckpointStore:
    """Opens checkpoints under the roots, and keeps what was read of them on the device.

    Args:
        roots: folders where checkpoints may lie.
        device: "auto", "cpu" or "cuda:N".
        resident_bytes: most that blocks may take between requests; at most half of the device's budget is used.
        device_bytes: most that may be used of the device in all; a share of what it has, when None.
    """

    def __init__(
        self,
        roots: Sequence[Path],
        *,
        device: str = "auto",
        resident_bytes: int = 2**32,
        device_bytes: int | None = None,
    ) -> None:
        self.roots = Roots(roots)
        self.device = usable_device(device)
        budget = device_budget(self.device) if device_bytes is None else device_bytes
        self.residency = Residency(min(resident_bytes, budget // 2))
        self.admission = Admission(budget, self.residency)
        self._opened = OpenedCheckpoints()
        self._pinned: dict[str, Checkpoint] = {}  # as it was when its blocks were pinned
        self._pinning = threading.Lock()  # one pin at a time, so that the budget is spent once

    def open(
        self,
        name: str,
        *,
        family: str | None = None,
        family_row: Mapping[str, object] | None = None,
        tower: str | None = None,
    ) -> Checkpoint:
        """Headers and config of a checkpoint as its files are now; no tensor is read.

        Args:
            name: as `Roots.resolve`.
            family: a name of the family table, instead of what the config says.
            family_row: a row of the caller's own, instead of one.
            tower: another stack of layers in the files.

        Raises:
            UnknownCheckpoint, AccessRefused, InvalidValue: as `Roots.resolve`; or the row cannot be used.
            UnknownFamily: `family` is not in the table.
        """
        if family is not None and family_row is not None:
            raise InvalidValue("family and family_row are both given", field="family", hint="give one of them")
        path = self.roots.resolve(name)
        if family_row is None:
            opened = self._opened.get(path, family, lambda: open_checkpoint(path, roots=self.roots, family=family))
        else:
            opened = open_checkpoint(path, roots=self.roots, family=parse_family_row(family_row))
        return opened if tower is None else opened.tower(tower)

    def serving(
        self,
        name: str,
        *,
        family: str | None = None,
        family_row: Mapping[str, object] | None = None,
        tower: str | None = None,
    ) -> Checkpoint:
        """As `open`, for running blocks: where the files cannot be used any more, as it was when blocks were pinned.

        Raises:
            As `open`, and `Checkpoint.require_usable`, where nothing is pinned.
        """
        last_good = self._pinned.get(name) if family is None and family_row is None and tower is None else None
        if last_good is None:
            return self.open(name, family=family, family_row=family_row, tower=tower)
        try:
            opened = self.open(name)
            opened.require_usable()
        except (CheckpointUnusable, UnknownCheckpoint):
            return last_good
        return opened

    def remarks(self, name: str) -> tuple[str, ...]:
        """What must be said beside an answer about this checkpoint: that its files are not what was used."""
        if name not in self._pinned:
            return ()
        try:
            self.open(name).require_usable()
        except (CheckpointUnusable, UnknownCheckpoint) as error:
            return (f"the files cannot be used any more ({error.message}): what was pinned before is used",)
        return ()

    def block(self, name: str, checkpoint: Checkpoint, layer: int, meter: ReadMeter) -> LoadedBlock:
        """One layer's block: the resident one, or read now and counted in `meter`."""

        def load() -> LoadedBlock:
            feed_forward = load_feed_forward(checkpoint, layer, self.device, meter)
            return LoadedBlock(feed_forward, load_wiring(checkpoint, layer, self.device, meter))

        return self._kept(Key(name, layer, "ffn"), checkpoint, load)

    def layer(self, name: str, checkpoint: Checkpoint, layer: int, meter: ReadMeter) -> Layer:
        """One whole layer; what of it is not resident is read now and counted in `meter`."""
        runnable(checkpoint, layer)
        tensors = whole_layer_tensors(checkpoint, layer)
        row = tensors.row
        if (row.feed_forward is None) == (row.mixture is None):
            return load_layer(checkpoint, layer, self.device, meter)  # which says that it is not run here
        # The network before the attention: where it cannot be had, nothing large was read in vain.
        if row.mixture is not None:
            second, wiring = self.mixture(name, checkpoint, layer, meter)
        else:
            block = self.block(name, checkpoint, layer, meter)
            second, wiring = block.feed_forward, block.wiring

        attended = self.attention(name, checkpoint, layer, meter)
        return Layer(attended.attention, attended.wiring, second, wiring)

    def attention(self, name: str, checkpoint: Checkpoint, layer: int, meter: ReadMeter) -> AttentionBlock:
        """The attention of one layer; what of it is not resident is read now and counted in `meter`."""
        runnable(checkpoint, layer)
        tensors = whole_layer_tensors(checkpoint, layer)

        def load() -> AttentionBlock:
            attention = attention_of(checkpoint, tensors, self.device, meter)
            return AttentionBlock(attention, wiring_of(checkpoint, tensors, self.device, meter, branch="attention"))

        return self._kept(Key(name, layer, "attention"), checkpoint, load)

    def mixture(self, name: str, checkpoint: Checkpoint, layer: int, meter: ReadMeter) -> tuple[Mixture, Wiring]:
        """A layer's mixture with its wiring; experts are read when they are asked for, and stay like all else."""

        def load() -> tuple[Mixture, Wiring]:
            return load_mixture(checkpoint, layer_tensors(checkpoint, layer), self.device, meter)

        def expert(number: int) -> FeedForward:
            return self._network(name, checkpoint, layer, number, meter)

        mixture, wiring = self._kept(Key(name, layer, "mixture"), checkpoint, load)
        return replace(mixture, experts=expert), wiring

    def expert(
        self, name: str, checkpoint: Checkpoint, layer: int, expert: Expert, meter: ReadMeter
    ) -> tuple[FeedForward, Wiring]:
        """One network of a mixture with the layer's wiring; what is not resident is read and counted in `meter`."""
        network = self._network(name, checkpoint, layer, expert, meter)
        return network, load_wiring(checkpoint, layer, self.device, meter, expert=expert)

    def grams(
        self, name: str, checkpoint: Checkpoint, layer: int, what: str, form: Callable[[], LayerGrams]
    ) -> LayerGrams:
        """The Gram matrices of a layer's block: those that lie beside it, or formed now.

        Args:
            name: of the checkpoint.
            checkpoint: as it was opened.
            layer: its layer.
            what: tells apart the matrices of one block: part, placement, dtype.
            form: forms them.
        """
        return self._kept(Key(name, layer, f"ffn: gram matrices {what}"), checkpoint, form)

    def _network(self, name: str, checkpoint: Checkpoint, layer: int, expert: Expert, meter: ReadMeter) -> FeedForward:
        def load() -> FeedForward:
            return load_feed_forward(checkpoint, layer, self.device, meter, expert=expert)

        return self._kept(Key(name, layer, f"expert {expert}"), checkpoint, load)

    def _kept(self, key: Key, checkpoint: Checkpoint, load: Callable[[], ValueT]) -> ValueT:
        stamp = _stamp(checkpoint)
        found = cast("ValueT | None", self.residency.get(key, stamp))
        if found is not None:
            return found
        value = load()
        as_pinned = self._pinned.get(key.checkpoint)
        if as_pinned is None or as_pinned.family == checkpoint.family:  # read as another family: what is pinned stays
            self.residency.put(key, stamp, value)
        return value

    def pin(self, name: str, layers: Iterable[int] | None) -> Held:
        """Read blocks and hold them; of all layers when `layers` is None. Where it fails, what was pinned stays so.

        Raises:
            InvalidValue: a layer is out of range, or a mixture.
            TooLarge: the blocks do not fit the budget.
            NoRoom: they do not fit now, beside what runs.
        """
        checkpoint = self.open(name)
        checkpoint.require_usable()
        wanted = checkpoint.layer_indices if layers is None else sorted(set(layers))
        sizes = [block_size(layer_tensors(checkpoint, layer)) for layer in wanted]
        keys = [Key(name, layer, "ffn") for layer in wanted]
        with self._pinning:
            total = sum(size.held for size in sizes)
            self._refuse_over_budget(name, len(sizes), total)
            there = self.pinned_bytes(name, checkpoint, wanted)
            peak = total + max((size.reading for size in sizes), default=0)
            with self.admission.reserved(peak, resident=there, field="layers"):
                blocks = {layer: self.block(name, checkpoint, layer, ReadMeter()) for layer in wanted}
                self._pinned[name] = checkpoint
                for key, block in zip(keys, blocks.values(), strict=True):
                    self.residency.put(key, _stamp(checkpoint), block, pinned=True)
                self.residency.pin(keys, name)
        return Held(blocks)

    def _refuse_over_budget(self, name: str, count: int, total: int) -> None:
        others = sum(size for key, (_, size) in self.residency.pinned().items() if key.checkpoint != name)
        if others + total > self.residency.budget:
            raise TooLarge(
                f"holding {count} block(s) of {name} would take {total:,} bytes beside {others:,} of others,"
                f" over the budget of {self.residency.budget:,}",
                field="layers",
                hint="pin fewer layers, evict another checkpoint, or raise GLASSBLOCK_RESIDENT_MIB",
            )

    def evict(self, name: str) -> None:
        """Let everything of a checkpoint go; nothing happens when there is nothing."""
        with self._pinning:
            self._pinned.pop(name, None)
            self.residency.drop(name)

    def held(self, name: str) -> Held | None:
        """What is pinned of a checkpoint."""
        if name not in self._pinned:
            return None
        pinned = sorted(self.residency.pinned(name).items())
        return Held({key.layer: cast("LoadedBlock", block) for key, (block, _) in pinned})

    def pinned_bytes(self, name: str, checkpoint: Checkpoint, layers: Iterable[int]) -> int:
        """Bytes of the blocks of some layers that are pinned, if they were read of `checkpoint` as it is."""
        pinned, wanted = self._pinned.get(name), set(layers)
        if pinned is None or _stamp(pinned) != _stamp(checkpoint):
            return 0
        return sum(size for key, (_, size) in self.residency.pinned(name).items() if key.layer in wanted)


def _stamp(checkpoint: Checkpoint) -> Stamp:
    identities = tuple(container.identity for container in checkpoint.containers.values())
    return Stamp(identities, {} if checkpoint.config is None else checkpoint.config.values, checkpoint.family)


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
