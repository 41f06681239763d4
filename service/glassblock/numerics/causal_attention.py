"""Causal attention of queries to keys, in bounded memory.

softmax(scale q k^T) v over the keys up to the query's own token and, with a window of w, no further back than w - 1
tokens before it. Query heads share keys in groups, in order (Ainslie et al., "GQA", 2023).

Where the arithmetic allows, `torch.nn.functional.scaled_dot_product_attention` computes it, called as transformers
calls it. Two things it has no argument for are written out, in the order of operations of the models that have them: a
soft cap, cap tanh(s / cap) on the scaled scores (Gemma 2), and a sink, one more logit for each head that takes its
share of the softmax and leads nowhere (gpt-oss).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

DEFAULT_BYTE_BUDGET = 2**28
_WIDEST_GROUPED_HEAD = 256
_SCORE_COPIES = 3  # scores, what is made of them, and the weights
_MASK_BYTES = 5  # the mask and the float copy that the kernel makes of it


def causal_attention(
    query: Float[Tensor, "batch heads tokens head_dim"],
    key: Float[Tensor, "batch kv_heads tokens head_dim"],
    value: Float[Tensor, "batch kv_heads tokens v_head_dim"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    byte_budget: int = DEFAULT_BYTE_BUDGET,
) -> Float[Tensor, "batch heads tokens v_head_dim"]:
    """Attend every token to itself and the tokens before it.

    Args:
        query: After norms and rotation.
        key: After norms and rotation; kv_heads divides heads.
        value: May have another width than the keys.
        scale: Multiplies the scores.
        window: How many tokens a token sees, itself included; None for all before it.
        softcap: None for none.
        sinks: One logit for each head; None for none.
        byte_budget: About how many bytes scores and masks may take. Queries are attended in as many parts as that
            asks for; a sequence that fits is attended at once.
    """
    batch, heads, tokens, _ = query.shape
    if query.numel() == 0 or value.numel() == 0:
        return query.new_zeros(batch, heads, tokens, value.shape[-1])
    written_out = softcap is not None or sinks is not None
    alike = query.shape[-1] == value.shape[-1]
    masked = window is not None and tokens >= window
    window = window if masked else None  # one that hides nothing may be any number, beyond int64 too
    if not written_out and not masked and alike:  # the kernel's own causal form never holds the scores
        return _kernel(query, key, value, None, scale=scale)
    if written_out or not alike:
        row_bytes = _SCORE_COPIES * batch * heads * tokens * max(query.dtype.itemsize, 4)
    else:
        row_bytes = _MASK_BYTES * tokens
    rows = max(1, byte_budget // row_bytes)
    parts: list[Tensor] = []
    for start in range(0, tokens, rows):
        stop = min(start + rows, tokens)
        # A sequence in one part sees all keys, as a model does; the mask hides them.
        first = 0 if window is None or rows >= tokens else max(0, start - window + 1)
        part = query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop]
        if written_out:
            mask = _mask(start, stop, first, window, device=query.device)
            parts.append(_written_out(*part, mask, scale=scale, softcap=softcap, sinks=sinks))
        else:
            whole = rows >= tokens and not masked
            mask = None if whole else _mask(start, stop, first, window, device=query.device)
            parts.append(_kernel(*part, mask, scale=scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float) -> Tensor:
    grouped = key.shape[1] != query.shape[1]
    if grouped and (mask is not None or not key.shape[-1] == value.shape[-1] <= _WIDEST_GROUPED_HEAD):
        key, value, grouped = _repeated(key, query), _repeated(value, query), False
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and query.shape[2] > 1,
        scale=scale,
        enable_gqa=grouped,
    )


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    scores = torch.matmul(query, _repeated(key, query).transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    else:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        logits = torch.cat((scores, column), dim=-1)
        # With sinks the softmax is in the dtype of the model, after the largest logit is taken off.
        weights = (logits - logits.amax(-1, keepdim=True)).softmax(-1)[..., :-1]
    return torch.matmul(weights, _repeated(value, query))


def _repeated(shared: Tensor, query: Tensor) -> Tensor:
    groups = query.shape[1] // shared.shape[1]
    return shared if groups == 1 else shared.repeat_interleave(groups, dim=1)


def _mask(
    start: int, stop: int, first: int, window: int | None, *, device: torch.device
) -> Bool[Tensor, "1 1 queries keys"]:
    """Which keys, of those from `first` to `stop`, the queries from `start` to `stop` see."""
    queries = torch.arange(start, stop, device=device)[:, None]
    keys = torch.arange(first, stop, device=device)
    seen = keys <= queries
    return (seen if window is None else seen & (keys > queries - window))[None, None]
