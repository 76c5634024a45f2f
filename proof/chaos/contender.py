"""A process whose two threads acquire leases, write under their protection, renew and release them, and record it all.

``Contenders`` starts it, with its job as JSON. It ends in order when its standard input is closed.
"""

import json
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from uuid import uuid4

import holdfast
from holdfast import telemetry
from holdfast.testing.history import Pending, Recorder, now
from proof.chaos.tables import Tables

NUMBERS = (1, 2)
"""The numbers of its threads."""
CRASHED = 3
"""The exit status of a contender after an unexpected exception."""
INHERITED = 4
"""The exit status of a forked child that was let into a transaction under its parent's grant."""
SESSION, FORCED = "session-", "forced-"
"""Prefixes of names: leases that fail over with the session, and leases that an operator releases by force. In both
cases the holder is notified after the fact, so that no belief is recorded."""
_NOT_GRANTED = frozenset({"Unreachable", "Busy", "Refused", "SchemaMismatch", "SessionUnsafe"})
"""Errors that prove that the lease was not granted, unless an earlier request of the acquire got no reply."""


class Job(NamedTuple):
    url: str
    folder: str
    worker: str
    names: list[str]
    ttl: float
    seed: int
    sane_clocks: bool


class Contender:
    """One thread, with its own connection for its writes."""

    def __init__(self, job: Job, number: int, client: Any, over: threading.Event, forks: threading.Event) -> None:
        """``forks``: set when it is to fork."""
        self._job, self._client, self._over, self._forks = job, client, over, forks
        self._random = random.Random(f"{job.seed}-{job.worker}-{number}")
        self._record = Recorder(job.folder, f"{job.worker}-{number}")
        self._tables = Tables(job.url, self._random, sane_clocks=job.sane_clocks)
        self._belief = Belief(self._record)

    def run(self) -> None:
        while not self._over.is_set():
            grant = self._acquire(self._random.choice(self._job.names))
            self._read_gauge()
            if grant is not None:
                self._hold(grant)
            self._over.wait(self._random.uniform(0, self._job.ttl / 10))
        self._tables.close()

    def _acquire(self, name: str) -> Any:
        ttl, limit = self._job.ttl, self._random.choice([0, 0, 0, self._job.ttl / 2])
        session = name.startswith(SESSION)
        kept = session or self._random.random() < 0.6
        lease = self._client.lease(
            name,
            ttl=ttl,
            timeout=limit,
            failover="session" if session else "ttl",
            auto_renew=kept,
            on_lost=self._belief.lost if kept else "flag",
        )
        with self._record.invoke("acquire", name, kept=kept) as call, _abandoned() as times:
            try:
                grant = lease.acquire()
            except holdfast.NotAcquired as refusal:
                call.fail(holder=refusal.holder, abandoned=len(times))
            except (holdfast.EngineError, holdfast.SchemaMismatch, holdfast.SessionUnsafe) as error:
                certain = not times and type(error).__name__ in _NOT_GRANTED
                _complete(call, error, certain=certain, abandoned=len(times))
            else:
                call.ok(grant.fence, abandoned=len(times))
                self._belief.begin(grant)
                return grant
        return None

    def _hold(self, grant: Any) -> None:
        if self._take_over(grant):
            for _ in range(self._random.randrange(6)):
                step = self._random.choice(
                    [self._write, self._write, self._linger, self._linger, self._renew, self._wait]
                )
                if self._over.is_set() or not step(grant):
                    break
                self._belief.look()
                if self._forks.is_set():
                    self._forks.clear()
                    self._fork(grant)
        if self._random.random() < 0.9:
            self._release(grant)
        else:  # forgotten: renewed until the process ends, or left to expire
            self._belief.look()

    def _fork(self, grant: Any) -> None:
        """A forked child holds nothing: RuntimeError if a transaction begins there under its parent's grant."""
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)  # its default action ends a child that hangs
            status = 0
            try:
                tables = Tables(self._job.url, self._random, sane_clocks=True)  # with a connection of its own
                if tables.lets_in(grant):
                    status = INHERITED
            finally:
                os._exit(status)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == INHERITED:
            raise RuntimeError(f"a forked child was let into a transaction under its parent's grant of {grant.name!r}")

    def _read_gauge(self) -> None:
        """Record the gauge of the process, that is, of both threads."""
        started, value = now(), telemetry.readings().get("leases_held", 0.0)
        workers = [f"{self._job.worker}-{number}" for number in NUMBERS]
        self._record.info("gauge", value=value, workers=workers, since=started, until=now())

    def _take_over(self, grant: Any) -> bool:
        """Count the writes of older grants, in a transaction that this grant protects."""
        with self._record.invoke("takeover", grant.name, grant.fence) as call:
            return self._tables.take_over(grant, call)

    def _write(self, grant: Any, lasting: float = 0.0) -> bool:
        key = uuid4().hex
        with self._record.invoke("write", grant.name, grant.fence, key=key) as call:
            return self._tables.write(grant, key, call, lasting)

    def _linger(self, grant: Any) -> bool:
        """Write for longer than the lease may last, so that another contender may hold it before the commit."""
        if self._tables.one_writer:
            return self._write(grant, self._random.uniform(0, 0.1))
        return self._write(grant, self._random.uniform(0.2, 1.8) * self._job.ttl)

    def _renew(self, grant: Any) -> bool:
        with self._record.invoke("renew", grant.name, grant.fence) as call:
            try:
                grant.renew()
            except holdfast.LeaseLost:
                call.fail()
            except (holdfast.EngineError, holdfast.OwnershipUnknown) as error:
                _complete(call, error)
            else:
                call.ok()
                return True
        return False

    def _wait(self, grant: Any) -> bool:
        self._over.wait(self._random.uniform(0, self._job.ttl / 2))
        return not grant.lost

    def _release(self, grant: Any) -> None:
        self._belief.end()
        with self._record.invoke("release", grant.name, grant.fence) as call:
            try:
                call.ok() if grant.release() else call.fail()
            except holdfast.EngineError as error:
                _complete(call, error)


class Belief:
    """Records the intervals in which a worker trusted its grant: between two calls of ``look``, and after the last one
    until it released the grant, was notified of its loss, or its trust ended, even if it was paused then."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._grant: Any = None
        self._since = self._until = 0.0
        self._notified = float("inf")

    def begin(self, grant: Any) -> None:
        self._grant = None if grant.name.startswith((SESSION, FORCED)) else grant
        self._since, self._notified = now(), float("inf")
        self._until = self._since + grant.remaining()

    def look(self) -> None:
        if self._grant is None:
            return
        at, left = now(), self._grant.remaining()
        if left > 0 and not self._grant.lost:
            self._record_until(at, sure=True)
            self._since, self._until = at, at + left
        else:
            self.end()

    def end(self) -> None:
        """The grant is released, or lost."""
        if self._grant is not None:
            at = now()  # before remaining(): a pause in between cannot make the interval too long
            left = 0.0 if self._grant.lost else self._grant.remaining()
            self._record_until(
                min(at, self._notified) if left > 0 else min(at, self._until, self._notified), sure=left > 0
            )
            self._grant = None

    def lost(self, grant: Any) -> None:
        """The ``on_lost`` callback of its leases."""
        self._record.info("lost", grant.name, grant.fence)
        if grant is self._grant:
            self._notified = now()

    def _record_until(self, until: float, *, sure: bool) -> None:
        """``sure``: it was not lost at ``until``. Otherwise it may have been lost before we were notified."""
        grant = self._grant
        if until > self._since:
            self._record.info("believe", grant.name, grant.fence, sure=sure, **{"from": self._since, "until": until})


def _complete(call: Pending, error: Exception, *, certain: bool = False, **data: Any) -> None:
    message = f"{type(error).__name__}: {error}"[:200]
    call.fail(error=message, **data) if certain else call.unknown(error=message, **data)


@contextmanager
def _abandoned() -> Iterator[list[None]]:
    """A list with one entry per acquire request that this thread abandoned, and that may still be granted."""
    times: list[None] = []
    thread = threading.get_ident()

    def on_event(event: str, fields: dict[str, Any]) -> None:
        if event == "lease.abandoned" and threading.get_ident() == thread:
            times.append(None)

    stop = telemetry.listen(on_event)
    try:
        yield times
    finally:
        stop()


def crash(*_: object) -> None:
    """An unexpected exception ends the whole process, and fails the run."""
    traceback.print_exc()
    os._exit(CRASHED)


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    threading.excepthook = crash
    over, forks = threading.Event(), threading.Event()
    signal.signal(signal.SIGURG, lambda *_: forks.set())
    try:
        with holdfast.Client(job.url) as client:
            contenders = [Contender(job, number, client, over, forks) for number in NUMBERS]
            threads = [threading.Thread(target=contender.run) for contender in contenders]
            for thread in threads:
                thread.start()
            sys.stdin.read()
            over.set()
            for thread in threads:
                thread.join()
    except BaseException:
        crash()


if __name__ == "__main__":
    main()
