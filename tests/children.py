"""Child processes with pipes, direct queries of the database, and waiting for conditions."""

from __future__ import annotations

import asyncio
import os
import queue
import select
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import psycopg

from tests.fork_server import Forked

PATIENCE = 60.0
"""Seconds to wait for an event that will happen, on a busy machine, too: a limit, never a measurement."""

HANG = 240.0
"""Seconds after which a started interpreter counts as hanging: less than the timeout of a test."""

ENDS = {
    "normally": ("pass", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "exception": ("sys.stderr = open(os.devnull, 'w'); raise RuntimeError", 1),
}
"""Ways to exit without closing anything: the last line of a program, and its exit status."""


class Child:
    """A Python process with ``program`` as its main module; its arguments are in ``sys.argv[1:]``."""

    def __init__(self, program: str, *args: object) -> None:
        (child_stdin, stdin), (stdout, child_stdout) = os.pipe(), os.pipe()
        self.process = Forked(
            dedent(program), "-c", *map(str, args), streams=(child_stdin, child_stdout, 2), new_session=True
        )
        os.close(child_stdin)
        os.close(child_stdout)
        self.stdin, self._stdout = os.fdopen(stdin, "w"), os.fdopen(stdout)
        self.pid = self.process.pid
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put("<end>")

    def line(self, timeout: float = PATIENCE) -> str:
        """The next line of its output; ``<end>`` after the last one."""
        line = self._lines.get(timeout=timeout)
        if line == "<end>":
            self._lines.put(line)
        return line

    def expect(self, *wanted: str) -> None:
        for text in wanted:
            assert (line := self.line()) == text, f"the child printed {line!r} instead of {text!r}"

    def say(self, text: str) -> None:
        self.stdin.write(text + "\n")
        self.stdin.flush()

    def signal_anywhere(self, number: signal.Signals) -> None:
        """To a program that never blocks for long."""
        self.process.send_signal(number)

    def signal(self, number: signal.Signals) -> None:
        """Python does not notice a signal that arrives just before a blocking call until that call ends, which may be
        never. So a signal with a handler is sent when the main thread sleeps, which the signal interrupts."""
        if number in _HANDLED:
            eventually(lambda: is_asleep(self.pid), "its main thread sleeps")
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()  # first, because it has no group before it runs
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # its own children
        self.process.wait(PATIENCE)
        with suppress(BrokenPipeError):
            self.stdin.close()
        self._reader.join(PATIENCE)
        self._stdout.close()


_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def is_asleep(pid: int) -> bool:
    """Whether the main thread of a process sleeps, or has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state not in ("R", "D")


_query_lock = threading.Lock()
_query_connection: psycopg.Connection[Any] | None = None
_query_url = ""


def query(url: str, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
    """Run a statement directly, without holdfast.

    On PostgreSQL the connection is reset and kept for the next query, because connecting takes longest.
    """
    global _query_connection, _query_url
    if url.startswith("sqlite"):
        file = sqlite3.connect(urlsplit(url).path, isolation_level=None, timeout=PATIENCE)
        try:
            return file.execute(statement.replace("%s", "?"), parameters).fetchall()
        finally:
            file.close()
    if not _query_lock.acquire(blocking=False):  # the query of another thread may take long
        with _connect(url) as connection:
            return _fetch(connection, statement, parameters)
    try:
        reused, _query_connection = _query_connection, None
        if reused is not None and not (_query_url == url and _is_alive(reused)):
            reused.close()
            reused = None
        reused = reused or _connect(url)
        try:
            rows = _fetch(reused, statement, parameters)
            reused.execute("discard all")
        except BaseException:
            reused.close()
            raise
        _query_connection, _query_url = reused, url
        return rows
    finally:
        _query_lock.release()


def close_query_connection() -> None:
    global _query_connection
    connection, _query_connection = _query_connection, None
    if connection is not None:
        connection.close()


def _connect(url: str) -> psycopg.Connection[Any]:
    return psycopg.connect(
        url, autocommit=True, application_name="onlooker", connect_timeout=int(PATIENCE), prepare_threshold=None
    )


def _fetch(connection: psycopg.Connection[Any], statement: str, parameters: tuple[object, ...]) -> list[Any]:
    cursor = connection.execute(statement.encode(), parameters or None)
    return cursor.fetchall() if cursor.description else []


def _is_alive(connection: psycopg.Connection[Any]) -> bool:
    """False if the server has ended the session, or is down."""
    return not select.select([connection], [], [], 0)[0] and connection.info.status is psycopg.pq.ConnStatus.OK


def rows(url: str) -> dict[str, int]:
    """The number of rows of leases and beats, expired ones included."""
    dot = "_" if url.startswith("sqlite") else "."
    [(leases, beats)] = query(
        url, f"select (select count(*) from holdfast{dot}lease), (select count(*) from holdfast{dot}beat)"
    )
    return {"lease": leases, "beat": beats}


NONE = {"lease": 0, "beat": 0}


OURS = "application_name ~ '^holdfast:[^:]*:[0-9]+$' and datname = current_database()"
"""Sessions of clients whose URLs have no application_name."""


def backends(url: str) -> list[int]:
    """The pids of holdfast's own sessions on this database."""
    return [pid for (pid,) in query(url, f"select pid from pg_stat_activity where {OURS} order by backend_start")]


def last_queries(url: str) -> list[str]:
    """The last statement of each of holdfast's sessions."""
    return [text for (text,) in query(url, f"select query from pg_stat_activity where {OURS}")]


def eventually(condition: Callable[[], object], what: str, timeout: float = PATIENCE) -> float:
    """Wait until ``condition()`` is true. Returns the seconds that it took."""
    started = time.monotonic()
    while not condition():
        passed = time.monotonic() - started
        assert passed < timeout, f"{what}: not within {timeout:g} s"
        time.sleep(_pause(passed))
    return time.monotonic() - started


def _pause(passed: float) -> float:
    """Seconds until the next check. Checks become rarer, because one may need a new session on the server."""
    return min(0.05, 0.01 + passed / 20)


async def until(condition: Callable[[], object], what: str, timeout: float = PATIENCE) -> None:
    """The same for asyncio."""
    started = time.monotonic()
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(_pause(time.monotonic() - started))


def kept(grant: Any, seconds: float = 1.0) -> None:
    """Wait until heartbeats have moved the end of trust in the grant by ``seconds``. Fails if it is lost."""

    def end() -> float:
        grant.check()
        return float(grant._trusted_until)

    before = end()
    eventually(lambda: end() > before + seconds, f"heartbeats have moved the end of its trust by {seconds:g} s")


def pass_time(seconds: float) -> None:
    """Sleep, where a test needs time to pass."""
    time.sleep(seconds)
