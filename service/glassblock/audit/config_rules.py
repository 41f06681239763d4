"""Rules about what the config declares: shapes, the family, and whether the output head is the embedding."""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

from glassblock.audit.evidence import Evidence
from glassblock.audit.names import in_words
from glassblock.audit.padding import network_entries, wider_than_declared
from glassblock.audit.rule import Checked, Found, Outcome, Rule
from glassblock.audit.tensor_rules import hidden_in_part
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.config import ConfigFile, declared_flags
from glassblock.checkpoint.fitting import LayerFault
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.outer_tensors import embedding_name, head_entry
from glassblock.checkpoint.recognition import PartWithin
from glassblock.checkpoint.settings import tied_of
from glassblock.checkpoint.strict_json import shown
from glassblock.checkpoint.wrappers import wrapped_names
from glassblock.errors import DamagedCheckpoint
from glassblock.wire.audits import Fix, Skipped, Undecidable

_HEADED = re.compile(r"(?:LM|LMHeadModel|ForConditionalGeneration)$")
"""How the names of classes end that have an output head over the vocabulary."""


def _shape(evidence: Evidence) -> Iterator[Outcome]:
    for fault in evidence.checkpoint.faults:
        if fault.rule == "config/shape":
            fix = Fix(action="correct-config", description=fault.hint)
            yield Found(fault.message, file=fault.file.name, evidence={"key": getattr(fault, "key", None)}, fix=fix)
    if evidence.lacks("family") is not None:
        yield Skipped(reason=evidence.lacks("family") or "")
        return
    padded = {layer: text for layer in evidence.layers if (text := _padding(evidence, layer)) is not None}
    for layer, text in padded.items():
        weights = evidence.layers[layer].weights
        names = tuple(entry.name for entry in weights.values())
        fix = Fix(action="correct-config", description="Set the width in the config to the stored one.")
        yield Found(text, layer, names, fix=fix, level="note", certainty="risk")
    explained = {entry.name for layer in padded for entry in network_entries(evidence.layers[layer])}
    faults = [fault for fault in evidence.misfits if fault.kind == "shape" and fault.tensor not in explained]
    alike: dict[str, list[LayerFault]] = defaultdict(list)
    for fault in faults:
        # The same words about tensors of many layers are one mistake.
        alike[fault.message.replace(fault.tensor, "")].append(fault)
    study = evidence.reference
    told_by = {} if study is None or not study.answers else {"reference": study.name}
    for group in alike.values():
        yield _misshapen(group, told_by)
    if not evidence.layers:
        yield Skipped(reason="the config's sizes cannot be used")
        return
    left_out = tuple(hidden_in_part(evidence))
    yield Checked(len(evidence.layers.keys() - {skipped.layer for skipped in left_out}))
    yield from left_out


def _misshapen(group: list[LayerFault], told_by: dict[str, str]) -> Found:
    names = tuple(fault.tensor for fault in group)
    places = {fault.layer for fault in group}
    layers = sorted(layer for layer in places if layer is not None)
    more = f" (and {len(group) - 1} more: {in_words(names[1:])})" if len(group) > 1 else ""
    return Found(
        f"{group[0].message}{more}",
        layer=layers[0] if len(places) == len(layers) == 1 else None,
        tensors=names,
        file=group[0].file.name,
        evidence={"layers": layers, **told_by},
        fix=Fix(action="correct-config", description=group[0].hint, tensors=names),
    )


def _padding(evidence: Evidence, layer: int) -> str | None:
    """In words, that the layer is wider than declared by idle neurons only; None where it is not."""
    width = wider_than_declared(evidence.checkpoint, evidence.layers[layer])
    if width is None or width.stored - width.declared.value != evidence.idle_neurons.get(layer):
        return None
    parts = "gate, up and down" if evidence.family.network.gated else "up and down"
    return (
        f"layer {layer} stores {width.stored} neurons where {width.declared.source} is {width.declared.value}: "
        f"{width.stored - width.declared.value} of them are zero in {parts}, so the width was padded and the function "
        "is the same; a loader that goes by the config refuses the shapes"
    )


def _unknown_family(evidence: Evidence) -> Iterator[Outcome]:
    checkpoint = evidence.checkpoint
    fault = checkpoint.family_fault
    if fault is None:
        known = checkpoint.family is not None
        yield Checked() if known else Skipped(reason="config.json cannot be read, which is a finding of its own")
        if checkpoint.part is not None:
            yield Skipped(reason=_beside_the_part(checkpoint, checkpoint.part))
        return
    wrapped = None if checkpoint.family is None else wrapped_names(checkpoint.entries, checkpoint.family)
    names = sorted(checkpoint.entries if wrapped is None else wrapped.names)
    named: dict[str, Any] = {}
    if checkpoint.config is not None:
        values = checkpoint.config.values
        named = {key: values[key] for key in ("model_type", "architectures") if key in values}
    yield Found(
        fault.message if wrapped is not None else f"{fault.message}; `glassblock families` lists those",
        tensors=tuple(names[:1]),
        file=fault.file.name,
        evidence={**named, "known": list(ARCHITECTURES), "first_tensors": names[:5]},
        fix=Fix(action="name-family" if wrapped is None else "unwrap-names", description=fault.hint),
    )


def _beside_the_part(checkpoint: Checkpoint, part: PartWithin) -> str:
    """What was not looked at around the language model of a larger model that no row describes."""
    row, trunk = checkpoint.require_usable(), checkpoint.trunk
    prefix = "" if trunk is None else trunk.prefix
    own = {
        name.partition(".")[0] for name in (row.layer, row.embedding, *(norm.template for norm in row.norms)) if name
    }
    outer = {embedding_name(checkpoint), None if trunk is None else trunk.head}

    def is_beside(name: str) -> bool:
        within = name.startswith(prefix) and (bool(prefix) or name.partition(".")[0] in own)
        return not within and name not in outer

    beside = sorted(filter(is_beside, checkpoint.entries))
    told = f": {len(beside)} tensors, such as {beside[0]}, were looked at for their numbers alone" if beside else ""
    return (
        f"no row describes the whole; its {part.key} says model_type {shown(part.model_type)}, and that part was "
        f"looked at as the family {row.name}. What lies beside it was not held against any family{told}"
    )


def _tied_head(evidence: Evidence) -> Iterator[Outcome]:
    checkpoint, row = evidence.checkpoint, evidence.family
    config = checkpoint.config
    try:
        tied = tied_of(config, row)
    except DamagedCheckpoint as error:
        yield Skipped(reason=error.message)
        return
    head, name = head_entry(checkpoint), checkpoint.trunk.head if checkpoint.trunk else None
    flags = _flags(evidence)
    if config is not None and len(set(flags.values())) > 1:
        told = ", ".join(f"{key} is {str(value).lower()}" for key, value in flags.items())
        # A larger model's own class has the head, and writes its parts' configs with the defaults of their classes.
        stands_in = head is None or evidence.head_is_embedding is True
        fits = _is_larger_model(config) and (stands_in if tied.value else head is not None)
        yield Found(
            f"{config.path.name} contradicts itself about the output head: {told}"
            + ("; the tensors are as the outermost says" if fits else ""),
            file=config.path.name,
            evidence={"flags": flags, "equal": evidence.head_is_embedding},
            fix=Fix(action="correct-config", description="Say the same at every level."),
            level="note" if fits else "warning",
            certainty="conflict",
        )
    if name is None:
        yield Skipped(reason="the family has no output head")
        return
    equal = evidence.head_is_embedding
    facts = {"tied": tied.value, "source": tied.source, "head": head is not None, "equal": equal}
    if head is None and not tied.value:
        if not _has_head(evidence):
            yield Skipped(reason="the checkpoint is a model without an output head")
        elif checkpoint.explains_absence(name):
            yield Undecidable(reason=f"{name} may lie in a file that is absent or damaged", would_decide="whole files")
        elif config is None:
            reason = f"{name} is absent, and no config says whether the head is the embedding"
            yield Undecidable(reason=reason, would_decide="config.json")
        else:
            yield Found(
                f"{name} is absent, and the embedding does not stand in for it: tie_word_embeddings is false "
                f"({tied.source}). A loader would put random numbers there",
                tensors=(name,),
                evidence=facts,
                fix=Fix(action="tie-or-restore", description=f"Set tie_word_embeddings, or store {name}."),
            )
            yield Checked()
    elif head is not None and tied.value and equal is None:
        yield Undecidable(reason=f"{name} could not be compared with the embedding", would_decide="readable tensors")
    else:
        if head is not None and tied.value:
            yield _spare_head(name, equal=bool(equal), source=tied.source, facts=facts)
        yield Checked()


def _spare_head(name: str, *, equal: bool, source: str, facts: dict[str, Any]) -> Found:
    if equal:
        message = f"{name} is stored though the head is the embedding ({source}); the two are equal, so it is redundant"
        fix = Fix(action="drop-tensor", description="It may be left out.", tensors=(name,))
        return Found(message, tensors=(name,), evidence=facts, fix=fix, level="note", certainty="proved")
    return Found(
        f"{name} differs from the embedding though the head is the embedding ({source}): loaders that believe the "
        "config drop it, others use it",
        tensors=(name,),
        evidence=facts,
        fix=Fix(action="untie-or-drop", description="Set tie_word_embeddings to false, or drop the head."),
        level="warning",
        certainty="conflict",
    )


def _flags(evidence: Evidence) -> dict[str, bool]:
    """Every declaration of the tie, at the top and in the language model's own config."""
    config, row = evidence.checkpoint.config, evidence.family
    if config is None or not row.tied.keys:
        return {}
    levels = {"", *row.nested}
    found = {key: value for name in row.tied.keys for key, value in declared_flags(config, name).items()}
    return {key: value for key, value in found.items() if key.rpartition(".")[0] in levels and isinstance(value, bool)}


def _is_larger_model(config: ConfigFile) -> bool:
    """Whether the config holds that of a part which is of another model type."""
    parts = (cast("dict[str, object]", part) for part in config.values.values() if isinstance(part, dict))
    return any(part.get("model_type") not in {None, config.values.get("model_type")} for part in parts)


def _has_head(evidence: Evidence) -> bool:
    """Whether the model that the config names ends in an output head over the vocabulary."""
    config, trunk = evidence.checkpoint.config, evidence.checkpoint.trunk
    stated = None if config is None else config.values.get("architectures")
    if isinstance(stated, list) and stated and isinstance(stated[0], str):
        return _HEADED.search(stated[0]) is not None
    return trunk is not None and trunk.prefix != ""


CONFIG_RULES: tuple[Rule, ...] = (
    Rule(
        "config/shape",
        "error",
        "proved",
        what="A width, the vocabulary or the number of layers in the config is not that of the tensors.",
        hurts="Loading fails, or a loader that builds from the config leaves tensors out.",
        detection="The shapes of the embedding, the head, the network, the norms and, where the family's attention is "
        "read, its projections are compared, and layers counted; packed codes hold as many bits as their form asks "
        "for. Neurons that are zero throughout are padding.",
        fooled_by="A config and tensors that are wrong together; more heads, each as much narrower.",
        report="https://github.com/QwenLM/Qwen3/issues/578",
        looks_at="tensors",
        look=_shape,
        tells_before_tensors=True,
        tells_after="layer",
    ),
    Rule(
        "config/unknown-family",
        "error",
        "proved",
        what="The config names no family of the table, contradicts itself, or its family has other tensor names.",
        hurts="A wrong family drops tensors without a word. Rules that need one are skipped.",
        detection="The model_type and architectures are looked up, and the family's names compared with the file's. Of "
        "a larger model that no row describes, the language model is read that its config declares within.",
        fooled_by="Families that share every name.",
        report="https://github.com/vllm-project/vllm/pull/39666",
        look=_unknown_family,
        tells_before_tensors=True,
    ),
    Rule(
        "config/tied-head",
        "error",
        "proved",
        what="The tie flag, the presence of the output head and its equality with the embedding do not fit.",
        hurts="A random head, a discarded one, or the wrong one of two.",
        detection="Untied and absent is an error; tied and different, or flags that differ, a warning; a copy a note, "
        "as are flags that differ in a larger model whose tensors are as its outermost flag says.",
        fooled_by="A head tied by an engine's own convention, without a flag.",
        report="https://github.com/vllm-project/vllm/issues/51063",
        needs=("family",),
        look=_tied_head,
    ),
)
