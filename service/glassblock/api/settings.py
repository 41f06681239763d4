"""Settings of a service, from arguments or from `GLASSBLOCK_*` in the environment."""

import ipaddress
import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from glassblock.errors import InvalidValue

MIB = 1024 * 1024


class Settings(BaseSettings):
    """What a service is told when it starts. Read once, passed down; nothing reads the environment later."""

    model_config = SettingsConfigDict(env_prefix="GLASSBLOCK_", frozen=True, extra="ignore")

    roots: Annotated[tuple[Path, ...], NoDecode, Field(description="folders that hold checkpoints")] = ()
    host: Annotated[str, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="port to listen on; 0 takes a free one")] = 8080
    device: Annotated[str, Field(description="auto, cpu or cuda:N")] = "auto"
    allow_open: Annotated[bool, Field(description="listen beyond loopback although anyone may ask anything")] = False
    max_body_mib: Annotated[int, Field(ge=1, le=65536, description="largest request body, MiB")] = 512
    resident_mib: Annotated[int, Field(ge=0, description="most that pinned blocks may hold, MiB")] = 4096
    threads: Annotated[int, Field(ge=1, le=256, description="operations running at once")] = 4

    @field_validator("roots", mode="before")
    @classmethod
    def _split_roots(cls, value: object) -> object:
        """`A:B` as in PATH (`;` on Windows), from the environment."""
        return [part for part in value.split(os.pathsep) if part] if isinstance(value, str) else value

    @property
    def max_body_bytes(self) -> int:
        """Largest request body, bytes."""
        return self.max_body_mib * MIB

    def refuse_open_address(self) -> None:
        """Without keys, only this machine may ask.

        Raises:
            InvalidValue: `host` is not a loopback address and `allow_open` is not set.
        """
        if self.allow_open or _is_loopback(self.host):
            return
        raise InvalidValue(
            f"refusing to listen on {self.host}: anyone who reaches it could read every checkpoint under the roots",
            field="host",
            hint="listen on 127.0.0.1 behind a proxy that checks callers, or insist: GLASSBLOCK_ALLOW_OPEN=1",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
