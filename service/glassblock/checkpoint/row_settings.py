"""What the values of a family's row are made of: sizes, settings that a config may declare, multipliers, projections.

Each carries the keys under which a config may hold it and what the family's own code takes where it does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

T = TypeVar("T")

Size = Literal[
    "hidden",
    "intermediate",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "vocab",
    "experts",
    "experts_per_token",
    "expert_width",
    "shared_experts",
    "shared_width",
    "q_rank",
    "kv_rank",
    "nope_head_dim",
    "rope_head_dim",
    "v_head_dim",
    "latent",
    "embedding_width",
]
Layout = Literal["out_in", "in_out"]
"""How a weight is stored: as torch's Linear, or as GPT-2's Conv1D and most stacks of experts."""


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A value that a config may declare.

    Attributes:
        keys: Keys that hold it, dotted where nested, with a number for an entry of a list; the first one present wins.
            Empty when the family fixes it.
        default: What the family's own code takes where no key is present.
        meanings: What the family makes of a declared text or flag, where that is not the value itself.
    """

    keys: tuple[str, ...]
    default: T
    meanings: Mapping[str | bool, T] | None = None


@dataclass(frozen=True)
class Ratio:
    """A size that follows from others: `of` * `times` // `over`."""

    of: Size
    times: int = 1
    over: Size | None = None


@dataclass(frozen=True)
class TwoThirds:
    """A width that is two thirds of `of` * `times`, times a factor, rounded up to a multiple (Shazeer 2020; Llama).

    Each step is cut to a whole number before the next, as in the models' own code.
    """

    of: Size
    times: int = 4
    factor: Setting[float] = Setting((), 1.0)
    multiple_of: Setting[float] = Setting((), 1.0)


@dataclass(frozen=True)
class SizeSetting:
    """A size that a config may declare.

    Attributes:
        keys: As those of a `Setting`.
        default: A number; or how it follows from other sizes; or None, when only the tensors show it.
        over: What the declared number is divided by: 2 where a family counts gate and up together.
    """

    keys: tuple[str, ...]
    default: int | Ratio | TwoThirds | None
    over: int = 1


@dataclass(frozen=True)
class SquareRoot:
    """A multiplier that is the square root of a size, `rounded` to the dtype of the weights or not."""

    of: Size
    rounded: bool = True


@dataclass(frozen=True)
class OverRootDepth:
    """A multiplier that is a number over the square root of (layers / `over`)."""

    of: Setting[float]
    over: float = 1.0


Scale = Setting[float] | OverRootDepth
"""A multiplier of a branch."""


@dataclass(frozen=True)
class Projection:
    """A linear map: names of its weight and bias, relative to the layer."""

    weight: str
    bias: str
