"""Rules about epsilons: no tensor carries one, so all that can be told is who states what, and how much it matters."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from glassblock.audit.against import another_model, either_way, own_place, own_settings, their_settings
from glassblock.audit.epsilon_decision import Witness, contradicted, decision, key_of, reference_epsilons, same_eps
from glassblock.audit.evidence import EmbeddingEnergy, Evidence
from glassblock.audit.rule import Checked, Found, Outcome, Rule
from glassblock.checkpoint.config import ConfigFile, as_epsilon, declared_eps
from glassblock.checkpoint.family import Architecture
from glassblock.checkpoint.settings import Sourced, eps_of
from glassblock.errors import DamagedCheckpoint
from glassblock.wire.audits import Fix, Level, Skipped, Undecidable


class _Stated(NamedTuple):
    """An epsilon, who states it, the roles of norms it speaks of, and its key where that is one of config.json.

    `party` is what it is among the witnesses: it does not speak for itself.
    """

    value: float
    source: str
    roles: tuple[str, ...]
    key: str | None = None
    party: str | None = None


def _conflict(evidence: Evidence) -> Iterator[Outcome]:
    checkpoint, row, question = evidence.checkpoint, evidence.family, evidence.question
    try:
        ours = {norm.role: eps_of(checkpoint.config, row, norm.eps) for norm in row.norms}
    except DamagedCheckpoint as error:
        unusable = Undecidable(reason=error.message, would_decide="a config with a usable epsilon")
        yield unusable if question.against is not None else Skipped(reason=error.message)
        return
    others = tuple(_other_sources(checkpoint.config, checkpoint.params, row))
    for other in others:
        yield from _disagreements(evidence, ours, other, level="warning")
    stated = len({eps.source for eps in ours.values() if not eps.defaulted}) + len(others)
    yield Checked(stated) if stated else Skipped(reason="no config of the checkpoint states an epsilon of these norms")
    if question.against is not None:
        yield from _against(evidence, ours)
    yield from _beside_reference(evidence, ours)


def _beside_reference(evidence: Evidence, ours: Mapping[str, Sourced[float]]) -> Iterator[Outcome]:
    """What the config of a reference that is the same model states: whoever gives one takes it for the truth."""
    by_source: dict[tuple[float, str], list[str]] = {}
    for witness in reference_epsilons(evidence):
        if witness.role in ours:
            by_source.setdefault((witness.value, witness.source), []).append(witness.role)
    for (value, source), roles in by_source.items():
        stated = _Stated(value, source, tuple(roles), party="reference")
        yield from _disagreements(evidence, ours, stated, level="error")
    if by_source:
        yield Checked(sum(len(roles) for roles in by_source.values()))


def _other_sources(config: ConfigFile | None, params: ConfigFile | None, row: Architecture) -> Iterator[_Stated]:
    """Declarations that this family does not read, and some other engine would."""
    levels = {"", *row.nested}
    for stated in declared_eps(config, row, params):
        if stated.key is None or stated.file is None:
            continue
        parent, _, leaf = stated.key.rpartition(".")
        roles = tuple(norm.role for norm in row.norms if leaf in {key.rpartition(".")[2] for key in norm.eps.keys})
        if params is not None and stated.file == params.path.name:
            yield _Stated(stated.value, f"{stated.file}: {stated.key}", stated.roles)
        elif not stated.roles and roles and parent in levels:
            yield _Stated(stated.value, f"{stated.file}: {stated.key}", roles, key=stated.key)


def _against(evidence: Evidence, ours: Mapping[str, Sourced[float]]) -> Iterator[Outcome]:
    """Role by role, what the other engine would add under the root."""
    theirs, name = their_settings(evidence), evidence.question.against_name
    if theirs is None:
        return
    other = another_model(evidence, own_settings(evidence), theirs)
    if other is not None:
        yield Undecidable(reason=other, would_decide="the config of an engine that runs this model")
        return
    by_source: dict[tuple[float, str], list[str]] = {}
    unspoken: list[str] = []
    for role in ours:
        told = theirs.settings.get(f"eps.{role}")
        value = None if told is None else as_epsilon(told.value)
        if told is None or value is None:
            unspoken.append(role)
        else:
            by_source.setdefault((value, told.source), []).append(role)
    yield Checked(len(ours) - len(unspoken))
    if unspoken:
        why = theirs.settings.why_not(f"eps.{unspoken[0]}")
        yield Undecidable(
            reason=why or f"{name} ({theirs.dialect}) states no epsilon for the norms {', '.join(unspoken)}",
            would_decide="a config that states one, such as rms_norm_eps",
        )
    for (value, source), roles in by_source.items():
        yield from _disagreements(evidence, ours, _Stated(value, source, tuple(roles), party="against"), level="error")


def _disagreements(
    evidence: Evidence, ours: Mapping[str, Sourced[float]], other: _Stated, *, level: Level
) -> Iterator[Found]:
    """One finding for each of our values that `other` does not share."""
    differing: dict[tuple[float, str], list[str]] = {}
    for role in other.roles:
        mine = ours[role]
        if not same_eps(mine.value, other.value):
            differing.setdefault((mine.value, mine.source), []).append(role)
    for (value, source), roles in differing.items():
        energy = evidence.embedding if "attn_in" in roles else None
        words, facts = _sensitivity(value, other.value, energy)
        settled = _settled(evidence, roles, value, other)
        here = own_place(evidence, source) if other.party is not None else source
        config = evidence.checkpoint.config
        place = f"the checkpoint's {_name_of(config)}" if ours[roles[0]].defaulted else here
        told = "" if "decided" not in settled else f"; {settled['decided']:g} is borne out by {settled['decided_by']}"
        yield Found(
            f"the epsilon of the norms {', '.join(roles)} is {value:g} ({here}) and {other.value:g} "
            f"({other.source}); {words}{told}",
            file=None if config is None else config.path.name,
            evidence={
                "roles": roles,
                "declared": {"value": value, "source": source},
                "other": {"value": other.value, "source": other.source},
                "sensitivity": facts,
                **settled,
            },
            fix=Fix(action="align-eps", description=_what_to_set((value, place), other, settled.get("decided"))),
            level=level,
        )


def _name_of(config: ConfigFile | None) -> str:
    return "config.json" if config is None else config.path.name


def _what_to_set(mine: tuple[float, str], other: _Stated, decided: float | None) -> str:
    value, place = mine
    if decided is None:
        return either_way((f"{value:g}", other.source), (f"{other.value:g}", place))
    return f"Set {decided:g} in {other.source if same_eps(decided, value) else place}."


def _settled(evidence: Evidence, roles: Sequence[str], mine: float, other: _Stated) -> dict[str, Any]:
    """The value that a third source bears out, and the key of config.json that states the other one."""
    if other.party == "reference":
        witness = Witness(roles[0], other.value, other.source)
        if any(contradicted(evidence, witness._replace(role=role), but="reference") for role in roles):
            return {}
    else:
        witness = decision(evidence, roles, (mine, other.value), but=other.party)
    if witness is None:
        return {}
    keys = {key_of(evidence, role) for role in roles} if same_eps(witness.value, other.value) else {other.key}
    key = keys.pop() if len(keys) == 1 else None
    settled = {"decided": witness.value, "decided_by": witness.source}
    return settled if key is None else settled | {"decided_key": key}


def _sensitivity(true: float, used: float, energy: EmbeddingEnergy | None) -> tuple[str, dict[str, Any] | None]:
    """By how much the first norm's output changes, in words and numbers.

    |sqrt((ms + true)/(ms + used)) - 1| falls as the mean square ms grows: over all rows it is largest at the least.
    """
    if energy is None:
        return "how much that matters cannot be told from the weights", None
    most, median = (relative_change(ms, true=true, used=used) for ms in (energy.least, energy.median))
    facts = {
        "norm": "layer 0, attn_in",
        "tensor": energy.tensor,
        "rows": energy.rows,
        "multiplier": energy.multiplier,
        "mean_square": {"least": energy.least, "median": energy.median, "most": energy.most},
        "relative_change": {"most": most, "median": median},
    }
    return f"it changes what the first norm returns by at most {most:.2g} of its size", facts


def relative_change(mean_square: float, *, true: float, used: float) -> float:
    """|sqrt((ms + true)/(ms + used)) - 1|: how much a norm's output changes with the wrong epsilon."""
    below = mean_square + used
    return abs(math.sqrt((mean_square + true) / below) - 1) if below > 0 else math.inf


def _defaulted(evidence: Evidence) -> Iterator[Outcome]:
    row, config = evidence.family, evidence.checkpoint.config
    taken: dict[tuple[float, tuple[str, ...]], list[str]] = {}
    spoken = [norm for norm in row.norms if norm.eps.keys]
    if not spoken:
        yield Skipped(reason=f"the family {row.name} fixes every epsilon, so no config could state one")
    for norm in spoken:
        try:
            eps = eps_of(config, row, norm.eps)
        except DamagedCheckpoint as error:
            yield Skipped(reason=error.message)
            continue
        if eps.defaulted:
            taken.setdefault((eps.value, norm.eps.keys), []).append(norm.role)
        yield Checked()
    for (value, keys), roles in taken.items():
        silent = "there is no config.json" if config is None else f"{config.path.name} has no {' or '.join(keys)}"
        notes = [note for note in row.notes if "epsilon" in note]
        yield Found(
            f"{silent}: the norms {', '.join(roles)} take {value:g}, the default of the family {row.name}"
            + "".join(f". {note}" for note in notes),
            file=None if config is None else config.path.name,
            evidence={
                "roles": roles,
                "default": value,
                "keys": list(keys),
                "family": row.name,
                **_default_borne_out(evidence, roles, value),
            },
            fix=Fix(action="declare-eps", description=f"State {keys[0]} in {_name_of(config)}."),
        )


def _default_borne_out(evidence: Evidence, roles: Sequence[str], default: float) -> dict[str, Any]:
    witness = decision(evidence, roles, (default, default))
    key = key_of(evidence, roles[0])
    if witness is None or key is None:
        return {}
    return {"decided": witness.value, "decided_by": witness.source, "decided_key": key}


EPSILON_RULES: tuple[Rule, ...] = (
    Rule(
        "config/eps-conflict",
        "error",
        "conflict",
        what="Two sources state different epsilons for one norm.",
        hurts="A slightly worse model: where rows are small, much worse. No tensor carries an epsilon to tell by.",
        detection="Every source (config.json at each level, params.json) is compared role by role: a warning. Another "
        "engine's config given with the question (transformers, Meta, GGUF, vLLM or SGLang, Megatron, or JSON of ours) "
        "makes it an error, as does the config of a reference that is the same model. The embedding's rows tell how "
        "much it matters. Where a third source (that engine, the reference, or a family that fixes the number) bears "
        "out one of two, it is told and can be repaired.",
        fooled_by="An engine that takes an epsilon from elsewhere than its config.",
        report="https://github.com/ggml-org/llama.cpp/issues/2373",
        needs=("family",),
        look=_conflict,
    ),
    Rule(
        "config/eps-defaulted",
        "note",
        "risk",
        what="No config states the epsilon of a norm, so it is the default of the family.",
        hurts="Another engine has another default.",
        detection="The keys that the family reads are absent from config.json.",
        fooled_by="A key of another name that some engine reads.",
        report="https://github.com/huggingface/transformers/pull/48762",
        needs=("family",),
        look=_defaulted,
    ),
)
