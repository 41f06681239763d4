"""A checkpoint of 6 GB in shards: memory and bytes read while its last layer is run on token ids.

The files hold real random bfloat16 numbers, one block of them over and over, so that every byte is read from the disk.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from peak_memory import WATCHED
from record import Promise, publish, table

LAYERS, D, M, HEADS, KV_HEADS, VOCAB, SHARDS = 17, 4096, 11008, 32, 8, 8192, 5
TOKENS, EARLY = 16, 4
MIB = 2**20

MEASURED = (
    WATCHED
    + """
path, layer, tokens, start = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), time.perf_counter()
from glassblock.operations.block_runs import run
from glassblock.operations.store import CheckpointStore
from glassblock.wire.blocks import BlockRunRequest
ids = tuple(range(0, 37 * tokens, 37))
request = BlockRunRequest(checkpoint=path.name, layer=layer, part="layer", token_ids=ids)
answer = run(CheckpointStore([path.parent], device="cpu", resident_bytes=0), request, {}).answer
seconds = time.perf_counter() - start
done.set()
rms = answer.stages["output"].rms
print(json.dumps({"peak": peak - before, "read": answer.read.bytes, "seconds": seconds, "rms": rms}))
"""
)


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        if shutil.disk_usage(scratch).free < 8e9:
            raise SystemExit("8 GB of free disk are needed for the temporary checkpoint")
        checkpoint, total, layer = written(Path(scratch) / "deep")
        early, last = (measured(checkpoint, number) for number in (EARLY, LAYERS - 1))
    head_dim = D // HEADS
    # Of one layer in float32: the stream and what each projection makes of it, all stages of the last layer at once.
    activations = 4 * TOKENS * (8 * D + 2 * HEADS * head_dim + 4 * KV_HEADS * head_dim + 4 * M)
    bound = 3 * layer + activations
    rows_read = 2 * TOKENS * D
    promises = [
        Promise(
            "the last layer runs in less than three layers' weights and its activations",
            f"{last['peak'] / MIB:.0f} of {bound / MIB:.0f} MiB",
            last["peak"] < bound,
        ),
        Promise(
            "however deep: within a tenth of what an early layer takes",
            f"{last['peak'] / early['peak']:.2f} times",
            last["peak"] < 1.1 * early["peak"],
        ),
        Promise(
            "every layer is read once, and of the embedding the rows of the tokens",
            f"{last['read']:,} bytes",
            last["read"] == LAYERS * layer + rows_read,
        ),
    ]
    rows = [
        (f"layer {number}", f"{row['read']:,}", f"{row['peak'] / MIB:.0f}", f"{row['seconds']:.1f}")
        for number, row in ((EARLY, early), (LAYERS - 1, last))
    ]
    says = (
        f"{LAYERS} layers, d = {D}, m = {M}, {HEADS} heads over {KV_HEADS}, bfloat16, {total:,} bytes in {SHARDS} "
        f"shards, {layer:,} bytes a layer. {TOKENS} token ids enter; nothing stays resident between layers. It is "
        "computed in float32. Memory is the resident set above an interpreter that has imported torch."
    )
    return publish("Streaming", says, promises, [table(("run", "bytes read", "peak MiB", "seconds"), rows)])


def measured(checkpoint: Path, layer: int) -> dict[str, float]:
    command = [sys.executable, "-c", MEASURED, str(checkpoint), str(layer), str(TOKENS)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def written(directory: Path) -> tuple[Path, int, int]:
    """The directory, its bytes, and the bytes of one layer."""
    directory.mkdir()
    keys = KV_HEADS * (D // HEADS)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, D), "model.norm.weight": (D,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (D, D) for name in "qo"}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (keys, D) for name in "kv"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (M, D) for name in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": (D, M)}
        shapes |= {f"{prefix}{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
    noise = torch.randn(8 * MIB, generator=torch.Generator().manual_seed(0)) * D**-0.5
    piece = memoryview(noise.bfloat16().view(torch.uint8).numpy()).cast("B")
    names, weight_map, total, one = list(shapes), {}, 0, 0
    for shard in range(SHARDS):
        file, header, end = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors", {}, 0
        for name in names[shard * len(names) // SHARDS : (shard + 1) * len(names) // SHARDS]:
            size = 2 * torch.Size(shapes[name]).numel()
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": (end, end + size)}
            weight_map[name], end = file, end + size
            one += size if name.startswith("model.layers.0.") else 0
        text = json.dumps(header).encode()
        with (directory / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for start in range(0, end, len(piece)):
                out.write(piece[: min(len(piece), end - start)])
        total += end
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5}
    sizes = {"hidden_size": D, "intermediate_size": M, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    more = {"num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps({**config, **sizes, **more}))
    return directory, total, one


if __name__ == "__main__":
    sys.exit(main())
