"""blocks/run: the answer is the mathematics, whatever way it travels."""

import json
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.wire.blocks import ALL_STAGES
from glassblock_client import Client, Overrides, Sample
from makers import USUAL, tiny_checkpoint
from safetensors import safe_open
from safetensors.numpy import load, save
from safetensors.torch import save as save_torch


def rows(count: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 48), dtype=np.float32)


@pytest.mark.parametrize("family", USUAL)
def test_every_family_runs_and_recombines(client: Client, family: str) -> None:
    run = client.run_block(family, 1, x=rows(), return_tensors=True)
    assert run.answer.family == family
    assert run.answer.recombination_error is not None
    # float32 sums of a few hundred terms, recomputed in float64
    assert run.answer.recombination_error < 2e-6
    absent = {note.partition(":")[0] for note in run.answer.notes}
    assert set(run.tensors) == set(ALL_STAGES) - absent
    for name, statistics in run.answer.stages.items():
        tensor = run.tensors[name].astype(np.float64)
        assert statistics.shape == tensor.shape
        assert statistics.rms == pytest.approx(np.sqrt(np.mean(tensor**2)))
        assert statistics.mean == pytest.approx(tensor.mean())
        assert (statistics.min, statistics.max) == (tensor.min(), tensor.max())
        assert (statistics.non_finite, statistics.fp16_overflow) == (0, False)


def test_json_and_safetensors_give_the_same_numbers(http: httpx.Client) -> None:
    x = rows()
    message = {"checkpoint": "llama", "layer": 0, "return_tensors": True}
    as_json = http.post("/v1/blocks/run", json={**message, "x": x.tolist()}).json()
    body = save({"x": x}, metadata={"request": json.dumps(message)})
    kind = "application/x-safetensors"
    framed = http.post("/v1/blocks/run", content=body, headers={"Content-Type": kind, "Accept": kind})
    assert framed.headers["content-type"] == kind
    tensors = load(framed.content)
    assert set(tensors) == set(as_json["tensors"])
    for name, tensor in tensors.items():
        assert np.array_equal(tensor, np.asarray(as_json["tensors"][name], np.float32)), name


def test_only_the_bytes_of_one_layer_are_read(client: Client, root: Path) -> None:
    run = client.run_block("sharded", 1, x=rows(1))
    wanted = {
        f"model.layers.1.{name}.weight"
        for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm")
    }
    sizes = 0
    for shard in (root / "sharded").glob("*.safetensors"):
        with safe_open(shard, "np") as file:
            sizes += sum(file.get_tensor(name).nbytes for name in wanted & set(file.keys()))
    assert run.answer.read.bytes == sizes
    assert run.answer.read.tensors == len(wanted)


def test_swap_exchanges_the_branches(client: Client) -> None:
    x = rows()
    plain = client.run_block("llama", 0, x=x, return_tensors=True).tensors
    swapped = client.run_block("llama", 0, x=x, return_tensors=True, overrides=Overrides(swap=True)).tensors
    assert np.array_equal(plain["gate"], swapped["up"])
    assert np.array_equal(plain["up"], swapped["gate"])
    assert np.abs(plain["down"] - swapped["down"]).max() > 1e-3


def test_overrides_change_what_they_name_and_say_so(client: Client) -> None:
    x = rows()
    run = client.run_block("llama", 0, x=x, overrides=Overrides(eps=0.5, activation="gelu", width=10))
    assert run.answer.eps["input"].value == 0.5
    assert run.answer.eps["input"].source == "override"
    assert (run.answer.activation.value, run.answer.activation.source) == ("gelu", "override")
    assert run.answer.stages["hidden"].shape == (5, 10)
    assert run.answer.hidden_elements == 50
    assert run.answer.parameters == 3 * 10 * 48


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "parallel", "branch-output"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2", "gpt2"])
def test_every_family_can_be_wired_every_way(client: Client, family: str, placement: str) -> None:
    run = client.run_block(family, 0, x=rows(), overrides=Overrides(placement=placement))  # pyright: ignore[reportArgumentType]
    assert run.answer.placement == placement
    assert run.answer.recombination_error is not None
    assert run.answer.recombination_error < 2e-6


@pytest.mark.parametrize("part", ["ffn", "layer"])
def test_an_answer_repeats_what_was_changed_and_nothing_else(client: Client, http: httpx.Client, part: str) -> None:
    message = {"checkpoint": "llama", "layer": 0, "part": part, "x": [[0.5] * 48]}
    changes = {"swap": True, "eps": 1e-3, "norm_offset": 0.0, "dtype": "float64"}
    told = http.post("/v1/blocks/run", json=message | {"overrides": changes | {"width": None}}).json()
    assert told["overrides"] == changes
    assert http.post("/v1/blocks/run", json=message | {"overrides": {"swap": False}}).json()["overrides"] == {}
    assert client.run_block("llama", 0, x=np.ones((1, 48)), part="ffn").answer.overrides == {}


def test_post_is_the_norm_of_the_sum(client: Client) -> None:
    x = rows()
    run = client.run_block(
        "llama", 0, x=x, return_tensors=True, overrides=Overrides(placement="post", norm_kind="rms_noweight")
    )
    total = (run.tensors["x"] + run.tensors["contribution"]).astype(np.float64)
    expected = total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-5)
    assert np.abs(run.tensors["output"] - expected).max() < 1e-6


def test_native_types_come_back_as_computed(client: Client, http: httpx.Client) -> None:
    message = {
        "checkpoint": "llama",
        "layer": 0,
        "return_tensors": True,
        "dtype": "native",
        "overrides": {"dtype": "bfloat16"},
    }
    body = save({"x": rows()}, metadata={"request": json.dumps(message)})
    kind = "application/x-safetensors"
    answer = http.post("/v1/blocks/run", content=body, headers={"Content-Type": kind, "Accept": kind})
    header = json.loads(answer.content[8 : 8 + int.from_bytes(answer.content[:8], "little")])
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"BF16"}
    assert json.loads(header["__metadata__"]["response"])["compute_dtype"] == "bfloat16"


def test_a_float64_request_stays_exact(client: Client) -> None:
    run = client.run_block(
        "llama",
        0,
        x=rows().astype(np.float64),
        return_tensors=True,
        dtype="native",
        overrides=Overrides(dtype="float64"),
    )
    assert run.tensors["output"].dtype == np.float64
    assert run.answer.recombination_error is not None
    assert run.answer.recombination_error < 1e-14


def test_nothing_but_the_norm_is_computed_when_nothing_else_is_asked_for(client: Client) -> None:
    run = client.run_block("llama", 0, x=rows(), capture=("x", "normed"))
    assert set(run.answer.stages) == {"x", "normed"}
    assert run.answer.recombination_error is None


def test_a_stage_that_overflows_float16_is_told(client: Client) -> None:
    run = client.run_block("olmo2", 0, x=rows() * 3e4)
    assert run.answer.stages["x"].fp16_overflow
    assert not run.answer.stages["contribution"].fp16_overflow


def test_a_sample_is_rows_of_the_embedding(client: Client, root: Path) -> None:
    run = client.run_block("gemma3", 0, sample=Sample(rows=7, seed=3), capture=("x",), return_tensors=True)
    again = client.run_block("gemma3", 0, sample=Sample(rows=7, seed=3), capture=("x",), return_tensors=True)
    other = client.run_block("gemma3", 0, sample=Sample(rows=7, seed=4), capture=("x",), return_tensors=True)
    with safe_open(root / "gemma3" / "model.safetensors", "np") as file:
        embedding = file.get_tensor("model.embed_tokens.weight") * np.float32(np.sqrt(np.float32(48)))
    assert np.array_equal(run.tensors["x"], again.tensors["x"])
    assert not np.array_equal(run.tensors["x"], other.tensors["x"])
    assert all((np.abs(embedding - row).max(-1) < 1e-6).any() for row in run.tensors["x"])


def test_an_eps_from_a_default_says_so(client: Client, root: Path) -> None:
    tiny_checkpoint("llama", root / "no-eps", config={"rms_norm_eps": ...})
    eps = client.run_block("no-eps", 0, x=rows()).answer.eps["input"]
    assert eps.value == 1e-6
    assert "default of family llama" in eps.source


def test_pinned_blocks_are_not_read_again(client: Client, root: Path) -> None:
    tiny_checkpoint("llama", root / "pinned")
    held = client.pin("pinned", layers=(1,))
    assert held.layers == (1,)
    try:
        assert client.run_block("pinned", 1, x=rows()).answer.read.bytes == 0
        assert client.run_block("pinned", 0, x=rows()).answer.read.bytes == held.bytes
        before = client.run_block("pinned", 1, x=rows(), return_tensors=True).tensors["output"]
        tiny_checkpoint("llama", root / "pinned", seed=1)
        changed = client.run_block("pinned", 1, x=rows(), return_tensors=True)
        assert changed.answer.read.bytes == held.bytes, "the file changed: what was held is stale"
        assert not np.array_equal(before, changed.tensors["output"])
    finally:
        assert client.evict("pinned").layers == ()


def test_unaligned_and_mixed_types_of_input(http: httpx.Client) -> None:
    """A body whose header is not padded: the data starts at an odd address."""
    x = rows()
    message = json.dumps({"checkpoint": "llama", "layer": 0, "capture": ["x"], "return_tensors": True})
    outputs = []
    for padding in (b"", b" ", b"   "):
        header = json.dumps(
            {
                "__metadata__": {"request": message},
                "x": {"dtype": "F32", "shape": [5, 48], "data_offsets": [0, x.nbytes]},
            }
        ).encode()
        header += padding
        body = len(header).to_bytes(8, "little") + header + x.tobytes()
        answer = http.post("/v1/blocks/run", content=body, headers={"Content-Type": "application/x-safetensors"})
        outputs.append(answer.json()["tensors"]["x"])
    assert outputs[0] == outputs[1] == outputs[2]
    assert np.array_equal(np.asarray(outputs[0], np.float32), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_posted_types_are_widened_exactly(http: httpx.Client, dtype: torch.dtype) -> None:
    x = torch.randn(2, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    message = {"checkpoint": "llama", "layer": 0, "capture": ["x"], "return_tensors": True}
    body = save_torch({"x": x}, metadata={"request": json.dumps(message)})
    answer = http.post("/v1/blocks/run", content=body, headers={"Content-Type": "application/x-safetensors"})
    assert answer.status_code == 200, answer.text
    assert torch.equal(torch.tensor(answer.json()["tensors"]["x"], dtype=torch.float32), x.to(torch.float32))


@pytest.mark.parametrize("placement", ["post", "sandwich", "branch-output"])
def test_a_later_norm_that_divides_by_zero_is_refused(client: Client, root: Path, placement: str) -> None:
    silent = {f"model.layers.0.mlp.{name}_proj.weight": torch.zeros(112, 48) for name in ("gate", "up")}
    tiny_checkpoint("llama", root / "silent", tensors=silent)
    x = np.zeros((2, 48), np.float32) if placement == "post" else rows(2)
    with pytest.raises(InvalidValue, match=r"row \[0\]") as refused:
        client.run_block("silent", 0, x=x, overrides=Overrides(placement=placement, eps=0.0))  # pyright: ignore[reportArgumentType]
    assert refused.value.field == "overrides.eps"


def test_a_made_up_norm_multiplies_by_one_in_the_arithmetic_asked_for(client: Client) -> None:
    for changed in ({"norm_kind": "rms_plus1"}, {"norm_offset": -1.0}, {}):
        run = client.run_block("llama", 0, x=rows(), overrides=Overrides(placement="sandwich", eps=1e-30, **changed))
        assert any("multiplies by one" in note for note in run.answer.notes)
        assert run.answer.stages["contribution"].rms == pytest.approx(1.0)


def test_a_pinned_block_follows_its_config(client: Client, root: Path) -> None:
    tiny_checkpoint("llama", root / "repinned")
    client.pin("repinned")
    tiny_checkpoint("llama", root / "repinned", config={"hidden_act": "relu", "rms_norm_eps": 1e-3})
    answer = client.run_block("repinned", 0, x=rows()).answer
    assert (answer.activation.value, answer.eps["input"].value) == ("relu", 1e-3)
    assert answer.read.bytes > 0
    client.evict("repinned")


def test_a_mean_square_that_overflows_is_told(client: Client) -> None:
    run = client.run_block("llama", 0, x=np.full((2, 48), 1e30, np.float32))
    assert any("overflows float32" in note for note in run.answer.notes)
    assert run.answer.stages["normed"].rms == 0.0


def test_what_a_norm_kind_leaves_out_is_told(client: Client) -> None:
    notes = client.run_block("gpt2", 0, x=rows(), overrides=Overrides(norm_kind="rms_llama")).answer.notes
    assert any("bias" in note for note in notes)


@pytest.mark.parametrize(("placement", "used"), [("pre", "input"), ("post", "input"), ("branch-output", "output")])
def test_a_norm_that_is_left_out_is_told(client: Client, placement: str, used: str) -> None:
    changed = Overrides(placement=placement)  # pyright: ignore[reportArgumentType]
    notes = client.run_block("gemma3", 0, x=rows(), overrides=changed).answer.notes
    assert any(f"only the one on the branch's {used} is used" in note for note in notes)
