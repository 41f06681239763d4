"""The tables of the edge are complete: nothing on the wire without a route, no error without a status."""

import inspect
import json
import re
from pathlib import Path
from typing import Any, cast

from glassblock.api.answers import ANSWERS
from glassblock.api.openapi import document
from glassblock.api.routes import ROUTES
from glassblock.api.settings import Settings
from glassblock.errors import ERRORS
from glassblock.wire.endpoints import ENDPOINTS

OPENAPI = Path(__file__).parents[2] / "docs" / "openapi.json"


def test_every_endpoint_has_its_route() -> None:
    assert set(ROUTES) == {endpoint.name for endpoint in ENDPOINTS}
    assert all(ROUTES[endpoint.name].endpoint is endpoint for endpoint in ENDPOINTS)


def test_every_setting_is_in_the_guide_with_its_default() -> None:
    guide = (OPENAPI.parent / "operating.md").read_text()
    rows = re.findall(r"\| `GLASSBLOCK_(\w+)` \| (.*) \| (.*) \|", guide)
    assert [name.lower() for name, _, _ in rows] == list(Settings.model_fields)
    for name, default, text in rows:
        field = Settings.model_fields[name.lower()]
        shown = (
            "off" if field.default is False else f"`{field.default}`" if field.default not in {None, (), ""} else "none"
        )
        assert (default, text) == (shown, field.description), name


def test_every_setting_is_used() -> None:
    """By a module of the service as `settings.NAME`, or by a property or method that a module uses so."""
    service = OPENAPI.parents[1] / "service" / "glassblock"
    text = "\n".join(file.read_text() for file in service.rglob("*.py"))
    asked = set(re.findall(r"\bsettings\.(\w+)", text))
    through = "".join(
        inspect.getsource(cast("Any", getattr(member, "fget", member)))
        for name, member in vars(Settings).items()
        if name in asked and (isinstance(member, property) or inspect.isfunction(member))
    )
    assert set(Settings.model_fields) <= asked | set(re.findall(r"\bself\.(\w+)", through))


def test_every_error_has_its_status() -> None:
    assert set(ANSWERS) == set(ERRORS.values())


def test_the_committed_openapi_document_is_the_one_served() -> None:
    assert json.loads(OPENAPI.read_text()) == json.loads(json.dumps(document())), "run `make openapi`"


def test_the_openapi_document_names_every_endpoint_once() -> None:
    operations = [method for methods in document()["paths"].values() for method in methods]
    assert len(operations) == len(ENDPOINTS)
