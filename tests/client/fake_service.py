"""A Glassblock service that answers from a table, for `httpx.MockTransport`."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from glassblock.errors import GlassblockError
from glassblock.wire import problems
from glassblock.wire.audits import Audit, Progress
from glassblock.wire.budgets import Budget, BudgetAnswer, EqualParameterWidth
from glassblock.wire.checkpoints import CheckpointDetail, CheckpointList, Residency
from glassblock.wire.tables import Capabilities, FamilyList, Health, RuleList, RuleRow
from glassblock.wire.values import Answer
from pydantic import BaseModel
from reports.report_makers import report

Handler = Callable[[httpx.Request], httpx.Response]


class FakeService:
    """Answers `METHOD /path` from `answers`; keeps every request in `asked`."""

    def __init__(self, answers: Mapping[str, Answer | Handler | Exception]) -> None:
        self.answers = dict(answers)
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.asked.append(request)
        answer = self.answers.get(f"{request.method} {request.url.raw_path.decode()}")
        if answer is None:
            raise AssertionError(f"nobody expected {request.method} {request.url}")
        if isinstance(answer, Exception):
            raise answer
        return json_response(answer) if isinstance(answer, Answer) else answer(request)

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self)

    def sent(self, number: int = -1) -> Any:
        """The JSON message of one request."""
        return json.loads(self.asked[number].content)

    def connect(self, **given: Any) -> Any:
        """Stands where the in-process service would: `obj` of the command line."""
        self.connected = given

        @contextmanager
        def opened() -> Any:
            yield self.transport

        return opened()


@contextmanager
def listening(service: FakeService) -> Iterator[str]:
    """The fake behind a real socket: its URL."""

    class Exchange(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            response = service(
                httpx.Request(self.command, f"{url}{self.path}", headers=dict(self.headers), content=body)
            )
            self.send_response(response.status_code)
            self.send_header("Content-Type", response.headers["Content-Type"])
            self.send_header("Content-Length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        do_GET = do_POST = do_PUT = do_DELETE = answer

    with ThreadingHTTPServer(("127.0.0.1", 0), Exchange) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield url
        finally:
            server.shutdown()
            thread.join()


def json_response(answer: BaseModel, status: int = 200) -> httpx.Response:
    return httpx.Response(status, content=answer.model_dump_json(), headers={"Content-Type": "application/json"})


def problem_response(error: GlassblockError, status: int) -> httpx.Response:
    problem = problems.problem_from_error(error, status)
    return httpx.Response(
        status, content=problem.model_dump_json(exclude_none=True), headers={"Content-Type": problems.MEDIA_TYPE}
    )


def finished_audit(finished: Any = None) -> Audit:
    finished = finished or report()
    return Audit(id="a1", state="succeeded", checkpoint="tiny", progress=Progress(done=4, total=4), report=finished)


RULES = RuleList(
    rules=(
        RuleRow(
            name="ffn/gate-up-swapped",
            level="error",
            certainty="statistical",
            what="Gate and up are exchanged.",
            hurts="The function changes.",
            detection="Signs.",
            fooled_by="Odd activations.",
            report="Somewhere public.",
        ),
        RuleRow(
            name="container/hole",
            level="error",
            certainty="proved",
            what="Bytes belong to no tensor.",
            hurts="Strict readers refuse the file.",
            detection="Offsets.",
            fooled_by="Nothing.",
            report="Elsewhere.",
        ),
    )
)
FAMILIES = FamilyList(families=(), norm_kinds=("rms_llama",), activations=("silu",), placements=("pre",))
_BUDGET = Budget(
    d_model=4,
    d_ff=8,
    kind="gated",
    batch=1,
    tokens=1,
    layers=1,
    dtype="bfloat16",
    parameters=96,
    parameters_per_layer=96,
    parameter_bytes=192,
    hidden_elements=8,
    activations={},
    macs_per_token=96,
    flops_per_token=192,
    flops=192,
    equal_parameter_width=EqualParameterWidth(exact="16/3", value=5.33, rounded=256, multiple_of=256),
)
BUDGET = BudgetAnswer(**_BUDGET.model_dump())
SWEPT_BUDGET = BudgetAnswer(
    **_BUDGET.model_dump(), swept="d_ff", sweep=(_BUDGET, _BUDGET.model_copy(update={"d_ff": 16}))
)
CAPABILITIES = Capabilities(glassblock="0.1.0", schema_version="1", torch="2", device="cpu", endpoints=())
DETAIL = CheckpointDetail(
    name="tiny",
    family="llama",
    verified=None,
    layers=4,
    d_model=64,
    d_ff=176,
    vocabulary=96,
    tensors=38,
    bytes=1000,
    dtypes={},
    files=(),
    shapes={},
    eps=(),
    residency=None,
    faults=(),
)
RESIDENCY = Residency(device="cpu", layers=(0,), bytes=10)
HEALTH = Health(status="ready", checks={})
NO_CHECKPOINTS = CheckpointList(checkpoints=())
