"""How the blocking flavour runs work beside its supervisor. ``running_async`` has the same names for asyncio."""

from __future__ import annotations

import atexit
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Protocol

from holdfast.runtime.clock import now
from holdfast.runtime.waiting import settled

_LAST_GRACE = 2.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)
_NAP = 0.5
MOST_UNTOLD = 1000
"""What a hook that hangs is to be told is kept so far: the latest of it."""


def check_work(work: Callable[..., Any]) -> None:
    if not callable(work):
        raise TypeError(f"work must be a function that takes the term, not {work!r}")


class Flag(threading.Event):
    """An Event that a signal's handler may set, though it may have interrupted the very thread that waits for it: with
    its lock taken, which must not be waited for then, or just before it lies down, where it hears nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition(threading.RLock())

    def wait(self, timeout: float | None = None) -> bool:
        until = math.inf if timeout is None else now() + timeout
        while not super().wait(min(until - now(), _NAP)) and now() < until:
            pass
        return self.is_set()


class Bell:
    """Rung from any thread and from a signal's handler, which an Event could make wait for itself; heard by one.

    A bare lock, taken while nothing rings. A queue would not do: if its ``get(timeout)`` is woken for nothing, by a
    signal whose handler takes its time, just as its time ends, Python 3.11 waits for ever."""

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        with suppress(RuntimeError):  # it rings already
            self._silence.release()

    def wait(self, timeout: float) -> None:
        """In short naps: a signal that comes just before a nap is handled after it, not within."""
        until = now() + timeout
        while not self._silence.acquire(timeout=max(0.0, min(until - now(), _NAP))) and now() < until:
            pass


class Job:
    """The work, in a thread of its own: its supervisor hears signals meanwhile. It is asked to stop, never killed."""

    def __init__(self, work: Callable[[Any], Any], term: Any, ended: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self.ended = True
        """Whether nothing of it runs."""

        def run() -> None:
            try:
                settled(work(term))
            except BaseException as error:
                self.error = error
            finally:
                self.ended = True
                ended()

        self._thread = threading.Thread(target=run, name=f"holdfast-term-{term.name}", daemon=True)

    def start(self) -> None:
        """Whoever is interrupted in here does not know whether it runs, and must not believe that it does not."""
        self.ended = False
        try:
            self._thread.start()
        except RuntimeError:  # no room for another thread
            self.ended = True
            raise

    def cancel(self) -> None:
        """Its term says so: ``term.stopping``, ``term.check()``."""


class Unfinished(Protocol):
    @property
    def busy(self) -> bool: ...
    def stop(self) -> None: ...
    def let_expire(self) -> None: ...


unfinished: set[Unfinished] = set()
"""What works under a lease in this process, whichever the flavour."""


@atexit.register
def _end_unfinished() -> None:
    """Before the keeper, which was there first, releases all there is: work in a daemon thread runs until the very end
    of the process, and its lease must not be another's by then."""
    working = [each for each in list(unfinished) if each.busy]
    for each in working:
        each.stop()
    until = now() + _LAST_GRACE
    while any(each.busy for each in working) and now() < until:
        time.sleep(0.005)
    for each in working:
        each.let_expire()


class Untold(deque[Any]):
    """What a function of the user's is still to be told. When that is too much the oldest is forgotten, and this is
    said once, until it has caught up."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        super().__init__(maxlen=MOST_UNTOLD)
        self._failed, self._said = failed, False

    def add(self, what: Any) -> bool:
        """False when one was forgotten for it."""
        full = len(self) == self.maxlen
        self._said &= bool(self)
        self.append(what)
        if full and not self._said:
            self._said = True
            self._failed(OverflowError(f"it hangs: of what it is still to be told only the last {len(self)} are kept"))
        return not full


class Teller:
    """Calls a function of the user's, one time after the other, beside what goes on: it may take its time, or hang."""

    def __init__(self, function: Callable[[Any], object], failed: Callable[[Exception], None]) -> None:
        self._function, self._failed = function, failed
        self._mutex = threading.Lock()
        self._untold = Untold(failed)
        self._thread: threading.Thread | None = None

    def tell(self, what: object) -> bool:
        """False when so much is untold that the oldest of it was forgotten."""
        with self._mutex:
            kept = self._untold.add(what)
            if self._thread is None or not self._thread.is_alive():  # in a fork it is not there any more
                self._thread = threading.Thread(target=self._run, name="holdfast-teller", daemon=True)
                self._thread.start()
            return kept

    def finish(self, timeout: float) -> None:
        """Wait for what is not told yet, and then for no more."""
        with self._mutex:
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
        with self._mutex:
            self._untold.clear()

    def _run(self) -> None:
        while True:
            with self._mutex:
                if not self._untold:
                    self._thread = None
                    return
                what = self._untold.popleft()
            try:
                settled(self._function(what))
            except Exception as error:
                self._failed(error)


class Interrupts:
    """SIGTERM and SIGINT call ``callback`` inside the block, and are what they were after it. On a loop several blocks
    may be open, and end in any order: each is called, and the last to end puts back what was there."""

    _open: ClassVar[list[Interrupts]] = []
    _before: ClassVar[dict[signal.Signals, Any]] = {}

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback = callback

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("signals=True needs the main thread: call stop() from your own handler instead")
        self._open.append(self)
        if len(self._open) == 1:
            self._before.update({each: signal.signal(each, self._interrupted) for each in SIGNALS})

    def __exit__(self, *_: object) -> None:
        if len(self._open) == 1:
            for each in SIGNALS:
                signal.signal(each, self._before.pop(each))
        self._open.remove(self)

    @classmethod
    def _interrupted(cls, *_: object) -> None:
        for each in list(cls._open):
            each._callback()
