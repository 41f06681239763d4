"""Who states which epsilon, whether another engine's config agrees, and how much a difference would matter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.epsilon_rules import relative_change
from glassblock.errors import InvalidValue
from glassblock.numerics.norms import Norm, norm_kind_named
from glassblock.wire.audits import Coverage, Report
from plants import edit_json, edit_tensors, healthy_checkpoint
from safetensors.torch import load_file

RULE = "config/eps-conflict"

DIALECTS: dict[str, dict[str, Any]] = {
    "transformers": {"rms_norm_eps": ...},
    "meta": {"norm_eps": ...},
    "older": {"layer_norm_epsilon": ...},
    "bert": {"layer_norm_eps": ...},
    "mpt": {"norm_epsilon": ...},
    "megatron": {"layernorm_epsilon": ...},
    "nested": {"text_config": {"rms_norm_eps": ...}},
    "llama.cpp": {"llama.attention.layer_norm_rms_epsilon": ...},
    "llama.cpp of another architecture": {
        "general.architecture": "qwen3",
        "qwen3.attention.layer_norm_rms_epsilon": ...,
    },
    "with a vision tower": {"rms_norm_eps": ..., "vision_config": {"layer_norm_eps": 0.125}},
}


def stating(dialect: str, value: object) -> dict[str, Any]:
    def filled(values: dict[str, Any]) -> dict[str, Any]:
        return {
            key: filled(inner) if isinstance(inner, dict) else value if inner is ... else inner
            for key, inner in values.items()
        }

    return filled(DIALECTS[dialect])


def audited(directory: Path, against: dict[str, Any] | None = None) -> tuple[Report, Coverage]:
    report = audit_checkpoint(directory, AuditQuestion(against=against, against_name="engine.json"))
    (coverage,) = (entry for entry in report.coverage if entry.rule == RULE)
    return report, coverage


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return healthy_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_another_engine_that_agrees_is_checked(dialect: str, llama: Path) -> None:
    _, alone = audited(llama)
    report, coverage = audited(llama, stating(dialect, 1e-5))
    assert (report.findings, report.verdict) == ((), "pass")
    assert coverage.checked == alone.checked + 3  # three norms, each compared
    assert coverage.undecidable == ()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_another_engine_that_differs_is_an_error(dialect: str, llama: Path) -> None:
    report, _ = audited(llama, stating(dialect, 1e-6))
    (finding,) = report.findings
    assert (finding.rule, finding.level, finding.certainty) == (RULE, "error", "conflict")
    assert finding.evidence["roles"] == ["attn_in", "ffn_in", "final"]
    assert finding.evidence["declared"] == {"value": 1e-5, "source": "config.json: rms_norm_eps"}
    assert finding.evidence["other"]["value"] == 1e-6
    assert report.verdict == "fail"


def test_a_question_to_a_checkpoint_of_no_family_is_inconclusive(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_json("config.json", model_type="llamax")(tmp_path)
    question = AuditQuestion(rules=(RULE,), against={"rms_norm_eps": 1e-5})
    assert audit_checkpoint(tmp_path, question).verdict == "inconclusive"


def test_the_float32_of_a_decimal_agrees_with_it(llama: Path) -> None:
    report, _ = audited(llama, {"llama.attention.layer_norm_rms_epsilon": float(torch.tensor(1e-5))})
    assert report.findings == ()


@pytest.mark.parametrize(
    "config", [{"rms_norm_eps": "1e-5"}, {"text_config": {"rms_norm_eps": None}, "rope_scaling": {}}]
)
def test_another_engine_that_states_none_leaves_the_question_open(config: dict[str, Any], llama: Path) -> None:
    report, coverage = audited(llama, config)
    assert report.findings == ()
    assert report.verdict == "inconclusive"
    (entry,) = coverage.undecidable
    assert "engine.json" in entry.reason
    assert "rms_norm_eps" in entry.would_decide


def test_an_epsilon_left_open_beside_other_answers_is_told(llama: Path) -> None:
    report, coverage = audited(llama, {"hidden_size": 48})
    assert (report.findings, report.verdict) == ((), "pass")
    (entry,) = coverage.undecidable
    assert "states no epsilon for the norms attn_in, ffn_in, final" in entry.reason


def test_a_question_without_a_family_stays_open(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_json("config.json", rms_norm_eps="1e-5")(tmp_path)
    _, coverage = audited(tmp_path, {"rms_norm_eps": 1e-5})
    assert "rms_norm_eps" in coverage.undecidable[0].reason


def test_a_config_to_compare_with_needs_the_rule_that_compares_it(llama: Path) -> None:
    question = AuditQuestion(rules=("container/header",), against={"rms_norm_eps": 1e-5})
    with pytest.raises(InvalidValue, match="config/eps-conflict"):
        audit_checkpoint(llama, question)


def test_a_norm_of_another_role_is_told_apart(tmp_path: Path) -> None:
    healthy_checkpoint("qwen3", tmp_path)
    report, _ = audited(tmp_path, {"rms_norm_eps": 1e-6})
    (finding,) = report.findings
    assert finding.evidence["roles"] == ["attn_in", "ffn_in", "final", "q", "k"]


@pytest.mark.parametrize(("family", "multiplier"), [("llama", 1.0), ("gemma3", 48**0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sensitivity_is_that_of_the_first_norm(
    family: str, multiplier: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Against the norm itself in float64 on every row, as the model feeds it."""
    healthy_checkpoint(family, tmp_path)
    edit_tensors(lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()}))(tmp_path)
    edit_tensors(lambda tensors: tensors["model.embed_tokens.weight"].mul_(0.01))(tmp_path)
    edit_tensors(lambda tensors: tensors["model.embed_tokens.weight"][7].zero_())(tmp_path)
    report, _ = audited(tmp_path, {"rms_norm_eps": 1e-4})
    (finding,) = (finding for finding in report.findings if finding.rule == RULE)

    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rows = (embedding * torch.tensor(multiplier, dtype=dtype)).double()
    kind = norm_kind_named("rms_noweight")
    ratios = Norm(kind, None, None, 1e-4)(rows).norm(dim=1) / Norm(kind, None, None, 1e-5)(rows).norm(dim=1)
    changes = (ratios - 1).abs()
    changes = changes[changes.isfinite()]
    sensitivity = finding.evidence["sensitivity"]
    # Mean squares are taken in float32: 48 terms, each rounded to 6e-8, far below 1e-5 of the sum.
    assert sensitivity["relative_change"]["most"] == pytest.approx(float(changes.max()), rel=1e-5)
    assert sensitivity["relative_change"]["median"] == pytest.approx(float(changes.median()), rel=1e-5)
    assert sensitivity["rows"] == 95
    assert sensitivity["tensor"] == "model.embed_tokens.weight"


@pytest.mark.parametrize("family", ["olmo2", "gpt2", "nanochat"])
def test_where_no_norm_sees_the_embedding_the_sensitivity_is_unknown(family: str, tmp_path: Path) -> None:
    healthy_checkpoint(family, tmp_path)
    report, _ = audited(tmp_path, {"norm_eps": 1e-3})
    assert [finding.rule for finding in report.findings] == [RULE]
    assert report.findings[0].evidence["sensitivity"] is None
    assert not any("input_mean_square" in name for name in report.layers[0].metrics)
    assert "cannot be told from the weights" in report.findings[0].message


def test_the_relative_change_by_hand() -> None:
    # sqrt((1e-6 + 1e-5)/(1e-6 + 1e-6)) = sqrt(5.5); and 1e-5 against 1e-6 at the least row of SmolLM2.
    assert relative_change(1e-6, true=1e-5, used=1e-6) == pytest.approx(5.5**0.5 - 1, rel=1e-12)
    assert relative_change(0.0056, true=1e-5, used=1e-6) == pytest.approx(8.0e-4, rel=0.01)  # two digits are given
    assert relative_change(0.0, true=1e-5, used=0.0) == float("inf")


def test_params_json_speaks_for_every_norm(tmp_path: Path) -> None:
    healthy_checkpoint("mistral", tmp_path)
    edit_json("params.json", norm_eps=1e-6)(tmp_path)
    report, _ = audited(tmp_path)
    (finding,) = report.findings
    assert (finding.level, finding.certainty, report.verdict) == ("warning", "conflict", "pass")
    assert finding.evidence["sensitivity"]["relative_change"]["most"] > 0


def test_a_default_is_named(tmp_path: Path) -> None:
    healthy_checkpoint("olmo2", tmp_path)
    edit_json("config.json", rms_norm_eps=...)(tmp_path)
    report, coverage = audited(tmp_path)
    (finding,) = report.findings
    assert (finding.rule, finding.level, finding.certainty) == ("config/eps-defaulted", "note", "risk")
    assert finding.evidence["default"] == 1e-5
    assert "1e-6" in finding.message  # what released checkpoints have
    assert (coverage.checked, len(coverage.skipped)) == (0, 1)


def test_a_config_of_another_name_is_called_by_it(tmp_path: Path) -> None:
    healthy_checkpoint("llama_meta", tmp_path)
    (stated,) = audited(tmp_path, {"norm_eps": 1e-6})[0].findings
    assert (stated.rule, stated.file) == (RULE, "params.json")
    edit_json("params.json", norm_eps=...)(tmp_path)
    (silent,) = audited(tmp_path)[0].findings
    assert (silent.rule, silent.file) == ("config/eps-defaulted", "params.json")
    assert silent.message.startswith("params.json has no norm_eps")
    assert silent.fix is not None
    assert silent.fix.description == "State norm_eps in params.json."


def test_the_rows_of_the_embedding_are_no_metric_of_another_layer(tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_tensors(lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("model.layers.0.")])(
        tmp_path
    )
    (layer,) = audited(tmp_path)[0].layers
    assert layer.layer == 1
    assert not any("input_mean_square" in name for name in layer.metrics)
