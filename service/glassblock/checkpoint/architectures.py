"""The family table: one row for each family of models. Adding a family means adding a row, nothing else."""

from collections.abc import Mapping
from types import MappingProxyType

from glassblock.checkpoint.families import (
    cohere,
    decoders,
    encoder_decoders,
    encoders,
    gemma,
    gguf,
    glm,
    gpt,
    granite,
    granite_mixtures,
    hybrids,
    latent_mixtures,
    llama,
    mixtures,
    native_blocks,
    natives,
    olmo,
    phi,
    plain_decoders,
    renamed,
    stacked_mixtures,
    vision,
)
from glassblock.checkpoint.family import Architecture

_MODULES = (
    llama,
    granite,
    renamed,
    cohere,
    gemma,
    glm,
    gpt,
    olmo,
    phi,
    decoders,
    plain_decoders,
    mixtures,
    stacked_mixtures,
    granite_mixtures,
    latent_mixtures,
    hybrids,
    encoder_decoders,
    encoders,
    vision,
    natives,
    gguf,
    native_blocks,
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {row.name: row for module in _MODULES for row in module.ROWS}
)
"""The families by name."""

BY_MODEL_TYPE: Mapping[str, Architecture] = MappingProxyType(
    {model_type: row for row in ARCHITECTURES.values() for model_type in row.model_types}
)
"""The families by a config's `model_type`."""

BY_ARCHITECTURE: Mapping[str, Architecture] = MappingProxyType(
    {name: row for row in reversed(tuple(ARCHITECTURES.values())) for name in row.architectures}
)
"""The families by an entry of a config's `architectures`; the first one where several are built by one class."""
