"""What a request changes about a block before it is run."""

from dataclasses import dataclass, replace

from glassblock.errors import InvalidValue
from glassblock.numerics.activations import activation_named
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.norms import GainOrder, Norm, check_eps, norm_kind_named
from glassblock.numerics.rewiring import rewired
from glassblock.numerics.wiring import Placement, Wiring
from glassblock.wire.blocks import Overrides


@dataclass(frozen=True)
class ChangedBlock:
    """A block as it will run, and what had to be assumed to make it so."""

    feed_forward: FeedForward
    wiring: Wiring
    notes: tuple[str, ...] = ()


def overridden(feed_forward: FeedForward, wiring: Wiring, overrides: Overrides) -> ChangedBlock:
    """The block with every override applied. The given tensors are not changed.

    Raises:
        InvalidValue: an override has no meaning for this block; its field is named.
    """
    network = overridden_network(feed_forward, overrides)
    wiring, notes = overridden_wiring(wiring, overrides)
    return ChangedBlock(network, wiring, notes)


def overridden_network(feed_forward: FeedForward, overrides: Overrides) -> FeedForward:
    """The network with what concerns it applied.

    Raises:
        InvalidValue: as `overridden`.
    """
    if overrides.swap:
        feed_forward = feed_forward.swapped(field="overrides.swap")
    if overrides.activation is not None:
        activation = activation_named(overrides.activation, field="overrides.activation")
        feed_forward = replace(feed_forward, activation=activation)
    if overrides.width is not None:
        feed_forward = feed_forward.narrowed(overrides.width, field="overrides.width")
    return feed_forward


def overridden_wiring(wiring: Wiring, overrides: Overrides) -> tuple[Wiring, tuple[str, ...]]:
    """The norms and their places with what concerns them applied, and what had to be assumed.

    Raises:
        InvalidValue: as `overridden`.
    """
    notes: list[str] = []
    changed = {
        role: None if norm is None else _changed_norm(norm, overrides, notes)
        for role, norm in (
            ("input_norm", wiring.input_norm),
            ("output_norm", wiring.output_norm),
            ("residual_norm", wiring.residual_norm),
        )
    }
    wiring = replace(wiring, **changed)
    # Places last: a norm that has to be made up multiplies by one in the arithmetic that is asked for.
    if overrides.placement is not None:
        wiring, assumed = rewired(wiring, Placement(overrides.placement), field="overrides.placement")
        notes += assumed
    return wiring, tuple(dict.fromkeys(notes))


def _changed_norm(norm: Norm, overrides: Overrides, notes: list[str]) -> Norm:
    kind, gain, bias, eps = norm.kind, norm.gain, norm.bias, norm.eps
    if overrides.norm_kind is not None:
        kind = norm_kind_named(overrides.norm_kind, field="overrides.norm_kind")
        if bias is not None and not kind.bias:
            notes.append(f"norm_kind: {kind.name} has no bias; the stored one is not used")
            bias = None
        if kind.gain is GainOrder.NONE:
            if gain is not None:
                notes.append(f"norm_kind: {kind.name} has no gain; the stored one is not used")
            gain = None
        elif gain is None:
            raise InvalidValue(
                f"norm kind {kind.name!r} needs a gain, and this norm stores none",
                field="overrides.norm_kind",
                hint="choose a kind without a gain",
            )
    if overrides.norm_offset is not None:
        if gain is None:
            raise InvalidValue(
                f"norm kind {kind.name!r} has no gain that an offset could be added to",
                field="overrides.norm_offset",
                hint="leave it out",
            )
        kind = replace(kind, offset=overrides.norm_offset)
    if overrides.eps is not None:
        check_eps(overrides.eps, field="overrides.eps")
        eps = overrides.eps
    return Norm(kind, gain, bias, eps)
