"""The error tree, shared by the service, the client and the command line.

    GlassblockError
    ├── InvalidValue            a value in the request cannot be used
    ├── UnsupportedContent      the body is of a type that is not read here
    ├── TooLarge                the body, or what it asks for, is over a stated limit
    ├── AccessRefused           a path outside the configured roots
    ├── Unauthenticated         no key came, or none that is known
    ├── NotPermitted            the key does not allow this
    ├── TooManyRequests         more requests of one caller than its rate allows
    ├── NotFound
    │   ├── UnknownCheckpoint   no checkpoint of that name under the roots
    │   ├── UnknownAudit        no audit of that id
    │   └── UnknownRoute        no such path or method
    ├── CheckpointUnusable
    │   ├── DamagedCheckpoint   a container, index or config that cannot be believed
    │   ├── FamilyMismatch      the tensors do not fit the family the config names
    │   └── UnknownFamily       no row of the family table fits
    ├── NotReady                the answer exists later: the job has not finished
    ├── NoRoom                  the device has no memory for this now
    ├── StorageUnavailable      the database of the jobs cannot be read or written now
    ├── ServiceUnavailable      the service cannot be reached, or answers no protocol of ours
    └── InternalFault           a defect of ours, told without its inside

An error carries facts (which field, tensor, file, byte) and what to do about it. It knows
no HTTP status: the edge decides that, in `api.answers.ANSWERS`. `code` is stable and is what
clients match on; `error_from_code` gives back the class, so that a failure in the same process
and one at the other end of a wire are caught by the same `except`.
"""

from typing import ClassVar, final

HINT_AS_JOB = "ask for it as a job: send `Prefer: respond-async` (the client: `client.as_job()`); or "
"""How the hint of a `TooLarge` begins where no limit but a caller's patience stands against it."""


class GlassblockError(Exception):
    """Root of every error raised on purpose. Where nobody catches it, its hint and known values stand below it.

    Args:
        message: What is wrong, in one sentence naming the culprit.
        hint: What to do about it.
        field: The request field at fault, dotted (`overrides.eps`).
        tensor: The tensor at fault, by its full name in the file.
        file: The file at fault, by its name under the checkpoint.
        byte: Offset in that file where the fault shows.
        known: The values that would have been accepted, for names out of a closed set.
        retry_after: Seconds after which the same request may succeed.
    """

    code: ClassVar[str] = "error"
    title: ClassVar[str] = "Something went wrong"

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        field: str | None = None,
        tensor: str | None = None,
        file: str | None = None,
        byte: int | None = None,
        known: tuple[str, ...] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.field = field
        self.tensor = tensor
        self.file = file
        self.byte = byte
        self.known = known
        self.retry_after = retry_after
        if hint is not None:
            self.add_note(hint)
        if known:
            self.add_note(f"Known: {', '.join(known)}")


@final
class InvalidValue(GlassblockError):
    code = "invalid-value"
    title = "A value in the request cannot be used"


@final
class UnsupportedContent(GlassblockError):
    code = "unsupported-content"
    title = "The content type is not read here"


@final
class TooLarge(GlassblockError):
    code = "too-large"
    title = "The request is over a limit"


@final
class AccessRefused(GlassblockError):
    code = "access-refused"
    title = "The path lies outside the configured roots"


@final
class Unauthenticated(GlassblockError):
    code = "unauthenticated"
    title = "A key is needed"


@final
class NotPermitted(GlassblockError):
    code = "not-permitted"
    title = "The key does not allow this"


@final
class TooManyRequests(GlassblockError):
    code = "too-many-requests"
    title = "Too many requests"


class NotFound(GlassblockError):
    code = "not-found"
    title = "There is no such thing here"


@final
class UnknownCheckpoint(NotFound):
    code = "unknown-checkpoint"
    title = "No checkpoint of that name"


@final
class UnknownAudit(NotFound):
    code = "unknown-audit"
    title = "No audit of that id"


@final
class UnknownRoute(NotFound):
    code = "unknown-route"
    title = "No such path or method"


class CheckpointUnusable(GlassblockError):
    code = "checkpoint-unusable"
    title = "The checkpoint cannot be used"


@final
class DamagedCheckpoint(CheckpointUnusable):
    code = "damaged-checkpoint"
    title = "The checkpoint is damaged"


@final
class FamilyMismatch(CheckpointUnusable):
    code = "family-mismatch"
    title = "The checkpoint does not fit its family"


@final
class UnknownFamily(CheckpointUnusable):
    code = "unknown-family"
    title = "No known family fits the checkpoint"


@final
class NotReady(GlassblockError):
    code = "not-ready"
    title = "The answer is not ready"


@final
class NoRoom(GlassblockError):
    code = "no-room"
    title = "No memory on the device"


@final
class StorageUnavailable(GlassblockError):
    code = "storage-unavailable"
    title = "The database of the jobs cannot be used now"


@final
class ServiceUnavailable(GlassblockError):
    code = "service-unavailable"
    title = "The service cannot be reached"


@final
class InternalFault(GlassblockError):
    code = "internal-fault"
    title = "A defect in the service"


def _tree(root: type[GlassblockError]) -> list[type[GlassblockError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


ERRORS: dict[str, type[GlassblockError]] = {error.code: error for error in _tree(GlassblockError)}


def error_from_code(code: str) -> type[GlassblockError]:
    """The class that carries `code`; `GlassblockError` for a code of a newer service."""
    return ERRORS.get(code, GlassblockError)
