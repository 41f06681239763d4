"""norms/statistics and residuals/compare are stopped between groups of rows, and give the same in groups as at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from glassblock.numerics.watching import ComputationCancelled
from glassblock.operations import norm_statistics, residuals
from glassblock.operations.operations import Operations
from glassblock.operations.reply import Reply
from glassblock.operations.store import CheckpointStore
from glassblock.operations.works import WORKS, Follower
from glassblock.wire.framing import WireTensor
from glassblock.wire.norms import NormStatisticsRequest, ResidualCompareRequest
from makers import tiny_checkpoint

D = 48
ROWS = 40
LAYER = {"checkpoint": "llama", "layer": 0}

Ask = Callable[[Operations, Follower], Reply[Any]]


def rows() -> dict[str, WireTensor]:
    drawn = np.random.default_rng(0).standard_normal((4, ROWS // 4, D), dtype=np.float32)
    return {"x": WireTensor("F32", drawn.shape, memoryview(bytearray(drawn.tobytes())))}


CASES: dict[str, Ask] = {
    "norms": lambda operations, by: WORKS["norm_statistics"](
        operations, NormStatisticsRequest(eps=1e-5, jacobian=True), rows(), by
    ),
    "norms of a layer": lambda operations, by: WORKS["norm_statistics"](
        operations, NormStatisticsRequest.model_validate({**LAYER, "norm": "ffn_in"}), rows(), by
    ),
    "residuals": lambda operations, by: WORKS["compare_residuals"](
        operations, ResidualCompareRequest.model_validate(LAYER), rows(), by
    ),
    "residuals by rows": lambda operations, by: WORKS["compare_residuals"](
        operations, ResidualCompareRequest.model_validate({**LAYER, "dense_up_to": 1}), rows(), by
    ),
}


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> Operations:
    folder: Path = tmp_path_factory.mktemp("cancelling")
    tiny_checkpoint("llama", folder / "llama")
    return Operations(CheckpointStore([folder], device="cpu"))


@pytest.fixture
def three_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_statistics, "ELEMENTS_AT_ONCE", 3 * D)
    monkeypatch.setattr(residuals, "JACOBIAN_ELEMENTS", 3 * D * max(D, 128))


@pytest.mark.usefixtures("three_rows_at_once")
@pytest.mark.parametrize("case", CASES)
def test_it_stops_at_the_next_group_of_rows(operations: Operations, case: str) -> None:
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) == 6

    with pytest.raises(ComputationCancelled):
        CASES[case](operations, Follower(cancelled=cancelled))
    assert len(asked) == 6, "it did not go on"


@pytest.mark.parametrize("case", CASES)
def test_groups_of_rows_change_nothing(
    operations: Operations, case: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = CASES[case](operations, Follower())
    request.getfixturevalue("three_rows_at_once")
    parts = CASES[case](operations, Follower())
    monkeypatch.undo()
    assert set(parts.tensors) == set(whole.tensors)
    for name, tensor in whole.tensors.items():
        # A product of matrices of another shape may sum in another order.
        torch.testing.assert_close(parts.tensors[name], tensor, rtol=1e-5, atol=1e-6)
    left, right = whole.answer.model_dump(), parts.answer.model_dump()
    for name in ("mean", "rms", "variance", "jacobian", "jacobian_frobenius", "dtype_report", "invariances", "notes"):
        assert left.get(name) == right.get(name), name
