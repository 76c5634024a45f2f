"""How the blocking flavour does many things at once, within bounds. ``crew_async`` has the same names for asyncio."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from holdfast.errors import LeaseLost
from holdfast.runtime import telemetry
from holdfast.runtime.clock import now
from holdfast.runtime.waiting import settled

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")

_LINGER = 5.0
"""Seconds that a thread stays which has nothing to ask."""
_NAP = 0.25
"""Seconds between two looks whether to stop, while an answer is waited for."""
_MOST_LATE = 256
"""Questions that have not been answered yet, though nobody waits any more: with so many of them no other is asked."""


def pause(flag: threading.Event, seconds: float) -> bool:
    """Wait, or until the flag is set: True if it is."""
    return flag.wait(min(seconds, threading.TIMEOUT_MAX))


theirs = nullcontext
"""A thread is not cancelled."""


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


class Ending(LeaseLost):
    """What was asked is not of interest any more. Nobody has failed."""


class Asker:
    """Asks what may never answer, and waits for so long and no longer.

    No thread can be ended: the one that asks is left behind then. So that these are few, the same is asked again only
    after twice the time, and fails at once until then, unless the answer comes after all."""

    def __init__(self) -> None:
        self._idle: list[_Asking] = []
        self._late: dict[str, tuple[int, float]] = {}
        """By question: how often nobody answered it in time, and when it may be asked again."""

    def ask(
        self, stopping: threading.Event | None, what: str, seconds: float, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Ending when whoever asks has to stop: a thread is not cancelled, as a task is that waits for an answer."""
        times, again_at = self._late.get(what, (0, 0.0))
        if now() < again_at or len(self._late) >= _MOST_LATE:
            raise TimeoutError(f"{what} is not called: it has not returned from before, or too many others have not")
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(settled(function(*arguments)))
            except BaseException as error:
                answer.set_exception(error)
            self._late.pop(what, None)

        self._free().ask(run)
        until = now() + seconds
        while (left := until - now()) > 0:
            if stopping is not None and stopping.is_set():
                raise Ending(f"{what} is not waited for: the term is ending")
            with suppress(TimeoutError):
                answer.exception(min(left, _NAP))
            if answer.done():
                return answer.result()
        self._late[what] = times + 1, now() + seconds * 2**times
        if answer.done():  # this very moment
            self._late.pop(what, None)
        raise TimeoutError(f"{what} has not returned within {seconds:g} s")

    def _free(self) -> _Asking:
        with suppress(IndexError):
            while not (found := self._idle.pop()).is_alive():  # in a fork none of them is
                pass
            return found
        return _Asking(self._idle)


class _Asking(threading.Thread):
    """Asks one question after the other, and waits among the idle in between."""

    def __init__(self, idle: list[_Asking]) -> None:
        super().__init__(name="holdfast-asking", daemon=True)
        self._idle, self._go = idle, threading.Lock()
        self._go.acquire()
        self._question: Callable[[], None] | None = None
        self.start()

    def ask(self, question: Callable[[], None]) -> None:
        self._question = question
        self._go.release()

    def run(self) -> None:
        while self._go.acquire(timeout=_LINGER) or not self._left():
            question, self._question = self._question, None
            assert question is not None
            question()
            del question
            self._idle.append(self)

    def _left(self) -> bool:
        try:
            self._idle.remove(self)
        except ValueError:  # somebody has just chosen us
            self._go.acquire()
            return False
        return True


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
