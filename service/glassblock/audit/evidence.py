"""What one pass over a checkpoint has shown. Rules read this and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from glassblock.audit.question import AuditQuestion
from glassblock.audit.values import TensorValues
from glassblock.checkpoint.entries import ContainerFault
from glassblock.checkpoint.family import Architecture
from glassblock.checkpoint.layers import LayerFault, LayerTensors
from glassblock.checkpoint.opened import Checkpoint
from glassblock.numerics.gate_or_up import GateUpEvidence, Judgement

Need = Literal["family", "separate-gate", "fused-gate"]
"""Evidence that a checkpoint may not offer: a family with its names, and gates of two kinds."""


@dataclass(frozen=True)
class Unasked:
    """Why the gate of a layer was not looked for. `would_decide` None: there is nothing to decide."""

    reason: str
    would_decide: str | None = None


@dataclass(frozen=True)
class GateLayer:
    """What the weights of one gated layer say.

    Attributes:
        gate: Name of the tensor called gate; the fused one where gate and up share one.
        up: Name of the tensor called up; the same one where they share one.
        down: Name of the projection back.
        companions: Names of the biases that belong to gate and up.
        statistics: The numbers.
        judgement: What they support.
    """

    gate: str
    up: str
    down: str
    companions: tuple[str, ...]
    statistics: GateUpEvidence
    judgement: Judgement


@dataclass(frozen=True)
class GateStudy:
    """The gates of all layers.

    Attributes:
        alpha: Family-wise error: the chance of one false rejection in a whole healthy checkpoint is below it.
        tests: Tensors tested, which share it.
        level: What is left for each.
        layers: The layers that were tested.
        unasked: The layers that were not.
    """

    alpha: float
    tests: int
    level: float
    layers: Mapping[int, GateLayer]
    unasked: Mapping[int, Unasked]


@dataclass(frozen=True)
class EmbeddingEnergy:
    """Mean squares of the embedding's rows as the first norm receives them, over all rows that are not zero.

    Attributes:
        tensor: Name of the embedding.
        rows: How many rows are not zero.
        zero_rows: How many are; they pass any norm unchanged.
        least, median, most: Mean square of a row.
        multiplier: What the rows were multiplied by, in the embedding's dtype.
    """

    tensor: str
    rows: int
    zero_rows: int
    least: float
    median: float
    most: float
    multiplier: float


@dataclass(frozen=True)
class Evidence:
    """All of it.

    Attributes:
        checkpoint: Headers, index, config and family.
        question: What was asked.
        misfits: Where tensors and config or family do not fit.
        layers: Which tensors each layer is made of, where family and config tell.
        values: What the tensors that could be read hold.
        unread: The others, with the reason.
        read_faults: What came over the files since their headers were read: cut meanwhile, or failing to be read.
        gates: The gates, where the family has some.
        embedding: Mean squares of the embedding's rows, where a norm receives them.
        head_is_embedding: Whether the output head equals the embedding; None where one of them could not be read.
        equal_copies: Of tensors that lie in several files, whether all copies are equal.
        idle_neurons: How many neurons are zero in all projections, of the layers whose gate was tested and of those
            that are wider than declared.
    """

    checkpoint: Checkpoint
    question: AuditQuestion
    misfits: tuple[LayerFault, ...]
    layers: Mapping[int, LayerTensors]
    values: Mapping[str, TensorValues]
    unread: Mapping[str, str]
    read_faults: tuple[ContainerFault, ...]
    gates: GateStudy | None
    embedding: EmbeddingEnergy | None
    head_is_embedding: bool | None
    equal_copies: Mapping[str, bool]
    idle_neurons: Mapping[int, int]

    @property
    def family(self) -> Architecture:
        """The family, for rules that need one."""
        if self.checkpoint.family is None:
            raise ValueError("a rule that reads the family must say that it needs one")
        return self.checkpoint.family

    def lacks(self, need: Need) -> str | None:
        """Why the evidence that is needed is not there; None where it is."""
        checkpoint = self.checkpoint
        if checkpoint.family is None or checkpoint.trunk is None:
            return _unknown(checkpoint)
        network = checkpoint.family.feed_forward
        if need == "separate-gate" and network.gate is None:
            return "gate and up are one tensor" if network.gated else _plain(checkpoint.family)
        if need == "fused-gate" and network.fused is None:
            return "gate and up are separate tensors" if network.gated else _plain(checkpoint.family)
        return None


def _unknown(checkpoint: Checkpoint) -> str:
    if checkpoint.family_fault is not None:
        return f"the family is unknown: {checkpoint.family_fault.message}"
    if checkpoint.family is None:
        return "the family is unknown: config.json cannot be read"
    return f"no tensor that can be read has a name of the family {checkpoint.family.name}"


def _plain(family: Architecture) -> str:
    return f"plain feed-forward network: the family {family.name} has no gate"
