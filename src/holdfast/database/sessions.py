"""Below both flavours, written by hand: one statement over one session, bounded in time.

``open_session`` gives a blocking session on either engine; those for asyncio are in the modules whose names end
in ``_async``. A session runs named statements and never decides anything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from holdfast.database.url import Database

Row = dict[str, Any]
S = TypeVar("S")


class Session(Protocol):
    """A blocking session: what the keeper and the generated sync flavour stand on."""

    pooled: bool
    """Something between us and the server may move us to another session: nothing may live in this one."""

    def call(self, name: str, parameters: Mapping[str, Any], timeout: float) -> list[Row]: ...
    def script(self, text: str, timeout: float) -> None: ...

    def post(self, name: str, parameters: Mapping[str, Any], timeout: float) -> None:
        """Send a statement that may wait for ever; ``answered`` tells when it does no more."""

    def answered(self) -> bool: ...

    def hold(self, key: int, timeout: float) -> bool:
        """Hold ``key`` for as long as this session lives; the system frees it, however the process ends."""

    def fileno(self) -> int | None:
        """What to poll for notifications and for the end of the connection; None where there are none."""

    def notifications(self) -> list[str]: ...

    def look(self) -> None:
        """Now and then: Unreachable when what it talks to is not what its database's name stands for any more."""

    def close(self) -> None: ...


def open_session(database: Database, timeout: float) -> Session:
    if database.dialect == "sqlite":
        from holdfast.database.sqlite import SqliteSession

        return SqliteSession.open(database, timeout)
    from holdfast.database.postgres import PostgresSession

    return PostgresSession.open(database, timeout)


def kind_of(kind: type[S]) -> type[S]:
    """The class that a new session is made of: ``kind`` itself, unless a test has set failpoints."""
    if not os.environ.get("HOLDFAST_FAILPOINTS"):
        return kind
    from holdfast.database.failpoints import armed

    return armed(kind)
