"""What can be wrong with a PostgreSQL server, its settings, and the way to it."""

from __future__ import annotations

import re
from typing import Any

from holdfast.core.health import (
    Check,
    Facts,
    Finding,
    Hidden,
    Unseen,
    Verdict,
    fail,
    judge,
    ok,
    row,
    rows,
    schema_version,
    warn,
)
from holdfast.core.rights import FOR_OPERATORS

OLDEST, TESTED = 14, (15, 16, 18)
CLOCK = 1.0
"""Seconds between the clocks, beyond what the round trip leaves open, from which people will read times wrongly."""
SHORT = 1000
"""Milliseconds: a limit below this ends statements that only had bad luck."""
OLD_SNAPSHOT, OLD_SNAPSHOT_AGE = 10_000, 900.0
"""Transactions since a snapshot was taken, and seconds. 20,000 renewals under one make a heartbeat 3 times slower."""
DEAD_ROWS = 10_000
PUBLISHED = frozenset({"idempotency_log", "wal", "outbox", "review", "audit", "relay", "parked"})
"""Tables of which a copy elsewhere is worth having: logs, unlike leases, say the same there."""


def examine(facts: Facts) -> tuple[Finding, ...]:
    findings = judge(
        CHECKS, facts, remedy="For the whole picture: GRANT pg_monitor TO the role, or ask as a superuser."
    )
    if row(facts, "connection")["error"] is None:
        return findings
    return tuple(finding for finding in findings if finding.status != "unseen")  # unanswered is not unseen


def connection(facts: Facts) -> Verdict:
    about = row(facts, "connection")
    if about["error"] is not None:
        return fail(about["error"], "Nothing else could be asked. Mend this first.")
    if about["refused"] is not None and not _read_only(facts):
        return fail(about["refused"], "The server answers, but holdfast cannot use its sessions. Mend this first.")
    return ok(f"the server answers in {about['round_trip'] * 1000:.1f} ms")


def version(facts: Facts) -> Verdict:
    major, minor = divmod(row(facts, "session_open")["version"], 10_000)
    tested = f"tested with {', '.join(map(str, TESTED))}"
    if major < OLDEST:
        return fail(f"PostgreSQL {major}.{minor} is too old", f"Upgrade the server: {OLDEST} or newer, {tested}.")
    if not TESTED[0] <= major <= TESTED[-1]:
        return warn(
            f"PostgreSQL {major}.{minor} should work, but holdfast is {tested}",
            "Try it before you rely on it.",
        )
    return ok(f"PostgreSQL {major}.{minor}")


def primary(facts: Facts) -> Verdict:
    about = row(facts, "session_open")
    if about["in_recovery"]:
        return fail(
            "the server is in recovery: a standby, which takes no writes",
            "List every host of the cluster in the URL, and the primary is found; or promote this one.",
        )
    if about["read_only"]:
        return fail(
            "transactions are read-only by default here",
            "Find out who set default_transaction_read_only (server, database or role) and why; then, for a role: "
            "ALTER ROLE … RESET default_transaction_read_only. Some providers set it when the disk is full.",
        )
    return ok("takes writes")


def pooler(facts: Facts) -> Verdict:
    about = row(facts, "pooler")
    remedy = (
        "Leases work, but waiters poll and failover='session' is refused. Give holdfast a direct URL beside the pooled "
        "one; it needs one connection a process."
    )
    if about["moved"]:
        return warn("a pooler between us and the server moves us from session to session (transaction mode)", remedy)
    if about["pooled"]:
        return warn("a pooler sits between us and the server (it kept our session while we looked)", remedy)
    if about["moved"] is None:
        return ok("none noticed on one connection; a second one for the full test was not to be had")
    return ok("none: the sessions are our own")


def clock(facts: Facts) -> Verdict:
    about = row(facts, "clock")
    offset, error = about["offset"], about["round_trip"] / 2
    found = f"the server's clock is {offset:+.3f} s from ours, give or take {error * 1000:.1f} ms"
    if abs(offset) - error <= CLOCK:
        return ok(found)
    return warn(
        found,
        "Run NTP or chrony on both. Leases are safe, the server's clock alone decides; but whoever reads times in "
        "listings and logs is misled, and a clock that is set right in one step shortens or stretches leases.",
    )


def keepalives(facts: Facts) -> Verdict:
    ours = rows(facts, "client_socket")
    if not ours:
        return ok("a local socket: it needs none")
    here = ours[0]
    if not here["keepalive"] or here["user_timeout"] == 0:
        return warn(
            "the URL switches off keepalives or tcp_user_timeout on our side",
            "Take keepalives and tcp_user_timeout out of the URL: a server that vanished is then noticed in 2 to 3 s "
            "instead of hours.",
        )
    if _pooled(facts):
        return ok("set on our side; the server's side is between it and the pooler")
    if not _tuned(facts):
        raise Unseen("the server did not give us a session to set them on")
    values = {name: int(_setting(facts, name)) for name in _SERVER_SIDE}
    if missing := [name for name, value in values.items() if value == 0]:
        return warn(
            f"the server's side of our sessions has none: {', '.join(missing)}",
            "The server's system may lack them. A client that vanished keeps its session, and what it waits for, until "
            "the server's own limits end it: set them in postgresql.conf.",
        )
    idle, interval, count = (values[name] for name in _SERVER_SIDE[:3])
    return ok(f"on both sides; the server notices a lost client in {idle + interval * count} s")


def connection_check(facts: Facts) -> Verdict:
    if _pooled(facts):
        return ok("a pooler's affair: the server sees the pooler's connections, not ours")
    if not _tuned(facts):
        raise Unseen("the server did not give us a session to set it on")
    milliseconds = int(_setting(facts, "client_connection_check_interval"))
    if milliseconds:
        return ok(f"client_connection_check_interval is {milliseconds / 1000:g} s on our sessions")
    return warn(
        "client_connection_check_interval is 0 on our sessions",
        "Set it to '1s' in postgresql.conf, if the server's system supports it: without it a client that is killed "
        "while it waits keeps its place until its statement ends.",
    )


def lock_table(facts: Facts) -> Verdict:
    names = ("max_locks_per_transaction", "max_connections", "max_prepared_transactions")
    a_transaction, connections, prepared = (int(_setting(facts, name)) for name in names)
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
    most, *reserved = (int(_setting(facts, name, "0")) for name in names)
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
    names, commit = _setting(facts, "synchronous_standby_names"), _default(facts, "synchronous_commit")
    if commit == "off":
        return warn(
            "synchronous_commit is off: a crash of the server loses the last commits",
            "holdfast's own statements switch it on, unless a pooler is in between; your protected transactions do "
            "not: SET LOCAL synchronous_commit = on where it matters.",
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
        limit = int(_default(facts, name))
        if 0 < limit < SHORT:
            harm.append(f"{name} is {_duration(limit)}")
    if (limit := int(_default(facts, "transaction_timeout", "0"))) > 0:
        harm.append(f"transaction_timeout is {_duration(limit)}")
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
    session, transaction = (int(_default(facts, name, "0")) for name in _IDLE)
    if session and (_pooled(facts) or not _tuned(facts)):
        harm.append(f"idle_session_timeout is {_duration(session)}")
    if 0 < transaction < SHORT:
        harm.append(f"{_IDLE[1]} is {_duration(transaction)}")
    if harm:
        return warn(
            "; ".join(harm),
            "See where it is set (psql: \\drds), and ALTER ROLE … SET it to 0 or higher: it ends the sessions a pooler "
            "keeps, or protected transactions that pause between two statements.",
        )
    if session:
        return ok("idle_session_timeout is set, and holdfast switches it off on its own sessions")
    return ok("none that would hurt")


def snapshots(facts: Facts) -> Verdict:
    about = row(facts, "examine_role")
    held = [
        each
        for each in rows(facts, "examine_snapshots")
        if each["transactions"] >= OLD_SNAPSHOT or (each["seconds"] or 0) >= OLD_SNAPSHOT_AGE
    ]
    if held:
        worst = max(held, key=lambda each: int(each["transactions"]))
        age = "" if worst["seconds"] is None else f" for {_duration(worst['seconds'] * 1000)}"
        return warn(
            f"{worst['who']} has kept a snapshot{age}, {worst['transactions']} transactions old"
            + (f" (and {len(held) - 1} more)" if len(held) > 1 else ""),
            "End it: SELECT pg_terminate_backend(pid), ROLLBACK PREPARED, or pg_drop_replication_slot(name). Until "
            "then vacuum removes nothing newer, and every heartbeat becomes slower.",
        )
    if not about["sees_all"]:
        raise Hidden("this role may not see other roles' transactions; its own are well")
    return ok("none that is old")


def privileges(facts: Facts) -> Verdict:
    about = row(facts, "examine_role")
    role, schema = about["role"], row(facts, "expected")["schema"]
    if not about["there"]:
        raise Unseen("there is no schema to have privileges in")
    denied = sorted({each["name"] for each in rows(facts, "examine_functions") if not each["may"]})
    missing = [name for name in denied if name not in FOR_OPERATORS]
    if not about["usage"]:
        return fail(f"role {role!r} has no USAGE on schema {schema!r}", _grants(schema, role, missing))
    if missing:
        return fail(f"role {role!r} may not execute {', '.join(missing)}", _grants(schema, role, missing))
    if denied:
        return ok(f"role {role!r} is a worker, and leaves {', '.join(denied)} to operators")
    return ok(f"role {role!r} may do all that holdfast asks, and what operators do")


def bloat(facts: Facts) -> Verdict:
    tables = rows(facts, "examine_tables")
    if not tables:
        raise Unseen("there are no tables")
    if _setting(facts, "autovacuum") == "off":
        return warn("autovacuum is off", "Switch it on: heartbeats rewrite the same rows over and over.")
    full = [each for each in tables if each["dead"] >= DEAD_ROWS and each["dead"] > 5 * each["live"]]
    if not full:
        return ok(f"{sum(each['dead'] for each in tables)} dead rows in all")
    worst = max(full, key=lambda each: int(each["dead"]))
    return warn(
        f"table {worst['name']} has {worst['dead']} dead rows and {worst['live']} live ones"
        + (", and was never vacuumed by autovacuum" if worst["vacuumed"] is None else ""),
        f"VACUUM {row(facts, 'expected')['schema']}.{worst['name']}; then see what keeps autovacuum from it: an old "
        "snapshot, or autovacuum_enabled = off on the table.",
    )


def replica_identity(facts: Facts) -> Verdict:
    tables = rows(facts, "examine_tables")
    if not tables:
        raise Unseen("there are no tables")
    published = [each for each in tables if each["publications"]]
    if not published:
        return ok("no publication has holdfast's tables")
    names = ", ".join(sorted(each["name"] for each in published if each["name"] not in PUBLISHED))
    if bad := [each["name"] for each in published if not each["identified"]]:
        return fail(
            f"published without a replica identity, so that updates fail: {', '.join(sorted(bad))}",
            "ALTER TABLE … REPLICA IDENTITY DEFAULT, or take the table out of the publication.",
        )
    if not names:
        return ok("what is published is the log of operations, which is meant to be")
    return warn(
        f"published for logical replication ({published[0]['publications']}): {names}",
        "Leave them out of the publication: a copy of a lease grants nothing, fences (a sequence) are not replicated, "
        "and every heartbeat is sent.",
    )


def operation_log(facts: Facts) -> Verdict:
    tables = {each["name"]: each for each in rows(facts, "examine_tables")}
    if "wal" not in tables:
        raise Unseen("there is no log of operations")
    if not tables["wal"]["bytes"]:
        return ok("no operation is logged yet")
    if row(facts, "session_open")["in_recovery"]:
        return ok("this is a copy of it")
    if standbys := row(facts, "examine_replicas")["connected"]:
        return ok(f"{standbys} server{'s' * (standbys != 1)} follow{'s' * (standbys == 1)} this one")
    if all(tables[name]["publications"] for name in ("idempotency_log", "wal")):
        return ok(f"published for logical replication ({tables['wal']['publications']})")
    return warn(
        "the log of operations is on this server alone: with it goes the knowledge of what was done already",
        "Run a standby, or publish it: CREATE PUBLICATION … FOR TABLE idempotency_log, wal. Where the provider keeps "
        "copies below PostgreSQL, this is no concern.",
    )


_IDLE = ("idle_session_timeout", "idle_in_transaction_session_timeout")
_SERVER_SIDE = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")
CHECKS: tuple[tuple[str, Check], ...] = (
    ("connection", connection),
    ("version", version),
    ("primary", primary),
    ("pooler", pooler),
    ("clock", clock),
    ("keepalives", keepalives),
    ("connection_check", connection_check),
    ("lock_table", lock_table),
    ("connections", connections),
    ("synchronous", synchronous),
    ("statement_timeouts", statement_timeouts),
    ("idle_timeouts", idle_timeouts),
    ("snapshots", snapshots),
    ("schema", schema_version),
    ("privileges", privileges),
    ("bloat", bloat),
    ("replica_identity", replica_identity),
    ("operation_log", operation_log),
)


def _read_only(facts: Facts) -> bool:
    about = row(facts, "session_open")
    return bool(about["in_recovery"] or about["read_only"])


def _pooled(facts: Facts) -> bool:
    about = row(facts, "pooler")
    return bool(about["pooled"] or about["moved"])


def _tuned(facts: Facts) -> bool:
    """Whether the session is one that holdfast would use, with its own limits set."""
    return row(facts, "connection")["refused"] is None


def _found(facts: Facts, name: str) -> dict[str, Any] | None:
    return next((each for each in rows(facts, "examine_settings") if each["name"] == name), None)


def _setting(facts: Facts, name: str, default: str | None = None) -> str:
    """In force in our session."""
    return _value(facts, name, "setting", default)


def _default(facts: Facts, name: str, default: str | None = None) -> str:
    """What server, database and role ask for: in force before holdfast sets its own, and in the user's sessions."""
    return _value(facts, name, "reset_val", default)


def _value(facts: Facts, name: str, column: str, default: str | None) -> str:
    found = _found(facts, name)
    value = default if found is None else found[column]
    if value is None:
        raise Hidden(f"the setting {name} is not visible to this role")
    return str(value)


def _duration(milliseconds: float) -> str:
    for size, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s")):
        if milliseconds >= size:
            return f"{milliseconds / size:.3g} {unit}"
    return f"{milliseconds:g} ms"


def _grants(schema: str, role: str, missing: list[str]) -> str:
    """What makes it a worker, and no more than that."""
    quoted = '"' + role.replace('"', '""') + '"'
    functions = ", ".join(f"{schema}.{name}" for name in missing)
    execute = f" GRANT EXECUTE ON FUNCTION {functions} TO {quoted};" if missing else ""
    return f"GRANT USAGE ON SCHEMA {schema} TO {quoted};{execute}"
