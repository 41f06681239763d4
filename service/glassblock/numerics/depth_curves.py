"""What a chain of functions does to a state and to small changes of it, layer by layer.

For functions f_0 .. f_(L-1) of token states `[tokens, d]`, x_0 = x, x_(l+1) = f_l(x_l), and J_(b<-a) for the Jacobian
of x_b by x_a:

    the state     rms(x_l), and |f_l(x_l) - x_l| / |x_l|, the size of what the layer adds
    to the end    ||J_(L<-l)|| for every l: probes pulled back from the end, one pass for all l (Hutchinson 1990)
    from the start  ||J_(l<-0)|| for every l: probes pushed forward, one pass for all l
    products      sigma_1 of each layer alone, bracketed, and the products of the upper bounds, which are upper bounds
                  on sigma_1 of the chains (submultiplicativity): how much of the depth is lost to them is the point

The spectral norm of a chain has a lower bound here, certain up to rounding: the largest Ritz value of a few steps of
bidiagonalisation that start at the top singular vector of the chain one layer shorter.

**Groups.** A chain of functions that treat every token by itself has a Jacobian of one block for each token, and all
norms are told per token. Where tokens are coupled there is one group, the whole state.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.coupled_jacobian import TokenFunction, pull_back, push_forward
from glassblock.numerics.golub_kahan import Bidiagonal, golub_kahan, uniform_starts
from glassblock.numerics.norm_factors import lengths
from glassblock.numerics.product_noise import ROUNDING
from glassblock.numerics.singular_bracket import bracket_largest
from glassblock.numerics.watching import UNWATCHED, Watch


class Curve(NamedTuple):
    """Norms of the Jacobians of chains, float64 `[L, groups]`.

    Attributes:
        frobenius: Estimated: the root of the mean over the probes of the squares.
        standard_error: Of `frobenius`, to first order.
        spectral_lower: Certain, up to rounding.
        product_upper: The product of the layers' upper bounds.
    """

    frobenius: Tensor
    standard_error: Tensor
    spectral_lower: Tensor
    product_upper: Tensor


class DepthCurves(NamedTuple):
    """A chain of L functions at one state.

    Attributes:
        rms: `[L + 1, tokens]`, float64: of the state before each layer and after the last.
        added: `[L, tokens]`: |f_l(x_l) - x_l| / |x_l|; infinite or NaN for a row of zeros.
        layer_lower, layer_upper: `[L, groups]`: sigma_1 of each layer, bracketed.
        to_end: Row l holds J_(L<-l).
        from_start: Row l holds J_(l+1<-0).
        coupled: Whether there is one group in place of one for each token.
        probes, steps, seed: Random vectors in each mean; steps of bidiagonalisation for each chain; of all randomness.
        failure_probability: Of each upper bound of one layer and group.
        products: Products with the Jacobian of one layer, all told.
    """

    rms: Tensor
    added: Tensor
    layer_lower: Tensor
    layer_upper: Tensor
    to_end: Curve
    from_start: Curve
    coupled: bool
    probes: int
    steps: int
    seed: int
    failure_probability: float
    products: int


def depth_curves(
    functions: Sequence[TokenFunction],
    x: Float[Tensor, "tokens d"],
    *,
    coupled: bool = True,
    probes: int = 16,
    steps: int = 2,
    tolerance: float = 1e-2,
    failure_probability: float = 1e-9,
    seed: int = 0,
    watch: Watch = UNWATCHED,
) -> DepthCurves:
    """Follow a state and its Jacobians through a chain.

    Args:
        functions: f_0 .. f_(L-1), each `[tokens, d]` to `[tokens, d]`, differentiable by torch.func.
        x: The state that enters, in the dtype of the computation.
        coupled: False where every function treats every token by itself.
        probes: For each curve.
        steps: Of bidiagonalisation for each chain.
        tolerance: How narrow the brackets of single layers are to be, relative.
        failure_probability: Of each of their upper bounds.
        seed: Of probes and starts.
        watch: Told and asked between products.

    Raises:
        InvalidValue: There is no function, a number is out of range, or a function changes the shape.
        ComputationCancelled: `watch` asked for it.
    """
    if not functions:
        raise InvalidValue("the chain holds no function", hint="Give one at least.", field="functions")
    for field, number, least in (("probes", probes, 2), ("steps", steps, 1)):
        if number < least:
            raise InvalidValue(f"{field} is {number}", hint=f"Ask for {least} at least.", field=field)
    states, links = _links(functions, x, coupled=coupled)
    meter = _Meter(watch, _products_planned(len(links), probes, steps))
    for link in links:
        link.meter = meter
    layers = [
        bracket_largest(
            link,
            uniform_starts(*link.grouped, seed=seed + number).to(x),
            steps=200,
            tolerance=tolerance,
            failure_probability=failure_probability,
            eps=ROUNDING * torch.finfo(x.dtype).eps,
            watch=Watch(cancelled=watch.cancelled),
        )
        for number, link in enumerate(links)
    ]
    upper = torch.stack([layer.upper for layer in layers])
    generator = torch.Generator("cpu").manual_seed(seed)
    back = _probed(links[::-1], generator, probes, lambda link, v: link.transposed_times(v))
    forth = _probed(links, generator, probes, lambda link, v: link.times(v))
    to_end = Curve(
        back.frobenius.flip(0),
        back.standard_error.flip(0),
        _to_end(links, steps, seed),
        upper.flip(0).cumprod(0).flip(0),
    )
    from_start = Curve(forth.frobenius, forth.standard_error, _from_start(links, steps, seed), upper.cumprod(0))
    sizes = torch.stack([lengths(state.double()) for state in states])
    moved = torch.stack([lengths((after - before).double()) for before, after in pairwise(states)])
    return DepthCurves(
        rms=sizes / math.sqrt(x.shape[-1]),
        added=moved / sizes[:-1],
        layer_lower=torch.stack([layer.lower for layer in layers]),
        layer_upper=upper,
        to_end=to_end,
        from_start=from_start,
        coupled=coupled,
        probes=probes,
        steps=steps,
        seed=seed,
        failure_probability=failure_probability,
        products=meter.done,
    )


@dataclass(eq=False)
class _Meter:
    watch: Watch
    planned: int
    done: int = 0

    def tick(self) -> None:
        self.watch.at(min(self.done, self.planned), self.planned, "products along the chain")
        self.done += 1


@dataclass(eq=False)
class _Link:
    """The Jacobian of one function at its state, as one matrix `[n, n]` for each group."""

    function: TokenFunction
    state: Tensor
    pull: Callable[[Tensor], Tensor]
    grouped: tuple[int, int]
    meter: _Meter

    def times(self, v: Tensor) -> Tensor:
        self.meter.tick()
        return push_forward(self.function, self.state, v.view(self.state.shape)).view(self.grouped)

    def transposed_times(self, v: Tensor) -> Tensor:
        self.meter.tick()
        return self.pull(v.view(self.state.shape)).view(self.grouped)


@dataclass(frozen=True, eq=False)
class _Chain:
    links: Sequence[_Link]

    def times(self, v: Tensor) -> Tensor:
        for link in self.links:
            v = link.times(v)
        return v

    def transposed_times(self, v: Tensor) -> Tensor:
        for link in reversed(self.links):
            v = link.transposed_times(v)
        return v


class _Probed(NamedTuple):
    frobenius: Tensor
    standard_error: Tensor


def _links(functions: Sequence[TokenFunction], x: Tensor, *, coupled: bool) -> tuple[list[Tensor], list[_Link]]:
    tokens, d = x.shape
    grouped = (1, tokens * d) if coupled else (tokens, d)
    states, links = [x], list[_Link]()
    for number, function in enumerate(functions):
        state, pull = pull_back(function, states[-1])
        if state.shape != x.shape:
            raise InvalidValue(
                f"function {number} makes {list(state.shape)} of {list(x.shape)}",
                hint="Every function of a chain must keep the shape [tokens, d].",
                field="functions",
            )
        links.append(_Link(function, states[-1], pull, grouped, _Meter(UNWATCHED, 0)))
        states.append(state)
    return states, links


def _probed(
    links: Sequence[_Link], generator: torch.Generator, probes: int, step: Callable[[_Link, Tensor], Tensor]
) -> _Probed:
    """The norms of the chains of the first 1, 2, .. L links, from the same probes for all of them."""
    squares: list[Tensor] = []
    for _ in range(probes):
        v = torch.randn(links[0].grouped, generator=generator, dtype=torch.float64).sign().to(links[0].state)
        along: list[Tensor] = []
        for link in links:
            v = step(link, v)
            along.append(lengths(v).double().square())
        squares.append(torch.stack(along))
    found = torch.stack(squares)
    frobenius = found.mean(0).sqrt()
    error = found.std(0) / probes**0.5 / (2.0 * frobenius)
    return _Probed(frobenius, torch.where(frobenius > 0, error, torch.zeros_like(error)))


def _to_end(links: Sequence[_Link], steps: int, seed: int) -> Tensor:
    """Lower bounds on sigma_1 of J_(L<-l), `[L, groups]`; each starts where the chain one layer shorter ended."""
    u = uniform_starts(*links[-1].grouped, seed=seed).to(links[-1].state)
    found: list[Tensor] = []
    for number in range(len(links) - 1, -1, -1):
        chain = _Chain(links[number:])
        state = _bidiagonal(chain, _unit(chain.transposed_times(u)), steps)
        u = _unit(state.top_vectors()[0])
        found.append(_lower(state, len(links) - number))
    return torch.stack(found[::-1])


def _from_start(links: Sequence[_Link], steps: int, seed: int) -> Tensor:
    v = uniform_starts(*links[0].grouped, seed=seed).to(links[0].state)
    found: list[Tensor] = []
    for number in range(1, len(links) + 1):
        state = _bidiagonal(_Chain(links[:number]), v, steps)
        v = _unit(state.top_vectors()[1])
        found.append(_lower(state, number))
    return torch.stack(found)


def _bidiagonal(chain: _Chain, start: Tensor, steps: int) -> Bidiagonal:
    *_, last = golub_kahan(chain, start, steps=steps)
    return last


def _lower(state: Bidiagonal, layers: int) -> Tensor:
    """The largest Ritz value less what rounding may have added in each of the layers."""
    return state.ritz_values()[:, 0] * (1.0 - layers * ROUNDING * torch.finfo(state.left.dtype).eps)


def _unit(v: Tensor) -> Tensor:
    length = lengths(v, keepdim=True)
    return v / torch.where(length > 0, length, torch.ones_like(length))


def _products_planned(layers: int, probes: int, steps: int) -> int:
    """Without those of single layers' brackets, which end when they are narrow: some 24 steps."""
    chains = layers * (layers + 1) // 2
    return 48 * layers + 2 * probes * layers + chains * (4 * steps + 1)
