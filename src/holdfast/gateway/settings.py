"""The settings of a replica: flags first, then HOLDFAST_* in the environment, then [gateway] in holdfast.toml."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast import Client
from holdfast.dashboard.webhook import WebhookTarget, read_secret
from holdfast.driver.daemon_signals import is_loopback
from holdfast.gateway import tokens
from holdfast.gateway.connections import MAX_CONNECTIONS
from holdfast.gateway.logs import mask_credentials
from holdfast.gateway.tokens import Token
from holdfast.governance import Policy
from holdfast.lineage.sinks import open_sink


@dataclass(frozen=True, slots=True)
class Settings:
    url: str = field(repr=False)
    schema: str = "holdfast"
    host: str = "127.0.0.1"
    port: int = 7411
    advertise: str | None = None
    """The URL under which other replicas reach this one; None: built from host and port."""
    entrance: str | None = None
    """The URL under which sandboxes reach any replica; None: that of the replica that created them, and they lose their
    connection with it."""
    redirect: bool = False
    """Whether a request that another replica has to answer is redirected to it; else it is sent on."""
    hosts: tuple[str, ...] = ()
    """Host names to answer to, beside localhost and addresses."""
    tokens: tuple[Token, ...] = ()
    keys: tuple[str, ...] = field(default=(), repr=False)
    """What secrets in the database are sealed with: the first one closes, each of them opens. None: on SQLite a key of
    its own in a file, on PostgreSQL they are not sealed, which ``load`` refuses beyond loopback."""
    writes: float = 1000.0
    """Writing requests a second and principal; 0 is no limit."""
    stop_within: float = 20.0
    driver: str | None = None
    """The address of the driver; None: the replica starts one on ``driver_folder``."""
    driver_folder: str = "holdfast-driver"
    open_files: int | None = None
    """The limit of open files of the driver that the replica starts; None: that of the replica."""
    connections: int = MAX_CONNECTIONS
    """At most, from all clients."""
    end_sandboxes: bool = False
    """Whether sandboxes end with the driver that the replica has started."""
    pools: Mapping[str, int] = field(default_factory=lambda: {"default": 8})
    """The pools of slots, and how many slots each has."""
    stop_delay: float = 5.0
    """Seconds after an agent's stop until its command is complete, unless the agent continues."""
    command_limit: float = 1800.0
    """Seconds without a hook after which the command of an agent has timed out."""
    agent_silence: float = 86400.0
    """Seconds without a hook after which an agent has ended."""
    transcripts: str | None = None
    """The folder below which transcripts of agents are read; None: none are read."""
    agent_config: str | None = None
    """The folder of the settings of agents that may be edited; None: none may."""
    policy: Policy | None = None
    """What operators may do to which datasets; None: nothing is declared."""
    summariser: str | None = None
    """``module:function`` that summarises the turns of a command; None: the built-in one."""
    relay: tuple[str, Any] | None = field(default=None, repr=False)
    """The name of the relay that publishes lineage, and its sink; None: the gateway runs none."""
    webhook: WebhookTarget | None = field(default=None, repr=False)
    """Where new problems are sent; None: nowhere."""

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def single(self) -> bool:
        """Whether this database allows only one replica: SQLite does."""
        return self.url.lower().startswith("sqlite")


class SettingsError(ValueError):
    """Lists every mistake in the settings."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = tuple(mistakes)


def load(
    url: str, schema: str, flags: Mapping[str, Any], environment: Mapping[str, str], table: Mapping[str, Any]
) -> Settings:
    """Read each option from the first place that has it. Raises SettingsError; no secret is in its message."""
    mistakes = [
        f"{name!r} in [gateway] is unknown; known are: {', '.join(sorted(OPTIONS))}" for name in table.keys() - OPTIONS
    ]
    try:
        Client(url, schema=schema).close()  # checks url and schema, and opens nothing
    except ValueError as error:
        mistakes.append(str(error))
    values: dict[str, Any] = {}
    for name, read in OPTIONS.items():
        variable = f"HOLDFAST_{name.upper()}"
        flag = () if flags.get(name) is False else flags.get(name)  # a switch that was not given is False
        places = (_flag(name), flag), (variable, environment.get(variable)), (f"{name} in [gateway]", table.get(name))
        for place, value in places:
            if value not in (None, ()):
                try:
                    values[name] = read(value)
                except ValueError as error:
                    mistakes.append(f"{place}: {error}")
                break
    if secrets := environment.get("HOLDFAST_TOKENS"):
        try:
            values["tokens_file"] = (*values.get("tokens_file", ()), *tokens.parse(secrets.replace(";", "\n")))
        except ValueError as error:
            mistakes.append(f"HOLDFAST_TOKENS: {error}")
    values["tokens"] = values.pop("tokens_file", ())
    if key := environment.get("HOLDFAST_KEY"):
        try:
            values["key_file"] = (*values.get("key_file", ()), *_parse_keys(key))
        except ValueError as error:
            mistakes.append(f"HOLDFAST_KEY: {error}")
    values["keys"] = values.pop("key_file", ())
    secret_file = values.pop("webhook_secret_file", None)
    if "webhook" in values:
        try:
            values["webhook"] = WebhookTarget(values["webhook"], read_secret(secret_file, environment))
        except ValueError as error:
            mistakes.append(f"webhook: {error}")
            del values["webhook"]
    settings = Settings(url, schema, **values)
    if not settings.loopback and not settings.tokens and "tokens" not in " ".join(mistakes):
        mistakes.append(
            f"{_flag('host')} {settings.host} is not a loopback address: every client that reaches it could run "
            "programs. Set tokens (--tokens-file, HOLDFAST_TOKENS)"
        )
    if not settings.loopback and not settings.single and not settings.keys and "key" not in " ".join(mistakes):
        mistakes.append(
            f"{_flag('host')} {settings.host} is not a loopback address, and variables of sandboxes would be readable "
            "in the database. Set a key, the same for all replicas (--key-file, HOLDFAST_KEY): openssl rand -base64 32"
        )
    if mistakes:
        raise SettingsError(mistakes)
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


def _silence(value: Any) -> float:
    return _number(value, 1, 365 * 86400)


def _rate(value: Any) -> float:
    return _number(value, 0, 1_000_000)


def _number(value: Any, minimum: float, maximum: float, *, whole: bool = False) -> float:
    try:
        number = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = None
    if number is None or not minimum <= number <= maximum or (whole and number != int(number)):
        raise ValueError(f"must be a {'whole ' if whole else ''}number from {minimum} to {maximum}, not {value!r:.40}")
    return number


def _url(value: Any) -> str:
    if not re.fullmatch(r"https?://[^/?#@\s]+", url := _text(value).rstrip("/")):
        # The message does not repeat the value: a password may be in it.
        raise ValueError("must be like http://10.0.0.7:7411, without a path")
    return url


def _driver(value: Any) -> str:
    address = _text(value)
    if not address.startswith("unix:/"):
        _url(address)
    return address


def _hosts(value: Any) -> tuple[str, ...]:
    names = value.replace(",", " ").split() if isinstance(value, str) else list(value)
    if bad := [each for each in names if not isinstance(each, str) or not re.fullmatch(r"[A-Za-z0-9.-]{1,253}", each)]:
        raise ValueError(f"must be names of hosts, without a port, and {bad[0]!r:.80} is none")
    return tuple(name.lower().rstrip(".") for name in names)


def _pools(value: Any) -> dict[str, int]:
    """``name=slots``, several with commas or as a table."""
    if isinstance(value, Mapping):
        pairs = [(name, slots) for name, slots in value.items()]
    else:
        words = value.split(",") if isinstance(value, str) else list(value)
        pairs = [tuple(word.strip().rpartition("=")[::2]) for word in words]
    pools: dict[str, int] = {}
    for name, slots in pairs:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
            given = f"{name or slots!r:.80}"
            raise ValueError(f"a pool is NAME=SLOTS, its name of letters, digits, '.', '_', '-', not {given}")
        pools[name] = int(_number(slots, 1, 10_000, whole=True))
    return pools


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


def _key_file(value: Any) -> tuple[str, ...]:
    try:
        return _parse_keys(Path(_text(value)).read_text(encoding="ascii", errors="replace"))
    except OSError as error:
        raise ValueError(f"the key cannot be read: {error.strerror}") from None


def _parse_keys(text: str) -> tuple[str, ...]:
    from holdfast.gateway.seal import parse_keys  # here: it needs the server extra, and `holdfast slots` does not

    return parse_keys(text)


def _folder(value: Any) -> str:
    if not Path(path := _text(value)).is_dir():
        raise ValueError(f"there is no folder {path!r:.200}")
    return path


def _summariser(value: Any) -> str:
    from holdfast.gateway.agents.summaries import load as load_summariser

    load_summariser(name := _text(value))
    return name


def _relay(value: Any) -> tuple[str, Any]:
    """``name=sink``. The sink is opened, so that a mistake in it ends the start."""
    name, _, sink = _text(value).partition("=")
    if not sink or not re.fullmatch(r"[A-Za-z0-9._:-]{1,180}", name):
        raise ValueError("must be NAME=SINK, its name of letters, digits, '.', '_', ':', '-'")
    try:
        return name, open_sink(sink)
    except ValueError as error:
        raise ValueError(mask_credentials(str(error))) from None


OPTIONS: Mapping[str, Callable[[Any], Any]] = {
    "host": _text, "port": _port, "advertise": _url, "entrance": _url, "redirect": _switch, "hosts": _hosts,
    "tokens_file": _tokens, "key_file": _key_file, "writes": _rate, "stop_within": _seconds, "driver": _driver,
    "driver_folder": _text, "end_sandboxes": _switch, "pools": _pools, "stop_delay": _delay, "command_limit": _silence,
    "agent_silence": _silence, "transcripts": _folder, "agent_config": _folder, "summariser": _summariser,
    "relay": _relay, "webhook": _text, "webhook_secret_file": _text,
}  # fmt: skip
"""The options that can be set in all three places, and how each is read."""
