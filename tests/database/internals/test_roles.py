"""What the page on roles grants, run as it stands: a worker does its work, and nothing to others'; an operator may."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.errors import InsufficientPrivilege

import holdfast
from holdfast import commands as operator
from holdfast.database.privileges import FOR_GATEWAYS, FOR_OPERATORS
from holdfast.database.statements import statements
from holdfast.lease.keeper import keepers_of
from holdfast.testing import available
from holdfast.testing.server import until
from tests.cli.command import columns_of, printed
from tests.conftest import MAJORS, NEWEST, fresh, server
from tests.gateway.local_replica import open_local_replica
from tests.lineage.recording_sink import RecordingSink

PAGE = (Path(__file__).resolve().parents[3] / "docs/howto/roles-and-poolers.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Who uses them")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"^```sql\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)
FOR_PSQL = {"lock_key", "sql_version", "lease_try", "slot_renew", "slot_release", "gate_require", "gate_trigger"}
FOR_PSQL_OPERATORS = {"gate_open", "gate_close"}
"""Functions that no statement of ours calls, for other languages."""
CALLED_BY_FUNCTIONS = {"audit_stands"}
"""Of those that run with the rights of the caller."""
GRANTS = Path(__file__).resolve().parents[3] / "deploy/roles.sql"
JANE: dict[str, Any] = {"actor": "jane", "reason": "its machine is gone"}


def granted(role: str) -> set[str]:
    lists = re.findall(rf"grant execute on function\s([^;]*?)\sto {role};", "".join(BLOCKS))
    return set(re.findall(r"holdfast\.(\w+)", "".join(lists)))


@pytest.fixture(params=sorted({MAJORS[0], NEWEST}))
def urls(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """The same database as the page's worker and as its operator see it."""
    major, url = request.param, fresh(request.param)
    name = url.rpartition("/")[2]
    server(major).execute("".join(BLOCKS), dbname=name)
    try:
        yield url.replace("postgres@", "worker@"), url.replace("postgres@", "operator@")
    finally:
        for role in ("gateway", "operator", "worker"):
            server(major).execute(f"drop owned by {role}", dbname=name)
            server(major).execute(f"drop role {role}")


def of_gateway(urls: tuple[str, str]) -> str:
    """The same database as the page's gateway sees it."""
    return urls[0].replace("worker@", "gateway@")


@pytest.fixture
def worker(urls: tuple[str, str]) -> Iterator[holdfast.Client]:
    with holdfast.Client(urls[0]) as client:
        yield client


@contextmanager
def refused(function: str) -> Iterator[None]:
    """The server refuses, and the message says whose it is to do."""
    with pytest.raises(holdfast.EngineError) as told:
        yield
    assert f"permission denied for function {function}. That is for operators: " in str(told.value)
    assert f"GRANT EXECUTE ON FUNCTION holdfast.{function} TO …" in str(told.value)


def may(connection: psycopg.Connection[Any]) -> set[str]:
    """The functions that the role of this session may execute."""
    asked = (
        "select proname::text from pg_proc where pronamespace = 'holdfast'::regnamespace"
        " and has_function_privilege(oid, 'execute')"
    )
    return {name for (name,) in connection.execute(asked)}


def test_the_page_grants_every_function_that_is_called_to_the_role_that_it_is_for() -> None:
    """A function that is added is granted by the page, to one of the three, or this fails."""
    texts = [each.sql for each in statements("postgres").values()]
    called = {*re.findall(r"\bholdfast\.(\w+)\(", "".join(texts)), *CALLED_BY_FUNCTIONS}
    assert called | FOR_PSQL_OPERATORS >= FOR_OPERATORS
    assert granted("operator") == FOR_OPERATORS
    assert granted("gateway") == FOR_GATEWAYS
    assert granted("worker") == called - FOR_OPERATORS - FOR_GATEWAYS | FOR_PSQL


def test_a_worker_does_all_of_its_work(urls: tuple[str, str], worker: holdfast.Client) -> None:
    server_url = urls[0].replace("worker@", "postgres@")
    with psycopg.connect(server_url, autocommit=True) as database:
        database.execute("create table public.work (x int)")
        database.execute("grant all on public.work to worker")
    with closing(psycopg.connect(urls[0], autocommit=True)) as mine:
        with worker.lease("import") as grant, grant.transaction(mine):
            mine.execute("insert into public.work values (1)")
        with worker.lease("import") as grant, grant.transaction(mine, at="commit"):
            assert worker.lease("import").adopt(grant.token).renew() is True
        with worker.lease("import", failover="session"), worker.lock("import"), worker.lock(("agent", 7)):
            assert [each.name for each in worker.leases.list()] == ["import"]
            until(
                lambda: {"import", "(agent, 7)"} <= {each.label for each in worker.locks.list()}, what="names of locks"
            )
        assert [each.outcome for each in worker.leases.history("import")] == ["released"] * 3
        with worker.slots("pool", capacity=2).claim(owner="s-1"):
            assert worker.slots("pool", capacity=2).in_use() == 1
        record = worker.objects.put_if("box", "b-1", 1, holdfast.MustCreate(), name="web")
        assert worker.objects.get_by_name("box", "web") == record
        worker.objects.delete_if("box", "b-1", record.version)
        insert = "insert into public.work values (2) returning x"
        assert worker.operation("inside", tx=mine).run(lambda: mine.execute(insert).fetchall()[0][0]).result == 2
        with mine.transaction():
            mine.execute("select 1")
            assert not worker.operation("joined", tx=mine).run(lambda: 3).committed
        assert [each.kind for each in worker.operations.history("joined")][-1] == "lock_released"
        assert worker.operation("outside").run(lambda: 3).result == 3
        assert worker.operation("outside").run(lambda: 4).replayed is True
        with pytest.raises(holdfast.PolicyDenied, match="is closed"):
            worker.gates.require("dot_config")
        assert mine.execute("select holdfast.lock_key('import') is not null").fetchone() == (True,)
        assert mine.execute("select x from public.work order by 1").fetchall() == [(1,), (2,)]
    assert worker.migrate() == []
    assert [each.ok for each in worker.leases.probe()] == [True] * 7


@pytest.mark.parametrize("role", ["worker", "operator"])
def test_the_functions_answer_as_the_conformance_script_says(urls: tuple[str, str], role: str) -> None:
    script = Path(__file__).resolve().parents[3] / "spec/conformance.sql"
    psql = [str(available()[NEWEST] / "psql"), "-X", urls[role == "operator"], "-f", str(script)]
    done = subprocess.run(psql, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("# all cases hold\n")
    assert done.stdout.count("\nok - ") > 40
    with holdfast.Client(urls[0]) as client:
        assert client.leases.list() == []
        assert client.objects.list("conformance") == []


def test_a_worker_takes_nothing_away_and_neither_reads_nor_forges_the_record(
    urls: tuple[str, str], worker: holdfast.Client
) -> None:
    worker.operation("done").run(lambda: 1)
    with holdfast.Client(urls[0]) as victim, victim.lease("import") as grant, victim.lock("import"):
        [held] = [each for each in victim.locks.list() if each.name == "import"]
        attempts: list[tuple[str, Callable[[], object]]] = [
            ("lease_force_release", lambda: worker.leases.force_release("import", **JANE)),
            ("lease_force_release_if", lambda: worker.leases.force_release("import", fence=grant.fence, **JANE)),
            ("audit_begin", lambda: worker.locks.end_session(held.pid or 0, **JANE)),
            ("operation_correct", lambda: worker.operations.reset("done", **JANE)),
            ("audit_list", lambda: worker.audit.list()),
            ("audit_begin", lambda: worker.audit.begin("lease.release", "import", **JANE)),
            ("audit_begin", lambda: worker.gate("dot_config", **JANE).__enter__()),
            ("audit_begin", lambda: operator.run(worker, "lease.release", {"name": "import"}, **JANE)),
        ]
        for function, attempt in attempts:
            with refused(function):
                attempt()
        direct = {
            "lease_force_release": "'import', 'jane', 'x'",
            "lease_force_release_if": f"'import', {grant.fence}, 'jane', 'x'",
            "lease_recall": f"'import', {grant.fence}, 'jane', 'x'",
            "lease_wipe": f"'import', '{grant.token}'",
            "lock_end_session": f"{held.pid}, 1",
            "gate_acquire": "'@gate:dot_config', 'jane', 30",
            "audit_begin": "'a', 's', 'jane', 'x'",
            "audit_note": "1, 1, null",
            "audit_end": "1, 'done'",
            "audit_list": "",
            "wal_archive": "'k', 'e', 'p', 1, '[]', 'jane', 'x'",
            "operation_expire": "1, 'jane', 'x'",
            "fence_raise": "1, 1",
            "relay_remove": "'r', 'jane', 'x'",
        }
        with psycopg.connect(urls[0], autocommit=True) as mine:
            assert may(mine) & FOR_OPERATORS == set()
            for function, arguments in direct.items():
                with pytest.raises(InsufficientPrivilege, match=rf"permission denied for function {function}$"):
                    mine.execute(f"select holdfast.{function}({arguments})".encode())
            with pytest.raises(InsufficientPrivilege):
                mine.execute("select from holdfast.audit")
        grant.check()
        assert victim.leases.get("import") is not None
    with holdfast.Client(urls[1]) as boss, psycopg.connect(urls[1]) as theirs:
        assert boss.audit.list() == []
        assert may(theirs) >= FOR_OPERATORS


def test_an_operator_may_what_a_worker_may_and_the_rest(urls: tuple[str, str], worker: holdfast.Client) -> None:
    with holdfast.Client(urls[1]) as boss:
        taken = [worker.lease(name).acquire() for name in ("a", "b", "c")]
        assert boss.leases.force_release("a", **JANE) is True
        assert boss.leases.force_release("b", fence=taken[1].fence, **JANE) is True
        assert operator.run(boss, "lease.release", {"name": "c"}, **JANE).changes
        worker.operation("outside").run(lambda: 3)
        boss.operations.reset("outside", **JANE)
        assert worker.operation("outside").run(lambda: 5).result == 5
        with boss.gate("dot_config", **JANE):
            assert worker.gates.require("dot_config").holder == "jane"
            reasons = [columns_of(printed("--url", url, "gates"))[0]["reason"] for url in urls]
            assert reasons == ["-", JANE["reason"]], "the reason is in the record, which a worker may not read"
        guard = boss._guard_lease("system:guard").acquire()
        kept = worker.lease("wiped").acquire()
        assert operator.run(boss, "lease.wipe", {"guard": guard.name, "token": guard.token}, **JANE).changes
        assert worker.leases.get(kept.name) is None
        assert {each.role for each in boss.audit.list()} == {"operator"}
        assert {"lease.release", "gate.window"} <= {each.action for each in boss.audit.list()}
        with closing(psycopg.connect(urls[0], autocommit=True)) as stuck:
            stuck.execute("select pg_advisory_lock(holdfast.lock_key('x'))")
            boss.locks.end_session(stuck.info.backend_pid, **JANE)
            with pytest.raises(psycopg.OperationalError):
                stuck.execute("select 1")
        with boss.lease("import"), boss.lock("import"):
            assert boss.operation("once").run(lambda: 1).result == 1


def test_the_doctor_is_content_with_all_three(urls: tuple[str, str]) -> None:
    for url, words in (
        (urls[0], "is a worker, and leaves audit_begin, "),
        (urls[1], "is an operator, and leaves peer_announce, peer_find to gateways"),
        (of_gateway(urls), "also those for operators and gateways"),
    ):
        with holdfast.Client(url) as client:
            [finding] = [each for each in client.doctor().findings if each.check == "privileges"]
            assert (finding.status, words in finding.found) == ("ok", True), finding


def test_the_doctor_finds_a_role_that_is_not_the_gateways_alone(urls: tuple[str, str], worker: holdfast.Client) -> None:
    def finding() -> tuple[str, str]:
        [one] = [each for each in worker.doctor().findings if each.check == "gateway_role"]
        return one.status, one.found

    assert finding() == ("ok", "only role 'gateway' may do what a gateway may")
    with closing(psycopg.connect(of_gateway(urls), autocommit=True)) as gateway:
        replica = '{"host": "gw-1", "pid": 7}'
        acquire = "select from holdfast.lease_acquire(%s, 'gw-1', 600, process => %s)"
        gateway.execute(acquire, ["gateway:replica:gw-1", replica])
        gateway.execute(acquire, ["gateway:reconciler", replica])
        assert finding()[0] == "ok"
        gateway.execute(acquire, ["nightly-import", '{"host": "web-1", "pid": 8}'])
        shared = "role 'gateway' runs a gateway, and web-1:8 holds lease 'nightly-import' with it"
        assert finding() == ("warn", shared)
    with psycopg.connect(of_gateway(urls).replace("gateway@", "postgres@"), autocommit=True) as owner:
        owner.execute("select holdfast.lease_force_release('nightly-import', 'jane', 'why')")
        owner.execute("grant execute on function holdfast.peer_announce to worker")
    assert finding() == ("warn", "3 roles may do what a gateway may: gateway, operator, worker")


ARGUMENTS = """select proname::text, coalesce(proargnames[:pronargs], '{}'), proargtypes::regtype[]::text[] from pg_proc
    where pronamespace = 'holdfast'::regnamespace and prokind = 'f' and prorettype <> 'trigger'::regtype
      and has_function_privilege(oid, 'execute') order by 1"""
BY_TYPE = {
    "uuid": "gen_random_uuid()", "boolean": "true", "bigint": "0", "integer": "1", "double precision": "60",
    "jsonb": "'{}'", "bytea": "null", "pg_snapshot": "pg_current_snapshot()", "xid8": "'0'",
}  # fmt: skip


def test_no_function_shows_the_token_of_a_lease_or_the_beat_of_a_process(
    urls: tuple[str, str], worker: holdfast.Client
) -> None:
    """Every function that any of the roles may execute, with the name of each kind of lease, and without its token."""

    def hold() -> None:
        worker.lease("import", ttl=3600).acquire()
        worker.slots("gpu", 1, ttl=3600).claim(owner="s-1")
        worker._guard_lease("system:guard", ttl=3600).acquire()
        with psycopg.connect(urls[0].replace("worker@", "postgres@")) as owner:
            found = owner.execute("select name, token, beat from holdfast.lease").fetchall()
        beats = [beat for keeper in keepers_of(worker._database) for beat in keeper._beats]
        assert (len(found), sum(len(beat.leases) for beat in beats)) == (4, 4)
        secrets = [secret for beat in beats for secret in (beat.id, *beat.leases)]
        secrets += [str(stored)[2:-1] for _, *hashes in found for stored in hashes]  # as an answer would show them
        with psycopg.connect(of_gateway(urls), autocommit=True) as gateway:
            functions = gateway.execute(ARGUMENTS).fetchall()
            answers = 0
            for function, arguments, types in functions:
                for name, *_ in found:
                    values = [f"'{name}'" if kind == "text" else BY_TYPE.get(kind, "null") for kind in types]
                    call = ", ".join(f"{each} => {value}" for each, value in zip(arguments, values, strict=True))
                    with suppress(psycopg.Error), gateway.transaction(force_rollback=True):
                        shown = str(gateway.execute(f"select * from holdfast.{function}({call})".encode()).fetchall())
                        answers += 1
                        assert not any(secret in shown for secret in secrets), function
            assert (len(functions) > 100, answers > 100) == (True, True)

    worker.operation("running").run(hold)


def test_the_token_of_one_lease_does_not_show_the_others_of_its_process(
    urls: tuple[str, str], worker: holdfast.Client
) -> None:
    """A program that was given one, by `holdfast run` for example, repeats the acquire with it."""
    given = worker.lease("given", ttl=3600).acquire()
    worker.lease("own", ttl=3600).acquire()
    with psycopg.connect(urls[0], autocommit=True) as child:
        acquire = "select status, beat from holdfast.lease_acquire('given', 'me', 60, %s)"
        assert child.execute(acquire, [given.token]).fetchone() == ("acquired", None)
        acquire = "select status, beat from holdfast.lease_acquire('solo', 'me', 60, %s, %s, process => '{}')"
        token, beat = uuid4(), uuid4()
        assert [child.execute(acquire, [token, beat]).fetchone() for _ in "12"] == [("acquired", beat)] * 2
        assert child.execute(acquire, [token, None]).fetchone() == ("acquired", None)


HOSTILE = """select status from holdfast.object_put_if(
    '@sandbox', 'evil', '{"spec": {"argv": ["sh", "-c", "id >owned"]}}', 0)"""


def test_only_a_gateway_writes_and_reads_what_its_driver_runs(urls: tuple[str, str]) -> None:
    """Every function of objects, past the library; EXECUTE on all of them gives nothing."""
    with (
        psycopg.connect(urls[0], autocommit=True) as plain,
        psycopg.connect(urls[1], autocommit=True) as boss,
        psycopg.connect(of_gateway(urls), autocommit=True) as gateway,
    ):
        for session in (plain, boss):
            for call in (
                HOSTILE, HOSTILE.replace(", 0)", ", -1)"),
                "select holdfast.object_swap('@sandbox', 'a', '{}', 1, null, false, null, null)",
                "select holdfast.object_swap('@sandbox', 'a', '{}', 1, null, true, null, null)",
                "select holdfast.object_delete_if('@sandbox', 'a', 1)",
                "select holdfast.object_get('@session', 'ses-1')",
                "select holdfast.object_get_by_name('@agent', 'session:1')",
                "select holdfast.object_list('@session')",
                "set role worker; select holdfast.object_list('@session')",
            ):  # fmt: skip
                with pytest.raises(InsufficientPrivilege, match="permission denied for '@"):
                    session.execute(call.encode())
        assert gateway.execute(HOSTILE.encode()).fetchone() == ("done",)
        [(version,)] = gateway.execute("select version from holdfast.object_list('@sandbox')").fetchall()
        swap = "select status, version from holdfast.object_swap('@sandbox', 'evil', '{}', %s, null, false, null, null)"
        [(status, version)] = gateway.execute(swap, [version]).fetchall()
        assert status == "done"
        assert gateway.execute("select body from holdfast.object_get('@sandbox', 'evil')").fetchone() == ("{}",)
        delete = "select status from holdfast.object_delete_if('@sandbox', 'evil', %s)"
        assert gateway.execute(delete, [version]).fetchone() == ("done",)
    with holdfast.Client(urls[0]) as client, pytest.raises(holdfast.Refused) as refusal:
        client.objects.list("@sandbox")
    assert "That is for gateways: GRANT EXECUTE ON FUNCTION holdfast.peer_announce TO …" in str(refusal.value)


def test_only_a_gateway_takes_the_names_of_its_leases(urls: tuple[str, str]) -> None:
    """A worker that held one could keep replicas from leading, and supervisors from being connected."""
    take = "select status from holdfast.{}('gateway:reconciler', 'me', 60)"
    calls = [take.format(f"{kind}_acquire") for kind in ("lease", "guard", "elector")]
    calls += [
        "select holdfast.lease_try('gateway:supervisor:sb-1', 'me', gen_random_uuid(), 60)",
        "select status from holdfast.lease_acquire('gateway:', 'me', 60, process => '{\"host\": \"x\", \"pid\": 1}')",
    ]
    for url in urls:
        with psycopg.connect(url, autocommit=True) as session:
            for call in (*calls, f"set role worker; {calls[0]}"):
                with pytest.raises(InsufficientPrivilege, match="permission denied for 'gateway:"):
                    session.execute(call.encode())
            assert session.execute("select count(*) from holdfast.lease_list()").fetchone() == (0,)
    with psycopg.connect(of_gateway(urls), autocommit=True) as gateway:
        assert gateway.execute(calls[0].encode()).fetchone() == ("acquired",)
    with holdfast.Client(urls[0]) as client:
        assert client.lease("gateway").try_acquire() is not None
        assert client.lease("gatewayed").try_acquire() is not None
        for take_lease in (client.lease("gateway:reconciler").try_acquire, client.elector("gateway:x").run):
            with pytest.raises(holdfast.Refused, match=r"for a role that may execute peer_announce"):
                take_lease(*([lambda term: None] if take_lease.__name__ == "run" else []))


async def test_a_gateway_does_all_of_its_work_with_its_role_and_does_not_start_with_another(
    urls: tuple[str, str], tmp_path: Path
) -> None:
    async with open_local_replica(of_gateway(urls), tmp_path) as local:
        session = await local.http.post("/sessions", json={"pool": "default"})
        assert session.status_code == 201, session.text
        assert (await local.http.post(f"/sessions/{session.json()['id']}/heartbeat")).status_code == 200
        assert (await local.send_hooks("session-start", "user-prompt-submit", "stop"))["agent"] == 1
        made = await local.http.post("/sandboxes", json={"argv": ["true"]})
        assert made.status_code == 201, made.text
        cancelled = await local.http.post(
            "/api/commands/session.cancel",
            json={"actor": "jane", "reason": "why", "parameters": {"id": session.json()["id"]}},
        )
        assert cancelled.status_code == 200, cancelled.text
        assert (await local.http.get("/")).status_code == 200
    for url in urls:
        with pytest.raises(holdfast.Refused, match="That is for gateways"):
            async with open_local_replica(url, tmp_path):
                pass


def test_the_grants_of_the_page_are_those_of_the_file_for_psql() -> None:
    page = [re.sub(r"create role .*\n", "", block) for block in BLOCKS if "create role" in block]
    assert GRANTS.read_text(encoding="utf-8").partition("\n\n")[2] == "\n".join(page)


RESET = """operation_correct('{key}', '{pointer}', '9:{end}', 9,
    '["", [9, "reset", 1, 1, 1, "{{}}", null], "{end}"]', 'failure', 1, 1, null, null, null, null, null, false, 0,
    null, 'repair', '{token}', 'paid', null, null, null, null, null, null, {said})"""
WRITE = """select holdfast.operation_write('{key}', '{pointer}', '9:f', 9,
    '["", [9, {kind}, 1, 1, 1, {detail}, null], "f"]', '{status}', {attempt}, 1, null, null, null, null, null, true, 0,
    null, 'mine', '{token}', null, null, 'paid', null, null, null, null, null, null)"""
BEGUN = (
    """select holdfast.operation_end(array_to_string(array[extract(epoch from transaction_timestamp())::text, 'new',
    'new', null, '1:f', '1', '["", [1, {kind}, 1, 1, 1, {detail}, null], "f"]', 'success', '1', '1', null, null, null,
    null, null, 'true', '0'] || array_fill(null::text, array[9]), chr(31), ''))""",
    """select holdfast.operation_claim(array_to_string(array['new', '1', btrim('{kind}', '"') || chr(30)
    || ('{detail}'::json #>> '{{}}'), null, 'true', null, 'new'] || array_fill(null::text, array[6]), chr(31), ''),
    '@op:new', 'me', 60, gen_random_uuid(), null, 0, false, null, null)""",
    """select holdfast.operation_claim_many('new', '1:f', '["", [1, {kind}, 1, 1, 1, {detail}, null], "f"]', 'new', '',
    '', '', '', '', '', '', 1, null, 'mine', '{token}', null)""",
)
"""Statements that write the first entries of an operation."""
STATE = """
    select (select json_agg(l order by l.name)::text from holdfast.lease l), (select count(*) from holdfast.history),
           (select json_agg(r)::text from holdfast.review r), (select json_agg(r)::text from holdfast.relay r),
           (select json_agg(g)::text from holdfast.idempotency_log g),
           (select b.wanted::text from holdfast.beat b join holdfast.lease l on l.beat = b.id where l.name = 'job'),
           (select count(*) from holdfast.audit)"""


def test_every_act_on_the_work_of_others_leaves_one_entry_that_no_sql_avoids(
    urls: tuple[str, str], worker: holdfast.Client
) -> None:
    """Rolled back, it leaves none; when its entry cannot be written, it does not happen."""
    said = "'jane', 'its machine is gone'"
    with (
        holdfast.Client(urls[1]) as boss,
        psycopg.connect(urls[1], autocommit=True) as mine,
        psycopg.connect(urls[0].replace("worker@", "postgres@"), autocommit=True) as owner,
    ):
        fences = {name: worker.lease(name, ttl=3600).acquire().fence for name in ("a", "b", "job", "rest")}
        repair = boss.lease("repair", ttl=3600).acquire()
        guard = boss._guard_lease("system:guard", ttl=3600).acquire()
        worker.operation("paid").run(lambda: 1)
        paid = worker.operations.get("paid")
        assert paid is not None
        [(review,)] = mine.execute("select holdfast.review_open('k', 'k', null, null, 'policy', 'why')").fetchall()
        worker.relay("r", RecordingSink()).step()
        worker.operation("old", keep=60).run(lambda: 1)
        old = worker.operations.get("old")
        assert old is not None
        owner.execute("update holdfast.idempotency_log set expires_at = updated_at where label = 'old'")
        archived = f"""'{old.key}', '{old.pointer}', '9:f', 9, '["", [9, "archived", 1, 1, 1, "{{}}", null], "f"]'"""
        reset = RESET.format(key=paid.key, pointer=paid.pointer, end="f" * 64, token=repair.token, said=said)
        acts = {
            "lease_recall": f"lease_recall('job', {fences['job']}, {said})",
            "lease_force_release": f"lease_force_release('a', {said})",
            "lease_force_release ": f"lease_force_release_if('b', {fences['b']}, {said})",
            "review_decide": f"review_decide({review}, 'approved', {said})",
            "relay_remove": f"relay_remove('r', {said})",
            "operation_expire": f"operation_expire(9, {said})",
            "wal_archive": f"wal_archive({archived}, {said})",
            "gate_open": f"gate_open('door', 60, {said})",
            "gate_close": f"gate_close('door', {said})",
            "operation_reset": reset,
            "lease_wipe": f"lease_wipe('{guard.name}', '{guard.token}')",
        }
        for action, act in acts.items():
            call = f"select holdfast.{act}".encode()
            [before] = owner.execute(STATE).fetchall()
            with mine.transaction(force_rollback=True):
                mine.execute(call)
            owner.execute("alter table holdfast.audit add constraint no_room check (false) not valid")
            with pytest.raises(psycopg.errors.CheckViolation):
                mine.execute(call)
            owner.execute("alter table holdfast.audit drop constraint no_room")
            assert owner.execute(STATE).fetchall() == [before], act
            mine.execute(call)
            [(*now, count)] = owner.execute(STATE).fetchall()
            assert (tuple(now) != before[:-1], count) == (True, before[-1] + 1), act
            entry = boss.audit.list()[0]
            assert (entry.action, entry.role, entry.outcome) == (action.strip(), "operator", "done")
            assert entry.actor == (guard.holder if action == "lease_wipe" else "jane")


def test_no_gate_is_opened_without_an_entry_that_stays(urls: tuple[str, str]) -> None:
    """A window outlives its transaction, so the entry is committed before."""
    take = b"select status from holdfast.gate_acquire('@gate:door', 'jane', 60)"
    begin = b"select holdfast.audit_begin('gate.window', %s, 'jane', 'why')"
    with (
        holdfast.Client(urls[1]) as boss,
        psycopg.connect(urls[1], autocommit=True) as mine,
        psycopg.connect(urls[0].replace("worker@", "postgres@"), autocommit=True) as owner,
    ):

        def refused() -> None:
            with pytest.raises(InsufficientPrivilege, match="first begin an audit entry"):
                mine.execute(take)

        refused()
        owner.execute(begin, ["door"])
        refused()
        mine.execute(begin, ["another"])
        refused()
        with mine.transaction(force_rollback=True):
            mine.execute(begin, ["door"])
            with mine.transaction(force_rollback=True):
                refused()
        [(entry,)] = mine.execute(begin, ["door"]).fetchall()
        mine.execute("select holdfast.audit_end(%s, 'done')", [entry])
        refused()
        assert boss.gates.list() == []
        mine.execute(begin, ["door"])
        assert mine.execute(take).fetchall() == [("acquired",)]
        assert mine.execute("select status from holdfast.gate_acquire('holdfast:runtime', 'jane', 60)").fetchall() == [
            ("acquired",)
        ]


def test_no_role_forges_an_entry_or_does_what_is_audited_another_way(
    urls: tuple[str, str], worker: holdfast.Client
) -> None:
    worker.operation("paid").run(lambda: 1)
    paid = worker.operations.get("paid")
    assert paid is not None
    mine = worker.lease("mine", ttl=3600).acquire()
    terms = {"key": paid.key, "pointer": paid.pointer, "token": mine.token, "attempt": 1, "status": "failure"}
    signed = r'"{\"actor\": \"elder\"}"'
    with psycopg.connect(urls[0], autocommit=True) as plain, psycopg.connect(urls[1], autocommit=True) as boss:
        for kind, detail in (
            ('"reset"', '"{}"'),
            (r'"\u0072eset"', '"{}"'),
            ('"success"', signed),
            ('"rollback"', signed),
        ):
            for session in (plain, boss):
                for statement in (WRITE, *BEGUN):
                    with pytest.raises(InsufficientPrivilege, match="operation_correct alone"):
                        session.execute(statement.format(kind=kind, detail=detail, **terms).encode())
        for change in ({}, {"status": "partial", "attempt": 2}):
            undo = WRITE.format(kind='"failure"', detail='"{}"', **{**terms, **change}).encode()
            assert plain.execute(undo).fetchone() == ("changed",), "a success stays, until it expires"
        for statement in (
            "select holdfast.audit_act('lease_force_release', 'x', 'jane', 'why', null, null)",
            "insert into holdfast.audit (actor, role, action, subject, reason) values ('a', 'b', 'c', 'd', 'e')",
            "update holdfast.audit set actor = 'joe'", "delete from holdfast.audit", "truncate holdfast.audit",
        ):  # fmt: skip
            with pytest.raises(InsufficientPrivilege):
                boss.execute(statement.encode())
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="must contain a dot"):
            boss.execute("select holdfast.audit_begin('lease_force_release', 'x', 'jane', 'why')")
        plain.execute("select pg_advisory_lock(1)")
        pid = plain.info.backend_pid
        begin = f"holdfast.audit_begin('lock.end', 'session {pid}', 'jane', 'why')"
        for entry in ("null", "(select max(id) from holdfast.audit_list())", begin):
            with boss.transaction():
                [(answer,)] = boss.execute(f"select holdfast.lock_end_session({pid}, {entry})".encode()).fetchall()
            assert answer.startswith("refused: first begin an audit entry"), entry
        [(stands,)] = boss.execute(f"select {begin}".encode()).fetchall()
        assert plain.execute("select 1").fetchone() == (1,)
        assert boss.execute(f"select holdfast.lock_end_session({pid}, {stands})".encode()).fetchone() == ("ended",)
