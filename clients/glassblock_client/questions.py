"""What a client can ask of a service: a question for each endpoint, put together here and sent by either client.

A function here has the arguments and the docstring of the method of the same name (`client.Client`,
`async_client.AsyncClient`). It sends nothing, and refuses what the service would refuse for its form.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar, cast, get_args

from glassblock.wire import endpoints as wire
from glassblock.wire.audits import Audit, AuditList, AuditQuery, AuditRequest, JobState, Report
from glassblock.wire.blocks import BlockPart, BlockRunAnswer, BlockRunRequest, Overrides
from glassblock.wire.budgets import BudgetAnswer, BudgetRequest
from glassblock.wire.checkpoints import CheckpointDetail, CheckpointList, Residency, ResidencyRequest
from glassblock.wire.endpoints import AnswerT, Endpoint, Nothing, RequestT
from glassblock.wire.explain import ExplainAnswer, ExplainRequest
from glassblock.wire.framing import WireTensor
from glassblock.wire.jacobians import (
    CHEAP_NORMS,
    Certificate,
    JacobianNorm,
    JacobianPart,
    JacobiansAnswer,
    JacobiansRequest,
    TextStates,
)
from glassblock.wire.likelihoods import LikelihoodAnswer, LikelihoodRequest
from glassblock.wire.norms import (
    NormRole,
    NormStatisticsAnswer,
    NormStatisticsRequest,
    ResidualCompareAnswer,
    ResidualCompareRequest,
)
from glassblock.wire.plans import PlanAnswer, PlannedOperation, PlanRequest, TensorShape
from glassblock.wire.repairs import RepairAnswer, RepairRequest
from glassblock.wire.selftests import SelftestAnswer, SelftestRequest
from glassblock.wire.tables import Capabilities, FamilyList, Health, RuleList
from glassblock.wire.values import ComputeDtype, PlacementName, Request, RunStage, Sample

from glassblock_client.exchange import Call, Reply, compose, prepare
from glassblock_client.given import as_object, as_tuple, named
from glassblock_client.jobs import job_endpoint
from glassblock_client.tensors import Array, Numbers, divide
from glassblock_client.texts import TokenIds, as_token_ids

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Question(Generic[ResultT]):
    """A call, and what its caller is given of the reply."""

    call: Call[Any]
    read: Callable[[Reply[Any]], ResultT]


def answer_to(endpoint: Endpoint[RequestT, AnswerT], message: RequestT, **said: Any) -> Question[AnswerT]:
    """A question whose result is the answering message. `said`: as `exchange.prepare` takes it."""
    return Question(prepare(endpoint, message, **said), lambda reply: reply.answer)


def reply_to(endpoint: Endpoint[RequestT, AnswerT], message: RequestT, **said: Any) -> Question[Reply[AnswerT]]:
    """A question whose result is the answering message and its tensors. `said`: as `exchange.prepare` takes it."""
    return Question(prepare(endpoint, message, **said), lambda reply: reply)


def signature_of_method(build: Callable[..., Question[Any]]) -> inspect.Signature:
    """How the method is called that asks what `build` puts together, for whoever asks Python about it."""
    own = inspect.signature(build)
    client = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    (result,) = get_args(own.return_annotation)
    return own.replace(parameters=[client, *own.parameters.values()], return_annotation=result)


def job_of(
    operation: str,
    request: Mapping[str, object] | Request,
    *,
    tensors: Mapping[str, Array | WireTensor] | None,
    return_tensors: bool,
    idempotency_key: str | None,
) -> Call[Any]:
    """The call that starts an operation as a job. Arguments as `start_job` of either client."""
    endpoint = job_endpoint(operation)
    message = request if isinstance(request, Request) else compose(endpoint.request, **named(request, "request"))
    said = {"Prefer": "respond-async", "Idempotency-Key": idempotency_key}
    _, beside = divide(**({} if tensors is None else named(tensors, "tensors")))
    return prepare(endpoint, message, tensors=beside, want_tensors=return_tensors, said=said)


def live() -> Question[Health]:
    """Whether the process answers."""
    return answer_to(wire.LIVE, Nothing())


def ready() -> Question[Health]:
    """Whether the device is usable and every root readable."""
    return answer_to(wire.READY, Nothing())


def metrics() -> Question[str]:
    """Numbers for Prometheus, in its text format."""
    return Question(prepare(wire.METRICS, Nothing()), lambda reply: reply.answer.text)


def capabilities() -> Question[Capabilities]:
    """Versions, and what this service offers."""
    return answer_to(wire.CAPABILITIES, Nothing())


def checkpoints() -> Question[CheckpointList]:
    """What lies under the service's roots."""
    return answer_to(wire.CHECKPOINTS, Nothing())


def pin(name: str, *, layers: Sequence[int] | None = None) -> Question[Residency]:
    """Hold a checkpoint's blocks on the device: those of `layers`, or all."""
    message = compose(ResidencyRequest, layers=as_tuple(layers))
    return answer_to(wire.PIN, message, parameters={"name": name})


def evict(name: str) -> Question[Residency]:
    """Let a checkpoint's blocks go."""
    return answer_to(wire.EVICT, Nothing(), parameters={"name": name})


def checkpoint(name: str) -> Question[CheckpointDetail]:
    """Family, shapes, types, layers, residency, and every declared epsilon with its source."""
    return answer_to(wire.CHECKPOINT, Nothing(), parameters={"name": name})


def run_block(
    checkpoint: str,
    layer: int,
    *,
    part: BlockPart = "ffn",
    expert: int | Literal["shared"] | None = None,
    x: Numbers | WireTensor | None = None,
    sample: Sample | None = None,
    token_ids: TokenIds | None = None,
    text: str | None = None,
    capture: Sequence[RunStage] | None = None,
    overrides: Overrides | None = None,
    family: str | None = None,
    family_row: Mapping[str, Any] | None = None,
    tower: str | None = None,
    return_tensors: bool = False,
    dtype: Literal["float32", "native"] = "float32",
) -> Question[Reply[BlockRunAnswer]]:
    """Run a part of one layer with its stages captured.

    Args:
        checkpoint: its name, a path under a root of the service.
        layer: counted from 0.
        part: the feed-forward block; attention, of whole sequences; or the layer, attention first.
        expert: one network of a mixture alone: its number, or "shared".
        x: what enters the part, [..., d_model]; for attention [..., tokens, d_model].
        sample: rows of the checkpoint's own embedding, in place of `x`.
        token_ids: a text from its first token, or several of one length, in place of `x`: the layers below are run.
        text: the same, tokenised with the checkpoint's own tokenizer.json.
        capture: stages to answer for; all that the part has when left out.
        overrides: what to change about the feed-forward block first.
        family: row of the family table, instead of what the config says.
        family_row: a row of your own, instead of one.
        tower: another stack of layers in the files, such as `encoder`.
        return_tensors: send the captured stages, in `.tensors`; else their statistics only.
        dtype: of the tensors returned: float32, or as computed (bfloat16 arrives as float32, bit for bit).
    """
    nested, tensors = divide(x=x)
    message = compose(
        BlockRunRequest,
        checkpoint=checkpoint,
        layer=layer,
        part=part,
        expert=expert,
        x=nested["x"],
        sample=sample,
        token_ids=as_token_ids(token_ids),
        text=text,
        capture=as_tuple(capture),
        overrides=Overrides() if overrides is None else overrides,
        family=family,
        family_row=as_object(family_row),
        tower=tower,
        return_tensors=return_tensors,
        dtype=dtype,
    )
    return reply_to(wire.RUN_BLOCK, message, tensors=tensors, want_tensors=return_tensors)


def explain_block(
    checkpoint: str,
    layer: int,
    captures: Mapping[str, Array | WireTensor],
    *,
    family: str | None = None,
    family_row: Mapping[str, Any] | None = None,
    tower: str | None = None,
    pairs: bool = True,
) -> Question[ExplainAnswer]:
    """Name the mistake, or the two, that explains tensors captured elsewhere.

    Args:
        checkpoint: its name, a path under a root of the service.
        layer: counted from 0.
        captures: stages by name, or under `layers.{layer}.`; [..., d_model], or [..., d_ff] for those between
            gate and hidden. In the type they were computed in: `WireTensor` carries bfloat16.
        family: row of the family table, instead of what the config says.
        family_row: a row of your own, instead of one.
        tower: another stack of layers in the files, such as `encoder`.
        pairs: look for two mistakes where one does not explain the captures.
    """
    _, tensors = divide(**named(captures, "captures"))
    message = compose(
        ExplainRequest,
        checkpoint=checkpoint,
        layer=layer,
        family=family,
        family_row=as_object(family_row),
        tower=tower,
        pairs=pairs,
    )
    return answer_to(wire.EXPLAIN_BLOCK, message, tensors=tensors)


def norm_statistics(
    *,
    x: Numbers | WireTensor | None = None,
    eps: float | None = None,
    gain: Numbers | WireTensor | None = None,
    offset: float = 0.0,
    checkpoint: str | None = None,
    family: str | None = None,
    family_row: Mapping[str, Any] | None = None,
    tower: str | None = None,
    layer: int | None = None,
    norm: NormRole | None = None,
    sample: Sample | None = None,
    token_ids: TokenIds | None = None,
    text: str | None = None,
    jacobian: bool = False,
    return_tensors: bool = True,
) -> Question[Reply[NormStatisticsAnswer]]:
    """Statistics, outputs, Jacobians and invariances of the norms of `x`.

    Args:
        x: [..., d].
        eps: epsilon; with `checkpoint`, in place of the declared one.
        gain: [d]; ones when left out.
        offset: added to the gain.
        checkpoint: take norm `norm` of layer `layer` from here.
        family: row of the family table, instead of what the config says.
        family_row: a row of your own, instead of one.
        tower: another stack of layers in the files, such as `encoder`.
        layer: counted from 0.
        norm: which of the checkpoint's norms.
        sample: rows of the checkpoint's own embedding, in place of `x`.
        token_ids: a text, in place of `x`: what this norm reads of it, through the layers below.
        text: the same, tokenised with the checkpoint's own tokenizer.json.
        jacobian: also the dense Jacobians, [..., d, d].
        return_tensors: outputs and Jacobians as arrays in `.tensors`; else as lists in the answer.
    """
    nested, tensors = divide(x=x, gain=gain)
    message = compose(
        NormStatisticsRequest,
        x=nested["x"],
        eps=eps,
        gain=nested["gain"],
        offset=offset,
        checkpoint=checkpoint,
        family=family,
        family_row=as_object(family_row),
        tower=tower,
        layer=layer,
        norm=norm,
        sample=sample,
        token_ids=as_token_ids(token_ids),
        text=text,
        jacobian=jacobian,
    )
    return reply_to(wire.NORM_STATISTICS, message, tensors=tensors, want_tensors=return_tensors)


def compare_residuals(
    *,
    x: Numbers | WireTensor | None = None,
    matrix: Numbers | WireTensor | None = None,
    eps: float | None = None,
    checkpoint: str | None = None,
    family: str | None = None,
    family_row: Mapping[str, Any] | None = None,
    tower: str | None = None,
    layer: int | None = None,
    sample: Sample | None = None,
    dense_up_to: int = 128,
    return_tensors: bool = True,
) -> Question[Reply[ResidualCompareAnswer]]:
    """The same sublayer wired pre-, post- and sandwich-norm: outputs and Jacobians.

    Args:
        x: [..., d].
        matrix: [d, d], the sublayer F(x) = matrix @ x.
        eps: epsilon of the norms.
        checkpoint: take the feed-forward block of layer `layer` as the sublayer.
        family: row of the family table, instead of what the config says.
        family_row: a row of your own, instead of one.
        tower: another stack of layers in the files, such as `encoder`.
        layer: counted from 0.
        sample: rows of the checkpoint's own embedding, in place of `x`.
        dense_up_to: widest d whose Jacobians are written out; norms beyond.
        return_tensors: outputs and Jacobians as arrays in `.tensors`; else as lists in the answer.
    """
    nested, tensors = divide(x=x, matrix=matrix)
    message = compose(
        ResidualCompareRequest,
        x=nested["x"],
        matrix=nested["matrix"],
        eps=eps,
        checkpoint=checkpoint,
        family=family,
        family_row=as_object(family_row),
        tower=tower,
        layer=layer,
        sample=sample,
        dense_up_to=dense_up_to,
    )
    return reply_to(wire.COMPARE_RESIDUALS, message, tensors=tensors, want_tensors=return_tensors)


def jacobians(
    checkpoint: str,
    layers: Sequence[int] | None = None,
    *,
    family: str | None = None,
    family_row: Mapping[str, Any] | None = None,
    tower: str | None = None,
    part: JacobianPart = "block",
    expert: int | Literal["shared"] | None = None,
    placement: PlacementName | Sequence[PlacementName] | None = None,
    x: Numbers | WireTensor | None = None,
    token_ids: Sequence[int] | None = None,
    text: str | None = None,
    states: TextStates | None = None,
    sample: Sample | None = None,
    norms: Sequence[JacobianNorm] = CHEAP_NORMS,
    tolerance: float = 0.01,
    certificate: Certificate = "probabilistic",
    failure_probability: float = 1e-9,
    seed: int = 0,
    vectors: bool = False,
    depth: bool = False,
    probes: int = 16,
    input_positions: Sequence[int] | None = None,
    output_positions: Sequence[int] | None = None,
) -> Question[Reply[JacobiansAnswer]]:
    """Norms of Jacobians per layer and token, each with how it was had.

    Args:
        checkpoint: its name, a path under a root of the service.
        layers: counted from 0; every one when left out.
        family: row of the family table, instead of what the config says.
        family_row: a row of your own, instead of one.
        tower: another stack of layers in the files, such as `encoder`.
        part: norm, ffn, branch, block, attention, mixture or layer.
        expert: of a mixture: this network alone, at every token; each at its own tokens when left out.
        placement: the same weights with the norm elsewhere; several stand side by side.
        x: what enters the block, [..., d_model], the same for every layer.
        token_ids: a text, as ids.
        text: the same in words, by the checkpoint's own tokenizer.json.
        states: of a text: "reached", what the model makes of it at each layer, or "embedding", its embedding rows. When
            left out, reached of `text`, and of attention, a mixture and a layer; else embedding.
        sample: rows of the checkpoint's own embedding as x.
        norms: of frobenius, spectral, trace, radial_gain, smallest, condition_number.
        tolerance: how narrow the bracket of a spectral norm is to be, relative.
        certificate: of its upper bound: "probabilistic" or "certain".
        failure_probability: of an upper bound that is not certain.
        seed: of starts, probes and the self-check's directions.
        vectors: the top singular vectors of every token, in `.tensors`.
        depth: also the curves of the chain of these layers' feed-forward blocks; of the layers with that part.
        probes: random vectors behind an estimate; as many as J has rows make it exact.
        input_positions: of a part that couples tokens: by which positions it is differentiated.
        output_positions: likewise: which positions are differentiated.
    """
    nested, tensors = divide(x=x)
    message = compose(
        JacobiansRequest,
        checkpoint=checkpoint,
        **({} if layers is None else {"layers": as_tuple(layers)}),
        family=family,
        family_row=as_object(family_row),
        tower=tower,
        part=part,
        expert=expert,
        placement=as_tuple(placement),
        x=nested["x"],
        token_ids=as_tuple(token_ids),
        text=text,
        states=states,
        sample=sample,
        norms=as_tuple(norms),
        tolerance=tolerance,
        certificate=certificate,
        failure_probability=failure_probability,
        seed=seed,
        vectors=vectors,
        depth=depth,
        probes=probes,
        input_positions=as_tuple(input_positions),
        output_positions=as_tuple(output_positions),
    )
    return reply_to(wire.JACOBIANS, message, tensors=tensors, want_tensors=vectors)


def likelihoods(
    checkpoint: str,
    *,
    token_ids: TokenIds | None = None,
    text: str | None = None,
    dtype: ComputeDtype | None = None,
    family: str | None = None,
    family_row: Mapping[str, Any] | None = None,
) -> Question[LikelihoodAnswer]:
    """How likely a checkpoint finds a text: ln p of every token but the first, given those before it.

    Args:
        checkpoint: its name, a path under a root of the service.
        token_ids: a text from its first token, or several of one length.
        text: the same, tokenised with the checkpoint's own tokenizer.json.
        dtype: run every step in this type, as an engine would; float32 at least when left out.
        family: row of the family table, instead of what the config says.
        family_row: a row of your own, instead of one.
    """
    message = compose(
        LikelihoodRequest,
        checkpoint=checkpoint,
        token_ids=as_token_ids(token_ids),
        text=text,
        dtype=dtype,
        family=family,
        family_row=as_object(family_row),
    )
    return answer_to(wire.LIKELIHOODS, message)


def plan(
    operation: PlannedOperation,
    request: Mapping[str, object] | Request,
    *,
    tensors: Mapping[str, TensorShape | tuple[int, ...]] | None = None,
) -> Question[PlanAnswer]:
    """What a request would read, hold and compute; it is not made.

    Args:
        operation: as the method is called that would make it.
        request: its message, as a mapping or as the model of `glassblock.wire`.
        tensors: of its body, by name: shapes of float32, or `TensorShape`.
    """
    said = request.model_dump(mode="json", exclude_unset=True) if isinstance(request, Request) else request
    given = {} if tensors is None else named(tensors, "tensors")
    shapes = {name: one if isinstance(one, TensorShape) else {"shape": as_tuple(one)} for name, one in given.items()}
    asked = compose(PlanRequest, operation=operation, request=as_object(said), tensors=cast("Any", shapes))
    return answer_to(wire.PLAN, asked)


def budgets(
    *,
    d_model: int | list[int] | None = None,
    d_ff: int | list[int] | None = None,
    kind: Literal["plain", "gated"] | None = None,
    batch: int | list[int] = 1,
    tokens: int | list[int] = 1,
    layers: int = 1,
    dtype: Literal["float64", "float32", "bfloat16", "float16", "float8"] | None = None,
    multiple_of: int = 256,
    checkpoint: str | None = None,
    family: str | None = None,
    family_row: Mapping[str, Any] | None = None,
    tower: str | None = None,
) -> Question[BudgetAnswer]:
    """Parameters, activations and FLOPs of a feed-forward block, counted.

    Sizes, or a `checkpoint` to take them from. A list in one size sweeps it. Without `dtype` the
    one that the checkpoint is stored in, else bfloat16. `family`, `family_row` and `tower` as `run_block` takes them.
    """
    message = compose(
        BudgetRequest,
        d_model=d_model,
        d_ff=d_ff,
        kind=kind,
        batch=batch,
        tokens=tokens,
        layers=layers,
        dtype=dtype,
        multiple_of=multiple_of,
        checkpoint=checkpoint,
        family=family,
        family_row=as_object(family_row),
        tower=tower,
    )
    return answer_to(wire.BUDGETS, message)


def start_audit(
    checkpoint: str,
    *,
    family: str | None = None,
    family_row: Mapping[str, Any] | None = None,
    against: Mapping[str, Any] | None = None,
    against_name: str = "against",
    rules: Sequence[str] | None = None,
    certify: bool = False,
    digest: Literal["fast", "sha256", "none"] = "fast",
    reference: str | Sequence[str] | None = None,
    captures: str | None = None,
    token_ids: TokenIds | None = None,
    text: str | None = None,
    idempotency_key: str | None = None,
) -> Question[Audit]:
    """Start an audit and return at once.

    Args:
        checkpoint: its name, a path under a root of the service.
        family: row of the family table, instead of what the config says.
        family_row: a row of your own, instead of one.
        against: another engine's config, to compare every setting with (docs/comparing.md).
        against_name: what findings call that config.
        rules: rules to apply; all when left out.
        certify: compute the certified bound of every tensor, not of suspects alone.
        digest: of each tensor's bytes: fast, or one that cannot be forged, or none.
        reference: name of another checkpoint, to compare every tensor with; or of several, to tell which tensors
            are made of which.
        captures: name of a safetensors file, or a folder of them, with tensors captured in an engine.
        token_ids: a text, or several of one length, as a witness beside the weights (docs/behaviour.md).
        text: the same in words, by the checkpoint's own tokenizer.
        idempotency_key: of your choosing; asked again with the same key, the same audit is the answer.
    """
    message = compose(
        AuditRequest,
        checkpoint=checkpoint,
        family=family,
        family_row=as_object(family_row),
        against=as_object(against),
        against_name=against_name,
        rules=as_tuple(rules),
        certify=certify,
        digest=digest,
        reference=as_tuple(reference),
        captures=captures,
        token_ids=as_token_ids(token_ids),
        text=text,
    )
    said = {"Idempotency-Key": idempotency_key}
    return answer_to(wire.START_AUDIT, message, said=said)


def audits(
    *,
    state: JobState | None = None,
    operation: str | None = None,
    checkpoint: str | None = None,
    since: datetime | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Question[AuditList]:
    """The audits and other jobs of this service, the newest first, a page at a time, without their reports.

    Args:
        state: only those in this state.
        operation: only those of this operation: `start_audit`, `jacobians` and so on.
        checkpoint: only those of this checkpoint.
        since: only those created then or later; with its zone.
        limit: how many at most, up to 500.
        cursor: `next` of the page before.
    """
    message = compose(
        AuditQuery,
        state=state,
        operation=operation,
        checkpoint=checkpoint,
        since=since,
        limit=limit,
        cursor=cursor,
    )
    return answer_to(wire.AUDITS, message)


def audit_report(audit_id: str) -> Question[Report]:
    """The report of an audit that ended. For other formats see `glassblock.reports.REPORTS`."""
    return answer_to(wire.AUDIT_REPORT, Nothing(), parameters={"id": audit_id})


def audit(audit_id: str) -> Question[Audit]:
    """State, progress and, when it ended well, the report."""
    return answer_to(wire.AUDIT, Nothing(), parameters={"id": audit_id})


def cancel_audit(audit_id: str) -> Question[Audit]:
    """Cancel an audit that has not ended."""
    return answer_to(wire.CANCEL_AUDIT, Nothing(), parameters={"id": audit_id})


def repair(
    checkpoint: str,
    *,
    output: str | None = None,
    dry_run: bool = False,
    rules: Sequence[str] | None = None,
    reference: str | None = None,
    against: Mapping[str, Any] | None = None,
    against_name: str = "against",
    family: str | None = None,
    family_row: Mapping[str, Any] | None = None,
    digest: Literal["fast", "sha256", "none"] = "fast",
) -> Question[RepairAnswer]:
    """Repair a checkpoint into a new directory of the service, or say what would be done.

    Args:
        checkpoint: its name, a path under a root of the service.
        output: name of the new directory under the service's output root.
        dry_run: write nothing; `after` is the audit of the patched checkpoint.
        rules: repair only what these find; all when left out.
        reference: name of another checkpoint, whose tensors decide more.
        against: another engine's config, which may bear out one of two epsilons.
        against_name: what findings call that config.
        family: row of the family table, where no config names one.
        family_row: a row of your own, instead of one.
        digest: of each tensor's bytes: fast, or one that cannot be forged, or none.
    """
    message = compose(
        RepairRequest,
        checkpoint=checkpoint,
        output=output,
        dry_run=dry_run,
        rules=as_tuple(rules),
        reference=reference,
        against=as_object(against),
        against_name=against_name,
        family=family,
        family_row=as_object(family_row),
        digest=digest,
    )
    return answer_to(wire.REPAIR, message)


def selftest(
    checkpoint: str,
    *,
    rules: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    family: str | None = None,
    family_row: Mapping[str, Any] | None = None,
    digest: Literal["fast", "sha256", "none"] = "fast",
) -> Question[SelftestAnswer]:
    """Plant each mistake in a checkpoint, in memory, and say what an audit finds.

    Args:
        checkpoint: its name, a path under a root of the service.
        rules: only mistakes that these are meant for; all when left out.
        layers: layers to plant in; all when left out.
        family: row of the family table, where no config names one.
        family_row: a row of your own, instead of one.
        digest: of each tensor's bytes: fast, or one that cannot be forged, or none.
    """
    message = compose(
        SelftestRequest,
        checkpoint=checkpoint,
        rules=as_tuple(rules),
        layers=as_tuple(layers),
        family=family,
        family_row=as_object(family_row),
        digest=digest,
    )
    return answer_to(wire.SELFTEST, message)


def rules() -> Question[RuleList]:
    """The rules, explained."""
    return answer_to(wire.RULES, Nothing())


def families() -> Question[FamilyList]:
    """The family table, and the names that overrides take."""
    return answer_to(wire.FAMILIES, Nothing())
