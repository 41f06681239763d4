"""Rules about the numbers of tensors, and about tensors that a family needs and does not get."""

from collections.abc import Callable, Iterator

from glassblock.audit.evidence import Evidence, GainMoments
from glassblock.audit.names import alike, in_words, layer_of, only_layer
from glassblock.audit.neuron_numbers import NeuronNumbers
from glassblock.audit.odd_and_right import counts_nothing, is_open_bound, zeros_by_design
from glassblock.audit.rule import Checked, Found, Outcome, Rule
from glassblock.audit.unrouted import unrouted, unrouted_tensors
from glassblock.audit.values import coordinates
from glassblock.checkpoint.family import Role
from glassblock.checkpoint.fitting import LayerFaultKind
from glassblock.checkpoint.layer_parts import Expert
from glassblock.numerics.norms import norm_kind_named
from glassblock.numerics.wiring import Placement
from glassblock.wire.audits import Fix, Skipped

# A marker without content that some exporters put into files of 8-bit weights.
_MARKERS = frozenset({"scaled_fp8"})
_ADDS_ZERO = frozenset({Placement.PRE, Placement.PARALLEL})
"""Where norms stand so that a branch which returns zero adds nothing; a norm after it may have a bias."""

_OF_NORMS: frozenset[LayerFaultKind] = frozenset({"missing-norm", "final-missing"})
ENTERING: tuple[Role, ...] = ("attn_in", "ffn_in")
"""Norms of what enters attention and the network."""

_ZERO_INITIALISED = ("lora_B", "lora_embedding_B")


def _non_finite(evidence: Evidence) -> Iterator[Outcome]:
    bad = {name: values for name, values in evidence.values.items() if values.non_finite}
    bounds = {name for name, values in bad.items() if is_open_bound(name, values)}
    if bounds:
        names = tuple(name for name in bad if name in bounds)
        yield Found(
            f"{in_words(names)}: infinite, as a bound that bounds nothing",
            layer=only_layer(names),
            tensors=names,
            file=evidence.checkpoint.entries[names[0]].file.name,
            evidence={"count": len(names)},
            level="note",
            certainty="risk",
        )
    for names in alike(name for name in bad if name not in bounds).values():
        first = names[0]
        index = bad[first].first_non_finite
        where = coordinates(index or 0, evidence.checkpoint.entries[first].shape)
        count = sum(bad[name].non_finite for name in names)
        elements = sum(bad[name].elements for name in names)
        yield Found(
            f"{in_words(names)}: {count:,} of {elements:,} numbers are NaN or infinite, "
            f"the first at {list(where)} of {first}",
            layer=only_layer(names),
            tensors=names,
            file=evidence.checkpoint.entries[first].file.name,
            evidence={"count": count, "elements": elements, "first": {"tensor": first, "coordinates": list(where)}},
            fix=Fix(action="convert-again", description="Write these tensors again from a source that is finite."),
        )
    yield Checked(len(evidence.values))
    yield from _unread(evidence)


def _all_zero(evidence: Evidence) -> Iterator[Outcome]:
    unreached = unrouted_tensors(evidence)
    identities = dict(_identities(evidence))
    if identities:
        names = tuple(name for outputs in identities.values() for name in outputs)
        layers = ", ".join(map(str, identities))
        yield Found(
            f"{in_words(names)}: every number is zero, so layer{'s' if len(identities) > 1 else ''} {layers} "
            f"{'pass on what they receive' if len(identities) > 1 else 'passes on what it receives'}, as a layer does "
            "that was put in to be trained",
            layer=only_layer(names),
            tensors=names,
            file=evidence.checkpoint.entries[names[0]].file.name,
            evidence={"layers": list(identities)},
            level="note",
        )
        unreached |= set(names)
    zero = [
        name
        for name, values in evidence.values.items()
        if values.all_zero and name not in unreached and _must_not_vanish(evidence, name)
    ]
    by_design = zeros_by_design(evidence, zero)
    seen = tuple(name for name in zero if by_design.get(name))
    if seen:
        yield Found(
            f"{in_words(seen)}: every number is zero, and so is every tensor like it: it may have begun so, and no "
            "training moved it",
            layer=only_layer(seen),
            tensors=seen,
            file=evidence.checkpoint.entries[seen[0]].file.name,
            evidence={"tensors": len(seen)},
            level="note",
        )
    for names in alike(name for name in zero if name not in by_design).values():
        first = evidence.checkpoint.entries[names[0]]
        yield Found(
            f"{in_words(names)}: every number is zero, so what it feeds receives nothing",
            layer=only_layer(names),
            tensors=names,
            file=first.file.name,
            evidence={"shape": list(first.shape), "dtype": first.dtype},
            fix=Fix(action="convert-again", description="Write it again from the source, unless it was meant so."),
        )
    yield from _zero_shares(evidence)
    yield Checked(len(evidence.values))
    yield from _unread(evidence)


def _zero_shares(evidence: Evidence) -> Iterator[Found]:
    """A half of a fused tensor, or the slice of one expert in a stack, of zeros: the tensor as a whole is none."""
    for layer, tensors in evidence.layers.items():
        shares: dict[tuple[str, str], list[Expert]] = {}
        for network in tensors.networks:
            numbers = evidence.neurons.get((layer, network.expert))
            reached = not isinstance(network.expert, int) or not unrouted(evidence, layer, network.expert)
            if numbers is None or numbers.neurons < 2 or not reached:
                continue
            for part, entry in network.weights.items():
                roles = ("gate", "up") if part == "fused" else (part,)
                zero = tuple(role for role in roles if _is_zero_in(numbers, role))
                shared = part == "fused" or entry.bytes < evidence.checkpoint.entries[entry.name].bytes
                values = evidence.values.get(entry.name)
                if zero and shared and values is not None and values.any_nonzero and not values.non_finite:
                    shares.setdefault((entry.name, " and ".join(zero)), []).append(network.expert)
        for (name, what), experts in shares.items():
            numbered = [expert for expert in experts if isinstance(expert, int)]
            of = f" of expert{'s' if len(numbered) > 1 else ''} {', '.join(map(str, numbered))}" if numbered else ""
            yield Found(
                f"layer {layer}: {what}{of} in {name} {'are' if ' and ' in what else 'is'} zero throughout, so what it "
                "feeds receives nothing",
                layer=layer,
                tensors=(name,),
                file=evidence.checkpoint.entries[name].file.name,
                expert=numbered[0] if len(numbered) == 1 else None,
                evidence={"projections": what.split(" and "), "experts": numbered},
                fix=Fix(action="convert-again", description="Write it again from the source, unless it was meant so."),
            )


def _is_zero_in(numbers: NeuronNumbers, role: str) -> bool:
    """Whether every neuron is zero in a projection, of which the numbers tell no spread then, nor of a single one."""
    without_spread = {str(name) for name, spread in numbers.spread.items() if spread is None}
    all_but_one = {str(name) for name, bits in numbers.zero.items() if bits.bit_count() == numbers.neurons - 1}
    return role in without_spread - all_but_one


def _identities(evidence: Evidence) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Layers both of whose branches end in zeros, and nothing else in them does: they are identities."""
    for layer, tensors in evidence.layers.items():
        attention = tensors.attention
        output = None if attention is None else attention.weights.get("output")
        if attention is None or output is None or not tensors.networks or tensors.row.placement not in _ADDS_ZERO:
            continue
        downs = (network.weights["down"].name for network in tensors.networks if "down" in network.weights)
        ends = {output.name, *downs}
        biases = [attention.biases.get("output"), *(network.biases.get("down") for network in tensors.networks)]
        zero = {name for name in ends if _is_zero(evidence, name)}
        within = {entry.name for network in tensors.networks for entry in network.weights.values()} - ends
        if (
            zero == ends
            and len(ends) > 1
            and all(bias is None or _is_zero(evidence, bias.name) for bias in biases)
            and not any(_is_zero(evidence, name) for name in within)
        ):
            yield layer, tuple(sorted(ends))


def _is_zero(evidence: Evidence, name: str) -> bool:
    values = evidence.values.get(name)
    return values is not None and values.all_zero


def _must_not_vanish(evidence: Evidence, name: str) -> bool:
    """Whether a tensor of zeros would be a loss: not a bias, a zero-initialised adapter, a buffer, a gain of 1 + w."""
    entry = evidence.checkpoint.entries[name]
    last = name.rpartition(".")[2]
    if "bias" in last or any(part in name for part in _ZERO_INITIALISED) or not entry.dtype.startswith(("F", "BF")):
        return False
    return len(entry.shape) >= 2 or _is_plain_gain(evidence, name)


def _is_plain_gain(evidence: Evidence, name: str) -> bool:
    family, trunk = evidence.checkpoint.family, evidence.checkpoint.trunk
    if family is None or trunk is None:
        return False
    gains = {
        norm.gain.name: norm.row.kind
        for layer in evidence.layers.values()
        for norm in layer.norms.values()
        if norm.gain is not None
    }
    final = family.norm("final")
    if final is not None:
        gains[trunk.prefix + final.gain] = final.kind
    return name in gains and norm_kind_named(gains[name]).offset == 0


def _empty(evidence: Evidence) -> Iterator[Outcome]:
    entries = evidence.checkpoint.entries
    hollow = [entry for entry in entries.values() if entry.elements == 0 and entry.name not in _MARKERS]
    none = tuple(entry.name for entry in hollow if counts_nothing(entry, evidence))
    empty = tuple(entry.name for entry in hollow if entry.name not in none)
    if none:
        yield Found(
            f"{in_words(none)}: an axis of length zero within others, as of something of which the model has none",
            layer=only_layer(none),
            tensors=none,
            file=entries[none[0]].file.name,
            evidence={"count": len(none), "tensors": len(entries)},
            level="note",
            certainty="risk",
        )
    if empty:
        yield Found(
            f"{len(empty)} of {len(entries)} tensors have no element: {in_words(empty)}",
            layer=only_layer(empty),
            tensors=empty,
            file=entries[empty[0]].file.name,
            evidence={"count": len(empty), "tensors": len(entries)},
            fix=Fix(
                action="save-again",
                description="Gather sharded parameters before saving (ZeRO-3 leaves such placeholders).",
            ),
        )
    yield Checked(len(entries))


def _unread(evidence: Evidence) -> Iterator[Skipped]:
    yield from (Skipped(layer=layer_of(name), reason=reason) for name, reason in sorted(evidence.unread.items()))


def misfit_look(*kinds: LayerFaultKind) -> Callable[[Evidence], Iterator[Outcome]]:
    """Tells the faults of these kinds between the family's names and the tensors that are there."""

    def look(evidence: Evidence) -> Iterator[Outcome]:
        if not evidence.layers:
            yield Skipped(reason="the config does not say which tensors the layers are made of")
            return
        for fault in evidence.misfits:
            if fault.kind in kinds:
                fix = Fix(action="convert-again", description=fault.hint, tensors=(fault.tensor,))
                there = evidence.checkpoint.entries.get(fault.tensor)
                facts = {"dtype": there.dtype, "shape": list(there.shape)} if there else {"missing": fault.tensor}
                yield Found(fault.message, fault.layer, (fault.tensor,), evidence=facts, fix=fix)
        left_out = () if _OF_NORMS.issuperset(kinds) else (*hidden_in_part(evidence), *_codes(evidence))
        yield Checked(len(evidence.layers.keys() - {skipped.layer for skipped in left_out}))
        yield from left_out

    return look


def hidden_in_part(evidence: Evidence) -> Iterator[Skipped]:
    """The layers of which some tensors lie in a shard that nobody looked into."""
    hidden = evidence.hidden
    yield from (Skipped(layer=layer, reason=hidden.reason) for layer in hidden.half)


def _codes(evidence: Evidence) -> Iterator[Skipped]:
    """What is stored in a form that is not read; of a layer's weights once what is true of all."""
    told = ((fault.layer, fault.message) for fault in evidence.misfits if fault.kind == "quantised")
    yield from (Skipped(layer=layer, reason=reason) for layer, reason in dict.fromkeys(told))


def _undeclared_bias(evidence: Evidence) -> Iterator[Outcome]:
    for layer, tensors in evidence.layers.items():
        for entry in tensors.undeclared:
            values = evidence.values.get(entry.name)
            if values is None:
                yield Skipped(layer=layer, reason=evidence.unread.get(entry.name, f"{entry.name} was not read"))
                continue
            told = f"{entry.name} is there, but no bias is declared ({tensors.denied_by[entry.name]})"
            fix = Fix(action="declare-bias", description="Declare the bias, or drop it.", tensors=(entry.name,))
            if values.all_zero:
                message = f"{told}; it is all zeros, so nothing changes"
                yield Found(message, layer, (entry.name,), entry.file.name, fix=fix, level="note")
            else:
                yield Found(f"{told}: loaders drop it", layer, (entry.name,), entry.file.name, fix=fix)
        yield Checked()
    if not evidence.layers:
        yield Skipped(reason="the config does not say which tensors the layers are made of")


def _final_norm(evidence: Evidence) -> Iterator[Outcome]:
    yield from misfit_look("final-missing")(evidence)
    final, trunk = evidence.family.norm("final"), evidence.checkpoint.trunk
    if final is None or trunk is None:
        return
    name = trunk.prefix + final.gain
    values, layers = evidence.values.get(name), _entering_gains(evidence) or tuple(evidence.gains.values())
    trained = sum(gain.most > gain.least for gain in layers)
    neutral = norm_kind_named(final.kind).initial
    if values is None or values.elements < 2 or values.non_finite or {values.least, values.most} != {neutral}:
        return
    if 2 * trained > len(layers):
        yield Found(
            f"{name}: every gain is {neutral:g}, as before training, where {trained} of {len(layers)} norms of the "
            "layers are trained: it may never have been written",
            tensors=(name,),
            file=evidence.checkpoint.entries[name].file.name,
            evidence={"gain": neutral, "trained": trained, "norms": len(layers)},
            fix=Fix(action="convert-again", description="Write the norm again from the source.", tensors=(name,)),
            level="warning",
            certainty="statistical",
        )


def _entering_gains(evidence: Evidence) -> tuple[GainMoments, ...]:
    """Of the norms that can be multiplied into the matrices behind them, where the last one can be into the head."""
    norms = (tensors.norms.get(role) for tensors in evidence.layers.values() for role in ENTERING)
    gains = (None if norm is None or norm.gain is None else evidence.gains.get(norm.gain.name) for norm in norms)
    return tuple(gain for gain in gains if gain is not None)


TENSOR_RULES: tuple[Rule, ...] = (
    Rule(
        "tensor/non-finite",
        "error",
        "proved",
        what="A tensor holds NaN or infinity.",
        hurts="One such number spreads to every output that depends on it.",
        detection="Every number of every tensor is read; the first place and the count are told. Infinite bounds "
        "and masks, told by their names, are noted only.",
        fooled_by="Scales that turn finite stored numbers into infinite ones.",
        report="https://github.com/ICTMCG/Make-Your-Anchor/issues/9",
        look=_non_finite,
        looks_at="tensors",
        tells_after="tensor",
    ),
    Rule(
        "tensor/empty",
        "error",
        "proved",
        what="A tensor has no element.",
        hurts="The parameter was never saved; a loader that does not insist keeps its initial values.",
        detection="An axis of length zero in the header. Where it stands behind another axis, in a tensor that no "
        "row describes, the model may have none of something, such as register tokens: a note.",
        fooled_by="Markers without content; the one in common use is known and let pass.",
        report="https://github.com/sediment1024/PhysRAG/issues/3",
        look=_empty,
        tells_before_tensors=True,
        looks_at="tensors",
    ),
    Rule(
        "tensor/all-zero",
        "warning",
        "risk",
        what="Every number of a weight or of a norm's gain is zero.",
        hurts="The branch behind it contributes nothing, which looks like a slightly worse model.",
        detection="Every number is read. Biases, adapters that start at zero, buffers, gains of 1 + w and "
        "experts that the router has no row for may be zero. Where both branches of a layer end in zeros, and nothing "
        "else in it is zero, it is noted only; so is a router, or a tensor that no row describes, where all that "
        "differ from it in a number of the name are zeros as well.",
        fooled_by="Weights that were pruned away on purpose: hence a warning, not an error.",
        report="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4200",
        look=_all_zero,
        looks_at="tensors",
        tells_after="layer",
    ),
)

MISSING_RULES: tuple[Rule, ...] = (
    Rule(
        "ffn/missing-tensor",
        "error",
        "proved",
        what="A weight that the family has is in no file.",
        hurts="Loaders that do not insist initialise it at random.",
        detection="The family's names are looked up for every layer, for the embedding too.",
        fooled_by="A config that names the wrong family of two with like names.",
        report="https://github.com/NVIDIA/Megatron-LM/issues/5844",
        needs=("family",),
        look=misfit_look("missing-tensor"),
        tells_before_tensors=True,
        looks_at="tensors",
    ),
    Rule(
        "ffn/missing-bias",
        "error",
        "proved",
        what="A bias that config or family declares is in no file.",
        hurts="It is taken as zero or as random numbers, depending on the loader.",
        detection="Declaration (config, else family) against presence, per projection.",
        fooled_by="A config whose flag is meant for attention only.",
        report="https://github.com/paiml/entrenar/issues/258",
        needs=("family",),
        look=misfit_look("missing-bias"),
        tells_before_tensors=True,
        looks_at="tensors",
    ),
    Rule(
        "ffn/undeclared-bias",
        "error",
        "proved",
        what="A bias is in the file that neither config nor family declares.",
        hurts="Loaders drop it. One that is all zeros is noted only.",
        detection="Presence against declaration, and whether all its numbers are zero.",
        fooled_by="Biases under names of another dialect.",
        report="https://github.com/vllm-project/vllm/pull/39666",
        needs=("family",),
        look=_undeclared_bias,
        looks_at="layers",
        tells_after="layer",
    ),
    Rule(
        "norm/final-missing",
        "error",
        "proved",
        what="The norm after the last layer is in no file, or was never written.",
        hurts="The head receives hidden states of another scale: the ranking of tokens changes.",
        detection="The family's name of it is looked up; families without one are let pass. A warning: all its gains "
        "are as before training, where those of most layers are not.",
        fooled_by="A base model saved under another prefix. A final norm whose gains were multiplied into the head.",
        report="https://github.com/sgl-project/sglang/pull/32279",
        needs=("family",),
        look=_final_norm,
        tells_before_tensors=True,
        looks_at="layers",
    ),
)
