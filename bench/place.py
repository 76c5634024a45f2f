"""The servers and files of the benchmarks, created on first use and deleted at the end."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
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
    def __init__(self, effort: Effort, *, beside: Path | None = None) -> None:
        self.effort = effort
        self.beside = beside
        """Another checkout to measure in the same run, where a benchmark can."""
        self._at_end = ExitStack()
        self.grants: list[object] = []
        """Grants to hold until the end."""

    @cached_property
    def folder(self) -> Path:
        return Path(self._at_end.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-")))

    @cached_property
    def memory(self) -> Path:
        """A folder in memory, if the system has one: a flush is free there, so only processor time counts."""
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        return Path(self._at_end.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=folder)))

    @cached_property
    def fast(self) -> Postgres:
        """fsync off: only processor time counts."""
        return self._at_end.enter_context(Postgres.create())

    @cached_property
    def durable(self) -> Postgres:
        """On a disk: test servers may live in memory, where a flush is free. A quick run uses ``fast`` instead."""
        if self.effort.quick:
            return self.fast
        folder = Path(self._at_end.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-")))
        server_user().own(folder)
        return self._at_end.enter_context(Postgres.create(folder / "server", durable=True))

    @cached_property
    def slow(self) -> Postgres | None:
        """With fsync, and every flush takes at least 2 ms. None without a C compiler, and in a quick run."""
        compiler = shutil.which("cc")
        if compiler is None or self.effort.quick:
            return None
        folder = Path(self._at_end.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-")))
        library, source = folder / "slow_disk.so", Path(__file__).with_name("slow_disk.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O", "-o", library, source, "-ldl"], check=True)
        for path in (folder, library):
            server_user().own(path)
        environment = {"LD_PRELOAD": str(library)}
        return self._at_end.enter_context(Postgres.create(folder / "server", durable=True, environment=environment))

    def postgres_url(self, server: Postgres | None = None, *, history: bool = True) -> str:
        """A fresh, migrated database; with ``history=False``, releases write no history row."""
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
        """Close it at the end."""
        self._at_end.callback(thing.close)
        return thing

    def at_end(self, end: Callable[[], object]) -> None:
        """Call it at the end, in reverse order."""
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
        text, count = re.subn(r"insert into holdfast\.history\b.*?;", "null;", row[0], flags=re.DOTALL)
        assert count == 1, "holdfast.lease_end has changed"
        connection.execute(text.encode())
