"""Every single mistake, and pairs of them, in captures of SmolLM2: named, or told apart from nothing it equals.

The captures come from an engine that makes mistakes on purpose (`tests/wrong_engine.py`), on the residual stream that
transformers computed for a paragraph of English; and, without a mistake, from transformers itself.
"""

import importlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from glassblock.numerics.activations import activation_named, gating_named
from glassblock.numerics.explanation import Explanation, explain
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.hypotheses import Alternatives, Hypothesis
from glassblock.numerics.nearness import EXCLUDES
from glassblock.numerics.norms import Norm, norm_kind_named
from glassblock.numerics.rewiring import rewired
from glassblock.numerics.wiring import Placement, Wiring
from record import ROOT, Promise, publish, table
from safetensors import safe_open
from torch import Tensor

LAYERS = (0, 5, 15, 29)
PAIR_LAYERS = (0, 15)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PLACES = (Placement.POST, Placement.SANDWICH, Placement.BRANCH_OUTPUT)

sys.path.append(str(ROOT / "tests"))
sys.path.append(str(ROOT / "tools"))


class Mistake(NamedTuple):
    """What the engine does, and how the hypothesis is called that says so."""

    engine: Mapping[str, Any]
    factor: Mapping[str, Any]


MISTAKES = {
    "gate and up exchanged": Mistake({"swap": True}, {"swap": "exchanged"}),
    "activation on up": Mistake({"activation_on_up": True}, {"swap": "activation-on-up"}),
    "activation gelu": Mistake({"activation": activation_named("gelu")}, {"activation": "gelu"}),
    "activation gelu_tanh": Mistake({"activation": activation_named("gelu_tanh")}, {"activation": "gelu_tanh"}),
    "activation relu": Mistake({"activation": activation_named("relu")}, {"activation": "relu"}),
    "activation dropped": Mistake({"activation": activation_named("identity")}, {"activation": "identity"}),
    "activation on both branches": Mistake({"both_activated": True}, {"both_activated": True}),
    "sum for product": Mistake({"total": True}, {"combine": "sum"}),
    "eps 1e-6 for 1e-5": Mistake({"eps": 1e-6}, {"eps": 1e-6}),
    "eps outside the root": Mistake({"eps_outside": True}, {"eps_place": "outside"}),
    "offset 1": Mistake({"added_to_gain": 1.0}, {"offset": 1.0}),
    "gain before the cast": Mistake({"gain_in_float32": True}, {"cast": "before"}),
    "LayerNorm for RMSNorm": Mistake({"layer_norm": True}, {"norm_kind": "layernorm"}),
    "placed post": Mistake({"placement": "post"}, {"placement": "post"}),
    "placed on the branch's output": Mistake({"placement": "branch-output"}, {"placement": "branch-output"}),
    "read as blocks of 4 ranks": Mistake({"split_rows": 4}, {"layout": "blocks-4"}),
}


def main() -> int:
    engines = importlib.import_module("wrong_engine")
    streams = {name: dict(_captured(dtype)) for name, dtype in DTYPES.items()}
    blocks = {layer: _block(layer) for layer in range(30)}
    healthy = [
        (name, layer, explain(captured, *blocks[layer], alternatives=_alternatives(blocks[layer][1])))
        for name, layers in streams.items()
        for layer, captured in layers.items()
    ]
    alarms = [(name, layer) for name, layer, explanation in healthy if explanation.verdict != "as-declared"]
    singles, told = [], Counter[str]()
    for label, mistake in MISTAKES.items():
        row = [label]
        for name, dtype in DTYPES.items():
            for layer in LAYERS:
                engine = _engine(engines, blocks[layer], dtype)
                captured = engine.but(**mistake.engine)(streams[name][layer]["x"])
                outcome = _outcome(_explained(captured, blocks[layer]), Hypothesis(**mistake.factor))
                told[_kind(outcome)] += 1
                row.append(outcome)
        singles.append(row)
    pairs = list(_pairs(engines, blocks, streams["float32"]))
    paired = Counter(_kind(outcome) for _, *outcomes in pairs for outcome in outcomes)
    tiny = list(_tiny(engines))
    held = "every single mistake is named, or told as one of those the captures leave open"
    healthy_said = "transformers' own captures are as declared, 30 layers in two dtypes"
    all_named = all(row[-1] == "named" for row in tiny)
    promises = [
        Promise(healthy_said, f"{len(alarms)} alarms", not alarms),
        Promise(held, _said(told), not told["missed"]),
        Promise("the same of every pair, in float32", _said(paired), not paired["missed"]),
        Promise("transposed down and a dropped norm bias, on tiny blocks", f"{len(tiny)} cases", all_named),
    ]
    says = (
        "`named`: the verdict is `explained` and names the mistake and nothing else. `one of n`: `indistinguishable`,"
        " and the mistake is among the n hypotheses told. `hidden`: on these tokens no sign test tells the mistake, or"
        " the second of two, from what the verdict names: both give the captured bits, or miss as few. `missed` would"
        " be anything else. All nine stages are captured."
    )
    columns = ("mistake", *(f"{name}, layer {layer}" for name in DTYPES for layer in LAYERS))
    sections = [
        "## One mistake\n",
        table(columns, singles),
        "## Two mistakes, in float32\n",
        table(("mistakes", *(f"layer {layer}" for layer in PAIR_LAYERS)), pairs),
        "## On tiny blocks\n",
        table(("mistake", "dtype", "outcome"), tiny),
    ]
    return publish("Mistakes explained from captures", says, promises, sections)


def _pairs(engines: Any, blocks: Mapping[int, Any], streams: Mapping[int, Any]) -> Iterator[tuple[str, ...]]:
    for (one, first), (other, second) in combinations(MISTAKES.items(), 2):
        if first.factor.keys() & second.factor.keys() or _impossible(first, second):
            continue
        outcomes: list[str] = []
        for layer in PAIR_LAYERS:
            engine = _engine(engines, blocks[layer], torch.float32)
            captured = engine.but(**first.engine, **second.engine)(streams[layer]["x"])
            truth = Hypothesis(**_both(first.factor, second.factor))
            outcomes.append(_outcome(_explained(captured, blocks[layer]), truth))
        yield f"{one}, {other}", *outcomes


def _both(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """An engine that exchanges gate and up, and then reads the rows in blocks, makes one mistake in one layout."""
    both = {**first, **second}
    if both.get("swap") == "exchanged" and "layout" in both:
        return {"layout": f"{both['layout']}-up-first"}
    return both


def _impossible(first: Mistake, second: Mistake) -> bool:
    """LayerNorm's kernel has one place for epsilon and one order of the cast."""
    both = {*first.factor, *second.factor}
    return "norm_kind" in both and bool(both & {"eps_place", "cast"})


def _outcome(explanation: Explanation, truth: Hypothesis) -> str:
    tied = [fit.hypothesis for fit in explanation.ranked[: explanation.tied]]
    if explanation.verdict == "explained" and tied == [truth]:
        return "named"
    if explanation.verdict == "indistinguishable" and truth in tied:
        return f"one of {len(tied)}"
    # The truth is at the floor too, and no sign test tells it from what the verdict names.
    true = explanation.trial.fit(truth)
    if tied and true.at_floor and explanation.trial.votes(explanation.ranked[0], true).chance > EXCLUDES:
        return "hidden"
    return "missed: " + (", ".join(str(hypothesis.departures()) for hypothesis in tied) or explanation.verdict)


def _kind(outcome: str) -> str:
    return "one of several" if outcome.startswith("one of") else outcome.partition(":")[0]


def _said(told: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in told.most_common())


def _explained(captured: Mapping[str, Tensor], block: tuple[FeedForward, Wiring]) -> Explanation:
    return explain(captured, *block, alternatives=_alternatives(block[1]))


def _alternatives(wiring: Wiring) -> Alternatives:
    return Alternatives(wirings=tuple(rewired(wiring, place)[0] for place in PLACES))


def _engine(engines: Any, block: tuple[FeedForward, Wiring], dtype: torch.dtype) -> Any:
    network, wiring = block
    assert wiring.input_norm is not None
    norm = wiring.input_norm
    return engines.Engine(network.gate, network.up, network.down, norm.gain, bias=norm.bias, eps=norm.eps, dtype=dtype)


def _tiny(engines: Any) -> Iterator[tuple[str, ...]]:
    for label, mistake, factor, kind, width in (
        ("transposed down", {"down_transposed": True}, {"transposed": "down"}, "rms_llama", 48),
        ("norm bias dropped", {"bias_dropped": True}, {"norm_bias": "dropped"}, "layernorm", 96),
    ):
        draw = torch.Generator().manual_seed(0)
        gate, up, down = (torch.randn(shape, generator=draw) / 7 for shape in ((width, 48), (width, 48), (48, width)))
        gain, bias = 1 + torch.randn(48, generator=draw) / 5, torch.randn(48, generator=draw) / 5
        network = FeedForward(gate, up, down, None, None, None, activation_named("silu"), gating_named("product"))
        norm = Norm(norm_kind_named(kind), gain, bias if kind == "layernorm" else None, 1e-5)
        block = network, Wiring(Placement.PRE, input_norm=norm)
        for name, dtype in DTYPES.items():
            captured = _engine(engines, block, dtype).but(**mistake)(torch.randn(64, 48, generator=draw))
            yield label, name, _outcome(_explained(captured, block), Hypothesis(**factor))


def _block(layer: int) -> tuple[FeedForward, Wiring]:
    opened: Any = safe_open(_smollm2() / "model.safetensors", "pt")
    prefix = f"model.layers.{layer}."
    with opened as file:
        gate, up, down = (file.get_tensor(f"{prefix}mlp.{role}_proj.weight") for role in ("gate", "up", "down"))
        gain = file.get_tensor(f"{prefix}post_attention_layernorm.weight")
    network = FeedForward(gate, up, down, None, None, None, activation_named("silu"), gating_named("product"))
    return network, Wiring(Placement.PRE, input_norm=Norm(norm_kind_named("rms_llama"), gain, None, 1e-5))


def _captured(dtype: torch.dtype) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Every stage of every layer, hooked in transformers' own forward pass."""
    hooks = importlib.import_module("real.conftest")
    models = importlib.import_module("transformers")
    tokenizers = importlib.import_module("tokenizers")
    models.utils.logging.disable_progress_bar()
    model = models.AutoModelForCausalLM.from_pretrained(str(_smollm2()), dtype=dtype).eval()
    tokens = tokenizers.Tokenizer.from_file(str(_smollm2() / "tokenizer.json")).encode(hooks.PARAGRAPH).ids
    with hooks.capturing(dict(enumerate(model.model.layers))) as captured, torch.inference_mode():
        model(torch.tensor([tokens]))
    for layer, stages in captured.items():
        yield layer, {stage: tensor[0].clone() for stage, tensor in stages.items()}


def _smollm2() -> Path:
    return importlib.import_module("smollm2").directories().single


if __name__ == "__main__":
    sys.exit(main())
