"""Which HTTP status each error gets. One row per error class; exact class, no default."""

import logging
import math
from collections.abc import Mapping
from typing import cast

from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from glassblock import errors
from glassblock.wire.problems import MEDIA_TYPE, problem_from_error
from glassblock.wire.refusals import refusal

log = logging.getLogger(__name__)

ANSWERS: Mapping[type[errors.GlassblockError], int] = {
    errors.GlassblockError: 500,
    errors.InvalidValue: 422,
    errors.UnsupportedContent: 415,
    errors.TooLarge: 413,
    errors.AccessRefused: 403,
    errors.Unauthenticated: 401,
    errors.NotPermitted: 403,
    errors.TooManyRequests: 429,
    errors.NotFound: 404,
    errors.UnknownCheckpoint: 404,
    errors.UnknownAudit: 404,
    errors.UnknownRoute: 404,
    errors.CheckpointUnusable: 409,
    errors.DamagedCheckpoint: 409,
    errors.FamilyMismatch: 409,
    errors.UnknownFamily: 409,
    errors.NotReady: 409,
    errors.NoRoom: 503,
    errors.StorageUnavailable: 503,
    errors.ServiceUnavailable: 503,
    errors.InternalFault: 500,
}


def answer_error(error: errors.GlassblockError, *, status: int | None = None) -> Response:
    """The problem document for `error`."""
    problem = problem_from_error(error, status or ANSWERS[type(error)])
    headers = {} if error.retry_after is None else {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    return Response(problem.model_dump_json(exclude_none=True), problem.status, headers, MEDIA_TYPE)


def answer_http_exception(request: Request, error: Exception) -> Response:
    """What the router itself refuses: no such path, or no such method on it."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = "no such method on this path" if status == 405 else "no such path"
    answer = answer_error(errors.UnknownRoute(message, hint="see GET /openapi.json"), status=status)
    answer.headers.update(error.headers or {} if isinstance(error, HTTPException) else {})
    if status == 405:
        answer.headers["Allow"] = ", ".join(_methods_of(request))
    return answer


def _methods_of(request: Request) -> list[str]:
    """Every method of the path: the router knows those of the first route alone, and one path may have several."""
    routes = (route for route in cast("FastAPI", request.app).routes if isinstance(route, Route))
    return sorted(
        {method for route in routes if route.matches(request.scope)[0] != Match.NONE for method in route.methods or ()}
    )


def answer_defect(request: Request, error: Exception) -> Response:
    """A defect of ours: the log has the trace, the caller a plain word."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return answer_error(errors.InternalFault("the service failed on this request", hint="its log has the details"))


def invalid_value(error: ValidationError, model: type[BaseModel] | None = None) -> errors.InvalidValue:
    """The first thing pydantic refused, naming its field, and what the field takes where the `model` tells."""
    refused = refusal(error, model)
    refused.hint = refused.hint or "see GET /openapi.json"
    return refused
