"""Layer numbers as a person writes them."""

from collections.abc import Iterable


def layer_ranges(layers: Iterable[int]) -> str:
    """`layer 7`, `layers 0-29`, `layers 0-3, 7`.

    >>> layer_ranges([3, 1, 2, 0, 7])
    'layers 0-3, 7'
    """
    runs: list[tuple[int, int]] = []
    for layer in sorted(set(layers)):
        if runs and layer == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], layer)
        else:
            runs.append((layer, layer))
    named = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    single = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"layer {named}" if single else f"layers {named}"
