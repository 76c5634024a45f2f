"""One picture for all who watch; and a database that is down is shown, not raised."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import holdfast
from holdfast.dashboard import app, formats, snapshot, stream
from holdfast.dashboard.problems import find_problems
from holdfast.dashboard.source import PageSource
from holdfast.gateway.context import Gateway
from tests.children import PATIENCE, eventually


async def test_a_database_that_is_down_or_not_migrated_is_shown_and_not_raised(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "EVERY", 0.0)
    monkeypatch.setattr(stream, "LOAD", math.inf)
    assert "does not answer" not in (await http.get("/")).text
    monkeypatch.setattr(snapshot, "READ_WITHIN", 0.05)
    for error, told in (
        (holdfast.EngineError("no route <b>"), "no route &lt;b&gt;"),
        (holdfast.SchemaMismatch("run it"), "run it"),
        (None, "has not answered in 0.05 s"),
    ):

        async def fail(*_: object, error: Any = error) -> None:
            if error is not None:
                raise error
            await asyncio.Event().wait()

        monkeypatch.setattr(snapshot, "_read", fail)
        answer = await http.get("/")
        assert answer.status_code == 200
        assert told in answer.text


async def test_however_many_watch_the_database_is_asked_once(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look happens when the test lets it, so that there are as many as pictures, however slow the machine is."""
    asked = 0
    look, may_look = snapshot.take_snapshot, asyncio.Semaphore(1)

    async def counted(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        await may_look.acquire()
        return await look(*arguments)

    monkeypatch.setattr(stream, "CLOCK_EVERY", 3600.0)
    monkeypatch.setattr(snapshot, "take_snapshot", counted)
    pages = gateway.pages._stream("/", {}, "", False)
    async with asyncio.timeout(PATIENCE):
        watching = [pages.subscribe() for _ in range(50)]
        first = await asyncio.gather(*(anext(each) for each in watching))
        assert len(set(first)) == 1
        assert asked <= 2, "the next look may have begun"
        async with gateway.client.lease("taken"):
            may_look.release()
            second = await asyncio.gather(*(anext(each) for each in watching))
            assert len(set(second)) == 1
            assert "taken" in second[0]
            assert '"sandboxes"' not in second[0], "what has not changed is not told again"
        assert asked <= 3
        gateway.stopping.set()
        for _ in range(asked):
            may_look.release()
        ends = await asyncio.gather(*(_rest(each) for each in watching))
        assert len(ends) == 50


async def _rest(stream: Any) -> list[str]:
    return [each async for each in stream]


async def test_one_too_many_is_told_so(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_STREAMS", 0)
    answer = await http.get("/events")
    assert answer.status_code == 503
    assert "clients watch here already" in answer.text
    assert answer.headers["retry-after"] == "10"


async def test_a_standby_that_waits_for_its_leader_to_end_is_no_problem(postgres_url: str) -> None:
    """It waits in the server for the leader's session, for as long as all is well."""
    with (
        holdfast.Client(postgres_url) as leader,
        holdfast.Client(postgres_url) as standby,
        holdfast.Client(postgres_url) as user,
        ThreadPoolExecutor() as threads,
    ):
        grant = leader.lease("work", failover="session").acquire()
        waits = threads.submit(standby.lease("work", failover="session").acquire, timeout=PATIENCE)
        held = leader.lock("session of a user").acquire()
        in_line = threads.submit(user.lock("session of a user").acquire, timeout=PATIENCE)
        eventually(lambda: sum(not each.granted and bool(each.name) for each in standby.locks.list()) == 2, "both wait")
        async with holdfast.AsyncClient(postgres_url) as client:
            seen = await snapshot.take_snapshot(PageSource(client), None)
        assert seen.trouble is None
        assert [each.label for each in seen.locks if not each.granted] == ["session of a user"]
        assert sum(each.waiting for each in seen.locks if each.granted) == 1, "of the user: the standby is not counted"
        later = dataclasses.replace(seen, locks=[dataclasses.replace(each, duration=60.0) for each in seen.locks])
        assert [each.subjects[0].name for each in find_problems(later) if "lock" in each.title] == ["session of a user"]
        grant.release()
        held.release()
        waits.result().release()
        in_line.result().release()


def test_names_stand_in_the_order_in_which_people_count_and_an_agent_has_its_number() -> None:
    assert sorted(["sb-10", "sb-9", "9", "sb", "10"], key=formats.natural_order) == [
        "9",
        "10",
        "sb",
        "sb-9",
        "sb-10",
    ]
    called = [SimpleNamespace(id="7", name=name, payload={"number": 7}) for name in ("session:s1", None)]
    assert [formats.record_name(each) for each in called] == ["agent 7 s1", "agent 7"]
