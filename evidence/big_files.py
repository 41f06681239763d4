"""A checkpoint of 8 GB in shards: memory and time while it is audited by every rule, and while one block of it is run.

Gate and up hold numbers: noise, and in the gates a direction common to all rows. The rest is sparse: zeros that take no
room on the disk, and are read like any others.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from peak_memory import WATCHED
from record import Promise, publish, table

LAYERS, D, M, SHARDS = 20, 4096, 10240, 4
PAIRS = 3
MIB = 2**20

MEASURED = (
    WATCHED
    + """
path, start = Path(sys.argv[1]), time.perf_counter()
if sys.argv[2] == "audit":
    from glassblock.audit.audit import audit_checkpoint
    report = audit_checkpoint(path)
    gates = [entry for entry in report.coverage if entry.rule == "ffn/gate-up-swapped"]
    assert [(entry.checked, entry.undecidable) for entry in gates] == [(len(report.layers), ())], gates
    assert all(finding.rule == "tensor/all-zero" for finding in report.findings), report.findings
    read = report.checkpoint.bytes
elif sys.argv[2] == "sum":
    from safetensors import safe_open
    read = 0
    for shard in sorted(path.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                tensor.sum(dtype=torch.float32)
                read += tensor.nbytes
else:
    from glassblock.operations.block_runs import run
    from glassblock.operations.store import CheckpointStore
    from glassblock.wire.blocks import BlockRunRequest
    request = BlockRunRequest(checkpoint=path.name, layer=7, x=[[1.0] * 4096])
    read = run(CheckpointStore([path.parent]), request, {}).answer.read.bytes
seconds = time.perf_counter() - start
done.set()
print(json.dumps({"peak": peak - before, "read": read, "seconds": seconds}))
"""
)


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, total, block = sparse_checkpoint(Path(scratch) / "big")
        with_gates(checkpoint)
        measured(checkpoint, "sum")  # so that all passes find the files where the first one found them
        passes = [(measured(checkpoint, "audit"), measured(checkpoint, "sum")) for _ in range(PAIRS)]
        audit, summed = passes[0]
        ratio = statistics.median(ours["seconds"] / sums["seconds"] for ours, sums in passes)
        peak = max(ours["peak"] for ours, _ in passes)
        one = measured(checkpoint, "block")
    promises = [
        Promise("one block reads one block's bytes", f"{one['read']:,} of {total:,}", one["read"] == block),
        Promise("running it stays under three blocks' bytes", f"{one['peak'] / MIB:.0f} MiB", one["peak"] < 3 * block),
        Promise("an audit by every rule peaks at most 400 MB higher", f"{peak / 1e6:.0f} MB", peak <= 400e6),
        Promise(
            "and takes at most twice as long as reading every tensor and summing it in float32",
            f"{ratio:.2f} (median of {PAIRS} pairs)",
            ratio <= 2,
        ),
    ]
    rows = [
        (name, f"{row['read']:,}", f"{row['peak'] / MIB:.0f}", f"{row['seconds']:.1f}")
        for name, row in (("audit, every rule", audit), ("sum in float32", summed), ("one block", one))
    ]
    says = (
        f"{LAYERS} layers, d = {D}, m = {M}, bfloat16, {total:,} bytes in {SHARDS} shards. Memory is the resident set "
        "above an interpreter that has imported torch."
    )
    return publish("Big files", says, promises, [table(("what", "bytes read", "peak MiB", "seconds"), rows)])


def with_gates(directory: Path) -> None:
    """Write noise where gate and up lie, and a direction common to its rows into every gate."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(M, D, generator=generator)
    up = noise.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    gate = (noise.flip(0) + 0.2 * torch.randn(D, generator=generator)).to(torch.bfloat16).view(torch.uint8)
    written = {"gate": gate.numpy().tobytes(), "up": up}
    for shard in directory.glob("*.safetensors"):
        with shard.open("r+b") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            for name, entry in header.items():
                role = name.rpartition(".mlp.")[2].partition("_proj")[0]
                if role in written:
                    file.seek(8 + length + entry["data_offsets"][0])
                    file.write(written[role])


def measured(checkpoint: Path, what: str) -> dict[str, float]:
    command = [sys.executable, "-c", MEASURED, str(checkpoint), what]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def sparse_checkpoint(directory: Path) -> tuple[Path, int, int]:
    """The directory, its bytes, and the bytes of one block."""
    directory.mkdir()
    shapes = {"model.embed_tokens.weight": (32000, D), "model.norm.weight": (D,), "lm_head.weight": (32000, D)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (M, D) for name in ("gate", "up")}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (D, D) for name in "qkvo"}
        shapes |= {f"{prefix}mlp.down_proj.weight": (D, M)}
        shapes |= {f"{prefix}{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
    names, weight_map, total = list(shapes), {}, 0
    for shard in range(SHARDS):
        file, header, end = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors", {}, 0
        for name in names[shard * len(names) // SHARDS : (shard + 1) * len(names) // SHARDS]:
            size = 2 * shapes[name][0] * (shapes[name][1] if len(shapes[name]) == 2 else 1)
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": (end, end + size)}
            weight_map[name], end = file, end + size
        text = json.dumps(header).encode()
        with (directory / file).open("wb") as written:
            written.write(len(text).to_bytes(8, "little") + text)
            written.truncate(8 + len(text) + end)
        total += end
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5}
    sizes = {"hidden_size": D, "intermediate_size": M, "num_hidden_layers": LAYERS, "num_attention_heads": 32}
    (directory / "config.json").write_text(json.dumps({**config, **sizes, "vocab_size": 32000}))
    return directory, total, 2 * (3 * D * M + D)


if __name__ == "__main__":
    sys.exit(main())
