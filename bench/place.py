"""Where the benchmarks run: servers and files made on first use, gone at the end."""

from __future__ import annotations

import re
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import holdfast
from bench.measure import Effort
from holdfast.testing import Postgres
from holdfast.testing.server_user import server_user


class Closeable(Protocol):
    def close(self) -> None: ...


Kept = TypeVar("Kept", bound=Closeable)


class Place:
    def __init__(self, effort: Effort) -> None:
        self.effort = effort
        self._at_end = ExitStack()
        self.grants: list[object] = []
        """What is to be held for as long as the place is there."""

    @cached_property
    def folder(self) -> Path:
        return Path(self._at_end.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-")))

    @cached_property
    def memory(self) -> Path:
        """Where the system has files in memory: to flush them costs nothing, and what is left is the processor's."""
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        return Path(self._at_end.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=folder)))

    @cached_property
    def fast(self) -> Postgres:
        """fsync off: what is left is the work of the processor."""
        return self._at_end.enter_context(Postgres.create())

    @cached_property
    def durable(self) -> Postgres:
        """On a disk: where servers of tests live in memory, a flush would cost nothing. Quick ones share the other."""
        if self.effort.quick:
            return self.fast
        folder = Path(self._at_end.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-")))
        server_user().own(folder)
        return self._at_end.enter_context(Postgres.create(folder / "server", durable=True))

    def postgres_url(self, server: Postgres | None = None, *, history: bool = True) -> str:
        """A fresh, migrated database; without history, one whose releases leave no row behind."""
        url = (server or self.fast).database()
        with holdfast.Client(url) as client:
            client.migrate()
        if not history:
            _forget_history(url)
        return url

    def sqlite_url(self, name: str) -> str:
        return f"sqlite:///{self.folder / name}.db"

    def client(self, url: str) -> holdfast.Client:
        return self._at_end.enter_context(holdfast.Client(url))

    def keep(self, thing: Kept) -> Kept:
        """Until the end, where it is closed."""
        self._at_end.callback(thing.close)
        return thing

    def at_end(self, end: Callable[[], object]) -> None:
        """The last one first."""
        self._at_end.callback(end)

    def psycopg(self, url: str) -> Any:
        import psycopg

        return self._at_end.enter_context(psycopg.connect(url, autocommit=True))

    def sqlite(self, url: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            url.removeprefix("sqlite:///"), isolation_level=None, timeout=10, check_same_thread=False
        )
        self._at_end.callback(connection.close)
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
        return connection

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._at_end.close()


def _forget_history(url: str) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute("select pg_get_functiondef('holdfast.lease_end'::regproc)").fetchone()
        assert row is not None
        text, found = re.subn(r"insert into holdfast\.history\b.*?;", "null;", row[0], flags=re.DOTALL)
        assert found == 1, "holdfast.lease_end has changed"
        connection.execute(text.encode())
