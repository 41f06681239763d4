"""RFC 9457 problem documents: how an error travels, and how it becomes the same error again."""

from typing import Annotated

from pydantic import Field

from glassblock.errors import GlassblockError, error_from_code
from glassblock.wire.values import Answer

MEDIA_TYPE = "application/problem+json"


class Problem(Answer):
    """A problem document. `code` is stable; clients match on it."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: Annotated[str | None, Field(description="what to do about it")] = None
    field: str | None = None
    tensor: str | None = None
    file: str | None = None
    byte: int | None = None
    known: tuple[str, ...] = ()
    retry_after: float | None = None


def problem_from_error(error: GlassblockError, status: int) -> Problem:
    """The document for `error`, answered with HTTP `status`."""
    return Problem(
        type=f"urn:glassblock:problem:{error.code}",
        title=error.title,
        status=status,
        detail=error.message,
        code=error.code,
        hint=error.hint,
        field=error.field,
        tensor=error.tensor,
        file=error.file,
        byte=error.byte,
        known=error.known,
        retry_after=error.retry_after,
    )


def error_from_problem(problem: Problem) -> GlassblockError:
    """The error that `problem` was made from, of the same class."""
    return error_from_code(problem.code)(
        problem.detail,
        hint=problem.hint,
        field=problem.field,
        tensor=problem.tensor,
        file=problem.file,
        byte=problem.byte,
        known=problem.known,
        retry_after=problem.retry_after,
    )
