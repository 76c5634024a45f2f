"""One process that contends: two threads that acquire, write under protection, renew and release, and write down what
they know of each. Started by a ``Crew``, with its errand as JSON; ends politely when its standard input does.
"""

import json
import os
import random
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
from proof.chaos.data import Data

NUMBERS = (1, 2)
"""Of its threads."""
FELL_OVER = 3
"""The exit status of a contender that met something it does not expect."""
SESSION, FORCED = "session-", "forced-"
"""Prefixes of names: those fail over with the session, and these are taken away by force. In both cases a holder learns
of it after the fact, so no belief is told of them."""
_NOT_GRANTED = frozenset({"Unreachable", "Busy", "Refused", "SchemaMismatch", "SessionUnsafe"})
"""These say that it was not granted, unless the acquire had asked before and was not answered."""


class Errand(NamedTuple):
    url: str
    folder: str
    worker: str
    names: list[str]
    ttl: float
    seed: int
    sane_clocks: bool


class Contender:
    """One thread, with a connection of its own for what it writes."""

    def __init__(self, errand: Errand, number: int, client: Any, over: threading.Event) -> None:
        self._errand, self._client, self._over = errand, client, over
        self._random = random.Random(f"{errand.seed}-{errand.worker}-{number}")
        self._record = Recorder(errand.folder, f"{errand.worker}-{number}")
        self._data = Data(errand.url, self._random, sane_clocks=errand.sane_clocks)
        self._belief = Belief(self._record)

    def run(self) -> None:
        while not self._over.is_set():
            grant = self._acquire(self._random.choice(self._errand.names))
            self._read_gauge()
            if grant is not None:
                self._hold(grant)
            self._over.wait(self._random.uniform(0, self._errand.ttl / 10))
        self._data.close()

    def _acquire(self, name: str) -> Any:
        ttl, limit = self._errand.ttl, self._random.choice([0, 0, 0, self._errand.ttl / 2])
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
                _tell(call, error, certain=certain, abandoned=len(times))
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
        if self._random.random() < 0.9:
            self._release(grant)
        else:  # forgotten: kept until the process ends, or never renewed again
            self._belief.look()

    def _read_gauge(self) -> None:
        """Of the whole process: both threads."""
        began, value = now(), telemetry.readings().get("leases_held", 0.0)
        workers = [f"{self._errand.worker}-{number}" for number in NUMBERS]
        self._record.info("gauge", value=value, workers=workers, since=began, until=now())

    def _take_over(self, grant: Any) -> bool:
        """Count what older grants wrote, in the same transaction that shows that we hold it now."""
        with self._record.invoke("takeover", grant.name, grant.fence) as call:
            return self._data.take_over(grant, call)

    def _write(self, grant: Any, lasting: float = 0.0) -> bool:
        key = uuid4().hex
        with self._record.invoke("write", grant.name, grant.fence, key=key) as call:
            return self._data.write(grant, key, call, lasting)

    def _linger(self, grant: Any) -> bool:
        """Write for longer than the lease may last, so that somebody else has it before the commit comes."""
        if self._data.one_writer:
            return self._write(grant, self._random.uniform(0, 0.1))
        return self._write(grant, self._random.uniform(0.2, 1.8) * self._errand.ttl)

    def _renew(self, grant: Any) -> bool:
        with self._record.invoke("renew", grant.name, grant.fence) as call:
            try:
                grant.renew()
            except holdfast.LeaseLost:
                call.fail()
            except (holdfast.EngineError, holdfast.OwnershipUnknown) as error:
                _tell(call, error)
            else:
                call.ok()
                return True
        return False

    def _wait(self, grant: Any) -> bool:
        self._over.wait(self._random.uniform(0, self._errand.ttl / 2))
        return not grant.lost

    def _release(self, grant: Any) -> None:
        self._belief.end()
        with self._record.invoke("release", grant.name, grant.fence) as call:
            try:
                call.ok() if grant.release() else call.fail()
            except holdfast.EngineError as error:
                _tell(call, error)


class Belief:
    """In which spans the worker trusted its grant, as it would have acted on it: from look to look, and at the end
    until it gave it back, or was told, or its trust was over, though it was stopped then and saw it later."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._grant: Any = None
        self._since = self._until = 0.0
        self._told = float("inf")

    def begin(self, grant: Any) -> None:
        self._grant = None if grant.name.startswith((SESSION, FORCED)) else grant
        self._since, self._told = now(), float("inf")
        self._until = self._since + grant.remaining()

    def look(self) -> None:
        if self._grant is None:
            return
        at, left = now(), self._grant.remaining()
        if left > 0 and not self._grant.lost:
            self._tell(at, sure=True)
            self._since, self._until = at, at + left
        else:
            self.end()

    def end(self) -> None:
        """It is given back, or lost."""
        if self._grant is not None:
            at = now()  # read before the trust: whatever holds us up in between, it was not over at that moment
            left = 0.0 if self._grant.lost else self._grant.remaining()
            self._tell(min(at, self._told) if left > 0 else min(at, self._until, self._told), sure=left > 0)
            self._grant = None

    def lost(self, grant: Any) -> None:
        """Called by holdfast."""
        self._record.info("lost", grant.name, grant.fence)
        if grant is self._grant:
            self._told = now()

    def _tell(self, until: float, *, sure: bool) -> None:
        """``sure``: it was not lost when the span ended. Else it may have been, a moment before we were told."""
        grant = self._grant
        if until > self._since:
            self._record.info("believe", grant.name, grant.fence, sure=sure, **{"from": self._since, "until": until})


def _tell(call: Pending, error: Exception, *, certain: bool = False, **data: Any) -> None:
    said = f"{type(error).__name__}: {error}"[:200]
    call.fail(error=said, **data) if certain else call.unknown(error=said, **data)


@contextmanager
def _abandoned() -> Iterator[list[None]]:
    """One for each time that this thread gave up on the answer to an acquire, which may have been granted."""
    times: list[None] = []
    thread = threading.get_ident()

    def heard(event: str, fields: dict[str, Any]) -> None:
        if event == "lease.abandoned" and threading.get_ident() == thread:
            times.append(None)

    stop = telemetry.listen(heard)
    try:
        yield times
    finally:
        stop()


def _fall_over(*_: object) -> None:
    """A contender that falls over is a finding of its own, and must not go on as half of itself."""
    traceback.print_exc()
    os._exit(FELL_OVER)


def main() -> None:
    errand = Errand(**json.loads(sys.argv[1]))
    threading.excepthook = _fall_over
    over = threading.Event()
    try:
        with holdfast.Client(errand.url) as client:
            contenders = [Contender(errand, number, client, over) for number in NUMBERS]
            threads = [threading.Thread(target=each.run) for each in contenders]
            for thread in threads:
                thread.start()
            sys.stdin.read()
            over.set()
            for thread in threads:
                thread.join()
    except BaseException:
        _fall_over()


if __name__ == "__main__":
    main()
