"""The feed-forward network of one block, gated or plain.

Gated: down @ (a(gate @ n) * (up @ n)), as the `gating` combines them. Plain: down @ a(up @ n), with no gate.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.activations import Activation, Gating
from glassblock.numerics.norms import Norm


@dataclass(frozen=True, eq=False)
class FeedForward:
    """The tensors and the arithmetic of one feed-forward network.

    Shapes are checked here rather than by annotation, so that a misfit is told by the name of the tensor.

    Attributes:
        gate: `[m, d]`, or None for a plain network.
        up: `[m, d]`. In a plain network its output is what is activated.
        down: `[d, m]`.
        gate_bias: `[m]` or None.
        up_bias: `[m]` or None.
        down_bias: `[d]` or None.
        activation: Applied to the gate, or to `up` in a plain network.
        gating: How the two branches meet. Not used in a plain network.
        hidden_norm: A norm of what `down` reads (BitNet); None in nearly every family.
        gate_scale: Multiplies what the gate projection returns, before the activation (Falcon-H1).
        down_scale: Multiplies what the network returns (Falcon-H1).
        gate_sparsity: The share of the gate that is cut away in front of the activation; see `read_of_gate`.

    Raises:
        InvalidValue: A shape does not fit the others, or a plain network has a gate bias, or no such share is one.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Activation
    gating: Gating
    hidden_norm: Norm | None = None
    gate_scale: float = 1.0
    down_scale: float = 1.0
    gate_sparsity: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.gate_sparsity < 1.0:
            raise InvalidValue(
                f"the share {self.gate_sparsity:g} of a gate cannot be cut away",
                hint="Give a number from 0 and below 1.",
                field="gate_sparsity",
            )
        if self.up.ndim != 2 or self.up.numel() == 0:
            raise InvalidValue(
                f"up has shape {list(self.up.shape)} and should be [hidden width, model width]",
                hint="Pass a two-dimensional weight stored [out, in].",
                field="up",
            )
        if self.gate is None and self.gate_bias is not None:
            raise InvalidValue(
                "a gate bias was given without a gate", hint="A plain network has none.", field="gate_bias"
            )
        m, d = self.up.shape
        expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
            "gate": (self.gate, (m, d)),
            "up": (self.up, (m, d)),
            "down": (self.down, (d, m)),
            "gate_bias": (self.gate_bias, (m,)),
            "up_bias": (self.up_bias, (m,)),
            "down_bias": (self.down_bias, (d,)),
        }
        for name, (tensor, shape) in expected.items():
            if tensor is not None and not tensor.is_floating_point():
                raise InvalidValue(
                    f"{name} has dtype {tensor.dtype}", hint="Dequantise integer weights first.", field=name
                )
            if tensor is not None and tuple(tensor.shape) != shape:
                raise InvalidValue(
                    f"{name} has shape {list(tensor.shape)} where up, {[m, d]}, asks for {list(shape)}",
                    hint="Weights are stored [out, in]; a tensor stored [in, out] must be transposed first.",
                    field=name,
                )

    @property
    def width(self) -> int:
        """m, the number of hidden units."""
        return self.up.shape[0]

    @property
    def model_width(self) -> int:
        """d, the width of what it reads and returns."""
        return self.up.shape[1]

    @property
    def gated(self) -> bool:
        """Whether there is a gate."""
        return self.gate is not None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All its tensors, those of its norm included."""
        norm = () if self.hidden_norm is None else (self.hidden_norm.gain, self.hidden_norm.bias)
        stored = (self.gate, self.up, self.down, self.gate_bias, self.up_bias, self.down_bias, *norm)
        return tuple(tensor for tensor in stored if tensor is not None)

    @property
    def parameters(self) -> int:
        """Number of stored numbers, those of biases and of its norm included."""
        return sum(tensor.numel() for tensor in self.tensors)

    @property
    def neuronwise(self) -> bool:
        """Whether each hidden unit is made from its own gate and up alone, with nothing but products around them."""
        scales = (self.gate_scale, self.down_scale)
        return self.hidden_norm is None and scales == (1.0, 1.0) and self.gate_sparsity == 0.0

    def narrowed(self, width: int, *, field: str = "width") -> "FeedForward":
        """The nested network of the first `width` hidden units, as views; the bias of `down` stays whole.

        Raises:
            InvalidValue: The width is not between 1 and the network's own.
        """
        if not 1 <= width <= self.width:
            raise InvalidValue(
                f"the width {width} is not between 1 and {self.width}",
                hint="Choose how many of the hidden units to keep, counted from the first.",
                field=field,
            )
        if (self.hidden_norm is not None or self.gate_sparsity) and width != self.width:
            over = "a norm in front of down" if self.hidden_norm is not None else "the cut of the gate"
            raise InvalidValue(
                f"{over} looks at all hidden units, so that fewer of them are another network",
                hint="Leave the width out.",
                field=field,
            )
        return replace(
            self,
            gate=None if self.gate is None else self.gate[:width],
            up=self.up[:width],
            down=self.down[:, :width],
            gate_bias=None if self.gate_bias is None else self.gate_bias[:width],
            up_bias=None if self.up_bias is None else self.up_bias[:width],
        )

    def swapped(self, *, field: str = "swap") -> "FeedForward":
        """The network with gate and up exchanged, each with its bias.

        Raises:
            InvalidValue: The network is plain.
        """
        if self.gate is None:
            raise InvalidValue(
                "gate and up cannot be exchanged in a plain feed-forward network, which has no gate",
                hint="Leave the exchange out.",
                field=field,
            )
        return replace(self, gate=self.up, up=self.gate, gate_bias=self.up_bias, up_bias=self.gate_bias)


def read_of_gate(gate: Float[Tensor, "*batch m"], feed_forward: FeedForward) -> Float[Tensor, "*batch m"]:
    """What is activated of a gate projection's output: scaled, and cut at the network's sparsity s.

    relu(g - mean(g) - std(g) Phi^-1(s)) over the hidden units of each row, with the biased deviation: of a normal
    gate the share s is zero (Gemma 3n, "Gaussian top-k"; Spark Transformer, You et al. 2025). In the dtype of `gate`.
    """
    scaled = gate if feed_forward.gate_scale == 1.0 else gate * feed_forward.gate_scale
    if feed_forward.gate_sparsity == 0.0:
        return scaled
    share = torch.tensor(feed_forward.gate_sparsity, dtype=torch.float32, device=gate.device)
    # The quantile as torch's Normal computes it, rounded as the model rounds it.
    deviations = (torch.erfinv(2 * share - 1) * math.sqrt(2)).to(gate.dtype)
    cut = scaled.mean(-1, keepdim=True) + scaled.std(-1, keepdim=True, unbiased=False) * deviations
    return (scaled - cut).relu()
