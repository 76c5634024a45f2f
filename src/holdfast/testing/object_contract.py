"""What every engine promises of objects, as tests. An engine is complete when they pass.

Subclass it as ``LeaseContract``, with the same two fixtures: ``url``, an empty and migrated database, and ``connect``,
which creates clients on it. The tests use public names only, and assert order and outcome, never speed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import holdfast
from holdfast import MatchVersion, MustCreate, Unconditional

Connect = Callable[..., Any]

PATIENCE = 60.0
"""Seconds to wait for something that will happen, however busy the machine is."""
PAYLOADS: list[Any] = [
    None, True, False, 0, -1, 2**70, 0.1, 1e300, "", "text", "é \u0000 \ud800 \U0001f600", [], [1, [None, "a"]], {},
    {"b": 1, "a": {"": [1.0, 1]}}, b"", b"\x00\xff", bytes(range(256)),
]  # fmt: skip


class ObjectContract:
    """Objects and watches, through public names."""

    def test_a_record_says_what_it_is(self, connect: Connect, url: str) -> None:
        before = datetime.now(UTC) - timedelta(seconds=5)
        record = connect(url).objects.put_if("box", "b-1", {"a": 1}, MustCreate(), name="web", labels={"team": "a"})
        assert (record.type, record.id, record.name, record.payload) == ("box", "b-1", "web", {"a": 1})
        assert record.labels == {"team": "a"}
        assert isinstance(record.version, int)
        assert record.version > 0
        assert before < record.created_at == record.updated_at < datetime.now(UTC) + timedelta(seconds=5)
        other = connect(url).objects
        assert other.get("box", "b-1") == record
        assert other.get_by_name("box", "web") == record
        assert other.list("box") == [record]

    def test_what_is_not_there_is_none(self, connect: Connect, url: str) -> None:
        objects = connect(url).objects
        objects.put_if("box", "b-1", 1, MustCreate(), name="web")
        assert objects.get("box", "b-2") is None
        assert objects.get("web", "b-1") is None
        assert objects.get_by_name("box", "b-1") is None
        assert objects.list("web") == []

    def test_a_payload_comes_back_as_it_was(self, connect: Connect, url: str) -> None:
        objects = connect(url).objects
        for number, payload in enumerate(PAYLOADS):
            assert objects.put_if("box", f"b-{number}", payload, MustCreate()).payload == payload
            stored = objects.get("box", f"b-{number}").payload
            assert (stored, type(stored)) == (payload, type(payload))
        buffer = bytearray(b"written")
        record = objects.put_if("box", "b-0", buffer, Unconditional())
        buffer[:] = b"used again"
        assert record == objects.get("box", "b-0")

    def test_of_two_creators_the_second_is_told_what_there_is(self, connect: Connect, url: str) -> None:
        first, second = connect(url).objects, connect(url).objects
        record = first.put_if("box", "b-1", 1, MustCreate())
        with pytest.raises(holdfast.AlreadyExists, match="'b-1' of type 'box'") as refused:
            second.put_if("box", "b-1", 2, MustCreate())
        assert (refused.value.current, refused.value.owner) == (record.version, "b-1")
        assert second.get("box", "b-1") == record

    def test_a_write_under_a_grant_is_refused_once_the_grant_has_passed_on(self, connect: Connect, url: str) -> None:
        """Whatever the version: the database refuses the old holder before that holder knows."""
        client, operator = connect(url), connect(url)
        grant = client.lease("work", ttl=600).acquire()
        record = client.objects.put_if("box", "b-1", 1, MustCreate(), under=_inner(grant))
        record = client.objects.put_if("box", "b-1", 2, MatchVersion(record.version), under=_inner(grant))
        operator.leases.force_release("work", actor="operator", reason="contract")
        successor = operator.lease("work", ttl=600).acquire()
        refused = (holdfast.FencedOut, holdfast.LeaseLost)
        for id, condition in (("b-1", MatchVersion(record.version)), ("b-1", Unconditional()), ("b-2", MustCreate())):
            with pytest.raises(refused):
                client.objects.put_if("box", id, 3, condition, under=_inner(grant))
        with pytest.raises(refused):
            client.objects.delete_if("box", "b-1", record.version, under=_inner(grant))
        assert operator.objects.list("box") == [record]
        operator.objects.delete_if("box", "b-1", record.version, under=_inner(successor))
        with pytest.raises(ValueError, match=r"grant\.transaction"):
            operator.objects.put_if("box", "b-1", 4, MustCreate(), under=_inner(successor), tx=object())
        successor.release()

    def test_of_many_creators_exactly_one_wins(self, connect: Connect, url: str) -> None:
        objects = [connect(url).objects for _ in range(4)]
        for round in range(5):
            barrier = threading.Barrier(len(objects))

            def create(number: int, round: int = round, barrier: threading.Barrier = barrier) -> int | None:
                barrier.wait(PATIENCE)
                try:
                    objects[number].put_if("box", f"b-{round}", number, MustCreate(), name=f"name-{round}")
                except holdfast.AlreadyExists:
                    return None
                return number

            with ThreadPoolExecutor(len(objects)) as pool:
                won = [number for number in pool.map(create, range(len(objects))) if number is not None]
            assert [objects[0].get("box", f"b-{round}").payload] == won

    def test_a_write_at_the_version_read_succeeds_and_any_other_is_refused(self, connect: Connect, url: str) -> None:
        objects, other = connect(url).objects, connect(url).objects
        first = objects.put_if("box", "b-1", 1, MustCreate(), name="web", labels={"a": "b"})
        second = other.put_if("box", "b-1", 2, MatchVersion(first.version))
        assert second.version > first.version
        assert (second.name, second.labels, second.created_at) == ("web", {"a": "b"}, first.created_at)
        for stale in (first.version, second.version + 1):
            with pytest.raises(holdfast.Conflict) as refused:
                objects.put_if("box", "b-1", 3, MatchVersion(stale))
            assert refused.value.current == second.version
        assert objects.get("box", "b-1") == second

    def test_a_version_matches_nothing_that_is_not_there(self, connect: Connect, url: str) -> None:
        objects = connect(url).objects
        with pytest.raises(holdfast.Conflict, match="does not exist") as refused:
            objects.put_if("box", "b-1", 1, MatchVersion(1))
        assert refused.value.current is None
        assert objects.get("box", "b-1") is None

    def test_a_version_never_comes_again_not_even_after_a_delete(self, connect: Connect, url: str) -> None:
        """Otherwise a writer that was paused would overwrite an object that it has never read."""
        objects = connect(url).objects
        stale = objects.put_if("box", "b-1", 1, MustCreate())
        objects.delete_if("box", "b-1", stale.version)
        fresh = objects.put_if("box", "b-1", 2, MustCreate())
        assert fresh.version > stale.version
        with pytest.raises(holdfast.Conflict):
            objects.put_if("box", "b-1", 3, MatchVersion(stale.version))
        with pytest.raises(holdfast.Conflict):
            objects.delete_if("box", "b-1", stale.version)
        assert objects.get("box", "b-1") == fresh

    def test_unconditional_writes_whatever_is_there(self, connect: Connect, url: str) -> None:
        objects = connect(url).objects
        first = objects.put_if("box", "b-1", 1, Unconditional())
        second = objects.put_if("box", "b-1", 2, Unconditional())
        assert second.version > first.version
        assert objects.get("box", "b-1") == second

    def test_delete_if_deletes_what_is_at_that_version(self, connect: Connect, url: str) -> None:
        objects = connect(url).objects
        record = objects.put_if("box", "b-1", 1, MustCreate())
        with pytest.raises(holdfast.Conflict) as refused:
            objects.delete_if("box", "b-1", record.version + 1)
        assert refused.value.current == record.version
        assert objects.delete_if("box", "b-1", record.version) is None
        assert objects.get("box", "b-1") is None
        with pytest.raises(holdfast.Conflict) as refused:
            objects.delete_if("box", "b-1", record.version)
        assert refused.value.current is None

    def test_a_name_is_one_objects_in_its_type(self, connect: Connect, url: str) -> None:
        objects = connect(url).objects
        first = objects.put_if("box", "b-1", 1, MustCreate(), name="web")
        objects.put_if("jar", "j-1", 1, MustCreate(), name="web")
        second = objects.put_if("box", "b-2", 1, MustCreate())
        for condition in (MatchVersion(second.version), Unconditional()):
            with pytest.raises(holdfast.AlreadyExists, match="'b-1' has it") as refused:
                objects.put_if("box", "b-2", 2, condition, name="web")
            assert (refused.value.owner, refused.value.current) == ("b-1", first.version)
        with pytest.raises(holdfast.AlreadyExists):
            objects.put_if("box", "b-3", 1, MustCreate(), name="web")
        assert objects.get("box", "b-3") is None
        assert objects.get("box", "b-2") == second

    def test_name_and_labels_stay_until_they_are_given(self, connect: Connect, url: str) -> None:
        objects = connect(url).objects
        objects.put_if("box", "b-1", 1, MustCreate(), name="web", labels={"a": "1"})
        kept = objects.put_if("box", "b-1", 2, Unconditional())
        assert (kept.name, kept.labels) == ("web", {"a": "1"})
        changed = objects.put_if("box", "b-1", 3, MatchVersion(kept.version), name="api", labels={"b": "2"})
        assert (changed.name, changed.labels) == ("api", {"b": "2"})
        bare = objects.put_if("box", "b-1", 4, MatchVersion(changed.version), name=None, labels={})
        assert (bare.name, bare.labels) == (None, {})
        assert objects.get_by_name("box", "web") is None
        objects.put_if("box", "b-2", 1, MustCreate(), name="web")

    def test_a_record_says_when_it_was_made_and_when_it_was_written(self, connect: Connect, url: str) -> None:
        objects = connect(url).objects
        record = created = objects.put_if("box", "b-1", 1, MustCreate())
        for payload, options in ((2, {}), (b"3", {}), (4, {"labels": {"a": "1"}}), (5, {"name": "web"})):
            for condition in (MatchVersion(record.version), Unconditional()):
                time.sleep(0.002)  # the clocks of databases tick in milliseconds
                written = objects.put_if("box", "b-1", payload, condition, **options)
                assert written.updated_at > record.updated_at
                assert written.created_at == created.created_at
                record = written
                assert objects.get("box", "b-1") == record

    def test_pages_are_stable(self, connect: Connect, url: str) -> None:
        objects = connect(url).objects
        ids = ["B", "a", "b", "b 1", "b-1", "z", "é"]
        for id in ids:
            objects.put_if("box", id, id, MustCreate())
        assert [record.id for record in objects.list("box")] == ids
        page = objects.list("box", limit=3)
        objects.delete_if("box", page[-1].id, page[-1].version)
        objects.put_if("box", "A", 1, MustCreate())
        rest = objects.list("box", after=page[-1].id, limit=10)
        assert [record.id for record in [*page, *rest]] == ids

    def test_a_page_ends_before_it_has_too_many_bytes(self, connect: Connect, url: str) -> None:
        objects = connect(url).objects
        for id in ("a", "b", "c", "d"):
            objects.put_if("box", id, b"x" * 100 if id == "c" else "x" * 98, MustCreate(), labels={"id": id})
        pages = {size: [record.id for record in objects.list("box", max_bytes=size)] for size in (1, 199, 200, 1000)}
        assert pages == {1: ["a"], 199: ["a"], 200: ["a", "b"], 1000: ["a", "b", "c", "d"]}
        assert [record.id for record in objects.list("box", after="b", limit=1, max_bytes=1000)] == ["c"]
        assert [record.id for record in objects.list("box", labels={"id": "d"}, max_bytes=1)] == ["d"]
        assert objects.list("box", after="d", max_bytes=1) == []
        with pytest.raises(ValueError, match="max_bytes"):
            objects.list("box", max_bytes=0)

    def test_a_selector_wants_all_its_labels(self, connect: Connect, url: str) -> None:
        objects = connect(url).objects
        labels = [{}, {"team": "a"}, {"team": "a", "app.kubernetes.io/name": "x"}, {"team": "b", "empty": ""}]
        for number, mapping in enumerate(labels):
            objects.put_if("box", str(number), number, MustCreate(), labels=mapping)
        assert [record.id for record in objects.list("box", labels={"team": "a"})] == ["1", "2"]
        assert [record.id for record in objects.list("box", labels=labels[2])] == ["2"]
        assert [record.id for record in objects.list("box", labels={"empty": ""})] == ["3"]
        assert objects.list("box", labels={"team": "c"}) == []
        assert [record.id for record in objects.list("box", labels={"team": "a"}, after="1", limit=1)] == ["2"]

    def test_update_reads_again_when_somebody_was_faster(self, connect: Connect, url: str) -> None:
        objects = [connect(url).objects for _ in range(3)]
        objects[0].put_if("box", "b-1", 0, MustCreate())

        def count(own: Any) -> None:
            for _ in range(5):
                own.update("box", "b-1", lambda record: record.payload + 1)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(count, objects))
        assert objects[0].get("box", "b-1").payload == 15

    def test_update_gives_up_in_the_end(self, connect: Connect, url: str) -> None:
        objects = connect(url).objects
        objects.put_if("box", "b-1", 0, MustCreate())
        versions: list[int] = []
        with holdfast.Client(url) as other:  # a sync client: the event loop waits while change() runs

            def change(record: Any) -> int:
                versions.append(record.version)
                other.objects.put_if("box", "b-1", -1, Unconditional())
                return 1

            with pytest.raises(holdfast.Conflict):
                objects.update("box", "b-1", change)
            assert len(versions) == len(set(versions)) > 3
            assert objects.get("box", "b-1").payload == -1
            with pytest.raises(holdfast.Conflict, match="does not exist"):
                objects.update("box", "b-2", change)

    def test_a_watch_tells_every_change_in_its_order(self, connect: Connect, url: str) -> None:
        objects = connect(url).objects
        cursor = objects.cursor()
        first = objects.put_if("box", "b-1", 1, MustCreate())
        second = objects.put_if("box", "b-1", 2, MatchVersion(first.version))
        with pytest.raises(holdfast.Conflict):
            objects.put_if("box", "b-1", 3, MatchVersion(first.version))
        objects.put_if("jar", "j-1", 1, MustCreate())
        objects.delete_if("box", "b-1", second.version)
        changes = drain(connect(url).objects.watch(since=cursor))
        assert [(each.type, each.id, each.kind) for each in changes] == [
            ("box", "b-1", "created"), ("box", "b-1", "updated"), ("jar", "j-1", "created"), ("box", "b-1", "deleted"),
        ]  # fmt: skip
        assert [each.version for each in changes[:2]] == [first.version, second.version]
        assert drain(objects.watch("jar", since=cursor)) == [changes[2]]

    def test_every_cursor_leads_on_from_its_change(self, connect: Connect, url: str) -> None:
        objects = connect(url).objects
        cursor = objects.cursor()
        for number in range(5):
            objects.put_if("box", f"b-{number}", number, MustCreate())
        watch = objects.watch(since=cursor)
        changes = drain(watch)
        for number, change in enumerate(changes):
            assert [each.id for each in drain(objects.watch(since=change.cursor))] == [
                f"b-{n}" for n in range(number + 1, 5)
            ]
        objects.put_if("box", "later", 1, MustCreate())
        assert [each.id for each in drain(objects.watch(since=watch.cursor))] == ["later"]
        assert [each.id for each in drain(watch)] == ["later"]

    def test_without_a_cursor_a_watch_begins_now(self, connect: Connect, url: str) -> None:
        objects = connect(url).objects
        objects.put_if("box", "before", 1, MustCreate())
        watch = objects.watch()
        assert watch.cursor is None
        assert watch.next(timeout=0) is None
        objects.put_if("box", "after", 1, MustCreate())
        assert watch.next(timeout=PATIENCE).id == "after"

    def test_a_watch_that_waits_is_told(self, connect: Connect, url: str) -> None:
        watch, writer = connect(url).objects.watch(), connect(url).objects
        watch.begin()
        with ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(watch.next, timeout=PATIENCE)
            writer.put_if("box", "b-1", 1, MustCreate())
            assert waiter.result(PATIENCE).id == "b-1"
            waiter = pool.submit(watch.next, timeout=PATIENCE)
            watch.close()
            assert waiter.result(PATIENCE) is None

    def test_a_cursor_that_is_none_is_refused(self, connect: Connect, url: str) -> None:
        objects = connect(url).objects
        for cursor in ("", "x", "-1", "1/2", "1/2:3", "1.5"):
            with pytest.raises(ValueError, match="since must be the cursor"):
                objects.watch(since=cursor)
        with pytest.raises(TypeError, match="since must be a str"):
            objects.watch(since=5)

    def test_a_cursor_of_another_time_is_told_as_expired(self, connect: Connect, url: str) -> None:
        """As after a failover that lost the last commits: positions of the old server mean nothing on the new."""
        objects = connect(url).objects
        head, slash, rest = objects.cursor().partition("/")
        foreign = f"{int(head) + 1}/{rest}" if slash else str(int(head) + (1 << 33))
        with pytest.raises(holdfast.CursorExpired, match=r"objects\.cursor\(\)"):
            objects.watch(since=foreign).next(timeout=PATIENCE)


def drain(watch: Any) -> list[Any]:
    """All changes that the watch has now."""
    changes = []
    while (change := watch.next(timeout=0)) is not None:
        changes.append(change)
    return changes


def _inner(grant: Any) -> Any:
    """The grant itself, without its facade."""
    return getattr(grant, "_inner", grant)
