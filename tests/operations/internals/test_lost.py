"""An operation whose lease is lost while its function runs: a flag, a report, a cancellation, or the end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import holdfast
from holdfast import AsyncOp, LeaseLost, Op, OwnershipUnknown
from holdfast.operations.leased_attempt import LeasedAttempt
from holdfast.testing.operation_contract import leave_half_done, name
from tests.children import PATIENCE, Child, eventually
from tests.operations.policies import connected

WHY: dict[str, Any] = {"actor": "operator", "reason": "test"}
LONG = 600.0
"""The TTL where no heartbeat is waited for: a renewal learns of the loss."""


def take_leases_away(url: str) -> None:
    with holdfast.Client(url) as other:
        for lease in other.leases.list():
            other.leases.force_release(lease.name, **WHY)


def lose(url: str, op: Op) -> None:
    take_leases_away(url)
    for grant in op._grants:
        with pytest.raises(LeaseLost):
            grant.renew()


async def lose_async(url: str, op: AsyncOp) -> None:
    await asyncio.to_thread(take_leases_away, url)
    for grant in op._grants:
        with pytest.raises(LeaseLost):
            await grant.renew()


def test_a_loss_is_flagged_and_reported_with_the_op(either: str) -> None:
    reported: list[Op] = []

    def work(op: Op) -> None:
        op.check()
        assert not op.lost
        lose(either, op)
        assert op.lost
        with pytest.raises(LeaseLost, match=r"^lease '@op:"):
            op.check()
        eventually(lambda: reported == [op], "on_lost is called")

    with holdfast.Client(either) as client:
        key = name()
        with pytest.raises(holdfast.FencedOut, match="its lease was lost"):
            client.operation(key, ttl=LONG, on_lost=reported.append).run(work)
        assert len(reported) == 1
        record = client.operations.get(key)
        assert record is not None
        assert record.status == "partial", "another attempt may run, and decides what to do"


async def test_a_loss_is_flagged_and_reported_on_the_loop(either: str) -> None:
    reported: list[AsyncOp] = []
    noticed = asyncio.Event()

    async def report(op: AsyncOp) -> None:
        reported.append(op)
        noticed.set()

    async def work(op: AsyncOp) -> None:
        op.check()
        assert not op.lost
        await lose_async(either, op)
        assert op.lost
        with pytest.raises(LeaseLost):
            op.check()
        await asyncio.wait_for(noticed.wait(), PATIENCE)

    async with holdfast.AsyncClient(either) as client:
        with pytest.raises(holdfast.FencedOut):
            await client.operation(name(), ttl=LONG, on_lost=report).run(work)
    assert len(reported) == 1


@pytest.mark.usefixtures("frequent_heartbeats")
def test_a_heartbeat_notices_the_loss(either: str) -> None:
    reported: list[Op] = []

    def work(op: Op) -> None:
        take_leases_away(either)
        eventually(lambda: op.lost and reported == [op], "a heartbeat finds no lease")

    with holdfast.Client(either) as client, pytest.raises(holdfast.FencedOut):
        client.operation(name(), ttl=600, on_lost=reported.append).run(work)


async def test_cancel_ends_the_function_and_raises_the_loss(either: str) -> None:
    async def work(op: AsyncOp) -> None:
        await lose_async(either, op)
        await asyncio.sleep(PATIENCE)
        pytest.fail("it was not cancelled")

    async with holdfast.AsyncClient(either) as client:
        key = name()
        with pytest.raises(LeaseLost) as raised:
            await client.operation(key, ttl=LONG, on_lost="cancel").run(work)
        assert isinstance(raised.value.__cause__, asyncio.CancelledError)
        block = name()
        with pytest.raises(LeaseLost) as raised:
            async with client.operation(block, ttl=LONG, on_lost="cancel") as op:
                await work(op)
        assert isinstance(raised.value.__cause__, asyncio.CancelledError)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0, "the task goes on"
        assert {(await client.operations.find(each)).status for each in (key, block)} == {"partial"}
        assert await client.leases.list() == []


async def test_a_cancellation_from_outside_stays_one(sqlite_url: str) -> None:
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        await asyncio.sleep(PATIENCE)

    async with holdfast.AsyncClient(sqlite_url) as client:
        task = asyncio.create_task(client.operation("a", on_lost="cancel").run(work))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        fine = await client.operation("b", on_lost="cancel").run(lambda: 7)
        async with client.operation("c", on_lost="cancel") as op:
            op.result = 8
        assert (fine.result, (await client.operation("c").run(int)).result) == (7, 8)


def test_exit_ends_the_process(either: str) -> None:
    program = """
    import sys, holdfast
    from functools import partial
    from holdfast.lease.terms import LeaseTerms
    LeaseTerms.check = staticmethod(partial(LeaseTerms.check, renew_every=0.1))
    def work(op):
        print("working", flush=True)
        input()
    with holdfast.Client(sys.argv[1]) as client:
        client.operation("a", ttl=600, on_lost="exit").run(work)
    """
    with Child(program, either) as child:
        child.expect("working")
        take_leases_away(either)
        assert child.wait() == 70


def test_the_lease_of_a_sovereign_dataset_counts_and_is_reported_once(either: str) -> None:
    reported: list[Op] = []
    key = holdfast.OperationKey(pipeline="p", task="t", dataset=name(), operation="o")

    def work(op: Op) -> None:
        own, dataset = op._grants
        with holdfast.Client(either) as other:
            other.leases.force_release(dataset.name, **WHY)
        with pytest.raises(LeaseLost):
            dataset.renew()
        assert not own.lost
        assert op.lost
        with pytest.raises(LeaseLost, match=dataset.name):
            op.check()
        lose(either, op)
        eventually(lambda: reported, "on_lost is called")

    with holdfast.Client(either) as client:
        options = holdfast.OperationOptions(sovereign=True)
        with pytest.raises(holdfast.FencedOut):
            client.operation(key, ttl=LONG, on_lost=reported.append, options=options).run(work)
    assert len(reported) == 1


def test_a_loss_before_the_function_is_called_is_reported(either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Op] = []
    notices: list[object] = []
    acquire, report_loss = LeasedAttempt.acquire, LeasedAttempt._report_loss

    def report(self: LeasedAttempt, grant: Any) -> object:
        result = report_loss(self, grant)
        notices.append(grant)
        return result

    def acquire_and_lose(self: LeasedAttempt, started: float) -> bool:
        acquired = acquire(self, started)
        take_leases_away(either)
        with pytest.raises(LeaseLost):
            self.held_grant.renew()
        eventually(lambda: notices, "the attempt is notified, and has no op yet")
        assert reported == []
        return acquired

    monkeypatch.setattr(LeasedAttempt, "_report_loss", report)
    monkeypatch.setattr(LeasedAttempt, "acquire", acquire_and_lose)
    with holdfast.Client(either) as client:
        with pytest.raises(ZeroDivisionError):  # a new operation is claimed in the statement that takes its lease
            client.operation("a").run(lambda: 1 / 0)
        with pytest.raises(holdfast.FencedOut):
            client.operation("a", ttl=LONG, on_lost=reported.append).run(lambda: pytest.fail("it was called"))
        eventually(lambda: reported, "on_lost is called")
        assert reported[0].key.label == "a"


def test_the_op_of_a_rollback_and_of_a_batch_knows_the_lease(either: str) -> None:
    key, lost = name(), list[bool]()
    leave_half_done(either, key)

    def undo(op: Op) -> None:
        op.check()
        lost.append(op.lost)
        lose(either, op)
        lost.append(op.lost)

    def item(_: str, op: Op) -> None:
        op.check()
        lost.append(op.lost)
        lose(either, op)
        lost.append(op.lost)

    with holdfast.Client(either) as client:
        with pytest.raises(holdfast.FencedOut):
            client.operation(key, rollback=undo).run(lambda: pytest.fail("it was called"))
        with pytest.raises((LeaseLost, holdfast.FencedOut)):
            client.operations.run_many([name(), name()], item)
    assert lost == [False, True] * 2


def test_in_a_transaction_nothing_is_lost(either: str) -> None:
    def work(op: Op) -> bool:
        op.check()
        return op.lost

    with holdfast.Client(either) as client, connected(either) as connection:
        assert client.operation(name(), tx=connection).run(work).result is False


def test_an_op_whose_attempt_has_ended_holds_nothing(sqlite_url: str) -> None:
    ops: list[Op] = []
    with holdfast.Client(sqlite_url) as client:
        client.operation("a").run(lambda op: ops.append(op))
        assert ops[0].lost
        with pytest.raises((LeaseLost, OwnershipUnknown), match="was released"):
            ops[0].check()
