"""Configs of other engines: which dialect one is written in, and what it tells.

One row for each dialect. It is recognised by its keys, never by a file's name, and what no row recognises is refused
with the list of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from glassblock.audit.engine_gguf import is_gguf, read_gguf
from glassblock.audit.engine_json import is_own, read_own
from glassblock.audit.engine_megatron import is_megatron, read_megatron
from glassblock.audit.engine_settings import DTYPE_KEYS, Settings, Told, dtype_name, settings_of
from glassblock.checkpoint.architectures import ARCHITECTURES, BY_ARCHITECTURE, BY_MODEL_TYPE
from glassblock.checkpoint.config import ConfigFile, as_epsilon, declared_eps, find
from glassblock.checkpoint.family import Architecture, Size
from glassblock.checkpoint.strict_json import JsonFault, parse_json
from glassblock.checkpoint.variants import row_for
from glassblock.errors import InvalidValue

MOST_DUMP_LEVELS = 3
"""How deep the model's config is looked for in a dump of an engine's own."""

_SIZE_OF_A_MODEL: tuple[Size, ...] = ("hidden", "layers", "heads")
_OTHER_MODELS = ("vision", "visual", "audio", "speech", "image", "clip")
_MODEL_KEYS = ("hf_text_config", "text_config", "hf_config", "hf_config_override")
_OVERRIDE_KEYS = ("hf_overrides", "json_model_override_args", "hf_config_overrides")
_DUMP_KEYS = frozenset(
    {"model_config", "hf_config", "hf_text_config", "model_path", "server_args", "engine_config", "load_config"}
    | set(_OVERRIDE_KEYS)
)


@dataclass(frozen=True)
class Spoken:
    """What another engine's config tells.

    Attributes:
        dialect: Which one it is written in.
        settings: Its values.
        remarks: What is to be known of the dialect here, in sentences.
        model: What it calls the model's family, where it does.
    """

    dialect: str
    settings: Settings
    remarks: tuple[str, ...] = ()
    model: str | None = None


@dataclass(frozen=True)
class Dialect:
    """One way to write a config.

    Attributes:
        name: What it is called.
        keys: Keys by which people know it.
        recognises: Whether a config is written in it.
        read: From the config, what to call it, and the family of the checkpoint, to what it tells.
    """

    name: str
    keys: str
    recognises: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any], str, Architecture], Spoken]


def dialect_of(config: Mapping[str, Any]) -> Dialect:
    """The dialect that a config is written in.

    Raises:
        InvalidValue: It is none that is known; the known ones are with the error.
    """
    for dialect in DIALECTS.values():
        if dialect.recognises(config):
            return dialect
    keys = ", ".join(sorted(map(str, config))[:8]) or "no key"
    raise InvalidValue(
        f"the config to compare with is written in no dialect that is read: it has {keys:.200}",
        field="against",
        known=tuple(f"{dialect.name} ({dialect.keys})" for dialect in DIALECTS.values()),
        hint="Give one of these, or write what the engine does as the JSON of docs/comparing.md.",
    )


def read_engine(config: Mapping[str, Any], name: str, row: Architecture) -> Spoken:
    """What another engine's config tells.

    Args:
        config: As parsed.
        name: What messages call it.
        row: The family of the checkpoint, whose keys a config without a family of its own is read by.

    Raises:
        InvalidValue: See `dialect_of`; or a config in our own words has a key or value that is none.
    """
    spoken = dialect_of(config).read(config, name, row)
    settings, short = spoken.settings, f"{Path(name).name}: "
    for setting, told in settings.told.items():  # readers of a ConfigFile tell a file by its last name alone
        if told.source.startswith(short):
            settings.told[setting] = replace(told, source=f"{name}: {told.source.removeprefix(short)}")
    return spoken


def _read_transformers(config: Mapping[str, Any], name: str, row: Architecture) -> Spoken:
    named = _family_of(config)
    theirs = row if named is None else named
    file = ConfigFile(Path(name), MappingProxyType(dict(config)))
    known = named is not None
    theirs = row_for(theirs, file) if known else theirs
    short = known and _is_cut_down(file, theirs)
    settings = settings_of(file, theirs, defaults=known and not short, fixed=known)
    _any_epsilon(settings, file, theirs)
    model = config.get("model_type")
    remarks = ()
    if not known:
        unknown = isinstance(model, str)
        words = f"its model_type {model!r:.60} is no known family" if unknown else "it names no family"
        remarks = (f"{words}, so what it does not say is not told",)
    elif short:
        words = "it does not state the model's size, so it is no whole config"
        remarks = (f"{words}: that the family's defaults stand for what it does not say is not assumed",)
    return Spoken("transformers", settings, remarks, model if isinstance(model, str) else None)


def _is_cut_down(file: ConfigFile, row: Architecture) -> bool:
    """Whether a config names its family and not the model's size, as no config does that an engine runs."""
    return any(size in row.sizes and find(file, row, row.sizes[size].keys) is None for size in _SIZE_OF_A_MODEL)


def _family_of(config: Mapping[str, Any]) -> Architecture | None:
    model, classes = config.get("model_type"), config.get("architectures")
    listed = cast("list[object]", classes) if isinstance(classes, list) else []
    first = next((text for text in listed if isinstance(text, str)), "")
    by_type = BY_MODEL_TYPE.get(model) if isinstance(model, str) else None
    return by_type or (BY_ARCHITECTURE.get(first) if model is None else None)


def _any_epsilon(settings: Settings, file: ConfigFile, row: Architecture) -> None:
    """An epsilon under a key that the family does not read speaks for every norm that no other key speaks of."""
    if any(name.startswith("eps.") and not told.defaulted for name, told in settings.told.items()):
        return
    for stated in declared_eps(file, row):
        if stated.key is None or stated.roles or any(word in stated.key.lower() for word in _OTHER_MODELS):
            continue
        for norm in row.norms:
            settings.put(f"eps.{norm.role}", stated.value, f"{file.path}: {stated.key}")
        settings.put("eps.*", stated.value, f"{file.path}: {stated.key}")
        return


def _is_transformers(config: Mapping[str, Any]) -> bool:
    keys = set(config)
    for nested in ("text_config", "llm_config", "language_config"):
        inner = config.get(nested)
        keys |= set(cast("Mapping[str, Any]", inner)) if isinstance(inner, Mapping) else set()
    return not keys.isdisjoint(_transformers_keys())


@cache
def _transformers_keys() -> frozenset[str]:
    """Every key that some family of the table reads at the top of its config.json, and those that tell the family."""
    keys = {"model_type", "architectures", "norm_eps", "norm_epsilon", "layer_norm_epsilon", "layernorm_eps"}
    for row in ARCHITECTURES.values():
        if row.config_file != "config.json":
            continue
        keys |= {key.partition(".")[0] for setting in row.sizes.values() for key in setting.keys}
        keys |= {key.partition(".")[0] for norm in row.norms for key in norm.eps.keys}
        keys |= {*row.network.activation.keys, *row.network.bias.keys, *row.tied.keys}
    return frozenset(keys | {"rope_theta", "rope_parameters", "swiglu_limit", *DTYPE_KEYS})


def _is_meta(config: Mapping[str, Any]) -> bool:
    return "model_type" not in config and "dim" in config and not {"n_layers", "n_heads"}.isdisjoint(config)


def _read_meta(config: Mapping[str, Any], name: str, row: Architecture) -> Spoken:
    del row
    file = ConfigFile(Path(name), MappingProxyType(dict(config)))
    theirs = row_for(ARCHITECTURES["llama_meta"], file)
    settings = settings_of(file, theirs)
    theta = config.get("rope_theta")
    if isinstance(theta, int | float) and not isinstance(theta, bool):
        settings.put("number.rope_theta", float(theta), f"{name}: rope_theta")
    vocabulary = config.get("vocab_size")
    if type(vocabulary) is int and vocabulary > 0:
        settings.put("size.vocab", vocabulary, f"{name}: vocab_size")
    if "norm_eps" not in config:
        for norm in theirs.norms:
            settings.told.pop(f"eps.{norm.role}", None)
    else:
        epsilon = as_epsilon(config["norm_eps"])
        settings.told |= {} if epsilon is None else {"eps.*": Told(epsilon, f"{name}: norm_eps")}
    # Meta's layout orders rows of queries and keys for its own rotation; how that is written here says nothing. Its
    # files always hold the head, also where it equals the embedding, so that params.json has no flag for it.
    settings.told.pop("number.rope_form", None)
    settings.told.pop("tied", None)
    return Spoken("meta", settings, model="llama_meta")


def _is_dump(config: Mapping[str, Any]) -> bool:
    return not _DUMP_KEYS.isdisjoint(config)


def _read_dump(config: Mapping[str, Any], name: str, row: Architecture) -> Spoken:
    """A dump of vLLM's or SGLang's arguments: the model's own config inside it, and what the engine overrides."""
    inner = dict(_inner_config(config, MOST_DUMP_LEVELS) or {})
    overrides = _overrides(config, MOST_DUMP_LEVELS)
    spoken = _read_transformers({**inner, **overrides}, name, row)
    settings = spoken.settings
    dtype = _found(config, "dtype", MOST_DUMP_LEVELS)
    if isinstance(dtype, str) and dtype != "auto":
        settings.put("dtype", dtype_name(dtype), f"{name}: dtype")
    order = _found(config, "fused_order", MOST_DUMP_LEVELS)
    if isinstance(order, str | list):
        settings.put("fused.order", fused_order(cast("object", order)), f"{name}: fused_order")
    remarks = (
        *(() if inner else ("it holds no config of the model (hf_config)",)),
        *(f"it overrides {key}" for key in overrides),
    )
    return Spoken("vllm or sglang", settings, (*remarks, *spoken.remarks), spoken.model)


def _inner_config(config: Mapping[str, Any], levels: int) -> Mapping[str, Any] | None:
    for key in _MODEL_KEYS[2:] + _MODEL_KEYS[:2]:
        inner = config.get(key)
        if isinstance(inner, Mapping) and _is_transformers(cast("Mapping[str, Any]", inner)):
            return cast("Mapping[str, Any]", inner)
    if levels:
        for inner in config.values():
            if isinstance(inner, Mapping):
                found = _inner_config(cast("Mapping[str, Any]", inner), levels - 1)
                if found is not None:
                    return found
    return None


def _overrides(config: Mapping[str, Any], levels: int) -> dict[str, Any]:
    for key in _OVERRIDE_KEYS:
        value = _found(config, key, levels)
        if isinstance(value, str):
            try:
                value = parse_json(value.encode(), constants=True)
            except JsonFault as fault:
                raise InvalidValue(
                    f"the {key} of the config to compare with cannot be read: {fault.message}",
                    field="against",
                    hint="Give it as an object.",
                ) from None
        if isinstance(value, Mapping) and value:
            return dict(cast("Mapping[str, Any]", value))
    return {}


def _found(config: Mapping[str, Any], key: str, levels: int) -> object:
    if config.get(key) is not None:
        return config[key]
    if not levels:
        return None
    inner = [cast("Mapping[str, Any]", value) for value in config.values() if isinstance(value, Mapping)]
    found = (_found(value, key, levels - 1) for value in inner)
    return next((value for value in found if value is not None), None)


def fused_order(value: object) -> str:
    """`gate|up` or `up|gate`, from a list, or a text such as `up_gate`.

    Raises:
        InvalidValue: It is neither.
    """
    listed = cast("list[object]", value) if isinstance(value, list) else str(value).strip("[]").replace("_", "|")
    words = [str(word).strip() for word in (listed.split("|") if isinstance(listed, str) else listed)]
    if sorted(words) != ["gate", "up"]:
        raise InvalidValue(
            f"fused_order is {value!r:.60}",
            field="against.fused_order",
            known=("gate|up", "up|gate"),
            hint="Say which.",
        )
    return "|".join(words)


def _read_own(config: Mapping[str, Any], name: str, row: Architecture) -> Spoken:
    settings = read_own(config, name, row, fused_order)
    return Spoken("glassblock", settings)


def _read_gguf(config: Mapping[str, Any], name: str, row: Architecture) -> Spoken:
    settings, model, remarks = read_gguf(config, name, row)
    return Spoken("gguf", settings, remarks, model)


def _read_megatron(config: Mapping[str, Any], name: str, row: Architecture) -> Spoken:
    del row
    return Spoken("megatron", read_megatron(config, name))


DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        row.name: row
        for row in (
            Dialect("glassblock", "norms, fused_order, ...: docs/comparing.md", is_own, _read_own),
            Dialect("gguf", "general.architecture, ARCH.attention.layer_norm_rms_epsilon", is_gguf, _read_gguf),
            Dialect("vllm or sglang", "hf_config, hf_overrides, model_config, server_args", _is_dump, _read_dump),
            Dialect(
                "megatron", "layernorm_epsilon, normalization, swiglu, add_bias_linear", is_megatron, _read_megatron
            ),
            Dialect("meta", "dim, n_layers, n_heads, norm_eps", _is_meta, _read_meta),
            Dialect("transformers", "model_type, hidden_size, rms_norm_eps", _is_transformers, _read_transformers),
        )
    }
)
"""The dialects, in the order in which they are tried."""
