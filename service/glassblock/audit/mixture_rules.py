"""Rules about routed experts: absent, copies of one another, never trained, or under other numbers."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from glassblock.audit.evidence import Evidence
from glassblock.audit.names import in_words
from glassblock.audit.neuron_numbers import NeuronNumbers, RowNumbers, is_noise, noise_spread
from glassblock.audit.rule import Checked, Found, Outcome, Rule
from glassblock.audit.tensor_rules import misfit_look
from glassblock.audit.unrouted import unrouted
from glassblock.checkpoint.layer_parts import LayerTensors, NetworkTensors
from glassblock.wire.audits import Fix, Skipped, Undecidable

TRAINED = 10.0
"""Standard deviations of the scatter of noise beyond which lengths cannot be noise."""

_AGAIN = Fix(action="convert-again", description="Convert the experts again from the source.")
_NO_EXPERTS = "no layer has several routed experts"


def _routed(tensors: LayerTensors) -> tuple[NetworkTensors, ...]:
    return tuple(network for network in tensors.networks if isinstance(network.expert, int))


def _mixtures(evidence: Evidence) -> Mapping[int, tuple[NetworkTensors, ...]]:
    """The routed experts of every layer that has at least two."""
    every = {layer: _routed(tensors) for layer, tensors in evidence.layers.items()}
    return {layer: experts for layer, experts in every.items() if len(experts) > 1}


def _duplicated(evidence: Evidence) -> Iterator[Outcome]:
    mixtures = _mixtures(evidence)
    if not mixtures:
        yield Skipped(reason=_NO_EXPERTS)
    for layer, experts in mixtures.items():
        copies = _copies(evidence, layer, experts)
        if copies is None:
            yield Skipped(layer=layer, reason="the bytes of its experts were not hashed, or not read")
            continue
        yield Checked()
        for numbers, parts in copies.items():
            yield _copied(layer, experts, numbers, parts)


def _copies(
    evidence: Evidence, layer: int, experts: Iterable[NetworkTensors]
) -> dict[tuple[int, ...], list[str]] | None:
    """Experts whose weights are equal byte for byte, and which of their projections are."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for network in experts:
        silent = _is_silent(evidence.neurons.get((layer, network.expert)))
        for part, entry in network.weights.items():
            digest = evidence.digest_of(entry)
            if digest is None:
                return None
            values = evidence.values.get(entry.name)
            whole = evidence.checkpoint.entries.get(entry.name)
            alone = whole is not None and whole.bytes == entry.bytes
            if (values is not None and alone and values.all_zero) or silent:
                continue  # experts of zeros are alike and no copies
            groups.setdefault((part, entry.dtype, entry.shape, digest), []).append(int(network.expert or 0))
    found: dict[tuple[int, ...], list[str]] = {}
    for (part, *_), numbers in groups.items():
        if len(numbers) > 1:
            found.setdefault(tuple(numbers), []).append(str(part))
    return found


def _is_silent(numbers: NeuronNumbers | None) -> bool:
    """Whether everything in a network is zero."""
    return numbers is not None and all(spread is None for spread in numbers.spread.values()) and not numbers.loudest


def _copied(layer: int, experts: tuple[NetworkTensors, ...], numbers: tuple[int, ...], parts: list[str]) -> Found:
    weights = {network.expert: network.weights for network in experts}
    names = tuple(
        dict.fromkeys(entry.name for number in numbers for part, entry in weights[number].items() if str(part) in parts)
    )
    whole = len(parts) == len(weights[numbers[0]])
    what = "all their weights" if whole else " and ".join(parts)
    facts: dict[str, Any] = {"experts": list(numbers), "projections": parts}
    told = f"layer {layer}: the experts {', '.join(map(str, numbers))} are equal byte for byte in {what}"
    if whole and len(numbers) == len(experts):
        message = f"{told}, and these are all it has: so begins a mixture that was made of a dense model"
        return Found(message, layer, names, evidence=facts, level="note", certainty="risk")
    return Found(f"{told}: one of them stands in for the others", layer, names, evidence=facts, fix=_AGAIN)


def _untrained(evidence: Evidence) -> Iterator[Outcome]:
    mixtures = _mixtures(evidence)
    if not mixtures:
        yield Skipped(reason=_NO_EXPERTS)
    for layer, experts in mixtures.items():
        numbers = {int(one.expert or 0): evidence.neurons.get((layer, one.expert)) for one in experts}
        known = {expert: found for expert, found in numbers.items() if found is not None}
        if len(known) < len(experts):
            yield Skipped(layer=layer, reason=f"{len(experts) - len(known)} of {len(experts)} experts were not weighed")
        else:
            yield Checked()
        chosen = {expert: found for expert, found in known.items() if not unrouted(evidence, layer, expert)}
        noise = tuple(expert for expert, found in chosen.items() if is_noise(found))
        beside = _trained_beside(evidence, layer, chosen, noise)
        if noise and beside is not None:
            yield _never_trained(layer, experts, noise, chosen, beside)


def _is_trained(found: NeuronNumbers) -> bool:
    least = noise_spread(found.width, found.neurons, deviations=TRAINED)
    return any(spread is not None and spread > least for spread in found.spread.values())


def _trained_beside(
    evidence: Evidence, layer: int, experts: Mapping[int, NeuronNumbers], noise: tuple[int, ...]
) -> str | None:
    """What in the layer was trained: most of the other experts, or, where all are noise, its attention."""
    others = [found for expert, found in experts.items() if expert not in noise]
    if others:
        return "its other experts" if 2 * sum(map(_is_trained, others)) > len(others) else None
    tensors = evidence.layers[layer]
    router = {entry.name for entry in tensors.router.values()}
    for name, rows in evidence.rows.items():
        if name.startswith(tensors.prefix) and name not in router and _rows_are_trained(rows):
            return name
    return None


def _rows_are_trained(rows: RowNumbers) -> bool:
    return rows.spread is not None and rows.spread > noise_spread(rows.width, rows.rows, deviations=TRAINED)


def _never_trained(
    layer: int,
    experts: tuple[NetworkTensors, ...],
    noise: tuple[int, ...],
    known: Mapping[int, NeuronNumbers],
    beside: str,
) -> Found:
    names = tuple(dict.fromkeys(entry.name for one in experts if one.expert in noise for entry in one.weights.values()))
    first = known[noise[0]]
    which = f"expert {noise[0]} has" if len(noise) == 1 else f"{len(noise)} of {len(known)} experts have"
    return Found(
        f"layer {layer}: {which} neurons whose lengths vary as those of independent random numbers, unlike {beside}: "
        f"never trained, or never filled ({in_words(names)})",
        layer,
        names,
        expert=noise[0] if len(noise) == 1 else None,
        evidence={
            "experts": list(noise),
            "spread": dict(first.spread),
            "noise": noise_spread(first.width, first.neurons, deviations=0.0),
            "beside": beside,
        },
        fix=_AGAIN,
    )


def _exchanged(evidence: Evidence) -> Iterator[Outcome]:
    mixtures = _mixtures(evidence)
    if not mixtures:
        yield Skipped(reason=_NO_EXPERTS)
    elif evidence.reference is None:
        yield Undecidable(
            reason="experts under other numbers than those of their rows in the router look as they do in order",
            would_decide="a reference checkpoint (--reference)",
        )
    elif evidence.reference.answers:
        yield Checked(len(mixtures))


MIXTURE_RULES: tuple[Rule, ...] = (
    Rule(
        "moe/experts-missing",
        "error",
        "proved",
        what="Of an expert that the router chooses, no tensor is in any file.",
        hurts="Loaders that do not insist put random numbers there, and every token sent to it is answered by noise.",
        detection="The names of every expert that the config counts (or the router has a row for) are looked up. One "
        "that is there in part lacks tensors, which is another rule.",
        fooled_by="Experts under names of another dialect. A config that counts more than the router does is told as "
        "a shape.",
        report="https://github.com/kekzl/imp/pull/1190",
        needs=("family",),
        looks_at="tensors",
        look=misfit_look("experts-missing"),
        tells_before_tensors=True,
    ),
    Rule(
        "moe/experts-duplicated",
        "error",
        "proved",
        what="Two experts of a layer hold the same numbers.",
        hurts="One expert answers for another: what that one had learnt is lost.",
        detection="The hashes of all experts' weights are compared. Experts of zeros are left out; where all experts "
        "of a layer are equal it is noted only, since mixtures made of a dense model begin so.",
        fooled_by="Experts merged on purpose and written out once for each name. Copies that were rounded otherwise.",
        report="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/1871",
        needs=("family",),
        looks_at="layers",
        look=_duplicated,
        tells_after="layer",
    ),
    Rule(
        "moe/experts-untrained",
        "warning",
        "statistical",
        what="Experts hold random numbers beside trained ones.",
        hurts="A converter that copied nothing reported success; tokens sent to these experts are answered by noise.",
        detection="The lengths of an expert's neurons vary in gate, up and down no more than those of independent "
        "numbers do, while those of the layer's other experts, or of its attention, vary far more.",
        fooled_by="An expert that the router never chose and that stayed as it was initialised; one whose row in the "
        "router is zero is left out.",
        report="https://github.com/NVIDIA/Megatron-LM/issues/5844",
        needs=("family",),
        looks_at="layers",
        look=_untrained,
        tells_after="layer",
    ),
    Rule(
        "moe/experts-exchanged",
        "error",
        "proved",
        what="Experts lie under other numbers than those of their rows in the router.",
        hurts="Every token is answered by an expert that was trained for others. Shapes and numbers are sound.",
        detection="Without a reference nothing tells. Where one is given (--reference), equal experts are found "
        "there under other numbers, whatever the order of their neurons, and the router's rows have not moved with "
        "them. Moved together they compute the same.",
        fooled_by="A reference that is wrong itself. Experts that were trained on since.",
        report="https://github.com/pytorch/torchtitan/pull/1918",
        needs=("family",),
        looks_at="layers",
        look=_exchanged,
    ),
)
