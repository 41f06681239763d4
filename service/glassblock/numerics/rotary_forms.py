"""The forms of rotary frequencies, as configurations name them in `rope_parameters` or `rope_scaling`.

Every form is data whose fields carry the configuration's names; `form_frequencies` is the arithmetic. The plain
frequencies are theta^(-2i/dim) for pair i of dim/2.

    default        Su et al. 2021
    linear         divided by a factor: position interpolation (Chen et al. 2023)
    dynamic        a base that grows with the sequence beyond its limit: NTK-aware scaling
    yarn           low frequencies divided, high ones kept, a ramp between, and scaled attention (Peng et al. 2023)
    llama3         the same with a smooth step by wavelength (Llama 3.1)
    longrope       one searched factor for each pair, one set for short and one for long sequences (Ding et al. 2024)
    proportional   the first pairs of the whole head turned, the others at frequency zero (Gemma 4)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.errors import InvalidValue


@dataclass(frozen=True)
class DefaultForm:
    """theta^(-2i/dim)."""


@dataclass(frozen=True)
class LinearForm:
    """theta^(-2i/dim) / factor."""

    factor: float


@dataclass(frozen=True)
class DynamicForm:
    """A base that grows once the sequence is longer than `max_position_embeddings`."""

    factor: float
    max_position_embeddings: int


@dataclass(frozen=True)
class YarnForm:
    """Pairs are kept that turn more than `beta_fast` times in the original context, and divided below `beta_slow`.

    `attention_factor` is worked out where it is None; `truncate` rounds the ends of the ramp to whole pairs.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class Llama3Form:
    """Wavelengths above context / low are divided by the factor, those below context / high are kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LongRopeForm:
    """theta^(-2i/dim) over the pair's factor: the long ones once the sequence outgrows the original context."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float
    attention_factor: float | None = None


@dataclass(frozen=True)
class ProportionalForm:
    """theta^(-2i/dim) / factor for the first pairs of the whole head, zero for the others."""

    partial_rotary_factor: float
    factor: float = 1.0


RotaryForm = DefaultForm | LinearForm | DynamicForm | YarnForm | Llama3Form | LongRopeForm | ProportionalForm

ROTARY_FORMS: Mapping[str, type[RotaryForm]] = MappingProxyType(
    {
        "default": DefaultForm,
        "linear": LinearForm,
        "dynamic": DynamicForm,
        "yarn": YarnForm,
        "llama3": Llama3Form,
        "longrope": LongRopeForm,
        "proportional": ProportionalForm,
    }
)
_MAY_BE_ZERO = frozenset({"mscale", "mscale_all_dim", "partial_rotary_factor"})
_BEYOND = 2**53

# The rotary sections of a multimodal model agree where all tokens are text.
ROTARY_FORM_ALIASES: Mapping[str, str] = MappingProxyType({"su": "longrope", "mrope": "default"})


def rotary_form_named(
    name: str, parameters: Mapping[str, object], *, max_positions: int | None, field: str = "rope_parameters"
) -> RotaryForm:
    """The form of that name, with its numbers out of a configuration.

    Only the keys that the form has are read. Derived as transformers derives them where a configuration leaves them
    out: `original_max_position_embeddings` is `max_positions`, and the factor of YaRN and LongRoPE is their ratio.

    Args:
        name: A key of `ROTARY_FORMS` or of `ROTARY_FORM_ALIASES`.
        parameters: The configuration's rotary parameters, flat.
        max_positions: The configuration's `max_position_embeddings`; None where it has none.
        field: What errors name.

    Raises:
        InvalidValue: The name is unknown, or a number is missing or is none.
    """
    form = ROTARY_FORMS.get(ROTARY_FORM_ALIASES.get(name, name))
    if form is None:
        raise InvalidValue(
            f"unknown form of rotary positions {name!r}",
            hint="Use one of the known names.",
            field=field,
            known=(*ROTARY_FORMS, *ROTARY_FORM_ALIASES),
        )
    given = _present(parameters)
    if max_positions is not None:
        given = {"original_max_position_embeddings": max_positions, **given, "max_position_embeddings": max_positions}
        original = given["original_max_position_embeddings"]
        if form in {YarnForm, LongRopeForm} and "factor" not in given and isinstance(original, int) and original > 0:
            given["factor"] = max_positions / original
    arguments: dict[str, object] = {}
    for entry in fields(form):
        if entry.name in given:
            arguments[entry.name] = _number(given[entry.name], kind=entry.type, name=entry.name, field=field)
        elif entry.default is MISSING:
            raise InvalidValue(
                f"rotary positions of the form {name!r} need {entry.name}",
                hint="Give it, as the model's configuration states it.",
                field=f"{field}.{entry.name}",
            )
    return cast("Callable[..., RotaryForm]", form)(**arguments)


def form_frequencies(form: RotaryForm, dim: int, theta: float, *, tokens: int | None) -> Float[Tensor, " half"]:
    """The angle per position of each of dim/2 pairs, in float32.

    Args:
        form: The rule.
        dim: How many channels are turned, or one less (`numerics.rotary.Rotary.over`).
        theta: The base.
        tokens: The highest position plus one; None for a sequence in bounds.
    """
    base = _grown_base(form, dim, theta, tokens) if isinstance(form, DynamicForm) else theta
    periods = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    frequencies = 1.0 / periods
    match form:
        case DefaultForm() | DynamicForm():
            return frequencies
        case LinearForm():
            return frequencies / form.factor
        case YarnForm():
            kept = _yarn_kept(form, dim, theta)
            return 1.0 / (form.factor * periods) * (1 - kept) + frequencies * kept
        case Llama3Form():
            return _llama3(form, frequencies)
        case LongRopeForm():
            long = tokens is not None and tokens > form.original_max_position_embeddings
            return 1.0 / (torch.tensor(form.long_factor if long else form.short_factor) * periods)
        case ProportionalForm():
            pairs = torch.arange(dim // 2)
            turned = int(form.partial_rotary_factor * dim // 2)
            return torch.where(pairs < turned, frequencies, 0.0) / form.factor


def form_scaling(form: RotaryForm) -> float:
    """What cosine and sine are multiplied by: 1 but for YaRN and LongRoPE."""
    if not isinstance(form, YarnForm | LongRopeForm):
        return 1.0
    if form.attention_factor is not None:
        return form.attention_factor
    if isinstance(form, LongRopeForm):
        if form.factor <= 1.0:
            return 1.0
        return math.sqrt(1 + math.log(form.factor) / math.log(form.original_max_position_embeddings))
    if form.mscale and form.mscale_all_dim:
        return yarn_scale(form.factor, form.mscale) / yarn_scale(form.factor, form.mscale_all_dim)
    return yarn_scale(form.factor)


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """0.1 mscale ln(factor) + 1 for a factor above one (Peng et al. 2023, equation 22; mscale is DeepSeek's)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _grown_base(form: DynamicForm, dim: int, theta: float, tokens: int | None) -> float | Tensor:
    limit, power = form.max_position_embeddings, dim / (dim - 2)
    if tokens is None or tokens <= limit:
        return theta * (form.factor * limit / limit - (form.factor - 1)) ** power
    # Models compute the base of a longer sequence from a tensor, so in float32.
    return theta * ((form.factor * torch.tensor(tokens) / limit) - (form.factor - 1)) ** power


def _yarn_kept(form: YarnForm, dim: int, theta: float) -> Float[Tensor, " half"]:
    """How far each pair keeps its frequency: a ramp from one to zero."""
    low, high = (
        dim * math.log(form.original_max_position_embeddings / (beta * 2 * math.pi)) / (2 * math.log(theta))
        for beta in (form.beta_fast, form.beta_slow)
    )
    if form.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    return 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def _llama3(form: Llama3Form, frequencies: Tensor) -> Float[Tensor, " half"]:
    context, low, high = form.original_max_position_embeddings, form.low_freq_factor, form.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    divided = torch.where(wavelengths > context / low, frequencies / form.factor, frequencies)
    smooth = (context / wavelengths - low) / (high - low)
    between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return torch.where(between, (1 - smooth) * divided / form.factor + smooth * divided, divided)


def _present(parameters: Mapping[str, object]) -> dict[str, object]:
    """Without the nulls that configurations write for what they leave out."""
    return {key: value for key, value in parameters.items() if value is not None}


def _number(value: object, *, kind: object, name: str, field: str) -> object:
    if kind == tuple[float, ...]:
        if isinstance(value, list | tuple):
            numbers = cast("Sequence[object]", value)
            return tuple(_number(each, kind=float, name=name, field=field) for each in numbers)
    elif kind is bool:
        if isinstance(value, bool):
            return value
    elif isinstance(value, int | float) and not isinstance(value, bool) and _in_range(value, name):
        return value
    raise InvalidValue(
        f"{name} of the rotary positions is {value!r:.80}",
        hint="Give a positive number (a list of them for the factors of LongRoPE, true or false for `truncate`).",
        field=f"{field}.{name}",
    )


def _in_range(value: int | float, name: str) -> bool:
    """Nearly all of them divide something; beyond the bound, a sum with 1 loses the 1. NaN is outside."""
    return 0 < value < _BEYOND or (value == 0 and name in _MAY_BE_ZERO)
