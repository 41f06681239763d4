"""Queries and keys as training leaves them, and rows put into the other rotary order as a conversion would."""

import torch
from torch import Tensor

HALVES, PAIRS = "halves", "pairs"


def planes(order: str, turned: int) -> Tensor:
    """The rows that positions turn together, `[turned / 2, 2]`."""
    rows = torch.arange(turned)
    return rows.view(2, -1).T if order == HALVES else rows.view(-1, 2)


def trained_heads(
    order: str, *, heads: int, kv_heads: int, width: int, channels: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Rows of queries `[heads, width, channels]` and of keys in whose planes (a, b) q_a k_b - q_b k_a stands out."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, channels, generator=generator)

    queries, keys = draw(kv_heads, heads // kv_heads, width), draw(kv_heads, width)
    first, second = planes(order, width).T
    for one, other, sign in ((first, second, 1), (second, first, -1)):
        shared = draw(kv_heads, width // 2)
        queries[:, :, one] += sign * shared[:, None]
        keys[:, other] += shared
    return queries.flatten(0, 1), keys


def into(order: str, rows: Tensor, width: int, turned: int | None = None) -> Tensor:
    """Rows of heads, or one number for each, brought into that order from the other one."""
    half = (width if turned is None else turned) // 2
    heads = rows.unflatten(0, (-1, width)).clone()
    sizes = (half, 2) if order == HALVES else (2, half)
    heads[:, : 2 * half] = heads[:, : 2 * half].unflatten(1, sizes).transpose(1, 2).flatten(1, 2)
    return heads.flatten(0, 1).contiguous()
