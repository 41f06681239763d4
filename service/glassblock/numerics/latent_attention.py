"""Multi-head latent attention: keys and values from one narrow latent (DeepSeek-V2, 2024, section 2.1).

A token's keys and values are read from a latent of rank r, which is what an engine keeps of it. Each head's queries and
keys have two parts: one without positions, and one that is turned, whose key is the same for all heads.

    c, k_r = split(W_down n)        k, v = split(W_up norm(c))        key = [k, rotate(k_r)]
    q, q_r = split(W_q n)           or W_q_up norm(W_q_down n)        query = [q, rotate(q_r)]
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.attention import AttentionStages, check_request, check_shapes, split_heads
from glassblock.numerics.causal_attention import DEFAULT_BYTE_BUDGET, causal_attention
from glassblock.numerics.dtypes import widest_dtype
from glassblock.numerics.linear import apply_linear
from glassblock.numerics.norms import Norm
from glassblock.numerics.rotary import Rotary, rotary_table, rotate
from glassblock.numerics.rotary_forms import yarn_scale


@dataclass(frozen=True, eq=False)
class LatentAttention:
    """The tensors and the arithmetic of latent attention.

    Attributes:
        key_value_down: `[rank + rope_dim, d]`: the latent first, then the shared turned key.
        key_value_norm: `[rank]`, on the latent alone.
        key_value_up: `[heads * (nope_dim + v_dim), rank]`: for each head its key, then its value.
        output: `[d, heads * v_dim]`.
        heads: Of queries, keys and values alike.
        nope_dim: Width of the part of a head that is not turned.
        rope_dim: Width of the part that is.
        v_dim: Width of a head of values.
        scale: Multiplies the scores; see `latent_score_scale`.
        rotary: Turns `rope_dim` channels.
        query: `[heads * (nope_dim + rope_dim), d]`, or None where queries are read from a latent of their own:
        query_down: `[query_rank, d]`.
        query_norm: `[query_rank]`.
        query_up: `[heads * (nope_dim + rope_dim), query_rank]`.
        query_down_bias, key_value_down_bias, output_bias: One number for each row of the weight, or None.

    Raises:
        InvalidValue: A shape does not fit the others, or the query has no weights or two sets of them.
    """

    key_value_down: Tensor
    key_value_norm: Norm
    key_value_up: Tensor
    output: Tensor
    heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    rotary: Rotary
    query: Tensor | None = None
    query_down: Tensor | None = None
    query_norm: Norm | None = None
    query_up: Tensor | None = None
    query_down_bias: Tensor | None = None
    key_value_down_bias: Tensor | None = None
    output_bias: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "nope_dim", "rope_dim", "v_dim"):
            count: int = getattr(self, name)
            if count < 1:
                raise InvalidValue(f"{name} is {count}", hint="Give a positive number.", field=name)
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise InvalidValue(f"scale is {self.scale}", hint="Give a positive number.", field="scale")
        if self.rotary.dim != self.rope_dim:
            raise InvalidValue(
                f"{self.rotary.dim} channels are turned and {self.rope_dim} are to be",
                hint="Turn exactly the channels that carry positions.",
                field="rotary",
            )
        narrow = (self.query_down, self.query_norm, self.query_up)
        if sum(part is not None for part in narrow) != (3 if self.query is None else 0):
            raise InvalidValue(
                "the query has no weights of its own, or more than one set of them",
                hint="Give `query`, or `query_down`, `query_norm` and `query_up`.",
                field="query",
            )
        for name, norm, width in (
            ("key_value_norm", self.key_value_norm, self.rank),
            ("query_norm", self.query_norm, 0 if self.query_down is None else self.query_down.shape[0]),
        ):
            if norm is not None and norm.width not in {None, width}:
                raise InvalidValue(
                    f"{name} has {norm.width} channels and the latent {width}",
                    hint="The norm is that of the latent alone.",
                    field=name,
                )
        d, rank, rows = self.model_width, self.rank, self.heads * (self.nope_dim + self.rope_dim)
        query_rank = 0 if self.query_down is None else self.query_down.shape[0]
        check_shapes(
            {
                "key_value_down": (self.key_value_down, (rank + self.rope_dim, d)),
                "key_value_up": (self.key_value_up, (self.heads * (self.nope_dim + self.v_dim), rank)),
                "output": (self.output, (d, self.heads * self.v_dim)),
                "query": (self.query, (rows, d)),
                "query_down": (self.query_down, (query_rank, d)),
                "query_up": (self.query_up, (rows, query_rank)),
                "query_down_bias": (self.query_down_bias, (query_rank,)),
                "key_value_down_bias": (self.key_value_down_bias, (rank + self.rope_dim,)),
                "output_bias": (self.output_bias, (d,)),
            }
        )

    @property
    def rank(self) -> int:
        """Width of the latent of keys and values."""
        return self.key_value_up.shape[-1]

    @property
    def model_width(self) -> int:
        """d, the width of what it reads and returns."""
        return self.key_value_down.shape[-1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All its tensors, those of its norms included."""
        norms = [norm for norm in (self.key_value_norm, self.query_norm) if norm is not None]
        stored = (
            *(self.key_value_down, self.key_value_up, self.output, self.query, self.query_down, self.query_up),
            *(self.query_down_bias, self.key_value_down_bias, self.output_bias),
            *(tensor for norm in norms for tensor in (norm.gain, norm.bias)),
        )
        return tuple(tensor for tensor in stored if tensor is not None)


def latent_score_scale(head_dim: int, *, factor: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """head_dim^-1/2 m^2 with m = 0.1 mscale_all_dim ln(factor) + 1.

    Args:
        head_dim: Of queries and keys, both parts together.
        factor: That of the rotary form, where it is not the default one.
        mscale_all_dim: That of the rotary parameters; 0 leaves m at 1.
    """
    scale = head_dim**-0.5
    if not mscale_all_dim:
        return scale
    m = yarn_scale(factor, mscale_all_dim)
    return scale * m * m


def run_latent_attention(
    n: Float[Tensor, "*tokens d"],
    attention: LatentAttention,
    *,
    positions: Int[Tensor, " *positions"],
    dtype: torch.dtype | None = None,
    byte_budget: int = DEFAULT_BYTE_BUDGET,
) -> AttentionStages:
    """Attend every token to itself and those before it; arguments and errors are those of `run_attention`.

    Queries and keys come back with the part without positions first.
    """
    check_request(n, attention.model_width, positions, dtype)
    n = n.to(dtype or widest_dtype((n, *attention.tensors)))
    table = rotary_table(attention.rotary, positions, dtype=n.dtype)
    query_nope, query_rope = _split(split_heads(_query(n, attention), attention.heads), attention.nope_dim)
    query = torch.cat((query_nope, rotate(query_rope, table, attention.rotary)), dim=-1)

    narrow = apply_linear(n, attention.key_value_down, attention.key_value_down_bias)
    latent, key_rope = _split(narrow, attention.rank)
    wide = apply_linear(attention.key_value_norm.to(n.dtype)(latent), attention.key_value_up)
    key_nope, value = _split(split_heads(wide, attention.heads), attention.nope_dim)
    key_rope = rotate(key_rope.unsqueeze(-3), table, attention.rotary).expand(*key_nope.shape[:-1], -1)
    key = torch.cat((key_nope, key_rope), dim=-1)

    sequences = math.prod(n.shape[:-2])
    attended = causal_attention(
        query.reshape(sequences, *query.shape[-3:]),
        key.reshape(sequences, *key.shape[-3:]),
        value.reshape(sequences, *value.shape[-3:]),
        scale=attention.scale,
        byte_budget=byte_budget,
    )
    merged = attended.transpose(1, 2).reshape(*n.shape[:-1], attention.output.shape[1])
    return AttentionStages(query, key, value, merged, apply_linear(merged, attention.output, attention.output_bias))


def _split(values: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The first channels, and the rest."""
    return values[..., :first], values[..., first:]


def _query(n: Tensor, attention: LatentAttention) -> Tensor:
    if attention.query is not None:
        return apply_linear(n, attention.query)
    # The dataclass saw to it that all three are there.
    parts = (attention.query_down, attention.query_norm, attention.query_up)
    down, norm, up = cast("tuple[Tensor, Norm, Tensor]", parts)
    narrow = apply_linear(n, down, attention.query_down_bias)
    return apply_linear(norm.to(n.dtype)(narrow), up)
