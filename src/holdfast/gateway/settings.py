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
    stop_delay: float = 5.0
    """Seconds after an agent's stop until its command is complete, unless it goes on."""
    command_limit: float = 1800.0
    """Seconds of silence after which the command of an agent is over."""
    agent_silence: float = 86400.0
    """Seconds of silence after which an agent has ended."""
    transcripts: str | None = None
    """The folder below which transcripts of agents are read; None: they are not."""
    agent_config: str | None = None
    """The folder of the settings that are edited for agents; None: none are."""
    summariser: str | None = None
    """``module:function`` that makes a text of the turns of a command; None: the one built in."""
