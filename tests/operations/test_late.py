"""Operations whose end comes late, or is not heard: who is refused, what is written once, and what stays half done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

import holdfast
from holdfast.testing.operation_contract import LONG, interrupted, leave_half_done, name
from holdfast.testing.proxy import Proxy
from tests.children import eventually, query
from tests.operations.policies import every_way

Connect = Callable[..., Any]


def test_a_late_owner_is_refused_by_its_fence(either: str) -> None:
    """It had the lease, and has done it; but somebody else has it now, and its result is the one that counts."""
    key, begun, go_on = name(), threading.Event(), threading.Event()

    def late() -> str:
        begun.set()
        assert go_on.wait(LONG)
        return "late"

    with holdfast.Client(either) as client, holdfast.Client(either) as other, ThreadPoolExecutor(1) as pool:
        zombie = pool.submit(lambda: client.operation(key).run(late))
        assert begun.wait(LONG)
        [lease] = other.leases.list()
        other.leases.force_release(lease.name, actor="test", reason="it stands still")
        assert other.operation(key, rollback=int).run(lambda: "in time").attempt == 2
        go_on.set()
        with pytest.raises(holdfast.FencedOut):
            zombie.result(LONG)
        assert other.operation(key).run(str).result == "in time"
        assert other.operations.verify(key).broken == ()


def test_a_late_owner_does_not_overwrite_what_an_operator_has_completed(either: str) -> None:
    key, begun, go_on = name(), threading.Event(), threading.Event()
    by_jane = {"actor": "jane", "reason": "the bank has booked it"}

    def late() -> str:
        begun.set()
        assert go_on.wait(LONG)
        return "late"

    with holdfast.Client(either) as client, holdfast.Client(either) as other, ThreadPoolExecutor(1) as pool:
        zombie = pool.submit(lambda: client.operation(key).run(late))
        assert begun.wait(LONG)
        with pytest.raises(holdfast.OperationInProgress):
            other.operations.complete(key, "by hand", **by_jane)
        [lease] = other.leases.list()
        other.leases.force_release(lease.name, actor="test", reason="it stands still")
        other.operations.complete(key, "by hand", **by_jane)
        go_on.set()
        with pytest.raises(holdfast.FencedOut):
            zombie.result(LONG)
        assert other.operation(key).run(str).result == "by hand"
        assert other.operations.verify(key).broken == ()


def test_a_checkpoint_of_a_late_owner_is_refused_too(either: str) -> None:
    with holdfast.Client(either) as client, holdfast.Client(either) as other:

        def work(op: Any) -> None:
            [lease] = other.leases.list()
            other.leases.force_release(lease.name, actor="test", reason="it stands still")
            op.checkpoint("half way")

        with pytest.raises(holdfast.FencedOut, match=r"'op-.*' has passed on to another owner"):
            client.operation(key := name()).run(work)
        record = other.operations.get(key)
        assert record is not None
        assert record.status == "partial"


def test_whoever_loses_the_lease_while_it_asks_whether_it_is_done_is_told_so(sqlite_url: str) -> None:
    leave_half_done(sqlite_url, "a")
    with holdfast.Client(sqlite_url) as client:

        def is_done() -> bool:
            [lease] = client.leases.list()
            client.leases.force_release(lease.name, actor="test", reason="it stands still")
            return True

        with pytest.raises(holdfast.FencedOut, match="'a' has passed on to another owner"):
            client.operation("a", verify=is_done).run(int)
        assert client.operation("a", verify=lambda op: op.done(7)).run(int).result == 7


async def test_what_is_cancelled_is_left_half_done(either: str) -> None:
    """Nobody knows what it has done: it is not a failure that may be tried again."""
    key, begun = name(), asyncio.Event()
    async with holdfast.AsyncClient(either) as client:

        async def work() -> None:
            begun.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(client.operation(key).run(work))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        record = await client.operations.get(key)
        assert record is not None
        assert record.status == "partial"


@pytest.mark.parametrize("many", [False, True])
async def test_what_a_function_leaves_behind_does_not_stand_in_the_way_of_its_end(either: str, many: bool) -> None:
    """A note that is being written when it returns comes before its end, and a later one is refused."""
    left: list[Any] = []

    async def work(key: Any = None, *, op: Any) -> int:
        left[:] = [op, asyncio.create_task(op.checkpoint("under way"))]
        await asyncio.sleep(0)
        return 1

    async with holdfast.AsyncClient(either) as client:
        if many:
            [outcome] = await client.operations.run_many(["a"], work)
        else:
            outcome = await client.operation("a").run(work)
        assert (outcome.result, await left[1]) == (1, None)
        with pytest.raises(RuntimeError, match="operation 'a' has ended"):
            await left[0].checkpoint("too late")
        kinds = [each.kind for each in await client.operations.history("a")]
        assert kinds == ["lock_acquired", "claimed", "effect_started", "checkpoint", "success", "lock_released"]


@pytest.mark.parametrize("moment", ["to_server", "to_client"])
def test_an_end_whose_answer_was_lost_is_written_once(postgres_url: str, moment: Any) -> None:
    entries = "select count(*) from holdfast.wal w join holdfast.idempotency_log g using (idem_key) where label = 'k'"
    with Proxy(postgres_url) as proxy, holdfast.Client(proxy.url) as client, ThreadPoolExecutor(1) as pool:

        def work() -> str:
            proxy.stall(moment)
            healed.append(pool.submit(heal, proxy.messages))
            return "done"

        def heal(sent: int) -> None:
            if moment == "to_server":
                eventually(lambda: proxy.messages > sent, "the end is sent")
                assert query(postgres_url, entries) == [(1,)]
            else:
                eventually(lambda: query(postgres_url, entries) == [(2,)], "the end is written")
            proxy.cut()
            proxy.heal()

        healed: list[Any] = []
        client.operation("before").run(int)  # its statements are prepared from here on
        outcome = client.operation("k", ttl=600).run(work)
        assert (outcome.result, outcome.attempt) == ("done", 1)
        healed[0].result(LONG)
        assert client.operation("k").run(str).result == "done"
    assert query(postgres_url, entries) == [(2,)], "the claim and the end"


@every_way
def test_what_is_mended_from_outside_is_run_by_nobody_meanwhile(either: str, attempt: Any) -> None:
    """What a batch left has the lease of that, and whoever runs it has another: what they did would be undone, and the
    log would say that it is done."""
    done: list[str] = []

    def undo(op: Any) -> None:
        done.append("undone")
        with suppress(holdfast.OperationInProgress):
            attempt(other, op.key.label, lambda: done.append("run"), rollback=int, when_locked="fail")

    with holdfast.Client(either) as client, holdfast.Client(either) as other:
        for made, function in ((client, undo), (other, int)):
            made.operations.register("it", rollback=function)
        for how in ("by itself", "by hand"):
            with pytest.raises(KeyboardInterrupt):
                other.operations.run_many([how], lambda _: interrupted(), rollback="it")
            if how == "by hand":
                client.operations.rollback(how, actor="jane", reason="why")
            else:
                client.operations.recover()
            assert (client.operations.get(how).status, done) == ("undone", ["undone"])  # type: ignore[union-attr]
            assert client.operations.verify().passed
            done.clear()
