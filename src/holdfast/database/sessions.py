"""A session runs one named statement after the other on one connection, each bounded in time. It decides nothing.

``open_session`` opens a blocking one on either engine. ``postgres_async`` and ``sqlite_async`` have those for asyncio.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from holdfast.database.url import Database

Row = dict[str, Any]
Statement = tuple[str, dict[str, Any]]
"""A named statement and its parameters."""
Calls = Sequence[tuple[str, Mapping[str, Any]]]
"""Named statements and their parameters."""
S = TypeVar("S")


class LostSession:
    """A session that was closed while a call on it was unanswered. Until its end, the server may execute that call.

    It counts as ended if no call can be executed late: on SQLite, and where all calls only read. A session of a pooler
    cannot be identified, and so cannot be ended.
    """

    __slots__ = ("give_up", "has_ended", "identity", "rows")

    def __init__(self, identity: Row | None, give_up: float = 0.0, rows: Sequence[tuple[str, ...]] = ()) -> None:
        """``identity``: of the session, as in ``CallSession``. ``give_up``: the time until which to try to end it.
        ``rows``: those that its calls write, as in ``call_queue``."""
        self.identity, self.give_up, self.rows = identity, give_up, rows
        self.has_ended = identity == {}


class Session(Protocol):
    """A blocking session, as the background thread uses it."""

    pooled: bool
    """A pooler may move us to another server session at any time: nothing may live in this one."""

    def call(self, name: str, parameters: Mapping[str, Any], timeout: float) -> list[Row]: ...
    def script(self, text: str, timeout: float) -> None: ...

    def post(self, name: str, parameters: Mapping[str, Any], timeout: float) -> None:
        """Send a statement that may wait for ever; ``answered`` says when it has been answered."""

    def answered(self) -> bool: ...

    def hold(self, key: int, timeout: float) -> bool:
        """Lock ``key`` for the life of this session. However the process ends, the lock goes with it."""

    def hold_shared(self, key: int, timeout: float) -> bool:
        """The same, shared with other sessions of this process. On SQLite the process has the lock until its end."""

    def show_waiting(self, names: Iterable[str]) -> None:
        """Show other processes that this one waits for ``names``, where waiters only poll; nothing through a pooler."""

    def fileno(self) -> int | None:
        """What to poll for notifications and for the end of the connection; None on SQLite."""

    def notifications(self) -> list[str]: ...

    def check_target(self) -> None:
        """Unreachable, or Busy, when the file that it has open was replaced or removed."""

    def close(self) -> None: ...


def open_session(database: Database, timeout: float) -> Session:
    if database.dialect == "sqlite":
        from holdfast.database.sqlite import SqliteSession

        return SqliteSession.open(database, timeout)
    from holdfast.database.postgres import PostgresSession

    return PostgresSession.open(database, timeout)


def session_class(cls: type[S]) -> type[S]:
    """``cls`` itself, or its form with failpoints if a test has set some."""
    if not os.environ.get("HOLDFAST_FAILPOINTS"):
        return cls
    from holdfast.database.failpoints import armed

    return armed(cls)


def is_readable(descriptor: int) -> bool:
    """Whether a socket has something to read, asked of the kernel.

    An event loop reports a readable socket until it has been read. uvloop reports a failed connection only once, and
    the server's last message may arrive together with the failure. So a reader that expects more asks the kernel.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
