"""What the models' own code writes is healthy: no rule may speak above a note, of any family, in any form of saving.

Each case of the oracle's is audited as its code begins it, and with every gain and bias moved off that, in each dtype,
whole and in shards, with its head tied and untied. What a row of the table describes is healthy too, at sizes that the
models' code is not made at here.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.checkpoint.architectures import ARCHITECTURES, BY_MODEL_TYPE
from glassblock.wire.audits import Report
from makers import Tiny, asked
from plants import edit_tensors, healthy_checkpoint
from reference_models import Case, cases, small_config, stored_numbers, untrained

CASES = tuple(cases(BY_MODEL_TYPE, transformers.CONFIG_MAPPING))
# Their configuration class refuses it.
CANNOT_BE_TIED = frozenset({"dbrx"})


class Form(NamedTuple):
    """How a model is made and saved: trained in gains and biases, or in everything, or in nothing."""

    trained: str
    dtype: torch.dtype
    tied: bool | None = None
    sharded: bool = False


FORMS = {
    "as begun": Form("nothing", torch.float32),
    "as begun, in bfloat16, tied": Form("nothing", torch.bfloat16, tied=True),
    "gains in float16, untied and sharded": Form("gains", torch.float16, tied=False, sharded=True),
    "gains in bfloat16, tied and sharded": Form("gains", torch.bfloat16, tied=True, sharded=True),
    "all, untied": Form("all", torch.float32, tied=False),
}


def saved(case: Case, form: Form, directory: Path) -> Any:
    """The model, written by itself; None where it has no such form."""
    torch.manual_seed(0)
    row = BY_MODEL_TYPE[case.model_type]
    config = small_config(case, row)
    if form.tied and case.model_type in CANNOT_BE_TIED:
        return None
    if form.tied is not None:
        for part in (config, *(getattr(config, name, None) for name in getattr(type(config), "sub_configs", {}))):
            if hasattr(part, "tie_word_embeddings"):
                part.tie_word_embeddings = form.tied
    model = untrained(config, row, dtype=form.dtype)
    if form.tied and not model._tied_weights_keys:
        return None  # its class has a head of its own whatever the config says
    train(model, form)
    model.save_pretrained(directory, max_shard_size="60KB" if form.sharded else "1GB")
    return model


def train(model: Any, form: Form) -> None:
    """Move what the form says."""
    for name, tensor in stored_numbers(model) if form.trained != "nothing" else ():
        if tensor.ndim <= 1 or "norm" in name:
            tensor.data += (0.2 * torch.randn(tensor.shape)).to(tensor.dtype)
        elif form.trained == "all":
            tensor.data = (torch.randn(tensor.shape) * tensor.shape[-1] ** -0.5).to(tensor.dtype)


def told(report: Report) -> list[tuple[str, str]]:
    return [(finding.rule, finding.message) for finding in report.findings if finding.level != "note"]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_model_of_every_family(case: Case, form: Form, tmp_path: Path) -> None:
    if saved(case, form, tmp_path) is not None:
        report = audit_checkpoint(tmp_path)
        assert told(report) == []
        assert report.verdict != "fail"


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("phi4_multimodal_audio", "encoders.1.conv.glu.b1"),
        ("deepseek_v4", "model.layers.1.attn.compressor.ape"),
        ("afmoe", "model.layers.1.mlp.router.gate.weight"),
    ],
)
def test_zeros_where_others_of_the_kind_hold_numbers_are_told(model_type: str, name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    row = BY_MODEL_TYPE[model_type]
    config = small_config(Case(model_type), row)
    if model_type == "afmoe":
        config.num_hidden_layers, config.layer_types = 3, ["sliding_attention"] * 3
    model = untrained(config, row)
    model.save_pretrained(tmp_path)

    def fill(tensors: dict[str, torch.Tensor]) -> None:
        like = name.replace(".1.", ".{}.", 1).split("{}")
        for other, tensor in tensors.items():
            if other.startswith(like[0]) and other.endswith(like[1]) and other != name:
                tensor.normal_()
        assert name in tensors

    assert told(audit_checkpoint(tmp_path)) == []
    edit_tensors(fill)(tmp_path)
    assert [rule for rule, message in told(audit_checkpoint(tmp_path)) if name in message] == ["tensor/all-zero"]


def test_a_bound_that_is_no_number_is_told(tmp_path: Path) -> None:
    saved(Case("gemma4"), FORMS["as begun"], tmp_path)
    name = "model.audio_tower.layers.0.self_attn.q_proj.input_max"
    edit_tensors(lambda tensors: tensors[name].fill_(float("nan")))(tmp_path)
    ((rule, message),) = told(audit_checkpoint(tmp_path))
    assert rule == "tensor/non-finite"
    assert name in message


def test_register_tokens_that_were_never_saved_are_told(tmp_path: Path) -> None:
    saved(Case("dinov3_vit"), FORMS["as begun"], tmp_path)
    name = "embeddings.register_tokens"
    assert [(finding.rule, finding.level) for finding in audit_checkpoint(tmp_path).findings if name in finding.tensors]
    edit_tensors(lambda tensors: tensors.update({name: torch.empty(0)}))(tmp_path)
    assert [rule for rule, _ in told(audit_checkpoint(tmp_path))] == ["tensor/empty"]


def test_a_base_model_whose_name_holds_the_letters_of_a_head(tmp_path: Path) -> None:
    """SmolLM3Model, InternLM2Model and their like have none."""
    config = transformers.SmolLM3Config(
        hidden_size=48, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.SmolLM3Model(config).save_pretrained(tmp_path)
    assert told(audit_checkpoint(tmp_path)) == []


@pytest.mark.parametrize(
    "tiny",
    [Tiny(layers=5), Tiny(hidden=64, intermediate=64, heads=4, kv_heads=4), Tiny(layers=1)],
    ids=["deep", "square", "one layer"],
)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_tensors_of_every_row(family: str, tiny: Tiny, tmp_path: Path) -> None:
    made = healthy_checkpoint(family, tmp_path / "made", tiny=tiny)
    assert told(audit_checkpoint(made, AuditQuestion(family=asked(family)))) == []
