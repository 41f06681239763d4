"""What one pass over a checkpoint has shown. Rules read this and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Literal, NamedTuple

from glassblock.audit.capture_study import CaptureStudy
from glassblock.audit.grain import Grain
from glassblock.audit.neuron_numbers import NeuronNumbers, RowNumbers
from glassblock.audit.orientation_types import OrientationStudy
from glassblock.audit.question import AuditQuestion
from glassblock.audit.reference_types import ReferenceStudy
from glassblock.audit.rotary_study import RotaryStudy
from glassblock.audit.values import TensorValues
from glassblock.checkpoint.absences import HiddenLayers, hidden_layers
from glassblock.checkpoint.entries import ContainerFault, TensorEntry
from glassblock.checkpoint.family import Architecture
from glassblock.checkpoint.fitting import LayerFault
from glassblock.checkpoint.layer_parts import Expert, LayerTensors
from glassblock.checkpoint.opened import Checkpoint
from glassblock.numerics.gate_or_up import GateScreen, Judgement
from glassblock.numerics.gate_up_evidence import GateUpEvidence

Need = Literal["family", "gate", "separate-gate", "fused-gate"]
"""Evidence that a checkpoint may not offer: a family with its names, gates, and gates of two kinds."""


@dataclass(frozen=True)
class Unasked:
    """Why the gate of a layer was not looked for. `would_decide` None: there is nothing to decide.

    `fused` tells which rule would have asked; None where that is not known.
    """

    reason: str
    would_decide: str | None = None
    fused: bool | None = None


Tested = Expert | Literal["experts"]
"""Which network was tested; `experts` is all routed experts of a layer together."""


@dataclass(frozen=True)
class Layout:
    """How the rows of a fused tensor lie: `groups` times a run of one projection and one of the other."""

    groups: int
    gate_first: bool
    interleaved: bool

    @property
    def words(self) -> str:
        """As it is told."""
        order = ("gate", "up") if self.gate_first else ("up", "gate")
        if self.interleaved:
            return f"rows of {order[0]} and {order[1]} in turn"
        if self.groups == 1:
            return f"[{order[0]} | {order[1]}]"
        return f"{self.groups} blocks of [{order[0]} | {order[1]}]"


@dataclass(frozen=True)
class GateLayer:
    """What the weights of one gated network say.

    Attributes:
        network: Which network of its layer.
        gate: Name of the tensor called gate; the fused one where gate and up share one.
        up: Name of the tensor called up; the same one where they share one.
        down: Name of the projection back.
        companions: Names of the biases that belong to gate and up.
        screen: What one look shows; None where the tensors could not be screened as they went by.
        judgement: What the numbers support.
        statistics: The numbers of the certified test, under the names given, or under `stored` where that is another
            layout; None where the screen was enough.
        channels: How many of the d channels these numbers are of.
        declared: The layout of a fused tensor by family; None for separate tensors.
        stored: The layout that its rows show, where the certified test was made and shows one.
        declared_up_log10_p: Certified log10 p-value of what the declared layout takes for up, where another one holds.
        others: Of several experts together, the names of gate and up of all but the first.
        stored_as: How quantised weights are stored, and what they were made to; None of plain ones.
    """

    network: Tested
    gate: str
    up: str
    down: str
    companions: tuple[str, ...]
    screen: GateScreen | None
    judgement: Judgement
    statistics: GateUpEvidence | None = None
    channels: int | None = None
    declared: Layout | None = None
    stored: Layout | None = None
    declared_up_log10_p: float | None = None
    others: tuple[str, ...] = ()
    stored_as: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that hold gate and up."""
        return tuple(dict.fromkeys((self.gate, self.up, *self.others)))

    @property
    def relaid(self) -> bool:
        """Whether the rows of a fused tensor are cut otherwise than the family says."""
        return self.stored is not None and self.declared is not None and self.stored.groups != self.declared.groups

    @property
    def fused(self) -> bool:
        """Whether gate and up share a tensor."""
        return self.gate == self.up


class ExpertCount(NamedTuple):
    """How the routed experts of a layer were decided: each by its own weights, or only all together, or not at all."""

    alone: int
    together: int
    undecided: int


@dataclass(frozen=True)
class LayerGates:
    """The gated networks of one layer.

    Attributes:
        networks: The dense and the shared one; of routed experts the sum of all, where it was needed, and each that was
            looked at more closely.
        experts: How its routed experts were decided; None in a layer without.
        fused: Whether gate and up of its routed experts share a tensor.
    """

    networks: tuple[GateLayer, ...]
    experts: ExpertCount | None = None
    fused: bool = False


@dataclass(frozen=True)
class Mispaired:
    """A layer whose neurons do not belong together, seen beside the others.

    Attributes:
        layer: Its number.
        network: Which network.
        tensors: Names of up and down.
        balance: Correlation of the log lengths of its rows of up and columns of down; None where they do not vary.
        others: The same, median over the other layers.
        paired_draws_p: P(up) among its draws.
        cosine_z: Of the summed squared cosines of gate and up rows, against permuted rows.
    """

    layer: int
    network: Tested
    tensors: tuple[str, ...]
    balance: float | None
    others: float | None
    paired_draws_p: float
    cosine_z: float


class PairingStudy(NamedTuple):
    """How the neurons of all networks are paired.

    Attributes:
        compared: How many networks were held against the others.
        mispaired: Those that stand apart.
        why_not: Why nothing was compared; None where it was.
        left_out: Networks in which there is nothing to pair: the layer of each, and why.
        open: Of those compared, each of which one tie shows nothing, where it does not in most others either: its
            layer, and what.
    """

    compared: int
    mispaired: tuple[Mispaired, ...]
    why_not: str | None = None
    left_out: tuple[tuple[int, str], ...] = ()
    open: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class GateStudy:
    """The gates of all layers.

    Attributes:
        alpha: Family-wise error: the chance of one false rejection in a whole healthy checkpoint is below it.
        tests: Tensors tested, in every layout that was tried; they share it.
        level: What is left for each.
        layers: The layers that were tested.
        unasked: What was not, by layer.
        pairing: Which rows of up belong to which columns of down.
    """

    alpha: float
    tests: int
    level: float
    layers: Mapping[int, LayerGates]
    unasked: Mapping[int, tuple[Unasked, ...]]
    pairing: PairingStudy


@dataclass(frozen=True)
class EmbeddingEnergy:
    """Mean squares of the embedding's rows as the first norm receives them, over all rows that are not zero.

    Attributes:
        tensor: Name of the embedding.
        rows: How many rows are not zero.
        least, median, most: Mean square of a row.
        multiplier: What the rows were multiplied by, in the embedding's dtype.
    """

    tensor: str
    rows: int
    least: float
    median: float
    most: float
    multiplier: float


class GainMoments(NamedTuple):
    """What pieces of one gain add up to, as it multiplies: with the offset of its kind.

    `rounded` of its entries become others when the offset is added in the dtype that stores them, by at most
    `most_rounded` of their size.
    """

    elements: int
    square_sum: float
    least: float
    most: float
    rounded: int = 0
    most_rounded: float = 0.0

    def joined(self, other: "GainMoments") -> "GainMoments":
        """Of both pieces together."""
        return GainMoments(
            self.elements + other.elements,
            self.square_sum + other.square_sum,
            min(self.least, other.least),
            max(self.most, other.most),
            self.rounded + other.rounded,
            max(self.most_rounded, other.most_rounded),
        )


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
        equal_halves: Networks whose fused tensor holds one projection twice.
        idle_neurons: How many neurons are zero in all projections, of the layers whose gate was tested and of those
            that are wider than declared.
        gains: How large the gains of the layers' norms are.
        neurons: What is known of the neurons of each network that could be weighed, by layer and network.
        rows: The rows of routers and of matrices of attention in layers with routed experts, by tensor.
        grains: On which grid of numbers each tensor lies.
        digests: The hash of each tensor's bytes, by name; empty where none was asked for.
        slice_digests: The same of the slices of stacked experts, by name and last byte in the file.
        reference: What a comparison with another checkpoint has shown, where one was given.
        captures: What captured tensors have shown, where some were given.
        orientation: Which way square projections lie, where that was asked.
        rotary: In which order the rows of queries and keys lie, where that was asked.
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
    gains: Mapping[str, GainMoments]
    equal_halves: frozenset[tuple[int, Expert]] = frozenset()
    neurons: Mapping[tuple[int, Expert], NeuronNumbers] = field(default_factory=lambda: MappingProxyType({}))
    rows: Mapping[str, RowNumbers] = field(default_factory=lambda: MappingProxyType({}))
    grains: Mapping[str, Grain] = field(default_factory=lambda: MappingProxyType({}))
    digests: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    slice_digests: Mapping[tuple[str, int], str] = field(default_factory=lambda: MappingProxyType({}))
    reference: ReferenceStudy | None = None
    captures: CaptureStudy | None = None
    orientation: OrientationStudy = field(default_factory=OrientationStudy)
    rotary: RotaryStudy = field(default_factory=RotaryStudy)

    def digest_of(self, entry: TensorEntry) -> str | None:
        """The hash of the bytes of a tensor, or of an expert's slice of one; None where they were not read or hashed.

        Two tensors are alike byte for byte where this, the dtype and the shape are equal.
        """
        whole = self.checkpoint.entries.get(entry.name)
        if whole is not None and (whole.start, whole.stop) == (entry.start, entry.stop):
            return self.digests.get(entry.name)
        return self.slice_digests.get((entry.name, entry.stop))

    @cached_property
    def hidden(self) -> HiddenLayers:
        """The layers with tensors in shards that nobody looked into."""
        return hidden_layers(self.checkpoint)

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
        networks = checkpoint.family.networks
        if need != "family" and not any(network.gated for network in networks):
            return _plain(checkpoint.family)
        if need == "separate-gate" and not any(network.gate is not None for network in networks):
            return "gate and up are one tensor"
        if need == "fused-gate" and not any(network.fused is not None for network in networks):
            return "gate and up are separate tensors"
        return None


def nothing_read(checkpoint: Checkpoint, question: AuditQuestion) -> Evidence:
    """Evidence before any tensor was read, and without a look at how names and config fit."""
    return Evidence(
        checkpoint=checkpoint,
        question=question,
        misfits=(),
        layers=MappingProxyType({}),
        values=MappingProxyType({}),
        unread=MappingProxyType({}),
        read_faults=(),
        gates=None,
        embedding=None,
        head_is_embedding=None,
        equal_copies=MappingProxyType({}),
        idle_neurons=MappingProxyType({}),
        gains=MappingProxyType({}),
    )


def _unknown(checkpoint: Checkpoint) -> str:
    if checkpoint.family_fault is not None:
        return f"the family is unknown: {checkpoint.family_fault.message}"
    if checkpoint.family is None:
        return "the family is unknown: config.json cannot be read"
    return f"no tensor that can be read has a name of the family {checkpoint.family.name}"


def _plain(family: Architecture) -> str:
    return f"plain feed-forward network: the family {family.name} has no gate"
