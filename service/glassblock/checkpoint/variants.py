"""A family's row as it is for one config, and in one layer: every variant whose condition holds is applied."""

from collections.abc import Callable
from dataclasses import replace

from glassblock.checkpoint.conditions import Circumstances, Condition, holds
from glassblock.checkpoint.config import ConfigFile, find
from glassblock.checkpoint.family import Architecture, Variant

Shape = Callable[[str], tuple[int, ...] | None]
"""The shape of the tensor of a name; None where there is none."""


def row_for(row: Architecture, config: ConfigFile | None) -> Architecture:
    """The row under a config: what its flags change is changed."""
    return _varied(row, row.config_variants, _circumstances(row, config))


def row_in(row: Architecture, config: ConfigFile | None, layer: int, *, prefix: str, shape: Shape) -> Architecture:
    """The row in one layer.

    Args:
        row: The row under the config.
        config: The config, where there is one.
        layer: The layer's number.
        prefix: What the names of its tensors begin with.
        shape: The shape of the tensor of a name; None where there is none.
    """
    if not row.layer_variants:
        return row
    return _varied(row, row.layer_variants, _circumstances(row, config, layer, prefix, shape))


def holds_in(
    condition: Condition | None,
    row: Architecture,
    config: ConfigFile | None,
    layer: int,
    *,
    prefix: str = "",
    shape: Shape = lambda _name: None,
) -> bool:
    """Whether a condition of the row holds in a layer; None always does."""
    return condition is None or holds(condition, _circumstances(row, config, layer, prefix, shape))


def _circumstances(
    row: Architecture,
    config: ConfigFile | None,
    layer: int = 0,
    prefix: str = "",
    shape: Shape = lambda _name: None,
) -> Circumstances:
    def declared(keys: tuple[str, ...], within: Architecture = row) -> object:
        found = None if config is None else find(config, within, keys)
        return None if found is None else found.value

    return Circumstances(declared, layer, prefix, shape, lambda keys: declared(keys, replace(row, nested=())))


def _varied(row: Architecture, variants: tuple[Variant, ...], at: Circumstances) -> Architecture:
    for variant in variants:
        if holds(variant.when, at):
            row = replace(row, **variant.changes)
    return row
