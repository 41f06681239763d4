"""No memory: what can never fit is told before it begins, a lack met later too, and the service goes on."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from glassblock.audit import gate_study
from glassblock.errors import NoRoom
from glassblock_client import Client, Sample
from makers import Tiny, tiny_checkpoint
from safetensors.torch import save

# Few weights, and one row of two numbers becomes four million hidden ones.
FLAT = Tiny(hidden=2, intermediate=2**22, layers=1, heads=1, kv_heads=1, head_dim=2, vocab=4)


def test_a_batch_larger_than_any_memory_is_refused_before_it_begins(
    http: httpx.Client, client: Client, root: Path
) -> None:
    tiny_checkpoint("llama", root / "flat", tiny=FLAT, dtype=torch.bfloat16)
    # The gate alone would take 2^47 bytes, all that an address can name: refused whatever the machine promises.
    x = torch.ones(2**23, 2).to(torch.float8_e4m3fn)
    body = save({"x": x}, metadata={"request": json.dumps({"checkpoint": "flat", "layer": 0})})
    answer = http.post("/v1/blocks/run", content=body, headers={"Content-Type": "application/x-safetensors"})
    assert answer.status_code == 413, answer.text
    assert answer.json()["code"] == "too-large"
    assert "estimated" in answer.json()["detail"]
    assert client.run_block("llama", 0, x=np.ones((1, 48), np.float32)).answer.stages


def test_the_devices_own_word_for_it(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr("glassblock.operations.block_runs.run_block", out_of_memory)
        with pytest.raises(NoRoom) as refused:
            client.run_block("llama", 0, sample=Sample(rows=1))
    assert refused.value.retry_after is not None
    assert client.run_block("llama", 0, sample=Sample(rows=1)).answer.stages


def test_an_audit_that_failed_lets_go_of_its_tensors(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is remembered, and so is its error: with it, not the weights that it was looking at."""
    held: list[weakref.ref[torch.Tensor]] = []

    def out_of_memory_with(*weights: torch.Tensor, **_: Any) -> Any:
        held.extend(weakref.ref(weight) for weight in weights)
        out_of_memory()

    monkeypatch.setattr(gate_study, "gate_up_evidence", out_of_memory_with)
    with pytest.raises(NoRoom):
        client.audit_checkpoint("llama", certify=True)
    gc.collect()
    assert client.audits().audits[0].state == "failed"
    assert len(held) == 3
    assert [tensor() is None for tensor in held] == [True, True, True]


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory.")
