"""The row types of what lies outside the layers: learned positions before them, logits after them."""

from dataclasses import dataclass

from glassblock.checkpoint.row_settings import Setting, Size, SquareRoot


@dataclass(frozen=True)
class PositionsRow:
    """Learned positions, added to the embedding rows.

    Attributes:
        name: Of their weight `[positions, d]`, relative to the trunk.
        offset: How many rows come before that of position zero (OPT: 2).
    """

    name: str
    offset: int = 0


@dataclass(frozen=True)
class LogitsRow:
    """What is made of the last norm's output.

    Attributes:
        scale: Multiplies the logits.
        divisor: Divides them: a number, or the square root of a size (T5).
        divided_by_size: A size that divides the divisor first, as MiniCPM has it: width over the base's width.
        softcap: cap of cap tanh(logit / cap); null for none.
        bias: Whether the head has a bias, under its name with `.bias` for `.weight`.
        unit_rows: Whether each row of the head is scaled to unit length (Baichuan 2).
    """

    scale: Setting[float] = Setting((), 1.0)
    divisor: Setting[float] | SquareRoot = Setting((), 1.0)
    divided_by_size: Size | None = None
    softcap: Setting[float | None] = Setting((), None)
    bias: Setting[bool] = Setting((), default=False)
    unit_rows: bool = False
