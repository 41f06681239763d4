"""The norms of a block at other places: what the same weights would be, wired otherwise."""

import torch

from glassblock.errors import InvalidValue
from glassblock.numerics.norms import Norm
from glassblock.numerics.wiring import Placement, Wiring


def rewired(wiring: Wiring, placement: Placement, *, field: str = "placement") -> tuple[Wiring, list[str]]:
    """The same norms at other places, and what was assumed.

    A norm the block has keeps its place where the new wiring has that place, and else moves to
    the one that is free. A second norm that the block lacks gets the same arithmetic and a gain
    that multiplies by one.

    Raises:
        InvalidValue: The block has no norm, of the field `field`.
    """
    if placement is wiring.placement:
        return wiring, []
    main = wiring.input_norm or wiring.residual_norm or wiring.output_norm
    if main is None:
        raise InvalidValue("this block has no norm to place", field=field, hint="leave it out")
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
    moved = Wiring(
        placement,
        input_norm=places.get("input_norm"),
        output_norm=places.get("output_norm"),
        residual_norm=places.get("residual_norm"),
        residual_scale=wiring.residual_scale,
        branch_scale=wiring.branch_scale,
        branch_gain=wiring.branch_gain,
    )
    return moved, notes


def _unit(like: Norm) -> Norm:
    if like.gain is None:
        return like
    return Norm(like.kind, torch.full_like(like.gain, 1.0 - like.kind.offset), None, like.eps)
