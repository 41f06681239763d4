"""Which experts a token goes to, and with which weights: the routers of released models as data.

All routers score the experts by a linear map of the token and send it to the k best. They differ in what a score is, in
whether it is taken before or after the choice, in groups that are chosen first, in a correction that moves the choice
but not the weights, and in how the weights are normalised. `Routing` says which; the families that a field names are
examples, not branches.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from glassblock.errors import InvalidValue
from glassblock.numerics.linear import apply_linear


class Scoring(StrEnum):
    """What a router's logits become."""

    SOFTMAX = "softmax"  # over all experts, or over the chosen
    SIGMOID = "sigmoid"  # each for itself: DeepSeek-V3, GLM-4 MoE, MiniMax-M2
    SQRTSOFTPLUS = "sqrtsoftplus"  # sqrt(ln(1 + e^x)), each for itself: DeepSeek-V4
    SPARSEMIXER = "sparsemixer"  # one softmax for each choice, over the experts near it: Phi-3.5-MoE


class GroupScore(StrEnum):
    """How a group of experts is judged by the scores of its members."""

    MAX = "max"  # by the best: DeepSeek-V2
    TOP_TWO = "top-two"  # by the sum of the two best: DeepSeek-V3


@dataclass(frozen=True)
class Routing:
    """The arithmetic of a router, from its logits to the weights of the chosen experts.

    Attributes:
        top_k: How many experts a token goes to.
        scoring: What the logits become.
        chosen_first: Whether the choice is made by the logits, and only the chosen are scored (gpt-oss, Granite).
        normalise: Whether the weights of the chosen are divided by their sum.
        sum_epsilon: Added to that sum (DeepSeek-V3: 1e-20).
        sum_floor: The least that sum may be (Ernie 4.5: `moe_norm_min`).
        normalise_order: p where the p-norm takes the place of the sum (DBRX: `moe_normalize_expert_weights`).
        groups: Into how many equal groups, in order, the experts are divided.
        kept_groups: How many groups the experts are chosen from.
        group_score: How groups are judged.
        scaling: Multiplies the weights at the end (`routed_scaling_factor`).
        wide_logits: Whether the linear map itself is in float32 at least (DeepSeek, Ernie 4.5).
        wide_scores: Whether the scores are in float32 at least; else in the dtype of the logits (gpt-oss, DBRX).
        rounded_weights: Whether the weights are cast to the dtype of the tokens before they multiply (Qwen).
        weigh_input: Whether the weight multiplies what the expert reads (Llama 4) rather than what it returns.
        jitter: SPARSEMIXER alone: how near to the best an expert must be, as half a relative distance.

    Raises:
        InvalidValue: A number is out of range or has no place under this scoring.
    """

    top_k: int
    scoring: Scoring = Scoring.SOFTMAX
    chosen_first: bool = False
    normalise: bool = False
    sum_epsilon: float = 0.0
    sum_floor: float = 0.0
    normalise_order: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_score: GroupScore = GroupScore.MAX
    scaling: float = 1.0
    wide_logits: bool = False
    wide_scores: bool = True
    rounded_weights: bool = False
    weigh_input: bool = False
    jitter: float | None = None

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise InvalidValue(f"a token goes to {self.top_k} experts", hint="Give one at least.", field="top_k")
        if not 1 <= self.kept_groups <= self.groups:
            raise InvalidValue(
                f"{self.kept_groups} of {self.groups} groups of experts are kept",
                hint="Keep one at least and no more than there are.",
                field="kept_groups",
            )
        for name in ("sum_epsilon", "sum_floor", "normalise_order", "scaling"):
            number: float = getattr(self, name)
            if not (math.isfinite(number) and number >= 0):
                raise InvalidValue(f"{name} is {number}", hint="Give a number that is not negative.", field=name)
        if (self.jitter is not None) != (self.scoring is Scoring.SPARSEMIXER):
            raise InvalidValue(
                f"the jitter is {self.jitter} under the scoring {self.scoring.value!r}",
                hint="Give it exactly where the scoring is 'sparsemixer'.",
                field="jitter",
            )
        if self.groups > 1 and (self.chosen_first or self.scoring is Scoring.SPARSEMIXER):
            raise InvalidValue(
                "groups of experts are chosen by scores, and this routing has none before the choice",
                hint="Leave the groups out.",
                field="groups",
            )


class Routed(NamedTuple):
    """A router's answer, in the dtypes of the model.

    Attributes:
        router_logits: `[*batch, E]`.
        chosen: `[*batch, k]`, the experts by number, the best first.
        weights: `[*batch, k]`, theirs.
    """

    router_logits: Tensor
    chosen: Tensor
    weights: Tensor


def route(
    n: Float[Tensor, "*batch d"],
    router: Float[Tensor, "experts d"],
    routing: Routing,
    *,
    bias: Float[Tensor, " experts"] | None = None,
    correction: Float[Tensor, " experts"] | None = None,
) -> Routed:
    """Send every token to its experts.

    Args:
        n: What the experts read; its dtype is that of the computation.
        router: One row for each expert.
        routing: The arithmetic.
        bias: Added to the logits.
        correction: Added to the scores for the choice alone, in its own dtype.
    """
    wide = torch.promote_types(n.dtype, torch.float32)
    logits = apply_linear(n.to(wide) if routing.wide_logits else n, router, bias)
    graded = logits.to(wide) if routing.wide_scores else logits
    if routing.scoring is Scoring.SPARSEMIXER:
        chosen, weights = _sparsemixer(graded, routing)
    elif routing.chosen_first:
        best, chosen = graded.topk(routing.top_k, dim=-1)
        weights = _scores(best, routing)
    else:
        scores = _scores(graded, routing)
        for_choice = scores if correction is None else scores + correction
        chosen = _within_groups(for_choice, routing).topk(routing.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
    if routing.normalise:
        weights = _normalised(weights, routing)
    if routing.scaling != 1.0:
        weights = weights * routing.scaling
    return Routed(logits, chosen, weights.to(n.dtype) if routing.rounded_weights else weights)


def _scores(logits: Tensor, routing: Routing) -> Tensor:
    if routing.scoring is Scoring.SOFTMAX:
        return logits.softmax(-1)
    if routing.scoring is Scoring.SIGMOID:
        return logits.sigmoid()
    return functional.softplus(logits).sqrt()


def _within_groups(scores: Tensor, routing: Routing) -> Float[Tensor, "*batch experts"]:
    """The scores, with minus infinity outside the groups that are kept."""
    if routing.groups == routing.kept_groups:
        return scores
    members = scores.reshape(*scores.shape[:-1], routing.groups, scores.shape[-1] // routing.groups)
    counted = 1 if routing.group_score is GroupScore.MAX else 2
    judged = members.topk(counted, dim=-1).values.sum(-1)
    kept = judged.topk(routing.kept_groups, dim=-1).indices
    outside = torch.ones_like(judged, dtype=torch.bool).scatter(-1, kept, value=False)
    return members.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)


def _normalised(weights: Tensor, routing: Routing) -> Tensor:
    if routing.normalise_order == 1.0:
        total = weights.sum(-1, keepdim=True)
    else:
        order = routing.normalise_order
        total = cast("Tensor", torch.linalg.vector_norm(weights, ord=order, dim=-1, keepdim=True))
    if routing.sum_epsilon:
        total = total + routing.sum_epsilon
    if routing.sum_floor:
        total = total.clamp(min=routing.sum_floor)
    return weights / total


def _sparsemixer(
    logits: Float[Tensor, "*batch experts"], routing: Routing
) -> tuple[Int[Tensor, "*batch k"], Float[Tensor, "*batch k"]]:
    """Liu, Gao and Chen, "Sparse Backpropagation for MoE Training" (2023), as it infers: no noise.

    Each choice in turn: the best expert left, weighed by a softmax over those whose logits lie near it.
    """
    left, chosen, weights = logits, list[Tensor](), list[Tensor]()
    threshold = 2 * (routing.jitter or 0.0)
    for _ in range(routing.top_k):
        best, index = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > threshold
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, index))
        chosen.append(index)
        left = left.scatter(-1, index, -torch.inf)
    return torch.cat(chosen, dim=-1), torch.cat(weights, dim=-1)
