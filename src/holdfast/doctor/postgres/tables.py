"""The tables: who may use them, what slows them down, and where else they are."""

from __future__ import annotations

from holdfast.database.privileges import FOR_OPERATORS
from holdfast.doctor.findings import Facts, Hidden, Unseen, Verdict, fail, ok, row, rows, warn
from holdfast.doctor.postgres.settings import duration, setting

OLD_SNAPSHOT, OLD_SNAPSHOT_AGE = 10_000, 900.0
"""Transactions since a snapshot was taken, and seconds. 20,000 renewals under one make a heartbeat 3 times slower."""
DEAD_ROWS = 10_000
PUBLISHED = frozenset({"idempotency_log", "wal", "outbox", "review", "audit", "relay", "parked"})
"""Tables of which a copy elsewhere is worth having: logs, unlike leases, say the same there."""


def snapshots(facts: Facts) -> Verdict:
    about = row(facts, "examine_role")
    held = [
        each
        for each in rows(facts, "examine_snapshots")
        if each["transactions"] >= OLD_SNAPSHOT or (each["seconds"] or 0) >= OLD_SNAPSHOT_AGE
    ]
    if held:
        worst = max(held, key=lambda each: int(each["transactions"]))
        age = "" if worst["seconds"] is None else f" for {duration(worst['seconds'] * 1000)}"
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
    if setting(facts, "autovacuum") == "off":
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


def _grants(schema: str, role: str, missing: list[str]) -> str:
    """What makes it a worker, and no more than that."""
    quoted = '"' + role.replace('"', '""') + '"'
    functions = ", ".join(f"{schema}.{name}" for name in missing)
    execute = f" GRANT EXECUTE ON FUNCTION {functions} TO {quoted};" if missing else ""
    return f"GRANT USAGE ON SCHEMA {schema} TO {quoted};{execute}"
