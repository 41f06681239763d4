"""Reports over HTTP: the format asked for, and what a browser may do with it."""

import json

import httpx
import pytest
from glassblock.api.reports import preferred
from glassblock.operations.tables import rules
from glassblock.reports import REPORTS
from glassblock.wire.audits import Report

from service.test_audits import ended

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


@pytest.fixture(scope="module")
def location(transport: httpx.BaseTransport) -> str:
    with httpx.Client(base_url="http://glassblock", transport=transport) as http:
        location = http.post("/v1/audits", json={"checkpoint": "llama"}).headers["location"]
        ended(http, location)
    return f"{location}/report"


@pytest.mark.parametrize("name", REPORTS)
def test_every_format_by_name_and_by_media_type(http: httpx.Client, location: str, name: str) -> None:
    row = REPORTS[name]
    by_name = http.get(location, params={"format": name})
    by_accept = http.get(location, headers={"Accept": row.media_type})
    assert by_name.status_code == by_accept.status_code == 200
    assert by_name.headers["content-type"].partition(";")[0] == row.media_type
    report = Report.model_validate(http.get(location).json())
    assert by_name.text == by_accept.text == row.render(report, rules=rules())


def test_a_browser_sees_the_page_and_the_page_runs_nothing(http: httpx.Client, location: str) -> None:
    page = http.get(location, headers={"Accept": BROWSER})
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert page.headers["content-security-policy"] in page.text
    assert page.headers["vary"] == "Accept"


@pytest.mark.parametrize("name", ["pdf", "%E2%82%AC", "%0d%0aX-Odd:%201", ""])
def test_an_unknown_format_has_no_tag_to_be_held(http: httpx.Client, location: str, name: str) -> None:
    refused = http.get(f"{location}?format={name}", headers={"If-None-Match": "*"})
    assert (refused.status_code, refused.json()["field"]) == (422, "format")


def test_an_unknown_format_is_refused_with_the_known_ones(http: httpx.Client, location: str) -> None:
    refused = http.get(location, params={"format": "docx"})
    assert refused.status_code == 422
    assert refused.json()["known"] == list(REPORTS)


@pytest.mark.parametrize(
    ("accept", "name"),
    [
        ("", "json"),
        ("*/*", "json"),
        ("text/*", "json"),
        ("image/png", "json"),
        (BROWSER, "html"),
        ("application/xml;q=0.9, text/html", "html"),
        ("text/markdown;q=0.2, text/html;q=0.1", "markdown"),
        ("text/html, text/markdown", "html"),
        ("text/html;q=0, text/plain;q=0.1", "text"),
        ("text/html;q=0", "json"),
        ("TEXT/HTML; charset=utf-8", "html"),
        ("application/sarif+json", "sarif"),
        ("text/html;q=nan, text/plain;q=2", "html"),
        (",;,q=1", "json"),
    ],
)
def test_the_greatest_weight_decides_then_the_first_named(accept: str, name: str) -> None:
    assert preferred(accept) == name


def test_json_has_the_places_and_numbers(http: httpx.Client, location: str) -> None:
    told = json.loads(http.get(location).text)
    assert "norm_attn_in_gain_rms" in told["layers"][0]["metrics"]
