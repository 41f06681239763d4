"""Whole layers against the decoder layers of transformers, each fed the hidden state that the model feeds it."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.layer import Layer, LayerStages, layer_dtype, run_layer
from glassblock.numerics.likelihood import logits
from glassblock.numerics.norms import NORM_KINDS, Norm
from torch import Tensor, nn

from numerics.layer_makers import DECODERS, Decoder, State, tiny_model
from numerics.makers import make_feed_forward

TOKENS = 40
# float32: sums of some 100 products, in an order that fused and separate kernels may choose.
FLOAT32 = 1e-5


class Seen(NamedTuple):
    """What one layer of the model read and returned."""

    x: Tensor
    attention: Tensor
    output: Tensor


class Run(NamedTuple):
    model: nn.Module
    layers: list[Layer]
    seen: list[Seen]
    logits: Tensor


def observe(decoder: Decoder, *, dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> Run:
    model = tiny_model(decoder, dtype=dtype)
    caught: list[dict[str, Tensor]] = []

    def first(value: Any) -> Tensor:
        return (value[0] if isinstance(value, tuple) else value).clone()

    for layer in model.get_submodule(decoder.layers):
        record: dict[str, Tensor] = {}
        caught.append(record)
        layer.register_forward_pre_hook(
            lambda module, args, kwargs, record=record: record.update(x=first(args or kwargs["hidden_states"])),
            with_kwargs=True,
        )
        layer.get_submodule(decoder.attention).register_forward_hook(
            lambda module, args, output, record=record: record.update(attention=first(output))
        )
        layer.register_forward_hook(lambda module, args, output, record=record: record.update(output=first(output)))
    ids = torch.randint(3, 99, (2, tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = model(ids, use_cache=False).logits
    state = dict(model.state_dict())
    layers = [decoder.make(State(state, decoder.prefix.format(i=i)), model.config, i) for i in range(len(caught))]
    return Run(model, layers, [Seen(**record) for record in caught], found)


def run(layer: Layer, x: Tensor, **options: Any) -> LayerStages:
    with torch.no_grad():
        return run_layer(x, layer, positions=torch.arange(x.shape[-2]), **options)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


@pytest.mark.parametrize("name", DECODERS)
def test_every_layer_of_every_family(name: str) -> None:
    observed = observe(DECODERS[name])
    for layer, seen in zip(observed.layers, observed.seen, strict=True):
        stages = run(layer, seen.x)
        assert stages.output.dtype == torch.float32
        assert relative(stages.attention.projected, seen.attention) < FLOAT32
        assert relative(stages.output, seen.output) < FLOAT32


@pytest.mark.parametrize("name", DECODERS)
def test_bit_for_bit_in_bfloat16(name: str) -> None:
    decoder = DECODERS[name]
    observed = observe(decoder, dtype=torch.bfloat16)
    for layer, seen in zip(observed.layers, observed.seen, strict=True):
        stages = run(layer, seen.x, dtype=torch.bfloat16)
        assert torch.equal(stages.attention.projected, seen.attention)
        if decoder.rounds_otherwise is None:
            assert torch.equal(stages.output, seen.output)
        else:  # one rounding of eight bits more in each of three products
            assert relative(stages.output, seen.output) < 3 * 2**-8


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "deepseek_v3", "gpt_oss"])
def test_half_weights_are_computed_in_float32_unless_asked_otherwise(name: str) -> None:
    decoder = DECODERS[name]
    half, wide = observe(decoder, dtype=torch.bfloat16), observe(decoder, dtype=torch.float32)
    wide.model.load_state_dict(half.model.state_dict())
    state = dict(wide.model.state_dict())
    for i, (layer, seen) in enumerate(zip(half.layers, half.seen, strict=True)):
        same = decoder.make(State(state, decoder.prefix.format(i=i)), wide.model.config, i)
        found = run(layer, seen.x)
        assert layer_dtype(seen.x, layer) == torch.float32
        assert torch.equal(found.output, run(same, seen.x.float()).output)


@pytest.mark.parametrize("name", DECODERS)
def test_logits_through_all_layers(name: str) -> None:
    decoder = DECODERS[name]
    observed = observe(decoder)
    hidden = observed.seen[0].x
    for layer in observed.layers:
        hidden = run(layer, hidden).output
    final = observed.model.get_submodule(decoder.final_norm)
    eps = getattr(final, "eps", None) or getattr(final, "variance_epsilon", 1e-5)
    own = dict(final.named_parameters())
    norm = Norm(NORM_KINDS[decoder.final_kind], own.get("weight"), own.get("bias"), eps)
    config, head = observed.model.config, observed.model.get_output_embeddings()
    found = logits(
        hidden,
        norm,
        head.weight,
        bias=head.bias,
        scale=decoder.logit_scale(config),
        softcap=getattr(config, "final_logit_softcapping", None),
    )
    torch.testing.assert_close(found.detach(), observed.logits, rtol=0, atol=1e-4)


def test_float64_is_computed_in_float64() -> None:
    decoder = DECODERS["qwen2_moe"]
    observed = observe(decoder, dtype=torch.float64)
    for layer, seen in zip(observed.layers, observed.seen, strict=True):
        stages = run(layer, seen.x)
        assert stages.output.dtype == torch.float64
        # transformers keeps router scores and the norms' rows in float32.
        assert relative(stages.output, seen.output) < FLOAT32


def test_the_stages_of_a_layer_in_sequence() -> None:
    observed = observe(DECODERS["gemma3"])
    stages = run(observed.layers[0], observed.seen[0].x)
    assert torch.equal(stages.middle, stages.x + stages.attention_contribution)
    assert torch.equal(stages.feed_forward.x, stages.middle)
    assert torch.equal(stages.output, stages.middle + stages.feed_forward.contribution)
    assert not torch.equal(stages.attention_contribution, stages.attention.projected)
    assert stages.mixture is None
    assert stages.feed_forward.hidden is not None


def test_the_stages_of_parallel_branches() -> None:
    observed = observe(DECODERS["cohere"])
    layer = observed.layers[0]
    stages = run(layer, observed.seen[0].x)
    assert layer.parallel
    assert stages.middle is None
    assert torch.equal(stages.feed_forward.x, stages.x)
    assert torch.equal(stages.feed_forward.normed, stages.attention_normed)
    expected = (stages.x + stages.attention_contribution) + stages.feed_forward.contribution
    assert torch.equal(stages.output, expected)


def test_a_layer_that_reads_the_stream_itself_has_no_normed_stage() -> None:
    observed = observe(DECODERS["olmo2"])
    stages = run(observed.layers[0], observed.seen[0].x)
    assert stages.attention_normed is None
    assert stages.feed_forward.normed is None


def test_the_stages_around_a_mixture() -> None:
    observed = observe(DECODERS["qwen2_moe"])
    stages = run(observed.layers[0], observed.seen[0].x)
    block, mixture = stages.feed_forward, stages.mixture
    assert mixture is not None
    assert (block.gate, block.up, block.activated, block.hidden) == (None, None, None, None)
    assert torch.equal(block.down, mixture.down)
    assert torch.equal(mixture.down, mixture.routed + mixture.shared)
    assert torch.equal(stages.output, stages.middle + block.contribution)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "mixtral"])
def test_any_number_of_batch_axes(name: str) -> None:
    observed = observe(DECODERS[name])
    layer, x = observed.layers[1], observed.seen[1].x
    whole = run(layer, x).output
    torch.testing.assert_close(run(layer, x[0]).output, whole[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run(layer, x[None, :, None]).output[0, :, 0], whole, rtol=1e-5, atol=1e-5)
    assert run(layer, x[:0]).output.shape == (0, *x.shape[1:])
    assert run(layer, x[:, :0]).output.shape == (2, 0, x.shape[-1])


def test_one_token_is_a_sequence() -> None:
    for name in ("llama", "mistral", "gemma2", "deepseek_v2", "gpt_oss"):
        observed = observe(DECODERS[name], tokens=1)
        for layer, seen in zip(observed.layers, observed.seen, strict=True):
            assert relative(run(layer, seen.x).output, seen.output) < FLOAT32


# What cannot be


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (lambda llama, cohere: {"feed_forward": cohere_sized(32)}, "feed_forward"),
        (lambda llama, cohere: {"feed_forward_wiring": cohere.feed_forward_wiring}, "feed_forward_wiring"),
        (
            lambda llama, cohere: {
                "attention_wiring": cohere.attention_wiring,
                "feed_forward_wiring": replace(cohere.feed_forward_wiring, residual_scale=2.0),
            },
            "feed_forward_wiring",
        ),
    ],
)
def test_branches_that_do_not_go_together_are_refused(changes: Any, field: str) -> None:
    llama, cohere = observe(DECODERS["llama"]).layers[0], observe(DECODERS["cohere"]).layers[0]
    with pytest.raises(InvalidValue) as caught:
        replace(llama, **changes(llama, cohere))
    assert caught.value.field == field


def cohere_sized(d: int) -> Any:
    return make_feed_forward(d, 12)
