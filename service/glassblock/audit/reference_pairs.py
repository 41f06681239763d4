"""Which parts of a checkpoint have met their counterparts in the reference, and what is known of each pair.

The study measures pairs here first; what it then finds out about them, one by one or as networks, is noted here too.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from glassblock.audit.reference_bytes import ByteEquality
from glassblock.audit.reference_map import Key, Part, expert_of_key, layer_of_key
from glassblock.audit.reference_networks import Verdict, likeness_of
from glassblock.audit.reference_types import Difference, FormKind, FunctionKind
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import GlassblockError
from glassblock.numerics.likeness import Likeness


@dataclass
class Pairs:
    """What was found so far.

    Attributes:
        bytes_of: Tells tensors of equal bytes.
        meter: Counts what is read.
        differences: What is told, in the order in which it was found.
        mapped: The keys of the parts that have a counterpart.
        same: Those among them that are equal to it, whatever they are called and however they lie.
        measured: How like its counterpart a part is of which not all bytes are equal, until a difference explains it.
        misshapen: The parts of another shape than their counterpart, until a difference explains it.
        lost: The keys of those that have one, of which one of the two could not be read.
        unread: What could not be compared, with the reason.
    """

    bytes_of: ByteEquality
    meter: ReadMeter
    differences: list[Difference] = field(default_factory=list[Difference])
    mapped: set[Key] = field(default_factory=set[Key])
    same: set[Key] = field(default_factory=set[Key])
    measured: dict[Key, Likeness] = field(default_factory=dict[Key, Likeness])
    misshapen: set[Key] = field(default_factory=set[Key])
    lost: set[Key] = field(default_factory=set[Key])
    unread: list[str] = field(default_factory=list[str])

    def meet(self, key: Key, here: Part, there: Part) -> bool:
        """Note whether two parts are equal, or how like; True where nothing is left to explain."""
        self.mapped.add(key)
        if here.shape != there.shape:
            self.misshapen.add(key)
            return False
        try:
            if here.plain and there.plain and here.offset == there.offset and self.bytes_of.equal(here, there):
                self.same.add(key)
                self._note_form(key, here, there)
                return True
            likeness = likeness_of(here, there, self.meter)
        except GlassblockError as error:
            self.unread.append(f"{here.name} beside {there.name}: {error.message}")
            self.mapped.discard(key)
            self.lost.add(key)
            return True
        self.measured[key] = likeness
        if likeness.equal:
            self.same.add(key)
            self._note_form(key, here, there)
            return True
        return likeness.rounded is not None

    def differs(self, key: Key) -> bool:
        """Whether a part has other numbers than its counterpart, beyond rounding, that nothing explains yet."""
        likeness = self.measured.get(key)
        return likeness is not None and not likeness.equal and likeness.rounded is None

    def settle(self, key: Key, *, same: bool = False) -> None:
        """Judge a part no more, as a difference explains it; `same`: which says that it computes the same."""
        self.measured.pop(key, None)
        self.misshapen.discard(key)
        if same and key in self.mapped:
            self.same.add(key)

    def tell(
        self,
        kind: FormKind | FunctionKind,
        words: str,
        key: Key,
        here: Part,
        there: Part,
        *,
        proved: bool = True,
        add: float | None = None,
    ) -> None:
        """Add a difference of one part."""
        likeness = self.measured.get(key)
        self.differences.append(
            Difference(
                kind,
                words,
                (here.name,),
                (there.name,),
                layer_of_key(key),
                expert_of_key(key),
                proved,
                None if likeness is None else likeness.relative_difference,
                None if likeness is None or math.isnan(likeness.cosine) else likeness.cosine,
                0 if likeness is None else likeness.elements,
                add,
                key,
            )
        )

    def tell_network(
        self, verdict: Verdict, home: Key, here: Mapping[str, Part], there: Mapping[str, Part], roles: Collection[str]
    ) -> None:
        """Add a difference of these parts of the network at `home`."""
        names, others = (
            tuple(dict.fromkeys(parts[role].name for role in roles if role in parts)) for parts in (here, there)
        )
        where = layer_of_key(home), expert_of_key(home)
        self.differences.append(Difference(verdict.kind, verdict.words, names, others, *where, verdict.proved))

    def _note_form(self, key: Key, here: Part, there: Part) -> None:
        """What is otherwise about two equal parts."""
        told: list[tuple[FormKind, str]] = []
        if here.offset != there.offset:
            told.append(("offset-folded", f"stored less {here.offset:g} here and less {there.offset:g} there"))
        if "the head is the embedding" in here.forms + there.forms and here.forms != there.forms:
            told.append(("tied", "the head is the embedding on one side, and an equal tensor on the other"))
        elif here.forms != there.forms or here.transposed != there.transposed or here.plain != there.plain:
            how = [", ".join(part.forms) or "plain" for part in (here, there)]
            told.append(("layout", f"stored {how[0]} here and {how[1]} there"))
        if here.entry.dtype != there.entry.dtype:
            told.append(("dtype", f"{here.entry.dtype} here and {there.entry.dtype} there, the same numbers"))
        if not told and here.name != there.name:
            told.append(("renamed", "another name"))
        for kind, words in told:
            self.tell(kind, words, key, here, there)
