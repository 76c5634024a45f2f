"""The server's lock table is shared by everybody: we stop long before it is full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.testing import Postgres
from tests.children import backends, eventually
from tests.conftest import migrated
from tests.lock.looks import advisory, core, waiters


@pytest.fixture(scope="module")
def small() -> Iterator[str]:
    """A server whose table is small: 10 * (40 + 0) locks, of which we take half."""
    settings = {"max_locks_per_transaction": 10, "max_connections": 40, "max_prepared_transactions": 0}
    with Postgres.create(settings=settings) as server:
        yield migrated(server.database())


def test_beyond_the_cap_an_error_and_never_an_outage(connect: Callable[..., Any], small: str) -> None:
    client, other = connect(small), connect(small)
    grants: list[Any] = []

    def take(numbers: range) -> None:
        for number in numbers:
            grants.append(client.lock(("many", number)).acquire())  # noqa: PERF401 - how far it came is the point

    with pytest.raises(holdfast.EngineError, match="max_locks_per_transaction") as refused:
        take(range(1000))
    assert getattr(refused.value, "sqlstate", "") == "53200"
    assert 150 <= len(grants) <= 200
    with psycopg.connect(small, autocommit=True) as anybody:
        anybody.execute("create temporary table still (works int)")
    with pytest.raises(holdfast.EngineError, match="max_locks_per_transaction"):
        other.lock("one more").acquire()
    assert [grant.lost for grant in grants] == [False] * len(grants)
    assert all(grant.release() for grant in grants)

    def works() -> bool:
        try:
            return bool(client.lock("a").acquire().release() and other.lock("a").acquire().release())
        except holdfast.EngineError:
            return False

    eventually(works, "there is room again, and it is noticed")
    eventually(lambda: advisory(small) == [], "nothing is left")


def test_many_locks_are_spread_over_sessions(connect: Callable[..., Any], postgres_url: str) -> None:
    """Each statement of a session costs in proportion to what it holds."""
    client = connect(postgres_url)
    grants = [client.lock(("many", number)).acquire() for number in range(700)]
    held: dict[int, int] = {}
    for *_, pid in advisory(postgres_url):
        held[pid] = held.get(pid, 0) + 1
    assert sum(held.values()) == 700
    assert len(held) == 3
    assert max(held.values()) <= 300
    assert all(grant.release() for grant in grants)


async def test_by_default_a_client_has_fifteen_sessions_and_ten_more_and_waits_in_no_other(postgres_url: str) -> None:
    names: list[Any] = [("many", number) for number in range(30)]
    async with holdfast.AsyncClient(postgres_url) as holder, holdfast.AsyncClient(postgres_url) as client:
        held = [await holder.lock(name).acquire() for name in [*names, "one more"]]
        waiting = [asyncio.create_task(client.lock(name).acquire(timeout=600)) for name in names]

        def sessions() -> int:
            return len(backends(postgres_url)) - 1  # the holder's

        await asyncio.to_thread(eventually, lambda: sessions() == 25, "as many as there may be")
        await asyncio.to_thread(eventually, lambda: len(waiters(postgres_url)) == 24, "all but one stand in line")
        assert len(core(client).pool._parked) == 6
        for seconds in (0.1, 1, 10, 60):  # until it is answered in time that it is held
            with pytest.raises(holdfast.AcquireTimeout) as refused:
                await client.lock("one more").acquire(timeout=seconds)
            if "is held by" in str(refused.value):  # it waited, and in no line but ours
                break
        else:
            pytest.fail(str(refused.value))
        assert len(core(client).pool._parked) == 6
        for grant in held:
            assert await grant.release() is True
        assert all([await (await each).release() for each in waiting])
        await asyncio.to_thread(eventually, lambda: sessions() <= 15, "and fifteen of them stay for a while")


def test_many_clients_are_told_of_the_same_room_and_do_not_all_spend_it(small: str) -> None:
    """Each of them knew it before any of the others took the first lock."""
    clients = [holdfast.Client(small) for _ in range(12)]
    try:
        for number, client in enumerate(clients):
            client.lock(("first", number)).acquire()
        taken = 0
        for number, client in enumerate(clients):
            try:
                for key in range(200):
                    client.lock((f"many {number}", key)).acquire()
                    taken += 1
            except holdfast.EngineError as error:
                assert "max_locks_per_transaction" in str(error)  # noqa: PT017 - how far each came is the point
        assert 100 <= taken <= 260
        with psycopg.connect(small, autocommit=True) as anybody:
            anybody.execute("create temporary table still (works int)")
    finally:
        for client in clients:
            client.close()
