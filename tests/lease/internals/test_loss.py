"""Loss is told: by a flag, a callable, the end of the process, or a cancellation that stays within its block."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

import holdfast
from holdfast.lease.keeper import Keeper, keeper_of
from holdfast.runtime.concurrency import MAX_NOTIFIERS, Owner
from tests.children import PATIENCE, Child, eventually, kept, until
from tests.pairs import EACH_ONCE

FAST: dict[str, Any] = {"ttl": 600.0, "renew_every": 0.05}
WHY: dict[str, Any] = {"actor": "operator", "reason": "test"}

Main = Callable[[], Awaitable[None]]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Main], None]:
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run(main: Main) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(PATIENCE):
                await main()

        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(bounded())

    return run


def cancelling() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


@EACH_ONCE
def test_a_twin_of_the_same_holder_takes_it_and_the_first_learns(connect: Callable[..., Any], either: str) -> None:
    """A service that starts under its own name while its old process still lives."""
    client = connect(either)
    first = client.lease("a", **FAST, holder="service", reenter="our secret").acquire()
    bystander = client.lease("b", **FAST).acquire()
    program = """
    import sys, holdfast
    client = holdfast.Client(sys.argv[1])
    with client, client.lease("a", ttl=600, holder="service", reenter="our secret") as grant:
        print(grant.fence)
        input()
        grant.check()
        print("kept")
    """
    with Child(program, either) as twin:
        assert int(twin.line()) > first.fence
        eventually(lambda: first.lost, "the first learns")
        with pytest.raises(holdfast.LeaseLost):
            first.check()
        assert first.release() is False
        assert not bystander.lost
        twin.say("go on")
        twin.expect("kept")


def test_an_on_lost_that_raises_or_hangs_harms_no_other_lease(either: str) -> None:
    hang, told = threading.Event(), []

    def raise_it(grant: Any) -> None:
        told.append(grant.name)
        raise RuntimeError("on_lost itself is broken")

    def hang_it(grant: Any) -> None:
        told.append(grant.name)
        hang.wait()

    with holdfast.Client(either) as client:
        client.lease("raises", **FAST, on_lost=raise_it).acquire()
        client.lease("hangs", **FAST, on_lost=hang_it).acquire()
        client.lease("last", **FAST, on_lost=lambda grant: told.append(grant.name)).acquire()
        other = client.lease("other", ttl=60, renew_every=0.05).acquire()
        for name in ("raises", "hangs", "last"):
            client.leases.force_release(name, **WHY)
        try:
            eventually(lambda: sorted(told) == ["hangs", "last", "raises"], "all three are told")
            kept(other, 0.2)
        finally:
            hang.set()


def test_on_lost_exit_ends_the_process_and_nothing_runs_after(either: str) -> None:
    program = """
    import atexit, sys, time, holdfast
    atexit.register(print, "never")
    with holdfast.Client(sys.argv[1]) as client:
        try:
            with client.lease("a", ttl=600, renew_every=0.05, on_lost="exit") as grant:
                print("held")
                time.sleep(600)
        finally:
            print("never")
    """
    with Child(program, either) as child, holdfast.Client(either) as client:
        child.expect("held")
        client.leases.force_release("a", **WHY)
        child.expect("<end>")
        assert child.wait() == 70


def test_on_lost_exit_waits_for_the_warning_that_another_thread_writes(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call has noticed the loss, and the heartbeat notices it before that call has logged it."""
    order, reports, exits = [], threading.Event(), threading.Event()

    class Slow(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if record.levelno == logging.WARNING:
                reports.set()
                exits.wait(1)
            order.append(record.levelname)
            return True

    def end(status: int) -> None:
        order.append(f"exit {status}")
        exits.set()

    with holdfast.Client(sqlite_url) as client:
        grant = client.lease("a", **FAST, on_lost="exit").acquire()
        error = holdfast.LeaseLost("it expired")
        slow, logger = Slow(), logging.getLogger("holdfast.lease")
        logger.addFilter(slow)
        try:
            monkeypatch.setattr("holdfast.lease.grant.os._exit", end)
            caller = threading.Thread(target=grant._report_end, args=(error,))
            caller.start()
            assert reports.wait(PATIENCE)
            grant._lose(error)
            caller.join()
        finally:
            logger.removeFilter(slow)
            monkeypatch.undo()
    assert order == ["WARNING", "CRITICAL", "exit 70"]


def test_a_signal_handler_finds_a_beat_that_is_being_created(sqlite_url: str) -> None:
    """It runs between any two instructions of the main thread, and gives up what it finds."""
    found: list[list[str]] = []

    class Requested(list[Any]):
        def __iter__(self) -> Any:
            found.append([beat.id for beat in keeper._beats])
            return super().__iter__()

    with holdfast.Client(sqlite_url) as client:
        keeper = keeper_of(client._database)
        keeper._requested = Requested()
        client.lease("a", ttl=600).acquire()
        assert found[-1] == [beat.id for beat in keeper._beats] != []


@pytest.mark.parametrize("kind", ["function", "coroutine function", "object with async call"])
def test_an_async_on_lost_runs_on_the_loop(run: Callable[[Main], None], postgres_url: str, kind: str) -> None:
    async def main() -> None:
        told: asyncio.Future[tuple[Any, Any]] = asyncio.get_running_loop().create_future()

        def plain(grant: Any) -> None:
            told.set_result((grant, asyncio.get_running_loop()))

        async def coroutine(grant: Any) -> None:
            await asyncio.sleep(0)
            plain(grant)

        class Caller:
            async def __call__(self, grant: Any) -> None:
                await coroutine(grant)

        on_lost = {"function": plain, "coroutine function": coroutine}.get(kind) or Caller()
        async with holdfast.AsyncClient(postgres_url) as client:
            grant = await client.lease("a", **FAST, on_lost=on_lost).acquire()
            await client.leases.force_release("a", **WHY)
            assert await told == (grant, asyncio.get_running_loop())

    run(main)


async def take_away(client: Any, *names: str) -> None:
    for name in names:
        await client.leases.force_release(name, **WHY)


FORMS = ["lease", "grant", "or_skip", "decorator", "timeout", "task group", "after shield"]


async def under_lease(client: Any, form: str, body: Callable[[], Awaitable[None]]) -> None:
    lease = client.lease("a", **FAST, on_lost="cancel")
    if form == "grant":
        async with await lease.acquire():
            await body()
    elif form == "or_skip":
        async with lease.or_skip() as grant:
            assert grant is not None
            await body()
    elif form == "decorator":
        await lease(body)()
    elif form == "timeout":
        async with lease, asyncio.timeout(600):
            await body()
    elif form == "task group":
        async with lease, asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(600))
            await body()
    elif form == "after shield":
        async with lease:
            await asyncio.shield(asyncio.ensure_future(body()))
    else:
        async with lease:
            await body()


@pytest.mark.parametrize("run", ["asyncio"], indirect=True)
@pytest.mark.parametrize("form", FORMS)
def test_cancel_becomes_lease_lost_in_every_form(run: Callable[[Main], None], postgres_url: str, form: str) -> None:
    async def main() -> None:
        async with holdfast.AsyncClient(postgres_url) as client:

            async def body() -> None:
                await take_away(client, "a")
                await asyncio.sleep(600)

            with pytest.raises(holdfast.LeaseLost):
                await under_lease(client, form, body)
            assert cancelling() == 0
            await asyncio.sleep(0)  # a cancellation left over would come out here
            async with client.lease("a", **FAST):
                pass

    run(main)


def test_inside_a_task_group_the_group_sees_lease_lost(run: Callable[[Main], None], postgres_url: str) -> None:
    async def main() -> None:
        async with holdfast.AsyncClient(postgres_url) as client:

            async def work() -> None:
                try:
                    async with client.lease("a", **FAST, on_lost="cancel"):
                        await take_away(client, "a")
                        await asyncio.sleep(600)
                finally:
                    assert cancelling() == 0

            async def together() -> None:
                async with asyncio.TaskGroup() as group:
                    group.create_task(work())
                    group.create_task(asyncio.sleep(600))

            with pytest.raises(ExceptionGroup) as caught:
                await together()
            assert [type(error) for error in caught.value.exceptions] == [holdfast.LeaseLost]

    run(main)


@pytest.mark.parametrize("lost", [False, True], ids=["alone", "together with the loss"])
def test_an_outer_cancellation_stays_one(run: Callable[[Main], None], postgres_url: str, lost: bool) -> None:
    async def main() -> None:
        async with holdfast.AsyncClient(postgres_url) as client:
            inside = asyncio.Event()

            async def work() -> None:
                async with client.lease("a", **FAST, on_lost="cancel") as grant:
                    inside.set()
                    try:
                        await asyncio.sleep(600)
                    finally:
                        if lost:  # the loss arrives while the outer cancellation is under way
                            await take_away(client, "a")
                            await until(lambda: grant.lost, "the holder learns")

            task = asyncio.create_task(work())
            await inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelled()
            assert await client.leases.get("a") is None

    run(main)


def test_an_outer_timeout_stays_a_timeout(run: Callable[[Main], None], postgres_url: str) -> None:
    async def main() -> None:
        async with holdfast.AsyncClient(postgres_url) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2), client.lease("a", **FAST, on_lost="cancel"):
                    await asyncio.sleep(600)
            assert cancelling() == 0

    run(main)


@pytest.mark.parametrize("run", ["uvloop"], indirect=True)
@pytest.mark.parametrize("names", [("outer",), ("inner",), ("inner", "outer")], ids="+".join)
def test_nested_leases_lose_only_what_is_lost(
    run: Callable[[Main], None], postgres_url: str, names: tuple[str, ...]
) -> None:
    async def main() -> None:
        async with holdfast.AsyncClient(postgres_url) as client:
            caught: list[str] = []
            try:
                async with client.lease("outer", **FAST, on_lost="cancel") as outer:
                    try:
                        async with client.lease("inner", **FAST, on_lost="cancel"):
                            await take_away(client, *names)
                            await asyncio.sleep(600)
                    except holdfast.LeaseLost:
                        caught.append("inner")
                    if "outer" in names:
                        await asyncio.sleep(600)
                    assert not outer.lost
            except holdfast.LeaseLost:
                caught.append("outer")
            assert caught[-1] == names[-1]
            assert cancelling() == 0
            await asyncio.sleep(0)

    run(main)


def test_a_loss_during_the_end_of_the_block_cancels_nothing(postgres_url: str) -> None:
    """Thousands of chances for the cancellation to arrive when the block is already over."""

    async def main() -> None:
        async with holdfast.AsyncClient(postgres_url) as client:
            for number in range(150):
                try:
                    async with client.lease(f"a{number}", ttl=600, renew_every=0.001, on_lost="cancel") as grant:
                        await client.leases.force_release(grant.name, **WHY)
                except holdfast.LeaseLost:
                    pass
                assert cancelling() == 0

    asyncio.run(main())


def test_a_block_entered_with_a_grant_already_lost_does_not_run_on(postgres_url: str) -> None:
    async def main() -> None:
        async with holdfast.AsyncClient(postgres_url) as client:
            grant = await client.lease("a", **FAST, on_lost="cancel").acquire()
            await take_away(client, "a")
            await until(lambda: grant.lost, "the holder learns")
            with pytest.raises(holdfast.LeaseLost):
                async with grant:
                    await asyncio.sleep(600)
            assert cancelling() == 0

    asyncio.run(main())


@EACH_ONCE
def test_no_block_begins_with_a_grant_that_is_gone(connect: Callable[..., Any], either: str) -> None:
    client = connect(either)
    released = client.lease("a").acquire()
    released.release()
    expired = client.lease("b", ttl=0.05, auto_renew=False).acquire()
    eventually(lambda: expired.lost, "its time is over")
    for grant, why in ((released, holdfast.LeaseLost), (expired, holdfast.OwnershipUnknown)):
        with pytest.raises(why, match=f"lease {grant.name!r}"), grant:
            pytest.fail("nothing of it runs")


@pytest.mark.parametrize("on_lost", ["exit", lambda _: pytest.fail("it is told")])
def test_whoever_gives_it_back_is_neither_ended_nor_told_over_its_loss(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, on_lost: Any
) -> None:
    """The work is over. That the database does not answer before our trust ends, or that a heartbeat finds it gone
    before the answer is here, is no reason to stop anything."""
    with holdfast.Client(sqlite_url) as client, client.lease("a", on_lost=on_lost) as grant:
        monkeypatch.setattr("os._exit", lambda _: pytest.fail("it ends the process"))
        monkeypatch.setattr(client._engine.owner, "notify", lambda on_lost, _: on_lost(grant))
        release = grant._release

        def late(timeout: float) -> bool:
            done = release(timeout)
            grant._lose(holdfast.OwnershipUnknown("the database did not answer before our trust in it ended"))
            return done

        monkeypatch.setattr(grant, "_release", late)
    assert grant.lost


def test_a_lease_forced_away_before_its_acquire_has_come_back_is_learned(
    either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat that hears of it comes before the keeper knows the lease: it must not be the last that looks."""
    keep = Keeper.keep

    def late(self: Any, *arguments: Any, **options: Any) -> Any:
        if arguments[-1].name == "b":
            assert operator.leases.force_release("b", **WHY)
            renewed = beat.remaining()
            eventually(lambda: beat.remaining() > renewed, "a heartbeat has heard of it")
        return keep(self, *arguments, **options)

    with holdfast.Client(either) as client, holdfast.Client(either) as operator:
        beat = client.lease("a", **FAST).acquire()
        monkeypatch.setattr(Keeper, "keep", late)
        grant = client.lease("b", **FAST).acquire()
        eventually(lambda: grant.lost, "it is told")
        with pytest.raises(holdfast.LeaseLost):
            grant.check()
        beat.check()


def test_however_many_are_lost_at_once_few_threads_tell_of_it_and_all_are_told() -> None:
    owner, go_on, told = Owner(), threading.Event(), []

    def tell(number: Any) -> None:
        go_on.wait()
        told.append(number)

    def telling() -> int:
        return sum(each.name == "holdfast-on-lost" for each in threading.enumerate())

    eventually(lambda: telling() == 0, "those of other tests have ended")
    for number in range(1000):
        owner.notify(tell, number)
    assert telling() == MAX_NOTIFIERS
    go_on.set()
    eventually(lambda: sorted(told) == list(range(1000)), "each is told once")
    eventually(lambda: telling() == 0, "and nobody stays for more")
    owner.notify(tell, 1000)
    eventually(lambda: told[-1] == 1000, "who comes later is told as well")
