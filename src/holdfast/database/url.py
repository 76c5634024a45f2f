"""A database URL, parsed and checked. Everything that a process keeps for a database is keyed by the result.

Only ``target`` contains the password; ``str()`` and ``repr()`` never show it.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from holdfast.database.statements import SCHEMA, Dialect, check_schema
from holdfast.errors import Unreachable

# A dead peer is noticed within 2 to 3 s: by keepalives when idle, by the user timeout when sending.
_DEFAULTS = {
    "target_session_attrs": "read-write",
    "keepalives": "1",
    "keepalives_idle": "1",
    "keepalives_interval": "1",
    "keepalives_count": "2",
    "tcp_user_timeout": "3000",
}

_ENCODING = {"client_encoding": "UTF8"}
"""Overrides the environment, the role and the URL: in another encoding a name would be that of another lease."""
_SQLITE_OPTIONS = {"cache", "immutable", "mode", "nolock", "psow", "vfs"}
# The parts of libpq's messages that may be shown: what it quotes may be the password, or a part of it.
_COMPLAINTS = (
    "unexpected spaces", "invalid percent-encoded token", "forbidden value %00", "missing key/value separator",
    "extra key/value separator", "IPv6 host address",
)  # fmt: skip
_UNKNOWN = "invalid URI query parameter"
_OPTIONS = "as in ?sslmode=require&connect_timeout=5; a '?' in the user or the password is written %3F"


class Database(NamedTuple):
    """``target`` is a libpq connection string or the absolute path of an SQLite file, ``label`` is for messages.
    ``same_as``: the pooled database that this is the direct URL of. ``permissions``: of a new SQLite file."""

    dialect: Dialect
    target: str
    label: str
    schema: str = SCHEMA
    prepared: bool = True
    same_as: "Database | None" = None
    permissions: int = 0o600

    def __str__(self) -> str:
        return self.label

    def __repr__(self) -> str:
        return f"<Database {self.label} {self.schema}>"


def parse(url: str | None, *, schema: str | None = None, prepared: bool = True) -> Database:
    """The URL, or that of the environment. An empty URL is an error. A trailing newline (from a file) is stripped."""
    url = os.environ.get("HOLDFAST_URL") if url is None else url
    schema = os.environ.get("HOLDFAST_SCHEMA", SCHEMA) if schema is None else schema
    url = url.strip() if isinstance(url, str) else url
    if not url:
        raise ValueError(
            "no database URL: pass one, e.g. Client('sqlite:///app.db') or Client('postgresql://host/name'), "
            "or set HOLDFAST_URL. There is no default: replicas with a file each would all win every election."
        )
    if not isinstance(url, str):
        raise TypeError(
            f"url must be a str, as 'sqlite:///app.db' or 'postgresql://host/name', not {type(url).__name__}"
        )
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise ValueError("not a database URL: expected sqlite:///file.db or postgresql://host/name")
    kind = scheme.partition("+")[0].lower()
    if kind == "sqlite":
        check_schema(schema, "sqlite")
        rest, permissions = _permissions(rest)
        path = _sqlite_path(rest)
        return Database("sqlite", path, f"sqlite:///{path}", schema, permissions=permissions)
    if kind in ("postgres", "postgresql"):
        check_schema(schema, "postgres")
        return Database("postgres", *_conninfo(f"postgresql://{rest}"), schema, prepared)
    shown = f" {scheme!r}" if scheme.replace("+", "").isalnum() else ""  # it may be a part of a password
    raise ValueError(f"unknown URL scheme{shown}: expected sqlite:///file.db or postgresql://host/name")


def _permissions(rest: str) -> tuple[str, int]:
    """The rest of an SQLite URL without ``?permissions=660``, and these permissions."""
    rest, option, given = rest.partition("?permissions=")
    if not option:
        return rest, 0o600
    if given not in ("600", "660", "666"):
        raise ValueError(
            "permissions in an SQLite URL are those of a file that it creates: 600 (its owner's, the default), 660 "
            f"(its group's as well) or 666 (everybody's), not {given!r}"
        )
    return rest, int(given, 8)


def _sqlite_path(rest: str) -> str:
    path, _, options = rest.partition("?")
    if "%" in path:
        from urllib.parse import unquote

        path = unquote(path)
    if not path.startswith("/"):
        raise ValueError(
            "an SQLite URL names no host and has three slashes, four before an absolute path: sqlite:///app.db"
        )
    path = path[1:]
    if path in ("", ":memory:") or path.endswith("/"):
        raise ValueError(
            f"sqlite:///{path} names no file: leases in the memory of one process cannot coordinate others; "
            "use sqlite:///app.db"
        )
    if options:
        is_known = {each.partition("=")[0] for each in options.split("&")} <= _SQLITE_OPTIONS  # it may be a secret
        without = repr(options) if is_known else "the '?' and what follows it"
        raise ValueError(f"an SQLite URL takes no options here: sqlite:///{path} without {without}")
    try:
        return os.path.realpath(path)  # SQLite follows links, too: the side files of one file have one name
    except FileNotFoundError:
        raise Unreachable(
            f"cannot open sqlite:///{path}: the working folder is gone. Go to one that exists, or name the whole path."
        ) from None


def _conninfo(url: str) -> tuple[str, str]:
    """The connection string and the label. An invalid URL is not quoted: the password may be anywhere in it."""
    try:
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict, make_conninfo
    except ImportError as error:
        raise ValueError("PostgreSQL needs the postgres extra: pip install 'holdfast[postgres]'") from error
    try:
        given = {key: str(value) for key, value in conninfo_to_dict(url).items() if value is not None}
    except ProgrammingError as error:
        if _UNKNOWN in str(error):
            raise ValueError(
                f"not a valid PostgreSQL URL: {_UNKNOWN}: after '?' libpq's own alone, {_OPTIONS}"
            ) from None
        raise _invalid(next((each for each in _COMPLAINTS if each in str(error)), "libpq refuses it")) from None
    hosts, ports = (given.get(key, "").split(",") for key in ("host", "port"))
    name = url.partition("://")[2].partition("/")[2].partition("?")[0]
    if any("@" in place for place in (*hosts, name)) or not all(port.isdecimal() for port in ports if port):
        raise _invalid("it has no valid host and port")
    return make_conninfo(**_DEFAULTS | given | _ENCODING), _label(given, hosts, ports)


def _invalid(reason: str) -> ValueError:
    return ValueError(
        f"not a valid PostgreSQL URL: {reason}. In the user and the password write @ as %40, : as %3A, / as %2F, "
        "? as %3F, % as %25, a space as %20"
    )


def _label(given: Mapping[str, str], hosts: list[str], ports: list[str]) -> str:
    from urllib.parse import quote

    user = quote(given.get("user", "")) + (":***" if "password" in given else "")
    places = [f"[{host}]" if ":" in host else quote(host, safe="") for host in hosts]
    ports = ports * len(hosts) if len(ports) == 1 else ports
    places = [f"{place}:{port}" if port else place for place, port in zip(places, ports, strict=False)]
    return f"postgresql://{user}{'@' if user else ''}{','.join(places)}/{quote(given.get('dbname', ''))}"
