"""Child processes that talk over pipes, and looks into the tables: for the tests about processes that die."""

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
from textwrap import dedent
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import psycopg

from tests.nursery import Forked

PATIENCE = 60.0
"""Seconds to wait for an event that will come, however busy the machine is: a limit, never a measurement."""

HANG = 240.0
"""Seconds after which an interpreter that was started, with all its imports, hangs: less than a test may take."""

ENDS = {
    "normally": ("pass", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "exception": ("sys.stderr = open(os.devnull, 'w'); raise RuntimeError", 1),
}
"""The last line of a program that closes nothing, and its exit status."""


class Child:
    """A Python process with ``program`` as its main module; its arguments are in ``sys.argv[1:]``."""

    def __init__(self, program: str, *args: object) -> None:
        (theirs, ours), (said, saying) = os.pipe(), os.pipe()
        self.process = Forked(dedent(program), "-c", *map(str, args), streams=(theirs, saying, 2), new_session=True)
        os.close(theirs)
        os.close(saying)
        self.stdin, self._stdout = os.fdopen(ours, "w"), os.fdopen(said)
        self.pid = self.process.pid
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put("<end>")

    def line(self, timeout: float = PATIENCE) -> str:
        """The next line it prints; ``<end>`` when there is none to come."""
        line = self._lines.get(timeout=timeout)
        if line == "<end>":
            self._lines.put(line)
        return line

    def expect(self, *wanted: str) -> None:
        for text in wanted:
            assert (found := self.line()) == text, f"the child said {found!r} instead of {text!r}"

    def say(self, text: str) -> None:
        self.stdin.write(text + "\n")
        self.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
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
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # and whatever it has forked
        self.process.wait(PATIENCE)
        with suppress(BrokenPipeError):
            self.stdin.close()
        self._reader.join(PATIENCE)
        self._stdout.close()


_looking = threading.Lock()
_onlooker: psycopg.Connection[Any] | None = None
_at = ""


def query(url: str, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
    """Ask the database itself, past holdfast. On PostgreSQL as a session that has just begun would: it is kept for the
    next question, because to begin one is what costs most."""
    global _onlooker, _at
    if url.startswith("sqlite"):
        file = sqlite3.connect(urlsplit(url).path, isolation_level=None, timeout=PATIENCE)
        try:
            return file.execute(statement.replace("%s", "?"), parameters).fetchall()
        finally:
            file.close()
    if not _looking.acquire(blocking=False):  # another thread asks, and may have to wait for its answer
        with _connected(url) as connection:
            return _asked(connection, statement, parameters)
    try:
        kept, _onlooker = _onlooker, None
        if kept is not None and not (_at == url and _is_alive(kept)):
            kept.close()
            kept = None
        kept = kept or _connected(url)
        try:
            found = _asked(kept, statement, parameters)
            kept.execute("discard all")
        except BaseException:
            kept.close()
            raise
        _onlooker, _at = kept, url
        return found
    finally:
        _looking.release()


def stop_looking() -> None:
    global _onlooker
    kept, _onlooker = _onlooker, None
    if kept is not None:
        kept.close()


def _connected(url: str) -> psycopg.Connection[Any]:
    return psycopg.connect(
        url, autocommit=True, application_name="onlooker", connect_timeout=int(PATIENCE), prepare_threshold=None
    )


def _asked(connection: psycopg.Connection[Any], statement: str, parameters: tuple[object, ...]) -> list[Any]:
    cursor = connection.execute(statement.encode(), parameters or None)
    return cursor.fetchall() if cursor.description else []


def _is_alive(connection: psycopg.Connection[Any]) -> bool:
    """Whether the server has ended it, or gone, meanwhile."""
    return not select.select([connection], [], [], 0)[0] and connection.info.status is psycopg.pq.ConnStatus.OK


def rows(url: str) -> dict[str, int]:
    """How many leases and beats there are, living or not."""
    dot = "_" if url.startswith("sqlite") else "."
    [(leases, beats)] = query(
        url, f"select (select count(*) from holdfast{dot}lease), (select count(*) from holdfast{dot}beat)"
    )
    return {"lease": leases, "beat": beats}


NONE = {"lease": 0, "beat": 0}


def backends(url: str) -> list[int]:
    """The pids of holdfast's own sessions on this database."""
    return [
        pid
        for (pid,) in query(
            url,
            "select pid from pg_stat_activity where application_name = 'holdfast' and datname = current_database()"
            " order by backend_start",
        )
    ]


def last_queries(url: str) -> list[str]:
    """What each of holdfast's sessions was last asked, or is being asked."""
    asked = query(
        url,
        "select query from pg_stat_activity where application_name = 'holdfast' and datname = current_database()",
    )
    return [text for (text,) in asked]


def eventually(condition: Callable[[], object], what: str, timeout: float = PATIENCE) -> float:
    """Wait until it holds; how long that took."""
    started = time.monotonic()
    while not condition():
        passed = time.monotonic() - started
        assert passed < timeout, f"{what}: not within {timeout:g} s"
        time.sleep(_pause(passed))
    return time.monotonic() - started


def _pause(passed: float) -> float:
    """Until the next look: what takes long is looked at less often, for a look may be a new session on the server."""
    return min(0.05, 0.01 + passed / 20)


async def until(condition: Callable[[], object], what: str, timeout: float = PATIENCE) -> None:
    """The same on an event loop, which goes on meanwhile."""
    started = time.monotonic()
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(_pause(time.monotonic() - started))


def kept(grant: Any, seconds: float = 1.0) -> None:
    """Wait until heartbeats have moved the end of its trust by so much. Without them it stays where it is, and the
    lease is lost when that has come: then this fails."""

    def end() -> float:
        grant.check()
        return float(grant.trusted_until)

    before = end()
    eventually(lambda: end() > before + seconds, f"heartbeats have moved the end of its trust by {seconds:g} s")


def pass_time(seconds: float) -> None:
    """Where the passing of time is the point."""
    time.sleep(seconds)
