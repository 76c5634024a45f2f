"""Where the database is: --url, else HOLDFAST_URL, else ``url`` in ./holdfast.toml. And the other tables of
holdfast.toml: the policy of datasets, and the gateway."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.governance import Policy

CONFIG = "holdfast.toml"


def database(
    url: str | None, schema: str | None, *, default_file: str | None = None, creates: bool = False
) -> tuple[str, str]:
    """The URL and the schema. ``default_file`` is the SQLite file to use if no URL is set; its path is printed.
    ``creates``: whether an SQLite file may be created, as one may with a default file.

    Raises ValueError if no URL is set and there is no default file, which would run a cron job that has lost its
    HOLDFAST_URL on every machine; if there is no such SQLite file, and the command creates none; if the first
    setting found is empty; and if holdfast.toml is invalid.
    """
    config = _read_config() if os.path.lexists(CONFIG) else {}
    if url and _has_password(url):
        _warn("every user of this machine can see the password in --url: use HOLDFAST_URL or holdfast.toml instead")
    url = _first_setting("url", url, config)
    if url is None:
        if default_file is None:
            raise ValueError(
                f"no database is configured: set HOLDFAST_URL=postgresql://host/name or =sqlite:///file.db, or url in "
                f"{CONFIG}, or put --url before the command"
            )
        url = f"sqlite:///{default_file}"
        _warn(
            f"no database is configured (--url, HOLDFAST_URL, url in {CONFIG}): using {os.path.abspath(default_file)}"
        )
    named_schema = _first_setting("schema", schema, config) or "holdfast"
    if default_file is None and not creates:
        _check_exists(url)
    return url, named_schema


def _check_exists(url: str) -> None:
    """Raises ValueError if it is that of an SQLite file that does not exist."""
    scheme, _, rest = url.partition("://")
    if scheme.partition("+")[0].lower() != "sqlite" or not rest.startswith("/"):
        return
    path = rest[1:].partition("?")[0]
    if "%" in path:
        from urllib.parse import unquote

        path = unquote(path)
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        with suppress(OSError):  # the working folder is gone: the client says so
            place = os.path.abspath(path)
            raise ValueError(
                f"there is no SQLite file {place!r}: check its name, or create it with 'holdfast migrate'"
            ) from None
    except (OSError, ValueError):
        return  # the client says what is wrong with it


def policy() -> Policy | None:
    """The policy of the datasets in holdfast.toml, if it has any. Raises ValueError with all of its mistakes."""
    if not os.path.lexists(CONFIG) or "datasets" not in _read_config():
        return None
    import holdfast

    return holdfast.governance.Policy.read(CONFIG)


def gateway() -> dict[str, Any]:
    """The table [gateway] of holdfast.toml, unchecked."""
    table: dict[str, Any] = _read_config().get("gateway", {}) if os.path.lexists(CONFIG) else {}
    return table


def pools() -> dict[str, int]:
    """The pools of the gateway with their capacities, as HOLDFAST_POOLS, else [gateway], states them. Raises ValueError
    if that is wrong."""
    value = os.environ.get("HOLDFAST_POOLS") or gateway().get("pools")
    if not value:
        return {}
    from holdfast.gateway.settings import OPTIONS

    capacities: dict[str, int] = OPTIONS["pools"](value)
    return capacities


def absolute_url(url: str) -> str:
    """The URL with an absolute path, if it is that of an SQLite file: for a process in another folder."""
    scheme, _, rest = url.partition("://")
    if scheme.partition("+")[0].lower() != "sqlite" or not rest.startswith("/") or rest.startswith("//"):
        return url
    folder = os.getcwd().replace("%", "%25").replace("?", "%3F")
    return f"{scheme}:///{folder}{rest}"


def _first_setting(key: str, option: str | None, config: dict[str, Any]) -> str | None:
    """The option, else the environment variable, else the file's. Raises ValueError if that one is empty."""
    variable = f"HOLDFAST_{key.upper()}"
    sources = ((f"--{key}", option), (variable, os.environ.get(variable)), (f"{key} in {CONFIG}", config.get(key)))
    for source, value in sources:
        if value is not None and not value.strip():
            raise ValueError(f"{source} is empty: give it a value, or remove it")
        if value is not None:
            return value.strip()
    return None


def _has_password(url: str) -> bool:
    return ":" in url.partition("://")[2].partition("/")[0].rpartition("@")[0] or "password=" in url


def _warn(line: str) -> None:
    if sys.stderr is not None:  # None: closed before Python started
        print(f"holdfast: {line}", file=sys.stderr)


def warn_if_readable(path: str) -> None:
    """For a file with secrets."""
    try:
        readable = os.stat(path).st_mode & 0o004
    except OSError:
        return  # it is read next, which says why it cannot be
    if readable:
        _warn(f"every user of this machine can read the secrets in {path}: use chmod o-r")


def _check_owner(*statuses: os.stat_result) -> None:
    """Raises ValueError for a file that another user may have written: it decides which database and code are used."""
    for status in statuses:
        if status.st_uid not in (0, os.geteuid()):
            raise ValueError(
                f"{CONFIG} in this folder belongs to the user with id {status.st_uid}, who would decide which database "
                "is used: change its owner, or run the command in another folder"
            )
        if status.st_mode & 0o002 and not stat.S_ISLNK(status.st_mode):
            raise ValueError(
                f"every user of this machine can write to {CONFIG} in this folder, which decides which database is "
                "used: use chmod o-w"
            )


def _read_config() -> dict[str, Any]:
    """Raises ValueError if holdfast.toml is another user's, cannot be read, or has unknown keys or wrong types."""
    import tomllib

    try:
        with open(CONFIG, "rb") as file:
            _check_owner(os.lstat(CONFIG), os.fstat(file.fileno()))
            table = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"{CONFIG} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{CONFIG} is not valid TOML: {error}") from None
    if unknown := sorted(table.keys() - {"datasets", "gateway", "url", "schema"}):
        raise ValueError(f"unknown key {unknown[0]!r} in {CONFIG}: it may contain datasets, gateway, schema and url")
    if not isinstance(table.get("gateway", {}), dict):
        raise ValueError(f"gateway in {CONFIG} must be a table: [gateway]")
    for key in ("url", "schema"):
        if not isinstance(table.get(key, ""), str):  # the message does not repeat the value: it may hold a password
            raise ValueError(f"{key} in {CONFIG} must be a string, not {type(table[key]).__name__}")
    return table
