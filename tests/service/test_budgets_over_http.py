"""budgets: the counts that follow by hand; and the block small enough to be counted and computed by hand."""

from pathlib import Path
from typing import Any, get_args

import httpx
import numpy as np
import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.wire.values import Stage
from glassblock_client import Client, Overrides
from makers import USUAL, Tiny, tiny_checkpoint


def budget(http: httpx.Client, **message: Any) -> dict[str, Any]:
    """The answer as anybody would get it with curl."""
    answer = http.post("/v1/budgets", json=message)
    assert answer.status_code == 200, answer.text
    return answer.json()


PLAIN, GATED = {"kind": "plain"}, {"kind": "gated"}

BY_HAND: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"d_model": 2, "d_ff": 2, **GATED}, {"parameters": 12, "hidden_elements": 2}),
    ({"d_model": 512, "d_ff": 2048, **PLAIN}, {"parameters": 2_097_152}),
    ({"d_model": 512, "d_ff": 2048, **GATED}, {"parameters": 3_145_728}),
    (
        {"d_model": 512, "d_ff": 2048, "batch": 2, "tokens": 1024, **GATED},
        {"hidden_elements": 4_194_304, "parameters": 3_145_728},
    ),
    ({"d_model": 4096, "d_ff": 16384, **PLAIN}, {"parameters": 134_217_728}),
    ({"d_model": 4096, "d_ff": 16384, **GATED}, {"parameters": 201_326_592}),
    ({"d_model": 4096, "d_ff": 10923, **GATED}, {"parameters": 134_221_824}),
    (
        {"d_model": 4096, "d_ff": 11008, "layers": 32, **GATED},
        {
            "parameters_per_layer": 135_266_304,
            "macs_per_token": 135_266_304,
            "flops_per_token": 270_532_608,
            "parameters": 4_328_521_728,
            "parameter_bytes": 8_657_043_456,  # two bytes each, as many as there are FLOPs
            "flops": 8_657_043_456,
        },
    ),
    (
        {"d_model": 4096, "d_ff": 11008, "layers": 32, "batch": 3, "tokens": 5, "dtype": "float32", **GATED},
        {"flops": 15 * 8_657_043_456, "parameter_bytes": 4 * 4_328_521_728},
    ),
]


@pytest.mark.parametrize(("sizes", "expected"), BY_HAND)
def test_counts_by_hand(http: httpx.Client, sizes: dict[str, Any], expected: dict[str, Any]) -> None:
    answer = budget(http, **sizes)
    assert {name: answer[name] for name in expected} == expected
    assert answer["swept"] is None
    assert answer["sweep"] == []
    assert "not peak memory" in answer["note"]


@pytest.mark.parametrize(
    ("d_ff", "multiple_of", "exact", "value", "rounded"),
    [
        (16384, 256, "32768/3", 10922.666666666666, 11008),  # 8 d / 3 for d = 4096
        (16384, 1, "32768/3", 10922.666666666666, 10923),
        (3072, 256, "2048", 2048.0, 2048),
        (4, 256, "8/3", 2.6666666666666665, 256),
    ],
)
def test_the_gated_width_that_spends_the_same(
    http: httpx.Client, d_ff: int, multiple_of: int, exact: str, value: float, rounded: int
) -> None:
    width = budget(http, d_model=4096, d_ff=d_ff, multiple_of=multiple_of, **PLAIN)["equal_parameter_width"]
    assert width == {"exact": exact, "value": value, "rounded": rounded, "multiple_of": multiple_of}


def test_the_equal_width_is_equal_where_three_divides_it(http: httpx.Client) -> None:
    plain = budget(http, d_model=768, d_ff=3072, **PLAIN)
    gated = budget(http, d_model=768, d_ff=plain["equal_parameter_width"]["rounded"], **GATED)
    assert gated["parameters"] == plain["parameters"]


@pytest.mark.parametrize(
    ("dtype", "item"), [("float64", 8), ("float32", 4), ("bfloat16", 2), ("float16", 2), ("float8", 1)]
)
def test_every_stage_has_its_elements_and_bytes(http: httpx.Client, dtype: str, item: int) -> None:
    gated = budget(http, d_model=10, d_ff=7, batch=3, tokens=11, layers=5, dtype=dtype, **GATED)["activations"]
    wide, narrow = 3 * 11 * 7, 3 * 11 * 10
    assert tuple(gated) == get_args(Stage)
    assert {name: stage["elements"] for name, stage in gated.items()} == {
        name: wide if name in {"gate", "up", "activated", "hidden"} else narrow for name in gated
    }
    assert all(stage["bytes"] == item * stage["elements"] for stage in gated.values())
    plain = budget(http, d_model=10, d_ff=7, **PLAIN)["activations"]
    assert "gate" not in plain


SIZES: dict[str, Any] = {"d_model": 64, "d_ff": 256, "batch": 2, "tokens": 16, "layers": 3, "kind": "gated"}
SWEEPS = {"d_model": [64, 1, 128], "d_ff": [256, 512, 1], "batch": [2, 1, 64], "tokens": [16, 4096, 1]}


@pytest.mark.parametrize("swept", SWEEPS)
def test_a_list_in_one_size_sweeps_it(http: httpx.Client, swept: str) -> None:
    answer = budget(http, **SIZES | {swept: SWEEPS[swept]})
    assert answer["swept"] == swept
    assert [point[swept] for point in answer["sweep"]] == SWEEPS[swept]
    for value, point in zip(SWEEPS[swept], answer["sweep"], strict=True):
        alone = budget(http, **SIZES | {swept: value})
        assert {name: alone[name] for name in point} == point
    assert {name: answer[name] for name in answer["sweep"][0]} == answer["sweep"][0]


@pytest.mark.parametrize("swept", ["batch", "tokens"])
def test_no_parameter_count_depends_on_what_is_put_through(http: httpx.Client, swept: str) -> None:
    points = budget(http, **SIZES | {swept: SWEEPS[swept]})["sweep"]
    assert {point["parameters"] for point in points} == {3 * 3 * 64 * 256}
    assert {point["flops_per_token"] for point in points} == {2 * 3 * 64 * 256}
    assert len({point["hidden_elements"] for point in points}) == len({point["flops"] for point in points}) == 3


def test_a_list_of_one_is_a_sweep_of_one(http: httpx.Client) -> None:
    answer = budget(http, d_model=[8], d_ff=8, **PLAIN)
    assert (answer["swept"], len(answer["sweep"])) == ("d_model", 1)


@pytest.mark.parametrize("family", USUAL)
def test_a_checkpoint_brings_its_sizes(client: Client, family: str) -> None:
    answer = client.budgets(checkpoint=family, batch=2, tokens=[1, 8])
    kind = "plain" if family == "gpt2" else "gated"
    assert (answer.d_model, answer.d_ff, answer.layers, answer.kind) == (48, 112, 2, kind)
    assert answer.dtype == "float32"  # as it is stored
    by_sizes = client.budgets(d_model=48, d_ff=112, layers=2, kind=kind, batch=2, tokens=[1, 8], dtype="float32")
    assert answer == by_sizes


@pytest.mark.parametrize("given", [{"d_model": 48}, {"d_ff": 112}, {"kind": "gated"}, {"layers": 2}])
def test_a_size_beside_a_checkpoint_is_refused(client: Client, given: dict[str, Any]) -> None:
    (field,) = given
    with pytest.raises(InvalidValue, match="comes from the checkpoint") as refused:
        client.budgets(checkpoint="llama", **given)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"d_model": []}, "d_model"),
        ({"tokens": [1, 0]}, "tokens"),
        ({"batch": 2**40 + 1}, "batch"),
        ({"batch": True}, "batch"),
        ({"tokens": 1.5}, "tokens"),
        ({"kind": "swiglu"}, "kind"),
        ({"dtype": "int4"}, "dtype"),
        ({"multiple_of": 0}, "multiple_of"),
        ({"kind": None}, "kind"),
    ],
)
def test_a_size_that_cannot_be_one_is_named(http: httpx.Client, given: dict[str, Any], field: str) -> None:
    answer = http.post("/v1/budgets", json={"d_model": 8, "d_ff": 8, "kind": "plain"} | given)
    assert answer.status_code == 422, answer.text
    assert answer.json()["field"].startswith(field), answer.json()


def test_counts_beyond_64_bits_stay_whole(http: httpx.Client) -> None:
    answer = budget(http, d_model=2**40, d_ff=2**40, batch=2**40, tokens=2**40, layers=2**40, **GATED)
    assert answer["parameters"] == 3 * 2**120
    assert answer["flops"] == 6 * 2**200


# A block that a hand can run: x = [1, -1] has mean square 1, so that with eps 0 its norm is itself.


def identities(directory: Path) -> Path:
    """SwiGLU with three 2x2 identities."""
    unit = {f"model.layers.0.mlp.{name}_proj.weight": torch.eye(2) for name in ("gate", "up", "down")}
    return tiny_checkpoint(
        "llama",
        directory,
        tiny=Tiny(hidden=2, intermediate=2, layers=1, heads=1, kv_heads=1, head_dim=2, vocab=4),
        tensors={**unit, "model.layers.0.post_attention_layernorm.weight": torch.ones(2)},
    )


def test_swiglu_with_three_identities(client: Client, root: Path) -> None:
    identities(root / "identities")
    run = client.run_block("identities", 0, x=[[1.0, -1.0]], overrides=Overrides(eps=0.0), return_tensors=True)
    by_hand = {
        "x": [1, -1],
        "normed": [1, -1],
        "gate": [1, -1],
        "up": [1, -1],
        "activated": [0.731059, -0.268941],
        "hidden": [0.731059, 0.268941],
        "down": [0.731059, 0.268941],
        "contribution": [0.731059, 0.268941],
        "output": [1.731059, -0.731059],
    }
    for stage, expected in by_hand.items():
        assert run.tensors[stage][0] == pytest.approx(expected, abs=5e-7), stage
    assert (run.answer.parameters, run.answer.hidden_elements) == (12, 2)
    counted = client.budgets(checkpoint="identities", tokens=1)
    assert (counted.parameters, counted.hidden_elements) == (12, 2)


def test_how_far_activations_differ(client: Client, root: Path) -> None:
    """GELU by the error function against its tanh form, and against SiLU, over gates from -8 to 8."""
    grid = torch.linspace(-8, 8, 16_001)
    # The normed row is [1, -1], so that a gate row [g, 0] gives the gate g.
    gate = torch.stack([grid, torch.zeros_like(grid)], dim=1)
    tiny_checkpoint(
        "llama",
        root / "gates",
        tiny=Tiny(hidden=2, intermediate=16_001, layers=1, heads=1, kv_heads=1, head_dim=2, vocab=4),
        tensors={
            "model.layers.0.mlp.gate_proj.weight": gate,
            "model.layers.0.post_attention_layernorm.weight": torch.ones(2),
        },
    )
    activated = {
        name: client.run_block(
            "gates",
            0,
            x=[[1.0, -1.0]],
            capture=("activated",),
            overrides=Overrides(eps=0.0, activation=name),
            return_tensors=True,
        ).tensors["activated"]
        for name in ("gelu", "gelu_pytorch_tanh", "silu")
    }
    # The largest of each over the grid; float32 gives them to one part in a thousand.
    assert np.abs(activated["gelu"] - activated["gelu_pytorch_tanh"]).max() == pytest.approx(4.73e-4, rel=2e-3)
    assert np.abs(activated["gelu"] - activated["silu"]).max() == pytest.approx(0.1930, rel=2e-3)
