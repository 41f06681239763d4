"""Loading the attention of one layer: its tensors and its arithmetic, as the family's row and the config mean them."""

from math import isfinite
from typing import cast

import torch
from torch import Tensor

from glassblock.checkpoint.attention_map import AttentionTensors
from glassblock.checkpoint.attention_row import AttentionRow, FusedHeads, LatentAttentionRow, RotaryRow
from glassblock.checkpoint.family import NormRow, Role
from glassblock.checkpoint.fitting import Sizes
from glassblock.checkpoint.layer_parts import LayerTensors
from glassblock.checkpoint.layers import norm_of, out_in
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter, read_tensor
from glassblock.checkpoint.rotary_settings import rotary_of, rotary_parameters
from glassblock.checkpoint.row_settings import Size
from glassblock.checkpoint.settings import flag_of, number_of, optional_number_of
from glassblock.checkpoint.stored_entries import read_weight
from glassblock.checkpoint.variants import holds_in
from glassblock.errors import FamilyMismatch, InvalidValue
from glassblock.numerics.attention import Attention, NormScope
from glassblock.numerics.latent_attention import LatentAttention, latent_score_scale
from glassblock.numerics.norms import Norm
from glassblock.numerics.rotary import Rotary


def attention_of(
    checkpoint: Checkpoint, tensors: LayerTensors, device: torch.device | str, meter: ReadMeter
) -> Attention | LatentAttention:
    """The attention of a layer, in the file's dtypes.

    Args:
        checkpoint: The checkpoint.
        tensors: The layer's, as `whole_layer_tensors` gives them.
        device: Where they go.
        meter: Counts what is read.

    Raises:
        FamilyMismatch: A size or a rotary parameter is missing or cannot be used.
        DamagedCheckpoint: The config holds something else than the family has there.
    """
    found = tensors.attention
    if found is None:
        raise FamilyMismatch(f"the attention of the family {tensors.row.name} is not read here")
    loaded = _Loaded(checkpoint, tensors, found, device, meter)
    try:
        if isinstance(found.row, AttentionRow):
            return _heads(loaded, found.row)
        return _latent(loaded, found.row)
    except InvalidValue as error:
        # Shapes were checked against the config: what is left are numbers of the config that no attention can have.
        raise FamilyMismatch(
            f"layer {tensors.layer}: {error.message}", hint=error.hint, file=_config_name(checkpoint), field=error.field
        ) from error


class _Loaded:
    """What the two kinds of attention are made from."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: LayerTensors,
        found: AttentionTensors,
        device: torch.device | str,
        meter: ReadMeter,
    ) -> None:
        self.checkpoint, self.tensors, self.row = checkpoint, tensors, tensors.row
        self._found, self._device, self._meter = found, device, meter

    def weight(self, name: str, layout: str = "out_in") -> Tensor:
        """A weight as `[out, in]`."""
        return out_in(read_weight(self._found.weights[name], self._device, self._meter), layout)

    def bias(self, name: str) -> Tensor | None:
        """Its bias, where there is one."""
        entry = self._found.biases.get(name)
        return None if entry is None else read_tensor(entry, self._device, self._meter)

    def has(self, name: str) -> bool:
        """Whether there is a weight of that name."""
        return name in self._found.weights

    def sinks(self) -> Tensor | None:
        """One more logit for each head."""
        entry = self._found.sinks
        return None if entry is None else read_tensor(entry, self._device, self._meter).flatten()

    def norm(self, role: Role) -> Norm | None:
        """A norm of this layer."""
        found = self.tensors.norms.get(role)
        return None if found is None else norm_of(self.checkpoint, found, self._device, self._meter)

    def size(self, size: Size) -> int:
        """A size that config and family tell."""
        told = Sizes(self.checkpoint).of(size)
        if told is None:
            raise FamilyMismatch(
                f"nothing says what {size} is, and the tensors alone do not show it",
                hint="Put the model's config beside its weights.",
            )
        return told.value


def _heads(loaded: _Loaded, row: AttentionRow) -> Attention:
    config, family = loaded.checkpoint.config, loaded.row
    heads, kv_heads, head_dim = (loaded.size(size) for size in ("heads", "kv_heads", "head_dim"))
    layer, prefix = loaded.tensors.layer, loaded.tensors.prefix
    windowed = holds_in(row.window_in, family, config, layer, prefix=prefix)
    window = optional_number_of(config, family, row.window) if windowed else None
    softcap, clip = (optional_number_of(config, family, setting) for setting in (row.softcap, row.clip))
    (query, key, value), biases = _projections(loaded, row, heads, kv_heads, head_dim)
    return Attention(
        query,
        key,
        value,
        query_bias=biases[0],
        key_bias=biases[1],
        value_bias=biases[2],
        output=loaded.weight("output", row.layout),
        output_bias=loaded.bias("output"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=_scale(loaded, row, head_dim),
        window=None if window is None else _whole(window.value, window.source),
        softcap=None if softcap is None else softcap.value,
        sinks=loaded.sinks(),
        query_norm=loaded.norm("q"),
        key_norm=loaded.norm("k"),
        norm_scope=_scope(family.norm("q")),
        norms_after_rotary=row.norms_after_rotary,
        rotary=rotary_at(loaded.checkpoint, loaded.tensors, row, head_dim),
        clip_qkv=None if clip is None else clip.value,
        clip_after_norms=row.clip_after_norms,
    )


def rotary_row_at(checkpoint: Checkpoint, tensors: LayerTensors, row: AttentionRow) -> RotaryRow | None:
    """What says how positions turn the heads of a layer; None where they do not."""
    config, family, where = checkpoint.config, tensors.row, (tensors.layer, tensors.prefix)
    if row.rotary is None or not holds_in(row.turned_in, family, config, where[0], prefix=where[1]):
        return None
    if row.windowed_rotary is None or not holds_in(row.window_in, family, config, where[0], prefix=where[1]):
        return row.rotary
    return row.rotary if optional_number_of(config, family, row.window) is None else row.windowed_rotary


def rotary_at(checkpoint: Checkpoint, tensors: LayerTensors, row: AttentionRow, head_dim: int) -> Rotary | None:
    """How positions turn the heads of a layer; None where they do not.

    Raises:
        InvalidValue, DamagedCheckpoint: See `rotary_of`.
    """
    rotary = rotary_row_at(checkpoint, tensors, row)
    return None if rotary is None else rotary_of(checkpoint, tensors.row, rotary, head_dim)


def _projections(
    loaded: _Loaded, row: AttentionRow, heads: int, kv_heads: int, head_dim: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """The weights of queries, keys and values, and their biases."""
    names = ("query", "key", "value")
    if heads % kv_heads:  # before a fused tensor is cut by them
        raise InvalidValue(
            f"{heads} heads cannot share {kv_heads} heads of keys evenly", field="kv_heads", hint="Correct the config."
        )
    if row.fused is None:
        return tuple(loaded.weight(name, row.layout) for name in names), tuple(loaded.bias(name) for name in names)
    bias = loaded.bias("fused")
    biases = (None, None, None) if bias is None else split_heads_of(bias, row.fused, heads, kv_heads, head_dim)
    return split_heads_of(loaded.weight("fused", row.layout), row.fused, heads, kv_heads, head_dim), biases


def split_heads_of(
    fused: Tensor, row: FusedHeads, heads: int, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values out of a fused weight `[(heads + 2 kv_heads) head_dim, d]`, or out of its bias."""
    if row.arrangement == "blocks":
        rows = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        return cast("tuple[Tensor, Tensor, Tensor]", fused.split(rows))
    groups = cast("Tensor", fused.unflatten(0, (kv_heads, heads // kv_heads + 2, head_dim)))
    return groups[:, :-2].flatten(0, 2), groups[:, -2].flatten(0, 1), groups[:, -1].flatten(0, 1)


def _latent(loaded: _Loaded, row: LatentAttentionRow) -> LatentAttention:
    rope_dim, nope_dim = loaded.size("rope_head_dim"), loaded.size("nope_head_dim")
    narrow = loaded.has("query_down")
    norm = loaded.norm("kv_latent")
    if norm is None:
        raise FamilyMismatch(f"the family {loaded.row.name} names no norm of its latent")
    return LatentAttention(
        key_value_down=loaded.weight("key_value_down"),
        key_value_norm=norm,
        key_value_up=loaded.weight("key_value_up"),
        output=loaded.weight("output"),
        heads=loaded.size("heads"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=loaded.size("v_head_dim"),
        scale=_latent_scale(loaded, row, nope_dim + rope_dim),
        rotary=rotary_of(loaded.checkpoint, loaded.row, row.rotary, rope_dim),
        query=None if narrow else loaded.weight("query"),
        query_down=loaded.weight("query_down") if narrow else None,
        query_norm=loaded.norm("q_latent") if narrow else None,
        query_up=loaded.weight("query_up") if narrow else None,
        query_down_bias=loaded.bias("query_down"),
        key_value_down_bias=loaded.bias("key_value_down"),
        output_bias=loaded.bias("output"),
    )


def _latent_scale(loaded: _Loaded, row: LatentAttentionRow, head_dim: int) -> float:
    parameters = rotary_parameters(loaded.checkpoint, loaded.row, row.rotary)
    if not row.scaled or parameters.name == "default":
        return latent_score_scale(head_dim)
    numbers = {name: parameters.number(name) for name in ("factor", "mscale_all_dim")}
    return latent_score_scale(head_dim, **{name: number for name, number in numbers.items() if number is not None})


def _scale(loaded: _Loaded, row: AttentionRow, head_dim: int) -> float:
    config, family = loaded.checkpoint.config, loaded.row
    of = None if row.scale.of is None else number_of(config, family, row.scale.of)
    if of is not None and of.value <= 0:
        raise InvalidValue(f"{of.source} is {of.value:g}, which scales no scores", hint="Correct the config.")
    base, power = head_dim if of is None else of.value, row.scale.power
    try:
        scale: float = base**power
    except OverflowError:
        raise InvalidValue(
            f"scores cannot be multiplied by {base:g} to the power {power:g}", hint="Correct attention.scale."
        ) from None
    return scale / (loaded.tensors.layer + 1) if flag_of(config, family, row.scale.by_layer).value else scale


def _scope(norm: NormRow | None) -> NormScope:
    """What a norm of queries runs over, by its width."""
    if norm is None or norm.width == ("head_dim",) or not norm.has_gain:
        return NormScope.HEAD
    return NormScope.EACH_HEAD if norm.per_head else NormScope.WIDTH


def _whole(value: float, source: str) -> int:
    if not (isfinite(value) and value == int(value) and value >= 1):
        raise InvalidValue(f"{source} is {value:g}, which is no number of tokens", hint="Correct the config.")
    return int(value)


def _config_name(checkpoint: Checkpoint) -> str | None:
    return None if checkpoint.config is None else checkpoint.config.path.name
