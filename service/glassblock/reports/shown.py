"""How a report is shown: what a format may heed, besides the report."""

from dataclasses import dataclass

from glassblock.wire.tables import RuleList


@dataclass(frozen=True)
class Shown:
    """How a report is to be shown. A format heeds what it has a use for.

    Attributes:
        width: columns of a line, for formats that have lines.
        colour: whether a terminal's escape sequences may be used.
        asked: the arguments that `glassblock fix` needs to repair what was found, as a shell reads them; the
            checkpoint as the report names it when left out.
        rules: of the service, for a format whose row `explains` them.
        place: where the checkpoint lies below the folder that its reader has open, for formats that name files; the
            checkpoint as the report names it when left out.
    """

    width: int = 80
    colour: bool = False
    asked: str | None = None
    rules: RuleList | None = None
    place: str | None = None


PLAIN = Shown()
