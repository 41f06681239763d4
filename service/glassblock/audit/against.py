"""The checkpoint's own settings beside another engine's, name by name: what two engines would do otherwise.

Each setting has one rule that tells it. A difference is an error, a conflict: one of the two configs is wrong for these
tensors. What the other side does not tell is undecidable, with what would tell it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch

from glassblock.audit.engine_dialects import Spoken, read_engine
from glassblock.audit.engine_settings import DTYPE_KEYS, Settings, Told, dtype_name, settings_of
from glassblock.audit.evidence import Evidence
from glassblock.audit.rule import Checked, Found, Outcome
from glassblock.checkpoint.architectures import BY_MODEL_TYPE
from glassblock.checkpoint.config import declared_flags
from glassblock.checkpoint.entries import FLOAT_CODES
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.outer_tensors import embedding_entry
from glassblock.numerics.activations import ACTIVATION_ALIASES, ACTIVATIONS, LEARNED_ACTIVATIONS
from glassblock.numerics.gate_or_up import Verdict
from glassblock.wire.audits import Fix, Skipped, Undecidable

ONE_FLOAT32 = 2.0**-23
"""Two decimal numbers that are one float32 number: formats such as GGUF store numbers so."""

_TELLING_SIZES = ("layers", "vocab", "intermediate", "heads")


class Group(NamedTuple):
    """Settings that one rule tells.

    Attributes:
        rule: The rule.
        words: What a difference is called; `{name}` is the setting within its group.
        consequence: What goes wrong.
        would_decide: What the other side would have to state.
    """

    rule: str
    words: str
    consequence: str
    would_decide: str


GROUPS: Mapping[str, Group] = MappingProxyType(
    {
        "norm": Group(
            "norm/kind-conflict",
            "the kind of the norm {name}",
            "RMSNorm and LayerNorm differ by the mean that is subtracted",
            "a config that states it, such as Megatron's normalization",
        ),
        "offset": Group(
            "norm/offset",
            "what is added to the gain of the norm {name}",
            "a gain that is off by 1 scales the whole stream",
            "a config that states it, such as Megatron's layernorm_zero_centered_gamma",
        ),
        "activation": Group(
            "config/activation-conflict",
            "the activation",
            "every neuron is bent otherwise",
            "a config with hidden_act, or a whole one of the model_type whose default it is",
        ),
        "gating": Group(
            "config/activation-conflict",
            "the {name} where gate and up meet",
            "only what reaches the clamp differs, which no average shows",
            "a config that states swiglu_limit, or a whole config without it",
        ),
        "fused": Group(
            "ffn/fused-order",
            "the {name} of gate and up in one tensor",
            "the activation is applied to the wrong half",
            "the fused_order that the engine's kernel wants",
        ),
        "bias": Group(
            "ffn/missing-bias",
            "whether projections of {name} have biases",
            "they are dropped, or left at what the loader fills in",
            "a config that states it, such as mlp_bias or add_bias_linear",
        ),
        "tied": Group(
            "config/tied-head",
            "whether the output head is the embedding",
            "a random head, a discarded one, or the wrong one of two",
            "a config with tie_word_embeddings",
        ),
        "placement": Group(
            "norm/role",
            "where the norms of a block stand",
            "the same tensors are applied elsewhere",
            "a config that names the family",
        ),
        "size": Group(
            "config/shape", "the size {name}", "shapes do not fit, or are filled up", "a config that states it"
        ),
        "number": Group("config/shape", "the {name}", "what it multiplies or turns is off", "a config that states it"),
        "dtype": Group(
            "config/dtype-conflict",
            "the dtype",
            "values beyond the range or below the resolution of the narrower one are lost",
            "a config with torch_dtype",
        ),
    }
)
"""Every group of settings but the epsilons, whose rule attaches how much they matter."""

EPS_RULE = "config/eps-conflict"
AGAINST_RULES: tuple[str, ...] = tuple(dict.fromkeys((EPS_RULE, *(group.rule for group in GROUPS.values()))))
"""The rules that a question asked with another engine's config is answered by."""


def own_settings(evidence: Evidence) -> Settings:
    """What the checkpoint's config and family make of it; sizes that no config tells are the tensors'."""
    checkpoint, row = evidence.checkpoint, evidence.family
    settings = settings_of(checkpoint.config, row)
    embedding = embedding_entry(checkpoint)
    if embedding is not None and len(embedding.shape) == 2:
        width = "hidden" if row.embedding_projections is None else "embedding_width"
        for size, length in (("vocab", embedding.shape[0]), (width, embedding.shape[1])):
            if settings.get(f"size.{size}") is None:
                settings.put(f"size.{size}", length, f"tensor {embedding.name}")
    if settings.get("size.layers") is None:
        settings.put("size.layers", checkpoint.layers, "the tensors")
    if settings.get("dtype") is None and (dtype := stored_dtype(checkpoint)) is not None:
        settings.put("dtype", dtype, "the tensors")
    return settings


def stored_dtype(checkpoint: Checkpoint) -> str | None:
    """The dtype of all matrices; None where they are of several, or some hold codes."""
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    stored = {names.get(entry.dtype) for entry in checkpoint.entries.values() if len(entry.shape) > 1}
    return stored.pop() if len(stored) == 1 else None


def narrower_storage(evidence: Evidence) -> Iterator[Outcome]:
    """Weights that lie there in float16 where the config says bfloat16: an engine may run the model in either."""
    checkpoint, config = evidence.checkpoint, evidence.checkpoint.config
    told, stored = settings_of(config, evidence.family).get("dtype"), stored_dtype(checkpoint)
    if config is None or told is None or stored is None:
        return
    yield Checked()
    # Of a larger model, the outermost config may say another dtype than that of a part.
    said = {dtype_name(str(value)) for key in DTYPE_KEYS for value in declared_flags(config, key).values() if value}
    held = FLOAT_CODES.intersection(entry.dtype for entry in checkpoint.entries.values())
    if said == {"bfloat16"} and stored == "float16" and len(held) == 1:
        yield Found(
            f"the dtype is bfloat16 ({told.source}), and every weight is stored as float16: an engine that goes by the "
            "files runs the model in float16, which ends at 65,504",
            file=config.path.name,
            evidence={"declared": {"value": told.value, "source": told.source}, "stored": stored},
            fix=Fix(
                action="align-config", description="Declare float16, or store the weights as bfloat16 from the source."
            ),
            level="note",
        )


def their_settings(evidence: Evidence) -> Spoken | None:
    """What the other engine's config tells; None where none was given."""
    against = evidence.question.against
    return None if against is None else read_engine(against, evidence.question.against_name, evidence.family)


def another_model(evidence: Evidence, ours: Settings, theirs: Spoken) -> str | None:
    """In words, that the other config is of another model: another width, and something else beside it."""
    differing = differences_of_kind(evidence, ours, theirs)
    if len(differing) < 2 or not differing[0].startswith("hidden "):
        return None
    return f"{evidence.question.against_name} is of another model: {'; '.join(differing)}"


def differences_of_kind(evidence: Evidence, ours: Settings, theirs: Spoken) -> list[str]:
    """In words, the sizes and the family in which the other config is not of this model; the width first."""
    differing = [
        f"{name} {told.value} ({told.source}) where here it is {own.value}"
        for name in ("hidden", *_TELLING_SIZES)
        for own, told in ((ours.get(f"size.{name}"), theirs.settings.get(f"size.{name}")),)
        if own is not None and told is not None and own.value != told.value
    ]
    other = BY_MODEL_TYPE.get(theirs.model or "")
    if other is not None and other.name != evidence.family.name:
        differing.append(f"the family {other.name} where here it is {evidence.family.name}")
    return differing


def answered(evidence: Evidence, rules: tuple[str, ...]) -> int:
    """How many settings those rules could compare with the other engine's."""
    if evidence.lacks("family") is not None:
        return 0
    theirs = their_settings(evidence)
    ours = own_settings(evidence)
    if theirs is None or another_model(evidence, ours, theirs) is not None:
        return 0
    names = [name for name in ours.told if rule_of(name) in rules]
    return sum(theirs.settings.get(name) is not None for name in names)


def rule_of(name: str) -> str:
    """The rule that tells a setting."""
    group = name.partition(".")[0]
    return EPS_RULE if group == "eps" else GROUPS[group].rule


def against_look(rule: str) -> Callable[[Evidence], Iterator[Outcome]]:
    """What a rule says of another engine's config; nothing where none was given."""

    def look(evidence: Evidence) -> Iterator[Outcome]:
        if evidence.question.against is None:
            return
        reason = evidence.lacks("family")
        if reason is not None:
            yield Undecidable(reason=reason, would_decide="a checkpoint of a known family")
            return
        theirs = their_settings(evidence)
        if theirs is None:
            return
        ours = own_settings(evidence)
        other = another_model(evidence, ours, theirs)
        if other is not None:
            yield Undecidable(reason=other, would_decide="the config of an engine that runs this model")
            return
        yield from _compared(evidence, rule, ours, theirs)

    return look


def _compared(evidence: Evidence, rule: str, ours: Settings, theirs: Spoken) -> Iterator[Outcome]:
    alike, unspoken = 0, dict[str, list[str]]()
    differing: dict[tuple[str, Told, Told], list[str]] = {}
    for name, own in ours.told.items():
        group = name.partition(".")[0]
        if rule_of(name) != rule or rule == EPS_RULE:
            continue
        told = theirs.settings.get(name)
        problem = theirs.settings.why_not(name) if told is None else _unknown_activation(name, told)
        if problem is not None:
            yield Undecidable(reason=problem, would_decide=GROUPS[group].would_decide)
        elif told is not None:
            alike += 1
            if not _same(name, own, told):
                differing.setdefault((group, own, told), []).append(name)
        elif not _neutral(name, own) and not (group == "offset" and theirs.dialect == "gguf"):
            unspoken.setdefault(group, []).append(name)
    for (group, own, told), names in differing.items():
        yield _difference(evidence, GROUPS[group], names, own, told)
    if alike:
        yield Checked(alike)
    yield from (_untold(evidence, theirs, GROUPS[group], names) for group, names in unspoken.items())
    yield from _remarks(evidence, rule, theirs)


def _untold(evidence: Evidence, theirs: Spoken, group: Group, names: list[str]) -> Undecidable:
    what = group.words.format(name=", ".join(name.partition(".")[2] or name for name in names))
    reason = f"{evidence.question.against_name} ({theirs.dialect}) does not tell {what}"
    return Undecidable(reason=reason, would_decide=group.would_decide)


def _remarks(evidence: Evidence, rule: str, theirs: Spoken) -> Iterator[Skipped]:
    """What is to be known of the dialect, each under the rule that it is about."""
    for remark in theirs.remarks:
        if rule == ("norm/offset" if "1 + w" in remark else "config/shape"):
            yield Skipped(reason=f"{evidence.question.against_name}: {remark}")


def _difference(evidence: Evidence, group: Group, names: list[str], own: Told, other: Told) -> Found:
    what = group.words.format(name=", ".join(_spelt(name) for name in names))
    told_by = evidence.question.against_name
    source = f"{other.source}, as {told_by} does not state it" if other.defaulted else other.source
    here = own_place(evidence, own.source)
    facts: dict[str, object] = {
        "settings": names,
        "declared": {"value": own.value, "source": own.source},
        "other": {"value": other.value, "source": other.source},
    }
    found = Found(
        f"{what} is {_shown(own.value)} ({here}) and {_shown(other.value)} ({source}): {group.consequence}",
        file=None if evidence.checkpoint.config is None else evidence.checkpoint.config.path.name,
        evidence=facts,
        fix=Fix(
            action="correct-engine",
            description=either_way((_shown(own.value), told_by), (_shown(other.value), here))
            if here != own.source
            else f"One of the two is wrong: find out which was trained with, and set it in {told_by}.",
        ),
        level="error",
        certainty="conflict",
    )
    if names[0] == "activation":
        most = activation_difference(str(own.value), str(other.value))
        if most is not None:
            facts["largest_difference"] = most
            found = replace(found, message=f"{found.message}; the two differ by at most {most:.2g} between -10 and 10")
    elif names[0] == "fused.order":
        stored = _stored_order(evidence)
        order = f"{f'stored=[{stored}]' if stored else f'declared=[{own.value}]'} engine=[{other.value}]"
        found = replace(found, message=f"order conflict: {order}. {found.message[0].upper()}{found.message[1:]}")
    elif names[0] == "dtype":
        narrower = other.value == "float16"
        if not narrower:
            return replace(found, level="note", certainty="risk")
        found = replace(found, message=f"{found.message}. float16 ends at 65,504")
    elif names[0] == "number.rope_theta":
        return replace(found, message=found.message.replace("the rope_theta", "the base of the rotary frequencies", 1))
    return replace(found, evidence=facts)


def own_place(evidence: Evidence, source: str) -> str:
    """Who tells a value, where it is a file of the checkpoint: another's may have the same name."""
    config = evidence.checkpoint.config
    return f"the checkpoint's {source}" if config is not None and source.startswith(config.path.name) else source


def either_way(one: tuple[str, str], other: tuple[str, str]) -> str:
    """What to do about two values of which nothing tells the right one; each with where it would be set."""
    ways = " or ".join(f"{value} in {place}" for value, place in (one, other))
    return f"One of the two is wrong: set {ways}, whichever was trained with."


def _stored_order(evidence: Evidence) -> str | None:
    """The order that the rows of fused tensors show: recovered by the certified test, or the declared one as it is."""
    networks = () if evidence.gates is None else (one for of in evidence.gates.layers.values() for one in of.networks)
    layouts = (one.stored or (one.declared if one.judgement.verdict is Verdict.AS_NAMED else None) for one in networks)
    orders = {"gate|up" if layout.gate_first else "up|gate" for layout in layouts if layout is not None}
    return orders.pop() if len(orders) == 1 else None


def activation_difference(one: str, other: str) -> float | None:
    """The largest difference of two activations on a grid between -10 and 10; None where one needs its tensors."""
    rows = [ACTIVATIONS.get(canonical_activation(name)) for name in (one, other)]
    first, second = rows
    if first is None or second is None:
        return None
    grid = torch.linspace(-10, 10, 20_001, dtype=torch.float64)
    return float((first(grid) - second(grid)).abs().max())


def canonical_activation(name: str) -> str:
    """A name of the table of activations for an alias of one, however it is written."""
    lower = name.lower()
    return ACTIVATION_ALIASES.get(lower, lower)


def formula_of(name: str) -> str:
    """What an activation computes, which several names may stand for; the name itself where it is not known."""
    known = ACTIVATIONS.get(canonical_activation(name))
    return name if known is None else known.formula


def _unknown_activation(name: str, told: Told) -> str | None:
    known = (*ACTIVATIONS, *LEARNED_ACTIVATIONS)
    if name != "activation" or canonical_activation(str(told.value)) in known:
        return None
    return f"{told.source} is {told.value!r:.60}, which is no known activation"


def _same(name: str, own: Told, told: Told) -> bool:
    one, other = own.value, told.value
    if name == "activation":
        return formula_of(str(one)) == formula_of(str(other))
    if isinstance(one, int) or not isinstance(one, float):  # no int is too large to be compared as it is
        return one == other
    return isinstance(other, int | float) and math.isclose(one, other, rel_tol=ONE_FLOAT32)


def _neutral(name: str, own: Told) -> bool:
    """Whether a setting that nobody speaks of is as good as absent: no multiplier, no clamp, no cap."""
    group = name.partition(".")[0]
    if group == "number":
        return own.value in (None, 1.0, "none", "default") or own.defaulted
    if group == "size":
        return own.defaulted
    return own.value is None or group == "dtype"


def _spelt(name: str) -> str:
    group, _, rest = name.partition(".")
    return rest.replace("_", " ") if group in ("size", "number") and not rest.startswith("rope") else rest or name


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
