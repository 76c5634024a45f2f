"""How the blocking flavour does many things at once, within bounds. ``aio_crew`` has the same names for asyncio."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from holdfast._wire import telemetry

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")


def pause(flag: threading.Event, seconds: float) -> bool:
    """Wait, or until the flag is set: True if it is."""
    return flag.wait(min(seconds, threading.TIMEOUT_MAX))


class Crew:
    """So many at a time and no more. What it is given raises nothing; leaving it waits for what is under way."""

    def __init__(self, most: int) -> None:
        self._room = threading.Semaphore(most)
        self._threads = ThreadPoolExecutor(most, "holdfast-crew")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Wait for all that was begun."""
        self._threads.shutdown()

    def spawn(self, function: Callable[..., Any], *arguments: Any) -> bool:
        """Begin it as soon as there is room; False when the crew has gone home."""
        self._room.acquire()

        def run() -> None:
            try:
                function(*arguments)
            finally:
                self._room.release()

        try:
            self._threads.submit(run)
        except RuntimeError:
            self._room.release()
            return False
        return True


class Aside:
    """Something that runs beside a block and has no effect of its own: nobody waits for its end."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._thread = threading.Thread(target=function, args=arguments, name="holdfast-aside", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None: ...


class Keyed:
    """One at a time for each key."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._locks: dict[str, list[Any]] = {}

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        with self._mutex:
            entry = self._locks.setdefault(key, [threading.Lock(), 0])
            entry[1] += 1
        try:
            with entry[0]:
                yield
        finally:
            with self._mutex:
                entry[1] -= 1
                if not entry[1]:
                    del self._locks[key]


class Tally(Generic[C]):
    """Counts that several threads add to. ``event``: what is told of each of them, to whoever listens."""

    def __init__(self, counts: C, event: str) -> None:
        self._counts, self._event = counts, event
        self._mutex = threading.Lock()

    def add(self, **more: int) -> None:
        if telemetry.listeners:
            for name, number in more.items():
                telemetry.tell(self._event, what=name, count=number)
        with self._mutex:
            for name, number in more.items():
                setattr(self._counts, name, getattr(self._counts, name) + number)

    def set(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self._counts, name, value)

    def copy(self, **values: Any) -> C:
        with self._mutex:
            return replace(self._counts, **values)
