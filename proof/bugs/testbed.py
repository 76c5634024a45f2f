"""The testbed of a scenario: one database, workers with their own sessions, and the history of what they did.

A scenario is a fixed sequence of steps. The implementation, `Holdfast` or a wrong one, decides only the answers; the
steps do not depend on them.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg.rows import dict_row

import holdfast
from holdfast.testing.faults.servers import Pair
from holdfast.testing.history import DatabaseRows, write_database
from holdfast.testing.postgres import Postgres
from holdfast.testing.server import until
from proof import protected_tables
from proof.bugs.implementation import Connection, Holdfast, fetch_bool
from proof.bugs.worker import Worker


class Testbed:
    """The testbed of one run of a scenario."""

    def __init__(self, folder: Path, server: Postgres | Pair, implementation: Holdfast) -> None:
        self.folder, self.server, self.implementation = folder, server, implementation
        self.sane_clocks = True
        self._workers: list[Worker] = []
        self._threads = ThreadPoolExecutor(max_workers=2)
        self._url = self._primary.database()
        with holdfast.Client(self._url) as client:
            client.migrate()
        self.admin = self.connect()
        for table in protected_tables.TABLES:
            self.admin.execute(table.encode())
        implementation.prepare(self.admin)
        implementation.open(self.url)

    @property
    def _primary(self) -> Postgres:
        return self.server.primary if isinstance(self.server, Pair) else self.server

    @property
    def pair(self) -> Pair:
        if not isinstance(self.server, Pair):
            raise TypeError("this scenario needs a pair of servers")
        return self.server

    @property
    def url(self) -> str:
        """The URL of the database, with both servers if there are two."""
        return self.server.urls(self._url) if isinstance(self.server, Pair) else self._url

    def connect(self) -> Connection:
        return psycopg.connect(self.url, autocommit=True, target_session_attrs="read-write")

    def worker(self, name: str) -> Worker:
        worker = Worker(self.folder, name, self.implementation, self.connect())
        self._workers.append(worker)
        return worker

    def expire(self, name: str) -> None:
        """Let the lease expire in the database."""
        statement = (
            "update holdfast.beat set expires_at = clock_timestamp()"
            " where id = (select beat from holdfast.lease where name = %s)"
        )
        self.admin.execute(statement, [name])

    def submit(self, function: Callable[[], Any]) -> "Future[Any]":
        """Call ``function`` in another thread."""
        return self._threads.submit(function)

    def submit_and_wait_for_lock(self, connection: Connection, function: Callable[[], Any]) -> "Future[Any]":
        """Call ``function``, which uses ``connection``, in a thread. Returns when it has ended or waits for a lock."""
        pid, future = connection.info.backend_pid, self.submit(function)
        waiting = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
        until(lambda: future.done() or fetch_bool(self.admin, waiting, pid), what="it has ended or waits")
        return future

    def fail_over(self) -> None:
        """Kill the primary, and promote the standby, which was down and lacks the last commits."""
        self.admin.close()
        self.pair.primary.kill()
        self.pair.standby.start()
        self.pair.fail_over()
        self._url = self._url.replace(f":{self.pair.standby.port}/", f":{self.pair.primary.port}/")
        self.admin = self.connect()

    def close(self) -> None:
        """Close all workers, and store the rows of the database beside the history."""
        self._close_workers()
        cursor = self.admin.cursor(row_factory=dict_row)

        def rows(statement: str) -> list[dict[str, Any]]:
            return cursor.execute(statement.encode()).fetchall()

        timeline = "select substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) as timeline"
        database = DatabaseRows(
            rows("select name, fence, key from proof_write"),
            rows("select name, fence, older, newest from proof_takeover"),
            rows("select name, fence, outcome from holdfast.history order by id"),
            [int(row["timeline"], 16) for row in rows(timeline)],
            sane_clocks=self.sane_clocks,
            effects=rows("select name, value from proof_effect order by 1, 2"),
        )
        write_database(self.folder, database)
        self.admin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(psycopg.Error):  # no thread may stay blocked; the error of the scenario is raised
            self.admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
        self._close_workers()
        self.admin.close()

    def _close_workers(self) -> None:
        self._threads.shutdown()
        for worker in self._workers:
            worker.close()
        self.implementation.close()
