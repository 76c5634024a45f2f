"""What the blocking flavour does with threads. ``concurrency_async`` has the same names for asyncio.

Everywhere else the blocking flavour is generated from the one for asyncio, by ``scripts/unasync.py``; ``lock`` and
``database``, too, have a few modules that are written by hand for each flavour.
"""

from __future__ import annotations

import atexit
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from types import CoroutineType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

from holdfast.errors import HoldfastError, LeaseLost
from holdfast.runtime import telemetry
from holdfast.runtime.clock import now
from holdfast.runtime.exit_handler import restore
from holdfast.runtime.log import ERROR, logger

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
C = TypeVar("C", bound="DataclassInstance")

log = logger("holdfast.lease")

_GENERATOR, _COROUTINE, _ASYNC_GENERATOR = 0x20, 0x80, 0x200  # the flags of inspect, which is slow to import
NAP = 0.5
"""Seconds of one wait. A signal that arrives just before a wait is handled only after it, so long waits are cut."""
BLOCKS = True
"""Whether a waiter blocks its thread."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
MAX_NOTIFIERS = 64
"""Threads that call ``on_lost`` of a client's grants: ten thousand may be lost at once."""
MAX_NOTICES = 1000
"""Notices that wait for a callback that hangs: the latest ones are kept."""
MAX_LATE_CALLS = 256
"""Calls of the user's functions that have not returned: with this many no further one is made."""
_EXIT_GRACE = 2.0
"""Seconds that the end of the process waits for work under a lease."""
_THREAD_LINGER = 5.0
"""Seconds that an idle thread of ``BoundedCalls`` is kept."""

sleep = time.sleep
Mutex = threading.Lock
current_id = threading.get_ident
"""Identifies the caller: its thread."""


# Functions of the user


def maybe_await(value: T) -> T:
    """The result of a user's function. TypeError if it would have to be awaited."""
    if hasattr(type(value), "__await__"):
        if isinstance(value, CoroutineType):
            value.close()  # prevents a second report, "coroutine was never awaited"
        raise TypeError(f"{value!r:.80} was returned, which has to be awaited: use AsyncClient")
    return value


def call_blocking(function: Callable[..., Any], *args: Any) -> Any:
    """Call a user's function that may block: it has this thread to itself."""
    return maybe_await(function(*args))


def check_function(function: Callable[..., Any]) -> None:
    """For a decorator: the function must have done its work when it returns."""
    if _returns_early(function):
        raise TypeError(
            f"{function!r} must be a plain function, not a coroutine or generator function: or use AsyncClient"
        )


def check_callable(function: Callable[..., Any], what: str) -> None:
    """For a callback: the function must have done its work when it returns."""
    if not callable(function):
        raise TypeError(f"{what} must be a function, not {function!r:.80}")
    if _returns_early(function):
        raise TypeError(
            f"{what} must be a plain function, not a coroutine or generator function: {function!r:.80}. Or use "
            "AsyncClient"
        )


check_async_callable = check_callable


def check_work(work: Callable[..., Any]) -> None:
    if not callable(work):
        raise TypeError(f"work must be a function that takes the term, not {work!r}")


CALL_CLOCK = BLOCK_CLOCK = "thread"
"""Whose CPU time is counted for a call, and for a ``with`` block."""


def count_cpu(_counter: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function``. The clock of the thread counts its CPU time; the asyncio flavour sets
    ``counter.cpu_seconds``."""
    return function(*args, **kwargs)


def _returns_early(function: Callable[..., Any]) -> bool:
    flags: int = getattr(getattr(function, "__code__", None), "co_flags", 0)
    return bool(flags & (_GENERATOR | _COROUTINE | _ASYNC_GENERATOR))


# Waiting


class StopEvent(threading.Event):
    """An Event that is safe to set from a signal handler, even if the handler interrupted the waiting thread."""

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition(threading.RLock())

    def wait(self, timeout: float | None = None) -> bool:
        until = math.inf if timeout is None else now() + timeout
        while not super().wait(min(until - now(), NAP)) and now() < until:
            pass
        return self.is_set()


def wait_event(event: threading.Event, seconds: float) -> bool:
    """Wait until the event is set, at most ``seconds``; whether it is."""
    return event.wait(min(seconds, threading.TIMEOUT_MAX))


class Wakeup:
    """Set by any thread and by signal handlers, waited for by one thread. A wait clears it.

    A bare lock, which is free while it is set: an Event could make a signal handler wait for itself, and a queue's
    ``get(timeout)`` may wait for ever in Python 3.11 when a signal arrives as its time ends.
    """

    def __init__(self) -> None:
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        with suppress(RuntimeError):  # it is set already
            self._unset.release()

    def wait(self, timeout: float) -> bool:
        """True when it was set."""
        until = now() + timeout
        while not (was_set := self._unset.acquire(timeout=max(0.0, min(until - now(), NAP)))) and now() < until:
            pass
        return was_set


class LoopWatchdog:
    """The counterpart of AsyncLoopWatchdog: there is no event loop."""

    def __init__(self) -> None:
        raise ValueError("watchdog=True needs an AsyncClient: it renews while the event loop turns, and there is none")

    def begin(self) -> None: ...

    def turns(self, notify: Callable[[], object]) -> bool:
        return True


class KeyedLock:
    """One thread at a time for each key."""

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


# The owner of a client, and the block under a grant


class Owner:
    """What a client belongs to: here the process."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._notices: deque[tuple[Callable[[Any], object], Any]] = deque()
        self._notifiers: set[threading.Thread] = set()

    def check(self) -> None:
        """May the caller use the client here and now?"""

    def alive(self) -> bool:
        return True

    def call(self, callback: Callable[[], object]) -> None:
        """Call ``callback``, which must not wait, in the background thread."""
        callback()

    def notify(self, callback: Callable[[Any], object], grant: Any) -> None:
        """Call the user's ``callback(grant)`` in a thread of its own: it may block, and heartbeats must go on."""
        with self._mutex:
            self._notices.append((callback, grant))
            if len(self._notifiers) >= MAX_NOTIFIERS:
                self._notifiers = {
                    thread for thread in self._notifiers if thread.is_alive()
                }  # in a forked child, no thread is
            if len(self._notifiers) < MAX_NOTIFIERS:
                thread = threading.Thread(target=self._run, name="holdfast-on-lost", daemon=True)
                thread.start()
                self._notifiers.add(thread)

    def _run(self) -> None:
        while True:
            with self._mutex:
                if not self._notices:
                    self._notifiers.discard(threading.current_thread())
                    return
                callback, grant = self._notices.popleft()
            try:
                callback(grant)
            except Exception:
                log.event(
                    "lease.callback_failed", ERROR, "on_lost of %(lease)r failed", exc_info=True, lease=grant.name
                )


class CancelScope:
    """The block under a grant. Threads are never killed, so there is nothing to cancel here."""

    cancels = False

    def enter(self) -> None: ...

    def cancel(self, error: HoldfastError) -> None: ...

    def exit(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


# Work under a lease


class Worker:
    """Runs ``work(term)`` in a thread of its own, so that its supervisor receives signals. It is never killed."""

    def __init__(self, work: Callable[[Any], Any], term: Any, on_end: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self.ended = True
        """Whether nothing of it runs."""

        def run() -> None:
            try:
                maybe_await(work(term))
            except BaseException as error:
                self.error = error
            finally:
                self.ended = True
                on_end()

        self._thread = threading.Thread(target=run, name=f"holdfast-term-{term.name}", daemon=True)

    def start(self) -> None:
        """If this is interrupted, ``ended`` is False: the thread may run."""
        self.ended = False
        try:
            self._thread.start()
        except RuntimeError:  # the system has no more threads
            self.ended = True
            raise

    def cancel(self) -> None:
        """Nothing to do: the work looks at ``term.stopping`` and ``term.check()``."""


class LeasedWork(Protocol):
    @property
    def _busy(self) -> bool: ...
    def stop(self) -> None: ...
    def _let_expire(self) -> None: ...


leased_work: set[LeasedWork] = set()
"""What runs under a lease in this process, in either flavour."""


def add_leased_work(work: LeasedWork) -> None:
    leased_work.add(work)
    atexit.unregister(_stop_leased_work)
    atexit.register(_stop_leased_work)  # the last one registered is the first one called


def _stop_leased_work() -> None:
    """Stop work before the background thread releases all leases: work in a daemon thread runs until the very end of
    the process, and must not run without its lease."""
    working = [work for work in list(leased_work) if work._busy]
    for work in working:
        work.stop()
    until = now() + _EXIT_GRACE
    while any(work._busy for work in working) and now() < until:
        time.sleep(0.005)
    for work in working:
        work._let_expire()


class StopSignals:
    """SIGTERM and SIGINT call ``callback`` inside the block.

    On a loop several blocks may be open and end in any order: each callback is called, and the last block to end
    restores the handlers that were there before.
    """

    _open: ClassVar[list[StopSignals]] = []
    _before: ClassVar[dict[signal.Signals, Any]] = {}

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback = callback

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("signals=True needs the main thread: call stop() from your own handler instead")
        self._open.append(self)
        if len(self._open) == 1:
            self._before.update({number: signal.signal(number, self._handle) for number in STOP_SIGNALS})

    def __exit__(self, *_: object) -> None:
        if len(self._open) == 1:
            for number in STOP_SIGNALS:
                restore(number, self._handle, self._before.pop(number))
        self._open.remove(self)

    @classmethod
    def _handle(cls, *_: object) -> None:
        for block in list(cls._open):
            block._callback()


# Callbacks that may take long, or never return


class Notices(deque[Any]):
    """What a user's callback is still to be called with. The oldest is dropped when there are too many, which is
    reported once, until the callback has caught up."""

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        super().__init__(maxlen=MAX_NOTICES)
        self._on_error, self._reported = on_error, False

    def add(self, notice: Any) -> bool:
        """False when another one was dropped for it."""
        full = len(self) == self.maxlen
        self._reported &= bool(self)
        self.append(notice)
        if full and not self._reported:
            self._reported = True
            self._on_error(OverflowError(f"it hangs: only the last {len(self)} of its calls are kept"))
        return not full


class Notifier:
    """Calls a user's function once per notice, one after the other, in a thread of its own."""

    def __init__(self, function: Callable[[Any], object], on_error: Callable[[Exception], None]) -> None:
        self._function, self._on_error = function, on_error
        self._mutex = threading.Lock()
        self._notices = Notices(on_error)
        self._thread: threading.Thread | None = None

    def notify(self, notice: object) -> bool:
        """False when there are so many notices that the oldest was dropped."""
        with self._mutex:
            kept = self._notices.add(notice)
            if self._thread is None or not self._thread.is_alive():  # it does not run in a forked child
                self._thread = threading.Thread(target=self._run, name="holdfast-notifier", daemon=True)
                self._thread.start()
            return kept

    def finish(self, timeout: float) -> None:
        """Wait for the notices that are left, then drop them."""
        with self._mutex:
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
        with self._mutex:
            self._notices.clear()

    def _run(self) -> None:
        while True:
            with self._mutex:
                if not self._notices:
                    self._thread = None
                    return
                notice = self._notices.popleft()
            try:
                maybe_await(self._function(notice))
            except Exception as error:
                self._on_error(error)


class TermEnding(LeaseLost):
    """A call is not waited for any longer, because the term ends. Nothing has failed."""


class BoundedCalls:
    """Calls functions that may never return, and waits for a bounded time.

    A thread cannot be ended, so the one that calls is left behind. To keep these few, calls of a function that did not
    return fail at once for a while: for as long as the last call was waited for, and twice as long each time. That ends
    when it returns after all.
    """

    def __init__(self) -> None:
        self._idle: list[_Caller] = []
        self._late: dict[str, tuple[int, float]] = {}
        """By name: how often it has not returned in time, and when it may be called again."""

    def call(
        self, stopping: threading.Event | None, what: str, seconds: float, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Call ``function`` in a thread and return its result. TimeoutError after ``seconds``; TermEnding when
        ``stopping`` is set. ``what``: names the function in messages, and in the list of those that are late."""
        times, again_at = self._late.get(what, (0, 0.0))
        if now() < again_at or len(self._late) >= MAX_LATE_CALLS:
            raise TimeoutError(f"{what} is not called: an earlier call, or too many others, have not returned")
        result: Future[Any] = Future()

        def run() -> None:
            try:
                result.set_result(maybe_await(function(*arguments)))
            except BaseException as error:
                result.set_exception(error)
            self._late.pop(what, None)  # after the result: see the end of ``call``

        self._idle_caller().call(run)
        until = now() + seconds
        while (left := until - now()) > 0:
            if stopping is not None and stopping.is_set():
                raise TermEnding(f"{what} is not waited for: the term is ending")
            with suppress(TimeoutError):
                result.exception(min(left, NAP / 2))
            if result.done():
                return result.result()
        self._late[what] = times + 1, now() + seconds * 2**times
        if result.done():  # it returned before the line above, and did not find itself in _late
            self._late.pop(what, None)
        raise TimeoutError(f"{what} has not returned within {seconds:g} s, and may still be running")

    def _idle_caller(self) -> _Caller:
        with suppress(IndexError):
            while not (caller := self._idle.pop()).is_alive():  # in a forked child, no thread is
                pass
            return caller
        return _Caller(self._idle)


class _Caller(threading.Thread):
    """Makes one call after the other, and is in ``idle`` in between."""

    def __init__(self, idle: list[_Caller]) -> None:
        super().__init__(name="holdfast-caller", daemon=True)
        self._idle, self._go = idle, threading.Lock()
        self._go.acquire()
        self._function: Callable[[], None] | None = None
        self.start()

    def call(self, function: Callable[[], None]) -> None:
        self._function = function
        self._go.release()

    def run(self) -> None:
        while self._go.acquire(timeout=_THREAD_LINGER) or not self._leave():
            function, self._function = self._function, None
            assert function is not None
            function()
            del function
            self._idle.append(self)

    def _leave(self) -> bool:
        try:
            self._idle.remove(self)
        except ValueError:  # it was just chosen for a call
            self._go.acquire()
            return False
        return True


# Several things at once


class TaskPool:
    """Runs at most ``size`` functions at a time, which must not raise. Leaving the block waits for them."""

    def __init__(self, size: int) -> None:
        self._room = threading.Semaphore(size)
        self._threads = ThreadPoolExecutor(size, "holdfast-pool")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Wait for everything that was spawned."""
        self._threads.shutdown()

    def spawn(self, function: Callable[..., Any], *arguments: Any) -> bool:
        """Start ``function`` as soon as there is room; False when the pool was shut down."""
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


class Companion:
    """A function without effects of its own that runs beside a block. The end of the block does not wait for it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._thread = threading.Thread(target=function, args=arguments, name="holdfast-companion", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None: ...


reject_foreign_cancel = nullcontext
"""The counterpart of the check in ``concurrency_async``. Does nothing: threads are not cancelled."""


class SharedCounts(Generic[C]):
    """Counts that several threads add to. Each addition is reported to telemetry as ``event``."""

    def __init__(self, counts: C, event: str) -> None:
        self._counts, self._event = counts, event
        self._mutex = threading.Lock()

    def add(self, **more: int) -> None:
        if telemetry.listeners:
            for name, number in more.items():
                telemetry.emit(self._event, what=name, count=number)
        with self._mutex:
            for name, number in more.items():
                setattr(self._counts, name, getattr(self._counts, name) + number)

    def set(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self._counts, name, value)

    def copy(self, **values: Any) -> C:
        with self._mutex:
            return replace(self._counts, **values)
