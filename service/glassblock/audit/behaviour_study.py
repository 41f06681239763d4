"""A text as a witness: how likely it is as the checkpoint stands, and without each mistake that may have been made."""

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import NormalDist
from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor

from glassblock.audit.behaviour_hypotheses import hypotheses_of
from glassblock.audit.behaviour_types import BehaviourStudy, Hypothesis, Judged, LeftOut, Reading
from glassblock.audit.evidence import Evidence
from glassblock.audit.question import AuditCancelled
from glassblock.checkpoint.layer_map import whole_layer_tensors
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.outer_tensors import embedding_entry
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.text_states import layer_count, require_head
from glassblock.checkpoint.text_variants import Variant, variant_log_likelihoods
from glassblock.errors import GlassblockError, InvalidValue
from glassblock.numerics.paired_differences import PairedDifference, paired_difference
from glassblock.numerics.watching import ComputationCancelled, Watch
from glassblock.wire.audits import Coverage, Finding

ALPHA = 1e-3
"""The chance that one of all hypotheses is told from the checkpoint as it stands though the text is as likely under
both, were tokens' differences normal: it is shared by all that were asked, in both directions."""

FEWEST_TOKENS = 32
"""Predicted, each another or after another; fewer say nothing of how their differences scatter, and are not asked."""

SMALLEST = 1e-5
"""Nats per token below which float32 does not tell two likelihoods apart: rounding alone moves a mean by some 1e-6."""

FORWARD_PASSES = 32.0
"""Through all layers, that the question may cost, unless it is asked of every layer (`certify`)."""

CHEAP_FLOPS = 2e11
"""Layers that the weights do not suspect are asked about while all of it stays below: some ten seconds of two cores.
So a short text is asked about more of them than a long one, and takes more passes, each shorter."""

MOST_TOKENS = 4096
"""Looked at, of all texts together: attention grows with their square, and hypotheses repeat it."""

STATES_BYTES = 256 << 20
"""Of the hypotheses' states held at once; one hypothesis is always asked."""


def behaviour_study(
    evidence: Evidence,
    findings: Sequence[Finding],
    coverage: Iterable[Coverage],
    *,
    token_ids: Int[Tensor, "*batch tokens"],
    device: torch.device,
    tell: Callable[[str], None],
    watch: Watch,
) -> BehaviourStudy:
    """Ask a text about a checkpoint.

    Args:
        evidence: What the weights have shown.
        findings: What the rules made of it.
        coverage: What they left open.
        token_ids: The text, or several of one length.
        device: Where it is computed.
        tell: Told what comes next.
        watch: Asked between layers whether to stop.

    Raises:
        AuditCancelled: `tell` or `watch` was told to stop.
        InvalidValue: More tokens than the model has positions.
    """
    checkpoint = evidence.checkpoint
    whole, token_ids = token_ids, looked_at(token_ids)
    texts = 1 if token_ids.ndim == 1 else token_ids.shape[0]
    nothing = BehaviourStudy(texts, texts * (token_ids.shape[-1] - 1))

    def progress(_done: int, _total: int, message: str) -> None:
        tell(message)

    try:
        checkpoint.require_usable()
        require_head(checkpoint)
        for layer in range(layer_count(checkpoint)):
            whole_layer_tensors(checkpoint, layer)
        few = too_few(token_ids)
        if few is not None:
            return _silent(nothing, few)
        offered = hypotheses_of(evidence, findings, coverage)
        chosen, left_out = _chosen(checkpoint, offered, token_ids, everything=evidence.question.certify)
        hypotheses, variants, faults = _made(chosen)
        with torch.no_grad():
            declared, others = variant_log_likelihoods(
                checkpoint,
                token_ids,
                variants,
                device,
                ReadMeter(),
                watch=Watch(progress, watch.cancelled),
            )
    except ComputationCancelled:
        raise AuditCancelled from None
    except GlassblockError as error:
        if isinstance(error, InvalidValue) and error.field == "token_ids":
            raise  # the question's fault, and not the checkpoint's
        return _silent(nothing, error.message)
    mean = float(declared.double().mean())
    if not math.isfinite(mean):
        return _silent(nothing, f"the mean log-likelihood of the text is {mean}: the model computes no numbers")
    if whole.numel() > token_ids.numel():
        told = f"{whole.numel() - token_ids.numel():,} tokens of the text after the first {token_ids.numel():,}"
        left_out.append(LeftOut(told, f"{MOST_TOKENS:,} tokens are the bound: ask with another part of it"))
    faults += [
        LeftOut(hypothesis.words, found.message)
        for hypothesis, found in zip(hypotheses, others, strict=True)
        if isinstance(found, GlassblockError)
    ]
    asked = [
        (hypothesis, found)
        for hypothesis, found in zip(hypotheses, others, strict=True)
        if not isinstance(found, GlassblockError)
    ]
    needed = NormalDist().inv_cdf(1 - ALPHA / 2 / max(1, len(asked)))
    count = layer_count(checkpoint)
    embedding = embedding_entry(checkpoint)
    chance = -math.inf if embedding is None else -math.log(embedding.shape[0])
    return BehaviourStudy(
        texts,
        declared.numel(),
        mean,
        tuple(_judged(asked, declared, needed, chance=chance)),
        (*left_out, *faults),
        1 + sum((count - hypothesis.first) / count for hypothesis in hypotheses),
        None if evidence.question.certify else FORWARD_PASSES,
        needed,
        chance=chance,
    )


def looked_at(token_ids: Int[Tensor, "*batch tokens"]) -> Int[Tensor, "*fewer first"]:
    """The tokens that are asked about: the first of each text, and of many texts the first."""
    first = token_ids[..., :MOST_TOKENS]
    return first if first.ndim == 1 else first[: max(1, MOST_TOKENS // first.shape[-1])]


def check_text(checkpoint: Checkpoint, token_ids: Int[Tensor, "*batch tokens"]) -> None:
    """Refuse a text that no model of this vocabulary could be asked about, before anything is read.

    Raises:
        InvalidValue: It is one token long, or has a token outside the vocabulary.
    """
    if token_ids.shape[-1] < 2:
        raise InvalidValue(
            "the text has one token: nothing stands before it", field="token_ids", hint="Give two tokens at least."
        )
    entry = None if checkpoint.family is None or checkpoint.trunk is None else embedding_entry(checkpoint)
    if entry is None or len(entry.shape) != 2:
        return
    outside = (token_ids < 0) | (token_ids >= entry.shape[0])
    if bool(outside.any()):
        raise InvalidValue(
            f"token {int(token_ids[outside][0])} is outside the vocabulary of {entry.shape[0]}",
            field="token_ids",
            hint=f"Token ids run from 0 to {entry.shape[0] - 1}.",
        )


def _silent(nothing: BehaviourStudy, reason: str) -> BehaviourStudy:
    return BehaviourStudy(nothing.texts, nothing.tokens, not_judged=reason)


def _chosen(
    checkpoint: Checkpoint, offered: Iterable[Hypothesis | LeftOut], token_ids: Tensor, *, everything: bool
) -> tuple[list[Hypothesis], list[LeftOut]]:
    """The hypotheses within the bounds, and what they leave out."""
    count = layer_count(checkpoint)
    flops = 2 * sum(entry.elements for entry in checkpoint.entries.values()) * token_ids.numel()
    embedding = embedding_entry(checkpoint)
    width = 1 if embedding is None else embedding.shape[-1]
    at_once = max(1, STATES_BYTES // (4 * width * token_ids.numel()))
    passes, chosen, left_out = 1.0, list[Hypothesis](), list[LeftOut]()
    for one in offered:
        if isinstance(one, LeftOut):
            left_out.append(one)
            continue
        after = passes + (count - one.first) / count
        reason = None
        if not everything and after > FORWARD_PASSES:
            reason = f"{FORWARD_PASSES:g} forward passes are the bound (--certify lifts it)"
        elif not everything and not one.sought and after * flops > CHEAP_FLOPS:
            reason = "the weights do not suspect it, and it is not cheap (--certify asks all the same)"
        elif len(chosen) >= at_once:
            reason = f"the states of {at_once} hypotheses are held at once: ask with a shorter text"
        if reason is None:
            chosen.append(one)
            passes = after
        else:
            left_out.append(LeftOut(one.words, reason))
    return chosen, left_out


def _made(chosen: Iterable[Hypothesis]) -> tuple[list[Hypothesis], list[Variant], list[LeftOut]]:
    hypotheses, variants, faults = list[Hypothesis](), list[Variant](), list[LeftOut]()
    for one in chosen:
        try:
            variants.append(one.make())
            hypotheses.append(one)
        except GlassblockError as error:
            faults.append(LeftOut(one.words, error.message))
    return hypotheses, variants, faults


def observations(token_ids: Int[Tensor, "*batch tokens"]) -> int:
    """How many different tokens after different tokens a text has.

    One that repeats itself asks the same again: the answers agree, their scatter is none, and they are one observation.
    """
    pairs = torch.stack([token_ids[..., :-1].reshape(-1), token_ids[..., 1:].reshape(-1)])
    return int(cast("Tensor", pairs.unique(dim=1)).shape[1])


def too_few(token_ids: Int[Tensor, "*batch tokens"]) -> str | None:
    """Why a text is too short to tell anything; None where it is long enough. The first token is not predicted."""
    predicted, different = token_ids[..., 1:].numel(), observations(token_ids)
    if different >= FEWEST_TOKENS:
        return None
    told = f"{predicted:,} token{'s' * (predicted != 1)}"
    repeats = "" if predicted < FEWEST_TOKENS else f", {different} of them without what repeats itself"
    return f"{told}{repeats}: {FEWEST_TOKENS} at least are needed"


def _judged(
    asked: Sequence[tuple[Hypothesis, Tensor]], declared: Tensor, needed: float, *, chance: float
) -> Iterable[Judged]:
    uniform = torch.full_like(declared, chance)
    for hypothesis, found in asked:
        difference = paired_difference(found, declared)
        reading = reading_of(difference, needed)
        # Whatever flattens the logits makes nonsense likelier, up to all tokens alike: that is no model of the text.
        preferred = found if reading == "better" else declared
        beyond = reading_of(paired_difference(preferred, uniform), needed) == "better"
        by_chance = reading != "undecided" and math.isfinite(chance) and not beyond
        yield Judged(
            hypothesis,
            float(found.double().mean()),
            difference,
            "undecided" if by_chance else reading,
            tuple(
                other
                for other, its in asked
                if other is not hypothesis
                and other.kind == hypothesis.kind
                and not (set(other.layers) ^ set(hypothesis.layers) if other.layers else False)
                and reading_of(paired_difference(its, found), needed) == "undecided"
            ),
            by_chance,
        )


def reading_of(difference: PairedDifference, needed: float) -> Reading:
    """Whether a difference is beyond the noise: `needed` standard errors and what float32 tells."""
    mean, error, _ = difference
    if error is None or not abs(mean) > max(SMALLEST, needed * error):
        return "undecided"
    return "better" if mean > 0 else "worse"
