"""Shards over replicas that come, go, and die."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import MustCreate
from holdfast.lease.keeper import Keeper
from holdfast.recipes.shards import Shards
from holdfast.recipes.shards_async import AsyncShards
from holdfast.recipes.shards_terms import ShardPlan, shard_of
from holdfast.testing.fake_driver import AsyncFakeDriver, FakeDriver
from tests.children import PATIENCE, Child, eventually, query

Connect = Callable[..., Any]
COUNT = 12
LONG = 600.0
"""A TTL that is never over. Replicas look every sixth of it."""


def shares(members: list[Any]) -> list[int]:
    """How many each has; none twice, at any moment. They are read one after the other, while shards move: what counts
    is whose grant was the same when all of them had been read."""
    before, after = ([grants(each) for each in members] for _ in range(2))
    kept = [one.items() & other.items() for one, other in zip(before, after, strict=True)]
    together = Counter(shard for each in kept for shard, _ in each)
    assert not together or max(together.values()) == 1
    return sorted(len(each.held) for each in members)


KEYS = {shard_of(str(number), COUNT): str(number) for number in range(200)}
"""A key for each shard."""


def grants(shards: Any) -> dict[int, int]:
    """The fences of the shards that are its own."""
    by_number = {number: shards.grant_for(key) for number, key in KEYS.items()}
    return {number: grant.fence for number, grant in by_number.items() if grant is not None}


@contextmanager
def member(connect: Connect, url: str, number: int = 0, ttl: float = LONG) -> Iterator[Any]:
    """A replica of its own: another URL has another keeper, as another process has."""
    other = "" if url.startswith("sqlite") else f"?application_name=replica-{number}"
    with connect(url + other).shards("sweep", COUNT, ttl=ttl) as shards:
        yield shards


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the TTL is so long that nothing is lost while the machine stands still."""
    for kind in (Shards, AsyncShards):
        monkeypatch.setattr(kind, "_next_delay", lambda *_, **__: 0.05)


@pytest.mark.usefixtures("looks_often")
def test_shares_are_fair_as_replicas_join_and_leave_and_little_moves(connect: Connect, either: str) -> None:
    with ExitStack() as rest, member(connect, either) as first:
        assert first.held == frozenset(range(COUNT)), "alone it has all, at once"
        second = rest.enter_context(member(connect, either, 1))
        eventually(lambda: shares([first, second]) == [6, 6], "two halves")
        before = [first.held, second.held]
        with member(connect, either, 2) as third:
            eventually(lambda: shares([first, second, third]) == [4, 4, 4], "three thirds")
            assert len(third.members) == 3
            for had, has in zip(before, (first, second), strict=True):
                assert has.held < had, "it only gave away"
        eventually(lambda: shares([first, second]) == [6, 6], "two halves again")
        assert {shard for each in (first, second) for shard in each.held} == set(range(COUNT))
    with holdfast.Client(either) as client:
        assert client.leases.list() == []


def test_sets_whose_names_begin_alike_are_two(connect: Connect, either: str) -> None:
    client = connect(either)
    with client.shards("sweep", 4, ttl=LONG) as one, client.shards("sweep/shard", 4, ttl=LONG) as other:
        assert one.held == other.held == frozenset(range(4))
        assert one.members == {one.holder}
        assert other.members == {other.holder}


def test_they_are_entered_once(connect: Connect, sqlite_url: str) -> None:
    """Inside its own block the end of the inner one would be that of both; after it, there would be no shard at all."""
    with member(connect, sqlite_url) as shards:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"create another one with client\.shards"), shards:
                pass
        assert len(shards.held) == COUNT
    with pytest.raises(RuntimeError, match="can be entered only once"), shards:
        pass


def test_a_block_ends_at_once_and_not_with_the_next_look(connect: Connect, either: str) -> None:
    """Who waits for the end must not hear the bell in the place of the one that is to end: that sleeps on, here for
    an hour."""
    for _ in range(3):
        with connect(either).shards("sweep", 2, ttl=36_000.0) as shards:
            assert len(shards.held) == 2


@contextmanager
def hanging(client: holdfast.AsyncClient, statement: str, number: int) -> Iterator[asyncio.Event]:
    """The answer to that statement never comes the ``number``-th time, though it was done; then the event is set."""
    call, hangs, left = client._engine.call, asyncio.Event(), itertools.count(number, -1)

    async def answer(name: str, *given: Any, **more: Any) -> Any:
        rows = await call(name, *given, **more)
        if name == statement and next(left) == 1:
            hangs.set()
            await asyncio.Event().wait()
        return rows

    client._engine.call = answer  # type: ignore[method-assign]
    yield hangs
    client._engine.call = call  # type: ignore[method-assign]


def test_entering_that_is_interrupted_keeps_nothing(either: str) -> None:
    async def main() -> None:
        async with holdfast.AsyncClient(either) as client:
            with hanging(client, "lease_acquire", 5) as hangs:
                entering = asyncio.create_task(client.shards("sweep", COUNT, ttl=LONG).__aenter__())
                await asyncio.wait_for(hangs.wait(), PATIENCE)
            assert len(looks.leases.list()) == 5
            entering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await entering
            await asyncio.to_thread(eventually, lambda: looks.leases.list() == [], "it has none")

    with holdfast.Client(either) as looks:
        asyncio.run(main())


def test_leaving_that_is_interrupted_keeps_nothing(sqlite_url: str) -> None:
    async def main() -> None:
        async with holdfast.AsyncClient(sqlite_url) as client:
            shards = client.shards("sweep", COUNT, ttl=LONG)
            await shards.__aenter__()
            with hanging(client, "lease_release", 5) as hangs:
                leaving = asyncio.create_task(shards.__aexit__(None, None, None))
                await asyncio.wait_for(hangs.wait(), PATIENCE)
            assert len(looks.leases.list()) == COUNT + 1 - 5
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            await asyncio.to_thread(eventually, lambda: looks.leases.list() == [], "all are")

    with holdfast.Client(sqlite_url) as looks:
        asyncio.run(main())


@pytest.mark.usefixtures("looks_often")
def test_a_key_belongs_to_the_replica_that_has_its_shard(connect: Connect, either: str) -> None:
    with member(connect, either) as first, member(connect, either, 1) as second:
        eventually(lambda: shares([first, second]) == [6, 6], "two halves")
        for number in range(50):
            grants = [each.grant_for(f"b-{number}") for each in (first, second)]
            [grant] = [each for each in grants if each is not None]
            assert grant.name == f"sweep/shard/{first.shard_of(f'b-{number}')}"


MEMBER = """
import sys, holdfast
with holdfast.Client(sys.argv[1]).shards("sweep", 12, ttl=float(sys.argv[2])) as shards:
    print("joined", flush=True)
    sys.stdin.read()
"""


def expire_others(url: str, holder: str) -> None:
    """As if the TTL of all leases but those of ``holder`` were over."""
    dot = "_" if url.startswith("sqlite") else "."
    theirs = f"select beat from holdfast{dot}lease where holder <> %s"
    query(url, f"update holdfast{dot}beat set expires_at = started where id in ({theirs})", holder)


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize(("engine", "number"), [("sqlite", signal.SIGKILL), ("postgres", signal.SIGSTOP)])
def test_the_shards_of_a_dead_one_are_taken_when_its_ttl_is_over(
    request: pytest.FixtureRequest, engine: str, number: signal.Signals
) -> None:
    url: str = request.getfixturevalue(f"{engine}_url")
    with member(holdfast.Client, url) as alive, Child(MEMBER, url, LONG) as other:
        other.expect("joined")
        eventually(lambda: len(alive.held) == 6, "half of them")
        other.signal(number)
        expire_others(url, alive.holder)
        eventually(lambda: len(alive.held) == COUNT, "all of them")
        eventually(lambda: len(alive.members) == 1, "it is alone")


def test_the_next_look_is_not_later_than_when_somebody_who_does_not_renew_is_gone(sqlite_url: str) -> None:
    """However far apart the looks are otherwise: what it had is taken when its TTL is over."""
    with holdfast.Client(sqlite_url) as client:
        shards = client.shards("sweep", COUNT, ttl=600.0)
        assert 0.5 < shards._next_delay(ShardPlan([], [], is_short=False), expiry=0.5) < 0.6
        assert shards._next_delay(ShardPlan([], [], is_short=False), expiry=500.0) >= 75


@pytest.mark.usefixtures("looks_often")
def test_those_that_cannot_be_given_back_yet_hold_up_none_of_the_others(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A transaction under them is open, say: until that has ended the database lists them as ours."""
    monkeypatch.setattr(Keeper, "release_later", lambda *_: None)
    with member(holdfast.Client, sqlite_url) as first:
        for number in (0, COUNT - 1):
            first._grants.pop(number)._abandon()
        with member(holdfast.Client, sqlite_url, 1) as second:
            eventually(lambda: len(second.held) == 4, "what is more than the share of the first")
            eventually(lambda: len(first.held) == 6, "what it has given back is no part of that")
        eventually(lambda: len(first.held) == COUNT - 2, "all but those two")
    assert "shards.unanswered" not in [each.__dict__.get("event") for each in caplog.records]


@pytest.mark.usefixtures("looks_often")
def test_a_lost_shard_is_noticed_and_taken_back(connect: Connect, either: str) -> None:
    with member(connect, either, ttl=LONG) as only:
        number, seen = only.shard_of("b-1"), dict[int, int]()

        def has_it() -> bool:
            seen.update(grants(only))
            return number in seen

        eventually(has_it, "it has it")
        connect(either).leases.force_release(f"sweep/shard/{number}", actor="operator", reason="test")
        eventually(lambda: grants(only).get(number, 0) > seen[number], "it is back")


@pytest.mark.usefixtures("looks_often")
async def test_each_replica_sweeps_the_records_of_its_own_shards(postgres_url: str, tmp_path: Path) -> None:
    """And together they sweep all: by the database's own account, since each write names the lease it is made under."""
    yard = FakeDriver(tmp_path)
    async with holdfast.AsyncClient(postgres_url) as client:
        for number in range(40):
            await client.objects.put_if("box", f"b-{number:02}", {}, MustCreate())
            yard.put(f"b-{number:02}")
        asked: dict[int, set[str]] = {0: set(), 1: set()}

        async def replica(index: int, ready: asyncio.Barrier) -> None:
            own = FakeDriver(tmp_path)
            own.before_get = asked[index].add
            async with (
                holdfast.AsyncClient(f"{postgres_url}?application_name=replica-{index}") as mine,
                mine.shards("sweep", COUNT, ttl=LONG) as shards,
            ):
                async with asyncio.timeout(PATIENCE):
                    while len(shards.held) != COUNT // 2:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    await ready.wait()
                held = shards.held
                running = asyncio.create_task(mine.reconciler("box", AsyncFakeDriver(own)).run(shards))
                async with asyncio.timeout(PATIENCE):
                    while {} in [each.payload for each in await client.objects.list("box")]:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                shards.stop()
                await running
                assert shards.held == held
                assert {shards.shard_of(id) for id in asked[index]} <= held
                async with asyncio.timeout(PATIENCE):
                    await ready.wait()  # the first to leave gives its shards to the other

        both = asyncio.Barrier(2)
        await asyncio.gather(replica(0, both), replica(1, both))
        assert asked[0] | asked[1] == {f"b-{number:02}" for number in range(40)}
        assert not asked[0] & asked[1]
        assert all(each.payload["status"]["phase"] == "Ready" for each in await client.objects.list("box"))


@pytest.mark.usefixtures("looks_often")
def test_the_records_of_shards_that_were_gained_are_swept_at_once(sqlite_url: str, tmp_path: Path) -> None:
    """The next sweep would come in a day, and no event tells of what their last owner has not seen."""
    yard, client = FakeDriver(tmp_path), holdfast.Client(sqlite_url)

    def not_ready() -> int:
        return sum(each.payload.get("status", {}).get("phase") != "Ready" for each in client.objects.list("box"))

    with client, client.shards("sweep", COUNT, ttl=LONG) as shards, Child(MEMBER, sqlite_url, LONG) as other:
        for number in range(30):
            client.objects.put_if("box", f"b-{number:02}", {}, MustCreate())
            yard.put(f"b-{number:02}", publish=False)
        other.expect("joined")
        eventually(lambda: len(shards.held) == 6, "half of them")
        reconciler = client.reconciler("box", yard, sweep_every=80_000.0)
        running = threading.Thread(target=reconciler.run, args=(shards,))
        running.start()
        eventually(lambda: reconciler.status().sweeps >= 2, "its own are swept")
        assert not_ready() > 0
        other.kill()
        expire_others(sqlite_url, shards.holder)
        eventually(lambda: not_ready() == 0, "all are swept")
        shards.stop()
        running.join(PATIENCE)
        assert not running.is_alive()


def test_stopping_tells_the_work_and_releases_nothing_before_the_block_ends(connect: Connect, sqlite_url: str) -> None:
    with member(connect, sqlite_url) as only:
        only.stop()
        assert only.stopping.is_set()
        assert len(only.held) == COUNT


def test_a_client_that_is_closed_ends_the_work_on_its_shards_and_they_are_released_after_it(
    either: str, tmp_path: Path
) -> None:
    """The reconciler would go on for ever otherwise, and ask a closed client."""
    client, ended, looks = holdfast.Client(either), [], holdfast.Client(either)

    def work() -> None:
        with client.shards("sweep", COUNT, ttl=LONG) as shards:
            client.reconciler("box", FakeDriver(tmp_path), sweep_every=0.05).run(shards)
            ended.append(len(looks.leases.list()))

    with looks:
        running = threading.Thread(target=work, daemon=True)
        running.start()
        eventually(lambda: len(looks.leases.list()) == COUNT + 1, "it has all shards")
        client.close()
        running.join(PATIENCE)
        assert not running.is_alive()
        assert ended == [COUNT + 1], "they were still ours when the work had ended"
        assert looks.leases.list() == []
