"""Mixtures of experts: every expert, norm and dense layer of a row against the models' own code.

Each expert is loaded alone, through the service's path, and compared with what the model's module computes with it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from glassblock.checkpoint.architectures import BY_MODEL_TYPE
from glassblock.checkpoint.embedding_rows import embedding_rows
from glassblock.checkpoint.families import granite_mixtures, hybrids, latent_mixtures, mixtures, stacked_mixtures
from glassblock.checkpoint.fitting import Sizes
from glassblock.checkpoint.layer_map import eps_sources, layer_tensors, resolve_layer, row_at, shape_faults
from glassblock.checkpoint.layer_parts import NetworkTensors
from glassblock.checkpoint.layers import feed_forward_of, load_feed_forward, load_norm, load_wiring
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.wanted_tensors import MAX_ABSENT_EXPERTS, wanted_in_layer
from glassblock.errors import FamilyMismatch, InvalidValue
from glassblock.numerics.block import apply_sublayer, run_block
from glassblock.numerics.feed_forward import FeedForward
from makers import Tiny, tiny_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from checkpoint.tiny_models import BASE, MIXTURES, shaken

# Float32 matrix products of 48 to 224 terms in another order: about 30 roundings of 6e-8, with room for cancellation.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Built:
    model_type: str
    model: Any
    checkpoint: Checkpoint

    @property
    def stack(self) -> nn.Module:
        """The module that holds the layers."""
        return next(module for module in self.model.modules() if hasattr(module, "layers") or hasattr(module, "blocks"))

    @property
    def layers(self) -> nn.ModuleList:
        return self.stack.layers if hasattr(self.stack, "layers") else self.stack.blocks


@pytest.fixture(scope="module", params=MIXTURES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    name: str = request.param
    model_type = name.partition(" ")[0]
    model = shaken(build(name))
    directory = tmp_path_factory.mktemp(model_type)
    model.save_pretrained(directory)
    checkpoint = open_checkpoint(directory)
    return Built(model_type, model, checkpoint)


def build(name: str) -> Any:
    values, model_type = MIXTURES[name], name.partition(" ")[0]
    values = BASE | values if model_type != "dbrx" else values | {"vocab_size": 96}
    config = transformers.AutoConfig.for_model(model_type, **values)
    if model_type == "dbrx":
        # The class reads it where no config of its own puts it.
        config.attn_config.rope_theta = 10000.0
    torch.manual_seed(0)
    if type(config) in transformers.AutoModelForCausalLM._model_mapping:
        return transformers.AutoModelForCausalLM.from_config(config)
    return transformers.AutoModel.from_config(config)


def test_the_config_names_the_family_and_every_tensor_fits(built: Built) -> None:
    checkpoint = built.checkpoint
    assert checkpoint.family.name == BY_MODEL_TYPE[built.model_type].name
    assert checkpoint.faults == ()
    assert checkpoint.family_fault is None
    assert shape_faults(checkpoint) == ()
    assert checkpoint.layers == len(built.layers)
    assert type(built.model).__name__ in checkpoint.family.architectures
    for layer in checkpoint.layer_indices:
        assert layer_tensors(checkpoint, layer).undeclared == ()


def test_every_tensor_of_a_network_belongs_to_the_row(built: Built) -> None:
    checkpoint = built.checkpoint
    for layer in checkpoint.layer_indices:
        tensors = layer_tensors(checkpoint, layer)
        known = {entry.name for entry in tensors.entries}
        names = {name for name in checkpoint.entries if name.startswith(tensors.prefix)}
        left = {
            name.removeprefix(tensors.prefix)
            for name in names - known
            if any(word in name for word in ("mlp.", "moe", "experts", "feed_forward", "ffn.", "norm"))
        }
        assert {name for name in left if not _is_elsewhere(name)} <= UNREAD.get(built.model_type, set())


UNREAD: dict[str, set[str]] = {
    "longcat_flash": {
        # Of experts that return their input: a model that was never trained has numbers there, which nothing uses.
        *(f"mlp.experts.{expert}.{part}_proj.weight" for expert in (4, 5) for part in ("gate", "up")),
    },
    "deepseek_v4": {"ffn.gate.tid2eid"},
    "nemotron_h": {f"mixer.fc{side}_latent_proj.weight" for side in (1, 2)},
}


def _is_elsewhere(name: str) -> bool:
    """Tensors of attention and state spaces, which are no part of the feed-forward block."""
    outside = ("self_attn", "self_attention", "linear_attn", "mamba", "attn.", "norm_attn_norm.attn", "mixer.norm")
    return name.startswith(outside)


def test_every_expert_is_the_models(built: Built) -> None:
    compared = 0
    for layer in built.checkpoint.layer_indices:
        module = built.layers[layer]
        for network in layer_tensors(built.checkpoint, layer).networks:
            generator = torch.Generator().manual_seed(layer)
            loaded = _loaded(built, layer, network, ReadMeter())
            x = torch.randn(7, loaded.model_width, generator=generator)
            ours = apply_sublayer(x, loaded)
            with torch.no_grad():
                theirs = reference(built.model_type, module, network.expert, x)
            error = (ours - theirs).abs().max() / theirs.abs().max()
            assert error <= TOLERANCE, (layer, network.expert, float(error))
            compared += 1
    assert compared > 2


def _loaded(built: Built, layer: int, network: NetworkTensors, meter: ReadMeter) -> FeedForward:
    """The network through the service's path; a dense one of blocks that are not run, which that refuses, by itself."""
    reason = row_at(built.checkpoint, layer).not_run
    if network.expert is None and reason is not None:
        with pytest.raises(FamilyMismatch, match="are not run here") as refused:
            load_feed_forward(built.checkpoint, layer, "cpu", ReadMeter())
        assert reason in refused.value.message
        return feed_forward_of(built.checkpoint, layer_tensors(built.checkpoint, layer), "cpu", meter)
    return load_feed_forward(built.checkpoint, layer, "cpu", meter, expert=network.expert)


def test_an_expert_reads_its_own_bytes_alone(built: Built) -> None:
    for layer in built.checkpoint.layer_indices:
        tensors = layer_tensors(built.checkpoint, layer)
        for network in tensors.networks:
            meter = ReadMeter()
            _loaded(built, layer, network, meter)
            hidden = tensors.norms.get("ffn_hidden")
            assert hidden is None
            assert meter.bytes == sum(entry.bytes for entry in (*network.weights.values(), *network.biases.values()))


def test_every_norm_is_the_models_bit_for_bit_in_bfloat16(built: Built, tmp_path: Path) -> None:
    model = type(built.model)(built.model.config)
    model.load_state_dict(built.model.state_dict())
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    half = replace(built, model=model, checkpoint=checkpoint)
    compared: set[str] = set()
    for layer in checkpoint.layer_indices:
        for norm in row_at(checkpoint, layer).norms:
            module = norm_module(half, layer, norm.role, norm.template)
            ours = load_norm(checkpoint, layer, norm.role, "cpu", ReadMeter())
            generator = torch.Generator().manual_seed(layer)
            width = ours.width or 16
            x = (torch.randn(32, width, generator=generator) * torch.logspace(-3, 2, 32)[:, None]).bfloat16()
            assert torch.equal(ours(x), module(x)), (layer, norm.role)
            eps = getattr(module, "eps", None) or getattr(module, "variance_epsilon", None)
            assert eps_sources(checkpoint).get(norm.role, None) is None or eps == ours.eps
            compared.add(norm.role)
    assert {"final"} < compared


def test_embedding_rows_are_what_enters_the_first_layer(built: Built) -> None:
    if built.checkpoint.family.embedding_scale is None:
        tokens = built.model.get_input_embeddings()(torch.tensor([3, 5]))
        assert torch.equal(embedding_rows(built.checkpoint, [3, 5], "cpu", ReadMeter()).x, tokens)
        return
    taken: list[Tensor] = []
    hook = built.layers[0].register_forward_pre_hook(lambda _module, inputs: taken.append(inputs[0]))
    with torch.no_grad():
        built.model(input_ids=torch.tensor([[3, 5]]))
    hook.remove()
    assert torch.equal(embedding_rows(built.checkpoint, [3, 5], "cpu", ReadMeter()).x, taken[0][0])


def test_a_dense_layer_runs_as_the_model_does(built: Built) -> None:
    """The whole feed-forward block of the dense layers, with norms and multipliers."""
    if BY_MODEL_TYPE[built.model_type].not_run is not None or built.model_type == "gemma4_text":
        return
    dense = [layer for layer in built.checkpoint.layer_indices if layer_tensors(built.checkpoint, layer).dense]
    for layer in dense:
        block = built.layers[layer]
        wiring = load_wiring(built.checkpoint, layer, "cpu", ReadMeter())
        network = load_feed_forward(built.checkpoint, layer, "cpu", ReadMeter())
        x = torch.randn(5, network.model_width, generator=torch.Generator().manual_seed(layer))
        stages = run_block(x, network, wiring)
        norms = {
            norm.role: norm_module(built, layer, norm.role, norm.template)
            for norm in row_at(built.checkpoint, layer).norms
        }
        with torch.no_grad():
            theirs = norms["ffn_in"](x)
            theirs = reference(built.model_type, block, None, theirs)
            theirs = norms["ffn_out"](theirs) if "ffn_out" in norms else theirs
            theirs = x + theirs
        assert (stages.output - theirs).abs().max() / theirs.abs().max() <= TOLERANCE


def test_what_is_not_run_says_why(tmp_path: Path) -> None:
    model = build("minimax")
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert shape_faults(checkpoint) == ()
    with pytest.raises(FamilyMismatch, match="residual stream is taken after the norm"):
        load_wiring(checkpoint, 0, "cpu", ReadMeter())


def test_the_second_dense_network_stands_behind_its_own_norm_and_the_layer_is_not_run(tmp_path: Path) -> None:
    model = shaken(build("longcat_flash"))
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(FamilyMismatch, match="a layer has two attentions and two dense networks"):
        load_wiring(checkpoint, 0, "cpu", ReadMeter())
    layer = model.model.layers[0]
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(5))
    for expert, norm, network in (
        ("shared", layer.post_attention_layernorm[1], layer.mlps[1]),
        (0, layer.post_attention_layernorm[0], lambda x: reference("longcat_flash", layer, 0, x)),
    ):
        wiring = load_wiring(checkpoint, 0, "cpu", ReadMeter(), expert=expert)
        stages = run_block(x, load_feed_forward(checkpoint, 0, "cpu", ReadMeter(), expert=expert), wiring, until="down")
        with torch.no_grad():
            theirs = network(norm(x))
        assert (stages.down - theirs).abs().max() / theirs.abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    "gone",
    [
        "mlps.1.gate_proj.weight",
        "mlps.1.down_proj.weight",
        "input_layernorm.1.weight",
        "post_attention_layernorm.1.weight",
    ],
)
def test_a_tensor_of_the_second_dense_network_that_is_absent_is_told(gone: str, tmp_path: Path) -> None:
    build("longcat_flash").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.0.{gone}"]
    save_file(tensors, tmp_path / "model.safetensors")
    (fault,) = shape_faults(open_checkpoint(tmp_path))
    assert fault.tensor == f"model.layers.0.{gone}"


@pytest.mark.parametrize("name", ["minimax", "deepseek_v4", "gemma4_text"])
def test_an_expert_of_what_is_not_run_stands_behind_its_own_norm(name: str, tmp_path: Path) -> None:
    model = shaken(build(name))
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(FamilyMismatch, match="are not run here"):
        load_wiring(checkpoint, 0, "cpu", ReadMeter())
    wiring = load_wiring(checkpoint, 0, "cpu", ReadMeter(), expert=1)
    network = load_feed_forward(checkpoint, 0, "cpu", ReadMeter(), expert=1)
    layer = next(module for module in model.modules() if hasattr(module, "layers")).layers[0]
    norm = layer.pre_feedforward_layernorm_2 if name == "gemma4_text" else layer.post_attention_layernorm
    x = torch.randn(5, network.model_width, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        theirs = reference(name, layer, 1, norm(x))
    stages = run_block(x, network, wiring, until="down")
    assert (stages.down - theirs).abs().max() / theirs.abs().max() <= TOLERANCE


def test_a_latent_expert_is_not_run_behind_a_norm_of_another_width(tmp_path: Path) -> None:
    build("nemotron_h latent").save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    (layer,) = (layer for layer in checkpoint.layer_indices if len(layer_tensors(checkpoint, layer).networks) > 1)
    with pytest.raises(FamilyMismatch, match="expert 0 reads what a projection of the mixture makes"):
        load_wiring(checkpoint, layer, "cpu", ReadMeter(), expert=0)
    assert load_wiring(checkpoint, layer, "cpu", ReadMeter(), expert="shared").input_norm is not None


def test_an_expert_must_be_named_and_exist(tmp_path: Path) -> None:
    build("qwen2_moe").save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(InvalidValue, match="is a mixture of experts") as refused:
        load_feed_forward(checkpoint, 0, "cpu", ReadMeter())
    assert 'number from 0 to 2 or "shared"' in (refused.value.hint or "")
    with pytest.raises(InvalidValue, match="layer 1 is dense"):
        load_feed_forward(checkpoint, 1, "cpu", ReadMeter(), expert=0)
    with pytest.raises(InvalidValue, match="has no expert 3"):
        load_feed_forward(checkpoint, 2, "cpu", ReadMeter(), expert=3)


def test_a_count_of_experts_that_no_model_has_is_not_looked_for(tmp_path: Path) -> None:
    tiny_checkpoint("mixtral", tmp_path, tiny=Tiny(layers=1), config={"num_local_experts": 4_967_300})
    checkpoint = open_checkpoint(tmp_path)
    wanted = list(wanted_in_layer(checkpoint, row_at(checkpoint, 0), "model.layers.0.", Sizes(checkpoint)))
    assert len(wanted) < 10 * MAX_ABSENT_EXPERTS
    tensors, faults = resolve_layer(checkpoint, 0)
    assert len(tensors.networks) == Tiny().experts
    assert any(fault.kind == "shape" and "4967300" in fault.message for fault in faults)


def test_as_many_experts_as_are_there_are_looked_for(tmp_path: Path) -> None:
    many = MAX_ABSENT_EXPERTS + 3
    gone = {f"model.layers.0.block_sparse_moe.experts.{many - 1}.w{part}.weight": None for part in (1, 2, 3)}
    tiny = Tiny(layers=1, hidden=2, intermediate=2, experts=many, heads=1, kv_heads=1, head_dim=2)
    tiny_checkpoint("mixtral", tmp_path, tiny=tiny, tensors=gone)
    tensors, faults = resolve_layer(open_checkpoint(tmp_path), 0)
    assert len(tensors.networks) == many - 1
    assert [fault.kind for fault in faults] == ["experts-missing"]
    assert f"expert {many - 1} has no tensor" in faults[0].message


@pytest.mark.parametrize("model_type", ["qwen2_moe", "deepseek_v3", "jamba", "llama4_text", "nemotron_h"])
def test_without_a_config_the_names_tell_which_layers_are_dense(model_type: str, tmp_path: Path) -> None:
    build(model_type).save_pretrained(tmp_path)
    with_config = open_checkpoint(tmp_path)
    kinds = {layer: layer_tensors(with_config, layer).networks for layer in with_config.layer_indices}
    (tmp_path / "config.json").unlink()
    without = open_checkpoint(tmp_path, family=BY_MODEL_TYPE[model_type].name)
    assert shape_faults(without) == ()
    for layer, networks in kinds.items():
        assert [network.expert for network in layer_tensors(without, layer).networks] == [
            network.expert for network in networks
        ]


def test_a_layer_for_further_tokens_is_no_fault(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("deepseek_v3", **BASE | MIXTURES["deepseek_v3"])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for declared, extra, faults in ((2, 1, 0), (2, 0, 1), (1, 1, 1)):
        values |= {"num_hidden_layers": declared, "num_nextn_predict_layers": extra}
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert len(shape_faults(open_checkpoint(tmp_path))) == faults


def test_released_files_of_qwen3_vl_store_experts_the_other_way(tmp_path: Path) -> None:
    model = shaken(build("qwen3_vl_moe_text"))
    model.save_pretrained(tmp_path)
    written = open_checkpoint(tmp_path)
    ours = load_feed_forward(written, 0, "cpu", ReadMeter(), expert=1)
    state = {
        name: tensor.transpose(1, 2).contiguous() if "experts" in name else tensor
        for name, tensor in model.state_dict().items()
    }
    model.save_pretrained(tmp_path, state_dict=state)
    released = open_checkpoint(tmp_path)
    assert released.entries["layers.0.mlp.experts.down_proj"].shape == (3, 40, 48)
    assert shape_faults(released) == ()
    theirs = load_feed_forward(released, 0, "cpu", ReadMeter(), expert=1)
    assert torch.equal(ours.up, theirs.up)
    assert torch.equal(ours.down, theirs.down)


def _embedding(built: Built) -> str:
    row, trunk = built.checkpoint.family, built.checkpoint.trunk
    return trunk.embedding or trunk.prefix + row.embedding


def norm_module(built: Built, layer: int, role: str, template: str) -> nn.Module:
    if role == "final":
        return built.stack.get_submodule(RENAMED.get((built.model_type, template), template))
    return built.layers[layer].get_submodule(RENAMED.get((built.model_type, template), template))


RENAMED = {
    ("deepseek_v4", "attn_norm"): "input_layernorm",
    ("deepseek_v4", "ffn_norm"): "post_attention_layernorm",
    ("deepseek_v4", "attn.q_norm"): "self_attn.q_a_norm",
    ("deepseek_v4", "attn.norm"): "self_attn.kv_norm",
    ("deepseek_v4", "attn.compressor.norm"): "self_attn.compressor.kv_norm",
    ("deepseek_v4", "attn.indexer.compressor.norm"): "self_attn.compressor.indexer.kv_norm",
}


def reference(model_type: str, layer: nn.Module, expert: int | str | None, x: Tensor) -> Tensor:
    """What the model's own network computes, the expert on all rows with the weight one."""
    if model_type == "gemma4_text" and expert is not None:
        return _routed(model_type, layer, int(expert), x)
    module = next(
        getattr(layer, name)
        for name in ("mlps", "mlp", "block_sparse_moe", "feed_forward", "ffn", "mixer", "shared_mlp")
        if hasattr(layer, name)
    )
    if expert is None:
        module = module[0] if model_type == "longcat_flash" else module
        return module(x)
    if model_type == "longcat_flash":
        module = layer.mlp
    if expert == "shared":
        return (layer.mlps[1] if model_type == "longcat_flash" else _shared(layer, module))(x)
    return _routed(model_type, module, int(expert), x)


def _shared(layer: nn.Module, module: nn.Module) -> nn.Module:
    for home in (module, layer):
        for name in ("shared_expert", "shared_experts", "shared_mlp"):
            if hasattr(home, name):
                return getattr(home, name)
    raise AssertionError("the model has no shared network")


def _routed(model_type: str, module: nn.Module, expert: int, x: Tensor) -> Tensor:
    if hasattr(module, "input_linear"):
        parallel = list(_counts(module.input_linear, expert, len(x)))
        gate, up = module.input_linear(x, parallel).chunk(2, dim=-1)
        return module.output_linear(module.activation(gate) * up, parallel)
    experts = module.experts
    if model_type == "llama4_text":
        count = experts.num_experts
        return experts(x.repeat(count, 1)).view(count, *x.shape)[expert]
    # A second choice of no weight: one module cannot do with a single one.
    chosen = torch.tensor([[expert, (expert + 1) % 3]]).expand(len(x), 2)
    return experts(x, chosen, torch.tensor([[1.0, 0.0]]).expand(len(x), 2)).view(x.shape)


def _counts(linear: Any, expert: int, rows: int) -> Iterator[int]:
    for number in range(linear.num_experts):
        yield rows if number == expert else 0


def test_every_row_said_to_be_executed_is_built_here() -> None:
    modules = (mixtures, stacked_mixtures, granite_mixtures, latent_mixtures, hybrids)
    rows = tuple(row for module in modules for row in module.ROWS)
    # The oracle builds the model of images and text, whose layers are those of the text model here.
    built = {BY_MODEL_TYPE[name.partition(" ")[0]].name for name in MIXTURES} | {"qwen3_vl_moe"}
    assert built == {row.name for row in rows if row.verified == "executed"} | {"gemma4"}
