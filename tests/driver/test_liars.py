"""Something answers in the driver's place, or the driver itself says what makes no sense: that is no answer, and never
one from which a record could be pruned."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

import holdfast
from tests.children import PATIENCE

OVER = threading.Event()


@contextmanager
def answering(
    answer: Callable[[socket.socket], object], timeout: float = PATIENCE
) -> Iterator[holdfast.reconciler.ProcessDriver]:
    def serve() -> None:
        with suppress(OSError):
            while True:
                one, _ = listening.accept()
                with closing(one), suppress(OSError):
                    one.recv(65536)
                    answer(one)

    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        serves = threading.Thread(target=serve, daemon=True)
        serves.start()
        yield holdfast.reconciler.ProcessDriver(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=timeout)
        OVER.set()
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)  # closing alone would let it wait for the next one for ever
        serves.join()


def said(status: str, body: bytes) -> Callable[[socket.socket], object]:
    return lambda one: one.sendall(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body))


def drips(one: socket.socket) -> None:
    """A byte now and then, each of them well within the time that an answer has."""
    one.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not OVER.wait(0.02):
        one.sendall(b" ")


ANSWERS: dict[str, tuple[Callable[[socket.socket], object], str]] = {
    "a page of somebody's own": (said("404 Not Found", b"<html>default backend</html>"), "is not the driver: 404"),
    "a problem of somebody's own": (said("404 Not Found", b'{"detail": "no route"}'), "is not the driver: 404"),
    "no JSON": (said("200 OK", b"hello"), "invalid answer"),
    "another shape": (said("200 OK", b'{"sandboxes": [{"id": "a"}], "id": "a"}'), "invalid answer"),
    "nothing": (said("200 OK", b""), "invalid answer"),
    "drop by drop": (drips, r"did not answer within 0\.2 s"),
}


@pytest.mark.parametrize(("answer", "told"), ANSWERS.values(), ids=ANSWERS)
def test_what_is_no_answer_of_a_driver_is_told_as_none(answer: Any, told: str) -> None:
    OVER.clear()
    with answering(answer, 0.2 if answer is drips else PATIENCE) as driver:
        for ask in (driver.list, lambda: driver.get("a"), lambda: driver.delete("a")):
            with pytest.raises(holdfast.DriverError, match=told) as refused:
                ask()
            assert refused.value.status is None
            OVER.set()  # the thread that drips has a next one to serve
            OVER.clear()


def test_what_a_later_driver_says_besides_is_no_obstacle() -> None:
    ready = {"type": "Ready", "status": True, "reason": "Started", "message": "", "terminal": False, "since": 1}
    told = {"id": "a", "conditions": [ready], "deleting": False, "details": {}, "more": 1}
    with answering(said("200 OK", json.dumps(told).encode())) as driver:
        assert driver.get("a") == holdfast.reconciler.Backend(
            "a", (holdfast.reconciler.BackendCondition("Ready", True, "Started"),)
        )


def test_a_watch_that_says_what_makes_no_sense_is_a_broken_one() -> None:
    chunk = b'{"kind": "status"}\n'
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(chunk), chunk)
    with (
        answering(lambda one: one.sendall(head)) as driver,
        pytest.raises(holdfast.DriverError, match="invalid answer"),
    ):
        next(iter(driver.watch()))
