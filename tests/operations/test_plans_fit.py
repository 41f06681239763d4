"""Plans hold what is done: what is pinned and is not of use, scores of attention, references that are read, copies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.operations import plans
from glassblock.operations.operations import Operations
from glassblock.operations.store import CheckpointStore
from glassblock.wire.audits import AuditRequest
from glassblock.wire.blocks import BlockPart, BlockRunRequest
from glassblock.wire.checkpoints import ResidencyRequest
from glassblock.wire.jacobians import JacobiansRequest
from glassblock.wire.norms import NormRole, NormStatisticsRequest
from glassblock.wire.repairs import RepairRequest
from makers import Tiny, tiny_checkpoint
from peaks import peak_of


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    for name, layers in (("one", 2), ("other", 3)):
        tiny_checkpoint("llama", tmp_path / name, tiny=Tiny(layers=layers))
    return CheckpointStore([tmp_path], device="cpu")


def test_what_is_pinned_as_another_family_is_not_there(store: CheckpointStore) -> None:
    """The block is read beside it, and must have its own room."""
    operations = Operations(store)
    operations.pin("one", ResidencyRequest(layers=(0,)))
    read: dict[str | None, tuple[bool, int]] = {}
    for family in (None, "mistral"):
        request = BlockRunRequest(checkpoint="one", layer=0, x=[[1.0] * 48], family=family)
        plan = operations.cost("run_block", request, {})
        read[family] = plan.pinned_bytes > 0, operations.run_block(request, {}).answer.read.bytes
    assert read[None] == (True, 0)
    assert (read["mistral"][0], read["mistral"][1] > 0) == (False, True)


@pytest.mark.parametrize("names", ["other", ["other", "one"]])
def test_references_are_read_too(store: CheckpointStore, names: Any) -> None:
    alone, beside = (
        plans.estimate(store, "start_audit", AuditRequest(checkpoint="one", reference=reference), {})
        for reference in (None, names)
    )
    references = [names] if isinstance(names, str) else names
    assert beside.bytes_read == alone.bytes_read + sum(store.open(name).bytes for name in references)


@pytest.mark.parametrize(("asked", "times"), [({"dry_run": True}, 2), ({"output": "new"}, 4)])
def test_a_repair_reads_what_its_page_says(store: CheckpointStore, asked: dict[str, Any], times: int) -> None:
    """Audited, audited through the patch, copied, audited again; nothing is copied in a dry run."""
    plan = plans.estimate(store, "repair", RepairRequest(checkpoint="one", **asked), {})
    assert plan.bytes_read == times * store.open("one").bytes


def test_of_layers_one_after_the_other_one_lies_there_at_a_time(store: CheckpointStore) -> None:
    """What is pinned of the others is no part of the peak, and nothing is saved by it."""
    operations = Operations(store)

    def needed(layers: tuple[int, ...]) -> int:
        request = JacobiansRequest(checkpoint="other", layers=layers, part="ffn", x=[[1.0] * 48], norms=("frobenius",))
        plan = operations.cost("jacobians", request, {})
        return plan.peak_bytes - plan.pinned_bytes

    operations.pin("other", ResidencyRequest())
    assert needed((0, 1, 2)) == needed((0,))


def test_a_pinned_block_is_no_part_of_its_attention(store: CheckpointStore) -> None:
    operations = Operations(store)
    operations.pin("one", ResidencyRequest())
    of_use: dict[BlockPart, bool] = {"attention": False, "ffn": True, "layer": True}
    for part, there in of_use.items():
        request = BlockRunRequest(checkpoint="one", layer=0, part=part, x=[[1.0] * 48])
        assert (operations.cost("run_block", request, {}).pinned_bytes > 0) is there


@pytest.mark.parametrize("part", ["attention", "layer"])
@pytest.mark.parametrize("rows", [32, 256])
def test_the_scores_of_attention_are_counted_where_they_are_differentiated(
    part: str, rows: int, tmp_path: Path
) -> None:
    """And of attention alone no network is read."""
    tiny = Tiny(hidden=192, intermediate=512, heads=3, kv_heads=1, head_dim=64)
    tiny_checkpoint("llama", tmp_path / "wide", tiny=tiny, dtype=torch.bfloat16)
    store = CheckpointStore([tmp_path], device="cpu", resident_bytes=0)
    asked = {"checkpoint": "wide", "layers": [1], "part": part, "norms": ["frobenius"]}
    x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(0))
    request = JacobiansRequest.model_validate({**asked, "x": x.tolist()})
    plan = plans.estimate(store, "jacobians", request, {})
    peak, answer = peak_of(lambda: Operations(store).jacobians(request, {}).answer)
    assert peak <= plan.peak_bytes <= 2 * peak + plans.SMALL_BYTES
    assert answer.read is not None
    assert plan.bytes_read == pytest.approx(answer.read.bytes, rel=0.02), "gains of norms are not counted"


@pytest.mark.parametrize(("layer", "norm"), [(0, "attn_in"), (1, "attn_in"), (1, "ffn_in"), (None, "final")])
def test_a_text_passes_the_layers_below_a_norm(store: CheckpointStore, layer: int | None, norm: NormRole) -> None:
    request = NormStatisticsRequest(checkpoint="other", layer=layer, norm=norm, token_ids=tuple(range(64)))
    store = CheckpointStore(store.roots.paths, device="cpu", resident_bytes=0)
    plan = plans.estimate(store, "norm_statistics", request, {})
    peak, answer = peak_of(lambda: Operations(store).norm_statistics(request, {}).answer)
    assert peak <= plan.peak_bytes
    assert answer.read is not None
    assert plan.bytes_read == pytest.approx(answer.read.bytes, rel=0.02), "gains of norms are not counted"
