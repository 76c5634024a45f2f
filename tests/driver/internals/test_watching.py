"""Logs within their bounds, and a watch that goes on where it was cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.driver import logs
from holdfast.driver.api import Api
from holdfast.driver.client import DriverWatch
from holdfast.driver.events import EventCursorExpired, Events
from holdfast.driver.http import HttpServer
from holdfast.driver.reconcile_folder import FolderReconciler
from holdfast.driver.supervisor.log import OutputLog
from tests.children import PATIENCE, eventually
from tests.driver.daemon import Daemon, reaches, text


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("watching") / "d") as running:
        yield running


SLOW = [HealthCheck.too_slow]
"""How fast the machine makes examples says nothing about them."""


def events(
    watch: DriverWatch, enough: Callable[[list[holdfast.reconciler.DriverEvent]], bool]
) -> list[holdfast.reconciler.DriverEvent]:
    """What is told until it is ``enough``, but for the sandboxes of other tests, which share the driver."""
    seen: list[holdfast.reconciler.DriverEvent] = []
    while not enough(seen):
        if (event := next(watch)) is not None and event.id.startswith("w"):
            seen.append(event)
    return seen


def test_a_log_is_bounded_and_its_end_is_kept(daemon: Daemon) -> None:
    client = daemon.client()
    script = "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done; echo the end >&2"
    client.create("much", ["sh", "-c", script], log_bytes=16384)
    reaches(client, "much", "Exited")
    whole = "".join(f"line {i}\n" for i in range(20000)) + "the end\n"
    kept = text(client, "much")
    assert whole.endswith(kept)
    assert 8192 <= len(kept) <= 16384
    assert sum(each.stat().st_size for each in daemon.box("much").glob("log.*")) <= 16384
    assert text(client, "much", tail=2) == "line 19999\nthe end\n"
    assert text(client, "much", tail=0) == ""
    assert text(client, "much", tail=10**6) == kept
    assert text(client, "much", offset=len(whole) - 8) == "the end\n"
    assert text(client, "much", offset=len(whole) + 8) == ""
    assert text(client, "much", offset=0) == kept, "what is gone is skipped"


def test_following_a_log_gives_it_as_it_is_written_and_ends_with_the_sandbox(daemon: Daemon, tmp_path: Path) -> None:
    client = daemon.client()
    go = tmp_path / "go"
    client.create("slow", ["sh", "-c", f"echo one; while [ ! -e {go} ]; do sleep 0.02; done; printf two"])
    pieces = client.log("slow", follow=True)
    assert next(pieces) == b"one\n"
    go.touch()
    assert b"".join(pieces) == b"two"
    with pytest.raises(holdfast.DriverError) as refused:
        next(client.log("nobody"))
    assert refused.value.status == 404


def test_whoever_hangs_up_is_noticed_although_the_sandbox_writes_nothing(daemon: Daemon) -> None:
    """Else its connection is kept for as long as the sandbox is quiet: 512 of them, and nobody was let in any more."""
    client = daemon.client()
    client.create("quiet", ["sleep", "1000"], grace=0.1)
    files = Path(f"/proc/{daemon.process.pid}/fd")
    before = len([*files.iterdir()])
    lines = [client._open("GET", "/v1/sandboxes/quiet/log?follow=true")[0] for _ in range(20)]
    assert len([*files.iterdir()]) > before + 10
    for line in lines:
        line.close()
    eventually(lambda: len([*files.iterdir()]) < before + 10, "they are closed")


def test_a_watch_that_was_cut_goes_on_with_what_it_missed_and_repeats_nothing(daemon: Daemon) -> None:
    client = daemon.client()
    first = client.watch()
    assert next(first) is None
    client.create("w1", ["sh", "-c", "exit 1"])
    before = events(first, lambda seen: bool(seen) and seen[-1].reason == "Exited")
    first.close()
    client.create("w2", ["sh", "-c", "exit 2"])
    reaches(client, "w2", "Exited")
    assert client.delete("w2", wait=PATIENCE)
    again = client.watch(since=first.cursor)
    missed = events(again, lambda seen: bool(seen) and seen[-1].kind == "deleted")
    again.close()
    assert {each.id for each in before} == {"w1"}
    assert {each.id for each in missed} == {"w2"}
    assert {each.message for each in missed if each.reason == "Exited"} == {"exit code 2"}


def test_several_watch_at_once_and_quiet_seconds_are_told(daemon: Daemon) -> None:
    watches = [daemon.client().watch() for _ in range(5)]
    assert [next(each) for each in watches] == [None] * 5
    assert next(watches[0]) is None, "within about a second, though nothing happens"
    daemon.client().create("w3", ["true"])
    for each in watches:
        assert events(each, lambda seen: bool(seen) and seen[-1].reason == "Exited")[0].id == "w3"
        each.close()


def test_a_cursor_of_an_earlier_driver_is_refused_and_the_list_is_whole(start: Callable[..., Daemon]) -> None:
    daemon = start()
    client = daemon.client()
    watch = client.watch()
    next(watch)
    watch.close()
    daemon.end()
    daemon.start()
    with pytest.raises(holdfast.DriverError, match="list, and watch from now on") as refused:
        next(client.watch(since=watch.cursor))
    assert refused.value.status == 410


async def test_a_watcher_too_slow_for_what_is_kept_is_cut_rather_than_missing_something() -> None:
    many = Events(limit=3)
    slow = many.since(many.position(many.cursor), 60)
    bookmark = await anext(slow)
    for number in range(3):
        many.add("status", str(number))
    assert (await anext(slow))["id"] == "0"
    for number in range(3, 6):
        many.add("status", str(number))
    assert [each async for each in slow] == []
    with pytest.raises(EventCursorExpired):
        many.position(bookmark["cursor"])
    with pytest.raises(ValueError, match="not been given out"):
        many.position(many.cursor + "0")


async def test_a_watch_that_nobody_reads_is_told_that_it_fell_behind(tmp_path: Path) -> None:
    """What the driver keeps for it is bounded, and so is what waits in the socket: the end is an error, not an end."""
    runs = FolderReconciler(tmp_path, 10, lambda _: None)
    runs.events = Events(limit=3)
    api = Api(runs, token=None, hosts=None)
    serving = await asyncio.start_unix_server(
        HttpServer(lambda _: None, api.handle, lambda *_: None).serve, str(tmp_path / "s")
    )
    watch = holdfast.reconciler.AsyncProcessDriver(f"unix:{tmp_path / 's'}").watch()
    assert await anext(watch) is None
    for number in range(40):
        runs.events.add("platform", str(number), message="x" * 100_000)
        await asyncio.sleep(0.005)
    told: list[str] = []

    async def read() -> None:
        async for event in watch:
            told.extend([] if event is None else [event.id])

    with pytest.raises(holdfast.DriverError, match="fell too far behind") as behind:
        await read()
    assert behind.value.status == 410
    assert told == [str(number) for number in range(len(told))], "and until then nothing was missed"
    assert 0 < len(told) < 40
    serving.close()


async def test_a_waiting_watcher_is_told_at_once() -> None:
    some = Events()
    waiting = some.since(some.position(some.cursor), 60)
    await anext(waiting)
    task: asyncio.Future[Any] = asyncio.ensure_future(anext(waiting))
    await asyncio.sleep(0)
    some.add("status", "a")
    assert (await asyncio.wait_for(task, PATIENCE))["id"] == "a"


@settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=SLOW)
@given(st.lists(st.binary(max_size=60), max_size=12), st.integers(2, 40), st.integers(0, 6), st.integers(1, 9))
def test_any_part_of_a_log_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, writes: list[bytes], limit: int, lines: int, block: int
) -> None:
    folder = tmp_path_factory.mktemp("log")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(logs, "BLOCK", block)
        log = OutputLog(limit)
        for each in writes:
            log.add(each)
    whole = b"".join(writes)
    first, end = logs.bounds(folder)
    assert end == len(whole)
    assert end - first <= limit
    for offset in (0, first, (first + end) // 2, end):
        at, data = offset, b""
        while piece := logs.read(folder, at, block)[1]:
            at, data = max(at, first) + len(piece), data + piece
        assert data == whole[max(offset, first) :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "BLOCK", block)
        start = logs.tail(folder, lines)
    wanted = _lines(whole[first:])
    assert whole[start:] == b"".join(wanted[len(wanted) - min(lines, len(wanted)) :])


def _lines(data: bytes) -> list[bytes]:
    """Split at newlines alone: the log is bytes."""
    parts = data.split(b"\n")
    found = [each + b"\n" for each in parts[:-1]]
    return [*found, parts[-1]] if parts[-1] else found


def test_a_disk_that_is_full_does_not_stop_the_program(daemon: Daemon) -> None:
    """Here: a log that cannot be written, as its name is taken by a folder."""
    client = daemon.client()
    client.create("full", ["sh", "-c", "while [ ! -e go ]; do sleep 0.02; done; echo lost; exit 4"])
    reaches(client, "full", "Started")
    (daemon.box("full") / "log.0").mkdir()
    (daemon.work("full") / "go").touch()
    assert reaches(client, "full", "Exited").details["exit_code"] == 4
    eventually(lambda: client.delete("full", wait=PATIENCE), "it can be deleted")
