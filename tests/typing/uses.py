"""Typical uses, annotated as a user's program would be. Type checkers read it; nothing runs it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import assert_type

import psycopg

import holdfast
from holdfast import (
    AsyncClient,
    AsyncElector,
    AsyncLeaseGrant,
    AsyncLock,
    AsyncOp,
    AsyncSlot,
    AsyncTerm,
    Checks,
    Client,
    Elector,
    Guard,
    Lease,
    LeaseGrant,
    LeaseRecord,
    Lock,
    LockGrant,
    LockRecord,
    MatchVersion,
    MustCreate,
    ObjectRecord,
    Op,
    Operation,
    OperationKey,
    OperationOptions,
    OperationRecord,
    Outcome,
    Retry,
    Shards,
    Slot,
    Slots,
    Term,
)
from holdfast.governance import Allow, Deny, Policy, PolicyContext
from holdfast.lineage import Contract, Event, Lineage
from holdfast.reconciler import Backend, BackendCondition, DriverEvent, ProcessDriver

KEY = OperationKey(pipeline="etl", task="load", dataset="parcels", operation="upsert", params={"year": 2026})


def open_client() -> Client:
    return Client("sqlite:///app.db", policy=Policy({"parcels": {"sovereign": True}}, forbid_deletes))


def forbid_deletes(context: PolicyContext) -> Allow | Deny:
    return Deny("nothing is deleted here") if context.operation == "delete" else Allow()


# Leases


def import_under(grant: LeaseGrant, connection: sqlite3.Connection) -> None:
    with grant.transaction(connection):
        connection.execute("insert into imports values (?)", (grant.fence,))
    grant.check()
    if grant.remaining() < 5 and not grant.lost:
        grant.renew()


def nightly(client: Client, connection: sqlite3.Connection) -> str:
    lease: Lease = client.lease("nightly-import", ttl=30, on_lost=report_loss)
    with lease as grant:
        import_under(grant, connection)
    with lease.or_skip() as maybe:
        if maybe is None:
            return "skipped"
        import_under(maybe, connection)
    taken: LeaseGrant | None = lease.try_acquire()
    if taken is not None:
        assert_type(taken.release(), bool)
        return taken.token
    adopted = lease.adopt("0b5c2f31-0000-4000-8000-000000000000")
    assert_type(adopted, LeaseGrant)
    return adopted.name


def report_loss(grant: LeaseGrant) -> None:
    print(grant.name, grant.holder, grant.fence)


def expiring(client: Client) -> list[LeaseRecord]:
    record = client.leases.get("nightly-import")
    assert_type(record, LeaseRecord | None)
    return [lease for lease in client.leases.list() if lease.remaining < 5]


# Locks


def serialise(client: Client, agent: int) -> None:
    lock: Lock = client.lock(("agent", agent), timeout=5)
    with lock as grant:
        protect_nothing(grant)
    held: list[LockRecord] = client.locks.list()
    print([(row.pid, row.namespace, row.granted) for row in held])


def protect_nothing(grant: LockGrant) -> None:
    try:
        grant.check()
    except holdfast.GrantLost as loss:
        raise SystemExit(str(loss)) from loss


# Objects


def rename(client: Client) -> int:
    record: ObjectRecord = client.objects.put_if("sandbox", "sb-1", {"size": 1}, MustCreate(), name="web")
    try:
        record = client.objects.put_if("sandbox", "sb-1", {"size": 2}, MatchVersion(record.version))
    except holdfast.Conflict as conflict:
        assert_type(conflict.current, int | None)
    return record.version


# Operations


def load(op: Op, rows: int) -> int:
    op.checkpoint("half", rows // 2)
    return rows


def run_operations(client: Client, connection: psycopg.Connection) -> int:
    outcome = client.operation(KEY, tx=connection, join=False).run(lambda: 7)
    assert_type(outcome, Outcome[int])
    assert_type(outcome.result, int)
    operation: Operation = client.operation(
        "send-mail-7",
        rollback=undo,
        when_locked="skip",
        retry=Retry(attempts=5, in_this_run=2, remember=(ValueError,)),
        checks=Checks(before=[lambda: True]),
        lineage=Lineage(inputs=["raw"], outputs=["parcels"], contract=Contract("parcels", "1")),
        options=OperationOptions(marks_effect=True),
        actor="jane",
    )
    print(operation.run(load, 3).status)
    many: list[Outcome[str]] = client.operations.run_many(["a", "b"], str.upper, key=lambda item: f"mail-{item}")
    record: OperationRecord | None = client.operations.get(KEY)
    print(record.status if record else "never begun", [each.result for each in many])
    return outcome.result


def undo() -> None:
    """Nothing to undo."""


@open_client().lease("report")
def report(day: str) -> int:
    return len(day)


def publish_key(path: str) -> str:
    return f"publish-{path}"


@open_client().operation(key=publish_key)
def publish(path: str) -> str:
    return path.upper()


def decorated() -> None:
    assert_type(report("monday"), int)
    assert_type(publish("a.csv"), Outcome[str])


# Recipes


def reconcile(term: Term) -> None:
    while not term.stopping.wait(1):
        term.check()


def lead(client: Client) -> None:
    elector: Elector = client.elector("reconciler", ttl=6, on_new_leader=lambda holder: print(holder))
    elector.run(reconcile, signals=True)
    status = elector.status()
    print(status.holder, status.leading, status.leader)
    guard: Guard = client.guard("system:guard", ttl=5)
    with guard as grant:
        client.leases.wipe(guard, prefix=grant.name)


def tune(client: Client) -> None:
    slots: Slots = client.slots("tuner", 4)
    slot: Slot = slots.claim(owner="session-1")
    assert_type(slot.slot, int)
    slots.release(slot)
    shards: Shards = client.shards("sweep", 64)
    with shards:
        grant = shards.grant_for("sb-1")
        assert_type(grant, LeaseGrant | None)


class Drawer:
    """A driver and a sink of one's own."""

    def list(self) -> Sequence[Backend]:
        return [Backend("sb-1", (BackendCondition("Ready", True, "Started"),))]

    def get(self, id: str) -> Backend | None:
        return next((backend for backend in self.list() if backend.id == id), None)

    def watch(self) -> Iterator[DriverEvent]:
        yield DriverEvent("status", "sb-1")

    def publish(self, events: Sequence[Event]) -> None:
        print(len(events))


def keep_true(client: Client, driver: ProcessDriver) -> None:
    for one in (driver, Drawer()):
        client.elector("reconciler").run(client.reconciler("sandbox", one).run)
    client.relay("catalogue", Drawer()).run()


# The same with asyncio


async def work(term: AsyncTerm) -> None:
    async with term.transaction(await psycopg.AsyncConnection.connect("")):
        await term.stopping.wait()


async def run_async(client: AsyncClient, elector: AsyncElector, lock: AsyncLock) -> None:
    async with client.lease("x", on_lost="cancel") as grant, lock:
        await hold(grant)
    await elector.run(work, signals=True)
    slot: AsyncSlot = await client.slots("tuner", 4).claim(timeout=None)
    await slot.release()
    coroutine = await client.operation(KEY).run(load_async, 3)
    assert_type(coroutine, Outcome[int])
    plain = await client.operation(KEY).run(lambda: "done")
    assert_type(plain.result, str)
    async with client.operation(KEY) as op:
        assert_type(op, AsyncOp)
        op.result = 3


async def load_async(op: AsyncOp, rows: int) -> int:
    await op.checkpoint("half", rows // 2)
    return rows


async def hold(grant: AsyncLeaseGrant) -> None:
    await grant.renew()
    if await grant.release():
        print(grant.fence)
