# Generated from engine_async.py by scripts/unasync.py. Do not edit.
"""What both engines share: the session for calls, opened on first use and closed when idle, and how errors read.

A statement sent through here may be sent twice (an acquire carries its own token), so a connection that died unnoticed
costs one reconnect and no error; one that must not be is marked by its caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

from holdfast.database.schema_version import Tables
from holdfast.database.sessions import Row
from holdfast.database.url import Database
from holdfast.errors import EngineError, Refused, SchemaMismatch, Unanswered, Unreachable
from holdfast.lease.keepers import Keeper, keeper_of, keepers_of
from holdfast.names import LeaseTerms
from holdfast.runtime import forks, telemetry
from holdfast.runtime.clock import now
from holdfast.runtime.identity import this_process
from holdfast.runtime.log import logger
from holdfast.runtime.waiting import Gate, Owner, Turn, sleep

log = logger("holdfast.engine")

CALL_TIMEOUT = 10.0
LOCKED, DENIED, RACED = "55P03", "42501", "40001"
IDLE = 1.0
"""Seconds after which an unused session is closed: a process that only holds leases has the keeper's connection."""

NOTHING: Mapping[str, Any] = {}

Calls = Sequence[tuple[str, Mapping[str, Any]]]
Answers = list[list[Row] | Refused]


class Repeated(list[Row]):
    """The answer to a statement that was sent twice: the first may have happened, or happen yet, whatever this says."""


class Session(Protocol):
    def call(self, name: str, parameters: Mapping[str, Any], timeout: float) -> list[Row]: ...
    def script(self, text: str, timeout: float) -> None: ...
    def look(self) -> None: ...
    def close(self) -> None: ...


class Working(Protocol):
    def stop(self) -> None: ...

    def leave(self) -> None:
        """Wait, bounded, until it has ended."""

    def let_expire(self) -> None:
        """It may not have: its lease is not released then, and not renewed either."""


class Engine(Tables, ABC):
    poll = 1.0
    """How often a waiter asks again when nobody wakes it."""

    def __init__(self, database: Database, *, looks: bool = False) -> None:
        """``looks``: through it nothing is written, whoever tries."""
        super().__init__(database)
        self.looks = looks
        self.owner = Owner()
        self.era = forks.era
        self.closing = self.closed = False
        self.home: int | None = None
        """Of its tables, as the database numbers them, where somebody had to know: see ``operation_begin``."""
        self.unkept: dict[str, str] = {}
        """Tokens and names of leases that no heartbeat renews: to be released with the client all the same."""
        self.guards: list[str] = []
        """Keys of guards whose block somebody is in: this client must not be closed."""
        self.violations: Counter[tuple[str, str]] = Counter()
        """Of pools, by kind."""
        self.slots_in_use: dict[str, int] = {}
        """Of pools, as they were last found."""
        self.working: set[Working] = set()
        """What runs under our leases, and is stopped before they are released."""
        self._identity = this_process()
        self._session: Session | None = None
        self._turn, self._gate = Turn(), Gate()
        self._used = self._reaping = False
        telemetry.register(self)

    def __reduce__(self) -> NoReturn:
        """Whatever is made by a client has this, so none can be pickled, or copied deeply."""
        raise TypeError(
            "clients, and what they make, belong to their process: make a client of its own there, from the same URL. "
            "A lease can be handed over by its token: client.lease(name).adopt(token)"
        )

    def gauges(self) -> Iterator[tuple[str, float]]:
        if not self.closed:
            yield "slots_in_use", float(sum(self.slots_in_use.values()))

    @property
    def process(self) -> dict[str, Any]:
        """Who we are, for the people who look: label, host, pid, started."""
        self._notice_fork()
        return self._identity

    @property
    def keeper(self) -> Keeper:
        return keeper_of(self.database)

    def keeper_for(self, terms: LeaseTerms) -> Keeper:
        """Whose heartbeat renews such leases, and who hears that one is free."""
        return keeper_of(self.database, brittle=terms.brittle)

    def wake(self, name: str) -> None:
        """That lease was released in this very process: no need to hear it from the server."""
        for keeper in keepers_of(self.database):
            keeper.wake(name)

    def call(
        self,
        name: str,
        parameters: Mapping[str, Any],
        *,
        timeout: float = CALL_TIMEOUT,
        again: Mapping[str, Any] | None = NOTHING,
    ) -> list[Row]:
        """Run a named statement; once more on a new connection when the old one turns out to be dead.

        ``again``: what is different the second time. None: there is none, because it could happen twice."""
        self.check_usable()
        deadline = now() + timeout
        unanswered: Unanswered | None = None
        while True:
            try:
                self._turn.check_free()
                try:
                    self._turn.enter(deadline)
                    session = self._session or self._open(deadline)
                    try:
                        rows = session.call(name, parameters, max(0.01, deadline - now()))
                    except Unanswered:
                        self._discard(session)
                        raise
                    if self._reaping:
                        self._used = True
                    else:
                        self._reap_later()
                    return rows if unanswered is None else Repeated(rows)
                finally:
                    try:  # noqa: SIM105 - not in a function: a signal could come on the way into that
                        self._turn.lock.release()
                    except RuntimeError:
                        pass  # it was not our turn yet
            except Unanswered as error:
                if unanswered is not None or again is None or now() >= deadline:
                    raise
                unanswered = error
                parameters = {**parameters, **again}
            except (Unreachable, Refused, SchemaMismatch) as error:
                if isinstance(error, Refused) and error.sqlstate == RACED and now() < deadline:
                    continue  # it has not happened: behind a pooler the default may be serializable transactions
                if unanswered is not None:  # the first attempt may have happened, whatever became of the second
                    raise unanswered from error
                told = self.translate(error) if isinstance(error, Refused) else error
                if told is error:
                    raise
                raise told from error

    def call_when_free(
        self,
        name: str,
        parameters: Mapping[str, Any],
        *,
        patience: float,
        timeout: float = CALL_TIMEOUT,
        again: Mapping[str, Any] | None = NOTHING,
    ) -> list[Row]:
        """A statement that is refused while a protected transaction is open: ask again for a while, in nobody's way."""
        until, deadline, pause = now() + patience, now() + timeout, 0.002
        while True:
            try:
                return self.call(name, parameters, timeout=deadline - now(), again=again)
            except Refused as error:
                if error.sqlstate != LOCKED or now() + pause > until:
                    raise
            sleep(pause)
            pause = min(pause * 2, 0.1)

    @contextmanager
    def separately(self, timeout: float = CALL_TIMEOUT) -> Iterator[Session]:
        """A session for one purpose that does not ask for our tables: migrations."""
        session = self.connect(timeout)
        try:
            yield session
        finally:
            session.close()

    @abstractmethod
    def rehearse(self, calls: Calls, *, timeout: float = CALL_TIMEOUT) -> Answers:
        """Named statements in one transaction that is rolled back; the answers, up to the first that is an error."""

    def connect(self, timeout: float, *, to_look: bool = False) -> Session:
        """A session of the caller's own; ``to_look`` when one to a server that cannot be used will do."""
        self.check_usable()
        session = self._connect_to_look(timeout) if to_look else self._connect(timeout)
        if not self.looks:
            return session
        from holdfast.database.read_only import looking

        try:
            return looking(session, self.database.dialect, timeout)
        except BaseException:
            session.close()
            raise

    def close(self) -> None:
        self._notice_fork()
        self.closed = True
        try:
            self._turn.check_free()
            self._turn.enter(now() + CALL_TIMEOUT)
            try:
                session, self._session = self._session, None
                if session is not None:
                    session.close()
            finally:
                self._turn.lock.release()
        except Unreachable:
            log.debug("closed in the middle of a call on %s, which keeps its session", self.database)

    def check_open(self) -> None:
        """For whatever would outlive the close that is under way."""
        if self.closing:
            raise EngineError(f"the client of {self.database} is closed")

    def check_usable(self) -> None:
        if self.closed:
            raise EngineError(f"the client of {self.database} is closed")
        self.owner.check()
        if self.era != forks.era:
            self._notice_fork()

    def _open(self, deadline: float) -> Session:
        with self._gate:
            if self._session is None:
                session = self.connect(max(0.05, deadline - now()))
                try:
                    if not self.looks:
                        self._hello(session, max(0.05, deadline - now()))
                        self.met = True
                except BaseException:
                    session.close()
                    raise
                self._session = session
            return self._session

    def _discard(self, session: Session) -> None:
        if self._session is session:
            self._session = None
        session.close()

    def _notice_fork(self) -> None:
        """In a forked child nothing of the parent's is used; a new session is opened when one is needed."""
        if self.era != forks.era:
            self.era, self._session, self._identity = forks.era, None, this_process()
            self.unkept, self.guards = {}, []
            self._turn, self._gate = Turn(), Gate()
            self._reaping = False
            self.slots_in_use = {}
            telemetry.register(self)

    def _reap_later(self) -> None:
        self._reaping = True
        self.keeper.later(IDLE, self._reap_soon)

    def _reap(self) -> None:
        if not self._turn.try_enter():
            self.keeper.later(IDLE, self._reap_soon)
            return
        try:
            self._reaping = False
            session = self._session
            if session is None or self.closed:
                return
            if self._used and _is_good(session):
                self._used = False
                self._reap_later()
                return
            self._session = None
            session.close()
        finally:
            self._turn.lock.release()

    def _reap_soon(self) -> None:
        """In the keeper's thread."""
        if self.owner.alive():
            self.owner.call(self._reap)
        elif self._session is not None:  # its loop is closed: nobody else would ever close it
            self._session.close()
            self._session = None

    @abstractmethod
    def _connect(self, timeout: float) -> Session:
        """A new session."""

    @abstractmethod
    def _connect_to_look(self, timeout: float) -> Session:
        """One that will do to look: at a standby, or at a file that is not to become ours by it."""

    @abstractmethod
    def _hello(self, session: Session, timeout: float) -> None:
        """What is asked of a session before it is used: SchemaMismatch when its tables are not ours."""

    def there(self) -> bool:
        """Whether there is a database at all to look at; to look must not make one."""
        return True

    def translate(self, error: Refused) -> EngineError | SchemaMismatch:
        return error


def _is_good(session: Session) -> bool:
    try:
        session.look()
    except EngineError as error:
        log.warning("%s", error, extra={"event": "database.replaced"})
        return False
    return True
