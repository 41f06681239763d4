"""Models whose own code is not in transformers, written again in few words from what that code does.

Names of modules are those of the originals, so that a state dict is one of theirs. Each is made small, with numbers of
its own in every norm and bias, and answers with the logits of token ids `[batch, tokens]`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, KEYS, LAYERS, TOKENS = 96, 48, 4, 2, 2, 24
HEAD = WIDTH // HEADS


class Scaled(nn.Module):
    """RMSNorm with a gain, in one order of operations or another."""

    def __init__(self, width: int, eps: float, *, gain_first: bool = False) -> None:
        super().__init__()
        self.weight, self.eps, self.gain_first = nn.Parameter(torch.ones(width)), eps, gain_first

    def forward(self, x: Tensor) -> Tensor:
        unit = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * unit).to(x.dtype) if self.gain_first else self.weight * unit.to(x.dtype)


class NanoGpt(nn.Module):
    """karpathy/nanoGPT, model.py."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        layers = [
            nn.ModuleDict(
                {
                    "ln_1": nn.LayerNorm(WIDTH, eps=1e-5, bias=bias),
                    "attn": nn.ModuleDict(
                        {
                            "c_attn": nn.Linear(WIDTH, 3 * WIDTH, bias=bias),
                            "c_proj": nn.Linear(WIDTH, WIDTH, bias=bias),
                        }
                    ),
                    "ln_2": nn.LayerNorm(WIDTH, eps=1e-5, bias=bias),
                    "mlp": nn.ModuleDict(
                        {
                            "c_fc": nn.Linear(WIDTH, 4 * WIDTH, bias=bias),
                            "c_proj": nn.Linear(4 * WIDTH, WIDTH, bias=bias),
                        }
                    ),
                }
            )
            for _ in range(LAYERS)
        ]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(TOKENS, WIDTH),
                "h": nn.ModuleList(layers),
                "ln_f": nn.LayerNorm(WIDTH, eps=1e-5, bias=bias),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, ids: Tensor) -> Tensor:
        parts: Any = self.transformer
        x = parts["wte"](ids) + parts["wpe"](torch.arange(ids.shape[1]))
        for layer in parts["h"]:
            query, key, value = (
                of_heads(part, HEADS) for part in layer["attn"]["c_attn"](layer["ln_1"](x)).chunk(3, -1)
            )
            x = x + layer["attn"]["c_proj"](attended(query, key, value))
            x = x + layer["mlp"]["c_proj"](functional.gelu(layer["mlp"]["c_fc"](layer["ln_2"](x))))
        return self.lm_head(parts["ln_f"](x))


class Llama2C(nn.Module):
    """karpathy/llama2.c, model.py: the width is told, or two thirds of four times the model's, rounded up."""

    def __init__(self, *, hidden: int | None, multiple_of: int) -> None:
        super().__init__()
        width = hidden or multiple_of * -(-int(2 * 4 * WIDTH / 3) // multiple_of)
        sizes = {"wq": (WIDTH, HEADS * HEAD), "wk": (WIDTH, KEYS * HEAD), "wv": (WIDTH, KEYS * HEAD)}
        sizes |= {"wo": (HEADS * HEAD, WIDTH)}
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention": nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()}),
                    "feed_forward": nn.ModuleDict(
                        {
                            "w1": nn.Linear(WIDTH, width, bias=False),
                            "w2": nn.Linear(width, WIDTH, bias=False),
                            "w3": nn.Linear(WIDTH, width, bias=False),
                        }
                    ),
                    "attention_norm": Scaled(WIDTH, 1e-5),
                    "ffn_norm": Scaled(WIDTH, 1e-5),
                }
            )
            for _ in range(LAYERS)
        )
        self.norm = Scaled(WIDTH, 1e-5)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        layers: Any = self.layers
        for layer in layers:
            attention, network, read = layer["attention"], layer["feed_forward"], layer["attention_norm"](x)
            query, key = (of_heads(attention[name](read), count) for name, count in (("wq", HEADS), ("wk", KEYS)))
            value = of_heads(attention["wv"](read), KEYS)
            x = x + attention["wo"](attended(neighbours_turned(query), neighbours_turned(key), value))
            read = layer["ffn_norm"](x)
            x = x + network["w2"](functional.silu(network["w1"](read)) * network["w3"](read))
        return self.output(self.norm(x))


class Olmo(nn.Module):
    """allenai/OLMo, olmo/model.py, blocks of the type sequential with rope."""

    def __init__(
        self, norm: Callable[[int], nn.Module], *, activation: str, after: bool, bias: bool, clip: float
    ) -> None:
        super().__init__()
        gated, inner = activation == "swiglu", 112
        self.activation, self.after, self.clip = activation, after, clip
        rows = (HEADS + 2 * KEYS) * HEAD
        blocks: list[nn.ModuleDict] = []
        for _ in range(LAYERS):
            block = nn.ModuleDict(
                {
                    "attn_norm": norm(WIDTH),
                    "ff_norm": norm(WIDTH),
                    "att_proj": nn.Linear(WIDTH, rows, bias=bias),
                    "attn_out": nn.Linear(WIDTH, WIDTH, bias=bias),
                    "ff_proj": nn.Linear(WIDTH, inner, bias=bias),
                    "ff_out": nn.Linear(inner // 2 if gated else inner, WIDTH, bias=bias),
                }
            )
            if after:
                block.update({"q_norm": norm(HEADS * HEAD), "k_norm": norm(KEYS * HEAD)})
            blocks.append(block)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "blocks": nn.ModuleList(blocks),
                "ln_f": norm(WIDTH),
                "ff_out": nn.Linear(WIDTH, VOCABULARY, bias=False),
            }
        )

    def forward(self, ids: Tensor) -> Tensor:
        parts: Any = self.transformer
        x = parts["wte"](ids)
        for block in parts["blocks"]:
            read = x if self.after else block["attn_norm"](x)
            both = block["att_proj"](read).clamp(-self.clip, self.clip)
            query, key, value = both.split([HEADS * HEAD, KEYS * HEAD, KEYS * HEAD], -1)
            if self.after:
                query, key = block["q_norm"](query), block["k_norm"](key)
            turned = (halves_turned(of_heads(query, HEADS)), halves_turned(of_heads(key, KEYS)))
            branch = block["attn_out"](attended(*turned, of_heads(value, KEYS)))
            x = x + (block["attn_norm"](branch) if self.after else branch)
            hidden = block["ff_proj"](x if self.after else block["ff_norm"](x))
            if self.activation == "swiglu":
                up, gate = hidden.chunk(2, -1)
                hidden = functional.silu(gate) * up
            else:
                hidden = getattr(functional, self.activation)(hidden)
            branch = block["ff_out"](hidden)
            x = x + (block["ff_norm"](branch) if self.after else branch)
        return parts["ff_out"](parts["ln_f"](x))


class ChatGlm(nn.Module):
    """THUDM/chatglm3-6b, modeling_chatglm.py: neighbours in the first half of a head are turned."""

    def __init__(self, *, groups: int | None, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.groups = groups
        rows = (HEADS + 2 * groups) * HEAD if groups is not None else 3 * HEADS * HEAD
        layers = [
            nn.ModuleDict(
                {
                    "input_layernorm": norm(WIDTH),
                    "self_attention": nn.ModuleDict(
                        {"query_key_value": nn.Linear(WIDTH, rows), "dense": nn.Linear(WIDTH, WIDTH, bias=False)}
                    ),
                    "post_attention_layernorm": norm(WIDTH),
                    "mlp": nn.ModuleDict(
                        {
                            "dense_h_to_4h": nn.Linear(WIDTH, 2 * 112, bias=False),
                            "dense_4h_to_h": nn.Linear(112, WIDTH, bias=False),
                        }
                    ),
                }
            )
            for _ in range(LAYERS)
        ]
        self.transformer = nn.ModuleDict(
            {
                "embedding": nn.ModuleDict({"word_embeddings": nn.Embedding(VOCABULARY, WIDTH)}),
                "encoder": nn.ModuleDict({"layers": nn.ModuleList(layers), "final_layernorm": norm(WIDTH)}),
                "output_layer": nn.Linear(WIDTH, VOCABULARY, bias=False),
            }
        )

    def forward(self, ids: Tensor) -> Tensor:
        parts: Any = self.transformer
        x = parts["embedding"]["word_embeddings"](ids)
        for layer in parts["encoder"]["layers"]:
            query, key, value = self.split(layer["self_attention"]["query_key_value"](layer["input_layernorm"](x)))
            turned = (
                torch.cat([neighbours_turned(h[..., : HEAD // 2]), h[..., HEAD // 2 :]], -1) for h in (query, key)
            )
            x = x + layer["self_attention"]["dense"](attended(*turned, value))
            gate, up = layer["mlp"]["dense_h_to_4h"](layer["post_attention_layernorm"](x)).chunk(2, -1)
            x = x + layer["mlp"]["dense_4h_to_h"](functional.silu(gate) * up)
        return parts["output_layer"](parts["encoder"]["final_layernorm"](x))

    def split(self, both: Tensor) -> tuple[Tensor, ...]:
        if self.groups is None:
            parts = both.unflatten(-1, (HEADS, 3 * HEAD)).chunk(3, -1)
            return tuple(part.transpose(1, 2) for part in parts)
        parts = both.split([HEADS * HEAD, self.groups * HEAD, self.groups * HEAD], -1)
        return tuple(
            of_heads(part, heads) for part, heads in zip(parts, (HEADS, self.groups, self.groups), strict=True)
        )


class Baichuan(nn.Module):
    """baichuan-inc/Baichuan2-7B-Base, modeling_baichuan.py: the rows of the head are of unit length."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.ModuleDict(
                {
                    "self_attn": nn.ModuleDict(
                        {
                            "W_pack": nn.Linear(WIDTH, 3 * WIDTH, bias=False),
                            "o_proj": nn.Linear(WIDTH, WIDTH, bias=False),
                        }
                    ),
                    "mlp": nn.ModuleDict(
                        {
                            "gate_proj": nn.Linear(WIDTH, 112, bias=False),
                            "down_proj": nn.Linear(112, WIDTH, bias=False),
                            "up_proj": nn.Linear(WIDTH, 112, bias=False),
                        }
                    ),
                    "input_layernorm": Scaled(WIDTH, 1e-6),
                    "post_attention_layernorm": Scaled(WIDTH, 1e-6),
                }
            )
            for _ in range(LAYERS)
        ]
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(VOCABULARY, WIDTH),
                "layers": nn.ModuleList(layers),
                "norm": Scaled(WIDTH, 1e-6),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        parts: Any = self.model
        x = parts["embed_tokens"](ids)
        for layer in parts["layers"]:
            both = layer["self_attn"]["W_pack"](layer["input_layernorm"](x)).unflatten(-1, (3, WIDTH))
            query, key, value = (of_heads(part, HEADS) for part in both.unbind(-2))
            x = x + layer["self_attn"]["o_proj"](attended(halves_turned(query), halves_turned(key), value))
            network, read = layer["mlp"], layer["post_attention_layernorm"](x)
            x = x + network["down_proj"](functional.silu(network["gate_proj"](read)) * network["up_proj"](read))
        return functional.linear(parts["norm"](x), functional.normalize(self.lm_head.weight))


def of_heads(rows: Tensor, heads: int) -> Tensor:
    """`[batch, tokens, heads * width]` as `[batch, heads, tokens, width]`."""
    return rows.unflatten(-1, (heads, -1)).transpose(1, 2)


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention, `[batch, tokens, heads * width]`; heads of keys are shared in order."""
    shared = query.shape[1] // key.shape[1]
    key, value = (heads.repeat_interleave(shared, 1) for heads in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    tokens = scores.shape[-1]
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
    return mixed.transpose(1, 2).flatten(2)


def neighbours_turned(heads: Tensor) -> Tensor:
    """Channels 2 k and 2 k + 1 as one complex number, turned by position times 10000^(-2 k / width)."""
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns(heads)).flatten(-2)


def halves_turned(heads: Tensor) -> Tensor:
    """Channel k of the first half with channel k of the second."""
    first, second = heads.float().chunk(2, -1)
    turned = torch.complex(first, second) * turns(heads)
    return torch.cat([turned.real, turned.imag], -1)


def turns(heads: Tensor) -> Tensor:
    """`[tokens, width / 2]`."""
    width = heads.shape[-1]
    angles = torch.arange(heads.shape[-2])[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    return torch.polar(torch.ones_like(angles), angles)


def settled(model: nn.Module) -> nn.Module:
    """With numbers off their zeros and ones, which would hide a gain or a bias in the wrong place."""
    generator = torch.Generator().manual_seed(7)
    for name, tensor in model.named_parameters():
        drawn = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim == 1:
            tensor.data = (1.0 if name.endswith("weight") else 0.0) + 0.2 * drawn
        else:
            tensor.data = drawn * tensor.shape[-1] ** -0.5
    return model.eval()


def state_of(model: nn.Module) -> Mapping[str, Tensor]:
    """Its tensors by name, those that are one under another name left out."""
    seen: set[int] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            kept[name] = tensor.contiguous()
            seen.add(tensor.data_ptr())
    return kept
