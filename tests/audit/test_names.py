"""Which layer a name speaks of, and names that are alike but for it."""

import pytest
from glassblock.audit.names import alike, cut_names, in_words, layer_of, only_layer
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.family import Architecture

UP = "model.layers.12.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        (UP, 12),
        ("transformer.h.3.mlp.c_fc.weight", 3),
        ("layers.0.feed_forward.w1.weight", 0),
        ("bert.encoder.layer.7.output.dense.weight", 7),
        ("decoder.block.3.layer.1.layer_norm.weight", 3),
        ("blk.4.attn_norm.weight", 4),
        ("transformer.decoder_layer.5.moe.0.linear.weight", 5),
        ("transformer_blocks.6.ff.net.0.proj.weight", 6),
        ("model.embed_tokens.weight", None),
        ("model.sublayers.4.weight", None),
        ("model.layers.norm.weight", None),
    ],
)
def test_layer_of(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


@pytest.mark.parametrize("row", ARCHITECTURES.values(), ids=lambda row: row.name)
def test_no_name_of_a_family_tells_another_layer(row: Architecture) -> None:
    """Nor do the numbers within a layer: `block.7.layer.1`, `layers.7.mlp.experts.1`."""
    prefix = row.layer.format(i=7)
    names = {f"{prefix}{norm.gain}" for norm in row.norms if norm.role != "final"}
    assert {layer_of(name) for name in names} <= {7, None}


def test_names_of_many_layers_are_one_group() -> None:
    names = [UP, UP.replace("12", "3"), "model.norm.weight"]
    assert alike(names) == {
        "model.layers.{i}.mlp.up_proj.weight": tuple(names[:2]),
        "model.norm.weight": ("model.norm.weight",),
    }


def test_a_number_elsewhere_in_a_name_is_no_layer() -> None:
    names = [f"model.layers.1.experts.{expert}.layers.1.weight" for expert in (1, 2)]
    assert set(alike(names)) == {name.replace("model.layers.1", "model.layers.{i}") for name in names}


def test_only_layer() -> None:
    assert only_layer([UP, UP.replace("up", "gate")]) == 12
    assert only_layer([UP, "model.norm.weight"]) is None
    assert only_layer([]) is None


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("a",), "a"),
        (("a", "b"), "a and b"),
        (("a", "b", "c"), "a, b and c"),
        (("a", "b", "c", "d", "e"), "5 tensors (a, b, c and 2 more)"),
    ],
)
def test_in_words(names: tuple[str, ...], words: str) -> None:
    assert in_words(names) == words


def test_names_that_nobody_reads_to_the_end_are_cut() -> None:
    assert cut_names("a.b is empty") == "a.b is empty"
    long, spaced = "x" * 1_000_000, "x y" * 1000
    assert cut_names(f"{long} is empty") == f"{'x' * 297}... is empty"
    assert cut_names(f"{spaced} is empty", (spaced,)) == f"{spaced[:297]}... is empty"
    words = "a sentence of many words " * 100
    assert cut_names(words) == words
