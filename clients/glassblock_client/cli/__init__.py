"""The command line. `app.COMMANDS` lists its commands; each lives in a module of its group."""

from glassblock_client.cli.app import app, main

__all__ = ["app", "main"]
