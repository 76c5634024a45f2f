"""A program that forks while it has a connection or a client. The scenario of C6 starts it.

Both processes acquire a lease: the parent one that is free, the child one that another worker holds.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import psycopg

import holdfast
from holdfast.testing.history import Recorder

_LIMIT = 50
"""Seconds after which each process ends, if it waits for a result that the other has read."""
_FREE = "select fence from holdfast.lease_acquire('free', 'parent', 30)"
_HELD = (
    "with gate as materialized (select pg_advisory_xact_lock_shared(1))"
    " select fence from gate, holdfast.lease_acquire('held', 'child', 30)"
)
"""Returns when the scenario unlocks the gate, after the child has read a result."""


class SharedConnection:
    """One connection for both. Results come in the order of the statements; the process that reads first gets them."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        self._pgconn: Any = self._connection.pgconn

    def send(self, statement: str) -> None:
        self._pgconn.send_query(statement.encode())
        self._pgconn.flush()

    def receive(self) -> int | None:
        value = self._pgconn.get_result().get_value(0, 0)
        return None if value is None else int(value)

    def parent(self, start: Callable[[], object], wait: Callable[[], object]) -> int | None:
        self.send(_FREE)
        start()
        wait()
        return self.receive()

    def child(self) -> int | None:
        self.send(_HELD)
        return self.receive()


class SharedClient:
    """One client for both, with a connection that was open before the fork."""

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
    signal.alarm(_LIMIT)
    if child == 0:
        os.read(started, 1)
        _acquire(folder, "child", "held", shared.child)
        os.write(sys.stdout.fileno(), b"the child has its result\n")
        os._exit(0)
    begin, wait = (lambda: os.write(start, b".")), (lambda: os.waitpid(child, 0))
    _acquire(folder, "parent", "free", lambda: shared.parent(begin, wait))


def _acquire(folder: str, worker: str, name: str, acquire: Callable[[], int | None]) -> None:
    with Recorder(folder, worker) as record, record.invoke("acquire", name) as call:
        fence = acquire()
        call.fail() if fence is None else call.ok(fence)


if __name__ == "__main__":
    main(*sys.argv[1:])
