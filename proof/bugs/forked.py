"""A process that divides, and whose halves go on with what they had: run as a process of its own by its scene.

Both halves ask for a lease: the parent for one that is free, the child for one that somebody else holds.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import psycopg

import holdfast
from holdfast.testing.history import Recorder

_PATIENCE = 50
"""Seconds after which each half ends, should it wait for an answer that the other has taken."""
_FREE = "select fence from holdfast.lease_acquire('free', 'parent', 30)"
_HELD = (
    "with gate as materialized (select pg_advisory_xact_lock_shared(1))"
    " select fence from gate, holdfast.lease_acquire('held', 'child', 30)"
)
"""Is answered when the scene opens the gate: not before the child has read an answer."""


class SharedConnection:
    """One connection for both. Answers come in the order of the questions, and go to whoever reads first."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        self._pgconn: Any = self._connection.pgconn

    def ask(self, question: str) -> None:
        self._pgconn.send_query(question.encode())
        self._pgconn.flush()

    def answer(self) -> int | None:
        value = self._pgconn.get_result().get_value(0, 0)
        return None if value is None else int(value)

    def parent(self, start: Callable[[], object], wait: Callable[[], object]) -> int | None:
        self.ask(_FREE)
        start()
        wait()
        return self.answer()

    def child(self) -> int | None:
        self.ask(_HELD)
        return self.answer()


class SharedClient:
    """One client for both, whose connection was open already when they divided."""

    def __init__(self, url: str) -> None:
        self._client = holdfast.Client(url)
        self._client.leases.list()

    def parent(self, start: Callable[[], object], wait: Callable[[], object]) -> int | None:
        start()
        fence = self._fence("free")
        wait()
        return fence

    def child(self) -> int | None:
        return self._fence("held")

    def _fence(self, name: str) -> int | None:
        grant = self._client.lease(name, ttl=30).try_acquire()
        return None if grant is None else grant.fence


def main(url: str, folder: str, kind: str) -> None:
    shared = SharedConnection(url) if kind == "connection" else SharedClient(url)
    started, start = os.pipe()
    child = os.fork()
    signal.alarm(_PATIENCE)
    if child == 0:
        os.read(started, 1)
        _acquire(folder, "child", "held", shared.child)
        os.write(sys.stdout.fileno(), b"the child has its answer\n")
        os._exit(0)
    begin, wait = (lambda: os.write(start, b".")), (lambda: os.waitpid(child, 0))
    _acquire(folder, "parent", "free", lambda: shared.parent(begin, wait))


def _acquire(folder: str, worker: str, name: str, ask: Callable[[], int | None]) -> None:
    with Recorder(folder, worker) as record, record.invoke("acquire", name) as call:
        fence = ask()
        call.fail() if fence is None else call.ok(fence)


if __name__ == "__main__":
    main(*sys.argv[1:])
