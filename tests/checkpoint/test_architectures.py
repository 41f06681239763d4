"""The family table is complete and consistent with itself and with the numerics it names."""

import string
from dataclasses import replace
from pathlib import Path

import pytest
from glassblock.checkpoint import families
from glassblock.checkpoint.architectures import ARCHITECTURES, BY_ARCHITECTURE, BY_MODEL_TYPE
from glassblock.checkpoint.conditions import keys_of
from glassblock.checkpoint.family import Architecture, FeedForwardRow, Ratio, Setting
from glassblock.checkpoint.name_fits import find_trunk
from glassblock.numerics.activations import ACTIVATION_ALIASES, ACTIVATIONS, GATINGS, LEARNED_ACTIVATIONS
from glassblock.numerics.norms import NORM_KINDS, GainOrder
from glassblock.numerics.wiring import Placement

ROWS = pytest.mark.parametrize("row", ARCHITECTURES.values(), ids=ARCHITECTURES)
FFN_NORMS_OF = {
    Placement.PRE: {"ffn_in"},
    Placement.POST: {"resid_ffn"},
    Placement.SANDWICH: {"ffn_in", "ffn_out"},
    Placement.PARALLEL: {"ffn_in"},
    Placement.BRANCH_OUTPUT: {"ffn_out"},
}


def states(row: Architecture) -> list[Architecture]:
    """The row as it is written, and as each of its variants alone makes it."""
    variants = (*row.config_variants, *row.layer_variants)
    return [row, *(replace(row, **variant.changes) for variant in variants)]


def networks(row: Architecture) -> list[FeedForwardRow]:
    return [network for state in states(row) for network in state.networks]


def test_the_table_holds_every_row_of_every_module() -> None:
    names = {path.stem for path in Path(families.__path__[0]).glob("*.py")}
    modules = [__import__(f"{families.__name__}.{name}", fromlist=["ROWS"]) for name in names - {"__init__"}]
    rows = [row for module in modules for row in getattr(module, "ROWS", ())]
    assert sorted(row.name for row in rows) == sorted(ARCHITECTURES)
    for module in modules:
        written = {id(value) for value in vars(module).values() if isinstance(value, Architecture)}
        assert {id(row) for row in getattr(module, "ROWS", ())} <= written


def test_no_config_means_two_families() -> None:
    assert len(BY_MODEL_TYPE) == sum(len(row.model_types) for row in ARCHITECTURES.values())
    for name, row in BY_ARCHITECTURE.items():
        others = [other for other in ARCHITECTURES.values() if name in other.architectures]
        # A class that builds several families can be told by the model type alone.
        assert others[0] is row
        assert all(other.model_types for other in others)


@ROWS
def test_a_row_names_known_arithmetic(row: Architecture) -> None:
    for network in networks(row):
        assert network.activation.default in {*ACTIVATIONS, *ACTIVATION_ALIASES, *LEARNED_ACTIVATIONS}
        assert (network.activation.default in LEARNED_ACTIVATIONS) == bool(network.activation_tensors)
        assert set(network.gating_parameters) == set(GATINGS[network.gating].needs)
    for state in states(row):
        for norm in (*state.norms, *([state.embedding_norm] if state.embedding_norm else [])):
            kind = NORM_KINDS[norm.kind]
            assert kind.bias or not norm.has_bias
            assert (kind.gain is GainOrder.NONE) == (not norm.has_gain)


@ROWS
def test_a_block_has_the_norms_of_its_placement(row: Architecture) -> None:
    for state in states(row):
        roles = [norm.role for norm in state.norms]
        assert len(roles) == len(set(roles))
        if (state.feed_forward or state.mixture) and state.not_run is None and state.norms:
            assert set(roles) & {"ffn_in", "ffn_out", "resid_ffn"} == FFN_NORMS_OF[state.placement]
        assert not state.branches_first or state.placement is Placement.PARALLEL


@ROWS
def test_a_network_is_plain_or_gated_or_fused(row: Architecture) -> None:
    for network in networks(row):
        assert (network.up is None) == (network.fused is not None)
        assert network.gate is None or network.fused is None
        assert network.fused is None or sorted(network.fused.order) == ["gate", "up"]


@ROWS
def test_templates_have_no_other_field_than_the_layer_and_the_expert(row: Architecture) -> None:
    assert [field for _, field, _, _ in string.Formatter().parse(row.layer) if field] == ["i"]
    for name in row.layer_names():
        assert {field for _, field, _, _ in string.Formatter().parse(name) if field} <= {"j"}


@ROWS
def test_sizes_follow_from_sizes_that_the_row_has(row: Architecture) -> None:
    assert {"hidden"} <= set(row.sizes)
    for setting in row.sizes.values():
        ratio = setting.default
        if isinstance(ratio, Ratio):
            assert {ratio.of, *([ratio.over] if ratio.over else [])} <= set(row.sizes)


@ROWS
def test_a_variant_changes_fields_and_asks_for_something(row: Architecture) -> None:
    for variant in row.config_variants:
        assert tuple(keys_of(variant.when))
        assert variant.changes
    for state in states(row):
        assert state.name == row.name


@ROWS
def test_layers_are_found_by_exact_names(row: Architecture) -> None:
    down = row.network.down.weight.replace("{j}", "0")
    for trunk in row.trunks:
        layer = trunk.prefix + row.layer
        names = [layer.format(i=i) + down for i in (0, 2, 10)]
        # None of these is a layer: another module before or after, a number that is none, a longer name.
        decoys = [f"another_tower.{layer.format(i=7)}{down}", f"{layer.format(i=7)}{down}.absmax"]
        decoys += [layer.format(i="07") + down, layer.format(i="-7") + down, layer.format(i=7) + "x" + down]
        found, indices = find_trunk(row, [*decoys, *names])
        assert found == trunk
        assert indices == (0, 2, 10)
        assert find_trunk(row, decoys) == (None, ())


@ROWS
def test_a_row_says_where_it_was_read(row: Architecture) -> None:
    assert row.sources
    assert all(": " in source for source in row.sources)


def test_a_row_is_data() -> None:
    scaled = replace(
        ARCHITECTURES["llama"],
        name="scaled",
        branch_scale=Setting(("residual_multiplier",), 1.0),
        embedding_scale=Setting(("embedding_multiplier",), 1.0),
    )
    assert scaled.roles == ARCHITECTURES["llama"].roles
    assert scaled.norm("final") is not None
    assert scaled.norm("ffn_out") is None
