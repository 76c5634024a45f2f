"""Watching under fire: transactions that commit out of order, connections that are cut, a listener that is deaf."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import MatchVersion, MustCreate
from holdfast.objects.changes import Position
from holdfast.testing import Proxy
from holdfast.testing.object_contract import drain
from tests.children import PATIENCE, eventually, query
from tests.pairs import EACH_ONCE
from tests.raw_session import trials, waiters


def test_a_slow_transaction_is_not_skipped_and_holds_up_nobody(postgres_url: str) -> None:
    """The trap of every log with a serial number: what was numbered first is committed last."""
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as slow:
        objects = client.objects
        watch = objects.watch(since=objects.cursor())
        objects.put_if("box", "slow", 1, MustCreate(), tx=slow)
        objects.put_if("box", "fast", 1, MustCreate())
        assert [each.id for each in drain(watch)] == ["fast"], "although an older transaction is open"
        assert drain(watch) == []
        slow.commit()
        assert [each.id for each in drain(watch)] == ["slow"]
        assert drain(watch) == []


def test_a_look_does_not_read_again_what_was_told_while_an_old_transaction_stays_open(postgres_url: str) -> None:
    """It would read every change since that transaction began: with 20,000 of them a poll took fifty times as long."""
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as old:
        client.objects.put_if("box", "old", 1, MustCreate(), tx=old)
        for number in range(20):
            client.objects.put_if("box", f"b-{number}", 1, MustCreate())
        cursor = client.objects.cursor()
        client.objects.put_if("box", "new", 1, MustCreate())
        old.commit()
        asked = Position.parse(cursor, "postgres").parameters()
        with psycopg.connect(postgres_url) as mine:
            mine.execute("set local enable_seqscan = off")  # which for so few it would do
            rows = mine.execute(
                "select id from holdfast.object_changes("
                "%(space)s, %(since)s, %(newest)s, null, null, null, null, 500, false)",
                asked,
            ).fetchall()
            [read] = mine.execute(
                "select seq_tup_read + idx_tup_fetch from pg_stat_xact_user_tables where relname = 'object_change'"
            ).fetchall()
        assert rows == [("new",), ("old",), (None,)]
        assert read == (4,), "two changes, and the newest of either snapshot"


def test_a_write_in_a_session_whose_triggers_are_off_is_told(postgres_url: str) -> None:
    """``session_replication_role = replica``, as bulk loads set it, leaves out plain triggers."""
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as mine:
        watch = client.objects.watch(since=client.objects.cursor())
        mine.execute("set session_replication_role = replica")
        client.objects.put_if("box", "b-1", 1, MustCreate(), tx=mine)
        mine.commit()
        assert [each.id for each in drain(watch)] == ["b-1"]


def test_an_object_is_told_in_the_order_of_its_writes_whatever_their_transactions_numbers(postgres_url: str) -> None:
    """The transaction that began first writes last: in the order of transaction ids it would come first."""
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as old:
        objects, cursor = client.objects, client.objects.cursor()
        old.execute("create table mine (a int)")  # has a number from here on
        first = objects.put_if("box", "b-1", 1, MustCreate())
        objects.put_if("box", "b-1", 2, MatchVersion(first.version), tx=old)
        old.commit()
        changes = drain(objects.watch(since=cursor))
        assert [each.kind for each in changes] == ["created", "updated"]
        assert [each.version for each in changes] == sorted(each.version for each in changes)


def test_of_two_transactions_the_one_that_commits_first_is_told_first(postgres_url: str) -> None:
    """Read in one batch, so that only the order of the commits distinguishes them."""
    with (
        holdfast.Client(postgres_url) as client,
        psycopg.connect(postgres_url) as first,
        psycopg.connect(postgres_url) as second,
    ):
        objects, cursor = client.objects, client.objects.cursor()
        late = [objects.put_if("box", f"late-{number}", 1, MustCreate(), tx=first) for number in range(2)]
        with first.transaction(force_rollback=True):
            objects.put_if("box", "undone", 1, MustCreate(), tx=first)
        objects.put_if("box", "soon", 1, MustCreate(), tx=second)
        objects.put_if("box", "at once", 1, MustCreate())
        second.commit()
        objects.delete_if("box", "late-0", late[0].version, tx=first)
        first.commit()
        watch = objects.watch(since=cursor)
        changes = drain(watch)
        wanted = [("at once", "created"), ("soon", "created"), ("late-0", "created"), ("late-1", "created")]
        assert [(each.id, each.kind) for each in changes] == [*wanted, ("late-0", "deleted")]
        assert changes[2].version == late[0].version, "the version is the one that was given"
        for number, change in enumerate(changes):
            assert drain(objects.watch(since=change.cursor)) == changes[number + 1 :]


def test_a_batch_that_was_not_read_to_its_end_goes_on_where_it_was(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though others commit meanwhile what was written before."""
    monkeypatch.setattr("holdfast.objects.watch.BATCH", 2)
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as slow:
        objects, cursor = client.objects, client.objects.cursor()
        objects.put_if("box", "slow", 1, MustCreate(), tx=slow)
        for number in range(5):
            objects.put_if("box", f"b-{number}", 1, MustCreate())
        watch = objects.watch(since=cursor)
        changes = [watch.next(timeout=0) for _ in range(3)]
        slow.commit()
        objects.put_if("box", "last", 1, MustCreate())
        changes += drain(objects.watch(since=watch.cursor))
        assert [each.id for each in changes if each] == ["b-0", "b-1", "b-2", "b-3", "b-4", "slow", "last"]


def test_an_object_made_after_a_delete_has_the_higher_version_although_it_was_numbered_before(
    postgres_url: str,
) -> None:
    """A creator that waits for another transaction got its id before that transaction deleted the object again."""
    with (
        holdfast.Client(postgres_url) as client,
        psycopg.connect(postgres_url) as mine,
        psycopg.connect(postgres_url, autocommit=True) as onlooker,
        ThreadPoolExecutor(1) as pool,
    ):
        objects, cursor = client.objects, client.objects.cursor()
        first = objects.put_if("box", "b-1", 1, MustCreate(), tx=mine)
        waiting = pool.submit(objects.put_if, "box", "b-1", 2, MustCreate())
        eventually(lambda: waiters(onlooker) == 1, "the other one waits for us")
        objects.delete_if("box", "b-1", first.version, tx=mine)
        mine.commit()
        second = waiting.result(PATIENCE)
        changes = drain(objects.watch(since=cursor))
        assert [each.kind for each in changes] == ["created", "deleted", "created"]
        assert second.version == changes[-1].version > changes[1].version


def test_what_was_rolled_back_is_not_told(postgres_url: str) -> None:
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as mine:
        watch = client.objects.watch(since=client.objects.cursor())
        client.objects.put_if("box", "gone", 1, MustCreate(), tx=mine)
        with mine.transaction(force_rollback=True):
            client.objects.put_if("box", "undone", 1, MustCreate(), tx=mine)
        client.objects.put_if("box", "kept", 1, MustCreate(), tx=mine)
        assert drain(watch) == []
        mine.commit()
        assert [each.id for each in drain(watch)] == ["gone", "kept"]


Commits = dict[int, tuple[float, float]]
"""By version: when the commit was asked for, and when it was answered."""


def write(url: str, number: int, writes: int, seed: int, commits: Commits) -> None:
    """Transactions of different lengths that overlap: some begin early, some are rolled back; and shared objects."""
    chance = random.Random(seed)
    with holdfast.Client(url) as client, psycopg.connect(url) as mine:
        for turn in range(writes):
            if chance.random() < 0.5:
                mine.execute("select pg_current_xact_id()")
            threading.Event().wait(chance.random() * 0.01)
            record = client.objects.put_if("box", f"{number}-{turn}", turn, MustCreate(), tx=mine)
            threading.Event().wait(chance.random() * 0.01)
            asked_at = time.monotonic()
            if chance.random() < 0.2:
                mine.rollback()
            else:
                mine.commit()
                commits[record.version] = (asked_at, time.monotonic())
            asked_at = time.monotonic()
            new = client.objects.update("box", f"shared-{chance.randrange(3)}", lambda record: record.payload + 1)
            commits[new.version] = (asked_at, time.monotonic())


def out_of_order(changes: list[Any], commits: Commits) -> list[Any]:
    """Changes that come after a change whose commit began when their own commit was already answered."""
    latest, late = 0.0, []
    for change in changes:
        asked_at, answered_at = commits[change.version]
        if answered_at < latest:
            late.append(change)
        latest = max(latest, asked_at)
    return late


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_nothing_is_missed_or_repeated_while_writers_overlap_and_connections_are_cut(
    postgres_url: str, flavour: str
) -> None:
    """Each watcher continues from a cursor, sometimes in a new watch; it receives exactly the changes of the log."""
    seed = random.randrange(10**6)
    changes: list[Any] = []
    commits: Commits = {}
    with Proxy(postgres_url) as proxy, holdfast.Client(postgres_url) as client:
        for number in range(3):
            client.objects.put_if("box", f"shared-{number}", 0, MustCreate())
        start, over = client.objects.cursor(), threading.Event()
        watcher = watch_blocking if flavour == "sync" else lambda *args: asyncio.run(watch_on_a_loop(*args))
        with ThreadPoolExecutor(5) as pool:
            watching = pool.submit(watcher, proxy.url, start, changes, over)
            writing = [
                pool.submit(write, postgres_url, number, trials(25), seed + number, commits) for number in range(4)
            ]
            while not all(each.done() for each in writing):
                threading.Event().wait(0.05)
                proxy.cut()
            for each in writing:
                each.result()
            done = query(postgres_url, "select version, type, id, kind from holdfast.object_change order by version")
            begun = {each[0] for each in done[:3]}
            wanted = [each for each in done if each[0] not in begun]
            try:
                eventually(lambda: len(changes) >= len(wanted), "everything is returned")
            finally:
                over.set()
            watching.result(PATIENCE)
    assert sorted((each.version, each.type, each.id, each.kind) for each in changes) == wanted, f"seed {seed}"
    by_object = defaultdict(list)
    for change in changes:
        by_object[change.id].append(change.version)
    assert all(versions == sorted(versions) for versions in by_object.values()), f"out of order, seed {seed}"
    assert out_of_order(changes, commits) == [], f"not in the order of the commits, seed {seed}"


def watch_blocking(url: str, cursor: str, changes: list[Any], over: threading.Event) -> None:
    while not over.is_set():
        with holdfast.Client(url) as client, client.objects.watch(since=cursor) as watch:
            for _ in range(40):
                with suppress(holdfast.EngineError):  # cut, and cut again: the watch goes on from where it was
                    change = watch.next(timeout=0.2) if not over.is_set() else None
                    if change is not None:
                        changes.append(change)
            cursor = str(watch.cursor)


async def watch_on_a_loop(url: str, cursor: str, changes: list[Any], over: threading.Event) -> None:
    while not over.is_set():
        async with holdfast.AsyncClient(url) as client, client.objects.watch(since=cursor) as watch:
            for _ in range(40):
                with suppress(holdfast.EngineError):
                    change = await watch.next(timeout=0.2) if not over.is_set() else None
                    if change is not None:
                        changes.append(change)
            cursor = str(watch.cursor)


def test_nobody_is_notified_when_nobody_watches(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as ear, holdfast.Client(postgres_url) as client:
        ear.execute('listen "holdfast.free"')
        client.objects.put_if("box", "b-1", 1, MustCreate())
        query(postgres_url, "select pg_notify('holdfast.free', 'ours')")
        assert [each.payload for each in ear.notifies(timeout=PATIENCE, stop_after=1)] == ["ours"], "and none before it"


def test_whoever_waits_is_woken_by_the_writer_and_not_by_its_own_asking(postgres_url: str) -> None:
    """All of them: there is something to read for everybody."""
    with holdfast.Client(postgres_url) as client, holdfast.Client(f"{postgres_url}?application_name=w") as other:
        watches = [client.objects.watch() for _ in range(2)]
        for watch in watches:
            watch._poll = 1e6
            watch.begin()
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(watch.next, timeout=2 * PATIENCE) for watch in watches]
            eventually(
                lambda: query(postgres_url, "select 1 from holdfast.object_watched where until > now()"), "armed"
            )
            other.objects.put_if("box", "b-1", 1, MustCreate())
            assert [each.result(PATIENCE).id for each in waiting] == ["b-1", "b-1"]  # type: ignore[union-attr]
        for watch in watches:
            watch.close()


@EACH_ONCE
def test_a_watch_that_somebody_reads_is_refused_to_others(connect: Any, either: str) -> None:
    """Both would read the same batch, and each change would be returned twice."""
    watch, writer = connect(either).objects.watch(), connect(either).objects
    watch.begin()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(watch.next, timeout=2 * PATIENCE) for _ in range(2)]
        eventually(lambda: any(each.done() for each in waiting), "one of them is refused")
        [refused] = [each for each in waiting if each.done()]
        assert "another task or thread is reading this watch" in str(refused.exception())
        writer.put_if("box", "b-1", 1, MustCreate())
        [change] = [each.result(PATIENCE) for each in waiting if each is not refused]
        assert change.id == "b-1"
    assert watch.next(timeout=0) is None


def test_a_watch_outlives_a_database_that_is_away(postgres_url: str) -> None:
    with Proxy(postgres_url) as proxy, holdfast.Client(proxy.url) as client, holdfast.Client(postgres_url) as other:
        watch = client.objects.watch()
        watch.begin()
        proxy.reset()
        other.objects.put_if("box", "b-1", 1, MustCreate())
        with pytest.raises(holdfast.EngineError):
            watch.next(timeout=0.2)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(watch.next, timeout=2 * PATIENCE)
            proxy.heal()
            assert waiting.result(PATIENCE).id == "b-1"  # type: ignore[union-attr]


def test_a_cursor_of_a_time_that_the_database_has_not_seen_is_expired(postgres_url: str) -> None:
    """It is another database, or one that was set back to an earlier state: what comes is not what came after it, and
    nothing at all would be returned until as much has happened here as there."""
    with holdfast.Client(postgres_url) as client:
        space, snapshot, _ = client.objects.cursor().split("/")
        ahead = int(snapshot.split(":")[1]) + 1000
        client.objects.put_if("box", "b-1", 1, MustCreate())
        with pytest.raises(holdfast.CursorExpired):
            client.objects.watch(since=f"{space}/{ahead}:{ahead}:/").next(timeout=0)


def test_a_cursor_says_the_same_when_it_is_read_back() -> None:
    inside = "1/5:9:6,7/4.27798.0f/8:12:10/27799/10.27799.a0b1c2d3"
    for text, dialect in (
        ("17", "sqlite"),
        ("1/5:9:6,7/", "postgres"),
        ("1/5:9:6,7/4.27798.0", "postgres"),
        (inside, "postgres"),
    ):
        assert str(Position.parse(text, dialect)) == text


@pytest.mark.parametrize(
    "cursor",
    [
        "1/5:3:",
        "1/0:0:",
        "1/5:9:7,6",
        "1/5:9:9",
        "1/5:9:,",
        "1/٣:٣:",
        f"1/1:{10**18}:",
        f"{10**18}/1:1:",
        "1/5:9:/9:8:/1",
    ],
)
def test_a_cursor_that_no_server_would_take_is_refused_before_it_is_asked(cursor: str) -> None:
    with pytest.raises(ValueError, match="since must be the cursor of a change"):
        Position.parse(cursor, "postgres")


def test_a_watch_that_is_closed_tells_no_more_and_says_what_it_told(sqlite_url: str) -> None:
    """Although it has read more: a closed watch can be continued after the last change that it returned."""
    with holdfast.Client(sqlite_url) as client:
        watch = client.objects.watch(since=client.objects.cursor())
        for id in ("b-1", "b-2"):
            client.objects.put_if("box", id, 1, MustCreate())
        ids = []
        for change in watch:
            ids.append(change.id)
            watch.close()
        assert ids == ["b-1"]
        assert [each.id for each in drain(client.objects.watch(since=watch.cursor))] == ["b-2"]
