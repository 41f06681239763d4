"""Dense Jacobians of residual blocks, for widths at which d^2 numbers a row are cheap.

With A the Jacobian of the sublayer where it is evaluated, J_N that of a norm, alpha and beta the scales of the wiring:

    PRE             alpha I + beta A J_N(x)
    POST            J_N(z) (alpha I + beta A),  z = alpha x + beta F(x)
    SANDWICH        alpha I + beta J_N'(F(N(x))) A J_N(x)
    PARALLEL        alpha I + beta A J_N(x) + the other branch's Jacobian
    BRANCH_OUTPUT   alpha I + beta J_N'(F(x)) A

Where something stands inside that these products do not name (a norm of the hidden units, multipliers inside the
network, a gain on its branch), the rows are pulled back through the block itself by autograd.

The order of the factors is part of the answer: A J_N and J_N A differ even for a diagonal A, unless it is scalar.
Computed in float32 at least; in float64 where any tensor is.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from glassblock.errors import InvalidValue
from glassblock.numerics.block import apply_sublayer, check_sublayer, common_dtype, residual_output, residual_stream
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.norm_jacobians import norm_jacobian
from glassblock.numerics.wiring import Placement, Wiring


def residual_jacobian(
    x: Float[Tensor, "*batch d"],
    sublayer: Float[Tensor, "out in"] | FeedForward,
    wiring: Wiring,
    *,
    other: Float[Tensor, "*batch d d"] | None = None,
) -> Float[Tensor, "*batch d d"]:
    """The dense Jacobian of the block's output by its input, for each row.

    Args:
        x: The residual stream that enters.
        sublayer: A matrix A, for F(n) = A n, or a feed-forward network.
        wiring: Norms and residual add.
        other: The Jacobian of the other branch; PARALLEL only.

    Raises:
        InvalidValue: `other` was given for another placement, or the sublayer is not of the width of `x`.
    """
    if other is not None and wiring.placement is not Placement.PARALLEL:
        raise InvalidValue(
            f"the placement {wiring.placement.value!r} has no second branch beside this one",
            hint="Leave `other` out, or use the placement 'parallel'.",
            field="other",
        )
    check_sublayer(x, sublayer)
    dtype = common_dtype(x, sublayer, wiring)
    x, wiring = x.to(dtype), wiring.to(dtype)
    plain = isinstance(sublayer, Tensor) or sublayer.neuronwise
    if not plain or wiring.branch_gain is not None:
        jacobian = _by_autograd(x, sublayer, wiring)
        return jacobian if other is None else jacobian + other.to(dtype)
    jacobian = wiring.branch_scale * _branch_jacobian(x, sublayer, wiring)
    jacobian = jacobian + wiring.residual_scale * torch.eye(x.shape[-1], dtype=dtype, device=x.device)
    if other is not None:
        jacobian = jacobian + other.to(dtype)
    if wiring.residual_norm is None:
        return jacobian
    return norm_jacobian(residual_stream(x, sublayer, wiring), wiring.residual_norm) @ jacobian


def feed_forward_jacobian(n: Float[Tensor, "*batch d"], feed_forward: FeedForward) -> Float[Tensor, "*batch d d"]:
    """The dense Jacobian of a feed-forward network by its input `n`, for each row.

    Gated by a product: Wd (diag(a'(g) u) Wg + diag(a(g)) Wu). Plain: Wd diag(a'(u)) Wu. Where a clamp or an activation
    has a kink, the derivative is the one that PyTorch's backward takes there. In the dtype of `n`.

    Raises:
        InvalidValue: A norm of the hidden units, or multipliers, stand between the neurons and the output.
    """
    if not feed_forward.neuronwise:
        raise InvalidValue(
            "the closed form of the Jacobian covers no norm of the hidden units and no multipliers inside the network",
            hint="Use `residual_jacobian`, which falls back on autograd.",
            field="feed_forward",
        )
    up_weight = feed_forward.up.to(n.dtype)
    by_gate, by_up = _hidden_derivatives(n, feed_forward)
    inner = by_up.unsqueeze(-1) * up_weight
    if feed_forward.gate is not None and by_gate is not None:
        inner = inner + by_gate.unsqueeze(-1) * feed_forward.gate.to(n.dtype)
    return feed_forward.down.to(n.dtype) @ inner


def _by_autograd(x: Tensor, sublayer: Tensor | FeedForward, wiring: Wiring) -> Tensor:
    def block(row: Tensor) -> Tensor:
        return residual_output(row, sublayer, wiring)

    with torch.inference_mode(mode=False):
        rows = [torch.func.jacrev(block)(row.clone()) for row in x.reshape(-1, x.shape[-1])]
    return torch.stack(rows).detach().reshape(*x.shape, x.shape[-1])


def _branch_jacobian(x: Tensor, sublayer: Tensor | FeedForward, wiring: Wiring) -> Tensor:
    read = x if wiring.input_norm is None else wiring.input_norm(x)
    if isinstance(sublayer, Tensor):
        jacobian = sublayer.to(x.dtype).expand(*x.shape[:-1], *sublayer.shape)
    else:
        jacobian = feed_forward_jacobian(read, sublayer)
    if wiring.input_norm is not None:
        jacobian = jacobian @ norm_jacobian(x, wiring.input_norm)
    if wiring.output_norm is not None:
        jacobian = norm_jacobian(apply_sublayer(read, sublayer), wiring.output_norm) @ jacobian
    return jacobian


def _hidden_derivatives(n: Tensor, feed_forward: FeedForward) -> tuple[Tensor | None, Tensor]:
    """Derivatives of each hidden unit by its gate and by its up value, `[*batch, m]` each.

    One weight is cast at a time: stored in 16 bits, a network would else lie there in float32 as a whole.
    """
    up = _pre_activation(n, feed_forward.up, feed_forward.up_bias)
    gate = None if feed_forward.gate is None else _pre_activation(n, feed_forward.gate, feed_forward.gate_bias)
    # The hidden units are elementwise in gate and up, so the gradient of their sum holds every derivative.
    with torch.inference_mode(mode=False), torch.enable_grad():
        up = up.clone().requires_grad_()
        if gate is None:
            (by_up,) = torch.autograd.grad(feed_forward.activation(up).sum(), (up,))
            return None, by_up
        gate = gate.clone().requires_grad_()
        _, hidden = feed_forward.gating.combine(gate, up, feed_forward.activation)
        by_gate, by_up = torch.autograd.grad(hidden.sum(), (gate, up))
    return by_gate, by_up


def _pre_activation(n: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(n, weight.to(n.dtype), None if bias is None else bias.to(n.dtype)).detach()
