"""The family table against the models' own code: names, shapes, settings, and every stage of the network.

Each `model_type` of the table is built as a tiny random model with transformers, written with `save_pretrained`, and
read back through the product's own path.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.checkpoint.architectures import ARCHITECTURES, BY_MODEL_TYPE
from glassblock.checkpoint.family import Ratio
from glassblock.checkpoint.layers import (
    activation_of,
    embedding_rows,
    eps_sources,
    layer_tensors,
    load_feed_forward,
    load_norm,
    load_wiring,
    shape_faults,
)
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.numerics.activations import activation_named
from glassblock.numerics.block import Stages, run_block
from makers import Tiny, sizes_for, tiny_checkpoint, tiny_config
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

TOKENS = [5, 17, 3, 42, 90, 0, 61, 8]
TINY = Tiny()
# Float32 sums of 112 terms in another order; 2e-6 is what the project promises of real checkpoints.
TOLERANCE = 2e-6


@dataclass(frozen=True)
class Model:
    """A model as transformers builds it, and the checkpoint that it wrote."""

    model_type: str
    module: Any
    checkpoint: Checkpoint

    @property
    def layers(self) -> Any:
        return self.text.get_submodule(self.checkpoint.family.layer.partition(".{i}")[0])

    @property
    def text(self) -> Any:
        """The trunk: the language model without its head."""
        inner = self.module.base_model
        return getattr(inner, "language_model", inner)


@pytest.fixture(scope="module", params=sorted(BY_MODEL_TYPE))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    model_type: str = request.param
    directory = tmp_path_factory.mktemp(model_type)
    torch.manual_seed(0)
    module = transformers.AutoModelForImageTextToText if model_type == "gemma3" else transformers.AutoModelForCausalLM
    built = module.from_config(config_of(model_type)).eval()
    for name, parameter in built.named_parameters():
        # Norms and biases of a fresh model are all ones or zeros, which would hide a gain in the wrong place.
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
        elif "embed" not in name and "wte" not in name:
            parameter.data *= 8
    built.save_pretrained(directory)
    return Model(model_type, built, open_checkpoint(directory))


def config_of(model_type: str) -> Any:
    row = BY_MODEL_TYPE[model_type]
    values = tiny_config(row.name, sizes_for(row.name, TINY))
    values.pop("architectures")
    values["attn_implementation"] = "eager"
    values |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if model_type == "gemma3":
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision |= {"image_size": 28, "patch_size": 14}
        text = {key: value for key, value in values.items() if key != "model_type"}
        return transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    return transformers.AutoConfig.for_model(**values | {"model_type": model_type})


def test_config_names_the_family_and_everything_fits(model: Model) -> None:
    checkpoint = model.checkpoint
    assert checkpoint.family is BY_MODEL_TYPE[model.model_type]
    assert checkpoint.faults == ()
    assert checkpoint.family_fault is None
    assert shape_faults(checkpoint) == ()
    assert checkpoint.layers == checkpoint.declared_layers.value == TINY.layers
    assert type(model.module).__name__ in checkpoint.family.architectures
    for layer in range(TINY.layers):
        assert layer_tensors(checkpoint, layer).undeclared == ()


def test_the_maker_writes_what_save_pretrained_writes(model: Model, tmp_path: Path) -> None:
    row = model.checkpoint.family
    made = open_checkpoint(tiny_checkpoint(row.name, tmp_path))
    prefix = model.checkpoint.trunk.prefix
    saved = {
        name.replace(prefix, row.trunks[0].prefix).replace(model.checkpoint.trunk.head, row.trunks[0].head): entry
        for name, entry in model.checkpoint.entries.items()
        if name.startswith((prefix, model.checkpoint.trunk.head))
    }
    assert {name: entry.shape for name, entry in made.entries.items()} == {
        name: entry.shape for name, entry in saved.items()
    }


def test_defaults_are_those_of_the_configuration_class(model: Model) -> None:
    row = model.checkpoint.family
    default = type(model.module.config)()
    text = default.get_text_config() if model.model_type == "gemma3" else default
    for size, setting in row.sizes.items():
        if not isinstance(setting.default, Ratio):
            assert getattr(text, setting.keys[0]) == setting.default, size
    for norm in row.norms:
        assert getattr(text, norm.eps.keys[0]) == norm.eps.default
    activation = row.feed_forward.activation
    assert getattr(text, activation.keys[0]) == activation.default
    assert default.tie_word_embeddings is row.tied.default
    for key in row.feed_forward.bias.keys:
        assert getattr(text, key) is row.feed_forward.bias.default
    if row.name == "gpt2":
        block = transformers.models.gpt2.modeling_gpt2.GPT2Block(transformers.GPT2Config(n_embd=48, n_inner=None))
        assert block.mlp.c_fc.nf == 4 * 48


def test_epsilons_and_activation_are_the_modules(model: Model) -> None:
    sources = eps_sources(model.checkpoint)
    for role, norm in norm_modules(model, layer=0):
        eps = getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", None)
        assert eps == sources[role].value == TINY.eps
        assert not sources[role].defaulted
    x = torch.linspace(-4, 4, 101)
    assert torch.equal(activation_named(activation_of(model.checkpoint).value)(x), activation_module(model)(x))


@pytest.mark.parametrize("layer", range(TINY.layers))
def test_every_stage_is_the_modules(model: Model, layer: int) -> None:
    expected = reference_stages(model, layer)
    meter = ReadMeter()
    network = load_feed_forward(model.checkpoint, layer, "cpu", meter)
    stages = run_block(expected.x, network, load_wiring(model.checkpoint, layer, "cpu", meter))
    compared = [name for name in Stages._fields if getattr(expected, name) is not None]
    assert {"x", "up", "hidden", "down", "contribution", "output"} <= set(compared)
    assert ("gate" in compared) == model.checkpoint.family.feed_forward.gated
    for name in compared:
        ours, theirs = getattr(stages, name), getattr(expected, name)
        assert ours is not None, name
        error = (ours - theirs).abs().max() / theirs.abs().max()
        assert error <= TOLERANCE, (name, float(error))


@pytest.mark.parametrize("layer", range(TINY.layers))
def test_every_norm_is_the_modules_bit_for_bit_in_bfloat16(model: Model, layer: int, tmp_path: Path) -> None:
    module = half(model)
    module.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    compared = set()
    for role, norm in norm_modules(Model(model.model_type, module, checkpoint), layer):
        ours = load_norm(checkpoint, layer, role, "cpu", ReadMeter())
        assert ours.width is not None
        generator = torch.Generator().manual_seed(layer)
        x = (torch.randn(64, ours.width, generator=generator) * torch.logspace(-3, 2, 64)[:, None]).bfloat16()
        theirs = norm(x)
        assert theirs.dtype == torch.bfloat16
        assert torch.equal(ours(x), theirs), role
        compared.add(role)
    assert compared == set(checkpoint.family.roles)


def test_embedding_rows_are_the_modules_bit_for_bit(model: Model, tmp_path: Path) -> None:
    for module, directory in ((model.module, None), (half(model), tmp_path)):
        if directory is not None:
            module.save_pretrained(directory)
        checkpoint = model.checkpoint if directory is None else open_checkpoint(directory)
        with torch.no_grad():
            theirs = module.get_input_embeddings()(torch.tensor(TOKENS))
        ours = embedding_rows(checkpoint, TOKENS, "cpu", ReadMeter())
        assert torch.equal(ours.x, theirs)
        assert (ours.multiplier is not None) == (checkpoint.family.embedding_scale is not None)


def test_a_flag_adds_biases_where_the_model_has_them(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**tiny_config("llama", sizes_for("llama", TINY)) | {"mlp_bias": True})
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    module.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    tensors = layer_tensors(checkpoint, 1)
    assert sorted(tensors.biases) == ["down", "gate", "up"]
    assert tensors.has_bias.source == "config.json: mlp_bias"
    network = load_feed_forward(checkpoint, 1, "cpu", ReadMeter())
    x = torch.randn(5, TINY.hidden)
    stages = run_block(x, network, load_wiring(checkpoint, 1, "cpu", ReadMeter()))
    layer = module.model.layers[1]
    with torch.no_grad():
        theirs = layer.mlp(layer.post_attention_layernorm(x))
    assert (stages.down - theirs).abs().max() / theirs.abs().max() <= TOLERANCE


def test_every_family_of_the_table_is_marked_as_proved() -> None:
    assert {row.name for row in BY_MODEL_TYPE.values()} == set(ARCHITECTURES)
    assert all(row.verified == "executed" for row in ARCHITECTURES.values())


def half(model: Model) -> Any:
    """The model in bfloat16, as an engine holds it."""
    copied = type(model.module)(model.module.config).eval()
    copied.load_state_dict(model.module.state_dict())
    return copied.to(torch.bfloat16)


def norm_modules(model: Model, layer: int) -> Iterator[tuple[str, nn.Module]]:
    for norm in model.checkpoint.family.norms:
        home = model.text if norm.role == "final" else model.layers[layer]
        yield norm.role, home.get_submodule(norm.template)


def activation_module(model: Model) -> Any:
    mlp = model.layers[0].mlp
    return next(getattr(mlp, name) for name in ("act_fn", "activation_fn", "act") if hasattr(mlp, name))


def reference_stages(model: Model, layer: int) -> Stages:
    """What the modules return while the whole model runs on tokens, by the names of the stages."""
    row = model.checkpoint.family
    block, network = model.layers[layer], row.feed_forward
    modules = {"mlp": block.mlp, "block": block}
    modules |= {
        part: block.get_submodule(projection.weight.removesuffix(".weight"))
        for part, projection in (
            ("gate", network.gate),
            ("up", network.up),
            ("fused", network.fused),
            ("down", network.down),
        )
        if projection is not None
    }
    modules |= {role: norm for role, norm in norm_modules(model, layer) if role in {"ffn_in", "ffn_out"}}
    taken: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [
        module.register_forward_hook(
            lambda _module, inputs, output, name=name: taken.update(
                {name: (inputs[0], output[0] if isinstance(output, tuple) else output)}
            )
        )
        for name, module in modules.items()
    ]
    with torch.no_grad():
        model.module(input_ids=torch.tensor([TOKENS]))
    for hook in hooks:
        hook.remove()
    gate, up = (taken[part][1] if part in taken else None for part in ("gate", "up"))
    if "fused" in taken:
        gate, up = taken["fused"][1].chunk(2, dim=-1)
    return Stages(
        x=taken["ffn_in" if "ffn_in" in taken else "mlp"][0],
        normed=taken["ffn_in"][1] if "ffn_in" in taken else None,
        gate=gate,
        up=up,
        hidden=taken["down"][0],
        down=taken["mlp"][1],
        contribution=taken["ffn_out" if "ffn_out" in taken else "mlp"][1],
        output=taken["block"][1],
    )


def test_nested_config_is_read_where_the_model_reads_it(tmp_path: Path) -> None:
    # Multimodal configs of older releases leave out whatever equals the default of the inner class.
    values = {"model_type": "gemma3", "text_config": {"hidden_size": 48, "num_hidden_layers": 2}}
    tiny_checkpoint("gemma3", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    inner = transformers.Gemma3Config(**values).get_text_config()
    checkpoint = open_checkpoint(tmp_path)
    sources = eps_sources(checkpoint)
    assert {source.value for source in sources.values()} == {inner.rms_norm_eps}
    assert all(source.source == "default of family gemma3" for source in sources.values())
    assert checkpoint.declared_layers.value == inner.num_hidden_layers
    assert checkpoint.declared_layers.source == "config.json: text_config.num_hidden_layers"
