"""Logits and log-likelihoods against their definition."""

from typing import Any

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.likelihood import log_likelihood, logit_chunks, logits
from torch.nn import functional

from numerics.makers import make_norm, random_tensor

D, VOCABULARY = 12, 37
IDS = torch.tensor([[3, 0, 36, 7, 7], [1, 2, 3, 4, 5]])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": random_tensor(VOCABULARY, seed=5)},
    "scaled": {"scale": 0.25},
    "capped": {"softcap": 2.0},
    "all": {"bias": random_tensor(VOCABULARY, seed=5), "scale": 0.25, "softcap": 2.0},
}


def parts() -> tuple[Any, Any, Any]:
    return random_tensor(2, 5, D, seed=1), make_norm("rms_llama", D), random_tensor(VOCABULARY, D, seed=2)


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("byte_budget", [1, 1000, 3000, 2**28])
def test_logits_in_parts_are_the_logits(case: str, byte_budget: int) -> None:
    hidden, norm, head = parts()
    options = OPTIONS[case]
    expected = norm(hidden) @ head.T + options.get("bias", 0.0)
    expected = expected * options.get("scale", 1.0)
    if "softcap" in options:
        expected = options["softcap"] * torch.tanh(expected / options["softcap"])
    found = torch.cat(list(logit_chunks(hidden, norm, head, byte_budget=byte_budget, **options)), -1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(logits(hidden, norm, head, **options), expected, rtol=1e-12, atol=1e-13)


def test_parts_keep_to_the_byte_budget() -> None:
    hidden, norm, head = parts()
    sizes = [part.shape[-1] for part in logit_chunks(hidden, norm, head, byte_budget=1000)]
    assert sum(sizes) == VOCABULARY
    assert len(sizes) > 5
    assert max(sizes) * (2 * 10 + D) * 8 <= 1000


@pytest.mark.parametrize("byte_budget", [1, 1000, 2**28])
def test_log_likelihood_follows_its_definition(byte_budget: int) -> None:
    hidden, norm, head = parts()
    whole = logits(hidden, norm, head)
    expected = -functional.cross_entropy(
        whole[:, :-1].reshape(-1, VOCABULARY), IDS[:, 1:].reshape(-1), reduction="none"
    ).reshape(2, 4)
    found = log_likelihood(logit_chunks(hidden, norm, head, byte_budget=byte_budget), IDS)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(log_likelihood(whole, IDS), expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(log_likelihood(whole[0], IDS[0]), expected[0], rtol=1e-12, atol=1e-13)


def test_far_logits_neither_overflow_nor_vanish() -> None:
    far = torch.tensor([[[1000.0, -1000.0, 999.0], [0.0, 0.0, 0.0]]])
    ids = torch.tensor([[0, 2]])
    # ln(e^-1 / (1 + e^-1))
    expected = torch.tensor([[-1.3132616875]])
    torch.testing.assert_close(log_likelihood(far, ids), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(log_likelihood(far.split(1, -1), ids), expected, rtol=1e-6, atol=0)


def test_logits_of_minus_infinity_are_words_that_never_come() -> None:
    barred = torch.tensor([[-torch.inf, -torch.inf, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    for ids, expected in (([0, 2], -0.6931471806), ([0, 1], -torch.inf)):
        found = log_likelihood(barred.split(1, -1), torch.tensor(ids))
        torch.testing.assert_close(found, torch.tensor([expected]), rtol=1e-6, atol=0)


def test_half_logits_are_summed_in_float32() -> None:
    half = random_tensor(5, 1000, dtype=torch.bfloat16)
    ids = torch.tensor([0, 1, 2, 3, 4])
    found = log_likelihood(half, ids)
    assert found.dtype == torch.float32
    expected = log_likelihood(half.double(), ids)
    # float32 sums of a thousand terms.
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def test_a_given_dtype_is_that_of_the_logits() -> None:
    hidden, norm, head = parts()
    assert logits(hidden, norm, head, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert logits(hidden.float(), norm.to(torch.float32), head.bfloat16()).dtype == torch.float32
    assert logits(hidden, None, head).dtype == torch.float64


@pytest.mark.parametrize(
    ("scores", "ids"),
    [
        (torch.zeros(3, 5), torch.tensor([0, 1, 5])),
        (torch.zeros(3, 5), torch.tensor([-1, 1, 2])),
        (torch.zeros(3, 5), torch.tensor([0, 1])),
        ([], torch.tensor([0, 1])),
    ],
)
def test_ids_that_do_not_go_with_the_logits_are_refused(scores: Any, ids: torch.Tensor) -> None:
    with pytest.raises(InvalidValue) as caught:
        log_likelihood(scores, ids)
    assert caught.value.field == "token_ids"


def test_a_head_of_another_width_is_refused() -> None:
    hidden, norm, _ = parts()
    with pytest.raises(InvalidValue) as caught:
        logit_chunks(hidden, norm, torch.ones(VOCABULARY, D + 1))
    assert caught.value.field == "head"
