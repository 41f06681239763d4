"""From the last layer's stream to logits, and from logits to the log-likelihood of a text.

A vocabulary of a quarter of a million makes logits larger than the rest of a small model together, so they may be had
in parts along the vocabulary, and the log-likelihood reads such parts one after the other.
"""

from collections.abc import Iterable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.dtypes import widest_dtype
from glassblock.numerics.linear import apply_linear
from glassblock.numerics.norms import Norm

DEFAULT_BYTE_BUDGET = 2**28


def logits(
    hidden: Float[Tensor, "*batch tokens d"],
    final_norm: Norm | None,
    head: Float[Tensor, "vocabulary width"],
    *,
    bias: Float[Tensor, " vocabulary"] | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "*batch tokens vocabulary"]:
    """cap tanh(scale (head norm(hidden) + bias) / cap), without the cap where there is none.

    Args:
        hidden: The residual stream that leaves the last layer.
        final_norm: None where the model has none.
        head: The output embedding, tied or not.
        bias: One number for each word, or None.
        scale: Cohere's `logit_scale`; one over Granite's `logits_scaling`.
        softcap: Gemma 2's `final_logit_softcapping`, or None.
        dtype: None computes in float32 at least; a given dtype runs every operation in it.

    Raises:
        InvalidValue: The width of the head is not that of the stream.
    """
    whole = logit_chunks(
        hidden, final_norm, head, bias=bias, scale=scale, softcap=softcap, dtype=dtype, byte_budget=None
    )
    return next(whole)


def logit_chunks(
    hidden: Float[Tensor, "*batch tokens d"],
    final_norm: Norm | None,
    head: Float[Tensor, "vocabulary width"],
    *,
    bias: Float[Tensor, " vocabulary"] | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    dtype: torch.dtype | None = None,
    byte_budget: int | None = DEFAULT_BYTE_BUDGET,
) -> Iterator[Float[Tensor, "*batch tokens part"]]:
    """The logits in parts along the vocabulary, in order; arguments and errors are those of `logits`.

    One part takes about `byte_budget` bytes with its rows of the head; None is all in one part.
    """
    if head.shape[-1] != hidden.shape[-1]:
        raise InvalidValue(
            f"the head has shape {list(head.shape)} and the stream has shape {list(hidden.shape)}",
            hint="The head is stored [vocabulary, model width].",
            field="head",
        )
    compute = dtype or widest_dtype((hidden, head, bias, None if final_norm is None else final_norm.gain))
    normed = hidden.to(compute)
    if final_norm is not None:
        normed = final_norm.to(compute)(normed)
    return _parts(normed, head, bias, scale=scale, softcap=softcap, byte_budget=byte_budget)


def log_likelihood(
    logits: Float[Tensor, "*batch tokens vocabulary"] | Iterable[Tensor], token_ids: Int[Tensor, " *text"]
) -> Float[Tensor, "*batch next"]:
    """ln p of every token but the first, given those before it: `[*batch, tokens - 1]`, in float32 at least.

    Args:
        logits: All of them, or parts along the vocabulary in order; a part is read once and not kept.
        token_ids: The text.

    Raises:
        InvalidValue: There is no part, the parts are not for these tokens, or an id is outside the vocabulary.
    """
    parts = (logits,) if isinstance(logits, Tensor) else logits
    following = token_ids[..., 1:]
    start = 0
    chosen = peak = total = torch.zeros(())
    for part in parts:
        if part.shape[:-1] != token_ids.shape:
            raise InvalidValue(
                f"logits of shape {list(part.shape)} do not go with {list(token_ids.shape)} token ids",
                hint="Give logits [..., tokens, vocabulary] and ids [..., tokens].",
                field="token_ids",
            )
        scores = part[..., :-1, :].to(torch.promote_types(part.dtype, torch.float32))
        stop = start + part.shape[-1]
        if start == 0:
            chosen = scores.new_zeros(following.shape)
            peak = scores.new_full(following.shape, -torch.inf)
            total = scores.new_zeros(following.shape)
        higher = torch.maximum(peak, scores.amax(-1))
        # A peak of minus infinity has no sum below it, and infinity minus infinity is not zero.
        total = torch.where(peak > -torch.inf, total * (peak - higher).exp(), 0.0)
        total = total + (scores - higher.unsqueeze(-1)).exp().sum(-1)
        peak = higher
        here = (following >= start) & (following < stop)
        place = torch.where(here, following - start, 0).unsqueeze(-1)
        chosen = torch.where(here, scores.gather(-1, place).squeeze(-1), chosen)
        start = stop
    outside = (token_ids < 0) | (token_ids >= start)
    if bool(outside.any()):
        raise InvalidValue(
            f"the token id {int(token_ids[outside][0])} is not among the {start} of the vocabulary",
            hint="Tokenise with the checkpoint's own tokenizer.",
            field="token_ids",
        )
    return (chosen - peak) - total.log()  # in this order large logits cancel before they round


def _parts(
    normed: Tensor, head: Tensor, bias: Tensor | None, *, scale: float, softcap: float | None, byte_budget: int | None
) -> Iterator[Tensor]:
    vocabulary, d = head.shape
    rows = vocabulary
    if byte_budget is not None:
        # A part is held with what it is made of: twice the logits, and the rows of the head as cast.
        per_row = (2 * normed[..., 0].numel() + d) * normed.dtype.itemsize
        rows = max(1, byte_budget // per_row)
    for start in range(0, vocabulary, rows):
        stop = min(start + rows, vocabulary)
        part = apply_linear(normed, head[start:stop], None if bias is None else bias[start:stop])
        if scale != 1.0:
            part = part * scale
        if softcap is not None:
            part = torch.tanh(part / softcap) * softcap
        yield part
