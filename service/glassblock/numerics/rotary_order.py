"""Which rows of queries and keys do positions turn together? A certified test that needs no data and no reference.

Rotary positions turn the rows of a head in pairs, its planes: row i with i + h of 2h rows (halves), or 2i with 2i + 1
(pairs). Files of one order under a family of the other load without a word.

**The symmetry.** Turn a plane of every head of a layer by 90 degrees, queries and keys alike: (a, b) becomes (b, -a).
All turns of one plane commute, so no score changes. The turn exchanges two rows and flips a sign, so an initialisation
of independent symmetric numbers and every optimiser that treats numbers or rows alike respect it: given the weights up
to such turns, **each turn is a fair coin**.

**What is compared.** Let g_st be the inner product of row s of the queries with row t of the keys. A plane (a, b)
enters the scores through C = g_aa + g_bb and S = g_ab - g_ba alone; c = g_aa - g_bb and s = g_ab + g_ba are what a turn
flips. Training moves C and S, so for the rows of one plane the determinant

    g_aa g_bb - g_ab g_ba = (C^2 + S^2 - c^2 - s^2) / 4

is large. Four rows {2m, 2m + 1, 2m + h, 2m + 1 + h} are two planes under either order. They can be paired in three
ways: {01|23} as pairs, {02|13} as halves, {03|12} as neither. Let D be the sum of the determinants of the two pairs of
one way. If the declared order is right, a turn of one of its two planes exchanges the D of the two other ways, exactly.
So

    w = D(other order) - D(neither),  over the squares of the g in both (those of g_ss about their mean),

has a fair sign, the same in all heads of the layer; over all fours of all layers the signs are independent. What all
rows have in common, such as a bias of rounding, is in both and cancels.

**The certified p-value** (Hoeffding 1963, Theorem 2). P(sum of s w >= z sqrt(sum of w^2)) <= exp(-z^2 / 2) for fair
signs s, whatever the sizes.

It fails, so these need a guard or a refusal: an initialisation that orders the rows of a head; norms of queries and
keys that subtract a mean; layers copied from others, whose coins are one.
"""

import math
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

LEVEL = 1e-9
"""Of a conviction. Were each layer there three times, which makes three coins one, 1e-3 would be left."""

NOISE_Z = 3.0
"""Below it a sum of fair signs is nothing unusual."""


class FairSigns(NamedTuple):
    """A sum of terms whose signs are fair coins if one order is right.

    Attributes:
        z: The sum over the root of the sum of squares.
        terms: How many are not zero.
    """

    z: float
    terms: int

    @property
    def log10_p(self) -> float:
        """Of a sum at least as large: certified."""
        return -(max(self.z, 0.0) ** 2) / 2 / math.log(10)

    @property
    def least_log10_p(self) -> float:
        """That of so many equal terms which all say the same."""
        return -self.terms / 2 / math.log(10)

    def rejected(self, level: float) -> bool:
        """Whether the order is not the one that the weights were trained in."""
        return self.log10_p <= math.log10(level)

    @property
    def noise(self) -> bool:
        """Whether nothing speaks against the order."""
        return self.z < NOISE_Z


NO_SIGNS = FairSigns(0.0, 0)
"""Where there is nothing to compare."""


class OrderVerdict(StrEnum):
    """What the weights of all layers together say of the order that is declared.

    `NOT_AS_DECLARED`: it is rejected, and something speaks against the other one too, as where some layers lie in each.
    """

    AS_DECLARED = "as declared"
    OTHER = "other order"
    NOT_AS_DECLARED = "not as declared"
    UNDECIDABLE = "undecidable"


def partner_products(
    queries: Float[Tensor, "kv_heads group head_dim d"], keys: Float[Tensor, "kv_heads head_dim d"], turned: int
) -> Float[Tensor, "fours kv_heads group 4 4"]:
    """The inner products of the rows of queries with those of the keys that they meet, four by four.

    Args:
        queries: Rows head by head, for each head of keys those that share it, or some of them.
        keys: Rows head by head, of the same channels.
        turned: How many rows of a head positions turn, from the first; a multiple of four.
    """
    # With numpy: an audit does this while another thread reads, and has to wait for it after each step of torch.
    heads, group, _, width = queries.shape
    shape = (2, turned // 4, 2, width)
    shared, own = (rows[..., :turned, :].cpu().numpy() for rows in (queries, keys))
    four_queries = shared.reshape(heads, group, *shape).transpose(3, 0, 1, 2, 4, 5).reshape(-1, heads, 4 * group, width)
    four_keys = own.reshape(heads, *shape).transpose(2, 0, 1, 3, 4).reshape(-1, heads, 4, width)
    with np.errstate(over="ignore", invalid="ignore"):
        products = four_queries @ four_keys.swapaxes(-1, -2)
    return torch.from_numpy(products.reshape(-1, heads, group, 4, 4))


def order_terms(
    products: Float[Tensor, "*layers fours kv_heads group 4 4"],
) -> tuple[Float[Tensor, "*layers fours"], Float[Tensor, "*layers fours"]]:
    """The terms whose signs are fair if halves are right, and those if pairs are; summed over the heads of a layer."""
    products = products / products.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(products.dtype).tiny)
    own = products.diagonal(dim1=-2, dim2=-1)
    own = own - own.mean(-1, keepdim=True)
    determinants = own[..., :, None] * own[..., None, :] - products * products.mT
    squares = products.square()
    squares = squares + squares.mT
    (pairs, halves, neither), sizes = _by_way(determinants), _by_way(squares)
    spread = own.square().sum(-1)
    against_halves, against_pairs = (
        ((way - neither) / (size + sizes[2] + spread)).nan_to_num(0.0, 0.0, 0.0).sum((-2, -1))
        for way, size in ((pairs, sizes[0]), (halves, sizes[1]))
    )
    return against_halves, against_pairs


def _by_way(values: Float[Tensor, "*n 4 4"]) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of a value of two rows over the two pairs of each way: as pairs, as halves, as neither."""
    pairs, halves, neither = (values[..., 0, one] + values[..., two, three] for one, two, three in _WAYS)
    return pairs, halves, neither


def fair_signs(terms: Float[Tensor, "*n"]) -> FairSigns:
    """The terms of all layers together."""
    values = terms.double().flatten()
    size = float(values.square().sum())
    return FairSigns(float(values.sum()) / math.sqrt(size) if size > 0 else 0.0, int((values != 0).sum()))


def judged(declared: FairSigns, other: FairSigns) -> OrderVerdict:
    """What the weights say, from what speaks against the declared order and against the other one."""
    if declared.rejected(LEVEL):
        return OrderVerdict.OTHER if other.noise else OrderVerdict.NOT_AS_DECLARED
    if other.rejected(LEVEL) and declared.noise:
        return OrderVerdict.AS_DECLARED
    return OrderVerdict.UNDECIDABLE


_WAYS = ((1, 2, 3), (2, 1, 3), (3, 1, 2))
"""Row 0 with the first, and the two others: as pairs, as halves, as neither."""
