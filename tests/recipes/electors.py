"""Helpers of the elector's tests: replicas in threads, whose work records when it begins and ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import holdfast
from tests.children import PATIENCE, eventually, query

QUICK: dict[str, Any] = {"ttl": 1.5, "renew_every": 0.3, "retry_every": 0.2}
"""Expires while a test waits for it. It may also expire because the machine stands still: no test may rely on it."""
STEADY: dict[str, Any] = {"ttl": 600.0, "renew_every": 0.1, "retry_every": 0.2, "grace": 0.2}
"""Asks often, and does not expire however long the machine stands still."""
SLOW: dict[str, Any] = {"ttl": 3600.0, "renew_every": 600.0, "retry_every": 600.0}
"""No timer ends before PATIENCE does: whatever happens was caused by an event."""


class Replica:
    """An elector in a thread. Its work records its begin and its end, and ends when it has to stop, but not while
    ``hold`` is set."""

    def __init__(self, url: str, name: str = "work", *, hold: bool = False, **options: Any) -> None:
        self.client, self.log, self.terms = holdfast.Client(url), [], []  # type: ignore[var-annotated]
        self.hold = threading.Event()
        if hold:
            self.hold.set()
        self.elector = self.client.elector(name, **options)
        self.thread = threading.Thread(target=self.elector.run, args=(self.work,), daemon=True)
        self.thread.start()

    def work(self, term: Any) -> None:
        self.terms.append(term)
        self.log.append("begin")
        term.stopping.wait()
        while self.hold.is_set():
            threading.Event().wait(0.01)
        self.log.append("end")

    def wait_patiently(self) -> None:
        """Raise the timeout of its client's calls to PATIENCE: they wait for a lock in the database."""
        call = self.client._engine.call
        self.client._engine.call = lambda *given, **more: call(*given, **{"timeout": PATIENCE} | more)  # type: ignore[method-assign]

    @property
    def leads(self) -> bool:
        return self.log[-1:] == ["begin"]

    def end(self) -> None:
        self.hold.clear()
        self.elector.stop()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        self.client.close()


@contextmanager
def replicas(url: str, count: int, **options: Any) -> Iterator[list[Replica]]:
    """Start replicas; the first one leads. Each has a URL, and so a keeper, of its own, like another process."""
    started: list[Replica] = []
    try:
        for number in range(count):
            other = "" if url.startswith("sqlite") else f"?application_name=replica-{number}"
            started.append(Replica(url + other, **options))
            eventually(lambda: started[0].leads, "the first one leads")
        yield started
    finally:
        for replica in started:
            replica.end()


@contextmanager
def replicas_beside(url: str, **options: Any) -> Iterator[Replica]:
    """Start one more replica, which need not lead."""
    replica = Replica(url, **options)
    try:
        yield replica
    finally:
        replica.end()


def expire_unless_renewed(url: str, condition: Callable[[], object], what: str) -> None:
    """Let every lease of a PostgreSQL database expire in one second, until ``condition()`` is true.

    A renewal that was in flight when its client was closed is undone. One that is repeated is not.
    """

    def is_true() -> bool:
        if condition():
            return True
        latest = "clock_timestamp() + interval '1 s'"
        query(url, f"update holdfast.beat set expires_at = {latest} where expires_at > {latest}")
        return False

    eventually(is_true, what)


@contextmanager
def logged(level: int) -> Iterator[list[Any]]:
    """The log records of the elector from ``level`` on."""
    records: list[Any] = []
    handler, logger = logging.Handler(level), logging.getLogger("holdfast.elector")
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
