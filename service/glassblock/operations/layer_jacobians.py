"""One layer's Jacobian norms as the numbers of an answer: the block, or its norm alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor

from glassblock.numerics.block import common_dtype
from glassblock.numerics.block_jacobians import Part
from glassblock.numerics.block_norms import BlockNorms, block_norms, norm_plan
from glassblock.numerics.condition_numbers import ConditionNumbers, condition_numbers
from glassblock.numerics.dtypes import name_of_dtype
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.finite_difference_check import FiniteDifferenceCheck, check_block, check_norm
from glassblock.numerics.layer_grams import DEFAULT_BYTE_BUDGET, LayerGrams, gram_flops, layer_grams
from glassblock.numerics.norm_factors import lengths
from glassblock.numerics.norm_jacobians import (
    norm_jacobian_along_row,
    norm_jacobian_frobenius,
    norm_jacobian_trace,
)
from glassblock.numerics.norm_singular_values import norm_singular_values
from glassblock.numerics.norms import Norm
from glassblock.numerics.product_noise import ROUNDING
from glassblock.numerics.spectral_bracket import SpectralBracket, spectral_bracket
from glassblock.numerics.spectral_request import DENSE_UP_TO, Certificate, SpectralRequest
from glassblock.numerics.watching import Watch
from glassblock.numerics.wiring import Wiring
from glassblock.operations.reply import nested_numbers
from glassblock.wire import jacobians as wire

CHECKED_TOKENS = 16
"""Tokens of the self-check: it runs the block three times in float64."""

PARTS = {"ffn": Part.FEED_FORWARD, "branch": Part.BRANCH, "block": Part.BLOCK}
EXACT = frozenset({"frobenius", "trace", "radial_gain"})
CONDITION = frozenset({"smallest", "condition_number"})


KeptGrams = Callable[[str, Callable[[], LayerGrams]], LayerGrams]
"""Of what part, placement and dtype, and how they are formed where they are not there."""


class LayerInput(NamedTuple):
    """What one layer is asked; `x` is `[tokens, d]`, `grams` keeps Gram matrices for the next request."""

    x: Tensor
    feed_forward: FeedForward
    wiring: Wiring
    request: wire.JacobiansRequest
    watch: Watch
    grams: KeptGrams | None = None


@dataclass(frozen=True)
class LayerOutcome:
    """Fields of a `LayerJacobians`, and the singular vectors by name."""

    fields: dict[str, object]
    vectors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def block_layer(given: LayerInput) -> LayerOutcome:
    """The network, its branch or its residual block."""
    request, part, wanted = given.request, PARTS[given.request.part], set(given.request.norms)
    block = given.x, given.feed_forward, given.wiring
    exact = _exact(given, part) if wanted & EXACT else None
    spectral = condition = None
    if "spectral" in wanted:
        spectral = spectral_bracket(*block, part=part, request=_spectral_request(given), norms=exact, watch=given.watch)
    if wanted & CONDITION:
        condition = condition_numbers(*block, part=part, request=_spectral_request(given), watch=given.watch)
    few = _few(given.x)
    checked = check_block(few, given.feed_forward, given.wiring, part=part, seed=request.seed)
    redone = torch.zeros(len(given.x), dtype=torch.bool, device=given.x.device)
    for found in (exact, spectral):
        redone = redone if found is None else redone | found.redone
    columns = _exact_columns(exact, wanted) | _spectral_columns(spectral) | _condition_columns(condition, wanted)
    fields: dict[str, object] = {
        "tokens": _tokens(columns | {"redone": nested_numbers(redone)}, len(given.x)),
        "method": "none" if exact is None else exact.method,
        "exactness": "none" if exact is None else exact.exactness,
        "flops": sum(found.flops for found in (exact, spectral, condition) if found is not None),
        "bytes": 0 if exact is None else exact.bytes,
        "accumulation": "none" if exact is None else name_of_dtype(exact.accumulation),
        "cancellation": None if exact is None else float(exact.cancellation.max()),
        "redone": redone.nonzero().flatten().tolist(),
        "spectral": None if spectral is None else _spectral_proof(spectral, request),
        "condition": None if condition is None else _condition_proof(condition, request),
        "self_check": self_check(checked, len(few), request.seed),
    }
    vectors: dict[str, Tensor] = {}
    if spectral is not None and spectral.left is not None and spectral.right is not None:
        vectors = {"left": spectral.left, "right": spectral.right}
    return LayerOutcome(fields, vectors)


def norm_layer(rows: Tensor, wiring: Wiring, request: wire.JacobiansRequest) -> LayerOutcome:
    """The norm of the branch alone, by x `[tokens, d]`: closed forms, in float64 whatever x is."""
    wanted = set(request.norms)
    norm, x = norm_of(wiring), rows.double()
    wide = norm.to(torch.float64)
    columns: dict[str, object] = {}
    if "frobenius" in wanted:
        columns["frobenius"] = nested_numbers(norm_jacobian_frobenius(x, wide))
    if "trace" in wanted:
        columns["trace"] = nested_numbers(norm_jacobian_trace(x, wide))
    if "radial_gain" in wanted:
        columns["radial_gain"] = nested_numbers(lengths(norm_jacobian_along_row(x, wide)) / lengths(x))
    extreme = norm_singular_values(rows, norm)
    few = _few(rows)
    rounding = ROUNDING * torch.finfo(torch.float64).eps * x.shape[-1] ** 0.5
    if "spectral" in wanted:
        ends = extreme.largest * (1.0 - rounding), extreme.largest * (1.0 + rounding)
        columns["spectral"] = [
            {"lower": low, "upper": high, "certain": True, "converged": True}
            for low, high in zip(*(_numbers(end) for end in ends), strict=True)
        ]
    small = extreme.smallest * (1.0 - rounding), extreme.smallest * (1.0 + rounding)
    if "smallest" in wanted:
        columns["smallest"] = _brackets(*small)
    if "condition_number" in wanted:
        columns["condition_number"] = _brackets(
            extreme.largest * (1.0 - rounding) / small[1], extreme.largest * (1.0 + rounding) / small[0]
        )
    return LayerOutcome(
        {
            "tokens": _tokens(columns, len(x)),
            "method": "closed form",
            "exactness": "exact",
            "flops": 0,
            "bytes": 0,
            "accumulation": "float64",
            "cancellation": None,
            "redone": (),
            "self_check": self_check(check_norm(few, norm, seed=request.seed), len(few), request.seed),
        }
    )


def norm_of(wiring: Wiring) -> Norm:
    """The norm of a branch: before it, else after it, else after the residual add."""
    # Every placement has one.
    return next(norm for norm in (wiring.input_norm, wiring.output_norm, wiring.residual_norm) if norm is not None)


def _exact(given: LayerInput, part: Part) -> BlockNorms:
    """The exact norms; where Gram matrices are the cheaper way, they are kept beside the block."""
    x, network, wiring = given.x, given.feed_forward, given.wiring
    dtype = common_dtype(x, network, wiring)
    if given.grams is None or norm_plan(len(x), network, wiring, part=part, dtype=dtype).method != "gram":
        return block_norms(x, network, wiring, part=part, watch=given.watch)
    forming: list[int] = []

    def form() -> LayerGrams:
        formed = layer_grams(
            network, wiring, part=part, dtype=dtype, byte_budget=DEFAULT_BYTE_BUDGET // 2, watch=given.watch
        )
        if formed.blocks is not None:
            forming.append(gram_flops(network.model_width, network.width, 1 + network.gated, rows=formed.rows))
        return formed

    grams = given.grams(f"{part.value} {wiring.placement.value} {name_of_dtype(dtype)}", form)
    found = block_norms(x, network, wiring, part=part, grams=grams, watch=given.watch)
    return found._replace(flops=found.flops + sum(forming))


def _spectral_request(given: LayerInput) -> SpectralRequest:
    request = given.request
    certificate = Certificate.PROBABLE
    if request.certificate == "certain":
        dense = given.feed_forward.model_width <= DENSE_UP_TO
        certificate = Certificate.DENSE if dense else Certificate.CHOLESKY
    return SpectralRequest(
        tolerance=request.tolerance,
        certificate=certificate,
        failure_probability=request.failure_probability,
        vectors=request.vectors,
        seed=request.seed,
    )


def _few(x: Tensor) -> Tensor:
    """Rows of x, evenly spread."""
    step = max(1, -(-len(x) // CHECKED_TOKENS))
    return x[::step]


def _exact_columns(exact: BlockNorms | None, wanted: set[wire.JacobianNorm]) -> dict[str, object]:
    if exact is None:
        return {}
    columns: dict[str, object] = {
        name: nested_numbers(cast("Tensor", getattr(exact, name))) for name in EXACT if name in wanted
    }
    return columns | {"cancellation": nested_numbers(exact.cancellation)}


def _spectral_columns(found: SpectralBracket | None) -> dict[str, object]:
    if found is None:
        return {}
    names = ("lower", "upper", "certain", "converged")
    values = [_numbers(cast("Tensor", getattr(found, name))) for name in names]
    return {"spectral": [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]}


def _condition_columns(found: ConditionNumbers | None, wanted: set[wire.JacobianNorm]) -> dict[str, object]:
    columns: dict[str, object] = {}
    if found is not None and "smallest" in wanted:
        columns["smallest"] = _brackets(found.smallest_lower, found.smallest_upper)
    if found is not None and "condition_number" in wanted:
        columns["condition_number"] = _brackets(found.condition_lower, found.condition_upper)
    return columns


def _brackets(lower: Tensor, upper: Tensor) -> list[dict[str, float]]:
    return [{"lower": low, "upper": high} for low, high in zip(_numbers(lower), _numbers(upper), strict=True)]


def _numbers(values: Tensor) -> list[float]:
    return cast("list[float]", values.tolist())


def _tokens(columns: dict[str, object], tokens: int) -> list[dict[str, object]]:
    lists = {name: cast("list[object]", values) for name, values in columns.items()}
    return [{name: values[token] for name, values in lists.items()} for token in range(tokens)]


def _spectral_proof(found: SpectralBracket, request: wire.JacobiansRequest) -> wire.BracketProof:
    certain = bool(found.certain.all())
    return wire.BracketProof(
        method=found.method,
        exactness=found.exactness,
        certificate="certain" if certain else "probabilistic",
        failure_probability=0.0 if certain else found.failure_probability,
        tolerance=request.tolerance,
        not_converged=int((~found.converged).sum()),
        steps=int(found.steps.max()),
        seed=found.seed,
        accumulation=name_of_dtype(found.accumulation),
        flops=found.flops,
    )


def _condition_proof(found: ConditionNumbers, request: wire.JacobiansRequest) -> wire.BracketProof:
    return wire.BracketProof(
        method=found.method,
        exactness=found.exactness,
        certificate="certain" if found.failure_probability == 0.0 else "probabilistic",
        failure_probability=found.failure_probability,
        tolerance=request.tolerance,
        not_converged=int((~found.converged).sum()),
        steps=0,
        seed=found.seed,
        accumulation=name_of_dtype(found.accumulation),
        flops=found.flops,
    )


def self_check(found: FiniteDifferenceCheck, tokens: int, seed: int) -> wire.SelfCheck:
    """What a comparison with finite differences showed, of so many tokens."""
    return wire.SelfCheck(
        relative_difference=float(found.relative_difference.max()),
        tokens=tokens,
        step=float(found.step.max()),
        seed=seed,
    )
