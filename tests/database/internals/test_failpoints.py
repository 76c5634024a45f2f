"""Failpoints: each action at each side of a statement, in both flavours and on both engines, and nothing when off."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import holdfast
from holdfast.database import failpoints
from holdfast.database.postgres import PostgresSession
from holdfast.database.postgres_async import AsyncPostgresSession
from holdfast.database.sessions import open_session, session_class
from holdfast.database.sqlite import SqliteSession
from holdfast.database.url import parse
from holdfast.testing import child_watchdog
from tests.children import PATIENCE, Child, eventually, query
from tests.pairs import EACH_ONCE

VARIABLE = failpoints.VARIABLE

flavours = pytest.mark.parametrize(
    ("either", "flavour"), [("sqlite", "sync"), ("postgres", "async")], indirect=["either"]
)

_WORKER = """
import asyncio, os, sys, holdfast
url, flavour, os.environ["HOLDFAST_FAILPOINTS"] = sys.argv[1:]

def sync():
    client = holdfast.Client(url)
    for number in range(1, 6):
        print("asks", number)
        client.lease(f"lease-{number}", ttl=60).acquire()
        print("has", number)

async def on_a_loop():
    client = holdfast.AsyncClient(url)
    for number in range(1, 6):
        print("asks", number)
        await client.lease(f"lease-{number}", ttl=60).acquire()
        print("has", number)

sync() if flavour == "sync" else asyncio.run(on_a_loop())
os._exit(0)
"""


@pytest.fixture(autouse=True)
def _count_anew() -> Iterator[None]:
    failpoints.parse.cache_clear()
    yield
    failpoints.parse.cache_clear()


def leases(url: str) -> list[str]:
    dot = "_" if url.startswith("sqlite") else "."
    return [name for (name,) in query(url, f"select name from holdfast{dot}lease order by name")]


@flavours
@pytest.mark.parametrize(("point", "left"), [("before", 2), ("after", 3)])
def test_kill_on_the_third_hit_leaves_what_was_done_before_or_after_it(
    either: str, flavour: str, point: str, left: int
) -> None:
    """The two sides of a statement are told apart by what the database knows."""
    with Child(_WORKER, either, flavour, f"{point}:lease_acquire=kill@3") as child:
        child.expect("asks 1", "has 1", "asks 2", "has 2", "asks 3", "<end>")
        assert child.wait() == -signal.SIGKILL
    assert leases(either) == [f"lease-{number}" for number in range(1, left + 1)]


@flavours
def test_stop_waits_for_a_signal_and_goes_on(either: str, flavour: str) -> None:
    with Child(_WORKER, either, flavour, "after:lease_acquire=stop@2") as child:
        child.expect("asks 1", "has 1", "asks 2")
        eventually(
            lambda: (child.pid, "T") in [(pid, state) for pid, _, state in child_watchdog.list_processes()], "it stops"
        )
        assert leases(either) == ["lease-1", "lease-2"]
        child.signal(signal.SIGCONT)
        child.expect("has 2", "asks 3", "has 3")


@pytest.mark.parametrize("point", ["before", "after"])
@EACH_ONCE
def test_error_is_doubt_and_is_asked_again(
    connect: Callable[..., Any], either: str, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An acquire may be sent twice: what the first one did is found by its token, so there is one grant."""
    monkeypatch.setenv(VARIABLE, f"{point}:lease_acquire=error@1")
    client = connect(either)
    grant = client.lease("a", ttl=600).acquire()
    assert grant.fence
    assert leases(either) == ["a"]
    monkeypatch.setenv(VARIABLE, f"{point}:lease_acquire=error")
    with pytest.raises(holdfast.EngineError, match="failpoint"):
        connect(either).lease("b", ttl=600).acquire()
    grant.check()


@EACH_ONCE
def test_delay_and_pause_take_their_time(
    connect: Callable[..., Any], either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "before:lease_list=delay:0.15;after:lease_list=pause:0.15")
    client = connect(either)
    begun = time.monotonic()
    client.leases.list()
    assert time.monotonic() - begun >= 0.3


async def test_a_delay_holds_up_its_call_alone(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "before:lease_list=delay:60")
    async with holdfast.AsyncClient(postgres_url) as client:
        asking = asyncio.create_task(client.leases.list())
        async with client.lease("a", ttl=600) as grant:
            await grant.renew()
        assert not asking.done()
        asking.cancel()


async def test_a_pause_holds_up_the_whole_loop(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "before:lease_list=pause:0.3")
    longest = 0.0
    async with holdfast.AsyncClient(postgres_url) as client:
        asking = asyncio.create_task(client.leases.list())
        while not asking.done():
            last = time.monotonic()
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - last)
        await asking
    assert longest >= 0.3


def test_a_probability_is_a_share_of_the_hits() -> None:
    points = failpoints.parse("before:purge=error%25")
    told = 0
    for _ in range(2000):
        try:
            points.hit("before:purge")
        except holdfast.EngineError:
            told += 1
    assert 350 < told < 650, "500, and nearly 8 standard deviations to either side"


def test_the_keepers_heartbeat_has_points_too(either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "before:beat_renew=error")
    with holdfast.Client(either) as client:
        grant = client.lease("a", ttl=0.5).acquire()
        eventually(lambda: grant.lost, "trust ends, because no renewal was answered")
        with pytest.raises(holdfast.OwnershipUnknown):
            grant.check()


def test_a_migration_killed_before_its_script_leaves_nothing(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path / 'app.db'}"
    with Child(_WORKER, url, "sync", "before:script=kill") as child:
        child.expect("asks 1", "<end>")
        assert child.wait() == -signal.SIGKILL
    assert query(url, "select count(*) from sqlite_master") == [(0,)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("lease_acquire=kill", "before:STATEMENT"),
        ("during:lease_acquire=kill", "before:STATEMENT"),
        ("before:leese_acquire=kill", "no statement 'leese_acquire'"),
        ("before:protect=kill", "session of holdfast's own"),
        ("before:lease_acquire", "expected kill"),
        ("before:lease_acquire=explode", "expected kill"),
        ("before:lease_acquire=delay", "takes seconds"),
        ("before:lease_acquire=kill:3", "takes no seconds"),
        ("before:lease_acquire=delay:1.2.3", "not a number"),
        ("before:lease_acquire=kill@0", "from 1"),
        ("before:lease_acquire=kill%0", "at most 100"),
        ("before:lease_acquire=kill%101", "at most 100"),
        ("before:lease_acquire=kill@1%5", "expected kill"),
        ("before:lease_list=kill;before:lease_list=stop", "twice"),
    ],
)
def test_a_mistake_is_told_with_the_point(
    sqlite_url: str, text: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"after:purge=error; {text}")
    with holdfast.Client(sqlite_url) as client, pytest.raises(ValueError, match=why) as told:
        client.leases.list()
    assert VARIABLE in str(told.value)
    assert text.rpartition(";")[2] in str(told.value)


@pytest.mark.parametrize("setting", [None, ""])
async def test_when_off_sessions_are_of_their_own_plain_classes(
    postgres_url: str, sqlite_url: str, setting: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is paid for a call: there is no object and no method between the caller and the wire."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if setting is not None:
        monkeypatch.setenv(VARIABLE, setting)
    for url, kind in ((postgres_url, PostgresSession), (sqlite_url, SqliteSession)):
        session = open_session(parse(url), PATIENCE)
        assert type(session) is kind
        assert "call" not in vars(session)
        session.close()
    aio = await AsyncPostgresSession.open(parse(postgres_url), PATIENCE)
    assert type(aio) is AsyncPostgresSession
    aio.close()
    monkeypatch.setenv(VARIABLE, "before:purge=error")
    assert session_class(PostgresSession) is not PostgresSession


@pytest.mark.parametrize(("setting", "imported"), [("", "False"), ("before:purge=error", "True")])
def test_holdfast_run_imports_them_only_when_they_are_set(sqlite_url: str, setting: str, imported: str) -> None:
    program = (
        "import sys, holdfast.cli\n"
        f"sys.argv = ['holdfast', '--url', {sqlite_url!r}, 'run', 'a', '--', 'true']\n"
        "try:\n    holdfast.cli.main()\n"
        "finally:\n    print('holdfast.database.failpoints' in sys.modules)"
    )
    environment = {**os.environ, VARIABLE: setting}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.stdout.strip(), done.returncode) == (imported, 0), done.stderr
