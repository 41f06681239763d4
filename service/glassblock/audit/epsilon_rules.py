"""Rules about epsilons: no tensor carries one, so all that can be told is who states what, and how much it matters."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from glassblock.audit.evidence import EmbeddingEnergy, Evidence
from glassblock.audit.rule import Checked, Found, Outcome, Rule
from glassblock.checkpoint.config import ConfigFile, DeclaredEps, declared_eps, find
from glassblock.checkpoint.family import Architecture
from glassblock.checkpoint.settings import Sourced, eps_of
from glassblock.errors import DamagedCheckpoint
from glassblock.wire.audits import Fix, Level, Skipped, Undecidable

# Two decimal numbers that are one float32 number: formats such as GGUF store epsilons so.
_ONE_FLOAT32 = 2.0**-23
_OTHER_MODELS = re.compile(r"vision|visual|audio|speech|image|clip", re.IGNORECASE)


class _Stated(NamedTuple):
    """An epsilon, who states it, and the roles of norms it speaks of."""

    value: float
    source: str
    roles: tuple[str, ...]


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
    yield Checked(len({eps.source for eps in ours.values() if not eps.defaulted}) + len(others))
    if question.against is not None:
        yield from _against(evidence, ours, question.against)


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
            yield _Stated(stated.value, f"{stated.file}: {stated.key}", roles)


def _against(evidence: Evidence, ours: Mapping[str, Sourced[float]], config: Mapping[str, Any]) -> Iterator[Outcome]:
    row, name = evidence.family, evidence.question.against_name
    file = ConfigFile(Path(name), MappingProxyType(dict(config)))
    stated = [eps for eps in declared_eps(file, row) if eps.key is not None]
    unspoken = [role for role in ours if not _speaking_of(role, stated)]
    yield Checked(len(ours) - len(unspoken))
    yield Skipped(
        reason=f"only epsilons are compared with {name}, nothing else in it{_of_another_model(evidence, file)}"
    )
    if unspoken:
        yield Undecidable(
            reason=f"{name} states no epsilon for the norms {', '.join(unspoken)}",
            would_decide="a config that states one, such as rms_norm_eps",
        )
    by_source: dict[tuple[float, str], list[str]] = {}
    for role in ours:
        for eps in _speaking_of(role, stated):
            by_source.setdefault((eps.value, f"{name}: {eps.key}"), []).append(role)
    for (value, source), roles in by_source.items():
        for found in _disagreements(evidence, ours, _Stated(value, source, tuple(roles)), level="error"):
            yield replace(found, message=f"{found.message}. Only epsilons were compared with {name}")


def _of_another_model(evidence: Evidence, other: ConfigFile) -> str:
    """In words, that a config declares another family or other sizes than ours; empty where it does not."""
    config, row = evidence.checkpoint.config, evidence.family
    if config is None:
        return ""
    differing: list[str] = []
    keys = (("model_type",), *(setting.keys for setting in row.sizes.values() if setting.keys))
    for key in keys:
        ours, theirs = find(config, row, key), find(other, row, key)
        if ours is not None and theirs is not None and ours.value != theirs.value:
            differing.append(f"{theirs.key} {theirs.value!r:.40} is {ours.value!r:.40} in {config.path.name}")
    return f"; it may be of another model: {', '.join(differing)}" if differing else ""


def _speaking_of(role: str, stated: Iterable[DeclaredEps]) -> list[DeclaredEps]:
    """What a config of another engine says about a norm: under the family's own key, else under any other."""
    own = [eps for eps in stated if role in eps.roles]
    return own or [eps for eps in stated if not eps.roles and not _OTHER_MODELS.search(eps.key or "")]


def _disagreements(
    evidence: Evidence, ours: Mapping[str, Sourced[float]], other: _Stated, *, level: Level
) -> Iterator[Found]:
    """One finding for each of our values that `other` does not share."""
    differing: dict[tuple[float, str], list[str]] = {}
    for role in other.roles:
        mine = ours[role]
        if not math.isclose(mine.value, other.value, rel_tol=_ONE_FLOAT32):
            differing.setdefault((mine.value, mine.source), []).append(role)
    for (value, source), roles in differing.items():
        energy = evidence.embedding if "attn_in" in roles else None
        words, facts = _sensitivity(value, other.value, energy)
        yield Found(
            f"the epsilon of the norms {', '.join(roles)} is {value:g} ({source}) and {other.value:g} "
            f"({other.source}); {words}",
            file="config.json" if evidence.checkpoint.config is not None else None,
            evidence={
                "roles": roles,
                "declared": {"value": value, "source": source},
                "other": {"value": other.value, "source": other.source},
                "sensitivity": facts,
            },
            fix=Fix(action="align-eps", description=f"Find out which was trained with, and set it in {other.source}."),
            level=level,
        )


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
    for norm in row.norms:
        if not norm.eps.keys:
            continue  # fixed by the family, so no config could say it
        try:
            eps = eps_of(config, row, norm.eps)
        except DamagedCheckpoint as error:
            yield Skipped(reason=error.message)
            continue
        if eps.defaulted:
            taken.setdefault((eps.value, norm.eps.keys), []).append(norm.role)
        yield Checked()
    for (value, keys), roles in taken.items():
        silent = "there is no config.json" if config is None else f"config.json has no {' or '.join(keys)}"
        notes = [note for note in row.notes if "epsilon" in note]
        yield Found(
            f"{silent}: the norms {', '.join(roles)} take {value:g}, the default of the family {row.name}"
            + "".join(f". {note}" for note in notes),
            file=None if config is None else config.path.name,
            evidence={"roles": roles, "default": value, "keys": list(keys), "family": row.name},
            fix=Fix(action="declare-eps", description=f"State {keys[0]} in config.json."),
        )


EPSILON_RULES: tuple[Rule, ...] = (
    Rule(
        "config/eps-conflict",
        "error",
        "conflict",
        what="Two sources state different epsilons for one norm.",
        hurts="A slightly worse model: where rows are small, much worse. No tensor carries an epsilon to tell by.",
        detection="Every source (config.json at each level, params.json) is compared role by role: a warning. Another "
        "engine's config given with the question makes it an error; of that config only the epsilons are compared. The "
        "embedding's rows tell how much it matters.",
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
