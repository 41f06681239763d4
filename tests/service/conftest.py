"""A service over a folder of tiny checkpoints, one of every family."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from glassblock.api.entry import connect
from glassblock_client import Client
from makers import USUAL, tiny_checkpoint


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roots")
    for family in USUAL:
        tiny_checkpoint(family, folder / family)
    tiny_checkpoint("llama", folder / "sharded", shards=3)
    return folder


@pytest.fixture(scope="session")
def transport(root: Path) -> Iterator[httpx.BaseTransport]:
    with connect(roots=[root], device="cpu") as transport:
        yield transport


@pytest.fixture
def http(transport: httpx.BaseTransport) -> httpx.Client:
    """Bare HTTP, for what a typed client would never send. Not closed: the transport is shared."""
    return httpx.Client(base_url="http://glassblock", transport=transport)


@pytest.fixture
def client(transport: httpx.BaseTransport) -> Client:
    return Client("http://glassblock", transport=transport)
