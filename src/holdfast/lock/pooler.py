"""Finds out whether a lock can live in a session: whether a pooler hands sessions round, and whether locks exclude."""

from __future__ import annotations

from holdfast.database.postgres import PostgresSession
from holdfast.database.session_locks import session_locks_exclude
from holdfast.database.url import Database
from holdfast.errors import SessionUnsafe, Unanswered
from holdfast.runtime.clock import now

PROBE = 2.0
"""Seconds to wait for what a healthy server gives at once: a second session's answer."""

_stay: set[Database] = set()
"""Databases that have passed the check."""


def check_that_it_stays(database: Database, session: PostgresSession, deadline: float) -> int:
    """The pid of our server process. SessionUnsafe when two connections of ours, one of them in a transaction, share a
    server session, or one of them moves to another: then a pooler hands sessions round. Also when the server gives both
    of them the same lock."""
    [ours] = session.call("session_open", {}, deadline - now())
    if database not in _stay:
        other = PostgresSession.open(database, max(0.05, deadline - now()))
        try:
            moved = _moves(session, other) or _moves(other, session)
            [still] = session.call("session_open", {}, PROBE)
            if not moved:
                with session_locks_exclude(database, session, other, PROBE) as key:
                    if database.same_as is not None:
                        _check_same(database, key, database.same_as, deadline)
        except Unanswered as error:
            if session.pooled:  # kept waiting for the session that our own transaction is in
                raise _unsafe(database) from error
            raise
        finally:
            other.close()
        if moved or still["pid"] != ours["pid"]:
            raise _unsafe(database)
        _stay.add(database)
    pid: int = ours["pid"]
    return pid


def _moves(session: PostgresSession, other: PostgresSession) -> bool:
    [before] = session.call("session_open", {}, PROBE)
    other.call("begin", {}, PROBE)
    [during] = other.call("session_open", {}, PROBE)
    [after] = session.call("session_open", {}, PROBE)
    other.call("rollback", {}, PROBE)
    return bool(before["pid"] != after["pid"] or during["pid"] == after["pid"])


def _check_same(direct: Database, key: int, pooled: Database, deadline: float) -> None:
    """SessionUnsafe unless ``key``, which is locked here, is locked there. Every other way to tell one database from
    another needs rights, or is true of a copy as well."""
    there = PostgresSession.open(pooled, max(0.05, deadline - now()))
    try:
        [free] = there.call("session_free", {"session_key": key}, PROBE)
    finally:
        there.close()
    if free["done"]:
        raise SessionUnsafe(
            f"lock_url leads to {direct}, which is another database than {pooled}: locks taken there exclude "
            "no client here. Give a direct URL of the same database"
        )


def _unsafe(database: Database) -> SessionUnsafe:
    return SessionUnsafe(
        f"a pooler between us and {database} hands server sessions round, and a lock lives in one: two clients would "
        "both be told that they have it. Give a direct URL for locks, Client(…, lock_url='postgresql://…'), or let the "
        "pooler work in session mode; leases work through it as they are"
    )
