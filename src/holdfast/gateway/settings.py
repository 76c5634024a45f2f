"""How a replica is set up: flags first, then HOLDFAST_* in the environment, then [gateway] in holdfast.toml."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast import Client, Policy
from holdfast.driver.daemon_signals import is_loopback
from holdfast.gateway import tokens
from holdfast.gateway.tokens import Token


@dataclass(frozen=True, slots=True)
class Settings:
    url: str = field(repr=False)
    schema: str = "holdfast"
    host: str = "127.0.0.1"
    port: int = 7411
    advertise: str | None = None
    """The address of this replica as the others reach it; None: made of host and port."""
    entrance: str | None = None
    """The address by which sandboxes find a replica, whichever; None: that of the one that made them, which they do not
    outlive then."""
    hosts: tuple[str, ...] = ()
    """Names by which it is asked for, beside localhost and addresses."""
    tokens: tuple[Token, ...] = ()
    writes: float = 1000.0
    """Requests a second and principal that change something; 0 is no limit."""
    stop_within: float = 20.0
    driver: str | None = None
    """The address of the driver; None: one is started beside us, on ``driver_folder``."""
    driver_folder: str = "holdfast-driver"
    end_sandboxes: bool = False
    """Whether what runs ends with the driver that was started beside us."""
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
    policy: Policy | None = None
    """What operators may do to which datasets; None: nothing is declared."""
    summariser: str | None = None
    """``module:function`` that makes a text of the turns of a command; None: the one built in."""

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def single(self) -> bool:
        """Whether this database is for one instance: a file is."""
        return self.url.lower().startswith("sqlite")


class Mistakes(ValueError):
    """All of them."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = tuple(mistakes)


def gather(
    url: str, schema: str, flags: Mapping[str, Any], environment: Mapping[str, str], table: Mapping[str, Any]
) -> Settings:
    """The first place that says something counts. Mistakes, with every one there is; no secret is in them."""
    wrong = [
        f"{name!r} in [gateway] is unknown; known are: {', '.join(sorted(KNOBS))}" for name in table.keys() - KNOBS
    ]
    try:
        Client(url, schema=schema).close()  # nothing is opened: would it make sense at all?
    except ValueError as error:
        wrong.append(str(error))
    found: dict[str, Any] = {}
    for name, read in KNOBS.items():
        variable = f"HOLDFAST_{name.upper()}"
        places = ((_flag(name), flags), (variable, environment), (f"{name} in [gateway]", table))
        for (place, values), key in zip(places, (name, variable, name), strict=True):
            if (value := values.get(key)) not in (None, (), False if values is flags else None):
                try:
                    found[name] = read(value)
                except ValueError as error:
                    wrong.append(f"{place}: {error}")
                break
    if secrets := environment.get("HOLDFAST_TOKENS"):
        try:
            found["tokens_file"] = (*found.get("tokens_file", ()), *tokens.parse(secrets.replace(";", "\n")))
        except ValueError as error:
            wrong.append(f"HOLDFAST_TOKENS: {error}")
    found["tokens"] = found.pop("tokens_file", ())
    settings = Settings(url, schema, **found)
    if not settings.loopback and not settings.tokens and "tokens" not in " ".join(wrong):
        wrong.append(
            f"{_flag('host')} {settings.host} is not a loopback address: whoever reaches it could run programs. "
            "Set tokens (--tokens-file, HOLDFAST_TOKENS)"
        )
    if wrong:
        raise Mistakes(wrong)
    return settings


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError("must be a text that is not empty")
    return value.strip()


def _port(value: Any) -> int:
    return int(_number(value, 0, 65535, whole=True))


def _seconds(value: Any) -> float:
    return _number(value, 1, 3600)


def _delay(value: Any) -> float:
    return _number(value, 0, 3600)


def _long(value: Any) -> float:
    return _number(value, 1, 365 * 86400)


def _rate(value: Any) -> float:
    return _number(value, 0, 1_000_000)


def _number(value: Any, least: float, most: float, *, whole: bool = False) -> float:
    try:
        number = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = None
    if number is None or not least <= number <= most or (whole and number != int(number)):
        raise ValueError(f"must be a {'whole ' if whole else ''}number from {least} to {most}, not {value!r:.40}")
    return number


def _address(value: Any) -> str:
    if not re.fullmatch(r"https?://[^/?#@\s]+", text := _text(value).rstrip("/")):
        raise ValueError("must be like http://10.0.0.7:7411, without a path")  # not repeated: a password may be in it
    return text


def _driver(value: Any) -> str:
    text = _text(value)
    if not text.startswith("unix:/"):
        _address(text)
    return text


def _hosts(value: Any) -> tuple[str, ...]:
    names = value.replace(",", " ").split() if isinstance(value, str) else list(value)
    if bad := [each for each in names if not isinstance(each, str) or not re.fullmatch(r"[A-Za-z0-9.-]{1,253}", each)]:
        raise ValueError(f"must be names of hosts, without a port, and {bad[0]!r:.80} is none")
    return tuple(each.lower().rstrip(".") for each in names)


def _pools(value: Any) -> dict[str, int]:
    """``name=slots``, several with commas or as a table."""
    if isinstance(value, Mapping):
        pairs = [(name, slots) for name, slots in value.items()]
    else:
        words = value.split(",") if isinstance(value, str) else list(value)
        pairs = [tuple(each.strip().rpartition("=")[::2]) for each in words]
    found: dict[str, int] = {}
    for name, slots in pairs:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
            told = f"{name or slots!r:.80}"
            raise ValueError(f"a pool is NAME=SLOTS, its name of letters, digits, '.', '_', '-', not {told}")
        found[name] = int(_number(slots, 1, 10_000, whole=True))
    return found


def _switch(value: Any) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {value!r:.40}")
    return value


def _tokens(value: Any) -> tuple[Token, ...]:
    try:
        text = Path(_text(value)).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the tokens cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError("the tokens are not UTF-8") from None
    return tokens.parse(text)


def _folder(value: Any) -> str:
    if not Path(text := _text(value)).is_dir():
        raise ValueError(f"there is no folder {text!r:.200}")
    return text


def _summariser(value: Any) -> str:
    from holdfast.gateway.agents.summaries import load

    load(text := _text(value))
    return text


KNOBS: Mapping[str, Callable[[Any], Any]] = {
    "host": _text, "port": _port, "advertise": _address, "entrance": _address, "hosts": _hosts,
    "tokens_file": _tokens, "writes": _rate, "stop_within": _seconds, "driver": _driver, "driver_folder": _text,
    "end_sandboxes": _switch, "pools": _pools, "stop_delay": _delay, "command_limit": _long, "agent_silence": _long,
    "transcripts": _folder, "agent_config": _folder, "summariser": _summariser,
}  # fmt: skip
"""What can be said in all three places, and how it is read."""
