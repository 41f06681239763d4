"""Weights that are stored quantised: found by what lies beside their codes, and read as the numbers they stand for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm
from types import MappingProxyType

import torch
from torch import Tensor

from glassblock.checkpoint.config import ConfigFile
from glassblock.checkpoint.entries import FLOAT_CODES, TensorEntry
from glassblock.checkpoint.quantisation import DeclaredQuantisation, declared_quantisation
from glassblock.checkpoint.reading import ReadMeter, read_tensor
from glassblock.checkpoint.storage import Layout, Sought, Storage, StorageFault, Unfit
from glassblock.checkpoint.storages_codebook import CODEBOOK_STORAGES
from glassblock.checkpoint.storages_packed import PACKED_STORAGES
from glassblock.checkpoint.storages_scaled import SCALED_STORAGES
from glassblock.checkpoint.strict_json import shown
from glassblock.errors import CheckpointUnusable, InvalidValue, UnknownCheckpoint

STORAGES: tuple[Storage, ...] = (*CODEBOOK_STORAGES, *SCALED_STORAGES, *PACKED_STORAGES)
"""Every stored form that is read. The first whose parts are there is taken."""

KNOWN_METHODS: tuple[str, ...] = tuple(sorted({method for storage in STORAGES for method in storage.methods}))
"""The values of `quant_method` that are read."""

_SCALES = (
    *("{name}_scale", "{name}_scale_inv", "{name}_scale_2", "{name}_scales", "{name}._scale", "{name}_scb"),
    *("{name}_scaling_factor", "{stem}.weights_scaling_factor", "{stem}.scale", "{stem}.scales", "{stem}.scale_weight"),
    *("{stem}.SCB", "{stem}.scb"),
)
"""What writers call the scale of a weight, whether the form is read here or not."""

_UNREAD_CODES = (
    *("{stem}.W_q", "{stem}.codes", "{stem}.indices", "{stem}.dense_weights", "{name}._data", "{name}_qdata"),
    *("{stem}._weight_qdata", "{stem}.q_weight", "{stem}.trellis", "{stem}.Qidxs", "{stem}.B"),
)
"""What methods that are not read call the codes of a weight: HQQ, AQLM, VPTQ, SpQR, Quanto, torchao and others."""

_LIKE_PLAIN = tuple(storage for storage in STORAGES if storage.dtypes & FLOAT_CODES)


@dataclass(frozen=True)
class StoredWeight:
    """A weight that is stored quantised, its parts found and their shapes checked.

    Attributes:
        name: The name that the plain weight would have.
        storage: The row of the table it is stored by.
        layout: How its parts belong together.
    """

    name: str
    storage: Storage
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        """`[out, in]`, or `[experts, out, in]` of a stack."""
        return self.layout.shape

    @property
    def main(self) -> TensorEntry:
        """The tensor that holds the codes."""
        return self.layout.parts["codes"]

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """Every tensor that is read for it."""
        return tuple(self.layout.parts.values())

    @property
    def bytes(self) -> int:
        """Bytes stored, scales and all."""
        return sum(entry.bytes for entry in self.entries)


def stored_weight(
    entries: Mapping[str, TensorEntry], config: ConfigFile | None, name: str
) -> StoredWeight | StorageFault | None:
    """The stored form of the weight `name`.

    From headers, but for two parts of a few bytes that hold the shape of a weight (`weight_shape` of
    compressed-tensors, the quantisation state of bitsandbytes).

    Args:
        entries: The checkpoint's tensors.
        config: Its config.
        name: The name of the plain weight.

    Returns:
        None where the weight is not quantised, or nothing of it is there; a fault where it is and cannot be read.
    """
    if _is_plain(entries, name):
        return None
    declared = declared_quantisation(config)
    chosen = _choose(entries, declared, name)
    if chosen is None or isinstance(chosen, StorageFault):
        return chosen
    storage, sought = chosen
    try:
        for role in storage.needs:
            if role not in sought.parts:
                raise sought.lack(role, f"{sought.main.name} ({sought.main.dtype}) cannot be read without it")
        for entry in sought.parts.values():
            if entry.elements == 0:
                message = f"{entry.name} has the shape {list(entry.shape)} and holds nothing"
                return StorageFault("empty", entry.name, sought.main, message, "Save the model again.")
        return StoredWeight(name, storage, storage.plan(sought))
    except Unfit as unfit:
        return unfit.fault
    except (CheckpointUnusable, UnknownCheckpoint) as error:
        kind = "unknown-form" if error.tensor in {None, sought.main.name} else "misfit"
        return StorageFault(kind, error.tensor or sought.main.name, sought.main, error.message, error.hint or "")


def scale_beside(entries: Mapping[str, TensorEntry], name: str) -> str | None:
    """A tensor beside the weight `name` that is called as scales are, whatever the form; None where there is none."""
    names = (template.format(name=name, stem=name.removesuffix(".weight")) for template in _SCALES)
    return next((found for found in names if found in entries), None)


def is_read(declared: DeclaredQuantisation) -> bool:
    """Whether a form of the method that a config declares is read here; so it is taken where it names none."""
    return declared.method is None or declared.method in KNOWN_METHODS


def read_stored(
    stored: StoredWeight,
    device: torch.device | str,
    meter: ReadMeter,
    *,
    dtype: torch.dtype = torch.float32,
    expert: int | None = None,
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """The weight as the numbers it stands for.

    Args:
        stored: As found.
        device: Where it is made.
        meter: Counts the bytes as stored.
        dtype: Of the answer. Codes and scales meet in float32, and are rounded to it once.
        expert: Only this one of a stack; its bytes alone are read, where the form keeps experts apart.
        rows: Only the rows from the first to before the second. Only their bytes are read where the form keeps rows
            apart: not in GPTQ, AWQ and bitsandbytes' 4 bits.

    Returns:
        `[out, in]`, or `[experts, out, in]` of a whole stack; of `rows` only that many.

    Raises:
        InvalidValue: There is no such expert or row, or `rows` is asked of a stack.
        DamagedCheckpoint: A part does not hold what it must, or a file changed since it was opened.
        UnknownCheckpoint, AccessRefused, ServiceUnavailable: See `files.open_regular`.
    """
    layout = _of_expert(stored, expert)
    if rows is None:
        return _read(layout, stored, device, meter).to(dtype)
    total = layout.shape[-2]
    if len(layout.shape) != 2:
        raise InvalidValue(f"{stored.name} is a stack: rows can be taken of one expert", hint="Say which expert.")
    first, end = rows
    if not 0 <= first < end <= total:
        raise InvalidValue(f"rows {first} to {end} are asked of {stored.name}, which has {total}", tensor=stored.name)
    # A scale, or a word of zero points, may stand for several rows: from and to where all parts begin anew.
    step = lcm(*layout.row_blocks.values()) if layout.row_blocks else total
    start, stop = first // step * step, min(-(-end // step) * step, total)
    part = layout if not layout.row_blocks else _of_rows(layout, start, stop)
    start = 0 if not layout.row_blocks else start
    return _read(part, stored, device, meter)[first - start : end - start].to(dtype)


def _is_plain(entries: Mapping[str, TensorEntry], name: str) -> bool:
    """Whether the weight lies there as it is: so most do, and nothing more is looked up for them."""
    plain = entries.get(name)
    if plain is None or plain.dtype not in FLOAT_CODES:
        return False
    disguised = (sought for storage in _LIKE_PLAIN if (sought := _sought(storage, entries, None, name)))
    return all(len(sought.parts) == 1 for sought in disguised)


def _choose(
    entries: Mapping[str, TensorEntry], declared: DeclaredQuantisation | None, name: str
) -> tuple[Storage, Sought] | StorageFault | None:
    """The row whose parts are there, and those parts."""
    method = None if declared is None else declared.method
    found = [(storage, sought) for storage in STORAGES if (sought := _sought(storage, entries, declared, name))]
    told = [pair for pair in found if not pair[0].tells or any(role in pair[1].parts for role in pair[0].tells)]
    unread = declared is not None and not is_read(declared)
    main = told[0][1].main if told else _codes(entries, name, _UNREAD_CODES if unread else ())
    if main is None:
        return None
    if declared is not None and unread:
        return _unknown_method(main, declared)
    likely = [pair for pair in told or found if method is None or method in pair[0].methods]
    beside = None if told else scale_beside(entries, name)
    if likely and (told or (method is not None and (beside is None or len(likely[0][1].parts) > 1))):
        # Without any scale beside the codes, the method that is declared says which one is missing.
        return likely[0]
    if told:
        return _contradicted(told[0], method)
    return _unknown_form(main, method) if beside is None else _unread_scale(main, beside, name)


def _codes(entries: Mapping[str, TensorEntry], name: str, others: tuple[str, ...]) -> TensorEntry | None:
    """The tensor that would hold the codes, whatever its dtype."""
    stem = name.removesuffix(".weight")
    templates = (*(template for storage in STORAGES for template in storage.codes), *others)
    names = (template.format(name=name, stem=stem) for template in templates)
    return next((entries[found] for found in names if found in entries), None)


def _sought(
    storage: Storage, entries: Mapping[str, TensorEntry], declared: DeclaredQuantisation | None, name: str
) -> Sought | None:
    stem = name.removesuffix(".weight")
    names: dict[str, str] = {}
    for role, templates in {"codes": storage.codes, **storage.needs, **storage.may}.items():
        told = [template.format(name=name, stem=stem) for template in templates]
        names[role] = next((one for one in told if one in entries), told[0])
    codes = entries.get(names["codes"])
    if codes is None or codes.dtype not in storage.dtypes:
        return None
    parts = {role: entries[found] for role, found in names.items() if found in entries}
    return Sought(name, MappingProxyType(parts), MappingProxyType(names), declared)


def _unknown_method(main: TensorEntry, declared: DeclaredQuantisation) -> StorageFault:
    key, known = f"{declared.key}.quant_method", ", ".join(KNOWN_METHODS)
    message = f"{key} is {shown(declared.method or '')}, which is not read; known are {known}"
    hint = "Dequantise the checkpoint first, or convert it to a form that is read."
    return StorageFault("unknown-method", main.name, main, message, hint, KNOWN_METHODS)


def _unread_scale(main: TensorEntry, beside: str, name: str) -> StorageFault:
    module = name.removesuffix("weight")
    message = f"weights of {main.dtype} with a scale called {beside.removeprefix(module)} beside them are not read"
    hint = "Dequantise the checkpoint first, or convert it to a form that is read."
    return StorageFault("unknown-form", main.name, main, message, hint, KNOWN_METHODS)


def _unknown_form(main: TensorEntry, method: str | None) -> StorageFault:
    declared = "" if method is None else f", though the config declares the quant_method {method}"
    message = f"{main.name} is stored as {main.dtype}, with no scale beside it that is known{declared}"
    hint = "Dequantise the checkpoint first, or download it again."
    return StorageFault("unknown-form", main.name, main, message, hint, KNOWN_METHODS)


def _contradicted(pair: tuple[Storage, Sought], method: str | None) -> StorageFault:
    storage, sought = pair
    beside = next((sought.names[role] for role in (*storage.tells, *storage.needs) if role in sought.parts), "")
    message = (
        f"{sought.main.name} lies there as {storage.name}, told by {beside or 'its name'}, "
        f"but the config declares the quant_method {method}"
    )
    return StorageFault("unknown-form", sought.main.name, sought.main, message, "Correct the config.", KNOWN_METHODS)


def _of_expert(stored: StoredWeight, expert: int | None) -> Layout:
    layout = stored.layout
    if expert is None:
        return layout
    if len(layout.shape) != 3 or not 0 <= expert < layout.shape[0]:
        raise InvalidValue(f"{stored.name} of shape {list(layout.shape)} has no expert {expert}", tensor=stored.name)
    parts = {
        role: _slice(entry, expert, expert + 1, drop=True) if role in layout.row_blocks else entry
        for role, entry in layout.parts.items()
    }
    return replace(layout, shape=layout.shape[1:], parts=MappingProxyType(parts))


def _of_rows(layout: Layout, start: int, stop: int) -> Layout:
    parts = dict(layout.parts)
    for role, block in layout.row_blocks.items():
        parts[role] = _slice(parts[role], start // block, -(-stop // block))
    return replace(layout, shape=(stop - start, layout.shape[-1]), parts=MappingProxyType(parts))


def _slice(entry: TensorEntry, start: int, stop: int, *, drop: bool = False) -> TensorEntry:
    """The entry of a run of slices of the first axis, or of the one slice without that axis."""
    length = entry.bytes // entry.shape[0]
    shape = entry.shape[1:] if drop else (stop - start, *entry.shape[1:])
    return replace(entry, shape=shape, start=entry.start + start * length, stop=entry.start + stop * length)


def _read(layout: Layout, stored: StoredWeight, device: torch.device | str, meter: ReadMeter) -> Tensor:
    parts = {role: read_tensor(entry, device, meter) for role, entry in layout.parts.items()}
    return stored.storage.dequantise(parts, layout)
