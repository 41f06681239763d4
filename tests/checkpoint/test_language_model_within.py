"""The language model inside a model of images that no row describes: read where its config declares it.

Each wrapper is built tiny and random by its own code and written with `save_pretrained`; the audit and the way from
token ids to logits see the files alone.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.checkpoint.architectures import BY_MODEL_TYPE
from glassblock.checkpoint.layer_map import shape_faults
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.text_states import entering_states, layer_count, logit_parts
from glassblock.errors import UnknownFamily
from glassblock.wire.audits import Report
from makers import tiny_checkpoint
from plants import edit_json, edit_tensors
from reference_models import randomise

# What the project promises in float32, for logits of a few units.
TOLERANCE = 1e-4
IDS = torch.tensor([[5, 17, 3, 42, 90, 0, 61, 8]])
TEXT = {
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MULTIPLIERS: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "granitemoe": {"logits_scaling": 8.0, "num_local_experts": 4},
    "gemma3_text": {"final_logit_softcapping": 0.5, "head_dim": 12},
}
TIED = {"tie_word_embeddings": True}
SQUARE = IMAGES | {"image_size": [28, 28], "patch_size": [14, 14]}

# Wrapper, the model_type of its language model, what its images are read with, and keys of its own.
WRAPPERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llava": ("llava", "llama", {"model_type": "clip_vision_model", **IMAGES}, {"image_token_index": 95}),
    "llava of qwen2": ("llava", "qwen2", {"model_type": "clip_vision_model", **IMAGES}, {"image_token_index": 95}),
    "llava of mistral": ("llava_next", "mistral", {"model_type": "clip_vision_model", **IMAGES}, {}),
    "llava_onevision": ("llava_onevision", "qwen2", {"model_type": "siglip_vision_model", **IMAGES}, {}),
    "mistral3": ("mistral3", "mistral", {"model_type": "pixtral", **IMAGES}, {"image_token_index": 95}),
    "smolvlm": ("smolvlm", "llama", IMAGES, {"image_token_id": 95, "scale_factor": 2}),
    "idefics3": ("idefics3", "llama", IMAGES, {"image_token_id": 95, "scale_factor": 2}),
    "internvl": ("internvl", "qwen2", SQUARE, {"image_token_id": 95}),
    "internvl of qwen3": ("internvl", "qwen3", SQUARE, {"image_token_id": 95}),
    # Multipliers and caps of logits that the language model has by itself, and no class of a larger one reads.
    "aya_vision": ("aya_vision", "cohere2", {"model_type": "siglip_vision_model", **IMAGES}, {}),
    "cohere2_vision": ("cohere2_vision", "cohere2", {"model_type": "siglip_vision_model", **IMAGES}, {}),
    "llava of cohere": ("llava", "cohere", {"model_type": "clip_vision_model", **IMAGES}, {"image_token_index": 95}),
    "llava of granite": ("llava_next", "granite", {"model_type": "clip_vision_model", **IMAGES}, {}),
    "llava of granitemoe": ("llava_next", "granitemoe", {"model_type": "clip_vision_model", **IMAGES}, {}),
    "llava of gemma3": ("llava_next", "gemma3_text", {"model_type": "clip_vision_model", **IMAGES}, {}),
    "shieldgemma2": ("shieldgemma2", "gemma3_text", {"model_type": "siglip_vision_model", **IMAGES}, TIED),
}


def written(wrapper: str, directory: Path, **changes: Any) -> Any:
    """The model, random in every number, saved by itself."""
    model_type, inner, images, more = WRAPPERS[wrapper]
    text = transformers.CONFIG_MAPPING[inner](**TEXT | MULTIPLIERS.get(inner, {}))
    config = transformers.CONFIG_MAPPING[model_type](
        text_config=text, vision_config=images, **({"tie_word_embeddings": False} | more | changes)
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    for tensor in model.parameters():
        randomise(tensor)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_it_is_healthy_as_its_class_begins_it(wrapper: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """With the flags of a tied head as the classes leave them, which differ between a model and its part."""
    model_type, inner, images, more = WRAPPERS[wrapper]
    text = {key: value for key, value in TEXT.items() if key != "tie_word_embeddings"}
    config = transformers.CONFIG_MAPPING[model_type](
        text_config=transformers.CONFIG_MAPPING[inner](**text | MULTIPLIERS.get(inner, {})),
        vision_config=images,
        **more,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=dtype)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    report = audit_checkpoint(tmp_path)
    assert [finding.message for finding in report.findings if finding.level != "note"] == []


def test_a_part_whose_class_keeps_its_layers_deeper(tmp_path: Path) -> None:
    side = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    decoder = {"hidden_size": 48, "ffn_dim": 112, "word_embed_proj_dim": 48, "num_hidden_layers": 2}
    config = transformers.Blip2Config(
        text_config=transformers.OPTConfig(**decoder, num_attention_heads=4, vocab_size=96, max_position_embeddings=64),
        vision_config=side | {"image_size": 28, "initializer_range": 0.02},
        qformer_config=side | {"encoder_hidden_size": 32, "vocab_size": 96},
    )
    model = transformers.Blip2ForConditionalGeneration(config).eval()
    for tensor in model.parameters():
        randomise(tensor)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.require_usable().name, checkpoint.layers) == ("opt", 2)
    report = audit_checkpoint(checkpoint)
    assert [finding.message for finding in report.findings if finding.level != "note"] == []


def test_an_encoder_of_text_within(tmp_path: Path) -> None:
    text = {key: value for key, value in TEXT.items() if key not in {"tie_word_embeddings", "num_key_value_heads"}}
    config = transformers.ModernVBertConfig(
        text_config=transformers.ModernBertConfig(**text, cls_token_id=1, sep_token_id=2), vision_config=IMAGES
    )
    model = transformers.ModernVBertForMaskedLM(config).eval()
    for tensor in model.parameters():
        randomise(tensor)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.require_usable().name, checkpoint.layers) == ("modernbert", 2)
    report = audit_checkpoint(checkpoint)
    assert [finding.message for finding in report.findings if finding.level != "note"] == []


def test_an_encoder_of_text_beside_one_of_images(tmp_path: Path) -> None:
    text = {key: value for key, value in TEXT.items() if key not in {"tie_word_embeddings", "num_key_value_heads"}}
    config = transformers.VisionTextDualEncoderConfig(
        text_config={"model_type": "bert", **text}, vision_config={"model_type": "vit", **IMAGES}
    )
    model = transformers.VisionTextDualEncoderModel(config).eval()
    for tensor in model.parameters():
        randomise(tensor)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.require_usable().name, checkpoint.layers) == ("bert", 2)
    report = audit_checkpoint(checkpoint)
    assert [finding.message for finding in report.findings if finding.level != "note"] == []


@pytest.mark.parametrize(("outer", "inner", "level"), [(True, False, "note"), (False, True, "warning")])
def test_flags_that_differ(outer: bool, inner: bool, level: str, tmp_path: Path) -> None:
    """A note where the tensors are as the outermost says, which is the one that the larger model's class reads."""
    written("mistral3", tmp_path, tie_word_embeddings=True)
    config = json.loads((tmp_path / "config.json").read_text())
    part = config["text_config"] | {"tie_word_embeddings": inner}
    edit_json("config.json", tie_word_embeddings=outer, text_config=part)(tmp_path)
    (told,) = (found for found in audit_checkpoint(tmp_path).findings if "contradicts itself" in found.message)
    assert (told.rule, told.level) == ("config/tied-head", level)


def logits_of(checkpoint: Checkpoint) -> torch.Tensor:
    meter = ReadMeter()
    states = entering_states(checkpoint, IDS, layer_count(checkpoint), "cpu", meter)
    return torch.cat(list(logit_parts(checkpoint, states, meter, dtype=None)), dim=-1)


def skipped(report: Report) -> list[str]:
    (entry,) = (entry for entry in report.coverage if entry.rule == "config/unknown-family")
    return [told.reason for told in entry.skipped]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_it_is_read_as_it_runs_and_what_lies_beside_it_is_told(wrapper: str, tmp_path: Path) -> None:
    model_type, inner = WRAPPERS[wrapper][:2]
    assert model_type not in BY_MODEL_TYPE
    model = written(wrapper, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.require_usable().name == BY_MODEL_TYPE[inner].name
    assert (checkpoint.faults, shape_faults(checkpoint), checkpoint.layers) == ((), (), 2)
    (note,) = checkpoint.notes
    assert f'its text_config says model_type "{inner}", and that part alone was opened, as it runs by itself' in note
    with torch.no_grad():
        theirs = model(input_ids=IDS, use_cache=False).logits
    assert float(theirs.abs().max()) > 0.05  # small logits would hide a wrong one
    assert float((logits_of(checkpoint) - theirs).abs().max()) <= TOLERANCE

    report = audit_checkpoint(checkpoint)
    assert [finding.message for finding in report.findings if finding.level != "note"] == []
    (reason,) = skipped(report)
    beside = [name for name in checkpoint.entries if "vision" in name or "projector" in name or "connector" in name]
    beside += [name for name in checkpoint.entries if name.endswith("image_newline")]
    assert f'its text_config says model_type "{inner}"' in reason
    assert f"{len(beside)} tensors, such as {min(beside)}, were looked at for their numbers alone" in reason
    # Every tensor, those of images as well, was looked at for numbers that are not finite.
    (finite,) = (entry for entry in report.coverage if entry.rule == "tensor/non-finite")
    assert finite.checked == len(checkpoint.entries)


def test_a_mistake_in_the_part_is_found(tmp_path: Path) -> None:
    written("llava", tmp_path)
    gone = "language_model.model.layers.1.mlp.down_proj.weight"
    edit_tensors(lambda tensors: tensors.pop(gone))(tmp_path)
    (finding,) = audit_checkpoint(tmp_path).findings
    assert (finding.rule, finding.level, finding.tensors) == ("ffn/missing-tensor", "error", (gone,))


def test_a_number_beside_the_part_that_is_none_is_found(tmp_path: Path) -> None:
    written("llava", tmp_path)
    name = "multi_modal_projector.linear_1.weight"
    edit_tensors(lambda tensors: tensors[name][0, 0].fill_(float("nan")))(tmp_path)
    (finding,) = audit_checkpoint(tmp_path).findings
    assert (finding.rule, finding.tensors) == ("tensor/non-finite", (name,))


def renamed(prefix: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: [
        tensors.update({name.replace("language_model.", prefix): tensors.pop(name)})
        for name in list(tensors)
        if name.startswith("language_model.")
    ]


def test_names_that_the_part_does_not_have_stay_an_unknown_family(tmp_path: Path) -> None:
    written("llava", tmp_path)
    edit_tensors(renamed("thinker.speech."))(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.family, checkpoint.part, checkpoint.notes) == (None, None, ())
    with pytest.raises(UnknownFamily, match=r'model_type is "llava", which is no known family') as refused:
        checkpoint.require_usable()
    assert 'Its text_config says model_type "llama": --family llama reads that part.' in str(refused.value.hint)
    report = audit_checkpoint(tmp_path)
    assert [(finding.rule, finding.level) for finding in report.findings] == [("config/unknown-family", "error")]
    assert skipped(report) == []


def test_a_part_of_an_unknown_model_type_stays_one(tmp_path: Path) -> None:
    written("llava", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    edit_json("config.json", text_config=config["text_config"] | {"model_type": "unheard-of"})(tmp_path)
    assert [finding.rule for finding in audit_checkpoint(tmp_path).findings] == ["config/unknown-family"]


def test_a_config_that_contradicts_itself_is_not_settled_by_its_part(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    part = json.loads((tmp_path / "config.json").read_text())
    edit_json("config.json", model_type="gpt2", architectures=["LlamaForCausalLM"], text_config=part)(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.family, checkpoint.part) == (None, None)
    assert "contradicts itself" in checkpoint.family_fault.message


@pytest.mark.parametrize("known", [{"model_type": "llama"}, {"architectures": ["LlamaForCausalLM"]}], ids=str)
def test_a_config_that_names_a_family_is_asked_first(known: dict[str, Any], tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    part = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "qwen2"}
    (tmp_path / "config.json").write_text(json.dumps(known | {"text_config": part}))
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.require_usable().name, checkpoint.part) == ("llama", None)


def test_a_family_that_was_asked_for_is_no_part(tmp_path: Path) -> None:
    written("llava", tmp_path)
    checkpoint = open_checkpoint(tmp_path, family="mistral")
    assert (checkpoint.require_usable().name, checkpoint.part) == ("mistral", None)
    assert skipped(audit_checkpoint(checkpoint, AuditQuestion(family="mistral"))) == []
