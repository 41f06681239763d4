"""SmolLM2 run by transformers over a paragraph of English, with every stage of four feed-forward blocks captured."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch
from glassblock.api.entry import connect
from glassblock_client import Client
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import Module

LAYERS = (0, 7, 29)
# The first token of the paragraph becomes a thousand times larger in layer 11 than its neighbours, and stays so.
MASSIVE = 12

PARAGRAPH = (
    "Two, three and sometimes four ferries a day cross the strait between the island and the mainland, and in winter "
    "the last of them leaves before it is dark. The schoolteacher, who had lived there for nineteen years, kept a "
    'record of every storm in a green notebook: wind, height of the waves, hours without electricity. "Nobody will '
    'ever read this," she told her sister, "but somebody has to write it down." When the council asked in 2014 '
    "whether the harbour wall should be raised by 1.5 metres, hers were the only measurements that anyone could find."
)

Captured = dict[str, Tensor]


@pytest.fixture(scope="session")
def model(smollm2: Any) -> Any:
    """The whole model in float32, as transformers loads it."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  seconds, and only for the tests here
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(str(smollm2.single), dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def hidden_states(smollm2: Any, model: Any) -> dict[int, Captured]:
    """Per layer the stages `[tokens, width]`, hooked in one forward pass of the whole model."""
    tokens = Tokenizer.from_file(str(smollm2.single / "tokenizer.json")).encode(PARAGRAPH).ids
    blocks = model.model.layers
    with capturing({n: blocks[n] for n in (*LAYERS, MASSIVE)}) as captured, torch.inference_mode():
        model(torch.tensor([tokens]))
    return {n: {stage: tensor[0] for stage, tensor in stages.items()} for n, stages in captured.items()}


@contextmanager
def capturing(layers: dict[int, Any]) -> Generator[dict[int, Captured]]:
    """Hooks on decoder layers of transformers' Llama, under the names that the stages have here."""
    captured: dict[int, Captured] = {n: {} for n in layers}
    handles: list[Any] = []

    def note(stages: Captured, stage: str) -> Callable[[Module, Any, Tensor], None]:
        def hook(_module: Module, _inputs: Any, output: Tensor) -> None:
            stages[stage] = output

        return hook

    def note_input(stages: Captured, stage: str) -> Callable[[Module, Any], None]:
        def hook(_module: Module, inputs: Any) -> None:
            stages[stage] = inputs[0]

        return hook

    for n, layer in layers.items():
        entered: list[tuple[Module, str]] = [(layer.post_attention_layernorm, "x"), (layer.mlp.down_proj, "hidden")]
        left: list[tuple[Module, str]] = [
            (layer.post_attention_layernorm, "normed"),
            (layer.mlp.gate_proj, "gate"),
            (layer.mlp.up_proj, "up"),
            (layer.mlp.act_fn, "activated"),
            (layer.mlp, "down"),
            (layer.mlp, "contribution"),
            (layer, "output"),
        ]
        handles += [module.register_forward_pre_hook(note_input(captured[n], stage)) for module, stage in entered]
        handles += [module.register_forward_hook(note(captured[n], stage)) for module, stage in left]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


@pytest.fixture(scope="session")
def transport(smollm2: Any) -> Iterator[httpx.BaseTransport]:
    assert smollm2.single.parent == smollm2.sharded.parent
    with connect(roots=[smollm2.single.parent], device="cpu") as transport:
        yield transport


@pytest.fixture
def http(transport: httpx.BaseTransport) -> httpx.Client:
    """Bare HTTP, for bfloat16 as it travels. Not closed: the transport is shared."""
    return httpx.Client(base_url="http://glassblock", transport=transport)


@pytest.fixture
def client(transport: httpx.BaseTransport) -> Client:
    return Client("http://glassblock", transport=transport)
