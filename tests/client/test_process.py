"""The command line as a process of its own: streams that are closed or full, and Ctrl-C under work that goes on."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from reports.report_makers import swapped_report

from client.fake_service import FakeService, finished_audit, listening

MAIN = "from glassblock_client.cli import main; main()"
PROMPTLY_S = 10.0  # one second of grace, and what a busy machine adds; the work that it must not wait for takes 60


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A service whose every audit ends with a finding: status 1."""
    with listening(FakeService({"POST /v1/audits": finished_audit(swapped_report(2))})) as url:
        yield url


def in_shell(*words: str, streams: str) -> subprocess.CompletedProcess[str]:
    """`glassblock WORDS STREAMS`, redirected by a real shell."""
    command = shlex.join([sys.executable, "-c", MAIN, *words])
    return subprocess.run(
        ["/bin/sh", "-c", f"{command} {streams}"], capture_output=True, text=True, check=False, env=environment()
    )


def environment() -> dict[str, str]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("GLASSBLOCK_")}
    return outside | {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize("streams", ["2>&-", ">&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full", "2</dev/null 2>&-"])
@pytest.mark.parametrize("words", [("audit", "/nope"), ("audit", "--nope"), ("audit", "")])
def test_a_stream_that_takes_nothing_leaves_the_status_of_a_refusal(words: tuple[str, ...], streams: str) -> None:
    process = in_shell(*words, streams=streams)
    assert process.returncode == 2
    assert "Traceback" not in process.stderr
    assert "defect" not in process.stderr


@pytest.mark.parametrize("streams", ["2>&-", ">&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_a_closed_stream_leaves_the_status_of_the_verdict(url: str, streams: str) -> None:
    process = in_shell("audit", "x", "--url", url, streams=streams)
    assert process.returncode == 1
    assert process.stderr == ""


@pytest.mark.parametrize("words", ["audit x --url {url}", "--version", "--help", "audit --help"])
def test_an_answer_that_cannot_be_written_is_one_line_and_no_verdict(url: str, words: str) -> None:
    process = in_shell(*words.format(url=url).split(), streams=">/dev/full")
    assert process.returncode == 2
    assert process.stderr == "error: output: No space left on device\n"


def test_a_closed_stream_is_not_taken_by_the_next_file(url: str, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    options = ("--format", "json", "--output", str(target))
    process = in_shell("audit", "x", "--url", url, *options, streams=">&- 2>&-")
    assert process.returncode == 1
    assert target.read_text().startswith("{")
    assert target.read_text().rstrip().endswith("}")


@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGINT, (130, "interrupted\n")), (signal.SIGTERM, (143, "terminated\n"))]
)
@pytest.mark.parametrize("again", [0, 2])
def test_a_signal_does_not_wait_for_work_that_cannot_be_interrupted(
    number: signal.Signals, ends: tuple[int, str], again: int, tmp_path: Path
) -> None:
    script = (
        "import threading, time, httpx\n"
        "from contextlib import contextmanager\n"
        "from glassblock_client.cli import app\n"
        "done = threading.Event()\n"
        "work = threading.Thread(target=lambda: (time.sleep(60), done.set()))\n"
        "def answer(request):\n"
        "    work.start()\n"
        "    print('working', flush=True)\n"
        "    done.wait()\n"
        "@contextmanager\n"
        "def connect(**_):\n"
        "    try:\n"
        "        yield httpx.MockTransport(answer)\n"
        "    finally:\n"
        "        done.wait()\n"
        "app(obj=connect)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, "run", str(tmp_path), "--layer", "0", "--sample", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        interrupted = time.monotonic()
        process.send_signal(number)
        for _ in range(again):
            time.sleep(0.2)
            process.send_signal(number)
        try:
            _, told = process.communicate(timeout=PROMPTLY_S)
        finally:
            process.kill()
    assert time.monotonic() - interrupted < PROMPTLY_S
    assert (process.returncode, told) == ends


def test_a_terminated_process_leaves_no_scratch_files(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    script = (
        "import time, httpx\n"
        "from contextlib import contextmanager\n"
        "from tempfile import TemporaryDirectory\n"
        "from glassblock_client.cli import app\n"
        "def answer(request):\n"
        "    print('working', flush=True)\n"
        "    time.sleep(60)\n"
        "@contextmanager\n"
        "def connect(**_):\n"
        "    with TemporaryDirectory():\n"
        "        yield httpx.MockTransport(answer)\n"
        "app(obj=connect)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, "run", str(tmp_path), "--layer", "0", "--sample", "1"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment() | {"TMPDIR": str(scratch)},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        assert list(scratch.iterdir()) != []
        process.terminate()
        assert process.wait(PROMPTLY_S) == 143
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("words", [("fix", "--dry-run"), ("selftest",)])
def test_what_works_without_a_client_is_put_away_too(
    number: signal.Signals, words: tuple[str, ...], tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    script = (
        "import time\n"
        "from tempfile import TemporaryDirectory\n"
        "from types import SimpleNamespace\n"
        "from glassblock_client.cli import app, fix, selftest\n"
        "def work(*_, **__):\n"
        "    with TemporaryDirectory():\n"
        "        print('working', flush=True)\n"
        "        time.sleep(60)\n"
        "fix.door = selftest.door = lambda: SimpleNamespace(repair=work, selftest=work)\n"
        "app()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, words[0], str(tmp_path), *words[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | {"TMPDIR": str(scratch)},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        assert list(scratch.iterdir()) != []
        process.send_signal(number)
        _, told = process.communicate(timeout=PROMPTLY_S)
    ends = (130, "interrupted\n") if number == signal.SIGINT else (143, "terminated\n")
    assert (process.returncode, told) == ends
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("target", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_a_report_may_go_into_a_stream_by_its_name(url: str, target: str) -> None:
    process = in_shell("audit", "x", "--url", url, "--format", "json", "--output", target, streams="| cat")
    assert process.stderr == f"fail: the report is in {target}\n"
    assert process.stdout.startswith("{")
    assert process.stdout.rstrip().endswith("}")
