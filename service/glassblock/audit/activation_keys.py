"""An activation that the config states under a key that the family's code does not read."""

from collections.abc import Iterator

from glassblock.audit.evidence import Evidence
from glassblock.audit.rule import Checked, Found, Outcome
from glassblock.checkpoint.config import find
from glassblock.checkpoint.settings import text_of
from glassblock.errors import DamagedCheckpoint
from glassblock.numerics.activations import ACTIVATION_ALIASES, ACTIVATIONS
from glassblock.wire.audits import Fix

_KEYS = ("hidden_act", "hidden_activation", "activation_function")


def unread_activation(evidence: Evidence) -> Iterator[Outcome]:
    """Engines differ in which of the keys they read: where the other key says something else, it is told."""
    row, config = evidence.family, evidence.checkpoint.config
    setting = row.network.activation
    if config is None or not set(setting.keys) & set(_KEYS):
        return
    try:
        ours = text_of(config, row, setting)
    except DamagedCheckpoint:
        return  # the config's own fault says why
    yield Checked()
    for key in _KEYS:
        stated = None if key in setting.keys else find(config, row, (key,))
        if stated is None or not isinstance(stated.value, str) or _formula(stated.value) == _formula(ours.value):
            continue
        yield Found(
            f"the activation is {ours.value} ({ours.source}), but {config.path.name} also says {stated.key} "
            f"{stated.value:.80}, which this family's code does not read and another engine may",
            file=config.path.name,
            evidence={"declared": ours.value, "source": ours.source, "other": stated.value, "key": stated.key},
            fix=Fix(action="correct-config", description=f"Say the same under {stated.key}."),
            level="warning",
            certainty="conflict",
        )


def _formula(name: str) -> str:
    known = ACTIVATIONS.get(ACTIVATION_ALIASES.get(name, name))
    return name if known is None else known.formula
