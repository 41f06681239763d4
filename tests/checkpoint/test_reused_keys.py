"""Layers of Gemma 3n and 4 that reuse keys and values have norms of neither; all others must have them."""

from pathlib import Path

import pytest
import torch
from glassblock.checkpoint.layer_map import layer_tensors, shape_faults
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from makers import tiny_checkpoint
from torch import Tensor

FAMILIES = pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
NORMS = tuple(f"model.layers.{layer}.self_attn.k_norm.weight" for layer in range(2))


def opened(family: str, directory: Path, *, reused: int, held: tuple[str, ...]) -> Checkpoint:
    """Two layers, the last `reused` of which reuse keys and values, and files that hold these norms of keys."""
    tiny_checkpoint(family, directory / "whole")
    tensors: dict[str, Tensor | None] = {name: torch.ones(16) for name in held}
    written = open_checkpoint(directory / "whole").entries
    tensors |= {name: None for name in NORMS if name in written and name not in held}
    return open_checkpoint(
        tiny_checkpoint(family, directory / "made", config={"num_kv_shared_layers": reused}, tensors=tensors)
    )


@FAMILIES
def test_a_layer_that_reuses_them_may_lack_the_norm_of_keys(tmp_path: Path, family: str) -> None:
    checkpoint = opened(family, tmp_path, reused=1, held=NORMS[:1])
    assert shape_faults(checkpoint) == ()
    assert {"q", "k", "v"} <= set(layer_tensors(checkpoint, 0).norms)
    assert {"q", "k", "v"} & set(layer_tensors(checkpoint, 1).norms) == {"q"}


@FAMILIES
@pytest.mark.parametrize(("reused", "missing"), [(0, 1), (1, 0)])
def test_one_that_does_not_may_not(tmp_path: Path, family: str, reused: int, missing: int) -> None:
    held = tuple(name for name in NORMS if name != NORMS[missing])
    (fault,) = shape_faults(opened(family, tmp_path, reused=reused, held=held))
    assert (fault.kind, fault.tensor) == ("missing-norm", NORMS[missing])


@FAMILIES
def test_released_files_hold_it_all_the_same(tmp_path: Path, family: str) -> None:
    checkpoint = opened(family, tmp_path, reused=1, held=NORMS)
    assert shape_faults(checkpoint) == ()
    assert "k" in layer_tensors(checkpoint, 1).norms
