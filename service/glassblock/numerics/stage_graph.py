"""Which stages of a block can be replayed from captured ones, and what of a hypothesis a replay depends on."""

from collections.abc import Collection

from glassblock.numerics.hypotheses import FACTORS_OF, Hypothesis

Key = tuple[object, ...]


class StageGraph:
    """The steps of a block between its captured stages.

    Args:
        captured: Names of the stages that were captured.
        gated: Whether the network has a gate.
        parallel: Whether another branch adds to the output, which is not known here.
    """

    def __init__(self, captured: Collection[str], *, gated: bool, parallel: bool) -> None:
        self._captured = frozenset(captured)
        self._sources: dict[str, tuple[str, ...]] = {
            "x": (),
            "normed": ("x",),
            "gate": ("normed",) if gated else (),
            "up": ("normed",),
            "activated": ("gate",) if gated else ("up",),
            "hidden": ("activated", "up") if gated else ("activated",),
            "down": ("hidden",),
            "contribution": ("down",),
            "output": () if parallel else ("x", "contribution"),
        }
        self._factors: dict[str, tuple[str, ...]] = {}

    def sources(self, stage: str) -> tuple[str, ...]:
        """The stages that the step which makes `stage` reads; none for `x`, and for what no step makes."""
        return self._sources[stage]

    def known(self, stage: str) -> bool:
        """Whether the stage was captured, or follows from captured ones."""
        return stage in self._captured or self.follows(stage)

    def follows(self, stage: str) -> bool:
        """Whether the stage can be replayed from captured ones before it."""
        return bool(self.sources(stage)) and all(self.known(source) for source in self.sources(stage))

    def captured_sources(self, stage: str) -> tuple[str, ...]:
        """The captured stages that a replay of `stage` starts from."""
        nearest: dict[str, None] = {}
        for source in self.sources(stage):
            nearest |= dict.fromkeys((source,) if source in self._captured else self.captured_sources(source))
        return tuple(nearest)

    def factors(self, stage: str) -> tuple[str, ...]:
        """The factors that a replay of `stage` depends on."""
        if stage not in self._factors:
            found = dict.fromkeys(FACTORS_OF[stage])
            for source in self.sources(stage):
                found |= {} if source in self._captured else dict.fromkeys(self.factors(source))
            self._factors[stage] = tuple(found)
        return self._factors[stage]

    def has_product(self, stage: str) -> bool:
        """Whether a replay of `stage` takes a matrix product."""
        return stage in {"gate", "up", "down"} or any(
            self.has_product(source) for source in self.sources(stage) if source not in self._captured
        )

    def key(self, stage: str, hypothesis: Hypothesis) -> Key:
        """What of the hypothesis a replay of `stage` depends on."""
        return (hypothesis.norms, *(getattr(hypothesis, factor) for factor in self.factors(stage)))

    def meets_fused(self, stage: str) -> bool:
        """Whether the activation or the product of the branches is made on the way to `stage`."""
        return stage in {"activated", "hidden"} or any(
            self.meets_fused(source) for source in self.sources(stage) if source not in self._captured
        )
