"""What a family takes where its config is silent: attention, routing and logits as its configuration class has them.

Sizes, epsilons, activations and flags of networks are held against the same classes in `test_oracle`.
"""

from pathlib import Path

import pytest
import transformers
from glassblock.checkpoint.architectures import BY_MODEL_TYPE
from glassblock.checkpoint.config import ConfigFile
from glassblock.checkpoint.family import Setting
from glassblock.checkpoint.layer_loading import load_layer
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.settings import number_of, optional_number_of
from glassblock.checkpoint.variants import row_for
from glassblock.errors import FamilyMismatch
from makers import tiny_checkpoint

MODEL_TYPES = sorted(BY_MODEL_TYPE.keys() & transformers.CONFIG_MAPPING.keys())


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_numbers_are_those_of_the_configuration_class(model_type: str) -> None:
    plain = transformers.CONFIG_MAPPING[model_type]()
    # Without the flag the class itself takes the window out.
    windowed = {"use_sliding_window": True} if hasattr(plain, "use_sliding_window") else {}
    told = ConfigFile(Path("config.json"), transformers.CONFIG_MAPPING[model_type](**windowed).to_dict())
    silent = ConfigFile(Path("config.json"), {"model_type": model_type})
    row = row_for(BY_MODEL_TYPE[model_type], told)
    attention = row.attention
    settings = [row.extra_layers]
    if row.logits is not None:
        settings += [setting for setting in (row.logits.scale, row.logits.divisor) if isinstance(setting, Setting)]
    for routing in row.routings:
        settings += [routing.groups, routing.kept_groups, routing.scaling]
    optional = [] if row.logits is None else [row.logits.softcap]
    rotary = getattr(attention, "rotary", None)
    settings += [] if rotary is None else [rotary.theta, rotary.share]
    # Null is for those whose class has some number, which a form that needs one asks of the config.
    optional += [] if rotary is None or rotary.max_positions.default is None else [rotary.max_positions]
    optional += [getattr(attention, name) for name in ("softcap", "window", "clip") if hasattr(attention, name)]
    for setting in settings:
        assert number_of(silent, row, setting).value == number_of(told, row, setting).value, setting.keys
    for setting in optional:
        ours, theirs = optional_number_of(silent, row, setting), optional_number_of(told, row, setting)
        assert (ours and ours.value) == (theirs and theirs.value), setting.keys


@pytest.mark.parametrize("form", ["dynamic", "yarn"])
def test_a_form_that_needs_the_longest_sequence_asks_for_it(tmp_path: Path, form: str) -> None:
    scaling = {"rope_type": form, "factor": 2.0}
    config = {"rope_scaling": scaling, "max_position_embeddings": 64}
    load_layer(open_checkpoint(tiny_checkpoint("mistral", tmp_path / "told", config=config)), 0, "cpu", ReadMeter())
    silent = open_checkpoint(tiny_checkpoint("mistral", tmp_path / "silent", config={"rope_scaling": scaling}))
    with pytest.raises(FamilyMismatch, match=rf"the form '{form}' need .*max_position_embeddings"):
        load_layer(silent, 0, "cpu", ReadMeter())


def test_a_setting_that_is_fixed_reads_no_config() -> None:
    row = BY_MODEL_TYPE["llama"]
    config = ConfigFile(Path("config.json"), {"logit_scale": 3.0})
    assert number_of(config, row, Setting((), 1.0)).value == 1.0
