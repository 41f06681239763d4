"""Train tiny models whose feed-forward weights are parameters in the storage that is named, and keep them in bfloat16.

    python tests/data/train_kinds.py fused interleaved experts transposed

Each is the byte-level Llama of `examples/train_tiny_llama.py` with other networks in its blocks: `fused` holds gate
and up as one parameter [gate | up]; `interleaved` holds them row by row in turn; `experts` is a mixture of four, two
for each token, every projection a parameter; `transposed` is a mixture in stacks stored `[in, out]`. The names are
those of phi3, phi3, mixtral and qwen3_vl_moe_text. Only what the gate rules read is meant to be complete: attention is
the example's, under names of its own family.
"""

import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parent.parent / "examples"))
example: Any = importlib.import_module("train_tiny_llama")

WIDTH, LAYERS, EXPERTS, CHOSEN = 64, 2, 4, 2
DENSE, EXPERT = 256, 128  # neurons
STD = 0.02


class Fused(nn.Module):
    """Gate and up as one parameter, `[2 m, d]`: halves, or in turn."""

    def __init__(self, *, interleaved: bool) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.gate_up = nn.Parameter(torch.randn(2 * DENSE, WIDTH) * STD)
        self.down = nn.Parameter(torch.randn(WIDTH, DENSE) * STD)

    def forward(self, x: Tensor) -> Tensor:
        both = x @ self.gate_up.T
        gate, up = (both[..., 0::2], both[..., 1::2]) if self.interleaved else both.chunk(2, -1)
        return (nn.functional.silu(gate) * up) @ self.down.T

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "mlp.gate_up_proj.weight", self.gate_up
        yield "mlp.down_proj.weight", self.down


class Mixture(nn.Module):
    """Softmax over the router, the two most likely experts, their weights scaled to sum to one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(EXPERTS, WIDTH) * STD)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x @ self.router.T).softmax(-1).topk(CHOSEN)
        weights = torch.zeros(*x.shape[:-1], EXPERTS).scatter(-1, chosen.indices, chosen.values)
        weights = weights / weights.sum(-1, keepdim=True)
        return torch.stack([weights[..., e, None] * self.expert(x, e) for e in range(EXPERTS)]).sum(0)

    def expert(self, x: Tensor, number: int) -> Tensor:
        raise NotImplementedError


class Experts(Mixture):
    """A parameter for every projection of every expert."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (
            nn.ParameterList(torch.randn(EXPERT, WIDTH) * STD for _ in range(EXPERTS)) for _ in range(2)
        )
        self.w2 = nn.ParameterList(torch.randn(WIDTH, EXPERT) * STD for _ in range(EXPERTS))

    def expert(self, x: Tensor, number: int) -> Tensor:
        return (nn.functional.silu(x @ self.w1[number].T) * (x @ self.w3[number].T)) @ self.w2[number].T

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "block_sparse_moe.gate.weight", self.router
        for name in ("w1", "w2", "w3"):
            for number, weight in enumerate(getattr(self, name)):
                yield f"block_sparse_moe.experts.{number}.{name}.weight", weight


class Transposed(Mixture):
    """Parameters `[in, out]` as Conv1D has them, gate and up as one; written as stacks of all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.ParameterList(torch.randn(WIDTH, 2 * EXPERT) * STD for _ in range(EXPERTS))
        self.down = nn.ParameterList(torch.randn(EXPERT, WIDTH) * STD for _ in range(EXPERTS))

    def expert(self, x: Tensor, number: int) -> Tensor:
        gate, up = (x @ self.gate_up[number]).chunk(2, -1)
        return (nn.functional.silu(gate) * up) @ self.down[number]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "mlp.gate.weight", self.router
        yield "mlp.experts.gate_up_proj", torch.stack(list(self.gate_up))
        yield "mlp.experts.down_proj", torch.stack(list(self.down))


def separate_attention(attention: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As Llama names it."""
    yield from ((f"self_attn.{name}", weight) for name, weight in attention.named_parameters())


def joined_attention(attention: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As Phi-3 names it."""
    weights = dict(attention.named_parameters())
    yield "self_attn.qkv_proj.weight", torch.cat([weights[f"{name}_proj.weight"] for name in "qkv"])
    yield "self_attn.o_proj.weight", weights["o_proj.weight"]


MIXED: dict[str, Any] = {"num_experts_per_tok": CHOSEN}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "fused": (
        lambda: Fused(interleaved=False),
        joined_attention,
        {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "intermediate_size": DENSE},
    ),
    "interleaved": (
        lambda: Fused(interleaved=True),
        joined_attention,
        {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "intermediate_size": DENSE},
    ),
    "experts": (
        Experts,
        separate_attention,
        MIXED
        | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "intermediate_size": EXPERT}
        | {"num_local_experts": EXPERTS},
    ),
    "transposed": (
        Transposed,
        separate_attention,
        MIXED
        | {"architectures": ["Qwen3VLMoeTextModel"], "model_type": "qwen3_vl_moe_text", "num_experts": EXPERTS}
        | {"moe_intermediate_size": EXPERT, "intermediate_size": DENSE},
    ),
}


def main() -> int:
    """Train each kind that is named, and write it beside this file."""
    torch.set_num_threads(1)
    text, recipe = example.python_documentation(), example.Recipe()
    for seed, kind in enumerate(KINDS):
        if kind not in sys.argv[1:]:
            continue
        make, attention, config = KINDS[kind]
        example.CONFIG.update(hidden_size=WIDTH, num_hidden_layers=LAYERS, intermediate_size=DENSE)
        torch.manual_seed(100 + seed)
        model = example.LlamaForCausalLM()
        for layer in model.model.layers:
            layer.mlp = make()
        started = time.process_time()
        example.train(model, text, recipe=recipe, seed=seed)
        seconds, loss = time.process_time() - started, example.held_out_loss(model, text, recipe=recipe)
        size = write(model, attention, example.CONFIG | config, FOLDER / f"trained-{kind}")
        print(f"{kind}: {seconds:.0f} CPU seconds, held-out loss {loss:.3f} nats per byte, {size:,} bytes", flush=True)
    return 0


def write(model: nn.Module, attention: Any, config: dict[str, Any], directory: Path) -> int:
    """A Hugging Face directory with weights in bfloat16; their bytes."""
    directory.mkdir(exist_ok=True)
    tensors: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.model.embed_tokens.weight,
        "model.norm.weight": model.model.norm.weight,
    }
    for number, layer in enumerate(model.model.layers):
        parts = {
            **dict(layer.mlp.tensors()),
            **dict(attention(layer.self_attn)),
            "input_layernorm.weight": layer.input_layernorm.weight,
            "post_attention_layernorm.weight": layer.post_attention_layernorm.weight,
        }
        tensors |= {f"model.layers.{number}.{name}": weight for name, weight in parts.items()}
    kept = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in tensors.items()}
    (directory / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}, indent=2) + "\n")
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    return (directory / "model.safetensors").stat().st_size


if __name__ == "__main__":
    sys.exit(main())
