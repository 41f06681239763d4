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
from glassblock.wire.endpoints import AUDIT_REPORT, ENDPOINTS, Endpoint, Nothing

JSON = "application/json"


@cache
def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document of the service."""
    models = {model for endpoint in ENDPOINTS for model in (endpoint.request, endpoint.answer)} - {Nothing}
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
        "components": {"schemas": schemas["$defs"]},
    }


def _operation(endpoint: Endpoint[Any, Any], refs: dict[Any, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {JSON: {"schema": refs[endpoint.answer]}}
    if endpoint.tensors_out:
        answer[framing.MEDIA_TYPE] = {"schema": {"type": "string", "format": "binary"}}
    if endpoint is AUDIT_REPORT:
        answer |= {row.media_type: {"schema": {"type": "string"}} for row in REPORTS.values() if row.media_type != JSON}
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
    if endpoint.request is not Nothing:
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
    if endpoint is not AUDIT_REPORT:
        return in_path
    formats = {"type": "string", "enum": list(REPORTS)}
    return [*in_path, {"name": "format", "in": "query", "required": False, "schema": formats}]


def _is_request(model: type[Any]) -> bool:
    return any(endpoint.request is model for endpoint in ENDPOINTS)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(document(), indent=2) + "\n")
