"""What a request would read, hold and compute, estimated from headers and shapes before anything is read.

The peak is of the device's allocator: weights as they lie there, stages, and the largest temporary. It is meant to be
never below what is needed and at most twice that. What depends on the numbers is not in it: tokens whose Jacobian is
done again in float64 may take up to 2 GiB more, and then a real lack of memory is answered like one foreseen.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple, cast

from pydantic import ValidationError

from glassblock.audit.behaviour_study import FORWARD_PASSES, STATES_BYTES, looked_at, too_few
from glassblock.checkpoint.entries import DTYPE_BITS
from glassblock.checkpoint.layer_map import layer_tensors
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.outer_tensors import embedding_entry, head_entry
from glassblock.checkpoint.text_states import HEAD_BYTES, layer_count
from glassblock.errors import GlassblockError, InvalidValue
from glassblock.numerics.likelihood import DEFAULT_BYTE_BUDGET as LOGITS_BYTES
from glassblock.operations.audits import open_reference, references_of
from glassblock.operations.block_runs import WITHOUT_WEIGHTS
from glassblock.operations.coupled_jacobians import COUPLED_PARTS
from glassblock.operations.jacobian_inputs import text_states, with_every_layer
from glassblock.operations.jacobian_sizes import coupled_cost, coupled_parts, depth_cost, separate_cost
from glassblock.operations.layer_costs import (
    cost_below,
    feed_forward_cost,
    layer_cost,
    one_network,
    sizes_of_layer,
)
from glassblock.operations.layer_sizes import (
    Cost,
    attention_cost,
    network_size,
)
from glassblock.operations.norm_statistics import ELEMENTS_AT_ONCE
from glassblock.operations.plan_inputs import PlanInput, Shapes, compute_item, input_of, posted_input, text_input
from glassblock.operations.residuals import PLACEMENTS, rows_at_once
from glassblock.operations.selftests import asked_mistakes
from glassblock.operations.store import CheckpointStore
from glassblock.operations.texts import token_ids_of
from glassblock.wire.audits import AuditRequest
from glassblock.wire.blocks import BlockRunRequest
from glassblock.wire.endpoints import ENDPOINTS
from glassblock.wire.explain import ExplainRequest, stage_of
from glassblock.wire.jacobians import JacobiansRequest
from glassblock.wire.likelihoods import LikelihoodRequest
from glassblock.wire.norms import NormStatisticsRequest, ResidualCompareRequest
from glassblock.wire.plans import PlanAnswer, PlannedOperation, PlanRequest
from glassblock.wire.refusals import refusal
from glassblock.wire.repairs import RepairRequest
from glassblock.wire.selftests import SelftestRequest
from glassblock.wire.values import Request

MARGIN = 1.04
"""For what is small and not counted: gains, biases, statistics."""

SMALL_BYTES = 1 << 16
"""The least that anything takes."""


class Plan(NamedTuple):
    """What a request costs.

    Attributes:
        bytes_read: of tensor data, where nothing is resident.
        peak_bytes: of the device.
        flops: of products of matrices.
        pinned_bytes: of the peak, pinned on the device already.
    """

    bytes_read: int
    peak_bytes: int
    flops: int
    pinned_bytes: int = 0


NOTHING = Plan(0, 0, 0)


def quote(store: CheckpointStore, request: PlanRequest) -> PlanAnswer:
    """The answer to a plan's request.

    Raises:
        InvalidValue: the message is none of that operation.
        GlassblockError: there is no such checkpoint, or its headers do not allow what is asked.
    """
    try:
        message = MESSAGES[request.operation].model_validate(request.request)
    except ValidationError as fault:
        raise refusal(fault, MESSAGES[request.operation], within="request") from fault
    shapes = cast("Shapes", request.tensors)
    plan = PLANS[request.operation](store, message, shapes)
    memory = store.admission.memory()
    return PlanAnswer(
        operation=request.operation,
        device=str(store.device),
        bytes_read=plan.bytes_read,
        peak_bytes=plan.peak_bytes,
        flops=plan.flops,
        budget_bytes=memory.budget,
        in_use_bytes=memory.reserved,
        resident_bytes=memory.resident,
        fits=store.admission.fits(plan.peak_bytes, resident=plan.pinned_bytes),
    )


def estimate(store: CheckpointStore, operation: str, message: Request, tensors: Shapes) -> Plan:
    """As `quote`, of a request that will be made; nothing of one that cannot, which tells itself why."""
    plan = cast("Mapping[str, Callable[[CheckpointStore, Any, Shapes], Plan]]", PLANS)[operation]
    try:
        return plan(store, message, tensors)
    except GlassblockError:
        return NOTHING


def _planned(read: int, cost: Cost, *, pinned: int = 0) -> Plan:
    return Plan(read, int(MARGIN * cost.bytes) + SMALL_BYTES, cost.flops, pinned)


def _usable(opened: Callable[..., Checkpoint], message: Any) -> Checkpoint:
    """The checkpoint that a message names, from the store's `open` or `serving`.

    Raises:
        GlassblockError: there is none, or it cannot be run.
    """
    tower = getattr(message, "tower", None)
    checkpoint = opened(message.checkpoint, family=message.family, family_row=message.family_row, tower=tower)
    checkpoint.require_usable()
    return checkpoint


_WITHOUT_BLOCK = frozenset({"attention", "mixture"})
"""Parts of a layer that what is pinned of it, its dense block, is no part of."""


def _pinned(store: CheckpointStore, message: Any, checkpoint: Checkpoint, layer: int) -> int:
    """Bytes of the block of a layer that is pinned as it would be run."""
    return store.pinned_bytes(message.checkpoint, checkpoint, (layer,))


def _block_run(store: CheckpointStore, message: BlockRunRequest, tensors: Shapes) -> Plan:
    checkpoint = _usable(store.serving, message)
    entered, named = input_of(store, checkpoint, message, tensors), message.overrides.dtype
    whole = message.part != "ffn" or entered.texts is not None
    sizes = sizes_of_layer(checkpoint, message.layer, whole=whole, rows=entered.rows)
    if message.expert is not None:
        sizes = one_network(sizes, network_size(layer_tensors(checkpoint, message.layer).network(message.expert)))
    item = compute_item(named, entered.item, sizes.item)
    width, rows = sizes.network.d, entered.rows
    held = rows * width * entered.item
    if message.part == "attention" and sizes.attention is not None:
        batch, tokens = entered.texts or (1, rows)
        cost = attention_cost(sizes.attention, batch, tokens, item)
        cost, read = cost._replace(held=cost.held + sizes.attention.held), sizes.attention.read
    elif message.part == "layer":
        cost, read = layer_cost(sizes, entered, item), sizes.read
    elif message.capture is not None and set(message.capture) <= {*WITHOUT_WEIGHTS} and entered.texts is None:
        cost, read = Cost(sizes.network.held + 2 * rows * width * item, 8 * rows * width, 0), sizes.read
    else:
        cost = feed_forward_cost(sizes, rows, item, recombined=min(rows, 32))
        cost, read = cost._replace(held=cost.held + sizes.held), sizes.read
    if message.return_tensors and message.dtype == "float32" and item != 4:
        cost = cost._replace(held=cost.held + 4 * cost.held // item)
    below, below_read = Cost(0, 0, 0), 0
    if entered.texts is not None:
        below, below_read = cost_below(checkpoint, message.layer, entered, named)
        if message.part == "ffn":
            attended = layer_cost(sizes, entered, item)
            below = Cost(max(below.bytes, attended.bytes - sizes.network.held), 0, below.flops)
    pinned = 0 if message.part in _WITHOUT_BLOCK else _pinned(store, message, checkpoint, message.layer)
    own, under = cost.held + held, below.bytes + held - cost.transient
    peak = max(own, under)
    cost = Cost(peak, cost.transient, cost.flops + below.flops)
    return _planned(read + below_read + entered.read, cost, pinned=peak - max(own - pinned, under))


def _likelihood(store: CheckpointStore, message: LikelihoodRequest, tensors: Shapes) -> Plan:
    checkpoint = _usable(store.open, message)
    cost, read = _text(checkpoint, input_of(store, checkpoint, message, tensors), message.dtype)
    return _planned(read, cost)


def _text(checkpoint: Checkpoint, entered: PlanInput, named: str | None) -> tuple[Cost, int]:
    """A text's likelihood through all layers and the head, and the bytes read for it."""
    below, read = cost_below(checkpoint, layer_count(checkpoint), entered, named)
    head = head_entry(checkpoint) or embedding_entry(checkpoint)
    if head is None or len(head.shape) != 2:
        raise InvalidValue("there is no output head", field="checkpoint")
    vocabulary, width = head.shape
    item = compute_item(named, entered.item, head.bytes // max(1, prod(head.shape)))
    stored = min(head.bytes, HEAD_BYTES)
    rows = max(1, min(vocabulary, stored * vocabulary // max(1, head.bytes)))
    logits = min(LOGITS_BYTES, rows * (2 * entered.rows + width) * item)
    top = stored + logits + 2 * entered.rows * width * item
    flops = below.flops + 2 * entered.rows * width * vocabulary
    held = entered.rows * width * item
    return Cost(max(below.bytes, top) + held, 0, flops), read + head.bytes + entered.read


NORM_COPIES = 11
"""float64 copies of the rows that norms/statistics looks at together."""

NORM_OUTPUTS = 2
"""float64 copies of x that stay."""


def _norms(store: CheckpointStore, message: NormStatisticsRequest, tensors: Shapes) -> Plan:
    below, read = Cost(0, 0, 0), 0
    if message.checkpoint is None:
        found = posted_input(message.x, tensors, "x", 8)
        if found is None:
            raise InvalidValue("x is missing", field="x")
        entered = found
    else:
        checkpoint = _usable(store.open, message)
        entered = input_of(store, checkpoint, message, tensors)
        if entered.texts is not None:
            passed = layer_count(checkpoint) if message.layer is None else message.layer + (message.norm != "attn_in")
            below, read = cost_below(checkpoint, passed, entered, None)
    elements = entered.rows * entered.width
    dense = 3 * elements * entered.width * 8 if message.jacobian else 0
    together = min(elements, max(entered.width, ELEMENTS_AT_ONCE))
    copies = 8 * ((NORM_COPIES - NORM_OUTPUTS) * together + NORM_OUTPUTS * elements)
    cost = Cost(elements * entered.item + max(copies, dense, below.bytes), 0, 2 * 20 * elements + below.flops)
    return _planned(entered.read + read, cost)


WIRED_FORWARDS = 6
"""Passes through a sublayer that is wired three ways: an output of each; post-norm looks at the stream twice more, to
check it and for its Jacobian, and sandwich-norm at the branch once."""

NORM_PRODUCTS = 4
"""Products of dense Jacobians with that of a norm, [d, d] by [d, d]: sandwich-norm has two."""


def _residuals(store: CheckpointStore, message: ResidualCompareRequest, tensors: Shapes) -> Plan:
    if message.checkpoint is None:
        entered = posted_input(message.x, tensors, "x", 8)
        matrix = posted_input(message.matrix, tensors, "matrix", 8)
        if entered is None or matrix is None:
            raise InvalidValue("x or matrix is missing", field="x")
        item, d = max(4, entered.item, matrix.item), entered.width
        dense = d <= message.dense_up_to
        at_once = min(entered.rows, rows_at_once(d, d)) if dense else 1
        outputs = 3 * entered.rows * (d + (d * d if dense else 0)) * item
        held = entered.rows * d * entered.item + d * d * matrix.item + outputs
        flops = 2 * entered.rows * (WIRED_FORWARDS * d * d + NORM_PRODUCTS * d**3)
        return _planned(0, Cost(held, 3 * at_once * d * d * item, flops))
    checkpoint = _usable(store.serving, message)
    if message.layer is None:
        raise InvalidValue("layer is missing", field="layer")
    size = network_size(layer_tensors(checkpoint, message.layer).network(None))
    entered = input_of(store, checkpoint, message, tensors)
    item, rows, d, m = max(4, entered.item, size.item), entered.rows, size.d, size.m
    dense = d <= message.dense_up_to
    at_once = min(rows, rows_at_once(d, m)) if dense else 1
    outputs = 3 * rows * (d + (d * d if dense else 0)) * item
    cast = m * d * item if item != size.item else 0
    inner = at_once * (3 * m * d + 2 * d * d) * item
    # Per wiring the network's Jacobian: what enters the activation, and the product of d columns with `down`.
    network = len(PLACEMENTS) * (size.elements - m * d + m * d * d)
    flops = 2 * rows * (WIRED_FORWARDS * size.elements + network + NORM_PRODUCTS * d**3)
    cost = Cost(size.held + rows * d * (entered.item + item) + outputs, cast + inner, flops)
    return _planned(size.read + entered.read, cost, pinned=_pinned(store, message, checkpoint, message.layer))


def _jacobians(store: CheckpointStore, message: JacobiansRequest, tensors: Shapes) -> Plan:
    checkpoint = _usable(store.serving, message)
    message = with_every_layer(checkpoint, message)
    entered = input_of(store, checkpoint, message, tensors)
    coupled = message.part in COUPLED_PARTS
    every = [
        sizes_of_layer(checkpoint, layer, whole=coupled and message.part != "mixture", rows=entered.rows)
        for layer in message.layers
    ]
    if message.expert is not None:
        every = [
            one_network(sizes, network_size(layer_tensors(checkpoint, layer).network(message.expert)))
            for layer, sizes in zip(message.layers, every, strict=True)
        ]
    placements = message.placement if isinstance(message.placement, tuple) else (message.placement,)
    costs: list[Cost] = []
    for sizes in every:
        item = max(4, entered.item, sizes.item)
        if coupled:
            costs.append(coupled_cost(coupled_parts(sizes, entered.rows, item, message), entered, item, message))
        else:
            costs.append(separate_cost(sizes, entered.rows, item, message))
    held = entered.rows * entered.width * (entered.item + 4)
    pins = [
        0 if message.part in _WITHOUT_BLOCK else _pinned(store, message, checkpoint, layer) for layer in message.layers
    ]
    peak = max(cost.bytes for cost in costs)
    beside = max(cost.bytes - pinned for cost, pinned in zip(costs, pins, strict=True))
    flops = max(1, len(placements)) * sum(cost.flops for cost in costs)
    if message.depth:
        chain = depth_cost([sizes.network for sizes in every], entered.rows, entered.item, message)
        peak, flops = max(peak, chain.bytes), flops + chain.flops
        beside = max(beside, chain.bytes - sum(pins))
    attended = [sizes.attention for sizes in every] if message.part == "attention" else []
    blocks = sum(size.read for size in (attended or every) if size is not None)
    if message.depth and blocks > store.residency.budget:
        blocks *= 2  # what does not stay on the device is read once more for the chain
    read = blocks + entered.read
    if text_states(message) == "reached":
        # It goes up once, through all below the highest layer and, for a part of its block, through its attention.
        text, highest = entered._replace(texts=(1, entered.rows)), max(message.layers)
        below, _ = cost_below(checkpoint, highest + (not coupled), text, None)
        peak, beside, flops = max(peak, below.bytes), max(beside, below.bytes), flops + below.flops
        read = max(read, cost_below(checkpoint, highest + 1, text, None)[1] + entered.read)
    return _planned(read, Cost(peak + held, 0, flops), pinned=peak - beside)


SCREENED_ROWS = 8
"""On which a hypothesis must come near before it is replayed in full (`trial`)."""

REPLAYED_ROWS = 256
"""Of captures of more (`captures`)."""

KEPT_REPLAYS = 2**28
"""Bytes of replayed stages that are kept for the hypotheses to come (`replay`)."""

OPEN_HYPOTHESES = 72
"""Single mistakes that show in a block of which only what enters and what leaves was captured."""

NEAR_HYPOTHESES = 18
"""Of those, the ones that come near and are replayed in full."""


def _explain(store: CheckpointStore, message: ExplainRequest, tensors: Shapes) -> Plan:
    """Of a block that one mistake explains: a search through pairs of them, where none does, takes longer.

    Every stage is replayed in four ways, in float64 and three times in the captures' dtype, three of them with matrix
    products of their own. A mistake shows in the stage after it, and in all that is not captured up to the next one
    that is: so many stages are replayed again for every hypothesis that comes near.
    """
    checkpoint = _usable(store.serving, message)
    network = sizes_of_layer(checkpoint, message.layer, whole=False, rows=1).network
    stages = {stage_of(name)[1] for name in tensors}
    rows = max((prod(tensor.shape[:-1]) for tensor in tensors.values()), default=0)
    posted = sum(prod(tensor.shape) * DTYPE_BITS.get(tensor.dtype, 32) // 8 for tensor in tensors.values())
    item = max((DTYPE_BITS.get(tensor.dtype, 32) // 8 for tensor in tensors.values()), default=4)
    replayed = min(rows, REPLAYED_ROWS)
    between = [{"normed"}, {"gate", "up", "activated"} if network.gated else {"up"}, {"hidden"}, {"down"}]
    unseen = sum(not stages & each for each in between) / len(between)
    products = 2 * network.elements
    flops = products * (3 * replayed * (1 + NEAR_HYPOTHESES * unseen) + SCREENED_ROWS * (1 + OPEN_HYPOTHESES * unseen))
    width = 4 * network.m + 4 * network.d
    ways = 8 + (3 * item if item == 2 else 2 * item)
    kept = min(KEPT_REPLAYS, int(replayed * width * ways * (3.5 + 11 * unseen)))
    cast = 8 * min(network.m * network.d, 2**24) + 4 * network.m * network.d
    return _planned(
        network.read, Cost(network.held + posted + posted * replayed // max(1, rows) + kept, cast, int(flops))
    )


AUDIT_BYTES = 16 << 20
"""Of an audit whatever the checkpoint: pieces that are read ahead, and what they are widened to."""

MOST_HYPOTHESES = 64
"""Of an audit with a text: a few of the whole model, and one for each suspect layer."""

AUDIT_LAYER_BYTES = 80 << 20
"""What the evidence of one layer takes at most: rows go by, and are not kept."""


def _audit(store: CheckpointStore, message: AuditRequest, tensors: Shapes) -> Plan:
    del tensors
    checkpoint = store.open(message.checkpoint, family=message.family, family_row=message.family_row)
    largest = 0
    known = checkpoint.family is not None and checkpoint.trunk is not None
    for layer in (*checkpoint.layer_indices[:1], *checkpoint.layer_indices[-1:]) if known else ():
        try:
            largest = max(largest, sizes_of_layer(checkpoint, layer, whole=False, rows=1).network.held)
        except GlassblockError:  # what does not fit is a finding, and no reason not to audit
            continue
    total = checkpoint.bytes + sum(open_reference(store, name).bytes for name in references_of(message))
    largest = largest or max((entry.bytes for entry in checkpoint.entries.values()), default=0)
    cost = Cost(min(3 * largest, AUDIT_LAYER_BYTES) + AUDIT_BYTES, 0, 8 * checkpoint.bytes)
    ids = token_ids_of(store, checkpoint, message.token_ids, message.text)
    if ids is None:
        return _planned(total, cost)
    try:
        checkpoint.require_usable()
        entered = text_input(checkpoint, looked_at(ids))
        once, read = _text(checkpoint, entered, None)
    except GlassblockError:  # such a model is not asked, and the report says why
        return _planned(total, cost)
    if too_few(looked_at(ids)) is not None:
        return _planned(total, cost)
    # At most; how many layers are suspect, and so asked about, only the audit will tell.
    states = min(STATES_BYTES, MOST_HYPOTHESES * entered.rows * entered.width * 4)
    passes = int(FORWARD_PASSES)
    asked = Cost(once.bytes + states, 0, cost.flops + passes * once.flops)
    return _planned(total + passes * read, Cost(max(cost.bytes, asked.bytes), 0, asked.flops))


def _repair(store: CheckpointStore, message: RepairRequest, tensors: Shapes) -> Plan:
    """The audits before and after, the copy and its audit; what one repair lays open takes another."""
    del tensors
    one = _audit(store, _audit_of(message, reference=message.reference), {})
    if message.dry_run:
        return _times(one, 2)
    return _times(one, 3)._replace(bytes_read=3 * one.bytes_read + store.open(message.checkpoint).bytes)


def _selftest(store: CheckpointStore, message: SelftestRequest, tensors: Shapes) -> Plan:
    del tensors
    return _times(_audit(store, _audit_of(message), {}), 1 + len(asked_mistakes(message.rules)))


def _audit_of(message: RepairRequest | SelftestRequest, *, reference: str | None = None) -> AuditRequest:
    return AuditRequest(
        checkpoint=message.checkpoint, family=message.family, family_row=message.family_row, reference=reference
    )


def _times(one: Plan, count: int) -> Plan:
    """So many audits, one after the other."""
    return one._replace(bytes_read=count * one.bytes_read, flops=count * one.flops)


PLANS: Mapping[PlannedOperation, Callable[[CheckpointStore, Any, Shapes], Plan]] = {
    "run_block": _block_run,
    "explain_block": _explain,
    "norm_statistics": _norms,
    "compare_residuals": _residuals,
    "jacobians": _jacobians,
    "likelihoods": _likelihood,
    "start_audit": _audit,
    "repair": _repair,
    "selftest": _selftest,
}
MESSAGES: Mapping[str, type[Request]] = {
    endpoint.name: endpoint.request for endpoint in ENDPOINTS if endpoint.name in PLANS
}
