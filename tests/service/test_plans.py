"""Estimates against what torch's allocator really gave out: never below it, and at most twice as much."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from glassblock.audit.mistakes import MISTAKES
from glassblock.errors import InvalidValue, NoRoom, UnknownCheckpoint
from glassblock.operations import plans
from glassblock.operations.operations import Operations
from glassblock.operations.store import CheckpointStore
from glassblock.operations.works import WORKS
from glassblock.wire.audits import AuditRequest
from glassblock.wire.blocks import BlockRunRequest
from glassblock.wire.explain import ExplainRequest
from glassblock.wire.framing import WireTensor
from glassblock.wire.plans import PlannedOperation, TensorShape
from glassblock.wire.values import RunStage
from glassblock_client import Client
from makers import Tiny, tiny_checkpoint
from peaks import peak_of
from torch.utils.flop_counter import FlopCounterMode

# A layer wide enough that its arrays, and not what every operation takes, are measured.
WIDE = Tiny(hidden=192, intermediate=512, layers=3, heads=3, kv_heads=1, head_dim=64, vocab=512)

CASES: dict[str, tuple[PlannedOperation, dict[str, Any], tuple[int, int] | None]] = {
    "one row": ("run_block", {"layer": 1, "sample": {"rows": 1, "seed": 0}}, None),
    "rows": ("run_block", {"layer": 1, "sample": {"rows": 512, "seed": 0}}, None),
    "posted": ("run_block", {"layer": 1}, (2048, 192)),
    "bfloat16": ("run_block", {"layer": 1, "overrides": {"dtype": "bfloat16"}}, (2048, 192)),
    "float64": ("run_block", {"layer": 1, "overrides": {"dtype": "float64"}}, (2048, 192)),
    "normed alone": ("run_block", {"layer": 1, "capture": ["normed"]}, (4096, 192)),
    "attention": ("run_block", {"layer": 1, "part": "attention"}, (1024, 192)),
    "layer": ("run_block", {"layer": 1, "part": "layer"}, (1024, 192)),
    "text": ("run_block", {"layer": 2, "token_ids": list(range(256)), "part": "layer"}, None),
    "text, network": ("run_block", {"layer": 2, "token_ids": list(range(256))}, None),
    "likelihoods": ("likelihoods", {"token_ids": list(range(256))}, None),
    "norms": ("norm_statistics", {"layer": 1, "norm": "ffn_in"}, (2048, 192)),
    "norms of many rows": ("norm_statistics", {"layer": 1, "norm": "ffn_in"}, (16384, 192)),
    "residuals": ("compare_residuals", {"layer": 1, "dense_up_to": 256}, (24, 192)),
    "residuals by rows": ("compare_residuals", {"layer": 1, "dense_up_to": 8}, (24, 192)),
    "jacobians, few": ("jacobians", {"layers": [1], "norms": ["frobenius"]}, (4, 192)),
    "jacobians": ("jacobians", {"layers": [1], "norms": ["frobenius", "trace"]}, (256, 192)),
    "spectral": ("jacobians", {"layers": [1], "norms": ["spectral"]}, (64, 192)),
    "jacobians, text": (
        "jacobians",
        {"layers": [2], "norms": ["frobenius"], "token_ids": list(range(256)), "states": "reached"},
        None,
    ),
}

COUNTED: dict[str, tuple[str, PlannedOperation, dict[str, Any], int]] = {
    "block": ("wide", "run_block", {"layer": 1}, 512),
    "block of a mixture": ("mixture", "run_block", {"layer": 1}, 512),
    "mixture with a shared network": ("shared", "run_block", {"layer": 1}, 512),
    "expert": ("mixture", "run_block", {"layer": 1, "expert": 0}, 512),
    "layer of a mixture": ("mixture", "run_block", {"layer": 1, "part": "layer"}, 256),
    "Jacobians of experts": ("mixture", "jacobians", {"layers": [1], "norms": ["frobenius"]}, 32),
    "Jacobian of an expert": ("mixture", "jacobians", {"layers": [1], "expert": 0, "norms": ["frobenius"]}, 32),
    "mixture": ("mixture", "jacobians", {"layers": [1], "part": "mixture", "norms": ["frobenius"]}, 32),
    "residuals": ("wide", "compare_residuals", {"layer": 1, "dense_up_to": 256}, 64),
    "residuals by rows": ("wide", "compare_residuals", {"layer": 1, "dense_up_to": 8}, 4),
    "residuals of a matrix": ("", "compare_residuals", {"eps": 1e-5, "dense_up_to": 256}, 32),
    "spectral": ("wide", "jacobians", {"layers": [1], "norms": ["spectral"]}, 32),
    "depth": ("wide", "jacobians", {"layers": [0, 1, 2], "part": "block", "norms": ["frobenius"], "depth": True}, 4),
}
"""Cases of which bytes, peak and FLOPs are counted."""

TWICE = "text, network"
"""Here nothing stays on the device, so that the network is read with its layer and again alone."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    folder = tmp_path_factory.mktemp("plans")
    tiny_checkpoint("llama", folder / "wide", tiny=WIDE, dtype=torch.bfloat16)
    # Nothing stays: every request takes all of its peak anew.
    return CheckpointStore([folder], device="cpu", resident_bytes=0)


@pytest.mark.parametrize("case", CASES)
def test_an_estimate_is_never_below_the_peak_and_at_most_twice_it(store: CheckpointStore, case: str) -> None:
    operation, message, shape = CASES[case]
    model = plans.MESSAGES[operation]
    request = model.model_validate({"checkpoint": "wide", **message})
    tensors: dict[str, WireTensor] = {}
    if shape is not None:
        rows = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
        tensors["x"] = WireTensor("F32", shape, memoryview(bytearray(rows.tobytes())))
    arguments = (request,) if operation == "likelihoods" else (request, tensors)
    call = getattr(Operations(store), operation)
    plan = plans.estimate(store, operation, request, tensors)
    peak, answer = peak_of(lambda: call(*arguments).answer)
    assert peak <= plan.peak_bytes <= 2 * peak + plans.SMALL_BYTES
    if hasattr(answer, "read") and operation not in {"norm_statistics", "jacobians"} and case != TWICE:
        assert plan.bytes_read == pytest.approx(answer.read.bytes, rel=0.02), "gains of norms are not counted"
    assert (plan.flops > 0) is (case not in {"normed alone"})


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counted")
    for name, family in (("wide", "llama"), ("mixture", "mixtral"), ("shared", "qwen2_moe")):
        tiny_checkpoint(family, folder / name, tiny=WIDE, dtype=torch.bfloat16)
    return folder


def posted(rows: int, width: int = 192) -> dict[str, WireTensor]:
    drawn = np.random.default_rng(0).standard_normal((rows, width), dtype=np.float32)
    return {"x": WireTensor("F32", (rows, width), memoryview(bytearray(drawn.tobytes())))}


@pytest.mark.parametrize("case", COUNTED)
def test_bytes_and_products_are_those_that_are_counted(resident: Path, case: str) -> None:
    name, operation, message, rows = COUNTED[case]
    store = CheckpointStore([resident], device="cpu")  # of its own: nothing is resident, and what is read stays
    message = {"checkpoint": name, **message} if name else message
    request = plans.MESSAGES[operation].model_validate(message)
    tensors = posted(rows) if name else posted(rows) | {"matrix": posted(192)["x"]}
    plan = plans.estimate(store, operation, request, tensors)
    with FlopCounterMode(display=False) as counter:
        answer = getattr(Operations(store), operation)(request, tensors).answer
    read = 0 if answer.read is None else answer.read.bytes
    assert plan.bytes_read == pytest.approx(read, rel=0.02), "gains of norms are not counted"
    counted = counter.get_total_flops()
    if message.get("part") == "layer":  # the counter does not know the CPU's attention: two products of [t, t, d]
        counted += 4 * rows * rows * 192
    # Of Jacobians the self-check and the steps of a bracket depend on the numbers; a run is counted to the last one.
    exact = operation in {"run_block", "compare_residuals"}
    assert plan.flops == pytest.approx(counted, rel=0.01 if exact else 0.25)
    fresh = CheckpointStore([resident], device="cpu", resident_bytes=0)
    peak, _ = peak_of(lambda: getattr(Operations(fresh), operation)(request, tensors))
    assert peak <= plan.peak_bytes <= 2 * peak + plans.SMALL_BYTES


SWAPPED = "ffn/gate-up-swapped"
STAGES: tuple[RunStage, ...] = ("x", "normed", "gate", "up", "hidden", "down", "output")


@pytest.mark.parametrize(
    ("rows", "seen", "tolerance"),
    [
        # 8 rows screen one mistake that meets a product; in few rows they may be fewer.
        (64, STAGES, 0.01),
        (256, STAGES, 0.01),
        # How many mistakes come near depends on the numbers, where only both ends are seen.
        (64, ("x", "output"), 0.5),
    ],
)
def test_explaining_is_counted_by_what_was_captured(
    resident: Path, rows: int, seen: tuple[str, ...], tolerance: float
) -> None:
    store = CheckpointStore([resident], device="cpu", resident_bytes=0)
    operations = Operations(store)
    run = BlockRunRequest.model_validate(
        {
            "checkpoint": "wide",
            "layer": 1,
            "capture": STAGES,
            "return_tensors": True,
            "overrides": {"dtype": "bfloat16"},
        }
    )
    captured = {
        name: one for name, one in operations.run_block(run, posted(rows)).wire_tensors().items() if name in seen
    }
    request = ExplainRequest(checkpoint="wide", layer=1)
    plan = plans.estimate(store, "explain_block", request, captured)
    with FlopCounterMode(display=False) as counter:
        answer = operations.explain_block(request, captured).answer
    assert plan.bytes_read == pytest.approx(answer.read.bytes, rel=0.02)
    assert plan.flops == pytest.approx(counter.get_total_flops(), rel=tolerance)
    peak, _ = peak_of(lambda: operations.explain_block(request, captured))
    assert peak <= plan.peak_bytes <= 2 * peak + plans.SMALL_BYTES


def test_of_a_mixture_no_more_experts_are_read_than_rows_can_choose(resident: Path) -> None:
    store = CheckpointStore([resident], device="cpu", resident_bytes=0)
    one, all_of_them = (
        plans.estimate(store, "run_block", BlockRunRequest(checkpoint="mixture", layer=1), posted(rows)).bytes_read
        for rows in (1, 64)
    )
    read = Operations(store).run_block(BlockRunRequest(checkpoint="mixture", layer=1), posted(1)).answer.read.bytes
    assert one == pytest.approx(read, rel=0.02)
    assert 1.9 < all_of_them / one < 2.1, "two of four experts"


def test_a_plan_over_http_does_nothing(client: Client) -> None:
    client.evict("llama")
    quote = client.plan("run_block", {"checkpoint": "llama", "layer": 0, "sample": {"rows": 4}})
    assert quote.fits == "now"
    assert 0 < quote.peak_bytes < quote.budget_bytes
    assert client.run_block("llama", 0, x=np.ones((1, 48), np.float32)).answer.read.bytes > 0, "nothing was read"
    posted = client.plan("run_block", {"checkpoint": "llama", "layer": 0}, tensors={"x": (10**9, 48)})
    assert posted.fits == "never"
    assert posted.flops > 10**9 * quote.flops // 8
    wide = {"x": TensorShape(dtype="F64", shape=(10**6, 48))}
    double = client.plan("run_block", {"checkpoint": "llama", "layer": 0}, tensors=wide)
    single = client.plan("run_block", {"checkpoint": "llama", "layer": 0}, tensors={"x": (10**6, 48)})
    assert 1.5 < double.peak_bytes / single.peak_bytes < 2.5
    assert client.plan("start_audit", {"checkpoint": "llama"}).bytes_read > 0


def test_a_plan_of_nothing_is_refused(client: Client) -> None:
    with pytest.raises(InvalidValue) as refused:
        client.plan("run_block", {"checkpoint": "llama"})
    assert refused.value.field == "request.layer"
    with pytest.raises(InvalidValue):
        client.plan("run_block", {"checkpoint": "llama", "layer": 99, "sample": {"rows": 4}})
    with pytest.raises(UnknownCheckpoint):
        client.plan("start_audit", {"checkpoint": "nothing"})


def test_every_row_has_a_message_and_whatever_may_be_a_job_a_row() -> None:
    assert plans.MESSAGES.keys() == plans.PLANS.keys() == WORKS.keys()


@pytest.mark.parametrize(
    ("operation", "message", "audits"),
    [
        ("repair", {"dry_run": True}, 2),
        ("selftest", {"rules": [SWAPPED]}, 1 + sum(SWAPPED in mistake.rules for mistake in MISTAKES.values())),
    ],
)
def test_repairs_and_self_tests_are_audits_one_after_the_other(
    store: CheckpointStore, operation: PlannedOperation, message: dict[str, Any], audits: int
) -> None:
    request = plans.MESSAGES[operation].model_validate({"checkpoint": "wide", **message})
    plan = plans.estimate(store, operation, request, {})
    one = plans.estimate(store, "start_audit", AuditRequest(checkpoint="wide"), {})
    assert plan == one._replace(bytes_read=audits * one.bytes_read, flops=audits * one.flops)
    call = getattr(Operations(store), operation)
    peak, _ = peak_of(lambda: call(request))
    assert peak <= plan.peak_bytes
    with store.admission.reserved(store.admission.budget - plan.peak_bytes + 1), pytest.raises(NoRoom):
        call(request)
    assert store.admission.memory().reserved == 0
