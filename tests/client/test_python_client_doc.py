"""docs/python-client.md: its code runs from top to bottom against a service behind a real socket."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import uvicorn
from glassblock.api.app import create_app
from glassblock.api.settings import Settings
from glassblock.wire.audits import ENDED, JobState
from makers import tiny_checkpoint

DOC = (Path(__file__).parents[2] / "docs" / "python-client.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
WRITTEN = "http://127.0.0.1:8080"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("models")
    tiny_checkpoint("llama", root / "llama")
    app = create_app(Settings(roots=(root,), device="cpu"))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the service did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def test_the_code_runs_as_it_stands(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(BLOCKS) > 8
    names: dict[str, Any] = {}
    told: list[str] = []
    for number, block in enumerate(BLOCKS):
        exec(compile(block.replace(WRITTEN, url), f"block {number} of python-client.md", "exec"), names)
        told.append(capsys.readouterr().out)
    printed = "".join(told)
    assert WRITTEN in DOC
    assert "{'swap': True}" in printed
    assert "bfloat16 float32" in printed
    assert "invalid-value layer" in printed
    assert "absent" in printed
    assert names["report"].checkpoint.path == "llama"
    assert names["page"].startswith("<!doctype html>")
    assert [layer.layer for layer in names["answer"].layers] == [0]


def test_what_the_page_says_of_defaults_is_so() -> None:
    import inspect  # noqa: PLC0415

    from glassblock_client import AsyncClient, Client  # noqa: PLC0415

    waiting = {state for states in re.findall(r"state in \{(.*?)\}", DOC) for state in re.findall(r'"(\w+)"', states)}
    assert waiting == set(get_args(JobState)) - ENDED
    for kind in (Client, AsyncClient):
        assert inspect.signature(kind).parameters["timeout"].default == 60.0
        for name in re.findall(r"`(as_job|start_job|audit_checkpoint|audit_events|cancel_audit|audits|ask)`", DOC):
            assert callable(getattr(kind, name))
