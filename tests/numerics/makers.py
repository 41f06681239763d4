"""Random norms, networks and wirings, and the oracles that closed forms are held against."""

from collections.abc import Callable

import torch
from glassblock.numerics.activations import activation_named, gating_named
from glassblock.numerics.block import Placement, Wiring
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.norms import NORM_KINDS, GainOrder, Norm, norm_kind_named
from torch import Tensor


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=generator(seed), dtype=torch.float64)).to(dtype)


def make_norm(name: str, d: int, *, seed: int = 0, dtype: torch.dtype = torch.float64, eps: float = 1e-3) -> Norm:
    """A norm of that kind with gains of both signs around one and, where there may be one, a bias."""
    kind = NORM_KINDS[name]
    has_gain = kind.gain is not GainOrder.NONE
    gain = random_tensor(d, seed=seed + 100, dtype=dtype) + (1.0 - kind.offset) if has_gain else None
    bias = random_tensor(d, seed=seed + 101, dtype=dtype) if kind.bias else None
    return Norm(kind, gain, bias, eps)


def unit_norm(name: str = "rms_noweight", *, eps: float = 0.0) -> Norm:
    """A norm without tensors: `rms_noweight` or `layernorm_noparam`."""
    return Norm(norm_kind_named(name), None, None, eps)


def make_feed_forward(
    d: int,
    m: int,
    *,
    activation: str = "silu",
    gating: str = "product",
    gated: bool = True,
    bias: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    limit: float | None = None,
    alpha: float | None = None,
) -> FeedForward:
    def tensor(*shape: int, offset: int) -> Tensor:
        return random_tensor(*shape, seed=seed + offset, dtype=dtype, scale=shape[-1] ** -0.5)

    return FeedForward(
        gate=tensor(m, d, offset=1) if gated else None,
        up=tensor(m, d, offset=2),
        down=tensor(d, m, offset=3),
        gate_bias=tensor(m, offset=4) if gated and bias else None,
        up_bias=tensor(m, offset=5) if bias else None,
        down_bias=tensor(d, offset=6) if bias else None,
        activation=activation_named(activation),
        gating=gating_named(gating, limit=limit, alpha=alpha),
    )


def make_wiring(
    placement: Placement, d: int, *, kind: str = "rms_llama", alpha: float = 1.0, beta: float = 1.0
) -> Wiring:
    roles = {
        Placement.PRE: ("input_norm",),
        Placement.POST: ("residual_norm",),
        Placement.SANDWICH: ("input_norm", "output_norm"),
        Placement.PARALLEL: ("input_norm",),
        Placement.BRANCH_OUTPUT: ("output_norm",),
    }[placement]
    norms = {role: make_norm(kind, d, seed=10 * number) for number, role in enumerate(roles)}
    return Wiring(placement, **norms, residual_scale=alpha, branch_scale=beta)


def central_differences(function: Callable[[Tensor], Tensor], x: Tensor, *, step: float = 1e-5) -> Tensor:
    """The Jacobian at one row of a function of rows, in float64; the moved rows go through it as one batch."""
    assert x.dtype == torch.float64
    moves = step * torch.eye(len(x), dtype=torch.float64)
    return (function(x + moves) - function(x - moves)).mT / (2 * step)
