"""What a request changes about a block before it is run."""

from dataclasses import dataclass, replace

import torch

from glassblock.errors import InvalidValue
from glassblock.numerics.activations import activation_named
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.norms import GainOrder, Norm, check_eps, norm_kind_named
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
    if overrides.swap:
        feed_forward = feed_forward.swapped(field="overrides.swap")
    if overrides.activation is not None:
        activation = activation_named(overrides.activation, field="overrides.activation")
        feed_forward = replace(feed_forward, activation=activation)
    if overrides.width is not None:
        feed_forward = feed_forward.narrowed(overrides.width, field="overrides.width")
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
        wiring, assumed = rewired(wiring, Placement(overrides.placement))
        notes += assumed
    return ChangedBlock(feed_forward, wiring, tuple(dict.fromkeys(notes)))


def rewired(wiring: Wiring, placement: Placement) -> tuple[Wiring, list[str]]:
    """The same norms at other places, and what was assumed.

    A norm the block has keeps its place where the new wiring has that place, and else moves to
    the one that is free. A second norm that the block lacks gets the same arithmetic and a gain
    that multiplies by one.
    """
    if placement is wiring.placement:
        return wiring, []
    main = wiring.input_norm or wiring.residual_norm or wiring.output_norm
    if main is None:
        raise InvalidValue("this block has no norm to place", field="overrides.placement", hint="leave it out")
    notes: list[str] = []
    branch_end = wiring.output_norm
    match placement:
        case Placement.PRE | Placement.PARALLEL:
            places = {"input_norm": main}
        case Placement.POST:
            places = {"residual_norm": main}
        case Placement.BRANCH_OUTPUT:
            places = {"output_norm": branch_end or main}
        case Placement.SANDWICH:
            if branch_end is None:
                branch_end = _unit(main)
                notes.append("sandwich: there is one norm; the one on the branch's output multiplies by one")
            elif main is branch_end:
                main = _unit(branch_end)
                notes.append("sandwich: there is one norm; the one on the branch's input multiplies by one")
            places = {"input_norm": main, "output_norm": branch_end}
    given = sum(norm is not None for norm in wiring.norms)
    if given > len(places):
        used = "output" if next(iter(places.values())) is wiring.output_norm else "input"
        notes.append(
            f"{placement.value}: the block has {given} norms here; only the one on the branch's {used} is used"
        )
    moved = Wiring(placement, **places, residual_scale=wiring.residual_scale, branch_scale=wiring.branch_scale)
    return moved, notes


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


def _unit(like: Norm) -> Norm:
    if like.gain is None:
        return like
    return Norm(like.kind, torch.full_like(like.gain, 1.0 - like.kind.offset), None, like.eps)
