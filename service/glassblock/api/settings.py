"""Settings of a service, from arguments or from `GLASSBLOCK_*` in the environment."""

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from glassblock.errors import InvalidValue
from glassblock.jobs.worker import Rules
from glassblock.operations.admission import machine_bytes

MIB = 1024 * 1024

SHARE_OF_BODIES = 0.25
MOST_OF_BODIES = 8192 * MIB
"""What bodies may hold together where nothing is set: this share of the memory, and no more than this."""


class Settings(BaseSettings):
    """What a service is told when it starts. Read once, passed down; nothing reads the environment later."""

    model_config = SettingsConfigDict(env_prefix="GLASSBLOCK_", frozen=True, extra="ignore")

    roots: Annotated[tuple[Path, ...], NoDecode, Field(description="folders that hold checkpoints")] = ()
    host: Annotated[str, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="port to listen on; 0 takes a free one")] = 8080
    device: Annotated[str, Field(description="auto, cpu or cuda:N")] = "auto"
    allow_open: Annotated[bool, Field(description="listen beyond loopback although anyone may ask anything")] = False
    max_body_mib: Annotated[int, Field(ge=1, le=65536, description="largest request body, MiB")] = 512
    bodies_mib: Annotated[
        int | None,
        Field(
            ge=1,
            description="most that bodies of requests and answers hold together, MiB; a quarter of the memory,"
            " at most 8192",
        ),
    ] = None
    connections: Annotated[
        int, Field(ge=1, le=1_000_000, description="connections at once; beyond, one that asks nothing is closed")
    ] = 1024
    head_seconds: Annotated[
        float,
        Field(gt=0, le=3600, description="longest that a request's head may take, since connecting or the last answer"),
    ] = 20.0
    resident_mib: Annotated[int, Field(ge=0, description="most that blocks may hold between requests, MiB")] = 4096
    device_mib: Annotated[
        int | None,
        Field(ge=1, description="most that may be used of the device, MiB; 90 % of a GPU's memory, 60 % of a CPU's"),
    ] = None
    heavy: Annotated[int, Field(ge=1, le=256, description="operations that work on the device at once")] = 1
    queue: Annotated[int, Field(ge=0, le=1_000_000, description="requests that may wait for the device")] = 64
    answers_mib: Annotated[
        int, Field(ge=0, description="most that stored answers may take in `data`, MiB; 0 stores none")
    ] = 1024
    data: Annotated[Path | None, Field(description="folder for what outlives a restart: jobs and their reports")] = None
    database: Annotated[
        SecretStr | None, Field(description="URL of the jobs' database in place of SQLite in `data`: postgresql://...")
    ] = None
    output_root: Annotated[
        Path | None, Field(description="folder into which repaired checkpoints may be written; none are without it")
    ] = None
    wait_tflop: Annotated[
        float | None,
        Field(gt=0, description="most that a request may compute while its caller waits, TFLOP; more must be a job"),
    ] = 1000.0
    wait_gib: Annotated[
        float | None,
        Field(gt=0, description="most that a request may read while its caller waits, GiB; more must be a job"),
    ] = 256.0
    jobs_mib: Annotated[
        int,
        Field(ge=1, description="most that posted tensors and answers of jobs may take in the database, MiB"),
    ] = 2048
    waiting: Annotated[int, Field(ge=1, le=1_000_000, description="jobs that may wait")] = 64
    attempts: Annotated[int, Field(ge=1, le=100, description="times a job is taken up before it is failed")] = 3
    audit_hours: Annotated[float, Field(gt=0, le=8760, description="longest that one attempt may take")] = 24.0
    lease_seconds: Annotated[
        float, Field(ge=2, le=3600, description="a worker that shows no life for so long is given up for dead")
    ] = 15.0
    room_seconds: Annotated[
        float, Field(ge=0, le=86400, description="longest that a job waits for room on the device")
    ] = 300.0
    keep_audits: Annotated[int, Field(ge=1, description="ended jobs that are kept")] = 10_000
    keep_days: Annotated[float, Field(gt=0, description="and for how many days")] = 30.0
    keys_file: Annotated[Path | None, Field(description="file of API keys, made by `glassblock keys`")] = None
    rate: Annotated[str, Field(description="requests that one key may make")] = "1200/minute"
    trusted_proxies: Annotated[
        str, Field(description="addresses whose X-Forwarded-For and -Proto are believed, separated by commas")
    ] = ""
    body_seconds: Annotated[float, Field(gt=0, le=86400, description="longest that a request's body may take")] = 600.0
    silence_seconds: Annotated[
        float, Field(gt=0, le=3600, description="longest pause within a request's body, or in which no answer is read")
    ] = 30.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="what is logged to stderr, as JSON")
    ] = "warning"
    access_log: Annotated[
        str | None,
        Field(description="file for who inspected what, `-` for stderr, `none`; stderr where there are keys"),
    ] = None
    otlp_endpoint: Annotated[str | None, Field(description="where OpenTelemetry traces go, http://host:4318")] = None

    @field_validator("roots", mode="before")
    @classmethod
    def _split_roots(cls, value: object) -> object:
        """`A:B` as in PATH (`;` on Windows), from the environment."""
        return [part for part in value.split(os.pathsep) if part] if isinstance(value, str) else value

    @field_validator("data", "database", "keys_file", "otlp_endpoint", "output_root", mode="before")
    @classmethod
    def _refuse_empty(cls, value: object) -> object:
        """A variable that is set to nothing is a mistake, and would stand for the folder one is in, or for no keys."""
        if value == "":
            raise ValueError("it is empty")
        return value

    @property
    def access_place(self) -> str | None:
        """Where who inspected what is written down: a file, "-" for stderr, or None."""
        if self.access_log is None:
            return None if self.keys_file is None else "-"
        return None if self.access_log == "none" else self.access_log

    @property
    def max_body_bytes(self) -> int:
        """Largest request body, bytes."""
        return self.max_body_mib * MIB

    @property
    def bodies_bytes(self) -> int:
        """Most that bodies of requests and answers may hold together."""
        if self.bodies_mib is None:
            return min(MOST_OF_BODIES, int(SHARE_OF_BODIES * machine_bytes()))
        return self.bodies_mib * MIB

    @property
    def device_bytes(self) -> int | None:
        """Most that may be used of the device, bytes; None for a share of what it has."""
        return None if self.device_mib is None else self.device_mib * MIB

    @property
    def answers_folder(self) -> Path | None:
        """Where answers are stored; None where they are not."""
        return self.data / "answers" if self.data is not None and self.answers_mib else None

    @property
    def jobs_place(self) -> str | Path | None:
        """Where jobs are kept: a URL, a folder, or None for a folder that goes with the process."""
        return self.data if self.database is None else self.database.get_secret_value()

    @property
    def job_rules(self) -> Rules:
        """How jobs are dealt with."""
        return Rules(
            waiting=self.waiting,
            held_bytes=self.jobs_mib * MIB,
            attempts=self.attempts,
            limit_seconds=3600 * self.audit_hours,
            lease_seconds=self.lease_seconds,
            room_seconds=self.room_seconds,
            keep=self.keep_audits,
            keep_seconds=86400 * self.keep_days,
        )

    def refuse_open_address(self) -> None:
        """Without keys, only this machine may ask.

        Raises:
            InvalidValue: `host` is no loopback address, and neither `keys_file` nor `allow_open` is set.
        """
        if self.allow_open or self.keys_file is not None or _is_loopback(self.host):
            return
        raise InvalidValue(
            f"refusing to listen on {self.host}: anyone who reaches it could read every checkpoint under the roots",
            field="host",
            hint="give keys (`glassblock keys NAME --file FILE`, GLASSBLOCK_KEYS_FILE=FILE), listen on 127.0.0.1,"
            " or insist: --allow-open, GLASSBLOCK_ALLOW_OPEN=1",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
