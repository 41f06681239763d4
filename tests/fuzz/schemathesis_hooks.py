"""What schemathesis is told beside the schema: names that exist, so that half of its requests come past the door."""

from typing import Any

import schemathesis

NAME = "tiny-llama"


@schemathesis.check
def busy_says_when(ctx: Any, response: Any, case: Any) -> None:
    """No defect; and whoever is told that there is no room is told when to come back."""
    if response.status_code >= 500:
        told = f"{response.status_code}: {response.text[:500]}"
        assert response.status_code == 503, told
        assert response.headers.get("retry-after"), told


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """A checkpoint that is there, for every other name."""
    if path_parameters and "name" in path_parameters and _every_other(path_parameters["name"]):
        return path_parameters | {"name": NAME}
    return path_parameters


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """A checkpoint and a layer that are there, in every other body that asks for one."""
    if isinstance(body, dict) and isinstance(body.get("checkpoint"), str) and _every_other(body["checkpoint"]):
        there: dict[str, Any] = {"checkpoint": NAME}
        if isinstance(body.get("layer"), int):
            there["layer"] = body["layer"] % 4
        if isinstance(body.get("layers"), list):
            there["layers"] = [layer % 4 if type(layer) is int else layer for layer in body["layers"][:2]]
        return body | there
    return body


def _every_other(name: Any) -> bool:
    """By the name itself, so that a run can be repeated."""
    return len(str(name)) % 2 == 1
