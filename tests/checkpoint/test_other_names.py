"""Layers under the names of llama.cpp and litgpt, held against the modules of transformers that they were renamed from.

Which norms a layer has says how it is wired; what the names do not say, such as Gemma's activation, is another row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from glassblock.checkpoint.architectures import ARCHITECTURES, BY_MODEL_TYPE
from glassblock.checkpoint.embedding_rows import embedding_rows
from glassblock.checkpoint.family import NormRow
from glassblock.checkpoint.fits import fitting_families
from glassblock.checkpoint.layer_map import layer_tensors, row_at, shape_faults
from glassblock.checkpoint.layers import load_feed_forward, load_norm, load_wiring
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import FamilyMismatch
from glassblock.numerics.block import run_block
from glassblock.numerics.wiring import Placement
from reference_models import TOKENS, Case, Reference, build
from safetensors.torch import load_file, save_file
from torch import Tensor

TOLERANCE = 2e-6
_GGUF_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
_GGUF_PRE = {**_GGUF, "post_attention_layernorm": "ffn_norm"}
_GGUF_AFTER = {
    **_GGUF,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GGUF_GLM4 = {
    **_GGUF_PRE,
    "mlp.gate_up_proj": "ffn_up",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_LITGPT_OUTER = {
    "model.embed_tokens.weight": "transformer.wte.weight",
    "model.norm.weight": "transformer.ln_f.weight",
    "lm_head.weight": "lm_head.weight",
}
_LITGPT = {
    "self_attn.q_norm": "attn.norm_q",
    "self_attn.k_norm": "attn.norm_k",
    "mlp.gate_proj": "mlp.fc_1",
    "mlp.up_proj": "mlp.fc_2",
    "mlp.down_proj": "mlp.proj",
    "input_layernorm": "norm_1",
}
_LITGPT_PRE = {**_LITGPT, "post_attention_layernorm": "norm_2"}
_LITGPT_AFTER = {
    **_LITGPT,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "norm_2",
    "post_feedforward_layernorm": "post_mlp_norm",
}


@dataclass(frozen=True)
class Renamed:
    """A model of transformers under other names.

    Attributes:
        model_type: The model.
        family: The row that reads it then.
        names: Names relative to a layer, without `.weight`; what is not in it is left out.
        eps: The epsilon that the row has.
        placement: How its layers are wired.
        folded: What is added to the gains of norms, as llama.cpp's conversion does it.
    """

    model_type: str
    family: str
    names: Mapping[str, str]
    eps: float
    placement: Placement
    folded: float = 0.0

    def __str__(self) -> str:
        return f"{self.model_type} as {self.family}"


CASES = (
    Renamed("llama", "gguf", _GGUF_PRE, 1e-5, Placement.PRE),
    Renamed("qwen3", "gguf", _GGUF_PRE, 1e-5, Placement.PRE),
    Renamed("llama", "gguf", {**_GGUF, "post_attention_layernorm": "post_attention_norm"}, 1e-5, Placement.PRE),
    Renamed("olmo2", "gguf", _GGUF_AFTER, 1e-5, Placement.BRANCH_OUTPUT),
    Renamed("phi3", "gguf_fused", _GGUF_GLM4, 1e-5, Placement.PRE),
    Renamed("glm4", "gguf_fused", _GGUF_GLM4, 1e-5, Placement.SANDWICH),
    Renamed("arcee", "gguf_plain", _GGUF_PRE, 1e-5, Placement.PRE),
    Renamed("gemma", "gguf_gemma", _GGUF_PRE, 1e-6, Placement.PRE, folded=1.0),
    Renamed("gemma2", "gguf_gemma", _GGUF_AFTER, 1e-6, Placement.SANDWICH, folded=1.0),
    Renamed("gemma3_text", "gguf_gemma", _GGUF_AFTER, 1e-6, Placement.SANDWICH, folded=1.0),
    Renamed("llama", "litgpt", _LITGPT_PRE, 1e-5, Placement.PRE),
    Renamed("qwen3", "litgpt", _LITGPT_PRE, 1e-5, Placement.PRE),
    Renamed("olmo2", "litgpt", _LITGPT_AFTER, 1e-5, Placement.BRANCH_OUTPUT),
    Renamed("gemma", "litgpt_gemma", _LITGPT_PRE, 1e-5, Placement.PRE),
    Renamed("gemma2", "litgpt_gemma", _LITGPT_AFTER, 1e-5, Placement.SANDWICH),
    Renamed("gemma3_text", "litgpt_gemma", _LITGPT_AFTER, 1e-5, Placement.SANDWICH),
)


@pytest.fixture(scope="module", params=CASES, ids=str)
def renamed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Renamed, Reference, Checkpoint]:
    case: Renamed = request.param
    changes = (("rms_norm_eps", case.eps),)
    model = build(Case(case.model_type, changes), BY_MODEL_TYPE[case.model_type], tmp_path_factory.mktemp("model"))
    file = tmp_path_factory.mktemp("renamed") / "model.safetensors"
    save_file(under_other_names(case, load_file(model.checkpoint.path / "model.safetensors")), file)
    return case, model, open_checkpoint(file, family=case.family)


def under_other_names(case: Renamed, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    gguf = case.family.startswith("gguf")
    outer, layers = (_GGUF_OUTER, "blk.") if gguf else (_LITGPT_OUTER, "transformer.h.")
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        value = tensor + case.folded if "norm" in name else tensor
        if name in outer:
            found[outer[name]] = value
        elif name.startswith("model.layers."):
            layer, _, relative = name.removeprefix("model.layers.").partition(".")
            new = case.names.get(relative.removesuffix(".weight"))
            found |= {} if new is None else {f"{layers}{layer}.{new}.weight": value}
    return found


def test_blocks_are_the_modules(renamed: tuple[Renamed, Reference, Checkpoint]) -> None:
    case, model, checkpoint = renamed
    assert shape_faults(checkpoint) == ()
    for layer in checkpoint.layer_indices:
        assert row_at(checkpoint, layer).placement is case.placement
        module = model.layer(layer)
        first = module.mlp if case.placement is Placement.BRANCH_OUTPUT else model.norm(in_front(model, layer), layer)
        network = load_feed_forward(checkpoint, layer, "cpu", ReadMeter())
        ours = run_block(model.calls[first].input[0], network, load_wiring(checkpoint, layer, "cpu", ReadMeter()))
        theirs = model.calls[module].output[0]
        assert float((ours.output - theirs).abs().max() / theirs.abs().max()) <= TOLERANCE


def in_front(model: Reference, layer: int) -> NormRow:
    norm = layer_tensors(model.checkpoint, layer).row.norm("ffn_in")
    assert norm is not None
    return norm


def test_norms_are_the_modules_bit_for_bit(renamed: tuple[Renamed, Reference, Checkpoint]) -> None:
    _, model, checkpoint = renamed
    places = [(None, "final"), *((0, norm.role) for norm in layer_tensors(checkpoint, 0).row.norms)]
    own = model.checkpoint.require_usable()
    for layer, role in places:
        if role == "final" and layer is not None:
            continue
        ours = load_norm(checkpoint, layer, role, "cpu", ReadMeter())
        theirs = own.norm(role)
        assert theirs is not None
        # Where these names mean another order of operations, the two are one in float32 alone.
        dtype = torch.bfloat16 if ours.kind.name == theirs.kind else torch.float32
        module = model.norm(theirs, layer)
        x = torch.randn(64, ours.width or model.width, generator=torch.Generator().manual_seed(5)).to(dtype)
        with torch.no_grad():
            expected = module.to(dtype)(x)
        module.to(torch.float32)
        assert torch.equal(ours.to(dtype)(x), expected), role


def test_embedding_rows_are_what_the_first_layer_reads(renamed: tuple[Renamed, Reference, Checkpoint]) -> None:
    _, model, checkpoint = renamed
    ours = embedding_rows(checkpoint, TOKENS, "cpu", ReadMeter())
    assert torch.equal(ours.x, model.calls[model.layer(0)].input[0])


def test_the_names_alone_fit_the_row(renamed: tuple[Renamed, Reference, Checkpoint]) -> None:
    case, _, checkpoint = renamed
    fits = {fit.family: fit for fit in fitting_families(checkpoint)}
    assert fits[case.family].fits, fits[case.family].why


@pytest.mark.parametrize(("family", "gemma"), [("gguf", "gguf_gemma"), ("litgpt", "litgpt_gemma")])
def test_four_norms_are_gemmas_and_not_run_as_llamas(family: str, gemma: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.family == gemma and case.model_type == "gemma2")
    model = build(Case("gemma2"), BY_MODEL_TYPE["gemma2"], tmp_path / "model")
    file = tmp_path / "model.safetensors"
    save_file(under_other_names(case, load_file(model.checkpoint.path / "model.safetensors")), file)
    checkpoint = open_checkpoint(file, family=family)
    with pytest.raises(FamilyMismatch, match=f"take the family {gemma}"):
        load_feed_forward(checkpoint, 0, "cpu", ReadMeter())
    assert gemma in ARCHITECTURES


@pytest.mark.parametrize(
    "name",
    [
        *("attn_norm_2.weight", "attn_output_norm.weight", "layer_output_norm.weight", "ffn_sub_norm.weight"),
        *("post_ffw_norm_1.weight", "layer_output_scale.weight", "attn_norm.bias", "ffn_norm.bias"),
    ],
)
@pytest.mark.parametrize("family", ["gguf", "gguf_gemma"])
def test_norms_that_other_architectures_have_are_not_run_as_if_they_were_not_there(
    family: str, name: str, tmp_path: Path
) -> None:
    """Falcon, Grok, DBRX, BERT, BitNet, Gemma 4, and whatever has LayerNorms: llama.cpp wires each in its own way."""
    case = next(case for case in CASES if case.family == family and case.model_type in {"llama", "gemma"})
    model = build(Case(case.model_type), BY_MODEL_TYPE[case.model_type], tmp_path / "model")
    tensors = under_other_names(case, load_file(model.checkpoint.path / "model.safetensors"))
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    load_wiring(open_checkpoint(file, family=family), 0, "cpu", ReadMeter())
    save_file(tensors | {f"blk.{i}.{name}": torch.ones(48) for i in range(2)}, file)
    with pytest.raises(FamilyMismatch, match=f"blocks of the family {family} are not run here: the(y|ir)"):
        load_wiring(open_checkpoint(file, family=family), 0, "cpu", ReadMeter())


@pytest.mark.parametrize("fused", [False, True])
def test_experts_are_as_wide_as_they_are_beside_dense_layers_of_another_width(fused: bool, tmp_path: Path) -> None:
    """DeepSeek's under GGUF's names: the first layer dense, the second with experts and a shared network."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (96, 48), "output": (96, 48), "output_norm": (48,)}
    shapes |= {f"blk.{i}.{name}": (48,) for i in range(2) for name in ("attn_norm", "ffn_norm")}
    shapes |= {"blk.0.ffn_gate": (112, 48), "blk.0.ffn_up": (112, 48), "blk.0.ffn_down": (48, 112)}
    shapes |= {"blk.1.ffn_gate_inp": (4, 48), "blk.1.ffn_down_exps": (4, 48, 24)}
    apart = {"blk.1.ffn_gate_exps": (4, 24, 48), "blk.1.ffn_up_exps": (4, 24, 48)}
    shapes |= {"blk.1.ffn_gate_up_exps": (4, 48, 48)} if fused else apart
    shapes |= {"blk.1.ffn_gate_shexp": (40, 48), "blk.1.ffn_up_shexp": (40, 48), "blk.1.ffn_down_shexp": (48, 40)}
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["blk.1.exp_probs_b.bias"] = torch.zeros(4)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "model.safetensors", family="gguf")
    assert shape_faults(checkpoint) == ()
    assert [network.expert for network in layer_tensors(checkpoint, 1).networks] == [0, 1, 2, 3, "shared"]
    gate = "blk.1.ffn_gate_up_exps.weight" if fused else "blk.1.ffn_gate_exps.weight"
    loaded = load_feed_forward(checkpoint, 1, "cpu", ReadMeter(), expert=2)
    assert torch.equal(loaded.gate, tensors[gate][2, :24])
    assert {"weight", "correction"} <= set(layer_tensors(checkpoint, 1).router)
