"""The object contract on every engine, in both flavours; and what only our own engines can show."""

from __future__ import annotations

import fcntl
import gc
import sqlite3
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import MatchVersion, MustCreate, Unconditional
from holdfast.testing import Proxy
from holdfast.testing.object_contract import ObjectContract, drain
from holdfast.testing.server import until
from tests.children import PATIENCE, query
from tests.conftest import MAJORS, shared
from tests.pairs import CONTRACT
from tests.user_connections import ALCHEMY, POSTGRES, settled, subject

Connect = Callable[..., Any]


@pytest.fixture
def url(emptied: str) -> str:
    return emptied


@CONTRACT
class TestObjects(ObjectContract):
    pass


KINDS = [
    "psycopg", "psycopg-async", "sqlite3", "sqlite3-async", "sqlite3-manual", "connection-psycopg2", "session-pg8000",
    "scoped-asyncpg-async", "session-pysqlite", "session-aiosqlite-async",
]  # fmt: skip
"""Each database driver once, because statements are sent through it, and each wrapper of SQLAlchemy. That every kind of
connection is told apart is shown where leases protect transactions."""


@pytest.mark.parametrize("kind", KINDS)
async def test_a_write_in_the_users_transaction_stays_or_goes_with_it(kind: str, sqlite_url: str) -> None:
    where = shared(MAJORS[-1]) if kind in POSTGRES or kind in ALCHEMY else sqlite_url
    async with subject(kind, where) as each:
        objects, outside = each.client.objects, each.other.objects
        for end in (each.rollback, each.commit):
            await each.begin()
            await each.write("mine")
            put = await settled(objects.put_if("tx", each.name, {"a": 1}, MustCreate(), tx=each.connection))
            with pytest.raises(holdfast.AlreadyExists):
                await settled(objects.put_if("tx", each.name, 2, MustCreate(), tx=each.connection))
            with pytest.raises(holdfast.Conflict):
                await settled(objects.delete_if("tx", each.name, put.version + 1, tx=each.connection))
            assert outside.get("tx", each.name) is None, "nobody sees it before the commit"
            await end()
        assert outside.get("tx", each.name) == put
        assert each.rows() == ["mine"], "the refusals left the transaction usable"
        await each.begin()
        await each.write("gone")
        raw = await settled(objects.put_if("tx", each.name, b"\x00", MatchVersion(put.version), tx=each.connection))
        await settled(objects.delete_if("tx", each.name, raw.version, tx=each.connection))
        await each.commit()
        assert outside.get("tx", each.name) is None


def test_a_connection_without_a_transaction_is_refused_before_anything_is_written(postgres_url: str) -> None:
    with (
        holdfast.Client(postgres_url) as client,
        psycopg.connect(postgres_url, autocommit=True) as bare,
        closing(sqlite3.connect(":memory:")) as elsewhere,
    ):
        with pytest.raises(ValueError, match="autocommit"):
            client.objects.put_if("box", "b-1", 1, MustCreate(), tx=bare)
        with pytest.raises(ValueError, match="the objects are in postgresql"):
            client.objects.put_if("box", "b-1", 1, MustCreate(), tx=elsewhere)
        with pytest.raises(TypeError, match=r"cannot use the transaction of a builtins\.str"):
            client.objects.delete_if("box", "b-1", 1, tx="conn")
        assert client.objects.list("box") == []


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_write_whose_answer_was_lost_is_done_once(postgres_url: str, moment: str) -> None:
    """The connection dies before the request arrives, or before the answer does: what compares is asked after."""
    with Proxy(postgres_url) as proxy, holdfast.Client(proxy.url) as client:
        objects, cursor = client.objects, client.objects.cursor()

        def broken(write: Callable[[], Any]) -> Any:
            for warm in (
                lambda: objects.put_if("x", "x", 1, MatchVersion(1)),
                lambda: objects.put_if("x", "x", 1, MatchVersion(1), labels={}),
                lambda: objects.delete_if("x", "x", 1),
            ):
                with pytest.raises(holdfast.Conflict):
                    warm()  # prepared by now: the next message is the statement itself
            if moment == "before":
                proxy.cut()
                return write()
            written = changes()
            proxy.stall("to_client")
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(write)
                until(lambda: changes() != written, what="the server has done it")
                proxy.cut()
                proxy.heal()
                return answer.result(PATIENCE)

        def changes() -> Any:
            return query(postgres_url, "select count(*) from holdfast.object_change")

        record = broken(lambda: objects.put_if("box", "b-1", 1, MustCreate(), name="web"))
        assert record == objects.get("box", "b-1")
        second = broken(lambda: objects.put_if("box", "b-1", 2, MatchVersion(record.version)))
        assert second == objects.get("box", "b-1")
        third = broken(lambda: objects.put_if("box", "b-1", 3, MatchVersion(second.version), labels={"a": "b"}))
        assert third == objects.get("box", "b-1")
        broken(lambda: objects.delete_if("box", "b-1", third.version))
        assert [each.kind for each in drain(objects.watch(since=cursor))] == [
            "created",
            "updated",
            "updated",
            "deleted",
        ]


def test_of_many_records_only_those_are_read_that_are_asked_for(postgres_url: str) -> None:
    """Of a table that has just been filled there are no statistics yet. Where a page or a trim reads all of
    it, a sweep costs the square of what there is."""
    rows = "select 'box', n::text, null, '0', null, '{}', 1, now(), now() from generate_series(10000, 12999) n"
    query(postgres_url, f"insert into holdfast.object {rows}")
    logged = "select '9'::xid8, n, n, 'box', n::text, 'updated' from generate_series(1, 9000) n"
    query(postgres_url, f"insert into holdfast.object_change {logged}")
    for table, call, number in (
        ("object", "holdfast.object_list('box', '{}', '10100', 10)", 10),
        ("object_change", "holdfast.object_trim(104000)", 5000),
    ):
        with psycopg.connect(postgres_url) as mine:
            mine.execute(f"select {call}".encode())
            read = "select seq_tup_read + idx_tup_fetch from pg_stat_xact_user_tables where relname = %s"
            assert mine.execute(read, (table,)).fetchone() == (number,), call
    assert query(postgres_url, "select count(*) from holdfast.object_change") == [(5000,)]


def test_a_payload_is_text_or_bytes_for_whoever_calls_the_function(postgres_url: str) -> None:
    for wrong in ("null, -1", "'1', -1, raw => '\\x00'"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="either text or bytes"):
            query(postgres_url, f"select holdfast.object_put_if('box', 'b-1', {wrong})")
    assert query(postgres_url, "select count(*) from holdfast.object") == [(0,)]


def test_at_a_version_read_before_a_restore_an_object_can_be_written_and_its_version_rises(postgres_url: str) -> None:
    """The statement that compares and swaps also checks that versions were raised since: else the long way."""
    with holdfast.Client(postgres_url) as client:
        record = client.objects.put_if("box", "b-1", 1, MustCreate())
        query(
            postgres_url, "update holdfast.meta set our_schema = our_schema"
        )  # which a restored dump does to its xmin
        query(postgres_url, "select setval('holdfast.version', 1)")
        written = client.objects.put_if("box", "b-1", 2, MatchVersion(record.version))
        assert written.version > record.version
        assert client.objects.get("box", "b-1") == written
        with pytest.raises(holdfast.Conflict):
            client.objects.put_if("box", "b-1", 3, MatchVersion(record.version))


def test_a_role_needs_usage_and_execute_alone(postgres_url: str) -> None:
    name = f"role_{postgres_url.rpartition('_')[2]}"
    for sql in (
        f"create role {name} login", f"grant usage on schema holdfast to {name}",
        f"grant execute on all functions in schema holdfast to {name}",
    ):  # fmt: skip
        query(postgres_url, sql)
    with holdfast.Client(postgres_url.replace("//postgres@", f"//{name}@")) as client:
        cursor = client.objects.cursor()
        record = client.objects.put_if("box", "b-1", 1, MustCreate(), name="web")
        assert client.objects.list("box") == [client.objects.get_by_name("box", "web")] == [record]
        client.objects.delete_if("box", "b-1", record.version)
        assert len(drain(client.objects.watch(since=cursor))) == 2


@pytest.mark.parametrize("ahead", [0, 3600])
def test_versions_rise_over_a_new_boot_and_cursors_that_saw_lost_changes_expire(sqlite_url: str, ahead: int) -> None:
    """WAL mode may lose the last commits when the machine itself goes down, and its clock may be behind after that."""
    with holdfast.Client(sqlite_url) as client:
        client.objects.put_if("box", "b-0", 1, MustCreate())
        query(
            sqlite_url,
            f"update holdfast_object_version set first = (select micros from holdfast_clock) + {ahead} * 1000000",
        )
        kept, cursor = client.objects.put_if("box", "b-1", 1, MustCreate()), client.objects.cursor()
        lost, late = client.objects.put_if("box", "b-2", 1, MustCreate()), client.objects.cursor()
    query(sqlite_url, f"delete from holdfast_object_change where version = {lost.version}")
    query(sqlite_url, "delete from holdfast_object where id = 'b-2'")
    query(sqlite_url, "delete from holdfast_object_change where kind = 'deleted'")
    query(sqlite_url, "update holdfast_fence set boot = 'another'")
    with holdfast.Client(sqlite_url) as client:
        assert client.objects.get("box", "b-1") == kept
        with pytest.raises(holdfast.CursorExpired):
            client.objects.watch(since=late).next(timeout=0)
        assert client.objects.put_if("box", "b-1", 2, MatchVersion(kept.version)).version > lost.version
        assert [each.id for each in drain(client.objects.watch(since=cursor))] == ["b-1"]


def test_on_a_file_a_write_waits_for_a_transaction_of_the_users_and_compares_with_what_that_left(
    sqlite_url: str,
) -> None:
    path = sqlite_url.removeprefix("sqlite:///")
    record = holdfast.Client(sqlite_url).objects.put_if("box", "b-1", 1, MustCreate())
    with (
        holdfast.Client(sqlite_url) as client,
        closing(sqlite3.connect(path)) as mine,
        Path(f"{path}.holdfast-turn").open("rb") as turn,
        ThreadPoolExecutor(1) as pool,
    ):

        def taken() -> bool:
            try:
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            fcntl.flock(turn, fcntl.LOCK_UN)
            return False

        written = client.objects.put_if("box", "b-1", 2, MatchVersion(record.version), tx=mine)
        waiting = pool.submit(client.objects.put_if, "box", "b-1", 3, MatchVersion(record.version))
        until(taken, what="it is its turn, and it waits")
        mine.commit()
        refused = waiting.exception(PATIENCE)
        assert isinstance(refused, holdfast.Conflict)
        assert refused.current == written.version
        assert client.objects.get("box", "b-1") == written


class Interrupt:
    """KeyboardInterrupt on the way into a function, where the interpreter looks for signals: number ``at`` of all that
    are called in the block, and not by the garbage collector, where nobody would hear of it."""

    def __init__(self, at: int) -> None:
        self.left, self.raised = at, False

    def __enter__(self) -> None:
        gc.disable()
        sys.settrace(self._called)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        gc.enable()

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if frame.f_code.co_name not in ("__exit__", "__del__") or frame.f_code.co_filename != __file__:
            self.left -= 1
            if self.left < 0 and not self.raised:
                self.raised = True
                raise KeyboardInterrupt


def test_a_write_that_was_interrupted_anywhere_leaves_the_client_usable_and_nothing_locked(either: str) -> None:
    """Also when the exception is kept, and with it the frames of its traceback, as an interactive prompt does."""
    kept: list[KeyboardInterrupt] = []
    with holdfast.Client(either) as client, holdfast.Client(either) as other:
        record = client.objects.put_if("box", "b-1", 0, MustCreate())
        written: list[dict[str, Any]] = [{}, {"labels": {"a": "b"}}]
        for more in written:  # which are written in two ways
            for at in range(10_000):
                interrupt = Interrupt(at)
                try:
                    with interrupt:
                        client.objects.put_if("box", "b-1", at, MatchVersion(record.version), **more)
                except KeyboardInterrupt as error:
                    kept.append(error)
                if not interrupt.raised:
                    break
                assert client.objects.get("box", "b-1") is not None
                record = other.objects.put_if("box", "b-1", "from here", Unconditional())
            record = other.objects.put_if("box", "b-1", "from here", Unconditional())
        assert len(kept) > 50


def test_a_version_that_was_rolled_back_is_nobody_elses(either: str) -> None:
    """A writer that read it in that transaction would overwrite what another has written since."""
    mine: Any = sqlite3.connect(either.removeprefix("sqlite:///")) if "sqlite" in either else psycopg.connect(either)
    with closing(mine), holdfast.Client(either) as client:
        record = client.objects.put_if("box", "b-1", "before", MustCreate())
        undone = client.objects.put_if("box", "b-1", "undone", MatchVersion(record.version), tx=mine)
        mine.rollback()
        kept = client.objects.put_if("box", "b-1", "by another", MatchVersion(record.version))
        assert kept.version != undone.version
        with pytest.raises(holdfast.Conflict):
            client.objects.put_if("box", "b-1", "by one who has never seen it", MatchVersion(undone.version))
        assert client.objects.get("box", "b-1") == kept


def test_the_log_is_trimmed_and_who_is_too_late_is_told(either: str) -> None:
    """The numbers are moved ahead instead of written a hundred thousand times."""
    with holdfast.Client(either) as client:
        objects = client.objects
        cursor = objects.cursor()
        objects.put_if("box", "b-0", 0, MustCreate())
        assert [each.id for each in drain(objects.watch(since=cursor))] == ["b-0"]
        if not either.startswith("sqlite"):
            query(either, "select setval('holdfast.object_change_number_seq', 102398)")
        objects.put_if("box", "b-1", 0, MustCreate())
        if either.startswith("sqlite"):
            query(either, "update holdfast_object_change set number = 102399 where id = 'b-1'")
        held = objects.cursor()
        for number in range(2, 4):
            objects.put_if("box", f"b-{number}", 0, MustCreate())
        kept = query(either, f"select count(*) from holdfast{'_' if 'sqlite' in either else '.'}object_change")
        assert kept == [(3,)]
        with pytest.raises(holdfast.CursorExpired):
            objects.watch(since=cursor).next(timeout=0)
        assert [each.id for each in drain(objects.watch(since=held))] == ["b-2", "b-3"]


def test_the_log_is_trimmed_where_all_is_written_in_transactions_of_the_users(postgres_url: str) -> None:
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as mine:
        client.objects.put_if("box", "b-0", 0, MustCreate())
        query(postgres_url, "select setval('holdfast.object_change_number_seq', 102399)")
        client.objects.put_if("box", "b-1", 0, MustCreate(), tx=mine)
        mine.commit()
    assert query(postgres_url, "select id from holdfast.object_change") == [("b-1",)]


def test_between_two_attempts_of_an_update_there_is_a_pause_of_chance(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who have lost the same race would meet again in the next one."""
    pauses: list[float] = []
    monkeypatch.setattr("holdfast.objects.objects.sleep", pauses.append)
    with holdfast.Client(sqlite_url) as client, holdfast.Client(sqlite_url) as other:
        client.objects.put_if("box", "b-1", 0, MustCreate())

        def change(record: Any) -> int:
            other.objects.put_if("box", "b-1", 0, Unconditional())
            return 1

        with pytest.raises(holdfast.Conflict):
            client.objects.update("box", "b-1", change)
    assert len({*pauses}) == 9
    assert all(0 <= pause <= min(0.002 * 2**attempt, 0.25) for attempt, pause in enumerate(pauses))
