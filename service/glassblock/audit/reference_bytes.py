"""Whether two tensors have the same bytes: by their first ones, then by a hash of all."""

from dataclasses import dataclass, field, replace

from glassblock.audit.read_ahead import hasher
from glassblock.audit.reference_map import Part
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.reading import ReadMeter, read_chunks

CHUNK_BYTES = 2 << 20
LOOK_BYTES = 4096
"""First bytes compared before a whole tensor is hashed."""

Digests = dict[tuple[str, int, int], str]
"""Hashes by name, first byte and last: a slice of a stack has its own."""


@dataclass
class ByteEquality:
    """Compares bytes, and hashes each tensor of either side once at most.

    Attributes:
        here: What is known of the checkpoint's tensors.
        meter: Counts what is read.
        there: The same of the reference's.
    """

    here: Digests
    meter: ReadMeter
    there: Digests = field(default_factory=Digests)

    def equal(self, here: Part, there: Part) -> bool:
        """Whether two parts, plain in their files, have the same dtype, number of elements and bytes."""
        one, other = here.entry, there.entry
        if (one.dtype, one.bytes) != (other.dtype, other.bytes) or here.elements != there.elements:
            return False
        if self._first(one) != self._first(other):
            return False
        return self._digest(one, self.here) == self._digest(other, self.there)

    def _first(self, entry: TensorEntry) -> bytes:
        length = min(LOOK_BYTES, entry.bytes)
        seen: list[bytes] = []
        head = replace(entry, dtype="U8", shape=(length,), stop=entry.start + length)
        for _ in read_chunks(head, LOOK_BYTES, meter=self.meter, seen=lambda view: seen.append(bytes(view))):
            pass
        return b"".join(seen)

    def _digest(self, entry: TensorEntry, known: Digests) -> str:
        place = entry.name, entry.start, entry.stop
        if place not in known:
            taken = hasher("fast")
            if taken is None:
                raise ValueError("there is no fast hash")
            for _ in read_chunks(entry, CHUNK_BYTES, meter=self.meter, seen=taken.update):
                pass
            known[place] = taken.hexdigest()
        return known[place]
