"""How much likelier one model finds a text than another: the mean of paired differences, with its standard error.

Tokens of a text are no independent draws, and neither are their differences: what one token shows, its neighbours show
in part. The standard error takes the differences' own correlation along the text into account (Newey and West 1987, "A
Simple, Positive Semi-Definite, Heteroskedasticity and Autocorrelation Consistent Covariance Matrix", Bartlett weights).
It is of this text alone: another kind of text may differ by more.
"""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from glassblock.errors import InvalidValue


class PairedDifference(NamedTuple):
    """A mean difference.

    Attributes:
        mean: Of the differences, in float64.
        standard_error: Of that mean; None for fewer than two tokens.
        tokens: How many differences.
    """

    mean: float
    standard_error: float | None
    tokens: int


def paired_difference(first: Float[Tensor, "*batch tokens"], second: Float[Tensor, "*others"]) -> PairedDifference:
    """The mean of `first - second`, token by token.

    The standard error is the larger of the one for independent tokens and the one with the correlations of tokens up to
    4 (n / 100)^(2/9) places apart in one text (the lag of Newey and West 1994), whose sum may be negative by chance.

    Args:
        first: Log-likelihoods of the tokens of one or several texts.
        second: Of the same tokens under another model.

    Raises:
        InvalidValue: The shapes differ, or there is no token.
    """
    if first.shape != second.shape or first.numel() == 0:
        raise InvalidValue(
            f"{list(first.shape)} and {list(second.shape)} numbers are not in pairs",
            hint="Give one number for each token, of one text or of several of one length.",
            field="token_ids",
        )
    differences = first.double() - second.double()
    count = differences.numel()
    mean = differences.mean()
    if count < 2:
        return PairedDifference(float(mean), None, count)
    texts = (differences - mean).reshape(-1, differences.shape[-1])
    variance = texts.square().sum() / count
    lag = min(int(4 * (count / 100) ** (2 / 9)), texts.shape[-1] - 1)
    correlated = variance.clone()
    for apart in range(1, lag + 1):
        covariance = (texts[:, apart:] * texts[:, :-apart]).sum() / count
        correlated += 2 * (1 - apart / (lag + 1)) * covariance
    largest = max(float(variance), float(correlated))
    return PairedDifference(float(mean), (largest / (count - 1)) ** 0.5, count)
