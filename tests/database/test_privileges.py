"""The SQL functions as a door of their own: for psql and for any language, safe from whoever may call them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.errors import (
    CheckViolation,
    InsufficientPrivilege,
    InvalidParameterValue,
    RaiseException,
    UndefinedFunction,
)
from psycopg.rows import namedtuple_row

import holdfast
from holdfast.testing.lease_contract import refused_after_waiting
from holdfast.testing.server import until
from tests.conftest import MAJORS, NEWEST, for_one_test, server
from tests.poor_postgres import tenant

Connect = Callable[..., Any]
TABLES = [
    "lease", "beat", "history", "meta", "schema_version", "commit_check", "lock_namespace", "lock_name", "lock_hold",
    "audit", "object", "object_change", "object_trimmed", "object_watched", "object_late", "idempotency_log",
    "wal_more", "wal_late", "outbox", "review", "relay", "parked", "peer", "policy",
    "schedule", "schedule_slot",
]  # fmt: skip
PUBLIC = {
    "hello", "purge", "lease_try", "lease_acquire", "lease_renew", "lease_status", "lease_release", "lease_abandon",
    "lease_list", "lease_history", "lease_force_release", "beat_renew", "beat_leases", "beat_release", "beat_end",
    "lease_protect",
    "lease_protect_at_commit", "lease_protect_proven", "owner_hold", "lock_namespace", "lock_note", "lock_holds",
    "lock_label", "audit_begin", "audit_end",
    "object_put_if", "object_swap", "object_delete_if", "object_get", "object_get_by_name", "object_list",
    "object_cursor", "object_changes",
    "operation_get", "operation_begin", "operation_claim", "operation_write", "operation_finish", "operation_end",
    "operation_list", "operation_match",
    "operation_entries",
    "operation_claim_many", "operation_expire", "operation_finish_many", "operation_health", "operation_indexes",
    "operation_kin", "operation_failed", "operation_correct", "review_open", "review_take", "review_return",
    "review_list", "review_decide", "operation_look", "policy_list", "policy_apply",
    "wal_chains", "wal_find", "wal_keys", "wal_latest", "wal_read", "wal_archive", "relay_read", "relay_open",
    "relay_begin",
    "relay_move", "relay_list", "relay_parked", "relay_retry", "relay_remove",
    "audit_note", "audit_stands", "audit_list", "guard_acquire", "elector_acquire", "gate_acquire",
    "operation_acquire", "relay_acquire", "slot_claim", "slot_list", "slot_renew", "slot_release",
    "slot_abandon", "gate_open", "gate_close", "gate_require", "gate_trigger", "lease_wipe",
    "lease_force_release_if",
    "shard_list", "fence_raise", "fence_ahead", "lease_recall", "lease_clear", "beat_wanted", "peer_announce",
    "peer_find",
    "schedule_register", "schedule_change", "schedule_look", "schedule_advance", "schedule_take", "schedule_settle",
    "schedule_slots", "schedule_pause", "schedule_order", "schedule_remove",
    "lease_activity", "operation_activity", "schedule_activity",
}  # fmt: skip
"""What a role calls, by itself or through the library. The rest is for these alone."""
INSIDE = {
    "lease_await": "'x', ''::bytea",
    "lease_take": "'gate', '@gate:x', 'me', 30, null, null, null, 0, true, null, null",
    "beat_look": "''::bytea",
    "lease_end": "row('import', 'x', ''::bytea, ''::bytea, 1, now(), null, false, 'plain', 'me', null)"
    "::holdfast.lease,"
    " 'released', false",
    "draw": "'holdfast.fence'",
    "raise_number": "'holdfast.fence'",
    "set_numbers": "1, 2, 3",
    "copy_id": "",
    "server_life": "",
    "current_space": "",
    "wal_ready": "",
    "object_newest": "pg_current_snapshot()",
    "slot_rows": "'@slot:x'",
    "operation_alive": "'x', 1",
    "operation_put": "'x', null, '1:a', 1, '[]', 'failure', 1, 1, null, null, null, null, null, false, 0, null, null,"
    " null, null, null, 'x', null, null, null, null, null, null, false, true",
    "audit_act": "'lease_force_release', 'x', 'jane', 'why', null, null",
    "object_fence": "'x', gen_random_uuid()",
    "object_log": "1, 1, 'box', 'b-1', 'created', null",
    "object_log_at_commit": "1, 'box', 'b-1', 'created', null",
    "object_trim": "1000000",
    "policy_lets_correct": "'x', 'y'",
}
HARMLESS = {
    "wake_payload": "'import'",
    "wake": "'import'", "waiters_name": "'import'", "check_name": "'name', 'x'", "check_kind": "'plain', 'x'",
    "check_gateway": "'@sandbox'", "check_payload": "'1', null", "check_labels": "'{}'", "sql_version": "",
    "own_name": "'@slot:', 'pool', 'x'", "protect_key": "'x'", "limit_transaction": "0",
    "fenced_out": "'import'",
    "check_savepoint": "'1'::xid", "clock_number": "", "random_space": "",
    "snapshot_time": "", "schedule_micros": "", "activity_start": "60, 60",
    "commit_check": "", "lock_end_session": "1, 1", "audit_check": "'jane', 'why'",
    "check_entries": "'[]'", "says_reset": "'{}'",
    "operation_is_of": "null, null, null, null, null, null, null",
    "operation_count": "null, 'x', 'failure', 1, 1, 1",
    "object_late": "", "lock_key": "'x'",
    "dataset_lock": "'x'", "policy_matches": "'x', '*'", "dataset_form": "'x'", "wal_late": "", "policy_check": "",
    "wal_settle": "", "relay_settle": "", "object_settle": "", "history_trim": "",
}  # fmt: skip


@pytest.fixture(params=sorted({MAJORS[0], NEWEST}))
def postgres_url(request: pytest.FixtureRequest) -> str:
    return for_one_test(request.param)


def execute(url: str, *sql: str) -> None:
    with psycopg.connect(url, autocommit=True) as database:
        for each in sql:
            database.execute(each.encode())


def role(url: str, *grants: str) -> str:
    """The database as a new role sees it."""
    name = f"role_{uuid4().hex[:12]}"
    execute(url, f"create role {name} login", *(f"{grant} to {name}" for grant in grants))
    return url.replace("//postgres@", f"//{name}@")


@pytest.fixture
def app_url(postgres_url: str) -> str:
    """As a role that may execute every function, which is more than an operator should have, and has no table."""
    return role(
        postgres_url,
        "grant usage on schema holdfast",
        "grant execute on all functions in schema holdfast",
        "grant create on schema public",
    )


@pytest.mark.parametrize(("postgres_url", "connect"), [(MAJORS[0], "sync"), (NEWEST, "async")], indirect=True)
def test_usage_and_execute_are_enough_to_hold_wait_renew_and_release(connect: Connect, app_url: str) -> None:
    client, other = connect(app_url), connect(app_url)
    with client.lease("import", holder="one", renew_every=0.02) as grant:
        assert grant.renew() is True
        expires = client.leases.get("import").expires_at
        until(lambda: other.leases.get("import").expires_at > expires, what="a heartbeat")
        assert refused_after_waiting(lambda: other.lease("import").acquire(timeout=0.05)).holder == "one"
        assert other.lease("import").adopt(grant.token).fence == grant.fence
    assert client.lease("import").acquire().release() is True
    assert other.lease("import", failover="session").acquire().fence > grant.fence
    assert other.leases.force_release("import", actor="operator", reason="test") is True
    assert [each.outcome for each in client.leases.history("import")] == ["forced", "released", "released"]


@pytest.mark.parametrize("at", ["start", "commit"])
def test_usage_and_execute_are_enough_to_protect(app_url: str, at: Any) -> None:
    with holdfast.Client(app_url) as client, psycopg.connect(app_url, autocommit=True) as mine:
        mine.execute("create table public.work (fence bigint)")
        grant = client.lease("import").acquire()
        with grant.transaction(mine, at=at):
            mine.execute("insert into public.work values (1)")
        with pytest.raises(holdfast.FencedOut), mine.transaction():  # noqa: PT012
            if at == "commit":
                grant.protect(mine, at=at)
            client.leases.force_release("import", actor="operator", reason="test")
            if at == "start":
                grant.protect(mine, at=at)
            mine.execute("insert into public.work values (2)")
        assert mine.execute("select fence from public.work").fetchall() == [(1,)]


def test_usage_and_execute_show_no_table_and_no_token(app_url: str) -> None:
    with holdfast.Client(app_url) as client, psycopg.connect(app_url, autocommit=True) as mine:
        grant = client.lease("import").acquire()
        for table in TABLES:
            for statement in (f"select from holdfast.{table}", f"delete from holdfast.{table}"):
                with pytest.raises(InsufficientPrivilege):
                    mine.execute(statement.encode())
        for statement in ("select from holdfast.wal", "select nextval('holdfast.fence')"):
            with pytest.raises(InsufficientPrivilege):
                mine.execute(statement.encode())
        refused = mine.execute("select * from holdfast.lease_acquire('import', 'somebody else', 30)").fetchall()
        listings = [mine.execute(f"select * from holdfast.lease_{each}()".encode()) for each in ("list", "history")]
        shown = [refused, *(listing.fetchall() for listing in listings)]
        assert "import" in str(shown)
        assert grant.token not in str(shown)


def test_execute_on_all_functions_is_no_way_around_the_token(app_url: str) -> None:
    """What only our own functions are to call has no rights of its own: a made-up row ends nobody's lease, no fence is
    drawn, and no history is forged or erased."""
    with holdfast.Client(app_url) as client, psycopg.connect(app_url, autocommit=True) as attacker:
        client.lease("before").acquire().release()
        grant = client.lease("import").acquire()
        history, held = client.leases.history(), client.leases.list()
        for function, arguments in INSIDE.items():
            with pytest.raises(InsufficientPrivilege):
                attacker.execute(f"select holdfast.{function}({arguments})".encode())
        for function, arguments in HARMLESS.items():
            with suppress(psycopg.Error):
                attacker.execute(f"select holdfast.{function}({arguments})".encode())
        for arguments in ("", "0", "-1"):
            with suppress(UndefinedFunction):
                attacker.execute(f"select holdfast.purge({arguments})".encode())
        assert client.leases.history() == history
        assert [(each.name, each.fence) for each in client.leases.list()] == [(each.name, each.fence) for each in held]
        grant.renew()
        assert client.lease("after").acquire().fence == grant.fence + 1
        grant.release()


RESET = '["",[1,"reset",1,1,1,"{\\"actor\\": \\"jane\\"}",null],"x"]'
WRITE = """operation_write('k', null, '1:x', 1, '{}', 'failure', 1, 1, null, null, null, null, null, false, 0, null,
    null, null, null, null, 'l', null, null, 'd', 'o', null, null)"""
END = f"|l|k||1:x|1|{RESET}|failure|1|1||||||false|0|||||d|o|||"
FORGED = [
    WRITE.format(RESET),
    WRITE.format(RESET.replace("reset", "archived")),
    f"operation_end(replace(extract(epoch from transaction_timestamp()) || '{END}', '|', chr(31)))",
    f"""operation_claim_many('k', '1:x', '{RESET}', 'l', '', 'p', 't', 'd', 'o', '', 'h', 1, null, 'mine', %(token)s,
        null)""",
    """operation_claim(replace('k|9|reset' || chr(30) || '{}|f|false||l|||d|o||', '|', chr(31)), '@op:k', 'me', 30,
        null, null, 0, true, null, null)""",
]
OVERWRITTEN = [
    """operation_write(%(key)s, %(at)s, '9:x', 9, '[]', 'failure', 1, 1, null, null, null, null, null, false, 0, null,
        %(owner)s, null, null, null, 'l', 'p', 't', 'd', 'o', null, %(params)s)""",
    """operation_finish_many(%(key)s, %(at)s, '9:x', '9', '[]', 'failure', '', '', '', '0', 'false', '', null, 'mine',
        %(token)s)""",
]


def test_the_operations_of_others_are_not_written_nor_their_entries_forged(app_url: str) -> None:
    """An attempt that runs is written under its own lease alone. A reset is written by the function that audits it."""
    with holdfast.Client(app_url) as client, psycopg.connect(app_url, autocommit=True) as attacker:
        token = {"token": client.lease("mine").acquire().token}
        for forged in FORGED:
            with pytest.raises(InsufficientPrivilege, match="operation_correct alone"):
                attacker.execute(f"select holdfast.{forged}".encode(), token)
        key = holdfast.OperationKey(pipeline="p", task="t", dataset="d", operation="o")

        def run() -> int:
            find = "select l.pointer, l.owner from holdfast.operation_list(null, null, %s, 1) l"
            [(pointer, owner)] = attacker.execute(find, (key.digest,)).fetchall()
            running = {"key": key.digest, "at": pointer, "owner": owner, "params": key.params_hash, **token}
            for attack in OVERWRITTEN:
                attacker.execute(f"select holdfast.{attack}".encode(), running)
            return 7

        assert client.operation(key).run(run).result == 7
        assert client.operations.verify().passed


def test_no_row_of_a_role_breaks_the_listings_of_others(app_url: str) -> None:
    with holdfast.Client(app_url) as client, psycopg.connect(app_url, autocommit=True) as attacker:
        info = """'{"info": {"x": 1e100000}}'"""
        with pytest.raises(CheckViolation):
            attacker.execute(f"select holdfast.lease_acquire('x', 'A', 30, process => {info})".encode())
        assert client.leases.list() == []
        attacker.execute("select pg_advisory_lock(5), pg_advisory_lock(6), pg_advisory_lock(7)")
        attacker.execute(
            "select holdfast.lock_note(true, '[]', '[[false,5,1e11,0],[false,6,-1e12,0],[false,7,\"NaN\",0]]', '[]')"
        )
        assert len(client.locks.list()) == 3


def test_no_function_has_the_rights_of_its_owner_but_those_that_are_to_be_called(postgres_url: str) -> None:
    """A function added later is one of the two, or this fails."""
    with psycopg.connect(postgres_url) as database:
        functions = database.execute(
            "select proname, prosecdef from pg_proc where pronamespace = 'holdfast'::regnamespace"
        ).fetchall()
    definer = {name for name, with_rights in functions if with_rights}
    assert definer - {"commit_check", "object_late", "policy_check", "wal_late"} == PUBLIC, (
        "and the triggers, which nobody can call"
    )
    assert {name for name, _ in functions} == PUBLIC | INSIDE.keys() | HARMLESS.keys()


def test_public_may_nothing(postgres_url: str) -> None:
    url = role(postgres_url)
    functions = """
        select oid::regprocedure::text from pg_proc
         where pronamespace = 'holdfast'::regnamespace and has_function_privilege(current_user, oid, 'execute')"""
    tables = """
        select oid::regclass::text from pg_class where relnamespace = 'holdfast'::regnamespace and relkind = 'r'
           and (has_any_column_privilege(oid, 'select, insert, update') or has_table_privilege(oid, 'delete, truncate'))
    """
    with psycopg.connect(url, autocommit=True) as nobody:
        assert nobody.execute("select has_schema_privilege('holdfast', 'usage, create')").fetchone() == (False,)
    execute(postgres_url, f"grant usage on schema holdfast to {url.partition('//')[2].partition('@')[0]}")
    with psycopg.connect(url, autocommit=True) as nobody:
        assert nobody.execute(functions).fetchall() == []
        assert nobody.execute(tables).fetchall() == []
        assert nobody.execute("select has_sequence_privilege('holdfast.fence', 'usage, select')").fetchone() == (False,)
        with pytest.raises(InsufficientPrivilege):
            nobody.execute("select * from holdfast.lease_acquire('import', 'me', 30)")
    with (
        holdfast.Client(url) as client,
        pytest.raises(
            holdfast.EngineError, match="GRANT USAGE ON SCHEMA holdfast TO …; and GRANT EXECUTE as 'holdfast doctor'"
        ),
    ):
        client.lease("import").acquire()


def test_the_owner_of_a_database_can_migrate_it_and_is_no_superuser() -> None:
    url = server().database()
    name = url.rpartition("/")[2]
    owner = role(url)
    execute(url, f"alter database {name} owner to {owner.partition('//')[2].partition('@')[0]}")
    with holdfast.Client(owner) as client:
        applied = client.migrate()
        assert len(applied) == len(client.migrations.scripts())
        assert client.lease("import").try_acquire() is not None
        assert client.migrations.down(to=0) == applied[::-1]


def test_a_role_that_may_only_use_the_schema_has_nothing_to_migrate(postgres_url: str, app_url: str) -> None:
    """Replicas that migrate at every start need no more rights than to hold leases; where something is missing they are
    told whose it is to do."""
    words = r"Only the owner .* may migrate.*'holdfast migrate up'.*GRANT USAGE ON SCHEMA holdfast TO .*GRANT EXECUTE"
    with holdfast.Client(app_url) as client:
        assert client.migrate() == []
        for call in (client.migrations.status, lambda: client.migrations.down(to=0)):
            with pytest.raises(holdfast.EngineError, match=words):
                call()
        execute(postgres_url, "delete from holdfast.schema_version where version > 1")
        with pytest.raises(holdfast.EngineError, match=words):
            client.migrate()
        execute(postgres_url, "insert into holdfast.schema_version (version, name) values (99, 'later')")
        with pytest.raises(holdfast.SchemaMismatch, match="upgrade holdfast"):
            client.migrate()
    missing = r"GRANT CREATE ON DATABASE test_\w+ TO …, or CREATE SCHEMA holdfast AUTHORIZATION …; else run 'hold"
    with holdfast.Client(role(server().database())) as nobody, pytest.raises(holdfast.EngineError, match=missing):
        nobody.migrate()


def test_every_function_pins_its_search_path(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as database:
        functions = database.execute(
            "select proname, proconfig from pg_proc where pronamespace = 'holdfast'::regnamespace"
        ).fetchall()
    assert len(functions) > 10
    assert [name for name, settings in functions if "search_path=pg_catalog, pg_temp" not in (settings or [])] == []


HIJACK = """
create function evil.{} language plpgsql as $$ begin raise exception 'hijacked'; end $$
"""


def test_a_shadowed_function_or_table_does_not_get_in(postgres_url: str, app_url: str) -> None:
    """And the same attack gets in where the search_path is not pinned, so it is one."""
    name = app_url.partition("//")[2].partition("@")[0]
    shadows = ("clock_timestamp() returns timestamptz", "gen_random_uuid() returns uuid")
    execute(postgres_url, "create schema evil", *map(HIJACK.format, shadows), f"grant usage on schema evil to {name}")
    with psycopg.connect(app_url, autocommit=True) as attacker:
        attacker.execute("set search_path = evil, pg_temp, pg_catalog, public")
        for table in ("lease", "beat", "meta"):
            attacker.execute(f"create temp table {table} (name text, one text)".encode())
        acquire = "select status from holdfast.lease_acquire('import', 'me', 30)"
        assert attacker.execute(acquire).fetchone() == ("acquired",)
        assert attacker.execute("select count(*) from holdfast.lease_list()").fetchone() == (1,)
        signature = "text, text, double precision, uuid, uuid, text, double precision, boolean, bigint, jsonb"
        for function in (f"lease_acquire({signature})", f"lease_take(text, {signature})"):
            execute(postgres_url, f"alter function holdfast.{function} reset search_path")
        with pytest.raises(RaiseException, match="hijacked"):
            attacker.execute(acquire)


def test_psql_can_call_the_lease_functions_directly(postgres_url: str, app_url: str) -> None:
    """Seven answers: acquired, held, re-entered, a stale token refused, renewed, taken over, released."""
    with psycopg.connect(app_url, autocommit=True, row_factory=namedtuple_row) as sql:

        def call(statement: str, *parameters: object) -> Any:
            row = sql.execute(f"select * from holdfast.{statement}".encode(), parameters).fetchone()
            return row if row is None or len(row) > 1 else row[0]

        first = call("lease_acquire('x', 'A', 30, reenter => 'secret')")
        assert (first.status, first.held_by) == ("acquired", None)
        assert 0 < first.remaining <= 30
        held = call("lease_acquire('x', 'B', 30)")
        assert (held.status, held.token, held.beat, held.fence, held.held_by) == ("held", None, None, None, "A")
        assert 0 < held.remaining <= 30
        assert call("lease_acquire('x', 'A', 60, reenter => 'a guess')").status == "held"
        again = call("lease_acquire('x', 'A', 60, reenter => 'secret')")
        assert again.status == "reentered"
        assert again.token != first.token
        assert again.fence > first.fence
        assert call("lease_renew('x', %s)", first.token) is False
        assert call("lease_release('x', null, %s)", first.token) is False
        assert call("lease_renew('x', %s)", again.token) is True
        assert 30 < call("lease_list('x')").remaining <= 60
        execute(postgres_url, "update holdfast.beat set expires_at = clock_timestamp()")
        assert call("lease_list('x')") is None
        thief = call("lease_acquire('x', 'B', 30)")
        assert (thief.status, thief.held_by) == ("taken_over", "A")
        assert thief.fence > again.fence
        assert call("lease_renew('x', %s)", again.token) is False
        assert call("lease_release('x', null, %s)", again.token) is False
        assert [call("lease_release('x', null, %s)", thief.token) for _ in "12"] == [True, False]
        assert call("lease_acquire('x', 'C', 30)").status == "acquired"


BAD_ARGUMENTS = [
    "'', 'A', 30", "repeat('x', 201), 'A', 30", "E'a\\nb', 'A', 30", "null, 'A', 30", "'x', '', 30", "'x', null, 30",
    "'x', 'A', 0", "'x', 'A', -1", "'x', 'A', 'NaN'", "'x', 'A', 'Infinity'", "'x', 'A', 86401", "'x', 'A', null",
    "'x', 'A', 30, reenter => ''", "'x', 'A', 30, reenter => repeat('x', 201)",
    *(f"'x', 'A', 30, at_least_seconds => {bad}" for bad in ("-1", "86401", "1e7", "'NaN'", "'Infinity'", "null")),
]  # fmt: skip


def test_the_functions_refuse_bad_input_themselves(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as sql:
        for arguments in BAD_ARGUMENTS:
            with pytest.raises(InvalidParameterValue):
                sql.execute(f"select * from holdfast.lease_acquire({arguments})".encode())
        for table in ("beat", "lease", "history"):
            assert sql.execute(f"select count(*) from holdfast.{table}".encode()).fetchone() == (0,)
        assert sql.execute("select is_called from holdfast.fence").fetchone() == (False,)


def test_what_a_process_says_of_itself_is_bounded(postgres_url: str) -> None:
    """It is told to everybody who looks."""
    boast = "jsonb_build_object('label', repeat('x', 1000000))"
    with psycopg.connect(postgres_url, autocommit=True) as sql:
        with suppress(psycopg.Error):
            sql.execute(f"select status from holdfast.lease_acquire('x', 'A', 30, process => {boast})".encode())
        assert sql.execute("select max(length(label)) > 200 from holdfast.beat").fetchone() != (True,)


def test_a_refused_function_of_the_server_is_the_one_to_grant(connect: Connect) -> None:
    """To the role that migrates; then to the owner, whose rights the functions have, whoever calls them."""
    url = server().database()
    ours = tenant(url, "pg_advisory_xact_lock")
    client = connect(ours)
    with pytest.raises(
        holdfast.EngineError, match=r"needs: GRANT EXECUTE ON FUNCTION pg_catalog\.pg_advisory_xact_lock TO"
    ):
        client.migrate()
    execute(url, "grant execute on function pg_catalog.pg_advisory_xact_lock(bigint) to tenant")
    client.migrate()
    tenant(url, "pg_try_advisory_xact_lock")
    with pytest.raises(holdfast.EngineError) as refused:
        client.lease("import").acquire()
    assert "GRANT EXECUTE ON FUNCTION pg_catalog.pg_try_advisory_xact_lock TO the owner of schema" in str(refused.value)
    assert "GRANT USAGE" not in str(refused.value)


def test_a_function_of_ours_that_was_revoked_is_the_one_to_grant(postgres_url: str) -> None:
    ours = role(postgres_url, "grant usage on schema holdfast", "grant execute on function holdfast.hello")
    with (
        holdfast.Client(ours) as client,
        pytest.raises(holdfast.EngineError, match=r"needs: GRANT EXECUTE ON FUNCTION holdfast\.lease_list TO …"),
    ):
        client.leases.list()
