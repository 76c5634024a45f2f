"""Sessions: each has a slot of a pool while it sends heartbeats, to any replica.

The slot is a lease. No replica renews it by itself: each heartbeat of the session does, with the token of the lease
that is sealed in the session's record. Without a heartbeat the lease expires, the slot is free again, and the session
is FAILED. A session that has ended answers 410.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

import holdfast
from holdfast.commands.gateway import ACTIVE, ended
from holdfast.gateway.context import CurrentGateway, Gateway
from holdfast.gateway.logs import WARNING, log
from holdfast.gateway.problem import documented
from holdfast.gateway.record_page import list_page
from holdfast.problem_json import Problem

TYPE = "@session"
KEEP = timedelta(days=7)
"""How long the record of an ended session is kept: until then it answers 410, later 404."""
_PAGE, _PAGE_BYTES = 1000, 4 << 20
_RELEASE_TIMEOUT = 3.0
"""Seconds that a claim which fails waits for the release of its slot; after that it is released in the background."""
_EXPIRED = "its slot has expired: no heartbeat came in time"

router = APIRouter(prefix="/sessions", tags=["sessions"])

Id = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9-]+$", examples=["ses-5f0c3a1be2d94c7e"])]
Text = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
State = Literal["ACTIVE", "STOPPED", "FAILED", "CANCELLED"]


class NewSession(BaseModel):
    pool: Text = Field("default", examples=["default"])
    agent: Text | None = Field(None, description="The agent that the session belongs to.")
    ttl: Annotated[float, Field(ge=1, le=3600)] = Field(
        30.0, description="Seconds without a heartbeat until the slot expires."
    )
    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"pool": "default", "agent": "a-1", "ttl": 30}]}
    )


class SessionEnd(BaseModel):
    state: Literal["STOPPED", "FAILED", "CANCELLED"]
    reason: Annotated[str, Field(max_length=1000, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")] = ""
    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"state": "STOPPED", "reason": "its work is done"}]}
    )


class SessionAnswer(BaseModel):
    id: str
    pool: str
    slot: int
    fence: int = Field(description="Rises with every claim of the slot.")
    agent: str | None
    ttl: float
    state: State
    reason: str
    ended_at: datetime | None
    created_at: datetime
    version: int


class SessionPage(BaseModel):
    items: list[SessionAnswer]
    next: str | None = Field(description="`after` of the next page; null at the end.")


@router.post("", status_code=201, response_model=SessionAnswer, responses=documented(409, 422, 503))
async def claim(gateway: CurrentGateway, body: NewSession, response: Response) -> Any:
    """Claim a slot. 409 with Retry-After when all are taken."""
    if body.pool not in gateway.settings.pools:
        raise Problem(422, f"there is no pool {body.pool!r}; there are: {', '.join(gateway.settings.pools)}")
    id = f"ses-{uuid4().hex}"
    slots = gateway.client.slots(body.pool, gateway.settings.pools[body.pool], ttl=body.ttl, auto_renew=False)
    try:
        grant = await slots.claim(owner=id)
    except holdfast.NotAcquired as error:
        raise Problem(409, str(error), headers={"Retry-After": "1"}) from None
    payload = {
        "pool": body.pool, "slot": grant.slot, "fence": grant.fence, "agent": body.agent, "ttl": body.ttl,
        "state": ACTIVE, "reason": "", "ended_at": None,
        "token": gateway.seal.close(grant.detach().encode(), id).decode(),
    }  # fmt: skip
    try:
        record = await gateway.client.objects.put_if(
            TYPE, id, payload, holdfast.MustCreate(), labels={"pool": body.pool, "state": ACTIVE}
        )
    except BaseException:
        with suppress(holdfast.EngineError):
            await grant.release(timeout=_RELEASE_TIMEOUT)
        raise
    response.headers["Location"] = f"/sessions/{id}"
    return _answer(record)


@router.get("/{id}", response_model=SessionAnswer, responses=documented(404, 410, 422, 503))
async def get(gateway: CurrentGateway, id: Id) -> Any:
    return _answer(await _get_alive(gateway, id))


@router.get("", response_model=SessionPage, responses=documented(422, 503))
async def list_(
    gateway: CurrentGateway,
    pool: Annotated[Text | None, Query()] = None,
    state: Annotated[State | None, Query()] = None,
    after: Annotated[str | None, Query(description="The next of the page before.", max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Any:
    """Also those that have ended in the last week."""
    labels = {name: value for name, value in (("pool", pool), ("state", state)) if value is not None}
    page, next = await list_page(gateway, TYPE, after or None, limit, labels)
    return {"items": [_answer(record) for record in page], "next": next}


@router.post("/{id}/heartbeat", response_model=SessionAnswer, responses=documented(404, 410, 422, 503))
async def heartbeat(gateway: CurrentGateway, id: Id) -> Any:
    """Renew the slot for another ttl."""
    record = await _get_active(gateway, id)
    try:
        grant = await _slots(gateway, record).adopt(record.payload["slot"], _token(gateway, record))
        await grant.renew()
    except holdfast.LeaseLost:
        raise await _record_loss(gateway, record) from None
    return _answer(record)


@router.post("/{id}/end", response_model=SessionAnswer, responses=documented(404, 409, 410, 422, 503))
async def end(gateway: CurrentGateway, id: Id, body: SessionEnd) -> Any:
    """End the session and free its slot."""
    record = await _get_alive(gateway, id)
    try:
        record = await _record_end(gateway, record, body.state, body.reason)
    except holdfast.Conflict:
        await _get_alive(gateway, id)  # raises 410 when it has ended meanwhile
        raise Problem(409, f"session {id!r} was changed meanwhile: try again", headers={"Retry-After": "1"}) from None
    try:
        grant = await _slots(gateway, record).adopt(record.payload["slot"], _token(gateway, record))
        await grant.release()
    except (holdfast.HoldfastError, Problem) as error:
        log.event(
            "session.released_late", WARNING,
            "the slot of session %(session)s could not be released and is free when it expires: %(error)s",
            session=id, error=str(error),
        )  # fmt: skip
    return _answer(record)


async def reconcile(gateway: Gateway) -> None:
    """Called by the leader: fail the sessions whose slot has expired. Log and count where slots and sessions differ.

    Sessions of a pool that is not configured any more are included.
    """
    active = [record async for record in _list_all(gateway, {"state": ACTIVE})]
    for pool in {record.payload["pool"] for record in active}:
        records = [record for record in active if record.payload["pool"] == pool]
        # Read after the records: a slot is claimed first, and its record is written then.
        owners = {*(await _slots(gateway, records[0]).owners()).values()}
        for record in records:
            if record.id not in owners:
                await _record_failure(gateway, record)
    for pool, capacity in gateway.settings.pools.items():
        slots = gateway.client.slots(pool, capacity)
        await slots.reconcile(partial(_claims, gateway, pool, slots))


async def forget_ended(gateway: Gateway) -> None:
    """Called by the leader: delete the records of sessions that ended a week ago."""
    oldest = datetime.now(UTC) - KEEP
    for state in ("STOPPED", "FAILED", "CANCELLED"):
        async for record in _list_all(gateway, {"state": state}):
            if record.updated_at < oldest:
                with suppress(holdfast.Conflict):
                    await gateway.client.objects.delete_if(TYPE, record.id, record.version)


def stop_counting(gateway: Gateway) -> None:
    """Drop the metrics of slots when the term ends: the next leader counts."""
    for pool, capacity in gateway.settings.pools.items():
        gateway.client.slots(pool, capacity).forget()


async def _claims(gateway: Gateway, pool: str, slots: Any) -> list[dict[str, Any]]:
    """The active sessions of a pool, and those that have ended and still own a slot."""
    records = {record.id: record async for record in _list_all(gateway, {"pool": pool, "state": ACTIVE})}
    for owner in {*(await slots.owners()).values()} - records.keys():
        if (record := await gateway.client.objects.get(TYPE, owner)) is not None:
            records[owner] = record
    return [
        {"id": id, "slot": record.payload["slot"], "terminal": record.payload["state"] != ACTIVE}
        for id, record in records.items()
    ]


async def _list_all(gateway: Gateway, labels: dict[str, str]) -> AsyncIterator[holdfast.ObjectRecord]:
    after: str | None = None
    while page := await gateway.client.objects.list(
        TYPE, labels=labels, after=after, limit=_PAGE, max_bytes=_PAGE_BYTES
    ):
        for record in page:
            yield record
        after = page[-1].id


async def _get_active(gateway: Gateway, id: str) -> holdfast.ObjectRecord:
    """The record, if its state is ACTIVE; its slot may have expired. Raises Problem 404 or 410."""
    record = await gateway.client.objects.get(TYPE, id)
    if record is None:
        raise Problem(404, f"there is no session {id!r}")
    if record.payload["state"] != ACTIVE:
        raise _gone(id, record.payload["state"], record.payload["reason"])
    return record


async def _get_alive(gateway: Gateway, id: str) -> holdfast.ObjectRecord:
    """The record, if it is ACTIVE and still has its slot. Raises Problem 404 or 410."""
    record = await _get_active(gateway, id)
    lease = await gateway.client.leases.get(_lease_name(record))
    if lease is None or lease.fence != record.payload["fence"]:
        raise await _record_loss(gateway, record)
    return record


async def _record_loss(gateway: Gateway, record: holdfast.ObjectRecord) -> Problem:
    """The problem for a session that has lost its slot.

    FAILED is written before the client hears of it: from then on every replica must answer the same.
    """
    await _record_failure(gateway, record)
    current = await gateway.client.objects.get(TYPE, record.id)
    payload = ended(record.payload, "FAILED", _EXPIRED) if current is None else current.payload
    return _gone(record.id, payload["state"], payload["reason"])


def _gone(id: str, state: str, reason: str) -> Problem:
    return Problem(410, f"session {id!r} is {state}" + (f": {reason}" if reason else ""), state=state, reason=reason)


async def _record_failure(gateway: Gateway, record: holdfast.ObjectRecord) -> None:
    """Write FAILED, unless the session was ended by another request meanwhile."""
    with suppress(holdfast.Conflict):
        await _record_end(gateway, record, "FAILED", await _loss_reason(gateway, record))


async def _loss_reason(gateway: Gateway, record: holdfast.ObjectRecord) -> str:
    for grant in await gateway.client.leases.history(_lease_name(record), limit=20):
        if grant.fence == record.payload["fence"] and grant.outcome == "forced":
            return f"its slot was taken away by {grant.actor}: {grant.reason}"
    return _EXPIRED


def _lease_name(record: holdfast.ObjectRecord) -> str:
    return f"@slot:{record.payload['pool']}:{record.payload['slot']}"


async def _record_end(
    gateway: Gateway, record: holdfast.ObjectRecord, state: str, reason: str
) -> holdfast.ObjectRecord:
    return await gateway.client.objects.put_if(
        TYPE, record.id, ended(record.payload, state, reason), holdfast.MatchVersion(record.version),
        labels={**record.labels, "state": state},
    )  # fmt: skip


def _slots(gateway: Gateway, record: holdfast.ObjectRecord) -> Any:
    """The slots of the session's pool, which may not be configured any more."""
    pool = record.payload["pool"]
    return gateway.client.slots(pool, gateway.settings.pools.get(pool, 1))


def _token(gateway: Gateway, record: holdfast.ObjectRecord) -> str:
    return gateway.seal.open(record.payload["token"].encode(), record.id).decode()


def _answer(record: holdfast.ObjectRecord) -> dict[str, Any]:
    """Everything but the token."""
    members = {name: value for name, value in record.payload.items() if name != "token"}
    return {**members, "id": record.id, "created_at": record.created_at, "version": record.version}
