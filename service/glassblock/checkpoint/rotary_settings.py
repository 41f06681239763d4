"""The rotary positions a config declares: `rope_parameters`, flat or by kind of layer, or the older `rope_scaling`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from glassblock.checkpoint.attention_row import RotaryRow
from glassblock.checkpoint.config import as_number, find
from glassblock.checkpoint.family import Architecture
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.settings import number_of, optional_number_of, optional_whole_of, word_of
from glassblock.errors import DamagedCheckpoint, InvalidValue
from glassblock.numerics.rotary import Arrangement, Rotary
from glassblock.numerics.rotary_forms import YarnForm, rotary_form_named

_SHARED_BY_FORM = "proportional"
_SHARE = "partial_rotary_factor"


@dataclass(frozen=True)
class RotaryParameters:
    """The parameters of a form as declared.

    Attributes:
        key: Where they lie in the config; the family's name where they are its own.
        name: The form.
        values: All that lies there.
    """

    key: str
    name: str
    values: Mapping[str, object]

    def number(self, name: str) -> float | None:
        """One of the values, where it is a number."""
        return as_number(self.values.get(name))


def rotary_of(checkpoint: Checkpoint, row: Architecture, rotary: RotaryRow, width: int) -> Rotary:
    """How positions turn a head, or the part of one, of that width.

    Raises:
        InvalidValue: A number is missing, or no rotation of such a head can have it.
        DamagedCheckpoint: The config holds something else than the family has there.
    """
    config = checkpoint.config
    parameters = rotary_parameters(checkpoint, row, rotary)
    longest = optional_whole_of(config, row, rotary.max_positions)
    form = rotary_form_named(
        parameters.name,
        parameters.values,
        max_positions=None if longest is None else longest.value,
        field=parameters.key,
    )
    counted = None if rotary.dim is None else optional_number_of(config, row, rotary.dim)
    told = number_of(config, row, rotary.share) if counted is None else counted
    if counted is None and parameters.name != _SHARED_BY_FORM:
        _require_told_share(checkpoint, row, rotary, told.value)
    turned = told.value * width if counted is None else told.value
    if not 0 < turned <= width or (counted is not None and not turned.is_integer()):
        raise InvalidValue(
            f"{told.source} is {told.value:g}, and a head is {width} wide", field="rotary", hint="Correct the config."
        )
    # The proportional form turns a share of the pairs itself.
    dim = width if counted is None and parameters.name == _SHARED_BY_FORM else int(turned)
    even = dim + dim % 2 if rotary.next_even and not isinstance(form, YarnForm) else dim
    if even % 2 or not 2 <= even <= width:
        raise InvalidValue(
            f"{told.source} is {told.value:g} of a head of {width} channels: {dim} of them would turn, and channels "
            "turn in pairs",
            field="rotary",
            hint="Give a share that leaves an even number of channels.",
        )
    arrangement = word_of(config, row, rotary.arrangement, Arrangement)
    theta = number_of(config, row, rotary.theta).value
    return Rotary(even, theta, form, arrangement, rotary.precision, over=dim if even > dim else None)


def _require_told_share(checkpoint: Checkpoint, row: Architecture, rotary: RotaryRow, share: float) -> None:
    """That a config declares no other share than a family whose code reads none turns."""
    config = checkpoint.config
    keys = tuple(f"{place}.{_SHARE}" for place in rotary.forms)
    declared = None if config is None or rotary.share.keys else find(config, row, (*keys, _SHARE))
    if declared is not None and declared.value != share:
        raise InvalidValue(
            f"{declared.key} is {declared.value!r:.40}, and the code of the family {row.name} reads no share: "
            f"it turns {share:g} of each, where other engines turn what is declared",
            field="rotary",
            hint=f"Set it to {share:g} or take it out; where the model was made with that share, say so with "
            "attention.rotary.share in a row of your own (family_row, --family-file).",
        )


def rotary_parameters(checkpoint: Checkpoint, row: Architecture, rotary: RotaryRow) -> RotaryParameters:
    """The form's parameters: those of the first of the row's keys that is there, or else the family's own.

    Raises:
        DamagedCheckpoint: Something else than an object lies there, or its name is no text.
    """
    config = checkpoint.config
    found = None if config is None else find(config, row, rotary.forms)
    if config is None or found is None:
        values, key = dict(rotary.form), f"family {row.name}"
    elif isinstance(found.value, Mapping):
        values, key = dict(cast("Mapping[str, object]", found.value)), found.key
    else:
        raise DamagedCheckpoint(
            f"{config.path.name}: {found.key} is {found.value!r:.80}, where an object is expected",
            file=config.path.name,
            field=found.key,
            hint="Correct the config.",
        )
    if config is not None and rotary.original_key is not None:
        original = find(config, row, (rotary.original_key,))
        if original is not None:
            values["original_max_position_embeddings"] = original.value
    name = next((values[name] for name in ("rope_type", "type") if values.get(name) is not None), "default")
    if not isinstance(name, str):
        raise DamagedCheckpoint(
            f"the form of the rotary positions is {name!r:.80}, where a name is expected",
            file=None if config is None else config.path.name,
            field=f"{key}.rope_type",
            hint="Correct the config.",
        )
    return RotaryParameters(key, name, values)
