"""Activation functions and the ways in which a gate meets the up projection.

`ACTIVATIONS` holds one row per arithmetic, not per function: three spellings of tanh-GELU are one function in exact
arithmetic (`formula`) and three different roundings. Rows that carry a name of transformers' `ACT2FN` give the same
bits as it does. Learned ones need tensors of the checkpoint: `LEARNED_ACTIVATIONS`; others (`prelu`) are refused.

Names of gated units follow Shazeer, "GLU Variants Improve Transformer" (2020): GLU gates with the sigmoid, ReGLU with
ReLU, GEGLU with the erf form of GELU, SwiGLU with SiLU, the bilinear unit with the identity.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from glassblock.errors import InvalidValue


@dataclass(frozen=True)
class Activation:
    """An elementwise activation.

    Attributes:
        name: The arithmetic, as `ACTIVATIONS` lists it.
        function: Elementwise, any shape, keeps the dtype.
        odd: Whether a(-g) == -a(g): then nothing in the weights tells the gate from the up projection.
        formula: Name of the function in exact arithmetic; two rows of one formula differ by rounding only.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    odd: bool
    formula: str

    def __call__(self, values: Tensor) -> Tensor:
        """Apply the function elementwise."""
        return self.function(values)


def activation_named(name: str, *, swish_beta: float | None = None, field: str = "activation") -> Activation:
    """The activation of that name or alias.

    Args:
        name: A key of `ACTIVATIONS` or of `ACTIVATION_ALIASES`.
        swish_beta: For `silu` alone: x * sigmoid(beta * x) (Ramachandran, Zoph and Le 2017). None leaves beta at 1.
        field: The request field that errors name.

    Raises:
        InvalidValue: The name is unknown, or beta is not finite, or goes with another activation.
    """
    row = ACTIVATIONS.get(ACTIVATION_ALIASES.get(name, name))
    if row is None:
        raise InvalidValue(
            f"unknown activation {name!r}",
            hint="Use one of the known names; a learned activation comes with its checkpoint alone.",
            field=field,
            known=(*ACTIVATIONS, *ACTIVATION_ALIASES),
        )
    if swish_beta is None:
        return row
    if row.name != "silu":
        raise InvalidValue(
            f"a Swish beta was given for the activation {name!r}, which has none",
            hint="Drop the beta, or use the activation silu.",
            field=field,
        )
    return _swish(swish_beta, field=field)


def _swish(beta: float, *, field: str) -> Activation:
    if not math.isfinite(beta):
        raise InvalidValue(f"the Swish beta is {beta}, which is not finite", hint="Give a finite number.", field=field)
    if beta == 1.0:
        return ACTIVATIONS["silu"]

    def function(values: Tensor) -> Tensor:
        return values * torch.sigmoid(beta * values)

    # With beta = 0 the sigmoid is 1/2 everywhere, and x/2 is odd.
    name = f"swish(beta={beta:g})"
    return Activation(name, function, odd=beta == 0.0, formula=name)


# Each function repeats the order of operations of its namesake, which is what decides the bits.


def _gelu_tanh(values: Tensor) -> Tensor:
    return functional.gelu(values, approximate="tanh")


def _gelu_new(values: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi) * (values + 0.044715 * torch.pow(values, 3.0))
    return 0.5 * values * (1.0 + torch.tanh(inner))


def _gelu_python_tanh(values: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi) * (values + 0.044715 * torch.pow(values, 3.0))
    return values * 0.5 * (1.0 + torch.tanh(inner))


def _gelu_fast(values: Tensor) -> Tensor:
    return 0.5 * values * (1.0 + torch.tanh(values * 0.7978845608 * (1.0 + 0.044715 * values * values)))


def _gelu_bloom(values: Tensor) -> Tensor:
    return values * 0.5 * (1.0 + torch.tanh(0.79788456 * values * (1 + 0.044715 * values * values)))


def _gelu_python(values: Tensor) -> Tensor:
    return values * 0.5 * (1.0 + torch.erf(values / math.sqrt(2.0)))


def _gelu_10(values: Tensor) -> Tensor:
    return torch.clip(functional.gelu(values), -10, 10)


def _quick_gelu(values: Tensor) -> Tensor:
    return values * torch.sigmoid(1.702 * values)


def _relu2(values: Tensor) -> Tensor:
    return torch.square(functional.relu(values))


def _laplace(values: Tensor) -> Tensor:
    return 0.5 * (1.0 + torch.erf((values - 0.707107).div(0.282095 * math.sqrt(2.0))))


def _sqrtsoftplus(values: Tensor) -> Tensor:
    return functional.softplus(values).sqrt()


def _identity(values: Tensor) -> Tensor:
    return values


def _row(
    name: str, function: Callable[[Tensor], Tensor], *, odd: bool = False, formula: str | None = None
) -> tuple[str, Activation]:
    return name, Activation(name, function, odd=odd, formula=formula or name)


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    dict(
        (
            _row("silu", functional.silu),
            _row("sigmoid", torch.sigmoid),
            _row("relu", functional.relu),
            _row("gelu", functional.gelu),
            _row("gelu_python", _gelu_python, formula="gelu"),
            _row("gelu_tanh", _gelu_tanh),
            _row("gelu_new", _gelu_new, formula="gelu_tanh"),
            _row("gelu_python_tanh", _gelu_python_tanh, formula="gelu_tanh"),
            _row("gelu_fast", _gelu_fast, formula="gelu_tanh"),
            _row("gelu_bloom", _gelu_bloom, formula="gelu_tanh"),
            _row("gelu_10", _gelu_10),
            _row("quick_gelu", _quick_gelu),
            _row("relu2", _relu2),
            _row("relu6", functional.relu6),
            _row("leaky_relu", functional.leaky_relu),
            _row("hardswish", functional.hardswish),
            _row("mish", functional.mish),
            _row("laplace", _laplace),
            _row("sqrtsoftplus", _sqrtsoftplus),
            _row("identity", _identity, odd=True),
            _row("tanh", torch.tanh, odd=True),
        )
    )
)

# Other spellings of the very same arithmetic, in configurations and engines.
ACTIVATION_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "swish": "silu",
        "swiglu": "silu",
        "glu": "sigmoid",
        "reglu": "relu",
        "geglu": "gelu",
        "bilinear": "identity",
        "linear": "identity",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_accurate": "gelu_new",
        "bloom_gelu": "gelu_bloom",
        "quickgelu": "quick_gelu",
        "relu_squared": "relu2",
        "squared_relu": "relu2",
        "sqrelu": "relu2",
    }
)


def xielu(*, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Activation:
    """xIELU with its learned numbers (Huang and Schlag 2024, "Deriving Activation Functions via Integration").

    For x > 0: p x^2 + beta x, else n (exp(min(x, eps)) - 1 - x) + beta x, with p = softplus(alpha_p) and
    n = beta + softplus(alpha_n); each a tensor of one number, as the checkpoint stores it.
    """

    def function(values: Tensor) -> Tensor:
        rising, falling, linear, edge = (number.to(values) for number in (alpha_p, alpha_n, beta, eps))
        positive = functional.softplus(rising)
        negative = linear + functional.softplus(falling)
        return torch.where(
            values > 0,
            positive * values * values + linear * values,
            (torch.expm1(torch.min(values, edge)) - values) * negative + linear * values,
        )

    return Activation("xielu", function, odd=False, formula="xielu")


LEARNED_ACTIVATIONS: Mapping[str, Callable[..., Activation]] = MappingProxyType({"xielu": xielu})
"""Activations with numbers of their own in the checkpoint, by name."""


def learned_activation(name: str, tensors: Mapping[str, Tensor]) -> Activation:
    """The learned activation of that name with its tensors, by parameter.

    Raises:
        InvalidValue: The name is unknown, or a tensor is missing or holds more than one number.
    """
    build = LEARNED_ACTIVATIONS.get(name)
    if build is None:
        raise InvalidValue(f"unknown learned activation {name!r}", field="activation", known=tuple(LEARNED_ACTIVATIONS))
    needed = tuple(key for key in build.__annotations__ if key != "return")
    for parameter in needed:
        if parameter not in tensors or tensors[parameter].numel() != 1:
            raise InvalidValue(
                f"the activation {name} needs {parameter}, one number of the checkpoint", field=parameter
            )
    return build(**{parameter: tensors[parameter] for parameter in needed})


@dataclass(frozen=True)
class Gating:
    """How an activated gate and the up projection make the hidden units.

    Attributes:
        name: A key of `GATINGS`.
        combine: (gate, up, activation) -> (activated, hidden), elementwise on `[*batch, m]`: `gate` and `up` as the
            projections return them, `activated` the factor that the gate contributes.
        up_sign_symmetric: Whether hidden is odd in `up`, so that flipping a row of the up projection together with
            its column of `down` changes nothing. The sign test for exchanged gates stands on this.
        limit: The clamp, where there is one.
        alpha: The factor inside the sigmoid, where the gating brings its own activation.
    """

    name: str
    combine: Callable[[Tensor, Tensor, Activation], tuple[Tensor, Tensor]]
    up_sign_symmetric: bool
    limit: float | None = None
    alpha: float | None = None


def product() -> Gating:
    """h = a(g) * u (Shazeer 2020)."""

    def combine(gate: Tensor, up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
        activated = activation(gate)
        return activated, activated * up

    return Gating("product", combine, up_sign_symmetric=True)


def clipped(values: Tensor, limit: float) -> Tensor:
    """Values from -limit to limit. A limit that their type cannot hold is infinite in it, and bounds nothing."""
    limit = _in_type(limit, values.dtype)
    return values.clamp(-limit, limit)


def _capped(values: Tensor, limit: float) -> Tensor:
    return values.clamp(max=_in_type(limit, values.dtype))


def _in_type(limit: float, dtype: torch.dtype) -> float:
    return limit if limit <= torch.finfo(dtype).max else math.inf


def clamped_before(limit: float) -> Gating:
    """h = a(min(g, limit)) * clip(u, -limit, limit): DeepSeek-V4, GLM-5-next, HY-V4, Megatron's clamp value."""

    def combine(gate: Tensor, up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
        activated = activation(_capped(gate, limit))
        return activated, activated * clipped(up, limit)

    return Gating("clamped_before", combine, up_sign_symmetric=True, limit=limit)


def clamped_after(limit: float) -> Gating:
    """h = min(a(g), limit) * clip(u, -limit, limit): Step-3.7."""

    def combine(gate: Tensor, up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
        activated = _capped(activation(gate), limit)
        return activated, activated * clipped(up, limit)

    return Gating("clamped_after", combine, up_sign_symmetric=True, limit=limit)


def swiglu_oai(alpha: float, limit: float) -> Gating:
    """h = (clip(u, -limit, limit) + 1) * g' * sigmoid(alpha * g') with g' = min(g, limit): gpt-oss, MiniMax-M3.

    The activation is part of the gating; the one that is passed in is not used, as in those models.
    """

    def combine(gate: Tensor, up: Tensor, _activation: Activation) -> tuple[Tensor, Tensor]:
        gate = _capped(gate, limit)
        activated = gate * torch.sigmoid(gate * alpha)
        return activated, (clipped(up, limit) + 1) * activated

    return Gating("swiglu_oai", combine, up_sign_symmetric=False, limit=limit, alpha=alpha)


@dataclass(frozen=True)
class GatingRow:
    """How to build a gating, and the names of the numbers it needs."""

    build: Callable[..., Gating]
    needs: tuple[str, ...]


GATINGS: Mapping[str, GatingRow] = MappingProxyType(
    {
        "product": GatingRow(product, ()),
        "clamped_before": GatingRow(clamped_before, ("limit",)),
        "clamped_after": GatingRow(clamped_after, ("limit",)),
        "swiglu_oai": GatingRow(swiglu_oai, ("alpha", "limit")),
    }
)


def gating_named(name: str, *, limit: float | None = None, alpha: float | None = None, field: str = "gating") -> Gating:
    """The gating of that name with its numbers, which are never guessed.

    Raises:
        InvalidValue: The name is unknown; a number it needs is missing or not a positive finite one; or a number is
            given that it does not take.
    """
    row = GATINGS.get(name)
    if row is None:
        raise InvalidValue(
            f"unknown gating {name!r}", hint="Use one of the known names.", field=field, known=tuple(GATINGS)
        )
    given = {key: value for key, value in (("alpha", alpha), ("limit", limit)) if value is not None}
    if set(given) != set(row.needs):
        needs = " and ".join(row.needs) or "no number"
        got = " and ".join(given) or "none"
        raise InvalidValue(
            f"the gating {name!r} takes {needs}, and {got} was given",
            hint="Give exactly the numbers it takes, as the model's configuration states them.",
            field=field,
        )
    for key, value in given.items():
        if not (math.isfinite(value) and value > 0):
            raise InvalidValue(
                f"the {key} of the gating {name!r} is {value}", hint="Give a positive finite number.", field=field
            )
    return row.build(**given)
