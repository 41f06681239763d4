"""Which families fit a checkpoint's tensors, by name and by shape, and what speaks against the others."""

from dataclasses import dataclass, replace

from glassblock.checkpoint.layer_map import resolve_layer
from glassblock.checkpoint.name_fits import NamesFit, name_fits
from glassblock.checkpoint.opened import Checkpoint

MAX_NEAR = 16
"""Families told of that do not fit; the nearest come first."""

MAX_NAMES = 8
"""Tensors named for each."""


@dataclass(frozen=True)
class FamilyFit:
    """How one family fits.

    Attributes:
        family: Its name.
        fits: Whether the names and shapes of the first and last layer are those of the family.
        missing: Names that it has and the checkpoint has not; the first few.
        unexpected: Names of networks and norms that it has not; the first few.
        why: What speaks against it, in a sentence; or that nothing does.
    """

    family: str
    fits: bool
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    why: str


def fitting_families(checkpoint: Checkpoint) -> tuple[FamilyFit, ...]:
    """Every family that fits, then at most `MAX_NEAR` of those that have but some names of a layer in common.

    The config is not asked: sizes are those that the tensors show. Several families may fit, since some differ in
    numbers alone that no tensor shows.
    """
    by_name = name_fits(checkpoint.entries)
    near = sum(names.fits for names in by_name) + MAX_NEAR
    fits = [_fit(checkpoint, names) for names in by_name[:near]]
    return tuple(sorted(fits, key=lambda fit: not fit.fits))


def _fit(checkpoint: Checkpoint, names: NamesFit) -> FamilyFit:
    seen = replace(
        checkpoint,
        config=None,
        family=names.row,
        trunk=names.trunk,
        layer_indices=names.layers,
    )
    ends = dict.fromkeys((names.layers[0], names.layers[-1]))
    faults = [fault for layer in ends for fault in resolve_layer(seen, layer)[1] if fault.kind == "shape"]
    reasons = [
        *([f"it has {_listed(names.missing)}, which are not there"] if names.missing else []),
        *([f"it has no {_listed(names.unexpected)}"] if names.unexpected else []),
        *(fault.message for fault in faults[:1]),
    ]
    return FamilyFit(
        family=names.row.name,
        fits=not reasons,
        missing=names.missing[:MAX_NAMES],
        unexpected=names.unexpected[:MAX_NAMES],
        why="; ".join(reasons) or "names and shapes of the first and last layer are those of the family",
    )


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
