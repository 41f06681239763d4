"""A model of transformers as Meta's own code stores it."""

from collections.abc import Mapping

from torch import Tensor

NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
}


def as_meta(tensors: Mapping[str, Tensor], heads: Mapping[str, int]) -> dict[str, Tensor]:
    """Meta's names, and the rows of queries and keys in the order of its rotation: pairs, not halves.

    Args:
        tensors: Of a llama or mixtral, under the names of transformers.
        heads: How many `q_proj` and `k_proj` have.
    """
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for projection, count in heads.items():
            if f".{projection}." in name:
                tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)  # noqa: PLW2901
        new = name.removeprefix("model.")
        for old, other in NAMES.items():
            new = new.replace(old, other)
        made[new] = tensor.contiguous()
    return made
