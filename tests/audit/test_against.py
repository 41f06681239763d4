"""Another engine's config, in every dialect: an equal one is silent, a planted difference is the only finding."""

import json
from pathlib import Path
from typing import Any

import pytest
from glassblock.audit.against import AGAINST_RULES, activation_difference
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.engine_dialects import DIALECTS, dialect_of
from glassblock.errors import InvalidValue
from glassblock.wire.audits import Finding, Report
from makers import tiny_checkpoint
from plants import edit_json, healthy_checkpoint

Config = dict[str, Any]

# What each dialect says of the tiny llama: 48 wide, 112 inside, 2 layers, 4 heads of 16, 2 of keys, 96 tokens.
EQUAL: dict[str, Config] = {
    "transformers": {
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 96,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    },
    "meta": {
        "dim": 48,
        "hidden_dim": 112,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 96,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
    "vllm or sglang": {
        "model_config": {
            "model": "tiny",
            "dtype": "torch.float32",
            "hf_config": {
                "model_type": "llama",
                "hidden_size": 48,
                "intermediate_size": 112,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "vocab_size": 96,
                "rms_norm_eps": 1e-5,
            },
        },
        "parallel_config": {"tensor_parallel_size": 2},
    },
    "gguf": {
        "general.architecture": "llama",
        "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
        "llama.embedding_length": 48,
        "llama.block_count": 2,
        "llama.feed_forward_length": 112,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 16,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": 96,
    },
    "megatron": {
        "num_layers": 2,
        "hidden_size": 48,
        "ffn_hidden_size": 112,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 16,
        "layernorm_epsilon": 1e-5,
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": False,
        "apply_layernorm_1p": False,
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "rotary_base": 10000,
        "bf16": False,
        "fp16": False,
    },
    "glassblock": {
        "norms": {
            "attn_in": {"eps": 1e-5, "kind": "rms", "offset": 0},
            "*": {"eps": 1e-5, "kind": "rms", "offset": 0},
        },
        "activation": "swish",
        "gating": {"limit": None},
        "placement": "pre",
        "tied": False,
        "bias": {"ffn": False, "attention": False},
        "rope_theta": 10000,
        "sizes": {"hidden": 48, "intermediate": 112, "layers": 2, "vocab": 96},
        "dtype": "fp32",
    },
}

EPS, ACT, SHAPE = "config/eps-conflict", "config/activation-conflict", "config/shape"
TIED, KIND, OFFSET, BIAS = "config/tied-head", "norm/kind-conflict", "norm/offset", "ffn/missing-bias"
DTYPE, ROLE = "config/dtype-conflict", "norm/role"

# Dialect, key (dotted), what it says instead, the rule that tells it, a word of the message.
PLANTED: list[tuple[str, str, Any, str, str]] = [
    ("transformers", "rms_norm_eps", 1e-6, EPS, "1e-06"),
    ("transformers", "rms_norm_eps", ..., EPS, "default of family llama"),
    ("transformers", "hidden_act", "gelu_new", ACT, "gelu_new"),
    ("transformers", "tie_word_embeddings", True, TIED, "true"),
    ("transformers", "rope_theta", 500000.0, SHAPE, "base of the rotary frequencies"),
    ("transformers", "intermediate_size", 336, SHAPE, "the size intermediate is 112"),
    ("transformers", "num_key_value_heads", ..., SHAPE, "the size kv heads is 2"),
    ("transformers", "mlp_bias", True, BIAS, "projections of ffn"),
    ("transformers", "attention_bias", True, BIAS, "projections of attention"),
    ("transformers", "torch_dtype", "float16", DTYPE, "65,504"),
    ("transformers", "swiglu_limit", 7.0, ACT, "the limit where gate and up meet"),
    ("transformers", "rope_scaling", {"rope_type": "linear", "factor": 4.0}, SHAPE, "linear x 4"),
    ("meta", "norm_eps", 1e-6, EPS, "norm_eps"),
    ("meta", "hidden_dim", 224, SHAPE, "hidden_dim"),
    ("meta", "rope_theta", 1e6, SHAPE, "rope_theta"),
    ("meta", "n_layers", 3, SHAPE, "n_layers"),
    ("vllm or sglang", "model_config.hf_config.rms_norm_eps", 1e-6, EPS, "1e-06"),
    ("vllm or sglang", "model_config.hf_overrides", {"rms_norm_eps": 1e-6}, EPS, "1e-06"),
    ("vllm or sglang", "json_model_override_args", '{"hidden_act": "relu"}', ACT, "relu"),
    ("vllm or sglang", "model_config.dtype", "torch.float16", DTYPE, "float16"),
    ("gguf", "llama.attention.layer_norm_rms_epsilon", 1e-6, EPS, "1e-06"),
    ("gguf", "llama.feed_forward_length", 224, SHAPE, "feed_forward_length"),
    ("gguf", "llama.rope.freq_base", 500000.0, SHAPE, "freq_base"),
    ("megatron", "layernorm_epsilon", 1e-6, EPS, "layernorm_epsilon"),
    ("megatron", "normalization", "LayerNorm", KIND, "normalization"),
    ("megatron", "layernorm_zero_centered_gamma", True, OFFSET, "zero_centered"),
    ("megatron", "swiglu", False, ACT, "gelu"),
    ("megatron", "add_bias_linear", True, BIAS, "add_bias_linear"),
    ("megatron", "untie_embeddings_and_output_weights", False, TIED, "untie"),
    ("megatron", "num_query_groups", 4, SHAPE, "num_query_groups"),
    ("megatron", "fp16", True, DTYPE, "float16"),
    ("glassblock", "norms.ffn_in", {"eps": 1e-6}, EPS, "of the norms ffn_in is"),
    ("glassblock", "norms.final", {"kind": "layer"}, KIND, "the norm final"),
    ("glassblock", "norms.*", {"eps": 1e-5, "kind": "rms", "offset": 1}, OFFSET, "ffn_in, final"),
    ("glassblock", "activation", "gelu", ACT, "gelu"),
    ("glassblock", "gating", {"limit": 7}, ACT, "limit"),
    ("glassblock", "placement", "sandwich", ROLE, "sandwich"),
    ("glassblock", "tied", True, TIED, "tied"),
    ("glassblock", "bias", True, BIAS, "ffn"),
    ("glassblock", "rope_theta", 1e6, SHAPE, "rope_theta"),
    ("glassblock", "multipliers", {"residual_multiplier": 0.5}, SHAPE, "residual multiplier"),
    ("glassblock", "dtype", "float16", DTYPE, "float16"),
]


def edited(config: Config, path: str, value: Any) -> Config:
    """A deep copy with another entry; `...` takes one out."""
    copy = json.loads(json.dumps(config))
    inner = copy
    parts = path.split(".") if not path.startswith("llama.") else [path]
    for part in parts[:-1]:
        inner = inner.setdefault(part, {})
    if value is ...:
        del inner[parts[-1]]
    else:
        inner[parts[-1]] = value
    return copy


def audited(directory: Path, against: Config, **more: Any) -> Report:
    return audit_checkpoint(directory, AuditQuestion(against=against, against_name="engine.json", **more))


def loud(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.level != "note"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return healthy_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def test_every_dialect_is_tested() -> None:
    assert EQUAL.keys() == DIALECTS.keys() == {dialect for dialect, *_ in PLANTED}
    assert all(dialect_of(config).name == name for name, config in EQUAL.items())


@pytest.mark.parametrize("dialect", EQUAL)
def test_an_equal_config_is_silent(dialect: str, llama: Path) -> None:
    report = audited(llama, EQUAL[dialect])
    assert (report.findings, report.verdict) == ((), "pass")


@pytest.mark.parametrize(("dialect", "path", "value", "rule", "word"), PLANTED)
def test_a_difference_is_the_only_finding(
    dialect: str, path: str, value: Any, rule: str, word: str, llama: Path
) -> None:
    report = audited(llama, edited(EQUAL[dialect], path, value))
    (finding,) = report.findings
    assert (finding.rule, finding.level, finding.certainty) == (rule, "error", "conflict")
    assert word in finding.message
    assert report.verdict == "fail"
    assert finding.fix is not None


@pytest.mark.parametrize("order", ["up_gate", ["up", "gate"], "[up|gate]"])
def test_the_order_that_a_kernel_wants(order: Any, tmp_path: Path) -> None:
    healthy_checkpoint("phi3", tmp_path)
    report = audited(tmp_path, {"fused_order": order})
    (finding,) = report.findings
    assert (finding.rule, finding.certainty) == ("ffn/fused-order", "conflict")
    assert "stored=[gate|up] engine=[up|gate]" in finding.message
    assert audited(tmp_path, {"fused_order": "gate_up"}).findings == ()
    assert audited(tmp_path, EQUAL["vllm or sglang"] | {"fused_order": "up_gate"}).verdict == "fail"


def test_an_order_that_the_weights_do_not_show_is_told_as_declared(tmp_path: Path) -> None:
    report = audited(tiny_checkpoint("phi3", tmp_path), {"fused_order": "up_gate"})
    (finding,) = (finding for finding in report.findings if finding.rule == "ffn/fused-order")
    assert "declared=[gate|up] engine=[up|gate]" in finding.message


def test_a_size_beyond_every_float(llama: Path) -> None:
    (finding,) = audited(llama, {"llama.block_count": 10**400}).findings
    assert finding.rule == "config/shape"


def test_blocks_that_another_engine_reads_are_compared_with_those_of_the_row(tmp_path: Path) -> None:
    healthy_checkpoint("phi3", tmp_path)
    (finding,) = audited(tmp_path, {"fused_arrangement": "blocks-4"}).findings
    assert (finding.rule, finding.certainty) == ("ffn/fused-order", "conflict")
    assert "blocks-4" in finding.message
    assert audited(tmp_path, {"fused_arrangement": "blocks-1"}).findings == ()
    assert audited(tmp_path, {"fused_arrangement": "halves"}).findings == ()


def test_an_order_that_is_not_declared_is_undecidable(tmp_path: Path) -> None:
    healthy_checkpoint("phi3", tmp_path)
    report = audited(tmp_path, {"layernorm_epsilon": 1e-5, "swiglu": True})
    (coverage,) = (entry for entry in report.coverage if entry.rule == "ffn/fused-order")
    assert any("does not tell the order" in entry.reason for entry in coverage.undecidable)
    assert any("fused_order" in entry.would_decide for entry in coverage.undecidable)
    assert report.verdict == "pass"


def test_a_clamp_that_the_other_side_drops(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_json("config.json", swiglu_limit=7.0)(tmp_path)
    (finding,) = audited(tmp_path, EQUAL["transformers"]).findings
    assert (finding.rule, finding.evidence["other"]["value"]) == (ACT, None)
    partial = audited(tmp_path, {"rms_norm_eps": 1e-5})
    assert partial.findings == ()
    (coverage,) = (entry for entry in partial.coverage if entry.rule == ACT)
    assert any("the limit where gate and up meet" in entry.reason for entry in coverage.undecidable)


def test_gguf_holds_what_gemma_adds(tmp_path: Path) -> None:
    """A documented change of convention, and no offset that differs."""
    healthy_checkpoint("gemma", tmp_path)
    metadata = {"general.architecture": "gemma", "gemma.attention.layer_norm_rms_epsilon": 1e-5}
    report = audited(tmp_path, metadata)
    assert (report.findings, report.verdict) == ((), "pass")
    (coverage,) = (entry for entry in report.coverage if entry.rule == OFFSET)
    assert any("GGUF holds 1 + w already" in entry.reason for entry in coverage.skipped)


def test_the_output_of_gguf_dump(llama: Path) -> None:
    metadata = {key: {"index": 1, "type": "X", "value": value} for key, value in EQUAL["gguf"].items()}
    dump = {"metadata": metadata, "tensors": {"output.weight": {"shape": [1]}}}
    assert audited(llama, dump).findings == ()
    listed = {"metadata": metadata, "tensors": [{"name": "output.weight"}]}
    assert audited(llama, listed).findings == ()
    (finding,) = audited(llama, {"metadata": metadata, "tensors": [{"name": "token_embd.weight"}]}).findings
    assert finding.rule == TIED


def test_another_model_is_said_and_not_called_damage(llama: Path) -> None:
    other = EQUAL["transformers"] | {"hidden_size": 64, "num_hidden_layers": 4, "hidden_act": "gelu"}
    report = audited(llama, other)
    assert (report.findings, report.verdict) == ((), "inconclusive")
    asked = (coverage for coverage in report.coverage if coverage.rule in AGAINST_RULES)
    reasons = [entry.reason for coverage in asked for entry in coverage.undecidable]
    assert reasons
    assert {reason for reason in reasons if "is of another model" not in reason} == set(), reasons


def test_activations_that_are_one_function_agree(tmp_path: Path) -> None:
    healthy_checkpoint("gemma", tmp_path)
    assert audited(tmp_path, {"rms_norm_eps": 1e-5, "hidden_act": "gelu_new"}).findings == ()
    (finding,) = audited(tmp_path, {"rms_norm_eps": 1e-5, "hidden_act": "gelu_python"}).findings
    # The erf and tanh forms of GELU differ by at most 4.732e-4, near 2.2.
    assert finding.evidence["largest_difference"] == pytest.approx(4.732e-4, rel=1e-3)
    assert activation_difference("silu", "swish") == 0.0
    assert activation_difference("silu", "xielu") is None


@pytest.mark.parametrize("wrapped", [True, False], ids=["a dump", "alone"])
def test_a_cut_down_config_says_what_it_states_and_no_default(wrapped: bool, tmp_path: Path) -> None:
    """Two key heads, another rotary base and a tie: of a config that is silent on them no default is an error."""
    healthy_checkpoint("llama", tmp_path, config={"rope_theta": 1e5})
    cut: Config = {"model_type": "llama", "rms_norm_eps": 1e-6}
    report = audited(tmp_path, {"hf_config": cut} if wrapped else cut)
    (finding,) = report.findings
    assert (finding.rule, finding.level) == (EPS, "error")
    (coverage,) = (entry for entry in report.coverage if entry.rule == SHAPE)
    untold = " ".join(entry.reason for entry in coverage.undecidable)
    assert all(word in untold for word in ("kv_heads", "rope_theta", "hidden"))
    assert any("no whole config" in entry.reason for entry in coverage.skipped)


def test_what_a_cut_down_config_states_is_still_compared(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    stated: Config = {"model_type": "llama", "num_key_value_heads": 4, "rope_theta": 5e5, "tie_word_embeddings": True}
    rules = sorted((finding.rule, finding.level) for finding in audited(tmp_path, stated).findings)
    assert rules == [(SHAPE, "error"), (SHAPE, "error"), (TIED, "error")]


def test_what_follows_from_another_family_alone_is_told_by_its_name(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    rules = {finding.rule for finding in audited(tmp_path, {"model_type": "olmo2", "rms_norm_eps": 1e-5}).findings}
    assert rules == {ROLE}


HOSTILE: list[tuple[Config, str]] = [
    ({}, "no dialect"),
    ({"foo": 1, "bar": [1]}, "bar, foo"),
    ({"norms": {"nowhere": {"eps": 1}}}, "nowhere"),
    ({"norms": {"final": {"eps": -1}}}, "norms.final.eps"),
    ({"norms": {"final": {"epsilon": 1}}}, "epsilon"),
    ({"norms": {"final": 3}, "tied": False}, "norms.final"),
    ({"norms": {}, "colour": 1}, "colour"),
    ({"fused_order": "gate_gate"}, "fused_order"),
    ({"fused_arrangement": "blocks"}, "fused_arrangement"),
    ({"fused_arrangement": "blocks-0"}, "fused_arrangement"),
    ({"tied": "yes"}, "tied"),
    ({"sizes": {"hidden": True}}, "sizes.hidden"),
    ({"model_config": {}, "hf_overrides": "{"}, "hf_overrides"),
]


@pytest.mark.parametrize(("config", "word"), HOSTILE)
def test_what_cannot_be_read_is_refused_by_name(config: Config, word: str, llama: Path) -> None:
    with pytest.raises(InvalidValue) as caught:
        audited(llama, config)
    assert word in caught.value.message
    assert caught.value.field is not None
    assert caught.value.field.startswith("against")


def test_a_refused_dialect_lists_the_known_ones(llama: Path) -> None:
    with pytest.raises(InvalidValue) as caught:
        audited(llama, {"foo": 1})
    assert len(caught.value.known) == len(DIALECTS)


ODD: list[Config] = [
    {"model_type": 7, "rms_norm_eps": 1e-5},
    {"model_type": ["llama"], "rms_norm_eps": 1e-5},
    {"model_type": "nobody", "rms_norm_eps": 1e-5},
    {"architectures": "LlamaForCausalLM", "rms_norm_eps": 1e-5},
    {"architectures": [None], "rms_norm_eps": 1e-5},
    {"text_config": [], "rms_norm_eps": 1e-5},
    {"general.architecture": None, "llama.attention.layer_norm_rms_epsilon": 1e-5},
    {"metadata": {"general.architecture": {"value": "llama"}, "llama.attention.layer_norm_rms_epsilon": 1e-5}},
    {"layernorm_epsilon": 1e-5, "normalization": 3, "swiglu": "yes", "num_query_groups": -1},
    {"dim": "48", "n_layers": None, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5},
    {"hf_config": {"rms_norm_eps": 1e-5}, "model_config": [1, {"a": 1}]},
]


@pytest.mark.parametrize("config", ODD)
def test_odd_values_are_no_findings_and_no_crash(config: Config, llama: Path) -> None:
    report = audited(llama, config)
    assert loud(report) == []


@pytest.mark.parametrize("dialect", EQUAL)
def test_a_checkpoint_of_no_family_leaves_the_question_open(dialect: str, tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_json("config.json", model_type="llamax")(tmp_path)
    report = audited(tmp_path, EQUAL[dialect], rules=("config/shape",))
    assert report.verdict == "inconclusive"


@pytest.mark.parametrize("tied", [True, False])
def test_metas_params_say_nothing_of_a_tie(tied: bool, tmp_path: Path) -> None:
    """Meta's files hold the head also where it is the embedding."""
    model = healthy_checkpoint("llama", tmp_path / "model", config={"tie_word_embeddings": tied})
    report = audited(model, EQUAL["meta"])
    assert not [
        finding for finding in report.findings if finding.rule == "config/tied-head" and finding.level == "error"
    ]


@pytest.mark.parametrize("name", ["other.json", "/some/where/other.json (--against)"])
def test_a_default_is_told_as_one_and_what_is_stated_is_not(name: str, tmp_path: Path) -> None:
    model = healthy_checkpoint("llama", tmp_path / "model", config={"rope_theta": 500000.0})

    def message(config: Config) -> str:
        (finding,) = audit_checkpoint(model, AuditQuestion(against=config, against_name=name)).findings
        return finding.message

    assert "does not state it" not in message(EQUAL["transformers"])
    silent = {key: value for key, value in EQUAL["transformers"].items() if key != "rope_theta"}
    assert f"default of family llama, as {name} does not state it" in message(silent)


@pytest.mark.parametrize("dialect", ["transformers", "meta"])
def test_two_files_of_one_name_are_told_apart(dialect: str, tmp_path: Path) -> None:
    model = healthy_checkpoint("llama", tmp_path / "model")
    sizes = json.loads((model / "config.json").read_text())
    others: dict[str, dict[str, Any]] = {
        "transformers": {"model_type": "llama", "rms_norm_eps": 1e-3, "hidden_act": "gelu"},
        "meta": {"dim": sizes["hidden_size"], "n_heads": sizes["num_attention_heads"], "norm_eps": 1e-3},
    }
    question = AuditQuestion(against=others[dialect], against_name="there/config.json")
    found = {finding.rule: finding for finding in audit_checkpoint(model, question).findings}
    epsilon = found["config/eps-conflict"]
    assert epsilon.fix is not None
    for text in (epsilon.message, epsilon.fix.description):
        assert "the checkpoint's config.json: rms_norm_eps" in text
        assert "there/config.json: " in text
    assert epsilon.fix.description.startswith("One of the two is wrong: set 1e-05 in there/config.json")
    if dialect == "transformers":
        activation = found["config/activation-conflict"]
        assert activation.fix is not None
        assert "gelu (there/config.json: hidden_act)" in activation.message
        assert activation.fix.description.startswith(
            "One of the two is wrong: set silu in there/config.json or gelu in"
        )


def test_a_third_source_says_what_to_set(tmp_path: Path) -> None:
    model = healthy_checkpoint("llama", tmp_path / "model")
    nested = {"model_type": "llama", "rms_norm_eps": 1e-6}
    edit_json("config.json", text_config=nested)(model)
    question = AuditQuestion(against={"rms_norm_eps": 1e-5}, against_name="there/config.json")
    (own,) = [finding for finding in audit_checkpoint(model, question).findings if finding.level == "warning"]
    assert own.fix is not None
    assert own.fix.description == "Set 1e-05 in config.json: text_config.rms_norm_eps."
