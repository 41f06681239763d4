"""How large the embedding's rows are, which decides how much an epsilon matters to the first norm."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.audit.evidence import EmbeddingEnergy
from glassblock.checkpoint.entries import FLOAT_CODES
from glassblock.checkpoint.family import SquareRoot
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.outer_tensors import embedding_entry
from glassblock.checkpoint.settings import scale_of
from glassblock.errors import DamagedCheckpoint
from glassblock.numerics.norms import norm_kind_named
from glassblock.numerics.squared_lengths import row_squares


@dataclass(frozen=True)
class EmbeddingPlan:
    """Which tensor's rows to measure, and what they are multiplied by first.

    Attributes:
        tensor: Its name.
        width: Entries of a row.
        multiplier: The family's multiplier.
        rounded: Whether the models round the multiplier to the weights' dtype before it multiplies.
    """

    tensor: str
    width: int
    multiplier: float
    rounded: bool

    def mean_squares(self, piece: Float[Tensor, " n"], squares: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """Mean square of each row in a piece of whole rows, in the arithmetic of the models.

        Args:
            piece: As stored.
            squares: Of its rows, the squared lengths.
        """
        multiplier = self.multiplier
        if self.rounded:
            stored, multiplier = piece.view(-1, self.width), 1.0
            rows = stored * torch.tensor(self.multiplier, dtype=stored.dtype, device=stored.device)
            squares = row_squares(rows.to(torch.promote_types(rows.dtype, torch.float32)))
        return squares.to("cpu", torch.float64) * (multiplier**2 / self.width)

    def energy(self, every: Float[Tensor, " rows"]) -> EmbeddingEnergy | None:
        """The rows' energies in three numbers; None where no row has any."""
        some = every[every.isfinite() & (every > 0)]
        if not len(some):
            return None
        return EmbeddingEnergy(
            tensor=self.tensor,
            rows=len(some),
            least=float(some.min()),
            median=float(some.median()),
            most=float(some.max()),
            multiplier=self.multiplier,
        )


def embedding_plan(checkpoint: Checkpoint, *, longest_row: int) -> EmbeddingPlan | None:
    """How to measure the rows that the first norm receives; None where no norm receives them as they are.

    That is so in families without a norm in front of the first attention, in those that normalise the rows before the
    first layer, and in those with centred norms, which add learned positions to the rows first.

    Args:
        checkpoint: As opened.
        longest_row: Bytes of the longest row that comes in one piece.
    """
    family = checkpoint.family
    if family is None or checkpoint.trunk is None:
        return None
    first, entry = family.norm("attn_in"), embedding_entry(checkpoint)
    if first is None or family.embedding_norm is not None or norm_kind_named(first.kind).centred or entry is None:
        return None
    if len(entry.shape) != 2 or entry.elements == 0 or entry.dtype not in FLOAT_CODES:
        return None
    if entry.bytes // entry.shape[0] > longest_row:
        return None
    multiplier = 1.0
    if family.embedding_scale is not None:
        try:
            multiplier = scale_of(checkpoint.config, family, family.embedding_scale, entry.shape[1]).value
        except DamagedCheckpoint:
            return None  # the config's own fault says why
    return EmbeddingPlan(entry.name, entry.shape[1], multiplier, isinstance(family.embedding_scale, SquareRoot))
