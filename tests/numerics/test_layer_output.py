"""The stream that leaves a layer without its stages is the one that leaves it with them, bit for bit."""

from typing import Any

import pytest
import torch
from glassblock.numerics.layer import layer_output, run_layer

from numerics.layer_makers import DECODERS, State, tiny_model


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_output_is_that_of_the_run_with_stages(name: str, dtype: torch.dtype) -> None:
    decoder = DECODERS[name]
    model: Any = tiny_model(decoder)
    state = dict(model.state_dict())
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0))
    for i in range(2):
        layer = decoder.make(State(state, decoder.prefix.format(i=i)), model.config, i)
        whole = run_layer(x, layer, positions=torch.arange(9), dtype=dtype)
        assert torch.equal(layer_output(x, layer, positions=torch.arange(9), dtype=dtype), whole.output)
