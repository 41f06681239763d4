"""Attention of one layer: queries, keys and values from the stream, norms, rotary positions, and the output projection.

Multi-head attention (Vaswani et al. 2017) with the variations of released decoders, as data: grouped queries, sliding
windows, soft caps, sinks, norms on queries and keys, clipped projections, biases. The attention itself is in
`causal_attention`, DeepSeek's latent attention in `latent_attention`.

Tokens meet here: `[*batch, tokens, d]`, and a token sees those before it on the axis of tokens, whatever its position
says. Positions only turn queries and keys.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.activations import clipped
from glassblock.numerics.causal_attention import DEFAULT_BYTE_BUDGET, causal_attention
from glassblock.numerics.dtypes import widest_dtype
from glassblock.numerics.linear import apply_linear
from glassblock.numerics.norms import Norm
from glassblock.numerics.rotary import Rotary, rotary_table, rotate


class NormScope(StrEnum):
    """What the norms of queries and keys run over."""

    HEAD = "head"  # one head, one gain of `[head_dim]` for all heads: Qwen3, Gemma 3
    WIDTH = "width"  # all heads together, a gain of `[heads * head_dim]`: OLMo-2, OLMoE
    EACH_HEAD = "each-head"  # one head, each with its own part of a gain of `[heads * head_dim]`: Cohere, StableLM


@dataclass(frozen=True, eq=False)
class Attention:
    """The tensors and the arithmetic of the attention of one layer.

    Attributes:
        query: `[heads * head_dim, d]`.
        key: `[kv_heads * head_dim, d]`.
        value: `[kv_heads * v_head_dim, d]`.
        output: `[d, heads * v_head_dim]`.
        heads: Of the queries.
        kv_heads: Of keys and values; divides `heads`.
        head_dim: Width of a head of queries and keys.
        scale: Multiplies the scores: usually head_dim^-1/2.
        v_head_dim: Width of a head of values; None is `head_dim`.
        query_bias, key_bias, value_bias, output_bias: One number for each row of the weight, or None.
        window: How many tokens a token sees, itself included; None for all before it.
        softcap: cap of cap tanh(s / cap) on the scaled scores, or None.
        sinks: `[heads]`, one more logit for each head, or None.
        query_norm, key_norm: Both or neither.
        norm_scope: What they run over.
        norms_after_rotary: Whether they come after the rotation (Hunyuan) rather than before.
        rotary: None where positions do not turn this layer.
        clip_qkv: Queries, keys and values are clamped to +-clip_qkv; None for none.
        clip_after_norms: Whether that comes after the norms (OLMoE) rather than before.

    Raises:
        InvalidValue: A shape or a number does not fit the others; the error names it.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    v_head_dim: int | None = None
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    output_bias: Tensor | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    norm_scope: NormScope = NormScope.HEAD
    norms_after_rotary: bool = False
    rotary: Rotary | None = None
    clip_qkv: float | None = None
    clip_after_norms: bool = False

    def __post_init__(self) -> None:
        _check_numbers(self)
        d = self.query.shape[-1]
        rows, kv_rows, value_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim, self._value_rows
        attended = self.heads * self.value_head_dim
        check_shapes(
            {
                "query": (self.query, (rows, d)),
                "key": (self.key, (kv_rows, d)),
                "value": (self.value, (value_rows, d)),
                "output": (self.output, (d, attended)),
                "query_bias": (self.query_bias, (rows,)),
                "key_bias": (self.key_bias, (kv_rows,)),
                "value_bias": (self.value_bias, (value_rows,)),
                "output_bias": (self.output_bias, (d,)),
                "sinks": (self.sinks, (self.heads,)),
            }
        )
        _check_norms(self)

    @property
    def value_head_dim(self) -> int:
        """Width of a head of values."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def model_width(self) -> int:
        """d, the width of what it reads and returns."""
        return self.query.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All its tensors, those of its norms included."""
        norms = (self.query_norm, self.key_norm)
        biases = (self.query_bias, self.key_bias, self.value_bias, self.output_bias, self.sinks)
        gains = [tensor for norm in norms if norm is not None for tensor in (norm.gain, norm.bias)]
        stored = (self.query, self.key, self.value, self.output, *biases, *gains)
        return tuple(tensor for tensor in stored if tensor is not None)

    @property
    def _value_rows(self) -> int:
        return self.kv_heads * self.value_head_dim


class AttentionStages(NamedTuple):
    """What attention computes on its way, in order.

    Attributes:
        query: `[*batch, heads, tokens, head_dim]`, as it meets the keys: after norms and rotation.
        key: `[*batch, kv_heads, tokens, head_dim]`, likewise.
        value: `[*batch, kv_heads, tokens, v_head_dim]`.
        attended: `[*batch, tokens, heads * v_head_dim]`, what the output projection reads.
        projected: `[*batch, tokens, d]`, what attention returns.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attended: Tensor
    projected: Tensor


def run_attention(
    n: Float[Tensor, "*tokens d"],
    attention: Attention,
    *,
    positions: Int[Tensor, " *positions"],
    dtype: torch.dtype | None = None,
    byte_budget: int = DEFAULT_BYTE_BUDGET,
) -> AttentionStages:
    """Attend every token to itself and those before it.

    Args:
        n: `[*batch, tokens, d]`, what attention reads: the normed stream, or the stream itself where the norm is on the
            branch's output.
        attention: Weights and arithmetic.
        positions: `[tokens]`, or one row for each sequence.
        dtype: None computes in float32 at least, and in float64 where any tensor is float64. A given dtype casts all
            tensors to it and runs every operation in it, as a model does.
        byte_budget: About how many bytes scores and masks may take.

    Raises:
        InvalidValue: The width, the positions or the dtype do not fit.
    """
    check_request(n, attention.model_width, positions, dtype)
    n = n.to(dtype or widest_dtype((n, *attention.tensors)))
    query = _clipped_and_normed(
        apply_linear(n, attention.query, attention.query_bias), attention.query_norm, attention, heads=attention.heads
    )
    key = _clipped_and_normed(
        apply_linear(n, attention.key, attention.key_bias), attention.key_norm, attention, heads=attention.kv_heads
    )
    value = apply_linear(n, attention.value, attention.value_bias)
    if attention.clip_qkv is not None:
        value = clipped(value, attention.clip_qkv)
    value = split_heads(value, attention.kv_heads)
    if attention.rotary is not None:
        table = rotary_table(attention.rotary, positions, dtype=n.dtype)
        query, key = rotate(query, table, attention.rotary), rotate(key, table, attention.rotary)
    if attention.norms_after_rotary:
        query, key = _normed(query, attention.query_norm), _normed(key, attention.key_norm)
    sequences = math.prod(n.shape[:-2])
    attended = causal_attention(
        query.reshape(sequences, *query.shape[-3:]),
        key.reshape(sequences, *key.shape[-3:]),
        value.reshape(sequences, *value.shape[-3:]),
        scale=attention.scale,
        window=attention.window,
        softcap=attention.softcap,
        sinks=attention.sinks,
        byte_budget=byte_budget,
    )
    merged = attended.transpose(1, 2).reshape(*n.shape[:-1], attention.output.shape[1])
    return AttentionStages(query, key, value, merged, apply_linear(merged, attention.output, attention.output_bias))


def split_heads(values: Float[Tensor, "*batch tokens rows"], heads: int) -> Float[Tensor, "*batch heads tokens width"]:
    """The rows of a projection as heads."""
    return values.reshape(*values.shape[:-1], heads, values.shape[-1] // heads).transpose(-3, -2)


def check_request(n: Tensor, width: int, positions: Tensor, dtype: torch.dtype | None) -> None:
    """Refuse what attention of that width cannot read.

    Raises:
        InvalidValue: Naming `x`, `positions` or `dtype`.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise InvalidValue(f"attention cannot run in {dtype}", hint="Give a floating-point dtype.", field="dtype")
    if n.ndim < 2 or n.shape[-1] != width:
        raise InvalidValue(
            f"the input has shape {list(n.shape)} and the attention is {width} wide",
            hint="Give [..., tokens, width].",
            field="x",
        )
    rows = list(positions.shape)
    if rows not in ([n.shape[-2]], list(n.shape[:-1])):
        raise InvalidValue(
            f"the positions have shape {rows} and the input has shape {list(n.shape)}",
            hint="Give one position for each token, in one row or in a row for each sequence.",
            field="positions",
        )


def check_shapes(expected: dict[str, tuple[Tensor | None, tuple[int, ...]]]) -> None:
    """Refuse a tensor of another shape than its place asks for.

    Raises:
        InvalidValue: Naming the tensor.
    """
    for name, (tensor, shape) in expected.items():
        if tensor is not None and not tensor.is_floating_point():
            raise InvalidValue(f"{name} has dtype {tensor.dtype}", hint="Dequantise integer weights first.", field=name)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise InvalidValue(
                f"{name} has shape {list(tensor.shape)} where the heads ask for {list(shape)}",
                hint="Weights are stored [out, in]; heads times their width are the rows.",
                field=name,
            )


def _clipped_and_normed(values: Tensor, norm: Norm | None, attention: Attention, *, heads: int) -> Tensor:
    """A projection after its clamp and its norm, split into heads."""
    clip = attention.clip_qkv
    if clip is not None and not attention.clip_after_norms:
        values = clipped(values, clip)
    early = None if attention.norms_after_rotary else norm
    if attention.norm_scope is NormScope.WIDTH:
        values = split_heads(_normed(values, early), heads)
    elif attention.norm_scope is NormScope.EACH_HEAD and early is not None:
        values = _normed_each(split_heads(values, heads), early)
    else:
        values = _normed(split_heads(values, heads), early)
    if clip is not None and attention.clip_after_norms:
        values = clipped(values, clip)
    return values


def _normed(values: Tensor, norm: Norm | None) -> Tensor:
    return values if norm is None else norm.to(values.dtype)(values)


def _normed_each(values: Tensor, norm: Norm) -> Tensor:
    heads, width = values.shape[-3], values.shape[-1]
    cast = norm.to(values.dtype)
    rows: list[Tensor] = []
    for head in range(heads):
        own = slice(head * width, (head + 1) * width)
        gain = None if cast.gain is None else cast.gain[own]
        bias = None if cast.bias is None else cast.bias[own]
        rows.append(Norm(norm.kind, gain, bias, norm.eps)(values[..., head, :, :]))
    return torch.stack(rows, dim=-3)


def _check_numbers(attention: Attention) -> None:
    for name in ("heads", "kv_heads", "head_dim", "value_head_dim"):
        count: int = getattr(attention, name)
        if count < 1:
            raise InvalidValue(f"{name} is {count}", hint="Give a positive number.", field=name)
    if attention.heads % attention.kv_heads:
        raise InvalidValue(
            f"{attention.heads} heads cannot share {attention.kv_heads} heads of keys evenly",
            hint="The heads of keys divide those of queries.",
            field="kv_heads",
        )
    for name in ("scale", "softcap", "clip_qkv", "window"):
        number: float | None = getattr(attention, name)
        if number is not None and not (math.isfinite(number) and number > 0):
            raise InvalidValue(f"{name} of the attention is {number}", hint="Give a positive number.", field=name)
    if attention.rotary is not None and attention.rotary.dim > attention.head_dim:
        raise InvalidValue(
            f"{attention.rotary.dim} channels are turned and a head has {attention.head_dim}",
            hint="Turn at most the width of a head.",
            field="rotary",
        )


def _check_norms(attention: Attention) -> None:
    if (attention.query_norm is None) != (attention.key_norm is None):
        raise InvalidValue(
            "one of the norms of queries and keys is missing", hint="Give both or neither.", field="query_norm"
        )
    if attention.norms_after_rotary and attention.norm_scope is not NormScope.HEAD:
        raise InvalidValue(
            f"norms after the rotation run over one head, not over {attention.norm_scope.value!r}",
            hint="Use the scope 'head'.",
            field="norm_scope",
        )
    one_head = attention.norm_scope is NormScope.HEAD
    for name, norm, heads in (
        ("query_norm", attention.query_norm, attention.heads),
        ("key_norm", attention.key_norm, attention.kv_heads),
    ):
        width = attention.head_dim * (1 if one_head else heads)
        if norm is not None and norm.width not in {None, width}:
            raise InvalidValue(
                f"the norm has {norm.width} channels where the scope {attention.norm_scope.value!r} has {width}",
                hint="Choose the scope that the model has.",
                field=name,
            )
