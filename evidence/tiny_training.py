"""The example, trained from three seeds: does training give every gate a direction and leave the rest noise?

`examples/train_tiny_llama.py` trains; its weights are judged here, with draws enough for a statement over all
layers of all seeds together.
"""

import importlib
import sys
from typing import NamedTuple

import torch
from glassblock.numerics.gate_or_up import GateUpEvidence, Verdict, gate_up_evidence, judge
from record import ROOT, Promise, publish, short, table
from torch import nn

SEEDS = (0, 1, 2)
LEVEL = 5e-6  # 1e-3 over 200 tensors
DRAWS = 9999
NOISE = ("up", "paired_gate", "down_columns", "product")


class Row(NamedTuple):
    """One layer of one training."""

    seed: int
    layer: int
    loss: float
    evidence: GateUpEvidence
    exchanged: Verdict


def main() -> int:
    torch.set_num_threads(1)
    sys.path.append(str(ROOT / "examples"))
    example = importlib.import_module("train_tiny_llama")
    text, recipe = example.python_documentation(), example.Recipe()
    rows: list[Row] = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = example.LlamaForCausalLM()
        example.train(model, text, recipe=recipe, seed=seed)
        loss = example.held_out_loss(model, text, recipe=recipe)
        rows += [judged(layer.mlp, seed, number, loss) for number, layer in enumerate(model.model.layers)]
    return report(rows)


def judged(network: nn.Module, seed: int, layer: int, loss: float) -> Row:
    weights = dict(network.named_parameters())
    gate, up, down = (weights[f"{role}_proj.weight"].detach() for role in ("gate", "up", "down"))
    evidence = gate_up_evidence(gate, up, down, seed=seed, level=LEVEL, draws=DRAWS, certify="all")
    exchanged = gate_up_evidence(up, gate, down, seed=seed, level=LEVEL, draws=DRAWS)
    return Row(seed, layer, loss, evidence, judge(exchanged, level=LEVEL).verdict)


def report(rows: list[Row]) -> int:
    certified = sum(row.evidence.gate.rejected(LEVEL) for row in rows)
    noise = [getattr(row.evidence, name) for row in rows for name in NOISE]
    least = min(test.draws_p for test in noise)
    named = [judge(row.evidence, level=LEVEL).verdict for row in rows]
    false = named.count(Verdict.SWAPPED) + sum(row.exchanged is Verdict.AS_NAMED for row in rows)
    promises = [
        Promise(
            f"the gate is certified at {short(LEVEL)} in every layer",
            f"{certified} of {len(rows)}",
            certified == len(rows),
        ),
        Promise(
            f"up, the mirrored gate and both controls are noise: p of draws above 0.01/{len(noise)}",
            f"lowest {least:.4f}",
            least > 0.01 / len(noise),
        ),
        Promise("no false verdict, as named or exchanged", f"{false} of {2 * len(rows)}", false == 0),
    ]
    body = (
        (
            f"{row.seed}, {row.layer}",
            f"{row.loss:.3f}",
            f"{row.evidence.gate.log10_p:.2f}",
            f"{row.evidence.paired_up.log10_p:.2f}",
            *(f"{getattr(row.evidence, name).draws_p:.4f}" for name in NOISE),
            judge(row.evidence, level=LEVEL).verdict,
            row.exchanged,
        )
        for row in rows
    )
    header = (
        "seed, layer",
        "held-out loss",
        "log10 p: T(gate)",
        "P(up)",
        "p of draws: T(up)",
        "P(gate)",
        "T(columns of down)",
        "P(gate * up)",
        "judged",
        "exchanged",
    )
    says = (
        "The Llama of `examples/train_tiny_llama.py` (361,024 parameters, next-byte cross entropy, AdamW), trained "
        f"from {len(SEEDS)} seeds; loss in nats per byte, {DRAWS} sign draws."
    )
    return publish("Trained from scratch", says, promises, ("## Layers\n", table(header, body)))


if __name__ == "__main__":
    sys.exit(main())
