"""Conditions, variants, and the settings that a row's data can have."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.conditions import (
    AtTop,
    AxisIs,
    Circumstances,
    Condition,
    Declares,
    Every,
    EveryLayer,
    FromLayer,
    Holds,
    LayerKind,
    LayerListed,
    Neither,
    Says,
    Whole,
    holds,
    keys_of,
)
from glassblock.checkpoint.config import ConfigFile
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.family import OverRootDepth, Setting, SizeSetting, Variant
from glassblock.checkpoint.settings import branch_scale_of, flag_of, number_of, size_of
from glassblock.checkpoint.variants import row_for, row_in
from glassblock.errors import DamagedCheckpoint

LLAMA = ARCHITECTURES["llama"]


def config(**values: Any) -> ConfigFile:
    return ConfigFile(Path("config.json"), values)


def at(layer: int = 0, **values: Any) -> Circumstances:
    shapes: Mapping[str, tuple[int, ...]] = {"h.0.mlp.experts.0.w1": (4, 3), "h.0.norm.weight": (3,)}
    return Circumstances(
        lambda keys: next((values[key] for key in keys if key in values), None), layer, "h.0.", shapes.get
    )


@pytest.mark.parametrize(
    ("condition", "circumstances", "expected"),
    [
        (Declares(("a", "b"), (1, 2)), at(b=2), True),
        (Declares(("a", "b"), (1, 2)), at(a=3, b=2), False),
        (Declares(("a",), (True,), default=True), at(), True),
        (AtTop(Says(("outer",))), at(outer=1), False),
        (AtTop(Says(("outer",))), replace(at(inner=1), at_top=at(outer=1).declared), True),
        (AtTop(Says(("inner",))), replace(at(inner=1), at_top=at(outer=1).declared), False),
        (Declares(("a",), (True,), default=True), at(a=False), False),
        (FromLayer(Whole(("first",), 2)), at(1), False),
        (FromLayer(Whole(("first",), 2)), at(2), True),
        (FromLayer(Whole(("first",), 2)), at(1, first=1), True),
        (FromLayer(Whole(("first",), 2)), at(1, first="1"), False),
        (FromLayer(Whole(("layers",), 9), back=Whole(("reused",), 2)), at(6), False),
        (FromLayer(Whole(("layers",), 9), back=Whole(("reused",), 2)), at(7), True),
        (FromLayer(Whole(("layers",), 9), back=Whole(("reused",), 2)), at(4, layers=5, reused=1), True),
        (FromLayer(Whole(("layers",), 9), back=Whole(("reused",), 2)), at(4, layers=5, reused=0), False),
        (AxisIs("mlp.experts.0.w1", -1, "norm.weight"), at(), True),
        (AxisIs("mlp.experts.0.w1", 0, "norm.weight"), at(), False),
        (AxisIs("mlp.experts.0.w1", 2, "norm.weight"), at(), False),
        (AxisIs("mlp.experts.0.w1", -1, "norm.bias"), at(), False),
        (AxisIs("mlp.experts.0.w2", -1, "norm.weight"), at(), False),
        (EveryLayer(Whole((), 4), shift=1), at(3), True),
        (EveryLayer(Whole((), 4), shift=1), at(4), False),
        (EveryLayer(Whole(("step",), 4)), at(0, step=0), False),
        (LayerListed(("dense",)), at(2, dense=[0, 2]), True),
        (LayerListed(("dense",)), at(1, dense=[0, 2]), False),
        (LayerListed(("dense",), default=True), at(1), True),
        (LayerKind(("kinds",), ("full",)), at(1, kinds=["linear", "full"]), True),
        (LayerKind(("kinds",), ("full",)), at(2, kinds=["linear", "full"]), False),
        (LayerKind(("kinds",), ("M",)), at(1, kinds="*M"), True),
        (LayerKind(("kinds",), ("full",), FromLayer(Whole((), 1))), at(1), True),
        (Holds("mlp.experts.{j}.w1"), at(), True),
        (Holds("mlp.experts.{j}.w2"), at(), False),
        (Neither((Declares(("a",), (1,)), Holds("mlp.w"))), at(a=2), True),
        (Neither((Declares(("a",), (1,)),)), at(a=1), False),
        (Every((Declares(("a",), (1,)), FromLayer(Whole((), 1)))), at(1, a=1), True),
        (Every((Declares(("a",), (1,)), FromLayer(Whole((), 1)))), at(0, a=1), False),
    ],
)
def test_a_condition(condition: Condition, circumstances: Circumstances, expected: bool) -> None:
    assert holds(condition, circumstances) is expected


def test_a_condition_names_the_keys_it_reads() -> None:
    condition = Every(
        (
            Declares(("a",), (1,)),
            LayerKind(("b",), ("x",), EveryLayer(Whole(("c",), 1), Whole(("d",), 0))),
            Neither((LayerListed(("a",)), FromLayer(Whole(("e",), 0), back=Whole(("f",), 0)), Holds("w"))),
            AxisIs("w", 0, "v"),
        )
    )
    assert tuple(keys_of(condition)) == ("a", "b", "c", "d", "e", "f")


def test_variants_are_applied_in_order() -> None:
    first = Variant(Declares(("a",), (1,)), MappingProxyType({"branches_first": True, "not_run": "first"}))
    second = Variant(Declares(("b",), (1,)), MappingProxyType({"not_run": "second"}))
    row = replace(LLAMA, config_variants=(first, second))
    assert row_for(row, config()) == row
    assert (row_for(row, config(a=1)).branches_first, row_for(row, config(a=1)).not_run) == (True, "first")
    assert (row_for(row, config(a=1, b=1)).branches_first, row_for(row, config(a=1, b=1)).not_run) == (True, "second")


def test_a_layer_variant_looks_at_the_layers_own_tensors() -> None:
    row = replace(LLAMA, layer_variants=(Variant(Holds("mlp.x"), MappingProxyType({"not_run": "x"})),))

    def shape(name: str) -> tuple[int, ...] | None:
        return (1,) if name == "layers.1.mlp.x" else None

    told = [row_in(row, None, layer, prefix=f"layers.{layer}.", shape=shape).not_run for layer in (0, 1)]
    assert told == [None, "x"]


def test_a_flag_may_be_said_the_other_way_round() -> None:
    setting = ARCHITECTURES["qwen"].network.bias
    assert [flag_of(config(no_bias=said), LLAMA, setting).value for said in (True, False)] == [False, True]
    with pytest.raises(DamagedCheckpoint, match=r"no_bias is 'yes', where the family llama has true or false"):
        flag_of(config(no_bias="yes"), LLAMA, setting)


def test_a_size_may_be_declared_as_a_multiple() -> None:
    row = replace(LLAMA, sizes={"intermediate": SizeSetting(("intermediate_size",), 8, over=2)})
    found = size_of(config(intermediate_size=22016), row, "intermediate")
    assert found is not None
    assert (found.value, found.source) == (11008, "config.json: intermediate_size / 2")
    assert size_of(config(), row, "intermediate").value == 8  # pyright: ignore[reportOptionalMemberAccess]


def test_a_key_may_name_an_entry_of_a_list() -> None:
    setting = Setting(("multipliers.1",), 1.0)
    assert number_of(config(multipliers=[0.5, 0.25]), LLAMA, setting).value == 0.25
    assert number_of(config(multipliers=[0.5]), LLAMA, setting).defaulted
    assert number_of(config(multipliers=0.5), LLAMA, setting).defaulted


def test_a_branch_may_be_scaled_by_depth() -> None:
    scale = OverRootDepth(Setting(("scale_depth",), 1.4))
    said = branch_scale_of(config(scale_depth=1.5, num_hidden_layers=9), LLAMA, scale, layers=4)
    assert (said.value, said.defaulted) == (0.5, False)
    assert branch_scale_of(None, LLAMA, scale, layers=4).value == pytest.approx(0.7)
    halved = replace(scale, over=2.0)
    assert branch_scale_of(config(num_hidden_layers=8), LLAMA, halved, layers=1).value == pytest.approx(0.7)


@pytest.mark.parametrize(("count", "shape", "size"), [(4, (3, 2), 24), (2, (2, 3, 2), 48)])
def test_a_part_of_a_tensor_is_a_tensor(count: int, shape: tuple[int, ...], size: int) -> None:
    entry = TensorEntry("w", "F32", (4, 3, 2), Path("x"), 100, 196)
    part = entry.part(1, count)
    assert (part.shape, part.start, part.stop, part.bytes) == (shape, 100 + size, 100 + 2 * size, size)
