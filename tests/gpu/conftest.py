"""The same checkpoints behind two services, one on the CPU and one on the GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import torch
from glassblock.api.entry import connect
from glassblock_client import Client
from makers import USUAL, Tiny, tiny_checkpoint

GPU = "cuda:0"

# The widths of SmolLM2-135M, with random weights: sums as long as real ones.
WIDE = Tiny(hidden=576, intermediate=1536, layers=1, heads=9, kv_heads=3, head_dim=64, vocab=128)
# Few weights, and one row of input is 16384 hidden units long: the memory goes to the stages.
FLAT = Tiny(hidden=16, intermediate=16384, layers=1, heads=1, kv_heads=1, head_dim=16, vocab=8)


@pytest.fixture(scope="session", autouse=True)
def _a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roots")
    for family in USUAL:
        tiny_checkpoint(family, folder / family)
        tiny_checkpoint(family, folder / f"{family}-bfloat16", dtype=torch.bfloat16)
    tiny_checkpoint("llama", folder / "wide", tiny=WIDE)
    tiny_checkpoint("llama", folder / "flat", tiny=FLAT, dtype=torch.bfloat16)
    return folder


class Both(NamedTuple):
    """Clients of the two services. Not closed: their transports are shared."""

    cpu: Client
    gpu: Client


@pytest.fixture(scope="session")
def transports(root: Path) -> Iterator[tuple[httpx.BaseTransport, httpx.BaseTransport]]:
    with connect(roots=[root], device="cpu") as on_cpu, connect(roots=[root], device=GPU) as on_gpu:
        yield on_cpu, on_gpu


@pytest.fixture
def both(transports: tuple[httpx.BaseTransport, httpx.BaseTransport]) -> Both:
    return Both(*(Client("http://glassblock", transport=transport) for transport in transports))
