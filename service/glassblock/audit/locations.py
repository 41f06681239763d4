"""Where the bytes lie that a finding is about."""

from collections.abc import Mapping

from glassblock.checkpoint.entries import TensorEntry
from glassblock.wire.audits import Finding, Location


def located(
    finding: Finding, entries: Mapping[str, TensorEntry], copies: Mapping[str, tuple[TensorEntry, ...]]
) -> Finding:
    """The finding with file and byte range of its tensors, as far as they are in a file.

    Args:
        finding: As a rule made it.
        entries: The checkpoint's tensors by name.
        copies: All places of those that lie in more than one file.
    """
    places = (
        place for name in finding.tensors for place in copies.get(name) or ((entries[name],) if name in entries else ())
    )
    return finding.model_copy(
        update={
            "locations": tuple(
                Location(tensor=place.name, file=place.file.name, byte_offset=place.start, byte_length=place.bytes)
                for place in places
            )
        }
    )
