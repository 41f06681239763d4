"""Where the norms of a block are, and how its branch joins the residual stream.

The wirings, for a sublayer F, with alpha = `residual_scale` and beta = `branch_scale`:

    PRE             alpha x + beta F(N(x))                     GPT-2, Llama; beta is Granite's residual multiplier
    POST            N(alpha x + beta F(x))                     BERT; alpha is DeepNorm's (Wang et al. 2022)
    SANDWICH        alpha x + beta N'(F(N(x)))                 Gemma 2 and 3
    PARALLEL        alpha x + other + beta F(N(x))             GPT-J, Cohere; `other` is the attention branch
    BRANCH_OUTPUT   alpha x + beta N'(F(x))                    OLMo-2

`other` is what the parallel branch adds; without it the PARALLEL output is that of the feed-forward branch alone.
The sum of three is rounded in one of two orders: (alpha x + other) + branch in Cohere and StableLM, and
(other + branch) + alpha x in GPT-NeoX, GPT-J, Phi and Falcon.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.norms import Norm


class Placement(StrEnum):
    """Where the norms of a block are."""

    PRE = "pre"
    POST = "post"
    SANDWICH = "sandwich"
    PARALLEL = "parallel"
    BRANCH_OUTPUT = "branch-output"


@dataclass(frozen=True, eq=False)
class Wiring:
    """The norms of a block and how its branch joins the residual stream.

    Attributes:
        placement: Where the norms are.
        input_norm: Before the sublayer: PRE, SANDWICH, PARALLEL.
        output_norm: On what the sublayer returns: SANDWICH, BRANCH_OUTPUT.
        residual_norm: After the residual add: POST.
        residual_scale: alpha, on x.
        branch_scale: beta, on the branch, after its norm where it has one.
        branch_gain: `[d]`, multiplies the branch channel by channel (LayerScale, Touvron et al. 2021); None for none.
        branches_first: PARALLEL only: the two branches are summed before the stream is added, which rounds otherwise.

    Raises:
        InvalidValue: A norm is missing or has no place here, or a scale is not finite.
    """

    placement: Placement
    input_norm: Norm | None = None
    output_norm: Norm | None = None
    residual_norm: Norm | None = None
    residual_scale: float = 1.0
    branch_scale: float = 1.0
    branch_gain: Tensor | None = None
    branches_first: bool = False

    def __post_init__(self) -> None:
        needed = NORMS_OF[self.placement]
        for role, norm in zip(NORM_PLACES, self.norms, strict=True):
            if (norm is not None) != (role in needed):
                problem = "needs" if role in needed else "has no place for"
                raise InvalidValue(
                    f"the placement {self.placement.value!r} {problem} a norm in the role {role}",
                    hint=f"Its norms are: {', '.join(needed)}.",
                    field=role,
                )
        for name, scale in (("residual_scale", self.residual_scale), ("branch_scale", self.branch_scale)):
            if not math.isfinite(scale):
                raise InvalidValue(f"{name} is {scale}", hint="Give a finite number.", field=name)
        if self.branches_first and self.placement is not Placement.PARALLEL:
            raise InvalidValue(
                f"the placement {self.placement.value!r} has no second branch to sum first",
                hint="Leave `branches_first` out, or use the placement 'parallel'.",
                field="branches_first",
            )

    def to(self, dtype: torch.dtype) -> "Wiring":
        """The same wiring with its tensors cast."""
        if all(tensor.dtype is dtype for tensor in self.tensors):
            return self
        return Wiring(
            self.placement,
            *(None if norm is None else norm.to(dtype) for norm in self.norms),
            residual_scale=self.residual_scale,
            branch_scale=self.branch_scale,
            branch_gain=None if self.branch_gain is None else self.branch_gain.to(dtype),
            branches_first=self.branches_first,
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its stored tensors: those of its norms, and the gain of its branch."""
        norms = (tensor for norm in self.norms if norm is not None for tensor in (norm.gain, norm.bias))
        return tuple(tensor for tensor in (*norms, self.branch_gain) if tensor is not None)

    @property
    def norms(self) -> tuple[Norm | None, Norm | None, Norm | None]:
        """Input, output and residual norm."""
        return self.input_norm, self.output_norm, self.residual_norm


NORM_PLACES = ("input_norm", "output_norm", "residual_norm")
"""The names of `Wiring.norms`, in their order."""

NORMS_OF: Mapping[Placement, tuple[str, ...]] = {
    Placement.PRE: ("input_norm",),
    Placement.POST: ("residual_norm",),
    Placement.SANDWICH: ("input_norm", "output_norm"),
    Placement.PARALLEL: ("input_norm",),
    Placement.BRANCH_OUTPUT: ("output_norm",),
}
"""Those of them that a placement has."""
