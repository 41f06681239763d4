"""config.json: every value with its source, every default said, every odd value refused by key."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.config import (
    MAX_CONFIG_BYTES,
    ConfigFault,
    ConfigFile,
    DeclaredEps,
    declared_eps,
    declared_flags,
    read_config,
)
from glassblock.checkpoint.family import Setting
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.settings import (
    Sourced,
    config_faults,
    eps_of,
    flag_of,
    number_of,
    scale_of,
    size_of,
    text_of,
    tied_of,
)
from glassblock.errors import DamagedCheckpoint
from makers import tiny_checkpoint

LLAMA, GEMMA3, GPT2, OLMO2 = (ARCHITECTURES[name] for name in ("llama", "gemma3", "gpt2", "olmo2"))
EPS = LLAMA.norms[0].eps


def config(**values: Any) -> ConfigFile:
    return ConfigFile(Path("config.json"), values)


def test_values_say_where_they_come_from() -> None:
    declared = config(hidden_size=64, rms_norm_eps=1e-5, hidden_act="gelu", mlp_bias=True)
    assert size_of(declared, LLAMA, "hidden") == Sourced(64, "config.json: hidden_size")
    assert eps_of(declared, LLAMA, EPS) == Sourced(1e-5, "config.json: rms_norm_eps")
    assert text_of(declared, LLAMA, LLAMA.feed_forward.activation) == Sourced("gelu", "config.json: hidden_act")
    assert flag_of(declared, LLAMA, LLAMA.feed_forward.bias) == Sourced(value=True, source="config.json: mlp_bias")


def test_defaults_say_so() -> None:
    silent = config(hidden_size=64, num_attention_heads=4, rms_norm_eps=None)
    for declared in (silent, None):
        assert eps_of(declared, LLAMA, EPS) == Sourced(1e-6, "default of family llama", defaulted=True)
    assert size_of(silent, LLAMA, "intermediate") == Sourced(11008, "default of family llama", defaulted=True)
    assert size_of(silent, LLAMA, "kv_heads") == Sourced(4, "default of family llama: heads", defaulted=True)
    assert size_of(silent, LLAMA, "head_dim").value == 16
    assert size_of(config(n_embd=48), GPT2, "intermediate") == Sourced(
        192, "default of family gpt2: hidden x 4", defaulted=True
    )


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "relu"])
def test_the_first_gemma_takes_gelu_for_the_tanh_form(name: str) -> None:
    """As its configuration class does, for the sake of the released configs, and no other Gemma's."""
    for family in ("gemma", "paligemma"):
        activation = ARCHITECTURES[family].network.activation
        read = text_of(config(hidden_act=name), ARCHITECTURES[family], activation)
        assert read == Sourced(transformers.GemmaConfig(hidden_act=name).hidden_act, "config.json: hidden_act")
    later = text_of(config(hidden_activation=name), GEMMA3, GEMMA3.network.activation)
    assert later.value == transformers.Gemma3TextConfig(hidden_activation=name).hidden_activation == name


def test_aliases_of_a_key_are_tried_in_order() -> None:
    assert size_of(config(hidden_size=8), GPT2, "hidden").source == "config.json: hidden_size"
    assert size_of(config(hidden_size=8, n_embd=4), GPT2, "hidden") == Sourced(4, "config.json: n_embd")


def test_dotted_keys_and_numbers() -> None:
    setting = Setting(("moe.alpha", "alpha"), 1.0)
    assert number_of(config(moe={"alpha": 2}), LLAMA, setting) == Sourced(2.0, "config.json: moe.alpha")
    assert number_of(config(moe=3, alpha=0.5), LLAMA, setting) == Sourced(0.5, "config.json: alpha")


ODD_EPSILONS = ["1e-5", True, math.nan, math.inf, -1e-6, [1e-5], {}, 10**400]


@pytest.mark.parametrize("value", ODD_EPSILONS)
def test_an_epsilon_of_the_wrong_kind_is_refused_by_key(value: Any) -> None:
    declared = config(text_config={"rms_norm_eps": value})
    with pytest.raises(DamagedCheckpoint) as error:
        eps_of(declared, LLAMA, EPS)
    assert error.value.field == "text_config.rms_norm_eps"
    assert "text_config.rms_norm_eps is" in error.value.message
    assert len(error.value.message) < 250
    (fault,) = config_faults(declared, LLAMA)
    assert (fault.kind, fault.key) == ("value", "text_config.rms_norm_eps")


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": -2}, "num_hidden_layers"),
        ({"num_attention_heads": [4]}, "num_attention_heads"),
        ({"hidden_act": 3}, "hidden_act"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"mlp_bias": 1}, "mlp_bias"),
        ({"mlp_bias": "true"}, "mlp_bias"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings"),
    ],
)
def test_values_of_the_wrong_kind_are_one_fault_each(values: dict[str, Any], key: str) -> None:
    (fault,) = config_faults(config(**values), LLAMA)
    assert (fault.kind, fault.key, fault.rule) == ("value", key, "config/shape")
    assert fault.message.startswith(f"config.json: {key} is ")


def test_a_number_of_extra_layers_that_is_none(tmp_path: Path) -> None:
    """It stops every comparison of layers with the config, so it must not go without a word."""
    changes = {"num_nextn_predict_layers": "one"}
    checkpoint = open_checkpoint(tiny_checkpoint("deepseek_v3", tmp_path, config=changes))
    assert [(fault.rule, fault.message) for fault in checkpoint.faults] == [
        (
            "config/shape",
            "config.json: num_nextn_predict_layers is 'one', where the family deepseek_v3 has a finite number",
        )
    ]
    with pytest.raises(DamagedCheckpoint):
        checkpoint.require_usable()


def test_a_sound_config_has_no_faults() -> None:
    for row in ARCHITECTURES.values():
        assert config_faults(config(), row) == ()


def test_the_inner_config_counts_and_the_tie_of_the_outer_model() -> None:
    nested = config(
        rms_norm_eps=1e-3, tie_word_embeddings=False, text_config={"hidden_size": 64, "tie_word_embeddings": True}
    )
    assert size_of(nested, GEMMA3, "hidden").source == "config.json: text_config.hidden_size"
    assert eps_of(nested, GEMMA3, GEMMA3.norms[0].eps).defaulted
    assert tied_of(nested, GEMMA3) == Sourced(value=False, source="config.json: tie_word_embeddings")
    assert tied_of(config(text_config={"tie_word_embeddings": False}), GEMMA3).source.endswith(
        "text_config.tie_word_embeddings"
    )
    assert tied_of(None, GEMMA3) == Sourced(value=True, source="default of family gemma3", defaulted=True)
    assert declared_flags(nested, "tie_word_embeddings") == {
        "tie_word_embeddings": False,
        "text_config.tie_word_embeddings": True,
    }


ROLES = ("attn_in", "ffn_in", "final")


def test_one_epsilon_for_all_norms() -> None:
    assert declared_eps(config(rms_norm_eps=1e-5), LLAMA) == [DeclaredEps(1e-5, "config.json", "rms_norm_eps", ROLES)]


def test_no_epsilon_is_the_familys_default() -> None:
    expected = [DeclaredEps(1e-6, None, None, ROLES)]
    assert declared_eps(config(), LLAMA) == expected
    assert declared_eps(None, LLAMA) == expected


def test_every_source_at_every_level() -> None:
    found = declared_eps(
        config(
            rms_norm_eps=1e-6,
            text_config={"rms_norm_eps": 1e-5, "extra": {"layer_norm_eps": 0}},
            vision_config={"layer_norm_eps": 1e-12},
            quantization_config={"norm_eps": 1.0},
            adam_epsilon=1e-8,
            hc_eps=1e-6,
            label_smoothing_eps=0.1,
        ),
        OLMO2,
        ConfigFile(Path("params.json"), {"norm_eps": 1e-4, "dim": 64}),
    )
    assert found[0] == DeclaredEps(1e-5, "config.json", "text_config.rms_norm_eps", OLMO2.roles)
    assert {(eps.file, eps.key, eps.value) for eps in found[1:]} == {
        ("config.json", "rms_norm_eps", 1e-6),
        ("config.json", "text_config.extra.layer_norm_eps", 0.0),
        ("config.json", "vision_config.layer_norm_eps", 1e-12),
        ("params.json", "norm_eps", 1e-4),
    }
    assert [eps.roles for eps in found if eps.file == "params.json"] == [OLMO2.roles]
    assert all(eps.roles == () for eps in found[1:] if eps.file == "config.json")


@pytest.mark.parametrize("value", ODD_EPSILONS)
def test_an_epsilon_of_the_wrong_kind_is_no_declaration(value: Any) -> None:
    assert declared_eps(config(rms_norm_eps=value), LLAMA) == []


def test_the_multiplier_of_embeddings() -> None:
    assert scale_of(None, GEMMA3, GEMMA3.embedding_scale or Setting((), 0.0), 64) == Sourced(
        8.0, "family gemma3: square root of hidden"
    )
    assert scale_of(config(embedding_multiplier=12), LLAMA, Setting(("embedding_multiplier",), 1.0), 64) == Sourced(
        12.0, "config.json: embedding_multiplier"
    )


@pytest.mark.parametrize(
    ("content", "words", "byte"),
    [
        (b"", "not JSON", 0),
        (b'{"hidden_size": 64,}', "not JSON", 19),
        (b'{"a": "\xff"}', "not UTF-8", 7),
        (b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}", "nested deeper", None),
        (b'{"rms_norm_eps": 1e-5, "rms_norm_eps": 1e-6}', "stands twice", None),
        (b"[]", "no JSON object", 0),
        (b"null", "no JSON object", 0),
        (b" " * (MAX_CONFIG_BYTES + 1), "at most 16,777,216", None),
    ],
)
def test_a_config_that_cannot_be_read_is_a_fault(tmp_path: Path, content: bytes, words: str, byte: int | None) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    fault = read_config(path)
    assert isinstance(fault, ConfigFault)
    assert (fault.kind, fault.rule, fault.file, fault.byte) == ("header", "container/header", path, byte)
    assert words in fault.message
    assert fault.message.startswith("config.json ")


def test_what_the_wild_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"time_step_limit": [0.0, Infinity], "x": NaN, "rms_norm_eps": 1e-05}')
    read = read_config(path)
    assert isinstance(read, ConfigFile)
    assert eps_of(read, LLAMA, EPS).value == 1e-5
    path.write_text(json.dumps({"rms_norm_eps": 1}))
    read = read_config(path)
    assert isinstance(read, ConfigFile)
    assert eps_of(read, LLAMA, EPS).value == 1.0
