"""Rules about numbers beyond the range of float16, and neurons that cannot act: notes, risks and no claims."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from glassblock.audit.against import own_settings, their_settings
from glassblock.audit.evidence import Evidence
from glassblock.audit.names import in_words, only_layer
from glassblock.audit.neuron_numbers import NeuronNumbers
from glassblock.audit.padding import wider_than_declared
from glassblock.audit.rule import Checked, Found, Outcome, Rule
from glassblock.checkpoint.family import FeedForwardRow
from glassblock.checkpoint.layer_parts import Expert, LayerTensors, NetworkTensors
from glassblock.checkpoint.settings import eps_of, number_of, text_of
from glassblock.errors import DamagedCheckpoint, InvalidValue
from glassblock.numerics.activations import Activation, activation_named
from glassblock.wire.audits import Skipped

FLOAT16_MOST = 65504.0
LARGE_EPS = 0.1
"""An epsilon that no norm in use has; the mean squares it is added to are often smaller."""

DEVIATIONS = 6.0
"""How far from its usual size the output of a projection may be on some token: standard deviations of normal rows."""

_PRUNING_KEYS = ("sparsity_config", "pruning_config", "pruned_heads", "sparsity", "pruning")


class _Reach(NamedTuple):
    layer: int
    expert: Expert
    neuron: int
    usual: float
    bound: float
    tensors: tuple[str, ...]


class _NormSize(NamedTuple):
    """Of the norm in front of a network: root mean square and greatest size of its gain, and length of its bias."""

    usual: float
    most: float
    bias: float


class _Growth(NamedTuple):
    """Of hidden units: whether the activation grows as its input or as the square, and what clamps leave at most."""

    power: int
    ceiling: float


def _overflow(evidence: Evidence) -> Iterator[Outcome]:
    yield from _stored(evidence)
    reaches: list[_Reach] = []
    for layer, tensors in evidence.layers.items():
        norm = _norm_size(evidence, tensors)
        if norm is None:
            yield Skipped(layer=layer, reason="no norm in front of its network, or none that could be read")
            continue
        found = [_reach(evidence, layer, network, norm) for network in tensors.networks]
        unknown = dict.fromkeys(why for why in found if isinstance(why, str))
        yield from (Skipped(layer=layer, reason=why) for why in unknown)
        known = [reach for reach in found if isinstance(reach, _Reach)]
        yield Checked(len(known))
        reaches += known
    over = [reach for reach in reaches if reach.usual > FLOAT16_MOST]
    if over:
        worst = max(over, key=lambda reach: reach.usual)
        where = "" if worst.expert is None else f", expert {worst.expert}"
        yield Found(
            f"layer {worst.layer}{where}: neuron {worst.neuron} reaches {worst.usual:.2g} in front of down where gate "
            f"and up are {DEVIATIONS:g} times their usual size (at most {worst.bound:.2g}): beyond float16, if an "
            "engine runs it in that",
            worst.layer,
            worst.tensors,
            expert=worst.expert if isinstance(worst.expert, int) else None,
            evidence={
                "site": "input of down",
                "neuron": worst.neuron,
                "reach": worst.usual,
                "bound": worst.bound,
                "layers": sorted({reach.layer for reach in over}),
            },
        )


def _stored(evidence: Evidence) -> Iterator[Outcome]:
    """Numbers in the file that float16 cannot hold."""
    large = {
        name: most
        for name, values in evidence.values.items()
        if (most := values.largest) is not None
        and most > FLOAT16_MOST
        and evidence.checkpoint.entries[name].dtype in {"F32", "BF16", "F64"}
    }
    if large:
        names = tuple(sorted(large, key=lambda name: -large[name]))
        yield Found(
            f"{in_words(names)}: numbers up to {large[names[0]]:.3g} become infinite in float16",
            only_layer(names),
            names,
            evidence.checkpoint.entries[names[0]].file.name,
            evidence={"site": "weights", "most": large[names[0]]},
        )


def _norm_size(evidence: Evidence, tensors: LayerTensors) -> _NormSize | None:
    norm = tensors.norms.get("ffn_in")
    if norm is None:
        return None
    values = None if norm.bias is None else evidence.values.get(norm.bias.name)
    if norm.bias is not None and (values is None or not math.isfinite(values.square_sum)):
        return None
    bias = 0.0 if values is None else math.sqrt(values.square_sum)
    if norm.gain is None:
        return _NormSize(1.0, 1.0, bias)
    found = evidence.gains.get(norm.gain.name)
    if found is None or not math.isfinite(found.square_sum):
        return None
    return _NormSize(math.sqrt(found.square_sum / found.elements), max(abs(found.least), abs(found.most)), bias)


def _reach(evidence: Evidence, layer: int, network: NetworkTensors, norm: _NormSize) -> _Reach | str:
    """How large the loudest neuron is, on rows that the norm has made: of d numbers, the squares add up to d.

    Or why that cannot be told.
    """
    numbers, row = evidence.neurons.get((layer, network.expert)), network.row
    if numbers is None or numbers.loudest is None:
        return f"{_called(network)} was not weighed, or is zero throughout"
    values = [evidence.values.get(entry.name) for part, entry in network.biases.items() if part != "down"]
    biases = [bias.largest for bias in values if bias is not None and bias.largest is not None]
    if len(biases) < len(values):
        return f"a bias of {_called(network)} could not be read"
    growth = _growth(evidence, row)
    if growth is None:
        return f"the activation of {_called(network)} is not known, or is learned"
    loudest = numbers.loudest
    lengths = [loudest.up] if loudest.gate is None else [loudest.gate, loudest.up]
    bias = max(biases, default=0.0)
    usual = [length * norm.usual * DEVIATIONS for length in lengths]
    most = [length * (norm.most * math.sqrt(numbers.width) + norm.bias) + bias for length in lengths]
    # The activation is that of the gate, or of the only projection.
    reach, bound = (min(math.prod([*[first] * growth.power, *rest]), growth.ceiling) for first, *rest in (usual, most))
    names = tuple(dict.fromkeys(entry.name for part, entry in network.weights.items() if part != "down"))
    return _Reach(layer, network.expert, loudest.neuron, min(reach, bound), bound, names)


def _growth(evidence: Evidence, row: FeedForwardRow) -> _Growth | None:
    """None where the config does not tell, or the activation is learned."""
    limit = row.gating_parameters.get("limit")
    if limit is None:
        activation = _activation(evidence, row)
        squares = activation is not None and float(activation.function(torch.tensor(1e3)).abs()) > 1e5
        return None if activation is None else _Growth(2 if squares else 1, math.inf)
    try:
        most = number_of(evidence.checkpoint.config, evidence.family, limit).value
    except DamagedCheckpoint:
        return None
    return _Growth(1, most * (most + 1))  # one form adds 1 to what is left of up


def _activation(evidence: Evidence, row: FeedForwardRow) -> Activation | None:
    """The one that the config names; None where that is none that is known, or one with tensors of its own."""
    if row.activation_tensors:
        return None
    try:
        return activation_named(text_of(evidence.checkpoint.config, evidence.family, row.activation).value)
    except (DamagedCheckpoint, InvalidValue):
        return None


def _underflow(evidence: Evidence) -> Iterator[Outcome]:
    row, config = evidence.family, evidence.checkpoint.config
    yield from _implausible(evidence)
    sides = [("", own_settings(evidence).get("dtype"))]
    theirs = their_settings(evidence)
    if theirs is not None:
        sides.append((f" ({evidence.question.against_name})", theirs.settings.get("dtype")))
    known = [(name, told) for name, told in sides if told is not None]
    if not known:
        yield Skipped(reason="neither config nor tensors tell one dtype")
    for name, told in known:
        dtype = getattr(torch, str(told.value), None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            continue
        gone: dict[tuple[float, str], list[str]] = {}
        for norm in row.norms:
            try:
                eps = eps_of(config, row, norm.eps)
            except DamagedCheckpoint as error:
                yield Skipped(reason=error.message)
                continue
            yield Checked()
            if eps.value > 0 and float(torch.tensor(eps.value, dtype=torch.float64).to(dtype)) == 0:
                gone.setdefault((eps.value, eps.source), []).append(norm.role)
        for (value, source), roles in gone.items():
            yield Found(
                f"the epsilon of the norms {', '.join(roles)} is {value:g} ({source}), which is 0 in {told.value} "
                f"({told.source}){name}: a row of zeros is divided by zero where the norm is not run in float32",
                file=None if config is None else config.path.name,
                evidence={
                    "eps": value,
                    "roles": roles,
                    "dtype": str(told.value),
                    "least_subnormal": torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps,
                },
            )


def _implausible(evidence: Evidence) -> Iterator[Outcome]:
    """Epsilons of which every norm that is in use is far: none at all, or as large as what they are added to."""
    row, config = evidence.family, evidence.checkpoint.config
    odd: dict[tuple[float, str], list[str]] = {}
    for norm in row.norms:
        try:
            eps = eps_of(config, row, norm.eps)
        except DamagedCheckpoint:
            continue  # told as a skip below
        if eps.value <= 0 or eps.value >= LARGE_EPS:
            odd.setdefault((eps.value, eps.source), []).append(norm.role)
    for (value, source), roles in odd.items():
        effect = (
            "rows whose mean square is not far above that come out too small"
            if value > 0
            else "a row of zeros is divided by zero"
        )
        yield Found(
            f"the epsilon of the norms {', '.join(roles)} is {value:g} ({source}), where norms have 1e-12 to 1e-3: "
            f"{effect}",
            file=None if config is None else config.path.name,
            evidence={"eps": value, "roles": roles},
        )


def _dead(evidence: Evidence) -> Iterator[Outcome]:
    config = evidence.checkpoint.config
    declared = None if config is None else next((key for key in _PRUNING_KEYS if config.values.get(key)), None)
    if declared is not None:
        yield Skipped(reason=f"the config declares that the model was pruned ({declared})")
        return
    if not any(tensors.networks for tensors in evidence.layers.values()):
        yield Skipped(reason="no feed-forward network was found")
    for layer, tensors in evidence.layers.items():
        if wider_than_declared(evidence.checkpoint, tensors) is not None:
            yield Skipped(layer=layer, reason="it is wider than declared, which is told as a shape")
            continue
        for network in tensors.networks:
            numbers = evidence.neurons.get((layer, network.expert))
            if numbers is None:
                yield Skipped(layer=layer, reason=f"{_called(network)} was not weighed")
                continue
            yield Checked()
            found = _dead_in(evidence, layer, network, numbers)
            if found is not None:
                yield found


def _dead_in(evidence: Evidence, layer: int, network: NetworkTensors, numbers: NeuronNumbers) -> Found | None:
    silencing = _silencing(evidence, network)
    # A projection that is zero as a whole is told by tensor/all-zero.
    zero = {
        role: bits for role, bits in numbers.zero.items() if role in silencing and bits.bit_count() < numbers.neurons
    }
    dead = 0
    for bits in zero.values():
        dead |= bits
    if not dead:
        return None
    counts = {role: bits.bit_count() for role, bits in zero.items() if bits}
    told = ", ".join(f"{count} in {role}" for role, count in counts.items())
    first = (dead & -dead).bit_length() - 1
    facts: dict[str, Any] = {"dead": dead.bit_count(), "neurons": numbers.neurons, "zero": counts, "first": first}
    return Found(
        f"layer {layer}: {dead.bit_count()} of {numbers.neurons} neurons of {_called(network)} are zero in some "
        f"projection and not in all ({told}; the first is {first}), so they never act",
        layer,
        tuple(dict.fromkeys(entry.name for entry in network.weights.values())),
        expert=network.expert if isinstance(network.expert, int) else None,
        evidence=facts,
    )


def _called(network: NetworkTensors) -> str:
    if network.expert is None:
        return "its network"
    return "its shared expert" if network.expert == "shared" else f"expert {network.expert}"


def _silencing(evidence: Evidence, network: NetworkTensors) -> frozenset[str]:
    """The projections in which a zero row (of down, a column) keeps a neuron from acting, whatever is in the others."""
    row, biased = network.row, {str(part) for part in network.biases}
    if "fused" in biased:
        biased |= {"gate", "up"}
    silencing = {"down"}
    if row.gating == "product" and row.gated and "up" not in biased:
        silencing.add("up")
    activation = _activation(evidence, row) if row.gating == "product" else None
    first = "gate" if row.gated else "up"
    if activation is not None and first not in biased and float(activation.function(torch.zeros(1))) == 0:
        silencing.add(first)
    return frozenset(silencing)


NEURON_RULES: tuple[Rule, ...] = (
    Rule(
        "ffn/dead-neurons",
        "note",
        "risk",
        what="Neurons are zero in one projection and not in the others, so that they never act.",
        hurts="Part of the width is idle: a tensor was filled in part, or pruned without saying so.",
        detection="The length of every row of gate and up and of every column of down. Neurons that are zero "
        "throughout are padding, and a config that declares pruning is believed.",
        fooled_by="A model pruned without a word in its config.",
        report="https://github.com/neuralmagic/sparseml/issues/553",
        needs=("family",),
        looks_at="layers",
        look=_dead,
        tells_after="layer",
    ),
)

RANGE_RULES: tuple[Rule, ...] = (
    Rule(
        "range/fp16-overflow",
        "note",
        "risk",
        what="In float16 a number of the file, or the input of a down projection, could exceed 65,504.",
        hurts="It becomes infinite, then NaN: empty text, or one character for ever.",
        detection="The longest product of a row of gate and a row of up, with the gain of the norm in front, at six "
        "times its usual size, squared by an activation that squares and cut by clamps; and the greatest number "
        "stored. The bound that no input exceeds, biases included, is told with it.",
        fooled_by="Inputs that never meet that neuron; massive activations on a few tokens, which weights do not show. "
        "Captured tensors would tell.",
        report="https://github.com/huggingface/transformers/issues/9295",
        needs=("family",),
        looks_at="layers",
        look=_overflow,
    ),
    Rule(
        "range/eps-underflow",
        "note",
        "risk",
        what="The epsilon of a norm is zero in the dtype that the model is declared to run in, or no size for one.",
        hurts="A row of zeros, such as that of a padding token, is divided by zero and becomes NaN.",
        detection="Every epsilon is rounded to the dtype of the config, or else of the tensors; with another engine's "
        "config, also to that of it. One that is 0, or 0.1 and more, is told in any dtype.",
        fooled_by="Engines that run norms in float32, as most do.",
        report="https://github.com/deepspeedai/DeepSpeed/issues/581",
        needs=("family",),
        look=_underflow,
        tells_before_tensors=True,
    ),
)
