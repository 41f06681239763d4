"""What a refused value is told: the field, what came, what is allowed; never in pydantic's own words."""

import doctest
import importlib
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from glassblock.errors import InvalidValue
from glassblock.wire import wanted
from glassblock.wire.audits import AuditQuery, AuditRequest
from glassblock.wire.blocks import BlockRunRequest
from glassblock.wire.budgets import BudgetRequest
from glassblock.wire.endpoints import ENDPOINTS
from glassblock.wire.jacobians import JacobiansRequest
from glassblock.wire.refusals import refusal
from glassblock.wire.values import Request, Sample
from pydantic import BaseModel, Field, ValidationError


def refused(model: type[BaseModel], **values: Any) -> InvalidValue:
    with pytest.raises(ValidationError) as fault:
        model.model_validate(values)
    return refusal(fault.value, model)


RUN: dict[str, Any] = {"checkpoint": "m", "layer": 0}
JACOBIANS: dict[str, Any] = {"checkpoint": "m", "layers": [0]}
TOLD: list[tuple[type[BaseModel], dict[str, Any], str, str]] = [
    (BlockRunRequest, {"checkpoint": "m"}, "layer", "layer is missing"),
    (BlockRunRequest, RUN | {"sample": {}}, "sample.rows", "sample.rows is missing"),
    (BlockRunRequest, RUN | {"capure": []}, "capure", "capure: there is no such field"),
    (BlockRunRequest, RUN | {"layer": "x"}, "layer", "layer: a whole number is wanted, not 'x'"),
    (BlockRunRequest, RUN | {"layer": 1.5}, "layer", "layer: a whole number is wanted, not 1.5"),
    (BlockRunRequest, RUN | {"layer": True}, "layer", "layer: a whole number is wanted, not true"),
    (BlockRunRequest, RUN | {"layer": None}, "layer", "layer: a whole number is wanted, not null"),
    (BlockRunRequest, RUN | {"checkpoint": 3}, "checkpoint", "checkpoint: a text is wanted, not 3"),
    (
        BlockRunRequest,
        RUN | {"checkpoint": ""},
        "checkpoint",
        "checkpoint: '' is too short: at least 1 character",
    ),
    (
        BlockRunRequest,
        RUN | {"checkpoint": "m" * 5000},
        "checkpoint",
        "checkpoint: a text of 5,000 characters is too long: at most 4,096",
    ),
    (
        BlockRunRequest,
        RUN | {"overrides": {"eps": "tiny"}},
        "overrides.eps",
        "overrides.eps: a number is wanted, not 'tiny'",
    ),
    (
        BlockRunRequest,
        RUN | {"overrides": {"norm_offset": float("nan")}},
        "overrides.norm_offset",
        "overrides.norm_offset: a finite number is wanted, not NaN",
    ),
    (
        BlockRunRequest,
        RUN | {"overrides": {"swap": "yes"}},
        "overrides.swap",
        "overrides.swap: true or false is wanted, not 'yes'",
    ),
    (BlockRunRequest, RUN | {"family_row": []}, "family_row", "family_row: an object is wanted, not a list"),
    (
        BlockRunRequest,
        RUN | {"sample": 3},
        "sample",
        "sample: an object is wanted, not 3; it has the fields rows, seed",
    ),
    (BlockRunRequest, RUN | {"expert": "x"}, "expert", "expert: a whole number or 'shared' is wanted, not 'x'"),
    (
        BlockRunRequest,
        RUN | {"part": "fnn"},
        "part",
        "part: 'fnn' is none of 'ffn', 'attention', 'layer'",
    ),
    (
        BlockRunRequest,
        RUN | {"capture": ["gat"]},
        "capture.0",
        "capture.0: 'gat' is none of the 22 known values",
    ),
    (Sample, {"rows": 0}, "rows", "rows: 0 is too small: at least 1 is wanted"),
    (Sample, {"rows": 65_537}, "rows", "rows: 65,537 is too large: at most 65,536 is wanted"),
    (Sample, {"rows": 10**400}, "rows", "rows: a number of very many digits is too large: at most 65,536 is wanted"),
    (JacobiansRequest, JACOBIANS | {"tolerance": 0.0}, "tolerance", "tolerance: 0.0 is too small: more than 0"),
    (JacobiansRequest, JACOBIANS | {"tolerance": 2.0}, "tolerance", "tolerance: 2.0 is too large: less than 1"),
    (
        JacobiansRequest,
        JACOBIANS | {"layers": []},
        "layers",
        "layers: 0 entries came, and at least 1 must",
    ),
    (JacobiansRequest, JACOBIANS | {"layers": 3}, "layers", "layers: a list is wanted, not 3"),
    (
        JacobiansRequest,
        JACOBIANS | {"layers": list(range(5000))},
        "layers",
        "entries came, and at most 4,096 may",
    ),
    (BudgetRequest, {"d_model": "x"}, "d_model", "d_model: a whole number or a list is wanted, not 'x'"),
    (BudgetRequest, {"d_model": 0}, "d_model", "d_model: 0 is too small: at least 1 is wanted"),
    (
        AuditRequest,
        {"checkpoint": "m", "token_ids": [1, "a"]},
        "token_ids.1",
        "token_ids.1: a whole number or a list is wanted, not 'a'",
    ),
    (AuditQuery, {"since": "yesterday"}, "since", "since: a time such as 2026-01-31T12:00:00Z is wanted, not"),
    (
        AuditQuery,
        {"since": datetime(2026, 1, 1)},  # without a zone
        "since",
        "since: a time with its zone, such as 2026-01-31T12:00:00Z is wanted",
    ),
    (AuditQuery, {"state": "done"}, "state", "state: 'done' is none of 'queued', "),
]


@pytest.mark.parametrize(("model", "values", "field", "told"), TOLD, ids=[told for *_, told in TOLD])
def test_a_refused_value_names_its_field_what_came_and_what_is_allowed(
    model: type[BaseModel], values: dict[str, Any], field: str, told: str
) -> None:
    error = refused(model, **values)
    assert told in error.message
    assert error.message.startswith(field)
    assert error.field == field


def test_a_closed_set_is_told_whole_and_what_is_near_is_the_hint() -> None:
    error = refused(BlockRunRequest, **RUN, part="fnn")
    assert error.known == ("ffn", "attention", "layer")
    assert error.hint == "Did you mean ffn?"


def test_faults_of_other_fields_are_counted_and_alternatives_of_one_are_not() -> None:
    assert "more)" not in refused(BudgetRequest, d_model=0).message
    assert refused(BudgetRequest, d_model=0, layers=0).message.endswith("is wanted (and 1 more)")


def test_what_is_within_a_quoted_request_says_so() -> None:
    with pytest.raises(ValidationError) as fault:
        BlockRunRequest.model_validate({"checkpoint": "m"})
    assert refusal(fault.value, BlockRunRequest, within="request").message == "request.layer is missing"


@pytest.mark.parametrize("came", [[1] * 3, {"a": 1}, (1,), 1e300, float("inf"), -float("inf"), "x" * 500, Path(), b""])
def test_any_value_is_shown_in_a_few_words(came: object) -> None:
    assert 0 < len(wanted.shown(came)) < 120


def test_the_docstring_shows_what_happens() -> None:
    assert doctest.testmod(importlib.import_module("glassblock.wire.wanted")).failed == 0


def _schema_kinds(schema: object, seen: set[int]) -> set[str]:
    """The kinds of validators of a message, and their bounds."""
    if id(schema) in seen:
        return set()
    seen.add(id(schema))
    found: set[str] = set()
    if isinstance(schema, dict):
        found |= {schema["type"]} if isinstance(schema.get("type"), str) else set()
        found |= {key for key in schema if isinstance(key, str) and key in LIMITS}
        inner: Any = schema.values()
    else:
        inner = schema if isinstance(schema, list | tuple) else ()
    return found.union(*(_schema_kinds(part, seen) for part in inner))


LIMITS = {
    "ge": {"greater_than_equal"},
    "gt": {"greater_than"},
    "le": {"less_than_equal"},
    "lt": {"less_than"},
    "pattern": {"string_pattern_mismatch"},
    "allow_inf_nan": {"finite_number"},
    "tz_constraint": {"timezone_aware"},
    "min_length": {"too_short", "string_too_short"},
    "max_length": {"too_long", "string_too_long"},
}
VALIDATORS = {
    "any": set[str](),
    "default": set[str](),
    "nullable": set[str](),
    "union": set[str](),
    "model-field": {"missing"},
    "model-fields": {"extra_forbidden"},
    "model": {"model_type"},
    "bool": {"bool_type"},
    "int": {"int_type"},
    "float": {"float_type"},
    "str": {"string_type"},
    "list": {"list_type"},
    "tuple": {"tuple_type"},
    "dict": {"dict_type"},
    "literal": {"literal_error"},
    "datetime": {"datetime_type"},
}


def test_every_kind_of_fault_that_a_request_can_have_has_words_of_its_own() -> None:
    """A new kind of field in a message needs a row here, and its words in the table."""
    seen: set[int] = set()
    kinds = set[str]().union(
        *(_schema_kinds(endpoint.request.__pydantic_core_schema__, seen) for endpoint in ENDPOINTS)
    )
    assert kinds >= {"int", "ge", "literal", "max_length"}  # or the walk finds nothing
    faults = set[str]().union(*(LIMITS.get(kind) or VALIDATORS[kind] for kind in kinds))
    assert faults - {"missing"} <= {*wanted.KINDS, *wanted.BOUNDS}


def test_a_kind_without_words_keeps_those_of_pydantic() -> None:
    class Odd(Request):
        field: Annotated[complex, Field(strict=True)]

    assert refused(Odd, field="x").message.startswith("field: ")


def test_the_service_says_the_same(http: httpx.Client) -> None:
    answer = http.post("/v1/blocks/run", json=RUN | {"layer": "x"})
    assert answer.status_code == 422
    assert answer.json()["detail"] == "layer: a whole number is wanted, not 'x'"
