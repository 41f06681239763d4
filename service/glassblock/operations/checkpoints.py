"""What lies under the roots, told from headers and configs alone, and what of it is held."""

import os
from collections import Counter
from dataclasses import asdict

import torch

from glassblock.checkpoint.config import declared_eps
from glassblock.checkpoint.fits import FamilyFit, fitting_families
from glassblock.checkpoint.layer_map import resolve_layer
from glassblock.checkpoint.opened import Checkpoint, Fault
from glassblock.checkpoint.outer_tensors import embedding_entry
from glassblock.checkpoint.weight_sets import WEIGHTS_SUFFIX
from glassblock.errors import CheckpointUnusable, GlassblockError, InvalidValue, ServiceUnavailable, UnknownCheckpoint
from glassblock.operations.inputs import layer_widths
from glassblock.operations.store import CheckpointStore, Held
from glassblock.wire import checkpoints as wire
from glassblock.wire.tables import Health


def health(store: CheckpointStore) -> Health:
    """That the device computes and every root can be listed.

    Raises:
        ServiceUnavailable: one of them does not.
    """
    checks: dict[str, str] = {}
    try:
        torch.ones(2, device=store.device).sum().item()
        checks["device"] = f"ok: {store.device}"
    except RuntimeError as fault:
        checks["device"] = f"failed: {str(fault).splitlines()[0]}"
    for number, root in enumerate(store.roots.paths):
        readable = root.is_dir() and os.access(root, os.R_OK | os.X_OK)
        checks[f"root {number}"] = "ok" if readable else "failed: not a readable folder"
    if not store.roots.paths:
        checks["roots"] = "ok: none configured"
    failed = [f"{what} {how}" for what, how in checks.items() if how.startswith("failed")]
    if failed:
        hint = "look at the device and at the roots' permissions"
        raise ServiceUnavailable(f"not ready: {'; '.join(failed)}", hint=hint, retry_after=5)
    return Health(status="ready", checks=checks)


def every(store: CheckpointStore) -> wire.CheckpointList:
    """One line per checkpoint. One that cannot be opened at all counts as one fault."""
    names, stopped = store.roots.list()
    note = f"the list is not whole: after {stopped} nothing more was looked for; any other can be asked for by its name"
    return wire.CheckpointList(
        checkpoints=tuple(_summary(store, name) for name in names), notes=() if stopped is None else (note,)
    )


def _summary(store: CheckpointStore, name: str) -> wire.CheckpointSummary:
    try:
        checkpoint = store.open(name)
    except GlassblockError:
        return wire.CheckpointSummary(name=name, family=None, layers=None, tensors=0, bytes=0, faults=1, dtypes={})
    return wire.CheckpointSummary(
        name=name,
        family=checkpoint.family and checkpoint.family.name,
        layers=checkpoint.layers or None,
        tensors=len(checkpoint.entries),
        bytes=checkpoint.bytes,
        faults=len(checkpoint.faults),
        dtypes=dict(Counter(entry.dtype for entry in checkpoint.entries.values())),
    )


def detail(store: CheckpointStore, name: str) -> wire.CheckpointDetail:
    """Everything the headers and configs say.

    Raises:
        UnknownCheckpoint, AccessRefused: there is no such checkpoint here, or the name is that of another file.
    """
    checkpoint = store.open(name)
    _require_weights(checkpoint)
    d_model, d_ff = _widths(checkpoint)
    row = checkpoint.family
    embedding = embedding_entry(checkpoint) if row and checkpoint.trunk else None
    return wire.CheckpointDetail(
        name=name,
        family=row and row.name,
        verified=row and row.verified,
        layers=checkpoint.layers or None,
        d_model=d_model,
        d_ff=d_ff,
        vocabulary=embedding.shape[0] if embedding is not None and embedding.shape else None,
        tensors=len(checkpoint.entries),
        bytes=checkpoint.bytes,
        dtypes=dict(Counter(entry.dtype for entry in checkpoint.entries.values())),
        files=tuple(file.name for file in checkpoint.files),
        shapes={tensor: entry.shape for tensor, entry in checkpoint.entries.items()},
        eps=_eps(checkpoint),
        residency=_residency(store, store.held(name)),
        faults=tuple(_fault(fault) for fault in checkpoint.faults),
        fits=tuple(wire.FamilyFit(**asdict(fit)) for fit in _fits(checkpoint)),
        notes=checkpoint.notes,
    )


def _require_weights(checkpoint: Checkpoint) -> None:
    """Refuse a single file that neither is a safetensors file nor is called one: a config, a tokenizer, a pickle."""
    container = checkpoint.containers.get(checkpoint.path.name)
    if container is None or checkpoint.path.name.endswith(WEIGHTS_SUFFIX):
        return
    if any(fault.kind == "not-safetensors" for fault in container.faults):
        raise UnknownCheckpoint(
            f"{checkpoint.path.name} is no file of weights in safetensors",
            field="checkpoint",
            hint="Name its directory, or one of the safetensors files in it.",
        )


def pin(store: CheckpointStore, name: str, request: wire.ResidencyRequest) -> wire.Residency:
    """Read blocks and hold them on the device.

    Raises:
        InvalidValue: a layer is out of range.
        TooLarge: they do not fit the budget.
        NoRoom: they do not fit now, beside what runs.
    """
    return _held(store, store.pin(name, request.layers))


def evict(store: CheckpointStore, name: str) -> wire.Residency:
    """Let a checkpoint's blocks go.

    Raises:
        UnknownCheckpoint: there is no such checkpoint, held or not.
    """
    if store.held(name) is None:
        store.roots.resolve(name)
    store.evict(name)
    return wire.Residency(device=str(store.device), layers=(), bytes=0)


def _residency(store: CheckpointStore, held: Held | None) -> wire.Residency | None:
    return None if held is None else _held(store, held)


def _held(store: CheckpointStore, held: Held) -> wire.Residency:
    return wire.Residency(device=str(store.device), layers=tuple(held.blocks), bytes=held.bytes)


def _widths(checkpoint: Checkpoint) -> tuple[int | None, int | None]:
    try:
        return layer_widths(checkpoint, next(iter(checkpoint.layer_indices), 0))
    except (CheckpointUnusable, InvalidValue):
        return None, None


def _eps(checkpoint: Checkpoint) -> tuple[wire.DeclaredEps, ...]:
    if checkpoint.family is None:
        return ()
    declared = declared_eps(checkpoint.config, checkpoint.family, checkpoint.params)
    return tuple(
        wire.DeclaredEps(
            norms=entry.roles,
            value=entry.value,
            source=f"default of family {checkpoint.family.name}" if entry.key is None else f"{entry.file}: {entry.key}",
        )
        for entry in declared
    )


def _fits(checkpoint: Checkpoint) -> tuple[FamilyFit, ...]:
    """Which families fit, asked where the config names none or one whose tensors these are not."""
    if checkpoint.family is not None and checkpoint.trunk is not None:
        first, last = checkpoint.layer_indices[0], checkpoint.layer_indices[-1]
        try:
            faults = [fault for layer in {first, last} for fault in resolve_layer(checkpoint, layer)[1]]
        except CheckpointUnusable:
            return ()
        if not any(fault.kind in {"missing-tensor", "missing-norm"} for fault in faults):
            return ()
    return fitting_families(checkpoint)


def _fault(fault: Fault) -> wire.Fault:
    return wire.Fault(
        rule=fault.rule, message=fault.message, file=fault.file.name, tensor=fault.tensor, byte=fault.byte
    )
