"""Sessions: each has a slot of a pool as long as it says now and then that it lives, to whichever replica.

The slot is a lease that no replica renews: a session's heartbeat does, with the token that is in its record and nowhere
else. Whoever falls silent loses the slot when its time is over, and is FAILED. What has ended answers 410.
"""

from __future__ import annotations

import logging
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
from holdfast.gateway.context import Gateway, Here
from holdfast.gateway.problem import Problem, documented

log = logging.getLogger("holdfast.gateway")

TYPE = "session"
KEEP = timedelta(days=7)
"""For how long a session that has ended is remembered, and answers 410 instead of 404."""
_PAGE = 1000
_EXPIRED = "its slot has expired: no heartbeat came in time"

router = APIRouter(prefix="/sessions", tags=["sessions"])

Id = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9-]+$", examples=["ses-5f0c3a1be2d94c7e"])]
Text = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
State = Literal["ACTIVE", "STOPPED", "FAILED", "CANCELLED"]


class NewSession(BaseModel):
    pool: Text = Field("default", examples=["default"])
    agent: Text | None = Field(None, description="Whose session it is.")
    ttl: Annotated[float, Field(ge=1, le=3600)] = Field(30.0, description="Seconds that it may be silent.")
    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"pool": "default", "agent": "a-1", "ttl": 30}]}
    )


class End(BaseModel):
    state: Literal["STOPPED", "FAILED", "CANCELLED"]
    reason: Annotated[str, Field(max_length=1000, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")] = ""
    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"state": "STOPPED", "reason": "its work is done"}]}
    )


class Session(BaseModel):
    id: str
    pool: str
    slot: int
    fence: int = Field(description="Rises with every claim: whoever has a higher one came later.")
    agent: str | None
    ttl: float
    state: State
    reason: str
    ended_at: datetime | None
    created_at: datetime
    version: int


class Sessions(BaseModel):
    items: list[Session]
    next: str | None = Field(description="To be given as after, for the next page; null at the end.")


@router.post("", status_code=201, response_model=Session, responses=documented(409, 422, 503))
async def claim(here: Here, asked: NewSession, response: Response) -> Any:
    """Claim a slot. 409 with Retry-After when all are taken."""
    if asked.pool not in here.settings.pools:
        raise Problem(422, f"there is no pool {asked.pool!r}; there are: {', '.join(here.settings.pools)}")
    id = f"ses-{uuid4().hex}"
    slots = here.client.slots(asked.pool, here.settings.pools[asked.pool], ttl=asked.ttl, auto_renew=False)
    try:
        grant = await slots.claim(owner=id)
    except holdfast.NotAcquired as error:
        raise Problem(409, str(error), headers={"Retry-After": "1"}) from None
    payload = {
        "pool": asked.pool, "slot": grant.slot, "fence": grant.fence, "agent": asked.agent, "ttl": asked.ttl,
        "state": ACTIVE, "reason": "", "ended_at": None, "token": grant.detach(),
    }  # fmt: skip
    try:
        record = await here.client.objects.put_if(
            TYPE, id, payload, holdfast.MustCreate(), labels={"pool": asked.pool, "state": ACTIVE}
        )
    except BaseException:
        grant.abandon()
        raise
    response.headers["Location"] = f"/sessions/{id}"
    return _told(record)


@router.get("/{id}", response_model=Session, responses=documented(404, 410, 422, 503))
async def get(here: Here, id: Id) -> Any:
    return _told(await _living(here, id))


@router.get("", response_model=Sessions, responses=documented(422, 503))
async def list_(
    here: Here,
    pool: Annotated[Text | None, Query()] = None,
    state: Annotated[State | None, Query()] = None,
    after: Annotated[str | None, Query(description="The next of the page before.", max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Any:
    """Those that have ended, too, for a week."""
    labels = {name: value for name, value in (("pool", pool), ("state", state)) if value is not None}
    page = await here.client.objects.list(TYPE, labels=labels, after=after or None, most=limit)
    return {"items": [_told(each) for each in page], "next": page[-1].id if len(page) == limit else None}


@router.post("/{id}/heartbeat", response_model=Session, responses=documented(404, 410, 422, 503))
async def heartbeat(here: Here, id: Id) -> Any:
    """It lives: its slot is its own for another ttl."""
    record = await _active(here, id)
    try:
        grant = await _slots(here, record).adopt(record.payload["slot"], record.payload["token"])
        await grant.renew()
    except holdfast.LeaseLost:
        raise await _over(here, record) from None
    return _told(record)


@router.post("/{id}/end", response_model=Session, responses=documented(404, 409, 410, 422, 503))
async def end(here: Here, id: Id, asked: End) -> Any:
    """It is over, and its slot is free."""
    record = await _living(here, id)
    try:
        record = await _end(here, record, asked.state, asked.reason)
    except holdfast.Conflict:
        await _living(here, id)  # it has ended meanwhile, most likely
        raise Problem(409, f"session {id!r} was changed meanwhile: try again", headers={"Retry-After": "1"}) from None
    try:
        grant = await _slots(here, record).adopt(record.payload["slot"], record.payload["token"])
        await grant.release()
    except holdfast.HoldfastError as error:
        log.warning(
            "the slot of session %r is free when its time is over: %s",
            id,
            error,
            extra={"event": "session.released_late", "session": id, "error": str(error)},
        )
    return _told(record)


async def tend(here: Gateway) -> None:
    """The leader's: sessions whose slot has expired have failed, also in a pool that is not offered any more; and what
    is truly in use is counted."""
    active = [each async for each in _all(here, {"state": ACTIVE})]
    for pool in {each.payload["pool"] for each in active}:
        ours = [each for each in active if each.payload["pool"] == pool]
        owners = {*(await _slots(here, ours[0]).owners()).values()}  # read later: a slot is claimed first, then written
        for record in ours:
            if record.id not in owners:
                await _fail(here, record)
    for pool, capacity in here.settings.pools.items():
        slots = here.client.slots(pool, capacity)
        await slots.reconcile(partial(_claims, here, pool, slots))


async def forget_ended(here: Gateway) -> None:
    """The leader's: those that ended long ago."""
    long_ago = datetime.now(UTC) - KEEP
    for state in ("STOPPED", "FAILED", "CANCELLED"):
        async for record in _all(here, {"state": state}):
            if record.updated_at < long_ago:
                with suppress(holdfast.Conflict):
                    await here.client.objects.delete_if(TYPE, record.id, record.version)


def count_no_more(here: Gateway) -> None:
    """Somebody else leads, and counts."""
    for pool, capacity in here.settings.pools.items():
        here.client.slots(pool, capacity).forget()


async def _claims(here: Gateway, pool: str, slots: Any) -> list[dict[str, Any]]:
    """All sessions that claim a slot, and of those that have ended the ones whose slot somebody says is theirs."""
    known = {each.id: each async for each in _all(here, {"pool": pool, "state": ACTIVE})}
    for owner in {*(await slots.owners()).values()} - known.keys():
        if (record := await here.client.objects.get(TYPE, owner)) is not None:
            known[owner] = record
    return [
        {"id": id, "slot": each.payload["slot"], "terminal": each.payload["state"] != ACTIVE}
        for id, each in known.items()
    ]


async def _all(here: Gateway, labels: dict[str, str]) -> AsyncIterator[Any]:
    after: str | None = None
    while page := await here.client.objects.list(TYPE, labels=labels, after=after, most=_PAGE):
        for each in page:
            yield each
        after = page[-1].id


async def _active(here: Gateway, id: str) -> Any:
    """As far as its record says."""
    record = await here.client.objects.get(TYPE, id)
    if record is None:
        raise Problem(404, f"there is no session {id!r}")
    if record.payload["state"] != ACTIVE:
        raise _gone(id, record.payload["state"], record.payload["reason"])
    return record


async def _living(here: Gateway, id: str) -> Any:
    """And its slot is its own."""
    record = await _active(here, id)
    lease = await here.client.leases.get(_lease(record))
    if lease is None or lease.fence != record.payload["fence"]:
        raise await _over(here, record)
    return record


async def _over(here: Gateway, record: Any) -> Problem:
    """Its slot is gone: ended a moment ago, or expired. That is written down before it is told, because from then on it
    is so for everybody who asks."""
    await _fail(here, record)
    now = await here.client.objects.get(TYPE, record.id)
    payload = ended(record.payload, "FAILED", _EXPIRED) if now is None else now.payload
    return _gone(record.id, payload["state"], payload["reason"])


def _gone(id: str, state: str, reason: str) -> Problem:
    return Problem(410, f"session {id!r} is {state}" + (f": {reason}" if reason else ""), state=state, reason=reason)


async def _fail(here: Gateway, record: Any) -> None:
    try:
        await _end(here, record, "FAILED", await _why(here, record))
    except holdfast.Conflict:  # somebody else has ended it
        return


async def _why(here: Gateway, record: Any) -> str:
    """Its slot is not its own any more."""
    for each in await here.client.leases.history(_lease(record), most=20):
        if each.fence == record.payload["fence"] and each.outcome == "forced":
            return f"its slot was taken away by {each.actor}: {each.reason}"
    return _EXPIRED


def _lease(record: Any) -> str:
    return f"@slot:{record.payload['pool']}:{record.payload['slot']}"


async def _end(here: Gateway, record: Any, state: str, reason: str) -> Any:
    return await here.client.objects.put_if(
        TYPE, record.id, ended(record.payload, state, reason), holdfast.MatchVersion(record.version),
        labels={**record.labels, "state": state},
    )  # fmt: skip


def _slots(here: Gateway, record: Any) -> Any:
    """Its pool may not be offered any more."""
    pool = record.payload["pool"]
    return here.client.slots(pool, here.settings.pools.get(pool, 1))


def _told(record: Any) -> dict[str, Any]:
    """Never its token."""
    told = {name: value for name, value in record.payload.items() if name != "token"}
    return {**told, "id": record.id, "created_at": record.created_at, "version": record.version}
