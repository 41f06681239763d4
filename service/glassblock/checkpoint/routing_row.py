"""The row type of a router: from its logits to the weights of the chosen experts, as a config declares it."""

from dataclasses import dataclass

from glassblock.checkpoint.row_settings import Setting
from glassblock.numerics.routing import GroupScore, Scoring


@dataclass(frozen=True)
class RoutingRow:
    """The fields of `numerics.routing.Routing`, those that a config may declare as settings.

    How many experts a token goes to is the row's size `experts_per_token`.

    Attributes:
        scoring: What the logits become, as `numerics.routing.Scoring` names it.
        chosen_first: Whether the choice is made by the logits, and only the chosen are scored.
        normalise: Whether the weights of the chosen are divided by their sum.
        sum_epsilon: Added to that sum.
        sum_floor: The least that sum may be.
        normalise_order: p where the p-norm takes the place of the sum; null for no normalising.
        grouped: Whether experts are chosen within groups.
        groups: Into how many groups they are divided.
        kept_groups: How many groups they are chosen from.
        group_score: How groups are judged.
        scaling: Multiplies the weights at the end.
        wide_logits: Whether the router itself runs in float32.
        wide_scores: Whether the scores are in float32.
        rounded_weights: Whether the weights are cast to the dtype of the tokens before they multiply.
        weigh_input: Whether the weight multiplies what the expert reads.
        jitter: How near to the best an expert must be, under the scoring `sparsemixer` alone.
    """

    scoring: Setting[str] = Setting((), Scoring.SOFTMAX.value)
    chosen_first: bool = False
    normalise: Setting[bool] = Setting((), default=False)
    sum_epsilon: float = 0.0
    sum_floor: Setting[float] = Setting((), 0.0)
    normalise_order: Setting[float | None] | None = None
    grouped: Setting[bool] = Setting((), default=True)
    groups: Setting[float] = Setting((), 1.0)
    kept_groups: Setting[float] = Setting((), 1.0)
    group_score: GroupScore = GroupScore.MAX
    scaling: Setting[float] = Setting((), 1.0)
    wide_logits: bool = False
    wide_scores: bool = True
    rounded_weights: bool = False
    weigh_input: bool = False
    jitter: Setting[float] | None = None
