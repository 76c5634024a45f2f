"""Real PostgreSQL servers for tests, ready in a fraction of a second.

    with Postgres.create() as postgres:
        client = holdfast.Client(postgres.database())

Each server has its own data folder, an ephemeral port on 127.0.0.1 and a superuser `postgres` without a password, so
everybody on the machine may enter: never put anything worth keeping into one. All servers of one PostgreSQL version
start from the same initialised data folder, so they have the same system identifier and differ only in what is done
to them afterwards.

Nothing outlives the process that made it, not even when that process is killed.
"""

import atexit
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote, urlsplit

from holdfast.testing import binaries, folders
from holdfast.testing.account import account
from holdfast.testing.closing import Closing
from holdfast.testing.server import HOST, Server, until

_SETTINGS: Mapping[str, object] = {
    "dynamic_shared_memory_type": "mmap",  # in the data folder: a crash leaves nothing in /dev/shm
    "hot_standby": "on",
    "log_line_prefix": "%m [%p] %a ",
    "log_timezone": "UTC",
    "max_connections": 200,
    "max_wal_senders": 8,
    "shared_buffers": "32MB",
    "timezone": "UTC",
    "unix_socket_directories": "",
    "wal_keep_size": "256MB",
    "wal_level": "replica",
    "wal_log_hints": "on",  # pg_rewind asks for it
    "wal_retrieve_retry_interval": "100ms",
}
_FAST: Mapping[str, object] = {"fsync": "off", "full_page_writes": "off"}


class Postgres(Server, Closing):
    """A PostgreSQL server that belongs to this process. Make one with `create()`."""

    def __init__(self, programs: binaries.Binaries, folder: Path | str | None) -> None:
        self._claim: int | None = None
        if folder is None:
            place, self._claim = folders.temporary()
        else:
            place = Path(folder).absolute()
            place.mkdir(parents=True, exist_ok=True)
            account().own(place)
        super().__init__(programs, place, temporary=folder is None)
        self._owner = os.getpid()
        self._standbys: list[Postgres] = []
        self._closed = False
        atexit.register(self.close)

    @classmethod
    def create(
        cls,
        folder: Path | str | None = None,
        *,
        bin: Path | str | None = None,
        major: int | None = None,
        settings: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
        durable: bool = False,
    ) -> Self:
        """Start a fresh server: that of the programs in `bin`, or of version `major`, or the newest there is.

        Its files go to `folder` and stay there, or to a temporary folder that is removed with it. It survives its own
        crash but not the machine's, which makes it fast, unless it is `durable`. `environment` is added to ours for it
        and for the standbys made from it.
        """
        postgres = cls(binaries.find(bin, major), folder)
        postgres.environment.update(environment or {})
        try:
            folders.initialise(postgres.binaries, postgres.data)
            postgres._configure({**_SETTINGS, **({} if durable else _FAST), **(settings or {})}, "postgresql.conf")
            postgres.start()
        except BaseException:
            postgres.close()
            raise
        return postgres

    @property
    def url(self) -> str:
        """The database `postgres`, as its superuser."""
        return self._url("postgres")

    def database(self, name: str | None = None, *, like: str | None = None) -> str:
        """Make a new database and return its URL: an empty one, or a copy of ``like``, to which nobody is connected."""
        name = name or f"test_{secrets.token_hex(6)}"
        model = "template1" if like is None else _name(like)
        copied = " strategy file_copy" if self.binaries.major >= 15 else ""  # the default writes all of it to the WAL
        self.execute(f"create database {_identifier(name)} template {_identifier(model)}{copied}")
        return self._url(name)

    def drop(self, url: str) -> None:
        """Remove a database made by `database()`, whoever is connected to it. One takes about 8 MB of disk."""
        self.execute(f"drop database {_identifier(_name(url))} with (force)")

    def execute(self, statement: str, *parameters: object, dbname: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement on a connection of its own and return its rows, if it has any."""
        import psycopg

        with psycopg.connect(self._url(dbname), autocommit=True, connect_timeout=60) as connection:
            cursor = connection.execute(statement.encode(), parameters or None)
            return cursor.fetchall() if cursor.description else []

    @property
    def is_primary(self) -> bool:
        """Whether it takes writes, rather than following another server."""
        return self.execute("select not pg_is_in_recovery()") == [(True,)]

    def standby(self, synchronous: bool = False, name: str = "standby1") -> "Postgres":
        """Start a server that follows this one, and wait until it streams. It is closed together with this one.

        With `synchronous`, from then on no commit here is answered before the standby has it.
        """
        _check_name(name)
        standby = Postgres(self.binaries, None)
        standby.environment.update(self.environment)
        self._standbys.append(standby)
        try:
            place = ["-D", str(standby.data), "-d", self._conninfo(name)]
            self.binaries.run("pg_basebackup", *place, "--checkpoint=fast", "--no-sync", "--no-manifest")
            standby._follow(self, name, synchronous)
        except BaseException:
            standby.close()
            raise
        return standby

    def promote(self) -> None:
        """Turn a standby into a primary and wait until it takes writes. It waits for no synchronous standby."""
        self.execute("select pg_promote(false)")
        until(lambda: self.is_primary, what=f"{self} is promoted")

    def rewind(self, source: "Postgres", synchronous: bool = False, name: str = "standby1") -> None:
        """Make this stopped or killed server a standby of `source`, which was promoted in its place, and start it.

        What it committed and `source` never got is undone.
        """
        _check_name(name)
        if self.running:
            raise RuntimeError(f"{self} is running: stop() or kill() it before rewind()")
        source.alter("full_page_writes", "on")  # pg_rewind asks for it
        source.execute("checkpoint")  # before that the source's files still tell the old timeline
        self.forget_crash()
        self.binaries.run(
            *("pg_rewind", "--no-sync", "--target-pgdata", str(self.data)),
            *("--source-server", source._conninfo(name) + " dbname=postgres"),
        )
        self._follow(source, name, synchronous)

    def close(self) -> None:
        """End the server and the standbys made from it, and remove its temporary folder. Harmless when closed.

        Does nothing in a process that was forked off after the server had been started: it is the parent's.
        """
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            for standby in self._standbys:
                standby.close()
        finally:
            self._end()
            if self._claim is not None:
                shutil.rmtree(self.folder, ignore_errors=True)
                os.close(self._claim)

    def __repr__(self) -> str:
        return f"<Postgres {self.binaries.version} in {self.folder}>"

    def _follow(self, source: "Postgres", name: str, synchronous: bool) -> None:
        following = {"primary_conninfo": source._conninfo(name), "synchronous_standby_names": ""}
        self._configure(following, "postgresql.auto.conf")
        self._configure({}, "standby.signal")
        self.start()
        if synchronous:
            source.alter("synchronous_standby_names", f'"{name}"')
        states = "select state, sync_state from pg_stat_replication where application_name = %s"
        wanted = ("streaming", "sync" if synchronous else "async")
        until(lambda: wanted in source.execute(states, name), what=f"{name} streams from {source}")

    def alter(self, setting: str, value: str) -> None:
        """Change a setting that needs no restart."""
        self.execute(f"alter system set {setting} = '{value}'")
        self.execute("select pg_reload_conf()")

    def _configure(self, settings: Mapping[str, object], file: str) -> None:
        path = self.data / file
        with path.open("a") as lines:
            for setting, value in settings.items():
                quoted = str(value).replace("'", "''")
                lines.write(f"{setting} = '{quoted}'\n")
        account().own(path)

    def _url(self, dbname: str) -> str:
        return f"postgresql://postgres@{HOST}:{self.port}/{quote(dbname, safe='')}"

    def _conninfo(self, name: str) -> str:
        return f"host={HOST} port={self.port} user=postgres application_name={name}"


def _name(url: str) -> str:
    return unquote(urlsplit(url).path.removeprefix("/"))


def _identifier(name: str) -> str:
    quoted = name.replace('"', '""')
    return f'"{quoted}"'


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,62}", name):
        raise ValueError(f"name={name!r}: a standby's name is made of lower-case letters, digits and _")
