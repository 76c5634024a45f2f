"""holdfast doctor on PostgreSQL: every condition that can be brought about here is really brought about."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import psycopg
import pytest

import holdfast
from holdfast.database.statements import migrations
from holdfast.doctor import examine as health
from holdfast.doctor import postgres as checks
from holdfast.testing import Postgres, Proxy
from holdfast.testing.server import until
from tests.children import PATIENCE
from tests.cli.command import Finished, at, call, invoke, on_terminal, valid
from tests.conftest import MAJORS, fresh, migrated, server
from tests.poor_postgres import SESSION_LOCKS, stub_postgres, tenant

USER = ("grant usage on schema holdfast to {}", "grant execute on all functions in schema holdfast to {}")
CHECKS = {
    "bloat", "clock", "connection", "connection_check", "connections", "fences", "gateway_role", "idle_timeouts",
    "keepalives", "lineage", "lock_table", "operation_log", "pooler", "primary", "privileges", "provider",
    "replica_identity", "schema", "session_locks", "snapshots", "statement_timeouts", "synchronous", "transactions",
    "version",
}  # fmt: skip
NO_SESSION = {"primary": "fail", "session_locks": "unseen", "keepalives": "unseen", "connection_check": "unseen"}
"""Where nothing can be written."""

Findings = dict[str, dict[str, Any]]


def doctor(url: str, *arguments: str, code: int = 0, run: Callable[..., Finished] = invoke) -> Findings:
    """The findings by check; the document is as its schema says, and the exit code is the one expected."""
    done = run(*at(url, "doctor", "--json", "--timeout", f"{PATIENCE:g}", *arguments))
    assert done.returncode == code, done.stdout + done.stderr
    document = valid("doctor", done.stdout)
    assert document["passed"] is (code == 0)
    return {finding["check"]: finding for finding in document["findings"]}


def not_ok(findings: Findings) -> dict[str, str]:
    return {check: finding["status"] for check, finding in findings.items() if finding["status"] != "ok"}


def execute(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


@pytest.fixture
def role(postgres_url: str) -> Iterator[Callable[..., str]]:
    """Makes roles; returns the database's URL for one. Statements have {} where the role's name goes."""
    roles = []

    def make(*statements: str) -> str:
        name = f"worker_{uuid4().hex[:12]}"
        execute(postgres_url, f"create role {name} login", *(each.format(name) for each in statements))
        roles.append(name)
        return postgres_url.replace("//postgres@", f"//{name}@")

    yield make
    for name in roles:
        execute(postgres_url, f"drop owned by {name}", f"drop role {name}")


@pytest.fixture
def own() -> Iterator[Postgres]:
    """A server of the test's own, with few locks and connections."""
    with Postgres.create(settings={"max_connections": 20, "max_locks_per_transaction": 10}) as postgres:
        yield postgres


@pytest.mark.parametrize("major", MAJORS)
def test_a_server_that_is_well_passes_every_check(major: int) -> None:
    findings = doctor(fresh(major), "--strict", run=call)
    assert findings.keys() == CHECKS
    assert not_ok(findings) == {}
    assert findings["version"]["found"].startswith(f"PostgreSQL {major}.")
    assert "on both sides" in findings["keepalives"]["found"]


def test_both_flavours_examine_both_engines(connect: Callable[..., Any], either: str) -> None:
    examination = connect(either).doctor(timeout=PATIENCE)
    assert examination.passed()
    assert examination.engine == either.partition(":")[0]
    with pytest.raises(ValueError, match="timeout"):
        connect(either).doctor(timeout=0)


def test_read_only_by_default_fails_and_the_rest_is_told_all_the_same(postgres_url: str) -> None:
    name = postgres_url.rpartition("/")[2]
    execute(postgres_url, f"alter database {name} set default_transaction_read_only = on")
    findings = doctor(postgres_url, code=1)
    assert not_ok(findings) == NO_SESSION
    assert "default_transaction_read_only" in findings["primary"]["remedy"]


def test_short_timeouts_of_the_role_are_a_warning(role: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Short is less than ten minutes here: on a busy machine less than a second would end the examination itself."""
    monkeypatch.setattr(checks, "SHORT", 600_000)
    short = ("statement_timeout = '8min'", "lock_timeout = '3min'", "idle_in_transaction_session_timeout = '2min'")
    url = role(*USER, *("alter role {} set " + limit for limit in short), "grant pg_read_all_stats to {}")
    with holdfast.Client(url) as client:
        findings = {each.check: each for each in client.doctor(timeout=PATIENCE).findings if each.status != "ok"}
    assert {check: each.status for check, each in findings.items()} == dict.fromkeys(
        ("statement_timeouts", "idle_timeouts"), "warn"
    )
    assert findings["statement_timeouts"].found == "statement_timeout is 8 min; lock_timeout is 3 min"
    assert "idle_in_transaction_session_timeout is 2 min" in findings["idle_timeouts"].found


def test_an_old_snapshot_is_named_to_those_who_may_see_it(postgres_url: str, role: Callable[..., str]) -> None:
    worker = role(*USER)
    with psycopg.connect(postgres_url, application_name="forgotten") as reader:
        reader.execute("set transaction isolation level repeatable read")
        reader.execute("select 1")
        loop = "for i in 1..10001 loop perform pg_current_xact_id(); commit; end loop"
        execute(postgres_url, f"do $$ begin {loop}; end $$")
        findings = doctor(postgres_url)
        assert not_ok(findings) == {"snapshots": "warn"}
        assert f"session {reader.info.backend_pid} (postgres, forgotten)" in findings["snapshots"]["found"]
        assert not_ok(doctor(worker)) == {"snapshots": "unseen"}
    assert not_ok(doctor(postgres_url)) == {}


def test_commits_that_would_hang_for_want_of_a_standby_are_told_without_hanging(own: Postgres) -> None:
    """Nobody need be privileged to learn it: that no standby is connected at all can be seen by everybody."""
    url = migrated(own.database())
    execute(url, "create role worker login", *(grant.format("worker") for grant in USER))
    own.execute("alter system set synchronous_standby_names = 'nobody'")
    own.execute("select pg_reload_conf()")
    until(lambda: own.execute("show synchronous_standby_names") == [("nobody",)], what="the setting is in force")
    for each in (url, url.replace("postgres@", "worker@")):
        findings = doctor(each, code=1)
        assert findings["synchronous"]["status"] == "fail"
        assert "hang" in findings["synchronous"]["found"]


def test_a_synchronous_standby_makes_the_primary_well_and_is_none_itself(own: Postgres) -> None:
    url = migrated(own.database())
    standby = own.standby(synchronous=True)
    assert "1 synchronous standby confirms" in doctor(url)["synchronous"]["found"]
    there = url.replace(f":{own.port}/", f":{standby.port}/")
    until(lambda: url.rpartition("/")[2] in str(standby.execute("select datname from pg_database")), what="it follows")
    findings = doctor(there, code=1)
    assert not_ok(findings) == NO_SESSION
    assert "recovery" in findings["primary"]["found"]
    both = url.replace(f"127.0.0.1:{own.port}/", f"127.0.0.1:{standby.port},127.0.0.1:{own.port}/")
    assert not_ok(doctor(both)) == {}, "of several hosts the primary is examined"


def test_a_lock_table_more_than_half_full_is_told(own: Postgres) -> None:
    url = migrated(own.database())
    with psycopg.connect(url) as holder:
        holder.execute("select pg_advisory_lock(i) from generate_series(1, 150) i")
        assert "of about 200" in doctor(url)["lock_table"]["found"]
        assert not_ok(doctor(url)) == {"lock_table": "warn"}


def test_a_server_that_is_paused_is_a_finding_in_bounded_time(postgres_url: str) -> None:
    """It accepts connections and answers nothing."""
    with Proxy(postgres_url) as way:
        way.stall()
        findings = doctor(way.url, "--timeout", "1", code=1)
    assert not_ok(findings) == {"connection": "fail"}
    assert findings.keys() == {"connection"}


def test_a_server_that_is_not_there_is_one_finding_and_no_password_is_shown() -> None:
    url = "postgresql://postgres:hunter2@127.0.0.1:1/postgres"
    done = invoke("doctor", HOLDFAST_URL=url)
    assert done.returncode == 1
    assert done.stdout.startswith("fail    connection  cannot connect")
    assert ":***@" in done.stdout
    assert "hunter2" not in done.stdout + done.stderr
    assert doctor(url, code=1).keys() == {"connection"}


def test_usage_and_execute_are_enough_for_a_useful_report(role: Callable[..., str]) -> None:
    findings = doctor(role(*USER), "--strict")
    assert findings.keys() == CHECKS
    assert not_ok(findings) == {"snapshots": "unseen"}
    assert "pg_monitor" in findings["snapshots"]["remedy"]
    newest = migrations("postgres")[-1].version
    assert findings["schema"]["found"] == f"schema 'holdfast' is at version {newest}"


def test_missing_rights_are_told_with_the_grants_that_mend_them(postgres_url: str, role: Callable[..., str]) -> None:
    nobody = role()
    findings = doctor(nobody, code=1)
    assert (findings["privileges"]["status"], findings["schema"]["status"]) == ("fail", "unseen")
    execute(postgres_url, *findings["privileges"]["remedy"].rstrip(";").split(";"))
    assert doctor(nobody)["privileges"]["status"] == "ok"
    with holdfast.Client(nobody) as client, client.lease("import") as grant:
        with pytest.raises(holdfast.EngineError, match="That is for operators"):
            client.leases.force_release("import", actor="me", reason="no more was granted than to work")
        grant.check()

    findings = doctor(role(USER[0]), code=1)
    assert findings["privileges"]["status"] == "fail"
    assert "lease_acquire" in findings["privileges"]["found"]

    findings = doctor(role(*USER, "revoke execute on function holdfast.lease_force_release from {}"))
    assert findings["privileges"]["status"] == "ok", "it is what the manual recommends"
    assert findings["privileges"]["found"].endswith("leaves lease_force_release to operators")


def test_a_role_that_has_used_up_its_connections_is_told(role: Callable[..., str]) -> None:
    url = role(*USER, "alter role {} connection limit 4")
    with psycopg.connect(url), psycopg.connect(url):
        findings = doctor(url, code=1)
    assert findings["connections"]["status"] == "fail"
    assert "of 4 connections of this role" in findings["connections"]["found"]


def test_a_missing_schema_fails_and_names_the_command() -> None:
    findings = doctor(server().database(), code=1)
    assert findings["schema"]["status"] == "fail"
    assert findings["schema"]["remedy"] == "Run: holdfast migrate up"
    unseen = [findings[check] for check in ("privileges", "bloat", "replica_identity")]
    assert {(each["status"], each["remedy"]) for each in unseen} == {("unseen", None)}, "no right would help"


def test_dead_rows_that_nobody_removes_are_told(postgres_url: str) -> None:
    execute(
        postgres_url,
        "alter table holdfast.beat set (autovacuum_enabled = off)",
        "insert into holdfast.beat (id, ttl, expires_at, solo, label) "
        "select uuid_send(gen_random_uuid()), interval '1 s', now(), true, 'x' from generate_series(1, 10001)",
        "delete from holdfast.beat",
        "select pg_stat_force_next_flush()",
    )
    findings = doctor(postgres_url)
    assert not_ok(findings) == {"bloat": "warn"}
    assert "table beat has 10001 dead rows" in findings["bloat"]["found"]


@pytest.mark.filterwarnings("ignore")
def test_a_publication_of_the_tables_is_told_and_one_that_stops_updates_fails(postgres_url: str) -> None:
    execute(postgres_url, "create publication everything for all tables")
    findings = doctor(postgres_url)
    assert not_ok(findings) == {"replica_identity": "warn"}
    assert "commit_check" not in findings["replica_identity"]["found"]
    execute(postgres_url, "alter table holdfast.lease replica identity nothing")
    findings = doctor(postgres_url, code=1)
    assert not_ok(findings) == {"replica_identity": "fail"}
    assert findings["replica_identity"]["found"].endswith("updates fail: lease")


@pytest.mark.parametrize("option", ["keepalives=0", "tcp_user_timeout=0"])
def test_a_url_that_switches_keepalives_off_is_told(postgres_url: str, option: str) -> None:
    """As a warning, which `--strict` makes a failure."""
    findings = doctor(f"{postgres_url}?{option}")
    assert not_ok(findings) == {"keepalives": "warn"}
    doctor(f"{postgres_url}?{option}", "--strict", code=1)


def test_a_clock_that_is_off_is_told_with_its_sign(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's cannot be set here, so ours is."""
    monkeypatch.setattr(health, "time", SimpleNamespace(time=lambda: time.time() - 36_000))
    with holdfast.Client(postgres_url) as client:
        [finding] = [each for each in client.doctor(timeout=PATIENCE).findings if each.check == "clock"]
    assert finding.status == "warn"
    offset = re.match(r"the server's clock is \+([0-9.]+) s", finding.found)
    assert offset is not None, finding.found
    assert abs(float(offset[1]) - 36_000) < PATIENCE, "an answer may have waited for that long"


def test_a_pooler_is_noticed(pooled_url: str) -> None:
    findings = doctor(pooled_url)
    assert not_ok(findings) == {"pooler": "warn"}
    assert "transaction mode" in findings["pooler"]["found"]
    assert "direct URL" in findings["pooler"]["remedy"]


def test_session_locks_that_are_refused_are_told_with_the_grants_that_mend_them() -> None:
    url = server().database()
    tenants = migrated(tenant(url, *SESSION_LOCKS))
    finding = doctor(tenants)["session_locks"]
    assert finding["status"] == "warn"
    assert "permission denied for function pg_try_advisory_lock" in finding["found"]
    execute(url, finding["remedy"].partition(";")[0])
    assert doctor(tenants)["session_locks"]["status"] == "ok"
    with holdfast.Client(tenants) as client, client.lock("a"), client.lock(("agent", 7)) as grant:
        grant.check()


def test_session_locks_that_lock_nothing_fail() -> None:
    findings = doctor(stub_postgres(), code=1)
    assert not_ok(findings) == {"session_locks": "fail"}
    assert "two sessions" in findings["session_locks"]["found"]


def test_a_provider_is_recognised_and_what_to_know_of_it_told(postgres_url: str) -> None:
    execute(postgres_url, "create role neon_superuser")
    try:
        assert "does not scale to zero" in doctor(postgres_url)["provider"]["found"]
    finally:
        execute(postgres_url, "drop role neon_superuser")


def test_it_reads_well_in_a_pipe_and_on_a_narrow_terminal(postgres_url: str) -> None:
    words = at(f"{postgres_url}?keepalives=0", "doctor", "--timeout", f"{PATIENCE:g}")
    lines = invoke(*words).stdout.splitlines()
    assert len(lines) == len(CHECKS) + 2, "a line a finding, one for the remedy, and the summary"
    assert [line.split()[1] for line in lines if line.startswith("warn ")] == ["keepalives"]
    assert lines[-1].endswith(": 23 ok, 1 warn")
    for columns in (40, 30, 20):
        narrow = invoke(*words, COLUMNS=str(columns)).stdout
        assert max(map(len, narrow.splitlines())) <= columns
        assert "the URL switches off keepalives" in " ".join(narrow.split())
    text = on_terminal(*words, columns=50, NO_COLOR="1")
    assert "\033[3" not in text
    assert max(map(len, text.splitlines())) <= 50
    assert "\033[" in on_terminal(*words, columns=100)


def test_a_wrong_call_says_so() -> None:
    for wrong in ("0", "-1", "soon"):
        done = invoke("doctor", "--timeout", wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--timeout" in done.stderr
