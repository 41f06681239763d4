"""Layers that hold the numbers of another: one note for all; silence where layers were never filled."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from glassblock.audit.audit import audit_checkpoint
from glassblock.wire.audits import Finding
from makers import Tiny
from plants import copy_layer, edit_tensors, healthy_checkpoint
from torch import Tensor

Tensors = dict[str, Tensor]


def told(
    directory: Path, change: Callable[[Tensors], object], *, layers: int = 4, family: str = "llama"
) -> list[Finding]:
    healthy_checkpoint(family, directory, tiny=Tiny(layers=layers))
    edit_tensors(change)(directory)
    return [finding for finding in audit_checkpoint(directory).findings if finding.rule == "tensor/duplicate"]


def of_layer(tensors: Tensors, layer: int, *, matrices: bool = False) -> list[str]:
    prefix = f"model.layers.{layer}."
    return [name for name, tensor in tensors.items() if name.startswith(prefix) and (tensor.ndim > 1 or not matrices)]


def test_one_note_names_all_of_a_deepened_model(tmp_path: Path) -> None:
    def deepened(tensors: Tensors) -> None:
        for layer in range(4, 8):
            copy_layer(tensors, layer - 3, layer)

    (finding,) = told(tmp_path, deepened, layers=9)
    assert (finding.level, finding.certainty, finding.layer) == ("note", "risk", None)
    assert "layers 1, 4 and 7, 2 and 5, 3 and 6 are equal byte for byte in every tensor" in finding.message
    assert finding.evidence == {"layers": [1, 2, 3, 4, 5, 6, 7], "equal": [[1, 4, 7], [2, 5], [3, 6]]}
    assert {name.split(".")[2] for name in finding.tensors} == {"4", "5", "6", "7"}


def test_of_many_pairs_some_are_shown(tmp_path: Path) -> None:
    (finding,) = told(tmp_path, lambda tensors: [copy_layer(tensors, n, n + 4) for n in range(4)], layers=9)
    assert "layers 0 and 4, 1 and 5, 2 and 6 (and 1 more such) are equal" in finding.message


def test_norms_of_their_own_leave_matrices_of_another(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        copy_layer(tensors, 1, 2)
        tensors["model.layers.2.input_layernorm.weight"] *= 1.01

    (finding,) = told(tmp_path, change)
    assert "layers 1 and 2 are equal byte for byte in every matrix" in finding.message


def test_one_matrix_of_its_own_makes_another_layer(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        copy_layer(tensors, 1, 2)
        tensors["model.layers.2.mlp.down_proj.weight"][0, 0] += 1e-3

    assert told(tmp_path, change) == []


def test_experts_of_their_own_make_another_layer(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        experts = {name: tensors[name] for name in of_layer(tensors, 2) if ".experts." in name}
        copy_layer(tensors, 1, 2)
        tensors |= experts

    assert told(tmp_path / "own", change, family="mixtral") == []
    assert len(told(tmp_path / "copied", lambda tensors: copy_layer(tensors, 1, 2), family="mixtral")) == 1


@pytest.mark.parametrize(("period", "groups"), [(1, [[0, 1, 2, 3]]), (2, [[0, 2], [1, 3]])])
def test_layers_that_all_are_another_s_are_noted(period: int, groups: list[list[int]], tmp_path: Path) -> None:
    """One written over all the others is told; masks that are the same everywhere are not why."""

    def change(tensors: Tensors) -> None:
        for layer in range(period, 4):
            copy_layer(tensors, layer % period, layer)

    (finding,) = told(tmp_path, change)
    assert (finding.level, finding.evidence["equal"]) == ("note", groups)
    assert "the model shares or repeats them on purpose, or one was written in place of another" in finding.message


def test_masks_that_are_the_same_everywhere_repeat_no_layer(tmp_path: Path) -> None:
    masks = {f"model.layers.{layer}.self_attn.mask": torch.ones(8, 8).tril() for layer in range(4)}
    assert told(tmp_path, lambda tensors: tensors.update(masks)) == []


@pytest.mark.parametrize("number", [0.0, 0.5])
def test_layers_that_were_never_filled_are_no_copies(number: float, tmp_path: Path) -> None:
    """With a mask that is the same everywhere: it tells no layer from another."""

    def change(tensors: Tensors) -> None:
        for layer in (1, 2):
            for name in of_layer(tensors, layer, matrices=True):
                tensors[name].fill_(number)
        tensors |= {f"model.layers.{layer}.self_attn.mask": torch.ones(8, 8).tril() for layer in range(4)}

    assert [finding for finding in told(tmp_path, change) if "layers 1 and 2" in finding.message] == []
