"""The log-likelihood of a text under a checkpoint and under variants of it, in one walk through the layers.

Every layer is read once for the checkpoint and once for each variant that has another one there. A variant takes the
states of the checkpoint up to the first layer in which it differs, so that what concerns layer n costs the layers from
n on. The states of each variant that has begun are held, and one layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassblock.checkpoint.layer_loading import load_layer
from glassblock.checkpoint.layer_map import whole_layer_tensors
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.text_states import embedded, layer_count, logit_parts, require_head
from glassblock.errors import GlassblockError
from glassblock.numerics.layer import layer_output
from glassblock.numerics.likelihood import log_likelihood
from glassblock.numerics.watching import UNWATCHED, ComputationCancelled, Watch


@dataclass(frozen=True)
class Variant:
    """A checkpoint that differs from another.

    Attributes:
        checkpoint: As it would be opened.
        layers: The layers in which it differs, and in nothing else; None where it may differ in any, and in the
            embedding and the norm after the last layer.
    """

    checkpoint: Checkpoint
    layers: frozenset[int] | None = None

    @property
    def first(self) -> int:
        """The first layer in which it may differ."""
        return 0 if self.layers is None else min(self.layers)

    def differs(self, layer: int) -> bool:
        """Whether it may differ in a layer."""
        return self.layers is None or layer in self.layers


Variants = tuple[Float[Tensor, "*batch next"] | GlassblockError, ...]
"""For each variant ln p of every token but the first, or why it has none."""


def variant_log_likelihoods(
    checkpoint: Checkpoint,
    token_ids: Int[Tensor, "*batch tokens"],
    variants: Sequence[Variant],
    device: torch.device | str,
    meter: ReadMeter,
    *,
    watch: Watch = UNWATCHED,
) -> tuple[Float[Tensor, "*batch next"], Variants]:
    """ln p of every token but the first, given those before it: of the checkpoint, and of each variant.

    Computed in float32 at least, each by itself in the same order of operations: a variant that has the same numbers
    gives the same bits.

    Args:
        checkpoint: The checkpoint.
        token_ids: The sequences, two tokens at least.
        variants: What else it might have been.
        device: Where it is computed.
        meter: Counts what is read.
        watch: Told and asked between layers.

    Raises:
        InvalidValue: A token is outside the vocabulary or the positions.
        FamilyMismatch: A layer of the checkpoint cannot be run here, or there is no head; of a variant that is a value.
        ComputationCancelled: `watch` asked for it.
        DamagedCheckpoint, UnknownFamily: See `Checkpoint.require_usable`.
    """
    walk = _Walk(checkpoint, token_ids, variants, torch.device(device), meter)
    count = layer_count(checkpoint)
    require_head(checkpoint)
    for layer in range(count):  # told before the first is read
        whole_layer_tensors(checkpoint, layer)
    steps = count + 1 + len(variants)
    walk.enter()
    for layer in range(count):
        watch.at(layer, steps, f"the text in layer {layer}")
        walk.through(layer, watch)
    found: list[Tensor | GlassblockError] = []
    for number, variant in enumerate((None, *variants)):
        watch.at(count + number, steps, "the text's likelihood")
        found.append(walk.likelihood(checkpoint if variant is None else variant.checkpoint, number - 1))
    declared, *others = found
    if isinstance(declared, GlassblockError):
        raise declared
    return declared, tuple(others)


class _Walk:
    """The states on their way. They are let go one by one, which is why this is an object."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        token_ids: Tensor,
        variants: Sequence[Variant],
        device: torch.device,
        meter: ReadMeter,
    ) -> None:
        self._checkpoint = checkpoint
        self._ids = token_ids.to(device)
        self._variants = variants
        self._device = device
        self._meter = meter
        self._positions = torch.arange(token_ids.shape[-1], device=device)
        self._declared = torch.empty(0)
        self._states: dict[int, Tensor] = {}
        self._faults: dict[int, GlassblockError] = {}

    def enter(self) -> None:
        """What enters the first layer."""
        self._declared = embedded(self._checkpoint, self._ids, self._device, self._meter)
        for number, variant in enumerate(self._variants):
            if variant.layers is None:
                self._put(number, variant, lambda one: embedded(one, self._ids, self._device, self._meter))

    def through(self, layer: int, watch: Watch) -> None:
        """One layer: first whoever has the checkpoint's own, then each that has another."""
        differing = {
            number: variant
            for number, variant in enumerate(self._variants)
            if variant.differs(layer) and number not in self._faults
        }
        entering = {number: self._states.pop(number, self._declared) for number in differing}
        self._alike(layer)
        for number, variant in differing.items():
            if watch.cancelled():
                raise ComputationCancelled
            x = entering.pop(number)
            self._put(number, variant, lambda one, x=x: self._run(one, x, layer))

    def likelihood(self, checkpoint: Checkpoint, number: int) -> Tensor | GlassblockError:
        """ln p under a variant, or under the checkpoint itself where the number is negative."""
        if number in self._faults:
            return self._faults[number]
        # A variant that differs in no layer that a text passes has the checkpoint's own.
        states = self._declared if number < 0 else self._states.pop(number, self._declared)
        try:
            return log_likelihood(logit_parts(checkpoint, states, self._meter, dtype=None), self._ids)
        except GlassblockError as error:
            return error

    def _alike(self, layer: int) -> None:
        """In a function of its own, so that the layer is let go before the next one is read."""
        own = load_layer(self._checkpoint, layer, self._device, self._meter)
        self._declared = layer_output(self._declared, own, positions=self._positions)
        for number, x in tuple(self._states.items()):
            self._states[number] = layer_output(x, own, positions=self._positions)

    def _run(self, checkpoint: Checkpoint, x: Tensor, layer: int) -> Tensor:
        other = load_layer(checkpoint, layer, self._device, self._meter)
        return layer_output(x, other, positions=self._positions)

    def _put(self, number: int, variant: Variant, make: Callable[[Checkpoint], Tensor]) -> None:
        try:
            self._states[number] = make(variant.checkpoint)
        except GlassblockError as error:
            self._faults[number] = error
