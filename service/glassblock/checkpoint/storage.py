"""The row type of the table of stored forms: how a weight lies in a file that does not hold its numbers as they are.

A row is data and two functions: one holds the shapes of the parts against each other, from headers alone, the other
makes numbers out of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from torch import Tensor

from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.quantisation import DeclaredQuantisation
from glassblock.checkpoint.strict_json import shown

StorageFaultKind = Literal["scale-missing", "unknown-method", "unknown-form", "misfit", "empty"]

REQUANTISE = "Download the checkpoint again, or quantise the model again."


@dataclass(frozen=True, slots=True)
class StorageFault:
    """Why a stored weight cannot be read.

    Attributes:
        kind: Which.
        tensor: The tensor that is absent or does not fit.
        entry: The tensor that holds the codes.
        message: What is wrong, with shapes.
        hint: What to do.
        known: What would have been accepted.
    """

    kind: StorageFaultKind
    tensor: str
    entry: TensorEntry
    message: str
    hint: str
    known: tuple[str, ...] = ()


class Unfit(Exception):
    """Raised by a row's plan; `stored_weight` hands the fault on as a value."""

    def __init__(self, fault: StorageFault) -> None:
        super().__init__(fault.message)
        self.fault = fault


@dataclass(frozen=True)
class Sought:
    """A weight that a row has recognised, before its shapes are believed.

    Attributes:
        name: The name of the weight.
        parts: The tensors found, by role.
        names: The name of each role's tensor, found or not.
        declared: What the config says.
    """

    name: str
    parts: Mapping[str, TensorEntry]
    names: Mapping[str, str]
    declared: DeclaredQuantisation | None

    @property
    def main(self) -> TensorEntry:
        """The tensor that holds the codes."""
        return self.parts["codes"]

    def axes(self, role: str, *counts: int) -> tuple[int, ...]:
        """The shape of a part, which must have one of these numbers of axes."""
        shape = self.parts[role].shape
        if len(shape) not in counts:
            problem = f"has {len(shape)} axes where {' or '.join(map(str, counts))} are expected"
            raise self.unclear(problem) if role == "codes" else self.misfit(role, problem)
        return shape

    def dtype_of(self, role: str, *codes: str) -> str:
        """The dtype of a part, which must be one of these."""
        dtype = self.parts[role].dtype
        if dtype not in codes:
            raise self.misfit(role, f"is stored as {dtype}, where {' or '.join(codes)} is expected")
        return dtype

    def expect(self, role: str, expected: tuple[int, ...], *, why: str, ones: bool = True) -> None:
        """Refuse a part of another shape; without `ones` axes of length one may be there or not."""
        found = self.parts[role].shape
        if found != expected and (ones or _longer(found) != _longer(expected)):
            raise self.misfit(role, f"has the shape {list(found)} where {list(expected)} is expected ({why})")

    def unclear(self, problem: str) -> Unfit:
        """Why the codes are none of a form that is known, though they may be sound."""
        name = self.main.name
        return Unfit(StorageFault("unknown-form", name, self.main, f"{name} {problem}", REQUANTISE))

    def misfit(self, role: str, problem: str) -> Unfit:
        """What is wrong with one part, which the form forbids."""
        name = self.names[role]
        return Unfit(StorageFault("misfit", name, self.main, f"{name} {problem}", REQUANTISE))

    def lack(self, role: str, why: str) -> Unfit:
        """That a part is absent."""
        name = self.names[role]
        return Unfit(StorageFault("scale-missing", name, self.main, f"{name} is missing: {why}", REQUANTISE))

    def unknown_setting(self, key: str, value: object, known: tuple[str, ...]) -> Unfit:
        """That the config declares something that is not known here."""
        where = key if self.declared is None else f"{self.declared.key}.{key}"
        told = shown(value) if isinstance(value, str) else f"{value!r:.80}"
        message = f"{self.main.name} cannot be read: {where} is {told}; known are {', '.join(known)}"
        hint = "Convert the checkpoint to a form that is known, or dequantise it first."
        return Unfit(StorageFault("unknown-form", self.main.name, self.main, message, hint, known))


def _longer(shape: tuple[int, ...]) -> list[int]:
    return [length for length in shape if length != 1]


@dataclass(frozen=True)
class Layout:
    """How the parts of one weight belong together, once their shapes have been checked.

    Attributes:
        shape: The weight's shape, `[out, in]` or `[experts, out, in]`.
        parts: The tensors, reshaped where that makes their axes those of the weight.
        detail: The form in words, such as `4 bits in groups of 128`.
        row_blocks: How many of the weight's rows one row of a part stands for. A part that is not named has no axis
            of rows (nor of experts) and is read whole; where the codes are not named, so is the weight.
        bits: Bits of a code.
        block: Rows and columns that share a scale.
        zero_offset: Added to stored zero points.
        quant_type: The name of a table of values.
        nested_block: Entries that share a scale in statistics that are quantised themselves.
        nested_offset: What is added to those.
    """

    shape: tuple[int, ...]
    parts: Mapping[str, TensorEntry]
    detail: str
    row_blocks: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    bits: int = 8
    block: tuple[int, int] = (1, 1)
    zero_offset: int = 0
    quant_type: str = ""
    nested_block: int = 0
    nested_offset: float = 0.0


@dataclass(frozen=True)
class Storage:
    """One stored form. In templates `{name}` is the weight's name and `{stem}` that name without `.weight`.

    Attributes:
        name: What it is called here.
        codes: Templates of the tensor that holds the codes.
        dtypes: What that may be stored as.
        needs: Templates of the other tensors it cannot be read without, by role.
        may: Those that may be absent.
        tells: Roles of which one at least is there; where none is, only `methods` can name the form.
        methods: Values of the config's `quant_method` that declare it.
        axes: `out_in` where the weight comes out as `[out, in]` even if the family keeps its plain weight transposed;
            `plain` where the axes are those of the plain weight.
        plan: Holds the parts against each other; raises `Unfit`.
        dequantise: Makes the weight in float32 out of the parts; rows as in the layout.
    """

    name: str
    codes: tuple[str, ...]
    dtypes: frozenset[str]
    needs: Mapping[str, tuple[str, ...]]
    methods: frozenset[str]
    axes: Literal["out_in", "plain"]
    plan: Callable[[Sought], Layout]
    dequantise: Callable[[Mapping[str, Tensor], Layout], Tensor]
    may: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    tells: tuple[str, ...] = ()
