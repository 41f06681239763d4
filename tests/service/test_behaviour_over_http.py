"""A text of an audit over HTTP and on the command line: taken as elsewhere, refused at once, told in the report."""

import json
from pathlib import Path

import httpx
import pytest
from client.test_command_line import invoke
from glassblock.audit.behaviour_study import MOST_TOKENS
from glassblock.errors import InvalidValue
from glassblock_client import Client

TRAINED = Path(__file__).resolve().parents[2] / "examples" / "tiny-llama"
IDS = [(7 * place) % 90 for place in range(40)]


def test_token_ids_make_the_report_tell_behaviour(client: Client) -> None:
    report = client.audit_checkpoint("llama", token_ids=IDS)
    assert report.behaviour is not None
    assert report.behaviour.tokens == len(IDS) - 1
    alone = client.likelihoods("llama", token_ids=IDS)
    assert report.behaviour.mean == alone.mean
    assert client.audit_checkpoint("llama").behaviour is None
    assert client.audit_checkpoint("llama", token_ids=IDS) == report


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"token_ids": [1]}, "token_ids"),
        ({"token_ids": [1, 10_000]}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [[1, 2], [3]]}, "token_ids"),
        ({"text": "a text, and no tokenizer"}, "text"),
        ({"token_ids": [1, 2], "text": "both"}, "text"),
    ],
)
def test_a_text_that_cannot_be_asked_about_is_refused_at_once(
    http: httpx.Client, request_: dict[str, object], field: str
) -> None:
    refused = http.post("/v1/audits", json={"checkpoint": "llama", **request_})
    assert refused.status_code == 422
    assert refused.json()["field"] == field


def test_an_audit_with_a_text_is_quoted(client: Client) -> None:
    without = client.plan("start_audit", {"checkpoint": "llama"})
    quoted = client.plan("start_audit", {"checkpoint": "llama", "token_ids": IDS})
    assert quoted.bytes_read > without.bytes_read
    assert quoted.flops > without.flops
    assert quoted.peak_bytes >= without.peak_bytes
    with pytest.raises(InvalidValue, match="no token"):
        client.plan("start_audit", {"checkpoint": "llama", "token_ids": []})


def test_a_text_that_is_too_short_costs_nothing_and_is_told(client: Client) -> None:
    short = {"checkpoint": "llama", "token_ids": IDS[:14]}
    assert client.plan("start_audit", short) == client.plan("start_audit", {"checkpoint": "llama"})
    behaviour = client.audit_checkpoint("llama", token_ids=IDS[:14]).behaviour
    assert behaviour is not None
    assert behaviour.not_judged == "13 tokens: 32 at least are needed"
    assert behaviour.forward_passes == 0


def test_of_a_long_text_the_part_that_is_looked_at_is_quoted(client: Client) -> None:
    def quoted(tokens: int) -> tuple[int, int, int]:
        plan = client.plan("start_audit", {"checkpoint": "llama", "token_ids": [place % 90 for place in range(tokens)]})
        return plan.bytes_read, plan.peak_bytes, plan.flops

    assert quoted(20_000) == quoted(MOST_TOKENS)
    assert quoted(MOST_TOKENS)[2] > quoted(MOST_TOKENS // 2)[2]


def test_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(list(b"A module may define functions and classes by name.")))
    told = invoke(None, "audit", TRAINED, "--tokens", tmp_path / "ids.json")
    assert told.exit_code == 0
    assert "behaviour: mean log-likelihood -" in told.stdout
    both = invoke(None, "audit", TRAINED, "--token-ids", "1,2,3", "--text", "both")
    assert both.exit_code == 2
    assert "give one of --token-ids" in both.stderr
