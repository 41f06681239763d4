"""Experts that no token reaches: whatever they hold, nothing changes."""

from glassblock.audit.evidence import Evidence


def unrouted(evidence: Evidence, layer: int, expert: int) -> bool:
    """Whether the router's row for an expert is zero, as it stays where no training reached it."""
    tensors = evidence.layers[layer]
    router, mixture = tensors.router.get("weight"), tensors.row.mixture
    rows = None if router is None else evidence.rows.get(router.name)
    if rows is None or mixture is None or mixture.router_layout != "out_in":
        return False
    return bool(rows.zero >> expert & 1)


def unrouted_tensors(evidence: Evidence) -> frozenset[str]:
    """Names of the tensors that hold nothing but such experts."""
    entries = evidence.checkpoint.entries
    return frozenset(
        entry.name
        for layer, tensors in evidence.layers.items()
        for network in tensors.networks
        if isinstance(network.expert, int) and unrouted(evidence, layer, network.expert)
        for entry in network.weights.values()
        if (whole := entries.get(entry.name)) is not None and entry.bytes == whole.bytes
    )
