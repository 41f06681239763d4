"""Whole models out of their files, against the models themselves: logits of every family whose attention is read.

Each model type that transformers can build is built tiny and random, with the family's defaults and with each flag of
its attention the other way, with a window shorter than the text, and with every form of rotary positions; written with
`save_pretrained`; and read, layer by layer, through the product's own path. A row with attention is tested without
another line here.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from glassblock.checkpoint.architectures import ARCHITECTURES, BY_MODEL_TYPE
from glassblock.checkpoint.attention_row import AttentionRow
from glassblock.checkpoint.config import ConfigFile, find
from glassblock.checkpoint.family import Architecture, Setting
from glassblock.checkpoint.layer_loading import load_layer
from glassblock.checkpoint.layer_map import shape_faults
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.rotary_settings import rotary_of
from glassblock.checkpoint.settings import flag_of, optional_number_of, text_of
from glassblock.checkpoint.text_states import (
    embedded,
    entering_states,
    layer_count,
    logit_parts,
    require_head,
    token_log_likelihoods,
)
from glassblock.checkpoint.variants import row_for
from glassblock.errors import FamilyMismatch, InvalidValue
from glassblock.numerics.watching import ComputationCancelled, Watch
from makers import tiny_checkpoint
from meta_names import as_meta
from reference_models import Case, randomise, small_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers.models.auto import modeling_auto as auto

# What the project promises in float32; logits here are near 3, and sums of a hundred terms round a hundred times finer.
TOLERANCE = 1e-4
IDS = torch.tensor([[5, 17, 3, 42, 90, 0, 61, 8, 33, 71, 12, 54], [7, 7, 80, 2, 2, 19, 44, 95, 1, 63, 28, 30]])
WINDOW = 4
PATTERN = ["sliding_attention", "full_attention"]

FORMS: Mapping[str, Mapping[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 1.5, 2.0],
    "original_max_position_embeddings": 8,
    "partial_rotary_factor": 0.5,
}
DEEP_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
# Of a head of 12 or 16 channels an odd number, 3 or 1: the models turn one more, at the frequencies of the odd number.
ODD = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
# What no flag alone shows.
MORE: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *(("llama", {"rope_parameters": {"rope_theta": 5000.0, **form}}) for form in FORMS.values()),
    ("llama", {"max_position_embeddings": 8, "rope_parameters": {"rope_theta": 5000.0, **FORMS["dynamic"]}}),
    ("gpt_neox", {"rope_parameters": ODD}),
    ("gpt_neox", {"rope_parameters": ODD | {"partial_rotary_factor": 0.1}}),
    *(("gpt_neox", {"rope_parameters": ODD | FORMS[name]}) for name in ("linear", "dynamic", "llama3")),
    *((name, {"rope_parameters": ODD | {"partial_rotary_factor": 0.2}}) for name in ("glm", "glm4", "glm4_moe")),
    ("phi3", {"rope_parameters": ODD}),
    ("phi3", {"rope_parameters": LONGROPE}),
    ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    (
        "gemma3_text",
        {
            "rope_parameters": {
                name: {"rope_type": "default", "rope_theta": t}
                for name, t in (("sliding_attention", 50.0), ("full_attention", 700.0))
            },
            "layer_types": PATTERN,
            "sliding_window": WINDOW,
        },
    ),
    ("smollm3", {"no_rope_layers": [0, 1]}),
    (
        "smollm3",
        {"no_rope_layers": [0, 1], "layer_types": PATTERN, "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "rope_parameters": DEEP_YARN},
    ),
    ("deepseek_v2", {"q_lora_rank": None}),
    ("deepseek_v3", {"n_group": 2, "topk_group": 1, "rope_parameters": DEEP_YARN}),
    ("deepseek_v3", {"q_lora_rank": None, "n_group": 2, "topk_group": 1}),
    ("gptj", {"rotary_dim": 4}),
    ("minimax_m2", {"rotary_dim": 8}),
    ("cohere", {"head_dim": 20}),
    ("apertus", {"hidden_act": "gelu"}),
    ("olmo", {"clip_qkv": 0.5}),
    ("olmoe", {"clip_qkv": 0.5}),
    ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 20}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("granite", {"attention_multiplier": 0.11, "logits_scaling": 4.0, "residual_multiplier": 0.3}),
    ("gpt_neox", {"rotary_pct": 0.5}),
    ("falcon", {"multi_query": False, "num_kv_heads": 4}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
    (
        "dbrx",
        {
            "attn_config": {"rope_theta": 50.0, "kv_n_heads": 2, "clip_qkv": 1.5},
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
        },
    ),
)
# Theirs, without which the small models could not be built or would not show what they are for.
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "dbrx": {
        "attn_config": {"rope_theta": 50.0, "kv_n_heads": 2, "clip_qkv": 1.5},  # not read: rope_parameters is
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 48},
    },
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5},
}


def all_cases() -> Iterator[Case]:
    for model_type, row in sorted(BY_MODEL_TYPE.items()):
        if row.attention is None or not built(model_type):
            continue
        known = transformers.CONFIG_MAPPING[model_type]().to_dict()
        needed = tuple(NEEDED.get(model_type, {}).items())
        yield Case(model_type, needed)
        if model_type != next(name for name in row.model_types if built(name)):
            continue
        settings = settings_in((row.attention, row.logits, *row.routings))
        flags = {setting.keys[0]: setting.default for setting in settings if isinstance(setting.default, bool)}
        for key, default in flags.items():
            if isinstance(known.get(key), bool):
                yield Case(model_type, (*needed, (key, not default)))
        for flag in (
            "use_qk_norm",
            "qk_layernorm",
            "use_parallel_residual",
            "parallel_attn",
            "new_decoder_architecture",
        ):
            if flag in known:
                yield Case(model_type, (*needed, (flag, not known[flag])))
        if "sliding_window" in known:
            windowed = {"sliding_window": WINDOW, "layer_types": PATTERN, "use_sliding_window": True}
            yield Case(model_type, (*needed, *((key, value) for key, value in windowed.items() if key in known)))
    yield from (Case(model_type, tuple(changes.items())) for model_type, changes in MORE)


def built(model_type: str) -> bool:
    """Whether transformers has a model of that type that gives logits for text."""
    if model_type not in transformers.CONFIG_MAPPING:
        return False
    config = transformers.CONFIG_MAPPING[model_type]
    return any(config in auto._model_mapping for auto in AUTO)


def class_for(config: Any) -> Any:
    return next(auto for auto in AUTO if type(config) in auto._model_mapping)


AUTO = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)


def settings_in(part: object) -> Iterator[Setting[Any]]:
    if isinstance(part, Setting):
        yield from [part] if part.keys else []
    elif isinstance(part, tuple):
        for each in part:
            yield from settings_in(each)
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            yield from settings_in(getattr(part, field.name))


def named(case: Case) -> str:
    changes = ",".join(f"{key}={json.dumps(value)[:24]}" for key, value in case.changes)
    return f"{case.model_type}-{changes}" if changes else case.model_type


def written(case: Case, directory: Path) -> Any:
    """A random model none of whose parts can be forgotten unseen, in its own files."""
    torch.manual_seed(0)
    config = small_config(case, BY_MODEL_TYPE[case.model_type])
    model = class_for(config).from_config(config, attn_implementation="eager").eval()
    kept = model.state_dict().keys()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and name in kept:
            randomise(tensor)
    model.save_pretrained(directory)
    return model


def logits_of(checkpoint: Checkpoint, ids: Tensor = IDS, dtype: torch.dtype | None = None) -> Tensor:
    meter = ReadMeter()
    states = entering_states(checkpoint, ids, layer_count(checkpoint), "cpu", meter, dtype=dtype)
    return torch.cat(list(logit_parts(checkpoint, states, meter, dtype=dtype)), dim=-1)


@pytest.mark.parametrize("case", tuple(all_cases()), ids=named)
def test_logits_are_the_models(case: Case, tmp_path: Path) -> None:
    model = written(case, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.faults == ()
    if checkpoint.require_usable().attention is None:
        with pytest.raises(FamilyMismatch, match="the attention of the family"):
            logits_of(checkpoint)
        return
    assert shape_faults(checkpoint) == ()
    with torch.no_grad():
        theirs = model(input_ids=IDS, use_cache=False).logits
    ours = logits_of(checkpoint)
    assert ours.dtype == torch.float32
    assert float(theirs.abs().max()) > 0.1  # small logits would hide a wrong one
    assert float((ours - theirs).abs().max()) <= TOLERANCE


# How long a model was made for matters to the forms alone, and a config with a form states it.
LENGTHS = frozenset({"max_position_embeddings", "n_positions", "max_seq_len"})
BUILT = tuple(name for name, row in sorted(BY_MODEL_TYPE.items()) if row.attention is not None and built(name))


@pytest.mark.parametrize("model_type", BUILT)
def test_defaults_are_those_of_the_configuration_class(model_type: str) -> None:
    silent = ConfigFile(Path("config.json"), {"model_type": model_type})
    told = ConfigFile(Path("config.json"), transformers.CONFIG_MAPPING[model_type]().to_dict())
    row = row_for(BY_MODEL_TYPE[model_type], told)
    for setting in settings_in((row.attention, row.logits, *row.routings)):
        if find(told, row, setting.keys) is None or setting.keys[0] in LENGTHS:
            continue
        if isinstance(setting.default, bool):
            ours, theirs = (flag_of(config, row, setting) for config in (silent, told))
        elif isinstance(setting.default, str):
            ours, theirs = (text_of(config, row, setting) for config in (silent, told))
        else:
            ours, theirs = (optional_number_of(config, row, setting) for config in (silent, told))
        unused = (
            setting.keys == ("sliding_window",) and theirs is not None and theirs.value == 0
        )  # Qwen2-MoE's no window
        assert unused or (ours and ours.value) == (theirs and theirs.value), setting.keys


FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "smollm3", "granite"),
    *("glm4", "cohere", "starcoder2", "gpt_neox", "gpt2", "gptj", "phi", "mixtral", "qwen2_moe", "qwen3_moe"),
    *("deepseek_v2", "deepseek_v3", "gpt_oss"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_people_use_have_attention(family: str) -> None:
    row = ARCHITECTURES[family]
    assert row.attention is not None
    assert any(case.model_type in row.model_types for case in all_cases())
    assert row.mixture is None or row.mixture.routing is not None


# Other code's names and layouts, from a model of transformers whose tensors are put where that code has them.


def tiny(config: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for tensor in model.parameters():
        randomise(tensor)
    return model


LLAMA = {
    "hidden_size": 48,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}


def as_internlm2(state: dict[str, Tensor]) -> dict[str, Tensor]:
    made = {}
    for name, tensor in as_meta(state, META_HEADS).items():
        if ".attention.wk" in name or ".attention.wv" in name:
            continue
        new = f"model.{name}" if not name.startswith("output") else name
        if ".attention.wq" in name:
            layer = name.split(".")[1]
            query, key, value = (
                state[f"model.layers.{layer}.self_attn.{part}_proj.weight"].unflatten(0, (2, -1, 12)) for part in "qkv"
            )
            made[new.replace("wq", "wqkv")] = torch.cat((query, key, value), dim=1).flatten(0, 2).contiguous()
        else:
            made[new] = tensor
    return made


def as_llama2_c(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"_orig_mod.{name}": tensor for name, tensor in as_meta(state, META_HEADS).items() if name != "output.weight"
    }


def as_nanogpt(state: dict[str, Tensor]) -> dict[str, Tensor]:
    linear = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    return {name: (tensor.T if name.endswith(linear) else tensor).contiguous() for name, tensor in state.items()}


GPT2 = {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 96, "activation_function": "gelu"}
META_HEADS = {"q_proj": 4, "k_proj": 2}
META_PARAMS = {"dim": 48, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5} | {
    "vocab_size": 96
}
Rewrite = Callable[[dict[str, Tensor]], dict[str, Tensor]]
OTHERS: Mapping[str, tuple[Any, Rewrite, str, dict[str, Any]]] = {
    "llama_meta": (transformers.LlamaConfig(**LLAMA), partial(as_meta, heads=META_HEADS), "params.json", META_PARAMS),
    "internlm2": (
        transformers.LlamaConfig(**LLAMA),
        as_internlm2,
        "config.json",
        {"model_type": "internlm2", "bias": False, **LLAMA},
    ),
    "llama2_c": (
        transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True),
        as_llama2_c,
        "config.json",
        META_PARAMS,
    ),
    "nanogpt": (
        transformers.GPT2Config(**GPT2),
        as_nanogpt,
        "config.json",
        {"n_embd": 48, "n_head": 4, "n_layer": 2, "vocab_size": 96, "bias": True},
    ),
}


@pytest.mark.parametrize("family", OTHERS)
def test_logits_are_the_same_under_other_names(family: str, tmp_path: Path) -> None:
    config, rewrite, file, declared = OTHERS[family]
    model = tiny(config)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(".attn.bias")}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    (tmp_path / file).write_text(json.dumps(declared))
    name = "consolidated.safetensors" if file == "params.json" else "model.safetensors"
    save_file(rewrite(state), tmp_path / name)
    checkpoint = open_checkpoint(tmp_path, family=family)
    assert shape_faults(checkpoint) == ()
    with torch.no_grad():
        theirs = model(IDS).logits
    assert float((logits_of(checkpoint) - theirs).abs().max()) <= TOLERANCE


# Refusals and edges, on one small Llama and one small mixture.


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    tiny(transformers.LlamaConfig(**LLAMA, attention_bias=True)).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def rewritten(path: Path, change: Callable[[dict[str, Tensor]], None], **config: Any) -> Checkpoint:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(values))
    return open_checkpoint(path)


K = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "rule", "tensor", "says"),
    [
        (lambda t: t.pop(K), "ffn/missing-tensor", K, "is missing"),
        (lambda t: t.update({K: torch.zeros(48, 48)}), "config/shape", K, r"\[48, 48\] where \[24, 48\]"),
        (lambda t: t.pop(K.replace("weight", "bias")), "ffn/missing-bias", K.replace("weight", "bias"), "is missing"),
    ],
    ids=["absent", "wrong shape", "bias absent"],
)
def test_attention_that_does_not_fit_is_a_fault_and_no_block_of_it_runs(
    llama: Path, change: Callable[[dict[str, Tensor]], None], rule: str, tensor: str, says: str
) -> None:
    checkpoint = rewritten(llama, change)
    (fault,) = shape_faults(checkpoint)
    assert (fault.rule, fault.tensor, fault.layer) == (rule, tensor, 1)
    with pytest.raises(FamilyMismatch, match=says) as told:
        load_layer(checkpoint, 1, "cpu", ReadMeter())
    assert told.value.tensor == tensor
    meter = ReadMeter()
    with pytest.raises(FamilyMismatch, match=says):
        entering_states(checkpoint, IDS, 2, "cpu", meter)
    assert meter.bytes == 0  # told before anything is read


@pytest.mark.parametrize(("said", "theta"), [({}, 500.0), ({"rope_parameters": {"rope_theta": 700.0}}, 700.0)])
def test_dbrx_has_theta_where_its_older_configs_had_it(said: dict[str, Any], theta: float, tmp_path: Path) -> None:
    tiny_checkpoint("dbrx", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["attn_config"]["rope_theta"] = 500.0
    (tmp_path / "config.json").write_text(json.dumps(values | said))
    attention = load_layer(open_checkpoint(tmp_path), 0, "cpu", ReadMeter()).attention
    assert attention.rotary is not None
    assert attention.rotary.theta == theta


def test_attention_that_is_missing_does_not_hinder_the_network(llama: Path) -> None:
    from glassblock.checkpoint.layers import load_feed_forward, load_wiring  # noqa: PLC0415

    checkpoint = rewritten(llama, lambda tensors: tensors.pop(K))
    assert load_feed_forward(checkpoint, 1, "cpu", ReadMeter()).width == 128
    assert load_wiring(checkpoint, 1, "cpu", ReadMeter()).input_norm is not None


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"rope_scaling": {"type": "nonsense"}}, "unknown form of rotary positions 'nonsense'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "need low_freq_factor"),
        ({"rope_parameters": None, "rope_theta": 0.5}, "rope theta is 0.5"),
        ({"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"rope_type": 3}}, "a name is expected"),
    ],
    ids=["form", "number", "theta", "name"],
)
def test_rotary_parameters_that_cannot_be_are_told(llama: Path, config: dict[str, Any], says: str) -> None:
    checkpoint = rewritten(llama, lambda _: None, **config)
    with pytest.raises(Exception, match=says) as told:
        load_layer(checkpoint, 0, "cpu", ReadMeter())
    assert getattr(told.value, "file", None) == "config.json"


@pytest.mark.parametrize(("share", "width", "turned"), [(0.05, 12, 0), (1.0, 9, 9)])
def test_channels_that_no_pair_can_be_made_of_are_refused(
    share: float, width: int, turned: int, tmp_path: Path
) -> None:
    tiny_checkpoint("gpt_neox", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rotary_pct": share, "hidden_size": 48}))
    checkpoint = open_checkpoint(tmp_path)
    row = checkpoint.require_usable()
    assert isinstance(row.attention, AttentionRow)
    with pytest.raises(InvalidValue, match=f"of a head of {width} channels: {turned} of them would turn"):
        rotary_of(checkpoint, row, row.attention.rotary, width)


def test_old_and_new_spellings_of_rotary_parameters_are_one(llama: Path) -> None:
    form = FORMS["llama3"]
    new = logits_of(rewritten(llama, lambda _: None, rope_parameters={"rope_theta": 777.0, **form}))
    old_form = {("type" if key == "rope_type" else key): value for key, value in form.items()}
    old = rewritten(llama, lambda _: None, rope_parameters=None, rope_theta=777.0, rope_scaling=old_form)
    assert torch.equal(logits_of(old), new)
    plain = rewritten(llama, lambda _: None, rope_scaling=None)
    assert not torch.equal(logits_of(plain), new)


def test_a_null_window_is_no_window(tmp_path: Path) -> None:
    """The family's own default is 4096."""
    model = tiny(transformers.MistralConfig(**LLAMA, sliding_window=None))
    model.save_pretrained(tmp_path)
    layer = load_layer(open_checkpoint(tmp_path), 0, "cpu", ReadMeter())
    assert layer.attention.window is None
    config = json.loads((tmp_path / "config.json").read_text())
    del config["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_layer(open_checkpoint(tmp_path), 0, "cpu", ReadMeter()).attention.window == 4096


def test_experts_are_read_when_tokens_choose_them(tmp_path: Path) -> None:
    mixture = LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 1}
    tiny(transformers.MixtralConfig(**mixture)).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    meter = ReadMeter()
    states = entering_states(checkpoint, IDS[:1, :1], 1, "cpu", meter)
    one = 3 * 48 * 128 * 4
    attention = 2 * (48 + 24) * 48 * 4
    norms, router, row = 2 * 48 * 4, 8 * 48 * 4, 48 * 4
    assert meter.bytes == row + attention + norms + router + one
    assert states.shape == (1, 1, 48)


def test_bits_are_the_models_in_bfloat16(tmp_path: Path) -> None:
    """The whole model in bfloat16 in the order of the model's own operations."""
    model = tiny(transformers.LlamaConfig(**LLAMA)).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        hidden = model.model(IDS, output_hidden_states=True, use_cache=False).hidden_states
    checkpoint = open_checkpoint(tmp_path)
    for layer in range(2):
        ours = entering_states(checkpoint, IDS, layer, "cpu", ReadMeter(), dtype=torch.bfloat16)
        assert torch.equal(ours, hidden[layer]), layer


def test_log_likelihoods_are_those_of_the_logits(llama: Path) -> None:
    checkpoint = open_checkpoint(llama)
    meter = ReadMeter()
    ours = token_log_likelihoods(checkpoint, IDS, "cpu", meter)
    logs = logits_of(checkpoint)[:, :-1].log_softmax(-1)
    expected = logs.gather(-1, IDS[:, 1:, None]).squeeze(-1)
    # Two sums over 96 words in float32, in another order.
    assert torch.allclose(ours, expected, rtol=0, atol=1e-5)
    assert meter.bytes >= checkpoint.bytes - 96 * 48 * 4  # everything once, of the embedding only the rows


def test_tokens_and_layers_that_are_not_there_are_told(llama: Path) -> None:
    checkpoint = open_checkpoint(llama)
    with pytest.raises(InvalidValue, match="token 96 is outside"):
        entering_states(checkpoint, torch.tensor([96]), 0, "cpu", ReadMeter())
    with pytest.raises(InvalidValue, match="layer 3 is out of range"):
        entering_states(checkpoint, IDS, 3, "cpu", ReadMeter())


def test_learned_positions_end(tmp_path: Path) -> None:
    tiny(transformers.GPT2Config(**GPT2)).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert embedded(checkpoint, torch.zeros(32, dtype=torch.int64), "cpu", ReadMeter()).shape == (32, 48)
    with pytest.raises(InvalidValue, match="33 tokens, and the model has 32 positions"):
        embedded(checkpoint, torch.zeros(33, dtype=torch.int64), "cpu", ReadMeter())


def test_a_missing_head_is_told(llama: Path) -> None:
    checkpoint = rewritten(llama, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(FamilyMismatch, match=r"lm_head.weight is not in the files.*tied is False"):
        token_log_likelihoods(checkpoint, IDS, "cpu", ReadMeter())


@pytest.mark.parametrize("model_type", ["llama", "gemma", "gpt2", "gpt_neox", "t5", "umt5"])
def test_a_stored_head_is_the_head_whatever_the_config_says_of_a_tie(model_type: str, tmp_path: Path) -> None:
    row = BY_MODEL_TYPE[model_type]
    config = small_config(Case(model_type, (("tie_word_embeddings", True),)), row)
    text_to_text = model_type in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    loader = transformers.AutoModelForSeq2SeqLM if text_to_text else transformers.AutoModelForCausalLM
    loader.from_config(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    head = row.trunks[0].head
    assert head is not None
    assert head not in load_file(file)
    save_file(load_file(file) | {head: torch.randn(96, 48)}, file, {"format": "pt"})
    model = loader.from_pretrained(tmp_path).eval()
    read: list[Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _module, args: read.append(args[0]))
    more = {"decoder_input_ids": IDS} if text_to_text else {}
    with torch.no_grad():
        theirs = model(input_ids=IDS, use_cache=False, **more).logits
    checkpoint = open_checkpoint(tmp_path)
    assert require_head(checkpoint).name == head
    if checkpoint.require_usable().attention is not None:
        assert float((logits_of(checkpoint) - theirs).abs().max()) <= TOLERANCE
    assert torch.equal(functional.linear(read[0], load_file(file)[head]), theirs)


@pytest.mark.parametrize(
    ("family", "config", "told"),
    [
        ("llama", {"partial_rotary_factor": 0.5}, "turns 1 of each"),
        ("cohere", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "turns 1 of each"),
        ("deepseek_v3", {"partial_rotary_factor": 0.5}, "turns 1 of each"),
        ("chatglm", {"partial_rotary_factor": 1.0}, "turns 0.5 of each"),
    ],
)
def test_a_share_that_the_familys_code_does_not_read_is_refused(
    family: str, config: dict[str, Any], told: str, tmp_path: Path
) -> None:
    """transformers turns whole heads of them, other engines what is declared: nothing here takes a side."""
    checkpoint = open_checkpoint(tiny_checkpoint(family, tmp_path, config=config))
    with pytest.raises(FamilyMismatch, match=rf"partial_rotary_factor is .*the code of the family {family}.*{told}"):
        load_layer(checkpoint, checkpoint.layer_indices[0], "cpu", ReadMeter())


def test_a_share_that_turns_what_the_family_turns_is_no_fault(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama", tmp_path, config={"partial_rotary_factor": 1.0}))
    load_layer(checkpoint, 0, "cpu", ReadMeter())


def test_a_run_can_be_stopped_between_layers(llama: Path) -> None:
    seen: list[str] = []

    def progress(done: int, total: int, message: str) -> None:
        seen.append(f"{done}/{total} {message}")

    entering_states(open_checkpoint(llama), IDS, 2, "cpu", ReadMeter(), watch=Watch(progress))
    assert seen == ["0/2 layer 0", "1/2 layer 1"]
    with pytest.raises(ComputationCancelled):
        entering_states(open_checkpoint(llama), IDS, 2, "cpu", ReadMeter(), watch=Watch(cancelled=lambda: True))


def test_rows_without_attention_say_so(tmp_path: Path) -> None:
    assert any(row.attention is None for row in ARCHITECTURES.values())
    row: Architecture = BY_MODEL_TYPE["bloom"]
    assert row.attention is None
    config = {"hidden_size": 48, "n_head": 4, "n_layer": 2, "vocab_size": 96}
    tiny(transformers.BloomConfig(**config)).save_pretrained(tmp_path)
    with pytest.raises(FamilyMismatch, match="the attention of the family bloom is not read here"):
        load_layer(open_checkpoint(tmp_path), 0, "cpu", ReadMeter())
