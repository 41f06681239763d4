"""`glassblock jacobian` against a service that answers from a table; its tables and its pictures."""

import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from glassblock.errors import InvalidValue, TooLarge
from glassblock.wire.jacobians import (
    Depth,
    DepthCurve,
    JacobiansAnswer,
    LayerJacobians,
    SelfCheck,
    SpectralNorm,
    TokenJacobian,
)
from glassblock.wire.values import BytesRead, Sourced
from glassblock_client.cli import jacobian_plot
from glassblock_client.tensors import wire_from_array
from makers import Tiny, tiny_checkpoint

from client.fake_service import DETAIL, FakeService, finished_audit, json_response, problem_response
from client.test_clients import BOTH
from client.test_command_line import invoke

TOKENS = 12


def layer(number: int, placement: Any = "pre", *, odd: int = 7) -> LayerJacobians:
    """Token `odd` stands out a hundredfold."""
    sizes = [(20.0 + token / 10) * (100 if token == odd else 1) for token in range(TOKENS)]
    return LayerJacobians(
        layer=number,
        placement=placement,
        eps={"input": Sourced(value=1e-5, source="config.json: rms_norm_eps")},
        tokens=tuple(
            TokenJacobian(
                frobenius=size,
                spectral=SpectralNorm(lower=size / 5, upper=size / 5 * 1.001, certain=False, converged=True),
                trace=size,
                radial_gain=1.0,
            )
            for size in sizes
        ),
        method="gram",
        exactness="exact",
        flops=10**9,
        bytes=10**6,
        accumulation="float32",
        cancellation=2.0,
        redone=(odd,),
        self_check=SelfCheck(relative_difference=1e-10, tokens=TOKENS, step=1e-5, seed=0),
    )


def answer(layers: Any = (0,), **changes: Any) -> JacobiansAnswer:
    fields: dict[str, Any] = {
        "checkpoint": "tiny",
        "part": "block",
        "family": "llama",
        "device": "cpu",
        "width": 64,
        "norms": ("frobenius", "spectral"),
        "token_ids": tuple(range(100, 100 + TOKENS)),
        "layers": tuple(layer(number) for number in layers),
        "read": BytesRead(bytes=10, tensors=1),
    }
    return JacobiansAnswer(**fields | changes)


def depth() -> Depth:
    curve = DepthCurve(
        frobenius=[[9.0, 8.0], [3.0, 2.0]],
        standard_error=[[0.1, 0.1]] * 2,
        spectral_lower=[[2.0, 2.0], [1.0, 1.0]],
        product_upper=[[90.0, 80.0], [3.0, 2.0]],
    )
    return Depth(
        layers=(0, 1),
        placement="pre",
        part="block",
        coupled=False,
        residual_rms=[[1.0, 1.0]] * 3,
        added=[[0.1, 0.1]] * 2,
        layer_spectral=[[[1.0, 1.0]] * 2] * 2,
        to_end=curve,
        from_start=curve,
        exactness="estimated",
        probes=16,
        steps=2,
        seed=0,
        failure_probability=1e-9,
        accumulation="float32",
        layer_products=100,
    )


def by_layer(request: httpx.Request) -> httpx.Response:
    """Answers for the layers asked for, in the placements asked for."""
    sent = json.loads(request.content) if request.headers["Content-Type"] == "application/json" else {"layers": [0]}
    placements = sent.get("placement", ["pre"])
    layers = tuple(layer(number, placement) for number in sent["layers"] for placement in placements)
    return json_response(
        answer(layers=(), depth=depth() if sent.get("depth") else None).model_copy(update={"layers": layers})
    )


@pytest.fixture
def service() -> FakeService:
    return FakeService({"POST /v1/jacobians": by_layer, "GET /v1/checkpoints/tiny": DETAIL})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    return folder


@BOTH
def test_both_clients_send_what_they_were_given(ask: Any) -> None:
    service = FakeService({"POST /v1/jacobians": answer()})
    reply = ask(
        service,
        lambda c: c.jacobians(
            "tiny", range(2), part="branch", placement=["pre", "post"], token_ids=[3], norms=["trace"]
        ),
    )
    assert reply.answer == answer()
    assert service.sent() == {
        "checkpoint": "tiny",
        "layers": [0, 1],
        "part": "branch",
        "placement": ["pre", "post"],
        "token_ids": [3],
        "norms": ["trace"],
    }
    assert service.asked[0].headers["Accept"] == "application/json"


def test_layers_are_asked_for_one_by_one_and_come_out_together(service: FakeService, checkpoint: Path) -> None:
    result = invoke(
        service, "jacobian", checkpoint, "--layers", "0-2,5", "--sample", 4, "--seed", 9, "--format", "json"
    )
    assert result.exit_code == 0, result.output
    told = JacobiansAnswer.model_validate_json(result.stdout)
    assert [one.layer for one in told.layers] == [0, 1, 2, 5]
    assert [service.sent(number)["layers"] for number in range(4)] == [[0], [1], [2], [5]]
    assert service.sent()["sample"] == {"rows": 4, "seed": 9}
    assert service.sent()["seed"] == 9
    assert told.read.bytes == 40
    assert any("same rows" in note for note in told.notes)


def test_all_layers_where_none_are_named_and_the_chain_first(service: FakeService, checkpoint: Path) -> None:
    result = invoke(service, "jacobian", checkpoint, "--token-ids", "1,2", "--depth", "--placement", "pre,post")
    assert result.exit_code == 0, result.output
    sent = [service.sent(number) for number in range(1, len(service.asked))]
    assert sent[0]["depth"] is True
    assert sent[0]["layers"] == [0, 1, 2, 3]
    assert [one["layers"] for one in sent[1:]] == [[0], [1], [2], [3]]
    assert {tuple(one["placement"]) for one in sent} == {("pre", "post")}
    assert result.stdout.count("post") == 4
    assert "1.0e-10" in result.stdout


def test_a_text_goes_as_it_was_given(service: FakeService, checkpoint: Path, tmp_path: Path) -> None:
    assert invoke(service, "jacobian", checkpoint, "--layers", 1, "--text", "Once upon").exit_code == 0
    assert service.sent()["text"] == "Once upon"
    file = tmp_path / "ids.json"
    file.write_text("[5, 6, 7]", encoding="utf-8")
    result = invoke(service, "jacobian", checkpoint, "--layers", 1, "--tokens", file, "--states", "reached")
    assert result.exit_code == 0, result.output
    assert (service.sent()["token_ids"], service.sent()["states"]) == ([5, 6, 7], "reached")


def test_layers_that_a_text_reached_are_not_said_to_have_the_same_rows(checkpoint: Path) -> None:
    def reached(request: httpx.Request) -> httpx.Response:
        found = json.loads(by_layer(request).content)
        return httpx.Response(200, json=found | {"states": "reached"})

    service = FakeService({"POST /v1/jacobians": reached, "GET /v1/checkpoints/tiny": DETAIL})
    result = invoke(service, "jacobian", checkpoint, "--layers", "0,1", "--text", "Once upon")
    assert result.exit_code == 0, result.output
    assert "same rows" not in result.stdout
    assert f"what a text of {TOKENS} tokens is at each layer" in result.stdout


@pytest.mark.parametrize("fits", [True, False])
def test_a_text_passes_the_layers_below_once_where_one_answer_holds_them_all(checkpoint: Path, fits: bool) -> None:
    """The first layer tells that the model's states are meant; the others are one job, or else as many requests."""
    asked: list[tuple[list[int], bool]] = []

    def reached(request: httpx.Request) -> httpx.Response:
        layers, as_job = json.loads(request.content)["layers"], request.headers.get("Prefer") == "respond-async"
        asked.append((layers, as_job))
        if as_job and not fits:
            return problem_response(TooLarge("too many tokens"), 413)
        told = answer(layers, states="reached")
        return json_response(told if not as_job else finished_audit(), 202 if as_job else 200)

    service = FakeService({"POST /v1/jacobians": reached, "GET /v1/audits/a1/answer": answer((1, 2), states="reached")})
    result = invoke(service, "jacobian", checkpoint, "--layers", "0-2", "--text", "Once upon", "--format", "json")
    assert result.exit_code == 0, result.output
    assert [layer["layer"] for layer in json.loads(result.stdout)["layers"]] == [0, 1, 2]
    assert asked == [([0], False), ([1, 2], True), *([] if fits else [([1], False), ([2], False)])]


def test_one_layer_is_listed_token_by_token(service: FakeService, checkpoint: Path) -> None:
    result = invoke(service, "jacobian", checkpoint, "--layers", 3, "--sample", TOKENS)
    assert result.exit_code == 0, result.output
    assert re.search(r"7\s+107\s+2070\s+414", result.stdout), result.stdout
    assert "redone in float64  1 tokens" in result.stdout


def test_each_layer_may_have_its_own_input(service: FakeService, checkpoint: Path, tmp_path: Path) -> None:
    from glassblock.wire.framing import frame  # noqa: PLC0415

    file = tmp_path / "states.safetensors"
    arrays = {f"layers.{n}.x": np.full((TOKENS, 4), float(n), np.float32) for n in (0, 2)}
    arrays["token_ids"] = np.arange(TOKENS) + 500
    file.write_bytes(b"".join(frame("request", "{}", {name: wire_from_array(a) for name, a in arrays.items()})))
    result = invoke(service, "jacobian", checkpoint, "--layers", "0,2", "--input", file, "--format", "json")
    assert result.exit_code == 0, result.output
    told = JacobiansAnswer.model_validate_json(result.stdout)
    assert told.token_ids == tuple(range(500, 500 + TOKENS))
    assert not any("same rows" in note for note in told.notes)
    assert service.asked[0].content != service.asked[1].content
    missing = invoke(service, "jacobian", checkpoint, "--layers", "1", "--input", file)
    assert missing.exit_code == 2
    assert "holds no layers.1.x" in missing.stderr
    arrays["token_ids"] = np.full(TOKENS, np.nan)
    file.write_bytes(b"".join(frame("request", "{}", {name: wire_from_array(a) for name, a in arrays.items()})))
    refused = invoke(service, "jacobian", checkpoint, "--layers", "0", "--input", file)
    assert refused.exit_code == 2
    assert "token ids are integers" in refused.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give one of --input"),
        (["--sample", 1, "--token-ids", "1"], "give one of --input"),
        (["--text", "a", "--token-ids", "1"], "give one of --input"),
        (["--sample", 1, "--states", "reached"], "--states has no effect"),
        (["--sample", 1, "--layers", "3-1"], "empty"),
        (["--sample", 1, "--layers", "a"], "neither a number nor a range"),
        (["--sample", 1, "--layers", ","], "names nothing"),
        (["--sample", 1, "--norms", "nuclear"], "norms"),
        (["--sample", 1, "--placement", "pre,inside"], "no placement 'inside'"),
        (["--token-ids", "1,x"], "neither a number"),
        (["--sample", 1, "--plot", "a.pdf"], "none of these kinds"),
        (["--sample", 1, "--plot", "no/such/folder/a.png"], "folder"),
        (["--sample", 1, "--plot", "a.png", "--norms", "trace"], "nothing can be drawn"),
        (["--token-ids", "1,2", "--plot", "a.png", "--part", "layer"], "nothing can be drawn"),
    ],
)
def test_what_cannot_be_used_is_told_before_any_work(checkpoint: Path, options: list[Any], words: str) -> None:
    service = FakeService({"GET /v1/checkpoints/tiny": DETAIL})
    result = invoke(service, "jacobian", checkpoint, *options)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert "POST" not in {request.method for request in service.asked}


def test_without_matplotlib_it_says_which_extra(
    service: FakeService, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    result = invoke(service, "jacobian", checkpoint, "--sample", 1, "--plot", tmp_path / "a.png")
    assert result.exit_code == 2
    assert "glassblock[plot]" in result.stderr
    assert not service.asked


def test_matplotlib_waits_until_a_picture_is_asked_for() -> None:
    code = "import sys, glassblock_client.cli.jacobian; print('matplotlib' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"


def test_pictures(service: FakeService, checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for suffix in jacobian_plot.SUFFIXES:
        file = tmp_path / f"a{suffix}"
        result = invoke(
            service, "jacobian", checkpoint, "--sample", TOKENS, "--depth", "--layers", "0,1", "--plot", file
        )
        assert result.exit_code == 0, result.output
        assert str(file) in result.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    drawn = ET.fromstring((tmp_path / "a.svg").read_text())
    assert drawn.tag.endswith("svg")
    page = (tmp_path / "a.html").read_text()
    assert "<svg" in page
    assert "‖J‖_F" in page
    assert not re.search(r"(src|href)=.?https?:|@import|url\(http", page)


def test_a_picture_names_the_token_that_stands_out_and_is_the_same_every_time() -> None:
    pytest.importorskip("matplotlib")
    both = answer().model_copy(update={"layers": tuple(layer(n, p) for n in range(3) for p in ("pre", "post"))})
    figure = jacobian_plot.figure_of(both)
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told == ["pre-norm", "post-norm", "the identity", "token 107 (position 7)"]
    assert all(axis.get_yscale() == "log" for axis in figure.axes)
    assert jacobian_plot.picture(both, ".svg") == jacobian_plot.picture(both, ".svg")
    unnamed = both.model_copy(update={"token_ids": None})
    assert "position 7" in {text.get_text() for text in jacobian_plot.figure_of(unnamed).legends[0].get_texts()}


def test_zeros_and_infinities_are_left_out_and_nothing_to_draw_is_told() -> None:
    pytest.importorskip("matplotlib")
    first, second, *rest = layer(0).tokens
    odd = (first.model_copy(update={"frobenius": 0.0}), second.model_copy(update={"frobenius": float("inf")}), *rest)
    assert jacobian_plot.picture(with_tokens(odd), ".png")
    with pytest.raises(InvalidValue, match="nothing can be drawn"):
        jacobian_plot.picture(with_tokens((TokenJacobian(trace=1.0),)), ".png")


def with_tokens(tokens: tuple[TokenJacobian, ...]) -> JacobiansAnswer:
    return answer().model_copy(update={"layers": (layer(0).model_copy(update={"tokens": tokens}),)})


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT is sent to a child")
@pytest.mark.skipif(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="a child would ignore SIGINT as we do")
def test_ctrl_c_ends_it_within_two_seconds_and_says_nothing_but_that(tmp_path: Path) -> None:
    """One second for the work to let go, and one for the interpreter to end."""
    wide = Tiny(hidden=1024, intermediate=4096, layers=1, heads=2, kv_heads=1, head_dim=16, vocab=4096)
    tiny_checkpoint("llama", tmp_path / "wide", tiny=wide)
    command = [sys.executable, "-m", "glassblock_client", "jacobian", str(tmp_path / "wide"), "--sample", "4000"]
    # Every singular value of 4000 matrices of 1024 by 1024: an hour.
    work = subprocess.Popen(
        [*command, "--norms", "condition_number"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        time.sleep(4.0)
        assert work.poll() is None, work.communicate()
        asked = time.monotonic()
        work.send_signal(signal.SIGINT)
        out, told = work.communicate(timeout=30)
        assert time.monotonic() - asked < 2.0
    finally:
        work.kill()
    assert work.returncode == 130
    assert (out, told.strip()) == ("", "interrupted")


def test_experts_are_listed_each_and_drawn_together(tmp_path: Path) -> None:
    """The real service: a mixture's experts at their own tokens."""
    model = tiny_checkpoint("mixtral", tmp_path / "mixtral")
    result = invoke(None, "jacobian", model, "--layers", "0,1", "--sample", 6)
    assert result.exit_code == 0, result.output
    assert {"layer", "expert", "tokens"} <= set(result.stdout.split())
    assert "derivatives of the router" in " ".join(result.stdout.split())
    told = json.loads(
        invoke(None, "jacobian", model, "--layers", 0, "--sample", 6, "--expert", 1, "--format", "json").stdout
    )
    assert [layer["expert"] for layer in told["layers"]] == [1]
    assert invoke(None, "jacobian", model, "--layers", 0, "--sample", 6, "--expert", "odd").exit_code == 2
    drawn = tmp_path / "experts.svg"
    assert invoke(None, "jacobian", model, "--layers", "0,1", "--sample", 6, "--plot", drawn).exit_code == 0
    ET.parse(drawn)


def test_whole_layers_say_over_which_positions_and_draw_their_depth(tmp_path: Path) -> None:
    model, drawn = tiny_checkpoint("llama", tmp_path / "llama"), tmp_path / "depth.svg"
    options = ("--part", "layer", "--token-ids", "3,4,5", "--depth", "--plot", drawn)
    result = invoke(None, "jacobian", model, *options)
    assert result.exit_code == 0, result.output
    assert "the positions 0 to 2 by 0 to 2" in " ".join(result.stdout.split())
    assert "same rows" not in result.stdout
    ET.parse(drawn)
