"""One block of a real checkpoint, asked for in a fresh process, against transformers with hooks.

Both start a Python interpreter, import torch, load what they need of SmolLM2 and return gate, up
and hidden of layer 7 for sixteen tokens. Ours goes through the whole service, in process.
"""

import subprocess
import sys
from pathlib import Path

from pairs import in_pairs, table
from smollm2 import directories

OURS = """
import sys
from glassblock_client import Client
from glassblock.api.entry import connect
from pathlib import Path
import numpy as np
path = Path(sys.argv[1])
x = np.random.default_rng(0).standard_normal((16, 576), dtype=np.float32)
with connect(roots=[path.parent], device="cpu") as wire, Client("http://glassblock", transport=wire) as client:
    run = client.run_block(path.name, 7, x=x, capture=("gate", "up", "hidden"), return_tensors=True)
assert set(run.tensors) == {"gate", "up", "hidden"}
assert run.answer.read.bytes == (3 * 1536 * 576 + 576) * 2, run.answer.read
"""

BASELINE = """
import sys
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
captured = {}
layer = model.model.layers[7]
layer.mlp.gate_proj.register_forward_hook(lambda m, i, o: captured.__setitem__("gate", o))
layer.mlp.up_proj.register_forward_hook(lambda m, i, o: captured.__setitem__("up", o))
layer.mlp.down_proj.register_forward_hook(lambda m, i, o: captured.__setitem__("hidden", i[0]))
x = torch.randn(16, 576, dtype=model.dtype)
with torch.inference_mode():
    layer.mlp(layer.post_attention_layernorm(x))
assert set(captured) == {"gate", "up", "hidden"}
"""

PROMISED = 1.5


def main() -> int:
    checkpoint = directories().single
    paired = in_pairs(lambda: fresh(OURS, checkpoint), lambda: fresh(BASELINE, checkpoint), runs=7)
    names = ("glassblock, one request", "transformers, from_pretrained and hooks")
    print(table("Cold: one block of SmolLM2-135M in a fresh process", names, paired))
    return 0 if paired.ratio >= PROMISED else 1


def fresh(code: str, checkpoint: Path) -> None:
    subprocess.run([sys.executable, "-c", code, str(checkpoint)], check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
