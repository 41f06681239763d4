"""Parameters, activations and operations of feed-forward networks, in plain whole numbers.

What is counted: every stored parameter; every element of every stage; the multiply-accumulates (MACs) of the matrix
products, two floating-point operations each. Not counted: activations, products of the branches, biases and norms,
which cost O(m) per token where a product costs O(d m). Counts of elements are sums over the stages, not a peak of
memory: what is alive at once depends on the engine.
"""

from dataclasses import dataclass
from fractions import Fraction

from glassblock.errors import InvalidValue

ELEMENT_COUNTS_ARE_NOT_PEAK_MEMORY = (
    "Element and byte counts are sums over the named stages. They are not peak memory: what is held at once depends "
    "on the engine, its kernels and what it frees."
)


@dataclass(frozen=True)
class StageBudget:
    """Elements of one stage, for one layer, and their bytes."""

    elements: int
    bytes: int


@dataclass(frozen=True)
class FeedForwardBudget:
    """The budget of `layers` equal feed-forward networks.

    Attributes:
        parameters: Of one network.
        hidden_elements: batch * tokens * d_ff: one branch of one layer. No parameter count depends on it.
        stages: Per captured stage, for one layer.
        activation_elements: Sum over the stages, for all layers.
        activation_bytes: The same in bytes.
        macs_per_token: Multiply-accumulates for one token in one layer.
        flops_per_token: Twice that.
        total_parameters: In all layers.
        total_flops: For all tokens of the batch in all layers.
        total_flops_per_token: For one token in all layers.
    """

    parameters: int
    hidden_elements: int
    stages: dict[str, StageBudget]
    activation_elements: int
    activation_bytes: int
    macs_per_token: int
    flops_per_token: int
    total_parameters: int
    total_flops: int
    total_flops_per_token: int


def feed_forward_budget(
    *,
    d_model: int,
    d_ff: int,
    gated: bool,
    batch: int,
    tokens: int,
    layers: int,
    element_bytes: int,
    bias: bool = False,
) -> FeedForwardBudget:
    """Everything that follows from the shape.

    Args:
        d_model: d, the model width.
        d_ff: m, the number of hidden units.
        gated: Three matrices rather than two.
        batch: Sequences.
        tokens: Tokens of each sequence.
        layers: Equal networks.
        element_bytes: Bytes of one activation.
        bias: Whether every matrix has a bias.

    Raises:
        InvalidValue: A number is not a whole number of at least 1.
    """
    _check_counts(batch=batch, tokens=tokens, layers=layers, element_bytes=element_bytes)
    parameters = feed_forward_parameters(d_model=d_model, d_ff=d_ff, gated=gated, bias=bias)
    macs = feed_forward_macs(d_model=d_model, d_ff=d_ff, gated=gated)
    rows = batch * tokens
    narrow, wide = rows * d_model, rows * d_ff
    elements = {"x": narrow, "normed": narrow}
    if gated:
        elements["gate"] = wide
    elements |= {"up": wide, "activated": wide}
    if gated:
        elements["hidden"] = wide
    elements |= {"down": narrow, "contribution": narrow, "output": narrow}
    total = layers * sum(elements.values())
    return FeedForwardBudget(
        parameters=parameters,
        hidden_elements=wide,
        stages={name: StageBudget(count, count * element_bytes) for name, count in elements.items()},
        activation_elements=total,
        activation_bytes=total * element_bytes,
        macs_per_token=macs,
        flops_per_token=2 * macs,
        total_parameters=layers * parameters,
        total_flops=2 * macs * rows * layers,
        total_flops_per_token=2 * macs * layers,
    )


def feed_forward_parameters(*, d_model: int, d_ff: int, gated: bool, bias: bool = False) -> int:
    """Stored numbers: 2 d m plain, 3 d m gated, and the biases of each matrix.

    >>> feed_forward_parameters(d_model=512, d_ff=2048, gated=False)
    2097152
    """
    _check_counts(d_model=d_model, d_ff=d_ff)
    branches = 2 if gated else 1
    return (branches + 1) * d_model * d_ff + (branches * d_ff + d_model if bias else 0)


def feed_forward_macs(*, d_model: int, d_ff: int, gated: bool) -> int:
    """Multiply-accumulates of the matrix products for one token: 2 d m plain, 3 d m gated."""
    return feed_forward_parameters(d_model=d_model, d_ff=d_ff, gated=gated)


def equal_parameter_width(plain_width: int) -> Fraction:
    """The gated width with as many weights as a plain network of `plain_width`: 2 m0 / 3, exactly (Shazeer 2020).

    >>> equal_parameter_width(16384)
    Fraction(32768, 3)
    """
    _check_counts(plain_width=plain_width)
    return Fraction(2 * plain_width, 3)


def round_up_to_multiple(width: Fraction | int, multiple_of: int) -> int:
    """The smallest multiple that is not below `width`.

    >>> round_up_to_multiple(equal_parameter_width(16384), 256)
    11008
    """
    _check_counts(multiple_of=multiple_of)
    if width <= 0:
        raise InvalidValue(f"the width is {width}", hint="Give a positive width.", field="width")
    return -(-Fraction(width) // multiple_of) * multiple_of


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        # Not isinstance: a bool is an int, and True layers is a mistake.
        if type(value) is not int or value < 1:
            raise InvalidValue(f"{name} is {value!r}", hint="Give a whole number of at least 1.", field=name)
