"""What lies outside the layers: embedding, head, learned positions and the norms around them. Headers only."""

from collections.abc import Iterator

from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.family import Architecture, NormRow
from glassblock.checkpoint.fitting import Axis, LayerFault, Sizes, Wanted, look_up, row_of, trunk_prefix
from glassblock.checkpoint.layer_parts import NormTensors, norm_in
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.wanted_tensors import wanted_of_norm
from glassblock.numerics.wiring import Placement


def embedding_entry(checkpoint: Checkpoint) -> TensorEntry | None:
    """The token embedding, where the file holds it."""
    return checkpoint.entries.get(embedding_name(checkpoint) or "")


def embedding_name(checkpoint: Checkpoint) -> str | None:
    """Full name of the token embedding; None in a family that reads no tokens."""
    row, trunk = row_of(checkpoint), checkpoint.trunk
    if trunk is not None and trunk.embedding is not None:
        return trunk.embedding
    return None if row.embedding is None else trunk_prefix(checkpoint) + row.embedding


def trunk_entry(checkpoint: Checkpoint, name: str) -> TensorEntry | None:
    """A tensor named relative to the trunk, where the file holds it."""
    return checkpoint.entries.get(trunk_prefix(checkpoint) + name)


def head_entry(checkpoint: Checkpoint) -> TensorEntry | None:
    """The output head, where the file holds one of its own."""
    head = None if checkpoint.trunk is None else checkpoint.trunk.head
    return None if head is None else checkpoint.entries.get(head)


def final_norm(checkpoint: Checkpoint) -> tuple[NormTensors | None, tuple[LayerFault, ...]]:
    """The norm after the last layer, and what is wrong with it; None where the family has none."""
    row = row_of(checkpoint)
    return _outer_norm(checkpoint, row.norm("final"))


def embedding_norm(checkpoint: Checkpoint) -> tuple[NormTensors | None, tuple[LayerFault, ...]]:
    """The norm of the embedding rows, and what is wrong with it; None where the family has none."""
    return _outer_norm(checkpoint, row_of(checkpoint).embedding_norm)


def _outer_norm(checkpoint: Checkpoint, norm: NormRow | None) -> tuple[NormTensors | None, tuple[LayerFault, ...]]:
    if norm is None:
        return None, ()
    sizes = Sizes(checkpoint)
    wanted = tuple(wanted_of_norm(norm, trunk_prefix(checkpoint), sizes, denied_by=f"family {row_of(checkpoint).name}"))
    found, faults = look_up(checkpoint, wanted, sizes, None)
    return norm_in(norm, found), faults


def wanted_outside(checkpoint: Checkpoint, sizes: Sizes, last: Architecture | None = None) -> Iterator[Wanted]:
    """The tensors outside the layers: embedding, head, positions, and the norms around them.

    Args:
        checkpoint: The checkpoint.
        sizes: What is known of sizes.
        last: The family's row in the last layer. One that ends in a norm of its own, as BERT's, may have none after it.
    """
    row, prefix = row_of(checkpoint), trunk_prefix(checkpoint)
    ended = last is not None and last.placement is Placement.POST and last.norm("final") is None
    narrow = row.embedding_projections is not None
    axes = (Axis(("vocab",)), Axis(("embedding_width" if narrow else "hidden",)))
    embedding = embedding_name(checkpoint)
    if embedding is not None:
        yield Wanted("embedding", "weight", embedding, axes)
    if checkpoint.trunk is not None and checkpoint.trunk.head is not None:
        # Whether a head must be there is the question of the tie, which is not one of shapes.
        yield Wanted("head", "weight", checkpoint.trunk.head, axes, optional=True)
    yield from _embedding_projections(row, prefix, sizes)
    if row.positions is not None:
        yield Wanted("positions", "positions", prefix + row.positions.name, (Axis(None), Axis(("hidden",))))
    for norm in (row.embedding_norm, None if ended else row.norm("final")):
        if norm is not None:
            yield from wanted_of_norm(norm, prefix, sizes, denied_by=f"family {row.name}")


def _embedding_projections(row: Architecture, prefix: str, sizes: Sizes) -> Iterator[Wanted]:
    """What leads from an embedding of another width to the layers, and from there to the head."""
    inner, outer = sizes.of("hidden"), sizes.of("embedding_width")
    if row.embedding_projections is None or inner is None or outer is None or inner.value == outer.value:
        return
    into, back = row.embedding_projections
    yield Wanted("embedding_in", "weight", prefix + into, (Axis(("hidden",)), Axis(("embedding_width",))))
    yield Wanted("embedding_out", "weight", prefix + back, (Axis(("embedding_width",)), Axis(("hidden",))))
