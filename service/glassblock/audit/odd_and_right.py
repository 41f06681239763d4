"""Tensors that look odd and are right: bounds that bound nothing, parameters of which there are none, zeros at a start.

What a family's row describes is judged by what it is there. Of a tensor that no row describes, such as one beside the
language model, only its like can tell: those whose names differ in a number.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from glassblock.audit.evidence import Evidence
from glassblock.audit.values import TensorValues
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.outer_tensors import embedding_entry, head_entry

_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,8})(?=\.)")
_BOUND = re.compile(r"(?:^|_)(?:min|max|mask|masked)(?:_|$)")


def is_open_bound(name: str, values: TensorValues) -> bool:
    """Whether infinities are a bound that bounds nothing yet, as of a clamp or an observer, or those of a mask."""
    return values.nan == 0 and _BOUND.search(name.rpartition(".")[2]) is not None


def counts_nothing(entry: TensorEntry, evidence: Evidence) -> bool:
    """Whether a tensor without elements is one of which the model has none, such as no register tokens.

    A placeholder of sharded training has one axis, and no other length left on it.
    """
    wanted = {fault.tensor for fault in evidence.misfits}
    return len(entry.shape) > 1 and entry.shape[0] > 0 and entry.name not in wanted


def zeros_by_design(evidence: Evidence, zero: Collection[str]) -> Mapping[str, bool]:
    """Those of the tensors of zeros that no row describes, or that only route, and none of whose like is known to hold
    anything else. They may have begun as zeros: routers do, tokens that stand for nothing, projections of another part.

    Returns:
        By name, whether all its like were seen. Of a part of a checkpoint that is not so where other layers have them.
    """
    doubtful = set(zero).difference(_never_zero(evidence)) if zero else set[str]()
    if not doubtful:
        return {}
    likes: defaultdict[str, set[str]] = defaultdict(set)
    for container in evidence.checkpoint.containers.values():
        for name in container.entries:
            likes[_NUMBER.sub("{}", name)].add(name)
    found: dict[str, bool] = {}
    for name in doubtful:
        group = likes[_NUMBER.sub("{}", name)] | {name}
        seen = [evidence.values[like] for like in group if like in evidence.values]
        if all(values.all_zero for values in seen):
            found[name] = all(like in evidence.values or like in evidence.unread for like in group)
    return found


def _never_zero(evidence: Evidence) -> Iterator[str]:
    """Names of what some row describes and no model begins with zeros in."""
    checkpoint = evidence.checkpoint
    for tensors in evidence.layers.values():
        for network in tensors.networks:
            yield from (entry.name for entry in network.weights.values())
        if tensors.attention is not None:
            yield from (entry.name for entry in tensors.attention.weights.values())
        yield from (norm.gain.name for norm in tensors.norms.values() if norm.gain is not None)
    if checkpoint.family is not None and checkpoint.trunk is not None:
        final = checkpoint.family.norm("final")
        outer = (embedding_entry(checkpoint), head_entry(checkpoint))
        yield from (entry.name for entry in outer if entry is not None)
        if final is not None:
            yield checkpoint.trunk.prefix + final.gain
