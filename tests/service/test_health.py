"""Health: alive whatever else, ready only when the device and the roots are."""

import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from glassblock.api.desk import JOBS_THREADS
from glassblock.api.entry import connect
from glassblock.api.settings import Settings
from glassblock.errors import InvalidValue
from glassblock.jobs.database import FILE
from glassblock_client import Client
from makers import tiny_checkpoint
from served import served


def test_alive_and_ready(http: httpx.Client) -> None:
    assert http.get("/health/live").json() == {"status": "alive", "checks": {}}
    ready = http.get("/health/ready").json()
    assert ready["status"] == "ready"
    assert ready["checks"]["device"] == "ok: cpu"


def test_not_ready_without_its_root_but_alive(tmp_path: Path) -> None:
    root = tmp_path / "models"
    root.mkdir()
    with (
        connect(roots=[root], device="cpu") as transport,
        httpx.Client(transport=transport, base_url="http://g") as http,
    ):
        assert http.get("/health/ready").status_code == 200
        root.rmdir()
        answer = http.get("/health/ready")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        assert "root 0" in answer.json()["detail"]
        assert http.get("/health/live").status_code == 200


@pytest.mark.long
def test_readiness_does_not_wait_behind_those_who_wait_for_the_database(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path / "roots" / "llama")
    data = tmp_path / "data"
    with (
        served(tmp_path / "roots", GLASSBLOCK_DATA=str(data)) as service,
        closing(sqlite3.connect(data / FILE, isolation_level=None)) as database,
        ThreadPoolExecutor(2 * JOBS_THREADS) as callers,
    ):
        database.execute("BEGIN IMMEDIATE")
        asked = {"json": {"checkpoint": "llama"}, "timeout": 60}
        waiting = [callers.submit(httpx.post, f"{service.url}/v1/audits", **asked) for _ in range(2 * JOBS_THREADS)]
        time.sleep(1)  # until they wait
        ready = httpx.get(f"{service.url}/health/ready", timeout=60)
        assert ready.status_code == 200
        assert not any(one.done() for one in waiting), "it waited until the others had given up"
        database.execute("ROLLBACK")


def test_capabilities_name_every_endpoint(client: Client) -> None:
    capabilities = client.capabilities()
    assert "POST /v1/blocks/run" in capabilities.endpoints
    assert capabilities.device == "cpu"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org"])
def test_an_open_address_is_refused_unless_told(host: str) -> None:
    with pytest.raises(InvalidValue, match="refusing to listen") as refused:
        Settings(host=host).refuse_open_address()
    assert refused.value.field == "host"
    Settings(host=host, allow_open=True).refuse_open_address()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_needs_no_leave(host: str) -> None:
    Settings(host=host).refuse_open_address()


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GLASSBLOCK_ROOTS", f"{tmp_path}:{tmp_path / 'more'}")
    monkeypatch.setenv("GLASSBLOCK_PORT", "9000")
    monkeypatch.setenv("GLASSBLOCK_ALLOW_OPEN", "1")
    settings = Settings()
    assert settings.roots == (tmp_path, tmp_path / "more")
    assert (settings.port, settings.allow_open) == (9000, True)


def test_an_absent_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="cuda:99") as refused, connect(roots=[tmp_path], device="cuda:99"):
        pass
    assert "cpu" in refused.value.known
