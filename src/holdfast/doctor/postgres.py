"""The checks of a PostgreSQL server: the connection, its settings and limits, and holdfast's tables. Pure.

Every check takes the facts that ``examine`` has collected, and returns a verdict; see ``findings``.
"""

from __future__ import annotations

import re

from holdfast.database.privileges import FOR_GATEWAYS, FOR_OPERATORS, SESSION_LOCKS
from holdfast.doctor.findings import (
    Check,
    Facts,
    Finding,
    NotPermitted,
    Unseen,
    Verdict,
    duration,
    fail,
    fences,
    judge,
    ok,
    row,
    rows,
    schema_version,
    warn,
)
from holdfast.doctor.operations import lineage

OLDEST, TESTED = 14, (15, 16, 18)
"""Major versions of PostgreSQL."""
CLOCK_SKEW = 1.0
"""Seconds between the clocks, beyond the uncertainty of the round trip, from which times are misleading."""
SHORT = 1000
"""Milliseconds: a timeout below this cancels statements that merely had to wait."""
OLD_SNAPSHOT, OLD_SNAPSHOT_AGE = 10_000, 900.0
"""Transactions since a snapshot was taken, and seconds. 20,000 renewals under one make a heartbeat 3 times slower."""
OPEN = 30.0
"""Seconds for which a transaction may hold a lease."""
DEAD_ROWS = 10_000
PUBLISHABLE = frozenset({"idempotency_log", "wal_more", "outbox", "review", "audit", "relay", "parked"})
"""Tables of which a copy elsewhere is useful: logs, unlike leases, mean the same there."""
_PROVIDERS = {
    "alloydbsuperuser": "AlloyDB: connect directly for locks; its managed pooling is in transaction mode by default",
    "azure_pg_admin": "Azure: connect to port 5432 for locks; port 6432 is PgBouncer",
    "cloudsqlsuperuser": "Cloud SQL: connect directly for locks; its managed pooling may share sessions",
    "neon_superuser": "Neon: each heartbeat is a query, so while a lease is held the compute does not scale to zero",
    "rds_superuser": "Amazon RDS or Aurora: connect directly for locks; RDS Proxy shares sessions",
    "supabase_admin": "Supabase: connect directly or to port 5432 for locks; port 6543 shares sessions",
}
"""What to know of a provider, by the role of its administrators."""
REPLICA = "gateway:replica:"
"""Prefix of the lease that every replica of the gateway holds."""
COMMON_KINDS = ("plain", "guard", "elector")
"""Kinds of the leases of services. An operator holds others for a moment, perhaps with the role of the gateway."""
_SEE_ROLES = "See docs/howto/roles-and-poolers.md."
_SERVER_KEEPALIVES = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")
_IDLE_TIMEOUTS = ("idle_session_timeout", "idle_in_transaction_session_timeout")


def examine(facts: Facts) -> tuple[Finding, ...]:
    remedy = "To see everything: GRANT pg_monitor TO the role, or examine as a superuser."
    findings = judge(CHECKS, facts, remedy=remedy)
    if row(facts, "connection")["error"] is None:
        return findings
    return tuple(finding for finding in findings if finding.status != "unseen")  # not asked, rather than not visible


# The connection


def connection(facts: Facts) -> Verdict:
    about = row(facts, "connection")
    if about["error"] is not None:
        return fail(about["error"], "Nothing else could be examined. Fix this first.")
    if about["refused"] is not None and not _is_read_only(facts):
        return fail(about["refused"], "The server answers, but holdfast cannot use its sessions. Fix this first.")
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
            "Find out where default_transaction_read_only is set (server, database or role) and why; then, for a role: "
            "ALTER ROLE … RESET default_transaction_read_only. Some providers set it when the disk is full.",
        )
    return ok("takes writes")


def pooler(facts: Facts) -> Verdict:
    about = row(facts, "pooler")
    remedy = (
        "Leases work, but waiters poll and failover='session' is refused. Give holdfast a direct URL beside the pooled "
        "one; it needs one connection per process."
    )
    if about["moved"]:
        return warn("a pooler moves our connection from session to session (transaction mode)", remedy)
    if about["pooled"]:
        return warn("there is a pooler before the server (it kept our session during the examination)", remedy)
    if about["moved"] is None:
        return ok("none noticed on one connection; the full test needs a second connection, which was refused")
    return ok("none: the sessions are our own")


def session_locks(facts: Facts) -> Verdict:
    if _is_pooled(facts) and facts.get("session_locks") is None:
        return ok("does not apply behind a pooler that moves connections")
    if not _is_configured(facts):
        raise Unseen("this server gives no session to take a lock in (see the other findings)")
    if facts.get("session_locks") is None:
        raise Unseen("the test needs a second connection, which was refused")
    about = row(facts, "session_locks")
    if about["refused"] is not None:
        role = _quoted(row(facts, "examine_role")["role"])
        return warn(
            f"the server lets this role take no session locks: {about['refused']}",
            f"GRANT EXECUTE ON FUNCTION {', '.join(SESSION_LOCKS)} TO {role}; Without it locks and failover='session' "
            "raise SessionUnsafe, and waiters poll. Leases, objects and operations work.",
        )
    if not about["exclude"]:
        return fail(
            "one lock was given to two sessions at once: the server's advisory locks lock nothing",
            "Use a PostgreSQL server. Here locks and failover='session' raise SessionUnsafe, and operations that share "
            "a lock do not exclude each other.",
        )
    return ok("a lock of one session is refused to another")


def provider(facts: Facts) -> Verdict:
    about = row(facts, "examine_provider")
    if "CockroachDB" in about["version"]:
        return fail(
            "CockroachDB is not a PostgreSQL server: its session locks lock nothing",
            "Use PostgreSQL, or SQLite on one machine.",
        )
    if about["role"] is None:
        return ok("none recognised")
    return ok(_PROVIDERS[about["role"]])


def clock(facts: Facts) -> Verdict:
    about = row(facts, "clock")
    offset, error = about["offset"], about["round_trip"] / 2
    summary = f"the server's clock is {offset:+.3f} s from ours, give or take {error * 1000:.1f} ms"
    if abs(offset) - error <= CLOCK_SKEW:
        return ok(summary)
    return warn(
        summary,
        "Run NTP or chrony on both. Leases are safe, because only the server's clock counts; but times in listings and "
        "logs are misleading, and a clock that is corrected in one step shortens or extends leases.",
    )


def keepalives(facts: Facts) -> Verdict:
    client_socket = rows(facts, "client_socket")
    if not client_socket:
        return ok("a local socket: it needs none")
    options = client_socket[0]
    if not options["keepalive"] or options["user_timeout"] == 0:
        return warn(
            "the URL switches off keepalives or tcp_user_timeout on our side",
            "Remove keepalives and tcp_user_timeout from the URL: then a server that has vanished is noticed in 2 to "
            "3 s instead of hours.",
        )
    if _is_pooled(facts):
        return ok("set on our side; the server has a connection to the pooler, not to us")
    if not _is_configured(facts):
        raise Unseen("this server gets no session for leases (see the other findings), so they were not set")
    values = {name: int(_setting(facts, name)) for name in _SERVER_KEEPALIVES}
    if missing := [name for name, value in values.items() if value == 0]:
        return warn(
            f"the server's side of our sessions has none: {', '.join(missing)}",
            "The server's operating system may not support them. A client that vanished keeps its session, and its "
            "place in queues, until the server's own limits end it: set them in postgresql.conf.",
        )
    idle, interval, count = (values[name] for name in _SERVER_KEEPALIVES[:3])
    return ok(f"on both sides; the server notices a lost client in {idle + interval * count} s")


def connection_check(facts: Facts) -> Verdict:
    if _is_pooled(facts):
        return ok("does not apply: the server sees the connections of the pooler, not ours")
    if not _is_configured(facts):
        raise Unseen("the server did not give us a session to set it on")
    milliseconds = int(_setting(facts, "client_connection_check_interval"))
    if milliseconds:
        return ok(f"client_connection_check_interval is {milliseconds / 1000:g} s on our sessions")
    return warn(
        "client_connection_check_interval is 0 on our sessions",
        "Set it to '1s' in postgresql.conf, if the server's operating system supports it: without it a client that is "
        "killed while it waits keeps its place in the queue until its statement ends.",
    )


# Limits and settings


def lock_table(facts: Facts) -> Verdict:
    names = ("max_locks_per_transaction", "max_connections", "max_prepared_transactions")
    per_transaction, connections, prepared = (int(_setting(facts, name)) for name in names)
    capacity, used = per_transaction * (connections + prepared), row(facts, "examine_locks")["used"]
    summary = f"{used} of about {capacity} locks are in use"
    if used * 2 <= capacity:
        return ok(summary)
    return (fail if used >= capacity * 0.9 else warn)(
        summary,
        "Find out who holds so many (SELECT pid, count(*) FROM pg_locks GROUP BY 1 ORDER BY 2 DESC), or raise "
        "max_locks_per_transaction and restart. When the table is full, new connections of every client fail.",
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
    summary = f"{used} of {most} connections of {who} are in use"
    if most - used >= min(10, max(3, most // 10)):
        return ok(summary)
    return (fail if most - used < 2 else warn)(
        summary,
        "Raise the limit, or make the application's pools smaller. A process that cannot connect cannot renew its "
        "leases once its connection breaks.",
    )


def synchronous(facts: Facts) -> Verdict:
    if row(facts, "session_open")["in_recovery"]:
        return ok("a standby commits nothing")
    names, commit = _setting(facts, "synchronous_standby_names"), _default(facts, "synchronous_commit")
    if commit == "off":
        return warn(
            "synchronous_commit is off: a crash of the server loses the last commits",
            "holdfast switches it on for its own statements, behind a pooler only for those of leases; not for your "
            "protected transactions: SET LOCAL synchronous_commit = on where it matters.",
        )
    if not names.strip():
        return ok("no synchronous standby is configured: a failover may lose the last commits, but fences still rise")
    if commit == "local":
        return ok("configured, but commits do not wait for it (synchronous_commit is local)")
    about = row(facts, "examine_replicas")
    quorum = re.match(r"\s*(?:first|any)?\s*(\d+)\s*\(", names, re.IGNORECASE)
    needed = int(quorum[1]) if quorum else 1
    confirming = about["synchronous"]
    if about["connected"] >= needed and not row(facts, "examine_role")["sees_all"]:
        raise NotPermitted(
            f"{about['connected']} standbys are connected, and this role may not see if one is synchronous"
        )
    if confirming >= needed:
        return ok(f"{confirming} synchronous standby{'s' * (confirming != 1)} confirm{'s' * (confirming == 1)} commits")
    return fail(
        f"commits hang: synchronous_standby_names asks for {needed} standbys, and {confirming} are connected",
        "Bring the standby back; or, if it is acceptable that a failover loses commits: "
        "ALTER SYSTEM SET synchronous_standby_names = ''; SELECT pg_reload_conf();",
    )


def statement_timeouts(facts: Facts) -> Verdict:
    harmful = []
    for name in ("statement_timeout", "lock_timeout"):
        limit = int(_default(facts, name))
        if 0 < limit < SHORT:
            harmful.append(f"{name} is {duration(limit / 1000)}")
    if (limit := int(_default(facts, "transaction_timeout", "0"))) > 0:
        harmful.append(f"transaction_timeout is {duration(limit / 1000)}")
    if not harmful:
        return ok("none that is harmful")
    return warn(
        "; ".join(harmful),
        "See where it is set (psql: \\drds), and ALTER ROLE … SET it to 0 or higher for the role of holdfast. On "
        "direct connections holdfast sets its own limits, after it has connected under these; behind a pooler and in "
        "your protected transactions they apply. transaction_timeout also ends the waiting of failover='session'.",
    )


def idle_timeouts(facts: Facts) -> Verdict:
    harmful = []
    session, transaction = (int(_default(facts, name, "0")) for name in _IDLE_TIMEOUTS)
    if session and (_is_pooled(facts) or not _is_configured(facts)):
        harmful.append(f"idle_session_timeout is {duration(session / 1000)}")
    if 0 < transaction < SHORT:
        harmful.append(f"idle_in_transaction_session_timeout is {duration(transaction / 1000)}")
    if harmful:
        return warn(
            "; ".join(harmful),
            "See where it is set (psql: \\drds), and ALTER ROLE … SET it to 0 or higher: it ends the sessions that a "
            "pooler keeps, or protected transactions that pause between two statements.",
        )
    if session:
        return ok("idle_session_timeout is set, and holdfast switches it off on its own sessions")
    return ok("none that is harmful")


# holdfast's tables


def snapshots(facts: Facts) -> Verdict:
    about = row(facts, "examine_role")
    old = [
        snapshot
        for snapshot in rows(facts, "examine_snapshots")
        if snapshot["transactions"] >= OLD_SNAPSHOT or (snapshot["seconds"] or 0) >= OLD_SNAPSHOT_AGE
    ]
    if old:
        worst = max(old, key=lambda snapshot: int(snapshot["transactions"]))
        age = "" if worst["seconds"] is None else f" for {duration(worst['seconds'])}"
        return warn(
            f"{worst['who']} has kept a snapshot{age}, {worst['transactions']} transactions old"
            + (f" (and {len(old) - 1} more)" if len(old) > 1 else ""),
            "End it: SELECT pg_terminate_backend(pid), ROLLBACK PREPARED, or pg_drop_replication_slot(name). Until "
            "then vacuum cannot remove newer dead rows, and heartbeats become slower and slower.",
        )
    if not about["sees_all"]:
        raise NotPermitted("this role may not see other roles' transactions; its own are fine")
    return ok("none that is old")


def transactions(facts: Facts) -> Verdict:
    old = [each for each in rows(facts, "examine_transactions") if each["seconds"] is None or each["seconds"] >= OPEN]
    if old:
        worst = max(old, key=lambda transaction: float(transaction["seconds"] or 0.0))
        age = "" if worst["seconds"] is None else f" for {duration(worst['seconds'])}"
        return warn(
            f"{worst['who']} has had an open {worst['what']}{age}"
            + (f" (and {len(old) - 1} more)" if len(old) > 1 else ""),
            f"End it: holdfast locks end {worst['pid']} --reason … Until then that lease cannot be taken over.",
        )
    return ok("none that has held a lease for long")


def privileges(facts: Facts) -> Verdict:
    about = row(facts, "examine_role")
    role, schema = about["role"], row(facts, "expected")["schema"]
    if not about["there"]:
        raise Unseen("there is no schema to have privileges in")
    denied = sorted({function["name"] for function in rows(facts, "examine_functions") if not function["may"]})
    missing = [name for name in denied if name not in FOR_OPERATORS | FOR_GATEWAYS]
    if not about["usage"]:
        return fail(f"role {role!r} has no USAGE on schema {schema!r}", _grants(schema, role, missing))
    if missing:
        return fail(f"role {role!r} may not execute {', '.join(missing)}", _grants(schema, role, missing))
    for purpose, functions in (("operators", FOR_OPERATORS), ("gateways", FOR_GATEWAYS)):
        if others := [name for name in denied if name in functions]:
            kind = "a worker" if purpose == "operators" else "an operator"
            return ok(f"role {role!r} is {kind}, and leaves {', '.join(others)} to {purpose}")
    return ok(f"role {role!r} may execute every function, also those for operators and gateways")


def gateway_role(facts: Facts) -> Verdict:
    """Whether the role that runs a gateway is used by nothing else, and no other role may do what it may."""
    able = [gateway["role"] for gateway in rows(facts, "examine_gateways")]
    leases = rows(facts, "examine_holders")
    replicas = {(lease["host"], lease["pid"]): lease["role"] for lease in leases if lease["name"].startswith(REPLICA)}
    running = sorted(set(replicas.values()))
    schema = row(facts, "expected")["schema"]
    for lease in leases:
        if lease["role"] in running and (lease["host"], lease["pid"]) not in replicas and lease["kind"] in COMMON_KINDS:
            process = f"{lease['host']}:{lease['pid']}" if lease["pid"] else "a process without a name"
            return warn(
                f"role {lease['role']!r} runs a gateway, and {process} holds lease {lease['name']!r} with it",
                "Give the gateway a role of its own: with this one a service may run programs and read secrets. "
                f"{_SEE_ROLES}",
            )
    if running and (broad := sorted(set(running) - set(able))):
        return warn(
            f"a gateway runs with role {broad[0]!r}, which is a superuser or owns the tables",
            f"Give the gateway a role of its own. {_SEE_ROLES}",
        )
    others = sorted(set(able) - set(running)) if running else able[1:]
    if others:
        functions = ", ".join(f"{schema}.{name}" for name in sorted(FOR_GATEWAYS))
        return warn(
            f"{len(able)} roles may do what a gateway may: {', '.join(able)}",
            f"REVOKE EXECUTE ON FUNCTION {functions} FROM those that are not the gateway's ({', '.join(others)}): they "
            f"may run programs with its driver. {_SEE_ROLES}",
        )
    if able:
        return ok(f"only role {able[0]!r} may do what a gateway may")
    return ok("no role but the owner of the tables may do what a gateway may")


def bloat(facts: Facts) -> Verdict:
    tables = rows(facts, "examine_tables")
    if not tables:
        raise Unseen("there are no tables")
    if _setting(facts, "autovacuum") == "off":
        return warn("autovacuum is off", "Switch it on: heartbeats update the same rows again and again.")
    bloated = [table for table in tables if table["dead"] >= DEAD_ROWS and table["dead"] > 5 * table["live"]]
    if not bloated:
        return ok(f"{sum(table['dead'] for table in tables)} dead rows in all")
    worst = max(bloated, key=lambda table: int(table["dead"]))
    return warn(
        f"table {worst['name']} has {worst['dead']} dead rows and {worst['live']} live ones"
        + (", and was never vacuumed by autovacuum" if worst["vacuumed"] is None else ""),
        f"VACUUM {row(facts, 'expected')['schema']}.{worst['name']}; then find out what keeps autovacuum from it: an "
        "old snapshot, or autovacuum_enabled = off on the table.",
    )


def replica_identity(facts: Facts) -> Verdict:
    tables = rows(facts, "examine_tables")
    if not tables:
        raise Unseen("there are no tables")
    published = [table for table in tables if table["publications"]]
    if not published:
        return ok("no publication has holdfast's tables")
    if broken := sorted(table["name"] for table in published if not table["identified"]):
        return fail(
            f"published without a replica identity, so that updates fail: {', '.join(broken)}",
            "ALTER TABLE … REPLICA IDENTITY DEFAULT, or take the table out of the publication.",
        )
    if not (names := sorted(table["name"] for table in published if table["name"] not in PUBLISHABLE)):
        return ok("only the log of operations is published, which is useful")
    return warn(
        f"published for logical replication ({published[0]['publications']}): {', '.join(names)}",
        "Remove them from the publication: a copy of a lease grants nothing, fences (a sequence) are not replicated, "
        "and every heartbeat is sent.",
    )


def operation_log(facts: Facts) -> Verdict:
    tables = {table["name"]: table for table in rows(facts, "examine_tables")}
    if "idempotency_log" not in tables:
        raise Unseen("there is no log of operations")
    if not tables["idempotency_log"]["bytes"]:
        return ok("no operation is logged yet")
    if row(facts, "session_open")["in_recovery"]:
        return ok("this server is a copy of it")
    if standbys := row(facts, "examine_replicas")["connected"]:
        return ok(f"{standbys} server{'s' * (standbys != 1)} follow{'s' * (standbys == 1)} this one")
    if all(tables[name]["publications"] for name in ("idempotency_log", "wal_more")):
        return ok(f"published for logical replication ({tables['wal_more']['publications']})")
    return warn(
        "the log of operations is on this server alone: if it is lost, operations may be done twice",
        "Run a standby, or publish it: CREATE PUBLICATION … FOR TABLE idempotency_log, wal_more. Ignore this if the "
        "provider replicates the storage of the server.",
    )


CHECKS: tuple[tuple[str, Check], ...] = (
    ("connection", connection),
    ("version", version),
    ("primary", primary),
    ("pooler", pooler),
    ("session_locks", session_locks),
    ("provider", provider),
    ("clock", clock),
    ("keepalives", keepalives),
    ("connection_check", connection_check),
    ("lock_table", lock_table),
    ("connections", connections),
    ("synchronous", synchronous),
    ("statement_timeouts", statement_timeouts),
    ("idle_timeouts", idle_timeouts),
    ("snapshots", snapshots),
    ("transactions", transactions),
    ("schema", schema_version),
    ("fences", fences),
    ("privileges", privileges),
    ("gateway_role", gateway_role),
    ("bloat", bloat),
    ("replica_identity", replica_identity),
    ("operation_log", operation_log),
    ("lineage", lineage),
)


# Facts that several checks need


def _is_read_only(facts: Facts) -> bool:
    about = row(facts, "session_open")
    return bool(about["in_recovery"] or about["read_only"])


def _is_pooled(facts: Facts) -> bool:
    about = row(facts, "pooler")
    return bool(about["pooled"] or about["moved"])


def _is_configured(facts: Facts) -> bool:
    """Whether the session is one that holdfast would use, with its own settings."""
    return row(facts, "connection")["refused"] is None


def _setting(facts: Facts, name: str, default: str | None = None) -> str:
    """The value in our session. ``default``: for servers that do not have the setting."""
    return _value(facts, name, "setting", default)


def _default(facts: Facts, name: str, default: str | None = None) -> str:
    """The value that server, database and role set: before holdfast sets its own, and in the user's sessions."""
    return _value(facts, name, "reset_val", default)


def _value(facts: Facts, name: str, column: str, default: str | None) -> str:
    setting = next((setting for setting in rows(facts, "examine_settings") if setting["name"] == name), None)
    value = default if setting is None else setting[column]
    if value is None:
        raise NotPermitted(f"this role may not read the server's setting {name}: GRANT pg_read_all_settings to it")
    return str(value)


def _grants(schema: str, role: str, missing: list[str]) -> str:
    """The statements that give a role the privileges of a worker, and no more."""
    quoted = _quoted(role)
    functions = ", ".join(f"{schema}.{name}" for name in missing)
    execute = f" GRANT EXECUTE ON FUNCTION {functions} TO {quoted};" if missing else ""
    return f"GRANT USAGE ON SCHEMA {schema} TO {quoted};{execute}"


def _quoted(role: str) -> str:
    return '"' + role.replace('"', '""') + '"'
