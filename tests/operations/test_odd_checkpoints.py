"""Operations on checkpoints that are not the plainest: layers that are absent, norms that only some layers have."""

import time
from pathlib import Path

import pytest
from glassblock.operations.opened import SETTLED_SECONDS
from glassblock.operations.operations import Operations
from glassblock.operations.store import CheckpointStore
from glassblock.wire.budgets import BudgetRequest
from glassblock.wire.checkpoints import ResidencyRequest
from glassblock.wire.jacobians import JacobiansRequest
from glassblock.wire.norms import NormStatisticsRequest
from makers import Tiny, tiny_checkpoint, tiny_tensors

LAYERS = Tiny(layers=4)
ROWS = [[1.0] * 48, [0.5] * 24 + [-1.0] * 24]


@pytest.fixture
def stage(tmp_path: Path) -> Operations:
    """The second half of a model of four layers, as a pipeline of two machines has it."""
    first = [name for name in tiny_tensors("llama", LAYERS) if name.startswith(("model.layers.0.", "model.layers.1."))]
    tiny_checkpoint("llama", tmp_path / "stage", tiny=LAYERS, tensors=dict.fromkeys(first))
    return Operations(CheckpointStore([tmp_path], device="cpu"))


def test_all_layers_are_those_that_are_there(stage: Operations) -> None:
    assert stage.pin("stage", ResidencyRequest()).answer.layers == (2, 3)
    answer = stage.jacobians(JacobiansRequest(checkpoint="stage", part="ffn", x=ROWS), {}).answer
    assert [told.layer for told in answer.layers] == [2, 3]


def test_sizes_are_those_of_the_first_layer_that_is_there(stage: Operations) -> None:
    detail = stage.checkpoint("stage").answer
    budget = stage.budgets(BudgetRequest(checkpoint="stage")).answer
    assert (detail.d_model, detail.d_ff) == (budget.d_model, budget.d_ff) == (48, 112)
    assert (budget.layers, budget.dtype) == (2, "float32")


def test_the_epsilon_of_a_norm_that_only_some_layers_have(tmp_path: Path) -> None:
    tiny_checkpoint("olmo_hybrid", tmp_path / "hybrid")
    operations = Operations(CheckpointStore([tmp_path], device="cpu"))
    request = NormStatisticsRequest(checkpoint="hybrid", layer=0, norm="attn_in", x=ROWS)
    assert operations.norm_statistics(request, {}).answer.eps.source == "config.json: rms_norm_eps"


def test_a_single_file_of_any_name_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    for layers in (2, 3):
        tiny_checkpoint("llama", tmp_path / str(layers), tiny=Tiny(layers=layers))
    store, file = CheckpointStore([tmp_path], device="cpu"), tmp_path / "one.weights"
    for layers in (2, 3):
        file.write_bytes((tmp_path / str(layers) / "model.safetensors").read_bytes())
        time.sleep(2 * SETTLED_SECONDS)
        assert store.open("one.weights", family="llama").layers == layers
