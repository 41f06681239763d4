"""Client and command line of Glassblock. Loads neither torch nor FastAPI.

    from glassblock_client import Client

    with Client("http://localhost:8080") as client:
        report = client.audit_checkpoint("SmolLM2-135M")

`Client` waits, `AsyncClient` is awaited; `Overrides` and `Sample` are what their calls take, `Reply`
what those with tensors return. Errors are in `glassblock.errors`, messages in `glassblock.wire`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glassblock.wire.blocks import Overrides
    from glassblock.wire.values import Sample

    from glassblock_client.async_client import AsyncClient
    from glassblock_client.client import Client
    from glassblock_client.exchange import Reply

__all__ = ["AsyncClient", "Client", "Overrides", "Reply", "Sample"]

_HOMES = {
    "AsyncClient": "glassblock_client.async_client",
    "Client": "glassblock_client.client",
    "Overrides": "glassblock.wire.blocks",
    "Reply": "glassblock_client.exchange",
    "Sample": "glassblock.wire.values",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: the command line lists its help before it needs HTTP."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
