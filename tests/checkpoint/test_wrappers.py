"""Names as training wrappers leave them: told as such, whoever names the family, and taken out again by a repair."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.audit.fixes import repair_of
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.name_fits import find_trunk
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.patches import patched
from glassblock.checkpoint.wrappers import wrapped_names
from glassblock.errors import FamilyMismatch
from plants import edit_json, edit_tensors, healthy_checkpoint


def _in_front(prefix: str) -> Callable[[str], str]:
    return lambda name: prefix + name


def _sharded(name: str) -> str:
    return "_fsdp_wrapped_module." + name.replace("layers.0.", "layers.0._fsdp_wrapped_module.").replace(
        "layers.1.", "layers.1._fsdp_wrapped_module._checkpoint_wrapped_module."
    )


def _compiled(name: str) -> str:
    return name.replace("layers.0.", "layers.0._orig_mod.").replace("layers.1.", "layers.1._orig_mod.")


def _inside(old: str, new: str) -> Callable[[str], str]:
    return lambda name: name.replace(old, new)


WRAPPERS: dict[str, tuple[Callable[[str], str], str]] = {
    "parallel": (_in_front("module."), "every name begins with `module.`"),
    "compiled whole": (_in_front("_orig_mod."), "every name begins with `_orig_mod.`"),
    "compiled and parallel": (_in_front("module._orig_mod."), "every name begins with `module._orig_mod.`"),
    "of an adapter": (_in_front("base_model.model."), "every name begins with `base_model.model.`"),
    "a trainer's": (_in_front("state.actor."), "every name begins with `state.actor.`"),
    "compiled by layer": (_compiled, "names hold `_orig_mod`"),
    "one layer compiled": (_inside("layers.0.", "layers.0._orig_mod."), "names hold `_orig_mod`"),
    "the last layer sharded": (
        _inside("layers.1.", "layers.1._fsdp_wrapped_module."),
        "names hold `_fsdp_wrapped_module`",
    ),
    "every network compiled": (_inside(".mlp.", ".mlp._orig_mod."), "names hold `_orig_mod`"),
    "one network in parallel": (_inside("layers.1.mlp.", "layers.1.mlp.module."), "names hold `module`"),
    "attention compiled": (_inside("layers.0.self_attn.", "layers.0._orig_mod.self_attn."), "names hold `_orig_mod`"),
    "one matrix compiled": (_inside("layers.1.mlp.up_proj.", "layers.1.mlp.up_proj._orig_mod."), "`_orig_mod`"),
    "the head and the norm compiled": (
        lambda name: name.replace("lm_head.", "lm_head._orig_mod.").replace("model.norm.", "model.norm._orig_mod."),
        "names hold `_orig_mod`",
    ),
    "the embedding compiled": (_inside("embed_tokens.", "embed_tokens._orig_mod."), "names hold `_orig_mod`"),
    "two kinds at two depths": (
        lambda name: name.replace("layers.0.", "layers.0._fsdp_wrapped_module.").replace(".mlp.", ".mlp._orig_mod."),
        "names hold `_fsdp_wrapped_module`, `_orig_mod`",
    ),
    "parallel, one layer compiled": (
        lambda name: "module." + name.replace("layers.0.", "layers.0._orig_mod."),
        "every name begins with `module.` and hold `_orig_mod`",
    ),
    "sharded": (_sharded, "names hold `_checkpoint_wrapped_module`, `_fsdp_wrapped_module`"),
}


def rename_all(change: Callable[[str], str]) -> Callable[[Path], object]:
    return edit_tensors(
        lambda tensors: [tensors.update({change(name): tensors.pop(name)}) for name in list(tensors)],
    )


def wrap(directory: Path, change: Callable[[str], str]) -> Path:
    healthy_checkpoint("llama", directory)
    edit_tensors(lambda tensors: [tensors.update({change(name): tensors.pop(name)}) for name in list(tensors)])(
        directory
    )
    return directory


@pytest.mark.parametrize(("change", "words"), WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("asked", [None, "llama"])
def test_they_are_told_and_taken_out(
    change: Callable[[str], str], words: str, asked: str | None, tmp_path: Path
) -> None:
    wrap(tmp_path, change)
    (finding,) = audit_checkpoint(tmp_path, AuditQuestion(family=asked)).findings
    assert (finding.rule, finding.level) == ("config/unknown-family", "error")
    assert f"{words}; without it they are those of llama" in finding.message
    checkpoint = open_checkpoint(tmp_path, family=asked)
    patch = repair_of(checkpoint, finding)
    assert isinstance(patch, tuple)
    healed = patched(checkpoint, patch)
    assert healed.family_fault is None
    assert "model.layers.1.mlp.up_proj.weight" in healed.entries
    assert audit_checkpoint(healed, AuditQuestion(family=asked)).findings == ()


def test_without_a_config_the_hint_says_so(tmp_path: Path) -> None:
    wrap(tmp_path, _in_front("module."))
    (tmp_path / "config.json").unlink()
    (finding,) = audit_checkpoint(tmp_path).findings
    assert finding.fix is not None
    assert finding.fix.action == "name-family"
    assert "Every name begins with `module.`; without it they are those of " in finding.fix.description


def test_names_that_no_family_has_either_way() -> None:
    assert wrapped_names(["module.a.weight", "module.b.weight"]) is None
    assert wrapped_names(["module.weight"]) is None
    assert wrapped_names([]) is None


def test_they_are_renamed_in_a_file(tmp_path: Path) -> None:
    wrap(tmp_path / "broken", _inside("layers.0.mlp.", "layers.0.mlp._orig_mod."))
    checkpoint = open_checkpoint(tmp_path / "broken")
    assert checkpoint.family_fault is not None
    told = checkpoint.family_fault.message
    assert f"3 of {len(checkpoint.entries)} tensors do not have the names of the family llama" in told
    assert "model.layers.0.mlp._orig_mod.down_proj.weight" in told
    with pytest.raises(FamilyMismatch, match="names hold `_orig_mod`"):
        checkpoint.require_usable()


@pytest.mark.parametrize(
    "beside",
    ["value_head._orig_mod.weight", "model.layers.0._orig_mod.probe.weight", "module.critic.weight"],
)
def test_wrapped_names_that_are_none_of_the_family_s(beside: str, tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    edit_tensors(lambda tensors: tensors.update({beside: 0.1 * torch.randn(8, 8)}))(tmp_path)
    report = audit_checkpoint(tmp_path)
    assert [finding.message for finding in report.findings if finding.level != "note"] == []
    assert open_checkpoint(tmp_path).family_fault is None


def test_a_copy_under_wrapped_names_is_no_wrapped_layer(tmp_path: Path) -> None:
    """Two names would meet: which of them is meant, the names do not say."""
    healthy_checkpoint("llama", tmp_path)
    edit_tensors(
        lambda tensors: tensors.update(
            {"model.layers.0.mlp._orig_mod.up_proj.weight": tensors["model.layers.0.mlp.up_proj.weight"] + 1}
        )
    )(tmp_path)
    assert open_checkpoint(tmp_path).family_fault is None
    assert not any(finding.rule == "config/unknown-family" for finding in audit_checkpoint(tmp_path).findings)


def test_a_family_whose_own_names_begin_with_a_wrapper_s() -> None:
    row = ARCHITECTURES["llama2_c"]
    names = ["_orig_mod.layers.0.feed_forward.w2.weight", "_orig_mod.layers.0.ffn_norm.weight"]
    assert find_trunk(row, names)[0] is not None
    assert wrapped_names(names, row) is None


def test_names_that_would_meet() -> None:
    names = [f"model.layers.0.{part}mlp.{name}_proj.weight" for part in ("", "_orig_mod.") for name in ("up", "down")]
    assert wrapped_names(names) is None


NESTED = {
    "text_config": "model.language_model.",
    "llm_config": "language_model.model.",
    "language_config": "language.model.",
    "text_config of another kind": "model.text_model.",
    "llm_config beside a resampler": "llm.model.",
    "llm_config of a base model": "llm.",
    "language_config of a base model": "language_model.",
}


@pytest.mark.parametrize(("key", "prefix"), NESTED.items(), ids=NESTED)
def test_the_language_model_inside_a_larger_one(key: str, prefix: str, tmp_path: Path) -> None:
    healthy_checkpoint("llama", tmp_path)
    before = audit_checkpoint(tmp_path)
    config = open_checkpoint(tmp_path).config
    assert config is not None
    top = {"model_type": "of_their_own", "architectures": ["OfTheirOwn"], key.split(maxsplit=1)[0]: dict(config.values)}
    edit_json("config.json", **(dict.fromkeys(config.values, ...) | top))(tmp_path)
    head = "lm_head.weight" if prefix.startswith("model.") or prefix == "language_model." else None
    outer = {"language_model.model.": "language_model.", "language.model.": "language."}.get(prefix, "llm.")

    def nest(name: str) -> str:
        if name == "lm_head.weight":
            return head or outer + name
        return prefix + name.removeprefix("model.")

    rename_all(nest)(tmp_path)
    report = audit_checkpoint(tmp_path, AuditQuestion(family="llama"))
    assert [finding.message for finding in report.findings] == []
    assert report.verdict == before.verdict == "pass"
    checkpoint = open_checkpoint(tmp_path, family="llama")
    assert checkpoint.declared_layers is not None
    assert checkpoint.declared_layers.source == f"config.json: {key.split(maxsplit=1)[0]}.num_hidden_layers"
