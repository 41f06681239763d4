"""A second real model, of another family: Gemma 3 270M is silent as it is, and each mistake made in it is named.

GELU for SiLU, four norms a layer with 1 added to their gains, norms of queries and keys, one head of keys for four of
queries, sliding windows: nothing of it is SmolLM2's.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.mistakes import MISTAKES, plant
from glassblock.audit.rotary_study import ROTARY_RULE
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.patches import patched
from glassblock.operations.likelihoods import likelihoods
from glassblock.operations.store import CheckpointStore
from glassblock.wire.audits import Report
from glassblock.wire.likelihoods import LikelihoodRequest
from record import ROOT, Promise, publish, table
from transformers import AutoModelForCausalLM

sys.path.append(str(ROOT / "tools"))
from gemma3 import directory

TOKENS = 256
SWAP = "ffn/gate-up-swapped"


def main() -> int:
    path = directory()
    checkpoint = open_checkpoint(path)
    healthy = audit_checkpoint(checkpoint)
    layers = checkpoint.layer_indices
    alone = [(layer, audited(checkpoint, "swap", [layer])) for layer in layers]
    everywhere = audited(checkpoint, "swap-everywhere", layers)
    turned = audited(checkpoint, "rotary-order", layers)
    found = [layer for layer, report in alone if swapped(report) == [layer]]
    loud = loud_in(healthy)
    furthest = likelihoods_apart(path)
    promises = [
        Promise("as it is: no error, no warning", f"{len(loud)} of {len(healthy.coverage)} rules", not loud),
        Promise(
            "as it is: gate and up of every layer are known as named",
            f"{decided(healthy, SWAP)} of {len(layers)}",
            decided(healthy, SWAP) == len(layers),
        ),
        Promise(
            "gate and up exchanged in one layer: that layer is named, and no other",
            f"{len(found)} of {len(layers)}",
            len(found) == len(layers),
        ),
        Promise(
            "exchanged in every layer: all are named",
            f"{len(swapped(everywhere))} of {len(layers)}",
            swapped(everywhere) == list(layers),
        ),
        Promise(
            "rows of queries and keys left in pairs: named, and nothing else",
            ", ".join(sorted(loud_in(turned))) or "nothing",
            loud_in(turned) == {ROTARY_RULE},
        ),
        Promise(
            f"log-likelihoods of {TOKENS} tokens in float32: within 1e-3 of transformers'",
            f"{furthest:.1e} apart at most",
            furthest <= 1e-3,
        ),
    ]
    rows = [(layer, *numbers(healthy, layer), *numbers(report, layer)) for layer, report in alone]
    head = ("layer", "z of gate", "z of up", "exchanged: z of gate", "z of up")
    says = (
        "bfloat16, dequantised from Q4_K_M; `tools/gemma3.py` fetches it. z tells how far the direction that the rows"
        " of a projection have in common stands out of draws of signs: a gate has one, an up has none."
    )
    return publish("Gemma 3 270M", says, promises, [table(head, rows)])


def audited(checkpoint: Checkpoint, mistake: str, layers: Iterable[int]) -> Report:
    """With one mistake planted in memory."""
    planted = plant(MISTAKES[mistake], checkpoint, tuple(layers))
    assert not isinstance(planted, str), planted
    return audit_checkpoint(patched(checkpoint, planted.patch), AuditQuestion())


def swapped(report: Report) -> list[int]:
    """The layers that are said to be exchanged, by errors of one layer or of several."""
    named = (finding for finding in report.findings if finding.rule == SWAP)
    return sorted({layer for finding in named for layer in finding.evidence.get("layers", [finding.layer])})


def loud_in(report: Report) -> set[str]:
    """Rules with errors or warnings."""
    return {finding.rule for finding in report.findings if finding.level != "note"}


def decided(report: Report, rule: str) -> int:
    """How many layers a rule decided."""
    return next(entry.checked for entry in report.coverage if entry.rule == rule)


def numbers(report: Report, layer: int) -> tuple[str, str]:
    """z of gate and of up."""
    metrics = next(entry.metrics for entry in report.layers if entry.layer == layer)
    return f"{metrics['gate_z']:.1f}", f"{metrics['up_z']:.1f}"


def likelihoods_apart(path: Path) -> float:
    """The largest difference of a token's log-likelihood from transformers'."""
    ids = torch.randint(2, 262_144, (TOKENS,), generator=torch.Generator().manual_seed(0))
    request = LikelihoodRequest(checkpoint=path.name, token_ids=tuple(ids.tolist()))
    store = CheckpointStore([path.parent], device="cpu")
    ours = torch.tensor(likelihoods(store, request).answer.log_likelihoods)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1].log_softmax(-1)
    theirs = logits.gather(-1, ids[1:, None])[:, 0]
    return float((ours - theirs).abs().max())


if __name__ == "__main__":
    sys.exit(main())
