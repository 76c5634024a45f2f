"""The checks of the doctor: each with facts that are fine, facts that are not, and facts that are not visible."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.doctor import postgres, sqlite
from holdfast.doctor.findings import Examination, Finding

SETTINGS = {
    "autovacuum": "on",
    "client_connection_check_interval": "1000",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "lock_timeout": "0",
    "max_connections": "100",
    "max_locks_per_transaction": "64",
    "max_prepared_transactions": "0",
    "reserved_connections": "0",
    "statement_timeout": "0",
    "superuser_reserved_connections": "3",
    "synchronous_commit": "on",
    "synchronous_standby_names": "",
    "tcp_keepalives_count": "2",
    "tcp_keepalives_idle": "1",
    "tcp_keepalives_interval": "1",
    "tcp_user_timeout": "3000",
    "transaction_timeout": "0",
}
TABLE = {"bytes": 8192, "live": 1, "dead": 5, "vacuumed": 1.0, "publications": None, "identified": True}
LOG = [{"name": name, **TABLE} for name in ("beat", "idempotency_log", "wal_more")]
UNRELAYED = {"relayed": False, "unrelayed": 4, "unrelayed_for": 7200.0}
PUBLISHED = [each | {"publications": "log" if each["name"] != "beat" else None} for each in LOG]
WELL: dict[str, Any] = {
    "expected": [{"schema": "holdfast", "version": 2, "self_migrating": False}],
    "connection": [{"error": None, "refused": None, "round_trip": 0.001}],
    "session_open": [{"version": 160004, "in_recovery": False, "read_only": False, "pid": 7}],
    "client_socket": [{"keepalive": True, "user_timeout": 3000}],
    "clock": [{"offset": 0.01, "round_trip": 0.001}],
    "pooler": [{"pooled": False, "moved": False}],
    "session_locks": [{"refused": None, "exclude": True}],
    "examine_provider": [{"version": "PostgreSQL 16.4 on x86_64-pc-linux-gnu", "role": None}],
    "examine_role": [{"role": "app", "there": True, "usage": True, "sees_all": True}],
    "examine_settings": [{"name": name, "setting": value, "reset_val": value} for name, value in SETTINGS.items()],
    "examine_locks": [{"used": 10}],
    "examine_connections": [
        {"used": 5, "database_used": 2, "database_limit": -1, "role_used": 1, "role_limit": -1}
    ],
    "examine_replicas": [{"connected": 0, "synchronous": 0}],
    "operation_health": [{"relayed": True, "unrelayed": None, "unrelayed_for": None, "unpublished": 0, "lag": None}],
    "relays": [],
    "examine_snapshots": [{"who": "session 8", "seconds": 0.1, "transactions": 3}],
    "examine_transactions": [{"who": "session 9", "pid": 9, "what": "acquire of lease x", "seconds": 0.1}],
    "examine_functions": [{"name": "lease_acquire", "may": True}, {"name": "lease_list", "may": True}],
    "examine_gateways": [],
    "examine_holders": [{"name": "import", "kind": "plain", "role": "app", "host": "web-1", "pid": 7}],
    "examine_tables": [
        {"name": "beat", **TABLE}, {"name": "lease", **TABLE},
        {"name": "idempotency_log", **TABLE, "bytes": 0, "dead": 0},
    ],
    "schema_applied": [{"version": 1}, {"version": 2}],
    "examine_fences": [{"name": "fence", "seconds": 59.9}, {"name": "version", "seconds": -3600.0}],
}  # fmt: skip
REPLICA = {"name": "gateway:replica:gw-1", "kind": "plain", "role": "gw", "host": "gw-1", "pid": 1}
AS_GATEWAY = {"name": "gateway:reconciler", "kind": "elector", "role": "gw", "host": "gw-1", "pid": 1}
OPERATORS = {"name": "holdfast:runtime", "kind": "gate", "role": "gw", "host": "desk", "pid": 2}
SERVICE = {"name": "import", "kind": "plain", "role": "gw", "host": "web-1", "pid": 7}
FILE = {
    "version": "3.40.1", "exists": True, "writable": True, "folder": "/srv", "folder_exists": True,
    "folder_writable": True, "filesystem": "ext4", "free": 1 << 40, "boot": True,
}  # fmt: skip
WELL_FILE: dict[str, Any] = {
    "expected": [{"schema": "holdfast", "version": 2, "self_migrating": True}],
    "connection": [{"error": None}],
    "file": [FILE],
    "examine_journal": [{"mode": "wal"}],
    "examine_integrity": [],
    "schema_applied": [{"version": 2}],
    "examine_fences": [{"name": "fence", "seconds": -0.5}],
    "write_lock": [{"error": None, "seconds": 0.001}],
    "operation_health": [{"relayed": True, "unrelayed": None, "unrelayed_for": None, "unpublished": 0, "lag": None}],
    "relays": [],
}


def changed(facts: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``changes`` by statement: a dict for its first row, a list for all its rows, None for what may not be seen."""
    facts = deepcopy(facts)
    for name, change in changes.items():
        if name == "settings":
            for each in facts["examine_settings"]:
                each.update(reset_val=change.get(each["name"], each["reset_val"]))
                each.update(setting=change.get(each["name"], each["setting"]))
        elif isinstance(change, dict):
            facts[name][0].update(change)
        else:
            facts[name] = change
    return facts


def finding(findings: tuple[Finding, ...], check: str) -> Finding:
    [match] = [each for each in findings if each.check == check]
    return match


POOLED = {"pooler": {"pooled": True, "moved": True}}
SYNC = {"synchronous_standby_names": "standby1"}
CASES: list[tuple[str, str, dict[str, Any], str]] = [
    ("connection", "fail", {"connection": {"error": "cannot connect"}}, "cannot connect"),
    ("connection", "fail", {"connection": {"refused": "no such setting"}}, "no such setting"),
    ("connection", "ok", {"connection": {"refused": "read-only"}, "session_open": {"in_recovery": True}}, "answers"),
    ("version", "fail", {"session_open": {"version": 130012}}, "13.12"),
    ("version", "warn", {"session_open": {"version": 140001}}, "14.1"),
    ("version", "ok", {"session_open": {"version": 170002}}, "17.2"),
    ("version", "warn", {"session_open": {"version": 190000}}, "19.0"),
    ("primary", "fail", {"session_open": {"in_recovery": True, "read_only": True}}, "recovery"),
    ("primary", "fail", {"session_open": {"read_only": True}}, "read-only"),
    ("pooler", "warn", POOLED, "transaction mode"),
    ("pooler", "warn", {"pooler": {"pooled": True}}, "pooler"),
    ("pooler", "ok", {"pooler": {"moved": None}}, "second"),
    ("session_locks", "warn", {"session_locks": {"refused": "permission denied for function x"}}, "denied for"),
    ("session_locks", "fail", {"session_locks": {"exclude": False}}, "two sessions"),
    ("session_locks", "ok", {"session_locks": None, **POOLED}, "pooler"),
    ("session_locks", "unseen", {"session_locks": None}, "second connection"),
    ("session_locks", "unseen", {"session_locks": None, "connection": {"refused": "read-only"}}, "no session"),
    ("provider", "fail", {"examine_provider": {"version": "CockroachDB CCL v25.1.0"}}, "CockroachDB"),
    ("provider", "ok", {"examine_provider": {"role": "neon_superuser"}}, "scale to zero"),
    ("provider", "ok", {"examine_provider": {"role": "rds_superuser"}}, "Aurora"),
    ("provider", "ok", {"examine_provider": {"role": "supabase_admin"}}, "6543"),
    ("clock", "warn", {"clock": {"offset": -5.0}}, "-5.000 s"),
    ("clock", "ok", {"clock": {"offset": 5.0, "round_trip": 9.0}}, "give or take 4500"),
    ("keepalives", "ok", {"client_socket": []}, "local socket"),
    ("keepalives", "warn", {"client_socket": {"keepalive": False}}, "our side"),
    ("keepalives", "warn", {"client_socket": {"user_timeout": 0}}, "our side"),
    ("keepalives", "ok", {"client_socket": {"user_timeout": None}}, "both sides"),
    ("keepalives", "warn", {"settings": {"tcp_keepalives_idle": "0"}}, "tcp_keepalives_idle"),
    ("keepalives", "ok", {"settings": {"tcp_keepalives_idle": "0"}, **POOLED}, "pooler"),
    ("keepalives", "unseen", {"connection": {"refused": "read-only"}}, "session"),
    ("connection_check", "warn", {"settings": {"client_connection_check_interval": "0"}}, "is 0"),
    ("connection_check", "ok", {"settings": {"client_connection_check_interval": "0"}, **POOLED}, "pooler"),
    ("connection_check", "unseen", {"connection": {"refused": "read-only"}}, "session"),
    ("fences", "warn", {"examine_fences": {"seconds": 120.5}}, "the next fence is 2.01 min ahead of the clock"),
    ("lock_table", "warn", {"examine_locks": {"used": 3201}}, "3201 of about 6400"),
    ("lock_table", "fail", {"examine_locks": {"used": 5760}}, "5760"),
    ("lock_table", "ok", {"examine_locks": {"used": 3201}, "settings": {"max_prepared_transactions": "100"}}, "12800"),
    ("connections", "warn", {"examine_connections": {"used": 90}}, "90 of 97 connections of the server"),
    ("connections", "fail", {"examine_connections": {"used": 96}}, "96 of 97"),
    ("connections", "warn", {"examine_connections": {"role_limit": 5, "role_used": 3}}, "3 of 5 connections of this"),
    ("connections", "fail", {"examine_connections": {"database_limit": 2}}, "this database"),
    ("connections", "warn", {"examine_connections": {"used": 85}, "settings": {"reserved_connections": "9"}}, "of 88"),
    ("synchronous", "warn", {"settings": {"synchronous_commit": "off"}}, "off"),
    ("synchronous", "fail", {"settings": SYNC}, "hang"),
    ("synchronous", "fail", {"settings": SYNC, "examine_replicas": {"connected": 1}}, "hang"),
    ("synchronous", "ok", {"settings": SYNC, "examine_replicas": {"connected": 1, "synchronous": 1}}, "1 synch"),
    ("synchronous", "ok", {"settings": SYNC | {"synchronous_commit": "local"}}, "local"),
    ("synchronous", "ok", {"settings": SYNC, "session_open": {"in_recovery": True}}, "standby"),
    ("synchronous", "fail", {"settings": SYNC, "examine_role": {"sees_all": False}}, "hang"),
    ("synchronous", "unseen", {"settings": SYNC, "examine_role": {"sees_all": False},
                               "examine_replicas": {"connected": 1}}, "may not see"),
    ("synchronous", "fail", {"settings": {"synchronous_standby_names": "ANY 2 (a, b)"},
                             "examine_replicas": {"connected": 2, "synchronous": 1}}, "asks for 2"),
    ("statement_timeouts", "warn", {"settings": {"statement_timeout": "500"}}, "statement_timeout is 500 ms"),
    ("statement_timeouts", "ok", {"settings": {"statement_timeout": "60000"}}, "none"),
    ("statement_timeouts", "warn", {"settings": {"lock_timeout": "1"}}, "lock_timeout is 1 ms"),
    ("statement_timeouts", "warn", {"settings": {"transaction_timeout": "90000"}}, "transaction_timeout is 1.5 min"),
    ("idle_timeouts", "ok", {"settings": {"idle_session_timeout": "1000"}}, "switches it off"),
    ("idle_timeouts", "warn", {"settings": {"idle_session_timeout": "1000"}, **POOLED}, "idle_session_timeout is 1 s"),
    ("idle_timeouts", "warn", {"settings": {"idle_in_transaction_session_timeout": "50"}}, "50 ms"),
    ("idle_timeouts", "ok", {"settings": {"idle_in_transaction_session_timeout": "60000"}}, "none"),
    ("snapshots", "warn", {"examine_snapshots": {"transactions": 10_000}}, "session 8"),
    ("snapshots", "warn", {"examine_snapshots": {"seconds": 5400}}, "for 1.5 h"),
    ("snapshots", "warn", {"examine_snapshots": {"transactions": 10_000, "seconds": None}}, "session 8 has kept"),
    ("snapshots", "warn", {"examine_snapshots": {"transactions": 10_000}, "examine_role": {"sees_all": False}}, "8"),
    ("snapshots", "unseen", {"examine_role": {"sees_all": False}}, "may not see"),
    ("transactions", "warn", {"examine_transactions": {"seconds": 40.0}}, "9 has had an open acquire of lease x for"),
    ("transactions", "warn", {"examine_transactions": {"seconds": None}}, "open acquire of lease x"),
    ("transactions", "ok", {}, "none"),
    ("schema", "fail", {"schema_applied": []}, "not there"),
    ("schema", "fail", {"schema_applied": [{"version": 1}]}, "at version 1"),
    ("schema", "fail", {"schema_applied": [{"version": 3}]}, "knows 2"),
    ("schema", "unseen", {"schema_applied": None}, "privileges"),
    ("privileges", "fail", {"examine_role": {"usage": False}}, "no USAGE"),
    ("privileges", "fail", {"examine_functions": {"may": False}}, "lease_acquire"),
    ("privileges", "ok", {"examine_functions": [{"name": "audit_list", "may": False}]}, "leaves audit_list to"),
    ("privileges", "unseen", {"examine_role": {"there": False}}, "no schema"),
    ("gateway_role", "ok", {}, "no role but the owner"),
    ("gateway_role", "ok", {"examine_gateways": [{"role": "gw"}], "examine_holders": [REPLICA, AS_GATEWAY]}, "'gw'"),
    ("gateway_role", "ok", {"examine_gateways": [{"role": "gw"}], "examine_holders": [REPLICA, OPERATORS]}, "'gw'"),
    ("gateway_role", "warn", {"examine_gateways": [{"role": "app"}, {"role": "gw"}]}, "app, gw"),
    ("gateway_role", "warn", {"examine_gateways": [{"role": "app"}], "examine_holders": [REPLICA]},
     "superuser or owns"),
    ("gateway_role", "warn", {"examine_gateways": [{"role": "app"}, {"role": "gw"}], "examine_holders": [REPLICA]},
     "2 roles"),
    ("gateway_role", "warn", {"examine_gateways": [{"role": "gw"}], "examine_holders": [REPLICA, SERVICE]},
     "web-1:7 holds lease 'import'"),
    ("bloat", "warn", {"settings": {"autovacuum": "off"}}, "off"),
    ("bloat", "warn", {"examine_tables": {"dead": 20_000, "vacuumed": None}}, "never"),
    ("bloat", "ok", {"examine_tables": {"dead": 20_000, "live": 20_000}}, "20005 dead"),
    ("bloat", "unseen", {"examine_tables": []}, "no tables"),
    ("replica_identity", "warn", {"examine_tables": {"publications": "everything"}}, "everything"),
    ("replica_identity", "fail", {"examine_tables": {"publications": "p", "identified": False}}, "beat"),
    ("replica_identity", "ok", {"examine_tables": {"identified": False}}, "no publication"),
    ("replica_identity", "unseen", {"examine_tables": []}, "no tables"),
    ("replica_identity", "ok", {"examine_tables": PUBLISHED}, "which is useful"),
    ("operation_log", "unseen", {"examine_tables": LOG[:1]}, "no log of operations"),
    ("operation_log", "warn", {"examine_tables": LOG}, "on this server alone"),
    ("operation_log", "warn", {"examine_tables": [*LOG[:2], PUBLISHED[2]]}, "on this server alone"),
    ("operation_log", "ok", {"examine_tables": [{**each, "bytes": 0} for each in LOG]}, "no operation is logged"),
    ("operation_log", "ok", {"examine_tables": PUBLISHED}, "published for logical replication (log)"),
    ("operation_log", "ok", {"examine_tables": LOG, "examine_replicas": {"connected": 2}}, "2 servers follow this one"),
    ("operation_log", "ok", {"examine_tables": LOG, "session_open": {"in_recovery": True}}, "a copy of it"),
    ("lineage", "warn", {"operation_health": UNRELAYED}, "4 entries wait for a relay, the oldest for 2 h"),
    ("lineage", "ok", {"schema_applied": []}, "no log"),
]  # fmt: skip
FILE_CASES: list[tuple[str, str, dict[str, Any], str]] = [
    ("fences", "warn", {"examine_fences": {"seconds": 7200.0}}, "the next fence is 2 h ahead of the clock"),
    ("connection", "fail", {"connection": {"error": "file is not a database"}}, "not a database"),
    ("connection", "warn", {"file": {"exists": False}}, "there is no such file"),
    ("version", "fail", {"file": {"version": "3.37.2"}}, "3.37.2"),
    ("writable", "fail", {"file": {"folder_exists": False}}, "/srv"),
    ("writable", "fail", {"file": {"folder_writable": False}}, "/srv"),
    ("writable", "fail", {"file": {"writable": False}}, "file"),
    ("writable", "ok", {"file": {"writable": False, "exists": False}}, "folder"),
    *(("filesystem", "warn", {"file": {"filesystem": kind}}, kind) for kind in ("nfs4", "cifs", "fuse.sshfs", "tmpfs")),
    *(("filesystem", "ok", {"file": {"filesystem": kind}}, kind) for kind in ("xfs", "btrfs", "fuseblk", "overlay")),
    ("filesystem", "unseen", {"file": {"filesystem": None}}, "does not tell"),
    ("boot", "warn", {"file": {"boot": False}}, "start"),
    ("space", "warn", {"file": {"free": 50 << 20}}, "50 MB"),
    ("space", "fail", {"file": {"free": 1 << 20}}, "1 MB"),
    ("space", "unseen", {"file": {"free": None}}, "does not tell"),
    ("journal", "fail", {"examine_journal": {"mode": "delete"}}, "delete"),
    ("journal", "ok", {"examine_journal": {"mode": "delete"}, "schema_applied": []}, "the next client"),
    ("journal", "unseen", {"examine_journal": None}, "no file"),
    ("schema", "ok", {"schema_applied": []}, "migrates it"),
    ("schema", "ok", {"schema_applied": [{"version": 1}]}, "migrates it"),
    ("schema", "fail", {"schema_applied": [{"version": 3}]}, "knows 2"),
    ("integrity", "fail", {"examine_integrity": [{"problem": "row 1 missing"}, {"problem": "2"}]}, "missing (and 1"),
    ("integrity", "unseen", {"examine_integrity": None}, "no tables"),
    ("lineage", "warn", {"operation_health": UNRELAYED}, "no relay has ever run"),
    ("write_lock", "fail", {"write_lock": {"error": "locked", "seconds": 2.0}}, "2.0 s"),
    ("write_lock", "unseen", {"write_lock": None}, "no file"),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "facts"), [(postgres, WELL), (sqlite, WELL_FILE)])
def test_a_database_that_is_well_has_nothing_but_ok(engine: Any, facts: dict[str, Any]) -> None:
    findings = engine.examine(facts)
    assert [each.check for each in findings] == [name for name, _ in engine.CHECKS]
    assert [each for each in findings if each.status != "ok" or each.remedy] == []


@pytest.mark.parametrize(
    ("engine", "check", "status", "changes", "words"),
    [(postgres, *case) for case in CASES] + [(sqlite, *case) for case in FILE_CASES],
)
def test_each_fault_is_told_with_its_remedy(
    engine: Any, check: str, status: str, changes: dict[str, Any], words: str
) -> None:
    result = finding(engine.examine(changed(WELL if engine is postgres else WELL_FILE, changes)), check)
    assert (result.status, words in result.found) == (status, True), result
    if status == "unseen":  # a right would help where one is missing, and nothing where there is nothing to see
        hidden = {"may not see": "pg_monitor", "privileges": "owner"}.get(words)
        assert result.remedy is None if hidden is None else hidden in str(result.remedy)
    else:
        assert bool(result.remedy) == (status in ("warn", "fail"))


def test_there_is_a_fault_for_every_check() -> None:
    for engine, cases in ((postgres, CASES), (sqlite, FILE_CASES)):
        assert {name for name, _ in engine.CHECKS} == {
            check for check, status, *_ in cases if status in ("warn", "fail")
        }


ASKED = sorted(name for name in WELL if name.startswith("examine_"))


@given(st.sets(st.sampled_from([*ASKED, "schema_applied"])))
def test_what_may_not_be_seen_is_marked_and_never_guessed(hidden: set[str]) -> None:
    findings = postgres.examine(changed(WELL, dict.fromkeys(hidden)))
    assert {each.status for each in findings} <= {"ok", "unseen"}
    assert len(findings) == len(postgres.CHECKS)
    if hidden - {"examine_replicas"}:  # of no interest without synchronous replication
        assert "unseen" in {each.status for each in findings}


@given(st.sets(st.sampled_from(sorted(WELL.keys() - {"connection", "expected"}))))
def test_without_an_answer_only_what_was_learnt_is_told(missing: set[str]) -> None:
    facts = {name: fact for name, fact in WELL.items() if name not in missing} | {"connection": [{"error": "silent"}]}
    findings = postgres.examine({**facts, "connection": [{"error": "silent", "refused": None}]})
    assert findings[0] == Finding("connection", "fail", "silent", findings[0].remedy)
    assert {each.status for each in findings[1:]} <= {"ok"}


statuses = st.lists(st.sampled_from(["ok", "warn", "fail", "unseen"]))


@given(statuses, st.booleans())
def test_only_a_failure_fails_and_a_warning_when_strict(states: list[Any], strict: bool) -> None:
    findings = tuple(Finding("x", status, "y") for status in states)
    examination = Examination("db", "holdfast", "sqlite", findings)
    assert examination.passed(strict=strict) is not ("fail" in states or (strict and "warn" in states))


MOUNTS = """\
/dev/vda / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
nas:/x /mnt/two\\040words nfs4 rw 0 0
/dev/vdb /mnt xfs rw 0 0
s /mnt/data fuse.sshfs rw 0 0
t /mnt/data btrfs rw 0 0

odd
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/tmpfile", "ext4"),
        ("/tmp", "tmpfs"),
        ("/tmp/a/b", "tmpfs"),
        ("/mnt/two words/app", "nfs4"),
        ("/mnt/two", "xfs"),
        ("/mnt/data/x", "btrfs"),
    ],
)
def test_a_file_is_on_the_mount_nearest_to_it_and_on_top(path: str, kind: str) -> None:
    assert sqlite.filesystem_type(MOUNTS, path) == kind
    assert sqlite.filesystem_type("", path) is None
