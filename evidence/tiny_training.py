"""The example, trained from ten seeds: does training give every gate a direction and leave the rest noise?

`examples/train_tiny_llama.py` trains, with half its batch; the weights are judged on the way and at the end, with draws
enough for a statement over all layers of all seeds together. That p-values of tossed signs are uniform tests the code
alone. That those of trained up projections are, over trainings that know nothing of one another, tests the symmetry.
"""

import importlib
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from glassblock.numerics.gate_or_up import Verdict, judge
from glassblock.numerics.gate_up_evidence import GateUpEvidence, gate_up_evidence
from record import ROOT, Promise, publish, short, table
from torch import nn
from uniformity import uniformity_p

SEEDS = range(10)
STEPS = (150, 600, 1500)  # of one training: its weights are judged after each of these
SEQUENCES = 4  # in a batch
LEVEL = 5e-6  # 1e-3 over 200 tensors
DRAWS = 9999
NOISE = {"up": "T(up)", "paired_gate": "P(gate)", "down_columns": "T(columns of down)", "product": "P(gate * up)"}


class Row(NamedTuple):
    """One layer after some steps of one training."""

    seed: int
    steps: int
    layer: int
    loss: float
    evidence: GateUpEvidence
    exchanged: Verdict


def main() -> int:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        rows = [row for trained in pool.imap(training, SEEDS) for row in trained]
    return report(rows)


def training(seed: int) -> list[Row]:
    """All that is looked at of one training."""
    torch.set_num_threads(1)
    sys.path.append(str(ROOT / "examples"))
    example = importlib.import_module("train_tiny_llama")
    text, recipe = example.python_documentation(), example.Recipe(steps=STEPS[-1], sequences=SEQUENCES)
    torch.manual_seed(seed)
    model = example.LlamaForCausalLM()
    rows: list[Row] = []
    for step, _ in example.training(model, text, recipe=recipe, seed=seed):
        if step in STEPS:
            loss = example.held_out_loss(model, text, recipe=recipe)
            rows += [judged(layer.mlp, seed, step, number, loss) for number, layer in enumerate(model.model.layers)]
            print(f"seed {seed}, step {step}: {loss:.3f} nats per byte", file=sys.stderr, flush=True)
    return rows


def judged(network: nn.Module, seed: int, steps: int, layer: int, loss: float) -> Row:
    weights = dict(network.named_parameters())
    gate, up, down = (weights[f"{role}_proj.weight"].detach() for role in ("gate", "up", "down"))
    evidence = gate_up_evidence(gate, up, down, seed=seed, level=LEVEL, draws=DRAWS, certify="all")
    exchanged = gate_up_evidence(up, gate, down, seed=seed, level=LEVEL, draws=DRAWS)
    return Row(seed, steps, layer, loss, evidence, judge(exchanged, level=LEVEL).verdict)


def report(rows: Sequence[Row]) -> int:
    final = [row for row in rows if row.steps == STEPS[-1]]
    certified = sum(row.evidence.gate.rejected(LEVEL) for row in final)
    uniform = {name: uniformity_p(p_values(final, name), draws=DRAWS) for name in NOISE}
    false = sum(named(row) is Verdict.SWAPPED or row.exchanged is Verdict.AS_NAMED for row in rows)
    promises = [
        Promise(
            f"after {STEPS[-1]} steps the gate is certified at {short(LEVEL)} in every layer",
            f"{certified} of {len(final)}",
            certified == len(final),
        ),
        Promise(
            f"p of draws of the {len(final)} up projections is uniform: Kolmogorov and Smirnov above 0.01",
            f"{uniform['up']:.3f}",
            uniform["up"] > 0.01,
        ),
        Promise(
            f"and of the mirrored gates and both controls: above 0.01/{len(NOISE) - 1}",
            f"lowest {min(p for name, p in uniform.items() if name != 'up'):.3f}",
            all(p > 0.01 / (len(NOISE) - 1) for name, p in uniform.items() if name != "up"),
        ),
        Promise("no false verdict, as named or exchanged", f"{false} of {2 * len(rows)}", false == 0),
    ]
    says = (
        "The Llama of `examples/train_tiny_llama.py` (361,024 parameters, 384 neurons, next-byte cross entropy, AdamW, "
        f"a cosine over {STEPS[-1]} steps of {SEQUENCES} windows), trained from {len(SEEDS)} seeds; loss in nats per "
        f"byte, {DRAWS} sign draws, certified at {short(LEVEL)}."
    )
    sections = (
        "## Power, by the steps of training\n",
        table(
            ("steps", "layers", "median loss", "gate rejected", "as named", "exchanged: found", "false verdicts"),
            (power(steps, [row for row in rows if row.steps == steps]) for steps in STEPS),
        ),
        f"## P-values after {STEPS[-1]} steps\n",
        table(
            ("statistic", "mean p", "p <= 0.01", "lowest", "Kolmogorov and Smirnov p"),
            (spread(final, name, uniform[name]) for name in NOISE),
        ),
        f"## Layers after {STEPS[-1]} steps\n",
        table(
            (
                "seed, layer",
                "held-out loss",
                "log10 p: T(gate)",
                "P(up)",
                "p of draws: T(up)",
                *(said for name, said in NOISE.items() if name != "up"),
                "judged",
                "exchanged",
            ),
            map(told, final),
        ),
    )
    return publish("Trained from scratch", says, promises, sections)


def power(steps: int, rows: Sequence[Row]) -> tuple[object, ...]:
    counts = (
        sum(row.evidence.gate.rejected(LEVEL) for row in rows),
        sum(named(row) is Verdict.AS_NAMED for row in rows),
        sum(row.exchanged is Verdict.SWAPPED for row in rows),
        sum(named(row) is Verdict.SWAPPED or row.exchanged is Verdict.AS_NAMED for row in rows),
    )
    return steps, len(rows), f"{statistics.median(row.loss for row in rows):.3f}", *counts


def spread(rows: Sequence[Row], name: str, uniform: float) -> tuple[object, ...]:
    values = p_values(rows, name)
    below = sum(p <= 0.01 for p in values)
    return NOISE[name], f"{statistics.mean(values):.3f}", below, f"{min(values):.4f}", f"{uniform:.3f}"


def told(row: Row) -> tuple[object, ...]:
    return (
        f"{row.seed}, {row.layer}",
        f"{row.loss:.3f}",
        f"{row.evidence.gate.log10_p:.2f}",
        f"{row.evidence.paired_up.log10_p:.2f}",
        *(f"{getattr(row.evidence, name).draws_p:.4f}" for name in NOISE),
        named(row),
        row.exchanged,
    )


def p_values(rows: Sequence[Row], name: str) -> list[float]:
    return [getattr(row.evidence, name).draws_p for row in rows]


def named(row: Row) -> Verdict:
    return judge(row.evidence, level=LEVEL).verdict


if __name__ == "__main__":
    sys.exit(main())
