"""Where a scene is played: one database, workers with sessions of their own, and a history of what they did.

A scene is a fixed script of steps. What it is played with, `Holdfast` or a wrong implementation that changes a few
lines of it, only decides the answers; whatever the answers are, the steps go on.
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
from proof import ledger
from proof.bugs.implementation import Connection, Holdfast, answer
from proof.bugs.worker import Worker


class Stage:
    """One scene, played once."""

    def __init__(self, folder: Path, server: Postgres | Pair, implementation: Holdfast) -> None:
        self.folder, self.server, self.implementation = folder, server, implementation
        self.sane_clocks = True
        self._workers: list[Worker] = []
        self._threads = ThreadPoolExecutor(max_workers=2)
        self._url = self._primary.database()
        with holdfast.Client(self._url) as client:
            client.migrate()
        self.director = self.connect()
        for table in ledger.TABLES:
            self.director.execute(table.encode())
        implementation.prepare(self.director)
        implementation.open(self.url)

    @property
    def _primary(self) -> Postgres:
        return self.server.primary if isinstance(self.server, Pair) else self.server

    @property
    def pair(self) -> Pair:
        if not isinstance(self.server, Pair):
            raise TypeError("this scene needs a pair of servers")
        return self.server

    @property
    def url(self) -> str:
        """The database, wherever its primary is; both servers are named where there are two."""
        return self.server.urls(self._url) if isinstance(self.server, Pair) else self._url

    def connect(self) -> Connection:
        return psycopg.connect(self.url, autocommit=True, target_session_attrs="read-write")

    def worker(self, name: str) -> Worker:
        worker = Worker(self.folder, name, self.implementation, self.connect())
        self._workers.append(worker)
        return worker

    def expire(self, name: str) -> None:
        """Its time is over, as far as the database knows."""
        statement = (
            "update holdfast.beat set expires_at = clock_timestamp()"
            " where id = (select beat from holdfast.lease where name = %s)"
        )
        self.director.execute(statement, [name])

    def ask(self, question: Callable[[], Any]) -> "Future[Any]":
        """Ask in a thread of its own."""
        return self._threads.submit(question)

    def meanwhile(self, connection: Connection, question: Callable[[], Any]) -> "Future[Any]":
        """Begin to ask on this connection; go on once there is an answer, or the question waits for a lock."""
        pid, asked = connection.info.backend_pid, self.ask(question)
        waiting = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
        until(lambda: asked.done() or answer(self.director, waiting, pid), what="it is answered, or waits")
        return asked

    def fail_over(self) -> None:
        """The primary dies, and the standby, which was down and knows only what it had seen before, takes its place."""
        self.director.close()
        self.pair.primary.kill()
        self.pair.standby.start()
        self.pair.fail_over()
        self._url = self._url.replace(f":{self.pair.standby.port}/", f":{self.pair.primary.port}/")
        self.director = self.connect()

    def close(self) -> None:
        """Everybody leaves, and the database tells its side."""
        self._leave()
        cursor = self.director.cursor(row_factory=dict_row)

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
        self.director.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(psycopg.Error):  # so that nobody is left waiting; what went wrong in the scene is told as it is
            self.director.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
        self._leave()
        self.director.close()

    def _leave(self) -> None:
        self._threads.shutdown()
        for worker in self._workers:
            worker.close()
        self.implementation.close()
