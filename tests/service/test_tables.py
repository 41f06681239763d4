"""The tables of the edge are complete: nothing on the wire without a route, no error without a status."""

import json
from pathlib import Path

from glassblock.api.answers import ANSWERS
from glassblock.api.openapi import document
from glassblock.api.routes import ROUTES
from glassblock.errors import ERRORS
from glassblock.wire.endpoints import ENDPOINTS

OPENAPI = Path(__file__).parents[2] / "docs" / "openapi.json"


def test_every_endpoint_has_its_route() -> None:
    assert set(ROUTES) == {endpoint.name for endpoint in ENDPOINTS}
    assert all(ROUTES[endpoint.name].endpoint is endpoint for endpoint in ENDPOINTS)


def test_every_error_has_its_status() -> None:
    assert set(ANSWERS) == set(ERRORS.values())


def test_the_committed_openapi_document_is_the_one_served() -> None:
    assert json.loads(OPENAPI.read_text()) == json.loads(json.dumps(document())), "run `make openapi`"


def test_the_openapi_document_names_every_endpoint_once() -> None:
    operations = [method for methods in document()["paths"].values() for method in methods]
    assert len(operations) == len(ENDPOINTS)
