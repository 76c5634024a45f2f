"""What the tests of the elector share: replicas in threads, whose work says when it begins and ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import holdfast
from tests.children import eventually

QUICK: dict[str, Any] = {"ttl": 1.5, "renew_every": 0.3, "retry_every": 0.2}
SLOW: dict[str, Any] = {"ttl": 600.0, "renew_every": 100.0, "retry_every": 60.0}


class Replica:
    """An elector in a thread. Its work says when it begins and ends, and ends when it is told to."""

    def __init__(self, url: str, name: str = "work", **options: Any) -> None:
        self.client, self.log, self.terms = holdfast.Client(url), [], []  # type: ignore[var-annotated]
        self.hold = threading.Event()
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

    @property
    def leads(self) -> bool:
        return self.log[-1:] == ["begin"]

    def end(self) -> None:
        self.hold.clear()
        self.elector.stop()
        self.thread.join(30)
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
