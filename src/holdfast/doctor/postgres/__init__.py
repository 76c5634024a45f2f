"""What can be wrong with a PostgreSQL server, its settings, and the way to it."""

from __future__ import annotations

from holdfast.doctor.findings import Check, Facts, Finding, judge, row, schema_version
from holdfast.doctor.postgres import connectivity as way
from holdfast.doctor.postgres import limits, tables

CHECKS: tuple[tuple[str, Check], ...] = (
    ("connection", way.connection),
    ("version", way.version),
    ("primary", way.primary),
    ("pooler", way.pooler),
    ("clock", way.clock),
    ("keepalives", way.keepalives),
    ("connection_check", way.connection_check),
    ("lock_table", limits.lock_table),
    ("connections", limits.connections),
    ("synchronous", limits.synchronous),
    ("statement_timeouts", limits.statement_timeouts),
    ("idle_timeouts", limits.idle_timeouts),
    ("snapshots", tables.snapshots),
    ("schema", schema_version),
    ("privileges", tables.privileges),
    ("bloat", tables.bloat),
    ("replica_identity", tables.replica_identity),
    ("operation_log", tables.operation_log),
)


def examine(facts: Facts) -> tuple[Finding, ...]:
    findings = judge(
        CHECKS, facts, remedy="For the whole picture: GRANT pg_monitor TO the role, or ask as a superuser."
    )
    if row(facts, "connection")["error"] is None:
        return findings
    return tuple(finding for finding in findings if finding.status != "unseen")  # unanswered is not unseen
