"""blocks/run on SmolLM2 with real hidden states: the numbers are those of the model's own modules in transformers."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from glassblock.wire.blocks import ALL_STAGES
from glassblock_client import Client, Overrides
from safetensors.numpy import load_file, save_file
from safetensors.torch import load, save
from torch import Tensor

from real.conftest import LAYERS, MASSIVE, Captured, capturing

pytestmark = pytest.mark.real

# Both sides sum 576 or 1536 products in float32, perhaps in another order: rounding, and no more.
ROUNDING = 2e-6
SAFETENSORS = "application/x-safetensors"
HiddenStates = dict[int, Captured]


def relative(found: Any, expected: Any) -> float:
    """Largest |difference| over largest |reference|."""
    found, expected = (np.asarray(side, dtype=np.float64) for side in (found, expected))
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("layout", ["single", "sharded"])
@pytest.mark.parametrize("layer", LAYERS)
def test_every_stage_in_float32(
    client: Client, smollm2: Any, hidden_states: HiddenStates, layer: int, layout: str
) -> None:
    expected = hidden_states[layer]
    run = client.run_block(getattr(smollm2, layout).name, layer, x=expected["x"].numpy(), return_tensors=True)
    assert set(run.tensors) == set(expected) == set(ALL_STAGES)
    errors = {stage: relative(run.tensors[stage], expected[stage]) for stage in ALL_STAGES}
    assert max(errors.values()) <= ROUNDING, errors
    assert run.answer.recombination_error is not None
    assert run.answer.recombination_error <= ROUNDING
    assert (run.answer.eps["input"].value, run.answer.activation.value) == (1e-5, "silu")
    assert run.answer.parameters == 3 * 1536 * 576


@pytest.mark.parametrize("layer", [*LAYERS, MASSIVE])
def test_one_token_alone(client: Client, smollm2: Any, hidden_states: HiddenStates, layer: int) -> None:
    """A single row takes another kernel than many: other sums, the same rounding."""
    expected = {stage: tensor[5:6] for stage, tensor in hidden_states[layer].items()}
    run = client.run_block(smollm2.single.name, layer, x=expected["x"].numpy(), return_tensors=True)
    errors = {stage: relative(run.tensors[stage], expected[stage]) for stage in ALL_STAGES}
    assert max(errors.values()) <= ROUNDING, errors


def test_both_layouts_give_the_same_bits(client: Client, smollm2: Any, hidden_states: HiddenStates) -> None:
    x = hidden_states[7]["x"].numpy()
    single, sharded = (client.run_block(path.name, 7, x=x, return_tensors=True).tensors for path in smollm2)
    assert all(np.array_equal(single[stage], sharded[stage]) for stage in ALL_STAGES)


@pytest.mark.parametrize("layer", [*LAYERS, MASSIVE])
def test_the_norm_in_bfloat16_has_the_bits_of_the_module(
    http: httpx.Client, smollm2: Any, model: Any, hidden_states: HiddenStates, layer: int
) -> None:
    x = hidden_states[layer]["x"].to(torch.bfloat16)
    norm = copy.deepcopy(model.model.layers[layer].post_attention_layernorm).to(torch.bfloat16)
    with torch.inference_mode():
        expected = norm(x)
    found = run_in_bfloat16(http, smollm2.single.name, layer, x, capture=("x", "normed"))
    assert_same_bits(found, {"x": x, "normed": expected})


@pytest.mark.parametrize("layer", [*LAYERS, MASSIVE])
def test_every_stage_in_bfloat16_has_the_bits_of_the_modules(
    http: httpx.Client, smollm2: Any, model: Any, hidden_states: HiddenStates, layer: int
) -> None:
    x = hidden_states[layer]["x"].to(torch.bfloat16)
    expected = replayed(copy.deepcopy(model.model.layers[layer]).to(torch.bfloat16), x)
    assert_same_bits(run_in_bfloat16(http, smollm2.single.name, layer, x, capture=ALL_STAGES), expected)


def run_in_bfloat16(
    http: httpx.Client, name: str, layer: int, x: Tensor, *, capture: tuple[str, ...]
) -> dict[str, Tensor]:
    message = {
        "checkpoint": name,
        "layer": layer,
        "capture": capture,
        "return_tensors": True,
        "dtype": "native",
        "overrides": {"dtype": "bfloat16"},
    }
    body = save({"x": x.contiguous()}, metadata={"request": json.dumps(message)})
    answer = http.post("/v1/blocks/run", content=body, headers={"Content-Type": SAFETENSORS, "Accept": SAFETENSORS})
    assert answer.status_code == 200, answer.text
    return load(answer.content)


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for stage, tensor in expected.items():
        assert found[stage].dtype == tensor.dtype == torch.bfloat16
        different = int((found[stage].view(torch.int16) != tensor.view(torch.int16)).sum())
        assert different == 0, f"{stage}: {different} of {tensor.numel()}"


def replayed(layer: Any, x: Tensor) -> dict[str, Tensor]:
    """The feed-forward half of a decoder layer, by its own modules; the residual add as the layer writes it."""
    with capturing({0: layer}) as captured, torch.inference_mode():
        stages = captured[0]
        stages["output"] = x + layer.mlp(layer.post_attention_layernorm(x))
    return stages


def exchange_gate_and_up(layer: Any) -> None:
    layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj


def set_eps(layer: Any) -> None:
    layer.post_attention_layernorm.variance_epsilon = 1e-6


class Change(NamedTuple):
    """One "what if", asked of the service and done to the module; how far it must move the output at the least."""

    overrides: Overrides
    apply: Callable[[Any], None]
    layer: int
    moves: float


# At layer 0 the rows' mean square is near 0.02, so that eps 1e-6 for 1e-5 moves the normed rows by up to
# 1e-5 / (2 * 0.01) = 5e-4, a hundred times what rounding does; in the deep layers nobody could see it.
CHANGES = {
    "swap in layer 0": Change(Overrides(swap=True), exchange_gate_and_up, 0, 1e-2),
    "swap in layer 7": Change(Overrides(swap=True), exchange_gate_and_up, 7, 1e-2),
    "swap in layer 29": Change(Overrides(swap=True), exchange_gate_and_up, 29, 1e-2),
    "eps 1e-6 in layer 0": Change(Overrides(eps=1e-6), set_eps, 0, 20 * ROUNDING),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_if_is_the_module_changed_in_the_same_way(
    client: Client, smollm2: Any, model: Any, hidden_states: HiddenStates, change: Change
) -> None:
    x = hidden_states[change.layer]["x"]
    layer = copy.deepcopy(model.model.layers[change.layer])
    change.apply(layer)
    expected = replayed(layer, x)
    if change.overrides.swap:  # the hooks follow the module's attributes: what is called gate_proj now is up_proj
        assert torch.equal(expected["gate"], hidden_states[change.layer]["up"])
    run = client.run_block(
        smollm2.single.name, change.layer, x=x.numpy(), overrides=change.overrides, return_tensors=True
    )
    errors = {stage: relative(run.tensors[stage], expected[stage]) for stage in ALL_STAGES}
    assert max(errors.values()) <= ROUNDING, errors
    assert relative(expected["down"], hidden_states[change.layer]["down"]) > change.moves


@pytest.mark.parametrize("layer", LAYERS)
def test_the_norm_after_the_residual_add(
    client: Client, smollm2: Any, model: Any, hidden_states: HiddenStates, layer: int
) -> None:
    x, block = hidden_states[layer]["x"], model.model.layers[layer]
    with torch.inference_mode():
        down = block.mlp(x)
        expected = {"down": down, "output": block.post_attention_layernorm(x + down)}
    run = client.run_block(
        smollm2.single.name, layer, x=x.numpy(), overrides=Overrides(placement="post"), return_tensors=True
    )
    assert "normed" not in run.tensors
    errors = {stage: relative(run.tensors[stage], expected[stage]) for stage in expected}
    assert max(errors.values()) <= ROUNDING, errors


def test_tokens_with_massive_activations(client: Client, smollm2: Any, hidden_states: HiddenStates) -> None:
    expected = hidden_states[MASSIVE]
    mean_square = expected["x"].double().square().mean(-1)
    assert mean_square.max() > 1e6
    assert mean_square.median() < 100
    run = client.run_block(smollm2.single.name, MASSIVE, x=expected["x"].numpy(), return_tensors=True)
    errors = {stage: relative(run.tensors[stage], expected[stage]) for stage in ALL_STAGES}
    assert max(errors.values()) <= ROUNDING, errors
    # One huge token must not hide what happens to the others: each row by its own scale, where a row is a sum of
    # 1536 products that partly cancel.
    rows = [relative(found, row) for found, row in zip(run.tensors["output"], expected["output"], strict=True)]
    assert max(rows) <= ROUNDING


ASK_FOR_ONE_BLOCK = """
import json, sys
from pathlib import Path
from glassblock.api.entry import connect
from glassblock_client import Client
from safetensors.numpy import load_file, save_file

root, name, layer, x, output = sys.argv[1:]

def read_so_far():  # every thread's reads, whatever function made them
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])

with connect(roots=[Path(root)], device="cpu") as transport, Client("http://glassblock", transport=transport) as client:
    x = load_file(x)["x"]
    before = read_so_far()
    run = client.run_block(name, int(layer), x=x, return_tensors=True)
    read = read_so_far() - before
mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".safetensors")]
save_file(dict(run.tensors), output)
json.dump({"read": read, "told": run.answer.read.bytes, "mapped": mapped}, sys.stdout)
"""


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts what a process reads")
def test_a_fresh_process_reads_the_bytes_of_one_block(
    smollm2: Any, hidden_states: HiddenStates, tmp_path: Path
) -> None:
    layer, x = 7, hidden_states[7]["x"]
    root = tmp_path / "root"
    block = copy_of_one_block(smollm2.sharded, root / "hollow", layer)
    save_file({"x": x.numpy()}, tmp_path / "x.safetensors")
    arguments = [str(root), "hollow", str(layer), str(tmp_path / "x.safetensors"), str(tmp_path / "out.safetensors")]
    child = subprocess.run(
        [sys.executable, "-c", ASK_FOR_ONE_BLOCK, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert child.returncode == 0, child.stderr
    told = json.loads(child.stdout)

    found = load_file(tmp_path / "out.safetensors")
    errors = {stage: relative(found[stage], hidden_states[layer][stage]) for stage in ALL_STAGES}
    assert max(errors.values()) <= ROUNDING, errors

    assert block == (3 * 1536 * 576 + 576) * 2
    assert told["told"] == block
    headers = sum(8 + header_length(shard) for shard in smollm2.sharded.glob("*.safetensors"))
    small = sum((smollm2.sharded / name).stat().st_size for name in ("config.json", "model.safetensors.index.json"))
    # Beside tensors, headers, config and index: the counter's own file, wake-ups of the event loop, a module that
    # Python imports late. Measured 4,277 bytes; the smallest weight of another layer that could hide there has 221,184.
    assert block <= told["read"] <= block + headers + small + 32 * 1024
    assert told["mapped"] == []


def copy_of_one_block(source: Path, target: Path, layer: int) -> int:
    """The checkpoint with all headers, and of its data one feed-forward block alone: the rest of the files is holes.

    Returns the bytes of that block.
    """
    target.mkdir(parents=True)
    for name in ("config.json", "model.safetensors.index.json"):
        (target / name).write_bytes((source / name).read_bytes())
    wanted = (f"model.layers.{layer}.mlp.", f"model.layers.{layer}.post_attention_layernorm.")
    copied = 0
    for shard in source.glob("*.safetensors"):
        start = 8 + header_length(shard)
        with shard.open("rb") as original, (target / shard.name).open("wb") as hollow:
            head = original.read(start)
            hollow.write(head)
            for name, entry in json.loads(head[8:]).items():
                if name.startswith(wanted):
                    first, last = entry["data_offsets"]
                    original.seek(start + first)
                    hollow.seek(start + first)
                    copied += hollow.write(original.read(last - first))
            hollow.truncate(shard.stat().st_size)
    return copied


def header_length(shard: Path) -> int:
    with shard.open("rb") as file:
        return int.from_bytes(file.read(8), "little")
