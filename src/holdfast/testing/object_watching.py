"""What every engine promises of watching objects: the part of the contract about changes, their order, and cursors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import holdfast
from holdfast import MatchVersion, MustCreate

Connect = Callable[..., Any]
PATIENCE = 60.0
"""Seconds to wait for what will come, however busy the machine is."""


class WatchingContract:
    """Every change once, in its order, and on from any cursor."""

    def test_a_watch_tells_every_change_in_its_order(self, connect: Connect, url: str) -> None:
        objects = connect(url).objects
        cursor = objects.cursor()
        first = objects.put_if("box", "b-1", 1, MustCreate())
        second = objects.put_if("box", "b-1", 2, MatchVersion(first.version))
        with pytest.raises(holdfast.Conflict):
            objects.put_if("box", "b-1", 3, MatchVersion(first.version))
        objects.put_if("jar", "j-1", 1, MustCreate())
        objects.delete_if("box", "b-1", second.version)
        told = drain(connect(url).objects.watch(since=cursor))
        assert [(each.type, each.id, each.kind) for each in told] == [
            ("box", "b-1", "created"), ("box", "b-1", "updated"), ("jar", "j-1", "created"), ("box", "b-1", "deleted"),
        ]  # fmt: skip
        assert [each.version for each in told[:2]] == [first.version, second.version]
        assert drain(objects.watch("jar", since=cursor)) == [told[2]]

    def test_every_cursor_leads_on_from_its_change(self, connect: Connect, url: str) -> None:
        objects = connect(url).objects
        cursor = objects.cursor()
        for number in range(5):
            objects.put_if("box", f"b-{number}", number, MustCreate())
        watch = objects.watch(since=cursor)
        told = drain(watch)
        for number, change in enumerate(told):
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
            waiting = pool.submit(watch.next, timeout=PATIENCE)
            writer.put_if("box", "b-1", 1, MustCreate())
            assert waiting.result(PATIENCE).id == "b-1"
            waiting = pool.submit(watch.next, timeout=PATIENCE)
            watch.close()
            assert waiting.result(PATIENCE) is None

    def test_a_cursor_that_is_none_is_refused(self, connect: Connect, url: str) -> None:
        objects = connect(url).objects
        for bad in ("", "x", "-1", "1/2", "1/2:3", "1.5"):
            with pytest.raises(ValueError, match="since must be the cursor"):
                objects.watch(since=bad)
        with pytest.raises(TypeError, match="since must be a str"):
            objects.watch(since=5)

    def test_a_cursor_of_another_time_is_told_as_expired(self, connect: Connect, url: str) -> None:
        """As after a failover that lost the last commits: what was counted there is not what is counted here."""
        objects = connect(url).objects
        head, slash, rest = objects.cursor().partition("/")
        elsewhere = f"{int(head) + 1}/{rest}" if slash else str(int(head) + (1 << 33))
        with pytest.raises(holdfast.CursorExpired, match=r"objects\.cursor\(\)"):
            objects.watch(since=elsewhere).next(timeout=5)


def drain(watch: Any) -> list[Any]:
    """All that there is to tell now."""
    told = []
    while (change := watch.next(timeout=0)) is not None:
        told.append(change)
    return told
