"""Many callers: turns, full lines, deadlines, shared computations, answers that are told by their tag or stored."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import xxhash
from glassblock.api.app import create_app
from glassblock.api.entry import in_process
from glassblock.api.flights import Flights
from glassblock.api.lanes import FairLane
from glassblock.api.results import Rendered, StoredAnswers
from glassblock.api.settings import Settings
from glassblock.errors import InvalidValue, NoRoom, ServiceUnavailable
from glassblock.operations import block_runs
from glassblock.operations.content import Content
from glassblock.wire.framing import WireTensor
from makers import tiny_checkpoint

SAME = xxhash.xxh3_128(b"")
"""A digest that says the same of everything."""

BODY = {"checkpoint": "model", "layer": 0, "sample": {"rows": 2, "seed": 0}}


def test_callers_take_turns_and_a_full_line_is_told() -> None:
    served: list[str] = []

    async def asks(lane: FairLane, caller: str) -> None:
        async with lane.slot(caller):
            served.append(caller)
            await anyio.sleep(0)

    async def main() -> None:
        lane = FairLane(1, 5)
        async with anyio.create_task_group() as group, lane.slot("first"):
            for caller in ("greedy", "greedy", "greedy", "greedy", "modest"):
                group.start_soon(asks, lane, caller)
            await anyio.wait_all_tasks_blocked()
            assert (lane.working, lane.waiting) == (1, 5)
            with pytest.raises(NoRoom) as refused:
                await asks(lane, "late")
            assert refused.value.retry_after is not None
        assert (lane.working, lane.waiting) == (0, 0)

    anyio.run(main)
    assert served == ["greedy", "modest", "greedy", "greedy", "greedy"]


def test_who_gives_up_waiting_leaves_the_line() -> None:
    async def main() -> None:
        lane = FairLane(1, 5)
        async with lane.slot("first"):
            with anyio.move_on_after(0.01):
                async with lane.slot("impatient"):
                    raise AssertionError
            assert lane.waiting == 0
        async with lane.slot("next"):
            assert lane.working == 1
        assert lane.working == 0

    anyio.run(main)


def test_the_same_is_computed_once_and_ends_when_nobody_waits() -> None:
    began: list[str] = []
    ended: list[str] = []

    async def main() -> None:
        async with anyio.create_task_group() as group:
            flights = Flights[str](group)
            go_on = anyio.Event()

            async def work() -> str:
                began.append("work")
                try:
                    await go_on.wait()
                except BaseException:
                    ended.append("stopped")
                    raise
                return "done"

            got: list[str] = []

            async def ask(seconds: float) -> None:
                with anyio.move_on_after(seconds):
                    got.append(await flights.run("key", work))

            async with anyio.create_task_group() as callers:
                callers.start_soon(ask, 10)
                callers.start_soon(ask, 0.01)  # goes before the end, and takes nothing with it
                callers.start_soon(ask, 10)
                await anyio.sleep(0.05)
                go_on.set()
            assert (began, got, ended) == (["work"], ["done", "done"], [])
            go_on = anyio.Event()
            await ask(0.01)
            await anyio.wait_all_tasks_blocked()
            assert ended == ["stopped"]

            async def fails() -> str:
                raise InvalidValue("no")

            for _ in range(2):
                with pytest.raises(InvalidValue):
                    await flights.run("other", fails)

    anyio.run(main)


def test_whoever_waits_for_a_computation_hears_that_the_service_stops() -> None:
    async def stopped() -> BaseException | None:
        faults: list[BaseException] = []

        async def wait(flights: Flights[None]) -> None:
            try:
                await flights.run("key", anyio.sleep_forever)
            except ServiceUnavailable as fault:
                faults.append(fault)

        with anyio.fail_after(10):
            async with anyio.create_task_group() as callers, anyio.create_task_group() as service:
                callers.start_soon(wait, Flights(service))
                await anyio.wait_all_tasks_blocked()
                service.cancel_scope.cancel()
        return faults[0] if faults else None

    assert isinstance(anyio.run(stopped), ServiceUnavailable)


def answer(text: bytes, **headers: str) -> Rendered:
    return Rendered(200, headers, "application/json", (text,))


def key(asked: str, *data: bytes) -> Content:
    return Content(asked, {str(number): WireTensor("U8", (len(x),), memoryview(x)) for number, x in enumerate(data)})


def test_a_key_is_every_byte_of_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert key("run", b"ab") == key("run", b"ab")
    assert key("run", b"ab").proof() == key("run", b"ab").proof()
    others = [key("run", b"ac"), key("run", b"a", b"b"), key("run"), key("norm", b"ab"), key("run", b"", b"ab")]
    assert len({key("run", b"ab"), *others}) == 6
    assert len({key("run", b"ab").proof(), *(other.proof() for other in others)}) == 6
    # Found by the digest, told apart by the bytes.
    monkeypatch.setattr("glassblock.operations.content.xxhash.xxh3_128", lambda _: SAME)
    assert key("run", b"ab").name == key("run", b"xy").name
    assert key("run", b"ab") != key("run", b"xy")
    assert key("run", b"ab") == key("run", b"ab")


def test_a_stored_answer_of_a_key_with_the_same_name_is_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glassblock.operations.content.xxhash.xxh3_128", lambda _: SAME)
    stored = StoredAnswers(tmp_path, 1 << 20)
    stored.put(key("run", b"evil"), answer(b"evil"))
    assert stored.get(key("run", b"good")) is None
    stored.put(key("run", b"good"), answer(b"good"))
    assert stored.get(key("run", b"good")) is None
    found = stored.get(key("run", b"evil"))
    assert found is not None
    assert bytes(found.chunks[0]) == b"evil"


def test_answers_survive_a_restart_and_a_damaged_one_is_removed(tmp_path: Path) -> None:
    stored = StoredAnswers(tmp_path, 1 << 20)
    stored.put(key("one"), answer(b"{}", Location="/there"))
    stored.put(key("two"), answer(b"[]"))
    (tmp_path / "tmpxyz").write_bytes(b"left behind")
    again = StoredAnswers(tmp_path, 1 << 20)
    found = again.get(key("one"))
    assert found is not None
    assert (found.status, found.headers, bytes(found.chunks[0])) == (200, {"Location": "/there"}, b"{}")
    damaged = tmp_path / f"{key('two').name}.answer"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert again.get(key("two")) is None
    assert sorted(item.name for item in tmp_path.iterdir()) == [f"{key('one').name}.answer"]
    assert again.counted()[1:] == (1, 1)


def test_the_least_recently_used_answers_leave_first(tmp_path: Path) -> None:
    stored = StoredAnswers(tmp_path, 2700)
    for name in ("a", "b"):
        stored.put(key(name), answer(b"x" * 300))
    assert stored.get(key("a")) is not None
    for name in ("c", "d", "e", "f", "g"):
        stored.put(key(name), answer(b"x" * 300))
    assert stored.get(key("b")) is None
    assert stored.get(key("a")) is not None
    stored.put(key("large"), answer(b"x" * 2000))
    assert stored.get(key("large")) is None, "one answer does not push out all others"
    assert sum(item.stat().st_size for item in tmp_path.iterdir()) <= 2700


def test_a_disk_that_is_full_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    stored = StoredAnswers(tmp_path, 1 << 20)
    monkeypatch.setattr(os, "replace", full)
    stored.put(key("one"), answer(b"{}"))
    assert stored.get(key("one")) is None
    assert list(tmp_path.iterdir()) == []


def test_what_the_disk_does_not_let_go_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    stored = StoredAnswers(tmp_path, 8 * 300)
    stored.put(key("a"), answer(b"a" * 100))
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"damaged")
    monkeypatch.setattr(Path, "unlink", refuse)
    assert stored.get(key("a")) is None
    assert StoredAnswers(tmp_path, 1).counted().bytes == 0


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[..., httpx.Client]]:
    tiny_checkpoint("llama", tmp_path / "roots" / "model")
    opened: list[Any] = []

    def start(**given: Any) -> httpx.Client:
        context = in_process(create_app(Settings(roots=(tmp_path / "roots",), device="cpu", **given)))
        opened.append(context)
        return httpx.Client(base_url="http://glassblock", transport=context.__enter__())

    yield start
    for context in opened:
        context.__exit__(None, None, None)


class Slow:
    """A run that takes until it is let go, and counts itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.go_on, self.stopped = 0, threading.Event(), threading.Event()
        self._run = block_runs.run
        monkeypatch.setattr("glassblock.operations.block_runs.run", self)

    def __call__(self, *arguments: Any, watch: Any) -> Any:
        self.count += 1
        try:
            while not self.go_on.wait(0.01):
                watch.at(0, 1, "waiting")
        except BaseException:
            self.stopped.set()
            raise
        return self._run(*arguments, watch=watch)


def test_the_same_request_at_the_same_time_is_computed_once(
    service: Callable[..., httpx.Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    http, slow = service(data=tmp_path / "data"), Slow(monkeypatch)
    stored: list[str] = []
    monkeypatch.setattr(StoredAnswers, "put", lambda _, key, __: stored.append(key.name))
    with ThreadPoolExecutor(5) as callers:
        calls = [callers.submit(http.post, "/v1/blocks/run", json=BODY) for _ in range(4)]
        time.sleep(0.3)
        other = callers.submit(http.post, "/v1/blocks/run", json={**BODY, "layer": 1})
        slow.go_on.set()
        answers = [call.result() for call in (*calls, other)]
    assert [answer.status_code for answer in answers] == [200] * 5
    assert slow.count == 2
    assert len({answer.content for answer in answers[:4]}) == 1
    assert len(stored) == len(set(stored)) <= 2, "each is stored once, whoever asked"


def test_a_full_line_is_503_and_hostile_bodies_do_not_stand_in_it(
    service: Callable[..., httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    http, slow = service(queue=1), Slow(monkeypatch)
    with ThreadPoolExecutor(2) as callers:
        first = callers.submit(http.post, "/v1/blocks/run", json=BODY)
        second = callers.submit(http.post, "/v1/blocks/run", json={**BODY, "layer": 1})
        deadline = time.monotonic() + 20
        while 'glassblock_line{lane="heavy",state="waiting"} 1.0' not in http.get("/metrics").text:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        refused = http.post("/v1/blocks/run", json={**BODY, "sample": {"rows": 3, "seed": 0}})
        assert (refused.status_code, refused.json()["code"]) == (503, "no-room")
        assert int(refused.headers["retry-after"]) >= 1
        assert (
            http.post("/v1/blocks/run", content=b"{", headers={"Content-Type": "application/json"}).status_code == 422
        )
        slow.go_on.set()
        assert (first.result().status_code, second.result().status_code) == (200, 200)


def test_a_deadline_is_kept_and_the_work_stopped(
    service: Callable[..., httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    http, slow = service(), Slow(monkeypatch)
    late = http.post("/v1/blocks/run", json=BODY, headers={"Prefer": "wait=1"})
    assert (late.status_code, late.json()["code"]) == (504, "service-unavailable")
    assert slow.stopped.wait(5)
    slow.go_on.set()
    met = http.post("/v1/blocks/run", json=BODY, headers={"Prefer": "handling=lenient, wait=30"})
    assert (met.status_code, met.headers["preference-applied"]) == (200, "wait=30")
    assert http.get("/v1/rules", headers={"Prefer": "wait=30"}).status_code == 200
    for wrong in ("wait=0", "wait=soon", "wait", "wait=9999999"):
        refused = http.post("/v1/blocks/run", json=BODY, headers={"Prefer": wrong})
        assert (refused.status_code, refused.json()["field"]) == (422, "Prefer")


def test_answers_have_tags_and_are_stored(
    service: Callable[..., httpx.Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    http, counted = service(data=data), Slow(monkeypatch)
    counted.go_on.set()
    first = http.post("/v1/blocks/run", json=BODY)
    tag = first.headers["etag"]
    assert http.post("/v1/blocks/run", json=BODY, headers={"If-None-Match": tag}).status_code == 304
    deadline = time.monotonic() + 20
    while not list((data / "answers").glob("*.answer")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    again = http.post("/v1/blocks/run", json=BODY)
    assert (again.content, again.headers["etag"], counted.count) == (first.content, tag, 1)
    as_tensors = {**BODY, "return_tensors": True}
    form = {"Accept": "application/x-safetensors"}
    sent = [http.post("/v1/blocks/run", json=as_tensors, headers=form).content for _ in range(2)]
    assert sent[0] == sent[1]
    restarted = service(data=data)
    assert restarted.post("/v1/blocks/run", json=BODY).content == first.content
    tiny_checkpoint("llama", tmp_path / "roots" / "model", seed=1)
    changed = http.post("/v1/blocks/run", json=BODY, headers={"If-None-Match": tag})
    assert (changed.status_code, changed.headers["etag"] == tag) == (200, False)
    sizes = {"d_model": 8, "d_ff": 32, "kind": "gated"}
    budget = http.post("/v1/budgets", json=sizes)
    held = {"If-None-Match": budget.headers["etag"]}
    assert http.post("/v1/budgets", json=sizes, headers=held).status_code == 304
    assert http.post("/v1/budgets", json=sizes, headers={"If-None-Match": "*"}).status_code == 200


def test_nothing_is_stored_without_a_folder(service: Callable[..., httpx.Client], tmp_path: Path) -> None:
    http = service()
    assert http.post("/v1/blocks/run", json=BODY).status_code == 200
    assert "glassblock_answers_bytes" not in http.get("/metrics").text
    assert sorted(item.name for item in tmp_path.iterdir()) == ["roots"]
