"""The family table is complete and consistent with itself and with the numerics it names."""

import string
from dataclasses import replace

import pytest
from glassblock.checkpoint import architectures
from glassblock.checkpoint.architectures import ARCHITECTURES, BY_ARCHITECTURE, BY_MODEL_TYPE
from glassblock.checkpoint.family import Architecture, Ratio, Setting
from glassblock.checkpoint.recognition import find_trunk
from glassblock.numerics.activations import ACTIVATION_ALIASES, ACTIVATIONS, GATINGS
from glassblock.numerics.norms import NORM_KINDS
from glassblock.numerics.wiring import Placement

ROWS = pytest.mark.parametrize("row", ARCHITECTURES.values(), ids=ARCHITECTURES)
NORMS_OF = {
    Placement.PRE: {"attn_in", "ffn_in"},
    Placement.SANDWICH: {"attn_in", "attn_out", "ffn_in", "ffn_out"},
    Placement.BRANCH_OUTPUT: {"attn_out", "ffn_out"},
}


def test_the_table_holds_every_row_of_its_module() -> None:
    rows = {value.name: value for value in vars(architectures).values() if isinstance(value, Architecture)}
    assert rows == dict(ARCHITECTURES)


def test_no_config_means_two_families() -> None:
    assert len(BY_MODEL_TYPE) == sum(len(row.model_types) for row in ARCHITECTURES.values())
    assert len(BY_ARCHITECTURE) == sum(len(row.architectures) for row in ARCHITECTURES.values())


@ROWS
def test_a_row_names_known_arithmetic(row: Architecture) -> None:
    network = row.feed_forward
    assert network.activation.default in {*ACTIVATIONS, *ACTIVATION_ALIASES}
    assert set(network.gating_parameters) == set(GATINGS[network.gating].needs)
    assert {norm.kind for norm in row.norms} <= set(NORM_KINDS)
    for norm in row.norms:
        assert NORM_KINDS[norm.kind].bias or not norm.has_bias


@ROWS
def test_a_row_has_the_norms_of_its_placement(row: Architecture) -> None:
    roles = [norm.role for norm in row.norms]
    assert len(roles) == len(set(roles))
    assert set(roles) - {"q", "k"} == NORMS_OF[row.placement] | {"final"}


@ROWS
def test_a_row_has_one_kind_of_network(row: Architecture) -> None:
    network = row.feed_forward
    assert (network.up is None) == (network.fused is not None)
    assert network.gate is None or network.fused is None
    assert network.fused is None or sorted(network.fused.order) == ["gate", "up"]


@ROWS
def test_templates_have_no_other_field_than_the_layer(row: Architecture) -> None:
    assert [field for _, field, _, _ in string.Formatter().parse(row.layer) if field] == ["i"]
    for name in row.layer_names():
        assert "{" not in name


@ROWS
def test_sizes_are_complete(row: Architecture) -> None:
    assert set(row.sizes) == {"hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab"}
    for setting in row.sizes.values():
        assert setting.keys or isinstance(setting.default, Ratio)


@ROWS
def test_layers_are_found_by_exact_names(row: Architecture) -> None:
    down = row.feed_forward.down.weight
    for trunk in row.trunks:
        layer = trunk.prefix + row.layer
        names = [layer.format(i=i) + down for i in (0, 2, 10)]
        # None of these is a layer: another module before or after, a number that is none, a longer name.
        decoys = [f"vision_tower.{layer.format(i=7)}{down}", f"{layer.format(i=7)}{down}.absmax"]
        decoys += [layer.format(i="07") + down, layer.format(i="-7") + down, layer.format(i=7) + "x" + down]
        found, indices = find_trunk(row, [*decoys, *names])
        assert found == trunk
        assert indices == (0, 2, 10)
        assert find_trunk(row, decoys) == (None, ())


def test_a_row_is_data() -> None:
    granite = replace(
        ARCHITECTURES["llama"],
        name="granite",
        model_types=("granite",),
        branch_scale=Setting(("residual_multiplier",), 1.0),
        embedding_scale=Setting(("embedding_multiplier",), 1.0),
    )
    assert granite.roles == ARCHITECTURES["llama"].roles
    assert granite.norm("final") is not None
    assert granite.norm("ffn_out") is None
