"""`POST /v1/jacobians`: norms of Jacobians, per layer and token, with the proof of each number beside it."""

from typing import Annotated, Literal

from pydantic import Field

from glassblock.wire.values import (
    Answer,
    BytesRead,
    FamilyName,
    FamilyRow,
    Flag,
    Nested,
    PlacementName,
    Real,
    Request,
    Sample,
    Sourced,
    Text,
    TowerName,
    Whole,
)

JacobianPart = Literal["norm", "ffn", "branch", "block", "attention", "mixture", "layer"]
JacobianNorm = Literal["frobenius", "spectral", "trace", "radial_gain", "smallest", "condition_number"]
Certificate = Literal["probabilistic", "certain"]
TextStates = Literal["embedding", "reached"]

CHEAP_NORMS: tuple[JacobianNorm, ...] = ("frobenius", "spectral", "trace", "radial_gain")


class JacobiansRequest(Request):
    """Norms of the Jacobian of one part of each of some layers, at every token."""

    checkpoint: Annotated[str, Field(min_length=1, max_length=4096, description="path under a root")]
    layers: Annotated[
        tuple[Whole, ...],
        Field(min_length=1, max_length=4096, description="counted from 0; every layer when left out"),
    ] = ()
    family: FamilyName = None
    family_row: FamilyRow = None
    tower: TowerName = None
    part: Annotated[
        JacobianPart,
        Field(
            description="norm: the norm of the FFN's branch alone, by x; ffn: the network alone, by what it reads; "
            "branch: the network with its norms, by x; block: with the residual add; attention: its branch, tokens "
            "coupled; mixture: the block around a mixture of experts, its router differentiated; layer: the whole layer"
        ),
    ] = "block"
    expert: Annotated[
        Whole | Literal["shared"] | None,
        Field(
            description="of a mixture: this network alone, in the place of the mixture, at every token. Without, each "
            "expert at the tokens that go to it, and the shared network at all"
        ),
    ] = None
    placement: Annotated[
        PlacementName | tuple[PlacementName, ...] | None,
        Field(description="the same weights with the norm elsewhere; several stand side by side"),
    ] = None
    x: Annotated[
        Nested | None,
        Field(description="[..., d_model], what enters the block, the same for every layer; or the tensor `x`"),
    ] = None
    token_ids: Annotated[
        tuple[Whole, ...] | None,
        Field(
            min_length=1,
            max_length=65_536,
            description="a text, from its first token; see `states`",
        ),
    ] = None
    text: Text = None
    states: Annotated[
        TextStates | None,
        Field(
            description="what x is of a text. reached: what the model makes of it, at each layer what enters that "
            "part, the layers below and, for a part of the feed-forward block, the layer's own attention run first. "
            "embedding: the tokens' embedding rows at every layer. When left out: reached of `text`, and of the parts "
            "attention, mixture and layer, which take nothing else; embedding of `token_ids`"
        ),
    ] = None
    sample: Sample | None = None
    norms: Annotated[tuple[JacobianNorm, ...], Field(min_length=1, description="which numbers are wanted")] = (
        CHEAP_NORMS
    )
    tolerance: Annotated[
        Real, Field(gt=0, lt=1, description="how narrow the bracket of a spectral norm is to be, relative")
    ] = 0.01
    certificate: Annotated[
        Certificate,
        Field(
            description="of the spectral norm's upper bound: wrong with at most `failure_probability`, or never wrong"
        ),
    ] = "probabilistic"
    failure_probability: Annotated[Real, Field(gt=0, lt=1, description="of each token's upper bound")] = 1e-9
    seed: Annotated[Whole, Field(ge=0, le=2**62, description="of starts, probes and the self-check's directions")] = 0
    vectors: Annotated[Flag, Field(description="also the top singular vectors of every token, as tensors")] = False
    depth: Annotated[
        Flag,
        Field(
            description="also the curves of the chain of these layers' feed-forward blocks, attention left out; with "
            "the part `layer`, of the whole layers"
        ),
    ] = False
    probes: Annotated[
        Whole,
        Field(
            ge=2,
            le=4096,
            description="random vectors behind an estimate; as many as J has rows give the Frobenius norm exactly",
        ),
    ] = 16
    input_positions: Annotated[
        tuple[Whole, ...] | None,
        Field(description="of attention, a mixture, a layer: by which positions of x it is differentiated"),
    ] = None
    output_positions: Annotated[
        tuple[Whole, ...] | None, Field(description="likewise: which positions of the result are differentiated")
    ] = None


class Bracket(Answer):
    """Bounds on a number."""

    lower: float
    upper: Annotated[float, Field(description="Infinity where nothing is known")]


class SpectralNorm(Bracket):
    """Bounds on the largest singular value."""

    certain: Annotated[bool, Field(description="the upper bound cannot be wrong, rounding included")]
    converged: Annotated[bool, Field(description="the bracket is as narrow as `tolerance` asked")]


class TokenJacobian(Answer):
    """One token's Jacobian in numbers; null is what was not asked for."""

    frobenius: float | None = None
    spectral: SpectralNorm | None = None
    trace: float | None = None
    radial_gain: Annotated[float | None, Field(description="|J x| / |x|; NaN for a row of zeros")] = None
    smallest: Annotated[Bracket | None, Field(description="smallest singular value")] = None
    condition_number: Bracket | None = None
    cancellation: Annotated[
        float | None,
        Field(
            description="by how much the sums behind the exact norms magnify rounding; negative or NaN: nothing left"
        ),
    ] = None
    redone: Annotated[bool, Field(description="some number of this token was done again in float64")] = False


class BracketProof(Answer):
    """How the brackets were had."""

    method: str
    exactness: Annotated[str, Field(description="exact, up to rounding, or bracketed")]
    certificate: str
    failure_probability: Annotated[float, Field(description="of each bound that is not certain; 0: none is uncertain")]
    tolerance: float
    not_converged: Annotated[int, Field(description="tokens whose bracket is wider than asked")]
    steps: Annotated[int, Field(description="most that a token took; 0 for a dense decomposition")]
    seed: int
    accumulation: str
    flops: int


class SelfCheck(Answer):
    """J v against a central finite difference of the block itself, in float64, on one random direction a token."""

    relative_difference: Annotated[float, Field(description="the largest over the tokens checked")]
    tokens: Annotated[int, Field(description="checked, evenly spread")]
    step: Annotated[float, Field(description="the largest, along a direction of length one")]
    seed: int


class FrobeniusEstimate(Bracket):
    """An estimate of a Frobenius norm; the bounds are the 95 % interval."""

    frobenius: float
    standard_error: float
    probes: int
    products: Annotated[int, Field(description="with the Jacobian or its transpose")]
    estimator: str
    distribution: str
    seed: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class CoupledSpectral(Bracket):
    """Bounds on the largest singular value over all chosen positions at once."""

    converged: bool
    steps: int
    adjoint_error: Annotated[float, Field(description="|u . J v - J^T u . v| over |J v|, one random pair")]
    failure_probability: float
    seed: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class WholeJacobian(Answer):
    """The Jacobian of a part that couples tokens, one matrix over all positions."""

    frobenius: FrobeniusEstimate | None = None
    spectral: CoupledSpectral | None = None


class LayerJacobians(Answer):
    """One layer in one placement, or one network of a mixture: every token, and how the numbers were had."""

    layer: int
    placement: PlacementName
    expert: Annotated[
        int | Literal["shared"] | None, Field(description="of a mixture: which network stands in its place")
    ] = None
    rows: Annotated[tuple[int, ...] | None, Field(description="which rows of x the tokens are, where not all")] = None
    weights: Annotated[
        tuple[float, ...] | None, Field(description="by which the mixture multiplies this network at each token")
    ] = None
    eps: dict[str, Sourced]
    tokens: tuple[TokenJacobian, ...]
    method: Annotated[str, Field(description="of the exact norms: gram, pushes, closed form; none: not asked for")]
    exactness: Annotated[str, Field(description="exact, up to rounding; none: not asked for")]
    flops: Annotated[int, Field(description="counted for all norms of this layer: products of matrices")]
    bytes: Annotated[int, Field(description="planned working memory of the exact norms, beside the weights")]
    accumulation: Annotated[str, Field(description="of the exact norms' long sums; a token redone has float64")]
    cancellation: Annotated[float | None, Field(description="the largest over the tokens")]
    redone: Annotated[tuple[int, ...], Field(description="tokens of which some number was done again in float64")]
    spectral: BracketProof | None = None
    condition: BracketProof | None = None
    self_check: SelfCheck | None = None
    whole: Annotated[WholeJacobian | None, Field(description="of a part that couples tokens")] = None


class DepthCurve(Answer):
    """Norms of the Jacobians of chains, [chains, groups]."""

    frobenius: Nested
    standard_error: Annotated[Nested, Field(description="of the estimate")]
    spectral_lower: Annotated[Nested, Field(description="certain up to rounding")]
    product_upper: Annotated[Nested, Field(description="product of the layers' upper bounds: the chain is below")]


class Depth(Answer):
    """The chain of the layers, or of their blocks, from the first to the last asked for."""

    layers: tuple[int, ...]
    placement: PlacementName
    part: str
    coupled: Annotated[bool, Field(description="one group, the whole sequence; else one for each token")]
    residual_rms: Annotated[Nested, Field(description="[layers + 1, tokens]")]
    added: Annotated[Nested, Field(description="|f(x) - x| / |x| of each layer, [layers, tokens]")]
    layer_spectral: Annotated[Nested, Field(description="lower and upper of each layer alone, [2, layers, groups]")]
    to_end: Annotated[DepthCurve, Field(description="of the end by the state before each layer")]
    from_start: Annotated[DepthCurve, Field(description="of the state after each layer by the start")]
    exactness: str
    probes: int
    steps: int
    seed: int
    failure_probability: float
    accumulation: str
    layer_products: Annotated[int, Field(description="products with the Jacobian of one layer, all told")]


class JacobiansAnswer(Answer):
    """Every layer asked for, in order; with several placements or experts, each layer once for each of them."""

    checkpoint: str
    part: JacobianPart
    family: str
    verified: Annotated[
        str | None, Field(description="how far the family's row was checked against the real model")
    ] = None
    device: str
    width: Annotated[int, Field(description="d_model: J is width x width for each token")]
    norms: tuple[JacobianNorm, ...]
    token_ids: Annotated[tuple[int, ...] | None, Field(description="of the rows of x, where they are those of tokens")]
    states: Annotated[
        TextStates | None, Field(description="what x is of those tokens: as asked for; null where x was posted")
    ] = None
    layers: tuple[LayerJacobians, ...]
    depth: Depth | None = None
    read: BytesRead
    notes: tuple[str, ...] = ()
    tensors: Annotated[
        dict[str, Nested] | None,
        Field(description="layers.N.PLACEMENT.left and .right; in a safetensors answer, the body's own"),
    ] = None
