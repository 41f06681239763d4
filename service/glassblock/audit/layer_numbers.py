"""Numbers of a layer besides those of its gate: the gains and epsilons of its norms, and what the first norm receives.

No rule looks at them; tables and pictures do.
"""

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.audit.evidence import Evidence, GainMoments
from glassblock.checkpoint.layer_parts import LayerTensors
from glassblock.checkpoint.settings import eps_of
from glassblock.errors import DamagedCheckpoint
from glassblock.numerics.norms import norm_kind_named

Metric = float | int | str | None


def gain_offsets(layers: Mapping[int, LayerTensors]) -> dict[str, float]:
    """The gains of all layers by name, each with what its kind of norm adds to it."""
    return {
        norm.gain.name: norm_kind_named(norm.row.kind).offset
        for layer in layers.values()
        for norm in layer.norms.values()
        if norm.gain is not None
    }


def gain_moments(piece: Float[Tensor, " n"], wide: Float[Tensor, " n"], *, offset: float) -> GainMoments:
    """Of one piece of a gain, which is not empty.

    Args:
        piece: As stored.
        wide: The same in float32 at least.
        offset: Added to it by its kind of norm.
    """
    # With numpy, whose calls cost a fifth of torch's: this is done for every norm, of a few hundred numbers.
    exact = wide.to("cpu", torch.float64).numpy() + offset
    off = 0, 0.0
    if offset:
        rounded = (piece + offset).to("cpu", torch.float64).numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.abs(rounded - exact) / np.abs(exact)
        errors = errors[errors > 0]
        off = len(errors), float(errors.max(initial=0.0))
    return GainMoments(len(exact), float(exact @ exact), float(exact.min()), float(exact.max()), *off)


def norm_metrics(evidence: Evidence, layer: int) -> dict[str, Metric]:
    """Per norm of one layer: root mean square, least and greatest entry of its gain, and its epsilon.

    Of the first norm also the mean squares of the rows it receives, where these are rows of the embedding.
    """
    metrics: dict[str, Metric] = {}
    for role, norm in evidence.layers[layer].norms.items():
        moments = None if norm.gain is None else evidence.gains.get(norm.gain.name)
        if moments is not None:
            metrics[f"norm_{role}_gain_rms"] = (moments.square_sum / moments.elements) ** 0.5
            metrics[f"norm_{role}_gain_least"] = moments.least
            metrics[f"norm_{role}_gain_most"] = moments.most
        try:
            metrics[f"norm_{role}_eps"] = eps_of(evidence.checkpoint.config, evidence.family, norm.row.eps).value
        except DamagedCheckpoint:
            continue  # the config's own fault says why
    energy = evidence.embedding
    if energy is not None and layer == 0:
        metrics["norm_attn_in_input_mean_square_least"] = energy.least
        metrics["norm_attn_in_input_mean_square_median"] = energy.median
        metrics["norm_attn_in_input_mean_square_most"] = energy.most
    return metrics
