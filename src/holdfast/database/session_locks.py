"""Finds out whether the session locks of a server exclude: whether a key that one session holds is refused to another.

Some servers do not let a role take advisory locks, and some accept the calls and lock nothing: those of CockroachDB
always answer true. There a lock would be given to every client, and a standby would find the session of every living
holder ended. It takes one random key, and leaves nothing locked.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.database.privileges import grant_execute
from holdfast.database.sessions import Session, open_session
from holdfast.database.url import Database
from holdfast.errors import Refused, SessionUnsafe

UNSUPPORTED = frozenset({"0A000", "42501", "42883"})
"""SQLSTATEs of a server that does not let this role use a feature: unsupported, not permitted, no such function."""

_exclude: set[Database] = set()
"""Databases that have passed the check."""


def require_session_locks(database: Database, session: Session, timeout: float) -> None:
    """Check ``session`` against a second session, once for each database. Raises as ``session_locks_exclude``."""
    if database in _exclude:
        return
    other = open_session(database, timeout)
    try:
        with session_locks_exclude(database, session, other, timeout):
            pass
    finally:
        other.close()
    _exclude.add(database)


@contextmanager
def session_locks_exclude(database: Database, session: Session, other: Session, timeout: float) -> Iterator[int]:
    """SessionUnsafe unless a key that ``other`` holds is refused to ``session``. ``other`` holds it in the block."""
    key = secrets.randbits(63)
    try:
        held = other.hold(key, timeout)
        both = session.hold(key, timeout)
        [free] = session.call("session_free", {"session_key": key}, timeout)
    except Refused as error:
        if error.sqlstate not in UNSUPPORTED:
            raise
        raise SessionUnsafe(
            f"locks and failover='session' need session-level advisory locks, which are refused here: {error}. "
            f"{grant_execute(str(error))}leases, objects and operations work without them, with failover='ttl'"
        ) from error
    if not held or both or free["done"]:
        raise SessionUnsafe(
            f"the session locks of {database} do not exclude: two sessions got the same lock at once. On some servers, "
            "such as CockroachDB, advisory locks are empty functions. Use leases with failover='ttl', which are rows"
        )
    try:
        yield key
    finally:
        # A server may take a while to notice that a connection was closed; a listing would show the key until then.
        other.call("session_release", {"session_key": key}, timeout)
