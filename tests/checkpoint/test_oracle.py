"""The family table against the models' own code: names, shapes, settings, and every stage of every network.

Each `model_type` that transformers can build is built as a tiny random model, once with the family's defaults and once
for each variant and flag of its row, written with `save_pretrained`, and read back through the product's own path. A
row added to the table is tested without another line here. The last line of the run counts what was reproduced.
"""

import copy
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from glassblock.checkpoint.architectures import ARCHITECTURES, BY_MODEL_TYPE
from glassblock.checkpoint.config import ConfigFile
from glassblock.checkpoint.embedding_rows import embedding_rows
from glassblock.checkpoint.family import Setting
from glassblock.checkpoint.fits import fitting_families
from glassblock.checkpoint.layer_map import eps_sources, layer_tensors, row_at, shape_faults
from glassblock.checkpoint.layer_parts import LayerTensors, NetworkTensors
from glassblock.checkpoint.layers import load_feed_forward, load_norm, load_wiring
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.outer_tensors import embedding_entry
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.settings import branch_scale_of, eps_of, flag_of, number_of, size_of, text_of, tied_of
from glassblock.checkpoint.text_states import logit_parts
from glassblock.checkpoint.variants import row_for
from glassblock.errors import FamilyMismatch
from glassblock.numerics.block import apply_sublayer, run_block
from glassblock.numerics.fused_layouts import split_rows
from glassblock.numerics.wiring import Placement
from makers import tiny_checkpoint
from reference_models import GOES_ON, OTHER_ENTRY, TOKENS, Case, Owner, Reference, build, cases
from torch import Tensor, nn
from transformers.models.auto import modeling_auto as auto
from uncovered import UNCOVERED

Record = Callable[[str, object], None]

# Float32 sums of a hundred terms in another order; 2e-6 is what the project promises of real checkpoints.
TOLERANCE = 2e-6
LOGITS_TOLERANCE = 1e-4
CASES = tuple(cases(BY_MODEL_TYPE, transformers.CONFIG_MAPPING))
FFN_ROLES = frozenset({"ffn_in", "ffn_out", "resid_ffn"})


@pytest.fixture(scope="module", params=CASES, ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    case: Case = request.param
    return build(case, BY_MODEL_TYPE[case.model_type], tmp_path_factory.mktemp("oracle"))


def test_the_file_is_what_the_row_says(model: Reference) -> None:
    checkpoint = model.checkpoint
    family = checkpoint.require_usable()
    assert family.name == BY_MODEL_TYPE[model.case.model_type].name
    assert checkpoint.faults == ()
    assert shape_faults(checkpoint) == ()
    assert checkpoint.declared_layers is None or checkpoint.layers == checkpoint.declared_layers.value
    assert type(model.module).__name__ in family.architectures
    for layer in checkpoint.layer_indices:
        assert layer_tensors(checkpoint, layer).undeclared == ()


def test_without_its_config_the_file_fits_the_family(model: Reference) -> None:
    fits = {fit.family: fit for fit in fitting_families(model.checkpoint)}
    name = BY_MODEL_TYPE[model.case.model_type].name
    assert fits[name].fits, fits[name].why


def test_every_stage_of_dense_networks_is_the_modules(model: Reference, record_property: Record) -> None:
    reproduced = 0
    for layer in model.checkpoint.layer_indices:
        tensors = layer_tensors(model.checkpoint, layer)
        if tensors.row.not_run is not None:
            with pytest.raises(FamilyMismatch, match=r"are not run here"):
                load_feed_forward(model.checkpoint, layer, "cpu", ReadMeter())
        elif tensors.dense is not None and tensors.row.mixture is None:
            theirs = stages_of(model, layer, tensors)
            feed_forward = load_feed_forward(model.checkpoint, layer, "cpu", ReadMeter())
            other = attention_output(model, layer) if tensors.row.placement is Placement.PARALLEL else None
            ours = run_block(
                theirs["x"], feed_forward, load_wiring(model.checkpoint, layer, "cpu", ReadMeter()), other=other
            )
            needed = {"x", "up", "hidden", "down"} | ({"gate"} if tensors.dense.row.gated else set())
            needed |= set() if model.case.model_type in GOES_ON else {"output"}
            assert needed <= set(theirs)
            for name, stage in theirs.items():
                assert_close(getattr(ours, name), stage, f"layer {layer}: {name}")
            reproduced = 1
    record_property("oracle", ("dense feed-forward networks", model.case.model_type, reproduced))


def test_every_expert_is_the_modules(model: Reference, record_property: Record) -> None:
    reproduced = 0
    for layer in model.checkpoint.layer_indices:
        for network in layer_tensors(model.checkpoint, layer).networks:
            if network.expert is None:
                continue
            feed_forward = load_feed_forward(model.checkpoint, layer, "cpu", ReadMeter(), expert=network.expert)
            x = torch.randn(9, feed_forward.model_width, generator=torch.Generator().manual_seed(layer))
            with torch.no_grad():
                theirs = expert_output(model, layer, network, x)
            assert_close(apply_sublayer(x, feed_forward), theirs, f"layer {layer}: expert {network.expert}")
            reproduced = 1
    record_property("oracle", ("sets of experts", model.case.model_type, reproduced))


def test_every_norm_is_the_modules_bit_for_bit_in_bfloat16(model: Reference, record_property: Record) -> None:
    checkpoint = model.checkpoint
    places = [
        (layer, norm) for layer in checkpoint.layer_indices for norm in layer_tensors(checkpoint, layer).row.norms
    ]
    places = [(layer, norm) for layer, norm in places if norm.role != "final"]
    final = checkpoint.require_usable().norm("final")
    places += [] if final is None else [(None, final)]
    for layer, norm in places:
        if norm.per_head:
            with pytest.raises(FamilyMismatch, match=r"one norm for each head"):
                load_norm(checkpoint, layer, norm.role, "cpu", ReadMeter())
            continue
        ours = load_norm(checkpoint, layer, norm.role, "cpu", ReadMeter())
        module = model.norm(norm, layer)
        eps = next((value for name in ("eps", "variance_epsilon") if (value := getattr(module, name, None))), None)
        assert eps in {None, ours.eps}, norm.role
        half = copy.deepcopy(module).to(torch.bfloat16)
        generator = torch.Generator().manual_seed(17)
        x = torch.randn(64, ours.width or model.width, generator=generator) * torch.logspace(-3, 2, 64)[:, None]
        with torch.no_grad():
            theirs = half(x.bfloat16())
        assert theirs.dtype == torch.bfloat16
        assert torch.equal(ours.to(torch.bfloat16)(x.bfloat16()), theirs), (layer, norm.role)
    roles = {norm.role for _, norm in places if not norm.per_head}
    record_property("oracle", ("norms", model.case.model_type, len(roles)))


def test_embedding_rows_are_what_the_first_layer_reads(model: Reference) -> None:
    family = model.checkpoint.require_usable()
    if family.embedding is None:
        return
    ours = embedding_rows(model.checkpoint, TOKENS, "cpu", ReadMeter())
    assert (ours.multiplier is not None) == (family.embedding_scale is not None)
    changed = family.embedding_scale is not None or family.embedding_norm is not None
    if not changed or model.case.model_type in OTHER_ENTRY:
        # What is added to them, such as learned positions, comes after.
        entry = embedding_entry(model.checkpoint)
        assert entry is not None
        with torch.no_grad():
            module = model.owners[entry.name].module
            # A tied head is found under the same numbers.
            module = model.module.get_input_embeddings() if isinstance(module, nn.Linear) else module
            theirs = module(torch.tensor(TOKENS))
    else:
        theirs = model.calls[model.layer(model.checkpoint.layer_indices[0])].input.flatten(0, -2)
    assert torch.equal(ours.x, theirs)


def test_logits_are_the_modules(model: Reference, record_property: Record) -> None:
    checkpoint = model.checkpoint
    family = checkpoint.require_usable()
    if model.logits is None or checkpoint.trunk is None or checkpoint.trunk.head is None:
        return
    if family.logits is None:
        with pytest.raises(FamilyMismatch, match=r"logits of the family .* are not read here"):
            next(logit_parts(checkpoint, torch.zeros(1, model.width), ReadMeter(), dtype=None))
        return
    final = family.norm("final")
    last = model.layer(checkpoint.layer_indices[-1])
    states = model.calls[last].output if final is None else model.calls[model.norm(final, None)].input
    ours = torch.cat(tuple(logit_parts(checkpoint, states, ReadMeter(), dtype=None)), dim=-1)
    assert ours.shape == model.logits.shape
    assert float((ours - model.logits).abs().max()) <= LOGITS_TOLERANCE
    record_property("oracle", ("heads", model.case.model_type, 1))


def test_the_maker_writes_the_same_names(model: Reference, tmp_path: Path) -> None:
    if model.case.changes:
        return
    row = BY_MODEL_TYPE[model.case.model_type]
    made = open_checkpoint(tiny_checkpoint(row.name, tmp_path))
    assert shape_faults(made) == ()
    for layer in made.layer_indices:
        if row_at(made, layer) == row_at(model.checkpoint, layer):
            assert names_of(made, layer) == names_of(model.checkpoint, layer)


def test_defaults_are_those_of_the_configuration_class(model: Reference) -> None:
    if model.case.changes:
        return
    silent = ConfigFile(Path("config.json"), {"model_type": model.case.model_type})
    told = ConfigFile(Path("config.json"), type(model.module.config)().to_dict())
    row = BY_MODEL_TYPE[model.case.model_type]
    assert row_for(row, silent) == row_for(row, told)
    row = row_for(row, told)
    for size in row.sizes:
        ours, theirs = size_of(silent, row, size), size_of(told, row, size)
        assert ours is None or theirs is None or ours.value == theirs.value, size
    for norm in row.norms:
        assert eps_of(silent, row, norm.eps).value == eps_of(told, row, norm.eps).value, norm.role
        assert eps_of(told, row, norm.eps).defaulted == (not norm.eps.keys), norm.role
    for network in row.networks:
        assert text_of(silent, row, network.activation).value == text_of(told, row, network.activation).value
        assert text_of(told, row, network.activation).defaulted == (not network.activation.keys)
        for flag in (network.bias, network.down_bias):
            if flag is not None:
                assert flag_of(silent, row, flag).value == flag_of(told, row, flag).value, flag.keys
    for number in (row.residual_scale, row.embedding_scale, row.branch_scale):
        if isinstance(number, Setting):
            assert number_of(silent, row, number).value == number_of(told, row, number).value, number.keys
    assert tied_of(silent, row).value == tied_of(told, row).value


def test_every_row_marked_executed_is_executed_here() -> None:
    executed = {BY_MODEL_TYPE[case.model_type].name for case in CASES}
    assert {row.name for row in ARCHITECTURES.values() if row.verified == "executed"} == executed


def test_what_transformers_has_and_no_row_covers_is_known() -> None:
    """Decoders and encoder-decoders alone; whoever adds a row, or raises transformers, looks at this list."""
    names = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    assert sorted(set(names) - set(BY_MODEL_TYPE)) == sorted(UNCOVERED)


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
    assert checkpoint.declared_layers is not None
    assert checkpoint.declared_layers.value == inner.num_hidden_layers
    assert checkpoint.declared_layers.source == "config.json: text_config.num_hidden_layers"


def stages_of(model: Reference, layer: int, tensors: LayerTensors) -> dict[str, Tensor]:
    """What the modules of a dense layer read and returned while the whole model ran, by the names of the stages."""
    network, row = tensors.dense, tensors.row
    assert network is not None
    owners = dict(owners_of(model, network))
    outputs = {part: owner.part(model.calls[owner.module].output) for part, owner in owners.items()}
    first = next(owner.module for part, owner in owners.items() if part != "down")
    stages = {"x": model.calls[first].input, "hidden": model.calls[owners["down"].module].input}
    if network.fused_layout is not None and "fused" in outputs:
        parts = split_rows(outputs["fused"].movedim(-1, 0), network.fused_layout)
        outputs |= {name: part.movedim(0, -1) for name, part in zip(("gate", "up"), parts, strict=True)}
    stages |= {name: outputs[name] for name in ("gate", "up") if name in outputs}
    scale = network.row.down_scale
    stages["down"] = outputs["down"] * (1.0 if scale is None else number_of(model.checkpoint.config, row, scale).value)
    called = {norm.role: model.calls[model.norm(norm, layer)] for norm in row.norms if norm.role in FFN_ROLES}
    if "ffn_in" in called:
        stages |= {"x": called["ffn_in"].input, "normed": called["ffn_in"].output}
    if "ffn_out" in called and row.branch_gain is None:
        scaled = branch_scale_of(model.checkpoint.config, row, row.branch_scale, model.checkpoint.layers).value
        stages["contribution"] = called["ffn_out"].output * scaled
    if "resid_ffn" in called:
        stages["output"] = called["resid_ffn"].output
    elif model.case.model_type not in GOES_ON:
        stages["output"] = model.calls[model.layer(layer)].output
    return {name: stage.flatten(0, -2) for name, stage in stages.items()}


def owners_of(model: Reference, network: NetworkTensors) -> Iterator[tuple[str, Owner]]:
    """The modules of a network's projections; those of a fused tensor's halves where the model has them apart."""
    for part, entry in network.weights.items():
        if entry.name in model.owners or network.row.fused is None:
            yield part, model.owners[entry.name]
        else:
            yield from (
                (name, model.owners[entry.name + half])
                for name, half in zip(network.row.fused.order, ("#first", "#second"), strict=True)
            )


def attention_output(model: Reference, layer: int) -> Tensor:
    """What the attention of a layer returned."""
    children = model.layer(layer).named_children()
    (attention,) = (
        module
        for name, module in children
        if "att" in name and any(parameter.ndim == 2 for parameter in module.parameters())
    )
    return model.calls[attention].output.flatten(0, -2)


def expert_output(model: Reference, layer: int, network: NetworkTensors, x: Tensor) -> Tensor:
    """What one expert of a mixture returns, whether it is a module or a slice of one."""
    owner = model.owners.get(network.weights["down"].name)
    weight = None if owner is None else getattr(owner.module, "weight", None)
    if owner is not None and weight is not None:
        parent = model.module.get_submodule(owner.path.rpartition(".")[0])
        if weight.ndim == 2:
            return parent(x)
        assert isinstance(network.expert, int)
        return granite_expert(parent, network.expert, x)
    assert isinstance(network.expert, int)
    experts: Any = next(module for module in model.layer(layer).modules() if type(module).__name__.endswith("Experts"))
    if len(inspect.signature(experts.forward).parameters) == 1:
        count = experts.down_proj.shape[0]
        return experts(x.repeat(count, 1)).view(count, *x.shape)[network.expert]
    # Another expert is chosen beside it, with no weight: some models want more than one.
    index = torch.tensor([[network.expert, 0 if network.expert else 1]]).expand(len(x), 2)
    return experts(x, index, torch.tensor([[1.0, 0.0]]).expand(len(x), 2)).view_as(x)


def granite_expert(parent: Any, expert: int, x: Tensor) -> Tensor:
    """Experts as two modules that take the number of tokens of each."""
    counts = [len(x) if number == expert else 0 for number in range(parent.input_linear.num_experts)]
    gate, up = parent.input_linear(x, counts).chunk(2, dim=-1)
    return parent.output_linear(parent.activation(gate) * up, counts)


def names_of(checkpoint: Checkpoint, layer: int) -> set[str]:
    """Names of a layer's tensors, relative to it."""
    tensors = layer_tensors(checkpoint, layer)
    return {entry.name.removeprefix(tensors.prefix) for entry in tensors.entries}


def assert_close(ours: Tensor | None, theirs: Tensor, what: str) -> None:
    assert ours is not None, what
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    assert error <= TOLERANCE, (what, error)
