"""The OpenAPI document, made from the endpoint table. Committed as `docs/openapi.json`; a test guards it.

python -m glassblock.api.openapi > docs/openapi.json
"""

import json
import re
import sys
from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

import glassblock
from glassblock.reports import REPORTS
from glassblock.wire import framing, problems
from glassblock.wire.endpoints import AUDIT_REPORT, ENDPOINTS, START_AUDIT, Endpoint, Nothing, Text

JSON = "application/json"

JOB_HEADERS = ("Prefer", "Idempotency-Key")
"""What is said of a job by an endpoint that may be asked for as one."""


@cache
def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document of the service."""
    bodies = [endpoint.request for endpoint in ENDPOINTS if endpoint.method != "GET"]
    models = {*bodies, *(endpoint.answer for endpoint in ENDPOINTS)} - {Nothing, Text}
    ordered = sorted(models | {problems.Problem}, key=lambda model: model.__name__)
    names, schemas = models_json_schema(
        [(model, "validation" if _is_request(model) else "serialization") for model in ordered],
        ref_template="#/components/schemas/{model}",
    )
    refs = {model: schema for (model, _), schema in names.items()}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, refs)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Glassblock",
            "version": glassblock.__version__,
            "description": "Looks inside the blocks of a transformer checkpoint. "
            f"Where a body may be {framing.MEDIA_TYPE}, the JSON message travels in the file's `__metadata__` "
            "under `request` or `response`, the tensors as themselves.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "where keys are configured"}
            },
        },
    }


def _operation(endpoint: Endpoint[Any, Any], refs: dict[Any, Any]) -> dict[str, Any]:
    schema = {"type": "string"} if endpoint.answer is Text else refs[endpoint.answer]
    answer: dict[str, Any] = {endpoint.media_type or JSON: {"schema": schema}}
    if endpoint.tensors_out:
        answer[framing.MEDIA_TYPE] = {"schema": {"type": "string", "format": "binary"}}
    if endpoint is AUDIT_REPORT:
        answer |= {
            row.media_type: {"schema": {"type": "object" if row.media_type.endswith("json") else "string"}}
            for row in REPORTS.values()
            if row.media_type != JSON
        }
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "parameters": _parameters(endpoint),
        "responses": {
            str(endpoint.status): {"description": endpoint.summary, "content": answer},
            "default": {
                "description": "A problem document (RFC 9457).",
                "content": {problems.MEDIA_TYPE: {"schema": refs[problems.Problem]}},
            },
        },
    }
    if endpoint.job:
        operation["responses"]["202"] = {
            "description": "Asked for with `Prefer: respond-async`: the job that will have the answer.",
            "content": {JSON: {"schema": refs[START_AUDIT.answer]}},
        }
    if endpoint.needs is not None:
        operation["security"] = [{"key": []}, {}]  # a service on loopback may have no keys
        operation["description"] = f"Needs a key of scope `{endpoint.needs}`, where there are keys."
    if endpoint.request is not Nothing and endpoint.method != "GET":
        body: dict[str, Any] = {JSON: {"schema": refs[endpoint.request]}}
        if endpoint.tensors_in:
            body[framing.MEDIA_TYPE] = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"] = {"content": body, "required": endpoint.method == "POST"}
    return operation


def _parameters(endpoint: Endpoint[Any, Any]) -> list[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    in_header = [
        {"name": name, "in": "header", "required": False, "schema": {"type": "string"}}
        for name in (*endpoint.headers, *(JOB_HEADERS if endpoint.job else ()))
    ]
    in_query = _query(endpoint) if endpoint.method == "GET" else []
    if endpoint is AUDIT_REPORT:
        formats = {"type": "string", "enum": list(REPORTS)}
        in_query = [{"name": "format", "in": "query", "required": False, "schema": formats}]
    return [*in_path, *in_query, *in_header]


def _query(endpoint: Endpoint[Any, Any]) -> list[dict[str, Any]]:
    schema = endpoint.request.model_json_schema()
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": field}
        for name, field in schema.get("properties", {}).items()
    ]


def _is_request(model: type[Any]) -> bool:
    return any(endpoint.request is model for endpoint in ENDPOINTS)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(document(), indent=2) + "\n")
