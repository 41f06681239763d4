"""RMSNorm and LayerNorm, in every order of operations that released models use.

`rms_norm` and `layer_norm` are the plain functions. `NORM_KINDS` lists the arithmetics of model families: each gives
the bits of the module it names, in bfloat16, float16 and float32. They differ by where the gain meets the cast back
to the input's dtype, by an offset added to the stored gain, and by the kernel; in exact arithmetic there are only two
functions. Where a family would fall back to float32 on float64 input, these stay in float64.

What a family's arithmetic does at the edge of a dtype is kept as it is: the mean square of a float32 row of 1e30 is
infinite, and such a row comes out as zeros, here as there. `norm_statistics` says when that happens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from glassblock.errors import InvalidValue


def rms_norm(
    x: Float[Tensor, "*batch d"], gain: Float[Tensor, " d"] | None, eps: float, *, offset: float = 0.0
) -> Float[Tensor, "*batch d"]:
    """x / sqrt(mean(x^2) + eps) * (offset + gain), in float32 at least and cast back at the end.

    Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). Without a gain the offset is not used.

    >>> rms_norm(torch.tensor([1.0, 3.0], dtype=torch.float64), None, 0.0)
    tensor([0.4472, 1.3416], dtype=torch.float64)
    """
    wide = x.to(_at_least_float32(x.dtype))
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    if gain is not None:
        normed = normed * (offset + gain.to(wide.dtype))
    return normed.to(x.dtype)


def layer_norm(
    x: Float[Tensor, "*batch d"],
    gain: Float[Tensor, " d"] | None,
    bias: Float[Tensor, " d"] | None,
    eps: float,
    *,
    offset: float = 0.0,
) -> Float[Tensor, "*batch d"]:
    """(x - mean) / sqrt(variance + eps) * (offset + gain) + bias, with the biased variance.

    Ba, Kiros and Hinton, "Layer Normalization" (2016). In float32 at least, cast back at the end; the variance is
    the mean of the squared deviations, not a difference of moments. Without a gain the offset is not used.

    >>> layer_norm(torch.tensor([1.0, 3.0], dtype=torch.float64), None, None, 0.0)
    tensor([-1.,  1.], dtype=torch.float64)
    """
    wide = x.to(_at_least_float32(x.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    if gain is not None:
        normed = normed * (offset + gain.to(wide.dtype))
    if bias is not None:
        normed = normed + bias.to(wide.dtype)
    return normed.to(x.dtype)


class GainOrder(StrEnum):
    """Where the gain is multiplied in, relative to the cast back to the input's dtype."""

    NONE = "none"  # there is no gain
    AFTER_CAST = "after_cast"  # cast to the input's dtype, then multiply: a wider gain widens the result
    WEIGHT_DTYPE = "weight_dtype"  # cast to the gain's dtype if that is half, then multiply
    BEFORE_CAST = "before_cast"  # multiply in float32, then cast
    FUSED = "fused"  # inside `torch.nn.functional.layer_norm`


@dataclass(frozen=True)
class NormArithmetic:
    """One order of operations.

    Attributes:
        name: A key of `NORM_KINDS`.
        centred: LayerNorm (subtracts the mean) rather than RMSNorm.
        gain: Where the gain is multiplied in.
        offset: Added to the stored gain.
        initial: What the models' own code begins stored gains with.
        bias: Whether a bias may be stored.
        power: Whether the root is written as a power of -1/2 rather than as `rsqrt`. PyTorch computes both alike.
        formula: The arithmetic in words of code, for people.
    """

    name: str
    centred: bool
    gain: GainOrder
    formula: str
    offset: float = 0.0
    initial: float = 1.0
    bias: bool = False
    power: bool = False


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm with its tensors: call it on `[*batch, d]`.

    The result has the input's dtype, but for two kinds of gain, as in those models: under `AFTER_CAST` and
    `WEIGHT_DTYPE` a gain wider than the input widens it, and under `WEIGHT_DTYPE` a half gain narrows it, float64
    included. Cast the norm (`to`) where its tensors should not decide.

    Attributes:
        kind: The arithmetic.
        gain: `[d]` as stored, without the arithmetic's offset. None exactly where the kind has no gain.
        bias: `[d]` as stored; None where there is none.
        eps: Added to the mean square or the variance, under the root.

    Raises:
        InvalidValue: `eps` is negative or not finite, or the tensors are not those the kind has.
    """

    kind: NormArithmetic
    gain: Tensor | None
    bias: Tensor | None
    eps: float

    def __post_init__(self) -> None:
        check_eps(self.eps)
        if (self.gain is None) != (self.kind.gain is GainOrder.NONE):
            has, given = ("a", "none") if self.gain is None else ("no", "one")
            raise InvalidValue(
                f"a norm of kind {self.kind.name!r} has {has} gain, and {given} was given",
                hint="Give a gain exactly where the kind has one.",
                field="gain",
            )
        if self.bias is not None and not self.kind.bias:
            raise InvalidValue(
                f"a norm of kind {self.kind.name!r} has no bias, and one was given",
                hint="Drop the bias, or use a kind that has one.",
                field="bias",
            )
        for name, tensor in (("gain", self.gain), ("bias", self.bias)):
            if tensor is not None and (tensor.ndim != 1 or tensor.numel() == 0 or not tensor.is_floating_point()):
                raise InvalidValue(
                    f"the {name} of a norm has shape {list(tensor.shape)} and dtype {tensor.dtype}",
                    hint="Give one floating-point number per channel, on one axis.",
                    field=name,
                )
        if self.gain is not None and self.bias is not None and self.gain.shape != self.bias.shape:
            raise InvalidValue(
                f"the gain has {self.gain.numel()} channels and the bias {self.bias.numel()}",
                hint="Give one number per channel in both.",
                field="bias",
            )

    def __call__(self, x: Float[Tensor, "*batch d"]) -> Tensor:
        """Normalise the last axis of `x` in the kind's arithmetic.

        Raises:
            InvalidValue: The last axis does not have the norm's width.
        """
        if self.width is not None and x.shape[-1:] != (self.width,):
            raise InvalidValue(
                f"the norm has {self.width} channels and the tensor has shape {list(x.shape)}",
                hint="The last axis is the width.",
                field="x",
            )
        if not self.kind.centred:
            return _rms(x, self)
        if self.kind.gain is GainOrder.BEFORE_CAST:
            return _layer_stepwise(x, self)
        return _layer_fused(x, self)

    @property
    def width(self) -> int | None:
        """Number of channels; None where no tensor fixes it."""
        return None if self.gain is None else self.gain.numel()

    def to(self, dtype: torch.dtype) -> "Norm":
        """The same norm with its tensors cast, as an engine holds them that runs in `dtype`."""
        if all(tensor is None or tensor.dtype is dtype for tensor in (self.gain, self.bias)):
            return self
        return replace(
            self,
            gain=None if self.gain is None else self.gain.to(dtype),
            bias=None if self.bias is None else self.bias.to(dtype),
        )


def _rms(x: Tensor, norm: Norm) -> Tensor:
    kind, gain = norm.kind, norm.gain
    wide = x.to(_at_least_float32(x.dtype))
    mean_square = wide.pow(2).mean(-1, keepdim=True) + norm.eps
    normed = wide * (mean_square.pow(-0.5) if kind.power else mean_square.rsqrt())
    if gain is None:
        return normed.to(x.dtype)
    if kind.gain is GainOrder.BEFORE_CAST:
        return (_offset(gain.to(torch.promote_types(gain.dtype, wide.dtype)), kind) * normed).to(x.dtype)
    if kind.gain is GainOrder.AFTER_CAST:
        return _offset(gain, kind) * normed.to(x.dtype)
    half = gain.dtype in {torch.float16, torch.bfloat16}
    return _offset(gain, kind) * (normed.to(gain.dtype) if half else normed)


def _layer_stepwise(x: Tensor, norm: Norm) -> Tensor:
    wide = x.to(_at_least_float32(x.dtype))
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    normed = (wide - mean) * (variance + norm.eps).rsqrt()
    if norm.gain is not None:
        normed = _offset(norm.gain.to(wide.dtype), norm.kind) * normed
    if norm.bias is not None:
        normed = normed + norm.bias.to(wide.dtype)
    return normed.to(x.dtype)


def _layer_fused(x: Tensor, norm: Norm) -> Tensor:
    shape = x.shape[-1:]
    if norm.gain is None:
        wide = x.to(_at_least_float32(x.dtype))
        return functional.layer_norm(wide, shape, None, None, norm.eps).to(x.dtype)
    # Widening loses nothing, and happens before the offset is added, which rounds in the dtype it is added in.
    common = torch.promote_types(x.dtype, norm.gain.dtype)
    gain = _offset(norm.gain.to(common), norm.kind)
    bias = None if norm.bias is None else norm.bias.to(common)
    # Kernels refuse mixed dtypes, but for half rows under float32 tensors on a CPU, which have a kernel with a rounding
    # of its own.
    mixed = x.is_cpu and common is torch.float32
    return functional.layer_norm(x if mixed else x.to(common), shape, gain, bias, norm.eps).to(x.dtype)


def _offset(gain: Tensor, kind: NormArithmetic) -> Tensor:
    return gain + kind.offset if kind.offset else gain


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _rms_row(
    name: str, gain: GainOrder, formula: str, *, offset: float = 0.0, initial: float = 1.0, power: bool = False
) -> tuple[str, NormArithmetic]:
    return name, NormArithmetic(
        name, centred=False, gain=gain, formula=formula, offset=offset, initial=initial, power=power
    )


def _layer_row(
    name: str, gain: GainOrder, formula: str, *, offset: float = 0.0, bias: bool = False
) -> tuple[str, NormArithmetic]:
    return name, NormArithmetic(name, centred=True, gain=gain, formula=formula, offset=offset, bias=bias)


# Below, n is the normed row in float32 and w the gain as stored.
NORM_KINDS: Mapping[str, NormArithmetic] = MappingProxyType(
    dict(
        (
            _rms_row("rms_llama", GainOrder.AFTER_CAST, "w * cast(n)"),
            _rms_row("rms_f32mul", GainOrder.BEFORE_CAST, "cast(w * n)"),
            _rms_row("rms_plus1", GainOrder.BEFORE_CAST, "cast(n * (1 + w))", offset=1.0, initial=0.0),
            _rms_row("rms_f32mul_pow", GainOrder.BEFORE_CAST, "cast(x * (mean(x^2) + eps)^-0.5 * w)", power=True),
            _rms_row("rms_t5", GainOrder.WEIGHT_DTYPE, "w * cast(n, to w's dtype if w is half)"),
            _rms_row("rms_chatglm", GainOrder.BEFORE_CAST, "cast(w * n)"),
            _rms_row("rms_noweight", GainOrder.NONE, "cast(n)"),
            _layer_row("layernorm", GainOrder.FUSED, "layer_norm(x, w, b)", bias=True),
            _layer_row("layernorm_nobias", GainOrder.FUSED, "layer_norm(x, w)"),
            _layer_row("layernorm_cohere", GainOrder.BEFORE_CAST, "cast(w * n), n centred"),
            _layer_row("layernorm_1p", GainOrder.FUSED, "layer_norm(x, w + 1, b)", offset=1.0, bias=True),
            _layer_row("layernorm_noparam", GainOrder.NONE, "cast(layer_norm(x in float32))"),
        )
    )
)


def norm_kind_named(name: str, *, field: str = "norm_kind") -> NormArithmetic:
    """The arithmetic of that name.

    Raises:
        InvalidValue: The name is unknown.
    """
    kind = NORM_KINDS.get(name)
    if kind is None:
        raise InvalidValue(
            f"unknown norm {name!r}", hint="Use one of the known names.", field=field, known=tuple(NORM_KINDS)
        )
    return kind


def check_eps(eps: float, *, field: str = "eps") -> None:
    """Refuse an epsilon that no norm can have.

    Raises:
        InvalidValue: It is negative or not finite. Zero passes: `check_norm_defined` decides whether the rows allow it.
    """
    if not (math.isfinite(eps) and eps >= 0):
        raise InvalidValue(f"eps is {eps}", hint="Give a finite number that is not negative.", field=field)


def check_norm_defined(x: Float[Tensor, "*batch d"], norm: Norm, *, field: str = "x") -> None:
    """Refuse rows on which the norm divides by zero.

    That is, in the norm's own arithmetic: eps is zero (or vanishes in float32) and the row is all zero, or so small
    that its squares vanish; for LayerNorm, the row is constant.

    Raises:
        InvalidValue: Naming the first such row by its index.
    """
    wide = x.to(_at_least_float32(x.dtype))
    eps = torch.tensor(norm.eps, dtype=wide.dtype)
    if eps > 0 or wide.numel() == 0:
        return
    deviation = wide - wide.mean(-1, keepdim=True) if norm.kind.centred else wide
    vanishing = deviation.square().mean(-1) == 0
    if norm.kind.centred:
        # The rounded mean of equal numbers need not be that number, so deviations of a constant row may not vanish.
        vanishing |= (wide == wide[..., :1]).all(-1)
    rows = vanishing.nonzero()
    if len(rows) == 0:
        return
    index = cast("list[int]", rows[0].tolist())
    what = "does not vary" if norm.kind.centred else "has no square above zero"
    raise InvalidValue(
        f"row {index} {what}, so with eps = {norm.eps:g} the norm divides by zero",
        hint="Use an eps above zero, or leave that row out.",
        field=field,
    )
