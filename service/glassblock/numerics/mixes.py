"""Is one tensor a linear mix of others? Least squares from pieces of all of them.

A merge by weights, SLERP and task arithmetic all write c_1 A_1 + ... + c_n A_n, tensor by tensor, and round it. The
Gram matrix of the parents and their products with the mix give c and what is left over; pieces add up.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

ONE_TENSOR = 1e-12
"""Least eigenvalue of the parents' cosines, below which one of them is a mix of the others but for rounding."""

_SUMS = 1e-13  # of a relative sum of float64 products, ten times what was seen


class Products(NamedTuple):
    """Sums over all elements seen so far, in float64.

    Attributes:
        elements: How many.
        gram: Products of the parents with each other.
        with_mix: Of each parent with the mix.
        mix: The mix with itself.
    """

    elements: int
    gram: Float[Tensor, "n n"]
    with_mix: Float[Tensor, " n"]
    mix: float

    def and_then(self, mix: Shaped[Tensor, "*shape"], parents: list[Tensor]) -> "Products":
        """With the next piece of all."""
        wide = torch.stack([parent.reshape(-1).double() for parent in parents])
        one = mix.reshape(-1).double()
        return Products(
            self.elements + one.numel(),
            self.gram + wide @ wide.T,
            self.with_mix + wide @ one,
            self.mix + float(one @ one),
        )

    def of(self, parents: Sequence[int]) -> "Products":
        """Of some of the parents alone."""
        chosen = torch.tensor(parents, dtype=torch.int64)
        return self._replace(gram=self.gram[chosen][:, chosen], with_mix=self.with_mix[chosen])


class Mix(NamedTuple):
    """The best fit.

    Attributes:
        coefficients: One for each parent.
        errors: Their standard errors, from what is left over as if it were noise.
        residual: |mix - fit| / |mix|; 0 for a mix of zeros.
        angle: Between two parents; None for another number of them.
        resolution: Residuals below are rounding of the sums: the more alike the parents, the larger.
    """

    coefficients: tuple[float, ...]
    errors: tuple[float, ...]
    residual: float
    angle: float | None
    resolution: float


def no_products(parents: int) -> Products:
    """Before the first piece."""
    return Products(
        0, torch.zeros(parents, parents, dtype=torch.float64), torch.zeros(parents, dtype=torch.float64), 0.0
    )


def fitted(products: Products) -> Mix | None:
    """Least squares. None where the parents are one tensor, zero or not finite, so that coefficients mean nothing."""
    gram, count = products.gram, len(products.gram)
    if not (bool(gram.isfinite().all()) and bool(products.with_mix.isfinite().all()) and math.isfinite(products.mix)):
        return None
    lengths = gram.diagonal().sqrt()
    if bool((lengths == 0).any()):
        return None
    # Of unit length each: float64 sums leave 1e-15 of these, so what is smaller is one tensor twice.
    unit = gram / torch.outer(lengths, lengths)
    values, vectors = cast("tuple[Tensor, Tensor]", torch.linalg.eigh(unit))
    if float(values[0]) < ONE_TENSOR:
        return None
    inverse = (vectors / values) @ vectors.T
    scaled = inverse @ (products.with_mix / lengths)
    coefficients = scaled / lengths
    left = max(products.mix - float(products.with_mix @ coefficients), 0.0)
    noise = left / max(products.elements - count, 1)
    errors = (noise * inverse.diagonal()).clamp_min(0).sqrt() / lengths
    angle = math.acos(max(-1.0, min(1.0, float(unit[0, 1])))) if count == 2 else None
    residual = math.sqrt(left / products.mix) if products.mix > 0 else 0.0
    resolution = math.sqrt(_SUMS / float(values[0]))
    return Mix(tuple(map(float, coefficients)), tuple(map(float, errors)), residual, angle, resolution)


def refined(mix: Mix, left: Products, *, whole: float) -> Mix:
    """A fit, made again to what it left over, so that nothing cancels.

    Args:
        mix: The fit.
        left: Products of the same parents with the mix less the fit.
        whole: The mix with itself.
    """
    again = fitted(left)
    if again is None or whole <= 0:
        return mix
    coefficients = tuple(one + more for one, more in zip(mix.coefficients, again.coefficients, strict=True))
    residual = again.residual * math.sqrt(left.mix / whole)
    return Mix(coefficients, again.errors, residual, mix.angle, again.resolution * math.sqrt(left.mix / whole))


def independent(products: Products) -> tuple[int, ...]:
    """The parents that are none of the mixes of those before them; those that are zero or not finite are none."""
    kept: list[int] = []
    for number, length in enumerate(map(float, products.gram.diagonal().sqrt())):
        if not (math.isfinite(length) and length > 0):
            continue
        some = products.gram[[*kept, number]][:, [*kept, number]]
        lengths = some.diagonal().sqrt()
        unit = some / torch.outer(lengths, lengths)
        if bool(unit.isfinite().all()) and float(cast("Tensor", torch.linalg.eigvalsh(unit))[0]) >= ONE_TENSOR:
            kept.append(number)
    return tuple(kept)


def one_tensor(products: Products, parent: int, other: int) -> bool:
    """Whether two parents hold the same numbers, as well as sums of products tell; in `fitted` they count once."""
    own, its = float(products.gram[parent, parent]), float(products.gram[other, other])
    # 1 - cosine of two of one length is half their squared relative distance.
    return own + its - 2 * float(products.gram[parent, other]) <= 2 * ONE_TENSOR * own


def unlike(products: Products, parent: int) -> float:
    """How far the mix is from one parent as it stands: |mix - parent| / |mix|; infinity for a mix of zeros."""
    apart = products.mix - 2 * float(products.with_mix[parent]) + float(products.gram[parent, parent])
    return math.sqrt(max(apart, 0.0) / products.mix) if products.mix > 0 else math.inf


def spherical_share(mix: Mix, *, slack: float) -> float | None:
    """The t of SLERP that gives these coefficients, sin((1 - t) w) / sin w and sin(t w) / sin w (Shoemake 1985).

    None where they are not of that form, and where the angle is so small that it is a straight mix within `slack`.
    """
    if mix.angle is None or not 0 < mix.angle < math.pi:
        return None
    first, second = mix.coefficients
    # tan(t w) from the ratio of both.
    turn = math.atan2(second * math.sin(mix.angle), first + second * math.cos(mix.angle))
    t, scale = turn / mix.angle, math.sin(mix.angle)
    expected = math.sin((1 - t) * mix.angle) / scale, math.sin(t * mix.angle) / scale
    if not -0.01 <= t <= 1.01 or abs(sum(expected) - 1) <= slack:
        return None
    return t if max(abs(expected[0] - first), abs(expected[1] - second)) <= slack else None
