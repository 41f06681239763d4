"""A linear map in the dtype of what it reads."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def apply_linear(
    values: Float[Tensor, "*batch in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "*batch out"]:
    """values @ weight.T + bias, in the dtype of `values`.

    One matrix is cast at a time, so that a wide computation never holds a wide copy of all the weights.
    """
    return functional.linear(values, weight.to(values.dtype), None if bias is None else bias.to(values.dtype))
