"""What the tests of the elector share: replicas in threads, whose work says when it begins and ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import holdfast
from tests.children import PATIENCE, eventually, query

QUICK: dict[str, Any] = {"ttl": 1.5, "renew_every": 0.3, "retry_every": 0.2}
"""Expires while a test waits for it; also when the machine stands still, so no test may need it to be kept."""
STEADY: dict[str, Any] = {"ttl": 600.0, "renew_every": 0.1, "retry_every": 0.2, "grace": 0.2}
"""Asks often, and is kept however long the machine stands still."""
SLOW: dict[str, Any] = {"ttl": 3600.0, "renew_every": 600.0, "retry_every": 600.0}
"""Nothing happens by itself before PATIENCE is over: what happens was caused by an event."""


class Replica:
    """An elector in a thread. Its work records its begin and its end, and ends when it is told to; but not while
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
        """Let its client wait for an answer for as long as the test does: what it asks for waits for a lock."""
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
    """The first one leads. Clients with URLs of their own have keepers of their own, as other processes have."""
    made: list[Replica] = []
    try:
        for number in range(count):
            other = "" if url.startswith("sqlite") else f"?application_name=replica-{number}"
            made.append(Replica(url + other, **options))
            eventually(lambda: made[0].leads, "the first one leads")
        yield made
    finally:
        for each in made:
            each.end()


@contextmanager
def replicas_beside(url: str, **options: Any) -> Iterator[Replica]:
    made = Replica(url, **options)
    try:
        yield made
    finally:
        made.end()


def expire_unless_renewed(url: str) -> None:
    """Let every lease of a PostgreSQL database end in a second, as if its TTL were nearly over."""
    query(url, "update holdfast.beat set expires_at = clock_timestamp() + interval '1 s'")


@contextmanager
def logged(level: int) -> Iterator[list[Any]]:
    said: list[Any] = []
    handler, logger = logging.Handler(level), logging.getLogger("holdfast.elector")
    handler.emit = said.append  # type: ignore[method-assign, assignment]
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
