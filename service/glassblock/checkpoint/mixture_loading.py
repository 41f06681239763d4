"""Loading the mixture of experts of one layer: its router, what every token passes, and the experts one by one."""

import torch

from glassblock.checkpoint.family import Architecture, RoutingRow
from glassblock.checkpoint.fitting import Sizes
from glassblock.checkpoint.layer_parts import LayerTensors
from glassblock.checkpoint.layers import feed_forward_of, out_in, runnable, wiring_of
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter, read_tensor
from glassblock.checkpoint.settings import flag_of, number_of, optional_number_of, whole_of, word_of
from glassblock.checkpoint.stored_entries import read_weight
from glassblock.errors import FamilyMismatch, InvalidValue
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.mixture import Mixture
from glassblock.numerics.routing import Routing, Scoring
from glassblock.numerics.wiring import Wiring


def mixture_of(checkpoint: Checkpoint, tensors: LayerTensors, device: torch.device | str, meter: ReadMeter) -> Mixture:
    """A layer's mixture, in the file's dtypes. An expert is read when it is asked for, and is not kept.

    Args:
        checkpoint: The checkpoint.
        tensors: The layer's.
        device: Where they go.
        meter: Counts what is read, experts when they are.

    Raises:
        FamilyMismatch: How this family routes is not read here, or the config declares what no router can have.
        DamagedCheckpoint: The config holds something else than the family has there.
    """
    row = tensors.row.mixture
    if row is None or row.routing is None or row.idle or row.output_bias is not None:
        raise FamilyMismatch(
            f"layer {tensors.layer}: how the family {tensors.row.name} chooses and weighs experts is not read here",
            hint="Run one expert alone: name it.",
        )

    def expert(number: int) -> FeedForward:
        return feed_forward_of(checkpoint, tensors, device, meter, expert=number)

    found = tensors.router
    small = {
        name: read_tensor(found[name], device, meter) for name in ("bias", "correction", "shared_gate") if name in found
    }
    try:
        return Mixture(
            router=out_in(read_weight(found["weight"], device, meter), row.router_layout),
            experts=expert,
            routing=routing_of(checkpoint, tensors.row, row.routing),
            router_bias=small.get("bias"),
            correction=small["correction"].flatten() if "correction" in small else None,
            shared=None if row.shared is None else feed_forward_of(checkpoint, tensors, device, meter, expert="shared"),
            shared_gate=small.get("shared_gate"),
        )
    except InvalidValue as error:
        raise FamilyMismatch(
            f"layer {tensors.layer}: {error.message}",
            hint=error.hint,
            file=None if checkpoint.config is None else checkpoint.config.path.name,
            field=error.field,
        ) from error


def load_mixture(
    checkpoint: Checkpoint, tensors: LayerTensors, device: torch.device | str, meter: ReadMeter
) -> tuple[Mixture, Wiring]:
    """A layer's mixture with the norms and the add around it.

    Raises:
        FamilyMismatch: Blocks of this family are not run here, or how it routes is not.
        DamagedCheckpoint: As `mixture_of`.
    """
    runnable(checkpoint, tensors.layer)
    return mixture_of(checkpoint, tensors, device, meter), wiring_of(checkpoint, tensors, device, meter)


def routing_of(checkpoint: Checkpoint, family: Architecture, row: RoutingRow) -> Routing:
    """The arithmetic of a router under a config.

    Raises:
        InvalidValue: It declares what no router can have.
        FamilyMismatch: Nothing says how many experts a token goes to.
        DamagedCheckpoint: The config holds something else than the family has there.
    """
    config = checkpoint.config
    top_k = Sizes(checkpoint).of("experts_per_token")
    if top_k is None:
        raise FamilyMismatch("nothing says how many experts a token goes to", hint="Put a config beside the weights.")
    grouped = flag_of(config, family, row.grouped).value
    order = None if row.normalise_order is None else optional_number_of(config, family, row.normalise_order)
    normalise = flag_of(config, family, row.normalise).value if row.normalise_order is None else order is not None
    return Routing(
        top_k.value,
        scoring=word_of(config, family, row.scoring, Scoring),
        chosen_first=row.chosen_first,
        normalise=normalise,
        sum_epsilon=row.sum_epsilon,
        sum_floor=number_of(config, family, row.sum_floor).value,
        normalise_order=1.0 if order is None else order.value,
        groups=whole_of(config, family, row.groups).value if grouped else 1,
        kept_groups=whole_of(config, family, row.kept_groups).value if grouped else 1,
        group_score=row.group_score,
        scaling=number_of(config, family, row.scaling).value,
        wide_logits=row.wide_logits,
        wide_scores=row.wide_scores,
        rounded_weights=row.rounded_weights,
        weigh_input=row.weigh_input,
        jitter=None if row.jitter is None else number_of(config, family, row.jitter).value,
    )
