"""The gate rules on tiny models that were trained in each storage (`tests/data/train_kinds.py`)."""

import shutil
from pathlib import Path

import pytest
from gates import edit_networks, exchange, gated_networks, lay_fused
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.gate_plans import GATE_RULE_NAMES
from glassblock.checkpoint.family_file import parse_family_row
from glassblock.checkpoint.layer_parts import Expert
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.wire.audits import Report
from safetensors.torch import load_file, save_file

DATA = Path(__file__).resolve().parents[1] / "data"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-llama"
KINDS = {
    "separate": EXAMPLE,
    "fused": DATA / "trained-fused",
    "interleaved": DATA / "trained-interleaved",
    "experts": DATA / "trained-experts",
    "transposed": DATA / "trained-transposed",
}
RULES = tuple(sorted(GATE_RULE_NAMES))


@pytest.fixture(params=[kind for kind in KINDS if kind != "interleaved"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def copied(kind: str, directory: Path) -> Path:
    return Path(shutil.copytree(KINDS[kind], directory / kind))


def audited(directory: Path) -> Report:
    return audit_checkpoint(directory, AuditQuestion(rules=RULES))


def places(directory: Path) -> list[tuple[int, Expert]]:
    return [(layer, network.expert) for layer, network in gated_networks(open_checkpoint(directory))]


def test_as_trained_it_is_silent_and_every_network_is_decided(kind: str) -> None:
    report = audited(KINDS[kind])
    assert report.findings == ()
    assert not any(entry.undecidable for entry in report.coverage if entry.rule != "norm/eps-mismatch")
    rule = "ffn/gate-up-swapped" if kind in {"separate", "experts"} else "ffn/fused-order"
    (entry,) = (entry for entry in report.coverage if entry.rule == rule)
    assert entry.checked == len(places(KINDS[kind]))


def test_each_exchanged_network_is_named_or_left_open_and_no_other(kind: str, tmp_path: Path) -> None:
    """An expert of 128 neurons that few tokens reached may be too faint to be convicted; none is acquitted wrongly."""
    found = 0
    every = places(KINDS[kind])
    for number, place in enumerate(every):
        directory = copied(kind, tmp_path / str(number))
        exchange(directory, place)
        report = audited(directory)
        expert = place[1] if isinstance(place[1], int) else None
        convicted = [(finding.layer, finding.expert) for finding in report.findings]
        open_layers = {open_.layer for entry in report.coverage for open_ in entry.undecidable}
        assert convicted == [(place[0], expert)] or (not convicted and place[0] in open_layers)
        found += bool(convicted)
    assert found >= (len(every) if kind in {"separate", "fused"} else len(every) - 1)


def test_interleaved_rows_are_named_where_the_family_has_halves() -> None:
    report = audited(KINDS["interleaved"])
    assert [(finding.rule, finding.layer) for finding in report.findings] == [("ffn/fused-layout", n) for n in (0, 1)]
    assert all(finding.evidence["stored"] == "rows of gate and up in turn" for finding in report.findings)


OWN_ROW = {
    "like": "phi3",
    "name": "mine",
    "feed_forward": {
        "fused": {
            "weight": "mlp.gate_up_proj.weight",
            "bias": "mlp.gate_up_proj.bias",
            "order": ["gate", "up"],
            "arrangement": "interleaved",
        }
    },
}


def test_interleaved_rows_are_healthy_where_the_family_has_them_so(tmp_path: Path) -> None:
    """Trained so, and declared so by a row of one's own: silent, and every exchanged network is named."""
    row = parse_family_row(OWN_ROW)
    healthy = audit_checkpoint(open_checkpoint(KINDS["interleaved"], family=row), AuditQuestion(rules=RULES))
    assert healthy.findings == ()
    assert not any(entry.undecidable for entry in healthy.coverage)
    (entry,) = (entry for entry in healthy.coverage if entry.rule == "ffn/fused-order")
    assert entry.checked == 2
    for layer in (0, 1):
        directory = copied("interleaved", tmp_path / str(layer))
        turn_pairs(directory, layer)
        report = audit_checkpoint(open_checkpoint(directory, family=row), AuditQuestion(rules=RULES))
        assert [(finding.rule, finding.layer) for finding in report.findings] == [("ffn/fused-order", layer)]


def turn_pairs(directory: Path, layer: int) -> None:
    """Write each row of up in front of its gate's."""
    tensors = load_file(directory / "model.safetensors")
    name = f"model.layers.{layer}.mlp.gate_up_proj.weight"
    tensors[name] = tensors[name].unflatten(0, (-1, 2)).flip(1).flatten(0, 1).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_blocks_are_named(groups: int, tmp_path: Path) -> None:
    directory = copied("fused", tmp_path)
    lay_fused(directory, 1, groups=groups)
    (finding,) = audited(directory).findings
    assert (finding.rule, finding.layer, finding.evidence["groups"]) == ("ffn/fused-layout", 1, groups)


def test_interleaved_rows_put_back_are_what_the_family_has(tmp_path: Path) -> None:
    """Read as what they were trained as, the same weights are healthy; exchanged, up comes first."""
    directory = copied("interleaved", tmp_path)
    put_back(directory)
    assert audited(directory).findings == ()
    exchange(directory, (1, None))
    (finding,) = audited(directory).findings
    assert (finding.rule, finding.layer) == ("ffn/fused-order", 1)


def put_back(directory: Path) -> None:
    edit_networks(
        directory,
        lambda _layer, _expert, weights: weights["fused"].copy_(
            weights["fused"].clone().unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
        ),
    )
