"""Layers that are wired as the norms say that a file holds for them: for layouts that many families are written in."""

from collections.abc import Iterator
from types import MappingProxyType

from glassblock.checkpoint.conditions import Condition, Every, Holds, unless
from glassblock.checkpoint.families.makers import Places, norms
from glassblock.checkpoint.family import NormRow, Role, Setting, Variant
from glassblock.numerics.wiring import Placement

Wiring = tuple[Condition, Placement, Places]
"""When a layer is wired so, how, and its norms by role and template."""


def wirings(before: str, after_attention: str, between: str, after: str) -> tuple[Wiring, Wiring, Wiring]:
    """In front of both branches, around both (Gemma 2), on what both return (OLMo 2), by the norms' templates."""
    into: tuple[Role, str] = ("attn_in", before)
    out: tuple[Role, str] = ("attn_out", after_attention)
    read: tuple[Role, str] = ("ffn_in", between)
    returned: tuple[Role, str] = ("ffn_out", after)
    front, middle, last = (Holds(f"{name}.weight") for name in (before, between, after))
    return (
        (Every((middle, unless(last))), Placement.PRE, (into, read)),
        (Every((front, middle, last)), Placement.SANDWICH, (into, out, read, returned)),
        (Every((unless(front), unless(middle), last)), Placement.BRANCH_OUTPUT, (out, returned)),
    )


def wired_by_norms(
    found: tuple[Wiring, ...],
    kind: str,
    eps: Setting[float],
    *,
    query: str,
    key: str,
    final: str,
    sandwich: str | None = None,
) -> Iterator[Variant]:
    """Each wiring as a variant, without and with norms of queries and keys.

    Args:
        found: The wirings.
        kind: The arithmetic of every norm.
        eps: Their epsilon.
        query: Template of the norm of queries; its width is the tensor's.
        key: That of keys.
        final: That of the last norm.
        sandwich: Why layers with norms around both branches are not run; None where they are.
    """
    heads: Places = (("q", query), ("k", key))
    of_heads = tuple(NormRow(role, template, kind, eps, width=None) for role, template in heads)
    for when, placement, places in found:
        rows = norms(kind, eps, *places, ("final", final))
        changes: dict[str, object] = {"placement": placement, "norms": rows}
        if placement is Placement.SANDWICH and sandwich is not None:
            changes["not_run"] = sandwich
        yield Variant(when, MappingProxyType(changes))
        normed = Every((when, Holds(f"{query}.weight")))
        yield Variant(normed, MappingProxyType({**changes, "norms": (*rows, *of_heads)}))
