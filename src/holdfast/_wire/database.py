"""Which database: a URL, checked and made into a value that keys everything a process keeps about it.

The password is in ``target`` alone; ``str()`` and ``repr()`` never show it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from holdfast.sql import Dialect, check_schema

# A dead peer is noticed in 2 to 3 s: keepalives for an idle connection, the user timeout for one that is sending.
_DEFAULTS = {
    "target_session_attrs": "read-write",
    "keepalives": "1",
    "keepalives_idle": "1",
    "keepalives_interval": "1",
    "keepalives_count": "2",
    "tcp_user_timeout": "3000",
    "fallback_application_name": "holdfast",
}


@dataclass(frozen=True, slots=True)
class Database:
    dialect: Dialect
    target: str = field(repr=False)
    """A libpq connection string, or the absolute path of an SQLite file."""
    label: str
    """For people: no password."""
    schema: str = "holdfast"
    prepared: bool = field(default=True, compare=False)

    def __str__(self) -> str:
        return self.label


def parse(url: str | None, *, schema: str = "holdfast", prepared: bool = True) -> Database:
    url = url or os.environ.get("HOLDFAST_URL")
    if not url:
        raise ValueError(
            "no database URL: pass one, e.g. Client('sqlite:///app.db') or Client('postgresql://host/name'), "
            "or set HOLDFAST_URL. There is no default: replicas with a file each would all win every election."
        )
    if not isinstance(url, str):
        raise TypeError(f"url must be a str, not {type(url).__name__}")
    check_schema(schema)
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise ValueError(f"not a database URL: {redact(url)!r}; expected sqlite:///file.db or postgresql://host/name")
    kind = scheme.partition("+")[0].lower()
    if kind == "sqlite":
        return Database("sqlite", _sqlite_path(url, rest), f"sqlite:///{_sqlite_path(url, rest)}", schema)
    if kind in ("postgres", "postgresql"):
        return Database("postgres", _conninfo(f"postgresql://{rest}"), redact(f"postgresql://{rest}"), schema, prepared)
    raise ValueError(f"unknown URL scheme {scheme!r}: expected sqlite:///file.db or postgresql://host/name")


def redact(url: str) -> str:
    """The URL without its password, wherever it stands."""
    url = re.sub(r"(://[^:/@?]*):[^@]*@", r"\1:***@", url)
    return re.sub(r"(?i)\b((?:ssl)?password)=[^&\s]*", r"\1=***", url)


def _sqlite_path(url: str, rest: str) -> str:
    path = unquote(rest.partition("?")[0])
    if not path.startswith("/"):
        raise ValueError(
            f"{url!r} names a host; an SQLite URL has three slashes (four for an absolute path): sqlite:///app.db"
        )
    path = path[1:]
    if path in ("", ":memory:") or path.endswith("/"):
        raise ValueError(
            f"{url!r} names no file: leases in the memory of one process would coordinate nobody; use sqlite:///app.db"
        )
    return str(Path(path).absolute())


def _conninfo(url: str) -> str:
    try:
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict, make_conninfo
    except ImportError as error:
        raise ValueError("PostgreSQL needs the postgres extra: pip install 'holdfast[postgres]'") from error
    try:
        given = conninfo_to_dict(url)
    except ProgrammingError as error:
        secrets = [urlsplit(url).password or ""] if "@" in url else []
        reason = str(error).strip()
        for secret in filter(None, secrets):
            reason = reason.replace(secret, "***").replace(unquote(secret), "***")
        raise ValueError(f"not a valid PostgreSQL URL: {redact(url)!r} ({reason})") from None
    return make_conninfo(**_DEFAULTS | {key: str(value) for key, value in given.items() if value is not None})
