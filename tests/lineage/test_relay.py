"""Relays publish everything, in order, at least once, also when a process dies."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.lineage import Contract, Lineage
from holdfast.testing import Postgres
from tests.children import PATIENCE, eventually, query
from tests.conftest import MAJORS, NEWEST, migrated, server
from tests.lineage.recording_sink import RecordingSink, deduplicated
from tests.lineage.sample_operations import key
from tests.operations.logs import change
from tests.pairs import EACH_ONCE


@EACH_ONCE
def test_a_relay_that_dies_before_it_has_moved_tells_the_same_again(either: str, connect: Any) -> None:
    class Crash(BaseException):
        pass

    def die(events: Any) -> None:
        raise Crash

    sink = RecordingSink()
    client, other = connect(either), connect(either)
    with holdfast.Client(either) as runs:
        for number in range(3):
            runs.operation(key("d", number)).run(lambda: 1)
    sink.after = die
    with pytest.raises(Crash):
        client.relay("r", sink).step()
    sink.after = lambda events: None
    assert other.relay("r", sink).step() == 6
    assert len(sink) == 12
    assert [each.key for each in deduplicated(sink)] == [key("d", number).digest for number in (0, 0, 1, 1, 2, 2)]


def test_one_that_was_superseded_cannot_move_the_cursor(either: str) -> None:
    """A relay hangs in its sink, its lease is taken away, and another relay continues. When the first returns, its save
    is refused and the cursor is where the other one left it."""
    slow, quick = RecordingSink(), RecordingSink()
    with holdfast.Client(either) as client, holdfast.Client(either) as other:
        client.operation("a").run(lambda: 1)

        def supersede(events: Any) -> None:
            assert other.leases.force_release("@relay:r", actor="jane", reason="it hangs")
            other.operation("b").run(lambda: 1)
            assert other.relay("r", quick).step() == 4

        slow.after = supersede
        with pytest.raises((holdfast.FencedOut, holdfast.LeaseLost)):
            client.relay("r", slow).step()
        assert (len(slow), len(quick)) == (2, 4)
        assert client.relay("r", quick).step() == 0
        assert [each.told for each in client.relays.list()] == [4]


def test_what_is_told_while_it_is_compared_is_not_missing(sqlite_url: str) -> None:
    sink = RecordingSink()
    with holdfast.Client(sqlite_url) as client:
        relay = client.relay("r", sink)

        def published() -> Iterator[str]:
            yield from [json.dumps(each.as_dict()) for each in sink]
            client.operation("b").run(int)
            relay.step()

        client.operation("a").run(int)
        relay.step()
        assert {each.what for each in client.relays.verify(published(), relay="r").problems} == {"waiting"}
        assert client.relays.verify(published(), relay="r").problems == ()


@EACH_ONCE
def test_it_runs_under_a_lease_and_another_goes_on(either: str, connect: Any) -> None:
    sink = RecordingSink()
    with holdfast.Client(either) as client:
        relays = [connect(either).relay("r", sink, poll=0.01) for _ in range(2)]
        threads = [threading.Thread(target=each.run, daemon=True) for each in relays]
        for thread in threads:
            thread.start()
        client.operation("a").run(lambda: 1)
        eventually(lambda: len(sink) == 2, "it is published")
        [record] = client.relays.list()
        assert record.holder in {each.status().holder for each in relays}
        with pytest.raises(holdfast.NotAcquired):
            client.relay("r", sink).step()
        first = next(each for each in relays if each.status().leading)
        first.stop()
        client.operation("b").run(lambda: 1)
        eventually(lambda: len(sink) == 4, "the other one goes on")
        relays[1 - relays.index(first)].stop()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
        assert sink.received() == [(label, type) for label in "ab" for type in ("START", "COMPLETE")]
        assert [each.holder for each in client.relays.list()] == [None]


def test_after_a_failover_and_after_a_restore_the_cursor_is_right() -> None:
    sink = RecordingSink()
    with Postgres.create() as primary:
        url = migrated(primary.database("app"))
        standby = primary.standby(synchronous=True)
        with holdfast.Client(url) as client:
            client.operation("a").run(lambda: 1)
            client.relay("r", sink).step()
            client.operation("b").run(lambda: 1)
        primary.kill()
        standby.promote()
        with holdfast.Client(f"postgresql://postgres@127.0.0.1:{standby.port}/app") as client:
            client.operation("c").run(lambda: 1)
            client.relay("r", sink).step()
    assert sink.received() == [(name, type) for name in "abc" for type in ("START", "COMPLETE")]


def test_after_a_restore_what_was_not_told_is_told_and_nothing_else() -> None:
    """In a restored database transaction ids start again, and of two concurrent commits the first may have the higher
    place."""
    source, target, sink = server(MAJORS[0]), server(NEWEST), RecordingSink()
    if not (target.binaries.folder / "pg_dump").exists():
        pytest.skip("no pg_dump beside the server")
    url = migrated(source.database())
    with holdfast.Client(url) as client, psycopg.connect(url, autocommit=True) as mine:
        client.operation("early", tx=mine).run(lambda: 1)
        change(url, "update {wal} set place = 1000")
        client.relay("r", sink).step()
        assert sink.received() == [("early", "START"), ("early", "COMPLETE")]
        client.operation("late", tx=mine).run(lambda: 1)
        client.operation("c").run(lambda: 1)
    dump = target.folder / "relay.sql"
    target.binaries.run("pg_dump", "--dbname", url, "--file", str(dump))
    restored = target.database()
    target.binaries.run(
        "psql", "--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1", f"--dbname={restored}", f"--file={dump}"
    )
    dump.unlink()
    before = list(sink)
    with holdfast.Client(restored) as client:
        client.operation("d").run(lambda: 1)
        client.relay("r", sink).step()
        assert list(client.relays.events()) == sink, "the order is the same, too"
    assert [(each.label, each.type) for each in sink[len(before) :]] == [
        (name, type) for name in ("late", "c", "d") for type in ("START", "COMPLETE")
    ]


def test_a_relay_is_removed_for_the_record(either: str) -> None:
    with holdfast.Client(either) as client:
        client.relay("r", RecordingSink()).step()
        assert client.relays.remove("r", actor="jane", reason="no longer run")
        assert not client.relays.remove("r", actor="jane", reason="no longer run")
        assert client.relays.list() == []
        [entry] = client.audit.list()
        assert (entry.action, entry.subject, entry.actor, entry.outcome) == ("relay_remove", "r", "jane", "done")


def test_a_relay_that_somebody_runs_is_not_removed(either: str) -> None:
    """It would start again from the beginning and publish everything twice."""
    sink, runs, goes_on = RecordingSink(), threading.Event(), threading.Event()

    def hold_up(events: Any) -> None:
        runs.set()
        goes_on.wait(PATIENCE)

    sink.before = hold_up
    with holdfast.Client(either) as client, holdfast.Client(either) as operator:
        client.operation("a").run(lambda: 1)
        relay = client.relay("r", sink)
        thread = threading.Thread(target=relay.run)
        thread.start()
        try:
            assert runs.wait(PATIENCE)
            with pytest.raises(holdfast.NotAcquired, match="@relay:r"):
                operator.relays.remove("r", actor="jane", reason="no longer run")
        finally:
            goes_on.set()
            relay.stop()
            thread.join(PATIENCE)
        assert [each.told for each in client.relays.list()] == [2]
        assert operator.relays.remove("r", actor="jane", reason="no longer run")
        removed, refused = client.audit.list()
        assert (removed.action, refused.action, refused.actor, refused.subject) == (
            "relay_remove", "relay.remove", "jane", "r",
        )  # fmt: skip
        assert (refused.outcome or "").startswith("refused: lease '@relay:r' is held by")


def test_a_lease_of_another_name_moves_no_relay(either: str) -> None:
    """A superseded relay, or any other process, may still hold some other lease."""
    with holdfast.Client(either) as client:
        client.operation("a").run(lambda: 1)
        client.relay("r", RecordingSink()).step()
        before = client.relays.list()
        with client.lease("mine") as grant:
            about = {"name": "r", "lease": grant.name, "token": grant.token, "tries": "{}"}
            moved = {"horizon": "0", "place": 0, "fence": 0, "told": 0, "ended": "[]", "parked": "[]", "freed": "[]"}
            for statement, more in (
                ("relay_open", {}),
                ("relay_begin", {}),
                ("relay_move", {**moved, "problem": None, "taken": None}),
            ):
                row: Any
                try:
                    [row] = client._engine.call(statement, {**about, **more})
                except holdfast.EngineError as error:
                    row = {"state": getattr(error, "sqlstate", error)}
                assert row["state"] in ("fenced", "HF001"), statement
        assert client.relays.list() == before


def test_bad_input_is_refused_before_anything_is_written(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        wrongs: list[dict[str, Any]] = [{"batch": 0}, {"tries": True}, {"poll": 0.0}, {"ttl": 0.0}]
        for wrong in wrongs:
            with pytest.raises(ValueError, match=next(iter(wrong))):
                client.relay("r", RecordingSink(), **wrong)
        with pytest.raises(TypeError, match=r"sink\.publish must be a function"):
            client.relay("r", object())  # type: ignore[arg-type]
        lineages: list[dict[str, Any]] = [{"inputs": "raw"}, {"outputs": [1]}, {"contract": ("c", "1")}]
        for lineage in lineages:
            with pytest.raises(TypeError, match=next(iter(lineage))):
                Lineage(**lineage)
        with pytest.raises(ValueError, match="version of a contract"):
            Contract("c", "")
        assert client.relays.list() == []


def test_importing_the_package_imports_no_sink_and_no_driver() -> None:
    look = (
        "import sys; from holdfast.lineage import Contract, Lineage; "
        "heavy = {'neo4j', 'openlineage', 'psycopg', 'rdflib', 'holdfast.lineage.relay', 'sqlite3'}; "
        "loaded = heavy & set(sys.modules); "
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", look], check=True, timeout=240)


def test_the_cursor_does_not_move_to_a_row_that_a_restore_has_lost(either: str) -> None:
    """The relay would skip what is written after the restore."""
    prefix = "holdfast_" if either.startswith("sqlite") else "holdfast."

    class SetBack:
        def publish(self, events: Any) -> None:
            change(either, "delete from {wal}")

    with holdfast.Client(either) as client:
        client.operation("lost").run(lambda: 1)
        with pytest.raises(holdfast.SinkDown, match="set back"):
            client.relay("catalogue", SetBack()).step()
        assert query(either, f"select place, told from {prefix}relay") == [(0, 0)]
