"""A row given as data: what it may say, what it is refused for, and that it does what a row of the table does."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.conditions import AxisIs, Declares, FromLayer, Whole, either
from glassblock.checkpoint.family import OverRootDepth, Ratio, Setting, SizeSetting
from glassblock.checkpoint.family_file import MAX_DEPTH, MAX_ITEMS, MAX_TEXT, parse_family_row
from glassblock.checkpoint.layer_loading import load_layer
from glassblock.checkpoint.layer_map import layer_tensors, shape_faults
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.settings import size_of
from glassblock.errors import FamilyMismatch, GlassblockError, InvalidValue, UnknownFamily
from makers import tiny_checkpoint
from safetensors.torch import load_file, save_file

NORMS = [
    {"role": "ffn_in", "template": "ln_2", "kind": "rms_llama", "eps": {"keys": ["eps"], "default": 1e-5}},
    {"role": "final", "template": "ln_f", "kind": "rms_llama", "eps": 1e-6},
]
WHOLE: dict[str, Any] = {
    "name": "mine",
    "trunks": [{"prefix": "net.", "head": None}],
    "layer": "blocks.{i}.",
    "sizes": {
        "hidden": {"keys": ["dim"], "default": None},
        "intermediate": {"keys": [], "default": {"of": "hidden", "times": 4}},
    },
    "feed_forward": {
        "gate": {"weight": "ff.g.weight", "bias": "ff.g.bias"},
        "up": {"weight": "ff.u.weight", "bias": "ff.u.bias"},
        "down": {"weight": "ff.d.weight", "bias": "ff.d.bias"},
        "activation": "silu",
        "bias": False,
    },
    "norms": NORMS,
    "placement": "pre",
    "embedding": "emb.weight",
    "tied": {"keys": ["tied"], "default": True},
}


def test_a_whole_row_is_read() -> None:
    row = parse_family_row(WHOLE)
    assert row.layer == "blocks.{i}."
    assert row.feed_forward.activation == Setting((), "silu")
    assert row.sizes["intermediate"] == SizeSetting((), Ratio("hidden", times=4))
    assert row.norm("ffn_in").eps == Setting(("eps",), 1e-5)
    assert row.norm("final").eps == Setting((), 1e-6)
    assert row.verified == "source only"


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_like_a_family_is_that_family(family: str) -> None:
    like, row = parse_family_row({"like": family, "name": family}), ARCHITECTURES[family]
    same = {"model_types": (), "architectures": (), "verified": "source only", "sources": (f"like {family}",)}
    assert like == replace(row, **same)


def test_only_the_differences_are_said() -> None:
    row = parse_family_row(
        {
            "like": "llama",
            "feed_forward": {"activation": {"keys": ["act"], "default": "gelu", "meanings": {"g": "gelu_tanh"}}},
            "branch_scale": {"of": 1, "over": 2},
            "layer_variants": [
                {
                    "when": {"if": "every", "of": [{"if": "from-layer", "first": {"keys": ["dense"], "default": 1}}]},
                    "changes": {"feed_forward": None},
                }
            ],
        }
    )
    llama = ARCHITECTURES["llama"]
    assert row.name == "like llama"
    assert row.feed_forward == replace(llama.feed_forward, activation=Setting(("act",), "gelu", {"g": "gelu_tanh"}))
    assert row.branch_scale == OverRootDepth(Setting((), 1.0), 2.0)
    assert row.layer_variants[0].when.of == (FromLayer(Whole(("dense",), 1)),)
    assert row.layer_variants[0].changes == {"feed_forward": None}


def test_what_only_tensors_tell_is_null() -> None:
    tall = {"if": "axis-is", "name": "mlp.up_proj.weight", "axis": 0, "of": "input_layernorm.weight"}
    row = parse_family_row(
        {
            "like": "llama",
            "logits": None,
            "norms": [*NORMS, NORMS[0] | {"role": "q", "template": "q_norm", "width": None}],
            "layer_variants": [{"when": tall, "changes": {"feed_forward": None}}],
        }
    )
    assert row.logits is None
    assert row.norm("q").width is None
    assert row.layer_variants[0].when == AxisIs("mlp.up_proj.weight", 0, "input_layernorm.weight")


def test_a_condition_of_an_older_file_is_told_what_took_its_place() -> None:
    old = {"if": "axis-is", "name": "mlp.up_proj.weight", "axis": 0, "length": {"keys": ["hidden_size"], "default": 8}}
    with pytest.raises(InvalidValue) as refused:
        parse_family_row({"like": "llama", "layer_variants": [{"when": old, "changes": {"feed_forward": None}}]})
    assert "length is no field of the condition axis-is" in refused.value.message
    assert "Name a tensor with an axis of that length: `of`" in (refused.value.hint or "")


def test_toml_says_the_same() -> None:
    text = """
    like = "llama"
    name = "mine"
    [feed_forward]
    activation = "gelu"
    [feed_forward.gate]
    weight = "mlp.w1.weight"
    bias = "mlp.w1.bias"
    """
    row = parse_family_row(tomllib.loads(text))
    assert row.feed_forward.gate.weight == "mlp.w1.weight"
    assert row.feed_forward.up == ARCHITECTURES["llama"].feed_forward.up


def test_blocks_are_a_number_or_what_the_config_says() -> None:
    for given, meant in (
        (4, Setting((), 4.0)),
        ({"keys": ["tensor_model_parallel_size"], "default": 1}, Setting(("tensor_model_parallel_size",), 1.0)),
    ):
        row = parse_family_row({"like": "phi3", "feed_forward": {"fused": {"arrangement": "blocks", "blocks": given}}})
        phi3 = ARCHITECTURES["phi3"].feed_forward
        assert row.feed_forward.fused == replace(phi3.fused, arrangement="blocks", blocks=meant)


def test_a_flag_has_meanings_by_its_words() -> None:
    setting = {"keys": ["swiglu"], "default": "relu", "meanings": {"true": "silu", "false": "gelu"}}
    row = parse_family_row({"like": "llama", "feed_forward": {"activation": setting}})
    assert row.feed_forward.activation.meanings == {True: "silu", False: "gelu"}


FUSED = "family_row.feed_forward.fused"
SAME = {"keys": [], "default": {"of": "hidden"}}
HEAD_DIM = {"keys": [], "default": {"of": "hidden", "over": "heads"}}
OVER_NONE = {"of": "hidden", "over": "head_dim"}
REFUSED: list[tuple[object, str, str]] = [
    (5, "family_row", "is a whole number, and a row is an object"),
    ([], "family_row", "is a list"),
    ({}, "family_row.name", "is missing: a row needs it"),
    ({"like": 3}, "family_row.like", "is a whole number"),
    ({"like": "llama", "feedforward": {}}, "family_row.feedforward", "is no field of a row"),
    ({"like": "llama", "verified": "executed"}, "family_row.verified", "is no field of a given row"),
    ({"like": "llama", "layer": "layers."}, "family_row.layer", "without {i}"),
    ({"like": "llama", "layer": "layers.{i.}"}, "family_row.layer", "without {i}"),
    ({"like": "llama", "layer": "layers.{i}.{k}."}, "family_row.layer", "braces that mean nothing here"),
    ({"like": "llama", "layer": "layers.{i"}, "family_row.layer", "without {i}"),
    # `format` would fill ten million places, and twice the number leaves no way to read it back.
    ({"like": "llama", "layer": "layers.{i:010000000d}."}, "family_row.layer", "without {i}"),
    ({"like": "llama", "layer": "layers.{i!x}."}, "family_row.layer", "without {i}"),
    ({"like": "llama", "layer": "layers.{i}.{i}."}, "family_row.layer", "braces that mean nothing here"),
    (
        {"like": "llama", "layer_variants": [{"when": {"if": "holds", "name": "a"}, "changes": {"layer": "l."}}]},
        "family_row.layer",
        "without {i}",
    ),
    (
        {"like": "llama", "trunks": [{"prefix": "m.{i}.", "head": None}]},
        "family_row.trunks[0].prefix",
        "braces that mean nothing here",
    ),
    (
        {"like": "llama", "sizes": {"hidden": SAME | {"default": {"of": "heads"}}, "heads": SAME}},
        "family_row.sizes.h",
        "follows from itself",
    ),
    ({"like": "llama", "sizes": {"hidden": {"keys": ["d"], "default": 0}}}, "family_row.sizes.hidden", "holds 0"),
    (
        {"like": "llama", "sizes": {"hidden": {"keys": ["d"], "default": 8, "over": 0}}},
        "family_row.sizes.hidden",
        "holds 0",
    ),
    (
        {"like": "llama", "sizes": {"intermediate": {"keys": [], "default": {"of": "hidden", "times": 10**380}}}},
        "family_row.sizes.intermediate",
        "holds 1000",
    ),
    (
        {"like": "llama", "branch_scale": {"of": 1.0, "over": 0.0}},
        "family_row.branch_scale.over",
        "is 0.0",
    ),
    ({"like": "llama", "trunks": []}, "family_row.trunks", "is empty"),
    ({"like": "llama", "trunks": {"prefix": "a"}}, "family_row.trunks", "is an object"),
    ({"like": "llama", "trunks": [{"prefix": 1, "head": None}]}, "family_row.trunks[0].prefix", "is 1"),
    ({"like": "llama", "tied": "yes"}, "family_row.tied.default", 'is "yes"'),
    ({"like": "llama", "placement": "before"}, "family_row.placement", 'is "before"'),
    ({"like": "llama", "placement": "sandwich"}, "family_row.norms", "none in the role ffn_out"),
    ({"like": "llama", "norms": NORMS[1:]}, "family_row.norms", "none in the role ffn_in"),
    ({"like": "llama", "norms": [NORMS[0] | {"role": "ffn"}]}, "family_row.norms[0].role", 'is "ffn"'),
    ({"like": "llama", "norms": [NORMS[0] | {"kind": "rms"}]}, "family_row.norms[0].kind", 'is "rms"'),
    ({"like": "llama", "norms": [NORMS[0] | {"has_bias": True}]}, "family_row.norms[0].has_bias", "has no bias"),
    (
        {"like": "llama", "norms": [*NORMS, NORMS[0] | {"role": "q", "per_head": True, "width": None}]},
        "family_row.norms[2].width",
        "names no size",
    ),
    ({"like": "llama", "sizes": {"width": {"keys": [], "default": 1}}}, "family_row.sizes.width", 'is "width"'),
    ({"like": "llama", "feed_forward": {"activation": "silly"}}, "family_row.feed_forward.activation", 'is "silly"'),
    ({"like": "llama", "feed_forward": {"up": None}}, "family_row.feed_forward", "needs either `up`"),
    ({"like": "phi3", "feed_forward": {"fused": {"arrangement": "tiles"}}}, f"{FUSED}.arrangement", 'is "tiles"'),
    ({"like": "phi3", "feed_forward": {"fused": {"arrangement": "blocks"}}}, f"{FUSED}.blocks", "is missing"),
    ({"like": "phi3", "feed_forward": {"fused": {"blocks": 4}}}, f"{FUSED}.blocks", "the arrangement is halves"),
    *(
        ({"like": "phi3", "feed_forward": {"fused": {"arrangement": "blocks", "blocks": n}}}, f"{FUSED}.blocks", told)
        for n, told in ((0, "has the default 0"), (2.5, "has the default 2.5"), (-2, "-2"), ("two", 'is "two"'))
    ),
    ({"like": "llama", "feed_forward": {"gating": "swiglu_oai"}}, "family_row.feed_forward.gating_parameters", "not"),
    ({"like": "llama", "feed_forward": {"width": ["shared_width"]}}, "family_row.feed_forward.width", "shared_width"),
    ({"like": "mixtral", "mixture": {"experts": {"down": {"weight": "w2", "bias": "b"}}}}, "", "without {j}"),
    ({"like": "llama", "feed_forward": None}, "family_row", "has no network"),
    ({"like": "llama", "embedding_scale": {"off": 3}}, "family_row.embedding_scale", "has the fields off"),
    ({"like": "llama", "layer_variants": [{"when": {"if": "always"}, "changes": {}}]}, "", 'has "always" under `if`'),
    ({"like": "llama", "layer_variants": [{"when": "x", "changes": {}}]}, "", 'is "x"'),
    (
        {"like": "llama", "layer_variants": [{"when": {"if": "holds", "name": "a"}, "changes": {"name": "b"}}]},
        "",
        "can",
    ),
    ({"like": "llama", "layer_variants": [{"when": {"if": "holds", "name": "a"}, "changes": 3}]}, "", "is 3"),
    ({"like": "llama", "notes": ["x" * (MAX_TEXT + 1)]}, "family_row", "characters"),
    ({"like": "llama", "notes": ["x"] * (MAX_ITEMS + 1)}, "family_row", "larger than"),
    ({"like": "llama", "not_run": float("nan")}, "family_row.not_run", "is nan"),
    (
        {"like": "llama", "feed_forward": {"gate_sparsity": 1.0}},
        "family_row.feed_forward.gate_sparsity",
        "is 1.0",
    ),
    (
        {"like": "llama", "norms": [*NORMS, {**NORMS[0], "role": "q", "template": "q.norms.{h}"}]},
        "family_row.norms[2].per_head",
        "numbers heads",
    ),
]


@pytest.mark.parametrize(("data", "field", "words"), REFUSED)
def test_what_is_no_row_is_refused_by_name(data: object, field: str, words: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        parse_family_row(data)
    assert words in refused.value.message
    assert refused.value.hint
    assert (refused.value.field or "").startswith(field or "family_row.")
    assert len(refused.value.message) < 500


def test_deep_data_are_refused_before_they_are_read() -> None:
    deep: object = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidValue, match=f"deeper than {MAX_DEPTH} levels"):
        parse_family_row({"like": "llama", "notes": deep})


def test_a_near_name_is_offered() -> None:
    with pytest.raises(InvalidValue) as refused:
        parse_family_row({"like": "llama", "feed_forwrad": {}})
    assert refused.value.hint == "Did you mean feed_forward?"
    with pytest.raises(UnknownFamily):
        parse_family_row({"like": "lama"})


def test_any_single_field_of_the_wrong_kind_is_refused_and_never_a_crash() -> None:
    wrong: tuple[object, ...] = (None, True, -1, 1.5, "", "x", [], [None], {}, {"x": 1}, [[["a"]]])
    for name in WHOLE:
        for value in wrong:
            assert refusal(WHOLE | {name: value}).startswith("family_row")


def refusal(data: dict[str, object]) -> str:
    """What is said of `data`; of a row that can be used, its name in a sentence."""
    try:
        row = parse_family_row(data)
    except GlassblockError as refused:
        return refused.message
    return f"family_row can be used: {row.name}"


def test_a_given_row_opens_a_checkpoint_and_is_named(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    (tmp_path / "config.json").unlink()
    row = parse_family_row({"like": "llama", "name": "mine"})
    checkpoint = open_checkpoint(tmp_path, family=row)
    assert checkpoint.require_usable().name == "mine"
    assert shape_faults(checkpoint) == ()
    assert layer_tensors(checkpoint, 1).dense is not None
    assert "The family mine was asked for, not read from a config." in checkpoint.notes


def test_sizes_are_changed_one_by_one() -> None:
    row, llama = parse_family_row({"like": "llama", "sizes": {"hidden": {"keys": ["dim"]}}}), ARCHITECTURES["llama"]
    assert row.sizes["hidden"] == replace(llama.sizes["hidden"], keys=("dim",))
    assert {name: size for name, size in row.sizes.items() if name != "hidden"} == {
        name: size for name, size in llama.sizes.items() if name != "hidden"
    }
    # Of free keys, as parameters are, nothing of the other family is left.
    with pytest.raises(InvalidValue, match="does not give what swiglu_oai needs"):
        parse_family_row({"like": "gpt_oss", "mixture": {"experts": {"gating_parameters": {"limit": 1.0}}}})


@pytest.mark.parametrize(
    ("change", "field", "name"),
    [
        (
            {"feed_forward": {"gate": {"weight": "mlp.w1.weight", "bias": "mlp.w1.bias"}}},
            "feed_forward.gate.weight",
            "model.layers.1.mlp.w1.weight",
        ),
        ({"attention": {"query": {"weight": "q.weight", "bias": "q.bias"}}}, "attention.query.weight", "q.weight"),
        ({"norms": NORMS[:1] + NORMS[1:]}, "norms[0].template", "ln_2.weight"),
        ({"embedding": "wte.weight"}, "embedding", "model.wte.weight"),
    ],
    ids=["network", "attention", "norm", "embedding"],
)
def test_a_name_that_is_not_there_is_told_with_the_field_that_says_it(
    change: dict[str, Any], field: str, name: str, tmp_path: Path
) -> None:
    tiny_checkpoint("llama", tmp_path)
    faults = shape_faults(
        open_checkpoint(tmp_path, family=parse_family_row({"like": "llama", "name": "mine"} | change))
    )
    told = [fault.hint for fault in faults if fault.tensor.endswith(name)]
    assert told
    assert all(
        hint.startswith(f"Look at {field} of the row that was given (family_row, --family-file)") for hint in told
    )


def test_of_a_row_of_the_table_the_file_is_what_is_wrong(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.gate_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    for family in (None, "llama"):
        (fault,) = shape_faults(open_checkpoint(tmp_path, family=family))
        assert fault.hint == "Convert or download the checkpoint again."


def test_a_row_none_of_whose_names_is_there_is_what_to_look_at(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    row = parse_family_row({"like": "llama", "name": "mine", "layer": "blocks.{i}."})
    fault = open_checkpoint(tmp_path, family=row).family_fault
    assert fault.hint == "Look at trunks, layer and the names in the row that was given (family_row, --family-file)."


def test_a_variant_of_the_config_is_applied(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"act": "new"}))
    variant = {
        "when": {"if": "declares", "keys": ["act"], "values": ["new"]},
        "changes": {"not_run": "it is new"},
    }
    row = parse_family_row({"like": "llama", "config_variants": [variant]})
    assert row.config_variants[0].when == Declares(("act",), ("new",))
    assert open_checkpoint(tmp_path, family=row).family.not_run == "it is new"
    assert either(Declares(("act",), ("new",))).of


def test_the_samples_of_the_document_are_rows() -> None:
    text = (Path(__file__).parents[2] / "docs" / "adding-a-family.md").read_text()
    samples = {kind: text.split(f"```{kind}\n")[1].split("```")[0] for kind in ("toml", "json")}
    named = parse_family_row(tomllib.loads(samples["toml"]))
    assert named.feed_forward.down.weight == "mlp.w2.weight"
    assert named.branch_scale == Setting(("residual_multiplier",), 1.0)
    assert parse_family_row(json.loads(samples["json"])).layer_variants


def test_sizes_that_come_to_nothing_are_told(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path, config={"half": 1})
    heads = {"keys": ["half"], "default": None, "over": 2}
    row = parse_family_row({"like": "llama", "sizes": {"heads": heads, "head_dim": HEAD_DIM}})
    (fault,) = open_checkpoint(tmp_path, family=row).faults
    assert fault.message == "config.json: half is 1, where the family like llama has a whole number from 2"
    # 48 channels among 100 heads leave none for each: a size that follows from that is not known.
    sizes = {"heads": {"keys": [], "default": 100}, "head_dim": HEAD_DIM, "kv_heads": SAME | {"default": OVER_NONE}}
    checkpoint = open_checkpoint(tmp_path, family=parse_family_row({"like": "llama", "sizes": sizes}))
    assert size_of(checkpoint.config, checkpoint.family, "kv_heads") is None
    assert shape_faults(checkpoint)


def test_a_power_of_the_scores_that_no_number_has(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    row = parse_family_row({"like": "llama", "attention": {"scale": {"power": 1e308}}})
    with pytest.raises(FamilyMismatch, match=r"scores cannot be multiplied by 16 to the power 1e\+308"):
        load_layer(open_checkpoint(tmp_path, family=row), 0, "cpu", ReadMeter())
