"""Which family a checkpoint is of, when its config does not say or does not tell the truth; and Meta's layout."""

import json
from pathlib import Path

import pytest
import torch
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.fits import fitting_families
from glassblock.checkpoint.layer_map import eps_sources, layer_tensors, shape_faults
from glassblock.checkpoint.layers import load_feed_forward
from glassblock.checkpoint.name_fits import name_fits
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.settings import size_of
from glassblock.errors import FamilyMismatch, UnknownFamily
from makers import tiny_checkpoint
from safetensors.torch import save_file
from torch import Tensor

SINGLE = ("llama", "gpt2", "gemma3", "phi3", "qwen3", "olmo2")


@pytest.mark.parametrize("family", SINGLE)
def test_without_a_config_the_names_that_fit_are_told(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(family, tmp_path)
    (tmp_path / "config.json").unlink()
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.family is None
    with pytest.raises(UnknownFamily) as refused:
        checkpoint.require_usable()
    assert refused.value.hint.startswith("The names fit: ")
    assert family in refused.value.hint
    fits = {fit.family: fit for fit in fitting_families(checkpoint)}
    assert fits[family].fits
    assert fits[family].missing == fits[family].unexpected == ()


def test_families_that_no_name_tells_apart_are_said_to_differ_in_numbers(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    checkpoint = open_checkpoint(tmp_path)
    assert 'model_type is "unheard-of"' in checkpoint.family_fault.message
    assert "llama, mistral" in checkpoint.family_fault.hint
    assert "they differ in" in checkpoint.family_fault.hint
    fits = {fit.family: fit.fits for fit in fitting_families(checkpoint)}
    assert fits["llama"]
    assert fits["mistral"]
    assert not fits.get("qwen3", False)


def test_a_config_that_lies_is_contradicted_by_name(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(FamilyMismatch, match=r"config\.json says gpt2, and they are those of llama"):
        checkpoint.require_usable()
    with pytest.raises(FamilyMismatch, match="the family gpt2 was asked for, and they are those of llama"):
        open_checkpoint(tmp_path, family="gpt2").require_usable()


def test_what_speaks_against_a_family_is_told(tmp_path: Path) -> None:
    tiny_checkpoint("qwen3", tmp_path)
    fits = {fit.family: fit for fit in fitting_families(open_checkpoint(tmp_path))}
    assert fits["qwen3"].fits
    assert not fits["llama"].fits
    assert fits["llama"].unexpected == tuple(
        sorted(f"model.layers.{i}.self_attn.{norm}_norm.weight" for i in (0, 1) for norm in ("q", "k"))
    )
    assert fits["llama"].why.startswith("it has no model.layers.0.self_attn.k_norm.weight")


@pytest.mark.parametrize(
    ("attention", "fits", "why"),
    [
        (
            ("q", "k", "v", "o"),
            {"llama": True, "qwen2": False},
            "it has model.layers.0.self_attn.q_proj.bias",
        ),
        (("q", "k", "v", "o", "biases"), {"llama": True, "qwen2": True, "mistral": False}, "it has no model.layers.0"),
    ],
)
def test_attention_speaks_for_and_against(
    attention: tuple[str, ...], fits: dict[str, bool], why: str, tmp_path: Path
) -> None:
    tensors = tiny_tensors()
    for i in range(2):
        for part in ("q", "k", "v", "o"):
            tensors[f"model.layers.{i}.self_attn.{part}_proj.weight"] = torch.zeros(48, 48)
            if "biases" in attention and part != "o":
                tensors[f"model.layers.{i}.self_attn.{part}_proj.bias"] = torch.zeros(48)
    save_file(tensors, tmp_path / "model.safetensors")
    found = {fit.family: fit for fit in fitting_families(open_checkpoint(tmp_path))}
    assert {family: found[family].fits for family in fits} == fits
    assert found["qwen2" if not fits["qwen2"] else "mistral"].why.startswith(why)
    # Its norms have no tensors, and these files have gains.
    assert not found["olmo"].fits


@pytest.mark.parametrize(
    ("family", "name", "against"),
    [
        ("llama", "input_layernorm.bias", {"llama", "gemma", "mistral", "ernie4_5"}),
        ("mistral", "mlp.down_proj.bias", {"mistral", "qwen2", "gemma"}),
        ("mixtral", "block_sparse_moe.gate.bias", {"mixtral"}),
        ("opt", "fc1.bias", {"qwen2"}),
    ],
)
def test_biases_speak_for_and_against(family: str, name: str, against: set[str], tmp_path: Path) -> None:
    """What a family never has speaks against it: a LayerNorm's bias against those with RMSNorm."""
    healthy = open_checkpoint(tiny_checkpoint(family, tmp_path / "healthy"))
    layer = layer_tensors(healthy, 0)
    more = {f"{layer.prefix.replace('.0.', f'.{i}.')}{name}": torch.ones(4) for i in healthy.layer_indices}
    biased = {fit.row.name: fit for fit in name_fits({*healthy.entries, *more})}
    for one in against:
        assert one not in biased or not biased[one].fits, one
    plain = {fit.row.name for fit in name_fits(healthy.entries) if fit.fits}
    assert family in plain
    if family != "opt":
        assert set(more) & set(biased[family].unexpected)


def test_a_bias_that_a_family_always_has_is_missed() -> None:
    names = {
        f"model.layers.{i}.{norm}.weight" for i in range(2) for norm in ("input_layernorm", "post_attention_layernorm")
    }
    names |= {f"model.layers.{i}.mlp.{part}.weight" for i in range(2) for part in ("c_fc", "c_proj")}
    (fit,) = (fit for fit in name_fits(names) if fit.row.name == "starcoder2")
    assert "model.layers.0.input_layernorm.bias" in fit.missing


def test_a_wrapper_whose_part_is_known_is_read_where_the_names_are_that_familys(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    save_file({f"language_model.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    inner = {"model_type": "qwen2", "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 2}
    config = {"model_type": "unheard-of", "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.require_usable().name == "qwen2"
    assert (checkpoint.part.key, checkpoint.part.model_type) == ("text_config", "qwen2")
    config["text_config"] = inner | {"model_type": "unknown too"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "text_config" not in open_checkpoint(tmp_path).family_fault.hint
    # Under names that no row has, it is told how that part would be read, and not read.
    save_file({f"speech.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    config["text_config"] = inner
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownFamily) as refused:
        open_checkpoint(tmp_path).require_usable()
    assert 'Its text_config says model_type "qwen2": --family qwen2 reads that part.' in refused.value.hint


def test_a_shape_that_contradicts_itself_fits_no_family(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(60, 48)
    save_file(tensors, tmp_path / "model.safetensors")
    fit = next(fit for fit in fitting_families(open_checkpoint(tmp_path)) if fit.family == "llama")
    assert not fit.fits
    assert "model.layers.1.mlp.up_proj.weight has the shape [60, 48] where [112, 48] is expected" in fit.why


def test_no_family_has_any_of_the_names(tmp_path: Path) -> None:
    save_file({"a.b": torch.zeros(2), "7.c": torch.zeros(2)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert fitting_families(checkpoint) == ()
    assert checkpoint.family_fault.hint == "Add the config, or name the family with --family."


def test_a_family_is_found_among_a_hundred_thousand_names() -> None:
    names = {f"model.layers.{i}.self_attn.w{j}.weight" for i in range(100) for j in range(1000)}
    names |= {f"model.layers.{i}.{name}.weight" for i in range(100) for name in LLAMA}
    fits = [fit.row.name for fit in name_fits(names) if fit.fits]
    assert "llama" in fits


LLAMA = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
PARAMS = {"dim": 48, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5, "multiple_of": 32}


def tiny_tensors() -> dict[str, Tensor]:
    shapes = {"mlp.gate_proj": (112, 48), "mlp.up_proj": (112, 48), "mlp.down_proj": (48, 112)}
    generator = torch.Generator().manual_seed(0)
    return {
        f"model.layers.{i}.{name}.weight": torch.randn(shapes.get(name, (48,)), generator=generator)
        for i in range(2)
        for name in LLAMA
    } | {"model.norm.weight": torch.ones(48), "model.embed_tokens.weight": torch.randn(96, 48, generator=generator)}


def native_tensors(width: int, *, experts: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {"tok_embeddings.weight": (96, 48), "output.weight": (96, 48), "norm.weight": (48,)}
    for i in range(2):
        homes = [f"feed_forward.experts.{j}." for j in range(experts)] or ["feed_forward."]
        tensors |= {
            f"layers.{i}.{home}{name}.weight": (48, width) if name == "w2" else (width, 48)
            for home in homes
            for name in ("w1", "w2", "w3")
        }
        tensors |= {f"layers.{i}.{name}.weight": (48,) for name in ("attention_norm", "ffn_norm")}
        tensors |= {f"layers.{i}.attention.{name}.weight": (48, 48) for name in ("wq", "wo")}
        tensors |= {f"layers.{i}.attention.{name}.weight": (24, 48) for name in ("wk", "wv")}
        tensors |= {f"layers.{i}.feed_forward.gate.weight": (experts, 48)} if experts else {}
    return {name: torch.randn(shape, generator=generator) for name, shape in tensors.items()}


# 8/3 of 48 is 128; times 1.3 is 166, and 192 is the next multiple of 32.
@pytest.mark.parametrize(
    ("more", "width"),
    [({}, 128), ({"ffn_dim_multiplier": 1.3}, 192), ({"hidden_dim": 100}, 100), ({"vocab_size": -1}, 128)],
)
def test_metas_layout_is_opened_by_its_params(more: dict[str, float], width: int, tmp_path: Path) -> None:
    tensors = native_tensors(width)
    save_file(tensors, tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text(json.dumps(PARAMS | more))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.family.name == "llama_meta"
    assert checkpoint.faults == ()
    assert shape_faults(checkpoint) == ()
    assert size_of(checkpoint.config, checkpoint.family, "intermediate").value == width
    assert eps_sources(checkpoint)["ffn_in"].source == "params.json: norm_eps"
    network = load_feed_forward(checkpoint, 1, "cpu", ReadMeter())
    assert torch.equal(network.gate, tensors["layers.1.feed_forward.w1.weight"])
    assert torch.equal(network.up, tensors["layers.1.feed_forward.w3.weight"])
    assert torch.equal(network.down, tensors["layers.1.feed_forward.w2.weight"])


def test_a_width_that_is_not_the_params_is_a_fault(tmp_path: Path) -> None:
    save_file(native_tensors(160), tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    faults = shape_faults(open_checkpoint(tmp_path))
    assert {fault.kind for fault in faults} == {"shape"}
    assert "intermediate 128" in faults[0].message


def test_mistrals_mixture_and_shards_are_read(tmp_path: Path) -> None:
    tensors = native_tensors(112, experts=3)
    names = sorted(tensors)
    shards = {f"consolidated-0000{part + 1}-of-00002.safetensors": names[part::2] for part in range(2)}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / shard)
    index = {"metadata": {}, "weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (tmp_path / "consolidated.safetensors.index.json").write_text(json.dumps(index))
    moe = {"num_experts": 3, "num_experts_per_tok": 2}
    (tmp_path / "params.json").write_text(json.dumps(PARAMS | {"hidden_dim": 112, "moe": moe}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.faults == ()
    assert shape_faults(checkpoint) == ()
    assert [network.expert for network in layer_tensors(checkpoint, 0).networks] == [0, 1, 2]
    expert = load_feed_forward(checkpoint, 1, "cpu", ReadMeter(), expert=2)
    assert torch.equal(expert.gate, tensors["layers.1.feed_forward.experts.2.w1.weight"])


def test_a_folder_with_both_layouts_is_what_config_json_says(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    save_file(native_tensors(112), tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text(json.dumps(PARAMS | {"hidden_dim": 112}))
    both = open_checkpoint(tmp_path)
    assert both.family.name == "llama"
    assert tuple(both.containers) == ("model.safetensors",)
    native = open_checkpoint(tmp_path, family="llama_meta")
    assert native.family.name == "llama_meta"
    assert tuple(native.containers) == ("consolidated.safetensors",)
    assert shape_faults(native) == ()


def test_a_bare_file_needs_the_family(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(native_tensors(112), file)
    unknown = open_checkpoint(file)
    assert unknown.family is None
    assert "llama_meta" in unknown.family_fault.hint
    checkpoint = open_checkpoint(file, family="llama_meta")
    assert shape_faults(checkpoint) == ()
    assert eps_sources(checkpoint)["final"].defaulted
    assert load_feed_forward(checkpoint, 0, "cpu", ReadMeter()).width == 112


def test_params_of_something_else_name_no_family(tmp_path: Path) -> None:
    save_file(native_tensors(112), tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text('{"learning_rate": 0.1}')
    assert open_checkpoint(tmp_path).family is None


@pytest.mark.parametrize("name", ["/etc/passwd", "../a.safetensors", "a/b.safetensors", "", "a\\b", "a\x00b", ".."])
@pytest.mark.parametrize("index", ["model.safetensors.index.json", "consolidated.safetensors.index.json"])
def test_an_index_with_an_odd_name_is_refused_and_nothing_else_opened(name: str, index: str, tmp_path: Path) -> None:
    save_file(native_tensors(112), tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text(json.dumps(PARAMS | {"hidden_dim": 112}))
    (tmp_path / index).write_text(json.dumps({"weight_map": {"norm.weight": name}}))
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.containers) == {"consolidated.safetensors"}
    if index.startswith("consolidated"):
        assert checkpoint.faults


def test_the_table_tells_its_rows_apart_by_params() -> None:
    assert [row.name for row in ARCHITECTURES.values() if row.config_file == "params.json"] == ["llama_meta"]
