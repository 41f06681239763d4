"""Encoders, encoder-decoders and image models: every block of every stack against the models' own code."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from glassblock.checkpoint.architectures import BY_MODEL_TYPE
from glassblock.checkpoint.families import encoder_decoders, encoders, vision
from glassblock.checkpoint.layer_map import layer_tensors, row_at, shape_faults
from glassblock.checkpoint.layers import load_feed_forward, load_norm, load_wiring
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import InvalidValue
from glassblock.numerics.block import run_block
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.phi4_multimodal import configuration_phi4_multimodal, modeling_phi4_multimodal

from checkpoint.tiny_models import ENCODERS, shaken

# As in the test of mixtures: some thirty roundings of float32 in another order.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Stack:
    """One stack of layers: the service's view of it, and the model's."""

    name: str
    checkpoint: Checkpoint
    layers: nn.ModuleList


def build(name: str) -> Any:
    model_type, values = name.partition(" ")[0], ENCODERS[name]
    torch.manual_seed(0)
    if model_type == "phi4_multimodal_audio":
        config = configuration_phi4_multimodal.Phi4MultimodalAudioConfig(**values)
        return modeling_phi4_multimodal.Phi4MultimodalAudioModel(config)
    config = transformers.AutoConfig.for_model(model_type, **values)
    if model_type == "moshi":
        return transformers.MoshiForCausalLM(config)
    for auto in (
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModelForSpeechSeq2Seq,
        transformers.AutoModelForCausalLM if model_type.endswith("decoder") else transformers.AutoModelForMaskedLM,
        transformers.AutoModel,
    ):
        if type(config) in auto._model_mapping:
            return auto.from_config(config)
    raise AssertionError(model_type)


def saved(model: Any, directory: Path) -> Checkpoint:
    model.save_pretrained(directory)
    return open_checkpoint(directory)


@pytest.fixture(scope="module", params=ENCODERS)
def stacks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Stack]:
    name: str = request.param
    model = shaken(build(name))
    return stacks_of(name, model, saved(model, tmp_path_factory.mktemp("model")))


def stacks_of(name: str, model: Any, checkpoint: Checkpoint) -> list[Stack]:
    assert checkpoint.family is not None
    views = {"": checkpoint} | {tower: checkpoint.tower(tower) for tower in checkpoint.family.towers}
    return [Stack(name, view, _layers(model, name, tower)) for tower, view in views.items()]


def _layers(model: Any, name: str, tower: str) -> nn.ModuleList:
    model_type = name.partition(" ")[0]
    main = {"t5": "decoder", "mt5": "decoder", "umt5": "decoder", "clip": "text_model", "siglip": "text_model"}
    main |= dict.fromkeys(("t5gemma", "whisper", "moonshine"), "decoder")
    home = {"vision": "vision_model", "out": ""}.get(tower, tower) or main.get(model_type, "")
    found = [
        module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and path.rpartition(".")[2] in {"layers", "layer", "block", "encoders"}
        and home in {*path.split(".")[:-1], ""}
    ]
    return found[0]


def test_the_config_names_the_family_and_every_tensor_fits(stacks: list[Stack]) -> None:
    for stack in stacks:
        assert stack.checkpoint.faults == ()
        assert stack.checkpoint.family_fault is None
        assert shape_faults(stack.checkpoint) == ()
        assert stack.checkpoint.layers == len(stack.layers)
        for layer in stack.checkpoint.layer_indices:
            assert layer_tensors(stack.checkpoint, layer).undeclared == ()


def test_every_block_is_the_models(stacks: list[Stack]) -> None:
    for number, stack in enumerate(stacks):
        for layer in stack.checkpoint.layer_indices:
            wiring = load_wiring(stack.checkpoint, layer, "cpu", ReadMeter())
            network = load_feed_forward(stack.checkpoint, layer, "cpu", ReadMeter())
            x = torch.randn(6, network.model_width, generator=torch.Generator().manual_seed(layer))
            ours = run_block(x, network, wiring).output
            with torch.no_grad():
                theirs = reference(stack, number)(stack.layers[layer], x)
            assert (ours - theirs).abs().max() / theirs.abs().max() <= TOLERANCE, (stack.name, number, layer)


def test_every_norm_of_a_branch_is_the_models_bit_for_bit_in_bfloat16(stacks: list[Stack], tmp_path: Path) -> None:
    name = stacks[0].name
    model = shaken(build(name)).to(torch.bfloat16)
    for number, stack in enumerate(stacks_of(name, model, saved(model, tmp_path))):
        for layer in stack.checkpoint.layer_indices:
            for norm in row_at(stack.checkpoint, layer).norms:
                if norm.role == "final":
                    assert load_norm(stack.checkpoint, layer, "final", "cpu", ReadMeter()).gain is not None
                    continue
                module = norm_module(stack, number, layer, norm.template)
                ours = load_norm(stack.checkpoint, layer, norm.role, "cpu", ReadMeter())
                generator = torch.Generator().manual_seed(layer)
                x = torch.randn(32, ours.width, generator=generator) * torch.logspace(-3, 2, 32)[:, None]
                assert torch.equal(ours(x.bfloat16()), module(x.bfloat16())), (name, layer, norm.role)


_RENAMED = {"norm1": "post_attention_layernorm", "norm2": "post_mlp_layernorm"}


def norm_module(stack: Stack, _number: int, layer: int, template: str) -> nn.Module:
    template = _RENAMED.get(template, template) if stack.name == "nomic_bert" else template
    return stack.layers[layer].get_submodule(template)


def reference(stack: Stack, number: int) -> Callable[[Any, Tensor], Tensor]:
    """The feed-forward block of one layer, by its own modules."""
    model_type = stack.name.partition(" ")[0]
    depth = len(stack.layers)
    side = ("in", "out")[number] if model_type == "phi4_multimodal_audio" else ""
    blocks: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "t5": lambda layer, x: layer.layer[-1](x),
        "t5gemma": lambda layer, x: x + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x))),
        "whisper": lambda layer, x: x + layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(x)))),
        "moonshine": lambda layer, x: (
            x + layer.mlp((layer.post_attention_layernorm if number else layer.final_layernorm)(x))
        ),
        "bert": lambda layer, x: layer.feed_forward_chunk(x),
        "modernbert": lambda layer, x: x + layer.mlp(layer.mlp_norm(x)),
        "nomic_bert": lambda layer, x: layer.post_mlp_layernorm(x + layer.mlp(x)),
        "esmc": lambda layer, x: x + layer.mlp(layer.post_attention_layernorm(x)) / (depth / 36) ** 0.5,
        "vit": lambda layer, x: x + layer.mlp(layer.layernorm_after(x)),
        "clip": lambda layer, x: x + layer.mlp(layer.layer_norm2(x)),
        "dinov2": lambda layer, x: x + layer.layer_scale2(layer.mlp(layer.norm2(x))),
        "phi4_multimodal_audio": lambda layer, x: x + 0.5 * getattr(layer, f"feed_forward_{side}")(x),
        "moshi": lambda layer, x: x + layer.mlp(layer.post_attention_layernorm(x)[None])[0],
    }
    alike = {"mt5": "t5", "umt5": "t5", "roberta": "bert", "xlm-roberta": "bert", "modernbert-decoder": "modernbert"}
    alike |= dict.fromkeys(("siglip", "siglip_vision_model", "clip_vision_model"), "clip")
    alike["kyutai_speech_to_text"] = "moshi"
    alike |= dict.fromkeys(("dinov2_with_registers", "dinov3_vit"), "dinov2")
    return blocks[alike.get(model_type, model_type)]


def test_a_tower_that_is_not_there_is_refused(tmp_path: Path) -> None:
    checkpoint = saved(build("t5"), tmp_path)
    with pytest.raises(InvalidValue, match="has no tower 'vision'") as refused:
        checkpoint.tower("vision")
    assert refused.value.known == ("encoder",)
    with pytest.raises(InvalidValue, match="has no tower"):
        saved(build("bert"), tmp_path / "bert").tower("encoder")


def test_files_with_the_encoder_alone_are_opened_as_it(tmp_path: Path) -> None:
    saved(build("t5"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: tensors[name] for name in tensors if "decoder" not in name}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.family.name == "t5 encoder"
    assert checkpoint.layers == 2
    assert "The files hold the encoder alone, and it is what was opened." in checkpoint.notes
    assert shape_faults(checkpoint) == ()


def test_gains_called_gamma_are_found(tmp_path: Path) -> None:
    saved(build("bert"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    save_file(old, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert shape_faults(checkpoint) == ()
    norm = load_norm(checkpoint, 1, "resid_ffn", "cpu", ReadMeter())
    assert torch.equal(norm.gain, tensors["bert.encoder.layer.1.output.LayerNorm.weight"])


def test_every_row_said_to_be_executed_is_built_here() -> None:
    built = {BY_MODEL_TYPE[name.partition(" ")[0]].name for name in ENCODERS}
    assert built == {
        row.name for row in (*encoder_decoders.ROWS, *encoders.ROWS, *vision.ROWS) if row.verified == "executed"
    }
