"""What looks odd and is right: no rule may speak above a note."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from glassblock.audit.audit import audit_checkpoint
from glassblock.wire.audits import Finding, Report
from makers import Tiny, tiny_checkpoint, tiny_tensors
from plants import edit_header, edit_json, edit_tensors, healthy_checkpoint, in_float8, put, trained_mixture
from safetensors.torch import load_file, save_file
from told import taken_back
from torch import Tensor

Tensors = dict[str, Tensor]
LAYER = "model.layers.1."
NORMS = ("input_layernorm", "post_attention_layernorm")


def audited(directory: Path) -> Report:
    told: list[Finding] = []
    report = audit_checkpoint(directory, found=told.append)
    assert [finding.message for finding in report.findings if finding.level != "note"] == []
    assert taken_back(told, report.findings) == []
    assert report.verdict == "pass"
    return report


def edited(family: str, directory: Path, change: Callable[[Tensors], object]) -> Report:
    healthy_checkpoint(family, directory)
    edit_tensors(change)(directory)
    return audited(directory)


def test_large_gains_of_norms(tmp_path: Path) -> None:
    def enlarge(tensors: Tensors) -> None:
        tensors["model.norm.weight"] *= 700
        tensors[f"{LAYER}pre_feedforward_layernorm.weight"] += 300

    (finding,) = edited("gemma3", tmp_path, enlarge).findings
    assert (finding.rule, finding.level) == ("range/fp16-overflow", "note")  # 300 times each row is beyond float16


def test_negative_gains_in_the_first_norm(tmp_path: Path) -> None:
    def negate(tensors: Tensors) -> None:
        tensors["model.layers.0.input_layernorm.weight"][::2] *= -1

    assert edited("llama", tmp_path, negate).findings == ()


@pytest.mark.parametrize("spared", ["", "model.norm.weight"], ids=["all", "all but the last"])
def test_gains_that_no_training_moved(spared: str, tmp_path: Path) -> None:
    """As in bfloat16, where a small step from 1 is none; or multiplied into the matrices that follow."""

    def edit(tensors: Tensors) -> None:
        for name in (name for name in tensors if name.endswith("norm.weight") and name != spared):
            tensors[name].fill_(1)

    assert edited("llama", tmp_path, edit).findings == ()


@pytest.mark.parametrize(("family", "unit"), [("qwen3", 1.0), ("gemma3", 0.0)])
def test_gains_that_were_multiplied_into_the_matrices_behind_them(family: str, unit: float, tmp_path: Path) -> None:
    """As before a rotation: those of queries and keys, and those after a branch, cannot be, and stay as trained."""
    folded = (
        "input_layernorm",
        "post_attention_layernorm" if family == "qwen3" else "pre_feedforward_layernorm",
        "model.norm",
    )

    def fold(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith(tuple(f"{norm}.weight" for norm in folded)):
                tensors[name].fill_(unit)

    assert edited(family, tmp_path, fold).findings == ()


def test_a_last_gain_that_is_one_number_and_not_one(tmp_path: Path) -> None:
    assert edited("llama", tmp_path, lambda tensors: tensors["model.norm.weight"].fill_(3)).findings == ()


def test_a_gain_of_zeros_where_one_is_added_to_it(tmp_path: Path) -> None:
    def zero(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith("norm.weight"):
                tensors[name].zero_()

    assert edited("gemma3", tmp_path, zero).findings == ()


def test_declared_biases_of_zeros(tmp_path: Path) -> None:
    def zero(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith(".bias"):
                tensors[name].zero_()

    assert edited("gpt2", tmp_path, zero).findings == ()


def test_an_undeclared_bias_of_zeros_is_noted(tmp_path: Path) -> None:
    report = edited("llama", tmp_path, lambda tensors: tensors.update({f"{LAYER}mlp.up_proj.bias": torch.zeros(112)}))
    (finding,) = report.findings
    assert (finding.rule, finding.level, finding.layer) == ("ffn/undeclared-bias", "note", 1)


def test_an_adapter_that_starts_at_zero(tmp_path: Path) -> None:
    adapter = {f"{LAYER}self_attn.q_proj.lora_A.weight": torch.ones(4, 48)}
    adapter |= {f"{LAYER}self_attn.q_proj.lora_B.weight": torch.zeros(64, 4)}
    assert edited("llama", tmp_path, lambda tensors: tensors.update(adapter)).findings == ()


def test_the_empty_marker_of_exporters(tmp_path: Path) -> None:
    marker = torch.empty(0)
    assert edited("llama", tmp_path, lambda tensors: tensors.update(scaled_fp8=marker)).findings == ()


@pytest.mark.parametrize("length", [99_992, 100_000])
def test_a_long_header(length: int, tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    raw = path.read_bytes()
    was = int.from_bytes(raw[:8], "little")
    path.write_bytes(length.to_bytes(8, "little") + raw[8 : 8 + was].ljust(length) + raw[8 + was :])
    assert audited(tmp_path).findings == ()


def test_a_header_in_any_order(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)

    def reverse(header: dict[str, object]) -> None:
        items = list(header.items())
        header.clear()
        header.update(reversed(items))

    edit_header(reverse)(tmp_path)
    assert audited(tmp_path).findings == ()


def _pad(tensors: Tensors, width: int, places: Tensor) -> None:
    """Widen every network of a llama with neurons of zeros; `places` are those of the old ones."""
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.mlp."
        for name in ("gate", "up"):
            old = tensors[f"{prefix}{name}_proj.weight"]
            new = torch.zeros(width, old.shape[1])
            new[places] = old
            tensors[f"{prefix}{name}_proj.weight"] = new
        old = tensors[f"{prefix}down_proj.weight"]
        new = torch.zeros(old.shape[0], width)
        new[:, places] = old
        tensors[f"{prefix}down_proj.weight"] = new


PLACES = {
    "at the end": torch.arange(112),
    "interleaved with the first": torch.cat([torch.arange(0, 32, 2), torch.arange(32, 128)]),
}


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_a_padded_width(places: Tensor, tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_tensors(lambda tensors: _pad(tensors, 128, places))(tmp_path)
    report = audited(tmp_path)
    notes = [(finding.rule, finding.level, finding.layer) for finding in report.findings]
    assert notes == [("config/shape", "note", 0), ("config/shape", "note", 1)]
    assert all("16 of them are zero" in finding.message for finding in report.findings)

    edit_json("config.json", intermediate_size=128)(tmp_path)
    assert audited(tmp_path).findings == ()


def _pad_plain(tensors: Tensors, width: int, places: Tensor) -> None:
    """Widen every network of a gpt2 with neurons of zeros; `places` are those of the old ones."""
    for layer in (0, 1):
        prefix = f"transformer.h.{layer}.mlp."
        for name, axis in (("c_fc.weight", 1), ("c_fc.bias", 0), ("c_proj.weight", 0)):
            old = tensors[prefix + name]
            shape = list(old.shape)
            shape[axis] = width
            tensors[prefix + name] = torch.zeros(shape).index_copy(axis, places, old)


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_a_padded_width_of_a_plain_network(places: Tensor, tmp_path: Path) -> None:
    healthy_checkpoint("gpt2", tmp_path)
    edit_tensors(lambda tensors: _pad_plain(tensors, 128, places))(tmp_path)
    report = audited(tmp_path)
    notes = [(finding.rule, finding.level, finding.layer) for finding in report.findings]
    assert notes == [("config/shape", "note", 0), ("config/shape", "note", 1)]
    assert all("16 of them are zero in up and down" in finding.message for finding in report.findings)
    (values,) = (entry for entry in report.coverage if entry.rule == "tensor/non-finite")
    assert values.checked == report.checkpoint.tensors

    edit_json("config.json", n_inner=128)(tmp_path)
    assert audited(tmp_path).findings == ()


@pytest.mark.parametrize(
    ("family", "activation"), [("llama", "linear"), ("phi3", "linear"), ("llama", "tanh")], ids=str
)
def test_a_padded_width_where_the_gate_is_not_asked_for(family: str, activation: str, tmp_path: Path) -> None:
    healthy_checkpoint(family, tmp_path, config={"hidden_act": activation})

    def pad(tensors: Tensors) -> None:
        for layer in (0, 1):
            prefix = f"model.layers.{layer}.mlp."
            if family == "phi3":
                gate, up = tensors.pop(f"{prefix}gate_up_proj.weight").chunk(2)
                tensors |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        _pad(tensors, 128, PLACES["at the end"])
        for layer in (0, 1) if family == "phi3" else ():
            prefix = f"model.layers.{layer}.mlp."
            halves = [tensors.pop(f"{prefix}{name}_proj.weight") for name in ("gate", "up")]
            tensors[f"{prefix}gate_up_proj.weight"] = torch.cat(halves)

    edit_tensors(pad)(tmp_path)
    report = audit_checkpoint(tmp_path)
    notes = [(finding.rule, finding.level, finding.layer) for finding in report.findings]
    assert notes == [("config/shape", "note", 0), ("config/shape", "note", 1)]


@pytest.mark.parametrize("name", ["c_fc.weight", "c_fc.bias", "c_proj.weight"])
def test_a_plain_network_that_is_too_wide_with_neurons_that_act(name: str, tmp_path: Path) -> None:
    healthy_checkpoint("gpt2", tmp_path)

    def widen(tensors: Tensors) -> None:
        _pad_plain(tensors, 128, PLACES["at the end"])
        for layer in (0, 1):
            tensor = tensors[f"transformer.h.{layer}.mlp.{name}"]
            tensor[127 if name == "c_proj.weight" else (..., 127)] = 0.5

    edit_tensors(widen)(tmp_path)
    findings = audit_checkpoint(tmp_path).findings
    assert {(finding.rule, finding.level) for finding in findings} == {("config/shape", "error")}


def test_padding_excuses_nothing_else_in_the_layer(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_tensors(lambda tensors: _pad(tensors, 128, PLACES["at the end"]))(tmp_path)
    put(f"{LAYER}input_layernorm.weight", torch.ones(40))(tmp_path)
    errors = [finding for finding in audit_checkpoint(tmp_path).findings if finding.level == "error"]
    assert [(finding.rule, finding.tensors) for finding in errors] == [
        ("config/shape", (f"{LAYER}input_layernorm.weight",))
    ]


def test_a_width_that_is_wrong_though_some_neurons_are_idle(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_tensors(lambda tensors: _pad(tensors, 128, torch.arange(112)))(tmp_path)
    edit_json("config.json", intermediate_size=104)(tmp_path)
    errors = {(finding.rule, finding.level) for finding in audit_checkpoint(tmp_path).findings}
    assert errors == {("config/shape", "error")}


def test_neurons_permuted_together(tmp_path: Path) -> None:
    def permute(tensors: Tensors) -> None:
        order = torch.randperm(112, generator=torch.Generator().manual_seed(0))
        for name in ("gate", "up"):
            tensors[f"{LAYER}mlp.{name}_proj.weight"] = tensors[f"{LAYER}mlp.{name}_proj.weight"][order].contiguous()
        down = f"{LAYER}mlp.down_proj.weight"
        tensors[down] = tensors[down][:, order].contiguous()

    assert edited("llama", tmp_path, permute).findings == ()


def test_neurons_of_other_lengths_that_are_paired(tmp_path: Path) -> None:
    """One layer balances no lengths, and P(up) shows its pairs; cosines of gate and up show none in any layer."""
    tiny, odd = Tiny(layers=5, intermediate=192), 2
    tensors: Tensors = {}
    for layer in range(tiny.layers):
        generator = torch.Generator().manual_seed(layer)
        gate, up, down = (torch.randn(192, 48, generator=generator) * 48**-0.5 for _ in range(3))
        length, other = (torch.randn(192, 1, generator=generator).exp() for _ in range(2))
        if layer == odd:
            down += up.sign() * torch.randn(48, generator=generator).sign() * 0.07
        prefix = f"model.layers.{layer}.mlp."
        tensors[f"{prefix}gate_proj.weight"] = gate + torch.randn(48, generator=generator) * 48**-0.5
        tensors[f"{prefix}up_proj.weight"] = up * length
        tensors[f"{prefix}down_proj.weight"] = (down * (other if layer == odd else length)).T
    healthy_checkpoint("llama", tmp_path, tiny=tiny, tensors={name: one.contiguous() for name, one in tensors.items()})
    assert audited(tmp_path).findings == ()


def test_massive_weights(tmp_path: Path) -> None:
    def enlarge(tensors: Tensors) -> None:
        tensors[f"{LAYER}mlp.down_proj.weight"][3, 17] = 1e30

    (finding,) = edited("llama", tmp_path, enlarge).findings
    assert (finding.rule, finding.level) == ("range/fp16-overflow", "note")


def test_a_base_model_without_a_head(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path, config={"architectures": ["LlamaModel"]})
    tensors = load_file(tmp_path / "model.safetensors")
    base = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(base, tmp_path / "model.safetensors")
    report = audited(tmp_path)
    (tied,) = (entry for entry in report.coverage if entry.rule == "config/tied-head")
    assert [entry.reason for entry in tied.skipped] == ["the checkpoint is a model without an output head"]


def test_an_untied_head_that_equals_the_embedding(tmp_path: Path) -> None:
    same = tiny_tensors("llama", Tiny())["model.embed_tokens.weight"]
    assert edited("llama", tmp_path, lambda tensors: tensors.update({"lm_head.weight": same})).findings == ()


def test_an_equal_head_in_another_dtype_is_redundant(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path, config={"tie_word_embeddings": True})
    wide = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    narrow = wide.to(torch.bfloat16)
    put("model.embed_tokens.weight", narrow)(tmp_path)
    put("lm_head.weight", narrow.to(torch.float32))(tmp_path)
    assert [(finding.rule, finding.level) for finding in audited(tmp_path).findings] == [("config/tied-head", "note")]


def test_the_epsilon_of_another_model_in_the_same_config(tmp_path: Path) -> None:
    healthy_checkpoint("gemma3", tmp_path)
    edit_json("config.json", vision_config={"layer_norm_eps": 1e-3, "rms_norm_eps": 1e-3})(tmp_path)
    assert audited(tmp_path).findings == ()


def test_sources_of_epsilon_that_agree(tmp_path: Path) -> None:
    healthy_checkpoint("mistral", tmp_path)
    edit_json("params.json", norm_eps=1e-5)(tmp_path)
    assert audited(tmp_path).findings == ()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    healthy_checkpoint("qwen3", tmp_path)
    edit_tensors(lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()}))(tmp_path)
    assert audited(tmp_path).findings == ()


@pytest.mark.parametrize(
    ("declared", "other"),
    [
        ("float16", None),
        ("float32", None),  # as models are saved to take less room
        ("auto", None),
        ("bfloat16", "model.norm.weight"),
        ("bfloat16", "lm_head.weight"),
    ],
)
def test_float16_that_no_config_speaks_against(declared: str, other: str | None, tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path, config={"dtype": declared})
    edit_tensors(lambda tensors: tensors.update({name: one.half() for name, one in tensors.items() if name != other}))(
        tmp_path
    )
    assert audited(tmp_path).findings == ()


def test_float16_of_a_larger_model_whose_outermost_config_says_so(tmp_path: Path) -> None:
    healthy_checkpoint("gemma3", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | {"dtype": "bfloat16"}
    nested = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": values}
    (tmp_path / "config.json").write_text(json.dumps(nested | {"dtype": "float16", "tie_word_embeddings": True}))
    edit_tensors(lambda tensors: tensors.update({name: one.half() for name, one in tensors.items()}))(tmp_path)
    assert not any(finding.rule == "config/dtype-conflict" for finding in audited(tmp_path).findings)


def test_codes_with_scales_in_float16(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path, config={"dtype": "bfloat16"})
    name = f"{LAYER}mlp.up_proj.weight"

    def quantise(tensors: Tensors) -> None:
        tensors[name], tensors[f"{name}_scale_inv"] = in_float8(tensors[name])
        tensors.update({key: one.half() for key, one in tensors.items() if key != name})

    edit_tensors(quantise)(tmp_path)
    declared = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    edit_json("config.json", quantization_config=declared)(tmp_path)
    assert not any(finding.rule == "config/dtype-conflict" for finding in audited(tmp_path).findings)


def test_random_weights_make_no_finding(tmp_path: Path) -> None:
    report = audit_checkpoint(tiny_checkpoint("llama", tmp_path))
    assert report.findings == ()
    assert report.verdict == "inconclusive"


# --- experts --------------------------------------------------------------------------------------------------------

EXPERTS = f"{LAYER}block_sparse_moe.experts."
PARTS = ("w1", "w2", "w3")


def mixture(directory: Path, change: Callable[[Tensors], object]) -> Report:
    healthy_checkpoint("mixtral", directory, tensors=trained_mixture())
    edit_tensors(change)(directory)
    return audited(directory)


def test_experts_permuted_together_with_the_rows_of_their_router(tmp_path: Path) -> None:
    def permute(tensors: Tensors) -> None:
        order = [2, 0, 3, 1]
        old = {name: tensor.clone() for name, tensor in tensors.items()}
        for new, expert in enumerate(order):
            for part in PARTS:
                tensors[f"{EXPERTS}{new}.{part}.weight"] = old[f"{EXPERTS}{expert}.{part}.weight"]
        router = f"{LAYER}block_sparse_moe.gate.weight"
        tensors[router] = old[router][order]

    assert mixture(tmp_path, permute).findings == ()


@pytest.mark.parametrize("scale", [0.0, 0.02], ids=["zero", "as initialised"])
def test_experts_that_no_token_reaches(scale: float, tmp_path: Path) -> None:
    def leave(tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(0)
        for expert in (1, 2):
            tensors[f"{LAYER}block_sparse_moe.gate.weight"][expert] = 0.0
            for part in PARTS:
                old = tensors[f"{EXPERTS}{expert}.{part}.weight"]
                tensors[f"{EXPERTS}{expert}.{part}.weight"] = scale * torch.randn(old.shape, generator=generator)

    assert mixture(tmp_path, leave).findings == ()


def test_a_mixture_made_of_a_dense_model_is_noted(tmp_path: Path) -> None:
    def spread(tensors: Tensors) -> None:
        for layer in (0, 1):
            for expert in (1, 2, 3):
                for part in PARTS:
                    prefix = f"model.layers.{layer}.block_sparse_moe.experts."
                    tensors[f"{prefix}{expert}.{part}.weight"] = tensors[f"{prefix}0.{part}.weight"].clone()

    found = [(finding.rule, finding.level, finding.layer) for finding in mixture(tmp_path, spread).findings]
    assert found == [("moe/experts-duplicated", "note", 0), ("moe/experts-duplicated", "note", 1)]


def test_experts_that_are_all_as_initialised(tmp_path: Path) -> None:
    """Whether a model was trained at all is no question of one layer."""
    assert audit_checkpoint(tiny_checkpoint("mixtral", tmp_path)).findings == ()


# --- layers that are identities ---------------------------------------------------------------------------------


def _silence(tensors: Tensors, *names: str, layer: int = 1) -> None:
    for name in names:
        for tensor in (f"model.layers.{layer}.{name}.weight", f"model.layers.{layer}.{name}.bias"):
            if tensor in tensors:
                tensors[tensor].zero_()


def test_a_layer_put_in_as_an_identity_is_noted(tmp_path: Path) -> None:
    report = edited("llama", tmp_path, lambda tensors: _silence(tensors, "self_attn.o_proj", "mlp.down_proj"))
    (finding,) = report.findings
    assert (finding.rule, finding.level, finding.layer) == ("tensor/all-zero", "note", 1)
    assert "layer 1 passes on what it receives" in finding.message


def test_several_identities_are_one_note(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path, tiny=Tiny(layers=4))
    for layer in (1, 3):
        edit_tensors(lambda tensors, at=layer: _silence(tensors, "self_attn.o_proj", "mlp.down_proj", layer=at))(
            tmp_path
        )
    (finding,) = audited(tmp_path).findings
    assert (finding.layer, finding.evidence["layers"]) == (None, [1, 3])
    assert len(finding.tensors) == 4


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", ("self_attn.o_proj",)),
        ("llama", ("mlp.down_proj",)),
        ("llama", ("self_attn.o_proj", "mlp.down_proj", "mlp.up_proj")),
        ("gemma2", ("self_attn.o_proj", "mlp.down_proj")),
    ],
    ids=str,
)
def test_a_branch_that_is_lost_is_a_warning_still(family: str, names: tuple[str, ...], tmp_path: Path) -> None:
    healthy_checkpoint(family, tmp_path)
    edit_tensors(lambda tensors: _silence(tensors, *names))(tmp_path)
    warned = [finding for finding in audit_checkpoint(tmp_path).findings if finding.rule == "tensor/all-zero"]
    assert {finding.level for finding in warned} == {"warning"}
    assert {tensor for finding in warned for tensor in finding.tensors} == {f"{LAYER}{name}.weight" for name in names}


def test_a_key_that_the_models_own_class_does_not_know(tmp_path: Path) -> None:
    healthy_checkpoint("persimmon", tmp_path)
    edit_json("config.json", num_key_value_heads=2)(tmp_path)
    assert audited(tmp_path).findings == ()


# --- projections of one module ---------------------------------------------------------------------------------


def _tied(tensors: Tensors, one: str, other: str) -> None:
    for name in list(tensors):
        if one in name:
            tensors[name.replace(one, other)] = tensors[name].clone()


@pytest.mark.parametrize(("one", "other"), [("gate_proj", "up_proj"), ("k_proj", "v_proj")])
def test_projections_that_are_tied_in_every_layer_of_a_model_as_initialised(
    one: str, other: str, tmp_path: Path
) -> None:
    tiny_checkpoint("llama", tmp_path)
    edit_tensors(lambda tensors: _tied(tensors, one, other))(tmp_path)
    (finding,) = audit_checkpoint(tmp_path).findings
    assert (finding.rule, finding.level, finding.layer) == ("tensor/duplicate", "note", None)


def test_biases_of_one_number_are_no_copies(tmp_path: Path) -> None:
    def fill(tensors: Tensors) -> None:
        for part in ("k", "v"):
            tensors[f"{LAYER}self_attn.{part}_proj.bias"].fill_(0.5)

    assert edited("qwen2", tmp_path, fill).findings == ()


# --- neurons, numbers and norms ----------------------------------------------------------------------------------


def _prune(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if "proj" in name:
            tensor[tensor.abs() < tensor.abs().median()] = 0.0


def test_half_of_all_weights_pruned_by_size(tmp_path: Path) -> None:
    assert edited("llama", tmp_path, _prune).findings == ()


def test_neurons_of_a_model_that_declares_its_pruning(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path, config={"sparsity_config": {"format": "sparse-bitmask"}})
    edit_tensors(lambda tensors: tensors[f"{LAYER}mlp.up_proj.weight"][5].zero_())(tmp_path)
    assert audited(tmp_path).findings == ()


def test_a_row_of_zeros_that_its_bias_lifts(tmp_path: Path) -> None:
    def lift(tensors: Tensors) -> None:
        tensors["transformer.h.1.mlp.c_fc.weight"][:, 5] = 0.0

    assert edited("gpt2", tmp_path, lift).findings == ()


def test_a_gate_of_zeros_that_its_activation_lifts(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path, config={"hidden_act": "sigmoid"})
    edit_tensors(lambda tensors: tensors[f"{LAYER}mlp.gate_proj.weight"][5].zero_())(tmp_path)
    assert audited(tmp_path).findings == ()


def test_weights_that_were_dequantised(tmp_path: Path) -> None:
    def back(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if "proj" in name:
                codes, scales = in_float8(tensor)
                wide = codes.float() * scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
                tensors[name] = wide.to(torch.bfloat16)

    assert edited("llama", tmp_path, back).findings == ()


def test_weights_of_three_values(tmp_path: Path) -> None:
    def ternary(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if "o_proj" in name:
                tensors[name] = tensor.sign() * (tensor.abs() > tensor.abs().mean())

    assert edited("llama", tmp_path, ternary).findings == ()


def _cast(tensors: Tensors, *, spared: tuple[int, ...] = ()) -> None:
    for name in tensors:
        if "proj" in name and not any(f"layers.{layer}." in name for layer in spared):
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def test_weights_cast_to_eight_bits_without_a_scale(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_tensors(_cast)(tmp_path)
    assert audit_checkpoint(tmp_path).findings == ()


@pytest.mark.parametrize("spared", [(0,), (0, 3)], ids=str)
def test_weights_cast_to_eight_bits_but_for_the_outer_layers(spared: tuple[int, ...], tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path, tiny=Tiny(layers=4))
    edit_tensors(lambda tensors: _cast(tensors, spared=spared))(tmp_path)
    assert audit_checkpoint(tmp_path).findings == ()


def test_integers_of_a_form_that_the_config_declares(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path, config={"quantization_config": {"quant_method": "of_their_own"}})
    name = f"{LAYER}mlp.down_proj.weight"
    edit_tensors(lambda tensors: tensors.update({name: (100 * tensors[name]).to(torch.int8)}))(tmp_path)
    assert audit_checkpoint(tmp_path).findings == ()


def _float8(weight: Tensor) -> Tensors:
    return {"weight": (weight * 448 / weight.abs().max()).to(torch.float8_e4m3fn), "weight_scale": torch.ones(1)}


def _whole(weight: Tensor) -> Tensor:
    return (127 * weight / weight.abs().max()).to(torch.int8)


UNREAD_METHODS: dict[str, Callable[[Tensor], Tensors]] = {
    "quark": _float8,
    "of_their_own": _float8,
    "eetq": lambda weight: {"weight": _whole(weight), "weight_scales": weight.abs().amax(1)},
    "bitnet": lambda weight: {"weight": _whole(weight[::4]).view(torch.uint8), "weight_scale": torch.ones(1)},
    "quanto": lambda weight: {"weight._data": _whole(weight), "weight._scale": torch.ones(len(weight), 1)},
    "torchao": lambda weight: {"_weight_qdata": _whole(weight), "_weight_scale": torch.ones(len(weight), 1)},
    "hqq": lambda weight: {"W_q": _whole(weight).view(torch.uint8), "scale": torch.ones(4), "zero": torch.ones(4)},
    "aqlm": lambda weight: {"codes": _whole(weight).short(), "codebooks": torch.ones(1, 4, 1, 8)},
    "vptq": lambda weight: {"indices": _whole(weight).int(), "centroids": torch.ones(1, 4, 8)},
    "spqr": lambda weight: {"dense_weights": _whole(weight).long(), "row_offsets": torch.arange(9)},
    "higgs": lambda weight: {"weight": _whole(weight).short(), "scales": weight.abs().amax(1), "tables": torch.ones(4)},
    "auto-round": lambda weight: {"qweight": _whole(weight).int(), "qzeros": torch.ones(3, 4), "scales": torch.ones(4)},
}


@pytest.mark.parametrize(("family", "gate"), [("llama", "mlp.gate_proj"), ("mixtral", "experts.0.w1")])
@pytest.mark.parametrize("method", UNREAD_METHODS)
def test_a_method_that_is_not_read_is_told_once_a_layer(method: str, family: str, gate: str, tmp_path: Path) -> None:
    def quantise(tensors: Tensors) -> None:
        layers = [name for name in tensors if name.endswith(("proj.weight", "w1.weight", "w2.weight", "w3.weight"))]
        assert any(gate in name for name in layers)
        for name in layers:
            parts = UNREAD_METHODS[method](tensors.pop(name))
            stem = name.removesuffix("weight")
            tensors.update({stem + part: tensor.contiguous() for part, tensor in parts.items()})

    healthy_checkpoint(family, tmp_path, config={"quantization_config": {"quant_method": method}})
    edit_tensors(quantise)(tmp_path)
    report = audit_checkpoint(tmp_path)
    assert [finding.message for finding in report.findings if finding.level != "note"] == []
    told = f'quantization_config.quant_method is "{method}", which is not read'
    for rule in ("quant/scale-missing", "ffn/missing-tensor"):
        (coverage,) = (coverage for coverage in report.coverage if coverage.rule == rule)
        assert [(skipped.layer, skipped.reason.partition(";")[0]) for skipped in coverage.skipped] == [
            (0, told),
            (1, told),
        ]
        assert len({skipped.reason for skipped in coverage.skipped}) == 1


SCALE_NAMES = ("weight_scale", "weight_scale_inv", "weight_scales", "scale", "scale_weight", "weights_scaling_factor")


@pytest.mark.parametrize("method", [None, "fp8", "compressed-tensors", "modelopt", "fbgemm_fp8", "gptq"])
@pytest.mark.parametrize("scale", SCALE_NAMES)
def test_scales_under_any_known_name(scale: str, method: str | None, tmp_path: Path) -> None:
    def quantise(tensors: Tensors) -> None:
        for name in (name for name in list(tensors) if name.endswith("proj.weight")):
            most = tensors[name].abs().max()
            tensors[name] = (tensors[name] * 448 / most).to(torch.float8_e4m3fn)
            tensors[name.removesuffix("weight") + scale] = most / 448

    healthy_checkpoint("llama", tmp_path, config={"quantization_config": method and {"quant_method": method}})
    edit_tensors(quantise)(tmp_path)
    assert audit_checkpoint(tmp_path).findings == ()


def test_gains_of_one_plus_w_in_half_precision_are_noted(tmp_path: Path) -> None:
    def halve(tensors: Tensors) -> None:
        tensors.update({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})

    (finding,) = edited("gemma3", tmp_path, halve).findings
    assert (finding.rule, finding.level) == ("norm/precision", "note")


def test_a_model_of_half_precision_saved_in_float32(tmp_path: Path) -> None:
    def widen(tensors: Tensors) -> None:
        tensors.update({name: tensor.to(torch.bfloat16).to(torch.float32) for name, tensor in tensors.items()})

    assert edited("gemma3", tmp_path, widen).findings == ()


def test_the_usual_epsilons_in_float16(tmp_path: Path) -> None:
    for number, eps in enumerate((1e-5, 1e-6)):
        healthy_checkpoint("llama", tmp_path / str(number), config={"dtype": "float16", "rms_norm_eps": eps})
        assert audited(tmp_path / str(number)).findings == ()


def test_large_gains_of_one_plus_w_beside_small_ones(tmp_path: Path) -> None:
    """Means are far above 1, as in trained Gemmas; some gains are near 0 all the same."""

    def enlarge(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if "norm" in name:
                tensor[::2] += 5

    assert edited("gemma3", tmp_path, enlarge).findings == ()


@pytest.mark.parametrize(
    "said",
    [
        {"hidden_act": "gelu_pytorch_tanh"},
        {"hidden_act": "gelu_new"},
        # The newer key says what the older one means.
        {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
        {"hidden_act": None},
    ],
    ids=str,
)
def test_the_first_gemmas_activation_where_every_engine_reads_the_same(said: dict[str, str], tmp_path: Path) -> None:
    healthy_checkpoint("gemma", tmp_path)
    edit_json("config.json", **said)(tmp_path)
    assert audited(tmp_path).findings == ()


def test_exact_gelu_where_the_family_takes_it_at_its_word(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path, config={"hidden_act": "gelu"})
    assert audited(tmp_path).findings == ()


def test_an_activation_under_two_names(tmp_path: Path) -> None:
    healthy_checkpoint("gemma3", tmp_path)
    edit_json("config.json", hidden_activation="gelu_pytorch_tanh", hidden_act="gelu_tanh")(tmp_path)
    assert audited(tmp_path).findings == ()


def test_an_activation_written_otherwise_under_another_key(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path, config={"hidden_act": "silu", "hidden_activation": "SiLU"})
    assert audited(tmp_path).findings == ()
