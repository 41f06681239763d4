"""A service that is killed, stopped and asked from the command line, as processes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from glassblock.wire.keys import key_line, new_key
from glassblock_client import Client
from glassblock_client.cli import app
from typer.testing import CliRunner

EXAMPLES = Path(__file__).parents[2] / "examples"
STOP_S = 20.0
SLOW = (  # an audit that takes its time, and asks all along whether to stop
    "import time\n"
    "from glassblock.operations.operations import Operations\n"
    "real = Operations.audit\n"
    "def slow(self, request, *, progress, cancelled, **more):\n"
    "    from glassblock.operations.audits import AuditStopped\n"
    "    for step in range(int(request.against_name)):\n"
    "        progress(step, 1000, f'layer {step}')\n"
    "        time.sleep(0.02)\n"
    "        if cancelled():\n"
    "            raise AuditStopped\n"
    "    return real(self, request, progress=progress, cancelled=cancelled, **more)\n"
    "Operations.audit = slow\n"
)
MAIN = "from glassblock_client.cli import main; main()"


@contextmanager
def serving(folder: Path, **settings: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("GLASSBLOCK_")}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW + MAIN, "serve", "--port", "0", "--device", "cpu", "--checkpoints", str(EXAMPLES)],
        stderr=subprocess.PIPE,
        text=True,
        env=outside
        | {"PYTHONPATH": os.pathsep.join(sys.path), "GLASSBLOCK_DATA": str(folder), "GLASSBLOCK_LEASE_SECONDS": "2"}
        | settings,
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        listens = re.search(r"http://[0-9.:]+", line)
        assert listens is not None, line + process.stderr.read()
        yield process, listens[0]
    finally:
        process.kill()
        process.communicate()


def start(client: Client, steps: int) -> str:
    return client.start_audit("tiny-llama", against={"rms_norm_eps": 1e-5}, against_name=str(steps)).id


def until(client: Client, audit: str, *states: str) -> Any:
    deadline = time.monotonic() + 60
    while (found := client.audit(audit)).state not in states:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def test_a_job_outlives_kill_and_stop_and_its_followers_are_let_go(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, url), Client(url) as client:
        audit = start(client, 50)
        until(client, audit, "running")
        process.kill()
        process.wait()
    with serving(tmp_path) as (process, url), Client(url) as client:
        assert client.audit(audit).state == "running", "what the dead worker left, until its lease lapses"
        ended = until(client, audit, "succeeded")
        assert (ended.attempts, ended.report.checkpoint.path) == (2, "tiny-llama")
        long = start(client, 100_000)
        until(client, long, "running")
        states: list[str] = []
        follower = threading.Thread(target=_follow, args=(url, long, states))
        follower.start()
        deadline = time.monotonic() + 10
        while not states:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        told = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0
        assert time.monotonic() - told < 10, "it waited for the audit or for its follower"
        follower.join(10)
        assert not follower.is_alive()
    with serving(tmp_path) as (_, url), Client(url) as client:
        running = until(client, long, "running")
        assert running.attempts == 1, "the job was handed back"
        assert client.cancel_audit(long).state == "cancelled"
        after = start(client, 0)
        until(client, after, "succeeded")


def _follow(url: str, audit: str, states: list[str]) -> None:
    with httpx.stream("GET", f"{url}/v1/audits/{audit}/events", timeout=30) as response:
        try:
            for line in response.iter_lines():
                states += [line]
        except httpx.HTTPError:
            states.append("cut")


def test_the_command_line_lists_follows_and_cancels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, look, keys = new_key(), new_key(), tmp_path / "keys"
    keys.write_text(key_line("ci", "run", key) + "\n" + key_line("eyes", "read", look) + "\n")
    log = tmp_path / "access"
    with serving(tmp_path / "data", GLASSBLOCK_KEYS_FILE=str(keys), GLASSBLOCK_ACCESS_LOG=str(log)) as (_, url):
        monkeypatch.setenv("GLASSBLOCK_KEY", key)
        monkeypatch.setenv("GLASSBLOCK_URL", url)
        with Client(url, api_key=key) as client:
            short, long = start(client, 5), start(client, 100_000)
        run = CliRunner()
        followed = run.invoke(app, ["audits", "--follow", short])
        assert followed.exit_code == 0, followed.output
        assert "tiny-llama" in followed.stdout
        events = run.invoke(app, ["audits", "--follow", short, "--format", "json"])
        assert [json.loads(line)["state"] for line in events.stdout.splitlines()][-1] == "succeeded"
        cancelled = run.invoke(app, ["audits", "--cancel", long])
        assert cancelled.exit_code == 0
        assert "cancelled" in cancelled.stdout
        listed = run.invoke(app, ["audits", "--format", "json"])
        assert [audit["id"] for audit in json.loads(listed.stdout)["audits"]] == [long, short]
        only = run.invoke(app, ["audits", "--state", "succeeded", "--since", "2020-01-01"])
        assert short in only.stdout
        assert long not in only.stdout
        monkeypatch.setenv("GLASSBLOCK_KEY", look)
        refused = run.invoke(app, ["audits", "--cancel", short])
        assert refused.exit_code == 2
        assert "needs a key of scope 'run'" in refused.stderr
        oversize = httpx.get(f"{url}/v1", headers={"X-Padding": "x" * 70_000})
        assert oversize.status_code in {400, 431}, "as it comes in one piece or in several"
    assert key not in log.read_text()
    assert {json.loads(line)["caller"] for line in log.read_text().splitlines()} - {""} == {"ci", "eyes"}


def test_without_a_service_there_is_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLASSBLOCK_URL", raising=False)
    refused = CliRunner().invoke(app, ["audits"])
    assert refused.exit_code == 2
    assert "--url" in refused.stderr


def test_a_key_is_printed_once_and_its_line_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    made = [CliRunner().invoke(app, ["keys", name, "--file", str(file)]) for name in ("one", "two", "one")]
    assert [one.exit_code for one in made] == [0, 0, 2]
    assert made[0].stdout.startswith("gb_")
    assert made[0].stdout.strip() not in file.read_text()
    assert len(file.read_text().splitlines()) == 2
    assert file.stat().st_mode & 0o077 == 0
    (tmp_path / "other").write_bytes(b"\xff\xfe")
    refused = CliRunner().invoke(app, ["keys", "one", "--file", str(tmp_path / "other")])
    assert refused.exit_code == 2
    assert "holds no text in UTF-8" in refused.stderr
