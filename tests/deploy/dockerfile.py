"""Reads the instructions of a Dockerfile: as much of the format as ours uses."""

import json
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Instruction(NamedTuple):
    """One instruction; continued lines are joined, comments are gone."""

    name: str
    value: str


class Image(NamedTuple):
    """What the last stage of the Dockerfile leaves behind."""

    environment: dict[str, str]
    entry_point: list[str]
    health_check: list[str]
    user: str
    volumes: list[str]
    exposed: str
    stop_signal: str


def instructions(text: str) -> list[Instruction]:
    """All instructions, in order."""
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    joined = "\n".join(lines).replace("\\\n", " ")
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines()]


def image() -> Image:
    """The image that the repository's Dockerfile describes."""
    steps = instructions((ROOT / "Dockerfile").read_text())
    last_stage = steps[max(index for index, step in enumerate(steps) if step.name == "FROM") :]

    def only(name: str) -> str:
        (value,) = (step.value for step in last_stage if step.name == name)
        return value

    return Image(
        environment=dict(
            pair.split("=", 1) for step in last_stage if step.name == "ENV" for pair in shlex.split(step.value)
        ),
        entry_point=json.loads(only("ENTRYPOINT")),
        health_check=json.loads(only("HEALTHCHECK").split("CMD", 1)[1]),
        user=only("USER"),
        volumes=json.loads(only("VOLUME")),
        exposed=only("EXPOSE"),
        stop_signal=only("STOPSIGNAL"),
    )
