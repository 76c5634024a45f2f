"""What the server has room, time and patience for."""

from __future__ import annotations

import re

from holdfast.doctor.findings import Facts, Hidden, Verdict, fail, ok, row, warn
from holdfast.doctor.postgres.settings import default, duration, pooled, setting, tuned

SHORT = 1000
"""Milliseconds: a limit below this ends statements that only had bad luck."""
_IDLE = ("idle_session_timeout", "idle_in_transaction_session_timeout")


def lock_table(facts: Facts) -> Verdict:
    names = ("max_locks_per_transaction", "max_connections", "max_prepared_transactions")
    a_transaction, connections, prepared = (int(setting(facts, name)) for name in names)
    capacity, used = a_transaction * (connections + prepared), row(facts, "examine_locks")["used"]
    found = f"{used} of about {capacity} locks are in use"
    if used * 2 <= capacity:
        return ok(found)
    return (fail if used >= capacity * 0.9 else warn)(
        found,
        "Find who holds so many (SELECT pid, count(*) FROM pg_locks GROUP BY 1 ORDER BY 2 DESC), or raise "
        "max_locks_per_transaction and restart. When the table is full, new connections fail for everybody.",
    )


def connections(facts: Facts) -> Verdict:
    names = ("max_connections", "superuser_reserved_connections", "reserved_connections")
    most, *reserved = (int(setting(facts, name, "0")) for name in names)
    about = row(facts, "examine_connections")
    limits = [("the server", most - sum(reserved), about["used"])]
    limits += [
        (who, about[limit], about[used])
        for who, limit, used in (
            ("this database", "database_limit", "database_used"),
            ("this role", "role_limit", "role_used"),
        )
        if about[limit] >= 0
    ]
    who, most, used = min(limits, key=lambda limit: limit[1] - limit[2])
    found = f"{used} of {most} connections of {who} are in use"
    if most - used >= min(10, max(3, most // 10)):
        return ok(found)
    return (fail if most - used < 2 else warn)(
        found,
        "Raise the limit, or let the application's pools hold fewer. A process that cannot connect cannot renew its "
        "leases once its connection breaks.",
    )


def synchronous(facts: Facts) -> Verdict:
    if row(facts, "session_open")["in_recovery"]:
        return ok("a standby commits nothing")
    names, commit = setting(facts, "synchronous_standby_names"), default(facts, "synchronous_commit")
    if commit == "off":
        return warn(
            "synchronous_commit is off: a crash of the server loses the last commits",
            "holdfast's own statements switch it on, behind a pooler those of leases alone; your protected "
            "transactions do not: SET LOCAL synchronous_commit = on where it matters.",
        )
    if not names.strip():
        return ok("none is asked for: a failover may lose the last commits, and fences rise all the same")
    if commit == "local":
        return ok("asked for, but commits do not wait for it (synchronous_commit is local)")
    about = row(facts, "examine_replicas")
    asked = re.match(r"\s*(?:first|any)?\s*(\d+)\s*\(", names, re.IGNORECASE)
    needed = int(asked[1]) if asked else 1
    confirming = about["synchronous"]
    if about["connected"] >= needed and not row(facts, "examine_role")["sees_all"]:
        raise Hidden(f"{about['connected']} standbys are connected, and this role may not see if one is synchronous")
    if confirming >= needed:
        return ok(f"{confirming} synchronous standby{'s' * (confirming != 1)} confirm{'s' * (confirming == 1)} commits")
    return fail(
        f"commits hang: synchronous_standby_names asks for {needed} standbys, and {confirming} are connected",
        "Bring the standby back; or, knowing that a failover may then lose commits: "
        "ALTER SYSTEM SET synchronous_standby_names = ''; SELECT pg_reload_conf();",
    )


def statement_timeouts(facts: Facts) -> Verdict:
    harm = []
    for name in ("statement_timeout", "lock_timeout"):
        limit = int(default(facts, name))
        if 0 < limit < SHORT:
            harm.append(f"{name} is {duration(limit)}")
    if (limit := int(default(facts, "transaction_timeout", "0"))) > 0:
        harm.append(f"transaction_timeout is {duration(limit)}")
    if not harm:
        return ok("none that would hurt")
    return warn(
        "; ".join(harm),
        "See where it is set (psql: \\drds), and ALTER ROLE … SET it to 0 or higher for the role holdfast connects as. "
        "On direct connections holdfast sets limits of its own, but begins under these; behind a pooler and in your "
        "protected transactions they are in force. transaction_timeout also ends the waiting of failover='session'.",
    )


def idle_timeouts(facts: Facts) -> Verdict:
    harm = []
    session, transaction = (int(default(facts, name, "0")) for name in _IDLE)
    if session and (pooled(facts) or not tuned(facts)):
        harm.append(f"idle_session_timeout is {duration(session)}")
    if 0 < transaction < SHORT:
        harm.append(f"{_IDLE[1]} is {duration(transaction)}")
    if harm:
        return warn(
            "; ".join(harm),
            "See where it is set (psql: \\drds), and ALTER ROLE … SET it to 0 or higher: it ends the sessions a pooler "
            "keeps, or protected transactions that pause between two statements.",
        )
    if session:
        return ok("idle_session_timeout is set, and holdfast switches it off on its own sessions")
    return ok("none that would hurt")
