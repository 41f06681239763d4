"""Reports as an audit writes them, made by hand: a healthy one, a swapped one, one that could not decide."""

from typing import Any

from glassblock.wire.audits import (
    AuditedCheckpoint,
    Comparison,
    Coverage,
    Finding,
    Fix,
    KnownFinding,
    LayerMetrics,
    Location,
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
        fix=Fix(
            action="swap-tensors", description=f"Rename {prefix}.gate_proj.weight and .up_proj.weight into each other."
        ),
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


def located_finding(layer: int) -> Finding:
    """A swap with the bytes that it is about."""
    found = swap_finding(layer)
    places = (
        Location(tensor=name, file="model.safetensors", byte_offset=1000 * (number + 1), byte_length=512)
        for number, name in enumerate(found.tensors)
    )
    return found.model_copy(update={"locations": tuple(places)})


def full_report() -> Report:
    """Every field filled: findings of three levels, a known one, open questions, a comparison, metrics."""
    findings = (
        located_finding(2),
        Finding(
            rule="container/truncated",
            level="error",
            certainty="proved",
            message="The file was cut.",
            file="model.safetensors",
            byte=1234567,
        ),
        Finding(rule="config/eps-conflict", level="warning", certainty="conflict", message="1e-5 and 1e-6"),
        Finding(rule="range/fp16-overflow", level="note", certainty="risk", layer=3, message="large"),
        located_finding(1).model_copy(update={"known": True, "expert": 4}),
    )
    undecided = Undecidable(layer=0, reason="too small", would_decide="captured tensors")
    old = KnownFinding(rule="tensor/all-zero", level="warning", layer=0, tensors=("model.layers.0.x",))
    made = report(verdict="fail", findings=findings, layers=tuple(drawn_layer(n) for n in range(4)))
    return made.model_copy(
        update={
            "coverage": (*made.coverage, Coverage(rule="norm/offset", checked=3, undecidable=(undecided,))),
            "comparison": Comparison(baseline="known.json", fixed=(old,), unseen=(old,)),
        }
    )


def drawn_layer(layer: int) -> LayerMetrics:
    """A layer with everything that charts read."""
    metrics: dict[str, float | int | str | None] = {"gate_z": 99.0 + layer, "up_z": -0.5, "verdict": "as-named"}
    for what in ("gate_row_norm", "up_row_norm", "down_column_norm"):
        metrics |= {f"{what}_least": 0.4, f"{what}_median": 0.9, f"{what}_most": 1.3 + layer}
    for role in ("attn_in", "ffn_in"):
        metrics |= {f"norm_{role}_gain_least": -0.1, f"norm_{role}_gain_rms": 0.6, f"norm_{role}_gain_most": 1.0}
        metrics |= {f"norm_{role}_eps": 1e-5}
    if layer == 0:
        for name, value in (("least", 0.005), ("median", 0.02), ("most", 0.2)):
            metrics[f"norm_attn_in_input_mean_square_{name}"] = value
    return LayerMetrics(layer=layer, metrics=metrics)


def hostile_report(evil: str) -> Report:
    """Every text that may come from a checkpoint or its user is `evil`."""
    finding = located_finding(0).model_copy(
        update={
            "rule": evil,
            "tensors": (evil, evil),
            "message": evil,
            "file": evil,
            "byte": 3,
            "evidence": {evil: evil},
            "fix": Fix(action=evil, description=evil),
            "locations": (Location(tensor=evil, file=evil, byte_offset=0, byte_length=1),),
        }
    )
    known = KnownFinding(rule=evil, level="error", tensors=(evil,), file=evil)
    made = report(
        verdict="fail",
        findings=(
            finding,
            finding.model_copy(update={"known": True, "level": "warning"}),
            # Of whose repair the report names the command.
            finding.model_copy(update={"fix": Fix(action="swap-tensors", description=evil)}),
        ),
        coverage=(
            Coverage(
                rule=evil,
                checked=1,
                undecidable=(Undecidable(layer=0, reason=evil, would_decide=evil),),
                skipped=(Skipped(reason=evil),),
            ),
        ),
        layers=(drawn_layer(0), LayerMetrics(layer=1, metrics={"gate_z": 1.0, "verdict": evil, evil: evil})),
        glassblock=evil,
    )
    checkpoint = made.checkpoint.model_copy(update={"path": evil, "family": evil, "verified": evil})
    comparison = Comparison(baseline=evil, fixed=(known,), unseen=(known,))
    return made.model_copy(update={"checkpoint": checkpoint, "comparison": comparison})


def huge_report() -> Report:
    """Three thousand findings with names as long as a header allows them to be, for all practical purposes."""
    name = "<|`*_[x](http://a.b/)@c|>" * 40
    found = located_finding(0).model_copy(update={"tensors": (name,) * 12, "message": name * 3})
    findings = tuple(found.model_copy(update={"layer": n}) for n in range(3000))
    open_ = tuple(Undecidable(layer=n, reason=f"{name} {n}", would_decide=name) for n in range(500))
    return report(verdict="fail", findings=findings, coverage=(Coverage(rule=RULE, checked=1, undecidable=open_),))
