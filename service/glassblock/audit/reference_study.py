"""A checkpoint beside a reference: which tensors are equal, which only look different, which compute something else.

Tensors meet by what they are in the model, then by the hash of their bytes. Equal bytes end the question; otherwise
both are read in pieces, and a network whose numbers differ is looked for under other orders of its rows. Two
pieces are in memory at a time; of a weight stored the other way round, or quantised, the whole matrix.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from glassblock.audit.readable import unreadable
from glassblock.audit.reference_bytes import ByteEquality
from glassblock.audit.reference_changes import changed_ranks, changes_in_words
from glassblock.audit.reference_map import Key, Part, heads_of, known_alike, layer_of_key, parts_of
from glassblock.audit.reference_networks import (
    Verdict,
    explained,
    fingerprints,
    likeness_of,
    prints_of,
    shared_dtypes,
    with_biases,
)
from glassblock.audit.reference_relation import CLOSE, FAR, LEAST_ELEMENTS, relation_of
from glassblock.audit.reference_types import FORM_KINDS, Difference, FormKind, FunctionKind, ReferenceStudy
from glassblock.checkpoint.layers import Expert, LayerTensors, resolve_layers
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import GlassblockError
from glassblock.numerics.likeness import Likeness, common_dtype

NOISE_SIGMAS = 6.0
"""Standard deviations within which a cosine is that of unrelated numbers."""

_OF_TWO = frozenset({"swapped", "fused-order", "fused-layout"})
"""What concerns gate and up alone."""

Tell = Callable[[str], object]


def reference_study(
    checkpoint: Checkpoint,
    reference: Checkpoint,
    *,
    name: str,
    layers: Mapping[int, LayerTensors],
    digests: Mapping[str, str],
    unread: Mapping[str, str],
    tell: Tell,
) -> ReferenceStudy:
    """Compare every tensor of a checkpoint with its counterpart.

    Args:
        checkpoint: The checkpoint.
        reference: The other one.
        name: What the other one is called.
        layers: The checkpoint's layers.
        digests: xxh3_128 of its tensors' bytes, where known.
        unread: Its tensors that cannot be read.
        tell: Told what comes next; may raise to stop.

    Raises:
        Whatever `tell` raises. What cannot be read is in the study.
    """
    before = checkpoint
    checkpoint, reference = known_alike(checkpoint, reference)
    layers = layers if checkpoint is before else resolve_layers(checkpoint)[0]
    their_layers = resolve_layers(reference)[0]
    # Where of one of them nothing is known but names, names meet, and bytes.
    known_both = bool(layers and their_layers)
    mine = parts_of(checkpoint, layers if known_both else {}, heads=heads_of(reference))
    its = parts_of(reference, their_layers if known_both else {}, heads=heads_of(checkpoint))
    their_broken = unreadable(reference)
    known = {
        (tensor, checkpoint.entries[tensor].start): digest
        for tensor, digest in digests.items()
        if tensor in checkpoint.entries
    }
    meter = ReadMeter()
    comparison = _Comparison(name, reference, ByteEquality(known, meter), meter)
    comparison.unread += [f"{tensor}: {reason}" for tensor, reason in sorted(their_broken.items())]
    mine = {key: part for key, part in mine.items() if part.name not in unread}
    its = {key: part for key, part in its.items() if part.name not in their_broken}
    comparison.pair_by_bytes(mine, its)
    for layer in (None, *sorted({number for key in mine if (number := layer_of_key(key)) is not None})):
        tell("the reference" if layer is None else f"layer {layer} in the reference")
        comparison.compare(
            layer,
            {key: part for key, part in mine.items() if layer_of_key(key) == layer},
            {key: part for key, part in its.items() if layer_of_key(key) == layer},
        )
    return comparison.finish(mine, its)


@dataclass
class _Comparison:
    """What was found so far."""

    name: str
    reference: Checkpoint
    bytes_of: ByteEquality
    meter: ReadMeter
    differences: list[Difference] = field(default_factory=list[Difference])
    mapped: dict[Key, Key] = field(default_factory=dict[Key, Key])
    same: set[Key] = field(default_factory=set[Key])
    measured: dict[Key, Likeness] = field(default_factory=dict[Key, Likeness])
    misshapen: set[Key] = field(default_factory=set[Key])
    unread: list[str] = field(default_factory=list[str])

    def pair_by_bytes(self, mine: dict[Key, Part], its: dict[Key, Part]) -> None:
        """Give tensors whose part in the model is not known the key of one with the same bytes."""
        loose = [key for key in mine if key not in its]
        free = [key for key in its if key not in mine]
        by_size: dict[tuple[str, int], list[Key]] = defaultdict(list)
        for key in free:
            by_size[its[key].entry.dtype, its[key].entry.bytes].append(key)
        for key in loose:
            part = mine[key]
            for other in by_size.get((part.entry.dtype, part.entry.bytes), ()):
                if (
                    (_nameless(key) or _nameless(other))
                    and part.plain
                    and its[other].plain
                    and self.bytes_of.equal(part, its[other])
                ):
                    its[key] = its.pop(other)
                    by_size[part.entry.dtype, part.entry.bytes].remove(other)
                    break

    def compare(self, layer: int | None, mine: Mapping[Key, Part], its: Mapping[Key, Part]) -> None:
        """One layer, or what lies outside of all."""
        if layer is not None:
            self._networks(layer, mine, its)
        for key, part in mine.items():
            if not _of_network(key) and key in its:
                self._pair(key, part, its[key])
        self._norm_roles(mine, its)
        for key in (key for key in mine if key in its):
            if key in self.measured and key not in self.same:
                self._judge(key, mine[key], its[key])
            elif key in self.misshapen:
                shapes = f"{list(mine[key].stored_shape)} here and {list(its[key].stored_shape)} there"
                self._add("shape", f"shape {shapes}", key, mine[key], its[key])

    def _networks(self, layer: int, mine: Mapping[Key, Part], its: Mapping[Key, Part]) -> None:
        """The networks of a layer: those that are not equal are looked for under other orders."""
        homes: dict[Expert, list[Key]] = defaultdict(list)
        for key in mine:
            if _of_network(key) and key in its:
                homes[_expert(key[3])].append(key)
        # Every part is compared, also after one that differs.
        equal: dict[Expert, list[bool]] = {
            expert: [self._pair(key, mine[key], its[key]) for key in keys] for expert, keys in homes.items()
        }
        differing: list[Expert] = [expert for expert, parts in equal.items() if not all(parts)]
        moved = self._experts_moved(layer, mine, its, differing)
        for expert in differing:
            if expert not in moved:
                self._explain(layer, expert, mine, its)

    def finish(self, mine: Mapping[Key, Part], its: Mapping[Key, Part]) -> ReferenceStudy:
        """The whole comparison, with its relation."""
        only_here = tuple(sorted({part.name for key, part in mine.items() if key not in self.mapped}))
        covered = {its[key].name for key in self.mapped.values() if key in its}
        only_there = tuple(sorted({part.name for part in its.values()} - covered))
        lacking = [name for name in only_there if not _is_buffer(name)] + [
            name for name in only_here if not _is_buffer(name)
        ]
        matrices = [key for key in self.mapped if mine[key].shape[1] > 1]
        layers = len({layer_of_key(key) for key in matrices} - {None})
        changed = [found for found in self.differences if found.kind == "differs" and (found.cosine or 0.0) >= CLOSE]
        ranks = changed_ranks(changed, mine, its, self.meter)
        relation, words = relation_of(
            self.differences,
            mapped=len(self.mapped),
            matrices=len(matrices),
            misshapen=sum(key in self.misshapen for key in matrices),
            layers=layers,
            lacking=len(lacking),
            changes=changes_in_words(changed, ranks, mapped=len(self.mapped), layers=layers),
        )
        differences = () if relation in ("other-model", "unanswered") else tuple(self.differences)
        family = self.reference.family
        profile: dict[int, float] = {}
        for key, likeness in self.measured.items():
            layer = layer_of_key(key)
            if layer is not None and likeness.elements >= LEAST_ELEMENTS and not math.isnan(likeness.cosine):
                profile[layer] = min(profile.get(layer, 1.0), likeness.cosine)
        return ReferenceStudy(
            name=self.name,
            family=None if family is None else family.name,
            relation=relation,
            words=words,
            mapped=len(self.mapped),
            same=len(self.same),
            differences=differences,
            only_here=only_here,
            only_there=only_there,
            unread=tuple(self.unread),
            profile=tuple(sorted(profile.items())),
        )

    def _pair(self, key: Key, here: Part, there: Part) -> bool:
        """Note whether two parts are equal, or how like; True where nothing is left to explain."""
        self.mapped[key] = key
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
            del self.mapped[key]
            return True
        self.measured[key] = likeness
        if likeness.equal:
            self.same.add(key)
            self._note_form(key, here, there)
            return True
        return likeness.rounded is not None

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
            self._add(kind, words, key, here, there)

    def _add(
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
        likeness = self.measured.get(key)
        self.differences.append(
            Difference(
                kind,
                words,
                (here.name,),
                (there.name,),
                layer_of_key(key),
                _expert(key[3]) if _of_network(key) else None,
                proved,
                None if likeness is None else likeness.relative_difference,
                None if likeness is None or math.isnan(likeness.cosine) else likeness.cosine,
                0 if likeness is None else likeness.elements,
                add,
                key,
            )
        )

    def _judge(self, key: Key, here: Part, there: Part) -> None:
        """What two parts of one shape that are not equal are to each other."""
        likeness = self.measured[key]
        rounded = likeness.rounded
        if rounded is not None:
            self._add(
                "rounded", f"rounded: {' then '.join(_dtype_words(dtype) for dtype in rounded)}", key, here, there
            )
            return
        if "norm" in key and key[-1] != "bias" and likeness.shifts:
            add = -likeness.shifts[0]
            self._add("offset", f"every gain is {likeness.shifts[0]:+g} of the reference's", key, here, there, add=add)
            return
        if _square(here) and _square(there) and self._is_transposed(here, there):
            self._add("transposed", "its axes are exchanged relative to the reference", key, here, there)
            return
        noise = NOISE_SIGMAS / math.sqrt(max(likeness.elements, 1))
        far = likeness.elements >= LEAST_ELEMENTS and here.shape[1] > 1 and abs(likeness.cosine) < max(noise, 1e-3)
        kind: FunctionKind = "unrelated" if far else "differs"
        words = f"changed by {100 * likeness.relative_difference:.3g} % (cosine {likeness.cosine:.6g})"
        self._add(kind, words, key, here, there, proved=False)

    def _is_transposed(self, here: Part, there: Part) -> bool:
        dtype = common_dtype(here.dtype, there.dtype)
        rows = fingerprints(here, dtype, self.meter)
        return bool(torch.equal(rows, fingerprints(there, dtype, self.meter, columns=True)))

    def _explain(self, layer: int, expert: Expert, mine: Mapping[Key, Part], its: Mapping[Key, Part]) -> None:
        """Look for a whole network under another order of its rows."""
        home: Key = ("layer", layer, "network", expert)
        here = {str(key[4]): part for key, part in mine.items() if key[:4] == home}
        there = {str(key[4]): part for key, part in its.items() if key[:4] == home}
        try:
            verdict = self._network_verdict(home, here, there)
            biases = self._biases_exchanged(home, here, there)
        except GlassblockError as error:
            self.unread.append(f"layer {layer}: {error.message}")
            return
        told = list[str]()
        if verdict is not None and verdict.kind != "rounded":
            roles = ["gate", "up"] if verdict.kind in _OF_TWO else ["gate", "up", "down"]
            self._add_network(verdict, home, here, there, roles)
            told += roles + (["gate-bias", "up-bias"] if verdict.kind in FORM_KINDS else [])
            down = self.measured.get((*home, "down"))
            if verdict.proved and down is not None and not down.equal and down.rounded is None:
                told.append("down")  # its columns are those of the reference in the order of the rows
        if biases is not None:
            told += ["gate-bias", "up-bias"]
            if verdict is None or verdict.kind not in _OF_TWO:
                self._add_network(biases, home, here, there, ["gate-bias", "up-bias"])
        for role in told:
            key = (*home, role)
            self.measured.pop(key, None)
            self.misshapen.discard(key)
            if verdict is not None and verdict.kind in FORM_KINDS and key in self.mapped:
                self.same.add(key)

    def _network_verdict(self, home: Key, here: Mapping[str, Part], there: Mapping[str, Part]) -> Verdict | None:
        if not {"up", "down"} <= here.keys() & there.keys():
            return None
        dtypes = shared_dtypes(here, there)
        prints, others = prints_of(here, dtypes, self.meter), prints_of(there, dtypes, self.meter)
        if prints is None or others is None:
            return None
        fused = "gate" in here and here["gate"].name == here["up"].name
        whole = [with_biases(*pair, dtypes, self.meter) for pair in ((prints, here), (others, there))]
        return (
            explained(whole[0], whole[1], fused=fused)
            or explained(prints, others, fused=fused)
            or self._nearly_exchanged(home, here, there)
        )

    def _biases_exchanged(self, home: Key, here: Mapping[str, Part], there: Mapping[str, Part]) -> Verdict | None:
        """Whether the biases of gate and up are each other's, which must go with the weights."""
        names = ("gate-bias", "up-bias")
        if not set(names) <= here.keys() & there.keys() or all((*home, name) in self.same for name in names):
            return None
        crossed = (likeness_of(here[one], there[other], self.meter) for one, other in (names, names[::-1]))
        if not all(likeness.equal or likeness.rounded for likeness in crossed):
            return None
        fused = here["gate-bias"].name == here["up-bias"].name
        return Verdict(
            "fused-order" if fused else "swapped", "the biases of gate and up are exchanged, and not the weights"
        )

    def _nearly_exchanged(self, home: Key, here: Mapping[str, Part], there: Mapping[str, Part]) -> Verdict | None:
        """Whether gate and up are exchanged where their numbers have moved as well: by the cosines both ways."""
        straight = [self.measured.get((*home, part)) for part in ("gate", "up")]
        if any(likeness is None or abs(likeness.cosine) > FAR for likeness in straight):
            return None
        crossed = [
            likeness_of(here[one], there[other], self.meter).cosine for one, other in (("gate", "up"), ("up", "gate"))
        ]
        if min(crossed) < CLOSE:
            return None
        words = f"gate is the reference's up and up its gate, with cosines {crossed[0]:.3g} and {crossed[1]:.3g}"
        return Verdict("fused-order" if here["gate"].name == here["up"].name else "swapped", words, proved=False)

    def _add_network(
        self, verdict: Verdict, home: Key, here: Mapping[str, Part], there: Mapping[str, Part], roles: list[str]
    ) -> None:
        names, others = (
            tuple(dict.fromkeys(parts[role].name for role in roles if role in parts)) for parts in (here, there)
        )
        where = layer_of_key(home), _expert(home[3])
        self.differences.append(Difference(verdict.kind, verdict.words, names, others, *where, verdict.proved))

    def _experts_moved(
        self, layer: int, mine: Mapping[Key, Part], its: Mapping[Key, Part], experts: list[Expert]
    ) -> set[Expert]:
        """Experts that lie under another number; harmless where the rows of the router moved with them."""
        routed = [expert for expert in experts if isinstance(expert, int)]
        if len(routed) < 2:
            return set()
        prints = [
            {
                expert: self._fingerprint(parts.get(("layer", layer, "network", expert, "down")))
                for expert in (routed if parts is mine else [key[3] for key in its if key[-1] == "down"])
                if isinstance(expert, int)
            }
            for parts in (mine, its)
        ]
        places = {value: expert for expert, value in prints[1].items() if value is not None}
        order = {expert: places[value] for expert, value in prints[0].items() if value in places}
        if len(order) < len(routed) or all(expert == other for expert, other in order.items()):
            return set()
        router = mine.get(("layer", layer, "router", "weight")), its.get(("layer", layer, "router", "weight"))
        along = False
        if router[0] is not None and router[1] is not None and router[0].shape == router[1].shape:
            dtype = common_dtype(router[0].dtype, router[1].dtype)
            rows, others = (fingerprints(part, dtype, self.meter) for part in router if part is not None)
            along = all(rows[expert] == others[other] for expert, other in order.items())
            if along:
                self.measured.pop(("layer", layer, "router", "weight"), None)
        moved = len([expert for expert, other in order.items() if expert != other])
        words = (
            f"{moved} experts lie under other numbers, the router's rows with them"
            if along
            else f"{moved} experts lie under other numbers, and the router's rows do not"
        )
        names = tuple(mine["layer", layer, "network", expert, "down"].name for expert in routed)
        self.differences.append(
            Difference(
                "experts-reordered" if along else "experts-exchanged", words, tuple(dict.fromkeys(names)), (), layer
            )
        )
        for key in [key for key in self.measured if len(key) == 5 and key[3] in order and key[2] == "network"]:
            if key[1] == layer:
                self.same.add(key) if along else self.measured.pop(key)
        if along:
            self.same.add(("layer", layer, "router", "weight"))
        return set(order)

    def _fingerprint(self, part: Part | None) -> int | None:
        if part is None:
            return None
        return int(fingerprints(part, torch.float32, self.meter).sum())

    def _norm_roles(self, mine: Mapping[Key, Part], its: Mapping[Key, Part]) -> None:
        """Norms of a layer that hold what another norm of that layer holds in the reference."""
        norms = {key: part for key, part in mine.items() if "norm" in key and key[-1] != "bias"}
        others = {key: part for key, part in its.items() if "norm" in key and key[-1] != "bias"}
        for key, part in norms.items():
            likeness = self.measured.get(key)
            if likeness is None or likeness.equal or likeness.rounded is not None or likeness.shifts:
                continue
            for other, candidate in others.items():
                if other != key and candidate.shape == part.shape and likeness_of(part, candidate, self.meter).equal:
                    words = f"it is the norm {other[-1]} of the reference, used as {key[-1]}"
                    self._add("role", words, key, part, candidate)
                    self.measured.pop(key)
                    break


def _of_network(key: Key) -> bool:
    return len(key) == 5 and key[2] == "network"


def _nameless(key: Key) -> bool:
    return key[0] == "tensor" or (len(key) == 4 and key[2] == "tensor")


def _is_buffer(name: str) -> bool:
    """Whether a tensor is made by the models' code from the config, so that its absence changes nothing."""
    return name.endswith(("inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "position_ids", ".attn.bias"))


def _square(part: Part) -> bool:
    return part.shape[0] == part.shape[1] > 1


def _expert(value: object) -> Expert:
    return value if isinstance(value, int) else "shared" if value == "shared" else None


def _dtype_words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
