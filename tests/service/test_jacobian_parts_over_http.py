"""Jacobians of attention, mixtures and whole layers over HTTP, against autograd's dense matrix over all positions."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from glassblock.api.entry import connect
from glassblock.checkpoint.layer_loading import load_layer
from glassblock.checkpoint.layer_map import layer_tensors
from glassblock.checkpoint.mixture_loading import load_mixture
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.text_states import entering_states
from glassblock.errors import FamilyMismatch, InvalidValue, TooLarge
from glassblock.numerics.block import branch_contribution, joined, run_block
from glassblock.numerics.layer import Layer, run_layer
from glassblock.numerics.mixture import Mixture, run_mixture
from glassblock.numerics.wiring import Wiring
from glassblock.operations import coupled_jacobians
from glassblock_client import Client, Sample
from makers import REPRESENTATIVES, Tiny, tiny_checkpoint
from torch import Tensor

D, TOKENS, LAYER = Tiny().hidden, 4, 1
ROWS = np.random.default_rng(7).standard_normal((TOKENS, D))
IDS = [3, 17, 5, 40]
# Queries grouped and not, windows, norms of queries and keys, parallel branches, latent attention, mixtures.
LAYERS = ("llama", "gemma3", "qwen3", "olmo2", "gpt2", "cohere", "phi3", "deepseek_v2", "mixtral", "qwen2_moe")
MIXTURES = ("mixtral", "qwen2_moe", "deepseek_v2", "olmoe", "dbrx")
INPUT_WEIGHED, UNLIKE = "llama4", ("bitnet", "dinov2", "dinov3_vit")
# Two orders of the same float64 sums.
ROUNDING = 1e-11


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    for family in sorted({*LAYERS, *MIXTURES, *UNLIKE, INPUT_WEIGHED, *REPRESENTATIVES}):
        tiny_checkpoint(family, folder / family)
    tiny_checkpoint("falcon_h1", folder / "scaled", config={"mlp_multipliers": [0.7, 1.6]})
    return folder


@pytest.fixture(scope="module")
def transport(root: Path) -> Iterator[httpx.BaseTransport]:
    with connect(roots=[root], device="cpu") as transport:
        yield transport


def loaded(root: Path, family: str, layer: int = LAYER) -> Layer:
    return load_layer(open_checkpoint(root / family), layer, "cpu", ReadMeter())


def whole(layer: Layer, part: str, x: Tensor) -> Tensor:
    stages = run_layer(x, layer, positions=torch.arange(len(x)), dtype=torch.float64)
    return stages.attention_contribution if part == "attention" else stages.output


def around_mixture(loaded: tuple[Mixture, Wiring], x: Tensor) -> Tensor:
    mixture, wiring = loaded[0], loaded[1].to(torch.float64)
    read = x if wiring.input_norm is None else wiring.input_norm(x)
    return joined(x, branch_contribution(run_mixture(read, mixture, dtype=torch.float64).down, wiring), wiring)


def dense(function: Any, x: Tensor) -> Tensor:
    """`[tokens d, tokens d]`, by autograd backwards, row by row: a router does not choose for a batch of them."""
    matrix = torch.autograd.functional.jacobian(function, x)
    assert isinstance(matrix, Tensor)
    return matrix.reshape(x.numel(), x.numel())


@pytest.mark.parametrize("part", ["attention", "layer"])
@pytest.mark.parametrize("family", LAYERS)
def test_norms_over_all_positions_are_those_of_the_dense_matrix(
    client: Client, root: Path, family: str, part: Any
) -> None:
    layer = loaded(root, family)
    matrix = dense(lambda x: whole(layer, part, x), torch.from_numpy(ROWS))
    answer = client.jacobians(family, [LAYER], part=part, x=ROWS, tolerance=1e-6, probes=64, vectors=True)
    (found,) = answer.answer.layers
    assert found.whole is not None
    frobenius, spectral = found.whole.frobenius, found.whole.spectral
    assert frobenius is not None
    assert spectral is not None
    truth = float(torch.linalg.matrix_norm(matrix))
    # Six standard errors: one draw of a mean of 64.
    assert abs(frobenius.frobenius - truth) <= 6 * frobenius.standard_error + ROUNDING * truth
    assert frobenius.inputs == frobenius.outputs == tuple(range(TOKENS))
    largest = float(torch.linalg.matrix_norm(matrix, 2))
    assert spectral.converged
    assert largest * (1 - 1e-6) <= spectral.lower <= largest * (1 + ROUNDING)
    assert spectral.upper >= largest * (1 - ROUNDING)
    right = torch.from_numpy(answer.tensors[f"layers.{LAYER}.{found.placement}.right"].reshape(-1).astype(np.float64))
    assert float(torch.linalg.vector_norm(matrix @ right)) == pytest.approx(largest, rel=1e-5)
    assert found.self_check is not None
    assert found.self_check.relative_difference < 1e-8
    assert (found.exactness, found.accumulation, found.tokens) == ("estimated", "float64", ())
    assert found.flops > 0


def test_the_interval_covers_the_truth_at_its_rate(client: Client, root: Path) -> None:
    """95 %: of 40 seeds 38 +- 1.4; the rate over 200 seeds is measured in tests/numerics."""
    layer = loaded(root, "llama")
    truth = float(torch.linalg.matrix_norm(dense(lambda x: whole(layer, "layer", x), torch.from_numpy(ROWS))))
    covered = 0
    for seed in range(40):
        answer = client.jacobians("llama", [LAYER], part="layer", x=ROWS, norms=["frobenius"], seed=seed).answer
        estimate = answer.layers[0].whole
        assert estimate is not None
        assert estimate.frobenius is not None
        covered += estimate.frobenius.lower <= truth <= estimate.frobenius.upper
    assert covered >= 33, covered


def test_chosen_positions_are_a_part_of_the_matrix(client: Client, root: Path) -> None:
    layer = loaded(root, "llama")
    matrix = dense(lambda x: whole(layer, "layer", x), torch.from_numpy(ROWS)).reshape(TOKENS, D, TOKENS, D)
    for inputs, outputs in (([0], [3]), ([1, 2], [2, 3]), ([3], [0])):
        answer = client.jacobians(
            "llama",
            [LAYER],
            part="layer",
            x=ROWS,
            input_positions=inputs,
            output_positions=outputs,
            probes=len(outputs) * D,
            tolerance=1e-6,
        ).answer
        told = answer.layers[0].whole
        assert told is not None
        assert told.frobenius is not None
        assert told.spectral is not None
        assert (told.frobenius.inputs, told.frobenius.outputs) == (tuple(inputs), tuple(outputs))
        chosen = matrix[outputs][:, :, inputs].reshape(len(outputs) * D, len(inputs) * D)
        # As many probes as rows: no estimate, but each row.
        assert (told.frobenius.estimator, told.frobenius.standard_error) == ("rows", 0.0)
        assert told.frobenius.frobenius == pytest.approx(float(torch.linalg.matrix_norm(chosen)), rel=ROUNDING)
        largest = float(torch.linalg.matrix_norm(chosen, 2))
        assert told.spectral.lower == pytest.approx(largest, rel=1e-6)
    assert largest == 0.0  # no early token reads a late one


def test_a_text_has_its_own_states_at_every_layer(client: Client, root: Path) -> None:
    states = client.run_block("llama", LAYER, part="layer", token_ids=IDS, capture=["x"], return_tensors=True)
    layer = loaded(root, "llama")
    x = torch.from_numpy(states.tensors["x"]).double()
    answer = client.jacobians(
        "llama", [0, LAYER], part="layer", token_ids=IDS, norms=["frobenius"], probes=TOKENS * D
    ).answer
    assert answer.token_ids == tuple(IDS)
    assert not any("same" in note for note in answer.notes)
    told = answer.layers[1].whole
    assert told is not None
    assert told.frobenius is not None
    truth = float(torch.linalg.matrix_norm(dense(lambda rows: whole(layer, "layer", rows), x)))
    # The text is run in float32.
    assert told.frobenius.frobenius == pytest.approx(truth, rel=1e-5)
    assert answer.layers[1].exactness == "exact"
    assert answer.layers[1].accumulation == "float32"


@pytest.mark.parametrize("family", ["llama", "gemma3", "cohere", "mixtral"])
@pytest.mark.parametrize("part", ["norm", "ffn", "branch", "block"])
def test_a_text_reaches_every_block_through_attention(client: Client, family: str, part: Any) -> None:
    """The same numbers as at the x that blocks/run captures there, of a parallel layer and of a mixture too."""
    answer = client.jacobians(family, [0, LAYER], part=part, token_ids=IDS, states="reached").answer
    assert (answer.states, answer.token_ids) == ("reached", tuple(IDS))
    assert not any("same" in note for note in answer.notes)
    for number in (0, LAYER):
        entered = client.run_block(family, number, token_ids=IDS, capture=["x"], return_tensors=True).tensors["x"]
        by_hand = client.jacobians(family, [number], part=part, x=entered).answer
        assert by_hand.states is None
        told = [layer for layer in answer.layers if layer.layer == number]
        assert [layer.rows for layer in told] == [layer.rows for layer in by_hand.layers]
        for one, other in zip(told, by_hand.layers, strict=True):
            # Both are run in float32, and which products are batched together may differ.
            for token, expected in zip(one.tokens, other.tokens, strict=True):
                assert token.frobenius == pytest.approx(expected.frobenius, rel=1e-5)
                assert token.radial_gain == pytest.approx(expected.radial_gain, rel=1e-5)


@pytest.mark.parametrize("part", ["block", "attention", "layer"])
def test_a_text_passes_the_layers_below_once_for_all_that_are_asked(
    client: Client, monkeypatch: pytest.MonkeyPatch, part: Any
) -> None:
    begun: list[tuple[int, int | None]] = []

    def noted(checkpoint: Any, ids: Any, layer: int, *more: Any, reached: Any = None, **said: Any) -> Any:
        begun.append((layer, None if reached is None else reached[0]))
        return entering_states(checkpoint, ids, layer, *more, reached=reached, **said)

    monkeypatch.setattr("glassblock.operations.texts.entering_states", noted)
    client.jacobians("llama", [0, 1], part=part, token_ids=[3, 1, 4], states="reached", norms=["frobenius"])
    assert begun == [(0, None), (1, 0)]


def test_layers_in_any_order_have_their_own_states(client: Client) -> None:
    asked = [1, 0]
    answer = client.jacobians("llama", asked, token_ids=IDS, states="reached", norms=["frobenius"]).answer
    turned = client.jacobians("llama", [0, 1], token_ids=IDS, states="reached", norms=["frobenius"]).answer
    assert [layer.layer for layer in answer.layers] == asked
    assert {layer.layer: layer.tokens for layer in answer.layers} == {
        layer.layer: layer.tokens for layer in turned.layers
    }


def test_the_depth_of_blocks_starts_where_a_text_enters_the_first(client: Client) -> None:
    entered = client.run_block("llama", 1, token_ids=IDS, capture=["x"], return_tensors=True).tensors["x"]
    answer = client.jacobians("llama", [1], token_ids=IDS, states="reached", depth=True, norms=["frobenius"]).answer
    assert answer.depth is not None
    rms = np.sqrt(np.mean(entered.astype(np.float64) ** 2, axis=1))
    np.testing.assert_allclose(answer.depth.residual_rms[0], rms, rtol=1e-5)


def test_token_ids_are_embedding_rows_of_a_block_unless_more_is_asked(client: Client) -> None:
    plain = client.jacobians("llama", [LAYER], token_ids=IDS, norms=["frobenius"]).answer
    said = client.jacobians("llama", [LAYER], token_ids=IDS, states="embedding", norms=["frobenius"]).answer
    assert plain.states == said.states == "embedding"
    assert plain.layers[0].tokens == said.layers[0].tokens
    both = client.jacobians("llama", [0, LAYER], token_ids=IDS, norms=["frobenius"]).answer
    assert any("'reached'" in note for note in both.notes)
    assert client.jacobians("llama", [0], part="layer", token_ids=IDS, norms=["frobenius"]).answer.states == "reached"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"x": ROWS, "states": "reached"}, "states"),
        ({"sample": Sample(rows=2), "states": "embedding"}, "states"),
        ({"token_ids": IDS, "part": "layer", "states": "embedding"}, "states"),
        ({"token_ids": IDS, "text": "a"}, "text"),
        ({"x": ROWS, "text": "a"}, "x"),
        ({"sample": Sample(rows=2), "text": "a"}, "sample"),
    ],
)
def test_what_is_taken_of_no_text_or_of_two_is_refused(client: Client, given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        client.jacobians("llama", [0], **given)
    assert refused.value.field == field


def test_sampled_rows_stand_at_positions_and_that_is_said(client: Client) -> None:
    answer = client.jacobians("llama", [0], part="attention", sample=Sample(rows=3), norms=["frobenius"]).answer
    assert answer.token_ids is not None
    assert answer.layers[0].whole is not None
    assert any("no text" in note for note in answer.notes)


def test_every_norm_of_a_layer_is_told_with_its_source(client: Client) -> None:
    (found,) = client.jacobians("gemma3", [0], part="layer", x=ROWS, norms=["frobenius"]).answer.layers
    assert set(found.eps) == {"input", "output", "attention_input", "attention_output"}
    (found,) = client.jacobians("gemma3", [0], part="attention", x=ROWS, norms=["frobenius"]).answer.layers
    assert set(found.eps) == {"input", "output"}


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_depth_of_whole_layers_is_that_of_the_chain(client: Client, root: Path, family: str) -> None:
    layers = [loaded(root, family, number) for number in (0, 1)]
    x = torch.from_numpy(ROWS)
    middle = whole(layers[0], "layer", x)
    last = whole(layers[1], "layer", middle)
    one = dense(lambda rows: whole(layers[0], "layer", rows), x)
    other = dense(lambda rows: whole(layers[1], "layer", rows), middle)
    answer = client.jacobians(family, [0, 1], part="layer", x=ROWS, depth=True, norms=["frobenius"]).answer
    depth = answer.depth
    assert depth is not None
    assert (depth.part, depth.coupled, depth.layers) == ("layer", True, (0, 1))
    rms = [np.sqrt(np.mean(state.detach().numpy() ** 2, axis=1)) for state in (x, middle, last)]
    np.testing.assert_allclose(depth.residual_rms, rms, rtol=1e-10)
    moved = [
        torch.linalg.vector_norm(after - before, dim=1) / torch.linalg.vector_norm(before, dim=1)
        for before, after in ((x, middle), (middle, last))
    ]
    np.testing.assert_allclose(depth.added, [row.detach().numpy() for row in moved], rtol=1e-10)
    for curve, chains in ((depth.to_end, [other @ one, other]), (depth.from_start, [one, other @ one])):
        found, error = np.array(curve.frobenius)[:, 0], np.array(curve.standard_error)[:, 0]
        truth = np.array([float(torch.linalg.matrix_norm(chain)) for chain in chains])
        assert (np.abs(found - truth) <= 6 * error).all(), (found, truth, error)
        largest = np.array([float(torch.linalg.matrix_norm(chain, 2)) for chain in chains])
        assert (np.array(curve.spectral_lower)[:, 0] <= largest * (1 + ROUNDING)).all()
        assert (np.array(curve.product_upper)[:, 0] >= largest * (1 - ROUNDING)).all()
    alone = [float(torch.linalg.matrix_norm(matrix, 2)) for matrix in (one, other)]
    assert (np.array(depth.layer_spectral)[0, :, 0] <= np.array(alone) * (1 + ROUNDING)).all()
    assert (np.array(depth.layer_spectral)[1, :, 0] >= np.array(alone) * (1 - ROUNDING)).all()


def test_the_depth_of_a_text_starts_at_its_states(client: Client) -> None:
    states = client.run_block("llama", 1, part="layer", token_ids=IDS, capture=["x"], return_tensors=True)
    depth = client.jacobians("llama", [1], part="layer", token_ids=IDS, depth=True, norms=["frobenius"]).answer.depth
    assert depth is not None
    np.testing.assert_allclose(depth.residual_rms[0], np.sqrt(np.mean(states.tensors["x"] ** 2, axis=1)), rtol=1e-5)


@pytest.mark.parametrize("family", MIXTURES)
def test_each_expert_is_differentiated_on_its_own_tokens(client: Client, root: Path, family: str) -> None:
    layer = loaded(root, family)
    mixture, wiring = layer.feed_forward, layer.feed_forward_wiring.to(torch.float64)
    assert isinstance(mixture, Mixture)
    assert wiring.input_norm is not None
    routed = run_mixture(wiring.input_norm(torch.from_numpy(ROWS)), mixture, dtype=torch.float64)
    answer = client.jacobians(family, [LAYER], x=ROWS, tolerance=1e-6).answer
    expected: dict[Any, list[int]] = {}
    for token, chosen in enumerate(routed.chosen.tolist()):
        for expert in chosen:
            expected.setdefault(expert, []).append(token)
    if mixture.shared is not None:
        expected["shared"] = list(range(TOKENS))
    assert {found.expert: list(found.rows or ()) for found in answer.layers} == expected
    assert any("derivatives of the router" in note for note in answer.notes)
    for found in answer.layers:
        assert found.expert is not None
        network = mixture.shared if found.expert == "shared" else mixture.expert(int(found.expert))
        assert network is not None
        rows = torch.from_numpy(ROWS[list(found.rows or ())])
        for row, told in zip(rows, found.tokens, strict=True):
            matrix = torch.func.jacrev(lambda x, network=network: run_block(x, network, wiring).output)(row)
            assert told.frobenius == pytest.approx(float(torch.linalg.matrix_norm(matrix)), rel=ROUNDING)
            assert told.trace == pytest.approx(float(matrix.diagonal().sum()), rel=1e-9)
            assert told.spectral is not None
            assert told.spectral.lower == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-6)
        if found.expert != "shared":
            rows_of = routed.chosen == int(found.expert)
            np.testing.assert_allclose(found.weights, routed.weights[rows_of].double(), rtol=1e-12)


def test_one_expert_at_every_token(client: Client, root: Path) -> None:
    layer = loaded(root, "qwen2_moe")
    assert isinstance(layer.feed_forward, Mixture)
    for expert in (2, "shared"):
        answer = client.jacobians("qwen2_moe", [LAYER], part="ffn", expert=expert, x=ROWS).answer
        (found,) = answer.layers
        assert (found.expert, found.rows, len(found.tokens)) == (expert, None, TOKENS)
        network = layer.feed_forward.shared if expert == "shared" else layer.feed_forward.expert(2)
        assert network is not None
        norm = layer.feed_forward_wiring.to(torch.float64).input_norm
        assert norm is not None
        for row, told in zip(norm(torch.from_numpy(ROWS)), found.tokens, strict=True):
            wiring = layer.feed_forward_wiring

            def alone(n: Tensor, network: Any = network) -> Tensor:
                gate, up = n @ network.gate.double().T, n @ network.up.double().T
                return (torch.nn.functional.silu(gate) * up) @ network.down.double().T

            assert wiring.placement.value == "pre"
            matrix = torch.func.jacrev(alone)(row)
            assert told.frobenius == pytest.approx(float(torch.linalg.matrix_norm(matrix)), rel=ROUNDING)
    for expert in (99, -1):
        with pytest.raises(InvalidValue):
            client.jacobians("qwen2_moe", [LAYER], expert=expert, x=ROWS)
    with pytest.raises(InvalidValue, match="dense"):
        client.jacobians("llama", [LAYER], expert=0, x=ROWS)
    with pytest.raises(InvalidValue, match="an expert is a network"):
        client.jacobians("mixtral", [LAYER], expert=0, part="layer", x=ROWS)


@pytest.mark.parametrize("family", [*MIXTURES, INPUT_WEIGHED])
def test_the_whole_mixture_has_its_routers_derivative(client: Client, root: Path, family: str) -> None:
    checkpoint = open_checkpoint(root / family)
    mixture = load_mixture(checkpoint, layer_tensors(checkpoint, LAYER), "cpu", ReadMeter())
    for token in (0, 2):
        row = torch.from_numpy(ROWS[[token]])
        matrix = dense(lambda x: around_mixture(mixture, x), row)
        answer = client.jacobians(
            family,
            [LAYER],
            part="mixture",
            x=ROWS,
            input_positions=[token],
            output_positions=[token],
            probes=D,
            tolerance=1e-6,
        ).answer
        (found,) = answer.layers
        assert found.whole is not None
        assert found.whole.frobenius is not None
        assert found.whole.spectral is not None
        assert found.whole.frobenius.frobenius == pytest.approx(float(torch.linalg.matrix_norm(matrix)), rel=ROUNDING)
        assert found.whole.spectral.lower == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-6)
        assert found.self_check is not None
        assert found.self_check.relative_difference < 1e-8


def test_experts_whose_input_is_weighed_are_refused_with_the_reason(client: Client) -> None:
    with pytest.raises(InvalidValue, match="multiplies what it reads"):
        client.jacobians(INPUT_WEIGHED, [LAYER], x=ROWS)
    assert client.jacobians(INPUT_WEIGHED, [LAYER], x=ROWS, expert=0).answer.layers[0].expert == 0


def test_a_dense_layer_has_no_mixture(client: Client) -> None:
    with pytest.raises(InvalidValue, match="no mixture"):
        client.jacobians("llama", [LAYER], part="mixture", x=ROWS)


@pytest.mark.parametrize("family", [*UNLIKE, "scaled"])
@pytest.mark.parametrize("part", ["ffn", "branch", "block"])
def test_what_no_closed_form_covers_is_refused_and_its_norm_told(client: Client, family: str, part: Any) -> None:
    for norms in (["frobenius"], ["spectral"], ["smallest"]):
        with pytest.raises(InvalidValue, match="closed form"):
            client.jacobians(family, [LAYER], part=part, x=ROWS, norms=norms)
    assert client.jacobians(family, [LAYER], part="norm", x=ROWS).answer.layers[0].tokens


@pytest.mark.parametrize("family", [*UNLIKE, "scaled"])
def test_residuals_of_such_blocks_are_those_of_the_block_itself(client: Client, root: Path, family: str) -> None:
    """By central differences of what the service runs; 1e-5 cubed is the error of the third derivative."""
    x = ROWS[0]
    compared = client.compare_residuals(checkpoint=family, layer=LAYER, x=x[None])
    moves = 1e-5 * np.eye(D)
    run = client.compare_residuals(checkpoint=family, layer=LAYER, x=np.concatenate([x + moves, x - moves]))
    for wiring in ("pre", "post", "sandwich"):
        outputs = run.tensors[wiring]
        differences = (outputs[:D] - outputs[D:]).T / 2e-5
        found = compared.tensors[f"{wiring}_jacobian"][0]
        np.testing.assert_allclose(found, differences, rtol=0, atol=1e-7 * np.abs(differences).max())


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_every_kind_of_row_proves_itself_or_says_why_not(client: Client, family: str) -> None:
    refused: list[str] = []
    for part in ("norm", "ffn", "branch", "block", "attention", "layer"):
        asked: dict[str, Any] = {"part": part, "x": ROWS, "norms": ["frobenius"]}
        if family == "bitnet" and part in {"ffn", "branch", "block"}:
            with pytest.raises(InvalidValue, match="closed form"):
                client.jacobians(family, [LAYER], **asked)
            continue
        try:
            answer = client.jacobians(family, [LAYER], **asked).answer
        except FamilyMismatch:  # attention that is not read here
            refused.append(part)
            continue
        check = answer.layers[0].self_check
        assert check is not None
        # Float64, smooth activations, rows of the order of one; a kink within a step shows in relu's kin.
        assert check.relative_difference < 1e-7, (part, check)
    assert refused in ([], ["attention", "layer"])


def test_what_is_no_sequence_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidValue, match="one sequence"):
        client.jacobians("llama", [0], part="layer", x=np.stack([ROWS, ROWS]))
    assert client.jacobians("llama", [0], part="layer", x=ROWS[None], norms=["frobenius"]).answer.layers[0].whole
    with pytest.raises(InvalidValue, match="inputs are"):
        client.jacobians("llama", [1], part="layer", x=ROWS, input_positions=[9])
    with pytest.raises(InvalidValue, match="as the model wires it"):
        client.jacobians("llama", [0], part="layer", x=ROWS, placement="post")
    with pytest.raises(InvalidValue, match="not told of the part"):
        client.jacobians("llama", [0], part="layer", x=ROWS, norms=["trace"])
    monkeypatch.setattr(coupled_jacobians, "MAX_TOKENS", TOKENS - 1)
    with pytest.raises(TooLarge, match="4 tokens"):
        client.jacobians("llama", [0], part="attention", x=ROWS)
