"""Which tensors a layer has by the family's row and the config."""

from collections.abc import Iterator

from glassblock.checkpoint.family import Architecture, FeedForwardRow, MixtureRow, NormRow
from glassblock.checkpoint.fitting import Axis, Sizes, Wanted, layer_prefix, row_of
from glassblock.checkpoint.layer_parts import MAX_EXPERTS, MAX_HEADS
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.settings import Sourced, flag_of

MAX_ABSENT_EXPERTS = 1_024
"""Experts one after the other that are looked for and absent; those beyond are not looked for."""


def wanted_in_layer(checkpoint: Checkpoint, row: Architecture, prefix: str, sizes: Sizes) -> Iterator[Wanted]:
    """The tensors of a layer's networks, router and norms.

    Args:
        checkpoint: The checkpoint.
        row: The family's row in this layer.
        prefix: What the names of the layer's tensors begin with.
        sizes: What is known of sizes; without a count of experts the names tell it.
    """
    if row.feed_forward is not None:
        yield from _of_network(checkpoint, row.feed_forward, prefix, "")
    if row.mixture is not None:
        yield from _of_mixture(checkpoint, row.mixture, prefix, sizes)
    for norm in row.norms:
        if norm.role != "final":
            yield from wanted_of_norm(norm, prefix, sizes, denied_by=f"family {row.name}")
    if row.branch_gain is not None:
        yield Wanted("branch", "branch-gain", prefix + row.branch_gain, (Axis(("hidden",)),))


def _of_mixture(checkpoint: Checkpoint, row: MixtureRow, prefix: str, sizes: Sizes) -> Iterator[Wanted]:
    outer, experts = Axis(("hidden",)), Axis((row.count,))
    axes = (experts, outer) if row.router_layout == "out_in" else (outer, experts)
    yield Wanted("router", "weight", prefix + row.router.weight, None if row.idle else axes)
    has_bias = flag_of(checkpoint.config, row_of(checkpoint), row.router_bias)
    rows = None if row.idle else (experts,)
    name = prefix + row.router.bias
    yield Wanted("router", "bias", name, rows, declared=has_bias.value, denied_by=has_bias.source)
    if row.correction is not None:
        entry = checkpoint.entries.get(prefix + row.correction)
        flat = entry is None or len(entry.shape) == 1  # ERNIE stores it with a leading axis of one
        corrected = (experts,) if flat else (Axis(()), experts)
        name = prefix + row.correction
        yield Wanted("router", "correction", name, None if row.idle else corrected, optional=True)
    if row.arrangement == "separate":
        for expert in range(_expert_count(checkpoint, row, prefix, sizes)):
            yield from _of_network(checkpoint, row.experts, prefix, str(expert))
    else:
        yield from _of_network(checkpoint, row.experts, prefix, row.arrangement, stack=row)
    if row.shared is not None:
        yield from _of_network(checkpoint, row.shared, prefix, "shared")
    if row.shared_gate is not None:
        yield Wanted("router", "shared_gate", prefix + row.shared_gate, (Axis(()), outer))
    if row.output_bias is not None:
        yield Wanted("router", "output_bias", prefix + row.output_bias, (outer,))


def _expert_count(checkpoint: Checkpoint, row: MixtureRow, prefix: str, sizes: Sizes) -> int:
    template = prefix + row.experts.down.weight
    declared = sizes.of(row.count)
    if declared is not None:
        return _looked_for(checkpoint, template, min(declared.value, MAX_EXPERTS))
    router = checkpoint.entries.get(prefix + row.router.weight)
    if router is not None and len(router.shape) == 2 and not row.idle:
        return _looked_for(checkpoint, template, min(router.shape[row.router_layout == "in_out"], MAX_EXPERTS))
    absent = (j for j in range(MAX_EXPERTS) if template.replace("{j}", str(j)) not in checkpoint.entries)
    return next(absent, MAX_EXPERTS)


def _looked_for(checkpoint: Checkpoint, template: str, declared: int) -> int:
    """The declared count, cut after a long run of experts that are not there: a config may declare any number."""
    run = 0
    for expert in range(declared):
        run = 0 if template.replace("{j}", str(expert)) in checkpoint.entries else run + 1
        if run == MAX_ABSENT_EXPERTS:
            return expert + 1
    return declared


def _of_network(
    checkpoint: Checkpoint, row: FeedForwardRow, prefix: str, network: str, *, stack: MixtureRow | None = None
) -> Iterator[Wanted]:
    """The tensors of one network, or of a stack of them; `network` is put in front of each part's name."""
    has_bias, down_bias = biases_of(checkpoint, row)
    first, last = row.layouts
    inner, outer, both = Axis(row.width), Axis((row.outer,)), Axis(row.width, times=2)
    for part, projection, rows, columns, layout, declared in (
        ("gate", row.gate, inner, outer, first, has_bias),
        ("up", row.up, inner, outer, first, has_bias),
        ("fused", row.fused, both, outer, first, has_bias),
        ("down", row.down, outer, inner, last, down_bias),
    ):
        if projection is None:
            continue
        axes = (rows, columns) if layout == "out_in" else (columns, rows)
        bias = (rows,)
        if stack is not None and stack.arrangement == "stacked":
            axes, bias = (Axis((stack.count,)), *axes), (Axis((stack.count,)), rows)
        elif stack is not None:
            inside = axes[0].sizes
            axes = (Axis(None if inside is None else (stack.count, *inside), times=axes[0].times), axes[1])
        place = f"{network}.{part}"
        weight, bias_name = (prefix + name.replace("{j}", network) for name in (projection.weight, projection.bias))
        yield Wanted(place, "weight", weight, axes, layout="out_in" if layout == "out_in" else "in_out")
        yield Wanted(place, "bias", bias_name, bias, declared=declared.value, denied_by=declared.source)
    for parameter, name in row.activation_tensors.items():
        yield Wanted(f"{network}.{parameter}", "activation", prefix + name.replace("{j}", network), None)


def biases_of(checkpoint: Checkpoint, row: FeedForwardRow) -> tuple[Sourced[bool], Sourced[bool]]:
    """Whether the first projections of a network have biases, and whether `down` has one, and who says so.

    Raises:
        DamagedCheckpoint: The config holds something else than true or false there.
    """
    config, family = checkpoint.config, row_of(checkpoint)
    if row.bias_in_files:
        firsts = [part.bias for part in (row.gate, row.up, row.fused) if part is not None]
        return _held(checkpoint, firsts), _held(checkpoint, [row.down.bias])
    first = flag_of(config, family, row.bias)
    return first, first if row.down_bias is None else flag_of(config, family, row.down_bias)


def _held(checkpoint: Checkpoint, names: list[str]) -> Sourced[bool]:
    """Whether any layer of the files has one of these tensors, which may be those of an expert: then of the first."""
    prefixes = (layer_prefix(checkpoint, layer) for layer in checkpoint.layer_indices)
    own = [name.replace("{j}", "0") for name in names]
    value = any(prefix + name in checkpoint.entries for prefix in prefixes for name in own)
    return Sourced(value, "its files, in every layer alike")


def wanted_of_norm(norm: NormRow, prefix: str, sizes: Sizes, *, denied_by: str) -> Iterator[Wanted]:
    """The tensors of one norm; `denied_by` says that it has no bias where it has none."""
    width = norm.width
    if norm.apart and width is not None:
        heads, own = sizes.of(width[0]), (Axis(width[1:]),)
        for head in range(0 if heads is None else min(heads.value, MAX_HEADS)):
            yield Wanted(f"{norm.role}.{head}", "gain", prefix + norm.gain.replace("{h}", str(head)), own)
        return
    axes = (Axis(width),) if width is None or not norm.per_head else tuple(Axis((size,)) for size in width)
    if norm.has_gain:
        yield Wanted(norm.role, "gain", prefix + norm.gain, axes)
    yield Wanted(norm.role, "norm-bias", prefix + norm.bias, axes, declared=norm.has_bias, denied_by=denied_by)
