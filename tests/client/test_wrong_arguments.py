"""Whatever an argument is given, a method answers with an error that tells the argument, and with no other."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from glassblock.errors import GlassblockError, InvalidValue
from glassblock_client import questions
from glassblock_client.questions import Question

WRONG: tuple[Any, ...] = (
    5, -1, 0.5, float("nan"), True, b"x", "", "x", object(), Path("x"), [], [object()], [[1], [2, 3]], {}, {5: 1},
    {"a": object()}, {"a": {5: object()}}, {1, 2}, range(3), 1j, np.int64(3), np.zeros((2, 2)), np.array(["a"]),
    np.array([object()]), lambda: None,
)  # fmt: skip
ENOUGH: dict[str, Any] = {
    "checkpoint": "tiny",
    "layer": 0,
    "layers": [0],
    "name": "tiny",
    "audit_id": "a",
    "captures": {"x": np.ones((1, 2))},
    "operation": "run_block",
    "request": {"checkpoint": "tiny", "layer": 0},
}
CALLED = {
    "audit_id": ("id",),
    "captures": ("a", "x", "captured"),
    "idempotency_key": ("Idempotency-Key",),
    "tensors": ("shape",),
}
"""What an error may call an argument."""

ASKING: dict[str, Callable[..., Question[Any]]] = {
    name: build
    for name, build in vars(questions).items()
    if inspect.isfunction(build)
    and build.__module__ == questions.__name__
    and str(inspect.signature(build).return_annotation).find("Question[") >= 0
    and name not in {"answer_to", "reply_to"}
}


@pytest.mark.parametrize("name", ASKING)
def test_a_question_is_put_together_or_refused_by_the_argument(name: str) -> None:
    build = ASKING[name]
    parameters = inspect.signature(build).parameters
    right = {given: ENOUGH[given] for given, one in parameters.items() if one.default is one.empty}
    build(**right) if name != "norm_statistics" else None
    for argument in parameters:
        for value in WRONG:
            try:
                build(**{**right, argument: value})
            except GlassblockError as refused:
                told = f"{refused.field} {refused.message}"
                names = {argument, *CALLED.get(argument, ()), "request holds what JSON has no form for"}
                assert any(name in told for name in names), (value, told)


@pytest.mark.parametrize("argument", ["operation", "request", "tensors", "idempotency_key"])
def test_so_is_a_job(argument: str) -> None:
    right: dict[str, Any] = {"operation": "run_block", "request": ENOUGH["request"], "tensors": None}
    right |= {"return_tensors": False, "idempotency_key": None}
    for value in WRONG:
        with suppress(InvalidValue):
            questions.job_of(**{**right, argument: value})


def test_arrays_of_numbers_are_lists_of_numbers() -> None:
    three: Any = np.arange(1, 4)
    square: Any = np.array([[1, 2], [3, 4]])
    listed = questions.likelihoods("tiny", token_ids=[1, 2, 3]).call.body
    assert questions.likelihoods("tiny", token_ids=three).call.body == listed
    assert questions.likelihoods("tiny", token_ids=list(three)).call.body == listed
    two = questions.likelihoods("tiny", token_ids=[[1, 2], [3, 4]]).call.body
    assert questions.likelihoods("tiny", token_ids=square).call.body == two
    assert questions.likelihoods("tiny", token_ids=list(square)).call.body == two
    layers = questions.jacobians("tiny", three, token_ids=three).call.body
    assert layers == questions.jacobians("tiny", [1, 2, 3], token_ids=[1, 2, 3]).call.body
