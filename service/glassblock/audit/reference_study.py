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
from glassblock.checkpoint.layer_map import resolve_layers
from glassblock.checkpoint.layer_parts import Expert, LayerTensors
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
        here, there = _network(layer, expert, mine), _network(layer, expert, its)
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
        found = self._reordered(here, there, biases=True) or self._reordered(here, there, biases=False)
        return found or self._nearly_exchanged(home, here, there)

    def _reordered(self, here: Mapping[str, Part], there: Mapping[str, Part], *, biases: bool) -> Verdict | None:
        """What order of its rows makes one network of the other; with the biases, which then must have moved alike."""
        if not {"up", "down"} <= here.keys() & there.keys():
            return None
        dtypes = shared_dtypes(here, there)
        prints, others = prints_of(here, dtypes, self.meter), prints_of(there, dtypes, self.meter)
        if prints is None or others is None:
            return None
        if biases:
            prints, others = (with_biases(*pair, dtypes, self.meter) for pair in ((prints, here), (others, there)))
        return explained(prints, others, fused="gate" in here and here["gate"].name == here["up"].name)

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
        """Experts that lie under another number: told, and returned; also those of which a part does.

        One that is whole is harmless where the rows of the router moved with it.
        """
        routed = [expert for expert in experts if isinstance(expert, int)]
        if len(routed) < 2:
            return set()
        moved: dict[int, int] = {}
        apart: set[Expert] = set()
        for part in ("down", "up", "gate"):
            others = [expert for expert in routed if expert not in moved and expert not in apart]
            for expert, other in self._homes_there(layer, part, mine, its, others).items():
                if self._same_network(_network(layer, expert, mine), _network(layer, other, its)):
                    moved[expert] = other
                else:
                    words = f"its {part} projection is that of the reference's expert {other}, and not all of it is"
                    parts, theirs = _network(layer, expert, mine), _network(layer, other, its)
                    home: Key = ("layer", layer, "network", expert)
                    self._add_network(Verdict("mispaired", words), home, parts, theirs, list(parts))
                    apart.add(expert)
        along = self._router_moved(layer, mine, its, moved)
        if moved:
            parts_moved = [(_network(layer, *pair) for pair in ((new, mine), (old, its))) for new, old in moved.items()]
            here, there = (
                tuple(dict.fromkeys(part.name for parts in side for part in parts.values()))
                for side in zip(*parts_moved, strict=True)
            )
            which = (
                f"the experts {', '.join(map(str, sorted(moved)))} lie"
                if len(moved) <= 8
                else f"{len(moved)} experts lie"
            )
            router = "the rows of the router with them" if along else "and the rows of the router do not"
            words = f"{which} under other numbers, {router}"
            kind = "experts-reordered" if along else "experts-exchanged"
            self.differences.append(Difference(kind, words, here, there, layer))
        for key in [key for key in mine if _of_network(key) and (key[3] in moved or key[3] in apart)]:
            self.measured.pop(key, None)
            self.misshapen.discard(key)
            if along and key[3] in moved and key in self.mapped:
                self.same.add(key)
        return {*moved, *apart}

    def _homes_there(
        self, layer: int, part: str, mine: Mapping[Key, Part], its: Mapping[Key, Part], experts: list[int]
    ) -> dict[int, int]:
        """Under which number the reference has this part of experts that have another one than theirs."""
        wanted = [expert for expert in experts if self._is_other(("layer", layer, "network", expert, part))]
        if not wanted:
            return {}
        theirs = {
            key: other for key, other in its.items() if key[:3] == ("layer", layer, "network") and key[4:] == (part,)
        }
        dtype = mine["layer", layer, "network", wanted[0], part].dtype
        for other in theirs.values():
            dtype = common_dtype(dtype, other.dtype)
        places = {self._fingerprint(other, dtype): key[3] for key, other in theirs.items() if isinstance(key[3], int)}
        found: dict[int, int] = {}
        for expert in wanted:
            value = self._fingerprint(mine["layer", layer, "network", expert, part], dtype)
            place = places.get(value)
            if value and isinstance(place, int) and place != expert:
                found[expert] = place
        return found

    def _is_other(self, key: Key) -> bool:
        """Whether a part has other numbers than its counterpart, rounded or not."""
        likeness = self.measured.get(key)
        return likeness is not None and not likeness.equal and likeness.rounded is None

    def _same_network(self, here: Mapping[str, Part], there: Mapping[str, Part]) -> bool:
        """Whether two networks are one, whatever the order of its neurons."""
        verdict = self._reordered(here, there, biases=True)
        return verdict is not None and verdict.kind in FORM_KINDS

    def _router_moved(
        self, layer: int, mine: Mapping[Key, Part], its: Mapping[Key, Part], moved: Mapping[int, int]
    ) -> bool:
        """Whether the rows of the router, and what else it has for each expert, moved with the experts."""
        keys = [key for key in mine if key[:3] == ("layer", layer, "router")]
        for key in keys:
            here, there = mine[key], its.get(key)
            if there is None or here.shape != there.shape or here.shape[0] <= max([*moved, *moved.values()], default=0):
                return False
            dtype = common_dtype(here.dtype, there.dtype)
            rows, others = (fingerprints(part, dtype, self.meter) for part in (here, there))
            if not all(rows[expert] == others[other] for expert, other in moved.items()):
                return False
            stay = [row for row in range(len(rows)) if row not in moved]
            if torch.equal(rows[stay], others[stay]):
                self.same.add(key)
        return bool(keys)

    def _fingerprint(self, part: Part, dtype: torch.dtype) -> int:
        return int(fingerprints(part, dtype, self.meter).sum())

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


def _network(layer: int, expert: Expert, parts: Mapping[Key, Part]) -> dict[str, Part]:
    """The parts of one network by role."""
    home = ("layer", layer, "network", expert)
    return {str(key[4]): part for key, part in parts.items() if key[:4] == home}


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
