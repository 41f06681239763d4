"""What a comparison with a reference checkpoint has shown. Rules and the report read this and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from glassblock.audit.reference_map import Key
from glassblock.checkpoint.layer_parts import Expert
from glassblock.wire.audits import Relation

Into = Literal["halves", "pairs"]
"""An order of the rows of a head: those that positions turn together lie half a head apart, or side by side."""

FormKind = Literal[
    "renamed", "dtype", "rounded", "layout", "offset-folded", "permuted", "padded", "experts-reordered", "tied"
]
FunctionKind = Literal[
    "swapped", "fused-order", "fused-layout", "mispaired", "transposed", "offset", "role", "unrelated", "differs",
    "shape", "experts-exchanged", "rotary-order",
]  # fmt: skip


@dataclass(frozen=True)
class HeadMoves:
    """How the rows of some heads come back into order.

    Attributes:
        steps: One after the other: of every so many rows, of which the first `turned` move, into `halves` or `pairs`.
        heads: Which heads of a fused tensor; None for all rows of a tensor.
    """

    steps: tuple[tuple[int, int, Into], ...]
    heads: tuple[int, ...] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """As evidence of a finding, which a repair reads."""
        steps = [{"width": width, "turned": turned, "into": into} for width, turned, into in self.steps]
        return {"steps": steps} | ({} if self.heads is None else {"heads": list(self.heads)})


@dataclass(frozen=True)
class Difference:
    """One way in which a tensor, or the tensors of one network, are otherwise than in the reference.

    Attributes:
        kind: Which.
        words: The same for people.
        here: Names of the tensors in the checkpoint.
        there: Names of theirs in the reference.
        layer: Where; None outside the layers.
        expert: Of which network of a mixture.
        proved: Whether equal numbers decide it, rather than near ones.
        relative: |here - there| / |there|, where numbers were compared.
        cosine: Of the angle between the two.
        elements: How many numbers were compared.
        add: What brings a gain back.
        key: What the first of the tensors is in the model.
        moves: What brings the rows of heads back.
        homes: The number in the reference of each expert that lies elsewhere, where exchanging names brings all back.
    """

    kind: FormKind | FunctionKind
    words: str
    here: tuple[str, ...]
    there: tuple[str, ...]
    layer: int | None = None
    expert: Expert = None
    proved: bool = True
    relative: float | None = None
    cosine: float | None = None
    elements: int = 0
    add: float | None = None
    key: Key = ()
    moves: HeadMoves | None = None
    homes: Mapping[int, int] | None = None


FORM_KINDS: frozenset[str] = frozenset(
    {"renamed", "dtype", "rounded", "layout", "offset-folded", "permuted", "padded", "experts-reordered", "tied"}
)


@dataclass(frozen=True)
class ReferenceStudy:
    """The whole comparison.

    Attributes:
        name: What the reference is called.
        family: Its family.
        relation: What the checkpoint is to it.
        words: The relation in a sentence.
        mapped: How many tensors of the checkpoint, or parts of them, have a counterpart.
        same: How many of those are equal, whatever they are called.
        differences: All others.
        only_here: Tensors without a counterpart there.
        only_there: The same the other way round.
        unread: What could not be read, with the reason.
        profile: Least cosine of the matrices of each layer with their counterparts.
    """

    name: str
    family: str | None
    relation: Relation
    words: str
    mapped: int
    same: int
    differences: tuple[Difference, ...]
    only_here: tuple[str, ...]
    only_there: tuple[str, ...]
    unread: tuple[str, ...]
    profile: tuple[tuple[int, float], ...]

    @property
    def answers(self) -> bool:
        """Whether it is the same model and could be read, so that what is equal there is right here."""
        return self.relation not in ("other-model", "unanswered")

    @property
    def form(self) -> tuple[Difference, ...]:
        """Those that cannot change what the model computes, but by rounding."""
        return tuple(difference for difference in self.differences if difference.kind in FORM_KINDS)

    @property
    def function(self) -> tuple[Difference, ...]:
        """Those that do."""
        return tuple(difference for difference in self.differences if difference.kind not in FORM_KINDS)
