"""A text on its way up: what it is at one layer after the other, each layer below passed once."""

import torch
from torch import Tensor

from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.numerics.watching import UNWATCHED, Watch
from glassblock.operations.layer_runs import Entering
from glassblock.operations.store import CheckpointStore
from glassblock.operations.texts import states_of


class TextAscent:
    """The states of one text at a checkpoint's layers; asked in the model's order, no layer is passed twice.

    Args:
        store: Where layers are held.
        name: Of the checkpoint there.
        checkpoint: The checkpoint.
        token_ids: `[tokens]`, from the first one of the text.
        meter: Counts what is read.
    """

    def __init__(
        self, store: CheckpointStore, name: str, checkpoint: Checkpoint, token_ids: Tensor, meter: ReadMeter
    ) -> None:
        self._store, self._name, self._checkpoint, self._meter = store, name, checkpoint, meter
        self._token_ids = token_ids
        self._reached: tuple[int, Tensor] | None = None

    def entering(self, layer: int, *, watch: Watch = UNWATCHED) -> Tensor:
        """`[tokens, d]`, what enters a layer.

        Raises:
            As `entering_states`.
        """
        reached = self._reached if self._reached is not None and self._reached[0] <= layer else None
        states = states_of(
            self._store,
            self._name,
            self._checkpoint,
            self._token_ids,
            layer=layer,
            meter=self._meter,
            reached=reached,
            watch=watch,
        )
        self._reached = layer, states
        return states

    def entering_block(self, layer: int, *, watch: Watch = UNWATCHED) -> Tensor:
        """`[tokens, d]`, what enters the feed-forward block of a layer: what its attention left.

        In a parallel layer that is what enters the layer.

        Raises:
            As `entering`; CheckpointUnusable also where this layer is not run here.
        """
        states = self.entering(layer, watch=watch)
        loaded = self._store.layer(self._name, self._checkpoint, layer, self._meter)
        x = Entering.after_attention(states, loaded, self._token_ids, dtype=None).x
        return x.to(torch.promote_types(x.dtype, torch.float32))
