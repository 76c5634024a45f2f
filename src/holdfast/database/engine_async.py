"""The engine of a client: runs named statements on sessions that are opened on first use and closed when idle.

If a connection is lost, the call on it is repeated on a new one, and the server may still have its first sending in a
queue. Executed late, that would overwrite a newer value, or take a lease that was released. Hence one rule: **before a
client sends anything else, the server ends the session whose call was not answered, and its end is waited for.** So the
first sending was executed before, or never will be: the next call sees its outcome, and a repeat needs to recognise
only a write that is done (by its token or version). Where a session cannot be ended (through a pooler, or if the server
refuses it, or takes longer than END_PATIENCE) no write is repeated, and Unanswered leaves its outcome open. On SQLite
nothing is executed after its answer. Callers forbid a repeat with ``again=None``.

The engine knows SQL by name only, and nothing of leases, locks, objects and operations. These store what they have to
remember for a client in ``state``, and register in ``resources`` what is to be stopped or released when the client
closes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

from holdfast.database.background import Background, background_of
from holdfast.database.call_dispatcher import END_PATIENCE
from holdfast.database.call_dispatcher_async import AsyncCallDispatcher, AsyncCallSession
from holdfast.database.call_queue import SessionToEnd
from holdfast.database.privileges import migrate_command
from holdfast.database.sessions import Calls, LostSession, Row, Statement
from holdfast.database.statements import FOUNDATION, migrations
from holdfast.database.url import Database
from holdfast.errors import EngineError, Refused, SchemaMismatch, Unanswered, Unreachable
from holdfast.runtime import forks
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency_async import AsyncOwner, sleep
from holdfast.runtime.identity import this_process
from holdfast.runtime.log import WARNING, logger

log = logger("holdfast.engine")

CALL_TIMEOUT = 10.0
LOCKED, DENIED, RACED = "55P03", "42501", "40001"
"""SQLSTATEs: lock not available, insufficient privilege, serialization failure."""

S = TypeVar("S")
Answers = list[list[Row] | Refused]

NOTHING: Mapping[str, Any] = {}


class Repeated(list[Row]):
    """The answer to a statement that was sent twice. The first one may have been executed, before the second."""


def _nothing() -> None: ...


async def _nothing_to_wait_for() -> None: ...


def _nothing_is_held(_: bool) -> list[Statement]:
    return []


@dataclass(slots=True, eq=False)
class AsyncResource:
    """What a client ends when it closes, in this order, each step for all resources before the next one."""

    check: Callable[[], None] = _nothing
    """Raises RuntimeError when the client must not be closed now."""
    stop: Callable[[], None] = _nothing
    """Asks the work to stop."""
    wait: Callable[[], Awaitable[None]] = _nothing_to_wait_for
    """Waits for its end, bounded."""
    leave: Callable[[], None] = _nothing
    """The wait is over, whether the work has ended or not."""
    release: Callable[[], Awaitable[None]] = _nothing_to_wait_for
    """Gives back what is held, bounded."""
    give_up: Callable[[bool], list[Statement]] = _nothing_is_held
    """When a signal ends the process, instead of all these: see ``AsyncEngine.give_up``."""


class AsyncEngine(ABC):
    poll = 1.0
    """Seconds between two attempts of a waiter that is not woken."""

    def __init__(self, database: Database, *, read_only: bool = False, sessions: int = 1) -> None:
        """``sessions``: how many may be open at once for calls."""
        self.database, self.read_only = database, read_only
        self.owner = AsyncOwner()
        self.era = forks.era
        self.closing = self.closed = False
        self.exit_signals = 0
        """How often ``give_up`` was called: a grant that remembers another number is over."""
        self.resources: dict[AsyncResource, None] = {}
        """In the order of registration."""
        self.accepts_older_schema = False
        """True while a governed command migrates: tables from the version FOUNDATION on are accepted, because those
        have the leases and the audit that the command needs."""
        self._state: dict[Callable[..., Any], Any] = {}
        self.schema_seen = False
        """Whether the tables were once found to be those of this version."""
        self._identity = this_process()
        self._sessions = sessions
        self._dispatcher = AsyncCallDispatcher(self, sessions)

    def __reduce__(self) -> NoReturn:
        """Everything a client makes refers to its engine, so none of it can be pickled or copied deeply."""
        raise TypeError(
            "clients, and what they make, belong to their process: make a client of its own there, from the same URL. "
            "A lease can be handed over by its token: client.lease(name).adopt(token)"
        )

    def register(self, resource: AsyncResource) -> AsyncResource:
        self.notice_fork()  # first: in a forked child it drops the parent's resources, and must not drop this one
        self.resources[resource] = None
        return resource

    def unregister(self, resource: AsyncResource | None) -> None:
        self.resources.pop(cast("AsyncResource", resource), None)

    def state(self, kind: Callable[[AsyncEngine], S]) -> S:
        """The one object of class ``kind`` that belongs to this engine, made on first use; a forked child starts
        without it. This is where the nouns keep what they have to remember for a client."""
        self.notice_fork()
        return cast("S", self._state.get(kind) or self._state.setdefault(kind, kind(self)))

    @property
    def process(self) -> dict[str, Any]:
        """This process, for listings: label, host, pid, started."""
        self.notice_fork()
        return self._identity

    @property
    def background(self) -> Background:
        return background_of(self.database)

    async def call(
        self,
        name: str,
        parameters: Mapping[str, Any],
        *,
        timeout: float = CALL_TIMEOUT,
        again: Mapping[str, Any] | None = NOTHING,
        alone: bool = False,
        on_repeat: Callable[[], object] = _nothing,
    ) -> list[Row]:
        """Run a named statement; once more on a new connection when the old one is lost, and its session has ended.

        ``again``: parameters that differ the second time. None: never send it twice. ``alone``: in no transaction with
        calls of others. ``on_repeat``: called before it is sent a second time.
        """
        self.check_usable()
        deadline = now() + timeout
        unanswered: Unanswered | None = None
        while True:
            try:
                if self._dispatcher.lost:
                    await self._end_lost_sessions(deadline)
                if unanswered is not None and not unanswered._session.has_ended:
                    raise unanswered
                rows = await self._dispatcher.call(name, parameters, deadline, alone=alone)
                return rows if unanswered is None else Repeated(rows)
            except SessionToEnd:
                continue
            except Unanswered as error:
                if unanswered is not None or again is None or error._session is None or now() >= deadline:
                    raise
                unanswered = error
                parameters = {**parameters, **again}
                on_repeat()
            except (Unreachable, Refused, SchemaMismatch) as error:
                if isinstance(error, Refused) and error.sqlstate == RACED and now() < deadline:
                    continue  # not executed: behind a pooler transactions may be serializable by default
                if unanswered is not None:  # the first one may have been executed, whatever the second one says
                    raise unanswered from error
                translated = self.translate(error) if isinstance(error, Refused) else error
                if translated is error:
                    raise
                raise translated from error

    async def _end_lost_sessions(self, deadline: float) -> None:
        """Unreachable when one has not ended before ``deadline``. After END_PATIENCE it is left as it is."""
        lost_sessions = self._dispatcher.lost
        for lost in list(lost_sessions):
            problem = ""
            while lost in lost_sessions and not lost.has_ended and not problem:
                problem = await self._end_session(lost, deadline)
            if problem and lost in lost_sessions:
                log.event(
                    "session.not_ended", WARNING,
                    "a session on %(database)s was lost, and may still execute its last call: %(error)s",
                    database=str(self.database), error=problem,
                )  # fmt: skip
            with suppress(ValueError):  # another caller has removed it
                lost_sessions.remove(lost)

    async def _end_session(self, lost: LostSession, deadline: float) -> str:
        """Try for a second. Returns why it cannot be ended, or an empty text."""
        unanswered: Unanswered | None = None
        for _ in range(self._sessions + 1):  # those that are open may be dead, too
            if (left := deadline - now()) <= 0:
                raise Unreachable(f"{self.database} has not yet ended a session that was lost: nothing was sent")
            parameters = {**(lost.identity or {}), "patience": max(1, int(min(left, 1.0) * 1000))}
            try:
                [row] = await self._dispatcher.call("session_end", parameters, deadline)
            except Unanswered as error:
                unanswered = error
            except Refused as error:
                return str(error)
            else:
                lost.has_ended = lost.has_ended or row["done"]
                is_over = not lost.has_ended and now() >= lost.give_up
                return f"it has not ended within {END_PATIENCE:g} s" if is_over else ""
        raise Unreachable(f"the connection to {self.database} was lost: nothing was sent") from unanswered

    async def call_when_free(
        self,
        name: str,
        parameters: Mapping[str, Any],
        *,
        patience: float,
        timeout: float = CALL_TIMEOUT,
        again: Mapping[str, Any] | None = NOTHING,
    ) -> list[Row]:
        """Run a statement that is refused while a protected transaction is open: retry for ``patience`` seconds."""
        until, deadline, pause = now() + patience, now() + timeout, 0.002
        while True:
            try:
                alone = pause > 0.002  # it was refused, and may be again
                return await self.call(name, parameters, timeout=deadline - now(), again=again, alone=alone)
            except Refused as error:
                if error.sqlstate != LOCKED or now() + pause > until:
                    raise
            await sleep(pause)
            pause = min(pause * 2, 0.1)

    @asynccontextmanager
    async def own_session(self, timeout: float = CALL_TIMEOUT) -> AsyncIterator[AsyncCallSession]:
        """A session for one purpose, which need not find our tables: for migrations."""
        session = await self.connect(timeout)
        try:
            yield session
        finally:
            session.close()

    @abstractmethod
    async def rehearse(self, calls: Calls, *, timeout: float = CALL_TIMEOUT) -> Answers:
        """Run named statements in one transaction that is rolled back; the answers up to the first error."""

    async def connect(self, timeout: float, *, for_examination: bool = False) -> AsyncCallSession:
        """A session of the caller's own. ``for_examination``: a server on which leases cannot work will do."""
        self.check_usable()
        session = await (self._connect_for_examination(timeout) if for_examination else self._connect(timeout))
        if not self.read_only:
            return session
        from holdfast.database.read_only_async import make_read_only

        try:
            return await make_read_only(session, self.database.dialect, timeout)
        except BaseException:
            session.close()
            raise

    async def close(self) -> None:
        self.notice_fork()
        self.closed = True
        try:
            await self._dispatcher.close(now() + CALL_TIMEOUT)
        except Unreachable:
            log.debug("closed in the middle of a call on %s, which keeps its session", self.database)

    def give_up(self, *, dies: bool) -> list[Statement]:
        """In a handler of a signal: forget everything that is held. Returns the statements that give it back.
        ``dies``: the process ends right after them."""
        self.exit_signals += 1
        return [statement for resource in list(self.resources) for statement in resource.give_up(dies)]

    def check_open(self) -> None:
        """EngineError from the moment on when the client begins to close."""
        if self.closing:
            raise EngineError(f"the client of {self.database} is closed")

    def check_usable(self) -> None:
        if self.closed:
            raise EngineError(f"the client of {self.database} is closed")
        self.owner.check()
        if self.era != forks.era:
            self.notice_fork()

    def notice_fork(self) -> None:
        """A forked child uses nothing of its parent, and opens a session of its own."""
        if self.era != forks.era:
            self.era, self._identity = forks.era, this_process()
            self.resources, self._state = {}, {}
            self._dispatcher = AsyncCallDispatcher(self, self._sessions)

    # The version of the tables

    @property
    def newest(self) -> int:
        """The version that this holdfast makes."""
        return migrations(self.database.dialect, self.database.schema)[-1].version

    def check_version(self, version: int | None) -> None:
        """SchemaMismatch unless this client can work with tables of that version (None: there are none)."""
        if version != self.newest and not self.accepts(version):
            raise self.mismatch(version)

    def accepts(self, version: int | None) -> bool:
        """Whether other tables than those of this version will do.

        Newer ones do for a client that has worked with its own before: during a deployment both versions run, and the
        older one has leases to release and operations to finish.
        """
        if (version or 0) > self.newest:
            return self.schema_seen
        return self.accepts_older_schema and (version or 0) >= FOUNDATION

    def mismatch(self, version: int | None) -> SchemaMismatch:
        state = f"is at version {version}" if version else "is not there"
        command = migrate_command(self.database.schema)
        remedy = f"run '{command}' or client.migrate()" if (version or 0) < self.newest else "upgrade holdfast"
        return SchemaMismatch(
            f"schema {self.database.schema!r} in {self.database} {state}, this holdfast needs version {self.newest}: "
            f"{remedy}"
        )

    # The session

    async def open(self, timeout: float) -> AsyncCallSession:
        """A session that finds our tables, for the calls of this client."""
        deadline = now() + timeout
        session = await self.connect(timeout)
        try:
            if not self.read_only:
                await self._check_tables(session, max(0.05, deadline - now()))
                self.schema_seen = True
        except BaseException:
            session.close()
            raise
        return session

    @abstractmethod
    async def _connect(self, timeout: float) -> AsyncCallSession:
        """A new session."""

    @abstractmethod
    async def _connect_for_examination(self, timeout: float) -> AsyncCallSession:
        """A new session, be it to a standby, or to a file that must not be changed by it."""

    @abstractmethod
    async def _check_tables(self, session: AsyncCallSession, timeout: float) -> None:
        """SchemaMismatch when a new session does not find tables that this client can use."""

    def database_exists(self) -> bool:
        """Whether there is a database to read: a reader must not create one."""
        return True

    def translate(self, error: Refused) -> EngineError | SchemaMismatch:
        """The error for the user: one with a remedy where there is one."""
        return error
