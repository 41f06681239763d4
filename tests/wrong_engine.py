"""An engine that makes mistakes on purpose: one gated block in eager torch, written without the replay that is tested.

Every mistake is a keyword. `other_sums` is another engine without any: it sums in eight parts, the last one first, and
makes activation and product in one kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

Captured = dict[str, Tensor]


@dataclass(frozen=True)
class Engine:
    """What it computes, and what it does wrong."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gain: Tensor
    bias: Tensor | None = None
    eps: float = 1e-5
    dtype: torch.dtype = torch.float32
    activation: Callable[[Tensor], Tensor] = functional.silu
    swap: bool = False
    names_exchanged: bool = False
    activation_on_up: bool = False
    total: bool = False
    both_activated: bool = False
    eps_outside: bool = False
    added_to_gain: float = 0.0
    bias_dropped: bool = False
    gain_in_float32: bool = False
    layer_norm: bool = False
    normed_twice: bool = False
    placement: str = "pre"
    down_transposed: bool = False
    clamp: float | None = None
    split_rows: int | None = None
    other_sums: bool = False

    def but(self, **mistakes: object) -> "Engine":
        return replace(self, **mistakes)

    def __call__(self, x: Tensor) -> Captured:
        x = x.to(self.dtype)
        normed = self.norm(x) if self.placement in {"pre", "sandwich"} else x
        gate_weight, up_weight = (self.up, self.gate) if self.swap else (self.gate, self.up)
        if self.split_rows is not None:
            rows = torch.cat([gate_weight, up_weight])
            parts = rows.chunk(2 * self.split_rows)
            gate_weight, up_weight = torch.cat(parts[0::2]), torch.cat(parts[1::2])
        gate, up = self.linear(normed, gate_weight), self.linear(normed, up_weight)
        one, other = (up, gate) if self.activation_on_up else (gate, up)
        if self.clamp is not None:
            one, other = one.clamp(max=self.clamp), other.clamp(-self.clamp, self.clamp)
        activated = self.activation(one)
        other = self.activation(other) if self.both_activated else other
        if self.other_sums:
            hidden = self.met(self.activation(one.float()), other.float()).to(self.dtype)
        else:
            hidden = self.met(activated, other)
        down = self.linear(hidden, self.down.T if self.down_transposed else self.down)
        contribution = self.norm(down) if self.placement == "branch-output" else down
        if self.placement == "sandwich":
            contribution = functional.rms_norm(down, down.shape[-1:], eps=self.eps)
        output = x + contribution
        output = self.norm(output) if self.placement == "post" else output
        if self.names_exchanged:
            gate, up = up, gate
        return {
            "x": x,
            "normed": normed,
            "gate": gate,
            "up": up,
            "activated": activated,
            "hidden": hidden,
            "down": down,
            "contribution": contribution,
            "output": output,
        }

    def met(self, activated: Tensor, other: Tensor) -> Tensor:
        return activated + other if self.total else activated * other

    def norm(self, x: Tensor) -> Tensor:
        gain = self.gain.to(self.dtype)
        gain = gain + self.added_to_gain if self.added_to_gain else gain
        bias = None if self.bias is None or self.bias_dropped else self.bias.to(self.dtype)
        if self.normed_twice:
            x = functional.rms_norm(x, x.shape[-1:], eps=self.eps)
        if self.layer_norm or self.bias is not None:
            return functional.layer_norm(x, x.shape[-1:], gain, bias, self.eps)
        wide = x.float()
        square = wide.pow(2)
        mean = self.mean_in_parts(square) if self.other_sums else square.mean(-1, keepdim=True)
        normed = wide / (mean.sqrt() + self.eps) if self.eps_outside else wide * torch.rsqrt(mean + self.eps)
        return (gain.float() * normed).to(self.dtype) if self.gain_in_float32 else gain * normed.to(self.dtype)

    def linear(self, values: Tensor, weight: Tensor) -> Tensor:
        weight = weight.to(self.dtype)
        if not self.other_sums:
            return functional.linear(values, weight)
        parts = zip(values.float().chunk(8, -1), weight.float().chunk(8, -1), strict=True)
        products = [part @ rows.T for part, rows in parts]
        return torch.stack(products[::-1]).sum(0).to(self.dtype)

    @staticmethod
    def mean_in_parts(values: Tensor) -> Tensor:
        sums = [part.sum(-1, keepdim=True) for part in values.chunk(8, -1)]
        return torch.stack(sums[::-1]).sum(0) / values.shape[-1]
