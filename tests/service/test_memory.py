"""What stays on the device, what may begin, and what becomes of a device that fails."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from glassblock.checkpoint.layer_map import layer_tensors
from glassblock.errors import CheckpointUnusable, NoRoom, ServiceUnavailable, TooLarge
from glassblock.operations.admission import Admission
from glassblock.operations.device_faults import EXIT_STATUS, device_faults, end_process
from glassblock.operations.layer_sizes import block_size
from glassblock.operations.operations import Operations
from glassblock.operations.residency import Key, Residency, device_bytes
from glassblock.operations.store import CheckpointStore
from glassblock.wire.blocks import BlockRunRequest
from glassblock.wire.jacobians import JacobiansRequest
from glassblock.wire.likelihoods import LikelihoodRequest
from glassblock.wire.values import Sample
from makers import REPRESENTATIVES, tiny_checkpoint

SAMPLE = Sample(rows=40)


def key(layer: int, part: str = "ffn") -> Key:
    return Key("model", layer, part)


def test_the_least_recently_used_leaves_first() -> None:
    residency = Residency(250)
    for layer in (0, 1):
        residency.put(key(layer), "stamp", torch.zeros(25))
    assert residency.get(key(0), "stamp") is not None
    residency.put(key(2), "stamp", torch.zeros(25))
    assert [residency.get(key(layer), "stamp") is not None for layer in (0, 1, 2)] == [True, False, True]
    assert residency.usage().evictions == 1
    assert residency.usage().bytes == 200


def test_what_is_pinned_stays_and_the_rest_makes_room() -> None:
    residency = Residency(250)
    residency.put(key(0), "stamp", torch.zeros(25), pinned=True)
    for layer in (1, 2, 3):
        residency.put(key(layer), "stamp", torch.zeros(25))
    assert residency.get(key(0), "stamp") is not None
    residency.put(key(4), "stamp", torch.zeros(50))
    assert residency.get(key(4), "stamp") is None, "200 bytes do not fit beside what is pinned"
    residency.clear()
    assert residency.usage() == residency.usage()._replace(bytes=100, pinned=100, entries=1)


def test_an_entry_of_other_files_is_not_given_out() -> None:
    residency = Residency(1000)
    residency.put(key(0), "before", torch.zeros(25))
    assert residency.get(key(0), "after") is None
    residency.put(key(0), "after", torch.ones(25))
    assert residency.get(key(0), "after") is not None
    assert residency.usage().bytes == 100


def test_gram_matrices_leave_with_their_block() -> None:
    residency = Residency(350)
    grams = key(0, "ffn: gram matrices block")
    residency.put(grams, "stamp", torch.zeros(25))
    assert residency.usage().entries == 0, "there is no block that they belong to"
    residency.put(key(0), "stamp", torch.zeros(25))
    residency.put(grams, "stamp", torch.zeros(25))
    assert residency.usage().entries == 2
    residency.limit(150)
    assert residency.usage().bytes == 0, "the block was used before them, and left first"


def test_memory_behind_views_is_counted_once() -> None:
    fused = torch.zeros(8, 4)
    assert device_bytes((fused[:4], [fused[4:]], None, "text")) == 128


def test_admission_refuses_makes_room_and_lets_go() -> None:
    residency = Residency(1000)
    admission = Admission(1000, residency)
    for layer in range(5):
        residency.put(key(layer), "stamp", torch.zeros(25))
    with pytest.raises(TooLarge, match=r"1,001 bytes .* 1,000 may be used"), admission.reserved(1001):
        pass
    with admission.reserved(800):
        assert residency.usage().bytes == 200, "blocks made room"
        with pytest.raises(NoRoom, match="estimated to take 300 bytes") as refused, admission.reserved(300):
            pass
        assert refused.value.retry_after is not None
        assert (admission.fits(300), admission.fits(200), admission.fits(2000)) == ("later", "now", "never")
    assert admission.memory().reserved == 0
    residency.put(key(9), "stamp", torch.zeros(25), pinned=True)
    with pytest.raises(NoRoom, match="100 are pinned"), admission.reserved(950):
        pass
    with admission.reserved(950, resident=100):
        assert residency.get(key(9), "stamp") is not None


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    tiny_checkpoint("llama", tmp_path / "model")
    return CheckpointStore([tmp_path], device="cpu")


def run(operations: Operations, layer: int = 0, **changes: Any) -> Any:
    message = {"checkpoint": "model", "layer": layer, "x": np.ones((2, 48)).tolist(), **changes}
    return operations.run_block(BlockRunRequest.model_validate(message), {}).answer


def test_blocks_stay_and_are_read_again_when_their_files_change(store: CheckpointStore, tmp_path: Path) -> None:
    operations = Operations(store)
    first = run(operations)
    assert first.read.bytes > 0
    assert run(operations).read.bytes == 0
    assert run(operations, part="layer", x=np.ones((2, 48)).tolist()).read.bytes > 0, "attention was not there yet"
    assert run(operations, part="layer", x=np.ones((2, 48)).tolist()).read.bytes == 0
    tiny_checkpoint("llama", tmp_path / "model", seed=1)
    changed = run(operations)
    assert changed.read.bytes == first.read.bytes
    assert changed.stages["output"].mean != first.stages["output"].mean


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_what_a_pinned_block_takes_is_known_before_it_is_read(tmp_path: Path, family: str) -> None:
    tiny_checkpoint(family, tmp_path / "model")
    store = CheckpointStore([tmp_path], device="cpu")
    held = store.pin("model", [0]).blocks[0].bytes
    assert held == store.residency.usage().pinned
    tensors = layer_tensors(store.open("model"), 0)
    norms = sum(entry.bytes for norm in tensors.norms.values() for entry in norm.entries)
    assert held <= block_size(tensors).held <= held + norms


def test_blocks_are_pinned_only_where_there_is_room_for_them(store: CheckpointStore) -> None:
    block = store.pin("model", [0]).bytes
    left = store.admission.budget - 2 * block
    for budget, refused, words in ((3 * block // 2, TooLarge, "over the budget"), (1 << 40, NoRoom, "are in use")):
        store.residency.budget = budget
        with store.admission.reserved(left), pytest.raises(refused, match=words) as told:
            store.pin("model", None)  # two layers, and what is needed to read one
        assert told.value.field == "layers"
        assert list(store.held("model").blocks) == [0], "what was pinned stays"  # pyright: ignore[reportOptionalMemberAccess]
        assert store.admission.memory() == (store.admission.budget, 0, block, block)
    with store.admission.reserved(left):
        assert store.pin("model", [0]).bytes == block, "what lies there already takes nothing more"
    assert len(store.pin("model", None).blocks) == 2
    assert store.admission.memory().pinned == 2 * block


def test_damaged_files_are_refused_unless_their_blocks_are_pinned(store: CheckpointStore, tmp_path: Path) -> None:
    operations = Operations(store)
    good = run(operations)
    weights = tmp_path / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointUnusable, match=r"model\.safetensors"):
        run(operations)
    weights.write_bytes(content)
    store.pin("model", [0])
    assert run(operations).notes == good.notes
    weights.write_bytes(content[: len(content) // 2])
    kept = run(operations)
    assert kept.stages == good.stages
    assert "cannot be used any more" in kept.notes[-1]
    with pytest.raises(CheckpointUnusable):
        run(operations, layer=1)  # is not pinned
    assert operations.content_of("run_block", BlockRunRequest(checkpoint="model", layer=0), {}, form="json") is None
    weights.write_bytes(content)
    assert run(operations).notes == good.notes


def test_gram_matrices_are_formed_once(store: CheckpointStore) -> None:
    operations = Operations(store)
    request = JacobiansRequest(checkpoint="model", layers=(0,), sample=SAMPLE, norms=("frobenius",))
    first, again = (operations.jacobians(request, {}).answer.layers[0] for _ in range(2))
    assert first.method == again.method == "gram"
    assert again.flops < first.flops, "they are not formed again"
    assert [token.frobenius for token in first.tokens] == [token.frobenius for token in again.tokens]
    assert [token.frobenius for token in first.tokens] != [None] * SAMPLE.rows


def test_a_small_budget_is_kept(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path / "model")
    store = CheckpointStore([tmp_path], device="cpu", device_bytes=1 << 20)
    operations = Operations(store)
    with pytest.raises(TooLarge, match="is estimated to take"):
        run(operations, x=np.ones((2000, 48)).tolist())
    assert run(operations).stages
    assert store.residency.usage().bytes <= 1 << 19


def test_out_of_memory_lets_resident_blocks_go() -> None:
    residency = Residency(1000)
    residency.put(key(0), "stamp", torch.zeros(25))
    with pytest.raises(NoRoom), device_faults(torch.device("cpu"), residency):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert residency.usage().bytes == 0


@pytest.mark.parametrize(
    "fault", [torch.AcceleratorError("CUDA error: an illegal memory access"), RuntimeError("CUDA error: unspecified")]
)
@pytest.mark.parametrize("broken", [True, False])
def test_only_a_fault_that_persists_ends_the_process(
    fault: Exception, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[BaseException] = []

    def probe(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access")

    if broken:
        monkeypatch.setattr("glassblock.operations.device_faults.torch.ones", probe)
    with (
        pytest.raises(ServiceUnavailable, match="the device failed"),
        device_faults(torch.device("cpu"), Residency(0), lost=lost.append),
    ):
        raise fault
    assert lost == ([fault] if broken else [])


def test_a_defect_of_ours_is_no_fault_of_the_device() -> None:
    with pytest.raises(RuntimeError, match="shapes"), device_faults(torch.device("cpu"), Residency(0)):
        raise RuntimeError("shapes do not match")


def test_the_process_ends_with_a_status_for_its_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr("glassblock.operations.device_faults.os._exit", ended.append)
    monkeypatch.setattr("glassblock.operations.device_faults.logging.shutdown", lambda: None)
    end_process(RuntimeError("CUDA error: device-side assert triggered\nmore"))
    assert ended == [EXIT_STATUS]


def test_an_audit_waits_for_room() -> None:
    admission = Admission(1000, Residency(0))
    began = threading.Event()

    def audit() -> None:
        admission.wait(500, given_up=lambda: False)
        began.set()

    with admission.reserved(800):
        thread = threading.Thread(target=audit)
        thread.start()
        assert not began.wait(0.3)
    assert began.wait(5)
    thread.join()
    since = time.monotonic()
    with admission.reserved(800):
        admission.wait(500, given_up=lambda: True)
    admission.wait(5000, given_up=lambda: False)  # it never will: the audit is told so when it begins
    assert time.monotonic() - since < 5


def test_an_answer_with_pieces_of_text_is_one_of_its_tokenizer(store: CheckpointStore, tmp_path: Path) -> None:
    """Token ids and the weights are the same, and the pieces that are told beside them are not."""
    operations = Operations(store)
    asked = LikelihoodRequest(checkpoint="model", token_ids=(1, 2))
    before = operations.content_of("likelihoods", asked, {}, form="json")
    assert before == operations.content_of("likelihoods", asked, {}, form="json")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert before != operations.content_of("likelihoods", asked, {}, form="json")
