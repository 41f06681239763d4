"""SmolLM2 with exchanged layers, repaired byte for byte; and what an audit of it would find."""

import json
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from glassblock.api.entry import repair, selftest
from glassblock.audit.audit import audit_checkpoint
from glassblock.wire.repairs import RepairRequest
from glassblock.wire.selftests import SelftestRequest

pytestmark = pytest.mark.real

EXCHANGED = (7, 8, 21)
WEIGHTS = "model.safetensors"


def silent(*_: object) -> None: ...


@pytest.fixture(scope="module")
def broken(smollm2: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with gate and up of three layers exchanged in the header."""
    directory = shutil.copytree(smollm2.single, tmp_path_factory.mktemp("broken") / "smollm2")
    exchange(directory / WEIGHTS, EXCHANGED)
    return directory


def exchange(path: Path, layers: Sequence[int]) -> None:
    with path.open("r+b") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        for layer in layers:
            gate, up = (f'"model.layers.{layer}.mlp.{name}_proj.weight"'.encode() for name in ("gate", "up"))
            assert header.count(gate) == header.count(up) == 1
            header = header.replace(gate, b"\0").replace(up, gate).replace(b"\0", up)
        file.seek(8)
        file.write(header)


def test_exchanged_layers_are_repaired_byte_for_byte(broken: Path, smollm2: Any, tmp_path: Path) -> None:
    before = (broken / WEIGHTS).read_bytes()
    request = RepairRequest(checkpoint=broken.name, output="repaired")
    answer = repair([broken.parent], request, output_root=tmp_path, device="cpu", progress=silent)
    assert [(step.rule, step.layer) for step in answer.steps] == [("ffn/gate-up-swapped", layer) for layer in EXCHANGED]
    assert (answer.refused, answer.header_only) == ((), True)
    assert (answer.before.verdict, answer.after.verdict, answer.after.findings) == ("fail", "pass", ())
    assert (broken / WEIGHTS).read_bytes() == before
    original = smollm2.single
    names = sorted(path.name for path in original.iterdir() if not path.name.startswith("."))
    assert sorted(path.name for path in (tmp_path / "repaired").iterdir()) == names
    for name in names:
        if name != WEIGHTS:
            assert (tmp_path / "repaired" / name).read_bytes() == (original / name).read_bytes()
    assert tensors(tmp_path / "repaired" / WEIGHTS) == tensors(original / WEIGHTS)


def tensors(path: Path) -> dict[str, tuple[Any, ...]]:
    """Every tensor's description with its bytes, whatever the order of the header."""
    raw = memoryview(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(bytes(raw[8:start]))
    return {
        name: (
            told["dtype"],
            tuple(told["shape"]),
            zlib.crc32(raw[slice(*(start + at for at in told["data_offsets"]))]),
        )
        for name, told in header.items()
        if name != "__metadata__"
    }


def test_a_dry_run_foresees_it_and_in_place_does_it(broken: Path, smollm2: Any, tmp_path: Path) -> None:
    directory = shutil.copytree(broken, tmp_path / broken.name)
    names = sorted(path.name for path in directory.iterdir())
    foreseen = repair([tmp_path], RepairRequest(checkpoint=broken.name, dry_run=True), device="cpu", progress=silent)
    assert sorted(path.name for path in directory.iterdir()) == names
    assert (foreseen.written, foreseen.after.verdict) == (None, "pass")
    done = repair([tmp_path], RepairRequest(checkpoint=broken.name), in_place=True, device="cpu", progress=silent)
    assert done.backups == (f"{WEIGHTS}.glassblock-backup",)
    assert done.after == foreseen.after == audit_checkpoint(directory)
    assert tensors(directory / WEIGHTS) == tensors(smollm2.single / WEIGHTS)
    with (directory / WEIGHTS).open("r+b") as file:
        file.write((directory / done.backups[0]).read_bytes())
    assert (directory / WEIGHTS).read_bytes() == (broken / WEIGHTS).read_bytes()


def test_a_selftest_names_every_mistake_that_a_rule_is_meant_for(smollm2: Any) -> None:
    request = SelftestRequest(checkpoint=smollm2.sharded.name, layers=(0, 7, 15, 22, 29))
    answer = selftest(smollm2.sharded.parent, request, device="cpu", progress=silent)
    assert answer.healthy == ()
    told = {mistake.mistake: mistake for mistake in answer.mistakes}
    for name in ("swap", "swap-everywhere", "transposed", "nan", "infinity", "truncated", "no-shard", "no-tensor"):
        assert told[name].outcome == "found", told[name]
    for name in ("no-final-norm", "tie", "fewer-layers"):
        assert told[name].outcome == "found", told[name]
    assert told["swap-everywhere"].named == (0, 7, 15, 22, 29)
    assert told["swap"].named == told["swap"].planted == (15,)
    assert told["eps"].outcome == "undecidable"
    assert told["interleaved"].outcome == "not-applicable"
