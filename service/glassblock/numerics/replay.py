"""One block replayed from captured tensors under a hypothesis, stage by stage and from the nearest captured ones.

A stage is computed from the stages before it; where one of those was captured, the captured tensor is taken. So a
mistake shows in the one stage that it is made in, and replaying every hypothesis costs the sum of the factors.

Each replay is made in several ways (`Way`): their spread is what rounding may do.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from glassblock.numerics.activations import Activation, Gating, activation_named
from glassblock.numerics.feed_forward import FeedForward, read_of_gate
from glassblock.numerics.hypotheses import Hypothesis, NormScope
from glassblock.numerics.norms import Norm
from glassblock.numerics.replay_norms import ReplayedNorm, replayed_norm
from glassblock.numerics.stage_graph import Key, StageGraph
from glassblock.numerics.wiring import Placement, Wiring

HALF = frozenset({torch.float16, torch.bfloat16})

# Numbers of a weight that are held in float64 at once: 128 MiB.
_CHUNK = 2**24
# Bytes of replayed stages that are kept for the hypotheses to come.
_KEPT_BYTES = 2**28


class Way(StrEnum):
    """How a replay is rounded and summed."""

    EXACT = "exact"  # everything in float64
    WIDE = "wide"  # everything in float32, or in float64 where the capture is
    STEPWISE = "stepwise"  # every operation in the capture's dtype, as an eager engine does
    BACKWARDS = "backwards"  # the same, every sum in the reverse order; a half product is summed in float32
    FUSED = "fused"  # the same, activation and product in one kernel that rounds at its end


class Replay:
    """The stages of one block under any hypothesis. Shapes are `[tokens, width]`.

    Args:
        captures: Captured stages by name.
        feed_forward: The network as declared.
        wirings: The norms as declared, and at other places, by the placement's name; `declared` among them.
        dtype: What the engine computed in.
        norms: Other norms of the layer, by role.
    """

    def __init__(
        self,
        captures: Mapping[str, Float[Tensor, "tokens width"]],
        feed_forward: FeedForward,
        wirings: Mapping[str, Wiring],
        dtype: torch.dtype,
        *,
        norms: Mapping[str, Norm] | None = None,
    ) -> None:
        self.captures = captures
        self.dtype = dtype
        self._network = feed_forward
        self._wirings = wirings
        self._norms = norms or {}
        self._kept: OrderedDict[tuple[str, Way, Key], tuple[Tensor, ...]] = OrderedDict()
        self._kept_bytes = 0
        parallel = wirings["declared"].placement is Placement.PARALLEL
        self.graph = StageGraph(captures, gated=feed_forward.gated, parallel=parallel)
        self._makers: Mapping[str, Callable[[Hypothesis, Way], Tensor]] = {
            "normed": self._normed,
            "gate": lambda hypothesis, way: self._projected(hypothesis, way)[0],
            "up": lambda hypothesis, way: self._projected(hypothesis, way)[1],
            "activated": self._activated,
            "hidden": self._hidden,
            "down": self._down,
            "contribution": self._contribution,
            "output": self._output,
        }

    def of_tokens(self, tokens: Int[Tensor, " few"]) -> "Replay":
        """The same block on some of the tokens."""
        few = {stage: tensor[tokens] for stage, tensor in self.captures.items()}
        return Replay(few, self._network, self._wirings, self.dtype, norms=self._norms)

    def in_dtype(self, dtype: torch.dtype) -> "Replay":
        """The same block in another engine's dtype."""
        return Replay(self.captures, self._network, self._wirings, dtype, norms=self._norms)

    @property
    def norms(self) -> tuple[Norm | None, Norm | None, Norm | None]:
        """Input, output and residual norm as declared."""
        return self._wirings["declared"].norms

    def replayed(self, stage: str, hypothesis: Hypothesis, way: Way) -> Float[Tensor, "tokens width"]:
        """`stage` from the captured stages before it; not the captured one itself."""
        way = self._same_as(stage, way)
        (made,) = self._keep(
            (stage, way, self.graph.key(stage, hypothesis)), lambda: (self._makers[stage](hypothesis, way),)
        )
        return made

    def _same_as(self, stage: str, way: Way) -> Way:
        """The way that gives the same tensor, so that it is made once."""
        if way is Way.FUSED and (self.dtype not in HALF or not self.graph.meets_fused(stage)):
            return Way.STEPWISE
        return way

    def _keep(self, key: tuple[str, Way, Key], make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        made = make()
        self._kept[key] = made
        self._kept_bytes += _bytes(made)
        while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
            _, let_go = self._kept.popitem(last=False)
            self._kept_bytes -= _bytes(let_go)
        return made

    def _read(self, stage: str, hypothesis: Hypothesis, way: Way) -> Tensor:
        """A stage as the next step reads it."""
        work = self._work(way)
        if stage not in self.captures:
            return self.replayed(stage, hypothesis, way)
        tensor = self.captures[stage]
        # The stream may be wider than what is computed from it.
        return tensor.to(torch.promote_types(tensor.dtype, work)) if stage == "x" else tensor.to(work)

    def _work(self, way: Way) -> torch.dtype:
        if way is Way.EXACT:
            return torch.float64
        return torch.promote_types(self.dtype, torch.float32) if way is Way.WIDE else self.dtype

    def _wiring(self, hypothesis: Hypothesis) -> Wiring:
        return self._wirings[hypothesis.placement]

    def _norm(self, role: NormScope, hypothesis: Hypothesis) -> ReplayedNorm | None:
        wiring = self._wiring(hypothesis)
        norm = {"input": wiring.input_norm, "output": wiring.output_norm, "residual": wiring.residual_norm}.get(role)
        if role == "input" and norm is not None and hypothesis.norm_from != "declared":
            norm = self._norms[hypothesis.norm_from]
        return None if norm is None else replayed_norm(norm, role, hypothesis)

    def _normalise(self, x: Tensor, norm: ReplayedNorm | None, way: Way) -> Tensor:
        return x if norm is None else norm(x, self._work(way), backwards=way is Way.BACKWARDS)

    def _normed(self, hypothesis: Hypothesis, way: Way) -> Tensor:
        """What the network reads: without a norm in front of it, the stream."""
        return self._normalise(self._read("x", hypothesis, way), self._norm("input", hypothesis), way).to(
            self._work(way)
        )

    def _projected(self, hypothesis: Hypothesis, way: Way) -> tuple[Tensor, Tensor]:
        gate, up = self._projections(hypothesis, way)
        if gate is None:
            return up, up
        if hypothesis.layout != "declared":
            gate, up = _read_as(hypothesis.layout, gate, up)
        return (up, gate) if hypothesis.swap in {"exchanged", "labels"} else (gate, up)

    def _projections(self, hypothesis: Hypothesis, way: Way) -> tuple[Tensor | None, Tensor]:
        """Gate and up as declared. Other readings of the rows only reorder them: the products are made once."""
        factors = [factor for factor in self.graph.factors("up") if factor not in {"swap", "layout"}]
        key = (hypothesis.norms, *(getattr(hypothesis, factor) for factor in factors))
        made = self._keep(("projections", way, key), lambda: self._multiplied(hypothesis, way))
        return (None, made[0]) if len(made) == 1 else (made[0], made[1])

    def _multiplied(self, hypothesis: Hypothesis, way: Way) -> tuple[Tensor, ...]:
        network = self._network
        n = self._read("normed", hypothesis, way)
        has_bias = hypothesis.network_bias == "declared"
        projections = {"gate": (network.gate, network.gate_bias), "up": (network.up, network.up_bias)}
        return tuple(
            self._linear(n, weight.mT if hypothesis.transposed == name else weight, bias if has_bias else None, way)
            for name, (weight, bias) in projections.items()
            if weight is not None
        )

    def _gating(self, hypothesis: Hypothesis) -> Gating | None:
        """The gating, where it is more than a product."""
        return None if self._network.gating.limit is None or hypothesis.clamp == "dropped" else self._network.gating

    def _activation(self, hypothesis: Hypothesis) -> Activation:
        if hypothesis.activation != "declared":
            return activation_named(hypothesis.activation)
        alpha = self._network.gating.alpha
        if alpha is None or not self._network.gated:
            return self._network.activation
        # swiglu_oai brings its own.
        return Activation(f"swish(beta={alpha:g})", lambda g: g * torch.sigmoid(g * alpha), odd=False, formula="swish")

    def _activated(self, hypothesis: Hypothesis, way: Way) -> Tensor:
        return self._in_activation(hypothesis, way).to(self._work(way))

    def _in_activation(self, hypothesis: Hypothesis, way: Way) -> Tensor:
        """The activated branch, still in the precision of the kernel that makes it."""
        branch = "up" if not self._network.gated or hypothesis.swap in _ON_UP else "gate"
        values = self._read(branch, hypothesis, way)
        values = values.to(torch.float32) if way is Way.FUSED and self.dtype in HALF else values
        if branch == "gate":
            scaled = hypothesis.scales == "declared"
            values = read_of_gate(values, self._network if scaled else replace(self._network, gate_scale=1.0))
        gating, activation = self._gating(hypothesis), self._activation(hypothesis)
        if gating is None or gating.limit is None or not self._network.gated:
            return activation(values)
        if gating.name == "clamped_after":
            return activation(values).clamp(max=gating.limit)
        return activation(values.clamp(max=gating.limit))

    def _hidden(self, hypothesis: Hypothesis, way: Way) -> Tensor:
        captured = "activated" in self.captures
        activated = self._read("activated", hypothesis, way) if captured else self._in_activation(hypothesis, way)
        hidden = self._met(activated, hypothesis, way).to(self._work(way))
        norm = self._network.hidden_norm
        return hidden if norm is None else self._normalise(hidden, ReplayedNorm(norm), way)

    def _met(self, activated: Tensor, hypothesis: Hypothesis, way: Way) -> Tensor:
        if not self._network.gated:
            return activated
        other = self._read("gate" if hypothesis.swap in _ON_UP else "up", hypothesis, way)
        other = other.to(torch.promote_types(activated.dtype, other.dtype))
        gating = self._gating(hypothesis)
        if gating is not None and gating.limit is not None:
            other = other.clamp(min=-gating.limit, max=gating.limit)
        if hypothesis.both_activated:
            other = self._activation(hypothesis)(other)
        if self._network.gating.alpha is not None:
            other = other + 1
        return activated + other if hypothesis.combine == "sum" else activated * other

    def _down(self, hypothesis: Hypothesis, way: Way) -> Tensor:
        weight = self._network.down
        bias = self._network.down_bias if hypothesis.network_bias == "declared" else None
        hidden = self._read("hidden", hypothesis, way)
        down = self._linear(hidden, weight.mT if hypothesis.transposed == "down" else weight, bias, way)
        scale = 1.0 if hypothesis.scales == "dropped" else self._network.down_scale
        return down if scale == 1.0 else down * scale

    def _contribution(self, hypothesis: Hypothesis, way: Way) -> Tensor:
        down = self._normalise(self._read("down", hypothesis, way), self._norm("output", hypothesis), way)
        wiring = self._wiring(hypothesis)
        scale = 1.0 if hypothesis.scales == "dropped" else wiring.branch_scale
        scaled = down if scale == 1.0 else down * scale
        return scaled if wiring.branch_gain is None else scaled * wiring.branch_gain.to(scaled.dtype)

    def _output(self, hypothesis: Hypothesis, way: Way) -> Tensor:
        stream = self._read("contribution", hypothesis, way)
        if hypothesis.residual != "absent":
            base = self._read("x" if hypothesis.residual == "stream" else "normed", hypothesis, way)
            scale = 1.0 if hypothesis.scales == "dropped" else self._wiring(hypothesis).residual_scale
            stream = (base if scale == 1.0 else base * scale) + stream
        return self._normalise(stream, self._norm("residual", hypothesis), way)

    def _linear(self, values: Tensor, weight: Tensor, bias: Tensor | None, way: Way) -> Tensor:
        work = self._work(way)
        added = None if bias is None else bias.to(work)
        if way is Way.EXACT:
            rows = max(1, _CHUNK // weight.shape[1])
            parts = [values @ weight[start : start + rows].to(work).mT for start in range(0, len(weight), rows)]
            product = torch.cat(parts, dim=-1)
            return product if added is None else product + added
        if way is not Way.BACKWARDS:
            return functional.linear(values.to(work), weight.to(work), added)
        wide = torch.promote_types(work, torch.float32)
        product = functional.linear(values.to(wide).flip(-1), weight.to(wide).flip(-1))
        return (product if bias is None else product + bias.to(wide)).to(work)


_ON_UP = frozenset({"activation-on-up", "labels"})


def _read_as(layout: str, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up as they come out where the fused rows [gate | up] are read in another layout."""
    width = gate.shape[-1]
    name, written = layout.removesuffix("-written").removesuffix("-up-first"), layout.endswith("-written")
    gate, up = (up, gate) if layout.endswith("-up-first") else (gate, up)
    blocks = width if name == "interleaved" else int(name.removeprefix("blocks-"))
    fused, leading = torch.cat([gate, up], dim=-1), gate.shape[:-1]
    if written:
        # The inverse: halves of rows that lie as [g0 u0 g1 u1 ...].
        mixed = fused.reshape(*leading, 2, blocks, width // blocks).transpose(-3, -2).reshape(*leading, 2 * width)
        return mixed[..., :width], mixed[..., width:]
    parts = fused.reshape(*leading, blocks, 2, width // blocks)
    return parts[..., 0, :].reshape(gate.shape), parts[..., 1, :].reshape(gate.shape)


def _bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)
