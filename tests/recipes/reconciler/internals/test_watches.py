"""Watches on a driver that break off, cannot be closed, or end late: they are begun again, and not in a busy loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast
from holdfast.testing.fake_driver import AsyncFakeDriver, FakeDriver
from tests.children import PATIENCE, eventually
from tests.recipes.reconciler.replicas import running


def test_a_watch_that_ends_as_soon_as_it_is_heard_is_left_alone_for_longer_and_longer(
    sqlite_url: str, yard: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time it begins all is swept: this must not be once a second for as long as the driver is so."""
    pauses: list[float] = []
    stopping = threading.Event()

    def pause(flag: threading.Event, seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 4:
            flag.set()

    monkeypatch.setattr("holdfast.recipes.reconciler.wait_event", pause)
    monkeypatch.setattr(yard, "watch", lambda: iter([None]))
    pool: Any = SimpleNamespace(spawn=lambda *_: True)
    with holdfast.Client(sqlite_url) as client:
        reconciler = client.reconciler("box", yard)
        reconciler._watch(SimpleNamespace(stopping=stopping), pool)
        assert pauses == sorted(pauses)
        assert pauses[-1] >= 6
        assert reconciler.status().driver_failures == 4
        assert "driver.watch() has returned" in str(reconciler.status().last_error)


class Unclosable:
    """A watch that breaks off, and fails once more when it is closed."""

    def __iter__(self) -> Unclosable:
        return self

    def __next__(self) -> None:
        raise ConnectionError("cut off")

    def close(self) -> None:
        raise OSError("it is not open any more")

    async def __anext__(self) -> None:
        next(self)

    async def aclose(self) -> None:
        self.close()

    __aiter__ = __iter__


def test_a_watch_that_cannot_be_closed_is_begun_again_like_another(
    place: tuple[str, str], yard: FakeDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[Unclosable] = []

    def watch(_: object) -> Unclosable:
        begun.append(Unclosable())
        return begun[-1]

    for driver in (FakeDriver, AsyncFakeDriver):
        monkeypatch.setattr(driver, "watch", watch)
    with running(place, yard, sweep_every=0.05):
        eventually(lambda: len(begun) > 2, "it goes on")
    assert "cut off" in caplog.text
    assert "it is not open any more" in caplog.text


def test_a_watch_of_the_last_term_that_ends_late_is_not_taken_for_the_one_of_this(
    sqlite_url: str, yard: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocking flavour leaves a thread waiting in the driver until that says something."""
    waits, continues, ended, goes_on = (threading.Event() for _ in range(4))

    def silent() -> Iterator[None]:
        yield None
        waits.set()
        continues.wait()
        try:
            yield None
        finally:
            ended.set()

    def talking() -> Iterator[None]:
        while True:
            yield None
            goes_on.set()
            time.sleep(0.01)

    watches = iter([silent(), talking()])
    monkeypatch.setattr(yard, "watch", lambda: next(watches))
    with holdfast.Client(sqlite_url) as client:
        reconciler = client.reconciler("box", yard)
        for heard in (waits, goes_on):
            term: Any = SimpleNamespace(stopping=threading.Event(), gained=0)
            running = threading.Thread(target=reconciler.run, args=(term,), daemon=True)
            running.start()
            assert heard.wait(PATIENCE)
            if heard is goes_on:
                continues.set()
                assert ended.wait(PATIENCE)
                eventually(lambda: reconciler.status().watching, "this one still does")
            term.stopping.set()
            running.join(PATIENCE)
            assert not running.is_alive()


def test_a_call_of_the_driver_that_was_cancelled_from_within_is_one_that_failed(
    sqlite_url: str, yard: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some clients raise it when their channel is closed. Nobody has cancelled us, and we go on."""
    cancelled: list[str] = []

    async def listed(_: object) -> list[holdfast.reconciler.Backend]:
        cancelled.append("list")
        raise asyncio.CancelledError

    async def watch(_: object) -> AsyncIterator[None]:
        yield None
        cancelled.append("watch")
        raise asyncio.CancelledError

    monkeypatch.setattr(AsyncFakeDriver, "list", listed)
    monkeypatch.setattr(AsyncFakeDriver, "watch", watch)
    with running((sqlite_url, "async"), yard, sweep_every=0.05) as replica:
        eventually(lambda: min(map(cancelled.count, ("list", "watch"))) > 2, "both are asked again")
        assert "not by holdfast" in replica.counts.last_error
