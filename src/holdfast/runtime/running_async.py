"""How the asyncio flavour runs a piece of work beside its supervisor: the same names as in ``running``."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from holdfast.runtime.running import Untold
from holdfast.runtime.waiting_async import AsyncSignal, settled

AsyncFlag = asyncio.Event


def check_work(work: Callable[..., Any]) -> None:
    if not inspect.iscoroutinefunction(work) and not inspect.iscoroutinefunction(getattr(work, "__call__", None)):  # noqa: B004
        raise TypeError(f"work must be an async def that takes the term, not {work!r}")


class AsyncBell:
    """Rung from any thread, heard by one task."""

    def __init__(self) -> None:
        self._signal: AsyncSignal | None = None
        self._early = False

    def ring(self) -> None:
        self._early = True  # before we look: whoever begins to wait this very moment sees one or the other
        if self._signal is not None:
            self._signal.set()

    async def wait(self, timeout: float) -> None:
        if self._signal is None:
            self._signal = AsyncSignal()
            if self._early:
                return
        await self._signal.wait(timeout)


class AsyncJob:
    """The work, in a task of its own, which is cancelled when it is to stop."""

    def __init__(self, work: Callable[[Any], Coroutine[Any, Any, Any]], term: Any, ended: Callable[[], None]) -> None:
        self._work, self._term, self._ended = work, term, ended
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> None:
        name = f"holdfast-term-{self._term.name}"
        self._task = asyncio.get_running_loop().create_task(self._work(self._term), name=name)
        self._task.add_done_callback(lambda _: self._ended())

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs."""
        return self._task is None or self._task.done()

    @property
    def error(self) -> BaseException | None:
        if self._task is None:
            return None
        return asyncio.CancelledError() if self._task.cancelled() else self._task.exception()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class AsyncTeller:
    """Calls a function of the user's, one time after the other, beside what goes on: it may take its time, or hang."""

    def __init__(self, function: Callable[[Any], object], failed: Callable[[Exception], None]) -> None:
        self._function, self._failed = function, failed
        self._untold = Untold(failed)
        self._task: asyncio.Task[None] | None = None

    def tell(self, what: object) -> bool:
        """False when so much is untold that the oldest of it was forgotten."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="holdfast-teller")
        return self._untold.add(what)

    async def finish(self, timeout: float) -> None:
        """Wait for what is not told yet, and then for no more."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=timeout)
            self._task.cancel()
            self._untold.clear()

    async def _run(self) -> None:
        while self._untold:
            try:
                await settled(self._function(self._untold.popleft()))
            except Exception as error:
                self._failed(error)
