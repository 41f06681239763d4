"""A mixture of experts in the place of a feed-forward network (Shazeer et al. 2017).

A router sends every token to a few experts (`routing`); what they return is weighed and summed. Each expert is computed
on its own tokens only, one expert after the other, so that the weights of experts may come from a stream and only one
expert's are held. The sum grows in the dtype of the computation, expert by expert in their order, as in the models'
own loops.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.block import apply_sublayer
from glassblock.numerics.dtypes import widest_dtype
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.linear import apply_linear
from glassblock.numerics.routing import GroupScore, Routing, route


@dataclass(frozen=True, eq=False)
class Mixture:
    """The tensors and the arithmetic of a mixture of experts.

    Attributes:
        router: `[E, d]`.
        experts: E networks, or a function that gives number j; it is asked once for each expert that has tokens, in
            order, and what it gave is not kept.
        routing: From logits to weights.
        router_bias: `[E]`, added to the logits, or None.
        correction: `[E]`, added to the scores for the choice alone, or None.
        shared: A network that every token goes to, or None.
        shared_gate: `[1, d]`: its sigmoid weighs what the shared network returns; or None.

    Raises:
        InvalidValue: A shape or a number does not fit the others; the error names it.
    """

    router: Tensor
    experts: tuple[FeedForward, ...] | Callable[[int], FeedForward]
    routing: Routing
    router_bias: Tensor | None = None
    correction: Tensor | None = None
    shared: FeedForward | None = None
    shared_gate: Tensor | None = None

    def __post_init__(self) -> None:
        if self.router.ndim != 2 or self.router.numel() == 0:
            raise InvalidValue(
                f"the router has shape {list(self.router.shape)}",
                hint="Give one row for each expert: [experts, model width].",
                field="router",
            )
        count, d = self.router.shape
        expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
            "router_bias": (self.router_bias, (count,)),
            "correction": (self.correction, (count,)),
            "shared_gate": (self.shared_gate, (1, d)),
        }
        for name, (tensor, shape) in expected.items():
            if tensor is not None and tuple(tensor.shape) != shape:
                raise InvalidValue(
                    f"{name} has shape {list(tensor.shape)} where the router, {[count, d]}, asks for {list(shape)}",
                    hint="Give one number for each expert, or for the gate one for each channel.",
                    field=name,
                )
        if not callable(self.experts) and len(self.experts) != count:
            raise InvalidValue(
                f"there are {len(self.experts)} experts and the router knows {count}",
                hint="Give one network for each row of the router.",
                field="experts",
            )
        members = count // self.routing.groups
        if count % self.routing.groups or self.routing.top_k > members * self.routing.kept_groups:
            raise InvalidValue(
                f"{self.routing.top_k} of {count} experts cannot be chosen from {self.routing.kept_groups} of "
                f"{self.routing.groups} equal groups",
                hint="The groups divide the experts evenly, and those that are kept hold enough of them.",
                field="groups" if self.routing.groups > 1 else "top_k",
            )
        judged = self.routing.kept_groups < self.routing.groups
        if judged and members < 2 and self.routing.group_score is GroupScore.TOP_TWO:
            raise InvalidValue(
                f"{self.routing.groups} groups of {members} expert each cannot be judged by their two best",
                hint="Give fewer groups.",
                field="groups",
            )
        if self.shared is None and self.shared_gate is not None:
            raise InvalidValue("a gate was given without a shared network", hint="Give both.", field="shared_gate")
        if self.shared is not None and self.shared.model_width != d:
            raise InvalidValue(
                f"the shared network is {self.shared.model_width} wide and the router {d}",
                hint="Experts read and return the model width.",
                field="shared",
            )

    @property
    def count(self) -> int:
        """E, the number of experts."""
        return self.router.shape[0]

    @property
    def model_width(self) -> int:
        """d, the width of what it reads and returns."""
        return self.router.shape[1]

    def expert(self, number: int) -> FeedForward:
        """The network of that number, checked to be of the model's width."""
        expert = self.experts(number) if callable(self.experts) else self.experts[number]
        if expert.model_width != self.model_width:
            raise InvalidValue(
                f"expert {number} is {expert.model_width} wide and the router {self.model_width}",
                hint="Experts read and return the model width.",
                field="experts",
            )
        return expert

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its tensors but those of the experts."""
        own = (self.router, self.router_bias, self.correction, self.shared_gate)
        shared = () if self.shared is None else self.shared.tensors
        return tuple(tensor for tensor in (*own, *shared) if tensor is not None)


class MixtureStages(NamedTuple):
    """What a mixture computes on its way, in order.

    Attributes:
        router_logits: `[*batch, E]`.
        chosen: `[*batch, k]`, the experts by number, the best first.
        weights: `[*batch, k]`, theirs.
        routed: `[*batch, d]`, the weighed sum of what they return.
        shared: `[*batch, d]`, what the shared network returns, after its gate; None where there is none.
        down: `[*batch, d]`, what the mixture returns.
    """

    router_logits: Tensor
    chosen: Tensor
    weights: Tensor
    routed: Tensor
    shared: Tensor | None
    down: Tensor


def run_mixture(n: Float[Tensor, "*batch d"], mixture: Mixture, *, dtype: torch.dtype | None = None) -> MixtureStages:
    """Send every token to its experts and sum what they return.

    Args:
        n: What the router and the experts read.
        mixture: Weights and arithmetic.
        dtype: None computes in float32 at least, and in float64 where any tensor is float64; experts that a function
            gives are not asked beforehand. A given dtype runs every operation in it, but for those that the routing
            calls wide.

    Raises:
        InvalidValue: The width or the dtype does not fit.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise InvalidValue(f"experts cannot run in {dtype}", hint="Give a floating-point dtype.", field="dtype")
    if n.shape[-1] != mixture.model_width:
        raise InvalidValue(
            f"the input has shape {list(n.shape)} and the experts are {mixture.model_width} wide",
            hint="The last axis is the model width.",
            field="x",
        )
    flat = n.to(dtype or mixture_dtype(n, mixture)).reshape(math.prod(n.shape[:-1]), n.shape[-1])
    logits, chosen, weights = route(
        flat, mixture.router, mixture.routing, bias=mixture.router_bias, correction=mixture.correction
    )
    routed = _through_experts(flat, chosen, weights, mixture)
    shared = None
    if mixture.shared is not None:
        shared = apply_sublayer(flat, mixture.shared)
        if mixture.shared_gate is not None:
            shared = torch.sigmoid(apply_linear(flat, mixture.shared_gate)) * shared
    down = routed if shared is None else routed + shared

    def shaped(stage: Tensor) -> Tensor:
        return stage.reshape(*n.shape[:-1], stage.shape[-1])

    return MixtureStages(
        shaped(logits),
        shaped(chosen),
        shaped(weights),
        shaped(routed),
        shared=None if shared is None else shaped(shared),
        down=shaped(down),
    )


def mixture_dtype(n: Tensor, mixture: Mixture) -> torch.dtype:
    """The widest of float32 and of the dtypes of the input and the mixture's tensors, streamed experts left out."""
    held = () if callable(mixture.experts) else mixture.experts
    return widest_dtype((n, *mixture.tensors, *(tensor for expert in held for tensor in expert.tensors)))


def _through_experts(
    n: Float[Tensor, "tokens d"], chosen: Int[Tensor, "tokens k"], weights: Float[Tensor, "tokens k"], mixture: Mixture
) -> Float[Tensor, "tokens d"]:
    routed = torch.zeros_like(n)
    choices = chosen.T.reshape(-1)  # all first choices, then all second ones
    order = choices.argsort(stable=True)
    counts = cast("list[int]", choices.bincount(minlength=mixture.count).tolist())
    for number, places in enumerate(cast("tuple[Tensor, ...]", order.split(counts))):
        if len(places) == 0:
            continue
        token = places % len(n)
        weight = weights[token, places // len(n), None]
        expert, rows = mixture.expert(number), n[token]
        if mixture.routing.weigh_input:
            down = apply_sublayer((rows * weight).to(n.dtype), expert)
        else:
            down = apply_sublayer(rows, expert) * weight
        routed.index_add_(0, token, down.to(n.dtype))
    return routed
