"""The Jacobian of a function of token states, known by its products alone, which torch.func makes.

The function maps `[tokens, d]` to `[tokens, d]`, so J is (tokens d) by (tokens d). Rows (output positions) and columns
(input positions) may be chosen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.errors import InvalidValue

TokenFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class CoupledJacobian:
    """J as one matrix `[1, tokens d]` by `[1, tokens d]`, zero outside the chosen positions.

    Attributes:
        function: Of token states.
        x: `[tokens, d]`.
        pull: J^T u for u `[tokens, d]`, of the whole function.
        inputs, outputs: The chosen positions.
    """

    function: TokenFunction
    x: Tensor
    pull: Callable[[Tensor], Tensor]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def times(self, v: Tensor) -> Tensor:
        """J v."""
        moved = push_forward(self.function, self.x, _only(v.view(self.x.shape), self.inputs))
        return _only(moved, self.outputs).reshape(1, -1)

    def transposed_times(self, v: Tensor) -> Tensor:
        """J^T v."""
        pulled = self.pull(_only(v.view(self.x.shape), self.outputs))
        return _only(pulled, self.inputs).reshape(1, -1)

    def pulled(self, z: Float[Tensor, " outputs_d"]) -> Float[Tensor, " inputs_d"]:
        """J^T z, with z over the chosen outputs and the result over the chosen inputs alone."""
        whole = torch.zeros_like(self.x)
        whole[list(self.outputs)] = z.to(self.x).view(len(self.outputs), -1)
        return self.pull(whole)[list(self.inputs)].reshape(-1)


def coupled_jacobian(
    function: TokenFunction,
    x: Float[Tensor, "tokens d"],
    *,
    inputs: Sequence[int] | None = None,
    outputs: Sequence[int] | None = None,
) -> CoupledJacobian:
    """The Jacobian of `function` at `x`, between the chosen positions.

    Raises:
        InvalidValue: A position is not there, or the function changes the shape.
    """
    chosen = {
        field: _positions(field, wanted, x.shape[0]) for field, wanted in (("inputs", inputs), ("outputs", outputs))
    }
    y, pull = pull_back(function, x)
    if y.shape != x.shape:
        raise InvalidValue(
            f"the function makes {list(y.shape)} of {list(x.shape)}",
            hint="It must keep the shape [tokens, d].",
            field="function",
        )
    return CoupledJacobian(function, x, pull, chosen["inputs"], chosen["outputs"])


def pull_back(function: TokenFunction, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The value at x, and v -> J^T v, for as many v as wanted after one pass forward."""
    with torch.inference_mode(mode=False):
        y, pull = cast("tuple[Tensor, Callable[[Tensor], tuple[Tensor]]]", torch.func.vjp(function, x.detach().clone()))
    return y.detach(), lambda v: pull(v)[0].detach()


def push_forward(function: TokenFunction, x: Tensor, v: Tensor) -> Tensor:
    """J v, in one pass forward."""
    _, moved = cast("tuple[Tensor, Tensor]", torch.func.jvp(function, (x,), (v,)))
    return moved.detach()


def _only(states: Tensor, positions: tuple[int, ...]) -> Tensor:
    if len(positions) == states.shape[0]:
        return states
    kept = torch.zeros_like(states)
    kept[list(positions)] = states[list(positions)]
    return kept


def _positions(field: str, wanted: Sequence[int] | None, tokens: int) -> tuple[int, ...]:
    chosen = tuple(range(tokens)) if wanted is None else tuple(sorted(set(wanted)))
    if not chosen or chosen[0] < 0 or chosen[-1] >= tokens:
        raise InvalidValue(
            f"{field} are {list(chosen)} of {tokens} tokens", hint=f"Positions run from 0 to {tokens - 1}.", field=field
        )
    return chosen
