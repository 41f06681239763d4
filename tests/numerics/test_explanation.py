"""Every factor fires alone, and a healthy capture is silent: tiny blocks under an engine that errs on purpose."""

import math
from typing import Any

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.activations import ACTIVATIONS, activation_named, gating_named
from glassblock.numerics.block import run_block
from glassblock.numerics.explanation import Explanation, explain
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.hypotheses import CLIPPED, FACTORS_OF, Alternatives, Hypothesis, single_mistakes
from glassblock.numerics.nearness import EXCLUDES, sign_test
from glassblock.numerics.norms import Norm, norm_kind_named
from glassblock.numerics.rewiring import rewired
from glassblock.numerics.wiring import Placement, Wiring
from torch import Tensor
from wrong_engine import Engine

D, M, TOKENS = 48, 96, 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PLACES = (Placement.POST, Placement.SANDWICH, Placement.BRANCH_OUTPUT)


def tensors(width: int = M, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"gate": (width, D), "up": (width, D), "down": (D, width)}
    found = {name: torch.randn(shape, generator=draw) * 2 / shape[1] ** 0.5 for name, shape in shapes.items()}
    # In bfloat16, as checkpoints are stored: an engine in bfloat16 then holds the very same weights.
    return {name: tensor.bfloat16().float() for name, tensor in found.items()} | {
        "gain": (1 + 0.3 * torch.randn(D, generator=draw)).bfloat16().float(),
        "bias": (0.3 * torch.randn(D, generator=draw)).bfloat16().float(),
    }


def stream(dtype: torch.dtype, *, tokens: int = TOKENS, scale: float = 0.1) -> Tensor:
    return (scale * torch.randn(tokens, D, generator=torch.Generator().manual_seed(9))).to(dtype)


def block(kind: str = "rms_llama", *, width: int = M, gating: Any = None, norm_bias: bool = False) -> Any:
    held = tensors(width)
    network = FeedForward(
        held["gate"],
        held["up"],
        held["down"],
        None,
        None,
        None,
        activation_named("silu"),
        gating or gating_named("product"),
    )
    norm = Norm(norm_kind_named(kind), held["gain"], held["bias"] if norm_bias else None, 1e-5)
    wiring = Wiring(Placement.PRE, input_norm=norm)
    return network, wiring


def engine(dtype: torch.dtype, *, width: int = M, norm_bias: bool = False, **mistakes: Any) -> Engine:
    held = tensors(width)
    bias = held["bias"] if norm_bias else None
    return Engine(held["gate"], held["up"], held["down"], held["gain"], bias=bias, dtype=dtype).but(**mistakes)


def explained(captures: dict[str, Tensor], network: FeedForward, wiring: Wiring, **given: Any) -> Explanation:
    places = Alternatives(wirings=tuple(rewired(wiring, place)[0] for place in PLACES))
    return explain(captures, network, wiring, alternatives=given.pop("alternatives", places), **given)


def named(explanation: Explanation) -> dict[str, object]:
    assert explanation.verdict in {"explained", "as-declared"}, explanation.verdict
    return explanation.ranked[0].hypothesis.departures()


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, object]]] = {
    "swap": ({"swap": True}, {"swap": "exchanged"}),
    "activation on up": ({"activation_on_up": True}, {"swap": "activation-on-up"}),
    "names exchanged": ({"names_exchanged": True}, {"swap": "labels"}),
    "blocks of 4 ranks": ({"split_rows": 4}, {"layout": "blocks-4"}),
    "interleaved": ({"split_rows": M}, {"layout": "interleaved"}),
    "sum": ({"total": True}, {"combine": "sum"}),
    "both activated": ({"both_activated": True}, {"both_activated": True}),
    "eps": ({"eps": 1e-6}, {"eps": 1e-6}),
    "eps outside the root": ({"eps_outside": True}, {"eps_place": "outside"}),
    "offset": ({"added_to_gain": 1.0}, {"offset": 1.0}),
    "offset taken away": ({"added_to_gain": -1.0}, {"offset": -1.0}),
    "LayerNorm": ({"layer_norm": True}, {"norm_kind": "layernorm"}),
    "post": ({"placement": "post"}, {"placement": "post"}),
    "sandwich": ({"placement": "sandwich"}, {"placement": "sandwich"}),
    "branch-output": ({"placement": "branch-output"}, {"placement": "branch-output"}),
}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("mistake", "factor"), MISTAKES.values(), ids=MISTAKES)
def test_every_mistake_is_named_and_nothing_else(
    mistake: dict[str, Any], factor: dict[str, object], dtype: torch.dtype
) -> None:
    assert named(explained(engine(dtype, **mistake)(stream(dtype)), *block())) == factor


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) - CLIPPED))
def test_every_activation_is_named_by_its_formula(name: str, dtype: torch.dtype) -> None:
    captures = engine(dtype, activation=activation_named(name))(stream(dtype))
    found = named(explained(captures, *block())).get("activation", "silu")
    assert ACTIVATIONS[str(found)].formula == ACTIVATIONS[name].formula


def test_the_cast_order_shows_in_half_precision_and_does_not_exist_in_float32() -> None:
    half, single = (engine(dtype, gain_in_float32=True)(stream(dtype)) for dtype in (torch.bfloat16, torch.float32))
    assert named(explained(half, *block())) == {"cast": "before"}
    explanation = explained(single, *block())
    assert named(explanation) == {}
    assert Hypothesis(cast="before") in [fit.hypothesis for fit in explanation.not_excluded]


def test_rows_normalised_twice_are_named_where_rounding_does_not_hide_it_and_never_called_another_mistake() -> None:
    """The second time divides by sqrt(ms / (ms + eps) + eps), next to 1: the two blocks are one but for rounding."""
    half, single = (engine(dtype, normed_twice=True)(stream(dtype)) for dtype in (torch.bfloat16, torch.float32))
    assert named(explained(single, *block())) == {"norm_passes": "twice"}
    explanation = explained(half, *block())
    assert named(explanation) == {}
    assert Hypothesis(norm_passes="twice") in [fit.hypothesis for fit in explanation.not_excluded]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_dropped_norm_bias_is_named(dtype: torch.dtype) -> None:
    captures = engine(dtype, norm_bias=True, bias_dropped=True)(stream(dtype))
    assert named(explained(captures, *block("layernorm", norm_bias=True))) == {"norm_bias": "dropped"}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_transposed_down_of_a_square_block_is_named(dtype: torch.dtype) -> None:
    captures = engine(dtype, width=D, down_transposed=True)(stream(dtype))
    assert named(explained(captures, *block(width=D))) == {"transposed": "down"}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_dropped_clamp_is_named(dtype: torch.dtype) -> None:
    clamped = block(gating=gating_named("clamped_before", limit=1.0))
    assert named(explained(engine(dtype)(stream(dtype)), *clamped)) == {"clamp": "dropped"}
    assert named(explained(engine(dtype, clamp=1.0)(stream(dtype)), *clamped)) == {}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_norm_of_another_role_is_named(dtype: torch.dtype) -> None:
    network, wiring = block()
    assert wiring.input_norm is not None
    other = tensors(seed=5)["gain"]
    norms = {"attn_in": Norm(wiring.input_norm.kind, other, None, 1e-5)}
    captures = engine(dtype).but(gain=other)(stream(dtype))
    explanation = explained(captures, network, wiring, alternatives=Alternatives(norms=norms))
    assert named(explanation) == {"norm_from": "attn_in"}


SUBSETS = (
    ("x", "normed"),
    ("x", "gate"),
    ("x", "hidden"),
    ("x", "output"),
    ("normed", "gate", "up", "hidden"),
    ("gate", "up", "hidden"),
    ("activated", "up", "hidden", "down"),
    ("hidden", "down"),
    ("x", "contribution", "output"),
    tuple(FACTORS_OF),
)


@pytest.mark.parametrize("other_sums", [False, True], ids=["the same kernel", "another engine"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_a_healthy_capture_is_as_declared(subset: tuple[str, ...], dtype: torch.dtype, other_sums: bool) -> None:
    captures = engine(dtype, other_sums=other_sums)(stream(dtype))
    explanation = explained({name: captures[name] for name in subset}, *block())
    assert explanation.verdict == "as-declared"
    assert explanation.ranked[0].excess < 2  # the spread of a few roundings about what they round to


@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_a_swap_is_named_wherever_it_shows(subset: tuple[str, ...]) -> None:
    captures = engine(torch.float32, swap=True)(stream(torch.float32))
    explanation = explained({name: captures[name] for name in subset}, *block())
    shows = any("swap" in explanation.trial.replay.graph.factors(stage) for stage in explanation.trial.stages)
    # From captured branches on, an exchange of weights has left no trace.
    shows = shows and not {"gate", "activated"} & set(subset[:1])
    assert named(explanation) == ({"swap": "exchanged"} if shows else {})


PAIRS = [
    ("swap", "eps"),
    ("sum", "offset"),
    ("eps outside the root", "both activated"),
    ("LayerNorm", "swap"),
    ("post", "sum"),
]


@pytest.mark.parametrize(
    ("pair", "subset"), [*((pair, tuple(FACTORS_OF)) for pair in PAIRS), (PAIRS[0], ("x", "output"))]
)
def test_two_mistakes_are_named(pair: tuple[str, str], subset: tuple[str, ...]) -> None:
    (first, one), (second, other) = (MISTAKES[name] for name in pair)
    captures = engine(torch.float32, **first, **second)(stream(torch.float32))
    assert named(explained({name: captures[name] for name in subset}, *block())) == one | other


def test_three_mistakes_and_noise_are_unexplained() -> None:
    captures = engine(torch.float32, swap=True, total=True, added_to_gain=1.0)(stream(torch.float32))
    explanation = explained(captures, *block())
    assert (explanation.verdict, explanation.tied) == ("unexplained", 0)
    noise = {name: torch.randn_like(tensor) for name, tensor in captures.items()}
    explanation = explained(noise, *block())
    assert explanation.verdict == "unexplained"
    assert explanation.ranked[0].excess > 100


def test_an_unseen_epsilon_is_left_open_and_a_small_one_is_not() -> None:
    """science.md: 1e-5 against 1e-6 moves a row's scale by 4.5e-6 / mean square; bfloat16 resolves 8e-3."""
    loud = stream(torch.bfloat16, scale=30.0)
    explanation = explained(engine(torch.bfloat16, eps=1e-6)(loud), *block())
    assert explanation.verdict == "as-declared"
    assert Hypothesis(eps=1e-6) in [fit.hypothesis for fit in explanation.not_excluded]


def test_bfloat16_widened_to_float32_is_still_bfloat16() -> None:
    captures = engine(torch.bfloat16, eps=1e-6)(stream(torch.bfloat16))
    wide = {name: tensor.float() for name, tensor in captures.items()}
    explanation = explained(wide, *block())
    assert explanation.captures.dtype is torch.bfloat16
    assert named(explanation) == {"eps": 1e-6}


def test_many_tokens_are_thinned_to_those_that_tell() -> None:
    x = stream(torch.float32, tokens=1000)
    x[700] *= 1e-3
    explanation = explained(engine(torch.float32, eps=1e-6)(x), *block())
    assert named(explanation) == {"eps": 1e-6}
    assert explanation.captures.given == 1000
    assert 700 in explanation.captures.tokens
    assert len(explanation.captures.tokens) <= 256


def test_every_single_mistake_touches_a_stage() -> None:
    network, wiring = block("layernorm", norm_bias=True)
    touched = {factor for factors in FACTORS_OF.values() for factor in factors}
    for hypothesis in single_mistakes(network, wiring, Alternatives()):
        assert len(hypothesis.departures()) == 1
        assert hypothesis.departures().keys() <= touched


def healthy() -> dict[str, Tensor]:
    return engine(torch.float32)(stream(torch.float32))


def without_last(tensor: Tensor) -> Tensor:
    return tensor[:-1]


def with_nan(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[3, 5] = torch.nan
    return changed


BAD = {
    "unknown name": (lambda good: {**good, "gated": good["gate"]}, "unknown stage 'gated'"),
    "x alone": (lambda good: {"x": good["x"]}, "no stage after x"),
    "nothing follows": (lambda good: {name: good[name] for name in ("down", "activated")}, "nothing can be compared"),
    "wrong width": (lambda good: {**good, "gate": good["down"]}, r"gate has shape \[64, 48\]"),
    "other tokens": (lambda good: {**good, "up": without_last(good["up"])}, "not of the same tokens"),
    "empty": (lambda good: {name: tensor[:0] for name, tensor in good.items()}, "x is empty"),
    "integers": (lambda good: {**good, "up": good["up"].long()}, "floating point"),
    "eight bits": (lambda good: {**good, "up": good["up"].to(torch.float8_e4m3fn)}, "16 bits at least"),
    "a scalar": (lambda good: {**good, "up": torch.tensor(1.0)}, "up has shape"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=BAD)
def test_captures_that_cannot_be_compared_are_refused(spoil: Any, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        explained(spoil(healthy()), *block())


def test_the_first_stage_that_is_not_finite_is_named() -> None:
    good = healthy()
    spoilt = {**good, "up": with_nan(good["up"]), "down": with_nan(good["down"])}
    with pytest.raises(InvalidValue, match=r"up\[3, 5\] is nan, and 1 value.*x, normed, gate before it hold none"):
        explained(spoilt, *block())


def test_a_plain_network_has_no_gate() -> None:
    held = tensors()
    plain = FeedForward(
        None, held["up"], held["down"], None, None, None, activation_named("gelu"), gating_named("product")
    )
    with pytest.raises(InvalidValue, match="this block has no gate"):
        explained(healthy(), plain, block()[1])


def test_leading_axes_of_one_do_not_matter() -> None:
    good = healthy()
    assert named(explained({**good, "x": good["x"].unsqueeze(0)}, *block())) == {}


def test_the_sign_test_is_the_binomial_tail() -> None:
    assert sign_test("tokens", 0, 0).chance == 1.0
    assert sign_test("tokens", 10, 9).chance == pytest.approx(11 / 1024)
    assert sign_test("tokens", 4, 0).chance == pytest.approx(1.0)
    assert sign_test("elements", 100_000, 100_000).chance == 0.0


@pytest.mark.parametrize("formula", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("kept", [("normed", "down"), ("normed", "hidden"), ("x", "down")], ids="+".join)
def test_of_several_spellings_of_one_function_the_plain_one_is_named(formula: str, kept: tuple[str, ...]) -> None:
    """Which of them lies nearest behind a matrix product is chance."""
    for spelling in (name for name, row in ACTIVATIONS.items() if row.formula == formula and name != formula):
        captures = engine(torch.float32, activation=activation_named(spelling))(stream(torch.float32, scale=1.0))
        explanation = explained({stage: captures[stage] for stage in kept}, *block())
        told = named(explanation)["activation"]
        # Another spelling is told only where the sign test excludes the plain one.
        plain = explanation.trial.fit(Hypothesis(activation=formula))
        excluded = explanation.trial.votes(explanation.ranked[0], plain).chance <= EXCLUDES
        assert told == formula or (told == spelling and (excluded or not plain.at_floor))


def check_finite(explanation: Explanation) -> None:
    for stage in explanation.ranked[0].stages:
        assert 0.0 < stage.floor < 0.1
        assert math.isfinite(stage.residual)
        assert math.isfinite(stage.excess)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_tokens_of_zeros_hide_nothing(dtype: torch.dtype) -> None:
    """Padding: nothing to round, and nothing that two hypotheses could differ in."""
    x = stream(dtype)
    x[::3] = 0.0
    for mistake, factor in (({}, {}), MISTAKES["swap"], MISTAKES["eps"]):
        explanation = explained(engine(dtype, **mistake)(x), *block())
        assert named(explanation) == factor
        check_finite(explanation)


def test_tokens_of_zeros_in_float64() -> None:
    """The rounding of a zero has no square there."""
    network, wiring = block()
    x = stream(torch.float64)
    x[::3] = 0.0
    for run, factor in ((network, {}), (network.swapped(), {"swap": "exchanged"})):
        stages = run_block(x, run, wiring)._asdict()
        captures = {name: stages[name] for name in ("x", "normed", "hidden", "down", "contribution", "output")}
        explanation = explained(captures, network, wiring)
        assert named(explanation) == factor
        check_finite(explanation)
