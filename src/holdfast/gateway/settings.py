"""How a replica is set up: flags first, then HOLDFAST_* in the environment, then [gateway] in holdfast.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Settings:
    url: str
    schema: str = "holdfast"
    host: str = "127.0.0.1"
    port: int = 7411
    driver: str | None = None
    """The address of the driver; None: one is started beside us."""
    pools: Mapping[str, int] = field(default_factory=lambda: {"default": 8})
    """Which pools of slots there are, and how many slots each has."""
