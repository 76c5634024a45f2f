"""What the page on roles grants, run as it stands: a worker does its work, and nothing to others'; an operator may."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.errors import InsufficientPrivilege

import holdfast
from holdfast import commands as operator
from holdfast.database.privileges import FOR_OPERATORS
from holdfast.database.statements import statements
from holdfast.testing.server import until
from tests.cli.command import columns_of, printed
from tests.conftest import MAJORS, NEWEST, fresh, server

PAGE = (Path(__file__).resolve().parents[3] / "docs/howto/roles-and-poolers.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Who uses them")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"^```sql\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)
FOR_PSQL = {"lock_key"}
"""Functions that no statement of ours calls, for other languages."""
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
        for role in ("operator", "worker"):
            server(major).execute(f"drop owned by {role}", dbname=name)
            server(major).execute(f"drop role {role}")


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


def test_the_page_grants_every_function_that_is_called_and_those_for_operators_to_operators_alone() -> None:
    """A function that is added is granted by the page, to one of the two, or this fails."""
    texts = [each.sql for each in statements("postgres").values()]
    called = set(re.findall(r"\bholdfast\.(\w+)\(", "".join(texts)))
    assert called >= FOR_OPERATORS
    assert granted("operator") == FOR_OPERATORS
    assert granted("worker") == called - FOR_OPERATORS | FOR_PSQL


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
        worker.operations.reset("outside", **JANE)
        assert worker.operation("outside").run(lambda: 5).result == 5
        with pytest.raises(holdfast.PolicyDenied, match="is closed"):
            worker.gates.require("dot_config")
        assert mine.execute("select holdfast.lock_key('import') is not null").fetchone() == (True,)
        assert mine.execute("select x from public.work order by 1").fetchall() == [(1,), (2,)]
    assert worker.migrate() == []
    assert [each.ok for each in worker.leases.probe()] == [True] * 7


def test_a_worker_takes_nothing_away_and_neither_reads_nor_forges_the_record(
    urls: tuple[str, str], worker: holdfast.Client
) -> None:
    with holdfast.Client(urls[0]) as victim, victim.lease("import") as grant, victim.lock("import"):
        [held] = victim.locks.list()
        attempts: list[tuple[str, Callable[[], object]]] = [
            ("lease_force_release", lambda: worker.leases.force_release("import", **JANE)),
            ("lease_force_release_if", lambda: worker.leases.force_release("import", fence=grant.fence, **JANE)),
            ("audit_begin", lambda: worker.locks.end_session(held.pid or 0, **JANE)),
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
            "lease_recall": f"'import', {grant.fence}",
            "lease_wipe": f"'import', '{grant.token}'",
            "lock_end_session": f"{held.pid}",
            "audit_begin": "'a', 's', 'jane', 'x'",
            "audit_note": "1, 1, null",
            "audit_end": "1, 'done'",
            "audit_list": "",
            "wal_archive": "'k', 'e', 'p', 1, '[]'",
            "operation_expire": "1",
            "relay_remove": "'r'",
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
        with boss.gate("dot_config", **JANE):
            assert worker.gates.require("dot_config").holder == "jane"
            reasons = [columns_of(printed("--url", url, "gates"))[0]["reason"] for url in urls]
            assert reasons == ["-", JANE["reason"]], "the reason is in the record, which a worker may not read"
        guard = boss.lease("system:guard").acquire()
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


def test_the_doctor_is_content_with_both(urls: tuple[str, str]) -> None:
    for url, words in zip(urls, ("is a worker, and leaves audit_begin, ", "also those for operators"), strict=True):
        with holdfast.Client(url) as client:
            [found] = [each for each in client.doctor().findings if each.check == "privileges"]
            assert (found.status, words in found.found) == ("ok", True), found
