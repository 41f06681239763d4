"""Reports as an audit writes them, made by hand: a healthy one, a swapped one, one that could not decide."""

from typing import Any

from glassblock.wire.audits import (
    AuditedCheckpoint,
    Coverage,
    Finding,
    Fix,
    LayerMetrics,
    Report,
    Skipped,
    Undecidable,
    Verdict,
)

RULE = "ffn/gate-up-swapped"


def report(**changes: Any) -> Report:
    layers = changes.pop("depth", 4)
    fields: dict[str, Any] = {
        "glassblock": "0.1.0",
        "checkpoint": AuditedCheckpoint(
            path="SmolLM2-135M", family="llama", verified="bit for bit", layers=layers, tensors=272, bytes=269_060_552
        ),
        "verdict": "pass",
        "findings": (),
        "coverage": (
            Coverage(rule=RULE, checked=layers),
            Coverage(rule="container/truncated", checked=1),
            Coverage(rule="container/overlap", checked=1),
            Coverage(rule="config/shape", checked=272),
            Coverage(rule="tensor/non-finite", checked=272),
            Coverage(rule="index/missing-shard", checked=0, skipped=(Skipped(reason="a single file has no index"),)),
            Coverage(rule="index/total-size", checked=0, skipped=(Skipped(reason="a single file has no index"),)),
            Coverage(rule="config/eps-conflict", checked=0, skipped=(Skipped(reason="only one source declares it"),)),
        ),
        "layers": tuple(healthy_layer(layer) for layer in range(layers)),
    }
    return Report(**fields | changes)


def healthy_layer(layer: int) -> LayerMetrics:
    metrics: dict[str, float | int | str | None] = {
        "gate_log10_p": -293.1 + 7.7 * layer,
        "gate_statistic": 62.25,
        "up_statistic": 1.02,
        "up_draws_p": 0.42,
        "paired_up_log10_p": -23.4,
        "balance_up": 0.87,
        "verdict": "as-named",
        "something_new": 3.0,
    }
    return LayerMetrics(layer=layer, metrics=metrics)


def swapped_layer(layer: int) -> LayerMetrics:
    healthy = healthy_layer(layer).metrics
    return LayerMetrics(
        layer=layer,
        metrics=healthy
        | {
            "gate_log10_p": 0.0,
            "gate_statistic": 1.02,
            "up_statistic": 62.2,
            "up_log10_p": -120.3,
            "up_draws_p": 0.001,
            "paired_up_log10_p": -0.3,
            "balance_up": -0.12,
            "verdict": "swapped",
        },
    )


def swap_finding(layer: int) -> Finding:
    prefix = f"model.layers.{layer}.mlp"
    return Finding(
        rule=RULE,
        level="error",
        certainty="statistical",
        layer=layer,
        tensors=(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"),
        message=(
            f"gate_proj and up_proj of layer {layer} are exchanged: the rows of the tensor named up share a direction, "
            "the rows of the one named gate do not."
        ),
        evidence={"up_log10_p": -120.3, "gate_draws_p": 0.42, "rejections": 2, "threshold_log10_p": -5.3},
        fix=Fix(action="rename", description=f"Rename {prefix}.gate_proj.weight and .up_proj.weight into each other."),
    )


def swapped_report(*layers: int, depth: int = 4) -> Report:
    return report(
        verdict="fail",
        depth=depth,
        findings=tuple(swap_finding(layer) for layer in layers),
        layers=tuple(swapped_layer(n) if n in layers else healthy_layer(n) for n in range(depth)),
    )


def undecided_report(depth: int = 4) -> Report:
    reason = "untrained: no tensor differs from noise"
    noise = LayerMetrics(layer=0, metrics={"gate_log10_p": 0.0, "up_log10_p": -0.2, "verdict": "undecidable"})
    return report(
        verdict="inconclusive",
        depth=depth,
        coverage=(
            Coverage(
                rule=RULE,
                checked=0,
                undecidable=tuple(
                    Undecidable(layer=n, reason=reason, would_decide="a trained checkpoint") for n in range(depth)
                ),
            ),
        ),
        layers=tuple(noise.model_copy(update={"layer": n}) for n in range(depth)),
    )


def report_with_verdict(verdict: Verdict) -> Report:
    return {"pass": report(), "fail": swapped_report(2), "inconclusive": undecided_report()}[verdict]
