"""Train the tiny Llama of this folder and show, layer by layer, which projection is the gate.

    python train_tiny_llama.py --output tiny-llama

A byte-level Llama (the token is the byte) learns the documentation that ships with Python: the
topics of `pydoc` and the docstrings of the standard library. Normal initialisation, next-byte cross
entropy, AdamW, a cosine schedule; nothing else is in the loss. The certified test then reads the
trained weights, and the directory is written only when in every layer the gate is rejected and the
up, the mirrored gate and both controls look like noise.

The same Python, torch and processor give the same file: the text is sorted, the seeds are fixed, and
one thread computes.
"""

import argparse
import ast
import hashlib
import importlib
import json
import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from glassblock.numerics.gate_up_evidence import GateUpEvidence, gate_up_evidence
from torch import Tensor, nn

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

LEVEL = 5e-6  # of a certified rejection: 1e-3 over 200 tensors
DRAWS = 1999  # of the signs, for "looks like noise"


class Recipe(NamedTuple):
    """How the weights are trained: what is usual for a model of this size."""

    steps: int = 1200
    sequences: int = 8
    tokens: int = 256
    learning_rate: float = 8e-3
    final_rate: float = 0.1  # where the cosine ends, as a part of the learning rate
    warm_up: int = 50  # steps
    weight_decay: float = 0.1  # matrices only
    betas: tuple[float, float] = (0.9, 0.95)
    gradient_norm: float = 1.0
    held_out: int = 1 << 16  # bytes at the end of the text, never trained on


def main() -> int:
    """Train, print the table, write the directory; the exit status is 1 when the table is not as it must be."""
    parser = argparse.ArgumentParser(description="Train a tiny byte-level Llama and test its gates.")
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="of the initialisation and the batches")
    given = parser.parse_args()
    torch.set_num_threads(1)
    recipe = Recipe()
    text = python_documentation()
    print(f"{len(text):,} bytes of text, sha256 {hashlib.sha256(text).hexdigest()}, Python {sys.version.split()[0]}")
    torch.manual_seed(given.seed)
    model = LlamaForCausalLM()
    started = time.process_time()
    train(model, text, recipe=recipe, seed=given.seed)
    seconds, loss = time.process_time() - started, held_out_loss(model, text, recipe=recipe)
    parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{parameters:,} parameters, {seconds:.0f} CPU seconds, held-out loss {loss:.3f} nats per byte")
    if not print_table(model):
        print("not every layer is as it must be; nothing was written", file=sys.stderr)
        return 1
    print(f"{write(model, given.output):,} bytes in {given.output / 'model.safetensors'}")
    return 0


def python_documentation() -> bytes:
    """English-like text that every installation of one Python version has alike, in a fixed order."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    parts = [topics[name] for name in sorted(topics)]
    library = Path(sysconfig.get_path("stdlib"))
    # The names in the language's own list, not the files in the folder: distributions add modules.
    for module in sorted(sys.stdlib_module_names):
        file = library / f"{module}.py"
        if file.is_file():
            parts += docstrings(file.read_text(encoding="utf-8"))
    return "\n\n".join(parts).encode()


def docstrings(source: str) -> list[str]:
    """The docstrings of a module and of all that it defines."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, documented))
    return [docstring for docstring in found if docstring]


class RMSNorm(nn.Module):
    """The gain is applied after the normalisation, as in every Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(CONFIG["hidden_size"]))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., d]` to `[..., d]`."""
        return self.weight * (x * (x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).rsqrt())


class Attention(nn.Module):
    """Causal attention with rotary positions and shared key and value heads."""

    def __init__(self) -> None:
        super().__init__()
        width, head = CONFIG["hidden_size"], CONFIG["head_dim"]
        self.q_proj = nn.Linear(width, CONFIG["num_attention_heads"] * head, bias=False)
        self.k_proj = nn.Linear(width, CONFIG["num_key_value_heads"] * head, bias=False)
        self.v_proj = nn.Linear(width, CONFIG["num_key_value_heads"] * head, bias=False)
        self.o_proj = nn.Linear(CONFIG["num_attention_heads"] * head, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, tokens, d]` to `[batch, tokens, d]`."""
        heads = (-1, CONFIG["head_dim"])
        query, key, value = (
            projection(x).unflatten(-1, heads).transpose(1, 2) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(
            rotated(query), rotated(key), value, is_causal=True, enable_gqa=True
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def rotated(x: Tensor) -> Tensor:
    """Rotary positions on `[..., tokens, head]`, the two halves of a head paired."""
    half = CONFIG["head_dim"] // 2
    frequencies = CONFIG["rope_theta"] ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[-2])[:, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        width, hidden = CONFIG["hidden_size"], CONFIG["intermediate_size"]
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., d]` to `[..., d]`."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm attention, then pre-norm feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(), Attention()
        self.post_attention_layernorm, self.mlp = RMSNorm(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, tokens, d]` to `[batch, tokens, d]`."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], CONFIG["hidden_size"])
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(CONFIG["num_hidden_layers"]))
        self.norm = RMSNorm()

    def forward(self, token_ids: Tensor) -> Tensor:
        """`[batch, tokens]` to `[batch, tokens, d]`."""
        x = self.embed_tokens(token_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """The names are those of Hugging Face, so that `state_dict()` is the file; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Llama()
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=CONFIG["initializer_range"])

    def forward(self, token_ids: Tensor) -> Tensor:
        """`[batch, tokens]` to the logits, `[batch, tokens, bytes]`."""
        return self.model(token_ids) @ self.model.embed_tokens.weight.T


def train(model: LlamaForCausalLM, text: bytes, *, recipe: Recipe, seed: int) -> None:
    """Next-byte prediction on random windows of all but the held-out text."""
    for step, loss in training(model, text, recipe=recipe, seed=seed):
        if step % 100 == 0:
            print(f"step {step:5d}  loss {loss:.3f}", flush=True)


def training(model: LlamaForCausalLM, text: bytes, *, recipe: Recipe, seed: int) -> Iterator[tuple[int, float]]:
    """The same step by step: the number of steps done, from 1, and the loss of the last one's batch."""
    data = as_token_ids(text[: -recipe.held_out])
    generator = torch.Generator().manual_seed(seed)
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    gains = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate_at(step + 1, recipe=recipe))
    for step in range(1, recipe.steps + 1):
        starts = torch.randint(0, len(data) - recipe.tokens, (recipe.sequences, 1), generator=generator)
        windows = data[starts + torch.arange(recipe.tokens + 1)]
        loss = next_byte_loss(model, windows)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_norm)
        optimiser.step()
        schedule.step()
        yield step, loss.item()


def rate_at(step: int, *, recipe: Recipe) -> float:
    """Part of the learning rate at a step: linear warm-up times a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    return min(1.0, step / recipe.warm_up) * (recipe.final_rate + (1 - recipe.final_rate) * cosine)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, text: bytes, *, recipe: Recipe) -> float:
    """Mean cross entropy in nats per byte over windows of the held-out text."""
    windows = as_token_ids(text[-recipe.held_out :]).view(-1, recipe.tokens)
    batches = windows.view(-1, 32, recipe.tokens)
    return sum(next_byte_loss(model, batch).item() for batch in batches) / len(batches)


def next_byte_loss(model: LlamaForCausalLM, windows: Tensor) -> Tensor:
    """Mean cross entropy in nats; every byte of a window but the first is predicted."""
    return nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def as_token_ids(text: bytes) -> Tensor:
    """A byte is its own token id."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def print_table(model: LlamaForCausalLM) -> bool:
    """One row per layer; whether all of them are as a trained layer must be.

    T and P as in `glassblock.numerics`: certified log10 p for T(gate) and P(up), which have a
    direction, and the p-value of drawn signs for the four that must be noise.
    """
    print("layer  log10 p: T(gate)    P(up)  |  p of draws: T(up)  P(gate)  T(down columns)  P(gate * up)")
    rows = [evidence_of(layer) for layer in model.model.layers]
    for number, row in enumerate(rows):
        print(
            f"{number:5d}  {row.gate.log10_p:16.2f} {row.paired_up.log10_p:8.2f}  |  {row.up.draws_p:17.3f}"
            f" {row.paired_gate.draws_p:8.3f} {row.down_columns.draws_p:16.3f} {row.product.draws_p:13.3f}"
        )
    return all(
        row.gate.rejected(LEVEL)
        and all(test.noise for test in (row.up, row.paired_gate, row.down_columns, row.product))
        for row in rows
    )


@torch.no_grad()
def evidence_of(layer: nn.Module) -> GateUpEvidence:
    """The certified test on one layer's weights."""
    weights = dict(layer.named_parameters())
    gate, up, down = (weights[f"mlp.{role}_proj.weight"].detach() for role in ("gate", "up", "down"))
    return gate_up_evidence(gate, up, down, seed=0, level=LEVEL, draws=DRAWS, certify="all")


def write(model: LlamaForCausalLM, directory: Path) -> int:
    """Write a Hugging Face directory; the size of the weights in bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    file = directory / "model.safetensors"
    tensors = {name: weight.detach().contiguous() for name, weight in model.state_dict().items()}
    # Not `save_file`, which keeps the file to its owner: this one is served and mounted.
    file.write_bytes(safetensors.torch.save(tensors, metadata={"format": "pt"}))
    return file.stat().st_size


if __name__ == "__main__":
    sys.exit(main())
