"""What a part, a norm or a network that is not equal to its counterpart in the reference is to it.

A network is looked for under other orders of its rows before its parts are judged one by one.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from glassblock.audit.reference_map import Key, Part, network_parts
from glassblock.audit.reference_networks import Verdict, fingerprints, likeness_of, reordered
from glassblock.audit.reference_pairs import Pairs
from glassblock.audit.reference_relation import CLOSE, FAR, LEAST_ELEMENTS
from glassblock.audit.reference_types import FORM_KINDS, FunctionKind
from glassblock.checkpoint.layer_parts import Expert
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import GlassblockError
from glassblock.numerics.dtypes import name_of_dtype
from glassblock.numerics.likeness import Likeness, narrower_dtype

NOISE_SIGMAS = 6.0
"""Standard deviations within which a cosine is that of unrelated numbers."""

_OF_TWO = frozenset({"swapped", "fused-order", "fused-layout"})
"""What concerns gate and up alone."""


def explain_network(
    pairs: Pairs, layer: int, expert: Expert, mine: Mapping[Key, Part], its: Mapping[Key, Part]
) -> None:
    """Tell under what order of its rows a network is its counterpart, or that gate and up are exchanged.

    Args:
        pairs: What is known of the parts; a difference is added, and the parts that it explains are settled.
        layer: Which.
        expert: Which network of the layer.
        mine: The parts of that layer.
        its: The same of the reference.
    """
    home: Key = ("layer", layer, "network", expert)
    here, there = network_parts(layer, expert, mine), network_parts(layer, expert, its)
    try:
        verdict = _network_verdict(pairs, home, here, there)
        biases = _biases_exchanged(pairs, home, here, there)
    except GlassblockError as error:
        pairs.unread.append(f"layer {layer}: {error.message}")
        return
    told = list[str]()
    if verdict is not None and verdict.kind != "rounded":
        roles = ["gate", "up"] if verdict.kind in _OF_TWO else ["gate", "up", "down"]
        pairs.tell_network(verdict, home, here, there, roles)
        told += roles + (["gate-bias", "up-bias"] if verdict.kind in FORM_KINDS else [])
        if verdict.proved and pairs.differs((*home, "down")):
            told.append("down")  # its columns are those of the reference in the order of the rows
    if biases is not None:
        told += ["gate-bias", "up-bias"]
        if verdict is None or verdict.kind not in _OF_TWO:
            pairs.tell_network(biases, home, here, there, ["gate-bias", "up-bias"])
    for role in told:
        pairs.settle((*home, role), same=verdict is not None and verdict.kind in FORM_KINDS)


def _network_verdict(pairs: Pairs, home: Key, here: Mapping[str, Part], there: Mapping[str, Part]) -> Verdict | None:
    found = reordered(here, there, pairs.meter, biases=True) or reordered(here, there, pairs.meter, biases=False)
    return found or _nearly_exchanged(pairs, home, here, there)


def _biases_exchanged(pairs: Pairs, home: Key, here: Mapping[str, Part], there: Mapping[str, Part]) -> Verdict | None:
    """Whether the biases of gate and up are each other's, which must go with the weights."""
    names = ("gate-bias", "up-bias")
    if not set(names) <= here.keys() & there.keys() or all((*home, name) in pairs.same for name in names):
        return None
    crossed = _crossed(names, here, there, pairs.meter)
    if not crossed or not all(likeness.equal or likeness.rounded for likeness in crossed):
        return None
    fused = here["gate-bias"].name == here["up-bias"].name
    return Verdict(
        "fused-order" if fused else "swapped", "the biases of gate and up are exchanged, and not the weights"
    )


def _nearly_exchanged(pairs: Pairs, home: Key, here: Mapping[str, Part], there: Mapping[str, Part]) -> Verdict | None:
    """Whether gate and up are exchanged where their numbers have moved as well: by the cosines both ways."""
    straight = [pairs.measured.get((*home, part)) for part in ("gate", "up")]
    if any(likeness is None or abs(likeness.cosine) > FAR for likeness in straight):
        return None
    cosines = [likeness.cosine for likeness in _crossed(("gate", "up"), here, there, pairs.meter)]
    if min(cosines, default=0.0) < CLOSE:
        return None
    words = f"gate is the reference's up and up its gate, with cosines {cosines[0]:.3g} and {cosines[1]:.3g}"
    return Verdict("fused-order" if here["gate"].name == here["up"].name else "swapped", words, proved=False)


def _crossed(
    names: tuple[str, str], here: Mapping[str, Part], there: Mapping[str, Part], meter: ReadMeter
) -> Sequence[Likeness]:
    """How like each of two parts is to the counterpart of the other; none where a shape is another."""
    both = [(here[one], there[other]) for one, other in (names, names[::-1])]
    if any(part.shape != other.shape for part, other in both):
        return ()
    return [likeness_of(part, other, meter) for part, other in both]


def tell_norm_roles(pairs: Pairs, mine: Mapping[Key, Part], its: Mapping[Key, Part]) -> None:
    """Tell which norms of a layer hold what another norm of that layer holds in the reference."""
    norms = {key: part for key, part in mine.items() if "norm" in key and key[-1] != "bias"}
    others = {key: part for key, part in its.items() if "norm" in key and key[-1] != "bias"}
    for key, part in norms.items():
        if not pairs.differs(key) or pairs.measured[key].shifts:
            continue
        for other, candidate in others.items():
            if other != key and candidate.shape == part.shape and likeness_of(part, candidate, pairs.meter).equal:
                words = f"it is the norm {other[-1]} of the reference, used as {key[-1]}"
                pairs.tell("role", words, key, part, candidate)
                pairs.settle(key)
                break


def judge_part(pairs: Pairs, key: Key, here: Part, there: Part) -> None:
    """Tell what two parts of one shape that are not equal are to each other."""
    likeness = pairs.measured[key]
    rounded = likeness.rounded
    if rounded is not None:
        pairs.tell("rounded", f"rounded: {' then '.join(name_of_dtype(dtype) for dtype in rounded)}", key, here, there)
        return
    if "norm" in key and key[-1] != "bias" and likeness.shifts:
        add = -likeness.shifts[0]
        pairs.tell("offset", f"every gain is {likeness.shifts[0]:+g} of the reference's", key, here, there, add=add)
        return
    if _square(here) and _square(there) and _is_transposed(here, there, pairs.meter):
        pairs.tell("transposed", "its axes are exchanged relative to the reference", key, here, there)
        return
    noise = NOISE_SIGMAS / math.sqrt(max(likeness.elements, 1))
    far = likeness.elements >= LEAST_ELEMENTS and here.shape[1] > 1 and abs(likeness.cosine) < max(noise, 1e-3)
    kind: FunctionKind = "unrelated" if far else "differs"
    words = f"changed by {100 * likeness.relative_difference:.3g} % (cosine {likeness.cosine:.6g})"
    pairs.tell(kind, words, key, here, there, proved=False)


def _is_transposed(here: Part, there: Part, meter: ReadMeter) -> bool:
    dtype = narrower_dtype(here.dtype, there.dtype)
    rows = fingerprints(here, dtype, meter)
    return bool(torch.equal(rows, fingerprints(there, dtype, meter, columns=True)))


def _square(part: Part) -> bool:
    return part.shape[0] == part.shape[1] > 1
