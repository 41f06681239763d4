"""SmolLM2 on 400 tokens of English: log-likelihoods and the states that enter its layers, against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from glassblock_client import Client
from tokenizers import Tokenizer

pytestmark = pytest.mark.real

TOKENS = 400
ENGLISH = Path(__file__).parents[2] / "LICENSE"
# Rounding in float32 grows with depth: at most this much of the largest number of a state after 29 layers.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def token_ids(smollm2: Any) -> list[int]:
    ids = Tokenizer.from_file(str(smollm2.single / "tokenizer.json")).encode(ENGLISH.read_text()).ids[:TOKENS]
    assert len(ids) == TOKENS
    return ids


@pytest.fixture(scope="module")
def theirs(model: Any, token_ids: list[int]) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), output_hidden_states=True)


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_log_likelihoods(client: Client, smollm2: Any, token_ids: list[int], theirs: Any, layout: str) -> None:
    answer = client.likelihoods(getattr(smollm2, layout).name, token_ids=token_ids)
    expected = theirs.logits[0, :-1].double().log_softmax(-1).gather(-1, torch.tensor(token_ids)[1:, None])[:, 0]
    assert abs(answer.mean - float(expected.mean())) <= 1e-4
    # Logits near 20 round to 2e-6 in float32, a hundred operations deep.
    assert np.abs(np.array(answer.log_likelihoods) - expected.numpy()).max() <= 1e-3


@pytest.mark.parametrize("layer", [0, 11, 29])
def test_the_state_that_enters_a_layer(
    client: Client, smollm2: Any, token_ids: list[int], theirs: Any, layer: int
) -> None:
    run = client.run_block(
        smollm2.single.name, layer, part="layer", token_ids=token_ids, capture=("x",), return_tensors=True
    )
    expected = theirs.hidden_states[layer][0].numpy()
    error = float(np.abs(run.tensors["x"] - expected).max() / np.abs(expected).max())
    assert error <= (0.0 if layer == 0 else ROUNDING), error


def test_a_text_and_its_token_ids_are_one(client: Client, smollm2: Any) -> None:
    text = "The harbour wall was raised by a metre and a half."
    ids = Tokenizer.from_file(str(smollm2.single / "tokenizer.json")).encode(text).ids
    by_text, by_ids = (
        client.likelihoods(smollm2.single.name, **given) for given in ({"text": text}, {"token_ids": ids})
    )
    assert by_text.token_ids == ids
    assert by_text.log_likelihoods == by_ids.log_likelihoods
