"""A checkpoint of 8 GB in shards: memory while it is audited, and while one block of it is run.

The files are sparse: their bytes are zeros that take no room on the disk, and are read like any others.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from record import Promise, publish, table

LAYERS, D, M, SHARDS = 20, 4096, 10240, 4
MIB = 2**20

MEASURED = """
import json, sys, psutil, torch
from pathlib import Path
import threading, time
process, peak, done = psutil.Process(), 0, threading.Event()
def watch():
    global peak
    while not done.is_set():
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.01)
before = process.memory_info().rss
threading.Thread(target=watch, daemon=True).start()
path, start = Path(sys.argv[1]), time.perf_counter()
if sys.argv[2] == "audit":
    from glassblock.audit.audit import AuditQuestion, audit_checkpoint
    from glassblock.audit.gate_plans import GATE_RULE_NAMES
    from glassblock.audit.rules import RULES
    rules = tuple(name for name in RULES if name not in GATE_RULE_NAMES)
    report = audit_checkpoint(path, AuditQuestion(rules=rules))
    read = report.checkpoint.bytes
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


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, total, block = sparse_checkpoint(Path(scratch) / "big")
        audit, one = (measured(checkpoint, what) for what in ("audit", "block"))
    promises = [
        Promise("one block reads one block's bytes", f"{one['read']:,} of {total:,}", one["read"] == block),
        Promise("running it stays under three blocks' bytes", f"{one['peak'] / MIB:.0f} MiB", one["peak"] < 3 * block),
        Promise(
            "an audit holds no more than two layers' networks and 400 MiB",
            f"{audit['peak'] / MIB:.0f} MiB",
            audit["peak"] < 2 * block + 400 * MIB,
        ),
    ]
    rows = [
        (name, f"{row['read']:,}", f"{row['peak'] / MIB:.0f}", f"{row['seconds']:.1f}")
        for name, row in (("audit, without the gate rules", audit), ("one block", one))
    ]
    says = (
        f"{LAYERS} layers, d = {D}, m = {M}, bfloat16, {total:,} bytes in {SHARDS} shards. Memory is the resident set "
        "above an interpreter that has imported torch. The gate rules have nothing to say of zeros and are left out."
    )
    return publish("Big files", says, promises, [table(("what", "bytes read", "peak MiB", "seconds"), rows)])


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
