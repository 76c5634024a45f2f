"""Where the database is: --url, else HOLDFAST_URL, else holdfast.toml in this folder, else a file here, said aloud.
And what else holdfast.toml says: what may be done to which datasets, how the gateway is set up."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast import Policy

DEFAULT_URL = "sqlite:///holdfast.db"
CONFIG = "holdfast.toml"


def database(url: str | None, schema: str | None) -> tuple[str, str]:
    """The URL and the schema. ValueError when holdfast.toml cannot be understood, or the first that is set is empty: an
    empty variable, or a link to nowhere, is somebody's mistake, and a file of one's own would elect a leader on every
    machine."""
    from_file = _read() if os.path.lexists(CONFIG) else {}
    if url and _has_password(url):
        _say("everybody on this machine can see the password in --url: put it into HOLDFAST_URL or holdfast.toml")
    url = _first("url", url, from_file)
    if url is None:
        url = DEFAULT_URL
        _say(f"no --url, no HOLDFAST_URL, no url in {CONFIG}: using {url} in this folder")
    return url, _first("schema", schema, from_file) or "holdfast"


def policy() -> Policy | None:
    """What holdfast.toml declares of datasets, if it does. ValueError with all that is wrong with it."""
    if not os.path.lexists(CONFIG) or "datasets" not in _read():
        return None
    import holdfast

    return holdfast.Policy.read(CONFIG)


def gateway() -> dict[str, Any]:
    """The table [gateway] of holdfast.toml, as it is."""
    table: dict[str, Any] = _read().get("gateway", {}) if os.path.lexists(CONFIG) else {}
    return table


def _first(key: str, option: str | None, from_file: dict[str, Any]) -> str | None:
    """Of those that are set."""
    variable = f"HOLDFAST_{key.upper()}"
    places = ((f"--{key}", option), (variable, os.environ.get(variable)), (f"{key} in {CONFIG}", from_file.get(key)))
    for place, value in places:
        if value is not None and not value.strip():
            raise ValueError(f"{place} is empty: say which, or leave it out altogether")
        if value is not None:
            return value.strip()
    return None


def absolute_url(url: str) -> str:
    """The same database for a process in another folder."""
    scheme, _, rest = url.partition("://")
    if scheme.partition("+")[0].lower() != "sqlite" or not rest.startswith("/") or rest.startswith("//"):
        return url
    here = os.getcwd().replace("%", "%25").replace("?", "%3F")
    return f"{scheme}:///{here}{rest}"


def _has_password(url: str) -> bool:
    return ":" in url.partition("://")[2].partition("/")[0].rpartition("@")[0] or "password=" in url


def _say(line: str) -> None:
    if sys.stderr is not None:
        print(f"holdfast: {line}", file=sys.stderr)


def _read() -> dict[str, Any]:
    import tomllib

    try:
        with open(CONFIG, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"{CONFIG} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{CONFIG} is not valid TOML: {error}") from None
    if unknown := sorted(table.keys() - {"datasets", "gateway", "url", "schema"}):
        raise ValueError(f"{CONFIG} has {unknown[0]!r}, and known are: datasets, gateway, schema, url")
    if not isinstance(table.get("gateway", {}), dict):
        raise ValueError(f"gateway in {CONFIG} must be a table: [gateway]")
    for key in ("url", "schema"):
        if not isinstance(table.get(key, ""), str):  # its value is not repeated: a password may be in it
            raise ValueError(f"{key} in {CONFIG} must be a string, not {type(table[key]).__name__}")
    return table
