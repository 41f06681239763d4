"""Rules about files: containers, the index, and tensors that lie there twice. All but the last need headers only."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from glassblock.audit.equal_projections import equal_projections
from glassblock.audit.evidence import Evidence
from glassblock.audit.repeated_layers import repeated_layers
from glassblock.audit.rule import Checked, Found, Outcome, Rule
from glassblock.checkpoint.entries import Container
from glassblock.checkpoint.opened import Fault
from glassblock.wire.audits import Fix, Skipped, Undecidable

_MOST_NAMES = 1000


def _faults(evidence: Evidence, rule: str) -> Iterator[Fault]:
    return (fault for fault in (*evidence.checkpoint.faults, *evidence.read_faults) if fault.rule == rule)


def _found(fault: Fault, action: str) -> Found:
    tensors = getattr(fault, "tensors", ()) or ((fault.tensor,) if fault.tensor is not None else ())
    return Found(
        fault.message,
        tensors=tensors[:_MOST_NAMES],
        file=fault.file.name,
        byte=fault.byte,
        evidence={"tensors": len(tensors)} if len(tensors) > 1 else {},
        fix=Fix(action=action, description=fault.hint) if fault.hint else None,
    )


def _container_rule(kind: str, action: str) -> Callable[[Evidence], Iterator[Outcome]]:
    rule = f"container/{kind}"

    def look(evidence: Evidence) -> Iterator[Outcome]:
        faulty = {fault.file.name for fault in _faults(evidence, rule)}
        yield from (_found(fault, action) for fault in _faults(evidence, rule))
        for name, container in evidence.checkpoint.containers.items():
            hidden = None if name in faulty else _hidden(kind, container)
            yield Checked() if hidden is None else Skipped(reason=f"{name}: {hidden}")

    return look


def _hidden(kind: str, container: Container) -> str | None:
    """What keeps this question from being answered for a file; None where it is answered."""
    if not container.listed and kind != "not-safetensors":
        return "its header could not be read"
    misplaced = bool(container.refused) or any(fault.kind == "overlap" for fault in container.faults)
    if kind in {"hole", "trailing-bytes"} and misplaced:
        return "tensors lie where they should not, which leaves gaps elsewhere"
    return None


def _index_rule(kind: str, action: str) -> Callable[[Evidence], Iterator[Outcome]]:
    rule = f"index/{kind}"

    def look(evidence: Evidence) -> Iterator[Outcome]:
        found = [_found(fault, action) for fault in _faults(evidence, rule)]
        yield from found
        index = evidence.checkpoint.index
        if index is None:  # files can tell by their own names that another one is missing
            yield Checked(len(found)) if found else Skipped(reason="the checkpoint has no index")
        else:
            yield Checked(len(index.weight_map) if kind.endswith("tensor") else len(index.shards))

    return look


def _unlisted(evidence: Evidence) -> Iterator[Outcome]:
    for fault in _faults(evidence, "index/unlisted-tensor"):
        found = _found(fault, "complete-index")
        # A file of its own beside the weights (an adapter, a second model) is not asked for by any loader.
        beside = fault.file.name not in evidence.checkpoint.containers
        yield replace(found, level="note", certainty="risk") if beside else found
    index = evidence.checkpoint.index
    yield Skipped(reason="the checkpoint has no index") if index is None else Checked(len(evidence.checkpoint.entries))


def _total_size(evidence: Evidence) -> Iterator[Outcome]:
    checkpoint = evidence.checkpoint
    found = [_found(fault, "correct-total-size") for fault in _faults(evidence, "index/total-size")]
    yield from found
    if checkpoint.index is None:
        yield Skipped(reason="the checkpoint has no index")
    elif checkpoint.index.total_size is None and not found:
        yield Skipped(reason="the index claims no total_size")
    elif any(fault.rule.startswith(("index/missing", "index/wrong", "index/unlisted")) for fault in checkpoint.faults):
        yield Skipped(reason="index and shards disagree about tensors, so their sizes cannot agree")
    elif checkpoint.duplicates or not all(container.listed for container in checkpoint.containers.values()):
        yield Skipped(reason="what the shards hold cannot be summed up")
    else:
        yield Checked()


def _two_sets(evidence: Evidence) -> Iterator[Outcome]:
    yield from (_found(fault, "keep-one-set") for fault in _faults(evidence, "index/two-weight-sets"))
    yield Checked()


def _duplicates(evidence: Evidence) -> Iterator[Outcome]:
    yield from equal_projections(evidence)
    yield from (replace(found, tensors=found.tensors[:_MOST_NAMES]) for found in repeated_layers(evidence))
    if not evidence.digests and evidence.layers:
        yield Skipped(reason="no tensor was hashed: projections of one module, and layers, were not compared")
    for name, copies in evidence.checkpoint.duplicates.items():
        files = [copy.file.name for copy in copies]
        where = " and in ".join(files)
        equal = evidence.equal_copies.get(name)
        if equal is None:
            reason = f"{name} lies in {where}, and not all copies could be read"
            yield Undecidable(reason=reason, would_decide="whole files")
            continue
        yield Checked()
        fix = Fix(action="drop-copy", description="Keep one copy.", tensors=(name,))
        evidence_of = {"files": files, "equal": equal}
        if equal:
            message = f"{name} lies in {where}, byte for byte the same"
            yield Found(message, None, (name,), evidence=evidence_of, fix=fix, level="note", certainty="proved")
        else:
            message = f"{name} lies in {where} with different contents: which one counts depends on the loader"
            yield Found(message, None, (name,), evidence=evidence_of, fix=fix)
    if not evidence.checkpoint.duplicates:
        yield Checked(len(evidence.checkpoint.entries))


_PARSED = "An own parser reads length, header and offsets, and believes none of them."

CONTAINER_RULES: tuple[Rule, ...] = (
    Rule(
        "container/truncated",
        "error",
        "proved",
        what="A file ends before the tensors that its header describes, or parts of it cannot be read from the disk.",
        hurts="Some loaders refuse the file, others read what lies behind it in memory.",
        detection=f"{_PARSED} The last byte of the last tensor lies past the end of the file. A file that is cut, or "
        "fails to be read, during the audit is told too; one that is replaced meanwhile ends the audit.",
        fooled_by="A file cut and filled up again with other bytes has the right length.",
        report="https://github.com/lyogavin/airllm/issues/137",
        look=_container_rule("truncated", "fetch-again"),
        tells_before_tensors=True,
    ),
    Rule(
        "container/trailing-bytes",
        "error",
        "proved",
        what="Bytes follow the last tensor.",
        hurts="The file loads in one program and is refused by another; it may hide a second file.",
        detection=f"{_PARSED} The file goes on after the last byte of the last tensor.",
        fooled_by="Nothing: the format has no room for such bytes.",
        report="https://github.com/Comfy-Org/ComfyUI/issues/15602",
        look=_container_rule("trailing-bytes", "cut"),
        tells_before_tensors=True,
    ),
    Rule(
        "container/overlap",
        "error",
        "proved",
        what="Two tensors share bytes.",
        hurts="One tensor's numbers stand in for another's, without an error in loaders that check each by itself.",
        detection=f"{_PARSED} Sorted by offset, a tensor begins before the one ahead of it ends.",
        fooled_by="Nothing: tied tensors are written once in this format, not as two views.",
        report="https://github.com/ohdearquant/lattice/issues/752",
        look=_container_rule("overlap", "write-again"),
        tells_before_tensors=True,
    ),
    Rule(
        "container/hole",
        "error",
        "proved",
        what="Bytes between two tensors belong to none.",
        hurts="Strict loaders refuse the file; the gap may carry anything.",
        detection=f"{_PARSED} Sorted by offset, a tensor begins after the one ahead of it has ended.",
        fooled_by="A tensor whose description was refused leaves a gap too; then this rule keeps silent.",
        report="https://github.com/antirez/h3.c/pull/48",
        look=_container_rule("hole", "write-again"),
        tells_before_tensors=True,
    ),
    Rule(
        "container/header",
        "error",
        "proved",
        what="A header, index or config that cannot be read, or a description that contradicts itself.",
        hurts="A loader that trusts a shape and another one that trusts the offsets read different numbers.",
        detection=f"{_PARSED} JSON is strict and bounded; dtype, shape and offsets of each tensor must agree.",
        fooled_by="A header that is wrong and consistent.",
        report="https://github.com/ml-explore/mlx/issues/3363",
        look=_container_rule("header", "write-again"),
        tells_before_tensors=True,
    ),
    Rule(
        "container/not-safetensors",
        "error",
        "proved",
        what="A file named .safetensors holds something else: a pickle, an LFS pointer, a web page, nothing; or "
        "it is a link that leads nowhere.",
        hurts="Loaders stop with words about a header that is too large.",
        detection="The first bytes are compared with what else is found under that name. Pickles are never opened.",
        fooled_by="Foreign content that happens to begin with a small length and a brace.",
        report="https://github.com/microsoft/OmniParser/issues/34",
        look=_container_rule("not-safetensors", "fetch-again"),
        tells_before_tensors=True,
    ),
)

_JOINED = "The index is joined with the headers of its shards, both ways."

INDEX_RULES: tuple[Rule, ...] = (
    Rule(
        "index/missing-shard",
        "error",
        "proved",
        what="A shard that the index names, or that the numbers in the other names promise, is absent, or is a link "
        "that leads nowhere.",
        hurts="Its tensors stay at their initial values where a loader does not insist.",
        detection=_JOINED,
        fooled_by="Nothing.",
        report="https://github.com/sgl-project/sglang/pull/32279",
        look=_index_rule("missing-shard", "fetch"),
        tells_before_tensors=True,
    ),
    Rule(
        "index/missing-tensor",
        "error",
        "proved",
        what="The index lists a tensor that no shard holds.",
        hurts="The tensor is initialised at random, or loading fails late.",
        detection=_JOINED,
        fooled_by="An index that forgot the tensor as well: then only the family can miss it.",
        report="https://github.com/huggingface/huggingface_hub/issues/4725",
        look=_index_rule("missing-tensor", "convert-again"),
        tells_before_tensors=True,
    ),
    Rule(
        "index/unlisted-tensor",
        "warning",
        "conflict",
        what="A shard holds a tensor that the index does not list, or numbered shards have no index at all.",
        hurts="A loader that follows the index never reads it, or refuses the directory; one that reads whole shards "
        "does.",
        detection=f"{_JOINED} A warning, not an error: the bytes are sound and most loaders read whole shards.",
        fooled_by="Weight files beside the indexed ones that belong to something else; they are only noted.",
        report="https://github.com/huggingface/huggingface_hub/pull/4728",
        look=_unlisted,
        tells_before_tensors=True,
    ),
    Rule(
        "index/wrong-shard",
        "error",
        "proved",
        what="The index puts a tensor into one shard, and it lies in another.",
        hurts="A loader that opens only the shard named does not find it.",
        detection=_JOINED,
        fooled_by="Nothing.",
        report="https://github.com/huggingface/huggingface_hub/pull/4740",
        look=_index_rule("wrong-shard", "correct-index"),
        tells_before_tensors=True,
    ),
    Rule(
        "index/total-size",
        "note",
        "risk",
        what="The total_size of the index is not the sum of the tensors' bytes.",
        hurts="Memory planners and parameter counts believe it; the weights do not depend on it.",
        detection=f"{_JOINED} A note: writers are known that sum up whole files, headers included.",
        fooled_by="Two errors that cancel.",
        report="https://github.com/ml-explore/mlx-examples/pull/413",
        look=_total_size,
        tells_before_tensors=True,
    ),
    Rule(
        "index/two-weight-sets",
        "note",
        "risk",
        what="Two complete sets of weights lie in one directory.",
        hurts="Loaders differ in which they take, and a stale set looks like the real one.",
        detection="Files are grouped by their numbering; a set that is not in use and large enough to be one is told.",
        fooled_by="Publishers who ship a second format on purpose: hence a note.",
        report="https://github.com/vllm-project/vllm/issues/4989",
        look=_two_sets,
        tells_before_tensors=True,
    ),
)

DUPLICATE_RULE = Rule(
    "tensor/duplicate",
    "error",
    "proved",
    what="One tensor lies in several files, or two projections of one module, or two layers, are the same.",
    hurts="With different contents, which one counts depends on the order in which a loader reads. Where gate is up, "
    "or keys are values, or one layer is the next, what one of them had learnt is lost.",
    detection="Names are joined over all files, and the copies compared byte for byte. Equal copies are a note. The "
    "hashes of gate and up, and of attention's projections, are compared within each module, and the halves of a fused "
    "tensor: equal in some layers only is an error; in all, a warning for trained gates, else a note. Layers of which "
    "every matrix is another's are a note: models share and repeat layers on purpose.",
    fooled_by="Single tensors of another layer are not told.",
    report="https://github.com/huggingface/huggingface_hub/issues/4725",
    look=_duplicates,
    looks_at="tensors",
)
