"""An activation that the config states for some engines and not for others, or by a name nobody knows.

It may stand under a key that the family's code does not read, or by a word that the family's code takes otherwise.
"""

from collections.abc import Iterator
from difflib import get_close_matches

from glassblock.audit.against import activation_difference, formula_of
from glassblock.audit.evidence import Evidence
from glassblock.audit.rule import Checked, Found, Outcome
from glassblock.checkpoint.config import find
from glassblock.checkpoint.family import Setting
from glassblock.checkpoint.settings import Sourced, text_of
from glassblock.checkpoint.strict_json import shown
from glassblock.errors import DamagedCheckpoint
from glassblock.numerics.activations import ACTIVATION_ALIASES, ACTIVATIONS, LEARNED_ACTIVATIONS
from glassblock.wire.audits import Fix

ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")
"""Keys under which configs name an activation, whichever of them a family's code reads."""


def unread_activation(evidence: Evidence) -> Iterator[Outcome]:
    """Engines differ in which of the keys they read: where the other key says something else, it is told."""
    row, config = evidence.family, evidence.checkpoint.config
    setting = row.network.activation
    if config is None or not set(setting.keys) & set(ACTIVATION_KEYS):
        return
    try:
        ours = text_of(config, row, setting)
    except DamagedCheckpoint:
        return  # the config's own fault says why
    yield Checked()
    yield from _taken_otherwise(evidence, setting, ours)
    for key in ACTIVATION_KEYS:
        stated = None if key in setting.keys else find(config, row, (key,))
        if stated is None or not isinstance(stated.value, str) or formula_of(stated.value) == formula_of(ours.value):
            continue
        yield Found(
            f"the activation is {ours.value} ({ours.source}), but {config.path.name} also says {stated.key} "
            f"{stated.value:.80}, which this family's code does not read and another engine may",
            file=config.path.name,
            evidence={"declared": ours.value, "source": ours.source, "other": stated.value, "key": stated.key},
            fix=Fix(action="align-config", description=f"Say the same under {stated.key}."),
            level="warning",
            certainty="conflict",
        )


def _taken_otherwise(evidence: Evidence, setting: Setting[str], ours: Sourced[str]) -> Iterator[Outcome]:
    """A word that the family's own code takes for another activation: engines that take it literally differ.

    It is settled by another key that says what is meant.
    """
    row, config = evidence.family, evidence.checkpoint.config
    found = None if config is None else find(config, row, setting.keys)
    if config is None or found is None or not isinstance(found.value, str):
        return
    others = (find(config, row, (key,)) for key in ACTIVATION_KEYS if key not in setting.keys)
    said = {formula_of(other.value) for other in others if other is not None and isinstance(other.value, str)}
    meant = formula_of(ours.value)
    if formula_of(found.value) == meant or meant in said:
        return
    most = activation_difference(found.value, ours.value)
    apart = "" if most is None else f"; the two differ by {most:.2g} at most"
    yield Found(
        f"{ours.source} is {shown(found.value)}, which this family's own code takes for {ours.value} and another "
        f"engine may take literally{apart}",
        file=config.path.name,
        evidence={"declared": found.value, "source": ours.source, "meant": ours.value, "largest_difference": most},
        fix=Fix(action="align-config", description=f"Say {ours.value} under {found.key}."),
        level="warning",
        certainty="conflict",
    )


def unknown_activation(evidence: Evidence) -> Iterator[Outcome]:
    """A name that is no activation here: a warning, since the models' own code may know one more."""
    config = evidence.checkpoint.config
    if config is None:
        return
    known = sorted({*ACTIVATIONS, *ACTIVATION_ALIASES, *LEARNED_ACTIVATIONS})
    told: dict[str, str] = {}
    for network in evidence.family.networks:
        try:
            stated = text_of(config, evidence.family, network.activation)
        except DamagedCheckpoint:
            continue  # the config's own fault says why
        if stated.value not in known:
            told[stated.source] = stated.value
    for source, name in told.items():
        nearest = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        guess = f", the nearest of which is {nearest[0]}" if nearest else ""
        yield Found(
            f"{source} is {shown(name)}, which is no activation known here{guess}: {', '.join(known)}",
            file=config.path.name,
            evidence={"declared": name, "source": source, "nearest": nearest[0] if nearest else None, "known": known},
            level="warning",
            certainty="conflict",
        )
