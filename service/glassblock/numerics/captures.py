"""Captured tensors of one block, checked against it and against each other."""

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.block import STAGES
from glassblock.numerics.feed_forward import FeedForward

MOST_TOKENS = 256
"""Tokens that are replayed. Of more, half are those of smallest mean square, which tell most of an epsilon."""

_WIDE = {torch.float64: (torch.bfloat16, torch.float16, torch.float32), torch.float32: (torch.bfloat16, torch.float16)}
_COMPARED = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
_MODEL_WIDE = frozenset({"x", "normed", "down", "contribution", "output"})


class Captures(NamedTuple):
    """Captured stages, ready to be replayed.

    Attributes:
        stages: `[tokens, width]` by name, in the order of the stages, each in the dtype that its values are of.
        tokens: Which of the captured tokens they are, counted through all leading axes.
        given: How many tokens were captured.
        dtype: What the engine computed in, as the values show: the widest of all stages but `x`.
    """

    stages: Mapping[str, Float[Tensor, "tokens width"]]
    tokens: tuple[int, ...]
    given: int
    dtype: torch.dtype


class BlockSize(NamedTuple):
    """Of a block whose weights are not read: all that shapes are held against."""

    model_width: int
    width: int
    gated: bool


def checked_captures(given: Mapping[str, Tensor], feed_forward: FeedForward) -> Captures:
    """The stages as matrices of tokens, no more than `MOST_TOKENS` of them.

    A float32 tensor whose every value is one of bfloat16 is taken for bfloat16 that was widened when it was saved.

    Raises:
        InvalidValue: A name is no stage, a width is not the block's, the tokens differ in number, or a value is not
            finite: then the first stage that holds one is named.
    """
    ordered = required_captures(given, feed_forward)
    flat = {name: tensor.reshape(-1, tensor.shape[-1]) for name, tensor in ordered.items()}
    dtypes = {name: _grid(tensor) for name, tensor in flat.items()}
    computed = [dtype for name, dtype in dtypes.items() if name != "x"]
    dtype = computed[0]
    for other in computed[1:]:
        dtype = torch.promote_types(dtype, other)
    chosen = _tokens(flat)
    stages = {name: tensor[chosen].to(dtypes[name]) for name, tensor in flat.items()}
    return Captures(stages, tuple(cast("list[int]", chosen.tolist())), len(next(iter(flat.values()))), dtype)


def required_captures(given: Mapping[str, Tensor], block: FeedForward | BlockSize) -> dict[str, Tensor]:
    """The stages as they were given, in their order, once they are those of the block.

    Raises:
        InvalidValue: As `checked_captures`.
    """
    for name in given:
        if name not in STAGES:
            raise InvalidValue(
                f"unknown stage {name!r}", field=name, tensor=name, hint="Rename it as a stage.", known=STAGES
            )
    ordered = {name: given[name] for name in STAGES if name in given}
    if not set(ordered) - {"x"}:
        raise InvalidValue(
            "no stage after x is captured", field="captures", hint="Capture x and what the block makes of it."
        )
    _check_shapes(ordered, block)
    _refuse_non_finite(ordered)
    return ordered


def _check_shapes(captures: Mapping[str, Tensor], block: FeedForward | BlockSize) -> None:
    leading: tuple[str, list[int]] | None = None
    for name, tensor in captures.items():
        width = block.model_width if name in _MODEL_WIDE else block.width
        if name == "gate" and not block.gated:
            raise InvalidValue(
                "this block has no gate, and a stage 'gate' is captured",
                field=name,
                tensor=name,
                hint="In a plain network what is activated is called up.",
            )
        if tensor.dtype not in _COMPARED:
            raise InvalidValue(
                f"{name} is {tensor.dtype}: floating point of 16 bits at least is needed",
                field=name,
                tensor=name,
                hint="Save it as it was.",
            )
        if tensor.ndim == 0 or tensor.shape[-1] != width:
            raise InvalidValue(
                f"{name} has shape {list(tensor.shape)}, and its last axis should be {width}",
                field=name,
                tensor=name,
                hint="Capture whole tensors, of the layer that is asked about; gather what ranks hold in parts.",
            )
        if tensor.numel() == 0:
            raise InvalidValue(f"{name} is empty: shape {list(tensor.shape)}", field=name, tensor=name)
        axes = [*tensor.shape[:-1]]
        while axes and axes[0] == 1:
            axes.pop(0)
        if leading is not None and axes != leading[1]:
            raise InvalidValue(
                f"{name} has shape {list(tensor.shape)} and {leading[0]} has shape {list(captures[leading[0]].shape)}:"
                " they are not of the same tokens",
                field=name,
                tensor=name,
                hint="Capture all stages in one forward pass, and save them in one shape.",
            )
        leading = leading or (name, axes)


def _refuse_non_finite(captures: Mapping[str, Tensor]) -> None:
    before: list[str] = []
    for name, tensor in captures.items():
        culprits = (~tensor.isfinite()).nonzero()
        if len(culprits):
            place = ", ".join(str(int(axis)) for axis in culprits[0])
            value = float(tensor[tuple(culprits[0])])
            clean = f"{', '.join(before)} before it hold none" if before else "it is the first stage captured"
            raise InvalidValue(
                f"{name}[{place}] is {value}, and {len(culprits)} value(s) of {name} are not finite; {clean}",
                field=name,
                tensor=name,
                hint="What is not finite cannot be compared: leave those tokens out, or capture up to that stage.",
            )
        before.append(name)


def _grid(tensor: Tensor) -> torch.dtype:
    """The narrowest type that holds every value."""
    for narrow in _WIDE.get(tensor.dtype, ()):
        if torch.equal(tensor.to(narrow).to(tensor.dtype), tensor):
            return narrow
    return tensor.dtype


def _tokens(flat: Mapping[str, Tensor]) -> Tensor:
    first = next(iter(flat.values()))
    count = len(first)
    if count <= MOST_TOKENS:
        return torch.arange(count, device=first.device)
    quiet = first.to(torch.float32).square().mean(-1).argsort()[: MOST_TOKENS // 2]
    spread = torch.linspace(0, count - 1, MOST_TOKENS // 2, device=first.device).long()
    return cast("Tensor", torch.cat([quiet, spread]).unique())
