"""Attention, experts, layers and texts over HTTP: the numbers of transformers' own modules, and what is refused."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from glassblock.api.entry import connect
from glassblock.errors import FamilyMismatch, InvalidValue, TooLarge
from glassblock.operations import texts
from glassblock_client import Client, Overrides, Sample
from reference_models import randomise
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# Both sides sum at most 128 products in float32, perhaps in another order.
ROUNDING = 2e-6
IDS = [5, 17, 3, 42, 90, 0, 61]
WORDS = "the cat sat on the mat"
BASE = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**BASE),
    "gptj": transformers.GPTJConfig(n_embd=48, n_head=4, n_layer=3, n_positions=64, rotary_dim=8, vocab_size=96),
    "mixtral": transformers.MixtralConfig(**BASE, num_local_experts=4),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **BASE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40
    ),
    "bloom": transformers.BloomConfig(hidden_size=48, n_head=4, n_layer=2, vocab_size=96),
}


@pytest.fixture(scope="module")
def models_by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("models")
    made: dict[str, Any] = {"root": root}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for tensor in model.parameters():
            randomise(tensor)
        model.save_pretrained(root / name)
        made[name] = model
    words = {word: number for number, word in enumerate(["<unk>", *dict.fromkeys(WORDS.split())])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(root / "llama" / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def transport(models_by_name: dict[str, Any]) -> Any:
    with connect(roots=[models_by_name["root"]], device="cpu") as transport:
        yield transport


def relative(found: Any, expected: torch.Tensor) -> float:
    expected = expected.detach()
    assert tuple(found.shape) == tuple(expected.shape)
    return float(np.abs(found - expected.numpy()).max() / expected.abs().max())


def calls_of(model: Any, modules: dict[str, Any]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """First input and first output of each module, of one run on `IDS`."""
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    hooks = []
    for name, module in modules.items():

        def hook(_m: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            read = args[0] if args else kwargs["hidden_states"]
            found[name] = (read.clone()[0], (output[0] if isinstance(output, tuple) else output).clone()[0])

        hooks.append(module.register_forward_hook(hook, with_kwargs=True))
    with torch.no_grad():
        model(torch.tensor([IDS]), use_cache=False)
    for hook_ in hooks:
        hook_.remove()
    return found


def test_a_layer_run_from_token_ids_is_the_models(client: Client, models_by_name: dict[str, Any]) -> None:
    model = models_by_name["llama"]
    block = model.model.layers[1]
    theirs = calls_of(
        model,
        {
            "layer": block,
            "attention_normed": block.input_layernorm,
            "attention": block.self_attn.o_proj,
            "ffn": block.post_attention_layernorm,
            "gate": block.mlp.gate_proj,
            "hidden": block.mlp.down_proj,
        },
    )
    client.evict("llama")
    run = client.run_block("llama", 1, part="layer", token_ids=IDS, return_tensors=True)
    expected = {
        "x": theirs["layer"][0],
        "attention_normed": theirs["attention_normed"][1],
        "attention_attended": theirs["attention"][0],
        "attention_projected": theirs["attention"][1],
        "middle": theirs["ffn"][0],
        "normed": theirs["ffn"][1],
        "gate": theirs["gate"][1],
        "hidden": theirs["hidden"][0],
        "down": theirs["hidden"][1],
        "output": theirs["layer"][1],
    }
    errors = {stage: relative(run.tensors[stage], tensor) for stage, tensor in expected.items()}
    assert max(errors.values()) <= ROUNDING, errors
    assert list(run.tensors) == [
        *("x", "attention_normed", "attention_query", "attention_key", "attention_value", "attention_attended"),
        *("attention_projected", "attention_contribution", "middle", "normed", "gate", "up", "activated", "hidden"),
        *("down", "contribution", "output"),
    ]
    assert run.tensors["attention_query"].shape == (4, len(IDS), 12)
    assert run.answer.token_ids == IDS
    # Layers 0 and 1 and seven rows of the embedding, each byte once.
    layer = (2 * (48 + 24) * 48 + 3 * 48 * 96 + 2 * 48) * 4
    assert run.answer.read.bytes == 2 * layer + len(IDS) * 48 * 4


@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_the_block_of_a_text_reads_what_attention_left(
    client: Client, models_by_name: dict[str, Any], name: str
) -> None:
    model = models_by_name[name]
    block = (model.model.layers if name == "llama" else model.transformer.h)[2]
    theirs = calls_of(model, {"layer": block, "mlp": block.mlp})
    run = client.run_block(name, 2, token_ids=IDS, return_tensors=True)
    assert relative(run.tensors["down"], theirs["mlp"][1]) <= ROUNDING
    assert relative(run.tensors["output"], theirs["layer"][1]) <= ROUNDING
    assert run.answer.recombination_error is not None
    assert run.answer.recombination_error <= ROUNDING


def test_attention_alone_on_posted_states(client: Client, models_by_name: dict[str, Any]) -> None:
    block = models_by_name["llama"].model.layers[0]
    theirs = calls_of(models_by_name["llama"], {"layer": block, "ffn": block.post_attention_layernorm})
    x = theirs["layer"][0].numpy()
    run = client.run_block("llama", 0, part="attention", x=x, return_tensors=True)
    assert relative(run.tensors["output"], theirs["ffn"][0]) <= ROUNDING
    assert run.answer.parameters == 2 * (48 + 24) * 48
    assert run.answer.activation is None
    assert run.answer.eps["input"].source == "config.json: rms_norm_eps"
    batch = client.run_block("llama", 0, part="attention", x=np.stack([x, x[::-1].copy()]), return_tensors=True)
    assert np.allclose(batch.tensors["output"][0], run.tensors["output"], atol=1e-6)
    assert not np.allclose(batch.tensors["output"][1], run.tensors["output"], atol=1e-2)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_a_mixture_is_the_modules(client: Client, models_by_name: dict[str, Any], name: str) -> None:
    model = models_by_name[name]
    block = model.model.layers[1]
    theirs = calls_of(model, {"layer": block, "mlp": block.mlp})
    run = client.run_block(name, 1, token_ids=IDS, return_tensors=True)
    assert relative(run.tensors["down"], theirs["mlp"][1]) <= ROUNDING
    assert relative(run.tensors["output"], theirs["layer"][1]) <= ROUNDING
    assert run.tensors["chosen"].shape == (len(IDS), 2)
    assert run.tensors["chosen"].dtype == np.int64
    assert ("shared" in run.tensors) == (name == "qwen2_moe")
    used = {int(number) for number in run.tensors["chosen"].ravel()}
    routed = np.zeros_like(run.tensors["routed"])
    for number in used:  # one expert alone, weighed by hand, makes the whole
        alone = client.run_block(name, 1, expert=number, x=run.tensors["x"], return_tensors=True)
        assert set(alone.tensors) == {"x", "normed", "gate", "up", "activated", "hidden", "down"}
        assert alone.answer.notes == ()
        weight = np.where(run.tensors["chosen"] == number, run.tensors["weights"], 0).sum(-1)
        routed += alone.tensors["down"] * weight[:, None]
    assert np.abs(routed - run.tensors["routed"]).max() <= 1e-5 * np.abs(routed).max()
    width, shared = (96, 0) if name == "mixtral" else (24, 40)
    assert run.answer.hidden_elements == len(IDS) * (2 * width + shared)
    gates = 0 if name == "mixtral" else 48
    assert run.answer.parameters == 4 * 48 + gates + 3 * 48 * (len(used) * width + shared)


def test_the_shared_expert_and_a_change_to_experts(client: Client) -> None:
    x = np.random.default_rng(0).standard_normal((3, 48), dtype=np.float32)
    shared = client.run_block("qwen2_moe", 0, expert="shared", x=x)
    assert shared.answer.stages["hidden"].shape == (3, 40)
    plain = client.run_block("qwen2_moe", 0, x=x, return_tensors=True)
    swapped = client.run_block("qwen2_moe", 0, x=x, overrides=Overrides(swap=True), return_tensors=True)
    assert np.array_equal(swapped.tensors["router_logits"], plain.tensors["router_logits"])
    assert np.abs(swapped.tensors["down"] - plain.tensors["down"]).max() > 0.05


def test_likelihoods_are_the_models(client: Client, models_by_name: dict[str, Any]) -> None:
    ids = [IDS, IDS[::-1]]
    answer = client.likelihoods("llama", token_ids=ids)
    with torch.no_grad():
        logs = models_by_name["llama"](torch.tensor(ids)).logits.log_softmax(-1)
    expected = logs[:, :-1].gather(-1, torch.tensor(ids)[:, 1:, None])[..., 0]
    # Sums over 96 words in float32.
    assert np.abs(np.array(answer.log_likelihoods) - expected.numpy()).max() <= 1e-5
    assert answer.mean == pytest.approx(np.mean(answer.log_likelihoods), abs=1e-6)
    assert answer.token_ids == ids
    assert answer.read.bytes > 0
    assert client.likelihoods("llama", token_ids=IDS, dtype="bfloat16").compute_dtype == "bfloat16"


def test_a_text_is_tokenised_with_the_checkpoints_own_tokenizer(client: Client) -> None:
    by_text = client.likelihoods("llama", text=WORDS)
    assert by_text.token_ids == [1, 2, 3, 4, 1, 5]
    assert by_text.log_likelihoods == client.likelihoods("llama", token_ids=[1, 2, 3, 4, 1, 5]).log_likelihoods
    run = client.run_block("llama", 1, text=WORDS)
    assert run.answer.token_ids == by_text.token_ids
    norms = client.norm_statistics(checkpoint="llama", layer=1, norm="ffn_in", text=WORDS)
    assert norms.tensors["output"].shape == (6, 48)


@pytest.mark.parametrize("role", ["attn_in", "ffn_in", "final"])
def test_norms_of_a_text_read_what_the_modules_read(client: Client, models_by_name: dict[str, Any], role: str) -> None:
    model = models_by_name["llama"]
    block = model.model.layers[1]
    modules = {"attn_in": block.input_layernorm, "ffn_in": block.post_attention_layernorm, "final": model.model.norm}
    theirs = calls_of(model, modules)[role]
    layer = None if role == "final" else 1
    found = client.norm_statistics(checkpoint="llama", layer=layer, norm=role, token_ids=IDS)
    assert relative(found.tensors["output"], theirs[1]) <= ROUNDING


def test_layers_that_lie_on_the_device_are_not_read_again(client: Client) -> None:
    client.evict("llama")
    first = client.likelihoods("llama", token_ids=IDS)
    again = client.likelihoods("llama", token_ids=IDS)
    assert again.log_likelihoods == first.log_likelihoods
    layers = 3 * (2 * (48 + 24) * 48 + 3 * 48 * 96 + 2 * 48) * 4
    rows, norm, head = len(IDS) * 48 * 4, 48 * 4, 96 * 48 * 4
    assert first.read.bytes == layers + rows + norm + head
    assert again.read.bytes == rows + norm + head


def test_jacobians_of_attention_and_of_a_layer(client: Client) -> None:
    answers = {
        part: client.jacobians("llama", [1], part=part, token_ids=IDS[:4], norms=("frobenius", "spectral")).answer
        for part in ("attention", "layer")
    }
    for part, answer in answers.items():
        whole = answer.layers[0].whole
        assert whole is not None, part
        assert whole.frobenius is not None
        assert whole.spectral is not None
        assert whole.spectral.lower <= whole.spectral.upper
        assert whole.spectral.lower <= whole.frobenius.frobenius + 6 * whole.frobenius.standard_error
        assert whole.spectral.adjoint_error <= 1e-5
    later = client.jacobians(
        "llama",
        [1],
        part="attention",
        token_ids=IDS[:4],
        input_positions=[3],
        output_positions=[0, 1, 2],
        norms=("frobenius",),
    )
    whole = later.answer.layers[0].whole
    assert whole is not None
    assert whole.frobenius is not None
    assert whole.frobenius.frobenius == 0  # no token sees a later one


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "x and a text": (
        {"x": np.ones((2, 48), np.float32), "token_ids": IDS},
        InvalidValue,
        "a text and x are both given",
    ),
    "two texts": ({"token_ids": IDS, "text": "the"}, InvalidValue, "token_ids and text are both given"),
    "no token": ({"token_ids": []}, InvalidValue, "token_ids holds no token"),
    "ragged": ({"token_ids": [[1, 2], [3]]}, InvalidValue, "texts of 1 to 2 tokens"),
    "a token beyond": ({"token_ids": [1, 96]}, InvalidValue, "token 96 is outside the vocabulary"),
    "a negative token": ({"token_ids": [-1]}, InvalidValue, "token -1 is outside"),
    "a huge number": ({"token_ids": [2**70]}, InvalidValue, "no token"),
    "too long": ({"token_ids": [1] * 40_000}, TooLarge, "40,000 tokens"),
    "rows as a text": ({"part": "layer", "sample": Sample(rows=2)}, InvalidValue, "sampled rows are no text"),
    "one row": ({"part": "attention", "x": np.ones(48, np.float32)}, InvalidValue, "attention reads sequences"),
    "an expert of attention": (
        {"part": "attention", "expert": 1, "token_ids": IDS},
        InvalidValue,
        "an expert is a feed",
    ),
    "an expert of a dense layer": ({"expert": 1, "sample": Sample(rows=2)}, InvalidValue, "layer 0 is dense"),
    "a gate of attention": (
        {"part": "attention", "token_ids": IDS, "overrides": Overrides(swap=True)},
        InvalidValue,
        "swap changes the feed-forward block",
    ),
    "parallel alone": (
        {"part": "layer", "token_ids": IDS, "overrides": Overrides(placement="parallel")},
        InvalidValue,
        "cannot be parallel alone",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_told(client: Client, name: str) -> None:
    arguments, error, says = REFUSED[name]
    with pytest.raises(error, match=says):
        client.run_block("llama", 0, **arguments)


def test_an_expert_that_is_not_there_is_told(client: Client) -> None:
    with pytest.raises(InvalidValue, match="has no expert 4"):
        client.run_block("mixtral", 0, expert=4, sample=Sample(rows=2))
    with pytest.raises(InvalidValue, match="has no expert shared"):
        client.run_block("mixtral", 0, expert="shared", sample=Sample(rows=2))


def test_a_family_without_attention_says_so_and_runs_posted_states(client: Client) -> None:
    for ask in (
        lambda: client.likelihoods("bloom", token_ids=IDS),
        lambda: client.run_block("bloom", 0, part="layer", token_ids=IDS),
        lambda: client.run_block("bloom", 1, token_ids=IDS),
    ):
        with pytest.raises(FamilyMismatch, match="the attention of the family bloom is not read here"):
            ask()
    x = np.random.default_rng(0).standard_normal((2, 48), dtype=np.float32)
    assert client.run_block("bloom", 0, x=x).answer.stages["output"].shape == (2, 48)


def test_jacobians_of_a_text_in_words_are_at_the_states_it_reaches(client: Client) -> None:
    told = client.jacobians("llama", [0, 1], text=WORDS, norms=["frobenius"]).answer
    assert told.token_ids is not None
    same = client.jacobians("llama", [0, 1], token_ids=told.token_ids, states="reached", norms=["frobenius"]).answer
    assert (told.states, told.layers) == ("reached", same.layers)
    rows = client.jacobians("llama", [1], text=WORDS, states="embedding", norms=["frobenius"]).answer
    assert rows.states == "embedding"
    assert rows.layers[0].tokens != told.layers[1].tokens


@pytest.mark.parametrize(("text", "says"), [("the cat", "the checkpoint has no tokenizer.json"), ("", "at least 1")])
def test_a_text_without_a_tokenizer_is_told(client: Client, text: str, says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        client.likelihoods("mixtral", text=text)


def test_a_tokenizer_that_cannot_be_read_is_told(client: Client, models_by_name: dict[str, Any]) -> None:
    broken: Path = models_by_name["root"] / "gptj" / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(InvalidValue, match=r"tokenizer\.json cannot be read"):
        client.likelihoods("gptj", text="the")
    by_ids = client.likelihoods("gptj", token_ids=[1, 2])
    assert by_ids.pieces is None
    assert any("tokens' text is not told" in note for note in by_ids.notes)
    broken.unlink()
    assert not any("not told" in note for note in client.likelihoods("gptj", token_ids=[1, 2]).notes)


WORD_LEVEL: dict[str, Any] = {"type": "WordLevel", "vocab": {"a": 0, "b": 2}, "unk_token": "a"}


@pytest.mark.parametrize("model", [WORD_LEVEL | {"unk_token": "c"}, WORD_LEVEL], ids=["an error", "a panic"])
def test_a_tokenizer_that_gives_up_over_a_text_is_told(
    client: Client, models_by_name: dict[str, Any], model: dict[str, Any]
) -> None:
    """Its file is read; what lacks shows with the text, as a bare exception, or as a panic of the library."""
    pair = [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": pair, "pair": pair, "special_tokens": {}}
    broken: Path = models_by_name["root"] / "gptj" / "tokenizer.json"
    broken.write_text(json.dumps({"version": "1.0", "added_tokens": [], "post_processor": template, "model": model}))
    try:
        with pytest.raises(InvalidValue, match=r"tokenizer\.json cannot tokenise the text"):
            client.likelihoods("gptj", text="the")
    finally:
        broken.unlink()


def test_likelihoods_tell_the_piece_of_text_that_each_token_is(client: Client) -> None:
    told = client.likelihoods("llama", token_ids=[1, 2, 3, 4, 1, 5])
    assert told.pieces is not None
    assert "".join(map(str, told.pieces)) == WORDS
    several = client.likelihoods("llama", token_ids=[[1, 2], [1, 5]])
    assert several.pieces == (("the", " cat"), ("the", " mat"))
    assert client.likelihoods("mixtral", token_ids=[1, 2]).pieces is None


def test_pieces_of_a_character_are_told_as_the_vocabulary_has_them() -> None:
    """Of bytes, two of which make a letter; and a token whose space a decoder drops at the start."""
    alphabet = {"Ã": 0, "©": 1, "a": 2, "Ġa": 3}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    assert list(texts._pieces(tokenizer, [0, 1, 3, 2])) == ["Ã", "©", " a", "a"]  # pyright: ignore[reportPrivateUsage]


def test_one_token_has_no_likelihood(client: Client) -> None:
    with pytest.raises(InvalidValue, match="nothing stands before it"):
        client.likelihoods("llama", token_ids=[3])


def test_a_truth_value_is_no_token(http: httpx.Client) -> None:
    answer = http.post("/v1/likelihoods", json={"checkpoint": "llama", "token_ids": [1, True]})
    assert answer.status_code == 422, answer.text
    assert "token_ids" in answer.json()["field"]
    assert json.loads(answer.text)["code"] == "invalid-value"
